"""Time steps of large models on a GPU, private steps next to AdamW's.

    python -m recipes.gpu_report --only "RoBERTa-large" --minutes 9
    python -m recipes.gpu_report --device cpu --tiny --output_dir runs/gpu-report  # tries it out

A row is a model with random weights, a precision and a method. It has the time of a step, the time
until the processor has launched the step, the time that kernels ran, their number, how often the
processor waited for the GPU, and the peak of allocated memory. Steps go through the Trainer, from
the forward pass to the update. In some rows, a loader draws the examples of each step, which then
has several physical batches. The first rows are a quick probe, of each model in 16 bits. The others
follow in the order of their worth, and begin with the largest model.

TF32 is a state of the whole process, which ``tf32=True`` and ``torch_compile=True`` leave on. Each
row sets it before it begins, and says which it had. Compiled rows run in a separate process.

The results of a device are a JSON file named after it, which is written after every row. A row that
it has already is not measured again, if the package's code, versions, device and processor are the
same. Before a private row is measured, AdamW's is, unless it was on the same processor. No new row
is started after ``--minutes``. The exit status is 0 when all rows are there, 1 if one failed for
another reason than memory, 2 if there is no CUDA device, and 3 if time was up: the same command
then goes on.
"""

import argparse
import gc
import json
import multiprocessing
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm
from transformers import set_seed

from dp_grape_hf.trainer import package_digest
from recipes.benchmark.methods import PlainTraining, PrivateTraining, quiet, train
from recipes.benchmark.models import Setting
from recipes.common.provenance import origin, versions, with_adapter, write
from recipes.gpu_report.models import MODELS, PLAN
from recipes.gpu_report.table import ADAMW, DP_ADAM, MATERIALISED, as_markdown

DONE, FAILED, NO_DEVICE, UNFINISHED = 0, 1, 2, 3
WARMUP, STEPS = 3, 8


@dataclass(frozen=True)
class Row:
    """A model with a batch, a precision, and what trains it."""

    model: str  # a name in ``plan.yaml``, as the two others
    precision: str  # what numbers are computed in
    method: str  # what trains it
    setting: Setting  # the model and its batch
    options: Mapping[str, Any] = field(default_factory=dict)  # arguments of the Trainer

    def __str__(self) -> str:
        return f"{self.model}, {self.precision}: {self.method}"

    @property
    def name(self) -> dict[str, Any]:
        """The properties by which results of rows differ."""
        own = {"model": self.model, "precision": self.precision, "method": self.method}
        return own | {"batch_size": self.setting.batch_size}


def rows(tiny: bool = False) -> list[Row]:
    """Return all rows in order; of tiny models if asked for."""
    small: dict[str, Any] = {"hidden_size": 32, "layers": 2, "heads": 2, "vocab_size": 64}
    small |= {"rank": 4, "length": 16, "batch_size": 4}
    found = []
    for model, precision, methods in PLAN["rows"]:
        way = PLAN["precisions"][precision]
        setting = replace(MODELS[model], **way.get("setting", {}), **(small if tiny else {}))
        for method in methods:
            own = PLAN["methods"][method]
            of_method = replace(setting, rank=own.get("projection_rank", setting.rank))
            found.append(Row(model, precision, method, of_method, own | way.get("options", {})))
    return found


# ---- One row ----


def measure(row: Row, device: torch.device, steps: int) -> dict[str, Any]:
    """Return what a step of a row takes, over so many timed steps, or that memory was short."""
    gc.collect()  # trainers are cycles, and the last row's holds its model
    tf32 = row.precision == "TF32"
    set_precision(tf32)
    try:
        return _measured(row, device, steps) | {"tf32": tf32}
    except torch.OutOfMemoryError as error:
        return {"out_of_memory": str(error).split(".")[0], "tf32": tf32}


