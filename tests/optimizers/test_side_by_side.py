"""Gradients in one vector move weights as the same gradients by name do."""

from typing import Any

import pytest
import torch

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.gradients import Layout
from dp_grape_hf.optimizers import UPDATE_RULES, ProjectedAdam, ProjectedOptimizer
from recipes.benchmark.kernels import Kernels
from tests.support.optimizers import (
    Draw,
    Parameters,
    assert_same,
    draw,
    gradients,
    parameters,
    saved_and_loaded,
    step,
)

EXACT: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}


def flat_step(
    optimizer: ProjectedOptimizer,
    weights: Parameters,
    number: int,
    projectors: Draw,
    beside: tuple[str, ...] = (),
) -> None:
    """Does what ``step`` does, with all gradients but some in one vector."""
    found = gradients(number, projectors)
    layout = Layout({n: w for n, w in weights.items() if n not in beside}, projectors)
    flat = torch.zeros(layout.size)
    for name, place in layout.places.items():
        place.of(flat).copy_(found[name])
    optimizer.receive(
        {weights[name]: found[name] for name in beside},
        {weights[name]: projector for name, projector in projectors.items()},
        *(flat, {weights[name]: place for name, place in layout.places.items()}),
    )
    optimizer.step()


def optimizer_of(weights: Parameters, rule: str, **options: Any) -> ProjectedOptimizer:
    groups = [
        {"params": [weights["left"], weights["number"]], "lr": 0.3},
        {"params": [weights[name] for name in ("right", "square", "vector")]},
    ]
    return ProjectedOptimizer(groups, 0.1, rule=rule, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decay", [0.0, 0.2])
@pytest.mark.parametrize("rule", UPDATE_RULES)
def test_weights_move_as_by_name(rule: str, decay: float, dtype: torch.dtype) -> None:
    one, other = parameters(dtype), parameters(dtype)
    by_name, by_place = (optimizer_of(w, rule, weight_decay=decay) for w in (one, other))
    for number, beside in enumerate([(), ("square",), ("vector",), ("vector", "number"), ()]):
        projectors = draw(number // 2)
        step(by_name, one, number, projectors)
        flat_step(by_place, other, number, projectors, beside)
    assert_same(other, one, **(EXACT if dtype is torch.float32 else {"rtol": 0.05, "atol": 0.05}))


@pytest.mark.parametrize("rule", UPDATE_RULES)
def test_a_state_goes_on_either_way(rule: str) -> None:
    one, other = parameters(), parameters()
    ways = [step, flat_step, step, flat_step]
    expected = optimizer_of(one, rule)
    optimizer = optimizer_of(other, rule)
    for number, way in enumerate(ways):
        step(expected, one, number, draw(0))
        way(optimizer, other, number, draw(0))
        state = saved_and_loaded(optimizer.state_dict())
        optimizer = optimizer_of(other, rule)
        optimizer.load_state_dict(state)
    assert_same(other, one, **EXACT)
    numbers = sum(g.numel() for g in gradients(0, draw(0)).values())
    assert optimizer.state_bytes() == 4 * numbers * len(UPDATE_RULES[rule].moments)


def test_separately_stored_updates_are_views_of_the_vector() -> None:
    one, other = parameters(torch.bfloat16), parameters(torch.bfloat16)
    kept = []
    for weights, way in ((one, step), (other, flat_step)):
        optimizer, projectors = optimizer_of(weights, "adam", weight_decay=0.1), draw(0)
        kept.append(optimizer.store_separately(weights["right"], projectors["right"])[0])
        for number in range(3):
            way(optimizer, weights, number, projectors)
        assert kept[-1].any()
        rounded = optimizer.store_separately(weights["right"], projectors["right"])[1]
        assert torch.equal(rounded, kept[-1].to(torch.bfloat16))
    torch.testing.assert_close(*kept, **EXACT)
    assert torch.equal(one["right"], other["right"])


def test_small_updates_of_unprojected_16_bit_weights_add_up() -> None:
    weights, exact = parameters(torch.bfloat16), parameters()
    for name, weight in weights.items():
        exact[name].data.copy_(weight)
    optimizers = [ProjectedOptimizer(w.values(), 1e-5, rule="sgd") for w in (weights, exact)]
    for number in range(20):
        for optimizer, moved in zip(optimizers, (weights, exact), strict=True):
            flat_step(optimizer, moved, number, {})
        if number == 10:
            state = saved_and_loaded(optimizers[0].state_dict())
            optimizers[0] = ProjectedOptimizer(weights.values(), 1e-5, rule="sgd")
            optimizers[0].load_state_dict(state)
    for name, weight in weights.items():
        assert torch.equal(optimizers[0].state[weight]["value"].to(weight.dtype), weight)
        torch.testing.assert_close(optimizers[0].state[weight]["value"], exact[name].data)


def test_changes_of_16_bit_weights_between_runs_are_kept() -> None:
    weights = parameters(torch.bfloat16)
    optimizer = ProjectedOptimizer(weights.values(), 1e-5, rule="sgd")
    flat_step(optimizer, weights, 0, {})
    state = saved_and_loaded(optimizer.state_dict())
    weights["vector"].data.fill_(3)
    optimizer = ProjectedOptimizer(weights.values(), 1e-5, rule="sgd")
    optimizer.load_state_dict(state)
    flat_step(optimizer, weights, 1, {})
    torch.testing.assert_close(weights["vector"].data, torch.full_like(weights["vector"], 3))


def test_no_float32_value_is_stored_for_a_32_bit_weight() -> None:
    weights, now = parameters(torch.bfloat16), parameters()
    optimizer = ProjectedOptimizer(weights.values(), 1e-5)
    flat_step(optimizer, weights, 0, {})
    assert all("value" in optimizer.state[w] for w in weights.values())
    loaded = ProjectedOptimizer(now.values(), 1e-5)
    loaded.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    assert not any("value" in loaded.state[w] for w in now.values())


def test_one_kernel_call_moves_all_16_bit_weights() -> None:
    weights = parameters(torch.bfloat16)
    optimizer, projectors = ProjectedAdam(weights.values()), draw(0)
    for name, projector in projectors.items():
        optimizer.store_separately(weights[name], projector)
    flat_step(optimizer, weights, 0, projectors)
    with (kernels := Kernels()):
        flat_step(optimizer, weights, 1, projectors)
    assert kernels.calls["_fused_adamw_"] == 1


def test_gradients_of_weights_unknown_to_the_optimizer_are_refused() -> None:
    weights = parameters()
    optimizer = ProjectedOptimizer([weights["left"]], 0.1)
    with pytest.raises(PrivacyError, match="4 of 5 private gradients"):
        flat_step(optimizer, weights, 0, draw(0))


def test_groups_may_change_their_settings() -> None:
    one, other = parameters(), parameters()
    by_name, by_place = (optimizer_of(w, "adam") for w in (one, other))
    for number in range(4):
        for optimizer in (by_name, by_place):
            optimizer.param_groups[0]["betas"] = (0.5, 0.9) if number % 2 else (0.9, 0.999)
            optimizer.param_groups[1]["lr"] = 0.1 * number
        step(by_name, one, number, draw(0))
        flat_step(by_place, other, number, draw(0))
    assert_same(other, one, **EXACT)
