"""The paper's figures from our results.

    python -m recipes.report.figures --results runs/results runs/sweep

Below the folders lie results of recipes, sweeps, reports of ``gpu_report`` and what
``singular_values`` writes. A figure is a PNG for each model, whose name is in the title; one that
has no data is not drawn, and named. Of the paper's own curves no numbers are printed.

Lines join runs that differ in nothing but what is on the axis, in what was searched (learning rate
and clipping bound), and in seeds: points are means, with standard errors.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dp_grape_hf.memory import ADAMW
from recipes.common.markdown import mean_and_error
from recipes.common.plots import Panels, Points, logarithmic
from recipes.gpu_report.table import TITLES, title_of_way
from recipes.report.findings import (
    Findings,
    Run,
    collect,
    groups_of,
    is_private,
    lines_of,
    natural,
    partition,
    title_of,
)

GB = 1e9  # bytes, as in the paper
RESERVED, PHYSICAL, RANK = "max_memory_reserved", "per_device_train_batch_size", "projection_rank"
WEIGHTY = (
    *(PHYSICAL, RANK, "projection", "project_embeddings", "max_length"),
    *("gradient_checkpointing", "bf16", "dtype", "engine", "grad_sample_mode", "clipping"),
)
"""What memory depends on, beside the model and the method."""
SHORT = {RANK: "r", PHYSICAL: "B"}
STEPS_MEMORY = "reserved (simulated: allocated), GB"
BESIDE_RANKS = (ADAMW, "dp_adam", "dpzero")
"""What the ranks of DP-GRAPE are compared with, by the names of ``gpu_report``."""

Drawing = tuple[str, Figure]
"""The name of a file, without its ending, and what goes into it."""


def main(argv: Sequence[str] | None = None) -> None:
    """Draws what there are data for, and says what there are none for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, nargs="+", required=True, help="folders")
    parser.add_argument("--output_dir", type=Path, default=Path("recipes/paper/results"))
    options = parser.parse_args(argv)
    findings = collect(options.results)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    written: set[Path] = set()
    for name, draw in FIGURES.items():
        before = len(written)
        for stem, figure in draw(findings):
            path = options.output_dir / f"{stem}.png"
            if path in written:
                path = path.with_stem(f"{stem}-{len(written)}")
            figure.savefig(path, dpi=130)
            written.add(path)
            sys.stdout.write(f"{path}\n")
        if len(written) == before:
            sys.stdout.write(f"{name}: not run\n")


# ---- Scores ----


def accuracy_against_epsilon(findings: Findings, vit: bool) -> Iterator[Drawing]:
    """Yields the utility that each budget buys, by method, a panel for each task.

    What is not private is a line across.

    Args:
        findings: with scores at several budgets.
        vit: whether to draw the recipe ``vit`` (the paper's fig:vit_results), or the others.
    """
    for (family, model), runs in _by_model(findings):
        panels = _panels(runs, lambda run: run.task)
        panels = {t: own for t, own in panels.items() if len({r.epsilon for r in own} - {None}) > 1}
        if not panels or (family == "vit") is not vit:
            continue
        picture = Panels(list(panels), f"{model}: scores at a budget")
        for panel, own in zip(picture.axes, panels.values(), strict=True):
            for line in lines_of(groups_of(own), ["target_epsilon"]):
                if is_private(line.groups[0][0].method):
                    scores = {float(g[0].epsilon or 0): g.score() for g in line.groups}
                    picture.line(panel, line.label, scores)
                else:
                    picture.across(panel, line.label, line.groups[0].score()[0])
            logarithmic(panel, [*{run.epsilon for run in own if run.epsilon}])
        deltas = {run.facts["target_delta"] for run in runs if run.epsilon}
        across = "ε, at δ = " + " or ".join(f"{delta:g}" for delta in sorted(deltas))
        figure = picture.finished(across, f"test {_metric(runs)}, %")
        yield _stem("accuracy_against_epsilon", family, model), figure


