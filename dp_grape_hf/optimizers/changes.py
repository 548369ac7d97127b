"""Store the total change of each projected weight as low-rank factors.

While P stays the same, the updates of a weight add up to ``lift(Z)``. Over several P, the change is
a sum of such products: a matrix of rank at most r times the number of projections. Z is float32.

Shapes: m x n the weight as stored, r rank, R the sum of the ranks of all P.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dp_grape_hf.projections import Projector, Side


class LowRankChanges:
    """The total change of each weight, as one pair of P and projected coordinates per P."""

    def __init__(self) -> None:
        self._terms: dict[nn.Parameter, list[tuple[Projector, Tensor]]] = {}

    def __contains__(self, weight: nn.Parameter) -> bool:
        """Return whether the weight was changed."""
        return weight in self._terms

    def add(self, weight: nn.Parameter, projector: Projector, coordinates: Tensor) -> None:
        """Record that ``projector.lift(coordinates)`` is added to the weight.

        Args:
            weight: (m, n).
            projector: coordinates of projectors with the same P are summed.
            coordinates: (r, n) or (m, r).
        """
        terms = self._terms.setdefault(weight, [])
        for index in reversed(range(len(terms))):
            earlier, total = terms[index]
            if earlier is projector or _same(earlier, projector):
                terms[index] = projector, total.add_(coordinates)
                return
        terms.append((projector, coordinates.to(torch.float32, copy=True)))

    def factors(self, weight: nn.Parameter) -> tuple[Tensor, Tensor]:
        """Return float32 factors (m, R) and (R, n), whose product is the change of the weight.

        Raises:
            KeyError: the weight was not changed.
        """
        pairs = [projector.factors(total) for projector, total in self._terms[weight]]
        left, right = zip(*pairs, strict=True)
        return torch.cat(left, dim=1), torch.cat(right, dim=0)

    @property
    def nbytes(self) -> int:
        """The size of all Z and P in bytes. The optimizer also uses the last P."""
        pairs = (pair for terms in self._terms.values() for pair in terms)
        return sum(projector.matrix.nbytes + total.nbytes for projector, total in pairs)

    # ---- State ----

    def state_of(self, weight: nn.Parameter) -> list[dict[str, Any]]:
        """Return the state of a weight for ``go_on_from``. The tensors are not copied."""
        return [
            {"side": projector.side.value, "projection": projector.matrix, "coordinates": total}
            for projector, total in self._terms[weight]
        ]

    def go_on_from(self, weight: nn.Parameter, state: list[dict[str, Any]]) -> None:
        """Load the state of a weight. Its tensors are copied to the weight's device."""
        self._terms[weight] = [
            (
                Projector(_copied(term["projection"], weight), Side(term["side"])),
                _copied(term["coordinates"], weight),
            )
            for term in state
        ]


def _same(one: Projector, other: Projector) -> bool:
    return one.side is other.side and torch.equal(one.matrix, other.matrix)


def _copied(saved: Tensor, weight: Tensor) -> Tensor:
    return saved.to(weight.device, torch.float32, copy=True)
