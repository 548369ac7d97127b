"""``dp-grape report``: write one page with plots of a run."""

import argparse
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dp_grape_hf.accounting import EpsilonCurve, rounded_up
from dp_grape_hf.cli.ledger import in_words
from dp_grape_hf.errors import PrivacyError, require
from dp_grape_hf.ledger import LEDGER_NAME, Ledger
from dp_grape_hf.trainer import logged

PAGE, PICTURE = "report.md", "report.png"
_POINTS = 40  # points of the epsilon curve
_GROUPS = {"": "all", "_head": "head", "_body": "body"}


def run(args: argparse.Namespace) -> str:
    """Write the page and its picture into the folder; return a message with their paths."""
    folder: Path = args.folder
    ledger = Ledger.load(folder / LEDGER_NAME)
    require(ledger.private, f"{folder}: epsilon is infinite, so there is no curve to draw.")
    delta = ledger.mechanism.target_delta if args.target_delta is None else args.target_delta
    require(delta is not None, f"{folder}: the ledger has no delta. Pass --delta.")
    require(ledger.composed != [], f"{folder}: the run has no private update yet. Train first.")
    lines = logged(folder)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PrivacyError(
            "dp-grape report needs matplotlib, which is not installed. Run `pip install "
            "matplotlib`."
        ) from error
    names = {name for line in lines for name in line}
    begin = {_draw_signal: "noise", _draw_rate: "learning_rate", _draw_metrics: "eval_"}
    drawn = [d for d in begin if any(name.startswith(begin[d]) for name in names)]
    panels: list[Any] = [_draw_epsilon, *drawn]
    figure = Figure(figsize=(7, 3 * len(panels)), layout="constrained")
    for axes, panel in zip(figure.subplots(len(panels), squeeze=False).flat, panels, strict=True):
        panel(axes, ledger, delta, lines)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    text = in_words(ledger, delta)
    notes = "\n\n".join(_notes(ledger, lines))
    page = f"# {folder.resolve().name}\n\n![The run]({PICTURE})\n\n{notes}\n\n```text\n{text}```\n"
    try:
        figure.savefig(folder / PICTURE, dpi=120)
        (folder / PAGE).write_text(page, encoding="utf-8")
    except OSError as error:
        raise PrivacyError(
            f"{folder} cannot be written to, so there is no report: {error}. Free disk space, or "
            "copy the folder to a place that you can write to."
        ) from error
    return f"Wrote {folder / PAGE} and {folder / PICTURE}.\n"


_Lines = Sequence[Mapping[str, float]]


def _notes(ledger: Ledger, lines: _Lines) -> Iterator[str]:
    """Yield paragraphs that explain the plots."""
    if (bands := _bands(ledger)) > 1:
        yield (
            f"Epsilon rises in steps. The noise is correlated over {bands} releases, and each "
            f"example can be sampled in only one of {bands} successive releases. The first of them "
            f"costs as much as all {bands}. A run that stops in between has spent the cost of all "
            f"{bands}."
        )
    if any("noise" in line for line in lines):
        yield (
            "Signal is the norm of the gradient in the mean of all releases so far, and noise is "
            "the norm of the noise in this mean. The line of the signal has a gap where the signal "
            "is not measurable. Both have the unit of a clipped gradient: 1 is the norm of a "
            "gradient that was clipped to C = 1."
        )


def _draw_epsilon(axes: Any, ledger: Ledger, delta: float, lines: _Lines) -> None:
    steps, epsilons = _curve(ledger, delta)
    style = "steps-pre" if _bands(ledger) > 1 else "default"
    axes.plot(steps, epsilons, color="C0", zorder=3, drawstyle=style)
    target = ledger.mechanism.target_epsilon
    if target is not None:
        axes.axhline(target, color="C3", linestyle="--", label=f"budget, {target:g}")
    spent = rounded_up(epsilons[-1], 3)
    axes.set(
        xlabel="releases",
        ylabel="epsilon, upper bound",
        title=f"{spent:.3f} spent at delta {delta:g}, by {ledger.mechanism.accountant}",
        xlim=(0, steps[-1]),
        ylim=(0, None),
    )


def _draw_signal(axes: Any, ledger: Ledger, delta: float, lines: _Lines) -> None:
    groups = {n: g for n, g in _GROUPS.items() if any(f"noise{n}" in line for line in lines)}
    if len(groups) > 1:
        del groups[""]
    for n, (name, group) in enumerate(groups.items()):
        for what, style in (("signal", "-"), ("noise", ":")):
            if any(f"{what}{name}" in line for line in lines):
                label = f"{what}, {group}"
                _line(axes, lines, f"{what}{name}", label, color=f"C{n}", linestyle=style)
            else:
                axes.plot([], [], " ", label=f"{what}, {group}: not measurable")
    axes.set(xlabel="step", ylabel="norm", title="Signal and noise in the mean of all releases")
    axes.set_yscale("log")


def _draw_rate(axes: Any, ledger: Ledger, delta: float, lines: _Lines) -> None:
    _line(axes, lines, "learning_rate", None)
    axes.set(xlabel="step", ylabel="learning rate", title="Learning rate", ylim=(0, None))


def _draw_metrics(axes: Any, ledger: Ledger, delta: float, lines: _Lines) -> None:
    left_out = ("runtime", "per_second", "jit_compilation_time")
    names = dict.fromkeys(name for line in lines for name in line if name.startswith("eval_"))
    for name in (name for name in names if not name.endswith(left_out)):
        _line(axes, lines, name, name.removeprefix("eval_"), marker="o")
    axes.set(xlabel="step", title="Metrics of evaluation data, which epsilon does not cover")


def _line(axes: Any, lines: _Lines, name: str, label: str | None, **style: Any) -> None:
    points = [(line["step"], line[name]) for line in lines if name in line]
    axes.plot(*zip(*points, strict=True), label=label, **{"marker": "."} | style)


# ---- Epsilon ----


def _bands(ledger: Ledger) -> int:
    """Return the largest number of bands of the runs that add up."""
    return max(block.bands for block in ledger.composed)


def _curve(ledger: Ledger, delta: float) -> tuple[list[int], list[float]]:
    """Return numbers of releases, over all runs that add up, and epsilon after each number."""
    blocks, accountant = ledger.composed, ledger.mechanism.accountant
    ends = list(accumulate(block.steps for block in blocks))
    steps = sorted({round(ends[-1] * n / _POINTS) for n in range(_POINTS + 1)})
    curves = [EpsilonCurve(block, delta, accountant, blocks[:n]) for n, block in enumerate(blocks)]
    epsilons = []
    for done in tqdm(steps, disable=None):
        n = bisect_left(ends, done)
        before = ends[n] - blocks[n].steps
        epsilons.append(curves[n].epsilon(done - before))
    return steps, epsilons
