"""Optimizers of torch in the projected space (paper, Algorithm 2).

Torch's optimizer updates Z, a flat vector that concatenates the coordinates of all weights. The
private gradients have the same layout. A step adds the update to Z, adds Z to the weights, and sets
Z to zero: ``W += lift(Z)`` for a projected weight, ``W += Z`` for others. So the private gradient,
the moments and the update of a projected weight have r x max(m, n) elements. Weight decay is
decoupled, as in AdamW, and acts on W.

A bfloat16 number stores 8 significant bits, and would round an update below 1/512 of a weight away.
To keep such updates, a weight may be stored as ``W + lift(Z)``: then Z, which is float32, is not
set to zero, and ``low_rank.LowRankUpdates`` adds the second term in the forward pass. When the
projection is redrawn, the sum is rounded stochastically, without bias. For an unprojected 16-bit
weight in the vector, such as a bias, Z is the float32 value, and the weight is Z rounded to the
nearest. Other 16-bit weights are rounded stochastically at every step.

The optimizer is post-processing: it receives private gradients only, and costs no privacy. The
random numbers of the rounding are public, so that all ranks round in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.optimizers.changes import LowRankChanges
from dp_grape_hf.optimizers.rules import UPDATE_RULES
from dp_grape_hf.phases import is_cpu
from dp_grape_hf.projections import (
    Projector,
    is_short,
    round_at_random,
    rounding_generator,
    row_blocks,
)
from dp_grape_hf.sharding import full_tensor, gathered, local, local_rows, rows_here, spread

_BLOCK = 2**20  # elements of a weight that have a float32 copy at a time, on a CPU
_GPU_BLOCK = 2**24
"""Elements of a weight that have a float32 copy at a time on a GPU, enough to hide the launch."""
_CHANGE, _VALUE = "change", "value"  # keys of a weight's state


class Place(Protocol):
    """The position of a weight's coordinates in a flat vector."""

    @property
    def start(self) -> int:
        """The first index of the coordinates."""

    @property
    def stop(self) -> int:
        """The index after the last one."""

    def of(self, flat: Tensor) -> Tensor:
        """Return the weight's coordinates as a view of ``flat``, in their shape."""


class _Block(NamedTuple):
    """Rows of a weight that are written together."""

    number: int  # seed of the random numbers that round the block
    here: Any  # index of the block in this process's part of the weight
    rows: Any  # index of the block in the weight
    among: tuple[int, int] | None  # rows of the whole block, and the first of them in this process


class _Moved(NamedTuple):
    """A tensor that torch's optimizer updates, and the source of its gradient."""

    numbers: nn.Parameter  # a part of Z; or a weight that is updated in place
    part: slice | None  # its part of the flat vector, if the gradient is in it
    weight: nn.Parameter | None  # if its gradient is a separate tensor
    in_place: bool = False


@dataclass
class _Group:
    """The weights of one parameter group, sorted by the way in which a step updates them."""

    lifted: list[nn.Parameter] = field(default_factory=list)  # W += lift(Z)
    added: list[nn.Parameter] = field(default_factory=list)  # W += Z
    separate: list[nn.Parameter] = field(default_factory=list)  # updates stay in Z
    valued: list[nn.Parameter] = field(default_factory=list)  # the float32 value is Z
    in_place: list[nn.Parameter] = field(default_factory=list)  # torch's optimizer updates W
    by_rows: list[nn.Parameter] = field(default_factory=list)  # the same, a few rows at a time


