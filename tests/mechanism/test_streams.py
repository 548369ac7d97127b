import copy
import io
import os
import pickle
import random
import struct

import pytest
import torch
from torch.utils.data import DataLoader

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.mechanism import (
    noise_generator,
    secret_generator,
    shared_sampling_generator,
    streams as streams_module,
)
from dp_grape_hf.mechanism.noise import add_noise_
from dp_grape_hf.projections import round_at_random
from dp_grape_hf.projections.seeds import projection_seed_for


def test_projection_seed_depends_on_every_argument_and_fits_63_bits():
    keys = [
        (seed, refresh, name, block)
        for seed in (0, 1, 11, 2**40)
        for refresh in (0, 1, 11)
        for name in ("a", "b", "1/a", "a/1")
        for block in (0, 1, 11)
    ]
    seeds = {projection_seed_for(*key) for key in keys}
    assert len(seeds) == len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)


INF, NAN = float("inf"), float("nan")
BF16, FP16 = torch.bfloat16, torch.float16


def rounded(value, dtype, count=1, seed=0):
    """Returns ``count`` roundings of one number, as float64."""
    generator = torch.Generator().manual_seed(seed)
    return round_at_random(torch.full((count,), value), dtype, generator).double()


@pytest.mark.parametrize(
    ("value", "dtype", "low", "high"),
    [
        (1 + 2**-9, BF16, 1.0, 1 + 2**-7),
        (-1 - 2**-9, BF16, -1 - 2**-7, -1.0),
        (2 - 2**-10, BF16, 2 - 2**-7, 2.0),  # the carry changes the exponent
        (-3 * 2.0**-130, BF16, -3 * 2.0**-130, -3 * 2.0**-130),  # subnormal, but bfloat16 has it
        (2.0**-135, BF16, 0.0, 2.0**-133),  # below the smallest bfloat16
        (1 + 2**-12, FP16, 1.0, 1 + 2**-10),
        (-1 - 2**-12, FP16, -1 - 2**-10, -1.0),
        (2**-13 * (2 - 2**-13), FP16, 2**-13 * (2 - 2**-10), 2**-12),
        (3.25 * 2**-24, FP16, 3 * 2**-24, 4 * 2**-24),  # subnormal float16
        (-(2**-26), FP16, -(2**-24), 0.0),
        (2**-14 - 2**-26, FP16, 2**-14 - 2**-24, 2**-14),
    ],
)
def test_stochastic_rounding_is_unbiased_and_yields_both_neighbours(value, dtype, low, high):
    """Seeded. False alarm for fresh coins: 2e-9 for each case, by Hoeffding's inequality."""
    count = 10_000
    found = rounded(value, dtype, count)
    assert set(found.unique().tolist()) == {low, high}
    assert abs(found.mean().item() - value) <= 3.2 * (high - low) / count**0.5


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_numbers_that_the_type_has_and_no_numbers_are_kept(dtype):
    largest, tiny = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    for value in (0.0, 1.0, -1.5, largest, -largest, tiny, -tiny, INF, -INF):
        assert set(rounded(value, dtype, 1000).tolist()) == {value}
    assert rounded(NAN, dtype, 1000).isnan().all()
    patterns = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7FC00000, -1, -(2**23) + 1])  # all NaN
    value = patterns.to(torch.int32).view(torch.float32).repeat(1000)
    assert value.isnan().all()
    assert round_at_random(value, dtype, torch.Generator()).isnan().all()


def test_rounding_keeps_shape_and_input_and_spends_no_other_generator():
    value = torch.randn(4, 6).T
    before, state = value.clone(), torch.get_rng_state()
    result = round_at_random(value, BF16, torch.Generator().manual_seed(0))
    assert (result.shape, result.dtype) == (value.shape, BF16)
    torch.testing.assert_close(result.float(), value, rtol=2**-7, atol=0)
    assert torch.equal(value, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert round_at_random(torch.zeros(()), BF16, torch.Generator()).shape == ()
    assert round_at_random(torch.zeros(0, 3), BF16, torch.Generator()).shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float8_e4m3fn], ids=str)
def test_types_without_rounding_at_random_are_refused(dtype):
    with pytest.raises(ValueError, match=f"dtype={dtype}"):
        round_at_random(torch.zeros(3), dtype, torch.Generator())


def test_secret_generators_differ_whatever_the_global_seed():
    """False alarm: two generators agree by chance with probability below 2**-1000."""
    draws = []
    for make in (secret_generator, shared_sampling_generator, noise_generator) * 2:
        torch.manual_seed(0)
        draws.append(torch.rand(64, dtype=torch.float64, generator=make()))
    for i, draw in enumerate(draws):
        assert not any(torch.equal(draw, other) for other in draws[:i])


def test_secret_generator_leaves_every_global_generator_alone():
    torch.manual_seed(3)
    random.seed(3)
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    torch.randn(100, generator=secret_generator())
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state


def _words(generator):
    return struct.unpack_from("<624Q", torch.Generator.get_state(generator).numpy().tobytes(), 24)


def _steps_of_the_seeding_rule(words):
    """How many words follow from their predecessor, as all do after any 32-bit seed."""
    return sum(
        words[j] == (1812433253 * (words[j - 1] ^ (words[j - 1] >> 30)) + j) % 2**32
        for j in range(1, 624)
    )


