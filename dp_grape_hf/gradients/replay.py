"""Compare per-sample gradients with the gradients of single examples, before the first update.

A per-sample gradient is right if it is the gradient of that example's loss when nothing else is in
the batch, with the random numbers that the example had. ``examine`` tests that on one batch, in the
mode in which the model is:

1. Some rows run alone, by plain autograd of the loss that the model itself returns. The numbers
   that they draw from torch's global random streams are recorded.
2. If they draw anything, three copies of one row run through the engine several times. Each time
   some copies get other numbers. The others must not change. Uniform numbers are set to their
   bounds as well, so that an event shows that is rare and that a bound brings about.
3. The whole batch runs through the engine. The rows that ran alone are given the numbers that they
   had there, and must have the same losses and gradients.
4. The batch runs once more with its rows in another order. All rows must have the same gradients.

The numbers of a draw belong to rows if there are B times as many of them for B rows. A draw that
does not grow is shared by the rows of a physical batch. One more example moves other examples to
other physical batches, so it changes which of them share a draw, and clipping does not bound that.
Shared draws are refused, except uniform ones that change nothing (``layerdrop=0.0``).

Not seen: a rare event that no bound of a uniform number brings about (one number of ``randint``)
and that one row has from the numbers of another. Dropout is off where the number of its positions
depends on their values (in the experts of a mixture).

Shapes: B rows, P parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from dp_grape_hf.errors import ERRORS, PrivacyError, UnsupportedModelError
from dp_grape_hf.gradients.adapters import advice
from dp_grape_hf.gradients.checks.draws import (
    SHARED,
    Draw,
    Draws,
    Owner,
    Values,
    in_rows,
    owners_of,
)
from dp_grape_hf.gradients.checks.guards import (
    DRAWS_BESIDE,
    host_streams,
    keeping_random_state,
    same_state,
    seed_all,
)
from dp_grape_hf.gradients.checks.sketches import (
    Prints,
    Tolerance,
    computes_in_16_bits,
    differing,
    joint_error,
    tolerance_for,
)
from dp_grape_hf.gradients.engine import Inputs, PerSampleEngine, listed
from dp_grape_hf.gradients.forms import exact_products
from dp_grape_hf.gradients.losses.losses import checked, split
from dp_grape_hf.gradients.losses.model_loss import ModelLoss
from dp_grape_hf.gradients.rows import batch_size_of, copies_of, rows_of
from dp_grape_hf.projections import Projector
from dp_grape_hf.sharding import local, reshard, rows_here

_ROWS_ALONE = 4  # rows of a batch that run alone: the first, the last, and others between them
_COPIES = 3  # of one row, in the passes that change what some of them draw
_REPEATS = 4  # passes that tell whether a model does the same twice
_PASS = 2**20  # draws of a pass, at most
_CHANGES = (((2,), False), ((0, 1), True))
"""For each pass that changes draws: which copies get others, and whether upper bounds."""

# ---- The examination ----


def examine(engine: PerSampleEngine, inputs: Inputs, projectors: Mapping[str, Projector]) -> bool:
    """Refuses an engine, a model or a loss by which a row contributes other gradients than alone.

    Args:
        engine: computes per-sample gradients of its model, which stays in its mode.
        inputs: a batch of the model's keyword arguments, of B rows; one row is taken twice.
        projectors: parameter name -> projector.

    Returns:
        Whether a row has a gradient that is finite and not zero, so that this batch shows anything.

    Raises:
        PrivacyError: a row's loss depends on the others, rows share random numbers, or the model
            draws them from elsewhere than torch's global streams, or sets these.
        UnsupportedModelError: gradients differ from plain autograd, or change with the order of
            the rows; a parameter takes no part in the loss; or the model's own loss of one row
            differs from the engine's.
    """
    count = batch_size_of(inputs)
    batch = rows_of(inputs, [row % count for row in range(max(2, count))])
    with (
        keeping_random_state(),
        without_zeros(engine.model),
        torch.enable_grad(),
        sdpa_kernel(SDPBackend.MATH),  # kernels show no mask of dropout
        torch.backends.cudnn.flags(enabled=False),  # nor does this one of a recurrent layer
        exact_products(),
    ):
        batch = _of_other_lengths(engine, batch)
        try:
            return _Examination(engine, batch, projectors).run()
        except _NoRowsDraw as error:
            draw = error.draw
        try:
            with WithoutDropout():
                return _Examination(engine, batch, projectors).run()
        except _NoRowsDraw:
            raise PrivacyError(_shared(draw, all_rows=True)) from None


def refuse_other_loss(
    engine: PerSampleEngine, one: Inputs, losses: Tensor, expected: Tensor
) -> None:
    """Refuses an engine that minimises another loss of one row than the model returns itself.

    Args:
        engine: computed the losses (1,).
        one: a batch of one row.
        losses: what the engine computed.
        expected: what the model returns, (1,).
    """
    assert isinstance(engine.loss, ModelLoss)
    tolerance = rounding = 2e-5
    if computes_in_16_bits(engine.model):
        tolerance, rounding = 2e-2, max(2e-2, engine.rounding_of_losses(one))
    if not torch.allclose(losses.double(), expected.double(), tolerance, rounding, equal_nan=True):
        raise UnsupportedModelError(
            f"The loss of one example that {type(engine.model).__name__} returns itself is "
            f"not the one that {engine.loss.name} computes for it: the model adds a term of "
            "its own (AdaLoRA's orthogonality, a mixture's load balance), or its head "
            "computes something else. Switch the term off, or pass compute_loss_func=f "
            "where f(outputs, labels) returns one loss per sample, of shape (B,)."
            f"{advice(engine.model)}"
        )


def refuse_random(engine: PerSampleEngine, inputs: Inputs) -> None:
    """Refuses a model whose losses are random in the mode in which it is.

    Args:
        engine: computes the losses of its model.
        inputs: a batch.

    Raises:
        UnsupportedModelError: naming what is drawn, if it is torch that draws.
    """
    with keeping_random_state(), torch.no_grad():
        seed_all(0)
        before = host_streams()
        with Draws(0) as draws:
            engine.losses(inputs)
        if not all(map(same_state, before, host_streams())) or draws.foreign:
            raise PrivacyError(DRAWS_BESIDE)
    if draws.made or draws.seeded:
        raise UnsupportedModelError(
            f"The model or its loss draws random numbers in evaluation mode "
            f"({', '.join(map(str, draws.made[:1]))}), and this method compares losses at two "
            "places. Draw them in training mode only (if self.training: ..., or "
            "functional.dropout(x, p, training=self.training))."
        )


class _NoRowsDraw(Exception):
    """There are neither as many of a draw as there are rows, nor is it there once for all."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw


