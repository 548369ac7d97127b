"""``dp-grape ledger``: what a run recorded, and the epsilon it spent."""

from __future__ import annotations

import argparse
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from tqdm import tqdm

from dp_grape_hf.accounting import AccountantFailure, EpsilonCurve, rounded_up
from dp_grape_hf.errors import PrivacyError, require
from dp_grape_hf.ledger import (
    KIND_OF,
    LEDGER_NAME,
    Entry,
    Ledger,
    Link,
    Mechanism,
    NotPrivate,
    Projection,
    Release,
    Resume,
    Start,
    Weights,
)
from dp_grape_hf.tables import table

_POINTS = 40  # of the curve


def run(args: argparse.Namespace) -> str:
    """Returns the ledger in words, and draws the curve if that was asked for."""
    place: Path = args.place
    ledger = Ledger.load(place / LEDGER_NAME if place.is_dir() else place)
    delta = ledger.mechanism.target_delta if args.target_delta is None else args.target_delta
    text = "\n".join(
        [
            f"run {ledger.run_id}, started {ledger.started_at}",
            "software: " + ", ".join(f"{k} {v}" for k, v in sorted(ledger.versions.items())),
            "",
            _mechanism(ledger.mechanism),
            _entries(ledger.links),
            *_spent(ledger, delta),
            "",
        ]
    )
    if args.plot is not None:
        _plot(ledger, delta, args.plot)
        text += f"\nWrote {args.plot}.\n"
    return text


def _mechanism(own: Mechanism) -> str:
    cap, unit = own.max_batch_size, own.privacy_unit
    rows = {
        "method": own.method,
        "noise multiplier sigma": f"{own.noise_multiplier:.6g}",
        "sampling": f"{own.sampling}, q = {own.sample_rate:.6g}"
        + ("" if cap is None else f", at most {cap} at a time"),
        "clipping": f"{own.clipping}, C = {own.max_grad_norm:g}",
        "privacy unit": f"{unit}, {own.adjacency.replace('_', ' ')}",
        "units declared": f"{own.num_samples}, of which {own.expected_batch_size:g} are expected",
        "projection": own.projection_in_words,
        "promised": "no epsilon"
        if own.target_epsilon is None
        else f"epsilon {own.target_epsilon:g} at delta {own.target_delta:g}",
        "accountant": own.accountant,
    }
    if own.public_dataset is not None:
        rows["declared public"] = own.public_dataset
    if own.gradient_factors is not None:
        rows["gradient factors"] = f"{own.gradient_factors}, before the clip"
    if own.chosen is not None:
        rows["chosen without the data"] = own.chosen
    if own.trials is not None:
        rows["trials"] = f"{own.trials}, of {own.steps_of_trial} releases each"
    return table(rows.items())


def _entries(links: Sequence[Link]) -> str:
    rows, total = [("#", "entry", "releases", "digest", "what it says")], 0
    for n, (entry, digest) in enumerate(links, 1):
        total = 0 if isinstance(entry, Start) else total
        total += entry.count if isinstance(entry, Release) else 0
        rows.append((f"{n}", KIND_OF[type(entry)], f"{total}", digest[:12], _says(entry)))
    return f"{table(rows, '><><')}head {links[-1].digest}\n"


def _says(entry: Entry) -> str:
    if isinstance(entry, Start):
        terms = "" if entry.continues is None else f", continues the run above, {entry.continues}"
        return f"run {entry.run_id[:12]} at {entry.at}{terms}"
    if isinstance(entry, Release):
        return f"{entry.count} with sigma {entry.noise_multiplier:.6g}, q {entry.sample_rate:.6g}"
    if isinstance(entry, Weights):
        files = ", ".join(f"{name} {digest[:12]}" for name, digest in sorted(entry.files.items()))
        return f"after {entry.updates} updates: {files or 'no digests'}"
    if isinstance(entry, Resume):
        changes = "".join(f", {name} is now {value}" for name, value in entry.changes.items())
        return f"from {entry.updates} updates at {entry.at}{changes}"
    if isinstance(entry, Projection):
        return f"P with digest {entry.sha256[:12]}"
    assert isinstance(entry, NotPrivate)
    return entry.reason


