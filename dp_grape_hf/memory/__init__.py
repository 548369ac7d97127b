"""The memory of a training step, before there is a GPU.

``step`` runs the step of the trainer on fake tensors, ``timeline`` says what was alive when;
``planning`` sets methods beside a card, and ``comparison`` sets every method beside every other.
"""

from dp_grape_hf.memory.comparison import Comparison, compare, every_method
from dp_grape_hf.memory.fakes import fake_tensors
from dp_grape_hf.memory.fit import KNOBS
from dp_grape_hf.memory.from_config import ModelOfConfig, auto_class, read_config
from dp_grape_hf.memory.planning import Card, Plan, plan
from dp_grape_hf.memory.step import (
    ADAMW,
    COMPARED,
    DP_GRAPE,
    Setting,
    Step,
    prepared,
    simulate,
)
from dp_grape_hf.memory.timeline import (
    ACTIVATIONS,
    COLLECTIVES,
    OPTIMIZER,
    PROJECTIONS,
    WEIGHTS,
    Timeline,
)

__all__ = [
    "ACTIVATIONS",
    "ADAMW",
    "COLLECTIVES",
    "COMPARED",
    "DP_GRAPE",
    "KNOBS",
    "OPTIMIZER",
    "PROJECTIONS",
    "WEIGHTS",
    "Card",
    "Comparison",
    "ModelOfConfig",
    "Plan",
    "Setting",
    "Step",
    "Timeline",
    "auto_class",
    "compare",
    "every_method",
    "fake_tensors",
    "plan",
    "prepared",
    "read_config",
    "simulate",
]
