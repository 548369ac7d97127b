"""Compare per-sample gradients with the gradients of single examples, before the first update.

A per-sample gradient is correct if it is the gradient of that example's loss without other examples
in the batch, with the same random numbers. ``examine`` tests this on one batch, in the current mode
of the model:

1. Some rows run alone, by plain autograd of the loss that the model itself returns. Their draws
   from torch's global random streams are recorded.
2. If there are draws, three copies of one row run through the engine several times. Each time some
   copies get other numbers, and the gradients of the other copies must not change. Uniform numbers
   are set to their bounds, so that rare events at a bound occur.
3. The whole batch runs through the engine. The rows that ran alone get the same random numbers
   again, and must have the same losses and gradients.
4. The batch runs again with its rows in another order. All rows must have the same gradients.

A *draw* is one operation that draws random numbers (``draws.Draw``), and its *owner* says which
rows use the numbers (``draws.Owner``). Numbers belong to rows if there are B times as many numbers
for B rows. A draw that does not grow is shared by the rows of a physical batch. Adding an example
moves other examples to other physical batches, so it changes which of them share a draw, and
clipping does not bound that. Shared draws are refused, except uniform ones that change nothing
(``layerdrop=0.0``).

Not seen: an event that is rare, does not occur at a bound of a uniform number (one value of
``randint``), and lets a row depend on another row's number.

Gradients are compared by their *sketches*: for each parameter, the norm of its gradient and k inner
products with fixed random directions (``sketches``).

Shapes: B rows; sketches (B, number of parameters, 1 + k).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dp_grape_hf.errors import ERRORS, PrivacyError, UnsupportedModelError
from dp_grape_hf.gradients.adapters import advice
from dp_grape_hf.gradients.checks.draws import SHARED, Draw, DrawRecorder, Owner, Values, owners_of
from dp_grape_hf.gradients.checks.guards import (
    OTHER_STREAMS,
    evaluating,
    fails,
    host_streams,
    keeping_random_state,
    same_state,
    seed_all,
    seed_torch,
    torch_streams,
)
from dp_grape_hf.gradients.checks.sketches import (
    Sketches,
    Tolerance,
    computes_in_16_bits,
    differing,
    joint_error,
    tolerance_for,
)
from dp_grape_hf.gradients.engine import Gradients, Inputs, PerSampleEngine, listed
from dp_grape_hf.gradients.forms import Dense, exact_products
from dp_grape_hf.gradients.losses.losses import checked, split
from dp_grape_hf.gradients.losses.model_loss import ModelLoss
from dp_grape_hf.gradients.rows import batch_size_of, copies_of, rows_of
from dp_grape_hf.projections import Projector
from dp_grape_hf.sharding import full_tensor, is_sharded, local, reshard, rows_here

_ROWS_ALONE = 4  # rows that run alone: the first, the last, the second and another
_ROWS_WITHOUT_DRAWS = 3  # the same, if rows draw nothing
_COPIES = 3  # copies of one row, in the passes that change the draws of some of them
_REPEATS = 4  # passes that test whether a model repeats its results
_PASS = 2**20  # the most draws of a pass; distance of the seeds of two rows
_CHANGES = (((2,), False), ((0, 1), True))
"""For each pass that changes draws: the indices of the copies that change, and whether uniform
numbers become their upper bound (True) or their lower bound (False)."""

# ---- The examination ----


def examine(engine: PerSampleEngine, inputs: Inputs, projectors: Mapping[str, Projector]) -> bool:
    """Check that each row of a batch has the same gradient in the batch as alone.

    Args:
        engine: computes per-sample gradients of its model, whose mode does not change.
        inputs: a batch of B rows of the model's keyword arguments; a single row is used twice.
        projectors: parameter name -> projector.

    Returns:
        Whether a row has a gradient that is finite and not zero; otherwise the batch shows nothing.

    Raises:
        PrivacyError: if a row's loss depends on the other rows, if rows share random numbers, or if
            the model seeds torch's global streams or draws from other streams.
        UnsupportedModelError: if gradients differ from plain autograd or change with the order of
            the rows, if a parameter takes no part in the loss, or if the model's loss of one row
            differs from the engine's.
    """
    count = batch_size_of(inputs)
    batch = rows_of(inputs, [row % count for row in range(max(2, count))])
    with (
        keeping_random_state(),
        without_zeros(engine.model),
        torch.enable_grad(),
        sdpa_kernel(SDPBackend.MATH),  # other kernels do not show their dropout mask
        torch.backends.cudnn.flags(enabled=False),  # nor does cuDNN's recurrent layer
        exact_products(),
    ):
        return _Examination(engine, _of_other_lengths(engine, batch), projectors).run()


def refuse_other_loss(
    engine: PerSampleEngine, one: Inputs, losses: Tensor, expected: Tensor
) -> None:
    """Refuse an engine whose loss of one row differs from the loss that the model returns.

    Args:
        engine: the engine.
        one: a batch of one row.
        losses: the engine's loss, (1,).
        expected: the model's loss, (1,).

    Raises:
        UnsupportedModelError: if the losses differ by more than rounding.
    """
    assert isinstance(engine.loss, ModelLoss)
    tolerance = rounding = 2e-5
    if computes_in_16_bits(engine.model):
        tolerance, rounding = 2e-2, max(2e-2, engine.rounding_of_losses(one))
    if not torch.allclose(losses.double(), expected.double(), tolerance, rounding, equal_nan=True):
        raise UnsupportedModelError(
            f"The loss of one example that {type(engine.model).__name__} returns itself is "
            f"not the one that {engine.loss.name} computes for it. The model adds a term to its "
            "loss (AdaLoRA's orthogonality, a mixture's load balance), or its head computes "
            "another loss. Switch the term off, or pass compute_loss_func=f where "
            "f(outputs, labels) returns one loss per sample, of shape (B,)."
            f"{advice(engine.model)}"
        )


def refuse_random(engine: PerSampleEngine, inputs: Inputs) -> None:
    """Refuse a model whose losses are random in its current mode.

    Args:
        engine: computes the losses of its model.
        inputs: a batch.

    Raises:
        PrivacyError: if the model draws from other streams than torch's global streams.
        UnsupportedModelError: if it draws from torch's global streams, naming the draw.
    """
    with keeping_random_state(), torch.no_grad():
        seed_all(0)
        before = host_streams()
        with DrawRecorder(0) as draws:
            engine.losses(inputs)
        if not all(map(same_state, before, host_streams())) or draws.foreign:
            raise PrivacyError(OTHER_STREAMS)
    if draws.made or draws.seeded:
        raise UnsupportedModelError(
            f"The model or its loss draws random numbers in evaluation mode "
            f"({', '.join(map(str, draws.made[:1]))}). This method compares losses at two "
            "different weights, so they must not be random. Draw in training mode only (if "
            "self.training: ..., or functional.dropout(x, p, training=self.training))."
        )


class _Shown(NamedTuple):
    """Losses, gradients and draws of the rows of one pass."""

    losses: Tensor  # (B,)
    sketches: Tensor  # (B, number of parameters, 1 + k), of the gradients
    draws: Sequence[Draw]  # in order
    names: list[str]  # the parameters that have gradients

    @property
    def finite(self) -> Tensor:
        """True if the gradients of a row are finite, (B,)."""
        return self.sketches.isfinite().flatten(1).all(1)

    @property
    def tells(self) -> bool:
        """True if the first row has a finite loss, and finite gradients that are not all zero."""
        return bool(self.losses[0].isfinite() & self.finite[0] & self.sketches[0, :, 0].any())

    def of(self, rows: Sequence[int]) -> _Shown:
        """Return the losses and sketches of some rows."""
        return self._replace(losses=self.losses[rows], sketches=self.sketches[rows])

    @property
    def values(self) -> list[Values]:
        return [draw.values for draw in self.draws]


class _Examination:
    """The passes over one batch, and their comparison."""

    def __init__(
        self, engine: PerSampleEngine, batch: Inputs, projectors: Mapping[str, Projector]
    ) -> None:
        self.engine, self.batch, self.projectors = engine, batch, projectors
        self.tolerance = tolerance_for(engine.model)
        self.size = batch_size_of(batch)
        self.names = list(engine.trainable)
        self.alone: dict[int, _Shown] = {}  # row -> its pass alone
        self.passes = 0  # number of passes so far, which seeds the next one
        self.silent = False  # whether no draw is expected, so that operations are not intercepted
        self.host_ends: dict[int, Any] = {}  # stream -> its state after a pass that reseeded it

    def run(self) -> bool:
        """Run all passes; return whether a row has a gradient that is finite and not zero."""
        others = torch.randperm(self.size, generator=torch.Generator().manual_seed(0)).tolist()
        rows = dict.fromkeys([0, self.size - 1, 1, *others])  # full-length and shortened rows
        for row in rows:
            shown = self.alone.values()
            draw = any(one.draws for one in shown)
            enough = _ROWS_ALONE if draw else _ROWS_WITHOUT_DRAWS
            if len(shown) >= enough and any(one.tells for one in shown):
                break
            self.alone[row] = self._alone(row)
        # Interception can change some code: quantised layers under vmap.
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
        """The absolute difference of two computations of one loss that rounding explains."""
        return self.engine.rounding_of_losses(self.batch)

    # ---- Passes ----

    def _alone(self, row: int) -> _Shown:
        """Run one row by plain autograd of the model's own loss, and keep its draws."""
        try:
            draws = DrawRecorder(_start(row), keep=True)
            return self._by_autograd(copies_of(self.batch, 1, row), draws)
        except PrivacyError:
            raise
        except ERRORS as error:
            if fails(partial(self.engine.losses, self.batch)):
                raise
            raise UnsupportedModelError(
                f"{type(self.engine.model).__name__} fails for one example alone, and not for "
                f"several: {type(error).__name__}: {error}. So its gradients cannot be checked. "
                "Make the model accept a batch of one example."
            ) from error

    def _by_autograd(self, one: Inputs, draws: DrawRecorder) -> _Shown:
        def run() -> tuple[Tensor, Sketches]:
            loss = loss_alone(self.engine, one)
            return loss.detach()[None], _by_autograd(self.engine, loss, self.projectors)

        return self._watched(run, draws)

    def _couples_losses(self) -> bool:
        """Return whether rows have other losses in the batch than alone."""
        with torch.no_grad(), evaluating(self.engine.model):
            together = self.engine.losses(self.batch).double().cpu()
            rows = [copies_of(self.batch, 1, row) for row in self.alone]
            alone = torch.cat([self.engine.losses(one).double().cpu() for one in rows])
        return self._other_losses(together[list(self.alone)], alone)

    def _together(self, inputs: Inputs, draws: DrawRecorder) -> _Shown:
        """Run a batch through the engine."""
        return self._watched(partial(self.engine.unchecked, inputs, self.projectors), draws)

    def _watched(
        self, run: Callable[[], tuple[Tensor, Gradients | Sketches]], draws: DrawRecorder
    ) -> _Shown:
        """Run a pass, and refuse a model that misuses random streams.

        Args:
            run: returns losses, and gradients or their sketches.
            draws: recorder of the draws of the pass.
        """
        while True:
            seed_all(self.passes)
            self.passes += 1
            before, unused, restarts = host_streams(), torch_streams(), self.engine.restarts
            with contextlib.nullcontext() if self.silent else draws:
                losses, found = run()
            if self.silent and not all(map(same_state, unused, torch_streams())):
                self.silent = False
            elif self.engine.restarts == restarts:  # otherwise, a broken pass has draws too
                break
        for number, (old, new) in enumerate(zip(before, host_streams(), strict=True)):
            if not same_state(old, new):
                if not same_state(self.host_ends.setdefault(number, new), new):
                    raise PrivacyError(OTHER_STREAMS)
                self.engine.reseeds_host = True  # the state afterwards is the same every time
        if draws.foreign:
            raise PrivacyError(OTHER_STREAMS)
        if draws.seeded:
            raise PrivacyError(
                "The model seeds torch's global random numbers during its forward pass, or "
                "restores an earlier state. Dropout masks and other random numbers would then be "
                "known or repeated, and reveal which examples were sampled. Remove the seeding."
            )
        if isinstance(found, Sketches):
            sketches = found
        else:  # after the pass, because interception of operations takes time
            sketches = Sketches(self.engine.device)
            sketches(found)
        losses = losses.detach().double().cpu()
        return _Shown(losses, sketches.of(self.names), draws.made, sketches.names)

    def _refuse_other_results(self, shown: _Shown, again: Callable[[], _Shown]) -> None:
        """Refuse a model whose pass has other results with the same random numbers."""
        rows = range(len(shown.losses))
        if any(self._differ(shown, again(), rows) for _ in range(_REPEATS)):
            raise PrivacyError(OTHER_STREAMS)

    def _differ(self, some: _Shown, others: _Shown, rows: Sequence[int]) -> bool:
        """Return whether gradients or losses of rows differ in two passes of one batch shape.

        Gradients that are not finite in both passes contribute nothing.
        """
        error = 1e-2 if computes_in_16_bits(self.engine.model) else 1e-5  # of one batch shape
        strict = Tolerance(error, floor=1e-2, loss=0.0, change=0.0)
        for before, now in ((some.of([row]), others.of([row])) for row in rows):
            if before.finite != now.finite:
                return True
            close = torch.isclose(before.losses, now.losses, error, error / 10, equal_nan=True)
            if before.finite and (
                not close or differing(before.sketches, now.sketches, strict).any()
            ):
                return True
        return False

    # ---- Checks ----

    def _refuse_other_loss(self, row: int) -> None:
        """Refuse an engine whose loss of one row differs from the loss that the model returns."""
        one = copies_of(self.batch, 1, row)

        def run() -> tuple[Tensor, Sketches]:
            return self.engine.losses(one), Sketches(self.engine.device)

        if isinstance(self.engine.loss, ModelLoss):
            actual = self._watched(run, DrawRecorder(_start(row))).losses
            refuse_other_loss(self.engine, one, actual, self.alone[row].losses)

    def _refuse_shared_draws(self, row: int) -> list[Owner]:
        """Refuse random numbers that rows share, or that influence other rows.

        Returns:
            The owners of the draws of a batch of three copies of the row.
        """
        batch, alone, start = copies_of(self.batch, _COPIES, row), self.alone[row].draws, 0
        if not alone:
            return []
        base = self._together(batch, DrawRecorder(start, keep=True))
        owners = owners_of(alone, base.draws, _COPIES)
        if isinstance(owners, Draw):
            raise PrivacyError(_shared(owners, all_rows=True))

        def changed(rows: Sequence[int], most: bool, numbers: Container[int]) -> _Shown:
            """Run a pass in which some rows get other numbers; shared draws change too."""
            given: list[list[Values | None]] = [[None] * len(alone) for _ in range(_COPIES)]
            shared: dict[int, Values] = {}
            for owner, draw in zip(owners, base.draws, strict=True):
                other = partial(self._other, owner.number, draw, most)
                if owner.number not in numbers:
                    continue
                if owner.shared:
                    shared[owner.number] = other(draw.values)
                for at in rows if owner.row is None else {owner.row}.intersection(rows):
                    given[at][owner.number] = other(owner.part(draw.values, at, _COPIES))
            return self._together(batch, DrawRecorder(start, False, owners, given, shared))

        every = range(len(alone))
        for rows, most in _CHANGES:
            kept = [at for at in range(_COPIES) if at not in rows]
            if not self._differ(base, changed(rows, most, every), kept):
                continue
            self._refuse_other_results(base, lambda: self._together(batch, DrawRecorder(start)))
            shows = (n for n in every if self._differ(base, changed(rows, most, [n]), kept))
            at_fault = [owner.number for owner in owners].index(next(shows, 0))
            raise PrivacyError(_shared(base.draws[at_fault], owners[at_fault].shared))
        for owner, draw in zip(owners, base.draws, strict=True):
            if owner.shared and draw.operation not in SHARED:  # it may change a result rarely
                raise PrivacyError(_shared(draw, all_rows=True))
        return owners if all(owner.row is None for owner in owners) else []

    def _other(self, number: int, draw: Draw, most: bool, drawn: Values) -> Values:
        """Return numbers to use in place of the drawn ones: a bound, or another row's numbers."""
        if draw.bounds is not None:
            return tuple(torch.full_like(value, draw.bounds[most]) for value in drawn)
        others = [s.draws[number].values for s in self.alone.values() if number < len(s.draws)]
        others = others[::-1] if most else others
        fitting = [o for o in others if o[0].numel() == drawn[0].numel()]
        unlike = [o for o in fitting if not torch.equal(o[0].flatten(), drawn[0].flatten())]
        return next(iter(unlike or fitting), drawn)

    def _compare_alone(self, owners: list[Owner]) -> tuple[_Shown, list[Owner]]:
        """Refuse rows that have other losses or gradients in the batch than alone.

        Returns:
            The pass over the batch, and the owners of its draws.
        """
        rows = list(self.alone)
        first = self.alone[rows[0]].draws
        for shown in self.alone.values():
            for one, other in zip_longest(first, shown.draws):
                if one is None or other is None or one.shapes != other.shapes:
                    raise PrivacyError(_shared(one or other, all_rows=True))

        def together() -> _Shown:
            given = self._given(range(self.size))
            return self._together(self.batch, DrawRecorder(0, False, owners, given))

        whole = together()
        actual = owners_of(first, whole.draws, self.size)
        if isinstance(actual, Draw):
            raise PrivacyError(_shared(actual, all_rows=True))
        if actual != owners:
            owners = actual
            whole = together()
        alone = _Shown(
            torch.cat([shown.losses for shown in self.alone.values()]),
            torch.cat([shown.sketches for shown in self.alone.values()]),
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
                f"the model couples the rows of a batch or treats a row by its position, or "
                f"{engine} does not support this model. Compute each loss from its example alone, "
                'choose the other engine (engine="functorch" or "layerwise"), or freeze these '
                "parameters with requires_grad_(False). Nothing was released."
            )
        return whole, owners

    def _given(self, rows: Iterable[int]) -> list[list[Values]]:
        """Return the numbers that rows get: those that they, or another row, drew alone."""
        every = list(self.alone.values())
        return [self.alone.get(row, every[row % len(every)]).values for row in rows]

    def _compare_reordered(self, whole: _Shown, owners: list[Owner]) -> None:
        """Refuse gradients that change with the order of the rows."""
        turns = torch.randperm(self.size, generator=torch.Generator().manual_seed(1))
        order = torch.empty_like(turns)
        order[turns] = turns.roll(1)  # no row stays where it is
        rows = order.tolist()
        draws = DrawRecorder(0, False, owners, self._given(rows))
        shown = self._together(rows_of(self.batch, rows), draws)
        expected = whole.of(rows)
        coupled = self._other_losses(shown.losses, expected.losses)
        if wrong := self._wrong(rows, shown, expected, owners):
            raise UnsupportedModelError(
                f"Per-sample gradients of {type(self.engine.model).__name__} change with the order "
                f"of the rows of their batch, for {wrong}. The model sorts its rows (by length), "
                "mixes them, or treats a row by its position, so a gradient may belong to another "
                "row. Leave the rows in their order, or use engine='functorch', which runs each "
                "row alone. Nothing was released."
            )
        if coupled:
            raise PrivacyError(COUPLED)

    def _under_vmap(self, what: str) -> UnsupportedModelError | None:
        """Return the error for an engine that runs each row alone; None for other engines."""
        if not self.engine.isolates_samples:
            return None
        return UnsupportedModelError(
            f"{type(self.engine.model).__name__} computes {what} of one example under "
            "torch.func.vmap than without it. Its code depends on how it is run, or uses a "
            "parameter in code that accepts no other tensor (a custom autograd.Function). "
            'Use engine="layerwise", another attn_implementation, or freeze the parameter with '
            "requires_grad_(False)."
        )

    def _other_losses(self, some: Tensor, others: Tensor) -> bool:
        change = self.tolerance.change
        return not torch.allclose(some, others, change, self.rounding, equal_nan=True)

    def _wrong(
        self, rows: Sequence[int], shown: _Shown, expected: _Shown, owners: list[Owner]
    ) -> str:
        """Return the names of parameters for which a row's gradient differs, as text.

        A gradient is not compared if it consists of rounding errors: if plain autograd gives
        different gradients for one and for two copies of the row. The gradient of a pair of equal
        texts is an example.
        """
        losses = expected.losses
        telling = (losses.abs() > self.tolerance.loss) & losses.isfinite()
        differ = differing(shown.sketches, expected.sketches, self.tolerance, bounds=True)
        differ &= telling[:, None]
        for at in differ.any(1).nonzero().flatten().tolist():
            if any(owner.row is not None for owner in owners):
                continue
            row = rows[at]
            one = self.alone[row] if row in self.alone else self._alone(row)
            draws = DrawRecorder(_start(row), False, owners, [one.values] * 2)
            two = self._by_autograd(copies_of(self.batch, 2, row), draws)
            error, norm = joint_error(one.sketches, two.sketches)
            differ[at] &= bool(0 < norm and error <= self.tolerance.error * norm)
        names = [n for n, any_ in zip(self.names, differ.any(0), strict=True) if any_]
        return listed([f"{name} (of {_module_of(self.engine.model, name)})" for name in names])

    def _refuse_unused(self, whole: _Shown) -> None:
        """Refuse trainable parameters that no loss depends on."""
        used = {name for shown in self.alone.values() for name in shown.names}
        moved = whole.sketches[..., 0].nan_to_num().sum(0) > 0
        used |= {name for name, moves in zip(self.names, moved, strict=True) if moves}
        used |= self.engine.used_by_value()
        self.engine.refuse_unused(used)


