"""The printed sweeps are the cells of the paper's tables, and hours are those of throughputs."""

from pathlib import Path
from typing import Any

import pytest

from recipes.common.sweep import Sweep
from recipes.paper import sweep
from recipes.report import hours
from recipes.report.__main__ import CONFIGS, PLANNED
from recipes.report.findings import ZERO_SHOT, Findings
from recipes.report.paper_match import read_paper

PAPER = read_paper()
PRINTED = {name: sweep.read(CONFIGS / f"{name}.yaml") for name in PLANNED if "printed" in name}
ROBERTA = PRINTED["printed_roberta"]
MEASURED = {
    **{"model": "RoBERTa-large, T=128", "precision": "float32", "method": "DP-GRAPE", "rank": 16},
    **{"batch_size": 40, "samples_per_second": 100.0},
}


def cells_of(config: Any) -> set[tuple[str, str, str, float | None]]:
    """The cells that a sweep fills, as (method, task, model, budget)."""
    cells = set()
    for cell in Sweep(config, Path()).final():
        options = dict(cell.settings)
        method = ZERO_SHOT if options.get("zero_shot") else options["method"]
        model = options.get("model_name_or_path", "").rpartition("/")[2]
        cells.add((method, cell.task, model, cell.epsilon if method != ZERO_SHOT else None))
    return cells


def test_every_cell_of_the_papers_tables_is_in_a_sweep() -> None:
    wanted = set()
    for spec in PAPER["tables"].values():
        for line in spec["rows"]:
            for column, value in zip(spec["columns"].values(), line["values"], strict=True):
                model = column.get("same", {}).get("model_name_or_path", "")
                if value != "OOM":
                    wanted.add((line["method"], column["task"], model, line.get("epsilon")))
    found = set().union(*(cells_of(c) for name, c in PRINTED.items() if "rank" not in name))
    assert found == wanted
    assert len(wanted) == 228 - 8  # DP-Adam on 6.7B does not fit


def test_the_first_hour_runs_sst2_with_two_budgets_three_seeds() -> None:
    first = [*Sweep(ROBERTA, Path()).final()][:6]
    assert {(c.row, c.task) for c in first} == {("DP-GRAPE", "SST-2")}
    assert {(c.epsilon, c.seed) for c in first} == {(e, s) for e in (2, 6) for s in (13, 21, 42)}
    findings = Findings(reports={Path(): [MEASURED | {"samples_per_second": 156.9}]})
    (cost, _) = hours.costs(findings, PAPER, {"printed_roberta": ROBERTA})
    assert sum(cost.hours[:6]) == pytest.approx(6 * 1000 * 64 / 156.9 / 3600)
    assert sum(cost.hours[:6]) < 0.75


def test_hours_use_the_measured_throughput_or_else_the_papers() -> None:
    measured = [MEASURED, MEASURED | {"method": "AdamW"}]
    plans = {"printed_roberta": ROBERTA, "quoted": PRINTED["printed_roberta_quoted"]}
    found = {
        (cost.sweep, cost.row): cost
        for cost in hours.costs(Findings(reports={Path(): measured}), PAPER, plans)
    }
    assert found["printed_roberta", "DP-GRAPE"].source == "measured 100.0"
    assert found["printed_roberta", "Zero-shot"].hours == (0.0,) * 18
    mezo = found["quoted", "MeZO"]
    assert mezo.source == "the paper's 268.1, estimated as DPZero"
    assert mezo.hours[0] == pytest.approx(10_000 * 64 / 268.1 / 3600)
    text = hours.by_sweep([*found.values()])
    assert "| `printed_roberta.yaml` | 54 | 6 | 100% |" in text
    assert "| `quoted.yaml` | 162 | 60 | 5% |" in text
    line = "| quoted | DP-Adam | 36 | 0.25 | 8.9 | the paper's 71.7 |"
    assert line in hours.by_row([*found.values()])
