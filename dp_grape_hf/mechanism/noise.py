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

import torch

from dp_grape_hf.mechanism.streams import SecretGenerator
from dp_grape_hf.phases import is_cpu

_DRAWS = 2  # independent draws that add up to one noise value; see ``add_noise_``
SECURE_DRAWS = 4  # 2n of Holohan and Braghin, n = 2
_GRID_BITS = 12  # the grid is at most 2**-12 of the noise's standard deviation
_SLICE = 2**15  # numbers per operation on a CPU; torch starts no threads for so few
_GPU_SLICE = 2**24  # numbers per operation on another device
_PARTS_AT_ONCE = 4  # slices per draw
_LEAST_PER_THREAD = 2**17  # numbers; starting a thread for fewer takes longer than it saves


def grid_of(std: float) -> float:
    """Return the grid for a standard deviation: a power of two, by which noisy sums are rounded.

    >>> grid_of(1.0) == grid_of(1.5) == 2**-12
    True
    """
    return math.ldexp(1.0, math.frexp(std)[1] - 1 - _GRID_BITS)


def add_noise_(
    values: Sequence[torch.Tensor], std: float, generator: torch.Generator, divisor: float = 1.0
) -> None:
    """Make each value ``(value + N(0, std^2)) / divisor`` in place.

    With a ``SecretGenerator``, the noise is the sum of two draws from separate streams, each of
    variance ``std^2 / 2``. PyTorch's float32 normals on a CPU end at 5.77 standard deviations,
    because their radius comes from a uniform number with 24 bits. At ``std = C``, a value beyond
    that end would reveal a gradient along one coordinate with probability 9e-7 in each release. The
    sum of two draws ends at 8.16, where this probability is 4e-13. On a GPU each draw has a 64-bit
    key, so the two keys have 128 bits. A ``secure`` generator makes four draws.

    On a CPU, each thread of torch has separate streams of the ``SecretGenerator``. Any other
    generator (in tests) makes one draw in one thread: the numbers that ``normal_`` draws for one
    value after the other.

    Args:
        values: float32 tensors, contiguous, all on the device of the generator.
        std: standard deviation of the noise, before the division; 0 adds no noise.
        generator: the noise stream.
        divisor: a constant.

    Guarantee:
        No two numbers share noise. An error in any thread is raised here. With a ``secure``
        generator, before the division every number is a multiple of ``grid_of(std)``, rounded to
        float32. Only public values may be added afterwards: a sum that another process adds later
        would show its low bits.
    """
    if std == 0:
        torch._foreach_div_(list(values), divisor)
        return
    cpu = is_cpu(generator.device)
    size = _SLICE if cpu else _GPU_SLICE
    parts = [part for v in values for part in v.view(-1).split(size) if len(part)]
    streams, threads, secure = [generator], 1, False
    at_once = 1 if cpu else _PARTS_AT_ONCE
    if isinstance(generator, SecretGenerator):
        secure = generator.secure
        at_once = 1 if secure else _PARTS_AT_ONCE
        if cpu:
            most = sum(map(len, parts)) // _LEAST_PER_THREAD
            threads = max(1, min(torch.get_num_threads(), most))
        streams = generator.streams(threads * (SECURE_DRAWS if secure else _DRAWS))

    def add(thread: int) -> None:
        mine, of_thread = parts[thread::threads], streams[thread::threads]
        for start in range(0, len(mine), at_once):
            _add_to_parts_(mine[start : start + at_once], std, of_thread, divisor, secure)

    if threads == 1:
        add(0)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(add, range(threads)))  # raises the error of a thread


def _add_to_parts_(
    parts: list[torch.Tensor],
    std: float,
    streams: Sequence[torch.Generator],
    divisor: float,
    secure: bool,
) -> None:
    """Add one draw of each stream; their variances add up to ``std^2``."""
    totals = [part.double() for part in parts] if secure else parts
    sizes, share = [len(part) for part in parts], std / math.sqrt(len(streams))
    noise = totals[0].new_empty(sum(sizes))
    for stream in streams:
        drawn = noise.normal_(0, share, generator=stream)
        torch._foreach_add_(totals, list(drawn.split(sizes)))
    if secure:
        for part, total in zip(parts, totals, strict=True):
            part.copy_(total.div_(grid_of(std)).round_().mul_(grid_of(std)))
    torch._foreach_div_(parts, divisor)
