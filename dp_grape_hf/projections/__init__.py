"""Projections P: which weights they act on, on which side, with which rank, and how P is made.

P is public: it is drawn from a seed in the ledger, or computed on public inputs. ``targets``
selects the weights, and ``placement`` the side and the rank. ``projector`` has the random families.
``principal`` computes principal directions on the inputs of ``probes``. ``schedules`` determines
when P is made again, and ``seeds`` derives all public random streams.
"""

from dp_grape_hf.projections.placement import Placement, Side, first_matches, placements
from dp_grape_hf.projections.principal import Batches, principal_directions
from dp_grape_hf.projections.probes import (
    LENGTHS,
    Inputs,
    SyntheticInputs,
    accepted,
    first_texts,
    natural_noise,
    on_inputs,
    reads_synthetic,
    synthetic_batches,
)
from dp_grape_hf.projections.projector import PRINCIPAL, PROJECTIONS, Projector
from dp_grape_hf.projections.schedules import (
    PrincipalProjection,
    ProjectionSchedule,
    SavedProjection,
)
from dp_grape_hf.projections.seeds import (
    is_public,
    is_short,
    projection_seed_for,
    public_generator,
    round_at_random,
    rounding_generator,
    row_blocks,
)
from dp_grape_hf.projections.targets import (
    MATRIX_LAYERS,
    default_targets,
    feature_dimensions,
    input_dimensions,
    output_embeddings,
    projection_targets,
    shared_parameters,
)

__all__ = [
    "LENGTHS",
    "MATRIX_LAYERS",
    "PRINCIPAL",
    "PROJECTIONS",
    "Batches",
    "Inputs",
    "Placement",
    "PrincipalProjection",
    "ProjectionSchedule",
    "Projector",
    "SavedProjection",
    "Side",
    "SyntheticInputs",
    "accepted",
    "default_targets",
    "feature_dimensions",
    "first_matches",
    "first_texts",
    "input_dimensions",
    "is_public",
    "is_short",
    "natural_noise",
    "on_inputs",
    "output_embeddings",
    "placements",
    "principal_directions",
    "projection_seed_for",
    "projection_targets",
    "public_generator",
    "reads_synthetic",
    "round_at_random",
    "rounding_generator",
    "row_blocks",
    "shared_parameters",
    "synthetic_batches",
]
