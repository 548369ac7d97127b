"""Privacy units of several examples: whose they are, draws, gradients, and runs of a trainer."""

import itertools
import math
from collections import Counter

import datasets
import numpy as np
import pytest
import torch
from transformers import BertForMultipleChoice

from dp_grape_hf import PrivacyError
from dp_grape_hf.gradients import ANSWERS, UNIT_OF_ROW, Dense, UnitEngine, flat, make_engine
from dp_grape_hf.gradients.forms import Factored, SparseRows
from dp_grape_hf.gradients.units import summed
from dp_grape_hf.mechanism import (
    EmptyDrawDataset,
    LogicalBatchCollator,
    PoissonBatchSampler,
    add_clipped_sum_,
    read_units,
)
from recipes.paper.methods.zeroth_order import ZerothOrderEngine
from tests.models.matrix import projectors_for
from tests.support.mechanism import coins, make_private, released
from tests.support.models import only, row
from tests.support.oracles import assert_gradients_equal, single_sample_gradients
from tests.support.trainers import (
    OWNERS,
    SIZES,
    TinyForSequenceClassification,
    assert_same_weights,
    points,
)


def _frozen(rows):
    return datasets.Dataset.from_list(rows)


@pytest.mark.parametrize(
    "dataset",
    [
        [{"user": u} for u in "abcacba"],
        [{"user": n} for n in (7, 1, 9, 7, 9, 1, 7)],
        [{"user": torch.tensor(n)} for n in (7, 1, 9, 7, 9, 1, 7)],
        [{"user": np.int64(n)} for n in (7, 1, 9, 7, 9, 1, 7)],
        [{"user": np.array(u)} for u in "abcacba"],
        _frozen([{"user": u, "x": 0} for u in "abcacba"]),
        _frozen([{"user": n} for n in (7, 1, 9, 7, 9, 1, 7)]).with_format("torch"),
        _frozen([{"user": u, "x": [1.0]} for u in "abcacba"]).with_format("torch", columns=["x"]),
        _frozen([{"user": u} for u in "abcacba"]).with_transform(lambda rows: {"text": ["a"]}),
        _frozen([{"user": u} for u in "zabcacbaz"]).select(range(1, 8)),
    ],
)
def test_equal_values_are_one_unit(dataset):
    units = read_units(dataset, "user")
    assert [units.examples(unit).tolist() for unit in range(len(units))] == [
        [0, 3, 6],
        [1, 5],
        [2, 4],
    ]
    assert (len(units), len(units.order), units.largest) == (3, 7, 3)


def test_the_checksum_tells_who_owns_what():
    one, same, other = (
        read_units([{"user": u} for u in text], "user") for text in ("aab", "xxy", "aba")
    )
    assert one.checksum == same.checksum != other.checksum


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        ([{"text": "x"}], r"column='user' is not in train_dataset\[0\], which has text"),
        ([{"user": "a"}, {}], r"is not in train_dataset\[1\]"),
        (_frozen([{"text": "x"}]), "is not in train_dataset, which has text"),
        ([("a", 1)], r"train_dataset\[0\] is a tuple, which has no columns"),
        ([{"user": "a"}, {"user": None}], r"train_dataset\[1\]\['user'\] is None"),
        (_frozen([{"user": 1}, {"user": None}]), r"train_dataset\[1\]\['user'\] is None"),
        ([{"user": math.nan}], "is nan.*that example is not known"),
        ([{"user": torch.tensor(math.nan)}], "is nan"),
        ([{"user": [1, 2]}], "is a list. Such values cannot be compared"),
        ([{"user": torch.tensor([1])}], "is a Tensor. Such values cannot be compared"),
        ([{"user": object()}], "is a object. Such values cannot be compared"),
        ([{"user": 1}, {"user": "1"}], r"train_dataset\[1\]\['user'\] is a str, and earlier"),
    ],
)
def test_a_column_that_does_not_identify_units_is_refused(dataset, reason):
    with pytest.raises(PrivacyError, match=reason):
        read_units(dataset, "user")


UNITS = read_units([{"user": owner} for owner in OWNERS], "user")
MEMBERS = [UNITS.examples(unit).tolist() for unit in range(len(UNITS))]


def _draws(sample_rate, steps, seed=0, cap=None, **place):
    place |= {"units": UNITS, "max_examples_per_unit": cap}
    return list(PoissonBatchSampler(len(UNITS), sample_rate, steps, coins(seed), **place))


def _unit_of(examples):
    return next(unit for unit, members in enumerate(MEMBERS) if set(examples) <= set(members))


def test_units_are_drawn_whole_by_the_coins_of_poisson_sampling():
    plain = PoissonBatchSampler(len(UNITS), 0.4, 200, coins())
    drawn = _draws(0.4, 200)
    assert drawn == [[MEMBERS[unit] for unit in draw] for draw in plain]
    assert [] in drawn


