"""The memory of a step of every method, simulated, next to the formulas of the paper's table.

    python -m recipes.paper.memory --model_name_or_path FOLDER --batch_size 16 --seq_len 64

Shapes: m_l x n_l a weight, m_l its dimension that is projected; r rank, B samples in the batch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from tqdm import tqdm

from dp_grape_hf.arguments import Method
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.gradients import GradSampleMode
from dp_grape_hf.memory import (
    ADAMW,
    TITLES,
    Footprint,
    ModelOfConfig,
    Report,
    Setting,
    fake_tensors,
    read_config,
    simulate,
)
from dp_grape_hf.projections import input_dimensions, placements, projection_targets
from dp_grape_hf.tables import table
from recipes.paper.methods import METHODS

NUMBER = 4  # bytes of a float32

# ---- The paper's formulas ----


class Sizes(NamedTuple):
    """What the formulas of the paper's table on memory are made of, in numbers.

    Parameters that are not projected count as they do in DP-Adam (paper, Algorithm 1): all their
    numbers are a part of both sums that weights have.
    """

    batch: int  # B
    full: int  # sum_l m_l n_l
    coordinates: int  # r sum_l n_l
    projections: int  # r sum_l m_l
    largest: int  # r max_l m_l


class Formula(NamedTuple):
    """An entry of the table: how it is written, and its value."""

    text: str
    value: Callable[[Sizes], int]


class Formulas(NamedTuple):
    """A row of the table."""

    gradients: Formula
    optimizer: Formula
    projectors: Formula

    def bytes(self, sizes: Sizes) -> dict[str, int]:
        """Returns the values, by name, for numbers of four bytes."""
        return {name: NUMBER * formula.value(sizes) for name, formula in self._asdict().items()}


_SUMMED = Formula("sum m n", lambda s: s.full)
_PER_SAMPLE = Formula("B sum m n", lambda s: s.batch * s.full)
_MOMENTS = Formula("2 sum m n", lambda s: 2 * s.full)
_PROJECTED_MOMENTS = Formula("2 r sum n", lambda s: 2 * s.coordinates)
_NONE = Formula("-", lambda s: 0)
_KEPT = Formula("r sum m", lambda s: s.projections)

FORMULAS: Mapping[str, Formulas] = {
    "adam": Formulas(_SUMMED, _MOMENTS, _NONE),
    "galore": Formulas(_SUMMED, _PROJECTED_MOMENTS, _KEPT),
    "dp_adam": Formulas(_PER_SAMPLE, _MOMENTS, _NONE),
    "dp_galore": Formulas(_PER_SAMPLE, _PROJECTED_MOMENTS, _KEPT),
    "dp_grape": Formulas(
        Formula("B r sum n", lambda s: s.batch * s.coordinates),
        _PROJECTED_MOMENTS,
        Formula("r max m", lambda s: s.largest),
    ),
}
"""The paper's table ``memory-usage-comp``, by the names of ``methods.METHODS``."""


