"""The branch of a linear layer that adds the updates kept apart from its weight.

Inside a projection period a weight is exactly ``W + lift(Z)``. Updates of a few parts in a
thousand, which bfloat16 would round away, go into Z, which is float32, and the branch adds their
share to the layer's output: two products with r columns, so the sum of the weights is never formed.
The optimizer owns Z and merges it into W when P is redrawn (``ProjectedOptimizer.keep_apart``).

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
    """Makes a model compute with the updates that its optimizer keeps apart, by forward hooks.

    A weight gets a branch if it is bfloat16 or float16, trained by the optimizer, and the weight of
    one ``nn.Linear`` or ``Conv1D`` and of nothing else. Other weights, such as a table tied to the
    output layer or the weight of a subclass, are rounded at random at every step.

    Use: run the model, then ``leave_uncalled``; ``use`` before the forward passes of a step;
    ``merge_`` before the weights are saved, replaced or handed on; ``remove`` after training; each
    on every rank. The branches act in training and evaluation, under both engines and with gradient
    checkpointing.

    Args:
        model: the model.
        optimizer: the optimizer of its parameters.
    """

    def __init__(self, model: nn.Module, optimizer: ProjectedOptimizer) -> None:
        self._optimizer = optimizer
        self._weights = dict(model.named_parameters())
        self._branches: dict[str, _Branch] = {}
        self._layers: dict[str, nn.Module] = {}
        self._hooks: dict[str, RemovableHandle] = {}
        trained = {weight for group in optimizer.param_groups for weight in group["params"]}
        shared = shared_parameters(model)
        for path, module in model.named_modules():
            name = f"{path}.weight" if path else "weight"
            weight = self._weights.get(name)
            if type(module) not in MATRIX_LAYERS or weight is None or id(weight) in shared:
                continue
            if weight in trained and is_short(weight):
                branch = _Branch(stored_transposed=isinstance(module, nn.Linear))
                self._branches[name], self._layers[name] = branch, module
                self._hooks[name] = module.register_forward_hook(branch, with_kwargs=True)

    def __len__(self) -> int:
        """Returns how many weights have a branch."""
        return len(self._branches)

    def __contains__(self, name: str) -> bool:
        """Returns whether the weight of that name has a branch."""
        return name in self._branches

    @property
    def branches(self) -> dict[nn.Module, _Branch]:
        """The branches by their layers."""
        return {self._layers[name]: branch for name, branch in self._branches.items()}

    def leave_uncalled(self) -> None:
        """Takes the branches from modules that have not been called, where they would do nothing.

        A model may use a weight directly, without its module.
        """
        for name in [n for n, branch in self._branches.items() if not branch.called]:
            del self._branches[name]
            self._hooks.pop(name).remove()

    def use(self, projectors: Mapping[str, Projector]) -> None:
        """Prepares a step: what is kept in coordinates of an earlier projector is merged.

        Args:
            projectors: parameter name -> projector, those of the step. For as long as P is the
                same it must be the same object.
        """
        for name, branch in self._branches.items():
            if name in projectors:
                branch.projector = projectors[name]
                branch.update = self._optimizer.keep_apart(self._weights[name], projectors[name])
                branch.rounded = self._optimizer.kept_apart(self._weights[name])

    def merge_(self) -> None:
        """Moves all updates into the weights, rounded at random; the branches then add zero."""
        self._optimizer.merge_()

    def remove(self) -> None:
        """Merges, and leaves the model as it was: without hooks."""
        self.merge_()
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._branches.clear()


class _Branch:
    """The hook of one layer; a plain object, so that a model that has it can be copied.

    Args:
        stored_transposed: whether the layer computes ``x W^T``, as ``nn.Linear``, or ``x W``.
    """

    def __init__(self, stored_transposed: bool) -> None:
        self._stored_transposed = stored_transposed
        self.projector: Projector | None = None
        self.update: Tensor | None = None
        self.rounded: Tensor | None = None  # the same, in the weight's type, until a step
        self.called = False
        self._taken = False

    def take(self) -> Tensor:
        """Returns Z, (m, r) or (r, n), for a layer whose forward adds the branch itself."""
        assert self.rounded is not None
        self._taken = True
        return self.rounded

    def leave(self) -> None:
        """Ends the pass in which layers may take it."""
        self._taken = False

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor:
        self.called = True
        taken, self._taken = self._taken, False
        if self.projector is None or self.update is None or taken:
            return output
        layer_input = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        dtype = output.dtype  # what the layer computes in, under autocast too
        left, right = self.projector.factors(self.update.to(dtype))  # (m, r), (r, n)
        first, second = (right.T, left.T) if self._stored_transposed else (left, right)
        low = layer_input.to(dtype) @ first  # (..., r)
        flat = output.reshape(-1, output.shape[-1])
        return torch.addmm(flat, low.reshape(-1, low.shape[-1]), second).view_as(output)
