"""What the launcher, and a scheduler set by hand, would do to the guarantee."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from accelerate import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from transformers import Trainer

from dp_grape_hf.arguments import METHODS
from dp_grape_hf.distributed import group_size
from dp_grape_hf.errors import PrivacyError

# By which accelerate launch asks for them.
ASKS_FOR_FSDP = "ACCELERATE_USE_FSDP"
ASKS_FOR_PARALLELISM = "ACCELERATE_USE_PARALLELISM_CONFIG"
_NOT_SPLIT = ("tp_size", "cp_size", "sp_size")


def refuse_launcher(trainer: Trainer) -> None:
    """Refuses what ``accelerate launch`` and the machine decide, once the trainer knows it.

    Raises:
        PrivacyError: with what was found and what to do.
    """
    args = trainer.args
    if trainer.is_deepspeed_enabled:
        raise PrivacyError(
            "DeepSpeed was asked for by the launcher, which owns gradients and optimizer steps. "
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
            "expected_batch_size instead. Each draw must be one update."
        )
    if args.n_gpu > 1:
        raise PrivacyError(
            f"{args.n_gpu=}: DataParallel splits a batch behind the engine's back. Start one "
            "process per GPU with accelerate launch, or set CUDA_VISIBLE_DEVICES to one GPU."
        )


class Sharding(NamedTuple):
    """How weights are to be spread over processes (FSDP2)."""

    layers: Collection[str] | None  # classes; None: those that the model names
    reshard_after_forward: bool
    replicas: int  # groups of processes, each of which has all weights


def sharding_of(args: Any) -> Sharding | None:
    """Returns how ``fsdp_config``, or the launcher, wants weights to be sharded, if it does.

    Args:
        args: a ``DPGrapeArguments``.

    Raises:
        PrivacyError: for what a private run does not have; with what to do.
    """
    settings, parallel, row = args.fsdp_plugin_args, args.parallelism_config, METHODS[args.method]
    if settings is None and not _asked(ASKS_FOR_FSDP):
        if parallel is not None:
            raise PrivacyError(
                "parallelism_config shards weights only with fsdp=True (accelerate launch "
                "--use_fsdp --fsdp_version 2). Set it, or leave parallelism_config out."
            )
        return None
    by_launcher = os.environ.get("FSDP_VERSION", 1)
    version = int(by_launcher if settings is None else settings.get("fsdp_version", 1))
    if version != 2:
        raise PrivacyError(
            f"FSDP of {version=} is not supported, which makes other parameters of the model's. "
            'Set fsdp_config={"version": 2}, or accelerate launch --fsdp_version 2.'
        )
    plugin = FullyShardedDataParallelPlugin(**settings or {})
    if parallel is None and _asked(ASKS_FOR_PARALLELISM):
        parallel = ParallelismConfig()
    sizes = {} if parallel is None else {n: getattr(parallel, n) or 1 for n in _NOT_SPLIT}
    split = {name: size for name, size in sizes.items() if size > 1}
    for what, (found, advice) in {
        "cpu_offload": (
            type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy",
            "Take more processes, or smaller physical batches",
        ),
        "mixed_precision_policy": (
            plugin.mixed_precision_policy is not None,
            "Set bf16=True, which is what it is without fsdp, or load the model in bfloat16",
        ),
        "activation_checkpointing": (
            plugin.activation_checkpointing,
            "Set the Trainer's gradient_checkpointing=True instead",
        ),
        "auto_wrap_policy": (
            plugin.min_num_params,
            'Name the classes of layers by fsdp_config={"transformer_layer_cls_to_wrap": [...]}',
        ),
        f"parallelism_config with {split}": (
            split,
            "It would spread one example over processes. Leave dp_replicate_size and dp_shard_size",
        ),
        f"method={args.method!r}": (
            row.zeroth_order or not row.private,
            "Choose a private method with gradients, or start plain processes",
        ),
        f"engine={args.engine!r}": (args.engine != "layerwise", "Leave it at 'layerwise'"),
    }.items():
        if found:
            raise PrivacyError(f"{what} with fsdp is not supported. {advice}.")
    return Sharding(
        plugin.transformer_cls_names_to_wrap,
        bool(plugin.reshard_after_forward),
        (parallel.dp_replicate_size or 1) if parallel is not None else 1,
    )


@contextmanager
def hidden_from_host(args: Any) -> Iterator[None]:
    """Has a host take a run with sharded weights for one of plain processes.

    It would shard the model after the optimizer was made, reduce gradients by FSDP's hooks, and
    write checkpoints of its own kind.

    Args:
        args: a ``DPGrapeArguments``.
    """
    given = args.fsdp_plugin_args, args.parallelism_config
    variables = {name: os.environ.pop(name, None) for name in (ASKS_FOR_FSDP, ASKS_FOR_PARALLELISM)}
    args.fsdp_plugin_args = args.parallelism_config = None
    try:
        yield
    finally:
        args.fsdp_plugin_args, args.parallelism_config = given
        os.environ.update({name: value for name, value in variables.items() if value is not None})


def _asked(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() == "true"


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
