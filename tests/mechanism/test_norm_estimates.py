"""Norms estimated from random directions, against their definition and their distribution.

Shapes: B samples in a batch, T positions, m x n a weight, k directions.
"""

import itertools
import json
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from dp_grape_hf.gradients import Dense, GradSampleMode, PerSampleEngine, forms, make_engine
from dp_grape_hf.gradients.forms import Factored, GradientSum, SparseRows, add
from dp_grape_hf.mechanism import PrivateMechanism, secret_generator
from dp_grape_hf.mechanism import clipping as norms
from dp_grape_hf.mechanism.clipping import EstimatedNorms, ExactNorms, NormDirections
from dp_grape_hf.mechanism.streams import derived_generator
from recipes.models.matrix import projectors_for
from tests.support.gradients import COLS, FORMS, ROWS, B, materialised
from tests.support.mechanism import Given, joint_norm, make_private, released, sample_norms, split
from tests.support.models import only
from tests.support.networks import MODELS, flat
from tests.support.oracles import Largest, relative_error, single_sample_gradients

K = 5


def estimating(
    per_sample: PerSampleEngine,
    k: int = K,
    clipping: str = "flat",
    bound: float = 0.5,
    generator: torch.Generator | None = None,
    factors: Mapping[str, float] | None = None,
) -> PrivateMechanism:
    """Returns an engine without noise, whose release is the clipped sum itself."""
    source = generator or torch.Generator().manual_seed(3)
    return make_private(
        per_sample,
        clipping=clipping,
        max_grad_norm=bound,
        noise_generator=source,
        norm_directions=k,
        gradient_factors=None if factors is None else json.dumps(factors),
    )


def directions(gradients: Mapping[str, Tensor], k: int = K) -> dict[str, Tensor]:
    """Returns the directions (k, ...) of the first logical batch of ``estimating``, as documented:
    a key of the noise's stream, and from it a generator for each parameter."""
    key = bytes(torch.randint(256, (32,), generator=torch.Generator().manual_seed(3)).tolist())
    found = {}
    for name, gradient in gradients.items():
        generator = derived_generator(key, f"1 {name}", "cpu")
        found[name] = torch.randn(k, *gradient.shape[1:], generator=generator)
    return found


def estimates(gradients: Mapping[str, Tensor], k: int = K) -> Tensor:
    """Returns M_i (B,) from the gradients (B, ...) and their directions, in float64."""
    drawn = directions(gradients, k)
    products = sum(
        gradients[name].double().flatten(1) @ drawn[name].double().flatten(1).T
        for name in gradients
    )
    return products.square().mean(1).sqrt()


# ---- Inner products ----


@pytest.mark.parametrize(
    "names",
    [n for count in (1, 2) for n in itertools.combinations_with_replacement(FORMS, count)],
    ids=" + ".join,
)
@pytest.mark.parametrize("at_once", [1, 3 * ROWS * COLS, 2**23])
def test_inner_products_are_those_of_the_dense_gradients(
    names: tuple[str, ...], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forms, "_LARGE", at_once)
    v = torch.randn(K, ROWS, COLS)
    for dtype, positions in itertools.product((torch.float32, torch.bfloat16), (3, 11)):
        parts = tuple(FORMS[name](positions=positions, dtype=dtype) for name in names)
        for gradient in (GradientSum(parts), add(parts), *parts):
            found, dense = gradient.inner_products(v), materialised(gradient)
            assert found.dtype is torch.float32
            torch.testing.assert_close(
                found, torch.einsum("bmn,kmn->bk", dense, v), rtol=1e-5, atol=1e-4
            )
            assert gradient.rounding().shape == (B,)


def test_a_dense_gradient_may_have_any_shape_and_lie_in_any_order() -> None:
    for values in (
        torch.randn(B, 2, 3, 4, 5),
        torch.randn(B),
        torch.randn(B, 6, 3).mT,
        torch.zeros(()).expand(B, 3, 4),
    ):
        v = torch.randn(K, *values.shape[1:])
        expected = values.reshape(B, -1) @ v.reshape(K, -1).T
        torch.testing.assert_close(Dense(values).inner_products(v), expected)


