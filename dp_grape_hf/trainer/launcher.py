"""Checks of launchers, callbacks and schedulers that would break the guarantee."""

import os
from typing import Any

from transformers import EarlyStoppingCallback, Trainer

from dp_grape_hf.distributed import group_size
from dp_grape_hf.errors import PrivacyError


def refuse_launcher(trainer: Trainer) -> None:
    """Check the settings that come from ``accelerate launch`` and the machine.

    Raises:
        PrivacyError: for DeepSpeed, separate processes on the same data, gradient accumulation,
            and DataParallel.
    """
    args = trainer.args
    if trainer.is_deepspeed_enabled:
        raise PrivacyError(
            "The launcher set up DeepSpeed, which would control gradients and optimizer steps. "
            "Use accelerate launch with plain processes, or for sharded weights --use_fsdp "
            "--fsdp_version 2."
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
            "expected_batch_size instead. Each sampled batch must be one update."
        )
    if args.n_gpu > 1:
        raise PrivacyError(
            f"{args.n_gpu=}: DataParallel would split batches, which the engine must do. Start one "
            "process per GPU with accelerate launch, or set CUDA_VISIBLE_DEVICES to one GPU."
        )


def refuse_following_metrics(trainer: Trainer) -> None:
    """Refuse a callback or a scheduler that follows a metric of evaluation data.

    Raises:
        PrivacyError: there is one, and the data were not declared public.
    """
    args: Any = trainer.args
    for follower in (*trainer.callback_handler.callbacks, trainer.lr_scheduler):
        name = type(follower).__name__
        follows = isinstance(follower, EarlyStoppingCallback) or name in _SCHEDULERS
        if follows and not args.eval_data_is_public:
            raise PrivacyError(
                f"The {name} follows a metric of the evaluation data, which no epsilon covers. Set "
                "eval_data_is_public=True if these data are public; otherwise remove the callback, "
                "or choose a fixed schedule."
            )


_SCHEDULERS = ("ReduceLROnPlateau", "GreedyLR")
