"""The mechanism: clip, sum, all-reduce, record, noise. The only noise in the package is added here.

For a logical batch that Poisson sampling drew, the release is

    (sum_i clip(R_i, C) + N(0, (sigma C)^2 I)) / B_expected

where R_i is sample i's gradient over all trainable parameters jointly, the projected ones in
coordinates. A parameter with a gradient factor f has ``f g_i`` in ``R_i``, for its gradient
``g_i``, and its release is divided by f: a larger f gives it more of C, and noise of std
``sigma C / f`` on the sum of its gradients. There is nothing to extend in this module: neither clip
nor noise has a variant.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dp_grape_hf.distributed import give_up, hang_up, sum_over_processes_
from dp_grape_hf.errors import PrivacyError, UnsupportedModelError
from dp_grape_hf.gradients import (
    FlatGradients,
    FlatTensors,
    Gradients,
    GradSampleMode,
    Inputs,
    Layout,
    PerSampleEngine,
    Runs,
    StateGuard,
    exact_products,
    guarding_streams,
)
from dp_grape_hf.ledger import BANDED, Clipping, Ledger
from dp_grape_hf.mechanism.banded import BandedNoise, Turns
from dp_grape_hf.mechanism.clipping import (
    ExactNorms,
    Factors,
    Gathered,
    add_clipped_sum_,
    add_weighted_sum_,
    factors_by_name,
    factors_of_parts,
    in_parts,
    take,
)
from dp_grape_hf.mechanism.noise import add_noise_
from dp_grape_hf.phases import CLIP, PER_SAMPLE, RECORD
from dp_grape_hf.projections import Projector
from dp_grape_hf.sharding import is_sharded

# By how much, relative, a norm may grow when it is computed once more, and is taken for larger:
# a CPU repeats itself, other devices add in no fixed order.
_REPEATED_ON_CPU, _REPEATED = 1e-5, 1e-3


class PrivateMechanism:
    """Turns the physical batches of a logical batch into one private gradient.

    Use: ``begin``, then ``accumulate`` for each physical batch (none, if the draw was empty), then
    ``release``. The split into physical batches has no influence on the release. A process that
    fails before ``release`` calls ``abandon``, or the others would wait for it.

    Args:
        per_sample: computes losses and per-sample gradients.
        ledger: where each release is recorded before it is made. What it records is what is done:
            sigma, C, the constant q N that sums are divided by, the clipping, the module that is
            clipped apart and the gradient factors are those of ``ledger.mechanism``.
        noise_generator: the secret stream of the noise, on the parameters' device.
        distributed: whether the batch is spread over the ranks of the default process group.
        noise_slice: as in ``add_noise_``.

    Clipping:
        ``flat`` clips the norm over all parameters to C. ``automatic`` scales every gradient by
        ``C / (norm + 0.01)`` (Bu et al. 2023): under Adam, C has no influence then and need not be
        tuned. The parameters of one module may be clipped apart from the others: each part then
        has a norm, and ``C / sqrt(2)`` in the place of C.

    Attributes:
        gradient_factors: parameter name -> f, which is public; 1 for those that are missing.
        turns: which examples may be sampled for the next release.

    Sensitivity:
        Adding or removing one sample moves the sum that meets the noise by at most C in L2, over
        all parameters jointly, whatever the clipping. That sum has the gradient factors in it, as
        the norms have; to divide by them afterwards is post-processing. A sample whose norm is NaN
        or Inf contributes exactly zero.

    Noise:
        That of each step by itself, or correlated over steps where ``ledger.mechanism`` has bands
        (``banded``). Batches must then be sampled by turns (``Turns``).

    Guarantee:
        A release is in the ledger before its value exists. Norms, factors, sums and noise are
        float32. Noise enters once, on the first rank, and every rank gets the same release.
    """

    def __init__(
        self,
        per_sample: PerSampleEngine,
        *,
        ledger: Ledger,
        noise_generator: torch.Generator,
        distributed: bool = False,
        noise_slice: int | None = None,
    ) -> None:
        own = ledger.mechanism
        self.per_sample = per_sample
        self._automatic, self._apart = own.clipping == Clipping.AUTOMATIC, own.clipped_apart
        self.max_grad_norm = own.max_grad_norm
        self.noise_multiplier = own.noise_multiplier
        self.expected_batch_size = own.expected_batch_size
        self.gradient_factors = factors_by_name(
            "gradient_factors", own.factors_by_pattern, per_sample.released_shapes({})
        )
        self.ledger = ledger
        self._noise_generator, self._noise_slice = noise_generator, noise_slice
        self._banded = BandedNoise(own.bands) if own.noise == BANDED else None
        self.turns = Turns(1 if self._banded is None else len(own.bands))
        self._distributed = distributed
        self._clipped_sum: dict[str, Tensor] | None = None
        self._layout: Layout | None = None
        self._flat: Tensor | None = None  # what most of the sum is a view of
        factor_of, apart = self.gradient_factors, self._apart
        self._runs = Runs(
            lambda name: (factor_of.get(name, 1.0), apart and name.startswith(f"{apart}."))
        )
        self._state = StateGuard(model=per_sample.model, loss=per_sample.loss)
        self._before: Any = None  # the state of both as the logical batch began
        self._watched = False  # whether a step was seen to leave all of it alone
        self.projectors: Mapping[str, Projector] = {}

    @property
    def independent_std(self) -> float:
        """That of noise that is not correlated, or not yet."""
        return self._summed_noise_std / self.expected_batch_size

    @property
    def kept_noise(self) -> list[Tensor]:
        """The tensors that hold the noise of earlier steps, if any does; secret."""
        return [] if self._banded is None else self._banded.kept

    @property
    def _summed_noise_std(self) -> float:
        return self.noise_multiplier * self.max_grad_norm if self.noise_multiplier else 0.0

    def begin(self, projectors: Mapping[str, Projector]) -> None:
        """Starts a logical batch: its sum is zero, its projectors are fixed."""
        if self._clipped_sum is not None:
            raise PrivacyError("The last logical batch was never released; draws must not merge.")
        self.projectors = projectors
        self._clipped_sum, self._flat = {}, None
        self._layout = self.per_sample.layout(projectors)
        # Tensors of a simulation have no numbers.
        thorough = not (self._watched or self.per_sample.simulated)
        self._before = self._state.snapshot(thorough=thorough)

    def accumulate(self, inputs: Inputs) -> Tensor:
        """Adds the clipped gradients of a physical batch; returns its losses (B,), sensitive."""
        if self._clipped_sum is None:
            raise PrivacyError("accumulate() without begin(): no logical batch was started.")
        total = self._clipped_sum
        try:
            with guarding_streams(lambda: self.per_sample.reseeds_host):
                if self.per_sample.grad_sample_mode == GradSampleMode.GHOST:
                    return self._accumulate_twice(total, inputs)
                losses, per_sample_grads = self.per_sample(inputs, self.projectors)
                self._add(total, per_sample_grads)
                return losses
        except PrivacyError:
            self._state.compare(self._before)  # memory may be the reason
            raise

    def _accumulate_twice(self, total: dict[str, Tensor], inputs: Inputs) -> Tensor:
        """Measures every group of gradients in one backward pass, and adds it up in a second.

        What is added up is measured as well: a kernel whose backward pass changes what it saved
        gives other gradients the second time. One that adds in no fixed order rounds otherwise:
        factors are of norms as large as the second ones may be, so that none exceeds C.
        """
        norms, again = (ExactNorms(self.gradient_factors, self._apart) for _ in range(2))
        cpu = self.per_sample.device.type == "cpu"
        grown = 1 + (_REPEATED_ON_CPU if cpu else _REPEATED)

        def measure(per_sample_grads: Gradients) -> None:
            with self._clipping(per_sample_grads):
                norms.add(per_sample_grads)

        @cache
        def factors() -> dict[bool, Factors]:
            found = {part: grown * own for part, own in norms.by_part().items()}
            return factors_of_parts(found, self.max_grad_norm, self._automatic, self._apart)

        def add(per_sample_grads: Gradients) -> None:
            with self._clipping(per_sample_grads):
                again.add(per_sample_grads)
                for part, some in in_parts(take(per_sample_grads), self._apart).items():
                    add_weighted_sum_(total, Gathered.of(some), factors()[part])

        losses = self.per_sample.stream(inputs, self.projectors, measure, add)
        first, second = norms.by_part(), again.by_part()
        if any(
            not ((second[part] <= grown * own) | ~own.isfinite()).all()  # the latter were left out
            for part, own in first.items()
        ):
            raise UnsupportedModelError(
                f"A sample's gradient of {type(self.per_sample.model).__name__} grew when the "
                "backward pass was repeated, after it was measured: a kernel of the model changes "
                "what it saved, or activations are recomputed with other random numbers (gradient "
                "checkpointing with preserve_rng_state=False). Use another grad_sample_mode than "
                "'ghost'."
            )
        return losses

    def _add(self, total: dict[str, Tensor], per_sample_grads: Gradients) -> None:
        bound, automatic, apart = self.max_grad_norm, self._automatic, self._apart
        with self._clipping(per_sample_grads):
            if self._layout is not None and isinstance(per_sample_grads, FlatGradients):
                if self._flat is None:  # not before the first backward pass, which needs the memory
                    self._flat = self._zeros(self._layout.size)
                    parts = self._runs.of(self._layout)
                    total.update((name, self._flat[part]) for name, part in parts.items())
                every, per_sample_grads = per_sample_grads, per_sample_grads.in_runs(self._runs)
                every.others.clear()  # each is freed once it is added up
            factors = self.gradient_factors
            add_clipped_sum_(total, per_sample_grads, bound, automatic, factors, apart)

    @contextlib.contextmanager
    def _clipping(self, per_sample_grads: Gradients) -> Iterator[None]:
        """Computes in float32 what is asked for in float32: autocast or TF32 would round it."""
        observer = self.per_sample.observer
        observer.made(PER_SAMPLE, per_sample_grads)
        with (
            observer.phase(CLIP),
            torch.no_grad(),
            torch.autocast(self.per_sample.device.type, enabled=False),
            exact_products(),
        ):
            yield

    def release(self) -> FlatTensors:
        """Records the release, adds noise, and returns the private gradients by parameter name.

        A collective call where the batch is spread over several processes.

        Raises:
            OtherProcessFailed: another process called ``abandon``; no process releases anything.
            PrivacyError: model or loss remember something of the examples.
        """
        if self._clipped_sum is None:
            raise PrivacyError("release() without begin(): no logical batch was started.")
        self._state.compare(self._before)
        self._watched = True
        clipped_sum, self._clipped_sum = self._clipped_sum, None
        with self.per_sample.observer.phase(RECORD):
            self.ledger.record()
        self.turns.made += 1
        layout, flat, self._flat = self._layout, self._flat, None
        if layout is not None and flat is None:
            flat = self._zeros(layout.size)
        shapes = self.per_sample.released_shapes(self.projectors)
        others = {}
        for name, shape in shapes.items():
            if layout is not None and name in layout:
                continue
            value = clipped_sum.pop(name, None)
            if value is None:  # no sample was drawn, or none reached this parameter
                value = self._zeros(*shape)
            others[name] = value
        private_grads = FlatTensors(layout, flat, others, shapes)
        for name, value in private_grads.in_runs(self._runs).items():
            if name in self.gradient_factors:
                value.mul_(self.gradient_factors[name])
        values = [*others.values()] if flat is None else [flat, *others.values()]
        once = not self._distributed or dist.get_rank() == 0
        std = self._summed_noise_std if once else 0.0
        divisor = self.expected_batch_size
        add_ = add_noise_ if self._banded is None else self._banded.add_
        add_(values, std, self._noise_generator, divisor, self._noise_slice)
        if self._distributed:
            sum_over_processes_(values)
        for name, value in private_grads.in_runs(self._runs).items():
            if name in self.gradient_factors:
                value.div_(self.gradient_factors[name])
        return private_grads

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=self.per_sample.device)

    def abandon(self) -> None:
        """Drops the logical batch after an error, and makes the other processes fail as well.

        A collective call where the batch is spread: the others take part in it by ``release``.
        """
        self._clipped_sum = None
        if self._distributed and is_sharded(self.per_sample.model):
            hang_up()  # what the others wait for may be a weight
        elif self._distributed:
            give_up(self.per_sample.device)
