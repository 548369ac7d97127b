"""``dp-grape memory``: the memory of a step, for a model of which there is only a config."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial

import torch
from tqdm import tqdm

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.memory import (
    COLLECTIVES,
    COMPARED,
    DP_GRAPE,
    FORMULAS,
    GIB,
    KINDS,
    KNOBS,
    MOST_SAMPLES,
    TITLES,
    Compared,
    Fit,
    Footprint,
    ModelOfConfig,
    Peak,
    Setting,
    Simulate,
    Sizes,
    Turned,
    choices,
    compared,
    every_method,
    footprint,
    interpolated,
    largest_batch,
    read_config,
    simulate_all,
    sizes_of_model,
    turn_each,
    turn_until_it_fits,
)
from dp_grape_hf.per_sample import GradSampleMode
from dp_grape_hf.tables import table


def run(args: argparse.Namespace) -> str:
    """Returns the tables, or JSON."""
    _refuse_combinations(args)
    model = _model(args)
    setting = Setting(
        batch_size=args.batch_size,
        dtype=getattr(torch, args.dtype),
        gradient_checkpointing=args.gradient_checkpointing,
        projection=args.projection,
        rank=args.rank,
        bits=args.bits,
        processes=args.processes,
        bands=args.bands,
    )
    if args.all_methods:
        return _compare(model, setting, args)
    names = list(dict.fromkeys(args.methods or COMPARED))
    steps = len(names) * (1 if args.gpu_memory is None else 2) + len(KNOBS) * args.knobs
    progress = tqdm(disable=None, total=steps, unit=" steps", desc="simulating")

    @cache
    def footprint_of(setting: Setting) -> Footprint:
        progress.update()
        return footprint(model.build, model.batch, setting)

    def peak_of(setting: Setting) -> Peak:
        return footprint_of(setting).peak

    settings = {name: compared(name, setting) for name in names}
    footprints = {name: footprint_of(setting) for name, setting in settings.items()}
    report = Report(model.name, model.parameters, model.length, setting, footprints)
    name = DP_GRAPE if DP_GRAPE in settings else names[0]
    chosen = settings[name]
    limit = None
    if args.gpu_memory is not None:
        report.card = (args.gpu_memory, args.reserve)
        limit = int((args.gpu_memory - args.reserve) * GIB)
        report.largest = {
            method: largest_batch(
                _total(peak_of, setting),
                limit,
                setting.batch_size,
                partial(_foreseen, footprint_of, setting),
            )
            for method, setting in settings.items()
        }
    too_large = limit is not None and peak_of(chosen).total > limit
    if args.knobs or too_large:
        report.chosen, report.turned = name, turn_each(peak_of, chosen)
    if limit is not None and too_large:
        report.fit = turn_until_it_fits(peak_of, chosen, limit, report.turned)
    progress.close()
    return report.as_json() if args.json else report.as_text()


def _model(args: argparse.Namespace) -> ModelOfConfig:
    config = read_config("model_name_or_path", args.model_name_or_path, args.num_labels)
    return ModelOfConfig(config, args.head, args.seq_len)


def _refuse_combinations(args: argparse.Namespace) -> None:
    if args.gpu_memory is not None and not args.gpu_memory > args.reserve >= 0:
        raise PrivacyError(
            f"gpu_memory={args.gpu_memory:g} leaves no room beside reserve={args.reserve:g}; both "
            "are in GiB, and the reserve must be at least 0."
        )
    for name in ("methods", "gpu_memory", "knobs"):
        if args.all_methods and getattr(args, name):
            raise PrivacyError(
                f"all_methods=True and {name}={getattr(args, name)!r}: --all_methods compares "
                "every method at one batch size, and searches for nothing. Leave one of them out."
            )


def _compare(model: ModelOfConfig, setting: Setting, args: argparse.Namespace) -> str:
    """Returns the tables of every method."""
    rows = every_method(setting)
    with tqdm(disable=None, total=len(rows), desc="every method") as progress:
        simulate_all(model.build, model.batch, rows, progress.update)
    sizes = sizes_of_model(model.build, setting)
    heading = Report(model.name, model.parameters, model.length, setting, {})
    report = Comparison(heading, rows, sizes)
    return report.as_json() if args.json else report.as_text()


def _total(peak_of: Simulate, setting: Setting) -> Callable[[int], int]:
    """Returns the peak in bytes as a function of the batch size."""
    return lambda size: peak_of(replace(setting, batch_size=size)).total


def _foreseen(
    footprint_of: Callable[[Setting], Footprint], setting: Setting, one: int, other: int, size: int
) -> int | None:
    """Returns the peak of a batch size from the traces of two others, if they tell it."""
    some = [(n, footprint_of(replace(setting, batch_size=n)).trace) for n in (one, other)]
    trace = interpolated(some[0], some[1], size)
    return None if trace is None else trace.total()


# ---- What is shown: tables in GiB or MiB, JSON in bytes ----


@dataclass
class Report:
    """What was found out about a step, and how it is shown.

    Args:
        model: the class of the model.
        parameters: how many it has.
        length: of a sample, in words.
        setting: what was asked for; its method does not count.
        footprints: method -> what its step takes.
        largest: method -> the largest batch that fits the card; empty without one.
        card: the card's memory, and how much of it is not for tensors, GiB.
        chosen: the method that the knobs are turned for.
        turned: what each knob does.
        fit: what makes the chosen setting fit, if it does not.
    """

    model: str
    parameters: int
    length: str
    setting: Setting
    footprints: dict[str, Footprint]
    largest: dict[str, int] = field(default_factory=dict)
    card: tuple[float, float] | None = None
    chosen: str | None = None
    turned: list[Turned] = field(default_factory=list)
    fit: Fit | None = None

    def as_text(self) -> str:
        """Returns the tables."""
        parts = [
            self.heading(),
            self._peaks(),
            self._sent(),
            self._card(),
            self._knobs(),
            self._way(),
        ]
        return "\n".join(part for part in parts if part)

    def as_json(self) -> str:
        """Returns the figures in bytes, by the names of ``Setting``."""
        methods = {
            method: {
                "peak": taken.peak.total,
                "reached_in": taken.peak.phase,
                "kinds": dict(taken.peak.kinds),
                "phases": dict(taken.peak.phases),
                "sent": dict(taken.sent) if self.setting.processes > 1 else None,
                "largest_batch": self.largest.get(method),
            }
            for method, taken in self.footprints.items()
        }
        knobs = [
            {"name": t.knob.name, "option": _option(t), "peak": t.peak.total, "cost": t.knob.cost}
            for t in self.turned
        ]
        fit = self.fit and {
            "options": [_option(t) for t in self.turned if t.knob in self.fit.knobs],
            "peak": self.fit.peak.total,
            "fits": self.fit.fits,
        }
        result = {
            **self.request(),
            "gpu_memory_and_reserve_gib": self.card,
            "methods": methods,
            "knobs_for": self.chosen,
            "knobs": knobs,
            "fit": fit,
        }
        return json.dumps(result, indent=2) + "\n"

    def request(self) -> dict[str, object]:
        """Returns what was asked for, by the names of ``Setting``."""
        return {
            "model": self.model,
            "parameters": self.parameters,
            "batch_size": self.setting.batch_size,
            "length": self.length,
            "dtype": str(self.setting.dtype).removeprefix("torch."),
            "projection": self.setting.projection,
            "rank": self.setting.rank,
            "bits": self.setting.bits,
            "processes": self.setting.processes,
        }

    def heading(self) -> str:
        """Returns the model, the batch and the options, in words."""
        setting = self.setting
        options = (
            f"{str(setting.dtype).removeprefix('torch.')} weights, rank {setting.rank}",
            "" if setting.projection == "gaussian" else f"{setting.projection} projections",
            "gradient checkpointing" if setting.gradient_checkpointing else "",
            f"linear layers in {setting.bits} bits" if setting.bits else "",
            f"one of {setting.processes} processes" if setting.processes > 1 else "",
        )
        millions = self.parameters / 1e6
        return (
            f"{self.model}, {millions:,.0f} million parameters\n"
            f"batch {setting.batch_size}, {self.length}, "
            f"{', '.join(filter(None, options))}\n"
        )

    def _peaks(self) -> str:
        peaks = [taken.peak for taken in self.footprints.values()]
        rows = [["peak memory, GiB", *(TITLES[method] for method in self.footprints)]]
        for kind in KINDS:
            rows.append([kind, *(_gib(peak.kinds[kind]) for peak in peaks)])
        rows.append(["total", *(_gib(peak.total) for peak in peaks)])
        rows.append(["reached in", *(peak.phase for peak in peaks)])
        return table(rows, "<>")

    def _sent(self) -> str:
        if self.setting.processes == 1:
            return ""
        rows = [["sent by a process in a step, GiB", *(TITLES[name] for name in self.footprints)]]
        for kind in COLLECTIVES:
            rows.append([kind, *(_gib(taken.sent[kind]) for taken in self.footprints.values())])
        return table(rows, "<>")

    def _card(self) -> str:
        if self.card is None:
            return ""
        memory, reserve = self.card
        rows = []
        for method, largest in self.largest.items():
            fits = f"fits up to B={largest}" if largest else "does not fit, even B=1"
            rows.append([TITLES[method], fits + (" or more" if largest >= MOST_SAMPLES else "")])
        heading = f"On a {memory:g} GiB card, {reserve:g} GiB of it left to CUDA:\n"
        return heading + table(rows)

    def _knobs(self) -> str:
        if self.chosen is None:
            return ""
        name, size = TITLES[self.chosen], self.setting.batch_size
        if not self.turned:
            return f"Nothing is left to turn for {name}.\n"
        before = self.footprints[self.chosen].peak.total
        rows = [["", "GiB", "saves", "", "costs"]]
        rows += [
            [t.knob.name, _gib(t.peak.total), _gib(before - t.peak.total), _option(t), t.knob.cost]
            for t in self.turned
        ]
        heading = f"What saves memory for {name} at B={size}, each alone:\n"
        return heading + table(rows, "<>><")

    def _way(self) -> str:
        if self.fit is None or self.card is None or self.chosen is None:
            return ""
        options = " ".join(_option(t) for t in self.turned if t.knob in self.fit.knobs)
        what = f"{TITLES[self.chosen]} at B={self.setting.batch_size}"
        verb = "fits" if self.fit.fits else "still does not fit"
        return (
            f"{what} {verb} a {self.card[0]:g} GiB card with: {options or '(nothing helps)'}"
            f" ({_gib(self.fit.peak.total)} GiB)\n"
        )


@dataclass
class Comparison:
    """What was found out about every method, and how it is shown.

    Args:
        report: of the model and what was asked for; without peaks.
        rows: the methods, AdamW first.
        sizes: what the paper's formulas are made of.
    """

    report: Report
    rows: list[Compared]
    sizes: Sizes

    def as_text(self) -> str:
        """Returns the tables, and how to read them."""
        parts = [self.report.heading(), self._steps(), self._kinds(), self._legend()]
        return "\n".join([*parts, "".join(self._choices())])

    def as_json(self) -> str:
        """Returns the figures in bytes."""
        result = {
            **self.report.request(),
            "rows": [self._row(row) for row in self.rows],
            "cost_rule": [asdict(choice) for choice in choices(self.rows)],
        }
        return json.dumps(result, indent=2) + "\n"

    def _row(self, row: Compared) -> dict[str, object]:
        taken = row.footprint
        return {
            "title": row.title,
            "method": row.setting.method,
            "grad_sample_mode": row.setting.grad_sample_mode,
            "refused": row.refused or None,
            "flops": taken and taken.flops,
            "peak": taken and taken.peak.total,
            "reached_in": taken and taken.peak.phase,
            "kinds": taken and dict(taken.peak.kinds),
            "gradients": taken and taken.gradients,
            "optimizer": taken and taken.optimizer,
            "projectors": taken and taken.projectors,
            "formulas": row.formulas and row.formulas.bytes(self.sizes),
        }

    def _steps(self) -> str:
        rows = [["a step", "GFLOP", "peak, MiB", "reached in"]]
        for row in self.rows:
            cells = [row.refused and "refused", "", ""]
            if (taken := row.footprint) is not None:
                cells = [f"{taken.flops / 1e9:,.2f}", _mib(taken.peak.total), taken.peak.phase]
            rows.append([row.title, *cells])
        refused = [f"{row.title}: {row.refused}\n" for row in self.rows if row.refused]
        return table(rows, "<>") + "".join(refused)

    def _kinds(self) -> str:
        names = ("gradients", "optimizer", "projectors")
        rows = [["memory, MiB", *(title for name in names for title in (name, "formula"))]]
        for row in self.rows:
            if row.footprint is None:
                continue
            values = row.formulas and row.formulas.bytes(self.sizes)
            cells = [row.title]
            for name in names:
                cells += [_mib(getattr(row.footprint, name)), _mib(values[name]) if values else ""]
            rows.append(cells)
        return table(rows, "<>")

    def _legend(self) -> str:
        rows = [["formula (4 bytes a number)", "gradients", "optimizer", "projectors"]]
        for method, formulas in FORMULAS.items():
            rows.append([TITLES[method], *(formula.text for formula in formulas)])
        return (
            table(rows)
            + "Sums are over the weights m x n, of which m is projected; parameters that are not "
            "projected count\nas in DP-Adam. The formulas count gradients per sample (DP) or of "
            "the batch. What is simulated is\nthe most of those and of their sum at one time, in "
            "the form in which they are kept. P is kept for\nevery weight.\n"
            "LoRA: rank r on all linear layers. GFLOP: products and convolutions.\n"
        )

    def _choices(self) -> list[str]:
        lines = []
        for choice in choices(self.rows):
            same = f" (here the same step as {choice.same_as})" if choice.same_as else ""
            found = f"{choice.peak:.2f} x that of {choice.smallest}"
            if choice.smallest == GradSampleMode.AUTO:
                found = "the smallest of the modes"
            lines.append(f"{TITLES[choice.method]} auto{same}: peak {found}.\n")
        return lines


def _mib(size: int) -> str:
    return f"{size / 2**20:,.2f}"


def _option(turned: Turned) -> str:
    return turned.knob.option.replace("r/4", str(turned.setting.rank))


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"