def in_another_process(row: Row, device: torch.device, steps: int) -> dict[str, Any]:
    """Return what ``measure`` finds in a new process, and leave nothing of it in this one."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing without a GPU
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, row, device, steps).result()


def set_precision(tf32: bool) -> None:
    """Say for the whole process whether products of float32 matrices may be rounded to TF32."""
    if hasattr(torch.backends, "fp32_precision"):  # has precedence over the others
        torch.backends.fp32_precision = "none"
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32


def _measured(row: Row, device: torch.device, steps: int) -> dict[str, Any]:
    setting = row.setting
    set_seed(0)
    model = setting.build_on(device)
    if "LoRA" in row.model:
        model = with_adapter(model, "dp_lora", setting.rank)
    clock = _Clock(device, steps)
    with tempfile.TemporaryDirectory() as folder, quiet():
        if batches := PLAN["precisions"][row.precision].get("batches"):
            much = {"steps": clock.steps, "batches": batches}
            train(model, setting, Path(folder), clock, **much, **row.options)
        else:
            with device:
                batch = setting.inputs(padded=True)
            kind = PrivateTraining if "method" in row.options else PlainTraining
            training = kind(model, setting, batch, Path(folder), **row.options)
            set_precision(row.precision == "TF32")  # which the arguments may have changed
            clock()
            for _ in range(clock.steps):
                training.step()
                clock()
    found = clock.found()
    return found | {"samples_per_second": setting.batch_size / found["seconds"]}


class _Clock:
    """Time the steps that lie between its calls; on a GPU, profile the last one."""

    def __init__(self, device: torch.device, steps: int) -> None:
        self._device, self._on_gpu = device, device.type == "cuda"
        self._first, self._last = WARMUP, WARMUP + steps  # calls before the first and last timed
        self.steps = self._last + self._on_gpu  # with those that are not timed
        self._calls, self._start = 0, 0.0
        self._times: dict[str, list[float]] = {"seconds": [], "host_seconds": []}
        self._found: dict[str, Any] = {}
        self._profile: Any = None

    def __call__(self) -> None:
        """Note that a step has ended, and that the next one begins."""
        launched = time.perf_counter() - self._start
        if self._on_gpu:
            torch.cuda.synchronize()
        if self._first < self._calls <= self._last:
            self._times["host_seconds"].append(launched)
            self._times["seconds"].append(time.perf_counter() - self._start)
        if self._on_gpu and self._calls == self._first:
            torch.cuda.reset_peak_memory_stats(self._device)
        if self._on_gpu and self._calls == self._last:
            self._found["allocated"] = torch.cuda.max_memory_allocated(self._device)
            self._found["reserved"] = torch.cuda.max_memory_reserved(self._device)
            self._profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
            self._profile.start()
        elif self._profile is not None:
            self._profile.stop()
            self._found |= _shown(self._profile.events())
        self._calls += 1
        self._start = time.perf_counter()

    def found(self) -> dict[str, Any]:
        """Return medians of seconds and, on a GPU, memory and the figures of the profile."""
        return {name: statistics.median(each) for name, each in self._times.items()} | self._found


def _shown(events: Any) -> dict[str, Any]:
    """Return how long kernels ran, how many, and how often the processor waited for them."""
    kernels = [event for event in events if event.device_type == DeviceType.CUDA]
    calls = [event.name for event in events if event.device_type == DeviceType.CPU]
    return {
        "kernel_seconds": sum(event.device_time for event in kernels) / 1e6,
        "kernels": len(kernels),
        "waits": sum(name.startswith("cuda") and "Synchronize" in name for name in calls),
    }


# ---- The report ----


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the rows that are missing, print all, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", default="", help="regular expression for names, as 'RoBERTa.*bf16: AdamW'")
    add("--minutes", type=float, default=9.0, help="start no new row after this long")
    add("--steps", type=int, default=STEPS, help="that are timed, of each row")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--tiny", action="store_true", help="tiny models, to see that everything works")
    add("--output_dir", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.stderr.write(
            "gpu_report measures on a GPU, and torch sees no CUDA device here. Run it on a machine "
            "that has one, or try it out with --device cpu --tiny.\n"
        )
        return NO_DEVICE
    device, end = torch.device(options.device), time.monotonic() + 60 * options.minutes
    where = origin() | {"versions": versions("dp_grape_hf"), "host": host(), "code": code()}
    slug = re.sub(r"[^a-z0-9.]+", "-", where["device"].lower()).strip("-")
    path = options.output_dir / f"{slug}.json"
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []

    def of(row: Row) -> list[dict[str, Any]]:
        return [other for other in results if row.name.items() <= other.items()]

    status = DONE
    for row in tqdm(missing(rows(options.tiny), options.only, of, where), unit="row"):
        if time.monotonic() > end:
            status = UNFINISHED
            break
        run = in_another_process if "torch_compile" in row.options else measure
        try:
            found = run(row, device, options.steps)
        except Exception as error:  # the other rows are worth having
            found = {"failed": " ".join(f"{type(error).__name__}: {error}".split())[:500]}
            status = FAILED
        rank = {} if row.method in (ADAMW, DP_ADAM, MATERIALISED) else {"rank": row.setting.rank}
        old = of(row)
        results = [other for other in results if other not in old]
        results.append({**row.name, **rank, **found, **where})
        write(path, results)
    sys.stdout.write(as_markdown(results))
    return status


def missing(
    plan: Sequence[Row],
    only: str,
    of: Callable[[Row], Sequence[Mapping[str, Any]]],
    where: Mapping[str, Any],
) -> list[Row]:
    """Return the rows of a plan that are to be measured, in its order.

    A result counts if it is of the same code and machine (``where``). Next to a row that is asked
    for by ``only``, AdamW is measured whatever that says.
    """
    same = {name: where[name] for name in ("device", "host", "versions", "code")}.items()

    def is_current(found: Mapping[str, Any]) -> bool:
        return "failed" not in found and all(found.get(name) == value for name, value in same)

    stale = [row for row in plan if not any(map(is_current, of(row)))]
    asked = [row for row in stale if re.search(only, str(row))]
    beside = {(row.model, row.precision) for row in asked}
    return [
        row
        for row in stale
        if row in asked or (row.method == ADAMW and (row.model, row.precision) in beside)
    ]


def host() -> str:
    """Return what launches the kernels: the name of the processor, and how many cores it has."""
    cpus = Path("/proc/cpuinfo")
    text = cpus.read_text(encoding="utf-8") if cpus.exists() else ""
    name = re.search(r"model name\s*:\s*(.+)", text)
    return f"{name[1] if name else platform.processor()}, {os.cpu_count()} cores"


def code() -> str:
    """Return a digest of the package's modules, which tells also a commit that is not made yet."""
    return package_digest()[:12]


if __name__ == "__main__":
    sys.exit(main())
