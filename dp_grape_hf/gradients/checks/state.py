"""Checks that a model, a loss, a collator or a data set does not remember examples.

A running statistic, a generator with a separate seed, or a cache that grows with the longest text
carries information from one example to later ones. Clipping bounds the contribution of an example
to a sum. It does not bound how an example changes the gradients of others. So an object that sees
private examples must have the same state before and after.

``StateGuard`` walks once through everything that its objects refer to, and lists the places where
values can change: attributes, containers, tensors, random generators and variables of functions.
It then compares two snapshots of these places. A snapshot holds references and counters, so it is
cheap. A thorough snapshot also has a checksum of each tensor.

Not seen: values inside C++ objects and open files, changes inside the entries of containers with
more than ``_LARGE`` of them, changes of containers and arrays above ``_HUGE`` that keep their size,
and variables of installed libraries.
"""

from __future__ import annotations

import functools
import pickle
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain, islice
from operator import attrgetter, length_hint
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dp_grape_hf.errors import PrivacyError, UnsupportedModelError
from dp_grape_hf.gradients.checks.guards import in_mode, keeping_random_state
from dp_grape_hf.gradients.rows import rows_of
from dp_grape_hf.projections import on_inputs
from dp_grape_hf.sharding import is_sharded, local, reshard

_LARGE = 256  # entries; those of a larger container are compared, but not walked through
_HUGE = 2**17  # entries, or numbers of a numpy array; only the size of a larger one is compared
_MOST_PLACES = 20_000  # of one object; bounds the time of a walk (about 0.1 s) and of a snapshot
_COLUMNS = 1024  # columns in which the bits of a tensor are added up

_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size),
    *(types.ModuleType, types.BuiltinFunctionType, range, slice),
)
"""Types of values that cannot change, and modules. Functions list the module variables they use."""

# Class names (so that no class has to be imported) of objects whose memory does not reach their
# results, or that take no part in computing a row.
_LEFT_OUT = {
    *("PreTrainedTokenizerBase", "ProcessorMixin", "ImageProcessingMixin"),
    *("FeatureExtractionMixin", "TrainingArguments", "Logger", "SecretGenerator"),
    *("Ledger", "Table", "TestCase"),
}
_GENERATORS: tuple[type, ...] = (
    *(torch.Generator, random.Random),
    *(np.random.Generator, np.random.BitGenerator, np.random.RandomState),
)
_INTERNALS = frozenset(vars(nn.Module()))  # attributes that torch gives every module

_ORDINARY = {Tensor, nn.Parameter}
"""Types of tensors whose address does not change. A pass may move a quantised weight."""

Read = Callable[[], Any]
"""Returns the current values of a place: a tuple, or a dictionary if the values have names."""


class _Snapshot(NamedTuple):
    values: list[Any]  # of each place
    tensors: list[Tensor]
    numbers: list[list[int]]  # addresses, versions and checksums of the tensors; see ``_numbers``
    thorough: bool


