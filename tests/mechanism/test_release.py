"""The mechanism against its definition: clip each sample, sum, record, add noise, divide.

Shapes: B samples in a batch, T positions, m x n a weight.
"""

import math
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.gradients import Dense, make_engine
from dp_grape_hf.gradients.forms import Factored, GradientSum, SparseRows, add
from dp_grape_hf.gradients.losses.heads import next_tokens, tokens
from dp_grape_hf.ledger import Ledger
from dp_grape_hf.mechanism import add_clipped_sum_, release
from tests.models.matrix import projectors_for
from tests.support.gradients import COLS, FORMS, ROWS
from tests.support.mechanism import (
    MECHANISM,
    ROUNDING,
    Given,
    distance,
    drawn_for,
    joint_norm,
    make_private,
    released,
    sample_norms,
    split,
)
from tests.support.models import only
from tests.support.oracles import single_sample_gradients

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("rank", [8, None], ids=["projected", "unprojected"])
@pytest.mark.parametrize("name", ["roberta-classifier", "opt"])
def test_the_release_equals_its_definition(name, rank):
    """The oracle differentiates each sample alone; half of the samples are clipped.

    No physical split changes it, also not when a physical batch is of size one.
    """
    model, inputs = only(name).model(), only(name).batch(6)
    projectors = projectors_for(model, rank)
    assert bool(projectors) == (rank is not None)
    assert projectors.keys() < dict(model.named_parameters()).keys()
    gradients = single_sample_gradients(model, inputs, projectors)[1]
    norms = sample_norms(gradients)
    bound, sigma, expected_batch_size = norms.median().item(), 0.7, 5.0
    assert (norms > bound).any()
    assert (norms < bound).any()
    factors = (bound / norms).clamp(max=1.0).float()
    clipped = {n: torch.einsum("b,b...->...", factors, g) for n, g in gradients.items()}
    per_sample = make_engine("layerwise", model)
    for sizes in ([6], [1] * 6, [2, 3, 1]):
        engine = make_private(
            per_sample,
            max_grad_norm=bound,
            noise_multiplier=sigma,
            expected_batch_size=expected_batch_size,
            seed=3,
        )
        private = released(engine, split(inputs, sizes), projectors)
        assert list(private) == list(gradients)
        noise = drawn_for(private, sigma * bound, seed=3)
        expected = {n: (clipped[n] + noise[n]) / expected_batch_size for n in clipped}
        assert distance(private, expected) < 1e-5 * bound, sizes


def test_the_noise_depends_only_on_its_seed():
    """Any number of samples, any split and the empty draw meet one and the same noise."""
    model, batch = only("roberta-classifier").model(), only("roberta-classifier").batch(6)
    projectors, per_sample = projectors_for(model, 8), make_engine("layerwise", model)

    def noise(batches):
        noisy = make_private(per_sample, noise_multiplier=1.5, max_grad_norm=0.5, seed=9)
        plain = make_private(per_sample, max_grad_norm=0.5)
        total = released(plain, batches, projectors)
        return {
            name: value - total[name]
            for name, value in released(noisy, batches, projectors).items()
        }

    empty = noise([])
    size = sum(value.numel() for value in empty.values())
    assert joint_norm(empty) == pytest.approx(1.5 * 0.5 * math.sqrt(size), rel=0.1)
    for batches in ([batch], split(batch, [1] * 6), split(batch, [2, 4]), split(batch, [1, 5])[:1]):
        assert distance(noise(batches), empty) < 1e-6 * joint_norm(empty)


@pytest.mark.parametrize("sizes", [[], [4], [1, 1, 2]], ids=str)
def test_one_logical_batch_is_one_release_in_the_ledger(sizes):
    engine = make_private(Given(a=(3,)), noise_multiplier=1.0)
    for step in range(1, 4):
        released(engine, [{"a": Dense(torch.randn(size, 3))} for size in sizes])
        assert engine.ledger.steps == step


