"""Refuse an optimizer that lacks a trained parameter, or has one twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import nn

from dp_grape_hf.errors import PrivacyError


def require_each_once(
    optimizer: torch.optim.Optimizer, model: nn.Module, trainable: Mapping[str, nn.Parameter]
) -> None:
    """Refuses an optimizer whose groups are not made of the parameters that are trained.

    Args:
        optimizer: as training begins; its user may have made it, or have frozen weights since.
        model: the model that is trained.
        trainable: parameter name -> parameter, of those that are differentiated.

    Raises:
        PrivacyError: if one of them is left out or is there twice, or if another is there.
    """
    held = [p for group in optimizer.param_groups for p in group["params"]]
    counts = Counter(map(id, held))
    for name, parameter in trainable.items():
        if (count := counts.pop(id(parameter), 0)) == 0:
            raise PrivacyError(
                f"{name} is trainable and not in the optimizer: its share of the privacy budget "
                f"would buy nothing. Freeze it with requires_grad_(False), or {_A_NEW_ONE}"
            )
        if count > 1:
            raise PrivacyError(
                f"{name} is in the optimizer {count} times, and each would move it by what is "
                f"released once: {_A_NEW_ONE}"
            )
    if counts:
        names = {id(p): name for name, p in model.named_parameters()}
        other = next(names.get(key, "A tensor that is none of the model's") for key in counts)
        raise PrivacyError(
            f"{other} is in the optimizer and not trainable, so no gradient of it is released; "
            f"frozen since the optimizer was made, say. Unfreeze it, or {_A_NEW_ONE}"
        )


_A_NEW_ONE = (
    "set trainer.optimizer=None before train(), which then makes one of all that is trainable (and "
    "make a scheduler of your own for that one, by trainer.create_optimizer()). Nothing was "
    "released."
)
