"""Whose the random numbers are that a forward pass draws.

One example more must not change the joint law of what the others contribute. So every coin is an
example's own (a dropout mask), or one for the whole logical step, or public. One for each physical
batch is none of these (layer drop, one crop size a batch): the examples of a physical batch share
it, an example more moves others across the borders of physical batches, and the sum of their
clipped gradients gets another law, in which no single contribution moved at all. Nor is a number an
example's own that was drawn for it and has an influence on others: in a mean, by its rank.

Neither can be read off the code of a model, but both off its passes over copies of one sample. What
is drawn for each copy grows in proportion from two copies to three. And if what is drawn changes in
a further pass, a copy that keeps what was drawn for it must show the same as before, whatever the
others and all of them get. It shows its loss and, of every parameter, the inner product of its
gradient with a random direction: a norm would not tell a gradient from its negative.

Shapes: B copies in a batch.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import FrameType
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from dp_grape_hf.errors import PrivacyError, UnsupportedModelError
from dp_grape_hf.gradients.checks.guards import (
    DRAWS_BESIDE,
    TorchDraws,
    host_streams,
    keeping_random_state,
    same_state,
    seed_all,
    seed_torch,
    torch_streams,
)
from dp_grape_hf.gradients.checks.sketches import Prints, Tolerance, computes_in_16_bits, differing
from dp_grape_hf.gradients.forms import PerSampleGradient
from dp_grape_hf.sharding import local, reshard, rows_here

# ---- Draws of torch ----

_EACH = {
    *("rand", "rand_like", "uniform", "randn", "randn_like", "normal", "bernoulli", "randint"),
    *("randint_like", "random", "exponential", "geometric", "cauchy", "log_normal", "poisson"),
    *("binomial", "_standard_gamma", "native_dropout", "rrelu_with_noise", "multinomial"),
}
"""What draws each number, or row, whatever the others are; ``randperm`` does not."""

_UNIFORM = {"rand", "rand_like", "uniform", "bernoulli"}
"""What has bounds. All that it can decide shows there."""

_SHARED = _UNIFORM
"""What may be drawn once for a batch, if it changes nothing: a coin that decides whether a layer is
dropped, at a rate of zero."""

_ROWS = 3  # copies in the passes that are compared
_FIRST, _SECOND, _LEAST, _MOST = range(4)
"""Values of a draw. The second differ from the first, and the last from those before it. Of what is
uniform the last two are its bounds, so that a coin shows that falls rarely."""

Levels = tuple[int, ...]
"""Which values each of three copies gets of what is drawn for it, and all get of what is shared."""

_PATTERNS: tuple[Levels, ...] = (
    *[(_FIRST, _FIRST, _FIRST, _FIRST)] * 2,
    (_FIRST, _SECOND, _SECOND, _LEAST),
    (_SECOND, _FIRST, _SECOND, _MOST),
    (_SECOND, _SECOND, _FIRST, _SECOND),
    *((*each, _LEAST + sum(each) % 2) for each in product((_LEAST, _MOST), repeat=_ROWS)),
)
_REPEATS = 5  # of a pass in which nothing may change
_REDRAWS = 200  # until few numbers differ from those before
_FEW = 2**12
_PASSES = "dp_grape_hf.gradients.passes"  # where modules run for one sample after another


class Place(NamedTuple):
    """Where numbers are drawn: in which module and line of it, how, in how many dimensions."""

    path: str
    line: int
    operation: str
    dims: int


class Key(NamedTuple):
    """A draw: its place, for which sample if an engine runs them in turn, and how many before."""

    place: Place
    sample: int | None
    number: int


class Draw(NamedTuple):
    """What a draw filled, in which class of module, and whether torch's dropout made it."""

    operation: str
    module: str
    shapes: tuple[tuple[int, ...], ...]
    drops: bool


