import itertools
import math
import pickle
from functools import partial

import datasets
import pytest
import torch
from torch.utils.data import DataLoader, Subset

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.mechanism import (
    EmptyDrawDataset,
    LogicalBatch,
    LogicalBatchCollator,
    PoissonBatchSampler,
    Turns,
    sampling,
)
from tests.support.marks import slow_but
from tests.support.mechanism import coins


def _inclusions(num_samples, sample_rate, steps):
    """1.0 where an example entered a draw, shape (steps, num_samples)."""
    table = torch.zeros(steps, num_samples, dtype=torch.float64)
    for step, draw in enumerate(PoissonBatchSampler(num_samples, sample_rate, steps, coins())):
        assert draw == sorted(set(draw))
        table[step, draw] = 1.0
    return table


@pytest.mark.parametrize("sample_rate", slow_but({"0.3"}, [0.02, 0.3, 0.9]))
def test_each_example_is_drawn_with_probability_q(sample_rate):
    """Chi-square of 200 counts over 4000 steps, normal approximation.

    False alarm: below 1e-6 (five standard deviations), with fixed coins.
    """
    num_samples, steps = 200, 4000
    counts = _inclusions(num_samples, sample_rate, steps).sum(0)
    variance = steps * sample_rate * (1 - sample_rate)
    chi_square = ((counts - steps * sample_rate).square() / variance).sum().item()
    assert abs(chi_square - num_samples) < 5 * math.sqrt(2 * num_samples)


def test_batch_sizes_are_binomial():
    """Mean within five, variance within six standard deviations: false alarm below 1e-6."""
    num_samples, q, steps = 300, 0.1, 4000
    sizes = _inclusions(num_samples, q, steps).sum(1)
    variance = num_samples * q * (1 - q)
    assert abs(sizes.mean().item() - num_samples * q) < 5 * math.sqrt(variance / steps)
    assert abs(sizes.var().item() / variance - 1) < 6 * math.sqrt(2 / steps)


@pytest.mark.parametrize("dim", [0, 1], ids=["steps", "examples"])
def test_coins_are_pairwise_independent(dim):
    """The largest of 7140 correlations over 4000 coins, between examples and between steps.

    False alarm: below 7140 * P(|normal| > 6.5) < 1e-6, with fixed coins.
    """
    shape = (120, 4000) if dim == 0 else (4000, 120)
    table = _inclusions(shape[1], 0.25, shape[0])
    correlations = torch.corrcoef(table if dim == 0 else table.T).fill_diagonal_(0.0)
    assert correlations.abs().max() < 6.5 / math.sqrt(4000)


def test_drawing_in_pieces_never_changes_the_draw(monkeypatch):
    whole = list(PoissonBatchSampler(1000, 0.1, 5, coins()))
    monkeypatch.setattr(sampling, "_NUMBERS_AT_ONCE", 64)
    assert list(PoissonBatchSampler(1000, 0.1, 5, coins())) == whole


def test_no_epoch_repeats_another_even_if_it_ended_early():
    sampler = PoissonBatchSampler(100, 0.2, 6, coins())
    seen = list(itertools.islice(sampler, 2)) + list(sampler) + list(sampler)
    assert seen == list(PoissonBatchSampler(100, 0.2, 14, coins()))
    assert seen[2:8] != seen[8:]


@pytest.mark.parametrize(
    ("world_size", "sample_rate", "bands"), [(8, 0.01, 1), (3, 0.2, 1), (2, 1.0, 1), (2, 0.2, 3)]
)
def test_ranks_partition_one_draw(world_size, sample_rate, bands):
    def of(*place):
        turns = partial(Turns, bands)
        return list(PoissonBatchSampler(100, sample_rate, 40, coins(), *place, turns=turns))

    ranks = [of(rank, world_size) for rank in range(world_size)]
    for draw, *shares in zip(of(), *ranks, strict=True):
        assert sorted(index for share in shares for index in share) == draw
        sizes = [len(share) for share in shares]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_samples": 0},
        {"sample_rate": 0.0},
        {"sample_rate": 1.0001},
        {"sample_rate": float("nan")},
        {"steps": -1},
        {"rank": 2},
        {"rank": -1},
        {"world_size": 0},
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_by_name(wrong):
    arguments = {"num_samples": 10, "sample_rate": 0.1, "steps": 3, "world_size": 2}
    with pytest.raises(PrivacyError, match=f"{next(iter(wrong))}="):
        PoissonBatchSampler(generator=coins(), **(arguments | wrong))


