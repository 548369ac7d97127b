"""Draw, clip, sum, add noise: what the guarantee rests on. The room to audit.

``sampling`` draws each logical batch (``units`` draws people instead of examples), ``collation``
makes the rows of each of nothing else, ``clipping`` bounds what one of them adds, ``release`` adds
it up and makes it private, and ``noise`` and ``streams`` are the randomness, which is secret;
``banded`` correlates noise over steps.
``signal`` tells how much of a release is more than noise.
"""

from dp_grape_hf.mechanism.banded import Turn, Turns
from dp_grape_hf.mechanism.clipping import (
    STABILITY,
    add_clipped_sum_,
    bound_of_part,
    factors_by_name,
    in_parts,
)
from dp_grape_hf.mechanism.collation import Grid, OwnRows, repeatable_seeds, secret_seeds
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
    "OwnRows",
    "PoissonBatchSampler",
    "PrivateMechanism",
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
