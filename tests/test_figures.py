"""The figures show the means, errors and bytes of results, and name what there is no data for."""

import math
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recipes.common.plots import MANY, Panels, logarithmic
from recipes.report import figures
from recipes.report.figures import FIGURES
from recipes.report.findings import Findings, Run
from tests.experiments import made_up, saved

GPU = {"device": "H100", "rank": 64}


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
    ((stem, figure),) = drawn("accuracy against epsilon, of texts", *results, *others).items()
    assert stem == "accuracy_against_epsilon-roberta-roberta-large"
    (panel,) = panels(figure).values()  # RTE has one budget only
    assert panel.get_title() == "SST-2"
    assert lines(panel)["DP-GRAPE"] == ([2.0, 6.0], [81.0, 91.0])
    assert lines(panel)["Adam (non-private)"][1] == [95.0, 95.0]
    (bars,) = (c for c in panel.collections if hasattr(c, "get_segments"))
    low, high = bars.get_segments()[0][:, 1]
    assert (low, high) == pytest.approx((80.0, 82.0))  # deviations of 1, over sqrt(2 - 1)
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("ε, at δ = 1e-05", "test accuracy, %")
    assert not drawn("accuracy against epsilon, of images", *results)


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
    (figure,) = drawn("accuracy against epsilon, of texts", *results).values()
    heights = {label: ys for label, (_, ys) in lines(figure.axes[0]).items()}
    assert heights == {
        "DP-Adam": [3.0, 3.0],
        "DP-GRAPE, projection_rank = 4": [1.0, 1.0],
        "DP-GRAPE, projection_rank = 16": [2.0, 2.0],
    }
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == list(heights)


def test_models_are_never_in_one_figure() -> None:
    results = [
        made_up(1.0, model_name_or_path=model, target_epsilon=epsilon)
        for model in ("roberta-large", "x/MiniLM")
        for epsilon in (2.0, 6.0)
    ]
    found = drawn("accuracy against epsilon, of texts", *results)
    assert [figure.get_suptitle() for figure in found.values()] == [
        "roberta-large: scores at a budget",
        "MiniLM: scores at a budget",
    ]


def test_accuracy_against_rank_has_a_line_for_each_budget() -> None:
    results = [
        made_up(100.0 - rank - epsilon, task=task, projection_rank=rank, target_epsilon=epsilon)
        for task in ("TREC", "SNLI")
        for rank in (16, 4)
        for epsilon in (6.0, 2.0)
    ]
    (figure,) = drawn("accuracy against rank", *results).values()
    found = panels(figure)
    assert list(found) == ["SNLI", "TREC"]
    assert lines(found["TREC"]) == {
        "ε = 2": ([4.0, 16.0], [94.0, 82.0]),
        "ε = 6": ([4.0, 16.0], [90.0, 78.0]),
    }


def test_convergence_has_means_at_the_steps_that_all_seeds_have() -> None:
    def curve(*scores: float) -> list[dict[str, float]]:
        return [{"step": 50 * i, "accuracy": score} for i, score in enumerate(scores, 1)]

    results = [
        made_up(0.0, seed=1, curve=curve(60.0, 70.0)),
        made_up(0.0, seed=2, curve=curve(64.0, 80.0, 90.0)),
    ]
    (figure,) = drawn("convergence", *results).values()
    (panel,) = panels(figure).values()
    assert panel.get_title() == "SST-2, ε = 6"
    assert lines(panel) == {"DP-GRAPE": ([50.0, 100.0], [62.0, 75.0])}
    assert panel.get_ylabel() == "dev accuracy, %"


def test_memory_of_runs_is_against_rank_or_batch() -> None:
    results = [
        made_up(
            0.0,
            projection_rank=rank,
            per_device_train_batch_size=size,
            peak_memory={"max_memory_reserved": (rank + size) * 10**9},
            device="H100",
            method=method,
        )
        for method in ("dp_grape", "dp_adam")  # whose rank means nothing
        for rank in (4, 16)
        for size in (8, 40)
    ]
    (figure,) = drawn("memory against rank, of runs", *results).values()
    assert lines(panels(figure)["SST-2, H100"]) == {
        "DP-GRAPE, B = 8": ([4.0, 16.0], [12.0, 24.0]),
        "DP-GRAPE, B = 40": ([4.0, 16.0], [44.0, 56.0]),
    }
    (figure,) = drawn("memory against batch size, of runs", *results).values()
    assert lines(figure.axes[0])["DP-GRAPE, r = 16"] == ([8.0, 40.0], [24.0, 56.0])
    assert lines(figure.axes[0])["DP-Adam"] == ([8.0, 40.0], [18.0, 50.0])
    assert not drawn("memory against rank, of runs", made_up(0.0), made_up(0.0, projection_rank=4))


