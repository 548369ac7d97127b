"""The memory of a training step, without a GPU.

``step`` runs the trainer's step on fake tensors, ``timeline`` records what is allocated, and
``planning`` compares methods with each other and with a card.
"""

from dp_grape_hf.memory.fakes import fake_tensors as fake_tensors
from dp_grape_hf.memory.from_config import (
    ModelOfConfig as ModelOfConfig,
    auto_class as auto_class,
    class_of as class_of,
    read_config as read_config,
)
from dp_grape_hf.memory.planning import (
    RESERVE as RESERVE,
    TITLES as TITLES,
    as_text as as_text,
    heading as heading,
    plan as plan,
)
from dp_grape_hf.memory.step import (
    ADAMW as ADAMW,
    COMPARED as COMPARED,
    DP_GRAPE as DP_GRAPE,
    Setting as Setting,
    Step as Step,
    prepared as prepared,
    simulate as simulate,
)
from dp_grape_hf.memory.timeline import (
    ACTIVATIONS as ACTIVATIONS,
    OPTIMIZER as OPTIMIZER,
    PROJECTIONS as PROJECTIONS,
    WEIGHTS as WEIGHTS,
    Footprint as Footprint,
    Timeline as Timeline,
)
