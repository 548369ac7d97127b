"""Privacy accounting: upper bounds on epsilon, and the noise for a privacy budget.

This subpackage computes with public numbers only. It reads no model, data or files, and does not
import torch. ``releases`` describes the releases of a run, ``accountants`` bounds their ε, and
``calibration`` finds the noise for a budget. ``banded`` designs correlated noise, and ``sizes``
chooses batch size and number of steps.
"""

from dp_grape_hf.accounting.accountants import (
    ACCOUNTANTS,
    DEFAULT,
    rounded_up,
)
from dp_grape_hf.accounting.banded import (
    Bands,
    correlated,
    find_bands,
    noise_left,
    release_weights,
    released_noise,
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
from dp_grape_hf.accounting.rdp import AccountantFailure
from dp_grape_hf.accounting.releases import Adjacency, Releases
from dp_grape_hf.accounting.sizes import batch_and_steps

__all__ = [
    "ACCOUNTANTS",
    "DEFAULT",
    "AccountantFailure",
    "Adjacency",
    "Bands",
    "EpsilonCurve",
    "Releases",
    "batch_and_steps",
    "blocks_of",
    "compose_epsilon",
    "compute_epsilon",
    "correlated",
    "expected_steps_per_epoch",
    "find_bands",
    "find_noise_multiplier",
    "noise_left",
    "refuse_large_delta",
    "release_weights",
    "released_noise",
    "rounded_up",
]
