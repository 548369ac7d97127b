"""Random projections: which side of a matrix is projected, and how P is drawn.

For a weight of shape m x n and rank r < min(m, n), P has orthogonal-in-expectation columns,
``E[P P^T] = I``, and the smaller side is projected (a square weight: the input side), so that a
projected gradient keeps r x max(m, n) numbers (paper, Algorithm 1). P is public: it is drawn from
a seed that stands in the ledger, never from the noise or sampling stream.

To add a family, subclass ``Projection`` and register it with ``@projection("name")``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.randomness import projection_generator

BLOCK_ROWS = 1024  # P is drawn in blocks of rows, so that any rank can draw any slice of it

_ALL_ROWS = slice(None)


class Side(Enum):
    """Which side of a gradient G (m x n) meets P."""

    LEFT = "left"  # P^T G, (r, n): rows are projected
    RIGHT = "right"  # G P, (m, r): columns are projected


class Projection(ABC):
    """A family of random matrices with ``E[P P^T] = I``."""

    name: ClassVar[str]

    @abstractmethod
    def draw(self, rows: int, rank: int, generator: torch.Generator) -> Tensor:
        """Returns a (rows, rank) float32 block of P on the CPU."""


PROJECTIONS: dict[str, type[Projection] | None] = {"identity": None}  # None: nothing is projected


def projection(name: str) -> Callable[[type[Projection]], type[Projection]]:
    """Registers a projection family under the name that arguments and ledger use."""

    def register(cls: type[Projection]) -> type[Projection]:
        if name in PROJECTIONS:
            raise ValueError(f"projection {name!r} is registered twice")
        cls.name = name
        PROJECTIONS[name] = cls
        return cls

    return register


@projection("gaussian")
class Gaussian(Projection):
    """Independent entries N(0, 1/r) (paper, Algorithm 1)."""

    def draw(self, rows: int, rank: int, generator: torch.Generator) -> Tensor:
        """Returns independent normal entries of variance 1/rank, (rows, rank)."""
        return torch.randn(rows, rank, generator=generator) / rank**0.5


@dataclass(frozen=True, eq=False)
class Projector:
    """One drawn P and the side it acts on."""

    matrix: Tensor  # (min(m, n), r)
    side: Side

    @property
    def rank(self) -> int:
        """Returns r."""
        return self.matrix.shape[1]

    def drawn(self) -> Projector:
        """Returns this projector with P at hand, as it must be inside ``torch.func.vmap``."""
        return self

    def project(self, gradient: Tensor) -> Tensor:
        """Returns ``P^T G`` (r, n) or ``G P`` (m, r); leading batch dimensions are kept."""
        matrix = self.matrix.to(gradient.dtype)
        return matrix.T @ gradient if self.side is Side.LEFT else gradient @ matrix

    def lift(self, coordinates: Tensor) -> Tensor:
        """Returns ``P Z`` or ``Z P^T``, (m, n); leading batch dimensions are kept."""
        left, right = self.factors(coordinates)
        return left @ right

    def factors(self, coordinates: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (m, r) and (r, n), ``P, Z`` or ``Z, P^T``, whose product is the lifted Z."""
        matrix = self.matrix.to(coordinates.dtype)
        return (matrix, coordinates) if self.side is Side.LEFT else (coordinates, matrix.T)

    def add_lifted_(
        self, weight: Tensor, coordinates: Tensor, scale: float, rows: slice = _ALL_ROWS
    ) -> None:
        """Adds ``scale * lift(coordinates)`` in place, without an m x n temporary.

        Args:
            weight: (m, n), or those of its rows that ``rows`` selects.
            coordinates: of the whole weight, (r, n) or (m, r).
            scale: a factor.
            rows: which rows of the lifted coordinates are added.
        """
        left, right = self.factors(coordinates.to(weight.dtype))
        weight.addmm_(left[rows], right, alpha=scale)

    def coordinate_shape(self, shape: torch.Size) -> tuple[int, int]:
        """Returns the shape of the projected gradient of an m x n weight."""
        return (self.rank, shape[1]) if self.side is Side.LEFT else (shape[0], self.rank)


class RedrawnProjector(Projector):
    """A projector that keeps no P, and draws it from its seed whenever it is used.

    P is there for the moment of its use only. It is never larger than the coordinates that it
    makes, so it is drawn as a whole.

    Args:
        draw: returns P, the same at every call.
        side: the side P acts on.
        rank: r, the columns of P.
    """

    _draw: Callable[[], Tensor]
    _rank: int

    def __init__(self, draw: Callable[[], Tensor], side: Side, rank: int) -> None:
        object.__setattr__(self, "_draw", draw)
        object.__setattr__(self, "side", side)
        object.__setattr__(self, "_rank", rank)

    @property
    def matrix(self) -> Tensor:
        """Returns P, (min(m, n), r), drawn now.

        Raises:
            RuntimeError: inside ``torch.func.vmap``, which would draw another P for each sample.
        """
        # In place, vmap refuses to draw; out of place, it may draw once per sample.
        torch.empty(1).uniform_(generator=torch.Generator())
        return self._draw()

    @property
    def rank(self) -> int:
        """Returns r, without drawing."""
        return self._rank

    def drawn(self) -> Projector:
        """Returns a projector with the same P, which it keeps."""
        return Projector(self.matrix, self.side)


