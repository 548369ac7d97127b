"""The paper's tables have our means and errors beside the paper's, of the printed sweeps alone."""

import importlib
import json
import re

import pytest

from recipes.common.sweep import Sweep
from recipes.gpu_report.__main__ import rows as gpu_rows
from recipes.gpu_report.models import MODELS
from recipes.paper import sweep
from recipes.paper.experiment import parse
from recipes.paper.methods import METHODS
from recipes.paper.sweep import ZERO_SHOT
from recipes.report.tables import CONFIGS, our_cells, read_paper, render, state
from recipes.report.tables_gpu import Measured
from tests.support.experiments import made_up, rows

PAPER = read_paper()


def section(text, title):
    return text.split(title, 1)[1].split("\n#", 1)[0]


def sweep_of(results, name, score):
    """A printed sweep with a result of each final run that has a score."""
    config = sweep.read(CONFIGS / f"{name}.yaml")
    found = Sweep(config, results / name)
    for cells in (found.search, found.final):
        for cell in cells():
            if (value := score(cell)) is not None:
                found.add(cell, made_up(value, **{**dict(cell.settings), "seed": cell.seed}))
    (found.folder / "sweep.json").write_text(json.dumps(found.summary()))
    return found


def grape_at_6(cell):
    """Scores 92, 90, 94 on SST-2 with the three seeds."""
    if (cell.row, cell.task, cell.epsilon) != ("DP-GRAPE", "SST-2", 6):
        return None
    return {13: 92.0, 21: 90.0, 42: 94.0}[cell.seed]


def test_our_mean_and_standard_error_are_shown_with_the_papers(tmp_path):
    sweep_of(tmp_path, "printed_roberta", grape_at_6)
    text = render(our_cells(tmp_path), Measured(), PAPER)
    part = section(text, "## RoBERTa")
    # deviations 0, -2, 2: the standard deviation is 2, the error 2 / sqrt(3)
    scores = ["93.3 ± 0.4", "92.0 ± 1.2 [3] (-1.3)", "49.1 ± 0.1", "not run"]
    assert rows(part, "| DP-GRAPE | 6")[0][:6] == ["DP-GRAPE", "6", *scores]
    assert rows(part, "| DP-GRAPE | max_grad_norm")[0][2:6] == ["0.5", "0.5", "20", "not run"]
    assert "* Ours 3 runs with the seeds 13, 21, 42; on cpu; torch 2.13.0" in part
    shares = state(our_cells(tmp_path), Measured(), PAPER)
    assert rows(shares, "| `tab:roberta-fewshot-results`")[0][2] == "1 of 72 cells"


def test_without_results_all_of_ours_is_not_run(tmp_path):
    text = render(our_cells(tmp_path), Measured(), PAPER)
    for spec in PAPER["tables"].values():
        part = section(text, f"## {spec['title']}")
        lines = [line for line in part.splitlines() if line.startswith("| ")]
        cells = [line.strip("| ").split(" | ") for line in lines if "paper" not in line]
        assert len(cells) >= len(spec["rows"])
        assert ("| DP-AggZO | 6 | n/a |" in part) == (spec["family"] == "roberta")
        assert all(cell == "not run" for line in cells for cell in line[3::2])
    timing = section(text, "## Throughput")
    assert rows(timing, "| RoBERTa-large on")[0][2:6] == ["71.7", "not run", "0.6", "not run"]


def test_a_method_the_paper_lacks_is_a_row_behind(tmp_path):
    """Of a sweep with a search, only the final runs count."""
    sweep_of(tmp_path, "aggzo", lambda cell: 90.0 if cell.task == "RTE" else None)
    text = section(render(our_cells(tmp_path), Measured(), PAPER), "## RoBERTa")
    assert rows(text, "| DP-AggZO | 6")[0][10:14] == ["n/a", "90.0 ± 0.0 [3]", "n/a", "not run"]
    assert rows(text, "| DPZero | 6")[0][10:12] == ["71.9 ± 0.9", "not run"]


def test_the_best_epoch_is_a_separate_row(tmp_path):
    found = Sweep(sweep.read(CONFIGS / "printed_vit.yaml"), tmp_path / "printed_vit")
    curve = [{"step": 1, "accuracy": 61.0}, {"step": 2, "accuracy": 59.0}]
    for cell in found.final():
        if (cell.row, cell.task, cell.epsilon) == ("DP-GRAPE", "CIFAR-10", 8):
            found.add(cell, made_up(60.0, curve))
    text = section(render(our_cells(tmp_path), Measured(), PAPER), "## ViT-Base from random")
    assert rows(text, "| DP-GRAPE | 8")[0][4:6] == ["49.2", "60.0 [1] (+10.8)"]
    assert rows(text, "| DP-GRAPE, best epoch")[0][4:6] == ["", "61.0 [1]"]


