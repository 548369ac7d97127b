"""The update rules: optimizers of torch, and which of their settings a user may choose.

A rule updates coordinates by private gradients. This is post-processing and costs no privacy.

To add a rule, add a row to ``UPDATE_RULES``. The optimizer must be elementwise, because it receives
a vector that concatenates many weights.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class UpdateRule(NamedTuple):
    """An update rule: an optimizer of torch with its arguments.

    Args:
        name: the value of the option ``update_rule``.
        optimizer: the class in torch.
        moments: name of a state tensor -> the power of the gradient that it averages.
        settings: argument of the class that a parameter group may set, in addition to ``lr`` -> its
            default.
        fixed: arguments of the class with fixed values.
    """

    name: str
    optimizer: Any  # a class derived from torch.optim.Optimizer
    moments: Mapping[str, int] = MappingProxyType({})
    settings: Mapping[str, Any] = MappingProxyType({})
    fixed: Mapping[str, Any] = MappingProxyType({})

    @property
    def counts_steps(self) -> bool:
        """True if the class in torch counts the steps in its state."""
        return self.optimizer is not torch.optim.SGD

    def checked(self, given: Mapping[str, Any], **common: float) -> dict[str, Any]:
        """Return a value for every setting: the given one or the default.

        Args:
            given: values of settings.
            **common: values of ``lr`` and ``weight_decay``.

        Raises:
            ValueError: for a setting that the rule does not have, or a value that torch refuses.
        """
        for name in given:
            if name not in self.settings:
                raise ValueError(
                    f"{name}={given[name]!r} is not a setting of the update rule {self.name!r}, "
                    f"which has: {', '.join(self.settings) or 'none'}. Leave it out."
                )
        values = {**self.settings, **given}
        self.optimizer([torch.zeros(1)], **common, **values)  # checks the ranges
        if not (momentum := values.get("momentum", 0.0)) < 1:  # but for this one
            raise ValueError(f"{momentum=} is out of range. Pass a number below 1.")
        return values

    def make(
        self, groups: list[dict[str, Any]], states: Mapping[Any, dict[str, Tensor]]
    ) -> torch.optim.Optimizer:
        """Return torch's optimizer of the parameter groups, without weight decay.

        Args:
            groups: groups with ``params``, ``lr`` and a value for every setting.
            states: parameter -> state: the number of steps, ``step``, and the moments.
        """
        optimizer: torch.optim.Optimizer = self.optimizer(groups, **self.fixed)
        optimizer.state.update(states)
        return optimizer


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
    numbers = nn.Parameter(torch.zeros(()))
    optimizer = rule.make([{"params": [numbers], "lr": 0.0, **rule.checked(settings)}], {})
    for gradient, rate in zip(gradients, rates, strict=True):
        if numbers.shape != gradient.shape:
            numbers.data = torch.zeros_like(gradient)
        optimizer.param_groups[0]["lr"], numbers.grad = rate, gradient
        optimizer.step()
    return numbers.detach()


_RULES = (
    UpdateRule(
        "adam",
        torch.optim.AdamW,
        moments={"exp_avg": 1, "exp_avg_sq": 2},
        settings={"betas": (0.9, 0.999), "eps": 1e-8},
        fixed={"fused": True, "weight_decay": 0.0},
    ),
    UpdateRule("sgd", torch.optim.SGD),
    UpdateRule(
        "momentum", torch.optim.SGD, moments={"momentum_buffer": 1}, settings={"momentum": 0.9}
    ),
    UpdateRule("rmsprop", torch.optim.RMSprop, moments={"square_avg": 2}),
    UpdateRule("adagrad", torch.optim.Adagrad, moments={"sum": 2}),
)
UPDATE_RULES: dict[str, UpdateRule] = {rule.name: rule for rule in _RULES}
"""Value of the option ``update_rule`` -> rule."""
