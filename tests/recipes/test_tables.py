"""The paper's tables have our means and errors beside the paper's, and never one for the other."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from recipes.common.sweep import Sweep
from recipes.gpu_report.__main__ import rows as gpu_rows
from recipes.gpu_report.models import MODELS
from recipes.paper.methods import METHODS
from recipes.report import tables
from recipes.report.findings import ZERO_SHOT, Findings, RunResult, collect, groups_of, lines_of
from recipes.report.paper_match import read_paper
from recipes.report.tables import render
from tests.support.experiments import made_up, rows, saved

PAPER = read_paper()
MINI = {"model_name_or_path": "x/MiniLM", "head": "classification", "dataset_path": "data/sst2"}


def text_of(*results: dict[str, Any]) -> str:
    return render(Findings([RunResult(result) for result in results]), PAPER)


def section(text: str, title: str) -> str:
    """What is between a title and the next."""
    return text.split(title, 1)[1].split("\n#", 1)[0]


# ---- Numbers ----


def test_our_mean_and_standard_error_are_shown_with_the_papers() -> None:
    text = text_of(*(made_up(s, seed=i) for i, s in enumerate((90.0, 92.0, 94.0))))
    line = rows(section(text, "## RoBERTa"), "| DP-GRAPE | 6")[0]
    # deviations -2, 0, 2: the standard deviation is 2, the error 2 / sqrt(3)
    assert line[:6] == [
        "DP-GRAPE",
        "6",
        "93.3 ± 0.4",
        "92.0 ± 1.2 [3] (-1.3)",
        "49.1 ± 0.1",
        "not run",
    ]
    assert "3 runs with seeds 0, 1, 2" in text
    assert (
        rows(section(text_of(made_up(90.0)), "## RoBERTa"), "| DP-GRAPE | 6")[0][3]
        == "90.0 [1] (-3.3)"
    )


def test_without_results_all_of_ours_is_not_run() -> None:
    text = text_of()
    for spec in PAPER["tables"].values():
        part = section(text, f"## {spec['title']}")
        lines = [line for line in part.splitlines() if line.startswith("| ")]
        cells = [line.strip("| ").split(" | ") for line in lines if "paper" not in line]
        assert len(cells) >= len(spec["rows"])
        assert all(cell == "not run" for line in cells for cell in line[3::2])
    assert "stand-ins" not in text
    timing = section(text, "## Throughput")
    assert rows(timing, "| RoBERTa-large on")[0][2:6] == ["71.7", "not run", "0.6", "not run"]


def test_a_budget_absent_from_the_paper_is_a_separate_row() -> None:
    text = section(text_of(made_up(91.0, target_epsilon=4.0)), "## RoBERTa")
    assert rows(text, "| DP-GRAPE | 4")[0][2:4] == ["n/a", "91.0 [1]"]


# ---- What is not averaged ----


def test_runs_that_differ_in_more_than_seeds_are_not_averaged() -> None:
    results = [made_up(90.0, seed=1), made_up(80.0, seed=2, learning_rate=5e-4)]
    text = section(text_of(*results), "## RoBERTa")
    found = {line[0]: line[2:4] for line in rows(text, "| DP-GRAPE, learning_rate")}
    assert found == {
        "DP-GRAPE, learning_rate = 0.0001": ["93.3 ± 0.4", "90.0 [1] (-3.3)"],
        "DP-GRAPE, learning_rate = 0.0005": ["93.3 ± 0.4", "80.0 [1] (-13.3)"],
    }


def test_a_variant_is_labelled_and_has_no_paper_number() -> None:
    text = section(text_of(made_up(90.0, projection="identity")), "## RoBERTa")
    plain, other = rows(text, "| DP-GRAPE | 6")[0], rows(text, "| DP-GRAPE, projection")[0]
    assert plain[2:4] == ["93.3 ± 0.4", "not run"]
    assert other[:4] == ["DP-GRAPE, projection = identity", "6", "", "90.0 [1]"]


def test_what_only_a_machine_notices_is_averaged() -> None:
    results = [made_up(90.0), made_up(92.0, per_device_train_batch_size=8, engine="functorch")]
    assert "91.0 ± 1.0 [2]" in text_of(*results)


def test_a_line_may_have_another_bound_on_each_task() -> None:
    runs = [RunResult(made_up(90.0)), RunResult(made_up(80.0, task="RTE", max_grad_norm=9.0))]
    (line,) = lines_of(groups_of(runs), ("task",))
    assert (line.label, len(line.groups)) == ("DP-GRAPE", 2)


def test_a_variant_does_not_move_plain_runs_of_other_tasks() -> None:
    results = (
        made_up(90.0),
        made_up(70.0, task="RTE", max_steps=100, splits={"train": 1024, "test": 277}),
    )
    text = section(text_of(*results), "## RoBERTa")
    assert rows(text, "| DP-GRAPE | 6")[0][3] == "90.0 [1] (-3.3)"
    (line,) = rows(text, "| DP-GRAPE, max_steps = 100 | 6")
    assert (line[3], line[11]) == ("not run", "70.0 [1]")


# ---- Stand-ins ----


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (MINI, "model_name_or_path: MiniLM; the paper: roberta-large"),
        ({"head": "classification"}, "head: classification; the paper: prompt"),
        ({"splits": {"train": 1024, "test": 1821}}, "test examples of SST-2: 1821; the paper: 872"),
        ({"expected_batch_size": 32}, "expected_batch_size: 32; the paper: 64"),
        ({"target_delta": 1e-3}, "target_delta: 0.001; the paper: 1e-05"),
    ],
)
def test_another_experiment_is_never_in_the_papers_table(
    change: dict[str, Any], reason: str
) -> None:
    text = text_of(made_up(55.5, notes=["cut short"], **change))
    assert "55.5" not in section(text, "## RoBERTa")
    model = change.get("model_name_or_path", "roberta-large").rsplit("/")[-1]
    part = section(text, f"### The same experiment on stand-ins: {model}")
    assert rows(part, "| DP-GRAPE | 6") == [["DP-GRAPE", "6", "55.5 [1]"]]
    assert f"* {reason}" in part
    assert "* cut short (SST-2)" in part
    assert ("data from sst2" in part) == ("dataset_path" in change)


def test_a_task_that_stands_in_is_shown() -> None:
    text = text_of(made_up(70.0, "vit", task="FASHION-MNIST", from_scratch=True))
    part = section(text, "### The same experiment on stand-ins: roberta-large")
    assert "| Method | ε | FASHION-MNIST |" in part
    assert "* task: FASHION-MNIST; the paper does not have it" in part


def test_what_the_paper_does_not_tell_is_said() -> None:
    text = text_of(made_up(60.0, method="dp_lora", **MINI), made_up(70.0, **MINI, bf16=True))
    part = section(text, "### The same experiment on stand-ins: MiniLM")
    assert "* max_steps: 1000 of DP-LoRA (the paper does not say)" in part
    assert "* dataset_path: sst2 of DP-LoRA, DP-GRAPE" in part
    assert "* bf16: True of DP-GRAPE" in part


# ---- Settings, epochs ----


def test_settings_stand_beside_the_papers() -> None:
    text = text_of(made_up(90.0, max_grad_norm=5.0, selection_runs=4))
    assert rows(text, "| DP-GRAPE | max_grad_norm")[0][2:6] == ["0.5", "5", "20", "not run"]
    assert "settings chosen from 4 runs for each task" in text


def test_the_best_epoch_is_a_separate_row() -> None:
    curve = [{"step": 1, "accuracy": 61.0}, {"step": 2, "accuracy": 59.0}]
    options: dict[str, Any] = {
        **{"task": "CIFAR-10", "from_scratch": True, "model_name_or_path": "vit-base"},
        **{"expected_batch_size": 1000, "num_train_epochs": 60, "max_steps": -1},
        **{"projection_rank": 64, "projection_update_steps": 250, "target_epsilon": 8.0},
        **{"splits": {"train": 50000, "test": 10000}, "curve": curve, "target_delta": 1.999e-5},
    }
    text = section(text_of(made_up(60.0, "vit", **options)), "## ViT-Base from random")
    assert rows(text, "| DP-GRAPE | 8")[0][4:6] == ["49.2", "60.0 [1] (+10.8)"]
    assert rows(text, "| DP-GRAPE, best epoch")[0][4:6] == ["", "61.0 [1]"]


# ---- What was measured on a GPU ----

ROBERTA, VIT = "RoBERTa-large, T=128", "ViT-Base, 224 pixels"


def measured(*rows_of_report: tuple[str, str, dict[str, Any]]) -> str:
    """The tables with a report of an H100, from models, methods and what was found."""
    common = {"precision": "float32", "batch_size": 40, "device": "H100"}
    report = [
        {**common, "model": model, "method": method, **found}
        for model, method, found in rows_of_report
    ]
    return render(Findings(reports={Path("r.json"): report}), PAPER)


def test_timings_are_beside_the_papers() -> None:
    text = measured(
        (ROBERTA, "DP-GRAPE", {"samples_per_second": 99.0, "rank": 16, "precision": "bf16"}),
        (ROBERTA, "DP-GRAPE", {"samples_per_second": 90.0, "rank": 4}),
        (ROBERTA, "DP-GRAPE", {"samples_per_second": 80.0, "rank": 16}),
        (ROBERTA, "DP-Adam", {"out_of_memory": "a step"}),
    )
    found = {line[1]: line[2:] for line in rows(section(text, "## Throughput"), "| RoBERTa-large")}
    # 64 x 1000 / 80 = 800 seconds
    assert found["DP-GRAPE"] == ["75.9", "80.0", "0.6", "0.22", "B=40; H100"]
    assert found["DP-Adam"][:4] == ["71.7", "OOM", "0.6", "OOM"]
    assert found["DPZero"] == ["268.1", "not run", "1.7", "not run", ""]


@pytest.mark.parametrize(
    "other", [{"rank": 4}, {"precision": "TF32"}, {"failed": "ValueError"}, {"model": VIT}]
)
def test_another_setting_is_never_beside_the_papers_number(other: dict[str, Any]) -> None:
    row = (ROBERTA, "DP-GRAPE", {"samples_per_second": 80.0, "rank": 16, **other})
    (line,) = rows(
        section(measured(row), "## Throughput"),
        "| RoBERTa-large on SST-2 (`tab:roberta-timing`) | DP-GRAPE",
    )
    assert line[2:4] == ["75.9", "not run"]


def test_memory_is_beside_the_papers_in_its_unit() -> None:
    text = measured(
        (ROBERTA, "DP-Adam, materialised", {"reserved": 80 * 10**9}),
        (ROBERTA, "DP-Adam", {"reserved": 16 * 10**9}),
        (ROBERTA, "DP-GRAPE", {"reserved": 20 * 2**30, "rank": 16}),
        (VIT, "DP-Adam, materialised", {"out_of_memory": "a step", "batch_size": 200}),
        (VIT, "DP-GRAPE", {"reserved": 1, "rank": 64, "batch_size": 200}),
    )
    found = {tuple(line[:3]): line[3:] for line in rows(section(text, "## Memory"), "| ")}
    roberta, vit = "RoBERTa-large on SST-2", "ViT-Base"
    nothing = ["not run", ""]
    whole = "DP-Adam, materialised"
    assert found[roberta, whole, "40"] == ["78.1", "80.0", "", "", *nothing, "H100"]
    assert found[roberta, "DP-Adam", "40"] == ["", "16.0", "", "80.0%", *nothing, "H100"]
    # 20 x 2^30 = 21.47 x 10^9; 1 - 21.47 / 80 = 0.7316
    ours = ["24.4", "21.5", "68.7%", "73.2%", *nothing, "H100"]
    assert found[roberta, "DP-GRAPE", "40"] == ours
    assert found[vit, whole, "200"][:2] == ["83.9", "OOM"]
    assert found[vit, "DP-GRAPE", "500"] == ["70.6", "not run", "", "not run", *nothing, ""]


def test_simulated_memory_is_compared_with_materialised_gradients() -> None:
    curves = {"DP-Adam, materialised": {"40": 80 * 10**9}, "DP-GRAPE, r = 16": {"40": 20 * 10**9}}
    text = render(Findings(curves={ROBERTA: curves}), PAPER)
    found = {tuple(line[1:3]): line[7:9] for line in rows(section(text, "## Memory"), "| RoBERTa")}
    assert found["DP-Adam, materialised", "40"] == ["80.0", ""]
    assert found["DP-GRAPE", "40"] == ["20.0", "75.0%"]
    assert found["DP-Adam", "40"] == ["not run", ""]


def test_the_papers_models_are_those_of_the_report() -> None:
    names = {row.model for row in gpu_rows() if row.precision == "float32"}
    for model in [*PAPER["timings"], *PAPER["memory_measured"]]:
        assert MODELS[model["measured"]].rank == model["rank"]
        assert model["measured"] in names or "6.7B" in model["measured"]  # which is too large


# ---- Files ----


def test_of_a_sweep_only_the_final_runs_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        **{"recipe": "roberta", "arguments": {}, "tasks": {"SST-2": {}}},
        **{"search": {"epsilon": 6, "seed": 100}, "final": {"epsilons": [6], "seeds": [1, 2]}},
        "rows": {
            "ours": {"arguments": {"method": "dp_grape"}, "grid": {"learning_rate": [0.1, 0.2]}}
        },
    }
    sweep = Sweep(config, tmp_path / "sweep")
    for stage, score in ((sweep.search, 11.0), (sweep.final, 90.0)):
        for number, cell in enumerate(stage()):
            options = {**dict(cell.settings), "seed": cell.seed}
            cost = {"selection_runs": cell.selection_runs}
            sweep.add(cell, made_up(score + number, **options, **cost))
    (sweep.folder / "sweep.json").write_text(json.dumps(sweep.summary()))
    tables.main(["--results", str(tmp_path), "--output_dir", str(tmp_path / "out")])
    text = capsys.readouterr().out
    assert (tmp_path / "out" / "paper_tables.md").read_text(encoding="utf-8") == text
    assert rows(text, "| ours | 6")[0][2:4] == ["93.3 ± 0.4", "90.5 ± 0.5 [2] (-2.8)"]
    assert "2 runs with seeds 1, 2" in text
    assert "not shown" not in text


def test_a_result_that_is_found_twice_counts_once(tmp_path: Path) -> None:
    result = made_up(90.0)
    folders = [saved(tmp_path / name, result) for name in ("a", "b")]
    assert len(collect([*folders, tmp_path]).runs) == 1


def test_what_is_not_shown_is_named(tmp_path: Path) -> None:
    untested = made_up(90.0) | {"metrics": {"dev": {"accuracy": 1.0}}}
    text = text_of(made_up(90.0, "digits"), untested)
    assert "* 1 belong to no table of the paper: digits on SST-2." in text
    assert "* 1 have no test score: what they score was held out of the training data" in text


def test_a_wrong_folder_or_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere is no folder"):
        collect([tmp_path / "nowhere"])
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ValueError, match=r"broken\.json is no JSON"):
        collect([tmp_path])


# ---- The paper's numbers ----


def test_every_row_has_a_value_for_every_column() -> None:
    for name, spec in PAPER["tables"].items():
        for line in [*spec["rows"], *PAPER["settings"][name]["rows"]]:
            assert len(line["values"]) == len(spec["columns"])
            assert line["method"] in {*METHODS, ZERO_SHOT}


LABELS = {
    *("tab:memory-usage-comp", "tab:roberta-fewshot-results", "tab:roberta-timing"),
    *("tab:opt-classification-results", "tab:opt-generation-results", "tab:opt-c"),
    *("tab:opt-timing", "tab:vit-full-results", "tab:vit-full-results-finetuning"),
    *("tab:vit-grid-search-hyperparameters", "tab:vit-grid-search-hyperparameters-finetuning"),
    "tab:vit-timing",
}
"""Every table of the paper with numbers, and that of its formulas."""


def test_every_table_of_the_paper_is_rendered() -> None:
    assert len(LABELS) == 12
    assert {*re.findall(r"tab:[a-z-]+", text_of())} == LABELS
