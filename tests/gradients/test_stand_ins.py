"""Weights in coordinates, under one vmap of the whole module, against autograd of each sample."""

from inspect import signature

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from dp_grape_hf.gradients import ENGINES, make_engine
from dp_grape_hf.projections import Projector, Side
from tests.gradients.functions import Function
from tests.models.matrix import dense
from tests.support.oracles import Largest, relative_error, single_sample_gradients

B, T, N = 3, 5, 6  # samples, positions, features
ROWS = 7  # of a table


LEFT, RIGHT = Side.LEFT, Side.RIGHT


def make_projectors(module, sides, rank=2):
    generator = torch.Generator().manual_seed(1)
    projectors = {}
    for name, side in sides.items():
        m, n = module.get_parameter(name).shape
        matrix = torch.randn(m if side is LEFT else n, rank, generator=generator)
        projectors[name] = Projector(matrix.to(module.get_parameter(name).dtype), side)
    return projectors


def loss(outputs, labels):
    flat = outputs.flatten(1).float()
    return (flat * torch.linspace(-1, 1, flat.shape[1])).sum(1) + flat.square().mean(1)


def found_and_expected(module, x, sides):
    """Returns what functorch computes, without a look at the module, and what autograd does."""
    inputs = {next(iter(signature(module.forward).parameters)): x}
    projectors = make_projectors(module, sides)
    engine = make_engine("functorch", module, loss)
    engine.assume_examined(inputs)
    return engine(inputs, projectors), single_sample_gradients(module, inputs, projectors, loss)


def linear():
    return {"layer": nn.Linear(N, 4)}


def square():
    return {"layer": nn.Linear(N, N)}


def table():
    return {"table": nn.Embedding(ROWS, N)}


def matrix():
    return {"matrix": torch.randn(N, 4)}


def looked_up(m, x):
    return m.table(x.argmax(-1))


def tied():
    table, head = nn.Embedding(ROWS, N), nn.Linear(N, ROWS)
    head.weight = table.weight
    return {"table": table, "head": head}


def behind_a_table(m, x):
    return m.head(looked_up(m, x).tanh())


def multiplied_in_place(m, x):
    output = m.layer(x)
    output.mul_(2)
    return m.second(output).add_(1)


def hidden_in_place(m, x):
    """Torch makes a view of the output if the input has three dimensions and there is a bias."""
    hidden = m.layer(looked_up(m, x))
    hidden[:, 0] = 0.0
    return hidden


def scaled_by_its_largest(m, x):
    with torch.no_grad():
        scale = m.layer.weight.abs().amax()
    return m.layer(x) + x.tanh() @ (m.layer.weight / scale).T


def multiplied_by_its_table(m, x):
    hidden = looked_up(m, x)
    return hidden + (hidden @ m.table.weight.T).tanh() @ m.table.weight


def flattened(m, x):
    """Layers see samples and positions as one dimension, as in OPT's feed-forward."""
    hidden = m.table(x.argmax(-1).flatten()).tanh()
    return m.layer(m.norm(hidden)).relu().view(*x.shape[:2], 4)


def scored_by_positions(m, x):
    """Adds a table of (T, T) scores to each sample's own scores."""
    places = torch.arange(T)
    scores = m.scores(places[:, None] - places[None] + 4).squeeze(-1)
    return (x @ x.transpose(1, 2) + scores).tanh() @ x


def rows_for_positions(leading):
    """A module without a rule, which returns the same for all samples."""

    def compute(m, count):
        return m.rows[None, :count] if leading else m.rows[:count]

    return lambda: {**square(), "positions": Function(compute, rows=torch.randn(9, N))}


def placed(m, x):
    return m.layer(x + m.positions(x.shape[1]))