def accuracy_against_rank(findings: Findings) -> Iterator[Drawing]:
    """Yields scores of DP-GRAPE against r, a panel for each task, a line for each budget.

    The paper's fig:roberta-r-ablation has SST-2, SNLI and TREC.
    """
    for (family, model), runs in _by_model(findings):
        projected = [run for run in runs if run.method == "dp_grape"]
        panels = _panels(projected, lambda run: run.task)
        panels = {t: own for t, own in panels.items() if len({r.facts[RANK] for r in own}) > 1}
        if not panels:
            continue
        picture = Panels(list(panels), f"{model}: DP-GRAPE with projections of rank r")
        for panel, own in zip(picture.axes, panels.values(), strict=True):
            budgets = partition(own, lambda run: float(run.epsilon or 0))
            for epsilon, at_budget in sorted(budgets.items()):
                for line in lines_of(groups_of(at_budget), [RANK]):
                    what = re.sub("^[^,]*", f"ε = {epsilon:g}", line.label)
                    points = {float(g[0].facts[RANK]): g.score() for g in line.groups}
                    picture.line(panel, what, points)
            logarithmic(panel, [*{run.facts[RANK] for run in own}])
        figure = picture.finished("rank r", f"test {_metric(projected)}, %")
        yield _stem("accuracy_against_rank", family, model), figure


def convergence(findings: Findings) -> Iterator[Drawing]:
    """Yields scores against steps, a panel for each task and budget (fig:roberta-convergence)."""
    for (family, model), runs in _by_model(findings):
        curved = [run for run in runs if run.result["curve"]]
        panels = {
            f"{task}, ε = {epsilon:g}" if epsilon else task: shown
            for task, own in _panels(curved, lambda run: run.task).items()
            for epsilon in sorted({run.epsilon for run in own if run.epsilon}) or [0.0]
            if (shown := [run for run in own if run.epsilon in (epsilon, None)])
        }
        if not panels:
            continue
        picture = Panels(list(panels), f"{model}: scores during training")
        for panel, own in zip(picture.axes, panels.values(), strict=True):
            for line in lines_of(groups_of(own), []):
                picture.line(panel, line.label, line.groups[0].curve())
            panel.set_xlim(left=0)
        split = "dev" if "dev" in curved[0].result["splits"] else "test"
        figure = picture.finished("steps", f"{split} {_metric(curved)}, %")
        yield _stem("convergence", family, model), figure


# ---- Memory ----


def memory_of_runs(findings: Findings, along: str) -> Iterator[Drawing]:
    """Yields what runs on a GPU took, against r (fig:roberta-memory-varied-r) or the batch size.

    Args:
        findings: with runs whose peaks are known.
        along: the setting on the axis.
    """
    titles = {RANK: "rank r", PHYSICAL: "physical batch size"}
    for (family, model), runs in _by_model(findings):
        weighed = [run for run in runs if RESERVED in run.result["peak_memory"]]
        if along == RANK:
            weighed = [run for run in weighed if run.method == "dp_grape"]
        by_place = _panels(weighed, lambda run: f"{run.task}, {run.result['device']}")
        panels = {k: o for k, o in by_place.items() if len({_weighty(r)[along] for r in o}) > 1}
        if not panels:
            continue
        picture = Panels(list(panels), f"{model}: memory")
        for panel, own in zip(picture.axes, panels.values(), strict=True):
            for label, points in peaks(own, along).items():
                picture.line(panel, label, points)
            logarithmic(panel, [*{_weighty(run)[along] for run in own}])
            panel.set_ylim(bottom=0)
        figure = picture.finished(titles[along], "largest memory reserved, GB")
        yield _stem(f"memory_of_runs_against_{SHORT[along]}", family, model), figure


def peaks(runs: Sequence[Run], along: str) -> dict[str, Points]:
    """Returns the lines of memory in GB: a line for each method and what else memory depends on."""
    lines: dict[str, dict[float, list[float]]] = {}
    for method, own in partition(runs, lambda run: run.method).items():
        facts = [_weighty(run) for run in own]
        varied = [n for n in WEIGHTY if n != along and len({str(fact[n]) for fact in facts}) > 1]
        for run, fact in zip(own, facts, strict=True):
            parts = [f"{SHORT.get(name, name)} = {fact[name]}" for name in varied]
            points = lines.setdefault(", ".join([title_of(method), *parts]), {})
            points.setdefault(fact[along], []).append(run.result["peak_memory"][RESERVED] / GB)
    return {
        label: {place: mean_and_error(values) for place, values in lines[label].items()}
        for label in sorted(lines, key=natural)
    }


