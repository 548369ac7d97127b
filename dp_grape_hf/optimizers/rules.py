"""What an optimizer does with private gradients in coordinates, and with its moments at a redraw.

A rule moves targets, which are weights or the coordinates of an update, by gradients and moments
of the same shape. It knows no projection: the optimizer lifts what it computes. All of it is
post-processing of private gradients and costs no privacy.

To add a rule, subclass ``UpdateRule`` and register it with ``@update_rule("name")``.

Shapes: m x n the weight as stored, d its projected dimension, r rank; P is (d, r), coordinates are
(r, n) on the left and (m, r) on the right.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from dp_grape_hf.errors import Choice
from dp_grape_hf.projections import Projector, Side


class AtRedraw(Choice):
    """What becomes of moments when P is redrawn."""

    KEEP = "keep"
    RESET = "reset"
    REPROJECT = "reproject"


_RIDGE = 1e-10  # of the mean eigenvalue of P^T P; only a P of lower rank than r needs it


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


UPDATE_RULES: dict[str, UpdateRule] = {}


def update_rule(name: str) -> Callable[[type[UpdateRule]], type[UpdateRule]]:
    """Registers an update rule under the name that arguments use."""

    def register(cls: type[UpdateRule]) -> type[UpdateRule]:
        if name in UPDATE_RULES:
            raise ValueError(f"update rule {name!r} is registered twice")
        cls.name = name
        UPDATE_RULES[name] = cls()
        return cls

    return register


def require_in_range(name: str, value: Any, good: bool) -> None:
    """Raises a ``ValueError`` with the name and the value of a setting that is not good."""
    if not good:
        raise ValueError(f"{name}={value} is out of range.")


# ---- The rules ----


@update_rule("adam")
class Adam(UpdateRule):
    """``m_hat / (sqrt(v_hat) + eps)`` (Kingma & Ba 2015), by torch's fused kernel."""

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


@update_rule("sgd")
class SGD(UpdateRule):
    """The gradient itself."""

    def apply(
        self, terms: list[Term], settings: Mapping[str, Any], lr: float, weight_decay: float
    ) -> None:
        """Takes ``lr * gradient`` off each target."""
        for term in terms:
            term.step.add_(1)
            target = term.target if weight_decay == 0 else term.target.mul_(1 - lr * weight_decay)
            target.add_(term.gradient, alpha=-lr)


@update_rule("momentum")
class Momentum(UpdateRule):
    """``u = momentum * u + gradient``, as ``torch.optim.SGD`` has it: a sum and not an average."""

    moments: ClassVar = {"momentum_buffer": 1}
    settings: ClassVar = {"momentum": Setting(0.9, lambda momentum: 0 <= momentum < 1)}

    def apply(
        self, terms: list[Term], settings: Mapping[str, Any], lr: float, weight_decay: float
    ) -> None:
        """Takes ``lr * u`` off each target."""
        for term in terms:
            term.step.add_(1)
            (buffer,) = term.moments
            buffer.mul_(settings["momentum"]).add_(term.gradient)
            target = term.target if weight_decay == 0 else term.target.mul_(1 - lr * weight_decay)
            target.add_(buffer, alpha=-lr)


# ---- At a redraw of the projection ----


class Redraws:
    """Follows the P that the moments of each weight are coordinates of.

    A redraw is told by the values of P: a resumed run makes another object of the same P. Between
    two steps with the same object nothing is compared.

    Args:
        choice: a name in ``AtRedraw``. With ``keep`` nothing is followed.

    Raises:
        ValueError: for another choice.
    """

    def __init__(self, choice: str) -> None:
        if choice not in AtRedraw:
            raise ValueError(f"moments_at_redraw={choice!r} must be one of: {', '.join(AtRedraw)}.")
        self.choice = choice
        self._last: dict[nn.Parameter, Projector | Tensor] = {}  # P alone after loading

    def follow(
        self, weight: nn.Parameter, state: dict[str, Any], rule: UpdateRule, projector: Projector
    ) -> None:
        """Makes the state of a weight one in coordinates of the projector, in place."""
        if self.choice == AtRedraw.KEEP or not rule.moments:
            return
        old, self._last[weight] = self._last.get(weight, projector), projector
        if old is projector:
            return
        before, now = _matrix(old), projector.matrix
        if torch.equal(before, now):
            return
        if self.choice == AtRedraw.RESET:
            for key in (*rule.moments, "step"):
                state[key].zero_()
            return
        change = change_of_coordinates(before, now)
        for key, power in rule.moments.items():
            reproject_(state[key], power, change, projector.side)

    def last(self, weight: nn.Parameter) -> Tensor | None:
        """Returns P of the last step, (d, r), or None where it does not matter."""
        return _matrix(self._last[weight]) if weight in self._last else None

    def go_on_from(self, weight: nn.Parameter, matrix: Tensor) -> None:
        """Takes P of the last step from a state that was saved."""
        if self.choice != AtRedraw.KEEP:
            self._last[weight] = matrix


def _matrix(last: Projector | Tensor) -> Tensor:
    return last if isinstance(last, Tensor) else last.matrix


def change_of_coordinates(old: Tensor, new: Tensor) -> Tensor:
    """Returns Q, which takes gradients in coordinates of the old P to those of the new one.

    ``Q = P_new^T P_old (P_old^T P_old)^-1``: of all full gradients with the given coordinates
    ``P_old^T G`` the shortest is taken, which is the most likely one if no direction is preferred,
    and projected anew. So Q is the identity if P did not change, and ``P_new^T P_old`` if P_old has
    orthonormal columns. Without the inverse, a P with ``E[P P^T] = I`` stretches by
    ``sqrt(d / r)`` on average at each redraw, and averages that survive several redraws diverge.
    Between independent draws Q shrinks by ``sqrt(r / d)``: most of a gradient is not known from
    its coordinates, so little of a first moment outlives a redraw.

    Args:
        old: (d, r), float32, as all P.
        new: (d, r').

    Returns:
        (r', r), float32.
    """
    old, new = old.double(), new.double()
    gram = old.T @ old
    gram.diagonal().add_(_RIDGE * gram.diagonal().mean())
    return torch.cholesky_solve(old.T @ new, torch.linalg.cholesky(gram)).T.float()


def reproject_(moment: Tensor, power: int, change: Tensor, side: Side) -> None:
    """Carries a moment into new coordinates, in place.

    A first moment is linear in the gradient: ``Q M``, on the right ``M Q^T``. A second moment is
    the diagonal of a covariance that nobody kept, and is carried by the diagonal rule,
    ``(Q * Q) V`` (as the variances of LDAdam, Robert et al. 2024), completed for what the old
    coordinates did not see: row i of ``Q * Q`` sums to the share of the new direction i that lay
    in the old subspace, and the rest of it gets the mean of the old second moments. So every new
    one is a weighted mean of old ones. It is never negative, and noise of equal variance in all
    coordinates, which is most of a private second moment, keeps its variance.

    Args:
        moment: (r, n) on the left, (m, r) on the right.
        power: 1 or 2, of the gradient.
        change: Q, (r, r).
        side: the side that P acts on.
    """
    rows = moment if side is Side.LEFT else moment.T  # (r, ...)
    if power == 1:
        rows.copy_(change @ rows)
        return
    weights = change.square()
    weights /= weights.sum(1, keepdim=True).clamp_min_(1)  # more than 1: P is not orthogonal
    unseen = 1 - weights.sum(1, keepdim=True)
    weights += unseen / len(change)
    rows.copy_(weights @ rows)