def _spent(ledger: Ledger, delta: float | None) -> Iterator[str]:
    runs = len(ledger.composed_runs)
    steps = sum(run.steps for run in ledger.composed_runs)
    of = f"{steps} releases" + (f" of {runs} runs on the same data" if runs > 1 else "")
    if not ledger.private:
        yield f"epsilon after {of} is infinite: {'; '.join(ledger.not_private_reasons)}"
    elif delta is None:
        yield f"epsilon after {of} needs a delta: pass --delta"
    else:
        require(0 < delta < 1, f"{delta=} must lie strictly between 0 and 1, for example 1e-5.")
        yield f"epsilon after {of}, at delta {delta:g}:"
        for name in ("prv", "pld", "rdp"):
            try:
                epsilon = f"{rounded_up(ledger.epsilon_by(name, delta)):.4f}"
            except AccountantFailure as failure:
                epsilon = f"not applicable: {failure}"
            yield f"  {name}  {epsilon}" + (
                ", the run's own" * (name == ledger.mechanism.accountant)
            )


# ---- The plot ----


def _curve(ledger: Ledger, delta: float) -> tuple[list[int], list[float]]:
    """Returns numbers of releases, over all runs that add up, and epsilon after each."""
    blocks, accountant = ledger.composed, ledger.mechanism.accountant
    ends = list(accumulate(block.steps for block in blocks))
    steps = sorted({round(ends[-1] * n / _POINTS) for n in range(_POINTS + 1)})
    curves = []
    for n, block in enumerate(blocks):
        own = EpsilonCurve(block, delta, accountant, blocks[:n])
        curves.append((own, block.num_trials is not None))
    epsilons = []
    for done in tqdm(steps, disable=None):
        n = bisect_left(ends, done)
        (curve, tuned), before = curves[n], ends[n] - blocks[n].steps
        # Of a trial among several, all counts from the start.
        epsilons.append(curve.epsilon(blocks[n].steps if tuned and done else done - before))
    return steps, epsilons


def _plot(ledger: Ledger, delta: float | None, path: Path) -> None:
    require(ledger.private, f"--plot {path}: epsilon is infinite, there is nothing to draw.")
    require(delta is not None, f"--plot {path}: the ledger has no delta. Pass --delta.")
    require(ledger.composed != [], f"--plot {path}: nothing was released yet.")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PrivacyError(
            f"--plot {path} needs matplotlib, which is not installed; run `pip install matplotlib`."
        ) from error
    assert delta is not None
    steps, epsilons = _curve(ledger, delta)
    spent = rounded_up(epsilons[-1], 3)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, epsilons, color="C0", zorder=3)
    target = ledger.mechanism.target_epsilon
    if target is not None:
        axes.axhline(target, color="C3", linestyle="--", label=f"promised, {target:g}")
    for label, color, style, at in _events(ledger):
        for n, step in enumerate(at):
            once = label if n == 0 else "_again"  # a legend leaves out what begins so
            axes.axvline(step, color=color, linestyle=style, linewidth=0.8, label=once)
    axes.set(
        xlabel="releases",
        ylabel="epsilon, upper bound",
        title=f"{spent:.3f} spent at delta {delta:g}, by {ledger.mechanism.accountant}",
        xlim=(0, steps[-1]),
        ylim=(0, None),
    )
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise PrivacyError(f"--plot {path} cannot be written: {error}") from error


def _events(ledger: Ledger) -> Iterator[tuple[str, str, str, list[int]]]:
    """Returns what else happened: a label, a colour, a style, and after which releases."""
    ids = {run.start.run_id for run in ledger.composed_runs}
    at: dict[type[object], list[int]] = {Weights: [], Resume: [], Start: []}
    total, counts = 0, False
    for entry, _ in ledger.links:
        if isinstance(entry, Start):
            counts = entry.run_id in ids
        if isinstance(entry, Release) and counts:
            total += entry.count
        elif counts and type(entry) in at:
            at[type(entry)].append(total)
    yield "weights saved", "0.8", "-", at[Weights]
    yield "resumed", "C1", ":", at[Resume]
    yield "another run continues", "C2", "-.", at[Start][1:]
