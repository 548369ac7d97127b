"""The methods that ``benchmark`` and ``gpu_report`` measure: each makes one step.

A step is all work between two batches: forward, backward, clip, noise, record, update. To add a
method, add a row to ``METHODS``.

Shapes: B samples in the batch, T positions.
"""

import copy
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from dp_grape_hf import DPGrapeTrainer, DPGrapeTrainingArguments
from dp_grape_hf.mechanism import LogicalBatch
from recipes.benchmark.models import DECODERS, OPT, Batch, Setting

STEPS = 10_000  # steps of the run; sets sigma and the schedule, and does not affect the time
DATASET_SIZE = 1_000
LEARNING_RATE = 1e-4


Maker = Callable[[nn.Module, Setting, Batch, Path], Any]
"""Returns an object with a method ``step``, which trains a model."""


@dataclass(frozen=True)
class Method:
    """A row of the tables."""

    title: str  # its name in the tables
    make: Maker  # ``(model, setting, batch, folder) -> training``
    # whether it is measured by default. Compiled methods are not: compiling takes long.
    usual: bool = True


def now(device: torch.device) -> tuple[float, float]:
    """Return seconds on the clock and of processor time, when the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()


class DoesNotRun(Exception):
    """Opacus cannot run this setting; the message is shown in the table."""


# ---- AdamW and this package ----


def trainer_of(
    model: nn.Module, setting: Setting, folder: Path, examples: Any, private: bool, **options: Any
) -> Trainer:
    """Return the trainer of this package, with a budget that starts fast, or the plain one."""
    common = {
        "output_dir": str(folder),
        "per_device_train_batch_size": setting.batch_size,
        "max_steps": STEPS,
        "learning_rate": LEARNING_RATE,
        **{"report_to": "none", "save_strategy": "no", "logging_strategy": "no"},
        "disable_tqdm": True,
        "remove_unused_columns": False,  # of models whose forward names no inputs
        **({"bf16": True} if setting.autocast else {}),
        "use_cpu": next(model.parameters()).device.type == "cpu",
    }
    if not private:
        return Trainer(model, TrainingArguments(**common | options), train_dataset=examples)
    budget: dict[str, Any] = {"noise_multiplier": 1.0, "accountant": "rdp", "target_delta": 1e-5}
    budget["projection_rank"] = setting.rank
    args = DPGrapeTrainingArguments(**common | budget | options)
    return DPGrapeTrainer(model, args, train_dataset=examples)


class PlainTraining:
    """Steps of the plain Hugging Face Trainer with its default optimizer, AdamW."""

    def __init__(
        self, model: nn.Module, setting: Setting, batch: Batch, folder: Path, **options: Any
    ) -> None:
        self.trainer = trainer_of(model, setting, folder, None, private=False, **options)
        self.trainer.create_optimizer_and_scheduler(STEPS)
        accelerator = self.trainer.accelerator
        self.model, self.optimizer = accelerator.prepare(model, self.trainer.optimizer)
        self.trainer.current_gradient_accumulation_steps = 1
        self.batch: Any = batch

    def step(self) -> None:
        """Run one step."""
        self.trainer.training_step(self.model, self.batch)
        norm = self.trainer.args.max_grad_norm
        self.trainer.accelerator.clip_grad_norm_(self.model.parameters(), norm)
        self.optimizer.step()
        self.trainer.lr_scheduler.step()
        self.model.zero_grad()


class PrivateTraining:
    """Steps of ``DPGrapeTrainer``, including the noise and the entry in the ledger."""

    def __init__(
        self, model: nn.Module, setting: Setting, batch: Batch, folder: Path, **options: Any
    ) -> None:
        size, chosen = DATASET_SIZE, options.get("learning_rate", LEARNING_RATE) is None
        if chosen or "noise" in options:  # bands are made for a target
            size = round(setting.batch_size / 0.064)
            options |= {"target_epsilon": 4.0, "max_steps": 200}
            options |= {"noise_multiplier": None, "accountant": "pld"}
        if chosen:
            _look_pretrained(model)
        examples = [{key: value[0] for key, value in batch.items()}] * size
        trainer: Any = trainer_of(model, setting, folder, examples, private=True, **options)
        self.trainer, self.model = trainer, trainer.start()
        self.batch = LogicalBatch([batch], [setting.batch_size])

    def step(self) -> None:
        """Run one step."""
        self.trainer.training_step(self.model, self.batch)
        self.trainer.optimizer.step()
        self.trainer.lr_scheduler.step()
        self.model.zero_grad()
        self.trainer.state.global_step += 1  # the projection is redrawn every F steps


@torch.no_grad()
def _look_pretrained(model: nn.Module) -> None:
    """Change the weights of norms: by them the package knows pretrained weights."""
    for module in model.modules():
        if "Norm" in type(module).__name__:
            module.weight.uniform_(0.9, 1.1)


class _Steps(TrainerCallback):
    """Call a function where a step ends and the next one begins."""

    def __init__(self, between: Callable[[], None]) -> None:
        self.on_train_begin = self.on_step_end = lambda *args, **kwargs: between()


def train(
    model: nn.Module,
    setting: Setting,
    folder: Path,
    between: Callable[[], None],
    *,
    steps: int,
    batches: int,
    **options: Any,
) -> None:
    """Train on random examples that a loader draws, in steps of so many physical batches.

    ``between`` is called before the first step and after each. The options are arguments of the
    Trainer; with ``method``, of the private one.
    """
    inputs = setting.inputs(DATASET_SIZE)
    examples = [{name: x[i] for name, x in inputs.items()} for i in range(DATASET_SIZE)]
    private = "method" in options
    size = {"expected_batch_size": setting.batch_size}
    options |= size if private else {"gradient_accumulation_steps": batches}
    options |= {"per_device_train_batch_size": setting.batch_size // batches, "max_steps": steps}
    trainer = trainer_of(model, setting, folder, examples, private, **options)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(_Steps(between))
    trainer.train()


# ---- Opacus ----


class OpacusTraining:
    """Steps of Opacus' DP-Adam: by ``hooks`` for every sample's gradient, or ``ghost`` clipping."""

    def __init__(
        self,
        mode: str,
        model: nn.Module,
        setting: Setting,
        batch: Batch,
        folder: Path | None = None,
        noise_multiplier: float = 1.0,
        max_grad_norm: float = 1.0,
    ) -> None:
        from opacus import optimizers
        from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
        from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

        self.batch = batch
        self._inputs = {key: value for key, value in batch.items() if key != "labels"}
        self._texts = setting.model == OPT
        if mode == "ghost":
            wrapper, make = (
                GradSampleModuleFastGradientClipping,
                optimizers.DPOptimizerFastGradientClipping,
            )
            options = {"max_grad_norm": max_grad_norm, "use_ghost_clipping": True}
        else:
            wrapper, make = GradSampleModule, optimizers.DPOptimizer
            options = {}
        self.model = wrapper(model, loss_reduction="mean", **options)
        self.adamw = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.optimizer = make(
            self.adamw,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=setting.batch_size,
        )
        self._criterion = None
        if mode == "ghost":
            criterion = nn.CrossEntropyLoss(reduction="mean")
            self._criterion = DPLossFastGradientClipping(
                self.model, self.optimizer, criterion, loss_reduction="mean"
            )

    def step(self) -> None:
        """Run one step."""
        self._loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _loss(self) -> Any:
        if self._criterion is None:
            return self.model(**self.batch).loss
        logits, labels = self.model(**self._inputs).logits, self.batch["labels"]
        if not self._texts:
            return self._criterion(logits, labels)
        logits, labels = logits[:, :-1], labels[:, 1:]  # (B, T - 1, vocabulary) and (B, T - 1)
        return self._criterion(logits.flatten(0, 1), labels.flatten(), shape=labels.shape)


# ---- LoRA ----


def adapted(make: Maker, model: Any, setting: Setting, batch: Batch, folder: Path) -> Any:
    """Return the training of an adapter of the setting's rank on all layers but the head."""
    task = "CAUSAL_LM" if setting.model in DECODERS else "SEQ_CLS"
    config = LoraConfig(r=setting.rank, target_modules="all-linear", task_type=task)
    return make(get_peft_model(model, config), setting, batch, folder)  # type: ignore[arg-type]


