"""The Trainer of transformers, private.

``mixin`` overrides methods of the host, the Trainer that it is put in front of; ``sharded`` has the
overrides for several processes, and ``saving`` the overrides that save and upload. ``run`` makes
the parts of a run and defines its step. ``chosen`` chooses the trained parameters and the learning
rates. ``trainers``, ``sft`` and ``preferences`` define the classes. The classes of ``sft`` and
``preferences`` need TRL and are imported at their first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dp_grape_hf.trainer.adapters import principal_adapter as principal_adapter
from dp_grape_hf.trainer.checkpoints import logged as logged
from dp_grape_hf.trainer.remembered import package_digest as package_digest
from dp_grape_hf.trainer.rows import Unseen as Unseen
from dp_grape_hf.trainer.run import PrivateRun as PrivateRun
from dp_grape_hf.trainer.trainers import (
    DPGrapeSeq2SeqTrainer as DPGrapeSeq2SeqTrainer,
    DPGrapeSeq2SeqTrainingArguments as DPGrapeSeq2SeqTrainingArguments,
    DPGrapeTrainer as DPGrapeTrainer,
)

if TYPE_CHECKING:
    from dp_grape_hf.trainer.preferences import (
        DPGrapeDPOConfig as DPGrapeDPOConfig,
        DPGrapeDPOTrainer as DPGrapeDPOTrainer,
        DPGrapeRewardConfig as DPGrapeRewardConfig,
        DPGrapeRewardTrainer as DPGrapeRewardTrainer,
    )
    from dp_grape_hf.trainer.sft import (
        DPGrapeSFTConfig as DPGrapeSFTConfig,
        DPGrapeSFTTrainer as DPGrapeSFTTrainer,
    )


def __getattr__(name: str) -> Any:
    if not name.startswith("DPGrape"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "sft" if "SFT" in name else "preferences"
    return getattr(import_module(f"{__name__}.{module}"), name)
