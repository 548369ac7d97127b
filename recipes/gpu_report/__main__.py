"""Time steps of large models on a GPU, private steps next to AdamW's.

    python -m recipes.gpu_report --only "RoBERTa-large" --minutes 9
    python -m recipes.gpu_report --device cpu --tiny --output_dir runs/gpu-report  # tries it out

A row is a model with random weights, a precision and a method. It has the time of a step, the time
until the processor has launched the step, the time that kernels ran, their number, how often the
processor waited for the GPU, and the peak of allocated memory. Steps go through the Trainer, from
the forward pass to the update. The rows are in the order of their worth: 16 bits come first.

TF32 is a state of the whole process, which ``tf32=True`` and ``torch_compile=True`` leave on. Each
row sets it before it begins, and says which it had. Compiled rows run in a separate process.

The results of a device are a JSON file named after it, which is written after every row. A row that
it has already, of the same code and versions, is not measured again. No new row is started after
``--minutes``. The exit status is 0 when all rows are there, 1 if one failed for another reason than
memory, 2 if there is no CUDA device, and 3 if time was up: the same command then goes on.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
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

from recipes.benchmark.methods import MEASURED, RANDOM, PlainTraining, PrivateTraining, quiet
from recipes.benchmark.models import Setting
from recipes.common.provenance import origin, versions, with_adapter, write
from recipes.gpu_report.models import MODELS
from recipes.gpu_report.table import ADAMW, DP_ADAM, DP_GRAPE, PRINCIPAL, as_markdown

DONE, FAILED, NO_DEVICE, UNFINISHED = 0, 1, 2, 3
WARMUP, STEPS = 3, 8

METHODS: Mapping[str, Mapping[str, Any]] = {
    ADAMW: {},
    DP_GRAPE: {"method": "dp_grape", **RANDOM},
    PRINCIPAL: {"method": "dp_grape", **MEASURED},
    DP_ADAM: {"method": "dp_adam"},
    "DP-LoRA": {"method": "dp_lora"},
}
"""Arguments of the Trainer; with ``method`` it is the private one."""

COMPILE: Mapping[str, Any] = {"bf16": True, "torch_compile": True}
CHECKPOINTED = {"dtype": "bfloat16", "gradient_checkpointing": True}
PRECISIONS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "float32": ({}, {}),
    "TF32": ({}, {}),
    "bf16": ({}, {"bf16": True}),
    "bfloat16 weights": (CHECKPOINTED, {}),
    "bf16, compiled": ({}, COMPILE),
    "bf16, CUDA graphs": ({}, COMPILE | {"torch_compile_mode": "reduce-overhead"}),
}
"""Changes to the model, and arguments of the Trainer."""

_ROBERTA, _VIT, _OPT, _OPT_27, _OPT_67, _LLAMA = MODELS
_PLAN: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (_ROBERTA, "bf16", (ADAMW, DP_GRAPE, PRINCIPAL)),
    (_OPT, "bf16", (ADAMW, DP_GRAPE)),
    (_OPT_67, "bfloat16 weights", (ADAMW, DP_GRAPE)),
    (_VIT, "bf16", (ADAMW, DP_GRAPE)),
    (_LLAMA, "bfloat16 weights", (ADAMW, "DP-LoRA")),
    (_ROBERTA, "TF32", (ADAMW, DP_GRAPE)),
    *((model, "bf16, compiled", (ADAMW, DP_GRAPE)) for model in (_ROBERTA, _OPT)),
    (_ROBERTA, "bf16, CUDA graphs", (ADAMW, DP_GRAPE)),
    *(
        (model, "float32", (ADAMW, DP_GRAPE, PRINCIPAL, DP_ADAM))
        for model in (_ROBERTA, _VIT, _OPT, _OPT_27)
    ),
)


@dataclass(frozen=True)
class Row:
    """A model with a batch, a precision, and what trains it.

    Args:
        model: name in ``MODELS``.
        precision: name in ``PRECISIONS``.
        method: name in ``METHODS``.
        setting: the model and its batch.
        options: arguments of the Trainer.
    """

    model: str
    precision: str
    method: str
    setting: Setting
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.model}, {self.precision}: {self.method}"


def rows(tiny: bool = False) -> list[Row]:
    """Return all rows in order; of tiny models if asked for."""
    small: dict[str, Any] = {"hidden_size": 32, "layers": 2, "heads": 2, "vocab_size": 64}
    found = []
    for model, precision, methods in _PLAN:
        changes, common = PRECISIONS[precision]
        setting = replace(MODELS[model], **changes)
        if tiny:
            setting = replace(setting, **small, rank=4, length=16, batch_size=4)
        for method in methods:
            rank = METHODS[method].get("projection_rank", setting.rank)
            own = replace(setting, rank=rank)
            found.append(Row(model, precision, method, own, {**METHODS[method], **common}))
    return found


# ---- One row ----


def measure(row: Row, device: torch.device, steps: int) -> dict[str, Any]:
    """Return what a step of a row takes, or that memory was short.

    Args:
        row: what to train.
        device: where.
        steps: how many are timed.
    """
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
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, row, device, steps).result()


def set_precision(tf32: bool) -> None:
    """Say for the whole process whether products of float32 matrices may be rounded to TF32."""
    if hasattr(torch.backends, "fp32_precision"):  # has precedence over the others
        torch.backends.fp32_precision = "none"
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32


def _measured(row: Row, device: torch.device, steps: int) -> dict[str, Any]:
    setting, on_gpu = row.setting, device.type == "cuda"
    wait: Callable[[], Any] = torch.cuda.synchronize if on_gpu else lambda: None
    set_seed(0)
    model = setting.build_on(device)
    if "LoRA" in row.model:
        model = with_adapter(model, "dp_lora", setting.rank)
    with device:
        batch = setting.inputs(padded=True)
    kind = PrivateTraining if "method" in row.options else PlainTraining
    with tempfile.TemporaryDirectory() as folder, quiet():
        training = kind(model, setting, batch, Path(folder), **row.options)
        set_precision(row.precision == "TF32")  # which the arguments may have changed
        for _ in range(WARMUP):
            training.step()
        wait()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        whole, launched = [], []
        for _ in range(steps):
            start = time.perf_counter()
            training.step()
            launched.append(time.perf_counter() - start)
            wait()
            whole.append(time.perf_counter() - start)
        found: dict[str, Any] = {
            "seconds": statistics.median(whole),
            "host_seconds": statistics.median(launched),
        }
        if on_gpu:
            found["allocated"] = torch.cuda.max_memory_allocated(device)
            found["reserved"] = torch.cuda.max_memory_reserved(device)
            found |= _profiled(training.step)
    return found | {"samples_per_second": setting.batch_size / found["seconds"]}


def _profiled(step: Callable[[], None]) -> dict[str, Any]:
    """Return how long kernels ran, how many, and how often the processor waited for them."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    events: Any = found.events()
    kernels = [event for event in events if event.device_type == DeviceType.CUDA]
    calls = [event.name for event in events if event.device_type == DeviceType.CPU]
    return {
        "kernel_seconds": sum(event.device_time for event in kernels) / 1e6,
        "kernels": len(kernels),
        "waits": sum(name.startswith("cuda") and "Synchronize" in name for name in calls),
    }


