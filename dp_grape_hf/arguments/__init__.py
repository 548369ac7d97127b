"""What is promised: options, methods, what they mean for N examples, and what is refused.

``arguments`` has the options with their ranges, ``methods`` the table of methods, ``refusals`` the
combinations that would void the promise, and ``plan`` works out noise, steps and sampling rate.
"""

from dp_grape_hf.arguments.arguments import (
    DPGrapeArguments,
    DPGrapeTrainingArguments,
    accepts_short_names,
)
from dp_grape_hf.arguments.methods import METHODS, Method, Projected, refuse_model
from dp_grape_hf.arguments.plan import PrivacyPlan, PrivacySpent, check_dataset, schedule_of

__all__ = [
    "METHODS",
    "DPGrapeArguments",
    "DPGrapeTrainingArguments",
    "Method",
    "PrivacyPlan",
    "PrivacySpent",
    "Projected",
    "accepts_short_names",
    "check_dataset",
    "refuse_model",
    "schedule_of",
]
