"""How each site is run while the projections are the same: worked out once, used in every pass.

Shapes: B samples, m x n a weight as stored, r rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from dp_grape_hf.gradients import functions
from dp_grape_hf.gradients.flat import Layout, Piece
from dp_grape_hf.gradients.layers import Forward, Site
from dp_grape_hf.gradients.rules import Conv1D, RMSNormRule
from dp_grape_hf.projections import Projector, Side


class Branch(Protocol):
    """What adds ``lift(Z)`` to the weight of a layer while the layer runs, for all samples."""

    @property
    def projector(self) -> Projector | None:
        """What Z is a coordinate of."""

    def take(self) -> Tensor:
        """Returns Z, which the layer adds itself this time."""

    def leave(self) -> None:
        """Ends the pass in which layers may take it."""


class Shared:
    """What layers with the same P share: P as functions take it, and the input.

    Queries, keys and values are computed of one tensor, and with principal directions they have one
    P. So that tensor is cast and projected once, if they run one after another.

    Args:
        projectors: name -> projector, of all that is trained.
    """

    def __init__(self, projectors: Mapping[str, Projector]) -> None:
        self._users = Counter(id(projector.matrix) for projector in projectors.values())
        self._made: dict[Any, tuple[Tensor | None, ...]] = {}
        self._input: tuple[ref[Tensor], int, torch.dtype] | None = None
        self._cast: Tensor | None = None
        self._before: Tensor | None = None
        self._projected: Tensor | None = None

    def matrices(
        self, projector: Projector, on_input: bool, folded: bool, dtype: torch.dtype
    ) -> tuple[Tensor | None, ...]:
        """Returns ``before``, ``constant`` and ``after`` as ``functions.Linear`` takes them."""
        key = id(projector.matrix), on_input, folded, dtype
        if key not in self._made:
            matrix = projector.matrix.to(dtype)
            if not on_input:
                self._made[key] = None, None, matrix
            elif folded:
                rows = torch.cat([matrix.T, matrix.new_zeros(1, len(matrix))])
                one = torch.zeros(len(rows), dtype=dtype, device=matrix.device)
                one[-1] = 1
                self._made[key] = rows, one, None
            else:
                self._made[key] = matrix.T, None, None
        return self._made[key]

    @property
    def copies(self) -> list[Tensor]:
        """P as it was made for passes."""
        return [matrix for made in self._made.values() for matrix in made if matrix is not None]

    def by_several(self, projector: Projector | None) -> bool:
        """Returns whether several layers have this P."""
        return projector is not None and self._users[id(projector.matrix)] > 1

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns an input in another type: the same tensor for the same input."""
        key = self._input
        if key is None or key[0]() is not x or key[1:] != (x._version, dtype):
            self.forget()
            self._input, self._cast = (ref(x), x._version, dtype), x.to(dtype)
        assert self._cast is not None
        return self._cast

    def projected(self, cast: Tensor, before: Tensor, constant: Tensor | None) -> Tensor:
        """Returns ``x P`` of what ``cast`` returned: the same tensor for the same P."""
        if self._projected is None or self._before is not before:
            with torch.no_grad():
                self._projected = nn.functional.linear(cast, before, constant)
            self._before = before
        return self._projected

    def forget(self) -> None:
        """Forgets the last input."""
        self._input = self._cast = self._before = self._projected = None


