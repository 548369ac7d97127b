"""Torch's optimizers on projected coordinates (paper, Algorithm 2).

What torch's optimizer moves is Z: one flat vector in which the coordinates of all weights lie side
by side, as their private gradients do. A step adds the update to Z, Z to the weights, and sets Z to
zero: a projected weight gets ``W += lift(Z)``, any other ``W += Z``. So for a projected weight the
private gradient, the moments and the update have r x max(m, n) numbers. Weight decay is decoupled,
as in AdamW, and acts on W.

A bfloat16 weight has 8 significant bits, so an update below 1/512 of it would be rounded away. Here
it counts all the same. A weight may be kept as ``W + lift(Z)``: then Z, which is float32, is not
set to zero, and ``low_rank.LowRankUpdates`` adds the second term in the forward pass. When the
projection is redrawn, the sum is rounded to the weight's type at random, without bias. Of an
unprojected weight in the vector, a bias say, Z is the value in float32, and the weight is the
nearest number of its type. Other weights of fewer than 32 bits are rounded at random at every step.

The optimizer is post-processing: it sees private gradients only, and costs no privacy. Neither do
the coins of the rounding, which are public, so that all ranks round alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.optimizers.changes import LowRankChanges
from dp_grape_hf.optimizers.rules import UPDATE_RULES, require_in_range
from dp_grape_hf.projections import (
    Projector,
    is_short,
    round_at_random,
    rounding_generator,
    row_blocks,
)
from dp_grape_hf.sharding import gathered, local, local_rows, rows_here, spread, whole

_BLOCK = 2**20  # numbers of a weight that have a float32 copy at once
GPU_BLOCK = 2**24
"""The same on a GPU, where a kernel takes longer to launch than to run on fewer numbers."""
_CHANGE, _VALUE = "change", "value"  # of a weight's state


class Place(Protocol):
    """The position of a weight's coordinates in a vector of many."""

    @property
    def start(self) -> int:
        """The position at which they begin."""

    @property
    def stop(self) -> int:
        """The position at which the next ones begin."""

    def of(self, flat: Tensor) -> Tensor:
        """Returns them, as a view in the shape that coordinates have."""


class _Block(NamedTuple):
    """Rows of a weight that are written at once."""

    number: int  # of the coins that round them
    here: Any  # an index of what this process has of the weight
    rows: Any  # an index of the weight
    among: tuple[int, int] | None  # how many rows the coins are for, and the first of these here


class _Moved(NamedTuple):
    """A tensor that torch's optimizer moves, and where its gradient comes from."""

    numbers: nn.Parameter  # a part of Z; or a weight that is moved in place
    part: slice | None  # of the vector
    weight: nn.Parameter | None  # whose gradient comes by itself
    in_place: bool = False


@dataclass
class _Group:
    """The weights of one parameter group, by what a step does with them."""

    lifted: list[nn.Parameter] = field(default_factory=list)  # W += lift(Z)
    added: list[nn.Parameter] = field(default_factory=list)  # W += Z
    apart: list[nn.Parameter] = field(default_factory=list)  # updates stay in Z
    valued: list[nn.Parameter] = field(default_factory=list)  # the value is Z
    in_place: list[nn.Parameter] = field(default_factory=list)  # moved by torch's optimizer
    by_rows: list[nn.Parameter] = field(default_factory=list)  # as well, a few rows at a time


@dataclass
class _LaidOut:
    """What torch's optimizer moves, and what that is to which weights.

    It is laid out anew when one of the first four changes.
    """

    alike: list[list[int]]  # numbers of groups, together where their settings are the same
    places: Mapping[nn.Parameter, Place]
    alone: set[nn.Parameter]  # weights whose gradients come by themselves
    projected: set[nn.Parameter]
    groups: list[_Group]
    moved: list[_Moved] = field(default_factory=list)
    states: dict[nn.Parameter, dict[str, Tensor]] = field(default_factory=dict)
    """of what is moved"""
    z: Tensor | None = None
    """(D,), if a part of it stays what it is after a step; else it is made for each step"""
    z_of: dict[nn.Parameter, Tensor] = field(default_factory=dict)  # parts of Z that stay
    rounded: Tensor | None = None  # Z in the type of the weights whose updates stay in it
    rounded_of: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    inner: torch.optim.Optimizer = field(init=False)  # torch's, of what is moved


