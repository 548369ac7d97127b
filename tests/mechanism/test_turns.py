"""Correlated noise at work: whose turn it is, what is added, and what stays in the process."""

import copy
import math
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from scipy.linalg import toeplitz

from dp_grape_hf.accounting import released_noise
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.gradients import Dense
from dp_grape_hf.mechanism import PoissonBatchSampler, Turns
from dp_grape_hf.mechanism.banded import BandedNoise, Groups
from tests.support.mechanism import Given, coins, make_private, released

COEFFICIENTS = (0.8, 0.48, 0.36)
BANDED = {"noise": "banded", "coefficients": "[0.8, 0.48, 0.36]"}


def test_noise_is_the_inverse_matrix_times_independent_noise():
    """Of two tensors at once; z is what the same generator would have drawn alone."""
    steps, std, divisor = 8, 0.5, 4.0
    noise, generator = BandedNoise(COEFFICIENTS), coins()
    found = []
    for _ in range(steps):
        values = [torch.ones(3), torch.zeros(2, 2)]
        noise.add_(values, std, generator, divisor)
        found.append(torch.cat([v.flatten() for v in values]))
    again = coins()
    shapes = [(3,), (2, 2)]
    drawn = [
        torch.cat([torch.empty(s).normal_(0, std, generator=again).flatten() for s in shapes])
        for _ in range(steps)
    ]
    column = np.zeros(steps)
    column[:3] = COEFFICIENTS
    inverse = np.linalg.inv(np.tril(toeplitz(column)))
    sums = torch.tensor([1.0, 1, 1, 0, 0, 0, 0])
    expected = (sums + torch.from_numpy(inverse).float() @ torch.stack(drawn)) / divisor
    torch.testing.assert_close(torch.stack(found), expected)


def test_a_release_has_the_noise_that_is_predicted():
    """Standard deviation of 40,000 numbers, at each of 6 steps: within five of its own."""
    engine = make_private(Given(w=(40_000,)), noise_multiplier=2.0, max_grad_norm=0.5, **BANDED)
    for number, factor in enumerate(released_noise(COEFFICIENTS, 6), 1):
        value = released(engine, [])["w"]
        assert float(value.std()) == pytest.approx(factor, rel=5 / math.sqrt(2 * 40_000))
        assert (engine.turns.bands, engine.turns.releases) == (3, number)


def test_without_noise_bands_change_nothing():
    plain, banded = (make_private(Given(w=(3,)), **own) for own in ({}, BANDED))
    batch = [{"w": Dense(torch.eye(3))}]
    for _ in range(4):
        assert torch.equal(released(plain, batch)["w"], released(banded, batch)["w"])


def test_earlier_noise_cannot_be_saved():
    noise = BandedNoise(COEFFICIENTS)
    noise.add_([torch.zeros(3)], 1.0, coins(), 1.0)
    for save in (pickle.dumps, copy.deepcopy):
        with pytest.raises(PrivacyError, match="cannot be pickled or copied"):
            save(noise)


def _table(bands, steps, *, rate=0.1, size=240):
    """1.0 where an example entered a draw, (steps, examples)."""
    table = torch.zeros(steps, size)
    draws = PoissonBatchSampler(size, rate, steps, coins(), turns=partial(Turns, bands))
    for step, draw in enumerate(draws):
        table[step, draw] = 1.0
    return table


@pytest.mark.parametrize("bands", [2, 5, 8])
def test_an_example_takes_part_at_most_once_in_b_steps(bands):
    table = _table(bands, 400)
    running = table.cumsum(0)
    within = running[bands - 1 :] - torch.cat([torch.zeros(1, 240), running[:-bands]])
    assert within.max() == 1


def test_in_its_turn_each_example_has_probability_b_q():
    """Within five standard deviations; and a draw has q N examples on average."""
    table = _table(5, 4000)
    assert abs(float(table.sum(1).mean()) - 24) < 5 * math.sqrt(24 / 4000)
    counts = table.sum(0)
    turns, rate = 4000 / 5, 0.5
    chi_square = float(((counts - turns * rate).square() / (turns * rate * (1 - rate))).sum())
    assert abs(chi_square - 240) < 5 * math.sqrt(2 * 240)


def test_groups_are_coins_of_each():
    """Sizes as of 30,000 coins: chi-square of 6 groups; neighbours share a group by chance."""
    groups = Groups(30_000, 6, coins())
    members = [groups.members(number) for number in range(6)]
    assert sorted(torch.cat(members).tolist()) == list(range(30_000))
    sizes = torch.tensor([float(len(m)) for m in members])
    assert float(((sizes - 5000).square() / 5000).sum()) < 40
    of = torch.empty(30_000)
    for number, own in enumerate(members):
        of[own] = number
    together = float((of[1:] == of[:-1]).float().mean())
    assert together == pytest.approx(1 / 6, abs=5 * math.sqrt(5 / 36 / 30_000))


def test_groups_stay_over_rounds_and_differ_between_runs():
    first, second = (Groups(500, 4, coins(seed)) for seed in (0, 1))
    for number in range(4):
        assert torch.equal(first.members(number), first.members(number + 8))
        assert not torch.equal(first.members(number), second.members(number))


def test_an_interrupted_epoch_continues_with_the_next_releases_turn():
    """A loader's workers may have drawn ahead: what they drew was nobody's turn."""
    turns = Turns(5)
    draws = PoissonBatchSampler(300, 0.2, 50, coins(), turns=lambda: turns)
    groups = [set() for _ in range(5)]
    for used, ahead in ((7, 3), (11, 1), (50, 0)):
        whole = iter(draws)
        for _ in range(used):
            groups[turns.releases % 5].update(next(whole))
            turns.releases += 1
        for _ in range(ahead):
            next(whole)
    assert not any(groups[i] & groups[j] for i in range(5) for j in range(i))
