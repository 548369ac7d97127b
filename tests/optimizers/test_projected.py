"""``ProjectedAdam`` against ``torch.optim.AdamW``; gradients in one vector and by name; changes.

The definition of each update rule is in ``test_rules``.
"""

import pytest
import torch
from torch import nn

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.optimizers import ProjectedAdam, ProjectedOptimizer, projected as optimizer_module
from recipes.benchmark.kernels import Kernels
from tests.support.optimizers import (
    assert_same,
    draw,
    flat_step,
    gradients,
    parameters,
    saved_and_loaded,
    step,
)


@pytest.mark.parametrize("way", [step, flat_step])
def test_groups_have_settings_of_their_own_as_on_adamw(way):
    """The groups of the Hugging Face Trainer: vectors do not decay."""

    def groups(weights):
        matrices = [weight for weight in weights.values() if weight.dim() == 2]
        others = [weight for weight in weights.values() if weight.dim() < 2]
        return [
            {"params": matrices, "weight_decay": 0.2},
            {"params": others, "weight_decay": 0.0, "lr": 0.05, "betas": (0.5, 0.9)},
        ]

    ours, theirs = parameters(), parameters()
    optimizer = ProjectedAdam(groups(ours), lr=0.1)
    reference = torch.optim.AdamW(groups(theirs), lr=0.1)
    for i in range(6):
        way(optimizer, ours, i)
        for name, gradient in gradients(i, {}).items():
            theirs[name].grad = gradient
        reference.step()
        assert_same(ours, theirs, rtol=1e-6, atol=1e-7)
        for group in (*optimizer.param_groups, *reference.param_groups):
            group["lr"] *= 0.7  # as a schedule does
            group["betas"] = (0.5, 0.9) if i % 2 else (0.9, 0.999)


def test_a_parameter_without_a_gradient_is_left_alone():
    """Neither decayed nor given state: it is not part of the release."""
    weights, before = parameters(), parameters()
    optimizer = ProjectedAdam(weights.values(), lr=0.1, weight_decay=0.5)
    square = weights.pop("square")
    step(optimizer, weights, 0)
    assert torch.equal(square, before["square"])
    assert square not in optimizer.state
    assert not torch.equal(weights["left"], before["left"])


@pytest.mark.parametrize(("dtype", "decay"), [(torch.float32, 0.0), (torch.bfloat16, 0.3)])
def test_non_contiguous_and_contiguous_weights_are_updated_alike(dtype, decay):
    """Torch's kernel would pair its numbers with those of the gradient in the order of memory."""
    values = torch.randn(5, 3).to(dtype)
    turned, plain = nn.Parameter(values.T.contiguous().T), nn.Parameter(values.clone())
    assert not turned.is_contiguous()
    optimizers = [ProjectedAdam([w], lr=0.1, weight_decay=decay) for w in (turned, plain)]
    for i in range(3):
        gradient = torch.randn(5, 3, generator=torch.Generator().manual_seed(i))
        for weight, optimizer in zip((turned, plain), optimizers, strict=True):
            given = gradient.T.contiguous().T if weight is plain else gradient
            optimizer.receive({weight: given})
            optimizer.step()
    tolerance = 1e-6 if dtype is torch.float32 else 0.02  # decay is rounded by itself
    torch.testing.assert_close(turned, plain, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(), (0, 3), (30, 4)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_the_size_of_blocks_changes_no_update(shape, dtype, monkeypatch):
    """But for the coins of rounding, which move a number to a neighbour at most."""
    found = []
    for size in (8, 2**20):
        monkeypatch.setattr(optimizer_module, "_BLOCK", size)
        generator = torch.Generator().manual_seed(0)
        weight = nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        optimizer = ProjectedAdam([weight], lr=0.1, weight_decay=0.1)
        for _ in range(2):
            optimizer.receive({weight: torch.randn(shape, generator=generator)})
            optimizer.step()
        assert optimizer.state[weight]["step"] == 2
        found.append(weight)
    tolerance = 0.02 if dtype is torch.bfloat16 else 0
    torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)


def test_the_state_of_a_part_of_the_parameters_is_loaded():
    weights, fresh = parameters(), parameters()
    optimizer, loaded = ProjectedAdam(weights.values()), ProjectedAdam(fresh.values())
    step(optimizer, {"vector": weights["vector"]}, 0)
    loaded.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    assert list(loaded.state) == [fresh["vector"]]