def test_without_noise_the_release_is_the_clipped_sum_exactly():
    values = torch.randn(4, 30)
    total = {"a": torch.zeros(30)}
    add_clipped_sum_(total, {"a": Dense(values)}, 0.5)
    engine = make_private(Given(a=(30,)), max_grad_norm=0.5, expected_batch_size=3)
    before = torch.Generator.get_state(engine._noise_generator)
    private = released(engine, [{"a": Dense(values)}])
    assert torch.equal(private["a"], total["a"] / 3)
    assert torch.equal(torch.Generator.get_state(engine._noise_generator), before)
    assert not engine.ledger.private


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e6])
def test_automatic_clipping_scales_every_sample_to_just_below_c(scale):
    """Bu et al. 2023: g C / (|g| + gamma), over all parameters jointly; NaN counts as zero."""
    values = {"a": scale * torch.randn(5, 3, 4), "b": scale * torch.randn(5, 7)}
    values["a"][1, 0, 0], values["b"][3] = math.nan, math.inf
    norms = sum(v.flatten(1).square().sum(1) for v in values.values()).sqrt()
    factors = torch.where(norms.isfinite(), 0.5 / (norms + 0.01), 0.0)
    total = {}
    add_clipped_sum_(total, {name: Dense(v) for name, v in values.items()}, 0.5, automatic=True)
    for name, v in values.items():
        expected = torch.einsum("b,b...->...", factors, v.nan_to_num(0, 0, 0))
        torch.testing.assert_close(total[name], expected, rtol=1e-4, atol=1e-7)
    alone = {}
    add_clipped_sum_(alone, {n: Dense(v[:1]) for n, v in values.items()}, 0.5, automatic=True)
    assert sum(v.square().sum() for v in alone.values()).sqrt() <= 0.5 * (1 + 1e-5)


@pytest.mark.parametrize("clipping", ["flat", "automatic"])
def test_per_group_clipping_gives_both_groups_half_of_c_squared(clipping):
    model, inputs = only("roberta-classifier").model(), only("roberta-classifier").batch(6)
    gradients = single_sample_gradients(model, inputs, {})[1]
    apart = "classifier.out_proj"
    head = {n: g for n, g in gradients.items() if n.startswith(f"{apart}.")}
    half = sample_norms(head).median().item()
    bound, expected = math.sqrt(2) * half, {}
    for part in (head, {n: g for n, g in gradients.items() if n not in head}):
        norms = sample_norms(part)
        assert (norms > half).any()
        factors = half / (norms + 0.01) if clipping == "automatic" else (half / norms).clamp(max=1)
        for name, gradient in part.items():
            expected[name] = torch.einsum("b,b...->...", factors.float(), gradient)
    engine = make_private(
        make_engine("layerwise", model), max_grad_norm=bound, clipping=clipping, clipped_apart=apart
    )
    private = released(engine, [inputs])
    assert distance(private, {name: expected[name] for name in private}) < 1e-4 * bound


def test_a_non_finite_norm_in_one_group_drops_the_sample():
    for bad, value in (("head.weight", NAN), ("body", INF), ("body", 1e20)):
        values = {"head.weight": torch.ones(3, 4), "body": torch.ones(3, 2, 5)}
        values[bad][1] = value
        total = {}
        given = {name: Dense(own) for name, own in values.items()}
        add_clipped_sum_(total, given, 1.0, clipped_apart="head")
        half = math.sqrt(0.5)
        torch.testing.assert_close(total["head.weight"], torch.full((4,), 2 * half / 2))
        torch.testing.assert_close(total["body"], torch.full((2, 5), 2 * half / math.sqrt(10)))
        alone = {}
        add_clipped_sum_(
            alone, {n: Dense(v[:1]) for n, v in values.items()}, 1.0, clipped_apart="head"
        )
        assert joint_norm(alone) == pytest.approx(1)


each_kind = pytest.mark.parametrize("kind", [*FORMS, "sum"])


def scaled(gradient, factors):
    """Multiplies what a backward pass would have multiplied: values, or the factor ``rows``."""
    shaped = factors[:, None, None]
    match gradient:
        case Dense(values):
            return Dense(values * shaped)
        case Factored(rows, cols):
            return Factored(rows * shaped, cols)
        case SparseRows(indices, values, num_rows):
            return SparseRows(indices, values * shaped, num_rows)
        case GradientSum(factored, sparse):
            return add([scaled(factored, factors), scaled(sparse, factors)])


def pair(kind, factors, seed=0):
    torch.manual_seed(seed)
    scale, forms = torch.tensor(factors), {name: make() for name, make in FORMS.items()}
    forms["sum"] = add([forms["factored"], forms["sparse rows"]])
    weight = forms[kind].select(torch.arange(len(factors)))
    bias = torch.randn(len(factors), ROWS) * scale[:, None]
    return {"weight": scaled(weight, scale), "bias": Dense(bias)}


def clipped(gradients, bound):
    total = {"weight": torch.zeros(ROWS, COLS), "bias": torch.zeros(ROWS)}
    add_clipped_sum_(total, gradients, bound)
    return total


