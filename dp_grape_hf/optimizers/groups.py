"""Refuse an optimizer that lacks a trained parameter, or has one twice."""

from collections import Counter
from collections.abc import Mapping

import torch
from torch import nn

from dp_grape_hf.errors import PrivacyError


def require_each_once(
    optimizer: torch.optim.Optimizer, model: nn.Module, trainable: Mapping[str, nn.Parameter]
) -> None:
    """Refuse an optimizer whose groups do not contain exactly the trained parameters.

    Args:
        optimizer: the optimizer at the beginning of training.
        model: the model that is trained.
        trainable: parameter name -> parameter, of the trained parameters.

    Raises:
        PrivacyError: if a trained parameter is missing or is in the optimizer twice, or if the
            optimizer has another parameter.
    """
    held = [p for group in optimizer.param_groups for p in group["params"]]
    counts = Counter(map(id, held))
    for name, parameter in trainable.items():
        if (count := counts.pop(id(parameter), 0)) == 0:
            raise PrivacyError(
                f"{name} is trainable and not in the optimizer, so its gradient would be released "
                f"but not used. Freeze it with requires_grad_(False), or {_A_NEW_ONE}"
            )
        if count > 1:
            raise PrivacyError(
                f"{name} is in the optimizer {count} times, so each update would be "
                f"applied {count} times. To correct this, {_A_NEW_ONE}"
            )
    if counts:
        names = {id(p): name for name, p in model.named_parameters()}
        other = next(names.get(key, "A tensor that is not in the model") for key in counts)
        raise PrivacyError(
            f"{other} is in the optimizer but not trainable, so it has no private gradient. "
            "You may have frozen it after you made the optimizer. Unfreeze it, or "
            f"{_A_NEW_ONE}"
        )


_A_NEW_ONE = (
    "set trainer.optimizer=None before train(), which then makes an optimizer of all trainable "
    "parameters (if you have your own scheduler, make it for the optimizer that "
    "trainer.create_optimizer() returns). Nothing was released."
)