class StateGuard:
    """Compare the state of some objects before and after they see private examples.

    Args:
        **objects: the objects, by their names in messages; ``_`` stands for a space.
    """

    def __init__(self, **objects: Any) -> None:
        self._objects = objects
        self._places: list[tuple[str, Read]] = []  # with their names in messages
        self._tensors: list[Tensor] = []
        self._titles: list[str] = []  # the names of these tensors
        self._walked: list[Any] | None = None  # the values at the last walk
        self._steady = 0  # number of places before those of a trainer, which change in each step
        self.changed_before = True  # whether such places changed before the last snapshot

    def __reduce__(self) -> Any:
        return functools.partial(StateGuard, **self._objects), ()  # another process walks again

    @contextmanager
    def unchanged(self, thorough: bool = False) -> Iterator[None]:
        """Compare the state of the objects before and after the code inside.

        If a check inside fails and the state has changed, the error names the change.

        Args:
            thorough: as in ``snapshot``.

        Raises:
            PrivacyError: if the state has changed. The message names the object and the attribute.
        """
        before = self.snapshot(thorough)
        try:
            yield
        except PrivacyError:
            self.compare(before)
            raise
        self.compare(before)

    def snapshot(self, thorough: bool = False) -> _Snapshot:
        """Return the current state.

        Args:
            thorough: whether to compute checksums of all tensors. They detect a change through
                ``.data``, which torch's version counter does not. They take 0.06 s for 100 million
                numbers.
        """
        self._reshard()
        values, walked, size = self._read(), self._walked, self._steady
        self.changed_before = walked is None or not _same(values[:size], walked[:size])
        if walked is None or self.changed_before or not _same(values[size:], walked[size:]):
            values = self._walk()
        return _Snapshot(values, self._tensors, _numbers(self._tensors, thorough), thorough)

    def compare(self, before: _Snapshot) -> None:
        """Compare the current state with the last snapshot.

        Raises:
            PrivacyError: if they differ. The message names the object and the attribute.
        """
        self._reshard()
        if (numbers := _numbers(before.tensors, before.thorough)) != before.numbers:
            was_and_now = (zip(*columns, strict=True) for columns in (before.numbers, numbers))
            each = zip(self._titles, self._tensors, *was_and_now, strict=True)
            self._refuse(*next(named for *named, was, now in each if was != now))
        values = self._read()
        if not _same(values, before.values):
            for (name, _), old, new in zip(self._places, before.values, values, strict=True):
                if (changed := _changed(name, old, new)) is not None:
                    self._refuse(changed)
            self._walked = None  # all values are equal, but some are other objects

    def _refuse(self, name: str, tensor: Tensor | None = None) -> None:
        title, _, path = name.partition(".")
        thing = self._objects[title]
        what = f"{path} of the " if path else "the "
        thing = getattr(thing, "data_collator", thing)  # without the Trainer's wrapper
        kind = "" if isinstance(thing, types.FunctionType) else f" ({type(thing).__name__})"
        saved = isinstance(thing, nn.Module) and any(
            tensor is value for value in thing.state_dict(keep_vars=True).values()
        )
        published = (
            "It is saved with the weights, and would publish a statistic of the training data "
            "without noise. "
            if saved
            else ""
        )
        raise (UnsupportedModelError if title == "model" else PrivacyError)(
            f"Private examples changed {what}{title.replace('_', ' ')}{kind}. {published}Such a "
            "memory lets one example change the gradients of later ones, and clipping does not "
            f"bound that. {_REMEDIES.get(title, _REMEDY)} Nothing of this step was released."
        )

    def _reshard(self) -> None:
        for thing in self._objects.values():
            if isinstance(thing, nn.Module) and is_sharded(thing):
                reshard(thing)

    # ---- Places ----

    def _read(self) -> list[Any]:
        return [read() for _, read in self._places]

    def _walk(self) -> list[Any]:
        """List all places and tensors; return their current values."""
        self._places, self._tensors, self._titles = [], [], []
        seen: dict[int, Any] = {}
        trainers: list[int] = []
        for root in self._objects.items():  # a model first, because its loss may refer to it
            waiting, most = deque([root]), len(self._places) + _MOST_PLACES
            while waiting and len(self._places) < most:
                name, value = waiting.popleft()
                if isinstance(value, _PLAIN) or id(value) in seen:
                    continue
                seen[id(value)] = value
                if isinstance(value, Tensor):
                    self._tensors.append(value)
                    self._titles.append(name)
                    continue
                if _is_trainer(value):
                    trainers.append(len(self._places))
                reads, inside = _explore(name, value)
                self._places += [(name, read) for read in reads]
                waiting.extend(inside)
        self._steady = min(trainers, default=len(self._places))
        self._walked = self._read()
        return self._walked


_REMEDY = (
    "Keep no state between examples. Draw random numbers from the global streams of torch, numpy "
    "or Python, which the trainer seeds in secret for each example; compute caches and statistics "
    "before training, or from public data."
)
_REMEDIES = {
    "model": "Switch that memory off in the model (track_running_stats=False, for example), or "
    "make it a constant before training. Draw random numbers from torch's global stream.",
    "loss": "Compute each loss from its own example and from constants.",
}


# ---- The places of an object ----

_Inside = list[tuple[str, Any]]


