"""Weights in coordinates, under one vmap of the whole module, against autograd of each sample."""

from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from dp_grape_hf.gradients import ENGINES, make_engine
from dp_grape_hf.gradients.stand_ins import outside_vmap
from dp_grape_hf.projections import Projector, Side
from tests.gradients.functions import Function
from tests.models.matrix import dense
from tests.support.oracles import (
    Largest,
    relative_error,
    single_sample_gradients,
)

B, T, N = 3, 5, 6  # samples, positions, features
ROWS = 7  # of a table
Sides = dict[str, Side]

LEFT, RIGHT = Side.LEFT, Side.RIGHT


def make_projectors(module: nn.Module, sides: Sides, rank: int = 2) -> dict[str, Projector]:
    generator = torch.Generator().manual_seed(1)
    projectors = {}
    for name, side in sides.items():
        m, n = module.get_parameter(name).shape
        matrix = torch.randn(m if side is LEFT else n, rank, generator=generator)
        projectors[name] = Projector(matrix.to(module.get_parameter(name).dtype), side)
    return projectors


def loss(outputs: Tensor, labels: Tensor | None) -> Tensor:
    """Weighs every number differently."""
    flat = outputs.flatten(1).float()
    return (flat * torch.linspace(-1, 1, flat.shape[1])).sum(1) + flat.square().mean(1)


def found_and_expected(
    module: nn.Module, x: Tensor, sides: Sides, engine: str = "functorch"
) -> tuple[Any, Any]:
    """Returns what an engine computes, functorch without a look, and what autograd does."""
    inputs = {next(iter(signature(module.forward).parameters)): x}
    projectors = make_projectors(module, sides)
    made = make_engine(engine, module, loss)
    if engine == "functorch":
        made.assume_examined(inputs)
    return made(inputs, projectors), single_sample_gradients(module, inputs, projectors, loss)


# ---- Modules ----


def tied() -> nn.Module:
    table, head = nn.Embedding(ROWS, N), nn.Linear(N, ROWS)
    head.weight = table.weight
    return Function(lambda m, x: m.head(m.table(x.argmax(-1)).tanh()), table=table, head=head)


def multiplied_in_place(m: Any, x: Tensor) -> Tensor:
    output = m.first(x)
    output.mul_(2)
    return m.second(output).add_(1)


def hidden_in_place(m: Any, x: Tensor) -> Tensor:
    """Torch makes a view of the output if the input has three dimensions and there is a bias."""
    hidden = m.layer(m.table(x.argmax(-1)))
    hidden[:, 0] = 0.0
    return hidden


