"""GaLore projections of private gradients: leading singular vectors, and when they are renewed."""

import pytest
import torch
from torch import Tensor

from dp_grape_hf.projections import Projector, Side
from recipes.paper.methods.released import SingularVectors, leading_vectors

SHAPES = {"wide": (6, 16), "tall": (16, 6), "square": (6, 6), "small": (2, 9), "bias": (6,)}


def svd_projector(gradient: Tensor, rank: int, side: Side) -> Projector:
    return Projector(leading_vectors(gradient, rank, side), side)


def gradients(seed: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


# ---- One SVD ----


@pytest.mark.parametrize("side", Side)
@pytest.mark.parametrize("shape", [(6, 16), (16, 6), (6, 6)])
@pytest.mark.parametrize("rank", [1, 4, 6])
def test_svd_projects_on_the_leading_singular_vectors(
    shape: tuple[int, int], side: Side, rank: int
) -> None:
    gradient = gradients(0, {"w": shape})["w"]
    projector = svd_projector(gradient, rank, side)
    p = projector.matrix
    assert (p.dtype, p.shape) == (
        torch.float32,
        (shape[0] if side is Side.LEFT else shape[1], rank),
    )
    torch.testing.assert_close(p.T @ p, torch.eye(rank))
    # The best approximation of rank r misses exactly the other singular values (Eckart, Young).
    missed = (gradient - projector.lift(projector.project(gradient))).norm()
    expected = torch.linalg.svdvals(gradient.double())[rank:].norm().float()
    torch.testing.assert_close(missed, expected, atol=1e-5, rtol=1e-5)
    # In order: the k-th coordinate has the k-th singular value as its norm.
    coordinates = projector.project(gradient)
    norms = coordinates.norm(dim=1 if side is Side.LEFT else 0)
    torch.testing.assert_close(norms, torch.linalg.svdvals(gradient)[:rank])
    assert p.untyped_storage().nbytes() == p.nbytes


def test_svd_is_computed_in_float32_whatever_the_type() -> None:
    gradient = gradients(0)["tall"].bfloat16()
    p = svd_projector(gradient, 3, Side.RIGHT).matrix
    assert torch.equal(p, svd_projector(gradient.float(), 3, Side.RIGHT).matrix)


def test_a_gradient_of_zeros_has_orthonormal_vectors_all_the_same() -> None:
    p = svd_projector(torch.zeros(6, 16), 3, Side.LEFT).matrix
    torch.testing.assert_close(p.T @ p, torch.eye(3))


# ---- The schedule ----


def test_svd_is_redrawn_every_f_steps_from_current_gradients() -> None:
    projections, before = SingularVectors(SHAPES, rank=2, update_steps=3), None
    for step in range(8):
        found = projections.at(step, gradients(step))
        assert (found["wide"] is before) == (step % 3 > 0)
        before, due = found["wide"], gradients(step - step % 3)
        assert {name: p.side for name, p in found.items()} == {
            "wide": Side.LEFT,
            "tall": Side.RIGHT,
            "square": Side.RIGHT,
        }
        for name, p in found.items():
            assert torch.equal(p.matrix, leading_vectors(due[name], 2, p.side))
