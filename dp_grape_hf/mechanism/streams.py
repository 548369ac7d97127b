"""The secret random streams: of sampling and of noise.

Anyone who knows the noise can subtract it. Anyone who knows which examples were sampled can undo
the amplification by sampling. So the secret streams never start from a seed that a user, a
checkpoint or a log could hold, and they cannot be pickled. The public streams (projections and
rounding) are in ``projections.seeds``.
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
            f"{method}() of a SecretGenerator is not allowed. Anyone who knows its state can "
            "subtract the noise or repeat the sampling. Use a torch.Generator for other purposes."
        )

    return refuse


class SecretGenerator(torch.Generator):
    """A generator whose state stays in this process: it cannot be pickled, copied or read.

    Attributes:
        secure: whether ``add_noise_`` adds secure noise (see ``noise``).

    Guarantee:
        ``pickle``, ``torch.save`` and ``copy.deepcopy`` of the generator, or of an object that
        holds it, raise ``PrivacyError``, so it cannot reach a checkpoint unnoticed. So do all
        methods that would return its state or its seed. A forked process gets fresh entropy,
        because otherwise both processes would draw the same numbers. A forked process can use the
        CPU only.
    """

    secure = False

    def refill(self) -> None:
        """Replace the state with fresh entropy of the operating system."""
        if self.device.type == "cpu":
            self.set_state(_twister_state(os.urandom(4 * _TWISTER_WORDS)))
        else:
            self.manual_seed(int.from_bytes(os.urandom(8), "little"))

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise PrivacyError(
            "a SecretGenerator cannot be pickled or copied. Anyone who has its state can subtract "
            "the noise or repeat the sampling. Leave it out of the files that you save, and create "
            "a new one after loading."
        )

    get_state = _refusing("get_state")
    graphsafe_get_state = _refusing("graphsafe_get_state")
    clone_state = _refusing("clone_state")  # returns a generator of the same numbers
    initial_seed = _refusing("initial_seed")
    seed = _refusing("seed")  # returns the new seed; use ``refill``

    def streams(self, count: int) -> list[torch.Generator]:
        """Return ``count`` independent secret generators, of which this one is the first.

        Calls with the same count return the same generators.
        """
        others: list[SecretGenerator] = vars(self).setdefault("_others", [])
        while len(others) < count - 1:
            others.append(secret_generator(self.device))
        return [self, *others[: count - 1]]


def secret_generator(device: str | torch.device = "cpu") -> SecretGenerator:
    """Return a generator filled with fresh entropy of the operating system.

    Neither ``args.seed`` nor any global generator is read or changed.

    Guarantee:
        On the CPU all 19937 bits of the Mersenne Twister are fresh. Seeding it would keep only 32
        bits, and an attacker could try all of them. On any other device the 64-bit seed is fresh;
        it is the whole key of CUDA's Philox. Noise on such a device adds up at least two streams.
        Neither generator is cryptographic: the guarantee assumes that an attacker cannot compute
        the state from the output.
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


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_refill_after_fork)


def forget_the_seed() -> None:
    """Reseed the global streams of torch, numpy and Python from the entropy of the OS.

    Dropout masks and random token masks come from these streams, in the order of the samples in a
    batch. If one sample is removed, the samples after it get other masks. Only while the streams
    are secret does a sample have no influence on the gradients of others.
    """
    torch.set_rng_state(torch.Generator.get_state(secret_generator()))
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(int.from_bytes(os.urandom(8), "little") >> 1)
    random.seed(os.urandom(32))
    np.random.seed(np.frombuffer(os.urandom(64), dtype=np.uint32))


def noise_generator(device: str | torch.device = "cpu", secure: bool = False) -> SecretGenerator:
    """Return a fresh secret noise stream on ``device``; ``secure`` as in ``SecretGenerator``.

    Guarantee:
        As of ``secret_generator``. The stream differs on every rank, so one rank alone draws the
        noise of a release.
    """
    generator = secret_generator(device)
    generator.secure = secure
    return generator


def shared_sampling_generator() -> SecretGenerator:
    """Return a secret sampling stream on the CPU that is the same on every rank.

    A collective call. If the streams of the ranks differed, their shares would not be parts of one
    Poisson sample.

    Guarantee:
        As of ``secret_generator``. The first rank draws the entropy and sends it to the other ranks
        over the network, unencrypted.
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
    """Return a state (5056 bytes) that holds ``entropy`` and twists before the first number."""
    _require_known_layout()
    words = np.frombuffer(entropy, np.uint32).astype(np.uint64).tobytes()  # 32 bits used of each
    # The zeros after the words say that no normal number is left from an earlier call.
    state = (_HEADER.pack(0, 1, 1, 0) + words).ljust(_STATE_BYTES, b"\0")
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


@cache
def _require_known_layout() -> None:
    current = bytes(torch.Generator().get_state().tolist())  # works with fake tensors too
    _, left, seeded, position = _HEADER.unpack_from(current)
    if len(current) != _STATE_BYTES or (left, seeded, position) != (1, 1, 0):
        raise PrivacyError(
            f"torch {torch.__version__} lays out the state of its CPU generator in an unknown way "
            f"({len(current)=}, {left=}, {seeded=}, {position=}; expected {_STATE_BYTES}, 1, 1, "
            "0), so it cannot be filled with entropy. Use a release of torch this package "
            "supports."
        )


# ---- Known streams, for tests ----


@dataclass(frozen=True)
class Streams:
    """Sampling and noise streams that are not secret, for tests.

    Anyone who knows the streams can subtract the noise. A run with such streams is not private, and
    its ledger says so.
    """

    sampling: torch.Generator
    noise: torch.Generator

    @classmethod
    def seeded(cls, seed: int = 0) -> Streams:
        """Return seeded streams, for a run that a test repeats."""
        sampling, noise = (torch.Generator().manual_seed(seed + i) for i in (0, 1))
        return cls(sampling=sampling, noise=noise)
