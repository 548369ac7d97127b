"""The methods that ``benchmark`` and ``gpu_report`` measure: each makes one step.

A step is everything between two batches: forward, backward, clip, noise, record, update. To add a
method, add a row to ``METHODS``.

Shapes: B samples in the batch, T positions.
"""

from __future__ import annotations

import copy
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.func import functional_call
from transformers import Trainer, TrainingArguments

from dp_grape_hf import DPGrapeTrainer, DPGrapeTrainingArguments
from dp_grape_hf.errors import UnsupportedModelError
from dp_grape_hf.mechanism import LogicalBatch
from recipes.benchmark.models import DECODERS, OPT, Batch, Setting
from recipes.models.matrix import own_gradients

Step = Callable[[], None]

STEPS = 10_000  # of the run that a timed step is part of: sets sigma and the schedule, not the time
DATASET_SIZE = 1_000
LEARNING_RATE = 1e-4
WRONG = 1e-2  # relative error above which a clipped sum is called another quantity


class Training(Protocol):
    """A model in training."""

    def step(self) -> None:
        """Runs one step."""


Maker = Callable[[nn.Module, Setting, Batch, Path], Training]


@dataclass(frozen=True)
class Method:
    """A row of the tables.

    Args:
        title: what tables call it.
        make: ``(model, setting, batch, folder) -> training``.
        ours: whether it is neither of Opacus nor of Opake.
        opacus: how Opacus computes gradients, if it does: ``hooks``, ``functorch`` or ``ghost``.
        materialises: whether it forms the gradient of every weight for every sample.
        usual: whether it is measured unless something else is asked for.
    """

    title: str
    make: Maker
    ours: bool = True
    opacus: str | None = None
    materialises: bool = False
    usual: bool = True


