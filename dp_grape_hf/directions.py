"""Random directions of the weights, and the optimizer that moves along them.

A direction is public: it is drawn anew from the seed, a block at a time, wherever it is needed.
What fits 64 MiB is kept until the next step, since a step needs it twice for each physical batch
and once for the update. ``zeroth_order`` says what the numbers are that the optimizer receives.

Shapes: K directions, d trainable numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dp_grape_hf.errors import Choice, PrivacyError
from dp_grape_hf.randomness import (
    projection_seed_for,
    round_at_random,
    rounding_generator,
    row_blocks,
)

DIRECTION = "direction"
"""The name under which a release has its scalars, (K,)."""


class DirectionDistribution(Choice):
    """Of the numbers of a direction."""

    GAUSSIAN = "gaussian"
    SPHERE = "sphere"


_BLOCK = 2**20  # numbers of a direction that exist at once; it is part of how they are drawn
_KEPT = 2**24  # numbers of the directions of one step that are kept, of any model


class Directions:
    """The directions of every step: public, and a function of the seed.

    Args:
        trainable: the parameters by name; a tied weight is one of them, and has one direction.
        seed: the public seed. All ranks draw the same, on devices of one type.
        count: K, how many directions a step has.
        distribution: ``gaussian``, N(0, I), or ``sphere``, uniform on the sphere of radius
            sqrt(d), which costs one more draw of each direction. They differ by a factor of
            ``1 + O(1 / sqrt(d))``.

    Raises:
        PrivacyError: for a count below 1 or another distribution.
    """

    def __init__(
        self,
        trainable: Mapping[str, nn.Parameter],
        seed: int,
        count: int = 1,
        distribution: str = DirectionDistribution.GAUSSIAN,
    ) -> None:
        if count < 1:
            raise PrivacyError(f"n_directions={count} must be at least 1.")
        if distribution not in DirectionDistribution:
            raise PrivacyError(
                f"{distribution=} is not known; choose one of: {', '.join(DirectionDistribution)}."
            )
        self.seed, self.count, self.distribution = seed, count, distribution
        self._trainable = dict(trainable)
        self._names = {id(p): name for name, p in trainable.items()}
        self._kept: dict[tuple[str, int, int, torch.device], Tensor] = {}  # of one step
        self._kept_step = -1
        self._room = _KEPT
        self._on_sphere: tuple[int, list[float]] | None = None  # a step and its factors

    def name_of(self, weight: Tensor) -> str | None:
        """Returns the name of a trainable parameter; None for any other tensor."""
        return self._names.get(id(weight))

    @torch.no_grad()
    def displaced(self, weight: Tensor, step: int, number: int, distance: float) -> Tensor:
        """Returns ``W + distance * z`` of a trainable parameter, rounded once to its type."""
        alpha = distance * self.factors(step)[number]
        moved = torch.empty_like(weight, requires_grad=False)
        for block, rows in enumerate(row_blocks(weight, _BLOCK)):
            z = self._draw(weight, step, number, block, rows)
            torch.add(weight.detach()[rows], z, alpha=alpha, out=moved[rows])
        return moved

    def combined(
        self, weight: Tensor, step: int, coefficients: list[float]
    ) -> Iterator[tuple[Any, Tensor]]:
        """Yields ``sum_k coefficients[k] z_k`` of a trainable parameter, float32, in blocks.

        Each comes with the index of the rows of the weight that it is about.
        """
        scales = [c * f for c, f in zip(coefficients, self.factors(step), strict=True)]
        for block, rows in enumerate(row_blocks(weight, _BLOCK)):
            total = self._draw(weight, step, 0, block, rows) * scales[0]
            for number in range(1, self.count):
                z = self._draw(weight, step, number, block, rows)
                total.add_(z, alpha=scales[number])
            yield rows, total

    def factors(self, step: int) -> list[float]:
        """Returns by what the Gaussian numbers of each direction are multiplied."""
        if self.distribution == DirectionDistribution.GAUSSIAN:
            return [1.0] * self.count
        if self._on_sphere is None or self._on_sphere[0] != step:
            self._on_sphere = step, [self._onto_sphere(step, k) for k in range(self.count)]
        return self._on_sphere[1]

    def _onto_sphere(self, step: int, number: int) -> float:
        squared = [
            self._draw(weight, step, number, block, rows).square().sum()
            for weight in self._trainable.values()
            for block, rows in enumerate(row_blocks(weight, _BLOCK))
        ]
        size = sum(weight.numel() for weight in self._trainable.values())
        return math.sqrt(size / torch.stack(squared).sum(dtype=torch.float64).item())

    def _draw(self, weight: Tensor, step: int, number: int, block: int, rows: Any) -> Tensor:
        """Returns a block of a direction, which must not be written to."""
        if step != self._kept_step:
            self._kept, self._kept_step, self._room = {}, step, _KEPT
        name = self._names[id(weight)]
        key = name, number, block, weight.device
        if (kept := self._kept.get(key)) is not None:
            return kept
        seed = projection_seed_for(self.seed, step * self.count + number, name, block)
        generator = torch.Generator(weight.device).manual_seed(seed)
        z = torch.empty(weight[rows].shape, device=weight.device).normal_(generator=generator)
        if z.numel() <= self._room:
            self._kept[key] = z
            self._room -= z.numel()
        return z


class ZerothOrderSGD(torch.optim.Optimizer):
    """Moves the weights along the directions of a step, by the private scalars of its release.

    ``W -= lr / K * sum_k g_k z_k`` with decoupled weight decay. It has no state: the directions
    are drawn anew. It is post-processing: it sees private numbers only, and costs no privacy.

    Args:
        params: parameters or parameter groups, which may set ``lr`` and ``weight_decay``.
        directions: those of the engine whose release it receives.
        lr: the learning rate; by default that of DPZero's and MeZO's experiments.
        weight_decay: decoupled; a step multiplies the weight by ``1 - lr * weight_decay``.
        float32_updates: a bfloat16 or float16 weight is rounded at random at every step, without
            bias, so that updates below its precision count on average.
        rounding_seed: the public seed of the rounding.
    """

    def __init__(
        self,
        params: Iterable[Any],
        directions: Directions,
        lr: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        float32_updates: bool = False,
        rounding_seed: int = 0,
    ) -> None:
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name}={value} is out of range: it must be at least 0.")
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.directions = directions
        self.float32_updates = float32_updates
        self._rounding_seed = rounding_seed
        self._received: tuple[list[float], int] | None = None

    def receive(self, private_scalars: Tensor, step: int) -> None:
        """Takes the private scalars (K,) of a release, and the step whose directions they are of.

        Raises:
            PrivacyError: if there is not one scalar per direction.
        """
        if private_scalars.shape != (self.directions.count,):
            raise PrivacyError(
                f"The private scalars have shape {tuple(private_scalars.shape)}, and a step has "
                f"{self.directions.count} directions. Hand over the release under {DIRECTION!r}."
            )
        self._received = private_scalars.tolist(), step

    def state_bytes(self) -> int:
        """Returns 0: nothing is kept from step to step."""
        return 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates the parameters from the scalars received, once.

        Raises:
            PrivacyError: if nothing was received since the last step: there was no release.
        """
        if closure is not None:
            raise PrivacyError("A closure would evaluate without noise; it is not supported.")
        if self._received is None:
            raise PrivacyError("step() without receive(): there is no private scalar to apply.")
        (scalars, step), self._received = self._received, None
        rounded = 0
        for group in self.param_groups:
            lr = float(group["lr"])
            decay = 1 - lr * group["weight_decay"]
            coefficients = [-lr * scalar / len(scalars) for scalar in scalars]
            for weight in group["params"]:
                if self.directions.name_of(weight) is None:
                    continue
                for rows, update in self.directions.combined(weight, step, coefficients):
                    if self.float32_updates and weight.dtype.itemsize < 4:
                        number = (step << 32) + rounded
                        coins = rounding_generator(self._rounding_seed, number, weight.device)
                        total = weight[rows].float().mul_(decay).add_(update)
                        weight[rows] = round_at_random(total, weight.dtype, coins)
                        rounded += 1
                    else:
                        weight[rows].mul_(decay).add_(update)