def scaled_by_its_largest(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = m.layer.weight.abs().amax()
    return m.layer(x) + x.tanh() @ (m.layer.weight / scale).T


def on_each_side(name: str) -> list[Sides]:
    return [{}, {name: LEFT}, {name: RIGHT}]


MODULES: dict[str, tuple[Callable[[], nn.Module], list[Sides]]] = {
    "linear on four dimensions": (
        lambda: Function(lambda m, x: m.layer(x[:, None, :, None]), layer=nn.Linear(N, 4)),
        on_each_side("layer.weight"),
    ),
    "linear on what all samples share": (
        lambda: Function(lambda m, x: m.layer(torch.eye(N)) @ x.mT[:, :4], layer=nn.Linear(N, 4)),
        on_each_side("layer.weight"),
    ),
    "embedding of positions": (
        lambda: Function(lambda m, x: m.table(torch.arange(T)) * x, table=nn.Embedding(ROWS, N)),
        on_each_side("table.weight"),
    ),
    "multi-head attention": (
        lambda: Function(
            lambda m, x: m.layer(x, x, x)[0], layer=nn.MultiheadAttention(N, 2, batch_first=True)
        ),
        [{}, {"layer.in_proj_weight": RIGHT, "layer.out_proj.weight": LEFT}],
    ),
    "tied embedding and head": (tied, on_each_side("table.weight")),
    "layer called twice": (
        lambda: Function(lambda m, x: m.layer(m.layer(x).tanh()), layer=nn.Linear(N, N)),
        on_each_side("layer.weight"),
    ),
    "weight used by another module": (
        lambda: Function(
            lambda m, x: functional.linear(x, m.layer.weight) + m.layer(x) @ m.layer.weight,
            layer=nn.Linear(N, N),
        ),
        on_each_side("layer.weight"),
    ),
    "bare matrix": (
        lambda: Function(lambda m, x: x @ m.matrix + m.matrix.sum(), matrix=torch.randn(N, 4)),
        on_each_side("matrix"),
    ),
    "addmm of a matrix": (
        lambda: Function(
            lambda m, x: torch.addmm(m.matrix[0], x.flatten(0, 1), m.matrix, alpha=2).unflatten(
                0, x.shape[:2]
            ),
            matrix=torch.randn(N, 4),
        ),
        [{}, {"matrix": RIGHT}],
    ),
    "in-place operations": (
        lambda: Function(
            multiplied_in_place, first=nn.Linear(N, 4), second=nn.LayerNorm(4, bias=False)
        ),
        on_each_side("first.weight"),
    ),
    "an output changed in place": (
        lambda: Function(hidden_in_place, table=nn.Embedding(ROWS, N), layer=nn.Linear(N, N)),
        [{}],
    ),
    "weight read without gradient": (
        lambda: Function(scaled_by_its_largest, layer=nn.Linear(N, 4)),
        on_each_side("layer.weight"),
    ),
    "table that is multiplied by as well": (
        lambda: Function(
            lambda m, x: (
                (h := m.table(x.argmax(-1))) + (h @ m.table.weight.T).tanh() @ m.table.weight
            ),
            table=nn.Embedding(ROWS, N),
        ),
        on_each_side("table.weight"),
    ),
    "layer called with and without samples": (
        lambda: Function(
            lambda m, x: m.table(x.argmax(-1)) + m.table(torch.arange(T)[None]),
            table=nn.Embedding(ROWS, N),
        ),
        on_each_side("table.weight"),
    ),
    "weight whose type is read": (
        lambda: Function(
            lambda m, x: m.layer(x.to(m.layer.weight.dtype)) * float(m.layer.weight.requires_grad),
            layer=nn.Linear(N, 4),
        ),
        [{"layer.weight": RIGHT}],
    ),
}
EACH = [
    pytest.param(make, sides, id=f"{name}-{'-'.join(s.value for s in sides.values()) or 'whole'}")
    for name, (make, several) in MODULES.items()
    for sides in several
]


def made(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = make().to(dtype)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return module


def samples(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(B, T, N, generator=torch.Generator().manual_seed(2)).to(dtype)


# ---- The value and the derivative ----


@pytest.mark.parametrize(("make", "sides"), EACH)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_derivative_is_that_of_autograd(
    make: Callable[[], nn.Module], sides: Sides, engine: str
) -> None:
    results, (expected_losses, expected) = found_and_expected(made(make), samples(), sides, engine)
    losses, gradients = results
    torch.testing.assert_close(losses, expected_losses)
    assert all(gradient.abs().sum() > 0 for gradient in expected.values())
    assert relative_error(dense(gradients, B), expected) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("make", [lambda: Conv1D(4, N), lambda: nn.LayerNorm(N), tied])
def test_gradients_are_float32_whatever_the_dtype_of_the_weights(
    make: Callable[[], nn.Module], dtype: torch.dtype
) -> None:
    matrix = next((n for n, p in make().named_parameters() if p.dim() == 2), None)
    for sides in [{}] if matrix is None else on_each_side(matrix):
        (_, gradients), (_, expected) = found_and_expected(made(make, dtype), samples(dtype), sides)
        found = dense(gradients, B)
        assert all(value.dtype is torch.float32 for value in found.values())
        assert relative_error(found, expected) < (2e-2 if dtype is torch.bfloat16 else 1e-6)


def test_under_autocast_the_layers_compute_in_its_type() -> None:
    module, x = made(lambda: nn.Linear(N, 4)), samples()
    for sides in on_each_side("weight"):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            (losses, gradients), _ = found_and_expected(module, x, sides)
        _, (expected_losses, expected) = found_and_expected(module, x, sides)
        assert 1e-5 < (losses - expected_losses).abs().max() < 5e-2
        assert relative_error(dense(gradients, B), expected) < 3e-2


@pytest.mark.parametrize("make", [lambda: nn.Linear(40, 50), lambda: Conv1D(50, 40)])
@pytest.mark.parametrize("side", Side)
def test_no_weight_exists_once_per_sample(make: Callable[[], nn.Module], side: Side) -> None:
    module = made(make)
    engine = make_engine("functorch", module, loss)
    engine.assume_examined(
        inputs := {next(iter(signature(module.forward).parameters)): torch.randn(B, T, 40)}
    )
    with Largest() as largest:
        engine(inputs, make_projectors(module, {"weight": side}))
    assert 40 * 50 <= largest.numbers < B * 40 * 50


def test_the_parameters_are_back_after_an_error() -> None:
    module = made(lambda: nn.Linear(N, 4))
    before = dict(module.named_parameters())
    with pytest.raises(RuntimeError, match="shapes"):
        found_and_expected(module, torch.randn(B, T, N + 1), {})
    after = dict(module.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert all(p.requires_grad and p.grad is None for p in before.values())


def test_a_function_called_outside_vmap_is_differentiated_for_each_sample() -> None:
    x = torch.randn(B, 4, requires_grad=True)
    shared = torch.randn(4, requires_grad=True)
    shapes = []

    def product(x: Tensor, shared: Tensor, missing: None) -> tuple[Tensor, int]:
        shapes.append((x.shape, shared.shape))
        return (x * shared).sum(1), 0

    result = vmap(lambda x: outside_vmap(x, product, x, shared, None))(x)
    torch.testing.assert_close(result, (x * shared).sum(1))
    assert shapes == [((B, 4), (B, 4))]
    gradients = torch.autograd.grad(result.sum(), [x, shared])
    torch.testing.assert_close(gradients[0], shared.expand(B, 4))
    torch.testing.assert_close(gradients[1], x.sum(0))


def test_outside_vmap_a_function_may_return_one_value_for_all() -> None:
    x = torch.randn(B, 4)
    seen = vmap(lambda x: x + outside_vmap(x, lambda: (torch.tensor(2.0), None)))(x)
    torch.testing.assert_close(seen, x + 2)
