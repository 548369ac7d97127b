"""Training from losses alone: one number per sample and direction, from forward passes.

A step has K public random directions z_k over all trainable parameters. Sample i's coordinates are
the finite differences of its own loss, which cost two forward passes and no backward pass:

    s_ik = (loss_i(W + mu z_k) - loss_i(W - mu z_k)) / (2 mu),    W -= lr / K * sum_k g_k z_k

where g is the private mean of the s_i that ``mechanism`` releases like any other gradient: clipped
to C jointly over the K directions, summed, with noise. MeZO (Malladi et al. 2023) is this without
clip and noise. DPZero (Zhang et al. 2024, Algorithm 2) has one direction, on the sphere in its
theory and Gaussian in its experiments. DP-ZO (Tang et al. 2024) has a Gaussian one and clips the
difference of the losses, not the quotient: its threshold is ``2 mu C`` in terms of C here. Clipping
several directions jointly is the order of DP-AggZO (Bao et al. 2025): aggregate, then clip. The
papers assume different neighbours; here they are what the accountant assumes for every method,
adding or removing one sample, so the noise has std ``sigma C`` and not ``2 sigma C``.

The weights are never written to. While a pass runs, each operation that reads a weight is given a
copy ``W + mu z``, which is freed after it, so the weights are afterwards what they were, bit for
bit, and the copies of one operation are all the memory it takes, beside at most 64 MiB of z, which
``projections.directions`` draws and keeps. The optimizer is ``optimizers.zeroth_order``.

Shapes: B samples in the batch, K directions, d trainable numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.gradients.checks.guards import in_mode, keeping_random_state
from dp_grape_hf.gradients.engine import ROUNDING, Gradients, Inputs, PerSampleEngine
from dp_grape_hf.gradients.forms import Dense
from dp_grape_hf.gradients.losses.losses import LossFunction, ModelLoss
from dp_grape_hf.gradients.replay import COUPLED, refuse_other_loss, refuse_random
from dp_grape_hf.gradients.rows import batch_size_of, copies_of, first_two
from dp_grape_hf.gradients.stand_ins import METADATA
from dp_grape_hf.phases import FORWARD
from dp_grape_hf.projections import DIRECTION, Directions, Projector


class ZerothOrderEngine(PerSampleEngine):
    """Per-sample finite differences of the loss along the directions of a step.

    Call ``use`` once for each logical batch, before its physical batches. Dropout is off, as in
    MeZO and DPZero, and a model that is random all the same is refused.

    Args:
        model: as in ``PerSampleEngine``.
        loss: as in ``PerSampleEngine``.
        seed: the public seed of the directions.
        perturbation: mu, how far from the weights the losses are taken; in the unit of a weight.
        n_directions: K.

    Raises:
        PrivacyError: for a value out of range.
        UnsupportedModelError: as in ``PerSampleEngine``.
    """

    skips_unlabelled = True

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction | None = None,
        *,
        seed: int,
        perturbation: float = 1e-3,
        n_directions: int = 1,
    ) -> None:
        super().__init__(model, loss)
        if not 0 < perturbation < math.inf:
            raise PrivacyError(f"{perturbation=} must be positive and finite; 1e-3 is usual.")
        self.perturbation = perturbation
        self.directions = Directions(self.trainable, seed, n_directions)
        self.groups = [(DIRECTION,)]
        self._step: int | None = None
        self._read: set[str] = set()  # names of the weights that passes were seen to read

    def use(self, step: int) -> None:
        """Chooses the directions: those of this step of training, until the next call."""
        self._step = step

    def released_shapes(self, projectors: Mapping[str, Projector]) -> dict[str, tuple[int, ...]]:
        """Returns the one name and shape of a release: the scalars of the directions, (K,)."""
        return {DIRECTION: (self.directions.count,)}

    def __call__(
        self, inputs: Inputs, projectors: Mapping[str, Projector]
    ) -> tuple[Tensor, Gradients]:
        """Returns losses (B,) and finite differences (B, K), under ``DIRECTION`` (sensitive).

        A loss is the mean of what the sample's passes gave, at ``W + mu z_k`` and ``W - mu z_k``.

        Raises:
            PrivacyError: for projectors, without ``use``, or if samples are coupled.
            UnsupportedModelError: if a parameter takes no part in the loss, or is used unseen.
        """
        if projectors:
            raise PrivacyError(
                f"There are projectors for {len(projectors)} parameters, and a zeroth-order method "
                "has no gradients to project. Switch the projection off."
            )
        if self._step is None:
            raise PrivacyError("use(step) was not called: it is not known which directions to try.")
        self._examine_once(inputs, projectors)
        losses, differences = self._differences(inputs)
        return losses, {DIRECTION: Dense(differences)}

    def _differences(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Returns losses (B,) and finite differences (B, K)."""
        assert self._step is not None
        mu = self.perturbation
        losses, differences = [], []
        with (
            self.observer.phase(FORWARD),
            in_mode(self.model, training=False),
            torch.no_grad(),
        ):
            for number in range(self.directions.count):
                sides = []
                for distance in (mu, -mu):
                    with _Displaced(self.directions, self._step, number, distance) as displaced:
                        side = self.losses(inputs).detach()
                    sides.append(side if side.dtype is torch.float64 else side.float())
                    self._read |= displaced.used
                ahead, behind = sides
                losses.append((ahead + behind) / 2)
                differences.append((ahead - behind) / (2 * mu))
        return torch.stack(losses).mean(0), torch.stack(differences, 1)

    # ---- The first batch ----

    def _examine(self, inputs: Inputs, projectors: Mapping[str, Projector]) -> bool:
        with in_mode(self.model, training=False):
            refuse_random(self, copies_of(inputs, 2))
            self._refuse_other_loss(inputs)
        two, _ = self._trial(copies_of(inputs, 2))
        three, _ = self._trial(copies_of(inputs, 3))
        _refuse_coupled(two[:1], torch.cat([two, three]))
        self.refuse_unused(
            self._read,
            " If the model does use them, it does so through code that PyTorch's function modes do "
            "not see (TorchScript, a kernel of its own).",
        )
        pairs = (first_two(inputs, first) for first in range(0, batch_size_of(inputs), 2))
        return any(map(self._probe_pair, pairs)) or batch_size_of(inputs) == 1

    def _refuse_other_loss(self, inputs: Inputs) -> None:
        if not isinstance(self.loss, ModelLoss):
            return
        for row in range(batch_size_of(inputs)):
            one = copies_of(inputs, 1, row)
            with torch.no_grad():
                expected = self.loss.of_batch(self.model, one)
                if expected is None:
                    return
                if expected.isfinite():  # not without a label, say
                    refuse_other_loss(self, one, self.losses(one), expected[None])
                    return

    def _probe_pair(self, pair: Inputs) -> bool:
        """Refuses coupling of two samples; returns whether they could have shown it."""
        together, differences = self._trial(pair)
        _, repeated = self._trial(pair)
        jitter = 4 * (differences - repeated).abs().max()  # of a device whose sums have no order
        for i in (0, 1):
            alone, own = self._trial(copies_of(pair, 2, i))
            _refuse_coupled(alone[i : i + 1], together[i : i + 1])
            # In the same row of a batch of the same shape, rounding is the same whatever the type.
            rounding = 4 * torch.finfo(alone.dtype).eps * (1 + alone[i].abs()) / self.perturbation
            allowed = 1e-4 * own[i].abs() + jitter + rounding
            if ((own[i] - differences[i]).abs() > allowed).any():
                raise PrivacyError(
                    "The finite difference of a sample's loss changes with the contents of the "
                    "other samples in its batch: the loss or the model couples samples, so "
                    "clipping bounds nothing. Compute each loss from that sample alone."
                )
        return bool(together.isfinite().all() & (together[0] != together[1]))

    def _trial(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Does as ``_differences``, from the same random numbers every time."""
        with keeping_random_state():
            return self._differences(inputs)


def _refuse_coupled(one: Tensor, others: Tensor) -> None:
    """Refuses losses of one sample that differ with what else is in the batch."""
    one, others = one.float().expand_as(others), others.float()
    if not torch.allclose(one, others, 1e-2, ROUNDING, equal_nan=True):
        raise PrivacyError(COUPLED)


class _Displaced(TorchFunctionMode):
    """Gives every operation that reads a trainable parameter ``W + distance * z`` in its place.

    A direction along some of the uses of a weight would be another direction. Operations are where
    all uses meet: tied weights, and modules that read the weights of others.
    """

    def __init__(self, directions: Directions, step: int, number: int, distance: float) -> None:
        super().__init__()
        self._directions = directions
        self._where = step, number, distance
        self.used: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if func in METADATA or name == "__set__":
            return func(*args, **kwargs)
        if name == "__get__":
            value = func(*args)
            if not isinstance(value, Tensor):  # a shape, a device: no copy for that
                return value
        return func(*self._replace(args), **{k: self._replace(v) for k, v in kwargs.items()})

    def _replace(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            name = self._directions.name_of(value)
            if name is None:
                return value
            self.used.add(name)
            return self._directions.displaced(value, *self._where)
        if type(value) in (tuple, list):
            return type(value)(self._replace(item) for item in value)
        return value