def _by_autograd(
    engine: PerSampleEngine, loss: Tensor, projectors: Mapping[str, Projector]
) -> Sketches:
    """Return the sketches of the gradient of one row's loss, a scalar, by plain autograd.

    Each parameter's gradient is projected, sketched and freed as soon as autograd has it.
    """
    names = {parameter: name for name, parameter in engine.trainable.items()}
    sketches = Sketches(engine.device)

    def receive(parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        name, gradient = names[parameter], parameter.grad.float()
        parameter.grad = None
        gradient = full_tensor(gradient)  # a mean over processes, which all run this row
        projector = projectors.get(name)
        with torch.no_grad(), torch.autocast(gradient.device.type, enabled=False):
            gradient = projector.project(gradient) if projector else gradient
        sketches({name: Dense(gradient[None])})

    hooks = [p.register_post_accumulate_grad_hook(receive) for p in names]
    try:
        if loss.requires_grad:
            reached = None if is_sharded(engine.model) else list(names)
            torch.autograd.backward(loss, inputs=reached)
    finally:
        for hook in hooks:
            hook.remove()
    return sketches


def _start(row: int) -> int:
    """Return the seed of the first draw of a row that runs alone."""
    return (row + 1) * _PASS


def loss_alone(engine: PerSampleEngine, one: Inputs) -> Tensor:
    """Return the loss of one row, or the mean over copies of it, a scalar.

    It is the loss that the model returns, if it returns one.
    """
    if isinstance(engine.loss, ModelLoss):
        seed = torch.initial_seed()
        returned = engine.loss.of_batch(engine.model, one)
        if returned is not None and returned.isfinite():
            return returned
        seed_torch(seed)  # the pass below repeats the draws of this one, and adds none
    inputs, labels = split(engine.loss, one)
    return checked(engine.loss(engine.model(**inputs), labels), batch_size_of(one)).mean()


COUPLED = (
    "The loss of a sample changes with the number or the contents of the other samples in its "
    "batch. The loss or the model couples samples, so clipping does not bound the influence of "
    "one. Compute each loss from that sample alone: divide by its own token count, not by a count "
    "over the batch. A loss that compares the samples of a batch (contrastive, or a rank) has no "
    "per-sample gradient; compare each sample with negatives in its row or of public data."
)
"""The error for a loss that depends on the other samples of a batch."""


def _shared(draw: Draw, all_rows: bool) -> str:
    """Return the error for a model with that draw."""
    how, what = (
        (
            "once for all samples of a physical batch",
            "Switch off layer drop, masks or crops that a batch shares, and dropout inside of "
            "experts, when you create the model (for example layerdrop=0.0).",
        )
        if all_rows
        else (
            "for each sample of a physical batch, and uses them for other samples as well (their "
            "mean, their order, one of them for all)",
            "Let the random numbers of a sample influence that sample alone.",
        )
    )
    return (
        f"The model draws random numbers ({draw}) {how}. Adding an example moves others to another "
        "physical batch and so changes their random numbers, and clipping does not bound that. "
        f"{what}"
    )


def _module_of(model: nn.Module, name: str) -> str:
    path = name.rpartition(".")[0]
    return f"{path or 'the model'}, a {type(model.get_submodule(path)).__name__}"


# ---- Inputs and weights during an examination ----


def _of_other_lengths(engine: PerSampleEngine, batch: dict[str, Any]) -> dict[str, Any]:
    """Return the batch with shorter attention masks, of different lengths, in every second row.

    The batch is returned unchanged if it has no attention mask, or if the model fails with them.
    """
    size, shorter = batch_size_of(batch), dict(batch)
    for name, mask in batch.items():
        if name.endswith("attention_mask") and isinstance(mask, Tensor) and mask.dim() == 2:
            seen = mask.long().cumsum(1)  # number of positions up to each
            half, number = seen[:, -1:] // 2, torch.arange(size, device=mask.device)[:, None]
            left = (half + number // 2 % (half - 1).clamp(min=1)).clamp(min=1)
            shorter[name] = torch.where((seen > left) & (number % 2 > 0), 0, mask)
    if all(shorter[name] is value for name, value in batch.items()):
        return batch
    try:
        with torch.no_grad():
            engine.losses(rows_of(shorter, slice(2)))
    except Exception:  # the model may require other masks
        return batch
    return shorter


@contextlib.contextmanager
def without_zeros(model: nn.Module) -> Iterator[None]:
    """Replace weights that are all zero by small public numbers inside, and restore them exactly.

    With a weight of zeros, many gradients are zero, so comparing them would show nothing.
    """
    reshard(model)
    kept: list[tuple[Tensor, Tensor]] = []
    try:
        for name, parameter in model.named_parameters():
            weight = local(parameter)
            if type(weight) not in (Tensor, nn.Parameter):
                continue  # quantised
            values = weight.data  # a change of it does not count as a new version of the weight
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


_SMALL = 0.02  # standard deviation of the numbers in place of zero weights
