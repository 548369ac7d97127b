"""Optimizers of torch in the projected space (paper, Algorithm 2).

Torch's optimizer updates Z, a flat vector that concatenates the coordinates of all weights, and
that is zero before each step. The private gradients have the same layout. A step then adds Z to the
weights: ``W += lift(Z)`` for a projected weight, ``W += Z`` for others. So the private gradient,
the moments and the update of a projected weight have r x max(m, n) elements. Weight decay is
decoupled, as in AdamW, and acts on W. A large weight without a projection is not in the vector:
torch's optimizer updates it directly, a block of rows at a time.

A bfloat16 number stores 8 significant bits, and would round an update below 1/512 of a weight away.
To keep such updates, a weight may be stored as ``W + lift(U)``: then a step adds Z to U, which is
float32, and ``low_rank.LowRankUpdates`` adds the second term in the forward pass. When the
projection is redrawn, the sum is rounded stochastically, without bias. For an unprojected 16-bit
weight in the vector, such as a bias, a step adds Z to its float32 value, and the weight is this
value rounded to the nearest. Other 16-bit weights are rounded stochastically at every step.

The optimizer is post-processing: it receives private gradients only, and costs no privacy. The
random numbers of the rounding are public, so that all ranks round in the same way.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.optimizers.rules import UPDATE_RULES
from dp_grape_hf.phases import is_cpu
from dp_grape_hf.projections import (
    Projector,
    Side,
    is_short,
    round_at_random,
    rounding_generator,
    row_blocks,
)
from dp_grape_hf.sharding import full_tensor, gathered, local, local_rows, rows_here, spread

_BLOCK = 2**20  # elements of a weight that have a float32 copy at a time, on a CPU
_GPU_BLOCK = 2**24
"""Elements of a weight that have a float32 copy at a time on a GPU, enough to hide the launch."""


class _Part(NamedTuple):
    """The position of a weight's coordinates in the flat vector."""

    start: int
    shape: torch.Size

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel()

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.stop].view(self.shape)


class _Block(NamedTuple):
    """Rows of a weight that are written together."""

    number: int  # seed of the random numbers that round the block
    here: Any  # index of the block in this process's part of the weight
    rows: Any  # index of the block in the weight
    among: tuple[int, int] | None  # rows of the whole block, and the first of them in this process


class _Move(NamedTuple):
    """The way in which a part of Z enters the model."""

    weight: nn.Parameter
    place: Any  # the part of Z; None for a weight that is updated by rows
    is_projected: bool
    is_separate: bool  # whether the update is stored separately


