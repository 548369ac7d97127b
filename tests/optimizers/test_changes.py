"""What was added to a weight, as factors, against the weights themselves."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dp_grape_hf.optimizers import LowRankUpdates, ProjectedOptimizer
from tests.support.optimizers import (
    RANK,
    SIDES,
    Parameters,
    draw,
    parameters,
    saved_and_loaded,
    step,
)


def added(before: dict[str, Tensor], weights: Parameters) -> dict[str, Tensor]:
    return {name: weights[name].detach() - before[name] for name in SIDES}


def copies(weights: Parameters) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in weights.items()}


def test_the_product_of_the_factors_is_what_all_steps_added() -> None:
    weights = parameters()
    before, plain = copies(weights), copy.deepcopy(weights)
    optimizer = ProjectedOptimizer(weights.values(), 0.1, keep_changes=True)
    other = ProjectedOptimizer(plain.values(), 0.1)
    for number in range(7):  # three periods of at most three steps
        projectors = draw(number // 3)
        step(optimizer, weights, number, projectors)
        step(other, plain, number, projectors)
    for name, change in added(before, weights).items():
        left, right = optimizer.changes()[weights[name]]
        assert left.shape[1] == right.shape[0] == 3 * RANK
        torch.testing.assert_close(left @ right, change, rtol=1e-5, atol=1e-6)
        assert change.norm() > 0.1
    assert weights["vector"] not in optimizer.changes()
    for name, weight in plain.items():  # to keep them moves nothing
        assert torch.equal(weights[name], weight)
    numbers = 3 * RANK * (20 + 8 + 20 + 8 + 8 + 8)
    assert optimizer.state_bytes() == other.state_bytes() + 4 * numbers


@pytest.mark.parametrize("stop", [3, 5], ids="after {} steps".format)
def test_a_saved_state_goes_on_with_the_same_periods(stop: int) -> None:
    """A P that was drawn again is known by its numbers, and so is one of an earlier period."""
    weights = parameters()
    before = copies(weights)
    optimizer = ProjectedOptimizer(weights.values(), 0.1, keep_changes=True)
    for number in range(stop):
        step(optimizer, weights, number, draw(number // 3))
    state = saved_and_loaded(optimizer.state_dict())
    resumed = ProjectedOptimizer(weights.values(), 0.1, keep_changes=True)
    kept = copies(weights)
    step(resumed, weights, 9, draw(0))  # what it has by itself is forgotten
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(kept[name])
    resumed.load_state_dict(state)
    for number in range(stop, 6):
        step(resumed, weights, number, draw(number // 3))
    step(resumed, weights, 6, draw(0))
    for name, change in added(before, weights).items():
        left, right = resumed.changes()[weights[name]]
        assert left.shape[1] == 2 * RANK
        torch.testing.assert_close(left @ right, change, rtol=1e-5, atol=1e-6)


def test_states_load_with_or_without_stored_changes() -> None:
    weights = parameters()
    keeping = ProjectedOptimizer(weights.values(), 0.1, keep_changes=True)
    plain = ProjectedOptimizer(weights.values(), 0.1)
    for optimizer in (keeping, plain):
        step(optimizer, weights, 0, draw(0))
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in (keeping, plain)]
    plain.load_state_dict(states[0])
    assert not plain.changes()
    keeping.load_state_dict(states[1])
    assert not keeping.changes()


def test_separately_stored_updates_are_merged_without_rounding() -> None:
    """In bfloat16 the weight is rounded; its change is not, in the state neither."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 20, bias=False).bfloat16()
    exact = nn.Linear(8, 20, bias=False)
    exact.load_state_dict({"weight": layer.weight.detach().float()})
    before = exact.weight.detach().clone()
    options: dict[str, Any] = {"lr": 1e-3, "keep_changes": True}
    optimizer = ProjectedOptimizer(layer.parameters(), **options)
    reference = ProjectedOptimizer(exact.parameters(), **options)
    branches = LowRankUpdates(layer, optimizer)
    for number in range(4):
        projector = draw(number // 2)["right"]
        branches.set_projectors({"weight": projector})
        step(optimizer, {"right": layer.weight}, number, {"right": projector})
        step(reference, {"right": exact.weight}, number, {"right": projector})
    branches.merge_()
    resumed = ProjectedOptimizer(layer.parameters(), **options)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    left, right = resumed.changes()[layer.weight]
    assert left.dtype is right.dtype is torch.float32
    torch.testing.assert_close(left @ right, exact.weight - before, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(layer.weight.float(), before + left @ right, rtol=2**-6, atol=1e-4)
