"""Checks, times and weighs private training on a GPU, and holds the simulated memory against it.

    python -m recipes.gpu_report
    python -m recipes.gpu_report --parts checks cells --only "(RoBERTa|ViT).*dp_grape$" --minutes 9
    python -m recipes.gpu_report --parts simulations          # needs no GPU
    python -m recipes.gpu_report --device cpu --tiny --output_dir runs/gpu-report  # tries it out

Five parts, in this order: ``quick`` times single steps, in 16 bits first, and counts their kernels
(``recipes.gpu_report.quick``); ``checks`` compares gradients and releases on the device with their
definition on the CPU; ``cells`` runs whole training steps of large models, random weights from a
configuration, with plain AdamW, DP-GRAPE, DP-Adam and, in float32, DPZero, of images also naive
DP-GaLore, and notes memory and time; ``simulations`` runs ``dp_grape_hf.memory.step`` for the same
cells; ``table`` renders what is there.

Each device has a report of its own, ``gpu_report-nvidia-h100-80gb-hbm3.json`` for example, which is
kept after every cell and rendered to a file of the same name in Markdown. Where there is no GPU,
``--report nvidia-h100-80gb-hbm3`` adds simulations to the report of one. What is finished, with the
same versions, is not done again. After ``--minutes`` no new cell is started: the exit status is
then 3, and the same command goes on. It is 0 when all is done, 1 if a check failed or a cell failed
for another reason than memory, and 2 where there is no CUDA device.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm
from transformers import set_seed

import dp_grape_hf
from dp_grape_hf import memory
from dp_grape_hf.gradients import GradSampleMode
from dp_grape_hf.memory import ACTIVATIONS, OPTIMIZER, PROJECTIONS, WEIGHTS, Timeline
from recipes.benchmark.methods import (
    COMPILED,
    CORRELATED,
    MEASURED,
    PRINCIPAL,
    PlainTraining,
    PrivateTraining,
    now,
    quiet,
)
from recipes.benchmark.models import VIT, Batch, Setting
from recipes.common.provenance import git_commit
from recipes.gpu_report.checks import checks
from recipes.gpu_report.models import SHAPES, TINY, Shape
from recipes.gpu_report.quick import GAUSSIAN, quick, set_precision
from recipes.gpu_report.table import render

PARTS = ("quick", "checks", "cells", "simulations", "table")
NEED_DEVICE = {"quick", "checks", "cells"}
DONE, FAILED, NO_DEVICE, UNFINISHED = 0, 1, 2, 3

WARMUP, STEPS = 2, 8


WAYS: dict[str, dict[str, Any]] = {
    memory.ADAMW: {},
    COMPILED: {"torch_compile": True},
    "dp_grape": GAUSSIAN,
    PRINCIPAL: MEASURED,
    CORRELATED: MEASURED | {"noise": "banded"},
    "dp_adam": {"method": "dp_adam"},
    "dp_adam_ghost": {"method": "dp_adam", "grad_sample_mode": GradSampleMode.GHOST},
    "dp_adam_materialise": {"method": "dp_adam", "grad_sample_mode": GradSampleMode.MATERIALISE},
    "dp_galore": {"method": "dp_galore"},
    "dpzero": {"method": "dpzero"},
}
"""Options of what trains, by the names in ``table.TITLES``."""
PLAIN = (memory.ADAMW, COMPILED)
NOT_SIMULATED = (COMPILED, PRINCIPAL, CORRELATED)


def is_measured(method: str, shape: Shape, setting: Setting) -> bool:
    """Returns whether a method is of interest for a model, and takes it."""
    if method == COMPILED:
        return setting.batch_size == shape.compiled
    if method in (PRINCIPAL, CORRELATED):  # which have a rank of their own
        return False
    if method == "dpzero":
        return setting.dtype == "float32"
    return method != "dp_galore" or setting.model == VIT  # the paper has it for images


TINY_MODELS = "^(RoBERTa|ViT), (sequence|image) classification"


@dataclass(frozen=True)
class Cell:
    """One measurement: a model with a batch, trained by a method."""

    shape: str
    setting: Setting
    method: str

    def __str__(self) -> str:
        return f"{self.shape}, B={self.setting.batch_size}, {self.method}"

    @property
    def way(self) -> str:
        """What trains, a name in ``WAYS``; in the name of a method, a rank may follow it."""
        return self.method.split(" ")[0]


def cells_of(shapes: dict[str, Shape], only: str = "") -> list[Cell]:
    """Returns all cells whose names match, those of each shape's first batch before the others."""
    ordered = []
    for name, shape in shapes.items():
        for turn, size in enumerate(shape.batch_sizes):
            setting = replace(shape.setting, batch_size=size)
            cells = [Cell(name, setting, m) for m in WAYS if is_measured(m, shape, setting)]
            cells += [
                Cell(name, replace(setting, rank=rank), f"dp_grape r={rank}")
                for rank in shape.ranks
            ]
            if shape.ranks and turn == 0:
                small = replace(setting, rank=MEASURED["projection_rank"])
                cells += [
                    Cell(name, small, f"{way} r={small.rank}") for way in (PRINCIPAL, CORRELATED)
                ]
            ordered += [(turn, cell) for cell in cells if re.search(only, str(cell))]
    return [cell for _, cell in sorted(ordered, key=lambda item: item[0])]


