"""A module run in coordinates, against ``functional_call`` with the sums formed, one by one."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from dp_grape_hf.per_sample import Dense, PerSampleGradient
from dp_grape_hf.per_sample.functional import call_in_coordinates, outside_vmap
from dp_grape_hf.per_sample.gradients import Single, add
from dp_grape_hf.projections import Projector, Side
from tests.support.oracles import Largest, dense, relative_error

B, T, N = 3, 5, 6  # samples, positions, features
ROWS = 7  # of a table
Sides = dict[str, Side]

LEFT, RIGHT = Side.LEFT, Side.RIGHT


# ---- The two ways to compute ----


def make_projectors(module: nn.Module, sides: Sides, rank: int = 2) -> dict[str, Projector]:
    generator = torch.Generator().manual_seed(1)
    projectors = {}
    for name, side in sides.items():
        m, n = module.get_parameter(name).shape
        matrix = torch.randn(m if side is LEFT else n, rank, generator=generator)
        projectors[name] = Projector(matrix.to(module.get_parameter(name).dtype), side)
    return projectors


def trainable_shapes(
    module: nn.Module, projectors: dict[str, Projector]
) -> dict[str, tuple[int, ...]]:
    return {
        name: projectors[name].coordinate_shape(p.shape) if name in projectors else tuple(p.shape)
        for name, p in module.named_parameters()
        if p.requires_grad
    }


def loss_of(output: Tensor) -> Tensor:
    """A loss of one sample that weighs every number differently."""
    flat = output.flatten().float()
    return (flat * torch.linspace(-1, 1, len(flat))).sum() + flat.square().mean()


def in_coordinates(
    module: nn.Module, inputs: Tensor, projectors: dict[str, Projector]
) -> tuple[Tensor, dict[str, PerSampleGradient]]:
    """Returns the losses (B,) and the gradients of the module under one vmap."""
    captured: dict[str, list[Single]] = defaultdict(list)
    z = {
        name: torch.zeros(()).expand(len(inputs), *shape).requires_grad_()
        for name, shape in trainable_shapes(module, projectors).items()
    }

    def one(z: dict[str, Tensor], sample: Tensor) -> Tensor:
        output = call_in_coordinates(
            module,
            module.forward,
            z,
            projectors,
            lambda name, gradient: captured[name].append(gradient),
            (sample,),
        )
        return loss_of(output)

    losses = vmap(one)(z, inputs)
    gradients = torch.autograd.grad(losses.sum(), list(z.values()), allow_unused=True)
    for name, gradient in zip(z, gradients, strict=True):
        if gradient is not None:
            captured[name].append(Dense(gradient))
    return losses.detach(), {name: add(captured[name]) for name in z}


def by_definition(
    module: nn.Module, inputs: Tensor, projectors: dict[str, Projector]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the same from weights ``W + lift(z)``, one sample after another."""
    losses, found = [], defaultdict(list)
    for sample in inputs:
        z = {
            name: torch.zeros(shape, requires_grad=True)
            for name, shape in trainable_shapes(module, projectors).items()
        }
        weights = {}
        for name, zero in z.items():
            weight = module.get_parameter(name).detach()
            delta = projectors[name].lift(zero) if name in projectors else zero
            weights[name] = weight + delta.to(weight.dtype)
        losses.append(loss_of(functional_call(module, weights, (sample,))))
        gradients = torch.autograd.grad(losses[-1], list(z.values()))
        for name, gradient in zip(z, gradients, strict=True):
            found[name].append(gradient)
    return torch.stack(losses).detach(), {name: torch.stack(g) for name, g in found.items()}


# ---- Modules ----


