"""The update rules: optimizers of torch, and which of their settings a user may choose.

A rule updates coordinates by private gradients. This is post-processing and costs no privacy.

To add a rule, add a row to ``UPDATE_RULES``. The optimizer must be elementwise, because it receives
a vector that concatenates many weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Setting(NamedTuple):
    """A setting of an update rule: its default, and its range."""

    default: Any
    good: Callable[[Any], bool]
    needed: str  # the range in words


class UpdateRule(NamedTuple):
    """An update rule: an optimizer of torch with its arguments.

    Args:
        name: the value of the option ``update_rule``.
        optimizer: the class in torch.
        moments: name of a state tensor -> the power of the gradient that it averages.
        settings: arguments of the class that a parameter group may set, in addition to ``lr``.
        fixed: arguments of the class with fixed values.
        counts_steps: whether this class counts the steps in its state.
    """

    name: str
    optimizer: type[torch.optim.Optimizer]
    moments: Mapping[str, int] = MappingProxyType({})
    settings: Mapping[str, Setting] = MappingProxyType({})
    fixed: Mapping[str, Any] = MappingProxyType({})
    counts_steps: bool = True

    def checked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return a value for every setting: the given one or the default.

        Raises:
            ValueError: for a setting that the rule does not have, or a value out of range.
        """
        for name in given:
            if name not in self.settings:
                raise ValueError(
                    f"{name}={given[name]!r} is not a setting of the update rule {self.name!r}, "
                    f"which has: {', '.join(self.settings) or 'none'}. Leave it out."
                )
        values = {n: given.get(n, setting.default) for n, setting in self.settings.items()}
        for name, value in values.items():
            setting = self.settings[name]
            require_in_range(name, value, setting.good(value), setting.needed)
        return values

    def make(
        self, groups: list[dict[str, Any]], states: Mapping[Any, dict[str, Tensor]]
    ) -> torch.optim.Optimizer:
        """Return torch's optimizer of the parameter groups, without weight decay.

        Args:
            groups: groups with ``params``, ``lr`` and a value for every setting.
            states: parameter -> state: the number of steps, ``step``, and the moments.
        """
        optimizer = self.optimizer(groups, **self.fixed)
        optimizer.state.update(states)
        return optimizer


def require_in_range(name: str, value: Any, good: bool, needed: str) -> None:
    """Raise a ``ValueError`` with name, value and range of a setting that is out of range."""
    if not good:
        raise ValueError(f"{name}={value} is out of range. Pass {needed}.")


def moved_from_zero(
    rule: UpdateRule,
    settings: Mapping[str, Any],
    gradients: Iterable[Tensor],
    rates: Iterable[float],
) -> Tensor:
    """Return the position that an update rule reaches from 0.

    Args:
        rule: the rule.
        settings: settings of the rule that differ from the default.
        gradients: the gradient of each step, all of the same shape.
        rates: the learning rate of each step.
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
    moments={"exp_avg": 1, "exp_avg_sq": 2},
    fixed={"fused": True, "weight_decay": 0.0},
    settings={
        "betas": Setting(
            (0.9, 0.999),
            lambda betas: all(0 <= beta < 1 for beta in betas),
            "two numbers of at least 0 and below 1",
        ),
        "eps": Setting(1e-8, lambda eps: eps >= 0, "a number of at least 0"),
    },
)
_SGD = UpdateRule("sgd", torch.optim.SGD, counts_steps=False)
_MOMENTUM = UpdateRule(
    "momentum",
    torch.optim.SGD,
    counts_steps=False,
    moments={"momentum_buffer": 1},
    settings={
        "momentum": Setting(
            0.9, lambda momentum: 0 <= momentum < 1, "a number of at least 0 and below 1"
        )
    },
)
_RMSPROP = UpdateRule("rmsprop", torch.optim.RMSprop, moments={"square_avg": 2})
_ADAGRAD = UpdateRule("adagrad", torch.optim.Adagrad, moments={"sum": 2})
_RULES = _ADAM, _SGD, _MOMENTUM, _RMSPROP, _ADAGRAD
UPDATE_RULES: dict[str, UpdateRule] = {rule.name: rule for rule in _RULES}
"""Value of the option ``update_rule`` -> rule."""
