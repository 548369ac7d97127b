"""Times the methods of ``benchmark`` in rounds, and renders what was measured."""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
from recipes.benchmark.models import VIT, Setting
from recipes.common.markdown import header, row

Results = dict[str, Any]  # title of a method -> what was measured, as JSON has it

SLOW = 4.0  # a method this much slower than the fastest takes part in fewer rounds
FEWEST = 3  # rounds that a slow method takes part in, at least


@dataclass(frozen=True)
class Sweep:
    """A quantity to be varied."""

    field: str  # of ``Setting``
    label: str  # of the axis
    values: tuple[int, ...]


SWEEPS = {
    "batch": Sweep("batch_size", "physical batch size B", (1, 2, 4, 8, 16, 32)),
    "length": Sweep("length", "positions T", (16, 36, 64, 144, 256)),  # squares: images too
    "rank": Sweep("rank", "rank r", (4, 8, 16, 32, 64, 128)),
    "depth": Sweep("layers", "layers", (1, 2, 4, 8, 12)),
}


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


def table(results: Results, setting: Setting) -> str:
    """Returns the results as text, one line per method, and below it what is to be known.

    The last column is a method's time divided by that of ``DPGrapeTrainer``.
    """
    private = results.get(METHODS[DP_GRAPE].title, {})
    lines = [
        str(setting),
        f"{'one step of':<34}{'median':>10}{'CPU':>10}{'speed vs AdamW (CPU)':>23}"
        f"{'over DPGrapeTrainer (CPU)':>27}",
    ]
    remarks = []
    for title, result in results.items():
        if "error" in result:
            remarks.append(f"{title} does not run: {result['error']}")
            lines.append(f"{title:<34}{'does not run':>20}")
            continue
        if "note" in result:
            remarks.append(f"{title}: {result['note']}")
        speeds = (result["speed_of_plain_adamw"], result["cpu_speed_of_plain_adamw"])
        over: tuple[float | None, ...] = (None, None)
        if "rounds" in private:
            over = tuple(ratio(result, private, of) for of in ("seconds", "cpu_seconds"))
        lines.append(
            f"{title:<34}{result['median_seconds']:>8.3f} s{result['median_cpu_seconds']:>8.3f} s"
            f"{_times(speeds):>23}{_times(over):>27}"
        )
    return "\n".join([*lines, *remarks]) + "\n"


def as_markdown(results: Results) -> str:
    """Returns the methods that run as a table in Markdown, times of the processor in brackets."""
    private = results[METHODS[DP_GRAPE].title]
    cells = ["One step of", "Median (CPU)", "Speed relative to AdamW", "DPGrapeTrainer is"]
    lines = header(cells)
    for title, result in results.items():
        if "error" in result:
            continue
        speeds = (result["speed_of_plain_adamw"], result["cpu_speed_of_plain_adamw"])
        over = _times([ratio(result, private, of) for of in ("seconds", "cpu_seconds")])
        seconds = f"{result['median_seconds']:.3f} s ({result['median_cpu_seconds']:.3f} s)"
        faster = "" if result is private else over.replace("x (", "x faster (")
        lines.append(row([title, seconds, _times(speeds), faster]))
    return "\n".join(lines) + "\n"


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
    lines = header(["Model", *_titles(names), "Measuring P", "of a thousand steps"])
    for record in records:
        once = record["measuring"]["cpu_seconds"]
        step = record["results"][METHODS[PRINCIPAL].title]["median_cpu_seconds"]
        share = once / step / 1000
        lines.append(row([*_cpu_times(record, names), f"{once:.1f} s", f"{share:.1%}"]))
    return "\n".join(lines) + "\n"


def times_table(records: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """Returns a table in Markdown: a step of some methods, a line per model.

    Times and ratios are of the processor, the latter to the first method.
    """
    lines = header(["Model", *_titles(names)])
    lines += [row(_cpu_times(record, names)) for record in records]
    return "\n".join(lines) + "\n"


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


def sweep(
    quantity: str,
    values: Sequence[int],
    setting: Setting,
    methods: Sequence[str],
    rounds: int,
    warmup: int,
    device: torch.device,
) -> list[dict[str, Any]]:
    """Returns a record per value of the swept quantity: its setting and its results."""
    name = SWEEPS[quantity].field
    settings = [replace(setting, **{name: value}) for value in values]  # type: ignore[arg-type]
    return [
        {"setting": vars(each), "results": measure(each, methods, rounds, warmup, device)}
        for each in settings
    ]


def sweep_table(quantity: str, runs: Sequence[dict[str, Any]]) -> str:
    """Returns seconds and speed of each method against the swept quantity."""
    swept = SWEEPS[quantity]
    titles = list(runs[0]["results"])
    errors = dict.fromkeys(
        f"{title} does not run at {swept.field}={run['setting'][swept.field]}: {result['error']}"
        for run in runs
        for title, result in run["results"].items()
        if "error" in result
    )
    lines = [
        _title(Setting(**runs[0]["setting"]), swept),
        f"{swept.label:<24}" + "".join(f"{title:>34}" for title in titles),
    ]
    for run in runs:
        cells = []
        for title in titles:
            result = run["results"][title]
            if "error" in result:
                cells.append("does not run")
            else:
                speeds = (result["speed_of_plain_adamw"], result["cpu_speed_of_plain_adamw"])
                cells.append(f"{result['median_seconds']:.3f} s {_times(speeds)}")
        value = run["setting"][swept.field]
        lines.append(f"{value:<24}" + "".join(f"{cell:>34}" for cell in cells))
    return "\n".join([*lines, *errors]) + "\n"


def plot_sweep(quantity: str, runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws seconds per step, and speed relative to plain AdamW, against the swept quantity."""
    from matplotlib.figure import Figure  # of another extra than the benchmark's own

    swept = SWEEPS[quantity]
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for title in runs[0]["results"]:
        done = [run for run in runs if "rounds" in run["results"][title]]
        if not done:
            continue
        x = [run["setting"][swept.field] for run in done]
        results = [run["results"][title] for run in done]
        left.plot(x, [result["median_seconds"] for result in results], "o-", label=title)
        if all(result["speed_of_plain_adamw"] is not None for result in results):
            right.plot(x, [result["speed_of_plain_adamw"] for result in results], "o-", label=title)
    left.set(xscale="log", yscale="log", ylabel="seconds per step (median)")
    right.set(xscale="log", ylabel="speed relative to plain AdamW", ylim=(0, None))
    for axes in (left, right):
        ticks = [run["setting"][swept.field] for run in runs]
        axes.set_xticks(ticks, labels=[str(tick) for tick in ticks], minor=False)
        axes.set_xticks([], minor=True)
        axes.set_xlabel(swept.label)
        axes.grid(alpha=0.3)
    left.legend()
    figure.suptitle(_title(Setting(**runs[0]["setting"]), swept))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _title(setting: Setting, swept: Sweep) -> str:
    names = {
        "layers": f"{setting.layers} layers",
        "batch_size": f"B={setting.batch_size}",
        "length": f"T={setting.length}",
        "rank": f"r={setting.rank}",
    }
    kept = ", ".join(text for name, text in names.items() if name != swept.field)
    vocabulary = "" if setting.model == VIT else f", vocabulary {setting.vocab_size}"
    return f"{setting.model}, hidden {setting.hidden_size}{vocabulary}, {kept}"
