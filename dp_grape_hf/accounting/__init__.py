"""Privacy accounting: upper bounds on epsilon, and the noise for a privacy budget.

This subpackage computes with public numbers only. It reads no model, data or files, and does not
import torch. ``releases`` describes the releases of a run, ``accountants`` bounds their ε, and
``calibration`` finds the noise for a budget. ``banded`` designs correlated noise.
"""

from dp_grape_hf.accounting.accountants import (
    ACCOUNTANTS as ACCOUNTANTS,
    DEFAULT as DEFAULT,
    rounded_up as rounded_up,
)
from dp_grape_hf.accounting.banded import (
    correlated as correlated,
    find_bands as find_bands,
    noise_left as noise_left,
    release_weights as release_weights,
    released_noise as released_noise,
)
from dp_grape_hf.accounting.calibration import (
    EpsilonCurve as EpsilonCurve,
    blocks_of as blocks_of,
    compose_epsilon as compose_epsilon,
    compute_epsilon as compute_epsilon,
    expected_steps_per_epoch as expected_steps_per_epoch,
    find_noise_multiplier as find_noise_multiplier,
    refuse_large_delta as refuse_large_delta,
    usual_batch_size as usual_batch_size,
)
from dp_grape_hf.accounting.rdp import AccountantFailure as AccountantFailure
from dp_grape_hf.accounting.releases import Adjacency as Adjacency, Releases as Releases
