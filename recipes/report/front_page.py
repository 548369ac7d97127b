"""The tables of the front page, from committed results, and that of all arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dp_grape_hf.options import OPTIONS
from recipes.benchmark import timing
from recipes.benchmark.methods import ADAMW, ADAMW_LORA, DP_ADAM, DP_GRAPE, DP_LORA, METHODS
from recipes.common.markdown import NOT_RUN, table
from recipes.digits.train import DigitsArguments, load_data
from recipes.gpu_report.table import (
    ADAMW as GPU_ADAMW,
    DP_ADAM as GPU_DP_ADAM,
    GIB,
    PRINCIPAL,
    beside,
)

BUDGETS = (None, 8.0, 2.0, 1.0)
"""Columns; None is training without privacy."""

_TEXT = "all-MiniLM-L6-v2 (22 million parameters)"
_TASKS = {
    "TREC": ("TREC, questions of six classes", _TEXT),
    "SST-2": ("SST-2, sentiment of sentences", _TEXT),
}
_ROWS = ("DP-GRAPE", "AdamW")
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


def privacy_costs(
    sweeps: Iterable[tuple[Mapping[str, Any], Iterable[Mapping[str, Any]]]],
    digits: Mapping[str, Any],
    compared: Mapping[str, Any],
) -> str:
    """Returns what privacy costs: test accuracy without it and at some budgets.

    Args:
        sweeps: on texts; the summary and the runs of each.
        digits: results with nothing searched.
        compared: results of all methods on the same digits.
    """
    sweeps = list(sweeps)
    summaries = [summary["tasks"] for summary, _ in sweeps]
    lines = [line for _, runs in sweeps for line in runs]
    rows = []
    for task, (title, model) in _TASKS.items():
        own = [line["result"] for line in lines if line["task"] == task and line["row"] in _ROWS]
        scores: dict[str, Any] = {}
        for summary in summaries:
            for row in _ROWS:
                scores |= summary[task].get(row, {}).get("scores", {})
        rows.append(
            [
                title,
                model,
                _only({result["splits"]["train"] for result in own}),
                _only({float(result["settings"]["num_train_epochs"]) for result in own}),
                *(f"{scores[b][0]:.1f}" if b in scores else NOT_RUN for b in map(_name, BUDGETS)),
            ]
        )
    found = {
        **digits["rows"]["DP-GRAPE, nothing searched"]["accuracy"],
        "inf": compared["rows"]["Adam (not private)"]["accuracy"]["inf"],
    }
    rows.append(
        [
            "digits, images of 8 x 8 pixels",
            "a small ViT, from random weights",
            f"{len(load_data(DigitsArguments.split_seed)[0]):,}",
            f"{digits['config']['shared']['num_train_epochs']}",
            *(f"{100 * found[_name(e)][0]:.1f}" for e in BUDGETS),
        ]
    )
    head = ["Task", "Model", "N", "Epochs", "Without privacy", *(f"ε = {e:g}" for e in BUDGETS[1:])]
    return table(head, rows)


def time_and_memory(
    gpu: Sequence[Mapping[str, Any]], cpu: Mapping[str, Any], lora: Mapping[str, Any]
) -> str:
    """Returns the speed of a training step relative to AdamW's, and peak memory on a GPU.

    Args:
        gpu: rows of ``gpu_report``.
        cpu: timings on a CPU.
        lora: timings on a CPU of the same model, with LoRA among them.
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


def _only(values: Iterable[float]) -> str:
    (value,) = values
    return f"{value:,.0f}"


def _name(epsilon: float | None) -> str:
    return "inf" if epsilon is None else f"{epsilon:g}"