@dataclass(eq=False)
class LinearPlan:
    """Runs ``nn.Linear`` and ``Conv1D`` by ``functions.Linear``.

    Args:
        layer: the layer.
        shared: by the plans of one model.
        piece: the coordinates of its weight, with those of the bias if ``folded``; or None.
        bias: those of its bias, if they lie by themselves.
        projector: of the weight, or None.
        folded: whether the bias is one more column of P.
    """

    layer: Any
    shared: Shared
    piece: Piece | None
    bias: Piece | None
    projector: Projector | None
    folded: bool
    tap: Tensor | None = None
    bias_tap: Tensor | None = None
    branch: Branch | None = None
    _matrices: dict[torch.dtype, tuple[Tensor | None, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.several = self.shared.by_several(self.projector)

    @property
    def conv1d(self) -> bool:
        """Whether the weight is stored as (inputs, outputs)."""
        return isinstance(self.layer, Conv1D)

    @property
    def keeps_input(self) -> bool:
        """Whether all of the input is needed for the gradient of the weight."""
        return self.piece is not None and not self._on_input()

    def _on_input(self) -> bool:
        side = Side.LEFT if self.conv1d else Side.RIGHT
        return self.projector is not None and self.projector.side is side

    def run(self, x: Tensor, again: Any = None, argument: Any = None) -> Tensor:
        """Returns the layer's output."""
        weight, bias, dtype = self.layer.weight, self.layer.bias, x.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        before, constant, after = self._matrices_as(dtype)
        projected = None
        if before is None or not self.several or torch.compiler.is_compiling():
            x = x.to(dtype)  # compiled code computes by itself only once what is the same
        else:
            x = self.shared.cast(x, dtype)
            projected = self.shared.projected(x, before, constant)
        shared = None
        if self.branch is not None and self.projector is not None:
            shared = self.branch.take().to(x.dtype)
            shared = shared.mT if self.projector.side is Side.RIGHT else shared
        usual = x, weight.T if self.conv1d else weight, bias, before, constant, self.tap
        if before is not None and self.bias_tap is None and shared is None:
            return functions.Projected.apply(*usual, projected)
        swapped = self.projector is None and not self.conv1d
        rest = self.bias_tap, after, swapped, shared, again, argument
        return functions.Linear.apply(*usual, projected, *rest)

    def prepare_like(self, other: Plan) -> None:
        """Makes what ``other`` has, so that compiled code that ran ``other`` can run this one."""
        for dtype in getattr(other, "_matrices", ()):
            self._matrices_as(dtype)

    def _matrices_as(self, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        """Returns P as ``functions.Linear`` takes it."""
        if dtype not in self._matrices:
            found: tuple[Tensor | None, ...] = None, None, None
            if self.projector is not None and self.piece is not None:
                options = self.projector, self._on_input(), self.folded, dtype
                found = self.shared.matrices(*options)
            self._matrices[dtype] = found
        return self._matrices[dtype]


@dataclass(eq=False)
class NormPlan:
    """Runs ``nn.LayerNorm`` by ``functions.LayerNorm``."""

    layer: Any
    piece: Piece | None
    bias: Piece | None
    tap: Tensor | None = None
    bias_tap: Tensor | None = None

    def run(self, x: Tensor) -> Tensor:
        """Returns the layer's output."""
        layer = self.layer
        if torch.is_autocast_enabled(x.device.type):  # which computes norms in float32
            with torch.autocast(x.device.type, enabled=False):
                return self._apply(x.float())
        return self._apply(x.to(layer.weight.dtype))

    def _apply(self, x: Tensor) -> Tensor:
        layer = self.layer
        return functions.LayerNorm.apply(
            *(x, layer.weight, layer.bias, layer.eps, self.tap, self.bias_tap),
        )

    def prepare_like(self, other: Plan) -> None:
        """Makes what ``other`` has: nothing depends on the projections."""


@dataclass(eq=False)
class RMSNormPlan:
    """Runs the RMSNorm of any model family by ``functions.RMSNorm``."""

    layer: Any
    piece: Piece | None
    rule: RMSNormRule
    offset: float
    bias: None = None
    tap: Tensor | None = None
    bias_tap: Tensor | None = None
    _dtypes: dict[tuple[torch.dtype, bool], torch.dtype] = field(default_factory=dict)

    def run(self, x: Tensor) -> Tensor:
        """Returns the layer's output."""
        eps = self.rule.eps(self.layer, x.dtype)
        dtype = self._dtype_of_output(x)
        return functions.RMSNorm.apply(x, self.layer.weight, eps, self.offset, dtype, self.tap)

    def _dtype_of_output(self, x: Tensor) -> torch.dtype:
        """Returns what the layer's code makes of an input of that type."""
        if x.dtype is self.layer.weight.dtype:
            return x.dtype
        key = x.dtype, torch.is_autocast_enabled(x.device.type)
        if key not in self._dtypes:
            with torch.no_grad():
                forward = type(self.layer).forward
                self._dtypes[key] = forward(self.layer, torch.zeros_like(x.detach()[:1])).dtype
        return self._dtypes[key]

    def prepare_like(self, other: Plan) -> None:
        """Makes what ``other`` has, so that compiled code that ran ``other`` can run this one."""
        self._dtypes |= getattr(other, "_dtypes", {})


Plan = LinearPlan | NormPlan | RMSNormPlan

_PLAIN = (Tensor, FakeTensor)  # neither quantised nor spread over processes


class Plans:
    """The plans of all sites for some projections.

    Args:
        layout: who has which coordinates.
        projectors: name -> projector.
        branches: layer -> its branch, if it has one.
    """

    def __init__(
        self,
        layout: Layout,
        projectors: Mapping[str, Projector],
        branches: Mapping[nn.Module, Branch],
    ) -> None:
        self.layout, self.projectors, self._branches = layout, projectors, branches
        self.shared = Shared(projectors)
        self._plans: dict[Site, Plan | None] = {}
        self._taps: dict[int, dict[Piece, Tensor]] = {}  # B -> the coordinates
        self._zero: Tensor | None = None
        self._batch_size = 0

    def __contains__(self, site: Site) -> bool:
        """Returns whether it is known how to run a site."""
        return site in self._plans

    def of(self, site: Site, forward: Forward) -> Plan | None:
        """Returns how to run a site; None if it must be run as any layer."""
        if site not in self._plans:
            self._plans[site] = self._make(site)
            self._connect(self._plans[site])
        plan = self._plans[site]
        if plan is None or not site.carried or site.rule is None:
            return None
        # Whoever has put another forward in its place wants that to be run.
        own = getattr(forward, "__func__", None) is type(site.module).forward
        return plan if own else None

    def tap(self, piece: Piece) -> Tensor:
        """Returns coordinates of each sample, (B, *piece.shape): zeros that take no memory."""
        taps = self.taps
        if piece not in taps:
            assert self._zero is not None
            zeros = self._zero.expand(self._batch_size, *piece.shape)
            taps[piece] = zeros.requires_grad_()
        return taps[piece]

    def ready(self, device: torch.device, batch_size: int) -> None:
        """Makes the coordinates those of so many samples."""
        if self._zero is None or self._zero.device != device:
            self._zero, self._taps = torch.zeros((), device=device), {}
        elif batch_size == self._batch_size and not self._branches:
            return
        self._batch_size = batch_size
        for plan in self._plans.values():
            self._connect(plan)

    @property
    def taps(self) -> dict[Piece, Tensor]:
        """The coordinates that have been asked for."""
        return self._taps.setdefault(self._batch_size, {})

    @property
    def copies(self) -> list[Tensor]:
        """The tensors that were made of the projections."""
        return self.shared.copies

    def _connect(self, plan: Plan | None) -> None:
        if plan is not None:
            plan.tap = None if plan.piece is None else self.tap(plan.piece)
            plan.bias_tap = None if plan.bias is None else self.tap(plan.bias)
        if isinstance(plan, LinearPlan):
            branch = self._branches.get(plan.layer)
            known = branch is not None and branch.projector is plan.projector
            plan.branch = branch if known else None

    def _make(self, site: Site) -> Plan | None:
        layer, places = site.module, self.layout.places
        if not all(name in places for name in site.parameters.values()):
            return None
        if not all(type(p.data) in _PLAIN for p in layer.parameters(recurse=False)):
            return None
        pieces = {local: places[name].piece for local, name in site.parameters.items()}
        weight, bias = pieces.get("weight"), pieces.get("bias")
        projector = self.projectors.get(site.parameters.get("weight", ""))
        if type(layer).forward is nn.LayerNorm.forward and projector is None:
            return NormPlan(layer, weight, bias)
        if isinstance(site.rule, RMSNormRule) and projector is None:
            offset = site.rule.offset(layer, type(layer).forward.__get__(layer))
            return None if offset is None else RMSNormPlan(layer, weight, site.rule, offset)
        if type(layer).forward not in (nn.Linear.forward, Conv1D.forward):
            return None
        plan = LinearPlan(layer, self.shared, weight, bias, projector, folded=False)
        if weight is None or bias is None or plan.keeps_input or bias.start != weight.stop:
            return plan
        rows, columns = weight.shape
        folded = Piece(weight.start, (rows + 1, columns))
        return LinearPlan(layer, self.shared, folded, None, projector, folded=True)
