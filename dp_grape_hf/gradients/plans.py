"""Plans for running sites by autograd functions; they are made once for each set of projections.

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
    """A term ``lift(Z)`` that is added to the weight of a layer, for all samples."""

    @property
    def projector(self) -> Projector | None:
        """The projector of Z."""

    def take(self) -> Tensor:
        """Return Z; the layer then adds the term itself in this pass."""

    def leave(self) -> None:
        """End the pass in which layers may call ``take``."""


def _weight_and_bias(layer: Any) -> tuple[Tensor, Tensor | None]:
    """Return ``layer.weight`` and ``layer.bias``, faster where they are parameters."""
    if torch.compiler.is_compiling():
        return layer.weight, layer.bias
    own = layer._parameters
    weight = own["weight"] if "weight" in own else layer.weight
    return weight, own["bias"] if "bias" in own else layer.bias


class Shared:
    """Tensors that several layers with the same P share: matrices made of P, and the input.

    Queries, keys and values have the same input, and with principal directions the same P. So the
    input is cast and projected only once, if these layers run one after another.

    Args:
        projectors: name -> projector, for all projected parameters.
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
        """Return ``before``, ``constant`` and ``after`` as ``functions.Linear`` takes them."""
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

    def by_several(self, projector: Projector | None) -> bool:
        """Return whether several layers have this P."""
        return projector is not None and self._users[id(projector.matrix)] > 1

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return an input in another dtype: the same tensor for the same input."""
        key = self._input
        if key is None or key[0]() is not x or key[1:] != (x._version, dtype):
            self.forget()
            self._input, self._cast = (ref(x), x._version, dtype), x.to(dtype)
        assert self._cast is not None
        return self._cast

    def projected(self, cast: Tensor, before: Tensor, constant: Tensor | None) -> Tensor:
        """Return ``x P`` of the result of ``cast``: the same tensor for the same P."""
        if self._projected is None or self._before is not before:
            with torch.no_grad():
                self._projected = nn.functional.linear(cast, before, constant)
            self._before = before
        return self._projected

    def forget(self) -> None:
        """Free the last input."""
        self._input = self._cast = self._before = self._projected = None


@dataclass(eq=False)
class LinearPlan:
    """Plan that runs ``nn.Linear`` and ``Conv1D`` by ``functions.Linear``.

    Args:
        layer: the layer.
        shared: the shared tensors of all plans of the model.
        piece: the coordinates of the weight, including the bias if ``folded``; or None.
        bias: the coordinates of the bias, if they are separate; or None.
        projector: the projector of the weight, or None.
        folded: whether the bias is treated as one more row of Z.
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
        """True if the weight is stored as (inputs, outputs)."""
        return isinstance(self.layer, Conv1D)

    @property
    def keeps_input(self) -> bool:
        """True if the gradient of the weight needs the full input."""
        return self.piece is not None and not self._on_input()

    def _on_input(self) -> bool:
        side = Side.LEFT if self.conv1d else Side.RIGHT
        return self.projector is not None and self.projector.side is side

    def run(self, x: Tensor, again: Any = None, argument: Any = None) -> Tensor:
        """Return the layer's output."""
        (weight, bias), dtype = _weight_and_bias(self.layer), x.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        before, constant, after = self._matrices_as(dtype)
        projected = None
        if before is None or not self.several or torch.compiler.is_compiling():
            # compiled code merges equal computations itself
            x = x if x.dtype is dtype else x.to(dtype)
        else:
            x = self.shared.cast(x, dtype)
            projected = self.shared.projected(x, before, constant)
        shared = None
        if self.branch is not None and self.projector is not None:
            shared = self.branch.take().to(x.dtype)
            shared = shared.mT if self.projector.side is Side.RIGHT else shared
        first = x, weight.T if self.conv1d else weight, bias, before, constant, self.tap
        if before is not None and self.bias_tap is None and shared is None:
            return functions.Projected.apply(*first, projected)
        swapped = self.projector is None and not self.conv1d
        rest = self.bias_tap, after, swapped, shared, again, argument
        return functions.Linear.apply(*first, projected, *rest)

    def prepare_like(self, other: Plan) -> None:
        """Make the tensors that ``other`` has made, so that its compiled code can run this plan."""
        for dtype in getattr(other, "_matrices", ()):
            self._matrices_as(dtype)

    def _matrices_as(self, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        """Return ``before``, ``constant`` and ``after`` as ``functions.Linear`` takes them."""
        if dtype not in self._matrices:
            matrices: tuple[Tensor | None, ...] = None, None, None
            if self.projector is not None and self.piece is not None:
                options = self.projector, self._on_input(), self.folded, dtype
                matrices = self.shared.matrices(*options)
            self._matrices[dtype] = matrices
        return self._matrices[dtype]


@dataclass(eq=False)
class NormPlan:
    """Plan that runs ``nn.LayerNorm`` by ``functions.LayerNorm``."""

    layer: Any
    piece: Piece | None
    bias: Piece | None
    tap: Tensor | None = None
    bias_tap: Tensor | None = None

    def run(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        weight, bias = _weight_and_bias(self.layer)
        rest = weight, bias, self.layer.eps, self.tap, self.bias_tap
        if torch.is_autocast_enabled(x.device.type):  # autocast computes norms in float32
            with torch.autocast(x.device.type, enabled=False):
                return functions.LayerNorm.apply(x.float(), *rest)
        return functions.LayerNorm.apply(
            x if x.dtype is weight.dtype else x.to(weight.dtype), *rest
        )

    def prepare_like(self, other: Plan) -> None:
        """Do nothing: no tensor of this plan depends on the projections."""


@dataclass(eq=False)
class RMSNormPlan:
    """Plan that runs the RMSNorm of any model family by ``functions.RMSNorm``."""

    layer: Any
    piece: Piece | None
    rule: RMSNormRule
    offset: float
    bias: None = None
    tap: Tensor | None = None
    bias_tap: Tensor | None = None
    _dtypes: dict[tuple[torch.dtype, bool], torch.dtype] = field(default_factory=dict)

    def run(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        eps = self.rule.eps(self.layer, x.dtype)
        dtype = self._dtype_of_output(x)
        return functions.RMSNorm.apply(x, self.layer.weight, eps, self.offset, dtype, self.tap)

    def _dtype_of_output(self, x: Tensor) -> torch.dtype:
        """Return the dtype of the output of the layer's code for this input."""
        if x.dtype is self.layer.weight.dtype:
            return x.dtype
        key = x.dtype, torch.is_autocast_enabled(x.device.type)
        if key not in self._dtypes:
            with torch.no_grad():
                forward = type(self.layer).forward
                self._dtypes[key] = forward(self.layer, torch.zeros_like(x.detach()[:1])).dtype
        return self._dtypes[key]

    def prepare_like(self, other: Plan) -> None:
        """Copy the dtypes of ``other``, so that its compiled code can run this plan."""
        self._dtypes |= getattr(other, "_dtypes", {})


Plan = LinearPlan | NormPlan | RMSNormPlan

_PLAIN = (Tensor, FakeTensor)  # types of weights that are neither quantised nor sharded


class Plans:
    """The plans of all sites for some projections.

    Args:
        layout: the positions of coordinates in the vector.
        projectors: name -> projector.
        branches: layer -> its branch.
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
        """Return whether ``of`` was called for a site."""
        return site in self._plans

    def of(self, site: Site, forward: Forward) -> Plan | None:
        """Return the plan of a site; None if the site must run by its rule."""
        if site not in self._plans:
            self._plans[site] = self._make(site)
            self._connect(self._plans[site])
        plan = self._plans[site]
        if plan is None or not site.carried or site.rule is None:
            return None
        # A forward that the user has replaced must run.
        original = getattr(forward, "__func__", None) is type(site.module).forward
        return plan if original else None

    def tap(self, piece: Piece) -> Tensor:
        """Return zero coordinates of each sample, (B, *piece.shape), which take no memory."""
        taps = self.taps
        if piece not in taps:
            assert self._zero is not None
            zeros = self._zero.expand(self._batch_size, *piece.shape)
            taps[piece] = zeros.requires_grad_()
        return taps[piece]

    def ready(self, device: torch.device, batch_size: int) -> None:
        """Prepare the coordinates for a batch size."""
        if self._zero is None or self._zero.device != device:
            self._zero, self._taps = torch.zeros((), device=device), {}
        elif batch_size == self._batch_size and not self._branches:
            return
        self._batch_size = batch_size
        for plan in self._plans.values():
            self._connect(plan)

    @property
    def taps(self) -> dict[Piece, Tensor]:
        """The coordinates of the current batch size that ``tap`` has made."""
        return self._taps.setdefault(self._batch_size, {})

    def _connect(self, plan: Plan | None) -> None:
        if plan is not None:
            plan.tap = None if plan.piece is None else self.tap(plan.piece)
            plan.bias_tap = None if plan.bias is None else self.tap(plan.bias)
        if isinstance(plan, LinearPlan):
            branch = self._branches.get(plan.layer)
            same = branch is not None and branch.projector is plan.projector
            plan.branch = branch if same else None

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