@each_kind
def test_a_finite_gradient_contributes_at_most_c_over_all_parameters(kind):
    factors, bounds = (1e-30, 1e-3, 1.0, 1e3, 1e12), (1e-3, 1.0, 1e3)
    for seed, factor, bound in product(range(5), factors, bounds):
        gradients = pair(kind, [factor], seed)
        own = joint_norm({name: g.weighted_sum(torch.ones(1)) for name, g in gradients.items()})
        contribution = joint_norm(clipped(gradients, bound))
        assert contribution <= bound * (1 + ROUNDING)
        assert contribution == pytest.approx(min(own, bound), rel=1e-5)


@each_kind
def test_a_gradient_without_a_finite_norm_contributes_exactly_zero(kind):
    """The norm of 1e20 overflows; the gradient 0 must not become 0 / 0."""
    for factor, bound in product((0.0, 1e20, NAN, INF, -INF), (1.0, INF)):
        for total in clipped(pair(kind, [factor]), bound).values():
            assert torch.equal(total, torch.zeros_like(total))


@each_kind
@pytest.mark.parametrize("bound", [1.0, INF])
def test_a_bad_sample_leaves_its_batch_mates_alone(kind, bound):
    for factor, bad in product((1e20, NAN, INF), ([0], [1, 2], [0, 1, 2, 3])):
        factors = [factor if i in bad else 0.1 * (i + 1) for i in range(4)]
        good = [i for i in range(4) if i not in bad]
        mates = {
            name: g.select(torch.tensor(good, dtype=int)) for name, g in pair(kind, factors).items()
        }
        expected = clipped(mates, bound)
        assert distance(clipped(pair(kind, factors), bound), expected) <= ROUNDING * len(good)
        assert (joint_norm(expected) > 0) == bool(good)


def test_expanded_zeros_of_a_left_out_parameter_stay_zero():
    gradients = pair("dense", [1.0, NAN])
    zeros = {"left out": Dense(torch.zeros(()).expand(2, ROWS, COLS))}
    mate = {name: gradient.select(torch.tensor([0])) for name, gradient in gradients.items()}
    total = {}
    add_clipped_sum_(total, gradients | zeros, 1.0)
    assert not total.pop("left out").any()
    assert distance(total, clipped(mate, 1.0)) < ROUNDING


SCALES = torch.tensor([1.0, 1e-30, 0.0, 1e25, NAN, INF, -INF])


def scaled_loss(outputs, labels):
    """Multiplies the loss of a text by what its first label, which predicts nothing, stands for."""
    return tokens(outputs["logits"], next_tokens(labels), None) * SCALES[labels[:, 0]]


def test_extreme_texts_of_tied_models_contribute_at_most_c():
    model, inputs = only("opt").model(), only("opt").batch(len(SCALES))
    inputs["labels"][:, 0] = torch.arange(len(SCALES))
    projectors = projectors_for(model, 8)
    engine = make_private(make_engine("layerwise", model, scaled_loss), max_grad_norm=0.1)
    each = [released(engine, [sample], projectors) for sample in split(inputs, [1] * len(SCALES))]
    norms = [joint_norm(contribution) for contribution in each]
    assert 0.1 * (1 - 1e-5) < norms[0] <= 0.1 * (1 + ROUNDING)
    assert 0 <= norms[1] < 1e-25
    assert norms[2:] == [0.0] * 5
    together = released(engine, [inputs], projectors)
    assert distance(together, each[0]) < 1e-6


def cancelling(kind, ratio):
    """Returns gradients whose parts are ``ratio`` times longer than their sum."""
    first, second, rest = torch.randn(3, ROWS, 1), torch.randn(3, 1, COLS), torch.randn(3, 1, 5)
    rows = torch.cat([first.mT, -first.mT], 1) * ratio
    cols = torch.cat([second, second + rest / ratio], 1)
    same_row = torch.zeros(3, 2, dtype=torch.int64)
    far = SparseRows(same_row, torch.cat([second, -second + rest / ratio], 1) * ratio, ROWS)
    near = Factored(-torch.eye(ROWS)[None, :1].expand(3, 1, ROWS), second * ratio)
    weight = {
        "factored": Factored(rows, cols),
        "sparse": far,
        "sum": GradientSum(near, SparseRows(same_row[:, :1], second * ratio + rest, ROWS)),
    }[kind]
    return {"weight": weight, "bias": Dense(torch.zeros(3, ROWS))}


@pytest.mark.parametrize("kind", ["factored", "sparse", "sum"])
def test_uses_that_cancel_contribute_at_most_c(kind):
    """In float32 the norm of such a sum has few right digits, or none."""
    for ratio in (1e2, 1e3, 1e4, 1e5):
        gradients = cancelling(kind, ratio)
        for i in range(3):
            one = {name: gradient.select(torch.tensor([i])) for name, gradient in gradients.items()}
            assert joint_norm(clipped(one, 0.1)) <= 0.1 * (1 + ROUNDING)