# ---- One cell ----


@contextmanager
def peak_memory(
    device: torch.device, training: PlainTraining | PrivateTraining, batch: Batch
) -> Iterator[dict[str, int]]:
    """Yields a dictionary that afterwards holds the peak in bytes: ``allocated``, ``reserved``.

    On a CPU it is what PyTorch allocates for tensors, and nothing is reserved.
    """
    peak: dict[str, int] = {}
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        torch.cuda.synchronize(device)
        peak["allocated"] = torch.cuda.max_memory_allocated(device)
        peak["reserved"] = torch.cuda.max_memory_reserved(device)
        return
    timeline = Timeline()
    model = training.model
    timeline.label(WEIGHTS, [*model.parameters(), *model.buffers()])
    timeline.label(ACTIVATIONS, batch)
    optimizer: Any = training.trainer.optimizer
    timeline.label(OPTIMIZER, [list(state.values()) for state in optimizer.state.values()])
    if isinstance(training, PrivateTraining):
        trainer, run = training.trainer, training.trainer.private_run
        kept = run.projectors_at(trainer.state.global_step).values()
        copies = run.per_sample.copies_of_projections()
        timeline.label(PROJECTIONS, [*(p.matrix for p in kept), *copies])
    timeline.phase = "step"
    with timeline:
        yield peak
    peak["allocated"] = timeline.peak().total


def measure(cell: Cell, device: torch.device, steps: int) -> dict[str, Any]:
    """Returns what a cell takes, or ``out_of_memory`` and where that was."""
    setting = cell.setting
    where, found = "making the model", dict[str, Any](rank=setting.rank)
    set_precision(tf32=False)  # which a compiled cell before may have changed
    gc.collect()  # trainers are cycles, and the last cell's holds its model
    try:
        set_seed(0)
        model: nn.Module = setting.build_on(device)
        with device:
            batch = setting.inputs(padded=True)
        with tempfile.TemporaryDirectory() as folder, quiet():
            kind = PlainTraining if cell.way in PLAIN else PrivateTraining
            training = kind(model, setting, batch, Path(folder), **WAYS[cell.way])
            where = "the first step"  # which makes the optimizer's state, and checks the gradients
            with peak_memory(device, training, batch) as peak:
                training.step()
            found["first_step"] = peak
            where = "a step"
            with peak_memory(device, training, batch) as peak:
                for _ in range(WARMUP):
                    training.step()
            found |= peak
            seconds = []
            for _ in range(steps):
                start = now(device)[0]
                training.step()
                seconds.append(now(device)[0] - start)
    except torch.OutOfMemoryError:  # what it holds on to is freed when this block has ended
        return {**found, "out_of_memory": where}
    step = statistics.median(seconds)
    return {**found, "seconds": step, "samples_per_second": setting.batch_size / step}


def simulate(cell: Cell, gpu: bool) -> dict[str, Any]:
    """Returns the simulated peak of a cell, in bytes and by kind."""
    setting = cell.setting
    peak = memory.simulate(
        setting.build,
        lambda size: setting.inputs(size, padded=True),
        setting.of_step(**{"method": memory.ADAMW, **WAYS[cell.way]}),
        gpu=gpu,
    )
    found = {"allocated": peak.total, "kinds": dict(peak.kinds), "phase": peak.phase}
    return {**found, "rank": setting.rank}


# ---- The report ----


def slug(device: str) -> str:
    """Returns the name of a device as it stands in the name of a file."""
    return re.sub(r"[^a-z0-9.]+", "-", device.lower()).strip("-")


