"""Parameters that all samples share as one row (a class token) get a row for each sample."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dp_grape_hf.gradients.layerwise import LayerwiseEngine
from tests.gradients.functions import Function, mean_output
from tests.support.oracles import assert_gradients_equal, single_sample_gradients

POSITIONS, FEATURES = 5, 6


def as_in_vit(m, x):
    token = m.token.expand(len(x), -1, -1)
    return torch.cat([token, m.inside(x)], 1) + m.positions


def by_broadcast(m, x):
    return (m.inside(x) * m.token.square()) + m.positions[:, 1:]


BY_ROWS = {
    "as in ViT": as_in_vit,
    "by broadcast": by_broadcast,
    "recomputed": lambda m, x: checkpoint(as_in_vit, m, x, use_reentrant=False),
    "run twice": lambda m, x: as_in_vit(m, x) * by_broadcast(m, x)[:, :1],
}

UNDER_VMAP = {
    "a mean over the row": lambda m, x: as_in_vit(m, x) * m.token.mean(0),
    "the first row alone": lambda m, x: as_in_vit(m, x) + m.positions[0],
    "a norm behind a sum": lambda m, x: nn.functional.layer_norm(
        as_in_vit(m, x) + m.token.sum(0), (FEATURES,)
    ),
    "a fixed shape": lambda m, x: (
        m.inside(x)[:, :1] * m.token + m.positions.reshape(1, POSITIONS + 1, FEATURES)
    ),
}


def gradients_are_exact(compute):
    torch.manual_seed(0)
    head = nn.Linear(FEATURES, FEATURES)
    own = Function(
        compute,
        token=torch.randn(1, 1, FEATURES),
        positions=torch.randn(1, POSITIONS + 1, FEATURES),
        inside=nn.Linear(FEATURES, FEATURES),
    )
    model = Function(lambda m, x: m.head(m.own(x)).tanh(), own=own, head=head)
    inputs = {"x": torch.randn(3, POSITIONS, FEATURES)}
    engine = LayerwiseEngine(model, mean_output)
    for _ in range(2):
        gradients = engine(inputs, {})[1]
        expected = single_sample_gradients(model, inputs, {}, loss=mean_output)[1]
        assert_gradients_equal(gradients, expected)
    assert "token" not in vars(model.own)
    return engine


@pytest.mark.parametrize("name", BY_ROWS)
def test_a_row_for_each_sample_has_that_samples_gradient(name):
    engine = gradients_are_exact(BY_ROWS[name])
    assert [site.by_rows for site in engine._sites] == [True, False, False]


@pytest.mark.parametrize("name", UNDER_VMAP)
def test_code_that_does_not_keep_rows_apart_runs_under_vmap(name):
    sites = gradients_are_exact(UNDER_VMAP[name])._sites
    assert [(site.path, site.by_rows) for site in sites] == [("own", False), ("head", False)]
