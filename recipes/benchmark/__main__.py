"""Times one logical step: plain AdamW, DP-GRAPE, DP-Adam, and Opacus with hooks and ghost clipping.

    python -m recipes.benchmark
    python -m recipes.benchmark --model vit --length 196 --batch_size 32 --rounds 20
    python -m recipes.benchmark --sweep batch --methods adamw dp_grape --output_dir runs/batch
    python -m recipes.benchmark --profile
    python -m recipes.benchmark --all --output_dir runs/benchmark --json runs/benchmark/cpu.json

Needs Opacus (the ``benchmark`` extra), and for the plots of sweeps matplotlib (``recipes``). All
methods train the same model from the same weights on the same batch, in one process; rounds
interleave them, so that a busy moment of the machine hits all of them alike. A step is everything
between two batches: forward, backward, clip, noise, record, update. Prints medians and the median
of the ratios within a round, of the time on the clock and, in parentheses, of the processor time of
all threads, which is steadier where the machine has other things to do.

``--sweep`` varies one quantity, ``--profile`` says where a step goes, and ``--all`` runs the
standard set. The default run takes about two minutes on two CPU cores, ``--all`` under a quarter of
an hour.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import dp_grape_hf
from recipes.benchmark.methods import (
    ADAMW,
    DP_ADAM,
    DP_GRAPE,
    METHODS,
    PRINCIPAL,
    USUAL,
    measuring_time,
)
from recipes.benchmark.models import OPT, TITLES, VIT, Setting
from recipes.benchmark.profile import profile, profile_table
from recipes.benchmark.timing import (
    SWEEPS,
    measure,
    measuring_line,
    plot_sweep,
    sweep,
    sweep_table,
    table,
)

ROUNDS, WARMUP = 12, 2
SWEPT_METHODS = (ADAMW, DP_GRAPE, DP_ADAM)
TABLES = "tables.txt"


@dataclass(frozen=True)
class Plan:
    """What ``--all`` runs, in this order."""

    settings: tuple[tuple[Setting, int], ...]  # and its rounds
    profiles: tuple[Setting, ...]
    swept: Setting
    swept_methods: tuple[str, ...] = SWEPT_METHODS
    swept_rounds: int = 5
    profile_rounds: int = 8


BASE = Setting(hidden_size=768, layers=12)
STANDARD = Plan(
    settings=(
        (Setting(), ROUNDS),
        (Setting(batch_size=4), 6),
        (Setting(length=128, batch_size=8), 6),
        (replace(BASE, batch_size=8), 4),
        (Setting(model=OPT, batch_size=8), 6),
        (Setting(model=VIT), 6),
    ),
    profiles=(Setting(), Setting(model=VIT)),
    swept=Setting(hidden_size=256, layers=4),
)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs what is asked for, prints its tables, and returns what ``--json`` writes."""
    options = parse(argv)
    setting = Setting(**{f.name: getattr(options, f.name) for f in fields(Setting)})
    device = torch.device(options.device)
    rounds, warmup = options.rounds, options.warmup
    record = _record(device)
    if options.output_dir is not None:
        (options.output_dir / TABLES).unlink(missing_ok=True)
    if options.all:
        methods = options.methods or USUAL
        record |= run_all(STANDARD, methods, warmup, device, options.output_dir)
    elif options.sweep:
        values = options.values or SWEEPS[options.sweep].values
        methods = options.methods or SWEPT_METHODS
        runs = sweep(options.sweep, values, setting, methods, rounds, warmup, device)
        record |= {"sweeps": {options.sweep: runs}}
        _show_sweep(options.sweep, runs, options.output_dir)
    elif options.profile:
        record |= {"setting": vars(setting), "profile": profile(setting, rounds, warmup, device)}
        _show(profile_table(record["profile"], setting), options.output_dir)
    else:
        methods = options.methods or USUAL
        results = measure(setting, methods, rounds, warmup, device)
        record |= {"setting": vars(setting), "results": results}
        _show(table(results, setting), options.output_dir)
        if PRINCIPAL in methods:
            record["measuring"] = measuring_time(setting, device)
            _show(measuring_line(record), options.output_dir)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    for f in fields(Setting):
        if f.type == "bool":
            add(f"--{f.name}", action="store_true")
        elif f.name == "model":
            add("--model", choices=TITLES, default=f.default)
        else:
            add(f"--{f.name}", type=type(f.default), default=f.default)
    add(
        "--methods",
        nargs="+",
        choices=METHODS,
        help=f"default: {' '.join(USUAL)}; in a sweep three",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--sweep", choices=SWEEPS, help="vary this quantity")
    what.add_argument("--profile", action="store_true", help="show where a step goes")
    what.add_argument("--all", action="store_true", help="run the standard set; its own settings")
    add("--values", type=int, nargs="+", help="what the swept quantity is set to")
    add("--rounds", type=int, default=ROUNDS)
    add("--warmup", type=int, default=WARMUP)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--json", type=Path, help="write the results to this file as well")
    add("--output_dir", type=Path, help="write tables and plots to this folder as well")
    options = parser.parse_args(argv)
    if options.values and not options.sweep:
        parser.error("--values says what --sweep varies over; give both")
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds} must be at least 1")
    return options


def run_all(
    plan: Plan, methods: Sequence[str], warmup: int, device: torch.device, folder: Path | None
) -> dict[str, Any]:
    """Runs a plan with some of the methods; returns runs, profiles and sweeps."""
    runs, profiles, sweeps = [], [], {}
    for setting, rounds in plan.settings:
        results = measure(setting, methods, rounds, warmup, device)
        runs.append({"setting": vars(setting), "results": results})
        _show(table(results, setting), folder)
    for setting in plan.profiles:
        found = profile(setting, plan.profile_rounds, warmup, device)
        profiles.append({"setting": vars(setting), "profile": found})
        _show(profile_table(found, setting), folder)
    chosen = [name for name in plan.swept_methods if name in methods]
    for quantity in SWEEPS if chosen else ():
        values, rounds = SWEEPS[quantity].values, plan.swept_rounds
        swept = sweep(quantity, values, plan.swept, chosen, rounds, warmup, device)
        sweeps[quantity] = swept
        _show_sweep(quantity, swept, folder)
    return {"runs": runs, "profiles": profiles, "sweeps": sweeps}


def _show_sweep(quantity: str, runs: list[dict[str, Any]], folder: Path | None) -> None:
    _show(sweep_table(quantity, runs), folder)
    if folder is not None:
        plot_sweep(quantity, runs, folder / f"sweep_{quantity}.png")


def _show(text: str, folder: Path | None) -> None:
    """Prints a table, and adds it to the folder's file of tables."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / TABLES).open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")


def _record(device: torch.device) -> dict[str, Any]:
    packages = ("torch", "transformers", "opacus")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": name,
        "threads": torch.get_num_threads(),
        "versions": {"dp_grape_hf": dp_grape_hf.__version__}
        | {package: metadata.version(package) for package in packages},
    }


if __name__ == "__main__":
    main()