def test_results_of_another_sweep_are_refused(tmp_path):
    made = sweep_of(tmp_path, "printed_roberta", grape_at_6)
    summary = made.summary()
    summary["config"]["arguments"]["max_steps"] = 5
    (made.folder / "sweep.json").write_text(json.dumps(summary))
    with pytest.raises(ValueError, match="results of another sweep"):
        our_cells(tmp_path)


ROBERTA, VIT = "RoBERTa-large, T=128", "ViT-Base, 224 pixels"


def measured(*rows_of_report):
    """The tables with a report of an H100, from models, methods and what was found."""
    common = {"precision": "float32", "batch_size": 40, "device": "H100"}
    report = [
        {**common, "model": model, "method": method, **found}
        for model, method, found in rows_of_report
    ]
    return render({}, Measured(report), PAPER)


def test_timings_are_beside_the_papers():
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
def test_another_setting_is_never_beside_the_papers_number(other):
    row = (ROBERTA, "DP-GRAPE", {"samples_per_second": 80.0, "rank": 16, **other})
    (line,) = rows(
        section(measured(row), "## Throughput"),
        "| RoBERTa-large on SST-2 (`tab:roberta-timing`) | DP-GRAPE",
    )
    assert line[2:4] == ["75.9", "not run"]


def test_memory_is_beside_the_papers_in_its_unit():
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


def test_simulated_memory_is_compared_with_materialised_gradients():
    curves = {"DP-Adam, materialised": {"40": 80 * 10**9}, "DP-GRAPE, r = 16": {"40": 20 * 10**9}}
    text = render({}, Measured(curves={ROBERTA: curves}), PAPER)
    found = {tuple(line[1:3]): line[7:9] for line in rows(section(text, "## Memory"), "| RoBERTa")}
    assert found["DP-Adam, materialised", "40"] == ["80.0", ""]
    assert found["DP-GRAPE", "40"] == ["20.0", "75.0%"]
    assert found["DP-Adam", "40"] == ["not run", ""]


def test_the_papers_models_are_those_of_the_report():
    names = {row.model for row in gpu_rows() if row.precision == "float32"}
    for model in [*PAPER["timings"], *PAPER["memory_measured"]]:
        assert MODELS[model["measured"]].rank == model["rank"]
        assert model["measured"] in names or "6.7B" in model["measured"]  # which is too large


def test_every_row_has_a_value_for_every_column():
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


def test_every_table_of_the_paper_is_rendered():
    assert len(LABELS) == 12
    assert {*re.findall(r"tab:[a-z-]+", render({}, Measured(), PAPER))} == LABELS


@pytest.mark.parametrize("config", ["paper", "reference_code"])
@pytest.mark.parametrize("name", PAPER["tables"])
def test_presets_have_the_settings_of_the_paper(name, config):
    """With the sweeps, whose cells are the paper's (test_hours), they make its experiments."""
    spec = PAPER["tables"][name]
    family = importlib.import_module(f"recipes.paper.{spec['family']}").FAMILY
    wanted = {}
    for line in PAPER["settings"][name]["rows"]:
        for at, value in enumerate(line["values"]):
            if value is not None:
                wanted.setdefault((line["method"], at), {})[line["setting"]] = value
    for (method, at), settings in wanted.items():
        column = [*spec["columns"].values()][at]
        words = [f"--config={config}", f"--task={column['task']}", f"--method={method}"]
        if model := column.get("model"):
            words.append(f"--model_name_or_path=facebook/{model}")
        _, args = parse(family, [*words, "--target_epsilon=2", "--use_cpu"])
        if (spec["family"], config) == ("roberta", "reference_code"):  # its scripts have another
            settings["learning_rate"] = 5e-4
        if method == "dp_grape" and "rank" in column:
            settings["projection_rank"] = column["rank"]
        settings |= spec["usual"]["all"] | spec["usual"].get(method, {})
        assert {setting: getattr(args, setting) for setting in settings} == settings
        projected = {"dp_grape": {"reference_code": "gaussian_over_r", "paper": "gaussian"}}
        assert args.projection == projected.get(method, {}).get(config, args.projection)
        assert args.num_samples is None  # N is the length of the data