def test_the_state_of_another_rank_is_refused():
    weights = parameters()
    optimizer = ProjectedAdam(weights.values())
    step(optimizer, weights, 0, draw(0))
    fresh = parameters()
    resumed = ProjectedAdam(fresh.values())
    resumed.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    other = draw(0, rank=2)
    with pytest.raises(PrivacyError, match=r"\(3, 20\).*\(2, 20\).*projection_rank"):
        step(resumed, fresh, 1, other)


def test_a_step_needs_a_release_of_its_own():
    weights, before = parameters(), parameters()
    optimizer = ProjectedAdam(weights.values(), weight_decay=0.1)
    with pytest.raises(PrivacyError, match=r"without receive\(\)"):
        optimizer.step()
    assert_same(weights, before, rtol=0, atol=0)
    step(optimizer, weights, 0)
    with pytest.raises(PrivacyError, match=r"without receive\(\)"):
        optimizer.step()


def test_a_closure_is_refused_before_it_runs():
    weights = parameters()
    optimizer = ProjectedAdam(weights.values())
    optimizer.receive({weights[name]: gradient for name, gradient in gradients(0, {}).items()})

    def closure():
        raise AssertionError("it ran")

    with pytest.raises(PrivacyError, match="closure"):
        optimizer.step(closure)


EXACT = {"rtol": 1e-5, "atol": 1e-6}


def test_separately_stored_updates_are_views_of_the_vector():
    one, other = parameters(torch.bfloat16), parameters(torch.bfloat16)
    kept = []
    for weights, way in ((one, step), (other, flat_step)):
        optimizer, projectors = ProjectedAdam(weights.values(), 0.1, weight_decay=0.1), draw(0)
        kept.append(optimizer.store_separately(weights["right"], projectors["right"])[0])
        for number in range(3):
            way(optimizer, weights, number, projectors)
        assert kept[-1].any()
        rounded = optimizer.store_separately(weights["right"], projectors["right"])[1]
        assert torch.equal(rounded, kept[-1].to(torch.bfloat16))
    torch.testing.assert_close(*kept, **EXACT)
    assert torch.equal(one["right"], other["right"])


def test_small_updates_of_unprojected_16_bit_weights_add_up():
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


def test_changes_of_16_bit_weights_between_runs_are_kept():
    weights = parameters(torch.bfloat16)
    optimizer = ProjectedOptimizer(weights.values(), 1e-5, rule="sgd")
    flat_step(optimizer, weights, 0, {})
    state = saved_and_loaded(optimizer.state_dict())
    weights["vector"].data.fill_(3)
    optimizer = ProjectedOptimizer(weights.values(), 1e-5, rule="sgd")
    optimizer.load_state_dict(state)
    flat_step(optimizer, weights, 1, {})
    torch.testing.assert_close(weights["vector"].data, torch.full_like(weights["vector"], 3))


def test_no_float32_value_is_stored_for_a_32_bit_weight():
    weights, now = parameters(torch.bfloat16), parameters()
    optimizer = ProjectedOptimizer(weights.values(), 1e-5)
    flat_step(optimizer, weights, 0, {})
    assert all("value" in optimizer.state[w] for w in weights.values())
    loaded = ProjectedOptimizer(now.values(), 1e-5)
    loaded.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    assert not any("value" in loaded.state[w] for w in now.values())


def test_one_kernel_call_moves_all_16_bit_weights():
    weights = parameters(torch.bfloat16)
    optimizer, projectors = ProjectedAdam(weights.values()), draw(0)
    for name, projector in projectors.items():
        optimizer.store_separately(weights[name], projector)
    flat_step(optimizer, weights, 0, projectors)
    with (kernels := Kernels()):
        flat_step(optimizer, weights, 1, projectors)
    assert kernels.calls["_fused_adamw_"] == 1


def test_gradients_of_weights_unknown_to_the_optimizer_are_refused():
    weights = parameters()
    optimizer = ProjectedOptimizer([weights["left"]], 0.1)
    with pytest.raises(PrivacyError, match="4 of 5 private gradients"):
        flat_step(optimizer, weights, 0, draw(0))
