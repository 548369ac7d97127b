"""The first part of the report, which fits ten minutes: where a step's time goes, in 16 bits first.

Private steps stand next to AdamW's, with the same batch, through the Trainer. A row has the time of
a step, the time until the processor has launched it, the time that kernels ran, their number, how
often the processor waited for the GPU, and the peak of memory. Rows are in the order of their
worth.

TF32 is a state of the whole process, which ``tf32=True`` and ``torch_compile=True`` leave on. Each
row sets it before it begins, and says which it had. Compiled rows come last.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import set_seed

from recipes.benchmark.methods import MEASURED, RANDOM, PlainTraining, PrivateTraining, quiet
from recipes.benchmark.models import LLAMA, Setting
from recipes.common.provenance import with_adapter
from recipes.gpu_report.models import SHAPES

WARMUP = 3

GAUSSIAN = {"method": "dp_grape", **RANDOM}
AMP, COMPILE = {"bf16": True}, {"torch_compile": True}


@dataclass(frozen=True)
class Row:
    """A model with a batch, and what trains it.

    Args:
        setting: the model.
        options: arguments of the Trainer; with ``method`` it is the private one.
        adapter: whether a LoRA adapter is trained, on all linear layers.
        tf32: whether products of float32 matrices may be rounded to TF32.
    """

    setting: Setting
    options: Mapping[str, Any] = field(default_factory=dict)
    adapter: bool = False
    tf32: bool = False


def _of(shape: str, batch_size: int) -> Setting:
    return replace(SHAPES[shape].setting, batch_size=batch_size)


def _pair(setting: Setting, common: Mapping[str, Any], tf32: bool = False) -> dict[str, Row]:
    return {
        "AdamW": Row(setting, common, tf32=tf32),
        "DP-GRAPE": Row(setting, {**GAUSSIAN, **common}, tf32=tf32),
    }


def rows_of(tiny: bool = False) -> dict[str, Row]:
    """Returns the rows by name, in order; of tiny models if asked for."""
    roberta, vit = _of("RoBERTa-large, T=128", 40), _of("ViT-Base, 224 pixels", 200)
    opt, large = _of("OPT-1.3B, T=512", 8), _of("OPT-6.7B, bfloat16, checkpointing, T=512", 8)
    llama = Setting(
        LLAMA,
        hidden_size=4096,
        layers=32,
        heads=32,
        vocab_size=128_256,
        batch_size=8,
        length=512,
        dtype="bfloat16",
    )
    groups: dict[str, dict[str, Row]] = {
        "RoBERTa-large, bf16": _pair(roberta, AMP),
        "OPT-6.7B, bfloat16 weights": _pair(large, {}),
        "OPT-1.3B, bf16": _pair(opt, AMP),
        "RoBERTa-large, float32": _pair(roberta, {}),
        "ViT-Base, bf16": _pair(vit, AMP),
        "RoBERTa-large, TF32": _pair(roberta, {}, tf32=True),
        "Llama, 8 billion, LoRA, bfloat16 weights": {
            "AdamW": Row(llama, adapter=True),
            "DP-LoRA": Row(llama, {"method": "dp_lora"}, adapter=True),
        },
        "RoBERTa-large, bf16, principal": {
            "DP-GRAPE": Row(replace(roberta, rank=MEASURED["projection_rank"]), MEASURED | AMP)
        },
        "RoBERTa-large, bf16, compiled": _pair(roberta, {**AMP, **COMPILE}),
        "RoBERTa-large, bf16, CUDA graphs": _pair(
            roberta, {**AMP, **COMPILE, "torch_compile_mode": "reduce-overhead"}
        ),
        "OPT-1.3B, bf16, compiled": _pair(opt, {**AMP, **COMPILE}),
    }
    rows = {f"{model}: {name}": row for model, own in groups.items() for name, row in own.items()}
    if not tiny:
        return rows
    return {name: replace(row, setting=_shrunk(row.setting)) for name, row in rows.items()}


def _shrunk(setting: Setting) -> Setting:
    shape: dict[str, Any] = {"hidden_size": 32, "layers": 2, "heads": 2, "vocab_size": 64}
    return replace(setting, **shape, rank=4, length=16, batch_size=4)


def quick(
    device: torch.device, steps: int, only: Callable[[str], Any], tiny: bool
) -> dict[str, Callable[[], dict[str, Any]]]:
    """Returns what measures each row whose name is wanted."""
    rows = {name: row for name, row in rows_of(tiny).items() if only(name)}
    return {name: partial(measure, row, device, steps) for name, row in rows.items()}


def measure(row: Row, device: torch.device, steps: int) -> dict[str, Any]:
    """Returns what a step of a row takes, or that memory was short.

    Args:
        row: what to train.
        device: where.
        steps: how many are timed.
    """
    gc.collect()
    set_precision(row.tf32)
    try:
        return _measured(row, device, steps) | {"tf32": row.tf32}
    except torch.OutOfMemoryError:
        return {"out_of_memory": "a step", "tf32": row.tf32}


def set_precision(tf32: bool) -> None:
    """Says for the whole process whether products of float32 matrices may be rounded to TF32."""
    if hasattr(torch.backends, "fp32_precision"):  # which is above the others, if anything set it
        torch.backends.fp32_precision = "none"
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32


def _measured(row: Row, device: torch.device, steps: int) -> dict[str, Any]:
    setting, on_gpu = row.setting, device.type == "cuda"
    wait: Callable[[], Any] = torch.cuda.synchronize if on_gpu else lambda: None
    set_seed(0)
    model = setting.build_on(device)
    if row.adapter:
        model = with_adapter(model, "dp_lora", setting.rank)
    with device:
        batch = setting.inputs(padded=True)
    kind = PrivateTraining if "method" in row.options else PlainTraining
    with tempfile.TemporaryDirectory() as folder, quiet():
        training = kind(model, setting, batch, Path(folder), **row.options)
        set_precision(row.tf32)  # which arguments may have changed
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
            found |= _profiled(training.step)
    return found | {"samples_per_second": setting.batch_size / found["seconds"]}


def _profiled(step: Callable[[], None]) -> dict[str, Any]:
    """Returns how long kernels ran, how many, and how often the processor waited for them."""
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
