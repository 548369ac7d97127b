"""Options of the Hugging Face Trainer under which the guarantee would not hold, and why."""

from __future__ import annotations

import os
from typing import Any

from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import SaveStrategy, SchedulerType
from transformers.training_args import OptimizerNames

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.processes import group_size

_SHARDED = "sharded weights are not supported yet; use plain multi-process launch"
_COMPILED = "it would not see the engine's per-layer forwards; leave it out"

REFUSED_IF_SET = {
    "auto_find_batch_size": "it restarts training after steps whose releases are spent; set "
    "per_device_train_batch_size, which has no influence on privacy",
    "deepspeed": "it owns gradients and optimizer steps; per-sample gradients need accelerate's "
    "plain or multi-process launch",
    "fsdp": _SHARDED,
    "parallelism_config": _SHARDED,
    "fp16": "its loss scaler skips steps on Inf, which depends on the data; use bf16=True",
    "torch_compile": _COMPILED,
    "torch_compile_backend": _COMPILED,
    "torch_compile_mode": _COMPILED,
    "use_liger_kernel": "its fused losses reduce over the batch; leave it out",
    "neftune_noise_alpha": "its scale depends on the padded length, hence on batch-mates; leave it "
    "out",
    "debug": "it prints extreme activations of the training data; debug on public data with the "
    "plain Trainer",
    "optim_args": "the optimizer is Adam in projected coordinates; set learning_rate, adam_beta1, "
    "adam_beta2, adam_epsilon and weight_decay",
}
"""Name of an option of ``TrainingArguments`` -> why it is refused, and what to do instead."""

_MLFLOW = ("HF_MLFLOW_LOG_ARTIFACTS", "false")
UPLOADING_TRACKERS = {
    "wandb": (("WANDB_LOG_MODEL", "false"),),
    "mlflow": (_MLFLOW,),
    "clearml": (("CLEARML_LOG_MODEL", "true"),),
    "dagshub": (("HF_DAGSHUB_LOG_ARTIFACTS", "false"), _MLFLOW),
    "dvclive": (("HF_DVCLIVE_LOG_MODEL", "false"),),
    "swanlab": (("SWANLAB_LOG_MODEL", "false"),),
    "comet_ml": (("COMET_LOG_ASSETS", "false"),),
    "flyte": (("", "true"),),
}
"""Name in ``report_to`` -> the variables that make it upload whole checkpoints, and defaults."""


def refuse_host_options(
    args: TrainingArguments, *, log_unnoised_statistics: bool, eval_data_is_public: bool
) -> None:
    """Refuses options of the Hugging Face Trainer under which the guarantee would not hold.

    Raises:
        PrivacyError: with the option, its value, the reason and what to do.
    """
    for name, reason in REFUSED_IF_SET.items():
        if getattr(args, name):
            raise PrivacyError(f"{name}={getattr(args, name)!r} is refused: {reason}.")
    if not args.skip_memory_metrics:
        raise PrivacyError(
            "skip_memory_metrics=False is refused: peak memory tells the sizes of the draws. Leave "
            "it at True."
        )
    if not 0 <= args.label_smoothing_factor < 1:
        raise PrivacyError(
            f"label_smoothing_factor={args.label_smoothing_factor!r} must be at least 0 and less "
            "than 1."
        )
    if args.train_sampling_strategy not in ("random", "group_by_length"):
        raise PrivacyError(
            f"train_sampling_strategy={args.train_sampling_strategy!r} is refused: batches are "
            "Poisson draws, in which each example enters independently. Leave it at 'random', or "
            "take 'group_by_length', which splits each draw by lengths."
        )
    optim = OptimizerNames(args.optim).value
    if optim not in ("adamw_torch", "adamw_torch_fused"):
        raise PrivacyError(
            f"{optim=} is refused: the optimizer is Adam in projected coordinates. Leave optim at "
            "its default."
        )
    counts = args.include_num_input_tokens_seen
    if counts not in ("no", False) and not log_unnoised_statistics:
        raise PrivacyError(
            f"include_num_input_tokens_seen={counts!r} is refused: token counts of drawn batches "
            "are un-noised functions of private data. For debugging on public data, set "
            "log_unnoised_statistics=True with an explicit noise_multiplier."
        )
    if not eval_data_is_public:
        _refuse_following_evaluation(args)


