"""An optimizer whose state lives in projected coordinates (paper, Algorithm 2).

For a projected weight the private gradient, the moments and the update have r x max(m, n) numbers;
only the last step lifts the update onto the weight: for Adam, ``W -= lr * lift(m_hat /
(sqrt(v_hat) + eps))``. Unprojected parameters get the rule as it is. Weight decay is decoupled, as
in AdamW. The rules are in ``rules``.

A bfloat16 weight has 8 significant bits, so an update below 1/512 of it would be rounded away. Here
it counts all the same. A weight may be kept as ``W + lift(Z)``: its updates go into Z, which is
float32, and ``low_rank.LowRankUpdates`` adds the second term in the forward pass. When the
projection is redrawn, the sum is rounded to the weight's type at random, without bias. Of an
unprojected weight whose gradient lies in a vector with others, a bias say, the state has the value
in float32, of which the weight is the nearest number of its type. Other weights of fewer than 32
bits are rounded at random at every step.

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
from dp_grape_hf.optimizers.rules import UPDATE_RULES, Term, require_in_range
from dp_grape_hf.projections import (
    Projector,
    is_short,
    round_at_random,
    rounding_generator,
    row_blocks,
)
from dp_grape_hf.sharding import gathered, local, local_rows, rows_here, spread, whole

_BLOCK = 2**20  # numbers of a weight, or of coordinates, that have a float32 copy at once
GPU_BLOCK = 2**24
"""The same on a GPU, where a kernel takes longer to launch than to run on fewer numbers."""
_CHANGE, _VALUE = "change", "value"  # of a weight's state


class _Block(NamedTuple):
    """Rows of a weight that are written at once."""

    number: int  # of the coins that round them
    here: Any  # an index of what this process has of the weight
    rows: Any  # an index of the weight
    among: tuple[int, int] | None  # how many rows the coins are for, and the first of these here


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

    def _replace(self, *, start: int) -> Place:
        """Returns where they would be from there on."""


@dataclass
class _Part:
    """Neighbours in the vector whose rule has the same settings, updated equally often."""

    settings: dict[str, Any]
    start: int
    stop: int
    count: float  # of updates, when it was made
    step: Tensor  # of updates
    weights: list[tuple[nn.Parameter, Place, int]] = field(default_factory=list)
    """each with its place in the part, and the number of its group"""
    moments: tuple[Tensor, ...] = ()
    kept: Tensor | None = None
    """float32: updates kept apart, and the values of other weights of fewer than 32 bits"""
    rounded: Tensor | None = None  # the same in fewer bits
    runs: list[tuple[int, int, int]] = field(default_factory=list)
    """of what is kept: from where to where, and the number of the group"""
    kept_of: dict[nn.Parameter, Tensor] = field(default_factory=dict)

    def keep(self, weight: nn.Parameter, place: Place, number: int) -> Tensor:
        """Returns what is kept of a weight, which is zero, from now on."""
        if self.kept is None:
            self.kept = torch.zeros(self.stop - self.start, device=self.step.device)
            self.rounded = self.kept.to(weight.dtype)
        start, stop = place.start, place.stop
        if self.runs and self.runs[-1][1:] == (start, number):
            start = self.runs.pop()[0]
        self.runs.append((start, stop, number))
        self.kept_of[weight] = place.of(self.kept)
        return self.kept_of[weight]

    def move_kept(self, update: Tensor, factors: list[tuple[float, float]]) -> None:
        """Adds an update to the kept vector, by the rate and the decay of each group."""
        if self.kept is None or self.rounded is None:
            return
        together: dict[tuple[float, float], tuple[list[Tensor], list[Tensor]]] = {}
        for start, stop, number in self.runs:
            targets, updates = together.setdefault(factors[number], ([], []))
            targets.append(self.kept[start:stop])
            updates.append(update[start:stop])
        for (rate, decay), (targets, updates) in together.items():
            if decay != 1:
                torch._foreach_mul_(targets, decay)
            torch._foreach_add_(targets, updates, alpha=rate)
        self.rounded.copy_(self.kept)


@dataclass
class _LaidOut:
    """The weights whose state lies side by side."""

    places: Mapping[nn.Parameter, Place] = field(default_factory=dict)
    weights: set[nn.Parameter] = field(default_factory=set)
    parts: list[_Part] = field(default_factory=list)
    settings: list[dict[str, Any]] = field(default_factory=list)  # of the groups
    rounded: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    """updates that are kept apart, in the weight's type"""


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
        ValueError: for an unknown rule, a setting it has not, or a value out of range.
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
        self._laid_out = _LaidOut()

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
            places: weight -> the position of its gradient in ``flat``. Pass the same object until
                positions change.
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
        self._refuse_strange(self._private_grads)
        if self._flat is not None:
            settings = [self._settings_of(group) for group in self.param_groups]
            known = self._laid_out
            if known.places is not self._places or known.settings != settings:
                self._refuse_strange(self._places)
                self._lay_out(self._places, settings, self._flat)
            for part in self._laid_out.parts:
                self._step_part(part, self._flat)
            left = self._places.keys() - self._laid_out.weights
            alone = {w: self._places[w].of(self._flat) for w in self._places if w in left}
            self._private_grads = {**self._private_grads, **alone}
        for group in self.param_groups:
            given = [w for w in group["params"] if w in self._private_grads]
            self._step_group(given, self._private_grads, group)
        self._private_grads, self._projectors, self._flat = None, {}, None

    def _refuse_strange(self, given: Iterable[nn.Parameter]) -> None:
        every = set(given)
        strange = every.difference(*(group["params"] for group in self.param_groups))
        if strange:
            raise PrivacyError(
                f"{len(strange)} of {len(every)} private gradients are of parameters "
                "that the optimizer does not have, and would move nothing. Make it of the "
                "parameters that the model has now."
            )

    # ---- Weights side by side ----

    def _settings_of(self, group: Mapping[str, Any]) -> dict[str, Any]:
        return {name: group[name] for name in self._rule.settings}

    def _lay_out(
        self,
        places: Mapping[nn.Parameter, Place],
        settings: list[dict[str, Any]],
        flat: Tensor,
    ) -> None:
        """Puts the state of weights side by side, as their gradients are."""
        for weight in self._laid_out.weights - places.keys():
            self._take_out(weight)
        group_of = {w: i for i, group in enumerate(self.param_groups) for w in group["params"]}
        parts: list[_Part] = []
        for weight, place in places.items():
            here = local(weight)
            plain = here is weight and here.dtype is torch.float32 and here.is_contiguous()
            if not (plain or weight in self._projectors or is_short(weight)):
                continue
            group, count = group_of[weight], float(self.state[weight].get("step", 0.0))
            last = parts[-1] if parts else None
            same = last is not None and (last.stop, last.count) == (place.start, count)
            if last is None or not same or last.settings != settings[group]:
                step = torch.full((), count, device=flat.device)
                parts.append(last := _Part(settings[group], place.start, place.stop, count, step))
            last.stop = place.stop
            last.weights.append((weight, place._replace(start=place.start - last.start), group))
        for part in parts:
            vectors = {key: flat.new_zeros(part.stop - part.start) for key in self._rule.moments}
            for weight, place, _ in part.weights:
                state = self.state[weight]
                for key, vector in vectors.items():
                    own = place.of(vector)
                    if key in state:
                        _check_shape(state[key], own.shape)
                        own.copy_(whole(state[key]))
                    state[key] = own
                state["step"] = part.step
            part.moments = tuple(vectors.values())
            self._lay_out_kept(part)
        laid_out = {weight for part in parts for weight, *_ in part.weights}
        rounded = {
            weight: place.of(part.rounded)
            for part in parts
            for weight, place, _ in part.weights
            if part.rounded is not None
            and (weight in self._apart and weight.dtype is part.rounded.dtype)
        }
        self._laid_out = _LaidOut(places, laid_out, parts, settings, rounded)

    def _lay_out_kept(self, part: _Part) -> None:
        """Puts updates and values that are kept in float32 into one vector."""
        for weight, place, number in part.weights:
            state = self.state[weight]
            if weight in self._apart:
                state["update"].set_(part.keep(weight, place, number).copy_(state["update"]))
            elif weight not in self._projectors and is_short(weight):
                value, now = state.get(_VALUE), whole(weight.detach())
                if value is None or not torch.equal(value.to(weight.dtype), now):
                    value = now  # of a run that kept none, or it was changed
                state[_VALUE] = part.keep(weight, place, number).copy_(value)
        if part.kept is not None and part.rounded is not None:
            part.rounded.copy_(part.kept)

    def _take_out(self, weight: nn.Parameter) -> None:
        """Copies the state of one weight out of the vectors; the next step lays out the others."""
        state = self.state[weight]
        keys = [key for key in (*self._rule.moments, "step", _VALUE) if key in state]
        state |= {key: state[key].clone().contiguous() for key in keys}
        if "update" in state:  # which a branch has
            state["update"].set_(state["update"].clone().contiguous())
        self._laid_out.weights.discard(weight)
        self._laid_out.rounded.pop(weight, None)
        self._laid_out.places = {}

    def _step_part(self, part: _Part, flat: Tensor) -> None:
        """Updates the weights of a part: the rule runs once for all of them."""
        gradient = flat[part.start : part.stop]
        update = torch.zeros_like(gradient)
        term = Term(update, gradient, part.moments, part.step)
        self._rule.apply([term], part.settings, 1.0, 0.0)
        rates = [float(group["lr"]) for group in self.param_groups]
        pairs = zip(rates, self.param_groups, strict=True)
        decays = [1 - rate * group["weight_decay"] for rate, group in pairs]
        part.move_kept(update, list(zip(rates, decays, strict=True)))
        plain: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        short: tuple[list[Tensor], list[Tensor]] = [], []
        for weight, place, number in part.weights:
            projector = self._projectors.get(weight)
            if weight in self._apart:
                self._refuse_other_coordinates(weight)
                self.state[weight]["decay"] *= decays[number]
            elif projector is not None:
                own = place.of(update)
                self._add_lifted(weight, own, projector, decays[number], rates[number])
            elif weight in part.kept_of:
                short[0].append(local(weight))
                short[1].append(rows_here(part.kept_of[weight], weight))
            else:
                targets, updates = plain.setdefault(number, ([], []))
                targets.append(weight)
                updates.append(place.of(update))
        if short[0]:
            torch._foreach_copy_(*short)
        for number, (targets, updates) in plain.items():
            if decays[number] != 1:
                torch._foreach_mul_(targets, decays[number])
            torch._foreach_add_(targets, updates, alpha=rates[number])

    def _step_group(
        self,
        weights: list[nn.Parameter],
        private_grads: Mapping[nn.Parameter, Tensor],
        group: dict[str, Any],
    ) -> None:
        decay = 1 - float(group["lr"]) * group["weight_decay"]
        at_once: list[Term] = []
        lifted: list[tuple[nn.Parameter, Term]] = []
        for weight in weights:
            gradient = private_grads[weight]
            if weight not in self._projectors:
                gradient = rows_here(gradient, weight)
            gradient = gradient.contiguous()  # as torch's kernel takes for granted
            state, here = self._checked_state(weight, gradient), local(weight)
            moments = tuple(local(state[key]) for key in self._rule.moments)
            term = Term(here, gradient, moments, state["step"])
            if weight in self._apart:
                at_once.append(term._replace(target=state["update"]))
                state["decay"] *= decay
            elif weight in self._projectors:
                lifted.append((weight, term))
            elif here.dtype is torch.float32 and here.is_contiguous():
                at_once.append(term)
            else:
                self._step_in_blocks(weight, term, decay, group)
        self._rule.apply(at_once, group, float(group["lr"]), group["weight_decay"])
        for part in _in_parts(lifted):
            terms = [term._replace(target=torch.zeros_like(term.gradient)) for _, term in part]
            self._rule.apply(terms, group, 1.0, 0.0)
            for (weight, _), (update, *_) in zip(part, terms, strict=True):
                projector = self._projectors[weight]
                self._add_lifted(weight, update, projector, decay, float(group["lr"]))

    def _step_in_blocks(
        self, weight: nn.Parameter, term: Term, decay: float, group: dict[str, Any]
    ) -> None:
        """Updates an unprojected weight that is not float32, or not contiguous."""
        here = term.target
        for part in self._blocks(weight):
            rows = part.here
            gradient, moments = term.gradient[rows], tuple(m[rows] for m in term.moments)
            update = torch.zeros_like(gradient)
            block = Term(update, gradient, moments, term.step.clone())
            self._rule.apply([block], group, 1.0, 0.0)
            if is_short(weight):
                total = here[rows].float().mul_(decay).add_(update, alpha=float(group["lr"]))
                self._write(here, part, total)
            else:
                kept = here[rows] if decay == 1 else here[rows].mul_(decay)
                kept.add_(update, alpha=float(group["lr"]))
        term.step.add_(1)

    def _add_lifted(
        self,
        weight: nn.Parameter,
        update: Tensor,
        projector: Projector,
        decay: float,
        scale: float,
    ) -> None:
        """Makes the weight ``decay * W + scale * lift(update)``, without an m x n temporary."""
        if self.changes is not None:
            self.changes.add(weight, projector, update, scale)
        here = local(weight)
        if not is_short(weight):
            if decay != 1:
                here.mul_(decay)
            projector.add_lifted_(here, update, scale, local_rows(weight))
            return
        for part in self._blocks(weight):
            total = here[part.here].float().mul_(decay)
            projector.add_lifted_(total, update, scale, part.rows)
            self._write(here, part, total)

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
        if weight not in self._apart and weight in self._laid_out.weights:
            self._take_out(weight)
        if "update" not in state:
            state["update"] = torch.zeros(shape, device=weight.device)
            state["decay"] = 1.0
        _check_shape(state["update"], shape)
        self._apart[weight] = projector
        return state["update"]

    def kept_apart(self, weight: nn.Parameter) -> Tensor:
        """Returns Z of a weight that is kept apart, in the weight's type, until the next step."""
        rounded = self._laid_out.rounded.get(weight)
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
            self._add_lifted(weight, state["update"], projector, state["decay"], 1.0)
            state["update"].zero_()
            state["decay"] = 1.0
            if weight in self._laid_out.rounded:
                self._laid_out.rounded[weight].zero_()

    # ---- State ----

    def _checked_state(self, weight: nn.Parameter, gradient: Tensor) -> dict[str, Any]:
        state, projected = self.state[weight], weight in self._projectors
        if weight in self._laid_out.weights:
            self._take_out(weight)
        if "step" not in state:  # torch's kernel wants the step count where the weight is
            state["step"] = torch.zeros((), device=weight.device)
            for key in self._rule.moments:
                state[key] = torch.zeros_like(
                    gradient if projected else weight,
                    dtype=torch.float32,
                    memory_format=torch.contiguous_format,
                )
        for key in self._rule.moments:
            if not projected:
                state[key] = spread(state[key], weight)  # what was loaded is whole
            _check_shape(local(state[key]), gradient.shape)
        self._refuse_other_coordinates(weight)
        return state

    def _refuse_other_coordinates(self, weight: nn.Parameter) -> None:
        if weight in self._apart and self._apart[weight] is not self._projectors.get(weight):
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
        self._apart, self._laid_out = {}, _LaidOut()
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


def _in_parts(
    lifted: list[tuple[nn.Parameter, Term]],
) -> Iterator[list[tuple[nn.Parameter, Term]]]:
    """Yields parts of a list that have at most ``_BLOCK`` coordinates, or one weight."""
    part: list[tuple[nn.Parameter, Term]] = []
    size = 0
    for item in lifted:
        if part and size + item[1].gradient.numel() > _BLOCK:
            yield part
            part, size = [], 0
        part.append(item)
        size += item[1].gradient.numel()
    if part:
        yield part


def _check_shape(kept: Tensor, shape: tuple[int, ...]) -> None:
    if kept.shape != shape:
        raise PrivacyError(
            f"The optimizer's state has shape {tuple(kept.shape)} where the private gradient "
            f"has {tuple(shape)}: the projection changed. Resume with the projection, "
            "projection_rank and optim_target_modules that the checkpoint was made with."
        )