def _weighty(run: Run) -> dict[str, Any]:
    """Returns what memory depends on; None for what the method does not look at."""
    known = {**run.result["script"], **run.result["settings"]}
    silent = {RANK, "projection"} - run.facts.keys()
    return {name: None if name in silent else known.get(name) for name in WEIGHTY}


@dataclass(frozen=True)
class Weighed:
    """What ``gpu_report`` has of a training step.

    Args:
        shape: the name of the model.
        size: B.
        method: a name of ``gpu_report``, which a rank may follow.
        simulated: whether it is, or was measured.
        rank: r of the projections, if the method has any.
        gigabytes: the peak: reserved, or allocated where it is simulated or on a CPU.
    """

    shape: str
    size: int
    method: str
    simulated: bool
    rank: int
    gigabytes: float


def weighed(report: Mapping[str, Any]) -> list[Weighed]:
    """Returns what a report has of steps that had enough memory, in its order."""
    found = []
    for part, what in (("cells", "reserved"), ("simulations", "allocated")):
        for key, entry in report[part].items():
            shape, batch, method = key.rsplit(", ", 2)
            size = entry.get(what, entry.get("allocated"))  # a CPU reserves nothing
            if size is not None and "out_of_memory" not in entry:
                number = int(batch.removeprefix("B="))
                simulated = part == "simulations"
                found.append(Weighed(shape, number, method, simulated, entry["rank"], size / GB))
    return found


def memory_against_batch(findings: Findings) -> Iterator[Drawing]:
    """Yields memory of whole steps against the batch size, a panel for each model.

    The paper's fig:roberta-opt-memory-usage; the numbers are those of ``gpu_report``. DP-GRAPE has
    the rank of the model's experiments. Simulations of what no GPU has room for end at the edge.
    """
    for path, report in findings.reports.items():
        own_ranks = [step for step in weighed(report) if step.method in TITLES]
        panels = partition(own_ranks, lambda step: step.shape)
        if not panels:
            continue
        picture = Panels(list(panels), _title(report))
        for panel, (shape, own) in zip(picture.axes, panels.items(), strict=True):
            lines = partition(own, lambda step: (title_of_way(step.method), step.simulated))
            for (method, simulated), steps in sorted(lines.items()):
                points = {float(step.size): (step.gigabytes, math.nan, 1) for step in steps}
                if simulated:
                    picture.line(panel, f"{method}, simulated", points, beside=method)
                else:
                    picture.line(panel, method, points)
            logarithmic(panel, [*{step.size for step in own}])
            fitting = [step for step in own if not step.simulated] or own
            panel.set_ylim(0, 1.1 * max(step.gigabytes for step in fitting))
            panel.set_title("\n".join([shape, *_out_of_memory(report["cells"], shape)]), fontsize=9)
        figure = picture.finished("batch size", STEPS_MEMORY)
        yield _stem("memory_against_batch", _device(path)), figure


def memory_against_rank(findings: Findings) -> Iterator[Drawing]:
    """Yields memory of whole steps of DP-GRAPE against r, a figure per model, a panel per batch.

    The paper's fig:roberta-memory-varied-r; the numbers are those of ``gpu_report``. What was
    measured of other methods is a line across.
    """
    for path, report in findings.reports.items():
        for shape, own in partition(weighed(report), lambda step: step.shape).items():
            batches = partition(own, lambda step: step.size)
            varied = {size: steps for size, steps in batches.items() if len(_ranks(steps)) > 1}
            if not varied:
                continue
            title = f"{shape}: DP-GRAPE with projections of rank r"
            picture = Panels([f"B = {size}" for size in sorted(varied)], _title(report, title))
            for panel, size in zip(picture.axes, sorted(varied), strict=True):
                _draw_ranks(picture, panel, varied[size])
            figure = picture.finished("rank r", STEPS_MEMORY)
            yield _stem("memory_against_rank", _device(path), shape), figure


def _ranks(steps: Sequence[Weighed]) -> set[int]:
    return {step.rank for step in steps if step.method.split(" ")[0] == "dp_grape"}


