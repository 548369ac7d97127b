"""Projections: unbiased, replayable, on the smaller side, redrawn on time."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dp_grape_hf.projections import (
    MATRIX_LAYERS,
    PROJECTIONS,
    ProjectionSchedule,
    Projector,
    Side,
    default_targets,
)
from dp_grape_hf.projections.projector import BLOCK_ROWS
from dp_grape_hf.projections.seeds import projection_generator
from tests.support.models import CASES, only, row

FAMILIES = {name: family for name, family in PROJECTIONS.items() if family is not None}
each_family = pytest.mark.parametrize("family", FAMILIES)
SHAPES = {"wide": (8, 32), "tall": (32, 8), "square": (8, 8), "small": (3, 40), "bias": (40,)}


def schedule(**changes):
    settings = {"rank": 3, "update_steps": 4, "seed": 5, **changes}
    return ProjectionSchedule(settings.pop("shapes", SHAPES), **settings)


@each_family
def test_lifting_is_unbiased(family):
    """The mean of ``P P^T`` is the identity up to 5 standard errors in each of 36 entries.

    (That over r, for the scaling of the authors' code.)

    An entry's standard deviation is at most sqrt(2 / r), on the diagonal. By the normal
    approximation a right family fails with probability below 36 * 5.8e-7 = 2.1e-5. The seed is
    fixed. The same holds of the mean of P, whose 12 entries have standard deviation 1/sqrt(r).
    """
    rows, rank, draws = 6, 2, 20_000
    generator = torch.Generator().manual_seed(0)
    drawn = torch.stack([FAMILIES[family](rows, rank, generator) for _ in range(draws)])
    assert drawn.dtype is torch.float32
    tolerance = 5 * (2 / rank) ** 0.5 / draws**0.5
    found = (drawn @ drawn.mT).double().mean(0).float()
    expected = torch.eye(rows) / (rank if family == "gaussian_over_r" else 1)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)
    torch.testing.assert_close(drawn.mean(0), torch.zeros(rows, rank), atol=tolerance, rtol=0)


@each_family
def test_projectors_are_determined_by_seed_refresh_and_name(family):
    first = schedule(family=family).at(0)
    assert all(
        torch.equal(p.matrix, schedule(family=family).at(0)[n].matrix) for n, p in first.items()
    )
    reordered = schedule(family=family, shapes=dict(reversed(SHAPES.items()))).at(0)
    assert all(torch.equal(p.matrix, reordered[name].matrix) for name, p in first.items())
    different = [
        first["wide"].matrix,
        first["square"].matrix,
        schedule(family=family, seed=6).at(0)["wide"].matrix,
        schedule(family=family).at(4)["wide"].matrix,
        schedule(family=family).at(8)["wide"].matrix,
    ]
    assert all(not torch.equal(a, b) for i, a in enumerate(different) for b in different[i + 1 :])


@pytest.mark.parametrize("update_steps", [1, 4, 100])
def test_projections_are_redrawn_exactly_at_multiples_of_the_update_steps(update_steps):
    projections = schedule(update_steps=update_steps)
    found = [projections.at(step)["wide"] for step in range(2 * update_steps + 1)]
    pairs = list(pairwise(found))
    redrawn = [step for step, (one, two) in enumerate(pairs, 1) if one is not two]
    assert redrawn == [update_steps, 2 * update_steps]
    assert not any(torch.equal(*(p.matrix for p in pairs[step - 1])) for step in redrawn)


def test_steps_may_be_requested_in_any_order():
    forward, resumed = schedule(), schedule()
    expected = {step: forward.at(step)["tall"].matrix for step in (0, 5, 9)}
    for step in (9, 0, 5, 9):
        assert torch.equal(resumed.at(step)["tall"].matrix, expected[step])


@each_family
def test_each_block_of_rows_is_drawn_on_its_own(family):
    tall, taller = 2 * BLOCK_ROWS + 7, 3 * BLOCK_ROWS
    matrices = [
        schedule(family=family, shapes={"w": (rows, rows)}).at(0)["w"].matrix
        for rows in (tall, taller)
    ]
    assert [len(m) for m in matrices] == [tall, taller]
    complete = 2 * BLOCK_ROWS
    assert torch.equal(matrices[0][:complete], matrices[1][:complete])
    second = FAMILIES[family](BLOCK_ROWS, 3, projection_generator(5, 0, "w", 1))
    assert torch.equal(matrices[1][BLOCK_ROWS : 2 * BLOCK_ROWS], second)


@pytest.mark.parametrize("shape", [(8, 32), (32, 8), (8, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_project_and_lift_are_adjoint_batched_and_keep_the_dtype(shape, dtype):
    projector = schedule(shapes={"w": shape}).at(0)["w"]
    gradients = torch.randn(4, *shape)
    p = projector.matrix
    expected = p.T @ gradients if projector.side is Side.LEFT else gradients @ p
    projected = projector.project(gradients.to(dtype))
    assert projected.dtype is dtype
    assert projected.shape == (4, *projector.coordinate_shape(torch.Size(shape)))
    tolerance = 1e-5 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(projected.float(), expected, atol=tolerance, rtol=tolerance)
    assert projector.lift(projected).shape == gradients.shape
    coordinates = torch.randn_like(expected)
    inner = (expected * coordinates).sum()
    torch.testing.assert_close((gradients * projector.lift(coordinates)).sum(), inner)


@pytest.mark.parametrize("side", Side)
def test_adding_lifted_coordinates_in_place_equals_lifting_them(side):
    projector = Projector(torch.randn(8, 3), side)
    weight = torch.randn(8, 8)
    coordinates = torch.randn(projector.coordinate_shape(weight.shape))
    expected = 0.5 * weight + projector.lift(coordinates)
    in_blocks = weight.clone()
    for rows in (slice(0, 3), slice(3, 8)):
        projector.add_lifted_(in_blocks[rows], coordinates, 0.5, rows)
    projector.add_lifted_(weight, coordinates, decay=0.5)
    torch.testing.assert_close(weight, expected)
    torch.testing.assert_close(in_blocks, expected)
    left, right = projector.factors(coordinates)
    assert (left.shape, right.shape) == ((8, 3), (3, 8))
    torch.testing.assert_close(left @ right, projector.lift(coordinates))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_default_targets_are_the_matrices_of_the_body(case):
    model = case.model()
    targets = default_targets(model)
    output = model.get_output_embeddings()
    body = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, MATRIX_LAYERS) and any(f".{i}." in f"{name}." for i in range(2))
    }
    assert body <= set(targets)
    assert len(targets) == len(set(targets))
    weights = [model.get_parameter(name) for name in targets]
    assert all(weight.dim() == 2 and weight.requires_grad for weight in weights)
    assert not any(weight is output.weight for weight in weights if output is not None)
    assert "classifier.weight" not in targets
    tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    assert not any(weight is table for weight in weights for table in tables)


def test_default_targets_omit_score_heads_and_untied_output_embeddings():
    model = row("Llama, sequence classification").model(num_labels=7)
    assert "score.weight" not in default_targets(model)
    causal = only("llama").model(tie_word_embeddings=False)
    assert "lm_head.weight" not in default_targets(causal)


def test_default_targets_of_a_plain_module_are_its_linear_layers():
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4, bias=False), nn.Linear(4, 2))
    assert default_targets(model) == ["0.weight", "2.weight", "3.weight"]
    model[3].requires_grad_(False)
    model[2].weight = nn.Parameter(model[0].weight.T.contiguous().T)
    assert default_targets(model) == ["0.weight", "2.weight"]
    model[2].weight = model[0].weight  # shared: its uses have different sides or none
    assert default_targets(model) == []
    assert default_targets(nn.Linear(3, 3)) == ["weight"]


def test_default_targets_omit_a_head_with_one_output_per_label():
    model = nn.Module()
    model.body, model.head = nn.Sequential(nn.Linear(4, 5)), nn.Linear(5, 3)
    model.config = SimpleNamespace(num_labels=3)
    assert default_targets(model) == ["body.0.weight"]