class ProjectedOptimizer(torch.optim.Optimizer):
    """A rule in coordinates, with parameter groups, schedulers and state like any torch optimizer.

    Gradients do not come through ``p.grad``, whose shape would be the weight's: call ``receive``
    with the private gradients, then ``step``. Moments are float32 whatever the weight's dtype.

    Args:
        params: parameters or parameter groups, which may set ``lr``, ``weight_decay`` and the
            settings of the rule for themselves.
        lr: the learning rate.
        rule: a name in ``UPDATE_RULES``: ``adam``, ``sgd`` or ``momentum``.
        weight_decay: decoupled; a step multiplies the weight by ``1 - lr * weight_decay``. Of a
            weight that is kept apart, Z is multiplied at once and W at the next merge, by the
            product of the factors since the last one: between merges the decay of W lags.
        rounding_seed: the public seed of the rounding.
        keep_changes: ``changes`` then has what was added to each projected weight since the start,
            but for what is kept apart and not merged yet, and is a part of the state.
        **settings: those of the rule: ``betas`` and ``eps``, the decay rates of Adam's moments and
            what is added to the root of the second; ``momentum``.

    Raises:
        ValueError: for an unknown rule, a setting it does not have, or a value out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        rule: str = "adam",
        weight_decay: float = 0.0,
        rounding_seed: int = 0,
        keep_changes: bool = False,
        **settings: Any,
    ) -> None:
        if rule not in UPDATE_RULES:
            raise ValueError(f"{rule=} is not known; choose one of: {', '.join(UPDATE_RULES)}.")
        self._rule = UPDATE_RULES[rule]
        require_in_range("lr", lr, lr >= 0)
        settings = self._rule.checked(settings)
        require_in_range("weight_decay", weight_decay, weight_decay >= 0)
        super().__init__(params, {"lr": lr, **settings, "weight_decay": weight_decay})
        self.changes = LowRankChanges() if keep_changes else None
        self._rounding_seed = rounding_seed
        self.numbers_at_once: int | None = None
        """How many numbers of a weight have a float32 copy at once; None: by the device."""
        self._private_grads: Mapping[nn.Parameter, Tensor] | None = None
        self._projectors: Mapping[nn.Parameter, Projector] = {}
        self._apart: dict[nn.Parameter, Projector] = {}  # what Z is a coordinate of
        self._flat: Tensor | None = None  # private gradients side by side
        self._places: Mapping[nn.Parameter, Place] = {}
        self._laid_out: _LaidOut | None = None

    def receive(
        self,
        private_grads: Mapping[nn.Parameter, Tensor],
        projectors: Mapping[nn.Parameter, Projector] | None = None,
        flat: Tensor | None = None,
        places: Mapping[nn.Parameter, Place] | None = None,
    ) -> None:
        """Takes the private gradients of the next step, in coordinates.

        Args:
            private_grads: weight -> gradient, in coordinates where it has a projector.
            projectors: weight -> projector.
            flat: (D,), the gradients of other weights, side by side.
            places: weight -> the position of its gradient in ``flat``.
        """
        self._private_grads, self._projectors = private_grads, projectors or {}
        self._flat, self._places = flat, places or {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates the parameters from the gradients received, once.

        Raises:
            PrivacyError: if nothing was received since the last step, as there was no release; or
                what was received is of other parameters, as after something replaced the model's.
        """
        if closure is not None:
            raise PrivacyError("A closure would differentiate without noise; it is not supported.")
        if self._private_grads is None:
            raise PrivacyError("step() without receive(): there is no private gradient to apply.")
        self._refuse_other_coordinates()
        laid_out = self._lay_out(self._private_grads)
        z_of = self._prepare(laid_out, self._private_grads)
        for group, own in zip(self.param_groups, laid_out.groups, strict=True):
            self._decay_what_is_moved(group, own)
        laid_out.inner.step()
        if not self._rule.counts_steps:
            for state in laid_out.states.values():
                state["step"] += 1
        for group, own in zip(self.param_groups, laid_out.groups, strict=True):
            self._move_weights(group, own, z_of)
            for weight in own.by_rows:
                self._move_by_rows(weight, self._private_grads[weight], group)
        self._clear(laid_out, z_of)
        self._private_grads, self._projectors, self._flat = None, {}, None

    def _refuse_strange(self, given: set[nn.Parameter]) -> None:
        strange = given.difference(*(group["params"] for group in self.param_groups))
        if strange:
            raise PrivacyError(
                f"{len(strange)} of {len(given)} private gradients are of parameters "
                "that the optimizer does not have, and would move nothing. Make it of the "
                "parameters that the model has now."
            )

    def _prepare(
        self, laid_out: _LaidOut, private_grads: Mapping[nn.Parameter, Tensor]
    ) -> dict[nn.Parameter, Tensor]:
        """Gives torch's optimizer the private gradients and the rates of now.

        Returns:
            Weight -> its part of Z.
        """
        for own, (first, *_) in zip(laid_out.inner.param_groups, laid_out.alike, strict=True):
            own.update(self._settings_of(self.param_groups[first]))
        z, z_of = laid_out.z, dict(laid_out.z_of)
        if z is None and self._flat is not None:
            z = torch.zeros_like(self._flat)
            z_of |= {weight: place.of(z) for weight, place in self._places.items()}
        for numbers, part, weight, in_place in laid_out.moved:
            if weight is None:
                assert self._flat is not None
                assert z is not None
                numbers.data, numbers.grad = z[part], self._flat[part]
                continue
            gradient = private_grads[weight]
            if weight not in self._projectors:
                gradient = rows_here(gradient, weight)
            if in_place:
                numbers.data = local(weight).detach()  # which something may have replaced
            elif weight not in z_of:
                numbers.data = z_of[weight] = torch.zeros(gradient.shape, device=numbers.device)
            _check_shape(numbers, gradient.shape)
            numbers.grad = gradient.contiguous()  # as torch's kernel takes for granted
        return z_of

    def _decay_what_is_moved(self, group: dict[str, Any], own: _Group) -> None:
        """Multiplies what torch's optimizer is about to move by ``1 - lr * weight_decay``."""
        decay = _decay_of(group)
        if decay == 1:
            return
        kept = [self.state[w]["update"] for w in own.apart]
        kept += [self.state[w][_VALUE] for w in own.valued]
        if targets := [*kept, *(local(weight) for weight in own.in_place)]:
            torch._foreach_mul_(targets, decay)
        for weight in own.apart:
            self.state[weight]["decay"] *= decay

    def _move_weights(
        self, group: dict[str, Any], own: _Group, z_of: Mapping[nn.Parameter, Tensor]
    ) -> None:
        """Moves weights by Z, but for those whose updates stay in it."""
        decay = _decay_of(group)
        for weight in own.lifted:
            self._add_lifted(weight, z_of[weight], self._projectors[weight], decay)
        if own.added:
            targets = [local(weight) for weight in own.added]
            if decay != 1:
                torch._foreach_mul_(targets, decay)
            torch._foreach_add_(targets, [_here(z_of[weight], weight) for weight in own.added])
        if own.valued:
            targets = [local(weight) for weight in own.valued]
            torch._foreach_copy_(targets, [_here(z_of[weight], weight) for weight in own.valued])

    def _move_by_rows(self, weight: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        """Moves an unprojected weight of fewer than 32 bits, of which few rows are float32 at once.

        The optimizer of torch is given one block of rows after another, with their moments.
        """
        here, gradient, decay = local(weight), rows_here(gradient, weight), _decay_of(group)
        state = self.state[weight]
        rows = nn.Parameter(torch.zeros(0, device=here.device))
        inner = self._rule.make([{"params": [rows], **self._settings_of(group)}], {})
        for block in self._blocks(weight):
            rows.data = here[block.here].float().contiguous().mul_(decay)
            rows.grad = gradient[block.here].contiguous()
            moments = {key: local(state[key])[block.here] for key in self._rule.moments}
            inner.state[rows] = {"step": state["step"].clone(), **moments}
            inner.step()
            self._write(here, block, rows.data)
            rows.grad = None
        state["step"] += 1

    def _clear(self, laid_out: _LaidOut, z_of: Mapping[nn.Parameter, Tensor]) -> None:
        """Frees what was made for the step, and sets to zero what moved weights of what stays."""
        for moved in laid_out.moved:
            moved.numbers.grad = None
            stays = (
                laid_out.z is not None if moved.weight is None else moved.weight in laid_out.z_of
            )
            if not stays:
                moved.numbers.data = moved.numbers.new_empty(0)
        passed_on = [w for own in laid_out.groups for w in (*own.lifted, *own.added)]
        if stale := [z_of[weight] for weight in passed_on if weight in laid_out.z_of]:
            torch._foreach_zero_(stale)
        if laid_out.rounded is not None and laid_out.z is not None:
            laid_out.rounded.copy_(laid_out.z)

    # ---- What torch's optimizer moves ----

    def _settings_of(self, group: Mapping[str, Any]) -> dict[str, Any]:
        return {name: group[name] for name in ("lr", *self._rule.settings)}

    def _alike(self) -> list[list[int]]:
        """Returns the numbers of the groups, together where their settings are the same now."""
        found: dict[str, list[int]] = {}
        for number, group in enumerate(self.param_groups):
            found.setdefault(repr(self._settings_of(group)), []).append(number)
        return list(found.values())

    def _lay_out(self, private_grads: Mapping[nn.Parameter, Tensor]) -> _LaidOut:
        """Returns Z, laid out anew if it is for other weights than at the last step."""
        known, alike = self._laid_out, self._alike()
        if (
            known is not None
            and known.alike == alike
            and (known.places is self._places or known.places == self._places)
            and known.alone == private_grads.keys()
            and known.projected == self._projectors.keys()
        ):
            return known
        self._refuse_strange({*self._places, *private_grads})
        new = _LaidOut(
            *(alike, self._places, {*private_grads}, {*self._projectors}),
            groups=[_Group() for _ in self.param_groups],
        )
        number_of = {w: i for i, group in enumerate(self.param_groups) for w in group["params"]}
        inner_of = {number: i for i, numbers in enumerate(alike) for number in numbers}
        inner_groups = [self._settings_of(self.param_groups[first]) for first, *_ in alike]
        for group in inner_groups:
            group["params"] = []
        for weight, moved, state in (
            *self._lay_side_by_side(new, number_of, inner_of),
            *self._lay_by_themselves(new, number_of, private_grads),
        ):
            new.moved.append(moved)
            new.states[moved.numbers] = state
            inner_groups[inner_of[number_of[weight]]]["params"].append(moved.numbers)
        new.inner = self._rule.make(inner_groups, new.states)
        self._laid_out = new
        return new

    def _lay_side_by_side(
        self, new: _LaidOut, number_of: Mapping[nn.Parameter, int], inner_of: Mapping[int, int]
    ) -> Iterator[tuple[nn.Parameter, _Moved, dict[str, Tensor]]]:
        """Puts the state of the weights in the vector side by side, as their gradients are.

        Yields:
            Neighbours of one setting that were updated equally often: the first of them, their
            part of Z and its state.
        """
        if self._flat is None:
            return
        kinds = {weight: self._kind(weight) for weight in self._places}
        if not {"apart", "valued"}.isdisjoint(kinds.values()):
            new.z = torch.zeros_like(self._flat)
            new.z_of = {weight: place.of(new.z) for weight, place in self._places.items()}
        vectors = {key: torch.zeros_like(self._flat) for key in self._rule.moments}
        runs: list[tuple[nn.Parameter, slice, dict[str, Tensor]]] = []
        last: tuple[Any, ...] = ()
        for weight, place in self._places.items():
            getattr(new.groups[number_of[weight]], kinds[weight]).append(weight)
            count = float(self.state[weight].get("step", 0.0))
            own = inner_of[number_of[weight]], count
            if last != (place.start, *own):
                step = torch.full((), count, device=self._flat.device)
                runs.append((weight, slice(place.start, place.start), {"step": step}))
            first, part, state = runs[-1]
            runs[-1] = first, slice(part.start, place.stop), state
            last = place.stop, *own
            views = {key: place.of(vector) for key, vector in vectors.items()}
            self._take_over(weight, views | {"step": state["step"]})
            self._keep(new, weight, kinds[weight])
        self._round_apart(new)
        for first, part, state in runs:
            numbers = nn.Parameter(self._flat.new_empty(0))
            moments = {key: vector[part] for key, vector in vectors.items()}
            yield first, _Moved(numbers, part, None), state | moments

    def _lay_by_themselves(
        self,
        new: _LaidOut,
        number_of: Mapping[nn.Parameter, int],
        private_grads: Mapping[nn.Parameter, Tensor],
    ) -> Iterator[tuple[nn.Parameter, _Moved, dict[str, Tensor]]]:
        """Makes the state of the weights whose gradients are not in the vector.

        Yields:
            Each that torch's optimizer moves at once, with its part of Z, or itself, and its state.
        """
        for weight, gradient in private_grads.items():
            state, here, kind = self.state[weight], local(weight), self._kind(weight)
            if kind == "valued":
                kind = "by_rows"
            elif kind == "added" and here.dtype is torch.float32 and here.is_contiguous():
                kind = "in_place"
            getattr(new.groups[number_of[weight]], kind).append(weight)
            like = gradient if weight in self._projectors else weight  # may be spread
            step = torch.full((), float(state.get("step", 0.0)), device=here.device)
            moments = {key: self._moment(state.get(key), like) for key in self._rule.moments}
            self._take_over(weight, moments | {"step": step})
            state.pop(_VALUE, None)
            if kind == "by_rows":
                continue
            numbers = nn.Parameter(here.new_empty(0, dtype=torch.float32))
            if kind == "apart":
                new.z_of[weight] = numbers.data = torch.zeros_like(gradient)
                self._keep(new, weight, kind)
            own = {key: local(moment) for key, moment in moments.items()}
            yield weight, _Moved(numbers, None, weight, kind == "in_place"), own | {"step": step}

    def _moment(self, known: Tensor | None, like: Tensor) -> Tensor:
        """Returns a float32 tensor with contiguous numbers: the known one, if that will do."""
        if known is not None and known.shape == like.shape and known.is_contiguous():
            return spread(known, like)
        options: Any = {"dtype": torch.float32, "memory_format": torch.contiguous_format}
        return torch.zeros_like(like, **options)

    def _kind(self, weight: nn.Parameter) -> str:
        """Returns which list of its group a weight is in, if its gradient is in the vector."""
        if weight in self._apart:
            return "apart"
        if weight in self._projectors:
            return "lifted"
        return "valued" if is_short(weight) else "added"

    def _take_over(self, weight: nn.Parameter, places: Mapping[str, Tensor]) -> None:
        """Copies the state of a weight to where it is from now on."""
        state = self.state[weight]
        for key, place in places.items():
            if key in state and key != "step" and state[key] is not place:
                _check_shape(state[key], place.shape)
                local(place).copy_(local(spread(state[key], place)))
            state[key] = place

    def _keep(self, new: _LaidOut, weight: nn.Parameter, kind: str) -> None:
        """Moves what Z already has of a weight to where it is from now on."""
        state = self.state[weight]
        if kind == "apart":
            z = new.z_of[weight].copy_(state["update"])
            state["update"].set_(z)  # which a branch has
        elif kind == "valued":
            value, now = state.get(_VALUE), whole(weight.detach())
            if value is None or not torch.equal(value.to(weight.dtype), now):
                value = now  # of a run that kept none, or it was changed
            state[_VALUE] = new.z_of[weight].copy_(value)

    def _round_apart(self, new: _LaidOut) -> None:
        """Makes a copy of Z in the type of the weights whose updates stay in it."""
        apart = [weight for weight in new.places if weight in self._apart]
        if apart and new.z is not None:
            new.rounded = z = new.z.to(apart[0].dtype)
            same = [weight for weight in apart if weight.dtype is z.dtype]
            new.rounded_of = {weight: new.places[weight].of(z) for weight in same}

    # ---- What is added to weights ----

    def _add_lifted(
        self, weight: nn.Parameter, z: Tensor, projector: Projector, decay: float
    ) -> None:
        """Makes the weight ``decay * W + lift(z)``, without an m x n temporary."""
        if self.changes is not None:
            self.changes.add(weight, projector, z)
        here = local(weight)
        if not is_short(weight):
            projector.add_lifted_(here, z, decay, local_rows(weight))
            return
        for block in self._blocks(weight):
            total = here[block.here].float()
            projector.add_lifted_(total, z, decay, block.rows)
            self._write(here, block, total)

    # ---- Weights of fewer than 32 bits ----

    def _blocks(self, weight: nn.Parameter) -> list[_Block]:
        """Returns the blocks of rows of a weight that this process has, or parts of them.

        Each gets the number of its coins, which are the same however the weight is spread.
        """
        group = self.param_groups[0]  # a part of the state that is saved and not of one weight
        most = self.numbers_at_once or (_BLOCK if weight.device.type == "cpu" else GPU_BLOCK)
        numbered = list(enumerate(row_blocks(weight, most), group.get("rounded", 0) + 1))
        if is_short(weight):
            group["rounded"] = numbered[-1][0] if numbered else group.get("rounded", 0)
        if weight.dim() == 0:
            return [_Block(number, ..., ..., None) for number, _ in numbered]
        own, found = local_rows(weight), []
        for number, block in numbered:
            stop = min(block.stop, len(weight))
            rows = slice(max(block.start, own.start), min(stop, own.stop))
            if rows.start < rows.stop:
                here = slice(rows.start - own.start, rows.stop - own.start)
                among = stop - block.start, rows.start - block.start
                found.append(_Block(number, here, rows, among))
        return found

    def _write(self, here: Tensor, block: _Block, total: Tensor) -> None:
        coins = rounding_generator(self._rounding_seed, block.number, here.device)
        here[block.here] = round_at_random(total, here.dtype, coins, block.among)

    @torch.no_grad()
    def keep_apart(self, weight: nn.Parameter, projector: Projector) -> Tensor:
        """Keeps the updates of a weight as coordinates of ``projector``, from now on.

        What was kept as coordinates of another projector is merged first. A state that was loaded
        continues, if it is called with the projector that was in force when the state was saved.

        Returns:
            Z, float32: the weight is now ``W + projector.lift(Z)``. The tensor changes in place,
            until the next call or ``load_state_dict``.

        Raises:
            PrivacyError: if a state was loaded that was made with another projection.
        """
        if self._apart.get(weight, projector) is not projector:
            self._merge(weight)
        state, shape = self.state[weight], projector.coordinate_shape(weight.shape)
        if weight not in self._apart:
            self._laid_out = None
        if "update" not in state:
            state["update"] = torch.zeros(shape, device=weight.device)
            state["decay"] = 1.0
        _check_shape(state["update"], shape)
        self._apart[weight] = projector
        return state["update"]

    def kept_apart(self, weight: nn.Parameter) -> Tensor:
        """Returns Z of a weight that is kept apart, in the weight's type, until the next step."""
        rounded = None if self._laid_out is None else self._laid_out.rounded_of.get(weight)
        return self.state[weight]["update"].to(weight.dtype) if rounded is None else rounded

    @torch.no_grad()
    def merge_(self) -> None:
        """Moves what is kept apart into the weights, rounded at random without bias; Z is then 0.

        Call it on every rank before weights are saved or handed on.
        """
        for weight in self._apart:
            self._merge(weight)

    def _merge(self, weight: nn.Parameter) -> None:
        state = self.state[weight]
        if state["decay"] != 1 or state["update"].any():
            projector = self._apart[weight]
            self._add_lifted(weight, state["update"], projector, state["decay"])
            state["update"].zero_()
            state["decay"] = 1.0
            if self._laid_out is not None and weight in self._laid_out.rounded_of:
                self._laid_out.rounded_of[weight].zero_()

    # ---- State ----

    def _refuse_other_coordinates(self) -> None:
        given = {*self._places, *(self._private_grads or {})}
        if any(
            projector is not self._projectors.get(weight)
            for weight, projector in self._apart.items()
            if weight in given
        ):
            raise PrivacyError(
                "A gradient was received in other coordinates than the updates of its weight are "
                "kept in. Call LowRankUpdates.use() with the projectors before the forward pass."
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns the state.

        A collective call where weights are sharded: it holds whole tensors.
        """
        packed = super().state_dict()
        for index, entry in packed["state"].items():
            packed["state"][index] = gathered(entry)
        if self.changes is not None:
            for index, weight in self._numbered(packed):
                if weight in self.changes:
                    change = self.changes.state_of(weight)
                    packed["state"][index] = {**packed["state"][index], _CHANGE: change}
        return packed

    def _numbered(self, packed: Mapping[str, Any]) -> Iterator[tuple[int, nn.Parameter]]:
        """Yields each weight with its number in a state."""
        order = [index for group in packed["param_groups"] for index in group["params"]]
        weights = [weight for group in self.param_groups for weight in group["params"]]
        return zip(order, weights, strict=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state; it stays float32, where torch would cast it like the weight.

        Raises:
            ValueError: if it is that of another rule, or holds updates that were not merged into
                what is now a float32 weight.
        """
        for entry in state_dict["state"].values():
            self._check_rule(entry)
        saved = state_dict["state"]
        own = _CHANGE, _VALUE
        plain = {i: {k: entry[k] for k in entry if k not in own} for i, entry in saved.items()}
        super().load_state_dict({**state_dict, "state": plain})
        self.changes = None if self.changes is None else LowRankChanges()
        self._apart, self._laid_out = {}, None
        for index, weight in self._numbered(state_dict):
            entry = saved.get(index, {})
            values = [_VALUE] if is_short(weight) else []
            for key in (*self._rule.moments, "step", "update", *values):
                if key in entry:
                    value = entry[key].to(weight.device, torch.float32, copy=True).contiguous()
                    self.state[weight][key] = value
            if _CHANGE in entry and self.changes is not None:
                self.changes.go_on_from(weight, entry[_CHANGE])
            if "update" in entry and not is_short(weight):
                if entry["update"].any() or entry["decay"] != 1:
                    raise ValueError(
                        "The state holds updates that were never merged into the weights, which "
                        f"are {weight.dtype} now. Resume in the type of the checkpoint."
                    )
                del self.state[weight]["update"], self.state[weight]["decay"]

    def _check_rule(self, entry: Mapping[str, Any]) -> None:
        every = {key for rule in UPDATE_RULES.values() for key in rule.moments}
        found, needed = every & entry.keys(), set(self._rule.moments)
        if "step" in entry and found != needed:
            raise ValueError(
                f"The state has the moments {sorted(found)}, and rule={self._rule.name!r} needs "
                f"{sorted(needed)}. Resume with the rule that the checkpoint was made with."
            )

    def state_bytes(self) -> int:
        """Returns the bytes of the moments, and of kept updates, values and changes."""
        keys = (*self._rule.moments, "update", _VALUE)
        kept = sum(s[key].nbytes for s in self.state.values() for key in keys if key in s)
        return kept + (0 if self.changes is None else self.changes.nbytes)


class ProjectedAdam(ProjectedOptimizer):
    """``ProjectedOptimizer`` with the rule ``adam``, whose arguments it takes."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Any,
    ) -> None:
        options |= {"betas": tuple(betas), "eps": eps}
        super().__init__(params, lr, rule="adam", weight_decay=weight_decay, **options)


def _decay_of(group: Mapping[str, Any]) -> float:
    return 1 - float(group["lr"]) * float(group["weight_decay"])


def _here(z: Tensor, weight: nn.Parameter) -> Tensor:
    """Returns the rows of Z that this process has of an unprojected weight."""
    return z if z.shape == local(weight).shape else rows_here(z, weight)


def _check_shape(kept: Tensor, shape: tuple[int, ...]) -> None:
    if kept.shape != shape:
        raise PrivacyError(
            f"The optimizer's state has shape {tuple(kept.shape)} where the private gradient "
            f"has {tuple(shape)}: the projection changed. Resume with the projection, "
            "projection_rank and optim_target_modules that the checkpoint was made with."
        )
