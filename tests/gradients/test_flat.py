"""Who has which part of the vector, and that parts come together as they should."""

import pytest
import torch
from torch import nn

from dp_grape_hf.gradients import FlatGradients, FlatTensors, Layout, Runs
from dp_grape_hf.gradients.flat import MOST
from dp_grape_hf.gradients.forms import Dense
from dp_grape_hf.projections import Projector, Side

B = 3
WEIGHTS = {
    "left.weight": nn.Parameter(torch.randn(4, 9)),
    "right.weight": nn.Parameter(torch.randn(9, 4)),
    "right.bias": nn.Parameter(torch.randn(9)),
    "table": nn.Parameter(torch.randn(MOST // 4 + 1, 4)),
    "wide": nn.Parameter(torch.randn(MOST // 4 + 1, 4)),
    "number": nn.Parameter(torch.randn(())),
}
PROJECTORS = {
    "left.weight": Projector(torch.randn(4, 2), Side.LEFT),
    "right.weight": Projector(torch.randn(4, 2), Side.RIGHT),
    "table": Projector(torch.randn(4, 4), Side.RIGHT),
}


@pytest.fixture
def layout():
    return Layout(WEIGHTS, PROJECTORS, ["table"])


def test_what_is_large_and_not_projected_stays_outside(layout):
    assert [*layout.places] == ["left.weight", "right.weight", "right.bias", "number"]
    assert layout.size == 2 * 9 + 9 * 2 + 9 + 1
    assert "wide" not in Layout(WEIGHTS, {})
    assert "table" in Layout(WEIGHTS, PROJECTORS)  # a matrix like others: a row each is enough


def test_neighbours_with_one_key_are_one_part(layout):
    def factor(name):
        return 2.0 if name.startswith("right") else 1.0

    flat = torch.randn(B, layout.size)
    others = {name: Dense(torch.randn(B, 5)) for name in ("table", "wide")}
    runs = Runs(factor)
    gradients = FlatGradients(layout, flat, others, WEIGHTS)
    assert [*gradients] == [*WEIGHTS]
    assert len(gradients) == len(WEIGHTS)
    few = gradients.in_runs(runs)
    assert [*few] == ["left.weight", "right.weight", "number", "table", "wide"]
    joint = sum(g.squared_norm() for g in gradients.values())
    torch.testing.assert_close(sum(g.squared_norm() for g in few.values()), joint)
    release = FlatTensors(layout, flat[0], {}, layout.places)
    assert [len(part) for part in release.in_runs(runs).values()] == [18, 27, 1]
    assert torch.equal(release["right.bias"], layout.places["right.bias"].of(flat[0]))