def test_memory_of_steps_is_measured_and_simulated_and_says_what_did_not_fit() -> None:
    report = {
        "cells": {
            "ViT, B=1, dp_grape": {"allocated": 1 * 10**9, "reserved": 2 * 10**9, **GPU},
            "ViT, B=8, dp_grape": {"allocated": 3 * 10**9, "reserved": 4 * 10**9, **GPU},
            "ViT, B=8, dp_grape r=4": {"allocated": 2 * 10**9, "reserved": 3 * 10**9, **GPU},
            "ViT, B=8, dp_adam": {"out_of_memory": "a step", **GPU},
        },
        "simulations": {
            "ViT, B=8, dp_grape": {"allocated": 3 * 10**9, "rank": 64, "device": "cuda"},
            "ViT, B=8, dp_adam": {"allocated": 90 * 10**9, "rank": 64, "device": "cuda"},
        },
    }
    reports = {Path("a/gpu_report-h100.json"): report}
    found = drawn("memory against batch size, of single steps", reports=reports)
    (panel,) = panels(found["memory_against_batch-h100"]).values()
    assert lines(panel) == {
        "DP-GRAPE": ([1.0, 8.0], [2.0, 4.0]),
        "DP-GRAPE, simulated": ([8.0], [3.0]),
        "DP-Adam, simulated": ([8.0], [90.0]),
    }
    colours = {line.get_label(): line.get_color() for line in panel.get_lines()}
    assert colours["DP-GRAPE"] == colours["DP-GRAPE, simulated"] != colours["DP-Adam, simulated"]
    assert panel.get_ylim() == pytest.approx((0.0, 1.1 * 4.0))  # what fits is to be seen
    assert panel.get_title().startswith("ViT\nout of memory: DP-Adam")
    assert panel.get_title().endswith("at B = 8")


def test_memory_of_steps_is_against_rank_beside_other_methods() -> None:
    def cell(gigabytes: int, rank: int, **others: Any) -> dict[str, Any]:
        return {"reserved": gigabytes * 10**9, "device": "H100", "rank": rank, **others}

    report = {
        "cells": {
            "ViT, B=8, dp_grape": cell(5, 64),
            "ViT, B=8, dp_grape r=4": cell(3, 4),
            "ViT, B=8, dp_grape r=256": cell(70, 256, out_of_memory="a step"),
            "ViT, B=8, adamw": cell(6, 64),
            "ViT, B=8, dp_adam_materialise": cell(50, 64),
            "ViT, B=16, dp_grape": cell(9, 64),
            "ViT, B=16, dp_grape r=4": cell(7, 4),
            "ViT, B=32, dp_grape": cell(9, 64),  # at one rank only
            "OPT, T=512, B=8, dp_grape": cell(9, 16),
        },
        "simulations": {
            "ViT, B=8, dp_grape": {"allocated": 4 * 10**9, "rank": 64, "device": "cuda"},
            "ViT, B=8, dp_grape r=256": {"allocated": 12 * 10**9, "rank": 256, "device": "cuda"},
            "ViT, B=8, adamw": {"allocated": 6 * 10**9, "rank": 64, "device": "cuda"},
        },
    }
    reports = {Path("a/gpu_report-h100.json"): report}
    found = drawn("memory against rank, of single steps", reports=reports)
    assert list(found) == ["memory_against_rank-h100-vit"]
    figure = found["memory_against_rank-h100-vit"]
    assert figure.get_suptitle() == "ViT: DP-GRAPE with projections of rank r (H100)"
    shown = {title: lines(panel) for title, panel in panels(figure).items()}
    assert shown["B = 8"] == {
        "DP-GRAPE": ([4.0, 64.0], [3.0, 5.0]),
        "DP-GRAPE, simulated": ([64.0, 256.0], [4.0, 12.0]),
        "AdamW": ([0.0, 1.0], [6.0, 6.0]),
    }
    assert shown["B = 16"] == {"DP-GRAPE": ([4.0, 64.0], [7.0, 9.0])}
    assert panels(figure).keys() == {"B = 8", "B = 16"}


def test_two_devices_have_a_figure_each() -> None:
    cells = {"ViT, B=1, dp_grape": {"reserved": 10**9, **GPU}}
    report = {"cells": cells, "simulations": {}}
    reports = {Path(f"a/gpu_report-{name}.json"): report for name in ("h100", "h200")}
    found = drawn("memory against batch size, of single steps", reports=reports)
    assert list(found) == ["memory_against_batch-h100", "memory_against_batch-h200"]


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
    assert sorted(said) == sorted(
        [str(picture), *(f"{n}: not run" for n in FIGURES if not n.endswith("of texts"))]
    )
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_a_label_has_one_style_in_all_panels_and_long_lines_a_band() -> None:
    picture = Panels(["a", "b", "c", "d"], "many")
    for number, panel in enumerate(picture.axes):
        for label in ("x", "y")[:: -1 if number else 1]:
            picture.line(panel, label, {0.0: (1.0, math.nan, 1), 1.0: (2.0, 0.5, 2)})
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
