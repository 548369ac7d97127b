"""The noise is normal, independent and fresh, at sizes that matter, and secure noise stays silent.

Entropy is fresh in every run. Each check says how often it would raise a false alarm; all of them
together do so in less than one of a million runs. Checks are tried on broken samplers as well.
"""

import math
import os

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.ledger import CARD_NAME
from dp_grape_hf.mechanism import PrivateMechanism, noise_generator
from dp_grape_hf.mechanism.noise import SECURE_DRAWS, add_noise_, grid_of
from dp_grape_hf.mechanism.streams import SecretGenerator
from tests.support.trainers import make_args, make_trainer, no_loss, spy_releases

both = pytest.mark.parametrize("secure", [False, True], ids=["default", "secure"])
secure_is_slow = pytest.mark.parametrize(
    "secure", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["default", "secure"]
)


def noise_of(size, secure, std=1.0):
    value = torch.zeros(size)
    add_noise_([value], std, noise_generator(secure=secure))
    return value.numpy() / std


def check_kolmogorov_smirnov(sample):
    """False alarm: ``2 exp(-2 * 3.1**2)``, 9e-9."""
    distance = scipy.stats.kstest(sample, "norm").statistic
    assert distance * math.sqrt(len(sample)) < 3.1


def check_anderson_darling(sample):
    """Weighs the tails. False alarm: ``sqrt(3) P(chi2_1 > 2 * 16)``, 3e-8, of the known law."""
    ordered, size = np.sort(sample).astype(np.float64), len(sample)
    below, above = scipy.special.log_ndtr(ordered), scipy.special.log_ndtr(-ordered[::-1])
    weights = (2 * np.arange(1, size + 1) - 1) / size
    assert -size - np.sum(weights * (below + above)) < 16


def check_tails(sample, *bounds):
    """Counts what lies beyond each bound. False alarm: 1e-8 a bound and side (Poisson)."""
    for bound in bounds:
        expected = len(sample) * scipy.stats.norm.sf(bound)
        for count in (int(np.sum(sample > bound)), int(np.sum(sample < -bound))):
            assert scipy.stats.poisson.cdf(count, expected) > 1e-8, (bound, count, expected)
            assert scipy.stats.poisson.sf(count - 1, expected) > 1e-8, (bound, count, expected)


def check_moments(sample):
    """Mean and variance within 6 standard errors: false alarm 2e-9 each."""
    size = len(sample)
    assert abs(sample.mean(dtype=np.float64)) < 6 / math.sqrt(size)
    squares = np.square(sample, dtype=np.float64)
    assert abs(squares.mean() - 1) < 6 * math.sqrt(2 / size)


def check_uncorrelated(first, second):
    """The numbers and their squares, within 6 standard errors: false alarm 2e-9 each."""
    size = len(first)
    one, two = first.astype(np.float64), second.astype(np.float64)
    assert abs(np.mean(one * two)) < 6 / math.sqrt(size)
    assert abs(np.mean((one**2 - 1) * (two**2 - 1))) < 6 * 2 / math.sqrt(size)


LAGS = (1, 2, 7, 8, 16, 312, 624, 2**15, 2**17)


def check_no_lag(sample):
    """Lags of torch's pairs (8), blocks (16), of the twister (624) and of our slices."""
    for lag in LAGS:
        check_uncorrelated(sample[:-lag], sample[lag:])


def check_fine(sample):
    """No float32 number occurs 16 times: each has probability below 3.6e-8. False alarm 1e-8."""
    assert np.unique(sample, return_counts=True)[1].max() < 16


@secure_is_slow
def test_a_large_release_is_normal_across_its_coordinates(secure):
    """Tails are counted to 4.5 standard deviations: 2**22 numbers have 14 a side beyond."""
    sample = noise_of(2**22, secure)
    check_moments(sample)
    check_tails(sample, 3.0, 4.0, 4.5, 5.5)
    check_no_lag(sample)
    check_kolmogorov_smirnov(sample[-(2**20) :])
    check_anderson_darling(sample[-(2**20) :])
    if not secure:
        check_fine(sample)


@pytest.mark.slow
def test_five_standard_deviations_are_exceeded_with_the_normal_frequency():
    """2**26 numbers have 19 a side beyond 5: enough to tell that none is missing."""
    sample = np.concatenate([noise_of(2**23, secure=False) for _ in range(8)])
    check_tails(sample, 4.5, 5.0, 5.25, 5.5)
    with pytest.raises(AssertionError):
        check_tails(sample.clip(-5, 5), 5.0)


