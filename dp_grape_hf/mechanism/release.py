"""The mechanism: clip, sum, record, add noise. The package adds noise to gradients only here.

For a logical batch of Poisson sampling, the release is

    (sum_i clip(R_i, C) + N(0, (sigma C)^2 I)) / B_expected

where R_i is sample i's gradient over all trainable parameters jointly, in the projected space for
projected parameters. A parameter with gradient ``g_i`` and gradient factor f enters ``R_i`` as
``f g_i``, and its release is divided by f. So a larger f gives the parameter a larger part of C,
and noise of standard deviation ``sigma C / f`` on the sum of its gradients. This module has no
extension points.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dp_grape_hf.distributed import give_up, hang_up, sum_over_processes_
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.gradients import (
    FlatGradients,
    FlatTensors,
    Inputs,
    PerSampleEngine,
    Runs,
    StateGuard,
    exact_products,
    guarding_streams,
)
from dp_grape_hf.ledger import BANDED, Clipping, Ledger
from dp_grape_hf.mechanism.banded import BandedNoise, Turns
from dp_grape_hf.mechanism.clipping import add_clipped_sum_, factors_by_name
from dp_grape_hf.mechanism.noise import add_noise_
from dp_grape_hf.phases import CLIP, PER_SAMPLE, RECORD
from dp_grape_hf.projections import Projector
from dp_grape_hf.sharding import is_sharded


class PrivateMechanism:
    """Turn the physical batches of a logical batch into one private gradient.

    Call ``begin``, then ``accumulate`` for each physical batch (never, if the sampled batch is
    empty), then ``release``. The split into physical batches has no influence on the release. A
    process that fails before ``release`` calls ``abandon``; otherwise the others would wait for it.

    Args:
        per_sample: computes losses and per-sample gradients.
        ledger: records each release before it is made. ``ledger.mechanism`` defines sigma, C, the
            constant q N that sums are divided by, the clipping, the module that is clipped
            separately, and the gradient factors.
        noise_generator: the secret noise stream, on the parameters' device.
        distributed: whether the processes of the default process group share each batch.

    Clipping:
        ``flat`` clips the norm over all parameters to C. ``automatic`` scales every gradient by
        ``C / (norm + 0.01)`` (Bu et al. 2023). Under Adam, C then has no influence, so you need not
        tune it. Per-group clipping clips one module and all other parameters to ``C / sqrt(2)``.

    Attributes:
        gradient_factors: parameter name -> f, which is public; missing factors are 1.
        turns: the groups that the next release may sample from.

    Sensitivity:
        Adding or removing one sample changes the sum, before noise, by at most C in L2 over all
        parameters jointly, with every clipping. This sum includes the gradient factors, as the
        norms do; dividing by them after the noise is post-processing. A sample whose norm is NaN or
        Inf contributes exactly zero.

    Noise:
        Independent in each step, or correlated over steps if ``ledger.mechanism`` has bands
        (``banded``). With bands, batches must be sampled by turns (``Turns``).

    Guarantee:
        A release is in the ledger before its value exists. Norms, factors, sums and noise are
        float32. The first process alone adds noise, and every process gets the same release.
    """

    def __init__(
        self,
        per_sample: PerSampleEngine,
        *,
        ledger: Ledger,
        noise_generator: torch.Generator,
        distributed: bool = False,
    ) -> None:
        facts = ledger.mechanism
        self.per_sample = per_sample
        self._automatic = facts.clipping == Clipping.AUTOMATIC
        self._clipped_apart = facts.clipped_apart
        self.max_grad_norm = facts.max_grad_norm
        self.noise_multiplier = facts.noise_multiplier
        self.expected_batch_size = facts.expected_batch_size
        self.gradient_factors = factors_by_name(
            "gradient_factors", facts.factors_by_pattern, per_sample.released_shapes({})
        )
        self.ledger = ledger
        self._noise_generator = noise_generator
        self._banded = BandedNoise(facts.bands) if facts.noise == BANDED else None
        self.turns = Turns(1 if self._banded is None else len(facts.bands))
        self._distributed = distributed
        self._clipped_sum: dict[str, Tensor] | None = None
        self._flat: Tensor | None = None  # (D,), the vector that most sums are views of
        factor_of, prefix = self.gradient_factors, f"{facts.clipped_apart}."
        self._runs = Runs(lambda name: (factor_of.get(name, 1.0), name.startswith(prefix)))
        self._state = StateGuard(model=per_sample.model, loss=per_sample.loss)
        self._before: Any = None  # state of model and loss when the logical batch began
        self._unchanged_once = False  # whether a step left the contents of all tensors unchanged
        self.projectors: Mapping[str, Projector] = {}

    @property
    def independent_std(self) -> float:
        """Standard deviation of independent noise in a release (the first one, with bands)."""
        return self._summed_noise_std / self.expected_batch_size

    @property
    def _summed_noise_std(self) -> float:
        return self.noise_multiplier * self.max_grad_norm if self.noise_multiplier else 0.0

    def begin(self, projectors: Mapping[str, Projector]) -> None:
        """Start a logical batch with a sum of zero and these projectors.

        Raises:
            PrivacyError: if the logical batch before was not released.
        """
        if self._clipped_sum is not None:
            raise PrivacyError(
                "begin() was called before the last logical batch was released. Two sampled "
                "batches must not be added up. Call release() or abandon() first."
            )
        self.projectors = projectors
        self._clipped_sum, self._flat = {}, None
        # Tensors of a simulation have no numbers.
        thorough = not (self._unchanged_once or self.per_sample.simulated)
        self._before = self._state.snapshot(thorough=thorough)
        if self._state.changed_before:  # by a callback; or this is the first step
            self.per_sample.check_next()

    def accumulate(self, inputs: Inputs) -> Tensor:
        """Add the clipped gradients of a physical batch; return its losses (B,), sensitive."""
        if self._clipped_sum is None:
            raise PrivacyError("accumulate() was called before begin(). Call begin() first.")
        total = self._clipped_sum
        try:
            with guarding_streams(lambda: self.per_sample.reseeds_host):
                losses, per_sample_grads = self.per_sample(inputs, self.projectors)
                self._add(total, per_sample_grads)
                return losses
        except PrivacyError:
            self._state.compare(self._before)  # a changed state explains the error better
            raise

    def _add(self, total: dict[str, Tensor], per_sample_grads: FlatGradients) -> None:
        """Add the clipped gradients; autocast and TF32 would round float32 operations."""
        observer, layout = self.per_sample.observer, per_sample_grads.layout
        observer.computed(PER_SAMPLE, per_sample_grads)
        with (
            observer.phase(CLIP),
            torch.no_grad(),
            torch.autocast(self.per_sample.device.type, enabled=False),
            exact_products(),
        ):
            if self._flat is None:  # allocated late: the first backward pass needs the memory
                self._flat = self._zeros(layout.size)
                parts = self._runs.of(layout)
                total.update((name, self._flat[part]) for name, part in parts.items())
            gradients = per_sample_grads.in_runs(self._runs)
            per_sample_grads.others.clear()  # each is freed once it is added up
            add_clipped_sum_(
                *(total, gradients, self.max_grad_norm, self._automatic),
                *(self.gradient_factors, self._clipped_apart),
            )

    def release(self) -> FlatTensors:
        """Record the release, add noise, and return the private gradients by parameter name.

        A collective call if several processes share the batch.

        Raises:
            OtherProcessFailed: if another process called ``abandon``. No process releases anything.
            PrivacyError: if the state of model or loss changed during the step.
        """
        if self._clipped_sum is None:
            raise PrivacyError("release() was called before begin(). Call begin() first.")
        self._state.compare(self._before)
        self._unchanged_once = True
        clipped_sum, self._clipped_sum = self._clipped_sum, None
        with self.per_sample.observer.phase(RECORD):
            self.ledger.record()
        self.turns.releases += 1
        layout, flat, self._flat = self.per_sample.layout(self.projectors), self._flat, None
        if flat is None:  # no example was sampled
            flat = self._zeros(layout.size)
        shapes = self.per_sample.released_shapes(self.projectors)
        others = {
            name: clipped_sum[name] if name in clipped_sum else self._zeros(*shape)
            for name, shape in shapes.items()
            if name not in layout
        }
        private_grads = FlatTensors(layout, flat, others, shapes)
        for name, value in private_grads.in_runs(self._runs).items():
            if name in self.gradient_factors:
                value.mul_(self.gradient_factors[name])
        values = [flat, *others.values()]
        adds_noise = not self._distributed or dist.get_rank() == 0
        std = self._summed_noise_std if adds_noise else 0.0
        divisor = self.expected_batch_size
        add_ = add_noise_ if self._banded is None else self._banded.add_
        add_(values, std, self._noise_generator, divisor)
        if self._distributed:
            sum_over_processes_(values)
        for name, value in private_grads.in_runs(self._runs).items():
            if name in self.gradient_factors:
                value.div_(self.gradient_factors[name])
        return private_grads

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=self.per_sample.device)

    def abandon(self) -> None:
        """Discard the logical batch after an error, and make the other processes fail as well.

        A collective call if several processes share the batch; the others call ``release``.
        """
        self._clipped_sum = None
        if self._distributed and is_sharded(self.per_sample.model):
            hang_up()  # the others may be waiting for a weight instead of a sum
        elif self._distributed:
            give_up(self.per_sample.device)