@dataclass(frozen=True)
class Parts:
    """Whose the numbers of a draw are of which every copy has as many.

    Args:
        shapes: what it fills for three copies.
        dims: of each tensor, the dimension in which it has as many times more numbers, those of one
            copy after those of another.
    """

    shapes: tuple[tuple[int, ...], ...]
    dims: tuple[int, ...]


Owners = Mapping[Key, Parts | int | None]
"""Whose a draw is: of each copy in part, of one copy alone, or None where all share it."""


class Draws(TorchDraws):
    """Notes what torch's global streams are drawn from inside, and chooses what they give.

    A draw is the same in two passes that give it the same values, whatever was drawn before it. If
    the model puts back the state of a stream and draws again, to recompute activations, it is given
    what it was.

    What torch's dropout draws is seen by no other code. So where the number of such draws varies
    with the values of copies (in the experts of a mixture), nothing is dropped.

    Args:
        copies: how many copies of one sample the batch is.
        owners: whose the draws are; while that is not known, copies are given the same.
        levels: which values each gets.
        exceptions: of some draws, which values each gets instead.
        paths: id of a module -> its path in the model.
        varying: places whose draws are of other numbers in other passes; more are added.
    """

    def __init__(
        self,
        copies: int,
        owners: Owners | None = None,
        levels: Levels = (),
        exceptions: Mapping[Key, Levels] | None = None,
        *,
        paths: Mapping[int, str] | None = None,
        varying: set[Place] | None = None,
    ) -> None:
        super().__init__()
        self._copies, self._owners, self._levels = copies, owners, levels
        self._exceptions, self._paths = exceptions or {}, paths or {}
        self._varying = set() if varying is None else varying
        self._known: dict[tuple[int, Place], Key] = {}  # by the state that a draw began with
        self._often: Counter[tuple[Place, int | None]] = Counter()
        self.made: dict[Key, Draw] = {}
        self.foreign = False  # whether the model drew from another generator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        generator = (kwargs or {}).get("generator")
        if generator is not None and not _is_global(generator):
            self.foreign |= not _is_ours()
        name = func._schema.name
        attends = "attention" in name and "backward" in name
        with _repeatable() if attends else contextlib.nullcontext():
            return super().__torch_dispatch__(func, types, args, kwargs)

    def drawn(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Notes a draw, and gives the copies what they are to get of it."""
        state, tensors = torch.initial_seed(), _filled(func, args, result)
        key = self._note(func._schema.name.rpartition("::")[2].rstrip("_"), state, tensors)
        operation = key.place.operation

        def draw(*seed: int) -> Any:
            seed_torch(_seed(key, *seed))
            return func(*args, **kwargs)

        if isinstance(result, tuple) and operation not in _EACH:  # attention: nobody sees its mask
            result = draw()
        elif self._owners is None:
            result = draw()
            for tensor in _filled(func, args, result):
                _alike(tensor, self._copies)
        elif self._varies(key, self._owners) and self.made[key].drops:
            tensors[-1].fill_(1)
            if operation == "native_dropout":
                tensors[0].copy_(args[0])
        else:
            shared = key.sample is None and self._owners.get(key) is None
            bounds = _bounds(operation, args, tensors[0].dtype, shared)
            self._fill(key, tensors, lambda *seed: _filled(func, args, draw(*seed)), bounds)
        seed_torch(state + 1)
        return result

    def _note(self, operation: str, state: int, tensors: Sequence[Tensor]) -> Key:
        """Notes a draw that began with that state of the stream."""
        around = _around(self._paths)
        place = Place(around.path, around.line, operation, tensors[0].dim())
        own = place, around.sample
        key = self._known.setdefault((state, place), Key(*own, self._often[own]))
        self._often[own] += key not in self.made
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        self.made[key] = Draw(operation, around.module, shapes, around.drops)
        return key

    def _varies(self, key: Key, owners: Owners) -> bool:
        """Returns whether draws of that place are of other numbers in other passes."""
        owner = owners.get(key)
        known = key in owners and not (
            isinstance(owner, Parts) and owner.shapes != self.made[key].shapes
        )
        if key.sample is None and not known:
            self._varying.add(key.place)
        return key.place in self._varying

    def _fill(
        self,
        key: Key,
        tensors: Sequence[Tensor],
        draw: Callable[[int, int], Sequence[Tensor]],
        bounds: tuple[float, float] | None,
    ) -> None:
        """Writes the values that each is to get of a draw into its tensors."""
        owner: Parts | int | None = key.sample
        if owner is None and self._owners and key.place not in self._varying:
            owner = self._owners[key]
        levels = self._exceptions.get(key, self._levels)

        def parts(values: Sequence[Tensor]) -> list[list[Tensor]]:
            """Returns what each has of them: one all of it, if it is one's or everyone's."""
            if not isinstance(owner, Parts):
                return [list(values)]
            pairs = zip(values, owner.dims, strict=True)
            split = [(value.unflatten(dim, (_ROWS, -1)), dim) for value, dim in pairs]
            return [[value.select(dim, row) for value, dim in split] for row in range(_ROWS)]

        def at(level: int, before: Sequence[list[Tensor]] = ()) -> list[list[Tensor]]:
            values = [value.clone() for value in draw(level, 0)]
            if bounds is not None and level in (_LEAST, _MOST):
                values[0].fill_(bounds[level - _LEAST])
            found = parts(values)
            for attempt in range(1, _REDRAWS if before and values[0].numel() <= _FEW else 1):
                pairs = enumerate(zip(found, before, strict=True))
                same = [row for row, (own, old) in pairs if torch.equal(own[0], old[0])]
                fresh = parts(draw(level, attempt)) if same else []
                for row in same:
                    for own, new in zip(found[row], fresh[row], strict=True):
                        own.copy_(new)
            return found

        wanted = levels[:-1]
        if not isinstance(owner, Parts):
            wanted = (levels[-1] if owner is None else levels[owner],)
        values = {
            level: at(level, at(level - 1) if level in (_SECOND, _MOST) else ())
            for level in {*wanted}
        }
        for row, (level, own) in enumerate(zip(wanted, parts(tensors), strict=True)):
            for tensor, value in zip(own, values[level][row], strict=True):
                tensor.copy_(value)


@contextlib.contextmanager
def _repeatable() -> Iterator[None]:
    """Lets kernels on GPUs sum in one order.

    Those of attention do not, backward, unless told to. In many layers of bfloat16 what that
    rounds away grows to 1 % of a gradient.
    """
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def _seed(*what: Any) -> int:
    """Returns a seed that is a function of some names and numbers, in all processes."""
    return crc32(repr(what).encode())


def _is_global(generator: Any) -> bool:
    on_gpus = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return generator._cdata in {g._cdata for g in (torch.default_generator, *on_gpus)}


def _is_ours() -> bool:
    """Whether a draw is one of projections and directions, which are public."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals["__name__"].startswith("torch."):
        frame = frame.f_back
    ours = f"{__name__.partition('.')[0]}.projections."
    return frame is not None and frame.f_globals["__name__"].startswith(ours)


def _filled(func: Any, args: Sequence[Any], result: Any) -> list[Tensor]:
    """Returns the tensors that a draw can be seen in: those it returns, and those it writes to."""
    given = zip(args, func._schema.arguments, strict=False)
    written = [x for x, argument in given if argument.is_write]
    return [x for x in (*tree_leaves(result), *written) if isinstance(x, Tensor)]


def _bounds(
    operation: str, args: Sequence[Any], dtype: torch.dtype, shared: bool
) -> tuple[float, float] | None:
    """Returns the least number of a uniform draw that has a logarithm, and the largest.

    A coin that all share falls on either side; all masks of dropout on one side would hide the
    model.
    """
    if operation not in _UNIFORM or (operation == "bernoulli" and not shared):
        return None
    if operation == "bernoulli":
        return 0.0, 1.0
    given = (*args[1:], *(0.0, 1.0)[len(args) - 1 :]) if operation == "uniform" else (0.0, 1.0)
    low, high = given[0], given[1]
    return low + (high - low) * 2**-24, high - (high - low) * torch.finfo(dtype).eps


def _alike(tensor: Tensor, copies: int) -> None:
    """Gives all copies what was drawn for the first of them."""
    if tensor.dim() and tensor.numel() and len(tensor) % copies == 0:
        parts = tensor.detach().unflatten(0, (copies, -1))
        parts[1:] = parts[:1].clone()


class _Around(NamedTuple):
    """Whose code is running: a module of the model, and the line of it that does."""

    path: str
    line: int
    module: str  # the class of the innermost module, which may have been made on the spot
    sample: int | None  # that an engine runs alone
    drops: bool  # whether torch's dropout is running


def _around(paths: Mapping[int, str]) -> _Around:
    frame: FrameType | None = sys._getframe(1)  # its own would hold itself, and all that called it
    path, line, module, sample, drops = "", 0, "", None, False
    while frame is not None:
        drops |= not module and frame.f_code is functional.dropout.__code__
        if isinstance(owner := frame.f_locals.get("self"), nn.Module):
            module = module or type(owner).__name__
            if not line and id(owner) in paths:
                path, line = paths[id(owner)], frame.f_lineno
        elif frame.f_code.co_name == "_one_by_one" and frame.f_globals["__name__"] == _PASSES:
            sample = frame.f_locals["i"]
        frame = frame.f_back
    return _Around(path, line, module, sample, drops)


def _owners(two: Mapping[Key, Draw], three: Mapping[Key, Draw]) -> Owners:
    """Returns whose the draws of a pass over three copies are, given one over two.

    Those of samples that run alone are left out, and those whose numbers follow neither from the
    number of copies nor are always as many.
    """
    few, many = (Counter(key.place for key in made) for made in (two, three))
    owners: dict[Key, Parts | int | None] = {}
    for key, draw in three.items():
        count = many[key.place]
        if key.sample is None and key in two and few[key.place] == count:
            parts = _parts(two[key], draw)
            if parts is not None or two[key].shapes == draw.shapes:
                owners[key] = parts
        elif key.sample is None and 2 * count == _ROWS * few[key.place]:  # in a loop over samples
            owners[key] = key.number // (count // _ROWS)
    return owners


def _parts(two: Draw, three: Draw) -> Parts | None:
    """Returns whose the numbers of one draw are, if those of each copy are its own."""
    dims = []
    for few, many in zip(two.shapes, three.shapes, strict=True):
        grown = [dim for dim, size in enumerate(many) if size != few[dim]]
        if len(grown) != 1 or 2 * many[grown[0]] != _ROWS * few[grown[0]]:
            return None
        dims += grown
    if three.operation not in _EACH or (three.operation == "multinomial" and len(many) < 2):
        return None
    return Parts(three.shapes, tuple(dims))


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
    named = _named(next(iter(draws.made.values()), None))
    raise UnsupportedModelError(
        "One and the same sample has another loss at every pass in evaluation mode, as the model "
        f"or its loss draws random numbers there as well ({named}). Draw them in "
        "training mode only (if self.training: ..., or functional.dropout(x, p, "
        "training=self.training)), from torch's global stream, for each sample. Until then it "
        "cannot be found out whether samples have an influence on each other."
    )


def _named(draw: Draw | None) -> str:
    """Returns what errors call a draw, if it is torch's."""
    if draw is None:
        return "of numpy or Python, or by a generator of its own"
    return f"{draw.operation} in {draw.module}" if draw.module else draw.operation


Run = Callable[[int], tuple[Tensor, Mapping[str, PerSampleGradient]]]
"""A number of copies of one sample -> their losses (B,), and gradients by name."""


class Shown(NamedTuple):
    """What a pass shows of each copy."""

    losses: Tensor  # (B,)
    prints: Prints  # of the gradients

    def says_something(self) -> bool:
        """Whether a copy has a finite loss, and gradients that are finite and not all zero."""
        whole = self.prints.marks(self.prints.names)[..., 1].norm(dim=1)
        return bool((whole.isfinite() & (whole > 0) & self.losses.isfinite()).any())


def _changed(row: int, some: Shown, other: Shown, tolerance: Tolerance) -> bool:
    """Returns whether a copy shows something else, by more than rounding."""
    names = sorted({*some.prints.names, *other.prints.names})
    before, now = (shown.prints.marks(names)[row : row + 1] for shown in (some, other))
    finite = [bool(marks.isfinite().all()) for marks in (before, now)]
    if not all(finite):
        return any(finite)  # what is not finite contributes nothing
    if bool(differing(before, now, tolerance).any()):
        return True
    losses = some.losses[row], other.losses[row]
    error = tolerance.error
    return not torch.isclose(*losses, rtol=error, atol=error / 10, equal_nan=True)


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
                numbers = torch.randn(
                    parameter.shape, generator=torch.Generator().manual_seed(_seed(name))
                )
                values.copy_(_SMALL * rows_here(numbers, parameter))
        yield
    finally:
        reshard(model)
        for values, zeros in kept:
            values.copy_(zeros)


_SMALL = 0.02
_TOLERANCES = {
    low: Tolerance(error, floor=1e-2, loss=0.0, change=0.0)
    for low, error in ((False, 1e-5), (True, 1e-2))
}
"""Of passes over batches of one shape, by whether there are numbers of 16 bits."""


class _Passes:
    """Makes passes, each of which begins with other states of all streams."""

    def __init__(self, run: Run, model: nn.Module) -> None:
        self._run = run
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._varying: set[Place] = set()
        self.drawn: dict[Key, Draw] = {}
        self.silent = True  # whether no pass has shown anything
        self._tolerance = _TOLERANCES[computes_in_16_bits(model)]
        self._states: list[tuple[Any, ...]] = []  # of torch and of the hosts, before and after

    def __call__(self, copies: int, *chosen: Any) -> tuple[Shown, dict[Key, Draw]]:
        """Returns what a pass shows and draws; what is chosen is as in ``Draws``."""
        seed_all(len(self._states))
        seed_torch(len(self._states) << 20)
        before = torch_streams(), host_streams()
        with Draws(copies, *chosen, paths=self._paths, varying=self._varying) as draws:
            losses, gradients = self._run(copies)
        self._states.append((*before, torch_streams(), host_streams()))
        self.drawn |= draws.made
        if draws.foreign:
            raise PrivacyError(DRAWS_BESIDE)
        prints = Prints()
        prints(gradients)
        shown = Shown(losses.detach().double().cpu(), prints)
        self.silent &= not shown.says_something()
        return shown, draws.made

    def fault(
        self, owners: Owners, patterns: Sequence[Levels], first: Shown | None = None
    ) -> _Fault | None:
        """Returns in what a copy changes though it keeps what was drawn for it.

        ``first`` is what a pass showed with the first of the patterns.
        """
        seen: dict[tuple[int, int], tuple[Levels, Shown]] = {}
        if first is not None:
            seen = {(row, _FIRST): (patterns[0], first) for row in range(_ROWS)}
        for levels in patterns:
            varying = len(self._varying)
            shown, _ = self(_ROWS, owners, levels)
            if len(self._varying) > varying:
                return self.fault(owners, patterns, first)
            for row in range(_ROWS):
                before, known = seen.setdefault((row, levels[row]), (levels, shown))
                if _changed(row, known, shown, self._tolerance):
                    return _Fault(row, before, levels, known)
            if self.silent and len(seen) == 2 * _ROWS:
                break  # with neither of two values
        return None

    def culprit(self, owners: Owners, fault: _Fault) -> Key:
        """Returns a draw that is at fault, by halves."""
        keys = list(self.drawn)
        while len(keys) > 1:
            half = keys[: len(keys) // 2]
            exceptions = dict.fromkeys(half, fault.levels)
            shown, _ = self(_ROWS, owners, fault.before, exceptions)
            found = _changed(fault.row, fault.known, shown, self._tolerance)
            keys = half if found else keys[len(half) :]
        return keys[0]

    def refuse_seeding(self, drawn: bool) -> bool:
        """Refuses streams that the passes leave as others know; returns whether the host's are."""
        (start, _, end, first_hosts), (_, hosts_before, last, hosts) = self._states[-2:]
        fixed = [*map(same_state, first_hosts, hosts)]  # though they began otherwise
        kept = [*map(same_state, hosts_before, hosts)]
        if any(not k and not f for k, f in zip(kept, fixed, strict=True)):
            raise PrivacyError(DRAWS_BESIDE)
        rewound = drawn and all(map(same_state, start, end))
        if rewound or any(map(same_state, end, last)):
            raise PrivacyError(
                "The model seeds torch's global random numbers during its forward pass, or puts "
                "them back to where they were. Masks of dropout, and the coins of a collator, are "
                "then known, or repeat themselves, and tell who was drawn. Take the seeding out."
            )
        return any(fixed)


class _Fault(NamedTuple):
    """A copy that shows something else than before, though it kept what was drawn for it."""

    row: int
    before: Levels
    levels: Levels
    known: Shown  # with the levels before


def examine_coins(run: Run, model: nn.Module) -> bool | None:
    """Refuses a forward pass whose random numbers are not each sample's own.

    That takes 15 passes over three copies, one of them over two; 5 if torch draws nothing; more
    where the number of draws varies, and to tell what is refused.

    A coin of another kind, of the clock or of the operating system, shows in passes that begin
    alike. If it is fair and tossed once a pass, it comes out the same five times, and so goes
    unnoticed, with probability 1/16.

    Args:
        run: a pass over copies of a sample.
        model: what runs.

    Returns:
        Whether the model sets the streams of numpy or Python to a fixed state (BigBird does); None
        if this sample has no gradient that could show anything.

    Raises:
        PrivacyError: it shares a draw among the samples of a batch, has a generator of its own,
            draws from the streams of numpy or Python, or sets or rewinds torch's.
    """
    with keeping_random_state(), without_zeros(model):
        passes = _Passes(run, model)
        shown, three = passes(_ROWS)
        if not three:
            if passes.silent:
                return None
            if passes.fault({}, _PATTERNS[:1] * (_REPEATS - 1), shown) is not None:
                raise PrivacyError(DRAWS_BESIDE)
            return passes.refuse_seeding(drawn=False)
        _, two = passes(2)
        owners = _owners(two, three)
        if (fault := passes.fault(owners, _PATTERNS)) is not None:
            same = [fault.before] * _REPEATS
            if fault.before == fault.levels or passes.fault(owners, same) is not None:
                raise PrivacyError(DRAWS_BESIDE)
            key = passes.culprit(owners, fault)
            raise PrivacyError(_shared(passes.drawn[key], owners.get(key, key.sample)))
        for key, owner in owners.items():  # which may decide something, and hardly ever does
            if owner is None and key.place.operation not in _SHARED:
                raise PrivacyError(_shared(three[key], None))
        if passes.silent:
            return None
        return passes.refuse_seeding(drawn=True)


def _shared(draw: Draw, owner: Parts | int | None) -> str:
    """Returns why a model with that draw is refused."""
    how, what = (
        (
            "once for all samples of a physical batch",
            "Set the rate of what drops whole layers, or masks or crops alike for a batch, to zero "
            "where the model is made (layerdrop=0.0, say).",
        )
        if owner is None
        else (
            "for each sample of a physical batch, and has others use them as well (their mean, "
            "their order, one of them for all)",
            "Let what is drawn for a sample have an influence on that sample alone.",
        )
    )
    return (
        f"The model draws random numbers ({_named(draw)}) {how}. A further example moves others "
        f"to another physical batch and so changes what they draw, which no clipping bounds. {what}"
    )
