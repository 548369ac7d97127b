"""How each site is run while the projections are the same: worked out once, used in every pass.

Shapes: B samples, m x n a weight as stored, r rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

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


@dataclass(eq=False)
class LinearPlan:
    """Runs ``nn.Linear`` and ``Conv1D`` by ``functions.Linear``.

    Args:
        layer: the layer.
        piece: the coordinates of its weight, with those of the bias if ``folded``; or None.
        bias: those of its bias, if they lie by themselves.
        projector: of the weight, or None.
        folded: whether the bias is one more column of P.
    """

    layer: Any
    piece: Piece | None
    bias: Piece | None
    projector: Projector | None
    folded: bool
    tap: Tensor | None = None
    bias_tap: Tensor | None = None
    branch: Branch | None = None
    _matrices: dict[torch.dtype, tuple[Tensor | None, ...]] = field(default_factory=dict)

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
        weight, bias = self.layer.weight, self.layer.bias
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        before, constant, after = self._matrices_as(x.dtype)
        shared = None
        if self.branch is not None and self.projector is not None:
            shared = self.branch.take().to(x.dtype)
            shared = shared.mT if self.projector.side is Side.RIGHT else shared
        usual = x, weight.T if self.conv1d else weight, bias, before, constant, self.tap
        if before is not None and self.bias_tap is None and shared is None:
            return functions.Projected.apply(*usual)
        swapped = self.projector is None and not self.conv1d
        rest = self.bias_tap, after, swapped, shared, again, argument
        return functions.Linear.apply(*usual, *rest)

    @property
    def copies(self) -> list[Tensor]:
        """P as it was made for passes."""
        return [x for found in self._matrices.values() for x in found if x is not None]

    def prepare_like(self, other: Plan) -> None:
        """Makes what ``other`` has, so that compiled code that ran ``other`` can run this one."""
        for dtype in getattr(other, "_matrices", ()):
            self._matrices_as(dtype)

    def _matrices_as(self, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        """Returns P as ``functions.Linear`` takes it."""
        if dtype not in self._matrices:
            found: tuple[Tensor | None, ...] = None, None, None
            if self.projector is not None and self.piece is not None:
                matrix = self.projector.matrix.to(dtype)
                if not self._on_input():
                    found = None, None, matrix
                elif self.folded:
                    rows = torch.cat([matrix.T, matrix.new_zeros(1, len(matrix))])
                    one = torch.zeros(len(rows), dtype=dtype, device=matrix.device)
                    one[-1] = 1
                    found = rows, one, None
                else:
                    found = matrix.T, None, None
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
        plans = [plan for plan in self._plans.values() if isinstance(plan, LinearPlan)]
        return [copy for plan in plans for copy in plan.copies]

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
        plan = LinearPlan(layer, weight, bias, projector, folded=False)
        if weight is None or bias is None or plan.keeps_input or bias.start != weight.stop:
            return plan
        rows, columns = weight.shape
        folded = Piece(weight.start, (rows + 1, columns))
        return LinearPlan(layer, folded, None, projector, folded=True)
