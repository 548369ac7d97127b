"""The figures show the means, errors and singular values of results."""

import json
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recipes.common.plots import Panels
from recipes.report import figures
from recipes.report.figures import (
    accuracy_against_epsilon,
    accuracy_against_examples,
    singular_values,
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


def test_accuracy_against_epsilon_has_means_errors_and_what_is_not_private() -> None:
    found = panels(accuracy_against_epsilon(SUMMARY, "sweep"))
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
    found = panels(accuracy_against_examples(SIZES, "sizes"))
    assert list(found) == ["DP-GRAPE"]
    assert lines(found["DP-GRAPE"]) == {
        "ε = 6": ([300.0, 20000.0], [40.0, 80.0]),
        "ε = 2": ([300.0, 20000.0], [30.0, 75.0]),
    }


SPECTRA = {
    "script": {"task": "CIFAR-10", "model_name_or_path": "x/vit-base"},
    "spectra": [
        {"C": None, "sigma": 0.0, "singular_values": [4.0, 1.0]},
        {"C": 10.0, "sigma": 0.5, "singular_values": [5.0, 3.0]},
        {"C": 0.1, "sigma": 0.0, "singular_values": [0.4, 0.1]},
    ],
}


def test_singular_values_have_a_panel_for_each_bound() -> None:
    found = panels(singular_values(SPECTRA))
    assert list(found) == ["C = 0.1", "C = 10"]
    assert lines(found["C = 10"]) == {
        "neither clipped nor noised": ([1.0, 2.0], [4.0, 1.0]),
        r"$\sigma$ = 0.5": ([1.0, 2.0], [5.0, 3.0]),
    }
    assert found["C = 10"].get_yscale() == "log"


def test_figures_are_files_and_other_results_are_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {
        **{"text/sweep.json": SUMMARY, "n/sweep.json": SIZES},
        **{"b/Spectra.json": SPECTRA, "b/other.json": {"a": 1}},
    }
    for name, found in names.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(found))
    figures.main(["--results", str(tmp_path), "--output_dir", str(tmp_path / "out")])
    stems = "spectra", "accuracy_against_n-n", "accuracy_against_epsilon-text"
    written = [tmp_path / "out" / f"{stem}.png" for stem in stems]
    assert [Path(line) for line in capsys.readouterr().out.splitlines()] == written
    assert all(picture.read_bytes()[:4] == b"\x89PNG" for picture in written)


def test_a_label_has_one_style_in_all_panels() -> None:
    picture = Panels(["a", "b", "c", "d"], "many")
    for number, panel in enumerate(picture.axes):
        for label in ("x", "y")[:: -1 if number else 1]:
            picture.line(panel, label, {0.0: (1.0, None, 1), 1.0: (2.0, 0.5, 2)})
    styles = [
        {line.get_label(): (line.get_color(), line.get_marker()) for line in panel.get_lines()}
        for panel in picture.axes
    ]
    assert all(style["x"] == styles[0]["x"] != style["y"] for style in styles)
    figure = picture.finished("steps", "score")
    assert [panel.axison for panel in figure.axes] == [True] * 4 + [False] * 2
