"""Choose the batch size and the number of steps for a number of epochs."""

from __future__ import annotations

import math

_SHARE = 0.8  # batch size, relative to the square root of epochs * N
_MOST = 0.1  # largest batch size of a run with a given, small number of steps, relative to N


def batch_and_steps(
    num_samples: int,
    epochs: float,
    *,
    batch: int | None = None,
    steps: int | None = None,
) -> tuple[int, int]:
    """Return the expected batch size B and the number of steps T.

    By default, B is 0.8 sqrt(epochs N), and T is epochs N / B rounded up. If T is given, B is
    epochs N / T, but at most the larger of N / 10 and the default B, so that a test run of a few
    steps has no huge batches.

    Args:
        num_samples: N.
        epochs: the mean number of times that each example is sampled.
        batch: B, if it is given.
        steps: T, if it is given.
    """
    sampled = num_samples * epochs
    if batch is None:
        wanted = usual = _SHARE * math.sqrt(sampled)
        if steps:
            wanted = min(sampled / steps, max(usual, _MOST * num_samples))
        batch = min(max(1, round(wanted)), num_samples)
    return batch, steps or max(1, math.ceil(sampled / batch))
