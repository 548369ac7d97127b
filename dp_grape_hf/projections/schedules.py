"""When P is made anew, and of what: of the public seed, or of gradients that are private already.

DP-GRAPE projects gradients at capture, before they are private: P is drawn, every F steps.
Naive DP-GaLore (paper, Appendix "GaLore and Naive DP-GaLore"), D2P2 and their non-private
counterparts privatise full gradients, and project afterwards to keep the optimizer's state small.
What is projected is private, so P may be computed from it: GaLore takes its leading singular
vectors. At capture it may not, which is why ``svd`` is no entry of ``projector.PROJECTIONS``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dp_grape_hf.errors import PrivacyError, require
from dp_grape_hf.projections.placement import Placement, Side, placements
from dp_grape_hf.projections.projector import BLOCK_ROWS, PROJECTIONS, Projector
from dp_grape_hf.projections.seeds import projection_generator

# ---- After the release ----

SVD = "svd"


def svd_projector(private_grad: Tensor, rank: int, side: Side) -> Projector:
    """Returns the projector onto the r leading singular vectors of a private gradient.

    P is the first r columns of U on the left side, of V on the right, of the singular value
    decomposition in float32 (Zhao et al. 2024, GaLore). Its columns are orthonormal, so ``P P^T``
    is the best projection of this gradient to rank r, and not the identity in expectation.

    Guarantee:
        Post-processing of ``private_grad``, if that is private. It must not be a sum that got no
        noise yet: what is projected by this P would depend on the data twice.

    Args:
        private_grad: (m, n), of any floating type.
        rank: r, at most min(m, n).
        side: the side P acts on.

    Raises:
        PrivacyError: if the gradient is no matrix or has no r singular vectors.
        ValueError: if it has NaN or Inf entries.
    """
    shape = tuple(private_grad.shape)
    require(len(shape) == 2, f"private_grad of shape {shape} is not one matrix.")
    require(
        1 <= rank <= min(shape),
        f"projection_rank={rank} is not between 1 and {min(shape)}, the number of singular vectors "
        f"of a gradient of shape {shape}.",
    )
    if not private_grad.isfinite().all():
        raise ValueError("private_grad has NaN or Inf entries, so it has no singular vectors.")
    u, _, vh = torch.linalg.svd(private_grad.detach().float(), full_matrices=False)
    columns = u[:, :rank] if side is Side.LEFT else vh[:rank].T
    # A copy, because a view would keep the vectors that are not needed.
    return Projector(columns.clone(memory_format=torch.contiguous_format), side)


class ReleasedProjection:
    """The projectors of full private gradients, fresh every F steps.

    ``svd`` draws nothing: it takes P from the private gradients of the step at which P is due, and
    keeps it until the next. The other families draw P from the public seed, the very P that
    ``ProjectionSchedule`` draws.

    Guarantee:
        Post-processing. Give it what ``PrivateMechanism.release`` returned, and nothing else.

    Args:
        shapes: parameter name -> shape, of the parameters to project; those with a rank that is
            not below the projected dimension stay unprojected, and with ``svd`` those with
            ``min(m, n) <= rank``, which have no more singular vectors.
        family: ``svd`` or a name in ``PROJECTIONS``; ``identity`` projects nothing.
        rank: r, the columns of P; or parameter name -> r, for every matrix in ``shapes``.
        update_steps: F; P is fresh at every step t (counted from 0) with ``t % F == 0``.
        seed: the public projection seed; ``svd`` has no use for it.
        device: where projectors are used; the gradients given for ``svd`` are there too.
        side: which dimension is projected, a name in ``placement.ProjectionSide``.
        input_dims: parameter name -> its dimension that is the layer's input, of those where it is
            not 1.

    Raises:
        PrivacyError: for an unknown family or side, or rank or update_steps below 1.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        family: str,
        rank: int | Mapping[str, int],
        update_steps: int,
        seed: int = 0,
        device: torch.device | str = "cpu",
        side: str = "smaller",
        input_dims: Mapping[str, int] | None = None,
    ) -> None:
        if family != SVD and family not in PROJECTIONS:
            known = ", ".join(sorted([SVD, *PROJECTIONS]))
            raise PrivacyError(f"projection={family!r} is not known; choose one of: {known}.")
        self._update_steps, self._device = update_steps, torch.device(device)
        self._schedule = ProjectionSchedule(
            shapes,
            family="identity" if family == SVD else family,
            rank=rank,
            update_steps=update_steps,
            seed=seed,
            device=device,
            side=side,
            input_dims=input_dims,
        )
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self._from_gradients: dict[str, Placement] = {}
        if family == SVD:
            placed = placements(shapes, rank, side, input_dims)
            self._from_gradients = {n: p for n, p in placed.items() if p.rank < min(shapes[n])}
        self._refresh = -1
        self._projectors: dict[str, Projector] = {}

    def at(self, step: int, private_grads: Mapping[str, Tensor]) -> dict[str, Projector]:
        """Returns the projectors in force at a step, counted from 0: the same until a redraw.

        Args:
            step: the logical step.
            private_grads: parameter name -> the full private gradient of this step.

        Raises:
            PrivacyError: if P is due from the gradients of another step: those between two redraws
                need the state that was saved; or if a gradient is missing or of the wrong shape.
        """
        if not self._from_gradients:
            return self._schedule.at(step)
        refresh, late = divmod(step, self._update_steps)
        if refresh != self._refresh:
            require(
                late == 0,
                f"the svd projection in force at {step=} is that of step {step - late}. Load the "
                "state that was saved with the checkpoint to resume between two redraws.",
            )
            self._projectors = {
                name: svd_projector(self._checked(name, private_grads), place.rank, place.side)
                for name, place in self._from_gradients.items()
            }
            self._refresh = refresh
        return self._projectors

    def _checked(self, name: str, private_grads: Mapping[str, Tensor]) -> Tensor:
        require(name in private_grads, f"private_grads has no gradient of {name!r} to project.")
        found, shape = tuple(private_grads[name].shape), self._shapes[name]
        require(
            found == shape,
            f"private_grads[{name!r}] has shape {found}, and the parameter {shape}: only the full "
            "gradient, after noise, is projected here.",
        )
        return private_grads[name]

    # ---- State ----

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs to go on with the same P: empty if P comes from a seed.

        P is post-processing of private gradients, so it may be saved with a checkpoint.
        """
        if not self._from_gradients:
            return {}
        matrices = {name: projector.matrix for name, projector in self._projectors.items()}
        return {"refresh": self._refresh, "matrices": matrices}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with the P of a state; tensors are copied to the device.

        Raises:
            PrivacyError: if it was saved with another projection.
        """
        shapes = {n: (p.rows, p.rank) for n, p in self._from_gradients.items()}
        saved = {n: tuple(matrix.shape) for n, matrix in state.get("matrices", {}).items()}
        fresh = state.get("refresh") == -1 and not saved
        require(
            (saved == shapes or fresh) and bool(state) == bool(shapes),
            "the state of the projection was saved with another projection, projection_rank, "
            "projection_side or optim_target_modules. Resume with those of the checkpoint.",
        )
        if state:
            self._refresh = state["refresh"]
            self._projectors = {
                name: Projector(matrix.to(self._device, copy=True), self._from_gradients[name].side)
                for name, matrix in state["matrices"].items()
            }


# ---- At capture ----


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
