"""The memory of a training step, before there is a GPU.

``step`` runs the step of the trainer on fake tensors, ``timeline`` says what was alive when;
and ``planning`` compares methods with each other and with a card.
"""

from dp_grape_hf.memory.fakes import fake_tensors
from dp_grape_hf.memory.from_config import ModelOfConfig, auto_class, read_config
from dp_grape_hf.memory.planning import TITLES, Card, Plan, Report, plan
from dp_grape_hf.memory.step import (
    ADAMW,
    COMPARED,
    DP_GRAPE,
    Footprint,
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
    "OPTIMIZER",
    "PROJECTIONS",
    "TITLES",
    "WEIGHTS",
    "Card",
    "Footprint",
    "ModelOfConfig",
    "Plan",
    "Report",
    "Setting",
    "Step",
    "Timeline",
    "auto_class",
    "fake_tensors",
    "plan",
    "prepared",
    "read_config",
    "simulate",
]
