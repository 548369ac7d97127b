"""Whose the random numbers are that a forward pass, or a collator, draws.

One example more must not change the joint law of what the others contribute. So every coin is an
example's own (a dropout mask), or one for the whole logical step, or public. One for each physical
batch is none of these (layer drop, one crop size a batch): the examples of a physical batch share
it, an example more moves others across the borders of physical batches, and the sum of their
clipped gradients gets another law, in which no single contribution moved at all.

Who drew a number cannot be read off the code of a model. It can be read off two passes, over two
and over three copies of one sample: what is drawn for each sample grows in proportion.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dp_grape_hf.errors import PrivacyError, UnsupportedModelError
from dp_grape_hf.per_sample.guards import (
    draws_beside,
    host_streams,
    keeping_random_state,
    same_state,
    seed_all,
)

_TRIALS = 3  # of other values for shared draws; the first two are the least and the largest
_REDRAWS = 200  # until a draw differs from the one before
_COPIES, _SEEDS = 8, 8  # of an example, and of the streams, that a collator is tried with

Run = Callable[[int], Sequence[Tensor]]
"""A number of copies of one sample -> everything that their pass, or their batch, shows."""


# ---- Draws of torch ----


class Draw(NamedTuple):
    """One draw: by which operation, of what shape, and in which class of module."""

    operation: str
    shape: tuple[int, ...]
    module: str


class Draws(TorchDispatchMode):
    """Notes what torch's global stream gives inside, by a seed for each draw, alike for all copies.

    With the seed of its number, a draw is the same in two passes that make the same draws before
    it. And copies of one sample stay copies, whatever is drawn for each of them.

    Args:
        copies: how many copies of one sample the batch is.
        others: numbers of draws that are given other values than ``values``, in a trial.
        values: what those draws gave before, by number.
        trial: from 1; the first two give what is uniform its least and its largest value.
    """

    def __init__(
        self,
        copies: int,
        others: frozenset[int] = frozenset(),
        values: Mapping[int, Tensor] | None = None,
        trial: int = 0,
    ) -> None:
        super().__init__()
        self._copies, self._others, self._trial = copies, others, trial
        self._before = values or {}
        self.made: list[Draw] = []
        self.values: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        of_global_stream = kwargs.get("generator") is None
        if torch.Tag.nondeterministic_seeded not in func.tags or not of_global_stream:
            return func(*args, **kwargs)
        number = len(self.made)

        def drawn(seed: int) -> tuple[Any, Tensor]:
            torch.manual_seed(number * (_TRIALS + 1) * _REDRAWS + seed)
            result = func(*args, **kwargs)
            return result, result[0] if isinstance(result, tuple) else result

        result, tensor = drawn(0)
        end = _torch_streams()
        torch.manual_seed(number * (_TRIALS + 1) * _REDRAWS)
        if all(map(same_state, _torch_streams(), end)):
            return result  # attention without dropout, say
        self.made.append(Draw(func._schema.name, tuple(tensor.shape), _module_around()))
        if number in self._others:
            before = self._before.get(number)
            for seed in range(1, _REDRAWS):
                result, tensor = drawn(self._trial * _REDRAWS + seed)
                if before is None or not torch.equal(tensor, before):
                    break
            if func.overloadpacket in _UNIFORM and self._trial <= 2:
                tensor.fill_(0.0 if self._trial == 1 else 1 - torch.finfo(tensor.dtype).eps)
        elif func is torch.ops.aten.native_dropout.default:
            _alike(result[1], self._copies)
            kept = 1 - args[1] or 1.0
            result = (args[0] * result[1] / kept, result[1])
        elif not isinstance(result, tuple):
            _alike(tensor, self._copies)
        if tensor.numel() <= _KEPT:
            self.values[number] = tensor.detach().clone()
        return result


_UNIFORM = (torch.ops.aten.rand, torch.ops.aten.rand_like, torch.ops.aten.uniform_)
_KEPT = 2**16  # numbers of a draw that is remembered: those that are shared are few


def _alike(tensor: Tensor, copies: int) -> None:
    """Gives all copies what was drawn for the first of them."""
    if tensor.dim() and tensor.numel() and len(tensor) % copies == 0:
        parts = tensor.detach().unflatten(0, (copies, -1))
        parts[1:] = parts[:1].clone()


def _module_around() -> str:
    """Returns the class of the module whose code is running."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if isinstance(owner := frame.f_locals.get("self"), nn.Module):
            return type(owner).__name__
        frame = frame.f_back
    return ""