def test_an_estimate_of_a_gradient_that_cancels_is_not_too_small() -> None:
    """In float32 the terms of such a gradient may cancel entirely; what is added is their error."""
    torch.manual_seed(0)
    rows, cols = 1e3 * torch.randn(B, 1, ROWS), torch.randn(B, 1, COLS)
    rows = torch.cat([rows, -rows * (1 + 2**-22)], 1)
    factored = Factored(rows, torch.cat([cols, cols], 1))
    sparse = SparseRows(torch.zeros(B, 2, dtype=torch.long), rows[:, :, :COLS], ROWS)
    both = (factored, Dense(-factored.dense().values))
    drawn = NormDirections(K, torch.Generator().manual_seed(3))
    drawn.redraw()
    for parts in ((factored,), (sparse,), both):
        norm = EstimatedNorms(drawn)
        norm.add({"w": add(parts)})
        expected = estimates({"w": sum(_in_float64(part) for part in parts)})
        terms = sum(part.magnitude() for part in parts)
        assert (norm.by_part()[False] >= expected * (1 - 1e-6)).all()
        assert (norm.by_part()[False] <= expected + 1e-5 * terms).all()


def _in_float64(part: Any) -> Tensor:
    if isinstance(part, Factored):
        return torch.einsum("btm,btn->bmn", part.rows.double(), part.cols.double())
    if isinstance(part, Dense):
        return part.values.double()
    table = torch.zeros(B, *part.shape, dtype=torch.float64)
    for b in range(B):
        table[b].index_add_(0, part.indices[b], part.values[b].double())
    return table


# ---- The release ----


FACTORS = {"first.weight": 4.0, "table.weight": 0.3, "last.bias": 10.0}


@pytest.mark.parametrize(
    ("name", "rank", "clipping", "factors"),
    [
        pytest.param("stack", 4, "flat", {}, marks=pytest.mark.slow),
        pytest.param("under vmap", None, "flat", {}, marks=pytest.mark.slow),
        pytest.param("tied gpt2", None, "automatic", {}, marks=pytest.mark.slow),
        ("stack", None, "flat", FACTORS),
        ("stack", None, "automatic", FACTORS),
    ],
)
def test_every_mode_releases_what_the_definition_says(
    name: str, rank: int | None, clipping: str, factors: dict[str, float]
) -> None:
    """Clipped by M_i from the same directions, of gradients times their factors; in any split."""
    torch.manual_seed(0)
    model, inputs, loss = MODELS[name]()
    projectors = projectors_for(model, rank)
    plain = single_sample_gradients(model, inputs, projectors, loss)[1]
    gradients = {n: factors.get(n, 1.0) * g for n, g in plain.items()}
    m = estimates(gradients)
    bound = m.median().item()
    clips = bound / (m + 0.01) if clipping == "automatic" else (bound / m).clamp(max=1)
    expected = {
        n: torch.einsum("b,b...->...", clips.float(), g) / factors.get(n, 1.0)
        for n, g in gradients.items()
    }
    for mode, sizes in zip(GradSampleMode, ([6], [4, 2], [1, 5], [3, 3]), strict=True):
        per_sample = make_engine("layerwise", model, loss, mode)
        engine = estimating(per_sample, clipping=clipping, bound=bound, factors=factors or None)
        found = released(engine, split(inputs, sizes), projectors)
        assert relative_error(flat(found), flat(expected)) < 5e-5, mode


def test_the_rounding_of_an_estimate_is_multiplied_as_well() -> None:
    drawn = NormDirections(K, torch.Generator().manual_seed(3))
    drawn.redraw()
    gradients = {"w": Factored(torch.randn(B, 2, ROWS), torch.randn(B, 2, COLS))}
    plain, times = EstimatedNorms(drawn), EstimatedNorms(drawn, {"w": 4.0})
    for norm in (plain, times):
        norm.add(gradients)
    assert torch.equal(times.by_part()[False], 4 * plain.by_part()[False])


def test_one_sample_moves_the_release_by_at_most_c_times_its_ratio() -> None:
    """The bound is ``C |R_i| / M_i`` with the same directions, and some sample exceeds C."""
    case = only("roberta-classifier")
    model, batch = case.model(), case.batch(6)
    gradients = single_sample_gradients(model, batch)[1]
    bound = 0.1 * sample_norms(gradients).min().item()
    ratios = sample_norms(gradients) / estimates(gradients, 2)
    assert ratios.max() > 1
    per_sample = make_engine("layerwise", model)
    everyone = released(estimating(per_sample, 2, bound=bound), [batch])
    for i, ratio in enumerate(ratios.tolist()):
        rest = {key: torch.cat([v[:i], v[i + 1 :]]) for key, v in batch.items()}
        without = released(estimating(per_sample, 2, bound=bound), [rest])
        moved = joint_norm({n: everyone[n] - without[n] for n in everyone})
        assert moved == pytest.approx(bound * ratio, rel=1e-3)


