"""The options and methods of a run, its plan for N examples, and the options that are refused.

``arguments`` checks the options, whose table is ``dp_grape_hf.options``, and makes them read-only.
``methods`` has the table of methods, which plug-ins can extend. ``refusals`` refuses combinations
that would void the guarantee. ``plan`` computes noise, number of steps and sampling rate.
"""

from dp_grape_hf.arguments.arguments import (
    DPGrapeArguments as DPGrapeArguments,
    DPGrapeTrainingArguments as DPGrapeTrainingArguments,
    accepts_short_names as accepts_short_names,
)
from dp_grape_hf.arguments.methods import (
    METHODS as METHODS,
    Method as Method,
    OptimizerAndOptions as OptimizerAndOptions,
    Update as Update,
    refuse_model as refuse_model,
    register_method as register_method,
)
from dp_grape_hf.arguments.plan import (
    PrivacyPlan as PrivacyPlan,
    PrivacySpent as PrivacySpent,
    check_dataset as check_dataset,
    schedule_of as schedule_of,
)