BROKEN = {
    "of half precision": (lambda x: x.astype(np.float16).astype(np.float32), check_fine),
    "clipped at 4": (lambda x: x.clip(-4, 4), lambda x: check_tails(x, 4.0)),
    "0.5 % too small": (lambda x: x * np.float32(0.995), check_moments),
    "shifted": (lambda x: x + np.float32(0.005), check_moments),
    "uniform": (lambda x: (scipy.special.ndtr(x) - 0.5) * math.sqrt(12), check_kolmogorov_smirnov),
    "heavy in its tails": (lambda x: np.where(abs(x) > 3, 1.2 * x, x), check_anderson_darling),
    "repeated from slice to slice": (lambda x: np.tile(x[: 2**15], 2**7), check_no_lag),
    "smeared over neighbours": (lambda x: x + 0.01 * np.roll(x, 1), check_no_lag),
    "of one radius a pair": (
        lambda x: np.concatenate([x.reshape(-1, 8), -x.reshape(-1, 8)], 1).ravel(),
        check_no_lag,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_sampler_is_found(fault):
    breaking, check = BROKEN[fault]
    sample = noise_of(2**22, secure=False)
    check(sample)
    with pytest.raises(AssertionError):
        check(breaking(sample))


def check_each_coordinate(releases):
    """Kolmogorov-Smirnov for every column. False alarm for all 1024: ``2048 exp(-2 * 3.7**2)``."""
    count = len(releases)
    law = scipy.special.ndtr(np.sort(releases, axis=0).astype(np.float64))
    rank = np.arange(count)[:, None] / count
    distance = np.maximum(law - rank, rank + 1 / count - law).max(axis=0)
    assert (distance * math.sqrt(count)).max() < 3.7  # 2.6e-9


@secure_is_slow
def test_each_coordinate_of_many_releases_is_normal_and_independent(secure):
    generator, size = noise_generator(secure=secure), 1024
    releases = np.empty((2048, size), dtype=np.float32)
    for release in releases:
        values = [torch.zeros(3), torch.zeros(20, 50), torch.zeros(21)]  # as of a model
        add_noise_(values, 1.0, generator)
        release[:] = torch.cat([value.flatten() for value in values]).numpy()
    check_each_coordinate(releases)
    for steps_apart in (1, 2, 10):
        check_uncorrelated(releases[:-steps_apart].ravel(), releases[steps_apart:].ravel())
    products = releases.T.astype(np.float64) @ releases / math.sqrt(len(releases))
    off = products[~np.eye(size, dtype=bool)]
    assert abs(off).max() < 9  # false alarm of half a million pairs, below 1e-9
    stuck = releases.copy()
    stuck[:, 5] = stuck[0, 5]
    with pytest.raises(AssertionError):
        check_each_coordinate(stuck)


@both
def test_streams_of_threads_and_ranks_are_independent(secure, monkeypatch):
    """Each rank has a generator of its own, and each of its threads a share of the numbers."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    shapes = [(3,), (2**18 - 20,), (), (0, 7), (16,), (2**9, 2**9)]  # 2**19 numbers
    shares = []
    for _ in range(2):
        values = [torch.zeros(shape) for shape in shapes]
        add_noise_(values, 1.0, noise_generator(secure=secure))
        rank = torch.cat([value.flatten() for value in values]).numpy()
        check_no_lag(rank)
        shares.extend(rank.reshape(4, -1))
    for i, share in enumerate(shares):
        check_moments(share)
        for other in shares[:i]:
            check_uncorrelated(share, other)


def _untempered(word):
    """The word of a Mersenne Twister's state that gives this output."""
    word ^= word >> 18
    word ^= (word << 15) & 0xEFC60000
    step = word
    for _ in range(4):
        step = word ^ ((step << 7) & 0x9D2C5680)
    word = step & 0xFFFFFFFF
    step = word
    for _ in range(2):
        step = word ^ (step >> 11)
    return step


def _with_largest_numbers(generator):
    """Fills a generator so that its next 624 words have all bits set."""
    state = torch.Generator.get_state(generator).numpy()
    state[8:12] = np.frombuffer(np.int32(624).tobytes(), np.uint8)  # left before the next twist
    words = np.full(624, _untempered(0xFFFFFFFF), np.uint64)
    state[24 : 24 + 8 * 624] = np.frombuffer(words.tobytes(), np.uint8)
    generator.set_state(torch.from_numpy(state))
    return generator


def test_noise_reaches_beyond_what_one_float32_draw_can():
    """Where one draw ends, 5.77, a release would betray what a single coordinate was."""
    value = torch.zeros(32)
    add_noise_([value], 1.0, _with_largest_numbers(torch.Generator()))
    assert value.max() == pytest.approx(math.sqrt(48 * math.log(2)), rel=1e-5)  # 24 bits: 5.768
    for secure, least in ((False, 8.15), (True, 17.0)):
        generator = noise_generator(secure=secure)
        for stream in generator.streams(SECURE_DRAWS):
            _with_largest_numbers(stream)
        value = torch.zeros(32)
        add_noise_([value], 1.0, generator)
        assert value.max() > least


def _guess(start, generator):
    """Which part of the sums close to 0 are multiples of 2**-24."""
    values = torch.full((2**18,), start)
    add_noise_([values], 1.0, generator)
    close = values[values.abs() < 0.125].double().numpy()
    assert len(close) > 10_000
    return float(np.mean(np.rint(close * 2**24) == close * 2**24))


def test_low_bits_reveal_the_sum_only_without_secure_noise():
    """The attack of Mironov (2012), for normals in float32: no search, one look at each sum."""
    plain = torch.Generator().manual_seed(0)
    assert _guess(1.0, plain) == 1.0
    assert _guess(0.0, plain) < 0.2
    for start in (0.0, 1.0, 0.3, 1e-6):
        assert _guess(start, noise_generator(secure=True)) == 1.0


@pytest.mark.parametrize("start", [0.3, -1e-6])
def test_secure_sums_are_grid_multiples_with_the_right_frequencies(start):
    """Whatever was added to. Chi-squared of the cells; false alarm below 1e-8."""
    std, size = 1.5, 2**21
    grid = grid_of(std)
    assert grid == 2**-12
    values = torch.full((size,), start)
    add_noise_([values], std, noise_generator(secure=True))
    cells = values.double().numpy() / grid
    assert np.array_equal(cells, np.rint(cells))
    edges = np.arange(-2000, 2001) + 0.5
    law = np.diff(scipy.special.ndtr((edges * grid - start) / std)) * size
    found = np.histogram(cells, edges)[0]
    statistic = float(np.sum((found - law) ** 2 / law))
    assert scipy.stats.chi2.sf(statistic, len(law)) > 1e-8
    assert scipy.stats.chi2.cdf(statistic, len(law)) > 1e-8


@pytest.mark.parametrize("std", [1e-12, 1e-3, 0.9999, 1.0, 7.3, 1e6])
def test_the_grid_is_a_power_of_two_and_fine(std):
    mantissa, _ = math.frexp(grid_of(std))
    assert mantissa == 0.5
    assert std * 2**-13 < grid_of(std) <= std * 2**-12


def test_a_run_with_secure_noise_releases_multiples_of_the_grid(monkeypatch, tmp_path):
    releases = spy_releases(monkeypatch)
    settings = {"noise_multiplier": 1.3, "compute_loss_func": no_loss}
    for secure in (False, True):
        releases.clear()
        trainer = make_trainer(tmp_path / str(secure), secure_noise=secure, **settings)
        trainer.train()
        assert isinstance(trainer.private_run.mechanism, PrivateMechanism)
        flat = torch.cat([v.flatten() for release in releases for v in release.values()])
        cells = flat.double() * trainer.args.expected_batch_size / grid_of(1.3)
        assert torch.equal(cells, cells.round()) is secure
        std = (flat.double() * trainer.args.expected_batch_size).std()
        assert std == pytest.approx(1.3, rel=6 / math.sqrt(2 * len(flat)))
        assert trainer.ledger.mechanism.noise == ("secure" if secure else None)
        trainer.save_model()
        card = (tmp_path / str(secure) / CARD_NAME).read_text(encoding="utf-8")
        assert ("| Noise | secure, " in card) is secure


def test_secure_noise_is_refused_where_it_protects_nothing(monkeypatch, tmp_path):
    with pytest.raises(PrivacyError, match="secure_noise=True contradicts noise"):
        make_args(tmp_path, secure_noise=True, noise_multiplier=0)
    with pytest.raises(PrivacyError, match=r"secure_noise=True contradicts"):
        make_args(tmp_path, secure_noise=True, method="adam", target_delta=None)
    cls = type(make_args(tmp_path))
    monkeypatch.setattr(cls, "world_size", property(lambda self: 2))
    with pytest.raises(PrivacyError, match="secure_noise=True with 2 processes"):
        make_args(tmp_path, secure_noise=True)


def _in_a_fork(draw):
    """Returns what a child of this process draws."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, draw().numpy().tobytes())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        received = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    return torch.frombuffer(bytearray(received), dtype=torch.float32)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@both
def test_a_fork_draws_other_numbers_than_its_parent(secure):
    """False alarm: two streams agree by chance with probability below 2**-1000."""
    generator = noise_generator(secure=secure)

    def draw():
        values = torch.zeros(64)
        add_noise_([values], 1.0, generator)
        return values

    draw()  # its other streams exist by now
    children = [_in_a_fork(draw), _in_a_fork(draw)]
    drawn = [draw(), *children]
    assert len(torch.cat(drawn).unique()) > 3 * 60
    known = torch.Generator().manual_seed(3)
    coins = [_in_a_fork(lambda: torch.rand(8, generator=known)) for _ in range(2)]
    assert torch.equal(*coins), "a generator without this protection repeats itself"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@both
def test_noise_on_a_gpu_is_normal_and_of_several_keys(secure):
    generator = noise_generator("cuda", secure=secure)
    value = torch.zeros(2**22, device="cuda")
    add_noise_([value], 1.0, generator)
    streams = generator.streams(SECURE_DRAWS if secure else 2)
    assert all(isinstance(stream, SecretGenerator) for stream in streams)
    halves = {torch.Generator.initial_seed(stream) >> 32 for stream in streams}
    assert len(halves) == len(streams)  # all 64 bits are fresh; two agree by chance in 2**32
    sample = value.cpu().numpy()
    check_moments(sample)
    check_tails(sample, 3.0, 4.0, 4.5)
    check_no_lag(sample)
    check_kolmogorov_smirnov(sample)
