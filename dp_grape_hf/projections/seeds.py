"""Public random numbers, for projections and for stochastic rounding.

Each stream starts from a hash of the run's public seed and of its purpose. So all ranks draw the
same numbers, and a resumed run does too. Secret streams are in ``mechanism.streams``.
"""

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

    The seed is a hash of all four arguments. So it does not depend on the device, the process, or
    the order of the layers, and any rank can draw any block.

    Args:
        projection_seed: the run's public seed, as in the ledger.
        refresh: the number of earlier draws of this projection; 0 for the first draw.
        name: the full name of the parameter that is projected.
        block: the index of the block of rows.
    """
    # The name is last, because only it may contain the separator.
    return _hashed(f"{projection_seed:d}/{refresh:d}/{block:d}/{name}", b"projection")


def projection_generator(
    projection_seed: int, refresh: int, name: str, block: int = 0
) -> torch.Generator:
    """Return the public, reproducible generator of one block of one projection, on the CPU.

    It is a CPU generator on all devices, so that the projection does not depend on the device.
    PyTorch uses the low 32 bits of the seed. If two blocks have these bits in common, they have the
    same rows. This affects neither privacy, because projections are public, nor their expectation.
    """
    return public_generator(projection_seed_for(projection_seed, refresh, name, block))


_public: weakref.WeakSet[torch.Generator] = weakref.WeakSet()


def public_generator(seed: int, device: str | torch.device = "cpu") -> torch.Generator:
    """Return a generator with a public seed; ``is_public`` recognises it while it exists."""
    generator = torch.Generator(device).manual_seed(seed)
    _public.add(generator)
    return generator


def is_public(generator: Any) -> bool:
    """Return whether ``public_generator`` made this generator, maybe as another object."""
    public: Iterable[Any] = _public
    return generator._cdata in {public_one._cdata for public_one in public}


# ---- Stochastic rounding ----


def rounding_generator(
    seed: int, number: int, device: str | torch.device = "cpu"
) -> torch.Generator:
    """Return the public generator of the random numbers of one stochastic rounding.

    The seed depends only on the arguments. So all ranks round their copies of a weight alike, and a
    resumed run rounds like an uninterrupted one. The rounded values are already private, so these
    random numbers need not be secret.

    Args:
        seed: a public seed of the run.
        number: the number of the rounding in the run; no two roundings have the same number.
        device: the device of the weight. Types of devices have different random numbers.
    """
    return public_generator(_hashed(f"{seed:d}/{number:d}", b"rounding"), device)


# Number of bits of float32 that the type does not store.
_DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}


def is_short(weight: torch.Tensor) -> bool:
    """Return whether elements of a weight have fewer than 32 bits, so small updates round off."""
    return weight.dtype.itemsize < 4


def round_at_random(
    value: torch.Tensor,
    dtype: torch.dtype,
    generator: torch.Generator,
    among: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Return float32 values in a shorter type, rounded stochastically without bias.

    A value between two neighbours of the type becomes the upper one with probability proportional
    to its distance from the lower one. Values of the type, NaN and infinity do not change.

    Args:
        value: any shape, float32.
        dtype: ``torch.bfloat16`` or ``torch.float16``.
        generator: the source of the random numbers, on the device of ``value``.
        among: if ``value`` is a part of a block of rows: the number of rows of the block, and the
            index of the first row in ``value``.

    Raises:
        ValueError: for another dtype.
    """
    if dtype not in _DROPPED_BITS:
        raise ValueError(
            f"{dtype=} has no stochastic rounding. Use weights in bfloat16, float16 or float32."
        )
    dropped = _DROPPED_BITS[dtype]
    shape = value.shape if among is None else (among[0], *value.shape[1:])
    drawn = torch.empty(shape, dtype=torch.int32, device=value.device)
    drawn.random_(0, 2**dropped, generator=generator)
    if among is not None:
        drawn = drawn[among[1] : among[1] + len(value)]
    # An addition to the bits increases the magnitude; a carry increases the exponent.
    bits = (value.contiguous().view(torch.int32) + drawn).bitwise_and_(-(2**dropped))
    rounded = bits.view(torch.float32)
    if dtype is torch.float16:  # below 2**-14, float16 values have the distance 2**-24
        equal = (value * 2**24 + drawn / 2**dropped).floor_() * 2**-24
        rounded = torch.where(value.abs() < 2**-14, equal, rounded)
    return torch.where(value.isfinite(), rounded, value).to(dtype)


# ---- In blocks ----


def row_blocks(weight: torch.Tensor, most: int) -> Iterator[Any]:
    """Yield indices of blocks of rows with at most ``most`` elements, or of one row.

    Large weights are drawn or rounded block by block, to limit memory.
    """
    if weight.dim() == 0:
        yield ...
        return
    count = max(1, most // max(1, weight.shape[1:].numel()))
    for start in range(0, len(weight), count):
        yield slice(start, start + count)