def now(device: torch.device) -> tuple[float, float]:
    """Returns seconds on the clock and of processor time, when the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()


class DoesNotRun(Exception):
    """A method cannot do this setting; the message is what the table says."""


# ---- Ours, and what it is compared with ----


class PlainTraining:
    """Steps of the plain Hugging Face Trainer with its default optimizer, AdamW."""

    def __init__(
        self, model: nn.Module, setting: Setting, batch: Batch, folder: Path, **options: Any
    ) -> None:
        args = TrainingArguments(**_common(setting, batch, folder), **options)
        self.trainer = Trainer(model, args)
        self.trainer.create_optimizer_and_scheduler(STEPS)
        accelerator = self.trainer.accelerator
        self.model, self.optimizer = accelerator.prepare(model, self.trainer.optimizer)
        self.trainer.current_gradient_accumulation_steps = 1
        self.batch = batch

    def step(self) -> None:
        """Runs one step."""
        self.trainer.training_step(self.model, self.batch)
        norm = self.trainer.args.max_grad_norm
        self.trainer.accelerator.clip_grad_norm_(self.model.parameters(), norm)
        self.optimizer.step()
        self.trainer.lr_scheduler.step()
        self.model.zero_grad()


def _private_trainer(
    model: nn.Module, setting: Setting, batch: Batch, folder: Path, **options: Any
) -> DPGrapeTrainer:
    budget: dict[str, Any] = {"noise_multiplier": 1.0, "accountant": "rdp"}  # the fastest to start
    size = DATASET_SIZE
    if "noise" in options:  # eight bands
        budget = {"target_epsilon": 4.0, "max_steps": 200}
        size = round(setting.batch_size / 0.064)
    args = DPGrapeTrainingArguments(
        **_common(setting, batch, folder)
        | {"target_delta": 1e-5, "projection_rank": setting.rank, **budget, **options}
    )
    dataset = [{key: value[0] for key, value in batch.items()}] * size
    return DPGrapeTrainer(model, args, train_dataset=dataset)


class PrivateTraining:
    """Steps of ``DPGrapeTrainer``, with noise and with the record in the ledger."""

    def __init__(
        self, model: nn.Module, setting: Setting, batch: Batch, folder: Path, **options: Any
    ) -> None:
        self.trainer = _private_trainer(model, setting, batch, folder, **options)
        self.model = self.trainer.start()
        self.batch = LogicalBatch([batch], [setting.batch_size])

    def step(self) -> None:
        """Runs one step."""
        self.trainer.training_step(self.model, self.batch)
        self.trainer.optimizer.step()
        self.trainer.lr_scheduler.step()
        self.model.zero_grad()
        self.trainer.state.global_step += 1  # the projection is redrawn every F steps


def measuring_time(setting: Setting, device: torch.device) -> dict[str, float]:
    """Returns what measuring principal directions takes, once in a run: on the clock and of CPU."""
    model = setting.build_on(device)
    with device:
        batch = setting.inputs()
    with tempfile.TemporaryDirectory() as folder, quiet():
        trainer = _private_trainer(model, setting, batch, Path(folder), **MEASURED)
        start = now(device)
        trainer.private_run.projectors_at(0)
        wall, cpu = (b - a for a, b in zip(start, now(device), strict=True))
    return {"seconds": wall, "cpu_seconds": cpu}


def _common(setting: Setting, batch: Batch, folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": setting.batch_size,
        "max_steps": STEPS,
        "learning_rate": LEARNING_RATE,
        "report_to": "none",
        "disable_tqdm": True,
        **({"bf16": True} if setting.autocast else {}),
        "use_cpu": next(iter(batch.values())).device.type == "cpu",
    }


# ---- Opacus ----


class OpacusTraining:
    """Steps of Opacus' DP-Adam.

    Args:
        mode: how gradients are computed. ``hooks`` has a rule per layer and ``functorch`` none, and
            both form every sample's gradient; ``ghost`` needs two backward passes, and does not.
        noise_multiplier: sigma.
        max_grad_norm: C.
    """

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
            options = {"force_functorch": mode == "functorch"}
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
        """Runs one step."""
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


def opacus(mode: str, title: str) -> Method:
    """Returns the row of a mode of Opacus."""
    make = partial(OpacusTraining, mode)
    return Method(f"Opacus, {title}", make, False, opacus=mode, materialises=mode != "ghost")


# ---- Opake ----


class OpakeTraining:
    """Steps of Opake's DP-AdamW, by its functional parts: its trainer takes neither family.

    Its ``vmap`` takes no mask, so that it is given none: it is one of ones.
    """

    def __init__(self, model: nn.Module, setting: Setting, batch: Batch, folder: Path) -> None:
        from opake.dpsgd.clipping import clipped_grad
        from opake.dpsgd.noise import gaussian_noise
        from opake.optimizers import adamw
        from opake.random import key

        model.set_attn_implementation("eager")  # type: ignore[operator]
        inputs = {name: value for name, value in batch.items() if name != "attention_mask"}

        def loss(params: dict[str, Tensor], *rows: Tensor) -> Tensor:
            alone = {name: row.unsqueeze(0) for name, row in zip(inputs, rows, strict=True)}
            found: Tensor = functional_call(model, params, (), alone).loss
            return found

        self._params = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
        self._rows = tuple(inputs.values())
        self._gradients, self._clipping = clipped_grad(
            loss,
            clipping_norm=1.0,
            batch_argnums=tuple(range(1, 1 + len(inputs))),
            normalize_by=setting.batch_size,
        )
        self._add_noise, self._noise = gaussian_noise(noise_multiplier=1.0, key=key(0))
        self._adamw = adamw(lr=LEARNING_RATE)
        self._moments = self._adamw.init(self._params)

    def step(self) -> None:
        """Runs one step."""
        clipped, self._clipping = self._gradients(self._params, *self._rows, state=self._clipping)
        private, self._noise = self._add_noise(clipped, self._noise)
        updates, self._moments = self._adamw.update(private, self._moments, params=self._params)
        for name, update in updates.items():
            self._params[name].add_(update)


# ---- LoRA ----


def adapted(make: Maker, model: Any, setting: Setting, batch: Batch, folder: Path) -> Training:
    """Returns what trains an adapter of the setting's rank on all layers but the head."""
    task = "CAUSAL_LM" if setting.model in DECODERS else "SEQ_CLS"
    config = LoraConfig(r=setting.rank, target_modules="all-linear", task_type=task)
    return make(get_peft_model(model, config), setting, batch, folder)  # type: ignore[arg-type]


# ---- Whether another library is right ----


def opacus_error(mode: str, setting: Setting) -> float:
    """Returns the relative error of Opacus' clipped gradient on a tiny model of the family.

    The exact value is what autograd says of the loss of each sample alone, clipped to half of the
    smallest norm, so that a wrong norm shows.

    Raises:
        DoesNotRun: if Opacus refuses the model or fails.
    """
    tiny = replace(
        setting, hidden_size=32, layers=1, vocab_size=50, batch_size=3, length=4, heads=2
    )
    tiny = replace(tiny, dtype="float32", gradient_checkpointing=False, dropout=0.0)
    model, batch = tiny.build(), tiny.inputs()
    _, gradients = own_gradients(model, batch)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)  # (B,)
    bound = norms.min().item() / 2
    expected = _joined([(bound / norms) @ g.flatten(1) for g in gradients.values()])
    found: list[Tensor] = []

    def look(optimizer: torch.optim.Optimizer, *args: Any) -> None:
        gradients = (p.grad for group in optimizer.param_groups for p in group["params"])
        found[:] = [torch.zeros(()) if g is None else g.detach().clone() for g in gradients]

    with told_why(), quiet():
        training = OpacusTraining(mode, model, tiny, batch, None, 0.0, bound)
        training.adamw.register_step_pre_hook(look)
        training.step()
    actual = tiny.batch_size * _joined(found)
    if actual.shape != expected.shape:
        return float("inf")
    return ((actual - expected).norm() / expected.norm()).item()


