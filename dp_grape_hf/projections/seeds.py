"""The public random numbers: of projections, and of rounding at random.

Each stream starts from a hash of the run's public seed and of its purpose, so all ranks draw the
same, and so does a resumed run. Streams that must be secret are in ``mechanism.streams``.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch


def _hashed(key: str, purpose: bytes) -> int:
    digest = hashlib.blake2b(key.encode(), digest_size=8, person=purpose).digest()
    return int.from_bytes(digest, "little") >> 1


def projection_seed_for(projection_seed: int, refresh: int, name: str, block: int = 0) -> int:
    """Return the 63-bit seed of one block of rows of one projection.

    The seed is a hash of all four arguments, so it depends on neither the device, the process
    nor the order in which layers are visited, and any rank can draw any block.

    Args:
        projection_seed: The run's public seed, as the ledger records it.
        refresh: How often this projection was redrawn before; 0 for the first draw.
        name: Full name of the parameter that is projected.
        block: Index of the block of rows.
    """
    # The name comes last: it is the only part that may contain the separator.
    return _hashed(f"{projection_seed:d}/{refresh:d}/{block:d}/{name}", b"projection")


def projection_generator(
    projection_seed: int, refresh: int, name: str, block: int = 0
) -> torch.Generator:
    """Return the public, reproducible generator of one block of one projection, on the CPU.

    It is always a CPU generator, so that the projection is the same whatever device trains.
    PyTorch keeps the low 32 bits of the seed; two blocks that share them share their rows,
    which harms neither privacy (projections are public) nor the expectation of any of them.
    """
    return public_generator(projection_seed_for(projection_seed, refresh, name, block))


_public: weakref.WeakSet[torch.Generator] = weakref.WeakSet()


def public_generator(seed: int, device: str | torch.device = "cpu") -> torch.Generator:
    """Return a generator with a public seed, which ``is_public`` knows while it is alive."""
    generator = torch.Generator(device).manual_seed(seed)
    _public.add(generator)
    return generator


def is_public(generator: Any) -> bool:
    """Return whether a generator is one of ``public_generator``, maybe as another object."""
    public: Iterable[Any] = _public
    return generator._cdata in {known._cdata for known in public}


# ---- Rounding at random ----


def rounding_generator(
    seed: int, number: int, device: str | torch.device = "cpu"
) -> torch.Generator:
    """Return the public generator that the coins of one rounding are drawn from.

    It depends on its arguments alone, so all ranks round their copies of a weight alike, and so
    does a run that is resumed. The rounded numbers are private already: the coins protect nothing.

    Args:
        seed: A public seed of the run.
        number: Which rounding of the run it is; no two may have the same.
        device: Where the weight is. Devices of different types draw different coins.
    """
    return public_generator(_hashed(f"{seed:d}/{number:d}", b"rounding"), device)


# The bits of a float32 number that the type has no place for.
_DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}


def is_short(weight: torch.Tensor) -> bool:
    """Return whether a weight has fewer than 32 bits per entry, so that small updates round off."""
    return weight.dtype.itemsize < 4


def round_at_random(
    value: torch.Tensor,
    dtype: torch.dtype,
    generator: torch.Generator,
    among: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Return float32 numbers in a shorter type, rounded up or down with mean ``value``.

    A number between two neighbours of the type becomes the upper one with probability
    proportional to its distance from the lower one. Numbers that the type has, NaN and infinity
    are kept.

    Args:
        value: Any shape, float32.
        dtype: ``torch.bfloat16`` or ``torch.float16``.
        generator: The source of the coins, on the device of ``value``.
        among: For how many rows coins are drawn, and the first of them that is in ``value``, where
            it has not all.

    Raises:
        ValueError: For another dtype.
    """
    if dtype not in _DROPPED_BITS:
        raise ValueError(
            f"{dtype=} has no rounding at random: weights must be bfloat16, float16 or float32."
        )
    dropped = _DROPPED_BITS[dtype]
    shape = value.shape if among is None else (among[0], *value.shape[1:])
    coins = torch.empty(shape, dtype=torch.int32, device=value.device)
    coins.random_(0, 2**dropped, generator=generator)
    if among is not None:
        coins = coins[among[1] : among[1] + len(value)]
    # To add to the bits is to add to the magnitude; a carry moves on into the exponent.
    bits = (value.contiguous().view(torch.int32) + coins).bitwise_and_(-(2**dropped))
    rounded = bits.view(torch.float32)
    if dtype is torch.float16:  # below 2**-14 its numbers stand at equal distances of 2**-24
        equal = (value * 2**24 + coins / 2**dropped).floor_() * 2**-24
        rounded = torch.where(value.abs() < 2**-14, equal, rounded)
    return torch.where(value.isfinite(), rounded, value).to(dtype)


# ---- In blocks ----


def row_blocks(weight: torch.Tensor, most: int) -> Iterator[Any]:
    """Yield indices of blocks of rows with at most ``most`` numbers, or of one row.

    What is drawn, or rounded, for a large weight is so many numbers at a time.
    """
    if weight.dim() == 0:
        yield ...
        return
    count = max(1, most // max(1, weight.shape[1:].numel()))
    for start in range(0, len(weight), count):
        yield slice(start, start + count)
