"""Training with several processes, with or without sharded weights (FSDP2)."""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend, FullyShardedDataParallelPlugin
from torch import nn
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from dp_grape_hf.arguments import METHODS
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.sharding import is_sharded, load_rows_, mesh_of, shard_, take_from_first_
from dp_grape_hf.trainer.override_checks import Host


class ShardingMixin(Host):
    """Overrides that replace DDP and FSDP of the host."""

    model: nn.Module
    _sharding: Sharding | None = None

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator without DDP and FSDP; the engine adds up clipped sums itself."""
        self._sharding = sharding_of(self.args)
        with nullcontext() if self._sharding is None else _hidden_from_host(self):
            super().create_accelerator_and_postprocess()
        accelerator = weakref.proxy(self.accelerator)  # a cycle would keep the model alive
        self.accelerator.prepare_model = partial(
            Accelerator.prepare_model, accelerator, evaluation_mode=True
        )
        # The engine compiles its passes; nothing else is compiled.
        self.accelerator.state.dynamo_plugin.backend = DynamoBackend.NO

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Move a model to its device, unless it will be sharded."""
        if self._sharding is None:
            super()._move_model_to_device(model, device)

    def _spread_model(self) -> None:
        """Give every process the weights of the first process, or its shard of them."""
        if is_sharded(self.model):
            return
        device = self.args.device
        if self._sharding is not None:
            shard_(self.model, device, mesh_of(device), *self._sharding)
        elif self.args.world_size > 1:
            take_from_first_(self.model, device)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as the host does; shard the weights first, if that is still to be done."""
        if self._sharding is not None:
            self._spread_model()
        return super().evaluation_loop(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save both; a collective call for a sharded model."""
        if not is_sharded(self.model):
            super()._save_optimizer_and_scheduler(output_dir)
            return
        assert self.optimizer is not None
        assert self.lr_scheduler is not None
        state = self.optimizer.state_dict()
        if self.args.should_save:
            torch.save(state, Path(output_dir) / OPTIMIZER_NAME)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the weights; for a sharded model, the rows of this process."""
        if is_sharded(self.model):
            load_rows_(self.model, resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        """Load the best weights; for a sharded model, the rows of this process."""
        if is_sharded(self.model):
            load_rows_(self.model, str(self.state.best_model_checkpoint))
        else:
            super()._load_best_model()


# ---- Settings ----


# Environment variables set by accelerate launch.
_ASKS_FOR_FSDP = "ACCELERATE_USE_FSDP"
_ASKS_FOR_PARALLELISM = "ACCELERATE_USE_PARALLELISM_CONFIG"


class Sharding(NamedTuple):
    """The settings of sharding (FSDP2)."""

    layers: Collection[str] | None  # class names; None for the names that the model declares
    reshard_after_forward: bool


def sharding_of(args: Any) -> Sharding | None:
    """Return the settings of sharding from ``fsdp_config`` or the launcher; None without FSDP.

    Args:
        args: a ``DPGrapeArguments``.

    Raises:
        PrivacyError: for settings that a private run does not support.
    """
    settings, row = args.fsdp_plugin_args, METHODS[args.method]
    if args.parallelism_config is not None or _asked(_ASKS_FOR_PARALLELISM):
        raise PrivacyError(
            "parallelism_config is not supported: some of its settings split an example over "
            "processes. Leave it out; to shard weights, set fsdp=True and "
            "fsdp_config={'version': 2}."
        )
    if settings is None and not _asked(_ASKS_FOR_FSDP):
        return None
    by_launcher = os.environ.get("FSDP_VERSION", 1)
    version = int(by_launcher if settings is None else settings.get("fsdp_version", 1))
    if version != 2:
        raise PrivacyError(
            f"FSDP of {version=} is not supported, because it replaces the model's parameters. "
            'Set fsdp_config={"version": 2}, or accelerate launch --fsdp_version 2.'
        )
    plugin = FullyShardedDataParallelPlugin(**settings or {})
    for what, (is_set, advice) in {
        "cpu_offload": (
            type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy",
            "Take more processes, or smaller physical batches",
        ),
        "mixed_precision_policy": (
            plugin.mixed_precision_policy is not None,
            "Set bf16=True, as without fsdp, or load the model in bfloat16",
        ),
        "activation_checkpointing": (
            plugin.activation_checkpointing,
            "Set the Trainer's gradient_checkpointing=True instead",
        ),
        "auto_wrap_policy": (
            plugin.min_num_params,
            'Name the classes of layers by fsdp_config={"transformer_layer_cls_to_wrap": [...]}',
        ),
        f"method={args.method!r}": (
            row.query is not None,
            "Choose a private method with gradients, or start plain processes",
        ),
        f"engine={args.engine!r}": (args.engine != "layerwise", "Leave it at 'layerwise'"),
    }.items():
        if is_set:
            raise PrivacyError(f"{what} with fsdp is not supported. {advice}.")
    return Sharding(plugin.transformer_cls_names_to_wrap, bool(plugin.reshard_after_forward))


@contextmanager
def _hidden_from_host(trainer: Any) -> Iterator[None]:
    """Hide the settings of sharding from the host."""
    given, trainer.args = trainer.args, copy(trainer.args)
    trainer.args.fsdp_plugin_args = None
    by_launcher = os.environ.pop(_ASKS_FOR_FSDP, None)
    try:
        yield
    finally:
        trainer.args = given
        if by_launcher is not None:
            os.environ[_ASKS_FOR_FSDP] = by_launcher


def _asked(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() == "true"
