"""What is done with private gradients: post-processing, which costs no privacy.

``projected`` keeps its state in the coordinates of P, ``rules`` has its update rules, ``low_rank``
carries what 16-bit weights cannot hold, and ``changes`` keeps what was added to a weight, as
factors. ``groups`` says whether an optimizer has what is trained.
"""

from dp_grape_hf.optimizers.groups import require_each_once
from dp_grape_hf.optimizers.low_rank import LowRankUpdates
from dp_grape_hf.optimizers.projected import GPU_BLOCK, ProjectedAdam, ProjectedOptimizer
from dp_grape_hf.optimizers.rules import UPDATE_RULES, moved_from_zero

__all__ = [
    "GPU_BLOCK",
    "UPDATE_RULES",
    "LowRankUpdates",
    "ProjectedAdam",
    "ProjectedOptimizer",
    "moved_from_zero",
    "require_each_once",
]
