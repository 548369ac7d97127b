"""How ``dp-grape memory`` shows what it found: aligned tables in GiB, or JSON in bytes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from dp_grape_hf.comparison import FORMULAS, TITLES, Compared, Sizes, choices
from dp_grape_hf.fit import GIB, MOST_SAMPLES, Fit, Turned
from dp_grape_hf.mechanism import Clipping
from dp_grape_hf.memory import Setting
from dp_grape_hf.per_sample import GradSampleMode
from dp_grape_hf.tables import table
from dp_grape_hf.timeline import KINDS, Peak


@dataclass
class Report:
    """What was found out about a step, and how they are shown.

    Args:
        model: the class of the model.
        parameters: how many it has.
        length: of a sample, in words.
        setting: what was asked for; its method does not count.
        peaks: method -> its peak.
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
    peaks: dict[str, Peak]
    largest: dict[str, int] = field(default_factory=dict)
    card: tuple[float, float] | None = None
    chosen: str | None = None
    turned: list[Turned] = field(default_factory=list)
    fit: Fit | None = None

    def as_text(self) -> str:
        """Returns the tables."""
        parts = [self.heading(), self._peaks(), self._card(), self._knobs(), self._way()]
        return "\n".join(part for part in parts if part)

    def as_json(self) -> str:
        """Returns the figures in bytes, by the names of ``Setting``."""
        methods = {
            method: {
                "peak": peak.total,
                "reached_in": peak.phase,
                "kinds": dict(peak.kinds),
                "largest_batch": self.largest.get(method),
            }
            for method, peak in self.peaks.items()
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
            "rank": self.setting.rank,
        }

    def heading(self) -> str:
        """Returns the model, the batch and the options, in words."""
        setting = self.setting
        options = (
            f"{str(setting.dtype).removeprefix('torch.')} weights, rank {setting.rank}",
            "gradient checkpointing" if setting.gradient_checkpointing else "",
            "" if setting.clipping == Clipping.FLAT else f"clipping {setting.clipping}",
            "projected embeddings" if setting.project_embeddings else "",
        )
        millions = self.parameters / 1e6
        return (
            f"{self.model}, {millions:,.0f} million parameters\n"
            f"batch {setting.batch_size}, {self.length}, "
            f"{', '.join(filter(None, options))}\n"
        )

    def _peaks(self) -> str:
        rows = [["peak memory, GiB", *(TITLES[method] for method in self.peaks)]]
        for kind in KINDS:
            rows.append([kind, *(_gib(peak.kinds[kind]) for peak in self.peaks.values())])
        rows.append(["total", *(_gib(peak.total) for peak in self.peaks.values())])
        rows.append(["reached in", *(peak.phase for peak in self.peaks.values())])
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
        before = self.peaks[self.chosen].total
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
