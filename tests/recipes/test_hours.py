"""The printed sweeps are the cells of the paper's tables, and hours are those of throughputs."""

from pathlib import Path

import pytest

from recipes.common.sweep import Sweep
from recipes.paper import sweep
from recipes.report import hours
from recipes.report.__main__ import CONFIGS, PLANNED
from recipes.report.tables import read_paper
from recipes.report.tables_gpu import Measured

PAPER = read_paper()
PRINTED = {name: sweep.read(CONFIGS / f"{name}.yaml") for name in PLANNED if "printed" in name}
ROBERTA = PRINTED["printed_roberta"]
MEASURED = {
    **{"model": "RoBERTa-large, T=128", "precision": "float32", "method": "DP-GRAPE", "rank": 16},
    **{"batch_size": 40, "samples_per_second": 100.0},
}


def test_every_cell_of_the_papers_tables_is_in_a_sweep():
    wanted = set()
    for spec in PAPER["tables"].values():
        for line in spec["rows"]:
            for column, value in zip(spec["columns"].values(), line["values"], strict=True):
                if value != "OOM":
                    place = column["task"], column.get("model", ""), line.get("epsilon")
                    wanted.add((line["method"], *place))
    plans = (Sweep(config, Path()) for name, config in PRINTED.items() if "rank" not in name)
    found = {sweep.place_of(cell) for plan in plans for cell in plan.final()}
    assert found == wanted
    assert len(wanted) == 228 - 8  # DP-Adam on 6.7B does not fit


def test_the_first_hour_runs_sst2_with_two_budgets_three_seeds():
    first = [*Sweep(ROBERTA, Path()).final()][:6]
    assert {(c.row, c.task) for c in first} == {("DP-GRAPE", "SST-2")}
    assert {(c.epsilon, c.seed) for c in first} == {(e, s) for e in (2, 6) for s in (13, 21, 42)}
    measured = Measured([MEASURED | {"samples_per_second": 156.9}])
    (cost, _) = hours.costs(measured, PAPER, {"printed_roberta": ROBERTA})
    assert sum(cost.hours[:6]) == pytest.approx(6 * 1000 * 64 / 156.9 / 3600)
    assert sum(cost.hours[:6]) < 0.75


def test_hours_use_the_measured_throughput_or_else_the_papers():
    measured = [MEASURED, MEASURED | {"method": "AdamW"}]
    plans = {"printed_roberta": ROBERTA, "quoted": PRINTED["printed_roberta_quoted"]}
    found = {(cost.sweep, cost.row): cost for cost in hours.costs(Measured(measured), PAPER, plans)}
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
