"""What was added to a weight, as factors, against the weights themselves."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dp_grape_hf.optimizers import LowRankUpdates, ProjectedOptimizer
from dp_grape_hf.projections import Projector, Side

SHAPES = {"left": (6, 20), "right": (20, 6)}
SIDES = {"left": Side.LEFT, "right": Side.RIGHT}
RANK = 2

Weights = dict[str, nn.Parameter]


def weights_in(dtype: torch.dtype = torch.float32) -> Weights:
    generator = torch.Generator().manual_seed(0)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in {**SHAPES, "vector": (7,)}.items()
    }


def projectors_of(period: int) -> dict[str, Projector]:
    generator = torch.Generator().manual_seed(100 + period)
    return {
        name: Projector(torch.randn(6, RANK, generator=generator), side)
        for name, side in SIDES.items()
    }


def step(optimizer: Any, weights: Weights, number: int, projectors: dict[str, Projector]) -> None:
    generator = torch.Generator().manual_seed(number)
    full = {
        name: torch.randn(weight.shape, generator=generator) for name, weight in weights.items()
    }
    grads = {n: projectors[n].project(g) if n in projectors else g for n, g in full.items()}
    optimizer.receive(
        {weights[name]: gradient for name, gradient in grads.items()},
        {weights[name]: projector for name, projector in projectors.items()},
    )
    optimizer.step()


def added(before: dict[str, Tensor], weights: Weights) -> dict[str, Tensor]:
    return {name: weights[name].detach() - before[name] for name in SHAPES}


def copies(weights: Weights) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in weights.items()}


def test_the_product_of_the_factors_is_what_all_steps_added() -> None:
    weights = weights_in()
    before, plain = copies(weights), copy.deepcopy(weights)
    optimizer = ProjectedOptimizer(weights.values(), 0.1, keep_changes=True)
    other = ProjectedOptimizer(plain.values(), 0.1)
    assert optimizer.changes is not None
    for number in range(7):  # three periods of at most three steps
        projectors = projectors_of(number // 3)
        step(optimizer, weights, number, projectors)
        step(other, plain, number, projectors)
    for name, change in added(before, weights).items():
        left, right = optimizer.changes.factors(weights[name])
        assert left.shape[1] == right.shape[0] == 3 * RANK
        torch.testing.assert_close(left @ right, change, rtol=1e-5, atol=1e-6)
        assert change.norm() > 0.1
    assert weights["vector"] not in optimizer.changes
    for name, weight in plain.items():  # to keep them moves nothing
        assert torch.equal(weights[name], weight)
    numbers = 3 * RANK * (20 + 6 + 20 + 6)
    assert optimizer.state_bytes() == other.state_bytes() + 4 * numbers


def test_an_optimizer_that_was_not_asked_to_keeps_none() -> None:
    weights = weights_in()
    optimizer = ProjectedOptimizer(weights.values(), 0.1)
    step(optimizer, weights, 0, projectors_of(0))
    assert optimizer.changes is None
    keys = {key for entry in optimizer.state_dict()["state"].values() for key in entry}
    assert keys == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("stop", [3, 5], ids="after {} steps".format)
def test_a_saved_state_goes_on_with_the_same_periods(stop: int) -> None:
    """A P that was drawn again is known by its numbers, and so is one of an earlier period."""
    weights = weights_in()
    before = copies(weights)
    optimizer = ProjectedOptimizer(weights.values(), 0.1, keep_changes=True)
    for number in range(stop):
        step(optimizer, weights, number, projectors_of(number // 3))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed = ProjectedOptimizer(weights.values(), 0.1, keep_changes=True)
    kept = copies(weights)
    step(resumed, weights, 9, projectors_of(0))  # what it has by itself is forgotten
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(kept[name])
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for number in range(stop, 6):
        step(resumed, weights, number, projectors_of(number // 3))
    step(resumed, weights, 6, projectors_of(0))
    assert resumed.changes is not None
    for name, change in added(before, weights).items():
        left, right = resumed.changes.factors(weights[name])
        assert left.shape[1] == 2 * RANK
        torch.testing.assert_close(left @ right, change, rtol=1e-5, atol=1e-6)


def test_a_state_without_changes_or_for_an_optimizer_without_is_loaded() -> None:
    weights = weights_in()
    keeping = ProjectedOptimizer(weights.values(), 0.1, keep_changes=True)
    plain = ProjectedOptimizer(weights.values(), 0.1)
    for optimizer in (keeping, plain):
        step(optimizer, weights, 0, projectors_of(0))
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in (keeping, plain)]
    plain.load_state_dict(states[0])
    assert plain.changes is None
    keeping.load_state_dict(states[1])
    assert not keeping.changes


def test_what_is_kept_apart_counts_once_it_is_merged_and_is_not_rounded() -> None:
    """In bfloat16 the weight is rounded; its change is not, in the state neither."""
    torch.manual_seed(0)
    layer = nn.Linear(6, 20, bias=False).bfloat16()
    exact = nn.Linear(6, 20, bias=False)
    exact.load_state_dict({"weight": layer.weight.detach().float()})
    before = exact.weight.detach().clone()
    options: dict[str, Any] = {"lr": 1e-3, "keep_changes": True}
    optimizer = ProjectedOptimizer(layer.parameters(), float32_updates=True, **options)
    reference = ProjectedOptimizer(exact.parameters(), **options)
    branches = LowRankUpdates(layer, optimizer)
    for number in range(4):
        projector = projectors_of(number // 2)["right"]
        branches.use({"weight": projector})
        step(optimizer, {"weight": layer.weight}, number, {"weight": projector})
        step(reference, {"weight": exact.weight}, number, {"weight": projector})
    branches.merge_()
    resumed = ProjectedOptimizer(layer.parameters(), float32_updates=True, **options)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.changes is not None
    left, right = resumed.changes.factors(layer.weight)
    assert left.dtype is right.dtype is torch.float32
    torch.testing.assert_close(left @ right, exact.weight - before, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(layer.weight.float(), before + left @ right, rtol=2**-6, atol=1e-4)