def _draw_ranks(picture: Panels, panel: Axes, steps: Sequence[Weighed]) -> None:
    for simulated in (False, True):
        points = {
            float(step.rank): (step.gigabytes, math.nan, 1)
            for step in steps
            if step.method.split(" ")[0] == "dp_grape" and step.simulated is simulated
        }
        if points:
            label = "DP-GRAPE, simulated" if simulated else "DP-GRAPE"
            picture.line(panel, label, points, beside="DP-GRAPE" if simulated else "")
    for step in steps:
        if step.method in BESIDE_RANKS and not step.simulated:
            picture.across(panel, title_of_way(step.method), step.gigabytes)
    logarithmic(panel, [*_ranks(steps)])
    panel.set_ylim(bottom=0)


def _title(report: Mapping[str, Any], what: str = "Memory of a training step") -> str:
    devices = sorted({entry["device"] for entry in report["cells"].values()})
    return f"{what} ({', '.join(devices) or 'simulated'})"


def _device(path: Path) -> str:
    return path.stem.removeprefix("gpu_report-")


def _out_of_memory(cells: Mapping[str, Any], shape: str) -> list[str]:
    found: dict[str, list[str]] = {}
    for key, entry in cells.items():
        where, batch, method = key.rsplit(", ", 2)
        if where == shape and method in TITLES and "out_of_memory" in entry:
            found.setdefault(title_of_way(method), []).append(batch[2:])
    return [f"out of memory: {name} at B = {', '.join(sizes)}" for name, sizes in found.items()]


# ---- Spectra ----


def singular_values(findings: Findings) -> Iterator[Drawing]:
    """Yields singular values of gradients before and after clipping and noise (fig:vit-svals).

    A panel is a bound C; the gradient that is neither clipped nor noised is in all of them.
    """
    for found in findings.spectra:
        entries = found["spectra"]
        plain = [entry for entry in entries if entry["C"] is None]
        bounds = sorted({entry["C"] for entry in entries} - {None})
        script = found["script"]
        model = Path(script["model_name_or_path"]).name
        title = f"{model} on {script['task']}: singular values of the gradient of the first step"
        picture = Panels([f"C = {bound:g}" for bound in bounds], title)
        for panel, bound in zip(picture.axes, bounds, strict=True):
            for entry in [*plain, *(entry for entry in entries if entry["C"] == bound)]:
                values = enumerate(entry["singular_values"], 1)
                points = {float(place): (value, math.nan, 1) for place, value in values}
                picture.line(panel, _noise(entry), points)
            panel.set_yscale("log")
            panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure = picture.finished("place, from the largest on", "singular value, mean over layers")
        yield _stem("singular_values", model, script["task"]), figure


def _noise(entry: Mapping[str, Any]) -> str:
    if entry["C"] is None:
        return "neither clipped nor noised"
    return rf"$\sigma$ = {entry['sigma']:g}" if entry["sigma"] else "clipped, without noise"


# ---- What the figures share ----


def _by_model(findings: Findings) -> list[tuple[tuple[str, str], list[Run]]]:
    tested = [run for run in findings.runs if "test" in run.result["metrics"]]
    return list(partition(tested, lambda run: (run.family, run.model)).items())


def _panels(runs: Sequence[Run], title: Callable[[Run], str]) -> dict[str, list[Run]]:
    found = partition(runs, title)
    return {name: found[name] for name in sorted(found, key=natural)}


def _metric(runs: Sequence[Run]) -> str:
    """Returns what is measured: accuracy, or on other tasks f1."""
    return " or ".join(dict.fromkeys(next(iter(r.result["metrics"]["test"])) for r in runs))


def _stem(*parts: str) -> str:
    return "-".join(re.sub(r"[^a-z0-9_.]+", "-", part.lower()).strip("-") for part in parts)


FIGURES: Mapping[str, Callable[[Findings], Iterator[Drawing]]] = {
    "memory against batch size, of single steps": memory_against_batch,
    "memory against batch size, of runs": partial(memory_of_runs, along=PHYSICAL),
    "memory against rank, of single steps": memory_against_rank,
    "memory against rank, of runs": partial(memory_of_runs, along=RANK),
    "accuracy against rank": accuracy_against_rank,
    "convergence": convergence,
    "accuracy against epsilon, of images": partial(accuracy_against_epsilon, vit=True),
    "accuracy against epsilon, of texts": partial(accuracy_against_epsilon, vit=False),
    "singular values": singular_values,
}


if __name__ == "__main__":
    main()
