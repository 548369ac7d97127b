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

from dp_grape_hf.gradients import Gradients, make_engine
from dp_grape_hf.gradients.stand_ins import outside_vmap
from dp_grape_hf.projections import Projector, Side
from tests.gradients.functions import Function
from tests.models.matrix import dense
from tests.support.oracles import Largest, relative_error, single_sample_gradients

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


def under_vmap(
    module: nn.Module, x: Tensor, projectors: dict[str, Projector]
) -> tuple[Tensor, Gradients]:
    """Returns what the engine computes, without a look at the module."""
    engine = make_engine("functorch", module, loss)
    engine.assume_examined(inputs := {argument_of(module): x})
    return engine(inputs, projectors)


def by_autograd(
    module: nn.Module, x: Tensor, projectors: dict[str, Projector]
) -> tuple[Tensor, dict[str, Tensor]]:
    return single_sample_gradients(module, {argument_of(module): x}, projectors, loss)


def argument_of(module: nn.Module) -> str:
    return next(iter(signature(module.forward).parameters))


# ---- Modules ----


class Matrix(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))


def tied() -> nn.Module:
    table, head = nn.Embedding(ROWS, N), nn.Linear(N, ROWS)
    head.weight = table.weight
    return Function(lambda m, x: m.head(m.table(x.argmax(-1)).tanh()), table=table, head=head)


def frozen_bias() -> nn.Module:
    layer = nn.Linear(N, 4)
    layer.bias.requires_grad_(False)
    return layer


def look_up(m: Any, x: Tensor) -> Tensor:
    indices = (x[:, :4, :3].argmax(-1) + torch.arange(4)) % ROWS
    return m.table(indices).square()


def multiplied_in_place(m: Any, x: Tensor) -> Tensor:
    output = m.first(x)
    output.mul_(2)
    return m.second(output).add_(1)


def on_each_side(name: str) -> list[Sides]:
    return [{}, {name: LEFT}, {name: RIGHT}]


MODULES: dict[str, tuple[Callable[[], nn.Module], list[Sides]]] = {
    "linear": (lambda: nn.Linear(N, 4), on_each_side("weight")),
    "frozen bias": (frozen_bias, [{}, {"weight": RIGHT}]),
    "linear on four dimensions": (
        lambda: Function(lambda m, x: m.layer(x[:, None, :, None]), layer=nn.Linear(N, 4)),
        on_each_side("layer.weight"),
    ),
    "linear on what all samples share": (
        lambda: Function(lambda m, x: m.layer(torch.eye(N)) @ x.mT[:, :4], layer=nn.Linear(N, 4)),
        on_each_side("layer.weight"),
    ),
    "Conv1D": (lambda: Conv1D(4, N), on_each_side("weight")),
    "embedding": (
        lambda: Function(look_up, table=nn.Embedding(ROWS, N)),
        on_each_side("table.weight"),
    ),
    "embedding with padding": (
        lambda: Function(
            lambda m, x: functional.embedding(x.argmax(-1), m.table.weight, 2 - ROWS).square(),
            table=nn.Embedding(ROWS, N),
        ),
        on_each_side("table.weight"),
    ),
    "embedding of positions": (
        lambda: Function(lambda m, x: m.table(torch.arange(T)) * x, table=nn.Embedding(ROWS, N)),
        on_each_side("table.weight"),
    ),
    "layer norm": (lambda: nn.LayerNorm(N), [{}]),
    "RMS norm": (lambda: nn.RMSNorm(N), [{}]),
    "convolution": (
        lambda: Function(lambda m, x: m.layer(x[:, None]), layer=nn.Conv2d(1, 3, 3, padding=1)),
        [{}],
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
        lambda: Function(
            lambda m, x: x @ m.matrix.weight + m.matrix.weight.sum(), matrix=Matrix(N, 4)
        ),
        on_each_side("matrix.weight"),
    ),
    "addmm of a matrix": (
        lambda: Function(
            lambda m, x: torch.addmm(
                m.matrix.weight[0], x.flatten(0, 1), m.matrix.weight, alpha=2
            ).unflatten(0, x.shape[:2]),
            matrix=Matrix(N, 4),
        ),
        [{}, {"matrix.weight": RIGHT}],
    ),
    "in-place operations": (
        lambda: Function(
            multiplied_in_place, first=nn.Linear(N, 4), second=nn.LayerNorm(4, bias=False)
        ),
        on_each_side("first.weight"),
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


def samples(dtype: torch.dtype = torch.float32, count: int = B) -> Tensor:
    return torch.randn(count, T, N, generator=torch.Generator().manual_seed(2)).to(dtype)


# ---- The value and the derivative ----


@pytest.mark.parametrize(("make", "sides"), EACH)
def test_the_derivative_is_that_of_autograd(make: Callable[[], nn.Module], sides: Sides) -> None:
    module, x = made(make), samples()
    projectors = make_projectors(module, sides)
    losses, gradients = under_vmap(module, x, projectors)
    expected_losses, expected = by_autograd(module, x, projectors)
    torch.testing.assert_close(losses, expected_losses)
    assert all(gradient.abs().sum() > 0 for gradient in expected.values())
    assert relative_error(dense(gradients, B), expected) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["Conv1D", "layer norm", "tied embedding and head"])
def test_gradients_are_float32_whatever_the_dtype_of_the_weights(
    name: str, dtype: torch.dtype
) -> None:
    make, several = MODULES[name]
    for sides in several:
        module, x = made(make, dtype), samples(dtype)
        projectors = make_projectors(module, sides)
        found = dense(under_vmap(module, x, projectors)[1], B)
        assert all(value.dtype is torch.float32 for value in found.values())
        expected = by_autograd(module, x, projectors)[1]
        assert relative_error(found, expected) < (2e-2 if dtype is torch.bfloat16 else 1e-6)


def test_under_autocast_the_layers_compute_in_its_type() -> None:
    module, x = made(lambda: nn.Linear(N, 4)), samples()
    for sides in on_each_side("weight"):
        projectors = make_projectors(module, sides)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses, gradients = under_vmap(module, x, projectors)
        expected_losses, expected = by_autograd(module, x, projectors)
        assert 1e-5 < (losses - expected_losses).abs().max() < 5e-2
        assert relative_error(dense(gradients, B), expected) < 3e-2


@pytest.mark.parametrize("make", [lambda: nn.Linear(40, 50), lambda: Conv1D(50, 40)])
@pytest.mark.parametrize("side", Side)
def test_no_weight_exists_once_per_sample(make: Callable[[], nn.Module], side: Side) -> None:
    module = made(make)
    projectors = make_projectors(module, {"weight": side})
    with Largest() as largest:
        under_vmap(module, torch.randn(B, T, 40), projectors)
    assert 40 * 50 <= largest.numbers < B * 40 * 50


def test_the_parameters_are_back_after_an_error() -> None:
    module = made(lambda: nn.Linear(N, 4))
    before = dict(module.named_parameters())
    with pytest.raises(RuntimeError, match="shapes"):
        under_vmap(module, torch.randn(B, T, N + 1), {})
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