@pytest.mark.parametrize("mode", ["auto", "ghost"])
def test_a_sample_that_is_not_finite_contributes_exactly_zero(mode: str) -> None:
    model, inputs, _ = MODELS["vit"]()
    per_sample = make_engine("layerwise", model, grad_sample_mode=mode)
    released(estimating(per_sample), [inputs])
    inputs["pixel_values"][2, 0, 0, 0], inputs["pixel_values"][4, 0, 1, 1] = torch.nan, torch.inf
    good = {key: value[[0, 1, 3, 5]] for key, value in inputs.items()}
    found, expected = (released(estimating(per_sample), [batch]) for batch in (inputs, good))
    assert relative_error(flat(found), flat(expected)) < 1e-5


def test_a_gradient_of_zero_is_not_scaled_to_anything() -> None:
    per_sample = Given(a=(3,))
    for clipping in ("flat", "automatic"):
        found = released(
            estimating(per_sample, clipping=clipping), [{"a": Dense(torch.zeros(B, 3))}]
        )
        assert torch.equal(found["a"], torch.zeros(3))


# ---- The directions ----


def test_the_square_of_an_estimate_is_chi_squared() -> None:
    """Kolmogorov-Smirnov over 1500 logical batches, of a gradient in several forms and parameters.

    With other seeds the test would fail once in 1000 times.
    """
    torch.manual_seed(1)
    gradients = {
        "matrix": Factored(torch.randn(1, 2, 4), torch.randn(1, 2, 3)),
        "table": SparseRows(torch.tensor([[1, 1, 4]]), torch.randn(1, 3, 2), 6),
        "bias": Dense(torch.randn(1, 3)),
    }
    exact = ExactNorms()
    exact.add(gradients)
    drawn, found = NormDirections(K, torch.Generator().manual_seed(7)), []
    for _ in range(1500):
        drawn.redraw()
        norm = EstimatedNorms(drawn)
        norm.add(gradients)
        found.append(K * float(norm.by_part()[False] / exact.by_part()[False]) ** 2)
    assert stats.kstest(found, stats.chi2(K).cdf).pvalue > 1e-3


def test_secret_directions_are_kept_for_a_logical_batch_and_drawn_anew_for_the_next() -> None:
    source = secret_generator()
    drawn, seen = NormDirections(3, source), []
    before = torch.Generator.get_state(source)
    for _ in range(2):
        drawn.redraw()
        for name in ("a", "b"):
            first, again = (torch.cat([*drawn.of(name, torch.Size((40,)))]) for _ in range(2))
            assert torch.equal(first, again)
            seen.append(first)
    for left, right in itertools.combinations([row for v in seen for row in v], 2):
        assert abs(torch.dot(left, right)) / 40**0.5 < 6  # N(0, 1): 2 in 10^9 for each pair
    assert torch.equal(torch.Generator.get_state(source), before), (
        "the noise has the stream for itself"
    )


def test_no_more_than_a_few_directions_are_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "_AT_ONCE", 2**10)
    m, n, k = 64, 48, 37
    gradients = {
        "matrix": Factored(torch.randn(2, 3, m), torch.randn(2, 3, n)),
        "table": SparseRows(torch.randint(0, m, (2, 5)), torch.randn(2, 5, n), m),
        "bias": Dense(torch.randn(2, 100)),
    }
    drawn = NormDirections(k, torch.Generator().manual_seed(3))
    drawn.redraw()
    norm = EstimatedNorms(drawn)
    with Largest() as largest:
        norm.add(gradients)
    assert largest.numbers <= 2 * m * n
    sizes = [len(v) for v in drawn.of("bias", torch.Size((100,)))]
    assert sizes == [10, 10, 10, 7]
    again = EstimatedNorms(drawn)
    again.add(gradients)
    assert torch.equal(norm.by_part()[False], again.by_part()[False])
    assert not math.isnan(norm.by_part()[False].sum())
