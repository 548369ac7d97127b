"""Gradients that are multiplied before the clip and divided after the noise, by parameter.

Shapes: B samples in a batch.
"""

import json
import math

import pytest
import torch

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.gradients import Dense, GradSampleMode, make_engine
from dp_grape_hf.ledger import Clipping
from dp_grape_hf.mechanism import noise_generator, release
from dp_grape_hf.mechanism.noise import grid_of
from tests.models.matrix import projectors_for
from tests.support.mechanism import (
    ROUNDING,
    Given,
    distance,
    in_order,
    joint_norm,
    make_private,
    released,
    split,
)
from tests.support.networks import MODELS, flat
from tests.support.oracles import relative_error, single_sample_gradients

# Some are of small tensors, some of large ones, some of tied ones; all others have 1.
FACTORS = {
    "stack": {"first.bias": 0.25, "first.weight": 4.0, "table.weight": 3.0, "norm.weight": 0.1},
    "under vmap": {"0.matrix": 5.0, "0.scale": 0.2, "3.bias": 2.0},
    "vit": {"classifier.weight": 8.0, "classifier.bias": 0.125},
}


def with_factors(per_sample, factors, **own):
    text = None if factors is None else json.dumps(factors)
    return make_private(per_sample, gradient_factors=text, **own)


def definition(gradients, factors, bound, clipping):
    """Returns ``sum_i clip(f g_i, C) / f`` of gradients (B, ...), in float64."""
    times = {name: factors.get(name, 1.0) * g.double() for name, g in gradients.items()}
    norms = sum(value.flatten(1).square().sum(1) for value in times.values()).sqrt()
    clips = bound / (norms + 0.01) if clipping == "automatic" else (bound / norms).clamp(max=1)
    found = {}
    for name, value in times.items():
        total = torch.einsum("b,b...->...", clips, value) / factors.get(name, 1.0)
        found[name] = total.float()
    return found


@pytest.mark.parametrize(
    ("rank", "clipping", "name"),
    [
        *(pytest.param(4, c, "stack", id=f"projected-{c.value}-stack") for c in Clipping),
        (None, "automatic", "under vmap"),
        pytest.param(None, "flat", "vit", marks=pytest.mark.slow),
    ],
)
def test_the_release_equals_its_definition(name, clipping, rank):
    """In every mode; some samples are clipped, and none would be clipped alike without factors."""
    torch.manual_seed(0)
    model, inputs, loss = MODELS[name]()
    projectors, factors = projectors_for(model, rank), FACTORS[name]
    gradients = single_sample_gradients(model, inputs, projectors, loss)[1]
    bound = 0.5 * joint_norm({n: factors.get(n, 1.0) * g[0] for n, g in gradients.items()})
    for mode in GradSampleMode:
        per_sample = make_engine("layerwise", model, loss, mode)
        engine = with_factors(
            per_sample, factors, clipping=clipping, max_grad_norm=bound, expected_batch_size=4.0
        )
        assert engine.gradient_factors == factors
        found = {n: 4 * v for n, v in released(engine, split(inputs, [4, 2]), projectors).items()}
        expected = definition(gradients, factors, bound, clipping)
        without = definition(gradients, {}, bound, clipping)
        assert relative_error(flat(found), flat(expected)) < 5e-5, mode
        assert relative_error(flat(found), flat(without)) > 1e-2, mode


def met_by_noise(engine, batches, monkeypatch):
    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(
            release, "add_noise_", lambda values, *_: seen.append([v.clone() for v in values])
        )
        release_made = released(engine, batches)
    return in_order(release_made, seen[0])


EXTREME = {
    "none": None,
    "large and small": {"first": 1e3, "last": 1e-3},
    "large": {"bias": 1e3},
    "small": {"*": 1e-3},
    "all": {"table": 1e-3, "*": 1e3},
}


@pytest.mark.parametrize(
    ("name", "clipping"), [*((name, "flat") for name in EXTREME), ("all", "automatic")]
)
def test_one_more_sample_moves_the_sum_before_noise_within_c(name, clipping, monkeypatch):
    torch.manual_seed(0)
    factors = EXTREME[name]
    model, inputs, loss = MODELS["stack"]()
    per_sample = make_engine("layerwise", model, loss)
    whole = with_factors(per_sample, factors, max_grad_norm=math.inf)
    own = joint_norm(met_by_noise(whole, [{"x": inputs["x"][:1]}], monkeypatch))
    for bound in (1e-3 * own, 0.5 * own, 1e3 * own):

        def summed(samples, bound=bound):
            engine = with_factors(per_sample, factors, clipping=clipping, max_grad_norm=bound)
            return met_by_noise(engine, [{"x": part} for part in samples.split(2)], monkeypatch)

        for one in (0, 3):
            rest = torch.cat([inputs["x"][:one], inputs["x"][one + 1 :]])
            moved = distance(summed(inputs["x"]), summed(rest))
            assert 0 < moved <= bound * (1 + 5 * ROUNDING)
            alone = joint_norm(summed(inputs["x"][one : one + 1]))
            assert alone <= bound * (1 + ROUNDING)
            if clipping == Clipping.FLAT and bound < 0.01 * own:
                assert alone == pytest.approx(bound, rel=1e-5)


def test_the_noise_of_a_parameter_is_divided_by_its_factor():
    """Seeded: the std of 100,000 numbers is off by more than 1.5 % once in 10^10 times."""
    own = {"noise_multiplier": 1.5, "max_grad_norm": 0.4, "expected_batch_size": 5.0}
    per_sample = Given(head=(100, 1000), body=(100_000,), bias=(7,))
    engine = with_factors(per_sample, {"head": 4.0, "bias": 0.1}, **own)
    found, plain = released(engine, []), released(with_factors(per_sample, None, **own), [])
    for name, factor in (("head", 4.0), ("body", 1.0), ("bias", 0.1)):
        torch.testing.assert_close(found[name], plain[name] / factor, rtol=1e-6, atol=0)
        if name != "bias":
            assert float(found[name].std()) == pytest.approx(1.5 * 0.4 / 5 / factor, rel=0.015)
    assert engine.independent_std == pytest.approx(1.5 * 0.4 / 5)


def test_secure_noise_is_rounded_before_the_division():
    engine = with_factors(
        Given(head=(3000,), body=(3000,)),
        {"head": 2.0},
        noise_multiplier=1.0,
        expected_batch_size=4.0,
        noise_generator=noise_generator("cpu", secure=True),
    )
    found = released(engine, [{name: Dense(torch.randn(2, 3000)) for name in ("head", "body")}])
    for name, factor in (("head", 2.0), ("body", 1.0)):
        grains = found[name] * factor * 4.0 / grid_of(1.0)
        assert torch.equal(grains, grains.round())
        assert grains.remainder(2).unique().tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    "text",
    [
        *("head", "[1.0]", "{}", "[" * 100_000, '{"head": true}', '{"head": "2"}'),
        *('{"head": 0}', '{"head": 1e7}', '{"head": 1e-7}', '{"head": -1}', '{"head": NaN}'),
    ],
    ids=lambda text: text[:20],
)
def test_factors_that_float32_does_not_bear_are_refused(text):
    with pytest.raises(PrivacyError, match=r"gradient_factors=.*must be a mapping"):
        make_private(Given(head=(3,)), gradient_factors=text)
