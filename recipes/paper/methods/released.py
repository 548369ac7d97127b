"""Projections of private sums: full private gradients, projected to keep optimizer states small.

Naive DP-GaLore (paper, Appendix "GaLore and Naive DP-GaLore"), D2P2 and their non-private
counterparts GaLore and FLORA. They project a private sum, so P may be computed from it: GaLore
takes its leading singular vectors.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dp_grape_hf.arguments import Method, Update
from dp_grape_hf.gradients import PerSampleEngine
from dp_grape_hf.phases import PROJECTORS
from dp_grape_hf.projections import (
    PROJECTIONS,
    ProjectionSchedule,
    Projector,
    SavedProjection,
    Side,
    input_dimensions,
    placements,
    projection_targets,
)
from recipes.paper.methods.whole_batch import BatchEngine

SVD = "svd"
FAMILIES = (SVD, *(name for name in PROJECTIONS if name != "identity"))


def leading_vectors(private_grad: Tensor, rank: int, side: Side) -> Tensor:
    """Returns the r leading singular vectors of a private gradient, as the columns of a P.

    They are the first r columns of U on the left side, of V on the right, of the singular value
    decomposition in float32 (Zhao et al. 2024, GaLore). They are orthonormal, so ``P P^T`` is the
    best projection of this gradient to rank r, and not the identity in expectation.

    Guarantee:
        Post-processing of ``private_grad``, if that is private. It must not be a sum that got no
        noise yet: what is projected by this P would depend on the data twice.

    Args:
        private_grad: (m, n), of any floating type.
        rank: r, at most min(m, n).
        side: the side P acts on.
    """
    u, _, vh = torch.linalg.svd(private_grad.detach().float(), full_matrices=False)
    columns = u[:, :rank] if side is Side.LEFT else vh[:rank].T
    # A copy, because a view would keep the vectors that are not needed.
    return columns.clone(memory_format=torch.contiguous_format)


class SingularVectors(SavedProjection):
    """The projectors of full private gradients by their leading singular vectors.

    They are taken from the private gradients of the step at which P is due, and kept until the
    next, F steps later. Shapes with ``min(m, n) <= rank``, which have no more singular vectors,
    stay unprojected.

    Guarantee:
        Post-processing. Give it what ``PrivateMechanism.release`` returned, and nothing else.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], *, rank: int, update_steps: int, **where: Any
    ) -> None:
        placed = placements(shapes, rank, where.get("input_dims"))
        placed = {name: place for name, place in placed.items() if rank < min(shapes[name])}
        super().__init__(placed, update_steps, where.get("device", "cpu"))

    def at(self, step: int, private_grads: Mapping[str, Tensor]) -> dict[str, Projector]:
        """Return the projectors in force at a step, counted from 0: the same until a redraw.

        Args:
            step: the logical step.
            private_grads: parameter name -> the full private gradient of this step.

        Raises:
            PrivacyError: if P is due from the gradients of another step: those between two redraws
                need the state that was saved.
        """
        return self.in_force(
            step,
            lambda _: {
                name: leading_vectors(private_grads[name], place.rank, place.side)
                for name, place in self.placements.items()
            },
        )


class _Projected(Update):
    """Projects private sums, and hands the optimizer their coordinates.

    ``svd`` computes P from the private sums. The other families draw P from the public seed.
    """

    def __init__(self, args: Any, engine: PerSampleEngine) -> None:
        self._engine, trainable = engine, engine.trainable
        targets = projection_targets(engine.model, trainable, args.optim_target_modules)
        shapes = {name: tuple(trainable[name].shape) for name in targets}
        options: dict[str, Any] = {
            "rank": args.projection_rank,
            "update_steps": args.projection_update_steps,
            "device": engine.device,
            "input_dims": input_dimensions(engine.model),
        }
        if args.projection == SVD:
            self.projection = SingularVectors(shapes, **options)
            self.at = self.projection.at
        else:
            options |= {"family": args.projection, "seed": args.projection_seed}
            schedule = ProjectionSchedule(shapes, **options)
            self.at = lambda step, private_grads: schedule.at(step)

    def hand_over(self, optimizer: Any, step: int, private_grads: Mapping[str, Tensor]) -> None:
        projectors, weights = self.at(step, private_grads), self._engine.trainable
        self._engine.observer.computed(PROJECTORS, projectors)
        optimizer.receive(
            {
                weights[name]: projectors[name].project(g) if name in projectors else g
                for name, g in private_grads.items()
            },
            {weights[name]: projector for name, projector in projectors.items()},
        )


def _row(title: str, source: str, projection: str, **more: Any) -> Method:
    return Method(
        title, source, projection=projection, projections=FAMILIES, update=_Projected, **more
    )


_OF_BATCH: dict[str, Any] = {"private": False, "query": BatchEngine.of}

ROWS = {
    "dp_galore": _row("naive DP-GaLore", "paper, Appendix on DP-GaLore; Zhao et al. 2024", SVD),
    "d2p2": _row("D2P2-SGD", "Jiang et al. 2024", "gaussian", update_rule="sgd"),
    "galore": _row("GaLore", "Zhao et al. 2024", SVD, **_OF_BATCH),
    "flora": _row("FLORA", "Hao et al. 2024", "gaussian", **_OF_BATCH),
}