def test_a_long_gradient_contributes_at_most_c():
    """One float32 sum over ten million squares is off by a percent."""
    gradients = {"a": Dense(torch.full((1, 10_000_000), 0.1))}
    total = {"a": torch.zeros(10_000_000)}
    add_clipped_sum_(total, gradients, 1.0)
    assert total["a"].double().norm().item() <= 1 + 1e-5


def test_a_convolution_on_one_patch_keeps_its_weights_shape():
    """With one place the factors are smaller than the gradient, which has four dimensions."""

    def loss(outputs, _):
        return outputs.square().sum(1)

    model = nn.Sequential(nn.Conv2d(3, 16, 4), nn.Flatten())
    inputs = {"input": torch.randn(3, 3, 4, 4)}
    engine = make_private(make_engine("layerwise", model, loss), max_grad_norm=1e6)
    private = released(engine, [inputs])
    loss(model(**inputs), None).sum().backward()
    for name, parameter in model.named_parameters():
        assert private[name].shape == parameter.shape
        expected = parameter.grad / engine.expected_batch_size
        torch.testing.assert_close(private[name], expected, rtol=1e-5, atol=1e-6)


def test_sums_and_noise_of_a_bfloat16_model_are_float32():
    """Rounded to bfloat16, a contribution would exceed C by up to half a percent."""
    model = only("roberta-classifier").model().to(torch.bfloat16)
    inputs, projectors = only("roberta-classifier").batch(4), projectors_for(model, 8)
    per_sample = make_engine("layerwise", model)
    for sample in split(inputs, [1] * 4):
        total = released(make_private(per_sample, max_grad_norm=0.1), [sample], projectors)
        assert all(value.dtype is torch.float32 for value in total.values())
        assert 0.1 * (1 - 1e-5) < joint_norm(total) <= 0.1 * (1 + ROUNDING)
    engine = make_private(per_sample, noise_multiplier=1.0, seed=4)
    private = released(engine, [], projectors)
    expected = drawn_for(private, 1.0, seed=4)
    assert all(torch.equal(value, expected[name]) for name, value in private.items())


@each_kind
def test_an_enclosing_autocast_does_not_reach_norms_and_sums(kind):
    engine = make_private(Given(weight=(ROWS, COLS), bias=(ROWS,)))
    batches = [pair(kind, [1.0, 3.0, 1e-3], seed) for seed in range(3)]
    expected = released(engine, batches)
    with torch.autocast("cpu", torch.bfloat16):
        assert distance(released(engine, batches), expected) < 1e-6


def test_the_default_dtype_does_not_reach_sums_and_noise():
    engine = make_private(Given(a=(100,)), noise_multiplier=1.0)
    try:
        torch.set_default_dtype(torch.bfloat16)
        private = released(engine, [])["a"]
    finally:
        torch.set_default_dtype(torch.float32)
    assert private.dtype is torch.float32
    assert not torch.equal(private, private.bfloat16().float())


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="of newer versions")
@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_tf32_set_by_the_user_does_not_change_clipping(precision):
    """The norm of a gradient that stays two factors is bounded with the rounding of products."""
    rows, cols = torch.randn(2, 1, 50, 8), torch.randn(2, 1, 50, 6)
    gradients = [Factored(row, col) for row, col in zip(rows, cols, strict=True)]
    before = torch.backends.fp32_precision
    found, products = [], dict[str, str]()
    for setting in (precision, before):
        torch.backends.fp32_precision = setting
        products[setting] = torch.backends.cuda.matmul.fp32_precision
    try:
        for setting in (before, precision):
            torch.backends.fp32_precision = setting
            engine = make_private(Given(weight=(8, 6)))
            engine.begin({})
            for gradient in gradients:
                engine.accumulate({"weight": gradient})
            found.append(engine.release()["weight"])
            assert torch.backends.fp32_precision == setting
            assert torch.backends.cuda.matmul.fp32_precision == products[setting]
    finally:
        torch.backends.fp32_precision = before
    assert torch.backends.cuda.matmul.fp32_precision == products[before]
    assert torch.equal(*found)
    assert found[0].norm() > 0


SIGMA, BOUND, EXPECTED = 1.5, 0.4, 5.0
FALSE_ALARM = 1e-8  # of each check below, if the noise were drawn afresh


