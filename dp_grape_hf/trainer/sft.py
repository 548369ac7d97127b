"""``DPGrapeSFTTrainer``: TRL's supervised fine-tuning, trained privately; and ``TRLMixin``.

TRL prepares the data set (chat template, tokens, labels, truncation), each example separately. Its
loss is used in evaluation only: it divides by the number of tokens of the batch, and logs entropy,
token accuracy and token counts of the training data.

Needs ``pip install 'dp_grape_hf[sft]'``.
"""

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
    "packing": "a row would have several examples, and clipping a row bounds none of them; leave "
    "it at False",
    "padding_free": "a batch would be one row, in which examples cannot be separated; leave it "
    "at False",
    "activation_offloading": "it is not tested with per-sample gradients; use "
    "gradient_checkpointing=True",
    "router_aux_loss_coef": "the load-balancing loss of experts averages over the tokens of the "
    "batch, so it couples samples; set it to 0.0",
}
"""Name of an option of ``SFTConfig`` -> why it is not supported, and what to do instead."""


class TRLArguments(DPGrapeArguments):
    """``DPGrapeArguments`` in front of a config of TRL, which can be made on any machine.

    As in TRL, and other than in ``TrainingArguments``, gradient checkpointing is on by default, and
    bfloat16 autocast where a GPU has it.
    """

    def __post_init__(self) -> None:
        """Leave bfloat16 off on CPUs, unless it is asked for: TRL's default is on."""
        here: Any = self
        if here.bf16 is None and (here.use_cpu or not is_torch_bf16_gpu_available()):
            here.bf16 = False
        super().__post_init__()


@accepts_short_names
@dataclass(repr=False)
class DPGrapeSFTConfig(TRLArguments, SFTConfig):  # type: ignore[misc]
    """``SFTConfig`` of a differentially private run; see ``TRLArguments``.

    ``completion_only_loss`` is on for data sets of prompts and completions.
    ``router_aux_loss_coef`` is 0 unless given.

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
        """Check the options of TRL, and then all others."""
        if self.loss_type not in (None, "nll", "chunked_nll"):
            raise PrivacyError(
                f"loss_type={self.loss_type!r} is not supported: training uses the mean "
                "cross-entropy of the tokens of each example. Leave it at 'nll', or pass a "
                "compute_loss_func that returns one loss per sample."
            )
        self.loss_type = "nll"  # older versions of TRL patch the model for chunks
        self.router_aux_loss_coef = self.router_aux_loss_coef or 0.0  # None: as the model has it
        super().__post_init__()


class TRLMixin(DPGrapeMixin):
    """``DPGrapeMixin`` in front of a trainer of TRL, which keeps metrics of the batches it sees."""

    _metrics: dict[str, Any]

    # ---- Training ----

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of TRL, in evaluation only; it logs metrics of the batch."""
        if self.model.training:
            raise PrivacyError(
                "compute_loss() was called in training mode. TRL would log entropy, token accuracy "
                "or rewards of training data without noise. Call evaluate(), or model.eval() first."
            )
        return super().compute_loss(model, inputs, *args, **kwargs)

    # ---- Logging & Metrics ----

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log without the count of training tokens, which is not private."""
        for metrics in self._metrics.values():
            metrics.pop("num_tokens", None)
        super().log(logs, start_time)

    def _send_telemetry(self) -> None:
        """Send nothing; the host would report the run to the developers of TRL."""


class DPGrapeSFTTrainer(TRLMixin, SFTTrainer):
    """TRL's ``SFTTrainer`` whose training is differentially private.

    Arguments, guarantee and errors are as in ``DPGrapeMixin``; ``args`` is a
    ``DPGrapeSFTConfig``. ``peft_config`` and ``formatting_func`` work as in ``SFTTrainer``.
    An example is a row of ``train_dataset`` as passed. TRL drops rows without any token to learn;
    they are not counted.
    """

    arguments_class: ClassVar[type[Any]] = DPGrapeSFTConfig
