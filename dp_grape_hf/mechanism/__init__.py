"""Sample, clip, sum, add noise: the code that the guarantee rests on. Audit this subpackage first.

``sampling`` samples each logical batch (``units`` samples privacy units instead of examples).
``collation`` makes the rows of each example from this example alone. ``clipping`` bounds the
gradient of each example. ``release`` sums the clipped gradients and adds noise. ``noise`` and
``streams`` hold the secret randomness, and ``banded`` correlates noise over steps. ``signal``
estimates how much of a release is not noise.
"""

from dp_grape_hf.mechanism.banded import Turn, Turns
from dp_grape_hf.mechanism.clipping import (
    STABILITY,
    add_clipped_sum_,
    bound_of_part,
    factors_by_name,
    in_parts,
)
from dp_grape_hf.mechanism.collation import Grid, RowCollator, repeatable_seeds, secret_seeds
from dp_grape_hf.mechanism.noise import NOISE_SLICE
from dp_grape_hf.mechanism.release import PrivateMechanism
from dp_grape_hf.mechanism.sampling import (
    EmptyDrawDataset,
    LogicalBatch,
    LogicalBatchCollator,
    PoissonBatchSampler,
)
from dp_grape_hf.mechanism.signal import Signal, Window
from dp_grape_hf.mechanism.streams import (
    Streams,
    forget_the_seed,
    noise_generator,
    secret_generator,
    shared_sampling_generator,
)
from dp_grape_hf.mechanism.units import (
    UnitBatchSampler,
    UnitCollator,
    UnitDataset,
    Units,
    read_units,
    refuse_large_unit,
)

__all__ = [
    "NOISE_SLICE",
    "STABILITY",
    "EmptyDrawDataset",
    "Grid",
    "LogicalBatch",
    "LogicalBatchCollator",
    "PoissonBatchSampler",
    "PrivateMechanism",
    "RowCollator",
    "Signal",
    "Streams",
    "Turn",
    "Turns",
    "UnitBatchSampler",
    "UnitCollator",
    "UnitDataset",
    "Units",
    "Window",
    "add_clipped_sum_",
    "bound_of_part",
    "factors_by_name",
    "forget_the_seed",
    "in_parts",
    "noise_generator",
    "read_units",
    "refuse_large_unit",
    "repeatable_seeds",
    "secret_generator",
    "secret_seeds",
    "shared_sampling_generator",
]
