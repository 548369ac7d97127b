"""The update rules: optimizers of torch, and which of their settings a user may choose.

A rule moves coordinates by private gradients. That is post-processing and costs no privacy.

To add a rule, add a row to ``UPDATE_RULES``. The optimizer has to move each number by itself,
because it is given a vector in which many weights lie side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Setting(NamedTuple):
    """A number that defines a rule."""

    default: Any
    good: Callable[[Any], bool]


class UpdateRule(NamedTuple):
    """How a step follows from gradients and state.

    Args:
        name: what arguments call it.
        optimizer: the class in torch.
        counts_steps: whether that counts the steps in its state.
        fixed: arguments of it that nobody chooses.
        moments: the tensors that it keeps of each parameter, and the power of the gradient that
            they are averages of.
        settings: arguments of it that a parameter group may set for itself, beside ``lr``.
    """

    name: str
    optimizer: type[torch.optim.Optimizer]
    counts_steps: bool
    fixed: Mapping[str, Any]
    moments: Mapping[str, int]
    settings: Mapping[str, Setting]

    def checked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a value for every setting.

        Raises:
            ValueError: for a setting that the rule does not have, or a value out of range.
        """
        for name in given:
            if name not in self.settings:
                raise ValueError(
                    f"{name}={given[name]!r} is no setting of the update rule {self.name!r}, which "
                    f"has: {', '.join(self.settings) or 'none'}. Leave it out."
                )
        values = {name: given.get(name, own.default) for name, own in self.settings.items()}
        for name, value in values.items():
            require_in_range(name, value, self.settings[name].good(value))
        return values

    def make(
        self, groups: list[dict[str, Any]], states: Mapping[Any, dict[str, Tensor]]
    ) -> torch.optim.Optimizer:
        """Returns torch's optimizer of parameter groups, without weight decay.

        Args:
            groups: each with ``params``, ``lr`` and a value for every setting.
            states: parameter -> its count of steps, ``step``, and its moments.
        """
        made = self.optimizer(groups, **self.fixed)
        made.state.update(states)
        return made


def require_in_range(name: str, value: Any, good: bool) -> None:
    """Raises a ``ValueError`` with the name and the value of a setting that is not good."""
    if not good:
        raise ValueError(f"{name}={value} is out of range.")


def moved_from_zero(
    rule: UpdateRule,
    settings: Mapping[str, Any],
    gradients: Iterable[Tensor],
    rates: Iterable[float],
) -> Tensor:
    """Returns where gradients move numbers that begin at 0.

    Args:
        rule: the rule.
        settings: those of its settings that are not the default.
        gradients: of one shape, for one step after another.
        rates: as many learning rates.
    """
    optimizer, numbers = None, nn.Parameter(torch.zeros(1))
    for gradient, rate in zip(gradients, rates, strict=True):
        if optimizer is None:
            numbers = nn.Parameter(torch.zeros_like(gradient))
            group = {"params": [numbers], "lr": rate, **rule.checked(settings)}
            optimizer = rule.make([group], {})
        optimizer.param_groups[0]["lr"], numbers.grad = rate, gradient
        optimizer.step()
    return numbers.detach()


_ADAM = UpdateRule(
    "adam",
    torch.optim.AdamW,
    counts_steps=True,
    fixed={"fused": True, "weight_decay": 0.0},
    moments={"exp_avg": 1, "exp_avg_sq": 2},
    settings={
        "betas": Setting((0.9, 0.999), lambda betas: all(0 <= beta < 1 for beta in betas)),
        "eps": Setting(1e-8, lambda eps: eps >= 0),
    },
)
_SGD = UpdateRule("sgd", torch.optim.SGD, counts_steps=False, fixed={}, moments={}, settings={})
_MOMENTUM = UpdateRule(
    "momentum",
    torch.optim.SGD,
    counts_steps=False,
    fixed={},
    moments={"momentum_buffer": 1},
    settings={"momentum": Setting(0.9, lambda momentum: 0 <= momentum < 1)},
)
UPDATE_RULES: dict[str, UpdateRule] = {rule.name: rule for rule in (_ADAM, _SGD, _MOMENTUM)}
"""By the names that arguments use."""
