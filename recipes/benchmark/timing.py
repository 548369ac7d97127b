"""Time the methods of ``benchmark`` in rounds, and render the results."""

import gc
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import set_seed

from recipes.benchmark.methods import ADAMW, DP_GRAPE, METHODS, DoesNotRun, now, prepare, quiet
from recipes.benchmark.models import Setting
from recipes.common.markdown import table

Results = dict[str, Any]  # title of a method -> times, for JSON


def measure(
    setting: Setting, methods: Sequence[str], rounds: int, warmup: int, device: torch.device
) -> Results:
    """Return seconds per step of each method, and its speed relative to plain AdamW.

    Each round runs every method once, in a changing order. A ratio is the median over the rounds
    that both took part in. A method that does not run has an ``error`` instead.
    """
    gc.collect()  # trainers are reference cycles, which hold the models of the last setting
    set_seed(0)
    original = setting.build_on(device)
    with device:
        batch = setting.inputs()
    prepared: dict[str, Callable[[], None]] = {}
    results: Results = {METHODS[name].title: {} for name in methods}
    kinds = ("rounds", "seconds", "cpu_seconds")  # the last of all threads together
    times: dict[str, Results] = {name: {kind: [] for kind in kinds} for name in methods}
    with tempfile.TemporaryDirectory() as folder, quiet():
        for name in methods:
            try:
                prepared[name] = prepare(name, original, setting, batch, Path(folder))
            except DoesNotRun as error:
                results[METHODS[name].title] = {"error": str(error)}
        for step in prepared.values():
            for _ in range(warmup):
                step()
        for number in tqdm(range(rounds), desc="rounds", file=sys.stderr, disable=None):
            order = list(prepared)
            shift = number % max(1, len(order))  # no method always follows the same one
            for name in order[shift:] + order[:shift]:
                start = now(device)
                prepared[name]()
                wall, cpu = (b - a for a, b in zip(start, now(device), strict=True))
                for kind, value in zip(kinds, (number, wall, cpu), strict=True):
                    times[name][kind].append(value)
    for name in prepared:
        results[METHODS[name].title] = _summary(times[name], times.get(ADAMW))
    return results


def _summary(times: Results, baseline: Results | None) -> Results:
    wall = cpu = None
    if baseline is not None:
        wall, cpu = (ratio(baseline, times, of) for of in ("seconds", "cpu_seconds"))
    return {
        "median_seconds": statistics.median(times["seconds"]),
        "median_cpu_seconds": statistics.median(times["cpu_seconds"]),
        "speed_of_plain_adamw": wall,
        "cpu_speed_of_plain_adamw": cpu,
        **times,
    }


def ratio(a: dict[str, Any], b: dict[str, Any], of: str = "seconds") -> float | None:
    """Return the median of a / b over the rounds that both took part in; None without any."""
    ours = dict(zip(b["rounds"], b[of], strict=True))
    both = [
        value / ours[number]
        for number, value in zip(a["rounds"], a[of], strict=True)
        if number in ours
    ]
    return statistics.median(both) if both else None


# ---- Rendering ----


def as_markdown(records: Sequence[dict[str, Any]]) -> str:
    """Return a table of the records of models: times, and ratios of processor time in brackets."""
    rows = []
    for record in records:
        results: Results = record["results"]
        model = str(Setting(**record["setting"]))
        private = results.get(METHODS[DP_GRAPE].title, {})
        for title, result in results.items():
            if "error" in result:
                continue
            speeds = (result["speed_of_plain_adamw"], result["cpu_speed_of_plain_adamw"])
            seconds = f"{result['median_seconds']:.3f} s ({result['median_cpu_seconds']:.3f} s)"
            over = ""
            if "rounds" in private and result is not private:
                over = _times([ratio(result, private, of) for of in ("seconds", "cpu_seconds")])
                over = over.replace("x (", " times as fast (").replace("x)", ")")
            rows.append([model, title, seconds, _times(speeds), over])
            model = ""  # only the first row names the model
    head = ["Model", "One step of", "Median (CPU)", "Speed relative to AdamW", "DPGrapeTrainer is"]
    return table(head, rows)


def remarks(results: Results) -> str:
    """Return one line for each method that does not run, with the reason."""
    return "".join(f"{t} does not run: {r['error']}\n" for t, r in results.items() if "error" in r)


def _times(pair: Sequence[float | None]) -> str:
    wall, cpu = pair
    return "" if wall is None or cpu is None else f"{wall:.2f}x ({cpu:.2f}x)"
