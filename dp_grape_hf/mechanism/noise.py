"""Adds Gaussian noise to float32 numbers in place: plainly, or so that its low bits tell nothing.

A sampler of floating-point normals reaches some numbers and not their neighbours, and which ones
a sum reaches depends on what the noise was added to. Whoever sees all bits of the sum can rule
values out, whatever epsilon is: Mironov (2012) for Laplace noise, Jin et al. (2022, "Are we there
yet?") for Gaussian noise and DP-SGD. In float32 the attack takes no search: close to 0, a sum of 1
and a normal is a multiple of ``2**-24``, and a normal alone need not be.

Secure noise does two things, of which each is a defence known by itself:

* The noise is the sum of four independent draws in float64, halved: four numbers of variance 1
  add up to one of variance 4 (Holohan and Braghin 2021, "Secure random sampling in differential
  privacy", with n = 2: to search the draws that explain an output takes ``2**(53 (2n - 1))``).
* The sum is formed in float64 and rounded to a multiple of a public power of two, about
  ``2**-12`` of the noise's standard deviation. That is post-processing of a mechanism that is as
  fine as float64, and all values release multiples of the same number: the bits below it, which
  the attack reads, are gone. The rounding is a part in ``10**8`` of the noise's variance.

Not covered: the generators are statistical, not cryptographic; the clipped sum is itself formed in
floating point, so the sensitivity is C up to its rounding (Casacuberta et al. 2022); nobody may
watch the time that a step takes.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

SECURE_DRAWS = 4  # 2n of Holohan and Braghin, n = 2
_GRID_BITS = 12  # of the noise's standard deviation that are kept
_AT_ONCE = {"cpu": 2**15, "other": 2**22}  # numbers; two float64 buffers of that size

# ---- Plain ----


def add_noise_in_slices_(
    parts: list[torch.Tensor], std: float, generator: torch.Generator, divisor: float
) -> None:
    """Works on slices that stay in the cache from the draw to the division."""
    for part in parts:
        if std:
            part.add_(torch.empty_like(part).normal_(0, std, generator=generator))
        part.div_(divisor)


def add_noise_at_once_(
    parts: list[torch.Tensor],
    std: float,
    streams: Sequence[torch.Generator],
    divisor: float,
    at_once: int,
) -> None:
    """Draws for many values in one call: it is the number of calls that takes time."""
    total, share = sum(len(part) for part in parts), std / math.sqrt(len(streams))
    size = min(total, at_once) if std else 0
    buffer = torch.empty(size, dtype=torch.float32, device=streams[0].device)
    while parts:
        count, size = 0, 0
        while count < len(parts) and (count == 0 or size + len(parts[count]) <= at_once):
            size += len(parts[count])
            count += 1
        some, parts = parts[:count], parts[count:]
        for stream in streams if std else ():  # into one buffer, one after the other
            noise = buffer[:size].normal_(0, share, generator=stream)
            torch._foreach_add_(some, list(noise.split([len(part) for part in some])))
        torch._foreach_div_(some, divisor)


def run_in_threads(work: Sequence[Callable[[], None]]) -> None:
    """Runs each function in a thread of its own, the first in this one."""
    if len(work) == 1:
        work[0]()
        return
    with ThreadPoolExecutor(len(work) - 1) as pool:
        running = [pool.submit(one) for one in work[1:]]
        work[0]()
    for future in running:
        future.result()  # raises what the thread raised


# ---- Secure ----


def grid_of(std: float) -> float:
    """Returns what sums with noise of that standard deviation are multiples of, a power of two.

    >>> grid_of(1.0) == grid_of(1.5) == 2**-12
    True
    """
    return math.ldexp(1.0, math.frexp(std)[1] - 1 - _GRID_BITS)


def add_secure_noise_(
    parts: Sequence[torch.Tensor],
    std: float,
    streams: Sequence[torch.Generator],
    divisor: float = 1.0,
) -> None:
    """Makes each part ``(part + N(0, std^2)) / divisor`` in place, by the module's rules.

    Args:
        parts: Float32 tensors of one dimension, on the device of the streams.
        std: Of the noise, before the division; positive.
        streams: ``SECURE_DRAWS`` independent generators.
        divisor: A constant.

    Guarantee:
        Before the division every number is a multiple of ``grid_of(std)``, rounded to float32.
        What is added to it before or after must be public: a part that another process adds
        later would show its own low bits.
    """
    if len(streams) != SECURE_DRAWS:
        raise ValueError(
            f"{len(streams)=} generators were given; secure noise takes {SECURE_DRAWS}."
        )
    grid, share = grid_of(std), std / math.sqrt(len(streams))
    for part in _small(parts):
        total = part.double()
        noise = torch.empty_like(total)
        for stream in streams:
            total.add_(noise.normal_(0, share, generator=stream))
        part.copy_(total.div_(grid).round_().mul_(grid)).div_(divisor)


def _small(parts: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    for part in parts:
        yield from part.split(_AT_ONCE["cpu" if part.device.type == "cpu" else "other"])
