"""The options and methods of a run, its plan for N examples, and the options that are refused.

``arguments`` checks the options, whose table is ``dp_grape_hf.options``, and makes them read-only.
``methods`` has the table of methods, which plug-ins can extend. ``refusals`` refuses combinations
that would void the guarantee. ``plan`` computes noise, number of steps and sampling rate.
"""

from dp_grape_hf.arguments.arguments import (
    DPGrapeArguments,
    DPGrapeTrainingArguments,
    accepts_short_names,
)
from dp_grape_hf.arguments.methods import (
    METHODS,
    Method,
    OptimizerAndOptions,
    Update,
    refuse_model,
    register_method,
)
from dp_grape_hf.arguments.plan import PrivacyPlan, PrivacySpent, check_dataset, schedule_of

__all__ = [
    "METHODS",
    "DPGrapeArguments",
    "DPGrapeTrainingArguments",
    "Method",
    "OptimizerAndOptions",
    "PrivacyPlan",
    "PrivacySpent",
    "Update",
    "accepts_short_names",
    "check_dataset",
    "refuse_model",
    "register_method",
    "schedule_of",
]
