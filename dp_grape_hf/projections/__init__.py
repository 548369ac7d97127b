"""Projections P: which weights they act on, on which side, with which rank, and how P is made.

P is public: it is drawn from a seed in the ledger, or computed on public inputs. ``targets``
selects the weights, and ``placement`` the side and the rank. ``projector`` has the random families.
``principal`` computes principal directions on the inputs of ``probes``. ``schedules`` determines
when P is made again, and ``seeds`` derives all public random streams.
"""

from dp_grape_hf.projections.placement import (
    Placement as Placement,
    Side as Side,
    first_matches as first_matches,
    placements as placements,
)
from dp_grape_hf.projections.principal import (
    Batches as Batches,
    principal_directions as principal_directions,
)
from dp_grape_hf.projections.probes import (
    LENGTHS as LENGTHS,
    Inputs as Inputs,
    SyntheticInputs as SyntheticInputs,
    accepted as accepted,
    first_texts as first_texts,
    natural_noise as natural_noise,
    on_inputs as on_inputs,
    reads_synthetic as reads_synthetic,
    synthetic_batches as synthetic_batches,
)
from dp_grape_hf.projections.projector import (
    PRINCIPAL as PRINCIPAL,
    PROJECTIONS as PROJECTIONS,
    Projector as Projector,
)
from dp_grape_hf.projections.schedules import (
    PrincipalProjection as PrincipalProjection,
    ProjectionSchedule as ProjectionSchedule,
    SavedProjection as SavedProjection,
)
from dp_grape_hf.projections.seeds import (
    is_public as is_public,
    is_short as is_short,
    projection_seed_for as projection_seed_for,
    public_generator as public_generator,
    round_at_random as round_at_random,
    rounding_generator as rounding_generator,
    row_blocks as row_blocks,
)
from dp_grape_hf.projections.targets import (
    MATRIX_LAYERS as MATRIX_LAYERS,
    default_targets as default_targets,
    input_dimensions as input_dimensions,
    output_embeddings as output_embeddings,
    projection_targets as projection_targets,
    shared_parameters as shared_parameters,
)
