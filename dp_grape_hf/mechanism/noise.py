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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import torch

from dp_grape_hf.mechanism.streams import SecretGenerator

SECURE_DRAWS = 4  # 2n of Holohan and Braghin, n = 2
_GRID_BITS = 12  # of the noise's standard deviation that are kept
_AT_ONCE = {"cpu": 2**15, "other": 2**22}  # numbers; two float64 buffers of that size

# ---- Plain ----


def add_noise_at_once_(
    parts: list[torch.Tensor],
    std: float,
    streams: Sequence[torch.Generator],
    divisor: float,
    at_once: int,
) -> None:
    """Draws for many values in one call: it is the number of calls that takes time."""
    total, share = sum(len(part) for part in parts), std / math.sqrt(len(streams))
    buffer = torch.empty(min(total, at_once), dtype=torch.float32, device=streams[0].device)
    while parts:
        count, size = 0, 0
        while count < len(parts) and (count == 0 or size + len(parts[count]) <= at_once):
            size += len(parts[count])
            count += 1
        some, parts = parts[:count], parts[count:]
        for stream in streams:  # into one buffer, one after the other
            noise = buffer[:size].normal_(0, share, generator=stream)
            torch._foreach_add_(some, list(noise.split([len(part) for part in some])))
        torch._foreach_div_(some, divisor)


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
    grid, share = grid_of(std), std / math.sqrt(len(streams))
    size = _AT_ONCE["cpu" if streams[0].device.type == "cpu" else "other"]
    for part in chain.from_iterable(part.split(size) for part in parts):
        total = part.double()
        noise = torch.empty_like(total)
        for stream in streams:
            total.add_(noise.normal_(0, share, generator=stream))
        part.copy_(total.div_(grid).round_().mul_(grid)).div_(divisor)


# ---- Either ----

_DRAWS = 2  # independent ones that add up to a number of noise; see ``add_noise_``
_SLICE = 2**15  # numbers of one operation on a CPU: torch starts no threads for so few
_LEAST_PER_THREAD = 2**17  # starting a thread for fewer takes longer than it saves
_DRAWN_BY_A_THREAD = 2**17  # in one call; after fewer, threads mostly wait for one another
NOISE_SLICE = 2**24
"""Numbers that get noise at once on another device than a CPU."""


def add_noise_(
    values: Sequence[torch.Tensor],
    std: float,
    generator: torch.Generator,
    divisor: float = 1.0,
    at_once: int | None = None,
) -> None:
    """Makes each value ``(value + N(0, std^2)) / divisor`` in place.

    The noise of a ``SecretGenerator`` is the sum of two draws from streams of their own, each of
    variance ``std^2 / 2``. PyTorch's float32 normals end at 5.77 standard deviations on a CPU, as
    their radius is of a uniform number with 24 bits: what lies beyond would betray a gradient along
    one coordinate with probability 9e-7 a release at ``std = C``. Two of them reach 8.16, where it
    is 4e-13. On a GPU each of the two has a 64-bit key, so that the noise has 128. If the
    generator is ``secure``, there are four draws; the module's docstring says how they add up.

    On a CPU, a ``SecretGenerator`` lends streams of their own to every thread of torch. Any other
    generator, a test's, serves one thread with one draw: the noise is then what ``normal_`` draws
    for one value after the other.

    Args:
        values: Float32 tensors, contiguous, all on the device of the generator.
        std: Of the noise, before the division; 0 draws none.
        generator: The noise stream.
        divisor: A constant.
        at_once: How many numbers get noise at once; None for as many as suit the device.

    Guarantee:
        No two numbers share noise, and an error in any thread is raised here.
    """
    if std == 0:
        torch._foreach_div_(list(values), divisor)
        return
    cpu = generator.device.type == "cpu"
    at_once = at_once or (_SLICE if cpu else NOISE_SLICE)
    parts = [part for v in values for part in v.view(-1).split(at_once) if len(part)]
    if isinstance(generator, SecretGenerator):
        _add_secret_noise_(parts, std, generator, divisor)
    elif cpu:
        for part in parts:  # which stays in the cache from the draw to the division
            part.add_(torch.empty_like(part).normal_(0, std, generator=generator)).div_(divisor)
    else:
        add_noise_at_once_(parts, std, [generator], divisor, NOISE_SLICE)


def _add_secret_noise_(
    parts: list[torch.Tensor], std: float, generator: SecretGenerator, divisor: float
) -> None:
    """Spreads the parts over threads, each of which has streams of its own."""
    cpu, total = generator.device.type == "cpu", sum(len(part) for part in parts)
    threads = max(1, min(torch.get_num_threads(), total // _LEAST_PER_THREAD)) if cpu else 1
    shares: list[list[torch.Tensor]] = [[] for _ in range(threads)]
    position = 0
    for part in parts:
        shares[position * threads // max(1, total)].append(part)
        position += len(part)
    at_once = _DRAWN_BY_A_THREAD if cpu else NOISE_SLICE
    draws = SECURE_DRAWS if generator.secure else _DRAWS
    streams = generator.streams(threads * draws)

    def add(i: int) -> None:
        own = streams[i * draws : (i + 1) * draws]
        if generator.secure:
            add_secure_noise_(shares[i], std, own, divisor)
        else:
            add_noise_at_once_(shares[i], std, own, divisor, at_once)

    if threads == 1:
        add(0)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(add, range(threads)))  # raises what a thread raised
