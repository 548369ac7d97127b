"""Steps of a whole ``train()``: a loader, and several physical batches in a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from dp_grape_hf import DPGrapeTrainer, DPGrapeTrainingArguments
from recipes.benchmark.methods import DATASET_SIZE, LEARNING_RATE
from recipes.benchmark.models import Setting


class _Steps(TrainerCallback):
    """Call a function where a step ends and the next one begins."""

    def __init__(self, between: Callable[[], None]) -> None:
        self._between = between

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._between()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._between()


def train(
    model: nn.Module,
    setting: Setting,
    folder: Path,
    between: Callable[[], None],
    *,
    steps: int,
    batches: int,
    on_cpu: bool,
    **options: Any,
) -> None:
    """Train on random examples, drawn and collated anew for each step.

    Args:
        model: on its device.
        setting: its B is the number of examples in a step; of a private step, on average.
        folder: for what a run writes.
        between: called before the first step and after each.
        steps: how many.
        batches: physical batches that B examples make.
        on_cpu: whether not to take a GPU.
        options: arguments of the Trainer; with ``method``, of the private one.
    """
    inputs = setting.inputs(DATASET_SIZE)
    examples: Any = [{name: x[i] for name, x in inputs.items()} for i in range(DATASET_SIZE)]
    common: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": setting.batch_size // batches,
        "max_steps": steps,
        "learning_rate": LEARNING_RATE,
        **{"report_to": "none", "save_strategy": "no", "logging_strategy": "no"},
        "disable_tqdm": True,
        "remove_unused_columns": False,  # of models whose forward names no inputs
        "use_cpu": on_cpu,
        **options,
    }
    if "method" in options:
        budget = {"noise_multiplier": 1.0, "accountant": "rdp", "target_delta": 1e-5}
        size = {"expected_batch_size": setting.batch_size, "projection_rank": setting.rank}
        private = DPGrapeTrainingArguments(**budget | size | common)
        trainer: Trainer = DPGrapeTrainer(model, private, train_dataset=examples)
    else:
        plain = TrainingArguments(gradient_accumulation_steps=batches, **common)
        trainer = Trainer(model, plain, train_dataset=examples)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(_Steps(between))
    trainer.train()
