"""When P is made anew, and of what: the public seed, or public inputs.

DP-GRAPE projects gradients at capture, before they are private: P is drawn from the seed every F
steps, or has the principal directions of what the layers are given when they read public inputs.
P may never be computed from gradients that are projected by it: they are not private yet.
"""

from __future__ import annotations

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
        placed: parameter name -> where its P acts, of those that are projected.
        update_steps: F; P is fresh at every step t (counted from 0) with ``t % F == 0``, and with
            None at the first alone.
        device: where projectors are used.

    Attributes:
        placements: parameter name -> where its P acts, of those that are projected.
    """

    def __init__(
        self,
        placed: Mapping[str, Placement],
        update_steps: int | None,
        device: torch.device | str,
    ) -> None:
        require(
            update_steps is None or update_steps >= 1,
            f"projection_update_steps={update_steps} must be at least 1.",
        )
        self.placements = placed
        self._update_steps, self._device = update_steps, torch.device(device)
        self._refresh = -1
        self._projectors: dict[str, Projector] = {}

    def in_force(
        self, step: int, make: Callable[[int], Mapping[str, Tensor]], drawn: bool = False
    ) -> dict[str, Projector]:
        """Return the projectors of a step.

        Args:
            step: counted from 0.
            make: returns the matrices, given how often they were made before.
            drawn: whether they can be made at any step, and not only when they are due.
        """
        every = self._update_steps
        refresh, late = (0, step) if every is None else divmod(step, every)
        if refresh != self._refresh:
            require(
                drawn or late == 0,
                f"the projection in force at {step=} is that of step {step - late}. Load the state "
                "that was saved with the checkpoint to resume between two redraws.",
            )
            self._projectors = self._on_device(make(refresh))
            self._refresh = refresh
        return self._projectors

    def _on_device(self, matrices: Mapping[str, Tensor]) -> dict[str, Projector]:
        """Return the projectors of matrices; where two are one tensor, they stay one."""
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
            "the state of the projection was saved with another projection, projection_rank or "
            "optim_target_modules. Resume with those of the checkpoint.",
        )
        if state:
            self._refresh = state["refresh"]
            copies = {matrix.data_ptr(): matrix.clone() for matrix in state["matrices"].values()}
            matrices = {n: copies[m.data_ptr()] for n, m in state["matrices"].items()}
            self._projectors = self._on_device(matrices)


class ProjectionSchedule(_Redrawn):
    """The random projectors of a model, which are drawn again every F steps.

    P is drawn on the CPU whatever the device, so that one seed gives one P everywhere.

    Args:
        shapes: parameter name -> shape, of the parameters to project; those with a rank that is
            not below the projected dimension stay unprojected.
        family: a name in ``PROJECTIONS``; ``identity`` projects nothing.
        rank: r, the columns of P.
        update_steps: F; P is fresh at every step t (counted from 0) with ``t % F == 0``.
        seed: the public projection seed.
        device: where projectors are used.
        input_dims: parameter name -> its dimension that is the layer's input, of those where it is
            not 1.

    Raises:
        PrivacyError: for an unknown family, or rank or update_steps below 1.
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
        known = ", ".join(sorted(PROJECTIONS))
        require(
            family in PROJECTIONS,
            f"projection={family!r} is not known; choose one of: {known}.",
        )
        placed = placements(shapes, rank, input_dims)
        self._draw, self._seed = PROJECTIONS[family], seed
        super().__init__(placed if self._draw else {}, update_steps, device)

    def at(self, step: int) -> dict[str, Projector]:
        """Return the projectors in force at a step, counted from 0: the same until a redraw."""
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
"""Returns the P, (n, r), of every weight that it is given a rank of."""


class PrincipalProjection(SavedProjection):
    """The projectors of principal directions, measured once, or afresh every F steps.

    P has orthonormal columns along the layer's input (of an embedding, its output). Weights may be
    named that keep all coordinates, in the directions and of the sizes that ``measure`` gives them.

    Guarantee:
        Whatever ``measure`` looks at, its result meets gradients before they are private: it must
        be a function of public inputs, of the seed, and of weights, which are private already.

    Args:
        shapes: as in ``ProjectionSchedule``, and so are ``rank`` and ``device``.
        rank: r.
        update_steps: F; None measures before the first step only.
        measure: makes the matrices. All ranks call it at the same time, and get the same.
        device: where projectors are used.
        input_dims: parameter name -> its dimension of features, of those where it is not 1.
        square: parameter names, of those whose P is square.

    Raises:
        PrivacyError: for a rank or update_steps below 1.
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
        """Return the projectors in force at a step, counted from 0: the same until a redraw.

        Raises:
            PrivacyError: if P was measured at an earlier step, and its state was not loaded.
        """
        return self.in_force(step, lambda _: self._measure(self._ranks))

    def digest(self) -> str:
        """Return the SHA-256, in hex, of the names and numbers of the P in force."""
        digest = hashlib.sha256()
        for name, projector in sorted(self._projectors.items()):
            matrix = projector.matrix.detach().cpu().contiguous()
            digest.update(f"{name}\n{tuple(matrix.shape)}\n".encode())
            digest.update(matrix.numpy().tobytes())
        return digest.hexdigest()
