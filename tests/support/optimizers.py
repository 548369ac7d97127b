"""Weights, projectors and private gradients, and a step of an optimizer with them."""

import io

import torch
from torch import nn

from dp_grape_hf.gradients import Layout
from dp_grape_hf.projections import Projector, Side

SHAPES = {"left": (8, 20), "right": (20, 8), "square": (8, 8), "vector": (7,), "number": ()}
SIDES = {"left": Side.LEFT, "right": Side.RIGHT, "square": Side.RIGHT}
RANK = 3


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {name: nn.Parameter(value.to(dtype)) for name, value in drawn.items()}


def draw(seed, rank=RANK):
    """Returns a new projector for each matrix, which has the same P for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: Projector(torch.randn(8, rank, generator=generator) / rank**0.5, side)
        for name, side in SIDES.items()
    }


def gradients(seed, projectors):
    """Returns gradients, in coordinates where a parameter has a projector."""
    generator = torch.Generator().manual_seed(1000 + seed)
    full = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {n: projectors[n].project(g) if n in projectors else g for n, g in full.items()}


def step(optimizer, weights, number, projectors=None):
    """Updates the weights by the gradients of that number, which must stay what they are."""
    projectors = projectors or {}
    found = gradients(number, projectors)
    optimizer.receive(
        {weight: found[name] for name, weight in weights.items()},
        {weights[name]: projector for name, projector in projectors.items()},
    )
    optimizer.step()
    assert all(torch.equal(g, found[name]) for name, g in gradients(number, projectors).items())


def flat_step(optimizer, weights, number, projectors=None, beside=()):
    """Does what ``step`` does, with all gradients but some in one vector."""
    projectors = projectors or {}
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


def assert_same(found, expected, **tolerance):
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, msg=name, **tolerance)


def saved_and_loaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