# ---- The report ----


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
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
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the rows that are missing, print all, and return the exit status."""
    options = parse(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.stderr.write(
            "gpu_report measures on a GPU, and torch sees no CUDA device here. Run it on a machine "
            "that has one, or try it out with --device cpu --tiny.\n"
        )
        return NO_DEVICE
    device, end = torch.device(options.device), time.monotonic() + 60 * options.minutes
    where = origin() | {"versions": versions("dp_grape_hf")}
    slug = re.sub(r"[^a-z0-9.]+", "-", where["device"].lower()).strip("-")
    path = options.output_dir / f"{slug}.json"
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    status = DONE
    for row in tqdm([r for r in rows(options.tiny) if re.search(options.only, str(r))], unit="row"):
        name = {"model": row.model, "precision": row.precision, "method": row.method}
        name["batch_size"] = row.setting.batch_size
        old = [other for other in results if name.items() <= other.items()]
        if any(_is_current(other, where) for other in old):
            continue
        if time.monotonic() > end:
            status = UNFINISHED
            break
        run = in_another_process if "torch_compile" in row.options else measure
        try:
            found = run(row, device, options.steps)
        except Exception as error:  # the other rows are worth having
            found = {"failed": " ".join(f"{type(error).__name__}: {error}".split())[:500]}
            status = FAILED
        rank = {} if row.method in (ADAMW, DP_ADAM) else {"rank": row.setting.rank}
        results = [other for other in results if other not in old]
        results.append({**name, **rank, **found, **where})
        write(path, results)
    sys.stdout.write(as_markdown(results))
    return status


def _is_current(row: Mapping[str, Any], where: Mapping[str, Any]) -> bool:
    names = ("device", "versions", "git_commit")
    return "failed" not in row and all(row[name] == where[name] for name in names)


if __name__ == "__main__":
    sys.exit(main())