def _joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


# ---- The table ----

ADAMW, DP_GRAPE, FUNCTORCH, DP_ADAM = "adamw", "dp_grape", "dp_grape_functorch", "dp_adam"
PRINCIPAL, CORRELATED = "dp_grape_principal", "dp_grape_correlated"
COMPILED, PRIVATE_COMPILED, OPAKE = "adamw_compiled", "dp_grape_compiled", "opake"
LORA = ADAMW_LORA, DP_LORA, OPAKE_LORA = "adamw_lora", "dp_lora", "opake_lora"
RANDOM = {"projection": "gaussian"}
MEASURED = {"projection": "principal", "projection_rank": 4}
METHODS = {
    ADAMW: Method("Trainer, AdamW (not private)", PlainTraining),
    COMPILED: Method(
        "Trainer, AdamW, torch_compile", partial(PlainTraining, torch_compile=True), usual=False
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
    FUNCTORCH: Method(
        "DPGrapeTrainer, functorch engine", partial(PrivateTraining, engine="functorch", **RANDOM)
    ),
    DP_ADAM: Method("DPGrapeTrainer, DP-Adam", partial(PrivateTraining, projection="identity")),
    "opacus_hooks": opacus("hooks", "hooks"),
    "opacus_functorch": opacus("functorch", "functorch"),
    "opacus_ghost": opacus("ghost", "ghost clipping"),
    OPAKE: Method("Opake", OpakeTraining, ours=False, materialises=True, usual=False),
    ADAMW_LORA: Method(
        "Trainer, AdamW, LoRA (not private)", partial(adapted, PlainTraining), usual=False
    ),
    DP_LORA: Method(
        "DPGrapeTrainer, LoRA",
        partial(adapted, partial(PrivateTraining, method="dp_lora")),
        usual=False,
    ),
    OPAKE_LORA: Method("Opake, LoRA", partial(adapted, OpakeTraining), ours=False, usual=False),
}
"""Name -> method. DP-Adam is our own engine without a projection (``projection="identity"``)."""
USUAL = tuple(name for name, method in METHODS.items() if method.usual)
"""To compile takes up to a minute, and Opake is no package of the tests."""


@contextmanager
def told_why() -> Iterator[None]:
    """Turns whatever another library raises into ``DoesNotRun`` with one line of text."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Opacus fails in many ways; none of them may end the benchmark
        text = " ".join(str(error).split()) or "no message"
        shown = text if len(text) <= 160 else f"{text[:157]}..."
        raise DoesNotRun(f"{type(error).__name__}: {shown}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps the warnings of other libraries off the screen."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus reports its non-secure generator and its hooks
        yield


@dataclass(frozen=True)
class Prepared:
    """A method that has run a step of a setting, and what is to be known about it."""

    step: Step
    note: str = ""


def prepare(
    name: str, original: nn.Module, setting: Setting, batch: Batch, folder: Path
) -> Prepared:
    """Returns a method's step on a copy of the model, after the first one has been run.

    Opacus is first tried on a tiny model, where its result is compared with the definition.

    Raises:
        DoesNotRun: if the method refuses the model, fails, or has not the memory.
    """
    method, note = METHODS[name], ""
    if method.opacus is not None:
        error = opacus_error(method.opacus, setting)
        if error > WRONG:
            note = f"its clipped sum is not the definition's (relative error {error:.2g})"
    if method.materialises:
        _require_memory(original, setting, next(iter(batch.values())).device)
    try:
        with quiet(), nullcontext() if method.ours else told_why():
            training = method.make(copy.deepcopy(original), setting, batch, folder / name)
            training.step()
    except UnsupportedModelError as error:
        raise DoesNotRun(f"refused: {error}") from error
    except torch.OutOfMemoryError as error:
        raise DoesNotRun("out of memory") from error
    return Prepared(training.step, note)


def _require_memory(model: nn.Module, setting: Setting, device: torch.device) -> None:
    """Refuses what would have the machine end the process: a CPU has no out-of-memory error."""
    if device.type != "cpu":
        return
    needed = setting.batch_size * sum(4 * p.numel() for p in model.parameters())
    free = psutil.virtual_memory().available
    if 1.25 * needed > free:
        raise DoesNotRun(
            f"per-sample gradients of {needed / 2**30:.1f} GiB do not fit into "
            f"{free / 2**30:.1f} GiB"
        )
