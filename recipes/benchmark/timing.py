"""Times the methods of ``benchmark`` in rounds, and renders what was measured."""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import set_seed

from recipes.benchmark.methods import (
    ADAMW,
    DP_GRAPE,
    METHODS,
    PRINCIPAL,
    DoesNotRun,
    Prepared,
    now,
    prepare,
    quiet,
)
from recipes.benchmark.models import Setting
from recipes.common.markdown import table

Results = dict[str, Any]  # title of a method -> what was measured, as JSON has it

SLOW = 4.0  # a method this much slower than the fastest takes part in fewer rounds
FEWEST = 3  # rounds that a slow method takes part in, at least


@dataclass
class Times:
    """Steps of one method, by round."""

    rounds: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)  # of all threads together


def measure(
    setting: Setting,
    methods: Sequence[str],
    rounds: int,
    warmup: int,
    device: torch.device,
) -> Results:
    """Returns seconds per step of each method, and its speed relative to plain AdamW.

    Each round runs every method once, in a changing order; of a method that is much slower than the
    others, only every few rounds. A ratio is the median over the rounds that both took part in. A
    method that does not run has an ``error`` instead.
    """
    gc.collect()  # trainers are cycles, and the last setting's hold its models
    set_seed(0)
    original = setting.build_on(device)
    with device:
        batch = setting.inputs()
    prepared: dict[str, Prepared] = {}
    results: Results = {METHODS[name].title: {} for name in methods}
    times = {name: Times() for name in methods}
    with tempfile.TemporaryDirectory() as folder, quiet():
        for name in methods:
            try:
                prepared[name] = prepare(name, original, setting, batch, Path(folder))
            except DoesNotRun as error:
                results[METHODS[name].title] = {"error": str(error)}
        every = _shares(prepared, rounds, warmup, device)
        for number in tqdm(range(rounds), desc="rounds", file=sys.stderr, disable=None):
            order = list(prepared)
            shift = number % max(1, len(order))  # nobody always follows the same one
            for name in order[shift:] + order[:shift]:
                if number % every[name] == 0:
                    start = now(device)
                    prepared[name].step()
                    wall, cpu = (b - a for a, b in zip(start, now(device), strict=True))
                    times[name].rounds.append(number)
                    times[name].seconds.append(wall)
                    times[name].cpu_seconds.append(cpu)
    for name, ready in prepared.items():
        results[METHODS[name].title] = _summary(times[name], times.get(ADAMW), ready.note)
    return results


def _shares(
    prepared: dict[str, Prepared], rounds: int, warmup: int, device: torch.device
) -> dict[str, int]:
    """Runs the warm-up; returns in which rounds a method takes part: in every n-th."""
    seconds = {}
    for name, ready in prepared.items():
        for _ in range(max(1, warmup)):
            start = now(device)[0]
            ready.step()
            seconds[name] = now(device)[0] - start
    fastest = min(seconds.values(), default=1.0)
    most = max(1, rounds // FEWEST)
    return {name: max(1, min(most, int(s / (SLOW * fastest)))) for name, s in seconds.items()}


def _summary(times: Times, baseline: Times | None, note: str) -> dict[str, Any]:
    ratios = (
        (None, None)
        if baseline is None
        else (ratio(vars(baseline), vars(times), of) for of in ("seconds", "cpu_seconds"))
    )
    wall, cpu = ratios
    summary = {
        "median_seconds": statistics.median(times.seconds),
        "median_cpu_seconds": statistics.median(times.cpu_seconds),
        "speed_of_plain_adamw": wall,
        "cpu_speed_of_plain_adamw": cpu,
        **vars(times),
    }
    return summary | ({"note": note} if note else {})


def ratio(a: dict[str, Any], b: dict[str, Any], of: str = "seconds") -> float | None:
    """Returns the median of a / b over the rounds that both took part in; None without any."""
    ours = dict(zip(b["rounds"], b[of], strict=True))
    both = [
        value / ours[number]
        for number, value in zip(a["rounds"], a[of], strict=True)
        if number in ours
    ]
    return statistics.median(both) if both else None


# ---- Rendering ----


def as_markdown(results: Results) -> str:
    """Returns the methods that run as a table in Markdown, times of the processor in brackets."""
    private = results.get(METHODS[DP_GRAPE].title, {})
    rows = []
    for title, result in results.items():
        if "error" in result:
            continue
        speeds = (result["speed_of_plain_adamw"], result["cpu_speed_of_plain_adamw"])
        seconds = f"{result['median_seconds']:.3f} s ({result['median_cpu_seconds']:.3f} s)"
        faster = ""
        if "rounds" in private and result is not private:
            over = _times([ratio(result, private, of) for of in ("seconds", "cpu_seconds")])
            faster = over.replace("x (", "x faster (")
        rows.append([title, seconds, _times(speeds), faster])
    head = ["One step of", "Median (CPU)", "Speed relative to AdamW", "DPGrapeTrainer is"]
    return table(head, rows)


def remarks(results: Results) -> str:
    """Returns which methods do not run, and what is to be known of others, a line each."""
    said = [f"{t} does not run: {r['error']}" for t, r in results.items() if "error" in r]
    said += [f"{title}: {result['note']}" for title, result in results.items() if "note" in result]
    return "".join(f"{line}\n" for line in said)


def measuring_line(record: dict[str, Any]) -> str:
    """Returns what measuring principal directions takes, and its share of a thousand steps."""
    step = record["results"][METHODS[PRINCIPAL].title]
    wall, cpu = (record["measuring"][of] for of in ("seconds", "cpu_seconds"))
    shares = (wall / step["median_seconds"] / 1000, cpu / step["median_cpu_seconds"] / 1000)
    return (
        f"principal directions are measured in {wall:.1f} s ({cpu:.1f} s), "
        f"{shares[0]:.1%} ({shares[1]:.1%}) of a thousand steps\n"
    )


def principal_table(records: Sequence[dict[str, Any]]) -> str:
    """Returns a table in Markdown: a step with principal directions, and measuring them.

    Times and ratios are of the processor.
    """
    names = (ADAMW, DP_GRAPE, PRINCIPAL)
    rows = []
    for record in records:
        once = record["measuring"]["cpu_seconds"]
        step = record["results"][METHODS[PRINCIPAL].title]["median_cpu_seconds"]
        share = once / step / 1000
        rows.append([*_cpu_times(record, names), f"{once:.1f} s", f"{share:.1%}"])
    return table(["Model", *_titles(names), "Measuring P", "of a thousand steps"], rows)


def times_table(records: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """Returns a table in Markdown: a step of some methods, a line per model.

    Times and ratios are of the processor, the latter to the first method.
    """
    return table(["Model", *_titles(names)], (_cpu_times(record, names) for record in records))


def _titles(names: Sequence[str]) -> list[str]:
    return [METHODS[name].title for name in names]


def _cpu_times(record: dict[str, Any], names: Sequence[str]) -> list[str]:
    steps = [record["results"][title] for title in _titles(names)]
    times = [
        f"{step['median_cpu_seconds']:.2f} s ({ratio(steps[0], step, 'cpu_seconds'):.2f}x)"
        for step in steps
    ]
    return [str(Setting(**record["setting"])), *times]


def _times(pair: Sequence[float | None]) -> str:
    wall, cpu = pair
    return "" if wall is None or cpu is None else f"{wall:.2f}x ({cpu:.2f}x)"