def refuse_shared_draws(run: Run, who: str, advice: str) -> tuple[Sequence[Tensor], bool]:
    """Refuses a draw of torch that all samples of a physical batch share, if it shows.

    Layer drop at rate 0 draws a number as well, which has no influence: what is shared is given
    other values, and must not show.

    Args:
        run: what is tried, with 2 and with 3 copies of a sample.
        who: what it is, for the error.
        advice: what to do about it.

    Returns:
        What the first pass showed, over 2 copies, and whether torch drew anything.

    Raises:
        PrivacyError: a draw is shared and shows.
    """
    with keeping_random_state():
        seed_all(0)
        with Draws(2) as two:
            shown = run(2)
        if not two.made:
            return shown, False
        seed_all(0)
        with Draws(3) as three:
            run(3)
        shared = _shared(two.made, three.made)
        for trial in range(1, _TRIALS + 1) if shared else ():
            seed_all(0)
            with Draws(2, shared, two.values, trial) as other:
                again = run(2)
            if other.made != two.made or _differ(shown, again):
                raise PrivacyError(
                    f"{who} draws random numbers ({_named([two.made[min(shared)]])}) once for all "
                    "samples of a physical batch. A further example moves others to another "
                    "physical batch and so changes what they draw, which no clipping bounds. "
                    f"{advice}"
                )
    return shown, True


def _shared(two: Sequence[Draw], three: Sequence[Draw]) -> frozenset[int]:
    """Returns which draws of a pass over two copies are not more in one over three copies."""
    if len(two) == len(three):  # one by one, as two texts of other lengths may make equal shapes
        return frozenset(i for i, draw in enumerate(two) if draw == three[i])
    often, more_often = Counter(two), Counter(three)  # drawn in a loop over the samples, perhaps
    alike = {d for d in often.keys() & more_often.keys() if 2 * more_often[d] != 3 * often[d]}
    return frozenset(i for i, draw in enumerate(two) if draw in alike)


def _differ(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return len(left) != len(right) or any(
        a.shape != b.shape
        or not torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-8, equal_nan=True)
        for a, b in zip(left, right, strict=True)
    )


# ---- A model ----


def refuse_noise(losses: Callable[[], Tensor], copies: int) -> None:
    """Refuses a pass in evaluation mode that is not the same twice: comparing it shows nothing.

    Args:
        losses: a pass over copies of one sample, (copies,).
        copies: how many.

    Raises:
        UnsupportedModelError: naming what is drawn, if it is torch that draws.
    """

    def run(seed: int) -> Tensor:
        seed_all(seed)
        return losses().double()

    with keeping_random_state():
        first, second = run(0), run(1)
        if torch.allclose(first, second, rtol=1e-5, atol=1e-8, equal_nan=True):
            return
        with Draws(copies) as draws:
            losses()
    if not draws.made and torch.allclose(first, second, rtol=1e-3, atol=1e-4, equal_nan=True):
        return  # sums in another order
    raise UnsupportedModelError(
        "One and the same sample has another loss at every pass in evaluation mode, as the model "
        f"or its loss draws random numbers there as well ({_named(draws.made[:1])}). Draw them in "
        "training mode only (if self.training: ..., or functional.dropout(x, p, "
        "training=self.training)), from torch's global stream, for each sample. Until then it "
        "cannot be found out whether samples have an influence on each other."
    )


def _named(draws: Sequence[Draw]) -> str:
    """Returns what errors call the first of some draws, if any is torch's."""
    for draw in draws:
        name = draw.operation.rpartition("::")[2].rstrip("_")
        return f"{name} in {draw.module}" if draw.module else name
    return "of numpy or Python, or by a generator of its own"