def _as_tensor(examples):
    assert examples, "a collator is never given an empty list"
    rows = [example["x"] if isinstance(example, dict) else example for example in examples]
    return {"x": torch.tensor(rows)}


@pytest.mark.parametrize("physical", [1, 2, 8, 100])
def test_physical_batches_cover_a_draw_exactly_once(physical):
    for size in (0, 1, 2, 7, 8, 9, 16, 17):
        batch = LogicalBatchCollator(_as_tensor, physical)(list(range(size)))
        chunks = [physical["x"].tolist() for physical in batch]
        assert [example for chunk in chunks for example in chunk] == list(range(size))
        assert all(1 <= len(chunk) <= physical for chunk in chunks)
        assert len(batch) == math.ceil(size / physical)
        assert batch.sizes == tuple(len(chunk) for chunk in chunks)
        assert batch.num_examples == size


def test_a_physical_batch_needs_room_for_one_example():
    with pytest.raises(PrivacyError, match="physical_batch_size=0"):
        LogicalBatchCollator(_as_tensor, 0)


def test_a_logical_batch_survives_pickling_with_its_collator():
    collator = pickle.loads(pickle.dumps(LogicalBatchCollator(_as_tensor, 2)))
    batch = pickle.loads(pickle.dumps(collator([1, 2, 3])))
    assert type(batch) is LogicalBatch
    assert (batch.sizes, batch.num_examples) == ((2, 1), 3)
    assert [physical["x"].tolist() for physical in batch] == [[1, 2], [3]]


class _Pinnable:
    def __init__(self, pinned=False):
        self.pinned = pinned

    def pin_memory(self):
        return _Pinnable(True)


def test_pinning_keeps_the_type_and_reaches_every_physical_batch():
    batch = LogicalBatch([{"x": _Pinnable()}, [_Pinnable()]], (4, 1))
    pinned = torch.utils.data._utils.pin_memory.pin_memory(batch)
    assert type(pinned) is LogicalBatch
    assert pinned.sizes == (4, 1)
    assert pinned[0]["x"].pinned
    assert pinned[1][0].pinned
    assert type(LogicalBatch([], ()).pin_memory()) is LogicalBatch


_SIZE = 30


def _in_memory():
    return list(range(_SIZE))


def _arrow():
    return datasets.Dataset.from_dict({"x": list(range(_SIZE))})


def _transformed():
    def transform(columns):
        first = columns["x"][0]  # fails for an empty list of indices
        return {"x": [x + 0 * first for x in columns["x"]]}

    return _arrow().with_transform(transform)


def _subset():
    return Subset(_transformed(), range(_SIZE))


@pytest.mark.parametrize(
    ("make_dataset", "workers"),
    [(_in_memory, 0), (_transformed, 0), (_transformed, 2), (_subset, 0)],
)
def test_loaders_deliver_each_draw_whatever_the_workers(make_dataset, workers):
    rate, steps = 0.05, 25
    draws = list(PoissonBatchSampler(_SIZE, rate, steps, coins()))
    assert [] in draws
    loader = DataLoader(
        EmptyDrawDataset(make_dataset()),
        batch_sampler=PoissonBatchSampler(_SIZE, rate, steps, coins()),
        collate_fn=LogicalBatchCollator(_as_tensor, 2),
        num_workers=workers,
    )
    batches = list(loader)
    assert len(loader) == steps
    assert all(type(batch) is LogicalBatch for batch in batches)
    assert [batch.num_examples for batch in batches] == [len(draw) for draw in draws]
    flat = [[x for physical in batch for x in physical["x"].tolist()] for batch in batches]
    assert flat == draws
