"""The gradient of a batch, neither clipped nor noised: what the methods that are not private use.

It has the surface of ``PrivateMechanism``, so that a private method and its counterpart share
sampler, optimizer and ledger. The ledger of such a run says that epsilon is infinite.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dp_grape_hf.distributed import give_up, sum_over_processes_
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.ledger import Ledger
from dp_grape_hf.per_sample import Inputs, PerSampleEngine, batch_size_of
from dp_grape_hf.phases import BACKWARD, RECORD
from dp_grape_hf.projections import Projector


class BatchGradient:
    """Turns the physical batches of a draw into the gradient of their mean loss.

    Args:
        per_sample: computes losses; its trainable parameters are differentiated.
        ledger: where each step is recorded, of a mechanism without noise.
        distributed: whether the batch is spread over the ranks of the default process group.

    Raises:
        PrivacyError: if the ledger would claim a guarantee.
    """

    noise_std = 0.0

    def __init__(
        self, per_sample: PerSampleEngine, *, ledger: Ledger, distributed: bool = False
    ) -> None:
        if ledger.private:
            raise PrivacyError("A ledger that claims privacy cannot record releases without noise.")
        self.per_sample = per_sample
        self.ledger = ledger
        self._distributed = distributed
        self._sum: dict[str, Tensor] | None = None
        self._count = 0

    def begin(self, projectors: Mapping[str, Projector]) -> None:
        """Starts a logical batch; nothing is projected before the release."""
        if projectors:
            raise PrivacyError("A batch gradient is projected after its release, not at capture.")
        self._sum, self._count = {}, 0

    def accumulate(self, inputs: Inputs) -> Tensor:
        """Adds the gradients of a physical batch; returns its losses (B,)."""
        if self._sum is None:
            raise PrivacyError("accumulate() without begin(): no logical batch was started.")
        size = batch_size_of(inputs)
        losses = self.per_sample.losses(self.per_sample.model, inputs, size)
        trainable = self.per_sample.trainable
        with self.per_sample.observer.phase(BACKWARD):
            found = torch.autograd.grad(losses.sum(), list(trainable.values()), allow_unused=True)
            for name, gradient in zip(trainable, found, strict=True):
                if gradient is not None:
                    known = self._sum.get(name)
                    self._sum[name] = gradient.float() if known is None else known + gradient
        self._count += size
        return losses.detach()

    def release(self) -> dict[str, Tensor]:
        """Records the step, and returns mean gradients by parameter name; zero if none was drawn.

        A collective call where the batch is spread over several processes.
        """
        if self._sum is None:
            raise PrivacyError("release() without begin(): no logical batch was started.")
        total, self._sum = self._sum, None
        with self.per_sample.observer.phase(RECORD):
            self.ledger.record()
        count = torch.tensor([float(self._count)], device=self.per_sample.device)
        for name, weight in self.per_sample.trainable.items():
            if name not in total:
                total[name] = torch.zeros_like(weight, dtype=torch.float32)
        gradients = {name: total.pop(name).contiguous() for name in self.per_sample.trainable}
        if self._distributed:
            sum_over_processes_([count, *gradients.values()])
        size = count.clamp(min=1)  # each gradient is freed when its mean is there
        return {name: gradients.pop(name) / size for name in list(gradients)}

    def abandon(self) -> None:
        """Drops the logical batch after an error, and makes the other processes fail as well."""
        self._sum = None
        if self._distributed:
            give_up(self.per_sample.device)
