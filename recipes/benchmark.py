"""Times one logical step: plain AdamW, DP-GRAPE, and Opacus with hooks and with ghost clipping.

    python -m recipes.benchmark
    python -m recipes.benchmark --hidden_size 768 --layers 12 --batch_size 32 --rounds 20

Needs Opacus (the ``benchmark`` extra). All methods train the same RoBERTa classifier from the same
weights on the same batch, in one process; rounds interleave them, so that a busy moment of the
machine hits all of them alike. A step is everything between two batches: forward, backward, clip,
noise, record, update. Prints medians and the median of the ratios within a round; with ``--json``
also writes them to a file. On two CPU cores it takes about two minutes.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import (
    RobertaConfig,
    RobertaForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

import dp_grape_hf
from dp_grape_hf import DPGrapeTrainer, DPGrapeTrainingArguments
from dp_grape_hf.sampling import LogicalBatch

Step = Callable[[], None]
Batch = dict[str, Tensor]

STEPS = 10_000  # of the run that a timed step is part of: sets sigma and the schedule, not the time
DATASET_SIZE = 1_000


@dataclass
class Setting:
    """The model and the batch: a RoBERTa classifier on random tokens."""

    hidden_size: int = 512
    layers: int = 6
    vocab_size: int = 5_000
    batch_size: int = 16
    length: int = 64
    rank: int = 16

    def model(self, device: torch.device) -> nn.Module:
        """Returns the model in training mode, without dropout."""
        config = RobertaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.layers,
            num_attention_heads=max(1, self.hidden_size // 64),
            intermediate_size=4 * self.hidden_size,
            max_position_embeddings=self.length + 8,
            type_vocab_size=1,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        return RobertaForSequenceClassification(config).train().to(device)

    def batch(self, device: torch.device) -> Batch:
        """Returns one batch, (B, T) tokens and (B,) labels."""
        ids = torch.randint(3, self.vocab_size, (self.batch_size, self.length), device=device)
        labels = torch.randint(0, 2, (self.batch_size,), device=device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def plain_adamw(model: nn.Module, setting: Setting, batch: Batch, folder: Path) -> Step:
    """One step of the plain Hugging Face Trainer."""
    trainer = Trainer(model, TrainingArguments(**_common(setting, folder / "plain")))
    trainer.create_optimizer_and_scheduler(STEPS)
    prepared, optimizer = trainer.accelerator.prepare(model, trainer.optimizer)
    trainer.current_gradient_accumulation_steps = 1

    def step() -> None:
        trainer.training_step(prepared, batch)
        trainer.accelerator.clip_grad_norm_(prepared.parameters(), trainer.args.max_grad_norm)
        optimizer.step()
        trainer.lr_scheduler.step()
        prepared.zero_grad()

    return step


def dp_grape(model: nn.Module, setting: Setting, batch: Batch, folder: Path) -> Step:
    """One step of ``DPGrapeTrainer``, with noise and with the record in the ledger."""
    args = DPGrapeTrainingArguments(
        **_common(setting, folder / "dp_grape"),
        noise_multiplier=1.0,
        delta=1e-5,
        r=setting.rank,
    )
    dataset = [{key: value[0] for key, value in batch.items()}] * DATASET_SIZE
    trainer = DPGrapeTrainer(model, args, train_dataset=dataset)
    prepared, _ = trainer._prepare_for_training(STEPS, None, None)
    logical = LogicalBatch([batch], [setting.batch_size])

    def step() -> None:
        trainer.training_step(prepared, logical)
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
        prepared.zero_grad()
        trainer.state.global_step += 1  # the projection is redrawn every F steps, as in training

    return step


def opacus_hooks(model: nn.Module, setting: Setting, batch: Batch, folder: Path) -> Step:
    """One step of Opacus' DP-Adam with materialised per-sample gradients."""
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    wrapped = GradSampleModule(model, loss_reduction="mean")
    optimizer = DPOptimizer(
        torch.optim.AdamW(wrapped.parameters(), lr=1e-4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=setting.batch_size,
    )

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        wrapped(**batch).loss.backward()
        optimizer.step()

    return step


def opacus_ghost(model: nn.Module, setting: Setting, batch: Batch, folder: Path) -> Step:
    """One step of Opacus' DP-Adam with ghost clipping: two backward passes."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    wrapped = GradSampleModuleFastGradientClipping(
        model, max_grad_norm=1.0, use_ghost_clipping=True, loss_reduction="mean"
    )
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.AdamW(wrapped.parameters(), lr=1e-4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=setting.batch_size,
    )
    criterion = DPLossFastGradientClipping(
        wrapped, optimizer, nn.CrossEntropyLoss(reduction="mean"), loss_reduction="mean"
    )
    inputs = {key: value for key, value in batch.items() if key != "labels"}

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        criterion(wrapped(**inputs).logits, batch["labels"]).backward()
        optimizer.step()

    return step


METHODS: dict[str, Callable[[nn.Module, Setting, Batch, Path], Step]] = {
    "Trainer, AdamW (not private)": plain_adamw,
    "DPGrapeTrainer": dp_grape,
    "Opacus, hooks": opacus_hooks,
    "Opacus, ghost clipping": opacus_ghost,
}


def measure(setting: Setting, rounds: int, warmup: int, device: torch.device) -> dict[str, Any]:
    """Returns seconds per step of each method, and its speed relative to plain AdamW."""
    set_seed(0)
    original, batch = setting.model(device), setting.batch(device)
    seconds: dict[str, list[float]] = {name: [] for name in METHODS}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus reports its non-secure generator and its hooks
        steps = {
            name: make(copy.deepcopy(original), setting, batch, Path(folder))
            for name, make in METHODS.items()
        }
        for number in tqdm(range(warmup + rounds), desc="rounds", file=sys.stderr):
            order = list(steps)
            shift = number % len(order)  # nobody always follows the one that leaves a full cache
            for name in order[shift:] + order[:shift]:
                start = _now(device)
                steps[name]()
                if number >= warmup:
                    seconds[name].append(_now(device) - start)
    baseline = next(iter(seconds.values()))
    return {
        name: {
            "median_seconds": statistics.median(values),
            "speed_of_plain_adamw": statistics.median(
                base / ours for base, ours in zip(baseline, values, strict=True)
            ),
            "seconds": values,
        }
        for name, values in seconds.items()
    }


def table(results: dict[str, Any], setting: Setting) -> str:
    """Returns the results as text, one line per method."""
    private = results["DPGrapeTrainer"]["seconds"]
    lines = [
        f"RoBERTa, hidden {setting.hidden_size}, {setting.layers} layers, vocabulary "
        f"{setting.vocab_size}, B={setting.batch_size}, T={setting.length}, r={setting.rank}",
        f"{'one step of':<30}{'median':>10}{'speed vs AdamW':>17}{'DPGrapeTrainer is':>20}",
    ]
    for name, result in results.items():
        ratio = statistics.median(a / b for a, b in zip(result["seconds"], private, strict=True))
        lines.append(
            f"{name:<30}{result['median_seconds']:>8.3f} s"
            f"{result['speed_of_plain_adamw']:>16.2f}x{ratio:>13.2f}x faster"
        )
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in vars(Setting()).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the results to this file as well")
    options = vars(parser.parse_args(argv))
    rounds, warmup, path = (options.pop(name) for name in ("rounds", "warmup", "json"))
    setting = Setting(**options)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = measure(setting, rounds, warmup, device)
    sys.stdout.write(table(results, setting))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_record(setting, results, device), indent=1) + "\n")


def _record(setting: Setting, results: dict[str, Any], device: torch.device) -> dict[str, Any]:
    packages = ("torch", "transformers", "opacus")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": name,
        "threads": torch.get_num_threads(),
        "versions": {"dp_grape_hf": dp_grape_hf.__version__}
        | {package: metadata.version(package) for package in packages},
        "setting": vars(setting),
        "results": results,
    }


def _common(setting: Setting, folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": setting.batch_size,
        "max_steps": STEPS,
        "learning_rate": 1e-4,
        "report_to": "none",
        "disable_tqdm": True,
    }


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