def sizes_of(model: ModelOfConfig, setting: Setting) -> Sizes:
    """Returns the sizes of a model, as a setting projects it."""
    with fake_tensors():
        built = model.build(setting.dtype)
    trainable = {n: p for n, p in built.named_parameters() if p.requires_grad}
    shapes = {name: tuple(parameter.shape) for name, parameter in trainable.items()}
    targets = projection_targets(built, trainable)
    matrices = {name: shapes[name] for name in targets}
    placed = placements(matrices, setting.rank, input_dims=input_dimensions(built))
    numbers = {name: prod(shape) for name, shape in shapes.items()}
    kept = {name: place.rank * numbers[name] // place.rows for name, place in placed.items()}
    projections = [place.rank * place.rows for place in placed.values()]
    return Sizes(
        setting.batch_size,
        sum(numbers.values()),
        sum((numbers | kept).values()),
        sum(projections),
        max(projections, default=0),
    )


# ---- Every method ----


@dataclass
class Compared:
    """A method, and what was found out about it.

    Args:
        title: what people call it, with the way it clips where there are several.
        setting: what was run.
        footprint: what a step takes; None if there can be no such run.
        refused: why there can be none.
    """

    title: str
    setting: Setting
    footprint: Footprint | None = None
    refused: str = ""

    @property
    def formulas(self) -> Formulas | None:
        """The method's row in the paper's table."""
        name = "adam" if self.setting.method == ADAMW else self.setting.method
        return FORMULAS.get(name)


def every_method(setting: Setting) -> list[Compared]:
    """Returns AdamW and all rows of the table of methods, some with each way to clip."""
    found = [Compared(TITLES[ADAMW], replace(setting, method=ADAMW))]
    for name, row in METHODS.items():
        for mode in GradSampleMode if _has_modes(row) else (setting.grad_sample_mode,):
            title = f"{row.title} {mode}" if _has_modes(row) else row.title
            found.append(Compared(title, replace(setting, method=name, grad_sample_mode=mode)))
    return found


def _has_modes(row: Method) -> bool:
    """Whether the full gradient of every weight is clipped."""
    return not (row.projected or row.adapter or row.query)


# ---- What is shown: tables in MiB, JSON in bytes ----


@dataclass
class Comparison(Report):
    """What was found out about every method.

    Args:
        rows: the methods, AdamW first.
    """

    rows: list[Compared]

    def as_json(self) -> str:
        """Returns the figures."""
        sizes = sizes_of(self.model, self.setting)
        result = {
            **self.request(),
            "rows": [_figures(row, sizes) for row in self.rows],
        }
        return json.dumps(result, indent=2) + "\n"

    def as_text(self) -> str:
        """Returns the tables, and how to read them."""
        kinds = _kinds(self.rows, sizes_of(self.model, self.setting))
        return "\n".join([self.heading(), _steps(self.rows), kinds, _legend()])


def _figures(row: Compared, sizes: Sizes) -> dict[str, object]:
    taken = row.footprint
    return {
        "title": row.title,
        "method": row.setting.method,
        "grad_sample_mode": row.setting.grad_sample_mode,
        "refused": row.refused or None,
        "flops": taken and taken.flops,
        "peak": taken and taken.total,
        "reached_in": taken and taken.phase,
        "kinds": taken and taken.kinds,
        "gradients": taken and taken.gradients,
        "optimizer": taken and taken.optimizer,
        "projectors": taken and taken.projectors,
        "formulas": row.formulas and row.formulas.bytes(sizes),
    }


def _steps(rows: list[Compared]) -> str:
    lines = [["a step", "GFLOP", "peak, MiB", "reached in"]]
    for row in rows:
        cells = [row.refused and "refused", "", ""]
        if (taken := row.footprint) is not None:
            cells = [f"{taken.flops / 1e9:,.2f}", _mib(taken.total), taken.phase]
        lines.append([row.title, *cells])
    refused = [f"{row.title}: {row.refused}\n" for row in rows if row.refused]
    return table(lines, "<>") + "".join(refused)


def _kinds(rows: list[Compared], sizes: Sizes) -> str:
    lines = [["memory, MiB", *(t for name in Formulas._fields for t in (name, "formula"))]]
    for row in rows:
        if row.footprint is None:
            continue
        values = row.formulas and row.formulas.bytes(sizes)
        cells = [row.title]
        for name in Formulas._fields:
            cells += [_mib(getattr(row.footprint, name)), _mib(values[name]) if values else ""]
        lines.append(cells)
    return table(lines, "<>")


def _legend() -> str:
    lines = [["formula (4 bytes a number)", *Formulas._fields]]
    for method, formulas in FORMULAS.items():
        lines.append([METHODS[method].title, *(formula.text for formula in formulas)])
    return (
        table(lines)
        + "Sums are over the weights m x n, of which m is projected; parameters that are not "
        "projected count\nas in DP-Adam. The formulas count gradients per sample (DP) or of "
        "the batch. What is simulated is\nthe most of those and of their sum at one time, in "
        "the form in which they are kept. P is kept for\nevery weight.\n"
        "LoRA: rank r on all linear layers. GFLOP: products and convolutions.\n"
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.2f}"


def compare(
    model: ModelOfConfig,
    setting: Setting,
    rows: list[Compared] | None = None,
    tick: Callable[[], object] = lambda: None,
) -> Comparison:
    """Simulates a step by every method.

    Args:
        model: the model.
        setting: what to run, by whatever method.
        rows: filled in; those of ``every_method`` if None.
        tick: called after each simulation.
    """
    rows = every_method(setting) if rows is None else rows
    for row in rows:
        try:
            row.footprint = simulate(model.build, model.batch, row.setting)
        except PrivacyError as error:
            row.refused = str(error)
        tick()
    return Comparison(model, setting, rows)


def main(words: Sequence[str] | None = None) -> None:
    """Prints the comparison for the model of a config."""
    parser = argparse.ArgumentParser(description="The memory of a step of every method.")
    parser.add_argument("--model_name_or_path", required=True, help="folder or file of a config")
    parser.add_argument("--batch_size", type=int, required=True, help="the physical batch")
    parser.add_argument("--seq_len", type=int, default=128, help="tokens")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--json", action="store_true", help="print JSON, memory in bytes")
    args = parser.parse_args(words)
    config = read_config("model_name_or_path", args.model_name_or_path, None)
    model = ModelOfConfig(config, None, args.seq_len)
    setting = Setting(batch_size=args.batch_size, rank=args.rank)
    rows = every_method(setting)
    with tqdm(disable=None, total=len(rows), desc="every method") as progress:
        report = compare(model, setting, rows, progress.update)
    sys.stdout.write(report.as_json() if args.json else report.as_text())


if __name__ == "__main__":
    main()
