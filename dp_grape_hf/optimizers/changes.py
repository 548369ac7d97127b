"""What an optimizer has added to its projected weights, as factors of low rank.

While P is the same, the updates of a weight add up to ``lift(Z)``, and over several P to a sum of
such products: a matrix of rank at most r times the number of projections. Z is float32.

Shapes: m x n the weight as stored, r rank, R the sum of the ranks of all P.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dp_grape_hf.projections import Projector, Side


class LowRankChanges:
    """Weight -> the sum of all that was lifted into it, in coordinates of each P."""

    def __init__(self) -> None:
        self._terms: dict[nn.Parameter, list[tuple[Projector, Tensor]]] = {}

    def __contains__(self, weight: nn.Parameter) -> bool:
        """Returns whether anything was added to the weight."""
        return weight in self._terms

    def add(self, weight: nn.Parameter, projector: Projector, coordinates: Tensor) -> None:
        """Notes that ``projector.lift(coordinates)`` is added to the weight.

        Args:
            weight: (m, n).
            projector: one that has the same P as an earlier one adds to what that one added.
            coordinates: (r, n) or (m, r).
        """
        terms = self._terms.setdefault(weight, [])
        for index in reversed(range(len(terms))):
            known, total = terms[index]
            if known is projector or _same(known, projector):
                terms[index] = projector, total.add_(coordinates)
                return
        terms.append((projector, coordinates.to(torch.float32, copy=True)))

    def factors(self, weight: nn.Parameter) -> tuple[Tensor, Tensor]:
        """Returns (m, R) and (R, n), float32, whose product was added to the weight.

        Raises:
            KeyError: nothing was added to it.
        """
        pairs = [projector.factors(total) for projector, total in self._terms[weight]]
        left, right = zip(*pairs, strict=True)
        return torch.cat(left, dim=1), torch.cat(right, dim=0)

    @property
    def nbytes(self) -> int:
        """The bytes of Z and P over all weights; the last P is also in use."""
        pairs = (pair for terms in self._terms.values() for pair in terms)
        return sum(projector.matrix.nbytes + total.nbytes for projector, total in pairs)

    # ---- State ----

    def state_of(self, weight: nn.Parameter) -> list[dict[str, Any]]:
        """Returns what ``go_on_from`` takes; the tensors are not copied."""
        return [
            {"side": projector.side.value, "projection": projector.matrix, "coordinates": total}
            for projector, total in self._terms[weight]
        ]

    def go_on_from(self, weight: nn.Parameter, state: list[dict[str, Any]]) -> None:
        """Takes the state of a weight, copied to where the weight is."""
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