def projected_side(shape: tuple[int, ...], rank: int) -> Side | None:
    """Returns the side to project, or None where projecting would save nothing.

    >>> projected_side((8, 32), 4), projected_side((32, 8), 4), projected_side((8, 8), 4)
    (<Side.LEFT: 'left'>, <Side.RIGHT: 'right'>, <Side.RIGHT: 'right'>)
    >>> projected_side((8, 4), 4) is None
    True
    """
    if len(shape) != 2 or min(shape) <= rank:
        return None
    return Side.LEFT if shape[0] < shape[1] else Side.RIGHT


class ProjectionSchedule:
    """Draws the projectors of a model and redraws them every F steps.

    Args:
        shapes: parameter name -> shape, of the parameters to project; those with
            ``min(m, n) <= rank`` stay unprojected.
        family: a name in ``PROJECTIONS``; ``identity`` projects nothing.
        rank: r, the columns of P.
        update_steps: F; P is fresh at every step t (counted from 0) with ``t % F == 0``.
        seed: the public projection seed.
        device: where projectors are used.
        cache: whether P is kept between two uses, or drawn again for each.

    P is drawn on the CPU whatever the device, so that one seed gives one P everywhere.

    Raises:
        PrivacyError: for an unknown family, or rank or update_steps below 1.
    """

    def __init__(
        self,
        shapes: dict[str, tuple[int, ...]],
        *,
        family: str = "gaussian",
        rank: int,
        update_steps: int,
        seed: int,
        device: torch.device | str = "cpu",
        cache: bool = True,
    ) -> None:
        if family not in PROJECTIONS:
            known = ", ".join(sorted(PROJECTIONS))
            raise PrivacyError(f"projection={family!r} is not known; choose one of: {known}.")
        for name, value in (("projection_rank", rank), ("projection_update_steps", update_steps)):
            if value < 1:
                raise PrivacyError(f"{name}={value} must be at least 1.")
        cls = PROJECTIONS[family]
        self._family = cls() if cls else None
        self._rank, self._update_steps, self._seed = rank, update_steps, seed
        self._device, self._cache = torch.device(device), cache
        self._sides = {
            name: (side, min(shape))
            for name, shape in shapes.items()
            if cls and (side := projected_side(shape, rank))
        }
        self._refresh = -1
        self._projectors: dict[str, Projector] = {}

    def at(self, step: int) -> dict[str, Projector]:
        """Returns the projectors in force at a step, counted from 0: the same until a redraw."""
        refresh = step // self._update_steps
        if refresh != self._refresh:
            self._projectors = {
                name: self._projector(name, side, rows, refresh)
                for name, (side, rows) in self._sides.items()
            }
            self._refresh = refresh
        return self._projectors

    def _projector(self, name: str, side: Side, rows: int, refresh: int) -> Projector:
        draw = partial(self._draw, name, rows, refresh)
        return Projector(draw(), side) if self._cache else RedrawnProjector(draw, side, self._rank)

    def _draw(self, name: str, rows: int, refresh: int) -> Tensor:
        assert self._family is not None
        blocks = [
            self._family.draw(
                min(BLOCK_ROWS, rows - start),
                self._rank,
                projection_generator(self._seed, refresh, name, start // BLOCK_ROWS),
            )
            for start in range(0, rows, BLOCK_ROWS)
        ]
        return torch.cat(blocks).to(self._device)


def default_targets(model: Any, matrix_layers: tuple[type[nn.Module], ...]) -> list[str]:
    """Returns the names of the weights that are projected unless the user names others.

    These are the trainable weights of the linear layers in the body of the model. The output
    embeddings and a head whose output is one number per label stay unprojected, as in the paper
    (Appendix, experimental details): their gradients have low rank already.
    """
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    labels = getattr(getattr(model, "config", None), "num_labels", None)
    shared = shared_parameters(model)
    targets = []
    for name, module in model.named_modules():
        if not isinstance(module, matrix_layers) or module is output:
            continue
        weight: Any = module.weight
        is_head = "." not in name and name and labels in tuple(weight.shape)
        if weight.requires_grad and not is_head and id(weight) not in shared:
            targets.append(f"{name}.weight" if name else "weight")
    return targets


def shared_parameters(model: nn.Module) -> set[int]:
    """Returns the ids of parameters that the model holds under more than one name."""
    seen: set[int] = set()
    shared: set[int] = set()
    names: Iterable[tuple[str, nn.Parameter]] = model.named_parameters(remove_duplicate=False)
    for _, parameter in names:
        (shared if id(parameter) in seen else seen).add(id(parameter))
    return shared