def _explore(name: str, value: Any) -> tuple[list[Read], _Inside]:
    """Return the places of one object, and the objects that it refers to, with names."""
    if isinstance(value, nn.Module):
        return _of_module(name, value)
    if _is_trainer(value):
        return _of_trainer(name, value)
    if _is_left_out(value) or isinstance(value, random.SystemRandom):
        return [], []
    match value:
        case torch.Generator():
            return [lambda: (bytes(value.get_state().tolist()),)], []
        case random.Random():
            return [value.getstate], []
        case np.random.Generator() | np.random.BitGenerator() | np.random.RandomState():
            return [lambda: (pickle.dumps(value),)], []
        case np.ndarray():
            small = value.size <= _HUGE and not value.dtype.hasobject
            return [lambda: (value.tobytes(),)] if small else [], []
        case bytearray():
            return [lambda: (bytes(value),)], []
        case dict() | list() | tuple() | set() | frozenset() | deque():
            return _of_container(name, value)
        case types.MethodType():
            owner, function = value.__self__, value.__func__
            if _is_trainer(owner) and _is_installed(function.__module__):
                return [], []  # TRL's loss, which no training batch reaches, counts tokens
            return [], [(name, owner), (name, function)]
        case types.FunctionType():
            return _of_function(name, value)
        case functools.partial():
            return [], [(name, value.func), (name, value.args), (name, value.keywords)]
        case types.GeneratorType():
            read = functools.partial(_read_running, value)
            return [read], [(name, item) for item in read()]
        case type():
            bases = [base for base in value.__mro__ if not _is_installed(base.__module__)]
            inside = [(name, item) for base in bases for item in vars(base).values()]
            return [functools.partial(dict, vars(base)) for base in bases], inside
        case property() | staticmethod() | classmethod():
            return [], [(name, getattr(value, "fget", None) or getattr(value, "__func__", None))]
    if hasattr(value, "__next__") and type(value).__module__ in ("itertools", "builtins"):
        return [lambda: (repr(value), length_hint(value))], []
    return _of_object(name, value)


def _of_module(name: str, module: nn.Module) -> tuple[list[Read], _Inside]:
    """Return the places of a module, and the objects that it and the user's hooks refer to.

    Attributes of torch's layers are constants, and left out unless a hook may set them. Attributes
    of a layer with a quantised weight are left out too: they describe the weight's memory layout.
    """
    own, cls = vars(module), type(module).__module__
    hooks = [*own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values()]
    hooks = [hook for hook in hooks if not _is_installed(getattr(hook, "__module__", None))]
    inside: _Inside = [(name, type(module)), *((f"{name}.hook", hook) for hook in hooks)]
    constant = any(map(_is_quantised, own["_parameters"].values())) or (
        cls.startswith("torch.nn.modules.") and not hooks
    )
    reads: list[Read] = [] if constant else [functools.partial(dict, own)]
    for kind in ("_parameters", "_buffers", "_modules"):
        if parts := own[kind]:
            if kind != "_modules" or not _is_installed(cls):
                reads.append(functools.partial(dict, parts))
            inside += _named(name, parts)
    if not constant:
        inside += _named(name, {n: v for n, v in own.items() if n not in _INTERNALS})
    return reads, inside


def _is_quantised(parameter: Any) -> bool:
    """Return whether a parameter is a frozen weight of a quantisation library's class."""
    frozen = isinstance(parameter, nn.Parameter) and not parameter.requires_grad
    return frozen and not isinstance(parameter, DTensor) and type(parameter) is not nn.Parameter


def _of_trainer(name: str, trainer: Any) -> tuple[list[Read], _Inside]:
    """Return the attributes of a trainer whose ``compute_loss`` is the loss.

    Only containers, arrays, generators, modules and objects of the user's classes are walked
    through: a subclass may remember examples in them.
    """
    attributes = vars(trainer)
    simple = (list, dict, set, deque, Tensor, np.ndarray, nn.Module, *_GENERATORS)
    kept = {
        n: v
        for n, v in attributes.items()
        if isinstance(v, simple) or not _is_installed(type(v).__module__)
    }
    reads: list[Read] = [functools.partial(dict, attributes)]
    reads += [functools.partial(dict, vars(part)) for part in (trainer.state, trainer.args)]
    return reads, _named(name, kept)