class Report:
    """What was found, in a file that is written after every entry.

    Args:
        path: the file; what is in it is gone on with.
        device: the name of what is measured on.
        simulated: the kind of device that simulations are for.
    """

    def __init__(self, path: Path, device: str, simulated: str) -> None:
        self.path, self._device, self._simulated = path, device, simulated
        self.versions = {"dp_grape_hf": dp_grape_hf.__version__} | {
            package: metadata.version(package).split("+")[0]  # without the CUDA it was built for
            for package in ("torch", "transformers")
        }
        self._commit = git_commit()
        self.parts: dict[str, dict[str, Any]] = {part: {} for part in PARTS[:-1]}
        if path.exists():
            self.parts |= json.loads(path.read_text(encoding="utf-8"))

    def has(self, part: str, key: str) -> bool:
        """Returns whether an entry is there, from this device with these versions."""
        entry = self.parts[part].get(key)
        if entry is None or entry["versions"] != self.versions or "failed" in entry:
            return False
        return bool(entry["device"] == self._device_of(part))

    def _device_of(self, part: str) -> str:
        return self._simulated if part == "simulations" else self._device

    def add(self, part: str, key: str, found: dict[str, Any]) -> None:
        """Adds an entry and writes the file."""
        origin = {
            "date": time.strftime("%Y-%m-%d"),
            "device": self._device_of(part),
            "versions": self.versions,
            "git_commit": self._commit,
        }
        self.parts[part][key] = found | origin
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.parts, indent=1) + "\n"
        partial_path = self.path.with_suffix(".tmp")  # a run that is killed leaves a whole file
        partial_path.write_text(text, encoding="utf-8")
        partial_path.replace(self.path)

    def failures(self) -> list[str]:
        """Returns what failed, but for want of memory."""
        return [
            f"{key}: {entry['failed']}"
            for entries in self.parts.values()
            for key, entry in entries.items()
            if "failed" in entry
        ]


Work = tuple[str, str, Callable[[], dict[str, Any]]]  # part, key, what to do


def work_of(options: argparse.Namespace, device: torch.device, report: Report) -> list[Work]:
    """Returns what is asked for and not there yet."""
    work: list[Work] = []
    models = TINY_MODELS if options.tiny else ""
    if "quick" in options.parts:
        wanted = partial(re.search, options.only)
        rows = quick(device, options.steps, wanted, options.tiny)
        work += [("quick", key, do) for key, do in rows.items()]
    if "checks" in options.parts:
        work += [("checks", key, check) for key, check in checks(device, models).items()]
    for cell in cells_of(TINY if options.tiny else SHAPES, options.only):
        if "cells" in options.parts:
            work.append(("cells", str(cell), partial(measure, cell, device, options.steps)))
        if "simulations" in options.parts and cell.way not in NOT_SIMULATED:
            gpu = device.type == "cuda"
            work.append(("simulations", str(cell), partial(simulate, cell, gpu)))
    order = {part: i for i, part in enumerate(PARTS)}
    work.sort(key=lambda item: order[item[0]])
    return [item for item in work if not report.has(*item[:2])]


def run(work: Sequence[Work], report: Report, minutes: float) -> int:
    """Does the work until time is up; returns how much is left."""
    end = time.monotonic() + 60 * minutes
    progress = tqdm(work, file=sys.stderr, unit="cell", disable=None)
    for done, (part, key, do) in enumerate(progress):
        if time.monotonic() > end:
            progress.close()
            return len(work) - done
        progress.set_postfix_str(f"{part}: {key}")
        try:
            found = do()
        except Exception as error:  # the rest of a report is worth having
            found = {"failed": " ".join(f"{type(error).__name__}: {error}".split())[:500]}
        if "error" in found and not found["error"] <= found["limit"]:
            found["failed"] = f"error {found['error']:.1e} is above {found['limit']:.0e}"
        report.add(part, key, found)
    return 0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add(
        "--only", default="", help="regular expression for the names of cells: model, batch, method"
    )
    add("--minutes", type=float, default=9.0, help="start no new cell after this long")
    add("--steps", type=int, default=STEPS, help="that are timed, of a cell")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--tiny", action="store_true", help="tiny models, to see that everything works")
    add("--report", help="the device whose report simulations are for; default: the one here")
    add("--output_dir", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(argv)
    if options.report and NEED_DEVICE & set(options.parts):
        parser.error("--report is for simulations and tables: what is measured here is of here")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Does what is left of the report; returns the exit status."""
    options = parse(argv)
    needs_device = bool(NEED_DEVICE & set(options.parts))
    if options.device == "cuda" and needs_device and not torch.cuda.is_available():
        sys.stderr.write(
            "gpu_report measures on a GPU, and torch sees no CUDA device here. Run it on a machine "
            "that has one, or try it out with --device cpu --tiny; --parts simulations table "
            "needs no GPU.\n"
        )
        return NO_DEVICE
    device = torch.device(options.device)
    on_gpu = device.type == "cuda" and torch.cuda.is_available()
    name = torch.cuda.get_device_name() if on_gpu else "CPU"
    where = options.report or (name if on_gpu else options.device)
    path = options.output_dir / f"gpu_report-{slug(where)}.json"
    report = Report(path, name, device.type)
    work = work_of(options, device, report)
    left = run(work, report, options.minutes)
    if "table" in options.parts:
        text = render(report.parts)
        options.output_dir.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".md").write_text(text, encoding="utf-8")
        sys.stdout.write(text)
    if left:
        sys.stdout.write(f"\n{left} of {len(work)} are left: run the same command again.\n")
        return UNFINISHED
    failures = report.failures()
    for failure in failures:
        sys.stderr.write(f"failed: {failure}\n")
    return FAILED if failures else DONE


if __name__ == "__main__":
    sys.exit(main())
