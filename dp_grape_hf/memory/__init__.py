"""The memory of a training step, without a GPU.

``step`` runs the trainer's step on fake tensors, ``timeline`` records what is allocated, and
``planning`` compares methods with each other and with a card.
"""

from dp_grape_hf.memory.fakes import fake_tensors
from dp_grape_hf.memory.from_config import ModelOfConfig, auto_class, class_of, read_config
from dp_grape_hf.memory.planning import RESERVE, TITLES, Plan, Report, plan
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
    Footprint,
    Timeline,
)

__all__ = [
    "ACTIVATIONS",
    "ADAMW",
    "COLLECTIVES",
    "COMPARED",
    "DP_GRAPE",
    "OPTIMIZER",
    "PROJECTIONS",
    "RESERVE",
    "TITLES",
    "WEIGHTS",
    "Footprint",
    "ModelOfConfig",
    "Plan",
    "Report",
    "Setting",
    "Step",
    "Timeline",
    "auto_class",
    "class_of",
    "fake_tensors",
    "plan",
    "prepared",
    "read_config",
    "simulate",
]