class _Shown(NamedTuple):
    """Losses, gradients and draws of the rows of one pass."""

    losses: Tensor  # (B,)
    marks: Tensor  # (B, P, ...), of the gradients
    draws: list[Draw]
    names: list[str]  # of the parameters that have gradients
    drew: bool = False  # whether anything was drawn, if draws were not looked at

    @property
    def tells(self) -> Tensor:
        """Whether a row has a finite loss, and gradients that are finite and not all zero, (B,)."""
        norms = self.marks[..., 0].norm(dim=1)
        return norms.isfinite() & (norms > 0) & self.losses.isfinite()

    def of(self, rows: list[int]) -> _Shown:
        """Returns the same, of some rows."""
        return self._replace(losses=self.losses[rows], marks=self.marks[rows])

    @property
    def values(self) -> list[Values]:
        return [draw.values for draw in self.draws]


@dataclass
class _Examination:
    """Makes the passes over one batch, and compares them."""

    engine: PerSampleEngine
    batch: Inputs
    projectors: Mapping[str, Projector]
    tolerance: Tolerance = field(init=False)
    alone: dict[int, _Shown] = field(init=False, default_factory=dict)
    passes: int = 0
    silent: bool = False  # whether no row draws anything
    host_ends: dict[int, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.tolerance = tolerance_for(self.engine.model)
        self.size = batch_size_of(self.batch)
        self.names = list(self.engine.trainable)

    def run(self) -> bool:
        """Makes all passes; returns whether a row shows anything."""
        others = torch.randperm(self.size, generator=torch.Generator().manual_seed(0)).tolist()
        rows = dict.fromkeys([0, self.size - 1, 1, *others])  # a full one, and a shorter one
        for row in rows:
            if len(self.alone) >= _ROWS_ALONE and any(s.tells for s in self.alone.values()):
                break
            self.alone[row] = self._alone(row)
        self.silent = not any(shown.draws for shown in self.alone.values())
        telling = next((row for row, shown in self.alone.items() if shown.tells), None)
        owners: list[Owner] = []
        if telling is not None:
            self._refuse_other_loss(telling)
            owners = self._refuse_shared_draws(telling)
        try:
            whole, owners = self._compare_alone(owners)
        except PrivacyError:
            raise
        except ERRORS as error:
            if self._couples_losses():
                raise PrivacyError(COUPLED) from error
            raise
        if not self.engine.isolates_samples:
            self._compare_reordered(whole, owners)
        if telling is not None:
            self._refuse_unused(whole)
        return telling is not None

    @cached_property
    def rounding(self) -> float:
        """The error of two computations of one loss, absolute."""
        return self.engine.rounding_of_losses(self.batch)

    # ---- Passes ----

    def _alone(self, row: int) -> _Shown:
        """Runs one row by plain autograd of the model's own loss, and keeps what it draws."""
        try:
            return self._by_autograd(copies_of(self.batch, 1, row), Draws(_start(row), keep=True))
        except PrivacyError:
            raise
        except ERRORS as error:
            try:
                with torch.no_grad():
                    self.engine.losses(self.batch)
            except ERRORS:
                raise error from None  # bad data fail in any company
            raise UnsupportedModelError(
                f"{type(self.engine.model).__name__} fails for one example alone, and not for "
                f"several: {type(error).__name__}: {error}. Its gradient is then not known."
            ) from error

    def _by_autograd(self, one: Inputs, draws: Draws) -> _Shown:
        def run() -> tuple[Tensor, Prints]:
            loss = loss_alone(self.engine, one)
            return loss.detach()[None], self.engine.by_autograd(loss, self.projectors)

        return self._watched(run, draws)

    def _couples_losses(self) -> bool:
        """Returns whether rows have other losses in the batch than alone."""
        with torch.no_grad(), WithoutDropout():
            together = self.engine.losses(self.batch).double().cpu()
            rows = [copies_of(self.batch, 1, row) for row in self.alone]
            alone = torch.cat([self.engine.losses(one).double().cpu() for one in rows])
        return self._other_losses(together[list(self.alone)], alone)

    def _together(self, inputs: Inputs, draws: Draws) -> _Shown:
        """Runs a batch through the engine."""

        def run() -> tuple[Tensor, Prints]:
            prints = Prints()
            return self.engine.marked(inputs, self.projectors, prints), prints

        return self._watched(run, draws)

    def _watched(self, run: Callable[[], tuple[Tensor, Prints]], draws: Draws) -> _Shown:
        """Makes a pass, and refuses what it does to random streams."""
        seed_all(self.passes)
        self.passes += 1
        before = host_streams()
        with draws:
            losses, prints = run()
        for number, (old, new) in enumerate(zip(before, host_streams(), strict=True)):
            if not same_state(old, new):
                if not same_state(self.host_ends.setdefault(number, new), new):
                    raise PrivacyError(DRAWS_BESIDE)
                self.engine.reseeds_host = True  # to a state that is the same every time
        if draws.foreign:
            raise PrivacyError(DRAWS_BESIDE)
        if draws.seeded:
            raise PrivacyError(
                "The model seeds torch's global random numbers during its forward pass, or puts "
                "them back to where they were. Masks of dropout, and the coins of a collator, are "
                "then known, or repeat themselves, and tell who was drawn. Take the seeding out."
            )
        losses = losses.detach().double().cpu()
        return _Shown(losses, prints.marks(self.names), draws.made, prints.names, draws.drew)

    def _refuse_other_results(self, shown: _Shown, again: Callable[[], _Shown]) -> None:
        """Refuses a pass that is not the same when it is repeated with the same random numbers."""
        rows = range(len(shown.losses))
        if any(self._differ(shown, again(), rows) for _ in range(_REPEATS)):
            raise PrivacyError(DRAWS_BESIDE)

    def _differ(self, some: _Shown, others: _Shown, rows: Iterable[int]) -> bool:
        """Returns whether rows show anything else in passes over batches of one shape."""
        strict = _STRICT[computes_in_16_bits(self.engine.model)]
        for row in rows:
            before, now = (shown.marks[row : row + 1] for shown in (some, others))
            finite = [bool(marks.isfinite().all()) for marks in (before, now)]
            if any(finite) and (not all(finite) or bool(differing(before, now, strict).any())):
                return True  # a row that is not finite contributes nothing
            losses = some.losses[row], others.losses[row]
            close = torch.isclose(*losses, strict.error, strict.error / 10, equal_nan=True)
            if any(finite) and not close:
                return True
        return False

    # ---- What is refused ----

    def _refuse_other_loss(self, row: int) -> None:
        """Refuses an engine that minimises another loss of one row than the model returns."""
        one = copies_of(self.batch, 1, row)
        if not isinstance(self.engine.loss, ModelLoss):
            return

        def run() -> tuple[Tensor, Prints]:
            with torch.no_grad():
                return self.engine.losses(one), Prints()

        actual = self._watched(run, Draws(_start(row))).losses
        refuse_other_loss(self.engine, one, actual, self.alone[row].losses)

    def _refuse_shared_draws(self, row: int) -> list[Owner]:
        """Refuses random numbers that rows share or have from each other; returns the owners.

        The owners are of a batch of three copies of this row.
        """
        batch, own, start = copies_of(self.batch, _COPIES, row), self.alone[row].draws, 0
        if not own:
            return []
        base = self._together(batch, Draws(start, keep=True))
        owners = owners_of(own, base.draws, _COPIES)
        if isinstance(owners, Draw):
            raise _NoRowsDraw(owners)

        def changed(rows: Sequence[int], most: bool, numbers: Container[int]) -> _Shown:
            """Makes the pass in which some rows, and all of them, get other numbers."""
            given: list[list[Values | None]] = [[None] * len(own) for _ in range(_COPIES)]
            shared: dict[int, Values] = {}
            for owner, draw in zip(owners, base.draws, strict=True):
                if owner.number not in numbers:
                    continue
                if owner.shared:
                    shared[owner.number] = self._other(owner.number, draw.values, draw, most)
                for at in rows:
                    if owner.dims is not None:
                        pairs = zip(draw.values, owner.dims, strict=True)
                        drawn = tuple(in_rows(value, dim, _COPIES)[at] for value, dim in pairs)
                    elif owner.row == at:
                        drawn = draw.values
                    else:
                        continue
                    given[at][owner.number] = self._other(owner.number, drawn, draw, most)
            return self._together(batch, Draws(start, False, owners, given, shared))

        every = range(len(own))
        for rows, most in _CHANGES:
            kept = [at for at in range(_COPIES) if at not in rows]
            if not self._differ(base, changed(rows, most, every), kept):
                continue
            self._refuse_other_results(base, lambda: self._together(batch, Draws(start)))
            numbers = list(every)
            while len(numbers) > 1:  # which draw it is, by halves
                half = numbers[: len(numbers) // 2]
                shows = self._differ(base, changed(rows, most, half), kept)
                numbers = half if shows else numbers[len(half) :]
            at_fault = [owner.number for owner in owners].index(numbers[0])
            raise PrivacyError(_shared(base.draws[at_fault], owners[at_fault].shared))
        for owner, draw in zip(owners, base.draws, strict=True):
            if owner.shared and draw.operation not in SHARED:  # it may decide something rarely
                raise PrivacyError(_shared(draw, all_rows=True))
        return owners if all(owner.row is None for owner in owners) else []

    def _other(self, number: int, drawn: Values, draw: Draw, most: bool) -> Values:
        """Returns other numbers than were drawn: a bound, or what another row drew alone."""
        if draw.bounds is not None:
            return tuple(torch.full_like(value, draw.bounds[most]) for value in drawn)
        others = [s.draws[number].values for s in self.alone.values() if number < len(s.draws)]
        others = others[::-1] if most else others
        fitting = [o for o in others if o[0].numel() == drawn[0].numel()]
        unlike = [o for o in fitting if not torch.equal(o[0].flatten(), drawn[0].flatten())]
        return next(iter(unlike or fitting), drawn)

    def _compare_alone(self, owners: list[Owner]) -> tuple[_Shown, list[Owner]]:
        """Refuses rows that have other losses or gradients in the batch than alone.

        Returns the pass over the batch, and the owners of its draws.
        """
        rows = list(self.alone)
        first = self.alone[rows[0]].draws
        for shown in self.alone.values():
            for one, other in zip_longest(first, shown.draws):
                if one is None or other is None or one.shapes != other.shapes:
                    raise _NoRowsDraw(one or other)
        given = self._given(range(self.size))

        def together() -> _Shown:
            return self._together(self.batch, Draws(0, False, owners, given, silent=self.silent))

        whole = together()
        if self.silent and whole.drew:
            self.silent = False
            whole = together()
        actual = owners_of(first, whole.draws, self.size)
        if isinstance(actual, Draw):
            raise _NoRowsDraw(actual)
        if actual != owners:
            owners = actual
            whole = together()
        alone = _Shown(
            torch.cat([shown.losses for shown in self.alone.values()]),
            torch.cat([shown.marks for shown in self.alone.values()]),
            first,
            self.names,
        )
        of_rows = whole.of(rows)
        coupled = self._other_losses(of_rows.losses, alone.losses)
        wrong = self._wrong(rows, of_rows, alone, owners)
        if coupled or wrong:
            self._refuse_other_results(whole, together)
        if coupled:
            raise self._under_vmap("another loss") or PrivacyError(COUPLED)
        if wrong:
            engine = type(self.engine).__name__
            if (error := self._under_vmap(f"other gradients, for {wrong},")) is not None:
                raise error
            raise UnsupportedModelError(
                f"Per-sample gradients differ by more than {self.tolerance.error:g} of their norm "
                f"from those of plain autograd on one example at a time, for {wrong}. The loss or "
                f"the model couples the rows of a batch, or treats a row by its place; or {engine} "
                "computes them wrongly for this model. Compute each loss from its own example "
                'alone, choose the other engine (engine="functorch" or "layerwise"), or freeze '
                "these parameters with requires_grad_(False). Nothing was released."
            )
        return whole, owners

    def _given(self, rows: Iterable[int]) -> list[list[Values]]:
        """Returns the numbers that rows get: what they drew alone, or what another one did."""
        every = list(self.alone.values())
        return [self.alone.get(row, every[row % len(every)]).values for row in rows]

    def _compare_reordered(self, whole: _Shown, owners: list[Owner]) -> None:
        """Refuses gradients that change with the order of the rows."""
        turns = torch.randperm(self.size, generator=torch.Generator().manual_seed(1))
        order = torch.empty_like(turns)
        order[turns] = turns.roll(1)  # no row stays where it is
        rows = order.tolist()
        draws = Draws(0, False, owners, self._given(rows), silent=self.silent)
        shown = self._together(rows_of(self.batch, rows), draws)
        expected = whole.of(rows)
        coupled = self._other_losses(shown.losses, expected.losses)
        if wrong := self._wrong(rows, shown, expected, owners):
            raise UnsupportedModelError(
                f"Per-sample gradients of {type(self.engine.model).__name__} change with the order "
                f"of the rows of their batch, for {wrong}: the model sorts its rows (by length, "
                "say), mixes them, or treats a row by its place, so that a gradient is not known "
                "to be its row's. Leave the rows in their order, or use engine='functorch', which "
                "runs each by itself. Nothing was released."
            )
        if coupled:
            raise PrivacyError(COUPLED)

    def _under_vmap(self, what: str) -> UnsupportedModelError | None:
        """Returns why an engine that runs each row by itself is refused; None for other engines."""
        if not self.engine.isolates_samples:
            return None
        return UnsupportedModelError(
            f"{type(self.engine.model).__name__} computes {what} of one example under "
            "torch.func.vmap than without it: its code asks how it is run, or uses a parameter "
            "through code that takes no other tensor in its place (a custom autograd.Function). "
            'Use engine="layerwise", another attn_implementation, or freeze the parameter with '
            "requires_grad_(False)."
        )

    def _other_losses(self, some: Tensor, others: Tensor) -> bool:
        change = self.tolerance.change
        return not torch.allclose(some, others, change, self.rounding, equal_nan=True)

    def _wrong(
        self, rows: Sequence[int], shown: _Shown, expected: _Shown, owners: list[Owner]
    ) -> str:
        """Names the parameters of which a row's gradient differs, by more than rounding.

        A gradient counts as rounding if plain autograd gives another one for two copies of the row
        than for one. The gradient of a pair of equal texts is such a gradient.
        """
        losses = expected.losses
        telling = (losses.abs() > self.tolerance.loss) & losses.isfinite()
        differ = differing(shown.marks, expected.marks, self.tolerance) & telling[:, None]
        for at in differ.any(1).nonzero().flatten().tolist():
            if any(owner.row is not None for owner in owners):
                continue
            row = rows[at]
            one = self.alone[row] if row in self.alone else self._alone(row)
            draws = Draws(_start(row), False, owners, [one.values] * 2)
            two = self._by_autograd(copies_of(self.batch, 2, row), draws)
            error, norm = joint_error(one.marks, two.marks)
            differ[at] &= bool(0 < norm and error <= self.tolerance.error * norm)
        names = [n for n, any_ in zip(self.names, differ.any(0), strict=True) if any_]
        return listed([f"{name} (of {_module_of(self.engine.model, name)})" for name in names])

    def _refuse_unused(self, whole: _Shown) -> None:
        """Refuses parameters that no loss depends on."""
        used = {name for shown in self.alone.values() for name in shown.names}
        moved = whole.marks[..., 0].nan_to_num().sum(0) > 0
        used |= {name for name, moves in zip(self.names, moved, strict=True) if moves}
        used |= self.engine.used_by_value()
        self.engine.refuse_unused(used)


def _start(row: int) -> int:
    """Returns the state of the streams with which a row begins that runs alone."""
    return (row + 1) * _PASS


def loss_alone(engine: PerSampleEngine, one: Inputs) -> Tensor:
    """Returns the loss of one row, or the mean of copies: the model's own, if it has one."""
    if isinstance(engine.loss, ModelLoss):
        own = engine.loss.of_batch(engine.model, one)
        if own is not None and own.isfinite():
            return own
    inputs, labels = split(engine.loss, one)
    return checked(engine.loss(engine.model(**inputs), labels), batch_size_of(one)).mean()


COUPLED = (
    "The loss of one and the same sample changes with the number or the contents of the samples in "
    "its batch: the loss or the model couples samples, so clipping bounds nothing. Compute each "
    "loss from that sample alone: divide by its own token count, not by a count over the batch. A "
    "loss that compares the samples of a batch with each other (contrastive, or a rank) has no "
    "gradient per sample: compare each with negatives in its own row, or of public data."
)
"""Why a loss that depends on the others of a batch is refused."""


def _shared(draw: Draw, all_rows: bool) -> str:
    """Returns why a model with that draw is refused."""
    how, what = (
        (
            "once for all samples of a physical batch",
            "Set the rate of what drops whole layers, or masks or crops alike for a batch, to zero "
            "where the model is made (layerdrop=0.0, say).",
        )
        if all_rows
        else (
            "for each sample of a physical batch, and has others use them as well (their mean, "
            "their order, one of them for all)",
            "Let what is drawn for a sample have an influence on that sample alone.",
        )
    )
    return (
        f"The model draws random numbers ({draw}) {how}. A further example moves others "
        f"to another physical batch and so changes what they draw, which no clipping bounds. {what}"
    )


def _module_of(model: nn.Module, name: str) -> str:
    path = name.rpartition(".")[0]
    return f"{path or 'the model'}, a {type(model.get_submodule(path)).__name__}"


_STRICT = {
    low: Tolerance(error, floor=1e-2, loss=0.0, change=0.0)
    for low, error in ((False, 1e-5), (True, 1e-2))
}
"""Of passes over batches of one shape, by whether there are numbers of 16 bits."""


# ---- What a model is run with ----


def _of_other_lengths(engine: PerSampleEngine, batch: dict[str, Any]) -> dict[str, Any]:
    """Returns the batch with every second row shorter, each by another number of positions.

    The batch is returned unchanged if it has no attention mask, or the model fails with these.
    """
    size, shorter = batch_size_of(batch), dict(batch)
    for name, mask in batch.items():
        if name.endswith("attention_mask") and isinstance(mask, Tensor) and mask.dim() == 2:
            seen = mask.long().cumsum(1)  # how many positions there were up to each
            half, number = seen[:, -1:] // 2, torch.arange(size, device=mask.device)[:, None]
            left = (half + number // 2 % (half - 1).clamp(min=1)).clamp(min=1)
            shorter[name] = torch.where((seen > left) & (number % 2 > 0), 0, mask)
    if all(shorter[name] is value for name, value in batch.items()):
        return batch
    try:
        with torch.no_grad():
            engine.losses(rows_of(shorter, slice(2)))
    except Exception:  # what a model asks of its inputs is not known; the masks may be no masks
        return batch
    return shorter


@contextlib.contextmanager
def without_zeros(model: nn.Module) -> Iterator[None]:
    """Lets weights that are all zero hold small public numbers, and puts them back bit for bit.

    Behind a head of zeros, or in front of one, nothing shows what it is computed from.
    """
    reshard(model)
    kept: list[tuple[Tensor, Tensor]] = []
    try:
        for name, parameter in model.named_parameters():
            weight = local(parameter)
            if type(weight) not in (Tensor, nn.Parameter):
                continue  # quantised
            values = weight.data  # whose version is not that of the weight
            if values.is_floating_point() and values.dtype.itemsize > 1 and not values.any():
                kept.append((values, values.clone()))
                generator = torch.Generator().manual_seed(crc32(name.encode()))
                numbers = torch.randn(parameter.shape, generator=generator)
                values.copy_(_SMALL * rows_here(numbers, parameter))
        yield
    finally:
        reshard(model)
        for values, zeros in kept:
            values.copy_(zeros)


_SMALL = 0.02


class WithoutDropout(TorchFunctionMode):
    """Lets a model in training mode run without dropout."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is functional.scaled_dot_product_attention:
            kwargs.update(zip(("attn_mask", "dropout_p", "is_causal"), args[3:], strict=False))
            args, kwargs["dropout_p"] = args[:3], 0.0
        return func(*args, **kwargs)


_DROPOUTS = {
    *(functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d),
    *(functional.alpha_dropout, functional.feature_alpha_dropout),
}