def _of_container(name: str, value: Any) -> tuple[list[Read], _Inside]:
    # Entries have the name of the container, because a key may be a value of an example.
    if len(value) > _HUGE:
        return [lambda: (len(value),)], []
    reads: list[Read] = [] if isinstance(value, tuple | frozenset) else [lambda: tuple(value)]
    inside = value
    if isinstance(value, dict):
        added = getattr(value, "__dict__", {})  # attributes of a subclass
        reads, inside = [lambda: (*value, *value.values())], [*value.values(), *added.values()]
    return reads, [(name, item) for item in inside] if len(value) <= _LARGE else []


def _of_function(name: str, function: types.FunctionType) -> tuple[list[Read], _Inside]:
    """Return the variables that a function of the user's code refers to."""
    if _is_installed(function.__module__):
        return [], []
    code, cells, everywhere = function.__code__, function.__closure__ or (), function.__globals__
    names = [n for n in _names_in(code) if n in everywhere]
    inside: _Inside = [(name, part) for part in (function.__defaults__, function.__kwdefaults__)]
    inside += [(name, part) for part in function.__dict__.values()]
    inside += [(name, _content(cell)) for cell in cells]
    inside += [(f"{name}.{n}", everywhere[n]) for n in names]
    return [
        lambda: dict(zip(code.co_freevars, map(_content, cells), strict=False)),
        lambda: {n: everywhere.get(n) for n in names},
    ], inside


def _read_running(running: types.GeneratorType[Any, Any, Any]) -> tuple[Any, ...]:
    frame = running.gi_frame
    return () if frame is None else (frame.f_lasti, *frame.f_locals.values())


def _of_object(name: str, value: Any) -> tuple[list[Read], _Inside]:
    if hasattr(value, "_format_kwargs") and hasattr(value, "_fingerprint"):  # datasets.Dataset
        return [], [(f"{name}.transform", value._format_kwargs)]
    if type(value).__name__ == "RemoveColumnsCollator":  # it remembers whether it has logged
        return [], [(name, value.data_collator)]
    slots = [n for base in type(value).__mro__ for n in _slots(base)]
    if slots and not _is_installed(type(value).__module__):
        read = functools.partial(_read_slots, value, slots)
        return [read], [(name, type(value)), *((name, item) for item in read().values())]
    own = getattr(value, "__dict__", None)
    if not isinstance(own, dict):
        return [], []
    return [functools.partial(dict, own)], [(name, type(value)), *_named(name, own)]


def _slots(base: type) -> tuple[str, ...]:
    found = vars(base).get("__slots__", ())
    names = (found,) if isinstance(found, str) else tuple(found)
    return tuple(n for n in names if n not in ("__dict__", "__weakref__"))


def _read_slots(value: Any, slots: list[str]) -> dict[str, Any]:
    return {name: getattr(value, name, None) for name in slots}


def _named(name: str, own: Mapping[str, Any]) -> _Inside:
    return [(f"{name}.{key}", value) for key, value in own.items()]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return None


def _names_in(code: types.CodeType) -> Iterator[str]:
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return chain(code.co_names, *map(_names_in, inner))


def _is_left_out(value: Any) -> bool:
    if type(value).__module__.startswith("torch.distributed."):  # state of gathered weights
        return True
    return _is_one_of(value, _LEFT_OUT)


def _is_trainer(value: Any) -> bool:
    return type(value) in weakref.ProxyTypes or _is_one_of(value, {"Trainer"})


def _is_one_of(value: Any, names: Container[str]) -> bool:
    """Return whether a class of a value has one of these names."""
    return any(base.__name__ in names for base in type(value).__mro__)


@functools.cache
def _is_installed(module: str | None) -> bool:
    """Return whether a module belongs to Python, to an installed library or to this package."""
    first = (module or "").partition(".")[0]
    if first in sys.stdlib_module_names - {"__main__"} or first == __name__.partition(".")[0]:
        return True
    found = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    return "site-packages" in found or "dist-packages" in found


# ---- Comparing ----


