"""``DPGrapeSFTTrainer``: TRL's supervised fine-tuning, trained privately; and ``TRLMixin``.

TRL prepares the data set (chat template, tokens, labels, truncation), each example by itself. Its
own loss never runs in training: that one divides by a count of tokens over the batch, and logs
entropy, token accuracy and token counts of the training data. It serves evaluation.

Needs ``pip install 'dp_grape_hf[sft]'``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from transformers.utils import is_torch_bf16_gpu_available

from dp_grape_hf.arguments import DPGrapeArguments, accepts_short_names
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.trainer.mixin import DPGrapeMixin

try:
    from trl import SFTConfig, SFTTrainer
except ImportError as error:
    raise ImportError(
        "DPGrapeSFTTrainer and the other trainers of TRL need it: pip install 'dp_grape_hf[sft]'. "
        f"The import failed with: {error}"
    ) from error

REFUSED_IF_SET = {
    "packing": "a row then holds several examples, and clipping rows bounds none of them; leave it "
    "at False",
    "padding_free": "the batch then is one row, in which examples cannot be told apart; leave it "
    "at False",
    "activation_offloading": "it was not tried with per-sample gradients; use "
    "gradient_checkpointing=True",
    "router_aux_loss_coef": "the load-balancing loss of experts averages over the tokens of the "
    "batch, so it couples samples; set it to 0.0",
}
"""Name of an option of ``SFTConfig`` -> why it is refused, and what to do instead."""


class TRLArguments(DPGrapeArguments):
    """``DPGrapeArguments`` in front of a config of TRL, which can be made on any machine."""

    def __post_init__(self) -> None:
        """Leave bfloat16 off on CPUs, unless it is asked for: TRL's default is on."""
        here: Any = self
        if here.bf16 is None and (here.use_cpu or not is_torch_bf16_gpu_available()):
            here.bf16 = False
        super().__post_init__()


@accepts_short_names
@dataclass(repr=False)
class DPGrapeSFTConfig(TRLArguments, SFTConfig):  # type: ignore[misc]
    """``SFTConfig`` of a differentially private run; see ``DPGrapeArguments``.

    As in ``SFTConfig``, and other than in ``TrainingArguments``, gradient checkpointing is on by
    default, and bfloat16 autocast where a GPU has it. ``completion_only_loss`` is on
    for data sets of prompts and completions. ``router_aux_loss_coef`` is 0 unless given.

    Raises:
        PrivacyError: also for packing, ``padding_free``, a ``loss_type`` other than ``nll``,
            activation offloading and a load-balancing loss of experts.
    """

    refused_if_set = DPGrapeArguments.refused_if_set | REFUSED_IF_SET
    router_aux_loss_coef: float | None = field(
        default=0.0,
        metadata={"help": "Must be 0: the load-balancing loss of experts averages over the batch."},
    )

    def __post_init__(self) -> None:
        """Refuses what belongs to this host, and then what belongs to all."""
        if self.loss_type not in (None, "nll", "chunked_nll"):
            raise PrivacyError(
                f"loss_type={self.loss_type!r} is refused: training uses the mean cross-entropy of "
                "each sample's own tokens. Leave it at 'nll', or pass a compute_loss_func that "
                "returns one loss per sample."
            )
        self.loss_type = "nll"  # older versions of TRL patch the model for chunks
        self.router_aux_loss_coef = self.router_aux_loss_coef or 0.0  # None: as the model has it
        super().__post_init__()


class TRLMixin(DPGrapeMixin):
    """``DPGrapeMixin`` in front of a trainer of TRL, which keeps metrics of the batches it sees."""

    _metrics: dict[str, Any]

    # ---- Training ----

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Serves evaluation only; in training the original would log what it sees in the batch."""
        if self.model.training:
            raise PrivacyError(
                "compute_loss() in training mode would log entropy, token accuracy or rewards of "
                "training data without noise. Call evaluate(), or model.eval() first."
            )
        return super().compute_loss(model, inputs, *args, **kwargs)

    # ---- Logging & Metrics ----

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Leaves out the count of training tokens, which is not kept here."""
        for metrics in self._metrics.values():
            metrics.pop("num_tokens", None)
        super().log(logs, start_time)

    def _send_telemetry(self) -> None:
        """Sends nothing; the original tells TRL's makers about the run."""


class DPGrapeSFTTrainer(TRLMixin, SFTTrainer):
    """TRL's ``SFTTrainer`` whose training is differentially private.

    Arguments, guarantee and errors are those of ``DPGrapeMixin``; ``args`` is a
    ``DPGrapeSFTConfig``. ``peft_config`` and ``formatting_func`` are taken as by ``SFTTrainer``.
    An example is a row of ``train_dataset`` as it is passed; rows without any token to learn, which
    TRL drops, are not counted.
    """

    arguments_class: ClassVar[type[Any]] = DPGrapeSFTConfig
