"""The low-rank branch of a linear layer, which adds float32 updates to a 16-bit weight.

While P stays the same, a weight is exactly ``W + lift(Z)``. bfloat16 would round small updates of W
away, so they are added to Z, which is float32. The branch adds the contribution of Z to the layer's
output by two products of rank r, without computing the sum of the weights. The optimizer owns Z and
merges it into W when P is redrawn (``ProjectedOptimizer.store_separately``).

Shapes: m x n the weight as stored, r rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dp_grape_hf.optimizers.projected import ProjectedOptimizer
from dp_grape_hf.projections import MATRIX_LAYERS, Projector, is_short, shared_parameters


class LowRankUpdates:
    """Forward hooks that add the updates that an optimizer stores separately from the weights.

    A weight gets a branch if it is bfloat16 or float16, trained by the optimizer, and the weight of
    exactly one ``nn.Linear`` or ``Conv1D``. Other weights, such as embeddings tied to the output
    layer or weights of a subclass, are rounded stochastically at every step.

    Run the model, then call ``leave_uncalled``. Call ``set_projectors`` before the forward passes
    of a step, ``merge_`` before the weights are saved or replaced, and ``remove`` after training,
    each on every rank. The branches act in training and evaluation, under both engines and with
    gradient checkpointing.

    Args:
        model: the model.
        optimizer: the optimizer of its parameters.
    """

    def __init__(self, model: nn.Module, optimizer: ProjectedOptimizer) -> None:
        self._optimizer = optimizer
        self._kept: dict[str, _Kept] = {}
        weights = dict(model.named_parameters())
        trained = {weight for group in optimizer.param_groups for weight in group["params"]}
        shared = shared_parameters(model)
        for path, module in model.named_modules():
            name = f"{path}.weight".lstrip(".")
            weight = weights.get(name)
            if type(module) not in MATRIX_LAYERS or weight is None or id(weight) in shared:
                continue
            if weight in trained and is_short(weight):
                branch = _Branch(stored_transposed=isinstance(module, nn.Linear))
                hook = module.register_forward_hook(branch, with_kwargs=True)
                self._kept[name] = _Kept(weight, module, branch, hook)

    def __len__(self) -> int:
        """Return how many weights have a branch."""
        return len(self._kept)

    def __contains__(self, name: str) -> bool:
        """Return whether the weight of that name has a branch."""
        return name in self._kept

    @property
    def branches(self) -> dict[nn.Module, _Branch]:
        """The branches by their layers."""
        return {kept.layer: kept.branch for kept in self._kept.values()}

    def leave_uncalled(self) -> None:
        """Remove the branches of modules that were not called.

        A model may use a weight without calling its module. Then the hook never runs.
        """
        for name in [n for n, kept in self._kept.items() if not kept.branch.called]:
            self._kept.pop(name).hook.remove()

    def set_projectors(self, projectors: Mapping[str, Projector]) -> None:
        """Set the projectors of a step, and merge updates in the coordinates of earlier ones.

        Args:
            projectors: parameter name -> projector of the step. While P stays the same, pass the
                same objects.
        """
        for name, (weight, _, branch, _) in self._kept.items():
            if name in projectors:
                branch.projector = projectors[name]
                branch.update = self._optimizer.store_separately(weight, projectors[name])
                branch.rounded = self._optimizer.stored_update(weight)

    def merge_(self) -> None:
        """Merge all updates into the weights with stochastic rounding; the branches then add 0."""
        self._optimizer.merge_()

    def remove(self) -> None:
        """Merge all updates, and remove the hooks from the model."""
        self.merge_()
        for kept in self._kept.values():
            kept.hook.remove()
        self._kept.clear()


class _Kept(NamedTuple):
    """A weight with a branch."""

    weight: nn.Parameter
    layer: nn.Module
    branch: _Branch
    hook: RemovableHandle


class _Branch:
    """The hook of one layer. It is a plain object, so that a model with it can be copied.

    Args:
        stored_transposed: whether the layer computes ``x W^T``, like ``nn.Linear``, or ``x W``.
    """

    def __init__(self, stored_transposed: bool) -> None:
        self._stored_transposed = stored_transposed
        self.projector: Projector | None = None
        self.update: Tensor | None = None
        self.rounded: Tensor | None = None  # the update in the weight's type, until the next step
        self.called = False
        self._taken = False

    def take(self) -> Tensor:
        """Return Z, (m, r) or (r, n), to a layer function that adds the branch itself."""
        assert self.rounded is not None
        self._taken = True
        return self.rounded

    def leave(self) -> None:
        """End the forward pass in which layers may call ``take``."""
        self._taken = False

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor:
        self.called = True
        taken, self._taken = self._taken, False
        if self.projector is None or self.update is None or taken:
            return output
        layer_input = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        dtype = output.dtype  # the type in which the layer computes, also under autocast
        left, right = self.projector.factors(self.update.to(dtype))  # (m, r), (r, n)
        first, second = (right.T, left.T) if self._stored_transposed else (left, right)
        low = layer_input.to(dtype) @ first  # (..., r)
        flat = output.reshape(-1, output.shape[-1])
        return torch.addmm(flat, low.reshape(-1, low.shape[-1]), second).view_as(output)