class _Layout(NamedTuple):
    """Torch's optimizer of Z. A new one is made when ``key`` changes."""

    key: tuple[Any, ...]
    inner: torch.optim.Optimizer | None  # None without a flat vector
    groups: list[int]  # of each group of ``inner``: the index of a group with its settings
    runs: list[tuple[nn.Parameter, slice]]  # parameters of ``inner``, and their parts of Z
    moves: list[list[_Move]]  # of each parameter group


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
            updates are stored separately (``store_separately``), U is multiplied in each step, and
            W at the next merge by the product of all factors since the last merge.
        rounding_seed: the public seed of the rounding.
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
        **settings: Any,
    ) -> None:
        if rule not in UPDATE_RULES:
            raise ValueError(f"{rule=} is not known; choose one of: {', '.join(UPDATE_RULES)}.")
        self._rule = UPDATE_RULES[rule]
        settings = self._rule.checked(settings, lr=lr, weight_decay=weight_decay)
        super().__init__(params, {"lr": lr, **settings, "weight_decay": weight_decay})
        self._rounding_seed = rounding_seed
        self._private_grads: dict[nn.Parameter, Tensor] | None = None
        self._projectors: Mapping[nn.Parameter, Projector] = {}
        self._flat: Tensor | None = None  # concatenated private gradients
        self._places: Mapping[nn.Parameter, Any] = {}
        self._joined: tuple[Any, Any, Mapping[nn.Parameter, Any]] = None, None, {}
        self._layout: _Layout | None = None
        self._separate: dict[nn.Parameter, Projector] = {}  # of separately stored updates
        self._rounded: dict[nn.Parameter, Tensor] = {}  # these updates, in the weight's type

    def receive(
        self,
        private_grads: Mapping[nn.Parameter, Tensor],
        projectors: Mapping[nn.Parameter, Projector] | None = None,
        flat: Tensor | None = None,
        places: Mapping[nn.Parameter, Any] | None = None,
    ) -> None:
        """Receive the private gradients of the next step.

        Args:
            private_grads: weight -> gradient; projected, if the weight has a projector.
            projectors: weight -> projector.
            flat: (D,), the concatenated gradients of the other weights.
            places: weight -> the position of its gradient in ``flat`` (``gradients.flat.Place``),
                in the order of the vector.
        """
        self._projectors, self._private_grads = projectors or {}, dict(private_grads)
        self._flat, self._places = flat, places if places is not None else {}
        if named := [weight for weight in private_grads if weight in self._projectors]:
            gradients = [self._private_grads.pop(weight) for weight in named]
            vectors = [*([] if flat is None else [flat]), *(g.reshape(-1) for g in gradients)]
            shapes = [(w, gradient.shape) for w, gradient in zip(named, gradients, strict=True)]
            if self._joined[0] is not places or self._joined[1] != shapes:
                joined, start = {**self._places}, 0 if flat is None else len(flat)
                for weight, shape in shapes:
                    joined[weight] = _Part(start, shape)
                    start += shape.numel()
                self._joined = places, shapes, joined
            self._places, self._flat = self._joined[2], torch.cat(vectors)

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
        for weight, projector in self._separate.items():
            given = weight in self._places or weight in self._private_grads
            if given and self._projectors.get(weight) is not projector:
                raise PrivacyError(
                    "The private gradient of a weight has another projection than the updates "
                    "stored for this weight. Before the forward pass, call "
                    "LowRankUpdates.set_projectors() with the projectors of the step."
                )
        layout = self._lay_out(self._private_grads)
        z = self._updates(layout)
        for group, moves in zip(self.param_groups, layout.moves, strict=True):
            self._move(group, moves, z, self._private_grads)
        if self._rounded:
            stored = [self.state[weight]["update"] for weight in self._rounded]
            torch._foreach_copy_([*self._rounded.values()], stored)
        self._private_grads, self._projectors, self._flat = None, {}, None

    def _updates(self, layout: _Layout) -> Tensor:
        """Update Z by torch's optimizer, and return it."""
        if self._flat is None or layout.inner is None:
            return torch.empty(0)
        z = torch.zeros_like(self._flat)
        for inner, number in zip(layout.inner.param_groups, layout.groups, strict=True):
            inner.update(self._settings_of(self.param_groups[number]))
        for numbers, part in layout.runs:
            numbers.data, numbers.grad = z[part], self._flat[part]
        layout.inner.step()
        for numbers, _ in layout.runs:
            numbers.data, numbers.grad = z.new_empty(0), None
            if not self._rule.counts_steps:
                layout.inner.state[numbers]["step"] += 1
        return z

    def _move(
        self,
        group: dict[str, Any],
        moves: Iterable[_Move],
        z: Tensor,
        private_grads: Mapping[nn.Parameter, Tensor],
    ) -> None:
        """Move the weights of a group, or the float32 tensors that stand for 16-bit weights."""
        decay = 1 - float(group["lr"]) * float(group["weight_decay"])
        pairs, short = [], []
        for weight, place, is_projected, is_separate in moves:
            if place is None:
                self._move_by_rows(weight, private_grads[weight], group, decay)
            elif is_separate:
                pairs.append((self.state[weight]["update"], place.of(z)))
                self.state[weight]["decay"] *= decay
            elif is_projected:
                self._add_lifted(weight, place.of(z), self._projectors[weight], decay)
            elif is_short(weight):
                pairs.append((self.state[weight]["value"], place.of(z)))
                short.append(weight)
            else:
                pairs.append((local(weight), rows_here(place.of(z), weight)))
        if pairs:
            targets, updates = map(list, zip(*pairs, strict=True))
            if decay != 1:
                torch._foreach_mul_(targets, decay)
            torch._foreach_add_(targets, updates)
        if short:
            values = [rows_here(self.state[weight]["value"], weight) for weight in short]
            torch._foreach_copy_([local(weight) for weight in short], values)

    def _move_by_rows(
        self, weight: nn.Parameter, gradient: Tensor, group: dict[str, Any], decay: float
    ) -> None:
        """Update an unprojected weight in blocks of rows, to limit float32 copies.

        Torch's optimizer receives one block of rows after the other, with their moments.
        """
        here, gradient, state = local(weight), rows_here(gradient, weight), self.state[weight]
        state.pop("value", None)
        state.setdefault("step", torch.zeros((), device=here.device))
        for key in self._rule.moments:
            if key not in state:
                state[key] = torch.zeros_like(weight, dtype=torch.float32)
            _check_shape(state[key], weight.shape)
            state[key] = spread(state[key], weight).contiguous()
        rows = nn.Parameter(torch.zeros(0, device=here.device))
        inner = self._rule.make([{"params": [rows], **self._settings_of(group)}], {})
        for block in self._blocks(weight):
            # If a weight is float32 and contiguous, this is a view of it.
            rows.data = here[block.here].float().contiguous()
            if decay != 1:
                rows.data.mul_(decay)
            rows.grad = gradient[block.here].contiguous()  # torch's fused kernel requires it
            moments = {key: local(state[key])[block.here] for key in self._rule.moments}
            inner.state[rows] = {"step": state["step"].clone(), **moments}
            inner.step()
            if here.dtype is not torch.float32 or not here.is_contiguous():
                self._write(here, block, rows.data)
            rows.grad = None
        state["step"] = state["step"] + 1  # not in place: weights of the vector share a tensor

    # ---- The layout of Z ----

    def _settings_of(self, group: Mapping[str, Any]) -> dict[str, Any]:
        return {name: group[name] for name in ("lr", *self._rule.settings)}

    def _lay_out(self, private_grads: Mapping[nn.Parameter, Tensor]) -> _Layout:
        """Return the layout of the last step, or a new one if weights or settings changed.

        Neighbouring weights with the same settings and number of updates are one parameter of
        torch's optimizer, and groups with the same settings are one group of it.
        """
        settings = [self._settings_of(group) for group in self.param_groups]
        alike = [settings.index(one) for one in settings]
        # It must not keep a P of an earlier step in memory.
        key = alike, self._places, {*private_grads}, {*self._projectors}, {*self._separate}
        if self._layout is not None and self._layout.key == key:
            return self._layout
        number_of = {w: i for i, group in enumerate(self.param_groups) for w in group["params"]}
        given = {*self._places, *private_grads}
        if unknown := given - number_of.keys():
            raise PrivacyError(
                f"{len(unknown)} of {len(given)} private gradients belong to parameters that the "
                "optimizer does not have, so they would not be applied. Make the optimizer of the "
                "model's current parameters."
            )
        moves: list[list[_Move]] = [[] for _ in settings]
        for weight, number in number_of.items():
            if weight in given:
                kinds = weight in self._projectors, weight in self._separate
                moves[number].append(_Move(weight, self._places.get(weight), *kinds))
        groups = {first: {"params": [], **settings[first]} for first in alike}
        runs: list[tuple[nn.Parameter, slice]] = []
        states: dict[nn.Parameter, dict[str, Tensor]] = {}
        flat = torch.empty(0) if self._flat is None else self._flat
        moments = {key: torch.zeros_like(flat) for key in self._rule.moments}

        def kind(weight: nn.Parameter) -> tuple[int, float]:
            return alike[number_of[weight]], float(self.state[weight].get("step", 0.0))

        for (first, count), weights in groupby(self._places, kind):
            numbers = nn.Parameter(flat.new_empty(0))
            step = torch.full((), count, device=flat.device)
            places = {weight: self._places[weight] for weight in weights}
            for weight, place in places.items():
                state = self.state[weight]
                for name, vector in moments.items():
                    view = place.of(vector)
                    if name in state:
                        _check_shape(state[name], view.shape)
                        view.copy_(state[name])
                    state[name] = view
                state["step"] = step
                if is_short(weight) and weight not in self._projectors:
                    self._take_value(weight)
            start, *_, stop = [bound for p in places.values() for bound in (p.start, p.stop)]
            states[numbers] = {key: vector[start:stop] for key, vector in moments.items()}
            states[numbers]["step"] = step
            runs.append((numbers, slice(start, stop)))
            groups[first]["params"].append(numbers)
        used = {first: group for first, group in groups.items() if group["params"]}
        inner = self._rule.make([*used.values()], states) if used else None
        self._layout = _Layout(key, inner, [*used], runs, moves)
        return self._layout

    def _take_value(self, weight: nn.Parameter) -> None:
        """Make the float32 value of a weight, if there is none or if the weight was changed."""
        value, now = self.state[weight].get("value"), full_tensor(weight.detach())
        if value is None or not torch.equal(value.to(weight.dtype), now):
            self.state[weight]["value"] = now.float()

    # ---- Lifted updates ----

    def _add_lifted(
        self, weight: nn.Parameter, z: Tensor, projector: Projector, decay: float
    ) -> None:
        """Set the weight to ``decay * W + lift(z)``, without an m x n temporary."""
        here = local(weight)
        if not is_short(weight):
            projector.add_lifted_(here, z, decay, local_rows(weight))
            return
        for block in self._blocks(weight):
            total = here[block.here].float()
            projector.add_lifted_(total, z, decay, block.rows)
            self._write(here, block, total)

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
        """Write float32 rows into a weight; 16-bit weights are rounded stochastically."""
        if is_short(here):
            generator = rounding_generator(self._rounding_seed, block.number, here.device)
            total = round_at_random(total, here.dtype, generator, block.among)
        here[block.here] = total

    # ---- Separately stored updates ----

    @torch.no_grad()
    def store_separately(self, weight: nn.Parameter, projector: Projector) -> tuple[Tensor, Tensor]:
        """Store the updates of a weight separately, as coordinates U of ``projector``.

        Updates that were stored for another projector are merged first. To continue a loaded state,
        pass a projector with the P of the saved state.

        Returns:
            U, float32: the weight is now ``W + projector.lift(U)``. And U in the weight's type.
            Both tensors are updated in place until the next call or ``load_state_dict``.

        Raises:
            PrivacyError: if a loaded state has another shape of U.
        """
        if self._separate.get(weight, projector) is not projector:
            self._merge(weight)
        state, shape = self.state[weight], projector.coordinate_shape(weight.shape)
        if "update" not in state:
            turned = projector.side is Side.RIGHT  # the strides of private gradients
            zeros = torch.zeros(shape[::-1] if turned else shape, device=weight.device)
            state["update"], state["decay"] = zeros.mT if turned else zeros, 1.0
        _check_shape(state["update"], shape)
        self._separate[weight] = projector
        rounded = self._rounded.get(weight)
        if rounded is None or rounded.dtype is not weight.dtype:
            self._rounded[weight] = state["update"].to(weight.dtype)
        return state["update"], self._rounded[weight]

    @torch.no_grad()
    def merge_(self) -> None:
        """Merge all separately stored updates into the weights by unbiased stochastic rounding.

        All U are 0 afterwards. Call it on every rank before weights are saved or replaced.
        """
        for weight in self._separate:
            self._merge(weight)

    def _merge(self, weight: nn.Parameter) -> None:
        state = self.state[weight]
        if state["decay"] != 1 or state["update"].any():
            projector = self._separate[weight]
            self._add_lifted(weight, state["update"], projector, state["decay"])
            state["decay"] = 1.0
            state["update"].zero_()
            self._rounded[weight].zero_()

    # ---- State ----

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with whole tensors.

        If weights are sharded, all processes must call this together.
        """
        packed = super().state_dict()
        packed["state"] = {index: gathered(entry) for index, entry in packed["state"].items()}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. It stays float32, where torch would cast it to the weight's type.

        Raises:
            ValueError: if the state belongs to another rule; or if it contains updates that were
                not merged, and the weight is float32 now.
        """
        every = {key for rule in UPDATE_RULES.values() for key in rule.moments}
        needed = set(self._rule.moments)
        for entry in state_dict["state"].values():
            if "step" in entry and (saved := every & entry.keys()) != needed:
                raise ValueError(
                    f"The state has the moments {sorted(saved)}, but rule={self._rule.name!r} "
                    f"needs {sorted(needed)}. Resume with the rule that the checkpoint was made "
                    "with."
                )
        super().load_state_dict({**state_dict, "state": {}})
        self._layout, self._separate, self._rounded = None, {}, {}
        order = [index for group in state_dict["param_groups"] for index in group["params"]]
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for index, weight in zip(order, weights, strict=True):
            if index not in state_dict["state"]:
                continue
            state = self.state[weight] = {
                key: value.to(weight.device, torch.float32, copy=True)
                if isinstance(value, Tensor)
                else value
                for key, value in state_dict["state"][index].items()
            }
            if not is_short(weight):
                state.pop("value", None)
                if state.get("decay", 1.0) != 1 or state.pop("update", torch.zeros(1)).any():
                    raise ValueError(
                        "The state contains updates that were not merged into the weights, and "
                        f"the weights are {weight.dtype} now. Resume with weights of the "
                        "checkpoint's type."
                    )
                state.pop("decay", None)

    def state_bytes(self) -> int:
        """Return the size of the moments, stored updates and float32 values, in bytes."""
        pairs = (pair for s in self.state.values() for pair in s.items() if pair[0] != "step")
        return sum(value.nbytes for _, value in pairs if isinstance(value, Tensor))


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


def _check_shape(tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise PrivacyError(
            f"The optimizer's state has shape {tuple(tensor.shape)}, but the private gradient has "
            f"{tuple(shape)}: the projection changed. Resume with the projection, projection_rank "
            "and optim_target_modules that the checkpoint was made with."
        )