def _same(before: list[Any], after: list[Any]) -> bool:
    """Return whether all values are identical or equal; False if they cannot be compared."""
    try:
        return before == after
    except Exception:  # tensors and arrays have no single truth value
        return False


def _changed(name: str, before: Any, after: Any) -> str | None:
    """Return the name of a value of a place that has changed; None if all are equal."""
    if isinstance(before, tuple):
        same = len(before) == len(after) and all(map(_equal, before, after))
        return None if same else name
    internal = _INTERNALS if "_parameters" in before else ()
    for key in {**after, **before}:
        if key not in internal and not (key in after and _equal(before.get(key), after[key])):
            return f"{name}.{key}"
    return None


def _equal(before: Any, after: Any) -> bool:
    if before is after or (before is None and _is_opaque(after)):
        return True
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        return type(before) is type(after) and _equal_tensors(before, after)
    try:
        return type(before) is type(after) and bool(np.all(before == after))
    except Exception:
        return False


def _equal_tensors(before: Tensor, after: Tensor) -> bool:
    if before.shape != after.shape or before.dtype != after.dtype or before.device != after.device:
        return False
    return _checksum(before) == _checksum(after)


def _is_opaque(value: Any) -> bool:
    """Return whether a value is a handle of a file or a connection, opened at its first use."""
    if not _is_installed(type(value).__module__) or isinstance(value, types.GeneratorType):
        return False
    try:
        pickle.dumps(value)
    except TypeError:
        return True
    except Exception:
        return False
    return False


def _numbers(tensors: list[Tensor], thorough: bool) -> list[list[int]]:
    """Return the addresses and version counters of tensors; if ``thorough``, checksums too."""
    if _ORDINARY.issuperset(map(type, tensors)):  # the usual case, which runs in C
        local_tensors, places = tensors, list(map(Tensor.data_ptr, tensors))
    else:
        local_tensors = [local(tensor) for tensor in tensors]
        places = [t.data_ptr() if type(t) in _ORDINARY else 0 for t in local_tensors]
    sums = [[_checksum(tensor) for tensor in tensors]] if thorough else []
    return [places, list(map(_version, local_tensors)), *sums]


_version = attrgetter("_version")


def _checksum(tensor: Tensor) -> int:
    """Return a checksum of the bits of a tensor: a weighted sum of its bytes as integers."""
    tensor = local(tensor.detach())
    if hasattr(tensor, "__tensor_flatten__"):  # a wrapper of other tensors
        parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        return hash(tuple(map(_checksum, parts)))
    if tensor.is_meta or tensor.layout != torch.strided or not tensor.numel():
        return 0
    if not tensor.untyped_storage().nbytes():  # a gathered weight that was freed since
        return 0
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = tensor.contiguous().view(-1).view(torch.uint8)
    bits = bits if bits.storage_offset() % 8 == 0 else bits.clone()
    length = 8 * _COLUMNS
    whole, rest = bits[: len(bits) // length * length], bits[len(bits) // length * length :]
    weights = torch.arange(1, 2 * length, 2, device=tensor.device)
    total = (rest.long() * weights[: len(rest)]).sum()
    if len(whole):
        total += (whole.view(torch.int64).view(-1, _COLUMNS).sum(0) * weights[:_COLUMNS]).sum()
    return int(total)


# ---- Before the first snapshot ----


def warm_up(model: nn.Module, batches: Iterable[Mapping[str, Any]]) -> None:
    """Run a model once in training mode on public inputs, so that it builds its tables.

    ``StateGuard`` would take a table that the model builds in its first pass for a memory of
    private examples. Nothing happens if the model cannot run on these inputs.

    Args:
        model: the model.
        batches: public inputs. The last of eight batches is used, because it has the longest
            texts; for images and sound, the first batch.
    """
    some: dict[str, Any] = {}
    with suppress(Exception), in_mode(model, training=True), keeping_random_state():
        for batch in islice(batches, 8):
            some = rows_of(batch, slice(2))
            if any(isinstance(v, Tensor) and v.is_floating_point() for v in some.values()):
                break
        with torch.no_grad():
            on_inputs(model, some)
    if is_sharded(model):
        reshard(model)