@pytest.mark.parametrize("cap", [None, 2])
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_a_draw_and_never_a_unit(world_size, cap):
    """Also what a cap leaves of a unit is the same on all ranks, although one of them has it."""
    whole = _draws(0.6, 60, cap=cap)
    shares = [
        _draws(0.6, 60, cap=cap, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    for step, draw in enumerate(whole):
        parts = [share[step] for share in shares]
        assert sorted(itertools.chain(*parts)) == sorted(draw)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_cap_leaves_each_unit_its_probability_and_independence():
    """Counts within five standard deviations, correlations within 5.5: false alarm below 2e-6."""
    steps, q = 3000, 0.3
    table = torch.zeros(steps, len(UNITS), dtype=torch.float64)
    for step, draw in enumerate(_draws(q, steps, cap=2)):
        for examples in draw:
            unit = _unit_of(examples)
            assert len(examples) == len(set(examples)) == min(2, SIZES[unit])
            table[step, unit] += 1
    assert table.max() == 1
    assert ((table.mean(0) - q).abs() < 5 * math.sqrt(q * (1 - q) / steps)).all()
    assert torch.corrcoef(table.T).fill_diagonal_(0).abs().max() < 5.5 / math.sqrt(steps)
    lagged = table[1:].T @ table[:-1] / (steps - 1) - q * q
    assert lagged.abs().max() < 5.5 * q * (1 - q) / math.sqrt(steps)


def test_a_cap_keeps_a_new_uniform_subset_in_each_batch():
    """Chi-square of the 100 pairs of consecutive subsets, 2 of 5: false alarm below 1e-5."""
    steps, kinds = 4001, set(itertools.combinations(range(5), 2))
    one = read_units([{"user": 0}] * 5, "user")
    draws = PoissonBatchSampler(1, 1.0, steps, coins(), units=one, max_examples_per_unit=2)
    subsets = [tuple(draw[0]) for draw in draws]
    assert set(subsets) == kinds
    pairs = Counter(itertools.pairwise(subsets))
    expected = (steps - 1) / len(kinds) ** 2
    cells = itertools.product(kinds, kinds)
    chi_square = sum((pairs[cell] - expected) ** 2 / expected for cell in cells)
    assert abs(chi_square - 99) < 5 * math.sqrt(2 * 99)


def test_arguments_of_a_sampler_that_do_not_fit_are_refused():
    with pytest.raises(PrivacyError, match="num_samples"):
        PoissonBatchSampler(5, 0.5, 1, coins(), units=UNITS)


def _collate(examples):
    return {"id": torch.tensor(examples)}


@pytest.mark.parametrize("physical_batch_size", [7, 8, 30])
def test_a_physical_batch_holds_whole_units(physical_batch_size):
    batches = LogicalBatchCollator(_collate, physical_batch_size, of_units=True)(MEMBERS)
    assert batches.sizes == tuple(len(batch["id"]) for batch in batches)
    assert max(batches.sizes) <= physical_batch_size
    assert len(batches) == math.ceil(sum(SIZES) / physical_batch_size)  # 24 examples fit tightly
    seen = []
    for batch in batches:
        numbers = batch[UNIT_OF_ROW].tolist()
        assert numbers == sorted(numbers)
        for number in range(max(numbers) + 1):
            seen.append(batch["id"][batch[UNIT_OF_ROW] == number].tolist())
    assert sorted(seen) == sorted(MEMBERS)


def test_the_column_stays_behind():
    rows = [{"user": u, "x": i} for i, u in enumerate("aba")]
    dataset = EmptyDrawDataset(rows, unit_column="user")
    assert dataset[1] == {"x": 1}
    assert dataset.__getitems__([[0, 2], [1]]) == [[{"x": 0}, {"x": 2}], [{"x": 1}]]
    assert len(dataset) == 3


OF_ROWS = (3, 1, 1, 2)  # examples of the units of a batch of 7
EACH = torch.arange(len(OF_ROWS)).repeat_interleave(torch.tensor(OF_ROWS))


def _summed(values):
    """The definition: the sum over the rows of a unit, (U, ...) of (B, ...)."""
    return torch.stack([values[unit == EACH].sum(0) for unit in range(len(OF_ROWS))])


def _points():
    rows = points(len(EACH)).examples
    return {name: torch.stack([torch.as_tensor(r[name]) for r in rows]) for name in ("x", "labels")}


def _of_units(name, **settings):
    case = only(name)
    return case.model(**settings).eval(), case.batch(len(EACH)) | {UNIT_OF_ROW: EACH}


@pytest.mark.parametrize(
    ("name", "engine", "rank", "most"),
    [
        ("roberta-classifier", "layerwise", None, 0),
        ("roberta-classifier", "layerwise", None, flat.MOST),
        ("roberta-classifier", "functorch", 2, 0),
        ("opt", "layerwise", None, 0),
        ("gpt2", "layerwise", 2, flat.MOST),
    ],
)
def test_a_units_gradient_is_the_sum_of_its_examples(name, engine, rank, most, monkeypatch):
    monkeypatch.setattr(flat, "MOST", most)
    model, batch = _of_units(name, num_hidden_layers=1)
    projectors = projectors_for(model, rank)
    examples = {name: value for name, value in batch.items() if name != UNIT_OF_ROW}
    losses, expected = single_sample_gradients(model, examples, projectors)
    expected = {name: _summed(gradient) for name, gradient in expected.items()}
    unit_engine = UnitEngine(make_engine(engine, model))
    found_losses, found = unit_engine(batch, projectors)
    torch.testing.assert_close(found_losses, losses)
    assert_gradients_equal(found, expected)
    for parameter, gradient in found.items():
        squared = expected[parameter].double().flatten(1).square().sum(1)
        torch.testing.assert_close(gradient.squared_norm().double(), squared, atol=1e-4, rtol=1e-4)
    shapes = unit_engine.released_shapes(projectors)
    assert shapes == {name: tuple(g.shape) for name, g in found.items()}


def test_examples_of_several_rows_are_summed_as_well():
    """An example of multiple choice is a row per option: the model sees B options rows."""
    entry = row("BERT, multiple choice")
    model, batch = entry.model().eval(), entry.batch(len(EACH))
    assert isinstance(model, BertForMultipleChoice)
    losses, expected = single_sample_gradients(model, batch)
    found_losses, found = UnitEngine(make_engine("layerwise", model))(
        batch | {UNIT_OF_ROW: EACH}, {}
    )
    torch.testing.assert_close(found_losses, losses)
    summed = {name: _summed(gradient) for name, gradient in expected.items()}
    assert_gradients_equal(found, summed, tolerance=1e-4)  # options cancel


def test_an_infinite_example_drops_its_unit_and_no_other():
    generator = torch.Generator().manual_seed(0)
    rows, cols = (torch.randn(7, 2, width, generator=generator) for width in (5, 6))
    indices, values = torch.randint(0, 9, (7, 3), generator=generator), torch.randn(7, 3, 4)

    def clipped(poison, first=0):
        spoilt, total = rows.clone(), {}
        spoilt[1] *= poison  # of unit 0
        examples = {
            "factored": Factored(spoilt, cols),
            "sparse": SparseRows(indices, values, 9),
            "dense": Dense(torch.ones(7, 3)),
        }
        kept = {name: e.select(slice(first, None)) for name, e in examples.items()}
        sizes = OF_ROWS[1:] if first else OF_ROWS
        units = {n: summed(e, sizes) for n, e in kept.items()}
        add_clipped_sum_(total, units, 0.5)
        return total

    for poison in (math.nan, math.inf):
        assert_same_weights(clipped(poison), clipped(1.0, first=3), atol=1e-6, rtol=1e-5)


def test_finite_differences_of_a_unit_add_up():
    inner = ZerothOrderEngine(TinyForSequenceClassification(), seed=3, n_directions=2)
    batch = _points()
    unit_engine = UnitEngine(inner)
    inner.use(4)
    losses, found = unit_engine(batch | {UNIT_OF_ROW: EACH}, {})
    alone, each = inner(batch, {})
    torch.testing.assert_close(losses, alone)
    differences = each[ANSWERS]
    assert isinstance(differences, Dense)
    assert_gradients_equal(found, {ANSWERS: _summed(differences.values)})
    assert unit_engine.released_shapes({}) == {ANSWERS: (2,)}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({UNIT_OF_ROW: None}, "has no 'privacy_unit_of_row'"),
        ({UNIT_OF_ROW: torch.tensor([0, 1, 0, 1, 2, 2, 2])}, "does not count up from 0"),
        ({UNIT_OF_ROW: EACH + 1}, "does not count up from 0"),
        ({UNIT_OF_ROW: EACH[:6]}, "did not return one row for each"),
    ],
)
def test_a_batch_without_the_unit_of_each_row_is_refused(changes, reason):
    batch = _points()
    batch |= {name: value for name, value in changes.items() if value is not None}
    engine = UnitEngine(make_engine("layerwise", TinyForSequenceClassification()))
    with pytest.raises(PrivacyError, match=reason):
        engine(batch, {})


