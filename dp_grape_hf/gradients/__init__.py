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
    ENGINES as ENGINES,
    OF_SINGLE_EXAMPLES as OF_SINGLE_EXAMPLES,
    make_engine as make_engine,
    per_sample_gradients as per_sample_gradients,
)
from dp_grape_hf.gradients.checks.guards import (
    configs_of as configs_of,
    evaluating as evaluating,
    guarding_streams as guarding_streams,
    keeping_configs as keeping_configs,
    keeping_random_state as keeping_random_state,
    seed_all as seed_all,
    without_checkpointing as without_checkpointing,
)
from dp_grape_hf.gradients.checks.sketches import tolerance_for as tolerance_for
from dp_grape_hf.gradients.checks.spot_checks import SpotCheckedEngine as SpotCheckedEngine
from dp_grape_hf.gradients.checks.state import StateGuard as StateGuard, warm_up as warm_up
from dp_grape_hf.gradients.checks.unused import (
    freeze_unused as freeze_unused,
    refuse_reached as refuse_reached,
)
from dp_grape_hf.gradients.compiled import Compilation as Compilation
from dp_grape_hf.gradients.engine import (
    Gradients as Gradients,
    GradSampleMode as GradSampleMode,
    Inputs as Inputs,
    PerSampleEngine as PerSampleEngine,
    keep_laid_out_for_training as keep_laid_out_for_training,
    refuse_modules as refuse_modules,
)
from dp_grape_hf.gradients.flat import (
    FlatGradients as FlatGradients,
    FlatTensors as FlatTensors,
    Layout as Layout,
    Runs as Runs,
)
from dp_grape_hf.gradients.forms import (
    Dense as Dense,
    PerSampleGradient as PerSampleGradient,
    exact_products as exact_products,
)
from dp_grape_hf.gradients.losses.heads import (
    IGNORE_INDEX as IGNORE_INDEX,
    choice as choice,
    classification as classification,
    cross_entropy as cross_entropy,
    is_regression as is_regression,
)
from dp_grape_hf.gradients.losses.losses import (
    LossFunction as LossFunction,
    loss_for as loss_for,
    losses_of as losses_of,
    with_three_arguments as with_three_arguments,
)
from dp_grape_hf.gradients.losses.model_loss import (
    ModelLoss as ModelLoss,
    ReturnedLoss as ReturnedLoss,
    is_target as is_target,
)
from dp_grape_hf.gradients.losses.pairs import (
    PREFERENCES as PREFERENCES,
    REFERENCE as REFERENCE,
    PairLoss as PairLoss,
    PreferenceLoss as PreferenceLoss,
    RewardLoss as RewardLoss,
    by_halves as by_halves,
    side_by_side as side_by_side,
)
from dp_grape_hf.gradients.losses.trainer_loss import (
    TrainerLoss as TrainerLoss,
    examine_trainer_loss as examine_trainer_loss,
)
from dp_grape_hf.gradients.query import ANSWERS as ANSWERS, QueryEngine as QueryEngine
from dp_grape_hf.gradients.rows import batch_size_of as batch_size_of, rows_of as rows_of
from dp_grape_hf.gradients.stand_ins import METADATA as METADATA
from dp_grape_hf.gradients.units import UNIT_OF_ROW as UNIT_OF_ROW, UnitEngine as UnitEngine
