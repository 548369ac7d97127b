import copy
import io
import os
import pickle
import random
import struct
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dp_grape_hf import randomness
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.randomness import (
    noise_generator,
    projection_generator,
    projection_seed_for,
    sampling_generator,
    secret_generator,
    shared_sampling_generator,
)

# ---- The public stream ----


def test_projection_seed_is_pinned_because_old_ledgers_must_replay() -> None:
    assert projection_seed_for(0, 0, "layer.weight") == 1595975799149185211
    assert projection_seed_for(17, 3, "a.b", block=2) == 6439672009347108744


def test_projection_seed_depends_on_every_argument_and_fits_63_bits() -> None:
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


def test_projection_generator_replays_and_ignores_the_global_generator() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = torch.randn(50, generator=projection_generator(0, 4, "w"))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(first, torch.randn(50, generator=projection_generator(0, 4, "w")))
    assert not torch.equal(first, torch.randn(50, generator=projection_generator(0, 5, "w")))
    assert projection_generator(0, 4, "w").device.type == "cpu"


# ---- The secret streams ----


def test_secret_generators_differ_whatever_the_global_seed() -> None:
    """False alarm: two generators agree by chance with probability below 2**-1000."""
    draws = []
    for make in (secret_generator, sampling_generator, noise_generator) * 2:
        torch.manual_seed(0)
        draws.append(torch.rand(64, dtype=torch.float64, generator=make()))
    for i, draw in enumerate(draws):
        assert not any(torch.equal(draw, other) for other in draws[:i])


def test_secret_generator_leaves_every_global_generator_alone() -> None:
    torch.manual_seed(3)
    random.seed(3)
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    torch.randn(100, generator=secret_generator())
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state


def _words(generator: torch.Generator) -> tuple[int, ...]:
    return struct.unpack_from("<624Q", generator.get_state().numpy().tobytes(), 24)


def _steps_of_the_seeding_rule(words: tuple[int, ...]) -> int:
    """How many words follow from their predecessor, as all do after any 32-bit seed."""
    return sum(
        words[j] == (1812433253 * (words[j - 1] ^ (words[j - 1] >> 30)) + j) % 2**32
        for j in range(1, 624)
    )


def test_no_32_bit_seed_reaches_a_secret_state() -> None:
    """False alarm: three words of 623 follow the seeding rule by chance, below 1e-20."""
    assert _steps_of_the_seeding_rule(_words(torch.Generator().manual_seed(7))) == 623
    assert _steps_of_the_seeding_rule(_words(secret_generator())) < 3


def test_every_bit_of_entropy_enters_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    entropy = random.Random(0).randbytes(4 * 624)
    monkeypatch.setattr(os, "urandom", lambda size: entropy[:size])
    generator = secret_generator()
    assert struct.pack("<624I", *_words(generator)) == entropy
    assert generator.initial_seed() == 0


def test_the_first_numbers_are_twisted_and_tempered_entropy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python's own Mersenne Twister, started from the same words, gives the same numbers."""
    entropy = random.Random(1).randbytes(4 * 624)
    monkeypatch.setattr(os, "urandom", lambda size: entropy[:size])
    drawn = torch.rand(1000, dtype=torch.float64, generator=secret_generator())
    python = random.Random()
    python.setstate((3, (*struct.unpack("<624I", entropy), 624), None))
    pairs = [(python.getrandbits(32), python.getrandbits(32)) for _ in range(1000)]
    assert drawn.tolist() == [(high * 2**32 + low) % 2**53 / 2**53 for high, low in pairs]


def test_numbers_of_a_secret_generator_follow_their_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kolmogorov-Smirnov at 100,000 numbers; false alarm below 1e-7, entropy fixed."""
    monkeypatch.setattr(os, "urandom", random.Random(2).randbytes)
    generator, size = secret_generator(), 100_000
    rank = torch.arange(1, size + 1, dtype=torch.float64) / size
    uniform = torch.rand(size, dtype=torch.float64, generator=generator).sort().values
    normal = torch.randn(size, dtype=torch.float64, generator=generator).sort().values
    bound = 2.9 / size**0.5  # P(exceeded) = 2 exp(-2 * 2.9**2) < 1e-7
    assert (uniform - rank).abs().max() < bound
    assert (torch.special.ndtr(normal) - rank).abs().max() < bound


def test_an_unknown_state_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(randomness, "_STATE_BYTES", 16)
    with pytest.raises(PrivacyError, match=r"len\(current\)=5056"):
        secret_generator()


def test_secret_generators_cannot_be_saved_or_copied() -> None:
    for save in (pickle.dumps, copy.deepcopy, copy.copy):
        with pytest.raises(PrivacyError, match="cannot be pickled"):
            save(noise_generator())
    with pytest.raises(PrivacyError, match="cannot be pickled"):
        copy.deepcopy({"holder": [noise_generator()]})
    with pytest.raises(PrivacyError, match="cannot be pickled"):
        torch.save(sampling_generator(), io.BytesIO())


def test_shared_generator_is_local_without_a_process_group() -> None:
    """False alarm: two generators agree by chance with probability below 2**-1000."""
    first, second = shared_sampling_generator(), shared_sampling_generator()
    assert not torch.equal(first.get_state(), second.get_state())


def _draw_on_rank(rank: int, folder: str) -> None:
    torch.manual_seed(rank)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    draws = [torch.rand(100, generator=shared_sampling_generator()) for _ in range(2)]
    draws.append(torch.rand(100, generator=shared_sampling_generator(dist.new_group([0, 1]))))
    draws.append(torch.rand(100, generator=noise_generator()))
    torch.save(draws, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_ranks_share_the_sampling_coins_and_nothing_else(tmp_path: Path) -> None:
    """False alarm: two generators agree by chance with probability below 2**-1000."""
    mp.spawn(_draw_on_rank, (str(tmp_path),), nprocs=2)
    zero, one = torch.load(tmp_path / "0.pt"), torch.load(tmp_path / "1.pt")
    for i in range(3):
        assert torch.equal(zero[i], one[i])
    assert not torch.equal(zero[0], zero[1])
    assert not torch.equal(zero[3], one[3])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_secret_generators_on_a_gpu_hold_64_fresh_bits() -> None:
    """False alarm: the high halves of two seeds agree by chance with probability 2**-32."""
    first, second = noise_generator("cuda"), noise_generator("cuda")
    assert first.device.type == "cuda"
    assert first.initial_seed() >> 32 != second.initial_seed() >> 32
    with pytest.raises(PrivacyError):
        pickle.dumps(first)