def test_ranks_share_the_entropy_of_the_first_alone(monkeypatch):
    entropy = random.Random(0).randbytes(4 * 624)
    monkeypatch.setattr(streams_module, "from_first", lambda make: entropy)
    assert struct.pack("<624I", *_words(shared_sampling_generator())) == entropy


def test_the_first_numbers_are_twisted_and_tempered_entropy(monkeypatch):
    """Python's own Mersenne Twister, started from the same words, gives the same numbers."""
    entropy = random.Random(1).randbytes(4 * 624)
    monkeypatch.setattr(os, "urandom", lambda size: entropy[:size])
    generator = secret_generator()
    drawn = torch.rand(1000, dtype=torch.float64, generator=generator)
    python = random.Random()
    python.setstate((3, (*struct.unpack("<624I", entropy), 624), None))
    pairs = [(python.getrandbits(32), python.getrandbits(32)) for _ in range(1000)]
    assert drawn.tolist() == [(high * 2**32 + low) % 2**53 / 2**53 for high, low in pairs]
    assert torch.Generator.initial_seed(generator) == 0


def test_an_unknown_state_layout_is_refused(monkeypatch):
    streams_module._require_known_layout.cache_clear()
    monkeypatch.setattr(streams_module, "_STATE_BYTES", 16)
    with pytest.raises(PrivacyError, match=r"len\(current\)=5056"):
        secret_generator()


def test_secret_generators_cannot_be_saved_or_copied():
    for save in (pickle.dumps, copy.deepcopy, copy.copy):
        with pytest.raises(PrivacyError, match="cannot be pickled"):
            save(noise_generator())
    with pytest.raises(PrivacyError, match="cannot be pickled"):
        copy.deepcopy({"holder": [noise_generator()]})
    with pytest.raises(PrivacyError, match="cannot be pickled"):
        torch.save(shared_sampling_generator(), io.BytesIO())


HANDS_OUT_THE_STATE = ["clone_state", "get_state", "graphsafe_get_state", "initial_seed", "seed"]


@pytest.mark.parametrize("name", HANDS_OUT_THE_STATE)
def test_a_secret_generator_does_not_hand_out_its_state(name):
    generator = noise_generator()
    before = torch.Generator.get_state(generator)
    with pytest.raises(PrivacyError, match=rf"^{name}\(\) of a SecretGenerator"):
        getattr(generator, name)()
    assert torch.equal(torch.Generator.get_state(generator), before)


def test_torch_has_no_other_way_to_ask_for_the_state():
    known = {"device", "get_offset", "set_offset"}  # how many numbers were drawn is public
    known |= {"manual_seed", "set_state", "graphsafe_set_state"}  # these take one
    found = {name for name in vars(torch.Generator) if not name.startswith("_")}
    assert found <= known | set(HANDS_OUT_THE_STATE)


def test_loaders_and_distributions_never_read_a_secret_generators_state():
    generator = secret_generator()
    data = list(range(8))
    loader = DataLoader(data, batch_size=2, shuffle=True, generator=generator, num_workers=1)
    assert sorted(x for batch in loader for x in batch.tolist()) == data
    torch.zeros(300).normal_(generator=generator)
    torch.randperm(8, generator=generator)
    torch.bernoulli(torch.full((8,), 0.5), generator=generator)


SHAPES = [(3,), (200_000,), (40, 50), (), (0, 7), (500, 1000), (17,), (70_001,)]


def test_plain_generators_draw_noise_sequentially_whatever_the_thread_count(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    values = [torch.randn(shape) for shape in SHAPES]
    generator = torch.Generator().manual_seed(4)
    expected = [
        (value + torch.empty_like(value).normal_(0, 0.5, generator=generator)) / 7
        for value in values
    ]
    found = [value.clone() for value in values]
    add_noise_(found, 0.5, torch.Generator().manual_seed(4), divisor=7)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_each_stream_of_a_secret_generator_is_fresh_and_kept():
    """False alarm: three words of 623 follow the seeding rule by chance, below 1e-20."""
    assert _steps_of_the_seeding_rule(_words(torch.Generator().manual_seed(7))) == 623
    generator = secret_generator()
    streams = generator.streams(3)
    assert streams[0] is generator
    assert all(a is b for a, b in zip(streams, generator.streams(3), strict=True))
    assert [generator.streams(1)[0] is generator, len(generator.streams(2))] == [True, 2]
    draws = [torch.rand(64, generator=s) for s in (*streams, *secret_generator().streams(3))]
    assert all(not torch.equal(a, b) for i, a in enumerate(draws) for b in draws[i + 1 :])
    for stream in streams:
        assert _steps_of_the_seeding_rule(_words(stream)) < 3
        with pytest.raises(PrivacyError, match="cannot be pickled"):
            pickle.dumps(stream)


def test_a_thread_that_fails_fails_the_release(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    generator = secret_generator()
    monkeypatch.setattr(type(generator), "streams", lambda self, count: [self, self, self, "none"])
    with pytest.raises(TypeError, match="not str"):
        add_noise_([torch.zeros(600_000)], 1.0, generator)


def test_a_value_without_numbers_gets_no_noise():
    values = [torch.zeros(5), torch.zeros(0), torch.zeros(0, 3)]
    add_noise_(values, 1.0, secret_generator())
    assert values[0].abs().min() > 0
    add_noise_([torch.zeros(0)], 1.0, secret_generator())
