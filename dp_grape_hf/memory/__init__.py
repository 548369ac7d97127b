"""The memory of a training step, before there is a GPU.

``step`` runs the step of the trainer on fake tensors, ``timeline`` says what was alive when,
``fit`` finds the largest batch for a card, and ``comparison`` does it for every method.
"""

from dp_grape_hf.memory.comparison import (
    FORMULAS,
    TITLES,
    Compared,
    Sizes,
    choices,
    every_method,
    simulate_all,
    sizes_of_model,
)
from dp_grape_hf.memory.fakes import fake_tensors
from dp_grape_hf.memory.fit import (
    GIB,
    MOST_SAMPLES,
    Fit,
    Simulate,
    Turned,
    largest_batch,
    turn_each,
    turn_until_it_fits,
)
from dp_grape_hf.memory.from_config import ModelOfConfig, auto_class, read_config
from dp_grape_hf.memory.step import (
    ADAMW,
    COMPARED,
    DP_GRAPE,
    Footprint,
    Setting,
    Step,
    compared,
    footprint,
    prepared,
    simulate,
)
from dp_grape_hf.memory.timeline import (
    ACTIVATIONS,
    COLLECTIVES,
    KINDS,
    OPTIMIZER,
    PROJECTIONS,
    WEIGHTS,
    Peak,
    Timeline,
)

__all__ = [
    "ACTIVATIONS",
    "ADAMW",
    "COLLECTIVES",
    "COMPARED",
    "DP_GRAPE",
    "FORMULAS",
    "GIB",
    "KINDS",
    "MOST_SAMPLES",
    "OPTIMIZER",
    "PROJECTIONS",
    "TITLES",
    "WEIGHTS",
    "Compared",
    "Fit",
    "Footprint",
    "ModelOfConfig",
    "Peak",
    "Setting",
    "Simulate",
    "Sizes",
    "Step",
    "Timeline",
    "Turned",
    "auto_class",
    "choices",
    "compared",
    "every_method",
    "fake_tensors",
    "footprint",
    "largest_batch",
    "prepared",
    "read_config",
    "simulate",
    "simulate_all",
    "sizes_of_model",
    "turn_each",
    "turn_until_it_fits",
]
