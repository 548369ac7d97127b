"""Refuse options that contradict each other, and options of the Trainer that void the guarantee.

The range of each option is checked before, by `dp_grape_hf.options`.
"""

import math
import os
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from transformers import TrainingArguments
from transformers.trainer_utils import SaveStrategy, SchedulerType
from transformers.training_args import OptimizerNames

from dp_grape_hf.accounting import Adjacency
from dp_grape_hf.arguments.methods import METHODS, Method
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.ledger import BANDED, EXAMPLE, Clipping

# ---- Contradictions between options of this package ----


# Options without effect in some methods: what they act on, and whether a method has it.
_ONLY_FOR: dict[str, tuple[str, Callable[[Method], bool]]] = {
    "optim_target_modules": ("a projection", lambda row: row.projected),
    "gradient_factors": ("gradients that are clipped", lambda row: row.query is None),
    "grad_sample_mode": ("per-sample gradients", lambda row: row.query is None),
}


def refuse_contradictions(args: Any) -> None:
    """Refuse arguments that are each in range, but contradict each other.

    Raises:
        PrivacyError: for the first contradiction; it names the arguments and their values.
    """
    _refuse_promise(args)
    _refuse_method(args)
    _refuse_units(args)
    _refuse_compilation(args)
    if args.noise == BANDED and (reason := reason_against_bands(args)) is not None:
        raise PrivacyError(f"noise={args.noise!r} with {reason}")
    if math.isinf(args.max_grad_norm) and (args.private or args.clipping == Clipping.AUTOMATIC):
        raise PrivacyError(
            f"max_grad_norm={args.max_grad_norm!r} does not bound the sensitivity, so no noise "
            "gives privacy, and clipping='automatic' has no norm to scale to. Pass a finite value, "
            "or noise_multiplier=0 and clipping='flat'."
        )


def _refuse_promise(args: Any) -> None:
    """Refuse a budget that is incomplete or contradicts the noise."""
    if (args.target_epsilon is None) == (args.noise_multiplier is None):
        raise PrivacyError(
            f"target_epsilon={args.target_epsilon!r} and "
            f"noise_multiplier={args.noise_multiplier!r}: pass exactly one of them. "
            "target_epsilon=8.0 sets a budget; noise_multiplier=0 trains without privacy. A YAML "
            "or JSON file needs these long names, not eps and delta."
        )
    if args.private and args.target_delta is None:
        raise PrivacyError(
            "target_delta=None: epsilon has no meaning without a delta. Choose one well below 1/N, "
            "for example target_delta=1e-5."
        )
    if args.secure_noise and not args.private:
        raise PrivacyError(
            f"secure_noise={args.secure_noise!r} contradicts "
            f"noise_multiplier={args.noise_multiplier!r}: there is no noise. Leave it out."
        )


def _refuse_method(args: Any) -> None:
    """Refuse options that the method does not support."""
    row = METHODS[args.method]
    families = sorted(row.projections)
    if args.projection not in families:
        raise PrivacyError(
            f"projection={args.projection!r} must be one of {families} with "
            f"method={args.method!r}. Leave it out, or choose another method."
        )
    defaults = {f.name: f.default for f in fields(args)}
    for name, (what, makes) in _ONLY_FOR.items():
        value = getattr(args, name)
        if value and value != defaults[name] and not makes(row):
            raise PrivacyError(
                f"{name}={value!r} has no effect: it acts on {what}, and method={args.method!r} "
                "has none. Leave it out."
            )


def _refuse_compilation(args: Any) -> None:
    """Refuse to compile a run that does not compute per-sample gradients in one pass."""
    names = ("torch_compile", "torch_compile_backend", "torch_compile_mode")
    given = [f"{name}={getattr(args, name)!r}" for name in names if getattr(args, name)]
    if not given:
        return
    row = METHODS[args.method]
    reasons = {
        f"method={args.method!r} computes no per-sample gradients": row.query is not None,
        f"engine={args.engine!r} runs the model under torch.func, which is not compiled": (
            args.engine != "layerwise"
        ),
        "fsdp gathers weights between layers": bool(args.fsdp),
    }
    if reason := next((text for text, applies in reasons.items() if applies), None):
        raise PrivacyError(f"{given[0]} is not supported: {reason}. Leave it out.")


def reason_against_bands(args: Any) -> str | None:
    """Return why noise cannot be correlated, and what to do; None if it can be."""
    if args.target_epsilon is None:
        return (
            f"noise_multiplier={args.noise_multiplier!r}: the number of bands and the noise are "
            "computed for a budget. Pass target_epsilon instead."
        )
    if METHODS[args.method].query is not None:
        return (
            f"method={args.method!r}: its private updates are not gradients, so noise of later "
            "steps would not cancel noise of earlier ones. Leave noise out."
        )
    if args.adjacency != Adjacency.ADD_OR_REMOVE_ONE:
        return (
            f"adjacency={args.adjacency!r}: the accountants cannot compute epsilon for this "
            "combination. Leave out one of them."
        )
    if args.secure_noise:
        return (
            "secure_noise=True: correlated noise is a sum over steps, which would not stay on the "
            "public grid. Leave out one of them."
        )
    return None


