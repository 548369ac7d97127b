"""Random projections: how P is drawn, projects and lifts.

A weight of shape m x n is projected along one of its dimensions, of d numbers, by a P of shape
d x r with ``E[P P^T] = I``; ``placement`` says which one. P is public: it is drawn from
a seed that stands in the ledger, never from the noise or sampling stream, and never from gradients,
which at capture are not private yet.

To add a family, subclass ``Projection`` and register it with ``@projection("name")``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dp_grape_hf.errors import PrivacyError, require
from dp_grape_hf.placement import Placement, Side, placements
from dp_grape_hf.randomness import projection_generator

BLOCK_ROWS = 1024  # P is drawn in blocks of rows, so that any rank can draw any slice of it

_ALL_ROWS = slice(None)


class Projection(ABC):
    """A family of random matrices with ``E[P P^T] = I``, unless it is not ``isotropic``.

    The rows of P are independent of each other, and are drawn in blocks of ``BLOCK_ROWS``, unless
    a family says ``whole``.
    """

    name: ClassVar[str]
    whole: ClassVar[bool] = False  # one draw makes all rows of P
    orthogonal: ClassVar[bool] = False  # P^T P = (d/r) I
    isotropic: ClassVar[bool] = True  # E[P P^T] = I, so that a projected gradient keeps its length

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


@projection("gaussian_over_r")
class GaussianOverR(Projection):
    """Independent entries N(0, 1/r^2), as the code of the paper's authors has them.

    ``E[P P^T] = I / r``: projected gradients are shorter by sqrt(r), against those of weights that
    are not projected. For comparison with results of that code.
    """

    isotropic = False

    def draw(self, rows: int, rank: int, generator: torch.Generator) -> Tensor:
        """Returns independent normal entries of variance 1/rank^2, (rows, rank)."""
        return torch.randn(rows, rank, generator=generator) / rank


@projection("rademacher")
class Rademacher(Projection):
    """Independent entries +-1/sqrt(r) (Achlioptas 2003).

    The squared norm of a projected vector varies less than with Gaussian entries, whose fourth
    moment is three times as large.
    """

    def draw(self, rows: int, rank: int, generator: torch.Generator) -> Tensor:
        """Returns independent fair signs times 1/sqrt(rank), (rows, rank)."""
        # Not bernoulli_, whose coins depend on the library that torch was built with.
        coins = torch.randint(2, (rows, rank), generator=generator, dtype=torch.float32)
        return (2 * coins - 1) / rank**0.5


@projection("stiefel")
class Stiefel(Projection):
    """Haar-distributed orthonormal columns times sqrt(d/r), so that ``P^T P = (d/r) I``.

    Every coordinate sees its direction with the same gain, and no two see the same. P is the Q of
    a Gaussian matrix whose R has a positive diagonal: only then is Q uniform (Mezzadri 2007). It
    costs ``O(d r^2)`` on the CPU for each draw, in float64.
    """

    whole = True
    orthogonal = True

    def draw(self, rows: int, rank: int, generator: torch.Generator) -> Tensor:
        """Returns a whole P, (rows, rank).

        Raises:
            PrivacyError: if rank > rows: there are not so many orthonormal columns.
        """
        require(rank <= rows, f"projection_rank={rank} is above the {rows} rows of a stiefel P.")
        gaussian = torch.randn(rows, rank, generator=generator, dtype=torch.float64)
        q, r = torch.linalg.qr(gaussian)
        signs = torch.where(r.diagonal() < 0, -1.0, 1.0)
        return (q * (signs * (rows / rank) ** 0.5)).float()


@dataclass(frozen=True, eq=False)
class Projector:
    """One drawn P and the side it acts on."""

    matrix: Tensor  # (d, r), where d is m on the left and n on the right side
    side: Side

    @property
    def rank(self) -> int:
        """Returns r."""
        return self.matrix.shape[1]

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


class ProjectionSchedule:
    """Draws the projectors of a model and redraws them every F steps.

    Args:
        shapes: parameter name -> shape, of the parameters to project; those with a rank that is
            not below the projected dimension stay unprojected.
        family: a name in ``PROJECTIONS``; ``identity`` projects nothing.
        rank: r, the columns of P; or parameter name -> r, for every matrix in ``shapes``.
        update_steps: F; P is fresh at every step t (counted from 0) with ``t % F == 0``.
        seed: the public projection seed.
        device: where projectors are used.
        side: which dimension is projected, a name in ``ProjectionSide``.
        input_dims: parameter name -> its dimension that is the layer's input, of those where it is
            not 1.

    P is drawn on the CPU whatever the device, so that one seed gives one P everywhere. (The QR of
    ``stiefel`` may round differently in another linear algebra library.)

    Raises:
        PrivacyError: for an unknown family or side, or rank or update_steps below 1; and for
            ``svd``, which must not see the gradients that are projected before they are private.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        family: str = "gaussian",
        rank: int | Mapping[str, int],
        update_steps: int,
        seed: int,
        device: torch.device | str = "cpu",
        side: str = "smaller",
        input_dims: Mapping[str, int] | None = None,
    ) -> None:
        known = ", ".join(sorted(PROJECTIONS))
        require(
            family != "svd",
            "projection='svd' is computed from gradients, and those that are projected here are "
            "not private yet: the release would not be either. Choose a method that projects "
            f"private gradients (dp_galore), or one of: {known}.",
        )
        if family not in PROJECTIONS:
            raise PrivacyError(f"projection={family!r} is not known; choose one of: {known}.")
        require(update_steps >= 1, f"projection_update_steps={update_steps} must be at least 1.")
        placed = placements(shapes, rank, side, input_dims)
        cls = PROJECTIONS[family]
        self._family = cls() if cls else None
        self._update_steps, self._seed = update_steps, seed
        self._device = torch.device(device)
        self._placements = placed if cls else {}
        self._refresh = -1
        self._projectors: dict[str, Projector] = {}

    def at(self, step: int) -> dict[str, Projector]:
        """Returns the projectors in force at a step, counted from 0: the same until a redraw."""
        refresh = step // self._update_steps
        if refresh != self._refresh:
            self._projectors = {
                name: Projector(self._draw(name, place, refresh), place.side)
                for name, place in self._placements.items()
            }
            self._refresh = refresh
        return self._projectors

    def _draw(self, name: str, place: Placement, refresh: int) -> Tensor:
        assert self._family is not None
        size = place.rows if self._family.whole else BLOCK_ROWS
        blocks = [
            self._family.draw(
                min(size, place.rows - start),
                place.rank,
                projection_generator(self._seed, refresh, name, start // size),
            )
            for start in range(0, place.rows, size)
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
