"""When P is made anew, and of what: the public seed, public inputs, or gradients that are private.

DP-GRAPE projects gradients at capture, before they are private: P is drawn from the seed every F
steps, or has the principal directions of what the layers are given when they read public inputs.
Naive DP-GaLore (paper, Appendix "GaLore and Naive DP-GaLore"), D2P2 and their non-private
counterparts privatise full gradients, and project afterwards to keep the optimizer's state small.
What is projected is private, so P may be computed from it: GaLore takes its leading singular
vectors. At capture it may not, which is why ``svd`` is no entry of ``projector.PROJECTIONS``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
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


class _KeptProjection:
    """Projectors that no seed can make again, and so are saved with a checkpoint.

    They are public, or post-processing of private gradients.
    """

    _placed: Mapping[str, Placement]  # of what is kept; nothing is, if it is empty
    _device: torch.device

    def __init__(self) -> None:
        self._refresh = -1
        self._projectors: dict[str, Projector] = {}

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs to go on with the same P: empty if P comes from a seed.

        It may be saved with a checkpoint.
        """
        if not self._placed:
            return {}
        matrices = {name: projector.matrix for name, projector in self._projectors.items()}
        return {"refresh": self._refresh, "matrices": matrices}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with the P of a state; tensors are copied to the device.

        Raises:
            PrivacyError: if it was saved with another projection.
        """
        shapes = {n: (p.rows, p.rank) for n, p in self._placed.items()}
        saved = {n: tuple(matrix.shape) for n, matrix in state.get("matrices", {}).items()}
        fresh = state.get("refresh") == -1 and not saved
        require(
            (saved == shapes or fresh) and bool(state) == bool(shapes),
            "the state of the projection was saved with another projection, projection_rank or "
            "optim_target_modules. Resume with those of the checkpoint.",
        )
        if state:
            self._refresh = state["refresh"]
            self._projectors = {
                name: Projector(matrix.to(self._device, copy=True), self._placed[name].side)
                for name, matrix in state["matrices"].items()
            }


class ReleasedProjection(_KeptProjection):
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
        rank: r, the columns of P.
        update_steps: F; P is fresh at every step t (counted from 0) with ``t % F == 0``.
        seed: the public projection seed; ``svd`` has no use for it.
        device: where projectors are used; the gradients given for ``svd`` are there too.
        input_dims: parameter name -> its dimension that is the layer's input, of those where it is
            not 1.

    Raises:
        PrivacyError: for an unknown family, or rank or update_steps below 1.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        family: str,
        rank: int,
        update_steps: int,
        seed: int = 0,
        device: torch.device | str = "cpu",
        input_dims: Mapping[str, int] | None = None,
    ) -> None:
        if family != SVD and family not in PROJECTIONS:
            known = ", ".join(sorted([SVD, *PROJECTIONS]))
            raise PrivacyError(f"projection={family!r} is not known; choose one of: {known}.")
        super().__init__()
        self._update_steps, self._device = update_steps, torch.device(device)
        self._schedule = ProjectionSchedule(
            shapes,
            family="identity" if family == SVD else family,
            rank=rank,
            update_steps=update_steps,
            seed=seed,
            device=device,
            input_dims=input_dims,
        )
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self._placed = {}
        if family == SVD:
            placed = placements(shapes, rank, input_dims)
            self._placed = {n: p for n, p in placed.items() if p.rank < min(shapes[n])}

    def at(self, step: int, private_grads: Mapping[str, Tensor]) -> dict[str, Projector]:
        """Returns the projectors in force at a step, counted from 0: the same until a redraw.

        Args:
            step: the logical step.
            private_grads: parameter name -> the full private gradient of this step.

        Raises:
            PrivacyError: if P is due from the gradients of another step: those between two redraws
                need the state that was saved; or if a gradient is missing or of the wrong shape.
        """
        if not self._placed:
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
                for name, place in self._placed.items()
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


# ---- At capture ----


class ProjectionSchedule:
    """Draws the projectors of a model and redraws them every F steps.

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

    P is drawn on the CPU whatever the device, so that one seed gives one P everywhere.

    Raises:
        PrivacyError: for an unknown family, or rank or update_steps below 1; and for
            ``svd``, which must not see the gradients that are projected before they are private.
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
            family != "svd",
            "projection='svd' is computed from gradients, and those that are projected here are "
            "not private yet: the release would not be either. Choose a method that projects "
            f"private gradients (dp_galore), or one of: {known}.",
        )
        if family not in PROJECTIONS:
            raise PrivacyError(f"projection={family!r} is not known; choose one of: {known}.")
        require(update_steps >= 1, f"projection_update_steps={update_steps} must be at least 1.")
        placed = placements(shapes, rank, input_dims)
        cls = PROJECTIONS[family]
        self._family = cls() if cls else None
        self._update_steps, self._seed = update_steps, seed
        self._device = torch.device(device)
        self._placements = placed if cls else {}
        self._refresh = -1
        self._projectors: dict[str, Projector] = {}

    @property
    def placements(self) -> Mapping[str, Placement]:
        """Parameter name -> where its P acts, of those that are projected."""
        return self._placements

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
        blocks = [
            self._family.draw(
                min(BLOCK_ROWS, place.rows - start),
                place.rank,
                projection_generator(self._seed, refresh, name, start // BLOCK_ROWS),
            )
            for start in range(0, place.rows, BLOCK_ROWS)
        ]
        return torch.cat(blocks).to(self._device)


Measure = Callable[[Mapping[str, int]], Mapping[str, Tensor]]
"""Returns the P, (n, r), of every weight that it is given a rank of."""


class PrincipalProjection(_KeptProjection):
    """The projectors of principal directions, measured once, or afresh every F steps.

    P has orthonormal columns along the layer's input (of an embedding, its output).

    Guarantee:
        Whatever ``measure`` looks at, its result meets gradients before they are private: it must
        be a function of public inputs, of the seed, and of weights, which are private already.

    Args:
        shapes: parameter name -> shape, of the parameters to project; those with a rank that is
            not below that dimension stay unprojected.
        rank: r.
        update_steps: F; None measures before the first step only.
        measure: makes the matrices. All ranks call it at the same time, and get the same.
        device: where projectors are used.
        input_dims: parameter name -> its dimension of features, of those where it is not 1.

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
    ) -> None:
        super().__init__()
        require(
            update_steps is None or update_steps >= 1,
            f"projection_update_steps={update_steps} must be at least 1.",
        )
        self._placed = placements(shapes, rank, input_dims, of_input=True)
        self._update_steps, self._measure = update_steps, measure
        self._device = torch.device(device)

    @property
    def placements(self) -> Mapping[str, Placement]:
        """Parameter name -> where its P acts, of those that are projected."""
        return self._placed

    def at(self, step: int) -> dict[str, Projector]:
        """Returns the projectors in force at a step, counted from 0: the same until a redraw.

        Raises:
            PrivacyError: if P was measured at an earlier step, and its state was not loaded.
        """
        every = self._update_steps
        refresh, late = (0, step) if every is None else divmod(step, every)
        if refresh != self._refresh:
            require(
                late == 0,
                f"the principal projection in force at {step=} is that of step {step - late}. Load "
                "the state that was saved with the checkpoint to resume between two redraws.",
            )
            found = self._measure({name: place.rank for name, place in self._placed.items()})
            self._projectors = {
                name: Projector(found[name].to(self._device), place.side)
                for name, place in self._placed.items()
            }
            self._refresh = refresh
        return self._projectors

    def digest(self) -> str:
        """Returns the SHA-256, in hex, of the names and numbers of the P in force."""
        digest = hashlib.sha256()
        for name, projector in sorted(self._projectors.items()):
            matrix = projector.matrix.detach().cpu().contiguous()
            digest.update(f"{name}\n{tuple(matrix.shape)}\n".encode())
            digest.update(matrix.numpy().tobytes())
        return digest.hexdigest()
