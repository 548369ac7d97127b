"""Sample, clip, sum, add noise: the code that the guarantee rests on. Audit this subpackage first.

``sampling`` samples each logical batch, of examples or of privacy units (``units``).
``collation`` makes the rows of each example from this example alone. ``clipping`` bounds the
gradient of each example. ``release`` sums the clipped gradients and adds noise. ``noise`` and
``streams`` hold the secret randomness, and ``banded`` correlates noise over steps. ``signal``
estimates how much of a release is not noise.
"""

from dp_grape_hf.mechanism.banded import Turns as Turns
from dp_grape_hf.mechanism.clipping import (
    STABILITY as STABILITY,
    add_clipped_sum_ as add_clipped_sum_,
    bound_of_part as bound_of_part,
    factors_by_name as factors_by_name,
    in_parts as in_parts,
)
from dp_grape_hf.mechanism.collation import (
    Grid as Grid,
    RowCollator as RowCollator,
    repeatable_seeds as repeatable_seeds,
    secret_seeds as secret_seeds,
)
from dp_grape_hf.mechanism.release import PrivateMechanism as PrivateMechanism
from dp_grape_hf.mechanism.sampling import (
    EmptyDrawDataset as EmptyDrawDataset,
    LogicalBatch as LogicalBatch,
    LogicalBatchCollator as LogicalBatchCollator,
    PoissonBatchSampler as PoissonBatchSampler,
)
from dp_grape_hf.mechanism.signal import Signal as Signal
from dp_grape_hf.mechanism.streams import (
    Streams as Streams,
    forget_the_seed as forget_the_seed,
    noise_generator as noise_generator,
    secret_generator as secret_generator,
    shared_sampling_generator as shared_sampling_generator,
)
from dp_grape_hf.mechanism.units import (
    Units as Units,
    read_units as read_units,
    refuse_large_unit as refuse_large_unit,
)
