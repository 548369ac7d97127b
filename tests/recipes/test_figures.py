"""The figures show the means, errors and singular values of results."""

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recipes.common.plots import draw
from recipes.report import figures
from recipes.report.__main__ import ROOT
from recipes.report.figures import (
    FIGURES,
    RESULTS,
    accuracy_against_epsilon,
    accuracy_against_examples,
    drawn,
    state,
)


def lines(panel: Axes) -> dict[str, tuple[list[float], list[float]]]:
    """What lies on the labelled lines of a panel."""
    found = {line.get_label(): line for line in panel.get_lines()}
    return {
        str(label): ([*map(float, line.get_xdata())], [*map(float, line.get_ydata())])
        for label, line in found.items()
        if not str(label).startswith("_")
    }


def panels(figure: Figure) -> dict[str, Axes]:
    """The panels of a figure by their titles; each has names on its axes."""
    found = {panel.get_title(): panel for panel in figure.axes if panel.axison}
    assert all(panel.get_xlabel() and panel.get_ylabel() for panel in found.values())
    return found


SUMMARY = {
    "config": {"final": {"epsilons": [2, 6]}},
    "tasks": {
        "SST-2": {
            "DP-GRAPE": {"scores": {"6": [91.0, 1.0, 2], "2": [81.0, None, 1]}},
            "Adam": {"scores": {"inf": [95.0, None, 1]}},
            "DPZero": {"scores": {}},
        },
        "RTE": {"DP-GRAPE": {"scores": {"6": [70.0, None, 1]}}},
    },
}


def test_accuracy_over_epsilon_has_means_errors_and_non_private_runs() -> None:
    found = panels(accuracy_against_epsilon(SUMMARY))
    assert list(found) == ["SST-2", "RTE"]
    assert lines(found["RTE"]) == {"DP-GRAPE": ([6.0], [70.0])}
    assert lines(found["SST-2"])["DP-GRAPE"] == ([2.0, 6.0], [81.0, 91.0])
    assert lines(found["SST-2"])["Adam"][1] == [95.0, 95.0]
    (bars,) = (c for c in found["SST-2"].collections if hasattr(c, "get_segments"))
    assert [tuple(segment[:, 1]) for segment in bars.get_segments()] == [(81, 81), (90, 92)]


SIZES = {
    "config": {
        "final": {"epsilons": [2, 6]},
        "tasks": {"few": {"train_examples": 300}, "many": {"train_examples": 20000}},
    },
    "tasks": {
        "few": {"DP-GRAPE": {"scores": {"6": [40.0, None, 1], "2": [30.0, None, 1]}}},
        "many": {"DP-GRAPE": {"scores": {"6": [80.0, None, 1], "2": [75.0, None, 1]}}},
    },
}


def test_accuracy_against_examples_has_a_line_for_each_budget() -> None:
    found = panels(accuracy_against_examples(SIZES))
    assert list(found) == ["DP-GRAPE"]
    assert lines(found["DP-GRAPE"]) == {
        "ε = 6": ([300.0, 20000.0], [40.0, 80.0]),
        "ε = 2": ([300.0, 20000.0], [30.0, 75.0]),
    }


def test_figures_are_files_and_other_results_are_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {**{"text/sweep.json": SUMMARY, "n/sweep.json": SIZES}, "b/other.json": {"a": 1}}
    for name, found in names.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(found))
    figures.main(["--results", str(tmp_path), "--output_dir", str(tmp_path / "out")])
    stems = "accuracy_against_n-n", "accuracy_against_epsilon-text"
    written = [tmp_path / "out" / f"{stem}.png" for stem in stems]
    assert [Path(line) for line in capsys.readouterr().out.splitlines()] == written
    assert all(picture.read_bytes()[:4] == b"\x89PNG" for picture in written)


def words(panel: Axes) -> list[str]:
    return [text.get_text() for text in panel.texts]


def test_every_figure_of_the_paper_is_drawn_with_missing_runs(tmp_path: Path) -> None:
    assert len(FIGURES) == 7
    for wanted in FIGURES:
        found = panels(drawn(wanted, tmp_path))
        for panel in found.values():
            assert words(panel) == ["ours: not run" if lines(panel) else "not run"]
        assert state(wanted, tmp_path) == "not run"
        for ending in ("svg", "png"):
            assert (ROOT / RESULTS / "figures" / f"{wanted['stem']}.{ending}").exists()


