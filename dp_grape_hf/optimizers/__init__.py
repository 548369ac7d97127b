"""Optimizers that apply private gradients. They are post-processing, so they cost no privacy.

``projected`` is an optimizer with its state in the projected space, and ``rules`` defines its
update rules. ``low_rank`` adds float32 updates to the outputs of 16-bit layers. ``groups`` checks
that an optimizer contains each trained parameter once.
"""

from dp_grape_hf.optimizers.groups import require_each_once as require_each_once
from dp_grape_hf.optimizers.low_rank import LowRankUpdates as LowRankUpdates
from dp_grape_hf.optimizers.projected import (
    ProjectedAdam as ProjectedAdam,
    ProjectedOptimizer as ProjectedOptimizer,
)
from dp_grape_hf.optimizers.rules import (
    UPDATE_RULES as UPDATE_RULES,
    moved_from_zero as moved_from_zero,
)
