"""How the passes over the data that a user affords are cut into steps."""

from __future__ import annotations

import math

_SHARE = 0.8  # of the root of all that is read
_MOST = 0.1  # of the examples, in a step of a run of few


def batch_and_steps(
    num_samples: int,
    passes: float,
    *,
    batch: int | None = None,
    steps: int | None = None,
) -> tuple[int, int]:
    """Returns the expected batch size B and the number of steps T, with B T = passes N.

    Few steps are not made larger for that than a tenth of the data, or than they would be without
    T: whoever asks for five steps wants to see whether a run works.

    With S examples read in all, B is 0.8 sqrt(S) and T the rest: both grow with the data. A few
    large steps do not arrive anywhere, and many small ones pay for noise that is below what
    sampling hides. TREC, epsilon 2, 2.4 passes over 2,635 examples: 85.5 to 87.1 % with 100 steps
    of 64, 84.9 with 50 of 128, 68.1 with 25 of 256.

    Args:
        num_samples: N.
        passes: over the data, on average.
        batch: B, if it is given.
        steps: T, if it is given.
    """
    read = num_samples * passes
    if batch is None:
        wanted = usual = _SHARE * math.sqrt(read)
        if steps:
            wanted = min(read / steps, max(usual, _MOST * num_samples))
        batch = min(max(1, round(wanted)), num_samples)
    return batch, steps or max(1, math.ceil(read / batch))
