"""The secret random streams, of sampling coins and of noise.

Whoever knows the noise can subtract it, and whoever knows the sampling coins voids the
amplification by sampling. So the secret streams never start from a seed that a user, a
checkpoint or a log could hold, and they refuse to be pickled. What is public, projections and
rounding, has its streams in ``projections.seeds``.
"""

from __future__ import annotations

import os
import random
import struct
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NoReturn

import numpy as np
import torch

from dp_grape_hf.distributed import from_first
from dp_grape_hf.errors import PrivacyError


def _refusing(method: str) -> Callable[..., NoReturn]:
    def refuse(self: torch.Generator) -> NoReturn:
        raise PrivacyError(
            f"{method}() of a SecretGenerator is refused: whoever knows its state can subtract the "
            "noise or replay the sampling. For a stream of your own make a torch.Generator."
        )

    return refuse


class SecretGenerator(torch.Generator):
    """A generator whose state must stay in this process: it is not pickled, copied or told.

    Attributes:
        secure: whether ``add_noise_`` adds what ``noise`` calls secure.

    Guarantee:
        ``pickle``, ``torch.save`` and ``copy.deepcopy`` of it, or of anything that holds it,
        raise ``PrivacyError``, so it cannot reach a checkpoint unnoticed, and so do all methods
        that would return its state, or the seed that is the state on another device than the CPU.
        A fork of the process gets fresh entropy, or both would draw the same numbers; in a fork no
        other device than the CPU can be used.
    """

    secure = False

    def refill(self) -> None:
        """Replaces the state by fresh entropy of the operating system."""
        if self.device.type == "cpu":
            self.set_state(_twister_state(os.urandom(4 * _TWISTER_WORDS)))
        else:
            self.manual_seed(int.from_bytes(os.urandom(8), "little"))

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise PrivacyError(
            "a SecretGenerator cannot be pickled or copied: whoever holds its state can subtract "
            "the noise or replay the sampling. Leave it out of what you save, and create a new "
            "one after loading."
        )

    get_state = _refusing("get_state")
    graphsafe_get_state = _refusing("graphsafe_get_state")
    clone_state = _refusing("clone_state")  # a twin, which draws the same numbers
    initial_seed = _refusing("initial_seed")
    seed = _refusing("seed")  # returns the new one; ``refill`` does not

    def streams(self, count: int) -> list[torch.Generator]:
        """Returns this generator and others, equally fresh and secret: as many as are asked for.

        The others are made once; calls with the same count return the same generators.
        """
        known: list[SecretGenerator] = vars(self).setdefault("_others", [])
        while len(known) < count - 1:
            known.append(secret_generator(self.device))
        return [self, *known[: count - 1]]


def secret_generator(device: str | torch.device = "cpu") -> SecretGenerator:
    """Returns a generator filled with fresh entropy of the operating system.

    Neither ``args.seed`` nor any global generator is read or changed.

    Guarantee:
        On the CPU all 19937 bits of the Mersenne Twister are fresh; seeding it would keep only
        32 bits, which can be tried one by one. On any other device the 64-bit seed is fresh,
        which is the whole key of CUDA's Philox: noise there adds up two of them or more. Both are
        statistical generators, not cryptographic ones: the guarantee assumes that nobody inverts
        them from their output.
    """
    generator = SecretGenerator(device=device)
    generator.refill()
    _secret.add(generator)
    return generator


_secret: weakref.WeakSet[SecretGenerator] = weakref.WeakSet()


def _refill_after_fork() -> None:
    for generator in list(_secret):
        if generator.device.type == "cpu":
            generator.refill()


if hasattr(os, "register_at_fork"):  # there are no forks on Windows
    os.register_at_fork(after_in_child=_refill_after_fork)


def forget_the_seed() -> None:
    """Reseeds the global streams of torch, numpy and Python from OS entropy.

    Dropout masks and the coins of a collator that masks tokens come from these streams, in the
    order in which samples stand in a batch. Whoever knows them sees the masks of all samples move
    when one sample is taken out; only as long as they are secret does a sample have no influence
    on the gradients of the others.
    """
    torch.set_rng_state(torch.Generator.get_state(secret_generator()))
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(int.from_bytes(os.urandom(8), "little") >> 1)
    random.seed(os.urandom(32))
    np.random.seed(np.frombuffer(os.urandom(64), dtype=np.uint32))


def noise_generator(device: str | torch.device = "cpu", secure: bool = False) -> SecretGenerator:
    """Returns a fresh secret stream of noise on ``device``; ``secure`` as in ``noise``.

    Guarantee:
        That of ``secret_generator``. It differs on every rank, so the noise of a release is
        drawn on one rank only.
    """
    generator = secret_generator(device)
    generator.secure = secure
    return generator


def shared_sampling_generator() -> SecretGenerator:
    """Returns a secret stream of sampling coins that is the same on every rank, on the CPU.

    A collective call: every rank must make it, as coins that differ between ranks are not one
    Poisson draw.

    Guarantee:
        That of ``secret_generator``. The entropy is the first rank's, and crosses the network
        between ranks, unencrypted.
    """
    generator = secret_generator()
    generator.set_state(_twister_state(from_first(lambda: os.urandom(4 * _TWISTER_WORDS))))
    return generator


# ---- Layout of PyTorch's CPU generator state ----

_TWISTER_WORDS = 624
# In order: seed (8 bytes), numbers left before the next twist (4), seeded flag (4), position (8).
_HEADER = struct.Struct("<QiiQ")
_STATE_BYTES = 5056


def _twister_state(entropy: bytes) -> torch.Tensor:
    """Returns the state (5056 bytes) that holds ``entropy`` and twists before its first number."""
    _require_known_layout()
    words = np.frombuffer(entropy, np.uint32).astype(np.uint64).tobytes()  # 32 bits used of each
    # Zeros after the words: no normal number is left over from an earlier call.
    state = (_HEADER.pack(0, 1, 1, 0) + words).ljust(_STATE_BYTES, b"\0")
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


@cache
def _require_known_layout() -> None:
    current = bytes(torch.Generator().get_state().tolist())  # which works on fake tensors too
    _, left, seeded, position = _HEADER.unpack_from(current)
    if len(current) != _STATE_BYTES or (left, seeded, position) != (1, 1, 0):
        raise PrivacyError(
            f"torch {torch.__version__} lays out the state of its CPU generator in an unknown way "
            f"({len(current)=}, {left=}, {seeded=}, {position=}; expected {_STATE_BYTES}, 1, 1, "
            "0), so it cannot be filled with entropy. Use a release of torch this package "
            "supports."
        )


# ---- Known, for tests ----


@dataclass(frozen=True)
class Streams:
    """The streams of a run that are known to somebody, who can subtract its noise.

    A run that has them is not private, and its ledger says so.
    """

    sampling: torch.Generator
    noise: torch.Generator

    @classmethod
    def known(cls, seed: int = 0) -> Streams:
        """Returns streams of coins and noise that a test can repeat."""
        coins, noise = (torch.Generator().manual_seed(seed + i) for i in (0, 1))
        return cls(sampling=coins, noise=noise)
