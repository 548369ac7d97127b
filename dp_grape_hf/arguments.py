"""``DPGrapeTrainingArguments``: what is promised, and which Hugging Face options would break it."""

from __future__ import annotations

import argparse
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from transformers import TrainingArguments
from transformers.trainer_utils import SaveStrategy, SchedulerType
from transformers.training_args import OptimizerNames

from dp_grape_hf.accounting import ACCOUNTANTS
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.per_sample import ENGINES
from dp_grape_hf.projection import PROJECTIONS

ALIASES = {
    "eps": "target_epsilon",
    "delta": "target_delta",
    "r": "projection_rank",
    "F": "projection_update_steps",
}


class _Once(argparse.Action):
    """Stores a value, and refuses to store it twice under two names."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        before = getattr(self, "_before", None)  # (weak reference to the namespace, option)
        if before and before[0]() is namespace:
            raise argparse.ArgumentError(
                self, f"given twice, as {before[1]} and {option_string}; give one of them"
            )
        self._before = (weakref.ref(namespace), option_string)
        setattr(namespace, self.dest, values)


def _short(alias: str) -> dict[str, Any]:
    return {"aliases": [f"--{alias}"], "action": _Once}


@dataclass
class DPGrapeTrainingArguments(TrainingArguments):
    """Training arguments of a differentially private run.

    Exactly one of ``target_epsilon`` and ``noise_multiplier`` is given. The short names ``eps``,
    ``delta``, ``r`` and ``F`` are accepted as keywords and on the command line.

    Other than in ``TrainingArguments``: ``max_grad_norm`` bounds each sample's gradient, not the
    batch's; ``gradient_accumulation_steps`` only multiplies the expected batch size and is then set
    to 1; an epoch has 1/q steps; ``optim`` is Adam in projected coordinates.

    Raises:
        PrivacyError: if a value is out of range, two values contradict each other, or an option
            would void the guarantee. The message names the option, its value and what to do.
    """

    # ---- The promise ----
    target_epsilon: float | None = field(
        default=None,
        metadata={
            "help": "The privacy budget epsilon: the noise is calibrated so that the whole run "
            "spends at most this, and training stops there. Give this or noise_multiplier.",
            **_short("eps"),
        },
    )
    target_delta: float | None = field(
        default=None,
        metadata={
            "help": "The delta at which epsilon holds; well below 1/N, for example 1e-5. No "
            "default: 1/N would depend on the data.",
            **_short("delta"),
        },
    )
    noise_multiplier: float | None = field(
        default=None,
        metadata={
            "help": "sigma: noise std divided by max_grad_norm. Give this or target_epsilon. 0 "
            "trains without noise and without any guarantee, and the ledger says so."
        },
    )
    accountant: str = field(
        default="prv",
        metadata={"help": "How epsilon is computed: prv (an upper bound), pld or rdp."},
    )

    # ---- The mechanism ----
    max_grad_norm: float = field(
        default=1.0,
        metadata={
            "help": "C: the L2 norm that each sample's gradient is clipped to, over all trainable "
            "parameters jointly. inf is allowed only with noise_multiplier=0."
        },
    )
    expected_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "The mean size of the logical batch, q N, and the constant that gradients are "
            "divided by. Default: per_device_train_batch_size * gradient_accumulation_steps * "
            "number of processes. per_device_train_batch_size itself bounds memory only."
        },
    )
    num_samples: int | None = field(
        default=None,
        metadata={
            "help": "The declared dataset size N, from which q = expected_batch_size / N follows. "
            "Default: the length of the training dataset, which treats that length as public."
        },
    )

    # ---- The projection ----
    projection: str = field(
        default="gaussian",
        metadata={"help": f"The family of random projections: {', '.join(sorted(PROJECTIONS))}."},
    )
    projection_rank: int = field(
        default=16,
        metadata={
            "help": "r: the rank of the projected gradients. A layer with min(m, n) <= r is not "
            "projected.",
            **_short("r"),
        },
    )
    projection_update_steps: int = field(
        default=100,
        metadata={"help": "F: resample the projection every this many steps.", **_short("F")},
    )
    projection_seed: int = field(
        default=0,
        metadata={"help": "The public seed of the projections; it stands in the ledger."},
    )
    engine: str = field(
        default="layerwise",
        metadata={
            "help": "How per-sample gradients are computed: layerwise (fast) or functorch (any "
            "model that vmap can trace; slow)."
        },
    )

    # ---- What leaves the machine ----
    log_unnoised_statistics: bool = field(
        default=False,
        metadata={
            "help": "Log the raw training loss and the token counts of drawn batches. They are "
            "functions of private data without noise: for debugging on public data only. The "
            "ledger then says that what was logged is not private."
        },
    )
    eval_data_is_public: bool = field(
        default=False,
        metadata={
            "help": "Declares that the evaluation data is public, so that the best checkpoint may "
            "be chosen by it."
        },
    )

    def __post_init__(self) -> None:
        """Fills in defaults and refuses what would void the guarantee."""
        self._read_numbers()
        self._refuse_values()
        self._refuse_host_options()
        super().__post_init__()
        if self.mixed_precision == "fp16":
            raise PrivacyError(
                "mixed_precision='fp16', from accelerate launch, is refused: its loss scaler skips "
                "steps on Inf, which depends on the data. Use --mixed_precision bf16."
            )
        if self.gradient_checkpointing:  # both names of the option hold the same by now
            self._set_checkpointing_kwargs()
        if self.expected_batch_size is None:
            self.expected_batch_size = (
                self.per_device_train_batch_size
                * self.gradient_accumulation_steps
                * self.world_size
            )
        elif self.gradient_accumulation_steps != 1:
            raise PrivacyError(
                f"expected_batch_size={self.expected_batch_size!r} and "
                f"gradient_accumulation_steps={self.gradient_accumulation_steps!r} both set the "
                "size of the logical batch. Leave gradient_accumulation_steps at 1: the logical "
                "batch is split into physical batches of per_device_train_batch_size by itself."
            )
        self.gradient_accumulation_steps = 1
        if self.logical_batch_size < 1:
            raise PrivacyError(
                f"expected_batch_size={self.logical_batch_size}, the product of "
                f"per_device_train_batch_size={self.per_device_train_batch_size!r}, "
                "gradient_accumulation_steps and the number of processes, must be at least 1."
            )

    @property
    def logical_batch_size(self) -> int:
        """The expected size of the logical batch, q N, which ``__post_init__`` has filled in."""
        assert self.expected_batch_size is not None
        return self.expected_batch_size

    @property
    def private(self) -> bool:
        """Whether noise is asked for."""
        return self.noise_multiplier != 0

    def _set_checkpointing_kwargs(self) -> None:
        kwargs: dict[str, Any] = dict(self.gradient_checkpointing_kwargs or {})  # type: ignore[arg-type]
        if kwargs.setdefault("use_reentrant", False):
            raise PrivacyError(
                "gradient_checkpointing_kwargs={'use_reentrant': True} hides the backward pass "
                "from the engine. Use {'use_reentrant': False}."
            )
        self.gradient_checkpointing_kwargs = kwargs
        if "activation_checkpointing_kwargs" in self.__dataclass_fields__:  # transformers >= 5.20
            self.activation_checkpointing_kwargs = kwargs

    def _read_numbers(self) -> None:
        """Converts our numbers from text, which is what YAML makes of 1e-5."""
        for name, kind in get_type_hints(type(self)).items():
            value = getattr(self, name, None)
            if name not in _OWN_FIELDS or value is None or kind in (str, bool):
                continue
            whole = kind in (int, int | None)
            try:
                number = float(value)
                if isinstance(value, bool) or (whole and number != int(number)):
                    raise ValueError
            except (TypeError, ValueError, OverflowError):
                needed = "a whole number" if whole else "a number"
                raise PrivacyError(f"{name}={value!r} must be {needed}.") from None
            setattr(self, name, int(value) if whole else number)

    def _refuse_values(self) -> None:
        if self.max_grad_norm is None:
            raise PrivacyError("max_grad_norm=None: give C, the norm each sample is clipped to.")
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            raise PrivacyError(
                f"target_epsilon={self.target_epsilon!r} and "
                f"noise_multiplier={self.noise_multiplier!r}: give exactly one of them. "
                "target_epsilon=8.0 asks for a budget; noise_multiplier=0 for no privacy at all."
            )
        if self.private and self.target_delta is None:
            raise PrivacyError(
                "target_delta=None: an epsilon means nothing without its delta. Choose one well "
                "below 1/N, for example target_delta=1e-5."
            )
        if self.log_unnoised_statistics and self.target_epsilon is not None:
            raise PrivacyError(
                "log_unnoised_statistics=True publishes un-noised functions of the training data, "
                f"which no epsilon covers, so it contradicts "
                f"target_epsilon={self.target_epsilon!r}. Debug with "
                "noise_multiplier=..., on public data; the ledger then says not private."
            )
        checks = (
            ("target_epsilon", "greater than 0", lambda v: 0 < v < math.inf),
            ("target_delta", "strictly between 0 and 1", lambda v: 0 < v < 1),
            ("noise_multiplier", "0 or greater, and finite", lambda v: 0 <= v < math.inf),
            ("max_grad_norm", "greater than 0", lambda v: v > 0),
            ("expected_batch_size", "at least 1", lambda v: v >= 1),
            ("num_samples", "at least 1", lambda v: v >= 1),
            ("projection_rank", "at least 1", lambda v: v >= 1),
            ("projection_update_steps", "at least 1", lambda v: v >= 1),
            ("projection_seed", "0 or greater", lambda v: v >= 0),
            ("projection", f"one of {sorted(PROJECTIONS)}", lambda v: v in PROJECTIONS),
            ("engine", f"one of {sorted(ENGINES)}", lambda v: v in ENGINES),
            ("accountant", f"one of {sorted(ACCOUNTANTS)}", lambda v: v in ACCOUNTANTS),
        )
        for name, needed, holds in checks:
            value = getattr(self, name)
            if value is not None and not holds(value):
                raise PrivacyError(f"{name}={value!r} must be {needed}.")
        if self.private and math.isinf(self.max_grad_norm):
            raise PrivacyError(
                f"max_grad_norm={self.max_grad_norm!r} leaves nothing to calibrate the noise to; "
                "give a finite C, or noise_multiplier=0."
            )

    def _refuse_host_options(self) -> None:
        """Refuses options of the Hugging Face Trainer under which the guarantee would not hold."""
        reasons = {
            "auto_find_batch_size": "it restarts training after steps whose releases are spent; "
            "set per_device_train_batch_size, which has no influence on privacy",
            "deepspeed": "it owns gradients and optimizer steps; per-sample gradients need "
            "accelerate's plain or multi-process launch",
            "fsdp": "sharded weights are not supported yet; use plain multi-process launch",
            "parallelism_config": "sharded weights are not supported yet",
            "fp16": "its loss scaler skips steps on Inf, which depends on the data; use bf16=True",
            "torch_compile": "it would not see the engine's per-layer forwards",
            "torch_compile_backend": "it would not see the engine's per-layer forwards",
            "torch_compile_mode": "it would not see the engine's per-layer forwards",
            "use_liger_kernel": "its fused losses reduce over the batch",
            "neftune_noise_alpha": "its scale depends on the padded length, hence on batch-mates",
            "debug": "it prints extreme activations of the training data",
            "optim_args": "the optimizer is Adam in projected coordinates",
            "push_to_hub": "uploads are not filtered yet, and a checkpoint folder holds optimizer "
            "state and logs; upload weights, config, tokenizer, ledger and card yourself",
        }
        for name, reason in reasons.items():
            if getattr(self, name):
                raise PrivacyError(f"{name}={getattr(self, name)!r} is refused: {reason}.")
        if not self.skip_memory_metrics:
            raise PrivacyError(
                "skip_memory_metrics=False is refused: peak memory tells the sizes of the draws."
            )
        if self.label_smoothing_factor:
            raise PrivacyError(
                f"label_smoothing_factor={self.label_smoothing_factor!r} is refused: its loss "
                "averages over the batch. Pass a compute_loss_func that smooths and returns one "
                "loss per sample."
            )
        if self.train_sampling_strategy != "random":
            raise PrivacyError(
                f"train_sampling_strategy={self.train_sampling_strategy!r} is refused: "
                "batches are Poisson draws, in which each example enters independently. Leave it "
                "at 'random'."
            )
        optim = OptimizerNames(self.optim).value
        if optim not in ("adamw_torch", "adamw_torch_fused"):
            raise PrivacyError(
                f"{optim=} is refused: the optimizer is Adam in projected "
                "coordinates. Leave optim at its default."
            )
        if (
            self.include_num_input_tokens_seen not in ("no", False)
            and not self.log_unnoised_statistics
        ):
            raise PrivacyError(
                f"include_num_input_tokens_seen={self.include_num_input_tokens_seen!r} is refused: "
                "token counts of drawn batches are un-noised functions of private data. For "
                "debugging on public data, set "
                "log_unnoised_statistics=True with an explicit noise_multiplier."
            )
        chooses = self.load_best_model_at_end or self.save_strategy == SaveStrategy.BEST
        if self.metric_for_best_model is not None and self.save_total_limit:
            chooses = True  # the best checkpoint is the one that is not deleted
        strategy = SaveStrategy(self.save_strategy)
        scheduler = SchedulerType(self.lr_scheduler_type)
        follows = scheduler.value in ("reduce_lr_on_plateau", "greedy")
        if (chooses or follows) and not self.eval_data_is_public:
            option = (
                f"save_strategy={strategy.value!r} with "
                f"load_best_model_at_end={self.load_best_model_at_end!r}"
            )
            if follows:
                option = f"lr_scheduler_type={scheduler.value!r}"
            raise PrivacyError(
                f"{option}: training would follow a metric of the evaluation data, which no "
                "epsilon covers. Set eval_data_is_public=True if that data is public; else use the "
                "last checkpoint and a fixed schedule."
            )


# The fields declared above, ``max_grad_norm`` included.
_OWN_FIELDS = frozenset(DPGrapeTrainingArguments.__annotations__)

_generated_init = DPGrapeTrainingArguments.__init__


def _init_with_short_names(self: DPGrapeTrainingArguments, *args: Any, **kwargs: Any) -> None:
    for short, name in ALIASES.items():
        if short in kwargs:
            if name in kwargs:
                raise PrivacyError(
                    f"{short}={kwargs[short]!r} and {name}={kwargs[name]!r} are the same quantity; "
                    "give one of them."
                )
            kwargs[name] = kwargs.pop(short)
    _generated_init(self, *args, **kwargs)


DPGrapeTrainingArguments.__init__ = _init_with_short_names  # type: ignore[method-assign]
