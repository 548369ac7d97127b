"""What releases cost: upper bounds on epsilon, and the noise that a budget buys.

No model, no data and no file: numbers in, numbers out, by numpy and scipy only. ``releases``
describes what is composed, ``accountants`` bounds its divergence, ``composition`` chooses among
accountants, and ``calibration`` turns the question round: which noise keeps a budget.
"""

from dp_grape_hf.accounting.accountants import (
    ACCOUNTANTS,
    LEAST,
    AccountantFailure,
    is_installed,
    rounded_up,
)
from dp_grape_hf.accounting.banded import (
    Bands,
    correlated,
    find_bands,
    noise_left,
    released_noise,
    what_arrives,
)
from dp_grape_hf.accounting.calibration import (
    EpsilonCurve,
    blocks_of,
    compose_epsilon,
    compute_epsilon,
    expected_steps_per_epoch,
    find_noise_multiplier,
    refuse_large_delta,
)
from dp_grape_hf.accounting.releases import Adjacency, Releases

__all__ = [
    "ACCOUNTANTS",
    "LEAST",
    "AccountantFailure",
    "Adjacency",
    "Bands",
    "EpsilonCurve",
    "Releases",
    "blocks_of",
    "compose_epsilon",
    "compute_epsilon",
    "correlated",
    "expected_steps_per_epoch",
    "find_bands",
    "find_noise_multiplier",
    "is_installed",
    "noise_left",
    "refuse_large_delta",
    "released_noise",
    "rounded_up",
    "what_arrives",
]
