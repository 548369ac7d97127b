"""The mechanism: clip, sum, all-reduce, record, noise. The only noise in the package is added here.

For a logical batch that Poisson sampling drew, the release is

    (sum_i clip(R_i, C) + N(0, (sigma C)^2 I)) / B_expected

where R_i is sample i's gradient over all trainable parameters jointly, the projected ones in
coordinates. There is nothing to extend in this module: neither clip nor noise has a variant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.ledger import Ledger
from dp_grape_hf.per_sample import Gradients, Inputs, PerSampleEngine
from dp_grape_hf.probing import refusing_changed_weights
from dp_grape_hf.projection import Projector

_SLICE = {True: 2**16, False: 2**24}  # coordinates that get noise at once, on a CPU and elsewhere


class PrivateEngine:
    """Turns the physical batches of a logical batch into one private gradient.

    Use: ``begin``, then ``accumulate`` for each physical batch (none, if the draw was empty), then
    ``release``. The split into physical batches has no influence on the release.

    Args:
        per_sample: computes losses and per-sample gradients.
        max_grad_norm: C, the L2 bound on what one sample contributes; ``inf`` only without noise.
        noise_multiplier: sigma; 0 adds no noise, and the ledger says that the run is not private.
        expected_batch_size: q N, the constant that sums are divided by.
        ledger: where each release is recorded before it is made.
        noise_generator: the secret stream of the noise, on the parameters' device.
        distributed: whether the batch is spread over the ranks of the default process group.

    Sensitivity:
        Adding or removing one sample moves the sum that meets the noise by at most C in L2, over
        all parameters jointly. A sample whose norm is NaN or Inf contributes exactly zero.

    Guarantee:
        A release is in the ledger before its value exists. Norms, factors, sums and noise are
        float32. Noise enters once, on the first rank, and every rank gets the same release.
    """

    def __init__(
        self,
        per_sample: PerSampleEngine,
        *,
        max_grad_norm: float,
        noise_multiplier: float,
        expected_batch_size: float,
        ledger: Ledger,
        noise_generator: torch.Generator,
        distributed: bool = False,
    ) -> None:
        for name, value in (
            ("max_grad_norm", max_grad_norm),
            ("expected_batch_size", expected_batch_size),
        ):
            if not value > 0:
                raise PrivacyError(f"{name}={value} must be greater than 0.")
        if not 0 <= noise_multiplier < math.inf:
            raise PrivacyError(f"{noise_multiplier=} must be 0 or a positive number.")
        if noise_multiplier > 0 and math.isinf(max_grad_norm):
            raise PrivacyError(
                f"{max_grad_norm=} leaves nothing to calibrate the noise to; give a finite C."
            )
        self.per_sample = per_sample
        self.max_grad_norm = max_grad_norm
        self.noise_multiplier = noise_multiplier
        self.expected_batch_size = expected_batch_size
        self.ledger = ledger
        self._noise_generator = noise_generator
        self._distributed = distributed
        self._clipped_sum: dict[str, Tensor] | None = None
        self._watched = False  # whether a pass was seen to leave what is saved alone
        self.projectors: Mapping[str, Projector] = {}

    def begin(self, projectors: Mapping[str, Projector]) -> None:
        """Starts a logical batch: its sum is zero, its projectors are fixed."""
        if self._clipped_sum is not None:
            raise PrivacyError("The last logical batch was never released; draws must not merge.")
        self.projectors = projectors
        self._clipped_sum = {}

    def accumulate(self, inputs: Inputs) -> Tensor:
        """Adds the clipped gradients of a physical batch; returns its losses (B,), sensitive."""
        if self._clipped_sum is None:
            raise PrivacyError("accumulate() without begin(): no logical batch was started.")
        with refusing_changed_weights(self.per_sample.model, thorough=not self._watched):
            losses, per_sample_grads = self.per_sample(inputs, self.projectors)
        self._watched = True
        with torch.autocast(losses.device.type, enabled=False):  # it would round norms and sums
            add_clipped_sum_(self._clipped_sum, per_sample_grads, self.max_grad_norm)
        return losses

    def release(self) -> dict[str, Tensor]:
        """Records the release, adds noise, and returns the private gradients by parameter name."""
        if self._clipped_sum is None:
            raise PrivacyError("release() without begin(): no logical batch was started.")
        clipped_sum, self._clipped_sum = self._clipped_sum, None
        self.ledger.record()
        private_grads = {}
        for name, weight in self.per_sample.trainable.items():
            value = clipped_sum.pop(name, None)
            if value is None:  # no sample was drawn, or none reached this parameter
                shape = self.per_sample.coordinate_shape(name, self.projectors)
                value = torch.zeros(shape, dtype=torch.float32, device=weight.device)
            self._add_noise_and_divide(value)
            if self._distributed:
                dist.all_reduce(value)
            private_grads[name] = value
        return private_grads

    def _add_noise_and_divide(self, value: Tensor) -> None:
        """Turns a clipped sum into a release in place, in slices that stay in the cache."""
        noisy = self.noise_multiplier > 0 and (not self._distributed or dist.get_rank() == 0)
        std = self.noise_multiplier * self.max_grad_norm if noisy else 0.0
        size = _SLICE[value.device.type == "cpu"]
        for part in value.view(-1).split(size):
            if noisy:
                part.add_(torch.empty_like(part).normal_(0, std, generator=self._noise_generator))
            part.div_(self.expected_batch_size)


def add_clipped_sum_(
    total: dict[str, Tensor], per_sample_grads: Gradients, max_grad_norm: float
) -> None:
    """Adds ``sum_i clip(R_i, C)`` to ``total``, in which missing parameters count as zero.

    Sensitivity:
        One sample's part has an L2 norm of at most C, over all parameters jointly; a sample whose
        norm is not finite has no part.
    """
    squared = [gradient.squared_norm() for gradient in per_sample_grads.values()]
    norms = torch.stack([s.float() for s in squared]).sum(0).sqrt()  # (B,)
    finite = norms.isfinite()
    if not finite.all():  # 0 * NaN is NaN: such a sample must not enter the sum at all
        per_sample_grads = {name: g.select(finite) for name, g in per_sample_grads.items()}
        norms = norms[finite]
    factors = (max_grad_norm / norms).clamp(max=1.0)  # C / 0 is inf and clamps to 1
    for name, gradient in per_sample_grads.items():
        if name not in total:
            shape, device = gradient.shape, factors.device
            total[name] = torch.zeros(shape, dtype=torch.float32, device=device)
        gradient.add_weighted_sum_(total[name], factors)


def private_norm(private_grads: Mapping[str, Tensor]) -> Tensor:
    """Returns the L2 norm of private gradients, a scalar, free to log."""
    return torch.nn.utils.get_total_norm(list(private_grads.values()))