def sweep_of(root: Path, name: str, tasks: Any, runs: Any = ()) -> None:
    folder = root / RESULTS / name
    folder.mkdir(parents=True)
    (folder / "sweep.json").write_text(json.dumps({"tasks": tasks}))
    (folder / "runs.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs))


def test_the_papers_figures_show_results_where_there_are_some(tmp_path: Path) -> None:
    grape = {"DP-GRAPE": {"scores": {"2": [91.0, 0.5, 3], "6": [93.0, 0.5, 3]}}}
    curve = [{"step": 50, "accuracy": 80.0}, {"step": 100, "accuracy": 90.0}]
    runs = [
        {"row": "DP-GRAPE", "task": "SST-2", "epsilon": epsilon, "result": {"curve": curve}}
        for epsilon in (2.0, 6.0)
    ]
    sweep_of(tmp_path, "printed_roberta", {"SST-2": grape}, runs)
    ranks = {"r = 4": {"scores": {"6": [85.0, None, 1]}}}
    sweep_of(tmp_path, "printed_roberta_rank", {"SST-2": ranks})
    sweep_of(tmp_path, "printed_vit", {"MNIST": {"DP-GRAPE": {"scores": {"8": [81.0, None, 1]}}}})
    memory = tmp_path / RESULTS / "memory" / "vit-base.json"
    memory.parent.mkdir()
    memory.write_text(json.dumps({"memory_curves": {"AdamW": {"50": 10**9, "200": 4 * 10**9}}}))
    pictures = {wanted["stem"]: panels(drawn(wanted, tmp_path)) for wanted in FIGURES}
    ablation = pictures["roberta_rank"]
    assert lines(ablation["SST-2"]) == {
        "ε = 6": ([4.0, 16.0], [85.0, 93.0]),
        "ε = 2": ([16.0], [91.0]),
    }
    assert words(ablation["SST-2"]) == [""]
    assert words(ablation["TREC"]) == ["not run"]
    steps = lines(pictures["roberta_convergence"]["SST-2, ε = 6"])
    assert steps == {"DP-GRAPE": ([50.0, 100.0], [80.0, 90.0])}
    vit = lines(pictures["vit_accuracy"]["MNIST"])
    assert vit["DP-GRAPE"] == ([8.0], [81.0])
    assert vit["the paper: DP-GRAPE"][1] == [63.9, 71.7, 76.5, 80.9]
    assert lines(pictures["vit_memory"]["ViT-Base"]) == {"AdamW": ([50.0, 200.0], [1.0, 4.0])}
    assert words(pictures["vit_memory"]["ViT-Base"]) == ["simulated"]
    states = {wanted["stem"]: state(wanted, tmp_path) for wanted in FIGURES}
    assert states["roberta_rank"] == "1 of 3 panels"
    assert states["vit_memory"] == "1 of 1 panels, simulated"


def test_spectra_have_a_panel_for_each_bound(tmp_path: Path) -> None:
    entries = [
        {"C": None, "sigma": 0.0, "singular_values": [4.0, 1.0]},
        {"C": 10.0, "sigma": 0.5, "singular_values": [5.0, 3.0]},
        {"C": 0.1, "sigma": 0.0, "singular_values": [0.4, 0.1]},
    ]
    path = tmp_path / RESULTS / "singular_values" / "singular_values-vit-vit-base-CIFAR-10.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"spectra": entries}))
    found = panels(drawn(FIGURES[0], tmp_path))
    assert list(found) == ["ViT-Base, C = 0.1", "ViT-Base, C = 10", "OPT-1.3B"]
    assert lines(found["ViT-Base, C = 10"]) == {
        "neither clipped nor noised": ([1.0, 2.0], [4.0, 1.0]),
        r"$\sigma$ = 0.5": ([1.0, 2.0], [5.0, 3.0]),
    }
    assert found["ViT-Base, C = 10"].get_yscale() == "log"
    assert words(found["OPT-1.3B"]) == ["not run"]


def test_a_label_has_one_style_in_all_panels() -> None:
    points = {0.0: (1.0, None, 1), 1.0: (2.0, 0.5, 2)}
    many = {name: dict.fromkeys("yx" if name == "b" else "xy", points) for name in "abcd"}
    figure = draw(many, "many", ("steps", "score"))
    styles = [
        {line.get_label(): (line.get_color(), line.get_marker()) for line in panel.get_lines()}
        for panel in figure.axes[:4]
    ]
    assert all(style["x"] == styles[0]["x"] != style["y"] for style in styles)
    assert [panel.axison for panel in figure.axes] == [True] * 4 + [False] * 2