def _release(clipping, batch, bound=0.3):
    """Returns the sum that the noise is added to, as one vector."""
    with torch.random.fork_rng(devices=[]):
        model = TinyForSequenceClassification()
    per_sample = UnitEngine(make_engine("layerwise", model))
    private = make_private(per_sample, clipping=clipping, max_grad_norm=bound)
    return torch.cat([value.flatten() for value in released(private, [batch]).values()])


@pytest.mark.parametrize("clipping", ["flat", "automatic"])
def test_a_user_moves_the_sum_within_one_examples_bound(clipping):
    """Adding or removing all of a user's examples, alike and large; three examples reach 3 C."""
    batch = _points()
    batch["x"][:3] = 20 * batch["x"][0]
    batch["labels"][:3] = (batch["labels"][0] + 1) % 3
    everyone = _release(clipping, batch | {UNIT_OF_ROW: EACH})
    others = {name: value[3:] for name, value in batch.items()}
    without = _release(clipping, others | {UNIT_OF_ROW: EACH[3:] - 1})
    moved = (everyone - without).norm().item()
    assert 0.29 < moved < 0.3 * (1 + 1e-5)
    singly = _release(clipping, batch | {UNIT_OF_ROW: torch.arange(7)})
    assert (singly - without).norm() > 0.7  # what the examples do by themselves
