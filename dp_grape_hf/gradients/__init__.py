"""Losses and per-sample gradients.

All results of this subpackage are sensitive: nothing is clipped, and nothing has noise. ``engine``
defines the interface of an engine. ``layerwise`` is the fast engine: one pass of the batch, with a
rule for each layer type. ``definition`` is the engine that runs each example separately, and
``query`` is the base class of plug-in engines. ``losses`` defines the loss of one example,
``forms`` the representations of its gradient, and ``flat`` the layout of most gradients in one
matrix. ``replay`` compares the gradients of a first batch with gradients of single examples, and
``checks`` tests the model during the run.
"""

from dp_grape_hf.gradients.by_name import (
    ENGINES,
    OF_SINGLE_EXAMPLES,
    make_engine,
    per_sample_gradients,
)
from dp_grape_hf.gradients.checks.guards import (
    configs_of,
    evaluating,
    guarding_streams,
    keeping_configs,
    keeping_random_state,
    seed_all,
)
from dp_grape_hf.gradients.checks.sketches import tolerance_for
from dp_grape_hf.gradients.checks.spot_checks import SpotCheckedEngine
from dp_grape_hf.gradients.checks.state import StateGuard, warm_up
from dp_grape_hf.gradients.checks.unused import freeze_unused, refuse_reached
from dp_grape_hf.gradients.compiled import Compilation
from dp_grape_hf.gradients.engine import (
    Gradients,
    GradSampleMode,
    Inputs,
    PerSampleEngine,
    keep_laid_out_for_training,
    refuse_modules,
)
from dp_grape_hf.gradients.flat import FlatGradients, FlatTensors, Layout, Runs
from dp_grape_hf.gradients.forms import Dense, PerSampleGradient, exact_products
from dp_grape_hf.gradients.losses.heads import (
    IGNORE_INDEX,
    choice,
    classification,
    cross_entropy,
    is_regression,
)
from dp_grape_hf.gradients.losses.losses import (
    LossFunction,
    loss_for,
    losses_of,
    with_three_arguments,
)
from dp_grape_hf.gradients.losses.model_loss import ModelLoss
from dp_grape_hf.gradients.losses.pairs import (
    PREFERENCES,
    REFERENCE,
    PairLoss,
    PreferenceLoss,
    RewardLoss,
    by_halves,
    side_by_side,
)
from dp_grape_hf.gradients.losses.returned_loss import ReturnedLoss, is_target
from dp_grape_hf.gradients.losses.trainer_loss import TrainerLoss, examine_trainer_loss
from dp_grape_hf.gradients.query import ANSWERS, QueryEngine
from dp_grape_hf.gradients.rows import batch_size_of, rows_of
from dp_grape_hf.gradients.stand_ins import METADATA
from dp_grape_hf.gradients.units import UNIT_OF_ROW, UnitEngine

__all__ = [
    "ANSWERS",
    "ENGINES",
    "IGNORE_INDEX",
    "METADATA",
    "OF_SINGLE_EXAMPLES",
    "PREFERENCES",
    "REFERENCE",
    "UNIT_OF_ROW",
    "Compilation",
    "Dense",
    "FlatGradients",
    "FlatTensors",
    "GradSampleMode",
    "Gradients",
    "Inputs",
    "Layout",
    "LossFunction",
    "ModelLoss",
    "PairLoss",
    "PerSampleEngine",
    "PerSampleGradient",
    "PreferenceLoss",
    "QueryEngine",
    "ReturnedLoss",
    "RewardLoss",
    "Runs",
    "SpotCheckedEngine",
    "StateGuard",
    "TrainerLoss",
    "UnitEngine",
    "batch_size_of",
    "by_halves",
    "choice",
    "classification",
    "configs_of",
    "cross_entropy",
    "evaluating",
    "exact_products",
    "examine_trainer_loss",
    "freeze_unused",
    "guarding_streams",
    "is_regression",
    "is_target",
    "keep_laid_out_for_training",
    "keeping_configs",
    "keeping_random_state",
    "loss_for",
    "losses_of",
    "make_engine",
    "per_sample_gradients",
    "refuse_modules",
    "refuse_reached",
    "rows_of",
    "seed_all",
    "side_by_side",
    "tolerance_for",
    "warm_up",
    "with_three_arguments",
]