class Function(nn.Module):
    """Layers by name, and what is computed with them."""

    def __init__(self, compute: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


class Matrix(nn.Module):
    """A bare matrix, that its parent uses."""

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


def conv1d(outputs: int) -> nn.Module:
    layer = Conv1D(outputs, N)
    nn.init.normal_(layer.bias)
    return layer


def look_up(m: Any, x: Tensor) -> Tensor:
    """Looks up three distinct rows per sample, one of them twice."""
    indices = (x[:4, :3].argmax(-1) + torch.arange(4)) % ROWS
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
    "linear on a vector": (
        lambda: Function(lambda m, x: m.layer(x[0]), layer=nn.Linear(N, 4)),
        on_each_side("layer.weight"),
    ),
    "linear on four dimensions": (
        lambda: Function(lambda m, x: m.layer(x[None, :, None]), layer=nn.Linear(N, 4)),
        on_each_side("layer.weight"),
    ),
    "linear on what all samples share": (
        lambda: Function(lambda m, x: m.layer(torch.eye(N)) @ x.T[:4], layer=nn.Linear(N, 4)),
        on_each_side("layer.weight"),
    ),
    "Conv1D": (lambda: conv1d(4), on_each_side("weight")),
    "wide Conv1D": (lambda: conv1d(9), on_each_side("weight")),
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
        lambda: Function(lambda m, x: m.layer(x[None]), layer=nn.Conv2d(1, 3, 3, padding=1)),
        [{}],
    ),
    "multi-head attention": (
        lambda: Function(lambda m, x: m.layer(x, x, x)[0], layer=nn.MultiheadAttention(N, 2)),
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
            lambda m, x: torch.addmm(m.matrix.weight[0], x, m.matrix.weight, alpha=2),
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
def test_the_derivative_is_that_of_the_formed_sum(
    make: Callable[[], nn.Module], sides: Sides
) -> None:
    module, inputs = made(make), samples()
    projectors = make_projectors(module, sides)
    losses, gradients = in_coordinates(module, inputs, projectors)
    expected_losses, expected = by_definition(module, inputs, projectors)
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
        module, inputs = made(make, dtype), samples(dtype)
        projectors = make_projectors(module, sides)
        _, gradients = in_coordinates(module, inputs, projectors)
        _, expected = by_definition(module, inputs, projectors)
        found = dense(gradients, B)
        assert all(value.dtype is torch.float32 for value in found.values())
        assert relative_error(found, expected) < (2e-2 if dtype is torch.bfloat16 else 1e-6)


def test_under_autocast_the_layers_compute_in_its_type() -> None:
    module, inputs = made(lambda: nn.Linear(N, 4)), samples()
    for sides in ({}, {"weight": LEFT}, {"weight": RIGHT}):
        projectors = make_projectors(module, sides)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses, gradients = in_coordinates(module, inputs, projectors)
        expected_losses, expected = by_definition(module, inputs, projectors)
        assert 1e-5 < (losses - expected_losses).abs().max() < 5e-2
        assert relative_error(dense(gradients, B), expected) < 3e-2


# ---- What does not exist ----


@pytest.mark.parametrize("make", [lambda: nn.Linear(40, 50), lambda: Conv1D(50, 40)])
@pytest.mark.parametrize("side", Side)
def test_no_weight_exists_once_per_sample(make: Callable[[], nn.Module], side: Side) -> None:
    module = made(make)
    projectors = make_projectors(module, {"weight": side})
    with Largest() as largest:
        in_coordinates(module, torch.randn(B, T, 40), projectors)
    assert 40 * 50 <= largest.numbers < B * 40 * 50


@pytest.mark.parametrize("sides", [{}, {"table.weight": RIGHT}])
def test_no_table_exists_once_per_sample(sides: Sides) -> None:
    module = made(lambda: Function(look_up, table=nn.Embedding(500, N)))
    projectors = make_projectors(module, sides)
    with Largest() as largest:
        in_coordinates(module, samples(count=9), projectors)
    assert 500 * N <= largest.numbers < 9 * 500 * 2


# ---- The call ----


def test_forward_is_called_as_given_and_hooks_of_children_run_once() -> None:
    module = made(lambda: nn.Sequential(nn.Linear(N, N), nn.Linear(N, 4)))
    calls: list[str] = []
    module.register_forward_hook(lambda *args: calls.append("module"))
    module[0].register_forward_hook(lambda *args: calls.append("child"))
    in_coordinates(module, samples(), {})
    assert calls == ["child"]


def test_the_parameters_are_back_after_a_call_and_after_an_error() -> None:
    module = made(lambda: nn.Linear(N, 4))
    before = dict(module.named_parameters())
    in_coordinates(module, samples(), {})
    with pytest.raises(RuntimeError, match="shapes"):
        in_coordinates(module, torch.randn(B, T, N + 1), {})
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


def test_a_function_called_outside_vmap_may_return_one_value_for_all_samples() -> None:
    x = torch.randn(B, 4)
    seen = vmap(lambda x: x + outside_vmap(x, lambda: (torch.tensor(2.0), None)))(x)
    torch.testing.assert_close(seen, x + 2)
