"""Layers that are given the same tensor have one P, and that tensor is projected once."""

import pytest
import torch
from torch import nn

from dp_grape_hf.gradients import make_engine
from dp_grape_hf.projections import Projector, Side, principal_directions
from recipes.benchmark.kernels import Kernels
from tests.gradients.functions import Function
from tests.support.oracles import assert_gradients_equal, single_sample_gradients


def attention(changed=False):
    def compute(m, x):
        queries = m.q(x)
        x = x.clone() if changed else x
        keys = m.k(x)
        x = x.mul_(2) if changed else x
        return m.o(nn.functional.scaled_dot_product_attention(queries, keys, m.v(x)))

    return Function(compute, **{name: nn.Linear(6, 6) for name in "qkvo"})


def squared(outputs, labels):
    return outputs.float().square().sum((1, 2)) * labels


def batches():
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(5, 4, 6, generator=generator)} for _ in range(3)]


def test_layers_that_read_one_tensor_have_one_tensor_of_directions():
    ranks = {f"{name}.weight": 2 for name in "qkvo"}
    found = principal_directions(attention(), ranks, batches)
    of = {name: found[f"{name}.weight"].directions for name in "qkvo"}
    assert of["q"] is of["k"] is of["v"]
    assert of["o"] is not of["q"]
    alone = principal_directions(attention(), {"k.weight": 2}, batches)["k.weight"]
    overlap = (of["k"].T @ alone.directions).svd().S
    torch.testing.assert_close(overlap, torch.ones(2), atol=1e-3, rtol=0)


def test_a_tensor_that_was_changed_in_between_is_another_one():
    ranks = {f"{name}.weight": 2 for name in "qkv"}
    found = principal_directions(attention(changed=True), ranks, batches)
    assert len({id(own.directions) for own in found.values()}) == 3


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_of_layers_with_one_projection_are_exact(bias):
    model = attention()
    for layer in (model.q, model.k, model.v, model.o):
        layer.bias.requires_grad_(bias)
    matrix = torch.linalg.qr(torch.randn(6, 2))[0]
    shared = Projector(matrix, Side.RIGHT)
    projectors = {f"{name}.weight": shared for name in "qkvo"}
    inputs = {"x": torch.randn(3, 4, 6), "labels": torch.ones(3)}
    losses, gradients = make_engine("layerwise", model, squared)(inputs, projectors)
    expected_losses, expected = single_sample_gradients(model, inputs, projectors, squared)
    torch.testing.assert_close(losses, expected_losses)
    assert_gradients_equal(gradients, expected, tolerance=1e-5)


def test_one_tensor_is_projected_once_and_not_kept_afterwards():
    model = attention()
    matrix = torch.linalg.qr(torch.randn(6, 2))[0]
    one = {f"{name}.weight": Projector(matrix, Side.RIGHT) for name in "qkvo"}
    each = {f"{name}.weight": Projector(matrix.clone(), Side.RIGHT) for name in "qkvo"}
    inputs = {"x": torch.randn(3, 4, 6), "labels": torch.ones(3)}
    counts = []
    for projectors in (one, each):
        engine = make_engine("layerwise", model, squared)
        engine(inputs, projectors)
        with (kernels := Kernels()):
            engine(inputs, projectors)
        counts.append(kernels.calls["addmm"])
    assert counts[1] - counts[0] == 2