def _refuse_units(args: Any) -> None:
    """Refuse options that contradict ``privacy_unit_column``, or need it."""
    column = args.privacy_unit_column
    if column is None:
        if args.max_examples_per_unit is not None:
            raise PrivacyError(
                f"max_examples_per_unit={args.max_examples_per_unit!r} needs privacy_unit_column: "
                "without it, each example is a unit. Pass privacy_unit_column, or leave "
                "max_examples_per_unit out."
            )
        return
    if column in ("", EXAMPLE):
        raise PrivacyError(
            f"privacy_unit_column={column!r}: the ledger uses {EXAMPLE!r} for single examples. "
            "Pass a column with another, non-empty name."
        )
    if not METHODS[args.method].private:
        raise PrivacyError(
            f"privacy_unit_column={column!r} with method={args.method!r}: this method is not "
            "private, so it has no privacy units. Leave it out, or choose a private method."
        )
    if args.expected_batch_size is None and not args.chooses:
        raise PrivacyError(
            f"expected_batch_size=None with privacy_unit_column={column!r}: the batch size counts "
            "units, but its default counts examples. Pass the expected number of units of a step."
        )


# ---- Options of TrainingArguments ----

REFUSED_IF_SET = {
    "auto_find_batch_size": "it restarts training after steps whose epsilon is already spent. Set "
    "per_device_train_batch_size, which does not change epsilon",
    "deepspeed": "DeepSpeed computes gradients and optimizer steps itself. If the weights are too "
    'large for one device, set fsdp=True and fsdp_config={"version": 2}, otherwise leave it out',
    "fp16": "its loss scaler skips steps on Inf, which depends on the data. Use bf16=True",
    "use_liger_kernel": "its fused losses reduce over the batch. Leave it out",
    "neftune_noise_alpha": "its scale depends on the padded length, and so on the other examples "
    "of the batch. Leave it out",
    "debug": "it prints extreme activations of the training data. Debug on public data with the "
    "plain Trainer",
    "optim_args": "optimizers take their settings from learning_rate, adam_beta1, adam_beta2, "
    "adam_epsilon and weight_decay. Set these",
}
"""Name of an option of ``TrainingArguments`` -> why it is refused, and what to do instead."""

FIXED_OF_HOST = {
    *("max_steps", "num_train_epochs", "gradient_accumulation_steps", "ignore_data_skip"),
    *("skip_memory_metrics", "label_smoothing_factor", "train_sampling_strategy", "optim"),
    *("include_num_input_tokens_seen", "save_strategy", "load_best_model_at_end"),
    *("metric_for_best_model", "optim_target_modules", "torch_compile", "fsdp"),
}
"""More options of ``TrainingArguments`` that cannot change after they were checked: they set the
number of steps, for which the noise is calibrated, or some of their values are refused."""

_MLFLOW = ("HF_MLFLOW_LOG_ARTIFACTS", "false")
TRACKERS: dict[str, tuple[tuple[str, str], ...]] = {
    **dict.fromkeys(
        ("azure_ml", "codecarbon", "kubeflow", "neptune", "tensorboard", "trackio"), ()
    ),
    "wandb": (("WANDB_LOG_MODEL", "false"),),
    "mlflow": (_MLFLOW,),
    "clearml": (("CLEARML_LOG_MODEL", "true"),),
    "dagshub": (("HF_DAGSHUB_LOG_ARTIFACTS", "false"), _MLFLOW),
    "dvclive": (("HF_DVCLIVE_LOG_MODEL", "false"),),
    "swanlab": (("SWANLAB_LOG_MODEL", "false"),),
    "comet_ml": (("COMET_LOG_ASSETS", "false"),),
    "flyte": (("", "true"),),
}
"""Name in ``report_to`` -> the environment variables that make it upload checkpoints, and defaults.

Without these variables, each of these trackers sends only logs and configs, by its source code.
"""


