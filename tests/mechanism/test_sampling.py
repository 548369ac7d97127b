import itertools
import math
from typing import Any

import pytest
import torch

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.mechanism import (
    PoissonBatchSampler,
    sampling,
)


def _coins(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _inclusions(num_samples: int, sample_rate: float, steps: int) -> torch.Tensor:
    """1.0 where an example entered a draw, shape (steps, num_samples)."""
    table = torch.zeros(steps, num_samples, dtype=torch.float64)
    for step, draw in enumerate(PoissonBatchSampler(num_samples, sample_rate, steps, _coins())):
        table[step, draw] = 1.0
    return table


# ---- The law of a draw ----


@pytest.mark.parametrize("sample_rate", [0.02, 0.3, 0.9])
def test_each_example_is_drawn_with_probability_q(sample_rate: float) -> None:
    """Chi-square of 200 counts over 4000 steps, normal approximation.

    False alarm: below 1e-6 (five standard deviations), with fixed coins.
    """
    num_samples, steps = 200, 4000
    counts = _inclusions(num_samples, sample_rate, steps).sum(0)
    variance = steps * sample_rate * (1 - sample_rate)
    chi_square = ((counts - steps * sample_rate).square() / variance).sum().item()
    assert abs(chi_square - num_samples) < 5 * math.sqrt(2 * num_samples)


def test_batch_sizes_are_binomial() -> None:
    """Mean within five, variance within six standard deviations: false alarm below 1e-6."""
    num_samples, q, steps = 300, 0.1, 4000
    sizes = _inclusions(num_samples, q, steps).sum(1)
    variance = num_samples * q * (1 - q)
    assert abs(sizes.mean().item() - num_samples * q) < 5 * math.sqrt(variance / steps)
    assert abs(sizes.var().item() / variance - 1) < 6 * math.sqrt(2 / steps)


@pytest.mark.parametrize("dim", [0, 1], ids=["steps", "examples"])
def test_coins_are_pairwise_independent(dim: int) -> None:
    """The largest of 7140 correlations over 4000 coins, between examples and between steps.

    False alarm: below 7140 * P(|normal| > 6.5) < 1e-6, with fixed coins.
    """
    shape = (120, 4000) if dim == 0 else (4000, 120)
    table = _inclusions(shape[1], 0.25, shape[0])
    correlations = torch.corrcoef(table if dim == 0 else table.T).fill_diagonal_(0.0)
    assert correlations.abs().max() < 6.5 / math.sqrt(4000)


def test_a_draw_has_no_duplicates_and_stays_in_range() -> None:
    for draw in PoissonBatchSampler(50, 0.5, 300, _coins()):
        assert draw == sorted(set(draw))
        assert set(draw) <= set(range(50))


def test_q_of_one_draws_everything() -> None:
    assert list(PoissonBatchSampler(7, 1.0, 3, _coins())) == [list(range(7))] * 3


def test_an_empty_draw_is_yielded() -> None:
    assert list(PoissonBatchSampler(5, 1e-9, 4, _coins())) == [[], [], [], []]


def test_drawing_in_pieces_never_changes_the_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = list(PoissonBatchSampler(1000, 0.1, 5, _coins()))
    monkeypatch.setattr(sampling, "_COINS_AT_ONCE", 64)
    assert list(PoissonBatchSampler(1000, 0.1, 5, _coins())) == whole


def test_length_is_the_number_of_draws() -> None:
    for steps in (0, 1, 17):
        sampler = PoissonBatchSampler(10, 0.01, steps, _coins())
        assert len(sampler) == len(list(sampler)) == steps


def test_a_second_pass_continues_the_stream() -> None:
    sampler = PoissonBatchSampler(100, 0.2, 6, _coins())
    two_passes = list(sampler) + list(sampler)
    assert two_passes == list(PoissonBatchSampler(100, 0.2, 12, _coins()))
    assert two_passes[:6] != two_passes[6:]


def test_a_pass_left_early_is_not_replayed() -> None:
    sampler = PoissonBatchSampler(100, 0.2, 6, _coins())
    seen = list(itertools.islice(sampler, 2)) + list(sampler)
    assert seen == list(PoissonBatchSampler(100, 0.2, 8, _coins()))


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("sample_rate", [0.01, 0.2, 1.0])
def test_ranks_partition_one_draw(world_size: int, sample_rate: float) -> None:
    whole = list(PoissonBatchSampler(100, sample_rate, 40, _coins()))
    ranks = [
        list(PoissonBatchSampler(100, sample_rate, 40, _coins(), rank, world_size))
        for rank in range(world_size)
    ]
    for draw, *shares in zip(whole, *ranks, strict=True):
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
def test_wrong_arguments_are_refused_by_name(wrong: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"num_samples": 10, "sample_rate": 0.1, "steps": 3, "world_size": 2}
    with pytest.raises(PrivacyError, match=f"{next(iter(wrong))}="):
        PoissonBatchSampler(generator=_coins(), **(arguments | wrong))
