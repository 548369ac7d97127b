"""The low-rank branch of a linear layer, which adds float32 updates to a 16-bit weight.

While P stays the same, a weight is exactly ``W + lift(U)``. bfloat16 would round small updates of W
away, so they are added to U, which is float32. The branch adds the contribution of U to the layer's
output by two products of rank r, without computing the sum of the weights. The optimizer owns U and
merges it into W when P is redrawn (``ProjectedOptimizer.store_separately``).

Shapes: m x n the weight as stored, r rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
        self._branches: dict[str, _Branch] = {}
        self._hooks: dict[str, RemovableHandle] = {}
        weights = dict(model.named_parameters())
        trained = {weight for group in optimizer.param_groups for weight in group["params"]}
        shared = shared_parameters(model)
        for path, module in model.named_modules():
            name = f"{path}.weight".lstrip(".")
            weight = weights.get(name)
            if type(module) not in MATRIX_LAYERS or weight is None or id(weight) in shared:
                continue
            if weight in trained and is_short(weight):
                self._branches[name] = branch = _Branch(module)
                self._hooks[name] = module.register_forward_hook(branch, with_kwargs=True)

    def __len__(self) -> int:
        """Return how many weights have a branch."""
        return len(self._branches)

    def __contains__(self, name: str) -> bool:
        """Return whether the weight of that name has a branch."""
        return name in self._branches

    @property
    def branches(self) -> dict[nn.Module, _Branch]:
        """The branches by their layers."""
        return {branch.layer: branch for branch in self._branches.values()}

    def leave_uncalled(self) -> None:
        """Remove the branches of modules that were not called.

        A model may use a weight without calling its module. Then the hook never runs.
        """
        for name in [name for name, branch in self._branches.items() if not branch.called]:
            del self._branches[name]
            self._hooks.pop(name).remove()

    def set_projectors(self, projectors: Mapping[str, Projector]) -> None:
        """Set the projectors of a step, and merge updates in the coordinates of earlier ones.

        Args:
            projectors: parameter name -> projector of the step. While P stays the same, pass the
                same objects.
        """
        for name, branch in self._branches.items():
            if projector := projectors.get(name):
                stored = self._optimizer.store_separately(branch.layer.weight, projector)
                branch.projector, (branch.update, branch.rounded) = projector, stored

    def merge_(self) -> None:
        """Merge all updates into the weights with stochastic rounding; the branches then add 0."""
        self._optimizer.merge_()

    def remove(self) -> None:
        """Merge all updates, and remove the hooks from the model."""
        self.merge_()
        for hook in self._hooks.values():
            hook.remove()
        self._branches, self._hooks = {}, {}


class _Branch:
    """The hook of one layer. It is a plain object, so that a model with it can be copied."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.projector: Projector | None = None
        self.update: Tensor | None = None
        self.rounded: Tensor | None = None  # the update in the weight's type
        self.called = False
        self._taken = False

    def take(self) -> Tensor:
        """Return U, (m, r) or (r, n), to a layer function that adds the branch itself."""
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
        first, second = (right.T, left.T) if isinstance(module, nn.Linear) else (left, right)
        low = layer_input.to(dtype) @ first  # (..., r)
        flat = output.reshape(-1, output.shape[-1])
        return torch.addmm(flat, low.reshape(-1, low.shape[-1]), second).view_as(output)