@dataclass
class _LaidOut:
    """The layout of Z, and of the tensors that torch's optimizer updates.

    A new layout is made when one of the first four fields changes.
    """

    alike: list[list[int]]  # indices of parameter groups; groups of equal settings are together
    places: Mapping[nn.Parameter, Place]
    alone: set[nn.Parameter]  # weights whose gradients are separate tensors
    projected: set[nn.Parameter]
    groups: list[_Group]
    moved: list[_Moved] = field(default_factory=list)
    states: dict[nn.Parameter, dict[str, Tensor]] = field(default_factory=dict)
    """state of torch's optimizer, by ``_Moved.numbers``"""
    z: Tensor | None = None
    """(D,), if a part of Z is kept after a step; otherwise Z is allocated in each step"""
    z_of: dict[nn.Parameter, Tensor] = field(default_factory=dict)  # parts of Z that are kept
    rounded: Tensor | None = None  # Z in the type of the weights whose updates stay in Z
    rounded_of: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    inner: torch.optim.Optimizer = field(init=False)  # torch's optimizer of ``moved``


class ProjectedOptimizer(torch.optim.Optimizer):
    """An update rule in the projected space, with groups and state like any torch optimizer.

    Gradients are not read from ``p.grad``, which would have the shape of the weight. Call
    ``receive`` with the private gradients, then ``step``. Moments are float32 for all weights.

    Args:
        params: parameters or parameter groups, which may set ``lr``, ``weight_decay`` and the
            settings of the rule.
        lr: the learning rate.
        rule: a name in ``UPDATE_RULES``: ``adam``, ``sgd`` or ``momentum``.
        weight_decay: decoupled; a step multiplies the weight by ``1 - lr * weight_decay``. If the
            updates are stored separately (``store_separately``), Z is multiplied in each step, and
            W at the next merge by the product of all factors since the last merge.
        rounding_seed: the public seed of the rounding.
        keep_changes: whether ``changes`` stores the total change of each projected weight, as part
            of the state. Updates that are stored separately are included when they are merged.
        **settings: settings of the rule: ``betas`` and ``eps`` of Adam, ``momentum`` of momentum.

    Raises:
        ValueError: for an unknown rule, a setting that the rule does not have, or a value out of
            range.
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
        settings = self._rule.checked(settings, lr=lr, weight_decay=weight_decay)
        super().__init__(params, {"lr": lr, **settings, "weight_decay": weight_decay})
        self.changes = LowRankChanges() if keep_changes else None
        self._rounding_seed = rounding_seed
        self._private_grads: Mapping[nn.Parameter, Tensor] | None = None
        self._projectors: Mapping[nn.Parameter, Projector] = {}
        # Projectors of separately stored updates
        self._separate: dict[nn.Parameter, Projector] = {}
        self._flat: Tensor | None = None  # concatenated private gradients
        self._places: Mapping[nn.Parameter, Place] = {}
        self._laid_out: _LaidOut | None = None

    def receive(
        self,
        private_grads: Mapping[nn.Parameter, Tensor],
        projectors: Mapping[nn.Parameter, Projector] | None = None,
        flat: Tensor | None = None,
        places: Mapping[nn.Parameter, Place] | None = None,
    ) -> None:
        """Receive the private gradients of the next step.

        Args:
            private_grads: weight -> gradient; projected, if the weight has a projector.
            projectors: weight -> projector.
            flat: (D,), the concatenated gradients of the other weights.
            places: weight -> the position of its gradient in ``flat``.
        """
        self._private_grads, self._projectors = private_grads, projectors or {}
        self._flat, self._places = flat, places or {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters by the gradients received. Each gradient is applied once.

        Raises:
            PrivacyError: if no gradients were received since the last step; or if they belong to
                parameters that the optimizer does not have.
        """
        if closure is not None:
            raise PrivacyError(
                "step(closure) is not supported: a closure would compute gradients without noise. "
                "Call receive() with private gradients, then step()."
            )
        if self._private_grads is None:
            raise PrivacyError(
                "step() without receive(): there is no private gradient to apply. Call receive() "
                "before each step."
            )
        self._refuse_other_coordinates()
        laid_out = self._lay_out(self._private_grads)
        z_of = self._prepare(laid_out, self._private_grads)
        for group, weights in zip(self.param_groups, laid_out.groups, strict=True):
            self._decay(group, weights)
        laid_out.inner.step()
        if not self._rule.counts_steps:
            for state in laid_out.states.values():
                state["step"] += 1
        for group, weights in zip(self.param_groups, laid_out.groups, strict=True):
            self._move_weights(group, weights, z_of)
            for weight in weights.by_rows:
                self._move_by_rows(weight, self._private_grads[weight], group)
        self._clear(laid_out, z_of)
        self._private_grads, self._projectors, self._flat = None, {}, None

    def _refuse_unknown(self, given: set[nn.Parameter]) -> None:
        unknown = given.difference(*(group["params"] for group in self.param_groups))
        if unknown:
            raise PrivacyError(
                f"{len(unknown)} of {len(given)} private gradients belong to parameters that the "
                "optimizer does not have, so they would not be applied. Make the optimizer of the "
                "model's current parameters."
            )

    def _prepare(
        self, laid_out: _LaidOut, private_grads: Mapping[nn.Parameter, Tensor]
    ) -> dict[nn.Parameter, Tensor]:
        """Pass the private gradients and the current learning rates to torch's optimizer.

        Returns:
            Weight -> its part of Z.
        """
        for inner, (first, *_) in zip(laid_out.inner.param_groups, laid_out.alike, strict=True):
            inner.update(self._settings_of(self.param_groups[first]))
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
                numbers.data = local(weight).detach()  # its storage may have been replaced
            elif weight not in z_of:
                numbers.data = z_of[weight] = torch.zeros(gradient.shape, device=numbers.device)
            _check_shape(numbers, gradient.shape)
            numbers.grad = gradient.contiguous()  # torch's fused kernel requires it
        return z_of

    def _decay(self, group: dict[str, Any], weights: _Group) -> None:
        """Apply weight decay to the tensors that torch's optimizer updates in place."""
        decay = _decay_of(group)
        if decay == 1:
            return
        stored = [self.state[w]["update"] for w in weights.separate]
        stored += [self.state[w][_VALUE] for w in weights.valued]
        if targets := [*stored, *(local(weight) for weight in weights.in_place)]:
            torch._foreach_mul_(targets, decay)
        for weight in weights.separate:
            self.state[weight]["decay"] *= decay

    def _move_weights(
        self, group: dict[str, Any], weights: _Group, z_of: Mapping[nn.Parameter, Tensor]
    ) -> None:
        """Add Z to the weights, except to weights whose updates stay in Z."""
        decay = _decay_of(group)
        for weight in weights.lifted:
            self._add_lifted(weight, z_of[weight], self._projectors[weight], decay)
        if weights.added:
            targets = [local(weight) for weight in weights.added]
            if decay != 1:
                torch._foreach_mul_(targets, decay)
            torch._foreach_add_(targets, [_here(z_of[w], w) for w in weights.added])
        if weights.valued:
            targets = [local(weight) for weight in weights.valued]
            torch._foreach_copy_(targets, [_here(z_of[w], w) for w in weights.valued])

    def _move_by_rows(self, weight: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        """Update an unprojected 16-bit weight in blocks of rows, to limit float32 copies.

        Torch's optimizer receives one block of rows after the other, with their moments.
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
        """Free the tensors of the step, and set the applied parts of Z to zero."""
        for moved in laid_out.moved:
            moved.numbers.grad = None
            stays = (
                laid_out.z is not None if moved.weight is None else moved.weight in laid_out.z_of
            )
            if not stays:
                moved.numbers.data = moved.numbers.new_empty(0)
        applied = [w for weights in laid_out.groups for w in (*weights.lifted, *weights.added)]
        if stale := [z_of[weight] for weight in applied if weight in laid_out.z_of]:
            torch._foreach_zero_(stale)
        if laid_out.rounded is not None and laid_out.z is not None:
            laid_out.rounded.copy_(laid_out.z)

    # ---- The layout of Z ----

    def _settings_of(self, group: Mapping[str, Any]) -> dict[str, Any]:
        return {name: group[name] for name in ("lr", *self._rule.settings)}

    def _alike(self) -> list[list[int]]:
        """Return lists of indices of the parameter groups that have equal settings now."""
        by_settings: dict[str, list[int]] = {}
        for number, group in enumerate(self.param_groups):
            by_settings.setdefault(repr(self._settings_of(group)), []).append(number)
        return list(by_settings.values())

    def _lay_out(self, private_grads: Mapping[nn.Parameter, Tensor]) -> _LaidOut:
        """Return the layout of the last step, or a new one if weights or settings changed."""
        last, alike = self._laid_out, self._alike()
        if (
            last is not None
            and last.alike == alike
            and (last.places is self._places or last.places == self._places)
            and last.alone == private_grads.keys()
            and last.projected == self._projectors.keys()
        ):
            return last
        self._refuse_unknown({*self._places, *private_grads})
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
        """Concatenate the state of the weights whose gradients are in the flat vector.

        Yields:
            For neighbouring weights with the same settings and number of updates: the first weight,
            their part of Z, and its state.
        """
        if self._flat is None:
            return
        kinds = {weight: self._kind(weight) for weight in self._places}
        if not {"separate", "valued"}.isdisjoint(kinds.values()):
            new.z = torch.zeros_like(self._flat)
            new.z_of = {weight: place.of(new.z) for weight, place in self._places.items()}
        vectors = {key: torch.zeros_like(self._flat) for key in self._rule.moments}
        runs: list[tuple[nn.Parameter, slice, dict[str, Tensor]]] = []
        last: tuple[Any, ...] = ()
        for weight, place in self._places.items():
            getattr(new.groups[number_of[weight]], kinds[weight]).append(weight)
            count = float(self.state[weight].get("step", 0.0))
            same = inner_of[number_of[weight]], count
            if last != (place.start, *same):
                step = torch.full((), count, device=self._flat.device)
                runs.append((weight, slice(place.start, place.start), {"step": step}))
            first, part, state = runs[-1]
            runs[-1] = first, slice(part.start, place.stop), state
            last = place.stop, *same
            views = {key: place.of(vector) for key, vector in vectors.items()}
            self._take_over(weight, views | {"step": state["step"]})
            self._keep(new, weight, kinds[weight])
        self._round_separate(new)
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
        """Make the state of the weights whose gradients are separate tensors.

        Yields:
            For each weight that is not updated by rows: the weight, its part of Z (or the weight
            itself), and its state.
        """
        for weight, gradient in private_grads.items():
            state, here, kind = self.state[weight], local(weight), self._kind(weight)
            if kind == "valued":
                kind = "by_rows"
            elif kind == "added" and here.dtype is torch.float32 and here.is_contiguous():
                kind = "in_place"
            getattr(new.groups[number_of[weight]], kind).append(weight)
            like = gradient if weight in self._projectors else weight  # the weight may be sharded
            step = torch.full((), float(state.get("step", 0.0)), device=here.device)
            moments = {key: self._moment(state.get(key), like) for key in self._rule.moments}
            self._take_over(weight, moments | {"step": step})
            state.pop(_VALUE, None)
            if kind == "by_rows":
                continue
            numbers = nn.Parameter(here.new_empty(0, dtype=torch.float32))
            if kind == "separate":
                new.z_of[weight] = numbers.data = torch.zeros_like(gradient)
                self._keep(new, weight, kind)
            parts = {key: local(moment) for key, moment in moments.items()}
            yield weight, _Moved(numbers, None, weight, kind == "in_place"), parts | {"step": step}

    def _moment(self, saved: Tensor | None, like: Tensor) -> Tensor:
        """Return a contiguous float32 moment: ``saved`` if it fits ``like``, otherwise zeros."""
        if saved is not None and saved.shape == like.shape and saved.is_contiguous():
            return spread(saved, like)
        options: Any = {"dtype": torch.float32, "memory_format": torch.contiguous_format}
        return torch.zeros_like(like, **options)

    def _kind(self, weight: nn.Parameter) -> str:
        """Return the list in ``_Group`` for a weight whose gradient is in the flat vector."""
        if weight in self._separate:
            return "separate"
        if weight in self._projectors:
            return "lifted"
        return "valued" if is_short(weight) else "added"

    def _take_over(self, weight: nn.Parameter, places: Mapping[str, Tensor]) -> None:
        """Copy the state of a weight to its new tensors."""
        state = self.state[weight]
        for key, place in places.items():
            if key in state and key != "step" and state[key] is not place:
                _check_shape(state[key], place.shape)
                local(place).copy_(local(spread(state[key], place)))
            state[key] = place

    def _keep(self, new: _LaidOut, weight: nn.Parameter, kind: str) -> None:
        """Copy the part of Z that is kept for a weight to its new tensor."""
        state = self.state[weight]
        if kind == "separate":
            z = new.z_of[weight].copy_(state["update"])
            state["update"].set_(z)  # in place, because a branch uses this tensor
        elif kind == "valued":
            value, now = state.get(_VALUE), full_tensor(weight.detach())
            if value is None or not torch.equal(value.to(weight.dtype), now):
                value = now  # there is no float32 value yet, or the weight was changed
            state[_VALUE] = new.z_of[weight].copy_(value)

    def _round_separate(self, new: _LaidOut) -> None:
        """Make a copy of Z in the type of the weights whose updates stay in Z."""
        separate = [weight for weight in new.places if weight in self._separate]
        if separate and new.z is not None:
            new.rounded = z = new.z.to(separate[0].dtype)
            same = [weight for weight in separate if weight.dtype is z.dtype]
            new.rounded_of = {weight: new.places[weight].of(z) for weight in same}

    # ---- Lifted updates ----

    def _add_lifted(
        self, weight: nn.Parameter, z: Tensor, projector: Projector, decay: float
    ) -> None:
        """Set the weight to ``decay * W + lift(z)``, without an m x n temporary."""
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
        """Return the blocks of rows of a weight, or their parts in this process.

        Each block has a number that seeds its rounding, which does not depend on the sharding.
        """
        group = self.param_groups[0]  # saved state that does not belong to one weight
        most = _BLOCK if is_cpu(weight.device) else _GPU_BLOCK
        numbered = list(enumerate(row_blocks(weight, most), group.get("rounded", 0) + 1))
        if is_short(weight):
            group["rounded"] = numbered[-1][0] if numbered else group.get("rounded", 0)
        if weight.dim() == 0:
            return [_Block(number, ..., ..., None) for number, _ in numbered]
        local_part, blocks = local_rows(weight), []
        for number, block in numbered:
            stop = min(block.stop, len(weight))
            rows = slice(max(block.start, local_part.start), min(stop, local_part.stop))
            if rows.start < rows.stop:
                here = slice(rows.start - local_part.start, rows.stop - local_part.start)
                among = stop - block.start, rows.start - block.start
                blocks.append(_Block(number, here, rows, among))
        return blocks

    def _write(self, here: Tensor, block: _Block, total: Tensor) -> None:
        generator = rounding_generator(self._rounding_seed, block.number, here.device)
        here[block.here] = round_at_random(total, here.dtype, generator, block.among)

    @torch.no_grad()
    def store_separately(self, weight: nn.Parameter, projector: Projector) -> Tensor:
        """Store the updates of a weight separately, as coordinates Z of ``projector``.

        Updates that were stored for another projector are merged first. To continue a loaded state,
        pass a projector with the P of the saved state.

        Returns:
            Z, float32: the weight is now ``W + projector.lift(Z)``. The tensor is updated in place
            until the next call or ``load_state_dict``.

        Raises:
            PrivacyError: if a loaded state has another shape of Z.
        """
        if self._separate.get(weight, projector) is not projector:
            self._merge(weight)
        state, shape = self.state[weight], projector.coordinate_shape(weight.shape)
        if weight not in self._separate:
            self._laid_out = None
        if "update" not in state:
            state["update"] = torch.zeros(shape, device=weight.device)
            state["decay"] = 1.0
        _check_shape(state["update"], shape)
        self._separate[weight] = projector
        return state["update"]

    def stored_update(self, weight: nn.Parameter) -> Tensor:
        """Return Z of a weight with separately stored updates, in the weight's type.

        The tensor is valid until the next step.
        """
        rounded = None if self._laid_out is None else self._laid_out.rounded_of.get(weight)
        return self.state[weight]["update"].to(weight.dtype) if rounded is None else rounded

    @torch.no_grad()
    def merge_(self) -> None:
        """Merge all separately stored updates into the weights by unbiased stochastic rounding.

        All Z are 0 afterwards. Call it on every rank before weights are saved or replaced.
        """
        for weight in self._separate:
            self._merge(weight)

    def _merge(self, weight: nn.Parameter) -> None:
        state = self.state[weight]
        if state["decay"] != 1 or state["update"].any():
            projector = self._separate[weight]
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
            for weight, projector in self._separate.items()
            if weight in given
        ):
            raise PrivacyError(
                "The private gradient of a weight has another projection than the updates stored "
                "for this weight. Before the forward pass, call LowRankUpdates.set_projectors() "
                "with the projectors of the step."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with whole tensors.

        If weights are sharded, all processes must call this together.
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
        """Yield the index in the state and the weight, for each weight."""
        order = [index for group in packed["param_groups"] for index in group["params"]]
        weights = [weight for group in self.param_groups for weight in group["params"]]
        return zip(order, weights, strict=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. It stays float32, where torch would cast it to the weight's type.

        Raises:
            ValueError: if the state belongs to another rule; or if it contains updates that were
                not merged, and the weight is float32 now.
        """
        for entry in state_dict["state"].values():
            self._check_rule(entry)
        saved = state_dict["state"]
        extra = _CHANGE, _VALUE
        plain = {i: {k: entry[k] for k in entry if k not in extra} for i, entry in saved.items()}
        super().load_state_dict({**state_dict, "state": plain})
        self.changes = None if self.changes is None else LowRankChanges()
        self._separate, self._laid_out = {}, None
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
                        "The state contains updates that were not merged into the weights, and "
                        f"the weights are {weight.dtype} now. Resume with weights of the "
                        "checkpoint's type."
                    )
                del self.state[weight]["update"], self.state[weight]["decay"]

    def _check_rule(self, entry: Mapping[str, Any]) -> None:
        every = {key for rule in UPDATE_RULES.values() for key in rule.moments}
        saved, needed = every & entry.keys(), set(self._rule.moments)
        if "step" in entry and saved != needed:
            raise ValueError(
                f"The state has the moments {sorted(saved)}, but rule={self._rule.name!r} needs "
                f"{sorted(needed)}. Resume with the rule that the checkpoint was made with."
            )

    def state_bytes(self) -> int:
        """Return the size of the moments, stored updates, float32 values and changes, in bytes."""
        keys = (*self._rule.moments, "update", _VALUE)
        size = sum(s[key].nbytes for s in self.state.values() for key in keys if key in s)
        return size + (0 if self.changes is None else self.changes.nbytes)


class ProjectedAdam(ProjectedOptimizer):
    """``ProjectedOptimizer`` with ``rule="adam"``, and the arguments of ``torch.optim.Adam``."""

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
    """Return the rows of Z that belong to this process's part of an unprojected weight."""
    return z if z.shape == local(weight).shape else rows_here(z, weight)


def _check_shape(tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise PrivacyError(
            f"The optimizer's state has shape {tuple(tensor.shape)}, but the private gradient has "
            f"{tuple(shape)}: the projection changed. Resume with the projection, projection_rank "
            "and optim_target_modules that the checkpoint was made with."
        )