def refuse_uploading_trackers(trackers: str | list[str] | None) -> None:
    """Refuses trackers that would log gradients, or send checkpoints past the allow-list.

    Raises:
        PrivacyError: with the tracker, what makes it upload, and what to do.
    """
    trackers = [trackers] if isinstance(trackers, str) else trackers or []
    watched = os.environ.get("WANDB_WATCH")
    if "wandb" in trackers and watched in ("all", "gradients"):
        raise PrivacyError(
            f"report_to={trackers!r} with WANDB_WATCH={watched!r} is refused: wandb would log "
            "gradients of batches, without noise. Unset WANDB_WATCH, or set it to 'parameters'."
        )
    pairs = [(name, *pair) for name in trackers for pair in UPLOADING_TRACKERS.get(name, ())]
    for tracker, variable, default in pairs:
        value = os.environ.get(variable, default)
        if value.strip().lower() not in ("", "0", "false", "no", "off", "none"):
            how = f"Set the environment variable {variable}=false" if variable else "Leave it out"
            raise PrivacyError(
                f"report_to={trackers!r} with {variable or 'its default'}={value!r} is refused: "
                f"{tracker} would upload whole checkpoints, with optimizer state and everything "
                f"else that stays on this machine. {how}; push_to_hub publishes the model."
            )


def _refuse_following_evaluation(args: TrainingArguments) -> None:
    """Refuses to choose weights or learning rates by a metric of evaluation data."""
    strategy, scheduler = SaveStrategy(args.save_strategy), SchedulerType(args.lr_scheduler_type)
    chooses = args.load_best_model_at_end or strategy is SaveStrategy.BEST
    if args.metric_for_best_model is not None and args.save_total_limit:
        chooses = True  # the best checkpoint is the one that is not deleted
    if scheduler.value in ("reduce_lr_on_plateau", "greedy"):
        option = f"lr_scheduler_type={scheduler.value!r}"
    elif chooses:
        option = (
            f"save_strategy={strategy.value!r} with "
            f"load_best_model_at_end={args.load_best_model_at_end!r}"
        )
    else:
        return
    raise PrivacyError(
        f"{option}: training would follow a metric of the evaluation data, which no epsilon "
        "covers. Set eval_data_is_public=True if that data is public; else use the last checkpoint "
        "and a fixed schedule."
    )


def refuse_launcher(trainer: Trainer) -> None:
    """Refuses what ``accelerate launch`` and the machine decide, once the trainer knows it.

    Raises:
        PrivacyError: with what was found and what to do.
    """
    args = trainer.args
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise PrivacyError(
            "DeepSpeed or FSDP was asked for by the launcher. Sharded weights are not supported "
            "yet; use accelerate launch with plain multi-process training."
        )
    variables = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
    started = {name: int(os.environ.get(name, 1)) for name in variables}
    for name, size in {**started, "the process group's size": group_size()}.items():
        if size > args.world_size:
            raise PrivacyError(
                f"{name}={size}, but this process trains alone (world_size={args.world_size}): "
                "each process would spend the budget on the same data, and the ledger would count "
                "one of them. On CPUs pass use_cpu=True (--use_cpu)."
            )
    if args.gradient_accumulation_steps != 1:
        raise PrivacyError(
            f"The accelerator's configuration asks for {args.gradient_accumulation_steps=}; set "
            "expected_batch_size instead. Each draw must be one update."
        )
    if args.n_gpu > 1:
        raise PrivacyError(
            f"{args.n_gpu=}: DataParallel splits a batch behind the engine's back. Start one "
            "process per GPU with accelerate launch, or set CUDA_VISIBLE_DEVICES to one GPU."
        )


def refuse_scheduler(scheduler: Any, eval_data_is_public: bool) -> None:
    """Refuses a scheduler, perhaps one set by hand, that follows evaluation data.

    Raises:
        PrivacyError: unless that data was declared public.
    """
    name = type(scheduler).__name__
    if name in ("ReduceLROnPlateau", "GreedyLR") and not eval_data_is_public:
        raise PrivacyError(
            f"The {name} follows a metric of the evaluation data, which no epsilon covers. Set "
            "eval_data_is_public=True if that data is public; else take a fixed schedule."
        )
