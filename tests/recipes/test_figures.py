"""The figures show the means, errors and bytes of results, and name what there is no data for."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recipes.common.plots import MANY, Panels, logarithmic
from recipes.report import figures
from recipes.report.figures import FIGURES
from recipes.report.findings import Findings, Run
from tests.support.experiments import made_up, saved


def drawn(name: str, *results: dict[str, Any], **others: Any) -> dict[str, Figure]:
    """The figures of a name, from results."""
    return dict(FIGURES[name](Findings([Run(result) for result in results], **others)))


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


def test_accuracy_against_epsilon_has_means_errors_and_what_is_not_private() -> None:
    results = [
        made_up(score + seed, target_epsilon=epsilon, seed=seed, max_grad_norm=epsilon)
        for epsilon, score in ((6.0, 90.0), (2.0, 80.0))
        for seed in (0, 2)
    ]
    others = [made_up(95.0, method="adam"), made_up(70.0, task="RTE")]
    ((stem, figure),) = drawn("accuracy against epsilon", *results, *others).items()
    assert stem == "accuracy_against_epsilon-roberta-roberta-large"
    (panel,) = panels(figure).values()  # RTE has one budget only
    assert panel.get_title() == "SST-2"
    assert lines(panel)["DP-GRAPE"] == ([2.0, 6.0], [81.0, 91.0])
    assert lines(panel)["Adam (non-private)"][1] == [95.0, 95.0]
    (bars,) = (c for c in panel.collections if hasattr(c, "get_segments"))
    low, high = bars.get_segments()[0][:, 1]
    assert (low, high) == pytest.approx((80.0, 82.0))  # deviations of 1, over sqrt(2 - 1)
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("ε, at δ = 1e-05", "test accuracy, %")


def test_methods_and_settings_are_lines_of_their_own() -> None:
    results = [
        made_up(score, target_epsilon=epsilon, **options)
        for epsilon in (2.0, 6.0)
        for score, options in (
            (1.0, {"projection_rank": 4}),
            (2.0, {"projection_rank": 16}),
            (3.0, {"method": "dp_adam"}),
        )
    ]
    (figure,) = drawn("accuracy against epsilon", *results).values()
    heights = {label: ys for label, (_, ys) in lines(figure.axes[0]).items()}
    assert heights == {
        "DP-Adam": [3.0, 3.0],
        "DP-GRAPE, projection_rank = 4": [1.0, 1.0],
        "DP-GRAPE, projection_rank = 16": [2.0, 2.0],
    }
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == list(heights)


def test_ticks_that_would_touch_have_no_number() -> None:
    panel = Panels(["a"], "many").axes[0]
    logarithmic(panel, [1, 128, 32, 500, 165, 50, 64, 200])
    labels = [label.get_text() for label in panel.get_xticklabels()]
    assert labels == ["1", "32", "", "64", "128", "", "", "500"]
    assert list(panel.get_xticks()) == [1, 32, 50, 64, 128, 165, 200, 500]


def test_singular_values_have_a_panel_for_each_bound() -> None:
    spectra = [
        {"C": None, "sigma": 0.0, "singular_values": [4.0, 1.0]},
        {"C": 10.0, "sigma": 0.5, "singular_values": [5.0, 3.0]},
        {"C": 0.1, "sigma": 0.0, "singular_values": [0.4, 0.1]},
    ]
    script = {"task": "CIFAR-10", "model_name_or_path": "x/vit-base"}
    (figure,) = drawn("singular values", spectra=[{"script": script, "spectra": spectra}]).values()
    found = panels(figure)
    assert list(found) == ["C = 0.1", "C = 10"]
    assert lines(found["C = 10"]) == {
        "neither clipped nor noised": ([1.0, 2.0], [4.0, 1.0]),
        r"$\sigma$ = 0.5": ([1.0, 2.0], [5.0, 3.0]),
    }
    assert found["C = 10"].get_yscale() == "log"


def test_figures_are_files_and_what_has_no_data_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(tmp_path / "in", *(made_up(1.0, target_epsilon=e) for e in (2.0, 6.0)))
    figures.main(["--results", str(folder), "--output_dir", str(tmp_path / "out")])
    said = capsys.readouterr().out.splitlines()
    (picture,) = (tmp_path / "out").iterdir()
    assert str(picture) in said
    assert sorted(said) == sorted([str(picture), "singular values: not run"])
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_a_label_has_one_style_in_all_panels_and_long_lines_a_band() -> None:
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
    long = Panels(["a"], "long")
    long.line(long.axes[0], "x", {float(i): (0.0, 1.0, 3) for i in range(MANY + 1)})
    (band,) = long.axes[0].collections
    assert band.get_paths()[0].get_extents().height == pytest.approx(2.0)
