"""Gaussian noise for float32 tensors, in place: plain, or secure against attacks on the low bits.

A sampler of floating-point normals cannot return every float. The floats that a noisy sum can take
depend on the value that the noise was added to. So an observer of all bits of the sum can exclude
values, whatever epsilon is: Mironov (2012) for Laplace noise, Jin et al. (2022, "Are we there
yet?") for Gaussian noise and DP-SGD. For instance, close to 0 the float32 sum of 1 and a normal is
a multiple of ``2**-24``, and a normal alone need not be.

Secure noise combines two published defences:

* The noise is the sum of four independent draws in float64, halved (Holohan and Braghin 2021,
  "Secure random sampling in differential privacy", with n = 2). A search for draws that explain an
  output takes ``2**(53 (2n - 1))`` steps.
* The sum is formed in float64 and rounded to a multiple of a public power of two, about ``2**-12``
  of the noise's standard deviation. Rounding is post-processing of the float64 sum. It removes the
  low bits that the attack reads, and adds a part in ``10**8`` to the noise's variance.

Not covered: torch's generators are not cryptographic. The clipped sum is itself rounded, so its
sensitivity is C up to rounding (Casacuberta et al. 2022). The time of a step is not hidden.
"""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import torch

from dp_grape_hf.mechanism.streams import SecretGenerator
from dp_grape_hf.phases import is_cpu

SECURE_DRAWS = 4  # 2n of Holohan and Braghin, n = 2
_GRID_BITS = 12  # the grid is at most 2**-12 of the noise's standard deviation
_AT_ONCE = {"cpu": 2**15, "other": 2**22}  # numbers that two float64 buffers hold

# ---- Plain ----


def add_noise_at_once_(
    parts: list[torch.Tensor],
    std: float,
    streams: Sequence[torch.Generator],
    divisor: float,
    at_once: int,
) -> None:
    """Make each part ``(part + N(0, std^2)) / divisor`` in place, many parts in one call.

    Args:
        parts: float32 tensors of one dimension, on the device of the streams.
        std, divisor: as in ``add_noise_``.
        streams: independent generators, whose draws add up to the noise.
        at_once: the most numbers that one call draws; no part has more.
    """
    total, share = sum(len(part) for part in parts), std / math.sqrt(len(streams))
    buffer = torch.empty(min(total, at_once), dtype=torch.float32, device=streams[0].device)
    while parts:
        count, size = 0, 0
        while count < len(parts) and (count == 0 or size + len(parts[count]) <= at_once):
            size += len(parts[count])
            count += 1
        some, parts = parts[:count], parts[count:]
        for stream in streams:  # one buffer serves all streams in turn
            noise = buffer[:size].normal_(0, share, generator=stream)
            torch._foreach_add_(some, list(noise.split([len(part) for part in some])))
        torch._foreach_div_(some, divisor)


# ---- Secure ----


def grid_of(std: float) -> float:
    """Return the grid for a standard deviation: a power of two, by which noisy sums are rounded.

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
    """Make each part ``(part + N(0, std^2)) / divisor`` in place, with secure noise.

    Args:
        parts, std, streams, divisor: as in ``add_noise_at_once_``, with ``SECURE_DRAWS`` streams.

    Guarantee:
        Before the division every number is a multiple of ``grid_of(std)``, rounded to float32.
        Only public values may be added afterwards: a sum that another process adds later would
        show its low bits.
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

_DRAWS = 2  # independent draws that add up to one noise value; see ``add_noise_``
_SLICE = 2**15  # numbers per operation on a CPU; torch starts no threads for so few
_LEAST_PER_THREAD = 2**17  # numbers; starting a thread for fewer takes longer than it saves
_DRAWN_BY_A_THREAD = 2**17  # numbers per call; with fewer, threads mostly wait for each other
_GPU_SLICE = 2**24  # numbers that get noise in one call on a device other than the CPU


def add_noise_(
    values: Sequence[torch.Tensor],
    std: float,
    generator: torch.Generator,
    divisor: float = 1.0,
) -> None:
    """Make each value ``(value + N(0, std^2)) / divisor`` in place.

    With a ``SecretGenerator``, the noise is the sum of two draws from separate streams, each of
    variance ``std^2 / 2``. PyTorch's float32 normals on a CPU end at 5.77 standard deviations,
    because their radius comes from a uniform number with 24 bits. At ``std = C``, a value beyond
    that end would reveal a gradient along one coordinate with probability 9e-7 in each release. The
    sum of two draws ends at 8.16, where this probability is 4e-13. On a GPU each draw has a 64-bit
    key, so the two keys have 128 bits. A ``secure`` generator makes four draws
    (``add_secure_noise_``).

    On a CPU, each thread of torch has separate streams of the ``SecretGenerator``. Any other
    generator (in tests) makes one draw in one thread: the numbers that ``normal_`` draws for one
    value after the other.

    Args:
        values: float32 tensors, contiguous, all on the device of the generator.
        std: standard deviation of the noise, before the division; 0 adds no noise.
        generator: the noise stream.
        divisor: a constant.

    Guarantee:
        No two numbers share noise. An error in any thread is raised here.
    """
    if std == 0:
        torch._foreach_div_(list(values), divisor)
        return
    cpu = is_cpu(generator.device)
    at_once = _SLICE if cpu else _GPU_SLICE
    parts = [part for v in values for part in v.view(-1).split(at_once) if len(part)]
    if isinstance(generator, SecretGenerator):
        _add_secret_noise_(parts, std, generator, divisor)
    elif cpu:
        for part in parts:  # small enough to stay in the cache
            part.add_(torch.empty_like(part).normal_(0, std, generator=generator)).div_(divisor)
    else:
        add_noise_at_once_(parts, std, [generator], divisor, at_once)


def _add_secret_noise_(
    parts: list[torch.Tensor], std: float, generator: SecretGenerator, divisor: float
) -> None:
    """Add noise to the parts in several threads, each with separate streams."""
    cpu, total = generator.device.type == "cpu", sum(len(part) for part in parts)
    threads = max(1, min(torch.get_num_threads(), total // _LEAST_PER_THREAD)) if cpu else 1
    shares: list[list[torch.Tensor]] = [[] for _ in range(threads)]
    position = 0
    for part in parts:
        shares[position * threads // max(1, total)].append(part)
        position += len(part)
    at_once = _DRAWN_BY_A_THREAD if cpu else _GPU_SLICE
    draws = SECURE_DRAWS if generator.secure else _DRAWS
    streams = generator.streams(threads * draws)

    def add(i: int) -> None:
        of_thread = streams[i * draws : (i + 1) * draws]
        if generator.secure:
            add_secure_noise_(shares[i], std, of_thread, divisor)
        else:
            add_noise_at_once_(shares[i], std, of_thread, divisor, at_once)

    if threads == 1:
        add(0)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(add, range(threads)))  # raises the error of a thread
