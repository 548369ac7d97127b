"""Random directions over the weights, along which zeroth-order methods measure and move.

A direction is public: it is drawn anew from the seed, a block at a time, wherever it is needed.
``zeroth_order`` measures losses along the directions.

Shapes: K directions, d trainable numbers.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dp_grape_hf.projections import projection_seed_for, public_generator, row_blocks

_BLOCK = 2**20  # numbers of a direction that exist at once; it is part of how they are drawn


class Directions:
    """The directions of every step, N(0, I): public, and a function of the seed.

    Args:
        trainable: the parameters by name; a tied weight is one of them, and has one direction.
        seed: the public seed. All ranks draw the same, on devices of one type.
        count: K, how many directions a step has.
    """

    def __init__(self, trainable: Mapping[str, nn.Parameter], seed: int, count: int = 1) -> None:
        self.seed, self.count = seed, count
        self._names = {id(p): name for name, p in trainable.items()}

    def name_of(self, weight: Tensor) -> str | None:
        """Returns the name of a trainable parameter; None for any other tensor."""
        return self._names.get(id(weight))

    @torch.no_grad()
    def displaced(self, weight: Tensor, step: int, number: int, distance: float) -> Tensor:
        """Returns ``W + distance * z`` of a trainable parameter, rounded once to its type."""
        moved = torch.empty_like(weight, requires_grad=False)
        for block, rows in enumerate(row_blocks(weight, _BLOCK)):
            z = self._draw(weight, step, number, block, rows)
            torch.add(weight.detach()[rows], z, alpha=distance, out=moved[rows])
        return moved

    def combined(
        self, weight: Tensor, step: int, coefficients: list[float]
    ) -> Iterator[tuple[Any, Tensor]]:
        """Yields ``sum_k coefficients[k] z_k`` of a trainable parameter, float32, in blocks.

        Each comes with the index of the rows of the weight that it is about.
        """
        for block, rows in enumerate(row_blocks(weight, _BLOCK)):
            total = self._draw(weight, step, 0, block, rows).mul_(coefficients[0])
            for number in range(1, self.count):
                z = self._draw(weight, step, number, block, rows)
                total.add_(z, alpha=coefficients[number])
            yield rows, total

    def _draw(self, weight: Tensor, step: int, number: int, block: int, rows: Any) -> Tensor:
        """Returns a block of a direction."""
        name = self._names[id(weight)]
        seed = projection_seed_for(self.seed, step * self.count + number, name, block)
        generator = public_generator(seed, weight.device)
        return torch.empty(weight[rows].shape, device=weight.device).normal_(generator=generator)
