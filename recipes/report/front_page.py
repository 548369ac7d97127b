"""The tables of the front page, from committed results, and the table of all arguments."""

from collections.abc import Mapping, Sequence
from typing import Any

from dp_grape_hf.options import OPTIONS
from recipes.benchmark import timing
from recipes.benchmark.methods import ADAMW, ADAMW_LORA, DP_ADAM, DP_GRAPE, DP_LORA, METHODS
from recipes.common.markdown import NOT_RUN, table
from recipes.gpu_report.table import (
    ADAMW as GPU_ADAMW,
    DP_ADAM as GPU_DP_ADAM,
    GIB,
    PRINCIPAL,
    beside,
)

_ON_GPU = {
    "RoBERTa-large, T=128": "RoBERTa-large, 128 tokens",
    "ViT-Base, 224 pixels": "ViT-Base, 224 pixels",
    "OPT-1.3B, T=512": "OPT-1.3B, 512 tokens",
}


def options() -> str:
    """Returns all arguments, with their defaults and meanings."""
    rows = []
    for name, option in OPTIONS.items():
        names = f"`{name}`" + (f", `{option.short}`" if option.short else "")
        default = "-" if option.default is None else f"`{option.default}`"
        rows.append([names, option.otherwise or default, option.meaning])
    return table(["Argument", "Default", "Meaning"], rows)


def time_and_memory(
    gpu: Sequence[Mapping[str, Any]], cpu: Mapping[str, Any], lora: Mapping[str, Any]
) -> str:
    """Returns the speed of a training step relative to AdamW's, and peak memory on a GPU.

    ``gpu`` has the rows of ``gpu_report``; ``cpu`` and ``lora`` are timings of the same model.
    """
    rows = []
    for row in gpu:
        if (row["precision"], row["method"]) == ("float32", GPU_ADAMW) and row["model"] in _ON_GPU:
            ways = (beside(gpu, row, method) for method in (GPU_ADAMW, PRINCIPAL, GPU_DP_ADAM))
            title = f"{_ON_GPU[row['model']]}, batch {row['batch_size']}; H100"
            rows.append([title, *(_costs(way, row) for way in ways), NOT_RUN])
    rows.append(
        [
            "RoBERTa classifier, hidden 512, 6 layers; CPU",
            *(_speed(cpu["results"], n) for n in (ADAMW, DP_GRAPE, DP_ADAM, "opacus_ghost")),
        ]
    )
    rows.append(
        [
            "the same with LoRA; CPU",
            *(_speed(lora["results"], name, ADAMW_LORA) for name in (ADAMW_LORA, DP_LORA)),
            "",
            NOT_RUN,
        ]
    )
    return table(["Model", "AdamW, no privacy", "This package", "DP-Adam", "Opacus"], rows)


def _costs(row: Mapping[str, Any] | None, plain: Mapping[str, Any]) -> str:
    if row is None:
        return NOT_RUN
    peak, speed = row["allocated"] / GIB, plain["seconds"] / row["seconds"]
    return f"{peak:.1f} GiB, {row['samples_per_second']:.3g}/s ({speed:.2f}x)"


def _speed(results: Mapping[str, Any], name: str, plain: str = ADAMW) -> str:
    steps = (results[METHODS[of].title] for of in (plain, name))
    return f"{timing.ratio(*steps, 'cpu_seconds'):.2f}x"