# ---- The table ----

ADAMW, DP_GRAPE, DP_ADAM = "adamw", "dp_grape", "dp_adam"
CHOSEN, CHOSEN_COMPILED = "dp_grape_chosen", "dp_grape_chosen_compiled"
PRINCIPAL, CORRELATED = "dp_grape_principal", "dp_grape_correlated"
COMPILED, PRIVATE_COMPILED = "adamw_compiled", "dp_grape_compiled"
ADAMW_LORA, DP_LORA = "adamw_lora", "dp_lora"
OPACUS = OPACUS_HOOKS, OPACUS_GHOST = "opacus_hooks", "opacus_ghost"
RANDOM = {"projection": "gaussian"}
MEASURED = {"projection": "principal", "projection_rank": 4}
NOTHING_SET = {"learning_rate": None, "projection_rank": None}
METHODS = {
    ADAMW: Method("Trainer, AdamW (not private)", PlainTraining),
    COMPILED: Method(
        "Trainer, AdamW, torch_compile", partial(PlainTraining, torch_compile=True), usual=False
    ),
    CHOSEN: Method("DPGrapeTrainer, nothing set", partial(PrivateTraining, **NOTHING_SET)),
    CHOSEN_COMPILED: Method(
        "DPGrapeTrainer, nothing set, torch_compile",
        partial(PrivateTraining, torch_compile=True, **NOTHING_SET),
        usual=False,
    ),
    DP_GRAPE: Method("DPGrapeTrainer", partial(PrivateTraining, **RANDOM)),
    PRIVATE_COMPILED: Method(
        "DPGrapeTrainer, torch_compile",
        partial(PrivateTraining, torch_compile=True, **RANDOM),
        usual=False,
    ),
    PRINCIPAL: Method("DPGrapeTrainer, principal, r = 4", partial(PrivateTraining, **MEASURED)),
    CORRELATED: Method(
        "DPGrapeTrainer, principal, correlated noise",
        partial(PrivateTraining, **MEASURED, noise="banded"),
        usual=False,
    ),
    DP_ADAM: Method("DPGrapeTrainer, DP-Adam", partial(PrivateTraining, projection="identity")),
    OPACUS_HOOKS: Method("Opacus, hooks", partial(OpacusTraining, "hooks")),
    OPACUS_GHOST: Method("Opacus, ghost clipping", partial(OpacusTraining, "ghost")),
    ADAMW_LORA: Method(
        "Trainer, AdamW, LoRA (not private)", partial(adapted, PlainTraining), usual=False
    ),
    DP_LORA: Method(
        "DPGrapeTrainer, LoRA",
        partial(adapted, partial(PrivateTraining, method="dp_lora")),
        usual=False,
    ),
}
"""Name -> method. DP-Adam is our own engine without a projection (``projection="identity"``)."""
USUAL = tuple(name for name, method in METHODS.items() if method.usual)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the warnings of other libraries off the screen."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus reports its non-secure generator and its hooks
        yield


def prepare(
    name: str, original: nn.Module, setting: Setting, batch: Batch, folder: Path
) -> Callable[[], None]:
    """Return a method's step on a copy of the model, after it has run once."""
    try:
        with quiet():
            training = METHODS[name].make(copy.deepcopy(original), setting, batch, folder / name)
            training.step()
    except Exception as error:  # Opacus fails in many ways; none of them may end the benchmark
        if name not in OPACUS:
            raise
        text = " ".join(str(error).split()) or "no message"
        raise DoesNotRun(f"{type(error).__name__}: {text[:160]}") from error
    return training.step