def chi_square_fits(sum_of_squares, degrees):
    """Bounds of Laurent and Massart (2000, lemma 1): each is exceeded with probability e^-t."""
    t = math.log(2 / FALSE_ALARM)
    lower = degrees - 2 * math.sqrt(degrees * t)
    upper = degrees + 2 * math.sqrt(degrees * t) + 2 * t
    return lower <= sum_of_squares <= upper


def noise_of(releases, seed=0, **shapes):
    """Returns the noise of releases (R, ...) of empty draws, of standard deviation 1."""
    engine = make_private(
        Given(**shapes),
        noise_multiplier=SIGMA,
        max_grad_norm=BOUND,
        expected_batch_size=EXPECTED,
        seed=seed,
    )
    found = [
        torch.cat([v.flatten() for v in released(engine, []).values()]) for _ in range(releases)
    ]
    return torch.stack(found).double() / (SIGMA * BOUND / EXPECTED)


def test_the_noise_has_its_std_in_every_single_coordinate():
    """Seeded. False alarm for fresh noise: 1e-8 for each of the 500 coordinates, 5e-6 in all."""
    squares = noise_of(600, a=(20, 20), b=(100,)).square().sum(0)  # (500,)
    assert squares.shape == (500,)
    assert all(chi_square_fits(value.item(), 600) for value in squares)
    for factor in (4 / 9, 9 / 4):
        assert not any(chi_square_fits(factor * value.item(), 600) for value in squares)


def test_no_two_releases_and_no_two_tensors_share_noise():
    """Seeded. Two independent normals agree by chance with probability below 1e-6 per pair."""
    shapes = {"matrix": (50, 100), "same": (50, 100), "vector": (20,)}
    noise = noise_of(3, seed=1, **shapes)
    assert noise.unique().numel() > 0.99 * noise.numel()
    for i, j in ((0, 1), (0, 2), (1, 2)):  # |correlation| is below 6 / sqrt(n) but for 2e-9
        assert (noise[i] * noise[j]).mean().abs() < 6 / math.sqrt(noise.shape[1])
    assert not torch.equal(noise[0], noise_of(1, seed=2, **shapes)[0])


def test_draws_do_not_merge_and_steps_have_their_order():
    engine = make_private(Given(a=(3,)), noise_multiplier=1.0)
    for step in (engine.release, lambda: engine.accumulate({"a": Dense(torch.ones(2, 3))})):
        with pytest.raises(PrivacyError, match=r"called before begin\(\)"):
            step()
    engine.begin({})
    with pytest.raises(PrivacyError, match="before the last logical batch was released"):
        engine.begin({})
    engine.release()
    with pytest.raises(PrivacyError, match=r"called before begin\(\)"):
        engine.release()
    assert engine.ledger.steps == 1


def test_a_release_that_is_not_recorded_is_never_made(monkeypatch):
    """Neither noise nor sum exists when the disk is full; the next logical batch starts at zero."""
    engine = make_private(Given(a=(3,)), noise_multiplier=1.0)
    before = torch.Generator.get_state(engine._noise_generator)

    def full_disk(steps=1):
        assert torch.equal(torch.Generator.get_state(engine._noise_generator), before)
        raise OSError("no space left")

    engine.begin({})
    engine.accumulate({"a": Dense(torch.ones(2, 3))})
    with monkeypatch.context() as patch:
        patch.setattr(engine.ledger, "record", full_disk)
        with pytest.raises(OSError, match="no space left"):
            engine.release()
    assert torch.equal(torch.Generator.get_state(engine._noise_generator), before)
    with pytest.raises(PrivacyError):
        engine.release()
    with pytest.raises(PrivacyError):
        engine.accumulate({"a": Dense(torch.ones(2, 3))})
    private = released(engine, [])["a"]
    assert torch.equal(private, torch.empty(3).normal_(generator=torch.Generator().manual_seed(0)))


def test_the_ledger_is_on_disk_before_the_noise_is_drawn(tmp_path, monkeypatch):
    engine = make_private(Given(a=(3,)), noise_multiplier=1.0)
    engine.ledger = Ledger.start(MECHANISM, tmp_path / "ledger.json")
    seen = []

    def noting(*args):
        seen.append(Ledger.load(tmp_path / "ledger.json").steps)

    monkeypatch.setattr(release, "add_noise_", noting)
    engine.begin({})
    assert Ledger.load(tmp_path / "ledger.json").steps == 0
    engine.release()
    assert seen == [1]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_of_two_processes_alone_adds_noise(rank):
    dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    try:
        engine = make_private(Given(a=(3,)), noise_multiplier=1.0, distributed=True)
        assert bool(released(engine, [])["a"].any()) == (rank == 0)
    finally:
        dist.destroy_process_group()
