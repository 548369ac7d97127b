"""The schedules of P: the steps at which it is made again, by a public seed or on public inputs.

DP-GRAPE projects gradients in the backward pass, before they are private. So P is drawn from a
seed every F steps, or it contains principal directions of layer inputs on public inputs. P must
never depend on the gradients that it projects, because they are not private yet.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from dp_grape_hf.errors import require
from dp_grape_hf.projections.placement import Placement, Side, placements
from dp_grape_hf.projections.projector import BLOCK_ROWS, PROJECTIONS, Projector
from dp_grape_hf.projections.seeds import projection_generator


class _Redrawn:
    """Projectors that are made again every F steps.

    Args:
        placed: parameter name -> placement of its P, for projected parameters.
        update_steps: F. P is made again at each step t (counted from 0) with ``t % F == 0``; if
            None, only at the first step.
        device: the device of the projectors.

    Attributes:
        placements: parameter name -> placement of its P, for projected parameters.
    """

    def __init__(
        self, placed: Mapping[str, Placement], update_steps: int | None, device: torch.device | str
    ) -> None:
        self.placements = placed
        self._update_steps, self._device = update_steps, torch.device(device)
        self._refresh = -1
        self._projectors: dict[str, Projector] = {}

    def in_force(
        self, step: int, make: Callable[[int], Mapping[str, Tensor]], drawn: bool = False
    ) -> dict[str, Projector]:
        """Return the projectors of a step.

        Args:
            step: the step, counted from 0.
            make: returns the matrices, given the number of times that they were made before.
            drawn: whether ``make`` can be called at any step, and not only when P is due.
        """
        every = self._update_steps
        refresh, late = (0, step) if every is None else divmod(step, every)
        if refresh != self._refresh:
            require(
                drawn or late == 0,
                f"The projection of {step=} was made at step {step - late}, and its state was not "
                "loaded. Load the state that was saved with the checkpoint.",
            )
            self._projectors = self._on_device(make(refresh))
            self._refresh = refresh
        return self._projectors

    def _on_device(self, matrices: Mapping[str, Tensor]) -> dict[str, Projector]:
        """Return the projectors of matrices; matrices that are one tensor remain one tensor."""
        moved = {id(matrix): matrix.to(self._device) for matrix in matrices.values()}
        return {
            name: Projector(moved[id(matrix)], self.placements[name].side)
            for name, matrix in matrices.items()
        }


class SavedProjection(_Redrawn):
    """Projectors that are saved with checkpoints, because no seed reproduces them.

    They are public.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which a resumed run loads the same P; empty without projections."""
        if not self.placements:
            return {}
        matrices = {name: projector.matrix for name, projector in self._projectors.items()}
        return {"refresh": self._refresh, "matrices": matrices}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the P of a state; tensors are copied to the device.

        Raises:
            PrivacyError: the state was saved with another projection.
        """
        shapes = {n: (p.rows, p.rank) for n, p in self.placements.items()}
        saved = {n: tuple(matrix.shape) for n, matrix in state.get("matrices", {}).items()}
        fresh = state.get("refresh") == -1 and not saved
        require(
            (saved == shapes or fresh) and bool(state) == bool(shapes),
            "The state of the projection was saved with another projection, projection_rank or "
            "optim_target_modules, so P would change. Resume with the options of the checkpoint.",
        )
        if state:
            self._refresh = state["refresh"]
            copies = {matrix.data_ptr(): matrix.clone() for matrix in state["matrices"].values()}
            matrices = {n: copies[m.data_ptr()] for n, m in state["matrices"].items()}
            self._projectors = self._on_device(matrices)


class ProjectionSchedule(_Redrawn):
    """The random projectors of a model, which are drawn again every F steps.

    P is drawn on the CPU for all devices, so a seed gives the same P everywhere.

    Args:
        shapes: parameter name -> shape, for the parameters to project. If the rank is not below the
            projected dimension, a parameter is not projected.
        family: a name in ``PROJECTIONS``; ``identity`` projects nothing.
        rank: r, the number of columns of P.
        update_steps: F. P is drawn again at each step t (counted from 0) with ``t % F == 0``.
        seed: the public projection seed.
        device: the device of the projectors.
        input_dims: parameter name -> the dimension of the layer's input, if it is not 1.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        family: str = "gaussian",
        rank: int,
        update_steps: int,
        seed: int,
        device: torch.device | str = "cpu",
        input_dims: Mapping[str, int] | None = None,
    ) -> None:
        placed = placements(shapes, rank, input_dims)
        self._draw, self._seed = PROJECTIONS[family], seed
        super().__init__(placed if self._draw else {}, update_steps, device)

    def at(self, step: int) -> dict[str, Projector]:
        """Return the projectors of a step, counted from 0; the same until the next redraw."""
        return self.in_force(step, self._matrices, drawn=True)

    def _matrices(self, refresh: int) -> dict[str, Tensor]:
        return {name: self._drawn(name, place, refresh) for name, place in self.placements.items()}

    def _drawn(self, name: str, place: Placement, refresh: int) -> Tensor:
        assert self._draw is not None
        blocks = [
            self._draw(
                min(BLOCK_ROWS, place.rows - start),
                place.rank,
                projection_generator(self._seed, refresh, name, start // BLOCK_ROWS),
            )
            for start in range(0, place.rows, BLOCK_ROWS)
        ]
        return torch.cat(blocks)


Measure = Callable[[Mapping[str, int]], Mapping[str, Tensor]]
"""A function from weight name -> rank to weight name -> P, (n, r)."""


class PrincipalProjection(SavedProjection):
    """The projectors of principal directions, computed once, or again every F steps.

    P has orthonormal columns along the layer's input (for an embedding, its output). The P of the
    weights in ``square`` has all directions, scaled as by ``measure``.

    Guarantee:
        P projects gradients before they are private. So the result of ``measure`` must be a
        function of public inputs, of the seed, and of weights, which are already private.

    Args:
        shapes: as in ``ProjectionSchedule``.
        rank: r, the number of columns of P.
        update_steps: F; None computes P only before the first step.
        measure: returns the matrices. All ranks call it at the same time, and get the same result.
        device: the device of the projectors.
        input_dims: parameter name -> the dimension of features, if it is not 1.
        square: the names of parameters with a square P.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        rank: int,
        update_steps: int | None,
        measure: Measure,
        device: torch.device | str = "cpu",
        input_dims: Mapping[str, int] | None = None,
        square: Collection[str] = (),
    ) -> None:
        placed = placements(shapes, rank, input_dims, of_input=True)
        for name in square:
            dimension = (input_dims or {}).get(name, 1)
            size = shapes[name][dimension]
            placed[name] = Placement(Side.RIGHT if dimension else Side.LEFT, size, size)
        super().__init__(placed, update_steps, device)
        self._measure = measure
        self._ranks = {name: place.rank for name, place in placed.items()}

    def at(self, step: int) -> dict[str, Projector]:
        """Return the projectors of a step, counted from 0; the same until the next redraw.

        Raises:
            PrivacyError: if P was computed at an earlier step, and its state was not loaded.
        """
        return self.in_force(step, lambda _: self._measure(self._ranks))

    def digest(self) -> str:
        """Return the SHA-256, in hex, of names and elements of the current P."""
        digest = hashlib.sha256()
        for name, projector in sorted(self._projectors.items()):
            matrix = projector.matrix.detach().cpu().contiguous()
            digest.update(f"{name}\n{tuple(matrix.shape)}\n".encode())
            digest.update(matrix.numpy().tobytes())
        return digest.hexdigest()
