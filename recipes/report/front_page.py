"""The tables of the front page, from committed results."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from recipes.benchmark import timing
from recipes.benchmark.methods import ADAMW, DP_GRAPE, METHODS
from recipes.common.markdown import NOT_RUN, table
from recipes.common.runs import read_lines
from recipes.common.sweep import Sweep
from recipes.gpu_report.table import SHORT, short

BUDGETS = (None, 8.0, 2.0, 1.0)
"""Columns; None is training without privacy."""

_TEXT = "all-MiniLM-L6-v2 (22 million parameters)"
_TASKS = {
    "TREC": ("TREC, questions of six classes", _TEXT),
    "SST-2": ("SST-2, sentiment of sentences", _TEXT),
}
_ROWS = ("DP-GRAPE", "AdamW")
_ON_GPU = {
    "RoBERTa-large, T=128, B=40": "RoBERTa-large, 128 tokens, batch 40",
    "ViT-Base, 224 pixels, B=200": "ViT-Base, 224 pixels, batch 200",
    "OPT-1.3B, T=512, B=8": "OPT-1.3B, 512 tokens, batch 8",
}


def privacy_costs(root: Path) -> str:
    """Returns what privacy costs: test accuracy without it and at some budgets.

    Args:
        root: of the repository.
    """
    paper, digits = root / "recipes/paper/results", root / "recipes/digits/results"
    folders = [paper / name for name in ("text_chosen", "text_epsilons")]
    summaries = [Sweep(_read(f / "sweep.json")["config"], f).summary()["tasks"] for f in folders]
    lines = [line for f in folders for line in read_lines(f / "runs.jsonl")]
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
    chosen, compared = (_read(digits / f"{name}.json") for name in ("chosen", "compare"))
    found = {
        **chosen["rows"]["DP-GRAPE, nothing searched"]["accuracy"],
        "inf": compared["rows"]["Adam (not private)"]["accuracy"]["inf"],
    }
    rows.append(
        [
            "digits, images of 8 x 8 pixels",
            "a small ViT, from random weights",
            "1,437",
            f"{chosen['config']['shared']['num_train_epochs']}",
            *(f"{100 * found[_name(e)][0]:.1f}" for e in BUDGETS),
        ]
    )
    head = ["Task", "Model", "N", "Epochs", "Without privacy", *(f"ε = {e:g}" for e in BUDGETS[1:])]
    return table(head, rows)


def time_and_memory(root: Path) -> str:
    """Returns the speed of a training step relative to AdamW's, and peak memory on a GPU.

    Args:
        root: of the repository.
    """
    gpu = next((root / "recipes/gpu_report/results").glob("gpu_report-nvidia-h100*.json"))
    cells = _read(gpu)["cells"]
    rows = []
    for key, title in _ON_GPU.items():
        plain = cells[f"{key}, {ADAMW}"]
        ways = (cells[f"{key}, {way}"] for way in (SHORT[0], SHORT[2], SHORT[-1]))
        rows.append([f"{title}; H100", *(short(way, plain) for way in ways), "not run"])
    cpu = _read(root / "recipes/benchmark/results/cpu.json")["results"]
    rows.append(
        [
            "RoBERTa classifier, hidden 512, 6 layers; CPU",
            *(_speed(cpu, name) for name in (ADAMW, DP_GRAPE, "dp_adam", "opacus_ghost")),
        ]
    )
    lora = _read(root / "recipes/benchmark/results/opake_roberta.json")["results"]
    rows.append(
        [
            "the same with LoRA; CPU",
            *(_speed(lora, name, "adamw_lora") for name in ("adamw_lora", "dp_lora")),
            "",
            "not run",
        ]
    )
    return table(["Model", "AdamW, no privacy", "This package", "DP-Adam", "Opacus"], rows)


def _speed(results: Mapping[str, Any], name: str, plain: str = ADAMW) -> str:
    steps = (results[METHODS[of].title] for of in (plain, name))
    return f"{timing.ratio(*steps, 'cpu_seconds'):.2f}x"


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _only(values: Iterable[float]) -> str:
    (value,) = values
    return f"{value:,.0f}"


def _name(epsilon: float | None) -> str:
    return "inf" if epsilon is None else f"{epsilon:g}"
