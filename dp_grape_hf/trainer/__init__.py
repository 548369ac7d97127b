"""The Trainer of transformers, private.

``mixin`` overrides methods of the host, the Trainer that it is put in front of; ``sharded`` has the
overrides for several processes, and ``saving`` the overrides that save and upload. ``run`` makes
the parts of a run and defines its step. ``chosen`` chooses the trained parameters and the learning
rates. ``trainers``, ``sft`` and ``preferences`` define the classes. The classes of ``sft`` and
``preferences`` need TRL and are imported at their first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dp_grape_hf.trainer.adapters import principal_adapter
from dp_grape_hf.trainer.checkpoints import logged
from dp_grape_hf.trainer.remembered import package_digest
from dp_grape_hf.trainer.rows import Unseen
from dp_grape_hf.trainer.run import PrivateRun
from dp_grape_hf.trainer.trainers import (
    DPGrapeSeq2SeqTrainer,
    DPGrapeSeq2SeqTrainingArguments,
    DPGrapeTrainer,
)

if TYPE_CHECKING:
    from dp_grape_hf.trainer.preferences import (  # noqa: F401
        DPGrapeDPOConfig,
        DPGrapeDPOTrainer,
        DPGrapeRewardConfig,
        DPGrapeRewardTrainer,
    )
    from dp_grape_hf.trainer.sft import DPGrapeSFTConfig, DPGrapeSFTTrainer  # noqa: F401

__all__ = [
    "DPGrapeSeq2SeqTrainer",
    "DPGrapeSeq2SeqTrainingArguments",
    "DPGrapeTrainer",
    "PrivateRun",
    "Unseen",
    "logged",
    "package_digest",
    "principal_adapter",
]


_MODULE_OF = {
    "DPGrapeDPOConfig": "preferences",
    "DPGrapeDPOTrainer": "preferences",
    "DPGrapeRewardConfig": "preferences",
    "DPGrapeRewardTrainer": "preferences",
    "DPGrapeSFTConfig": "sft",
    "DPGrapeSFTTrainer": "sft",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