def refuse_host_options(args: Any) -> None:
    """Refuse options that would void the guarantee, before ``TrainingArguments`` checks them."""
    for name, reason in args.refused_if_set.items():
        if getattr(args, name):
            raise PrivacyError(f"{name}={getattr(args, name)!r} is not supported: {reason}.")
    if not args.skip_memory_metrics:
        raise PrivacyError(
            "skip_memory_metrics=False is not supported: the peak memory depends on the sizes of "
            "the sampled batches, which are secret. Leave it at True."
        )
    if not 0 <= args.label_smoothing_factor < 1:
        raise PrivacyError(
            f"label_smoothing_factor={args.label_smoothing_factor!r} must be at least 0 and less "
            "than 1."
        )
    if args.train_sampling_strategy not in ("random", "group_by_length"):
        raise PrivacyError(
            f"train_sampling_strategy={args.train_sampling_strategy!r} is not supported: the "
            "guarantee needs Poisson sampling, which includes each example independently. Leave it "
            "at 'random'. Each sampled batch is split by lengths anyway."
        )
    counts = args.include_num_input_tokens_seen
    if counts not in ("no", False) and args.private:
        raise PrivacyError(
            f"include_num_input_tokens_seen={counts!r} is not supported: token counts of sampled "
            "batches are functions of private data without noise. Leave it out. For debugging on "
            "public data, set noise_multiplier=0."
        )
    if not args.eval_data_is_public:
        _refuse_following_evaluation(args)


def rule_of_optim(optim: Any, update_rule: str | None) -> str | None:
    """Return the update rule that transformers' option ``optim`` names.

    Args:
        optim: its value. AdamW, the default, leaves the choice to ``update_rule``.
        update_rule: the value that the user gave; None if there is none.

    Raises:
        PrivacyError: the optimizer is not supported, or differs from ``update_rule``.
    """
    name = OptimizerNames(optim).value
    if name in ("adamw_torch", "adamw_torch_fused"):
        return update_rule
    if name not in _RULES_OF_OPTIM:
        raise PrivacyError(
            f"optim={name!r} is not supported: the optimizer receives one vector of projected "
            "coordinates, which only an elementwise optimizer of torch can update. Use "
            f"'adamw_torch', or one of: {', '.join(map(repr, _RULES_OF_OPTIM))}."
        )
    if update_rule not in (None, name):
        raise PrivacyError(
            f"optim={name!r} and {update_rule=} name two optimizers. Pass one of them."
        )
    return name


_RULES_OF_OPTIM = "sgd", "rmsprop", "adagrad"


def refuse_machine(args: Any) -> None:
    """Refuse settings of launcher and environment, after ``TrainingArguments`` has read them."""
    _refuse_uploading_trackers(args.report_to)
    if args.mixed_precision == "fp16":
        raise PrivacyError(
            "mixed_precision='fp16', from accelerate launch, is not supported: its loss scaler "
            "skips steps on Inf, which depends on the data. Use --mixed_precision bf16."
        )
    if args.secure_noise and args.world_size > 1:
        raise PrivacyError(
            f"secure_noise={args.secure_noise!r} with {args.world_size} processes is not "
            "supported: the sum over processes would not stay on the public grid. Train in one "
            "process, or leave it out."
        )


def _refuse_uploading_trackers(trackers: str | list[str] | None) -> None:
    """Refuse trackers that would log gradients, or upload whole checkpoints."""
    trackers = [trackers] if isinstance(trackers, str) else trackers or []
    watched = os.environ.get("WANDB_WATCH")
    if "wandb" in trackers and watched in ("all", "gradients"):
        raise PrivacyError(
            f"report_to={trackers!r} with WANDB_WATCH={watched!r} is not supported: wandb would "
            "log gradients without noise. Unset WANDB_WATCH, or set it to 'parameters'."
        )
    if unknown := [name for name in trackers if name not in TRACKERS]:
        raise PrivacyError(
            f"report_to={trackers!r}: {unknown[0]} is not a supported tracker, and may upload "
            f"files that are not private. Choose from {', '.join(sorted(TRACKERS))}. If its "
            "callback sends only logs, pass the callback by callbacks= instead."
        )
    pairs = [(name, *pair) for name in trackers for pair in TRACKERS[name]]
    for tracker, variable, default in pairs:
        value = os.environ.get(variable, default)
        if value.strip().lower() not in ("", "0", "false", "no", "off", "none"):
            how = f"Set the environment variable {variable}=false" if variable else "Leave it out"
            raise PrivacyError(
                f"report_to={trackers!r} with {variable or 'its default'}={value!r} is not "
                f"supported: {tracker} would upload whole checkpoints, whose optimizer and trainer "
                f"states must stay on this machine. {how}; push_to_hub publishes the model."
            )


def _refuse_following_evaluation(args: TrainingArguments) -> None:
    """Refuse to choose weights or learning rates by a metric of private evaluation data."""
    strategy = SaveStrategy(args.save_strategy)
    try:
        scheduler = SchedulerType(args.lr_scheduler_type)
    except ValueError:
        names = ", ".join(repr(scheduler.value) for scheduler in SchedulerType)
        raise PrivacyError(
            f"lr_scheduler_type={args.lr_scheduler_type!r} must be one of: {names}."
        ) from None
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
        f"{option}: training would depend on a metric of the evaluation data, which epsilon does "
        "not cover. Set eval_data_is_public=True if these data are public. Otherwise, use the last "
        "checkpoint and a fixed schedule."
    )
