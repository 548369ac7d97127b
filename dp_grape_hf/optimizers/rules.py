"""What an optimizer does with private gradients in coordinates.

A rule moves targets, which are weights or the coordinates of an update, by gradients and moments
of the same shape. It knows no projection: the optimizer lifts what it computes. All of it is
post-processing of private gradients and costs no privacy.

To add a rule, subclass ``UpdateRule``, and name it in ``UPDATE_RULES``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

from torch import Tensor
from torch.optim.adamw import adamw


class Term(NamedTuple):
    """What a rule moves, by which gradient and with which state."""

    target: Tensor
    gradient: Tensor
    moments: tuple[Tensor, ...]  # in the order of UpdateRule.moments
    step: Tensor  # (), the steps before this one


class Setting(NamedTuple):
    """A number that defines a rule."""

    default: Any
    good: Callable[[Any], bool]


class UpdateRule(ABC):
    """How a step follows from gradients and state; the same for weights and coordinates."""

    name: ClassVar[str]
    moments: ClassVar[Mapping[str, int]] = {}
    """Names of the tensors it keeps, and the power of the gradient that they are averages of."""
    settings: ClassVar[Mapping[str, Setting]] = {}
    """What a parameter group may set for itself."""

    def checked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a value for every setting.

        Raises:
            ValueError: for a setting that the rule has not, or a value out of range.
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

    @abstractmethod
    def apply(
        self, terms: list[Term], settings: Mapping[str, Any], lr: float, weight_decay: float
    ) -> None:
        """Moves targets, moments and step counts in place, by one step.

        Args:
            terms: contiguous float32 tensors; those of a term have one shape.
            settings: has a value for each setting of the rule.
            lr: what the update is multiplied by.
            weight_decay: targets are first multiplied by ``1 - lr * weight_decay``.
        """


def require_in_range(name: str, value: Any, good: bool) -> None:
    """Raises a ``ValueError`` with the name and the value of a setting that is not good."""
    if not good:
        raise ValueError(f"{name}={value} is out of range.")


# ---- The rules ----


class Adam(UpdateRule):
    """``m_hat / (sqrt(v_hat) + eps)`` (Kingma & Ba 2015), by torch's fused kernel."""

    name = "adam"
    moments: ClassVar = {"exp_avg": 1, "exp_avg_sq": 2}
    settings: ClassVar = {
        "betas": Setting((0.9, 0.999), lambda betas: all(0 <= beta < 1 for beta in betas)),
        "eps": Setting(1e-8, lambda eps: eps >= 0),
    }

    def apply(
        self, terms: list[Term], settings: Mapping[str, Any], lr: float, weight_decay: float
    ) -> None:
        """Takes ``lr * m_hat / (sqrt(v_hat) + eps)`` off each target: one pass over memory."""
        beta1, beta2 = settings["betas"]
        adamw(
            [term.target for term in terms],
            [term.gradient for term in terms],
            [term.moments[0] for term in terms],
            [term.moments[1] for term in terms],
            [],
            [term.step for term in terms],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=settings["eps"],
            maximize=False,
        )


class SGD(UpdateRule):
    """The gradient itself."""

    name = "sgd"

    def apply(
        self, terms: list[Term], settings: Mapping[str, Any], lr: float, weight_decay: float
    ) -> None:
        """Takes ``lr`` times the direction off each target."""
        for term in terms:
            term.step.add_(1)
            if weight_decay:
                term.target.mul_(1 - lr * weight_decay)
            term.target.add_(self._direction(term, settings), alpha=-lr)

    def _direction(self, term: Term, settings: Mapping[str, Any]) -> Tensor:
        return term.gradient


class Momentum(SGD):
    """``u = momentum * u + gradient``, as ``torch.optim.SGD`` has it: a sum and not an average."""

    name = "momentum"
    moments: ClassVar = {"momentum_buffer": 1}
    settings: ClassVar = {"momentum": Setting(0.9, lambda momentum: 0 <= momentum < 1)}

    def _direction(self, term: Term, settings: Mapping[str, Any]) -> Tensor:
        (buffer,) = term.moments
        return buffer.mul_(settings["momentum"]).add_(term.gradient)


UPDATE_RULES: dict[str, UpdateRule] = {rule.name: rule for rule in (Adam(), SGD(), Momentum())}
"""By the names that arguments use."""