MODULES = {
    "linear on four dimensions": (
        lambda m, x: m.layer(x[:, None, :, None]),
        linear,
        "layer.weight",
    ),
    "linear on what all samples share": (
        lambda m, x: m.layer(torch.eye(N)) @ x.mT[:, :4],
        linear,
        "layer.weight",
    ),
    "samples and positions flattened": (
        flattened,
        lambda: {**linear(), **table(), "norm": nn.LayerNorm(N)},
        "layer.weight",
    ),
    "embedding of positions": (lambda m, x: m.table(torch.arange(T)) * x, table, "table.weight"),
    "scores of positions": (scored_by_positions, lambda: {"scores": nn.Embedding(9, 1)}, ""),
    "rows for positions": (placed, rows_for_positions(False), "layer.weight"),
    "rows for positions, leading": (placed, rows_for_positions(True), "layer.weight"),
    "multi-head attention": (
        lambda m, x: m.layer(x, x, x)[0],
        lambda: {"layer": nn.MultiheadAttention(N, 2, batch_first=True)},
        "layer.in_proj_weight",
    ),
    "tied embedding and head": (behind_a_table, tied, "table.weight"),
    "layer called twice": (lambda m, x: m.layer(m.layer(x).tanh()), square, "layer.weight"),
    "weight used by another module": (
        lambda m, x: functional.linear(x, m.layer.weight) + m.layer(x) @ m.layer.weight,
        square,
        "layer.weight",
    ),
    "bare matrix": (lambda m, x: x @ m.matrix + m.matrix.sum(), matrix, "matrix"),
    "addmm of a matrix": (
        lambda m, x: torch.addmm(m.matrix[0], x.flatten(0, 1), m.matrix, alpha=2).view(-1, T, 4),
        matrix,
        "matrix",
    ),
    "in-place operations": (
        multiplied_in_place,
        lambda: {**linear(), "second": nn.LayerNorm(4, bias=False)},
        "layer.weight",
    ),
    "an output changed in place": (
        hidden_in_place,
        lambda: {**table(), **square()},
        "layer.weight",
    ),
    "weight read without gradient": (scaled_by_its_largest, linear, "layer.weight"),
    "table that is multiplied by as well": (multiplied_by_its_table, table, "table.weight"),
    "layer called with and without samples": (
        lambda m, x: looked_up(m, x) + m.table(torch.arange(T)[None]),
        table,
        "table.weight",
    ),
    "weight whose type is read": (
        lambda m, x: m.layer(x.to(m.layer.weight.dtype)) * float(m.layer.weight.requires_grad),
        linear,
        "layer.weight",
    ),
}


def on_each_side(name):
    return [{}, {name: LEFT}, {name: RIGHT}] if name else [{}]


def made(make, dtype=torch.float32):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = make().to(dtype)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return module


def samples(dtype=torch.float32, count=B):
    return torch.randn(count, T, N, generator=torch.Generator().manual_seed(2)).to(dtype)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_derivative_is_that_of_autograd(name, engine):
    compute, parts, weight = MODULES[name]
    for sides in on_each_side(weight):
        module = made(lambda: Function(compute, **parts()))
        projectors, computes = make_projectors(module, sides), make_engine(engine, module, loss)
        for x in (samples(), samples(count=T), samples(count=1)):
            losses, gradients = computes({"x": x}, projectors)
            exact = single_sample_gradients(module, {"x": x}, projectors, loss)
            torch.testing.assert_close(losses, exact[0])
            assert all(gradient.abs().sum() > 0 for gradient in exact[1].values())
            assert relative_error(dense(gradients, len(x)), exact[1]) < 1e-5


def tied_model():
    return Function(behind_a_table, **tied())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("make", [lambda: Conv1D(4, N), lambda: nn.LayerNorm(N), tied_model])
def test_gradients_are_float32_whatever_the_dtype_of_the_weights(make, dtype):
    for sides in on_each_side(next((n for n, p in make().named_parameters() if p.dim() == 2), "")):
        (_, gradients), (_, expected) = found_and_expected(made(make, dtype), samples(dtype), sides)
        found = dense(gradients, B)
        assert all(value.dtype is torch.float32 for value in found.values())
        assert relative_error(found, expected) < (2e-2 if dtype is torch.bfloat16 else 1e-6)


def test_under_autocast_the_layers_compute_in_its_type():
    module, x = made(lambda: nn.Linear(N, 4)), samples()
    for sides in on_each_side("weight"):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            (losses, gradients), _ = found_and_expected(module, x, sides)
        _, (expected_losses, expected) = found_and_expected(module, x, sides)
        assert 1e-5 < (losses - expected_losses).abs().max() < 5e-2
        assert relative_error(dense(gradients, B), expected) < 3e-2


@pytest.mark.parametrize("make", [lambda: nn.Linear(40, 50), lambda: Conv1D(50, 40)])
@pytest.mark.parametrize("side", Side)
def test_no_weight_exists_once_per_sample(make, side):
    module = made(make)
    engine = make_engine("functorch", module, loss)
    engine.assume_examined(
        inputs := {next(iter(signature(module.forward).parameters)): torch.randn(B, T, 40)}
    )
    with Largest() as largest:
        engine(inputs, make_projectors(module, {"weight": side}))
    assert 40 * 50 <= largest.numbers < B * 40 * 50


def test_the_parameters_are_back_after_an_error():
    module = made(lambda: nn.Linear(N, 4))
    before = dict(module.named_parameters())
    with pytest.raises(RuntimeError, match="shapes"):
        found_and_expected(module, torch.randn(B, T, N + 1), {})
    after = dict(module.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert all(p.requires_grad and p.grad is None for p in before.values())