def examine_coins(run: Run) -> bool:
    """Refuses a forward pass whose random numbers are not each sample's own.

    Args:
        run: a pass over copies of a sample -> losses, and norms of gradients.

    Returns:
        Whether the model sets the streams of numpy or Python to a fixed state (BigBird does).

    Raises:
        PrivacyError: it shares a draw among the samples of a batch, draws from the streams of numpy
            or Python, or sets or rewinds torch's.
    """
    ends: list[Any] = []

    def noting(copies: int) -> Sequence[Tensor]:
        shown = run(copies)
        ends.append(host_streams())
        return shown

    shown, draws = refuse_shared_draws(
        noting,
        "The model",
        "Set the rate of what drops whole layers, or masks or crops alike for a batch, to zero "
        "where the model is made (layerdrop=0.0, say).",
    )
    with keeping_random_state():
        seed_all(1)
        before = host_streams()
        with Draws(2):
            again = noting(2)
    moved = [not same_state(*pair) for pair in zip(before, ends[-1], strict=True)]
    fixed = [same_state(*pair) for pair in zip(ends[0], ends[-1], strict=True)]
    if _differ(shown, again) or any(m and not f for m, f in zip(moved, fixed, strict=True)):
        raise PrivacyError(draws_beside("The model"))
    if draws:
        _refuse_reseeding(run)
    return any(fixed)


def _are_set(starts: Sequence[Sequence[Any]], ends: Sequence[Sequence[Any]], drawn: bool) -> bool:
    """Returns whether streams end where others know, or where they were though they were used.

    Args:
        starts: of several runs, the states of some streams, other ones in every run.
        ends: the states afterwards.
        drawn: whether the runs showed other numbers.
    """
    fixed = any(map(same_state, ends[0], ends[1]))  # though they began otherwise
    return fixed or (drawn and all(map(same_state, starts[0], ends[0])))


def _refuse_reseeding(run: Run) -> None:
    """Refuses a pass that leaves torch's stream in a state that others know, or had before."""
    shown, starts, ends = [], [], []
    for seed in (1, 2):
        with keeping_random_state():
            seed_all(seed)
            starts.append(_torch_streams())
            shown.append(run(2))
            ends.append(_torch_streams())
    if _are_set(starts, ends, _differ(*shown)):
        raise PrivacyError(
            "The model seeds torch's global random numbers during its forward pass, or puts them "
            "back to where they were. Masks of dropout, and the coins of a collator, are then "
            "known, or repeat themselves, and tell who was drawn. Give the model a generator of "
            "its own for that, or take the seeding out."
        )


# ---- A collator ----


def refuse_shared_collation(
    collate: Callable[[list[Any]], Mapping[str, Any]], some: Any, other: Any
) -> None:
    """Refuses a collator whose random numbers are not each example's own.

    Copies of examples whose rows are alike whenever they are collated together, and other rows
    when they are collated again, share a coin.

    Args:
        collate: makes a batch of a list of examples.
        some: an example.
        other: another one, of another length if there is one.

    Raises:
        PrivacyError: it crops, pads or masks all examples of a batch by one coin, or it seeds or
            rewinds a global stream.
    """
    advice = "Toss such coins for each example, in the data set or in the collator."

    def batch(copies: int) -> dict[str, Tensor]:
        both = [copy(example) for example in (some, other) for _ in range(copies)]
        collated = collate(both)  # which may change what it is given
        return {k: v for k, v in collated.items() if isinstance(v, Tensor) and v.dim() > 0}

    refuse_shared_draws(lambda copies: list(batch(copies).values()), "The data collator", advice)
    batches, starts, ends = [], [], []
    for seed in range(_SEEDS):
        with keeping_random_state():
            seed_all(seed)
            starts.append([*_torch_streams(), *host_streams()])
            batches.append(batch(_COPIES))
            ends.append([*_torch_streams(), *host_streams()])
    drawn = any(_differ([*batches[0].values()], [*other.values()]) for other in batches)
    if _are_set(starts, ends, drawn):
        raise PrivacyError(
            "The data collator seeds the global random numbers of torch, numpy or Python, or puts "
            "them back to where they were. What it draws is then known, or repeats itself, and "
            "tells who was drawn. Take the seeding out: these streams are seeded in secret."
        )
    for name, first in batches[0].items():
        rows = [found[name] for found in batches if name in found]
        parts = [part for value in rows for part in value.split(_COPIES)]
        alike = not any(_differ([part[:1].expand_as(part)], [part]) for part in parts)
        if alike and any(_differ([first], [value]) for value in rows):
            raise PrivacyError(
                f"The data collator tosses one coin for all examples of a physical batch, which "
                f"shows in {name!r} (how long they are cropped, on which side they are padded). A "
                "further example moves others to another physical batch, and so changes what they "
                f"are made into, which no clipping bounds. {advice}"
            )


def _torch_streams() -> list[tuple[Tensor]]:
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [(state,) for state in (torch.get_rng_state(), *on_gpus)]
