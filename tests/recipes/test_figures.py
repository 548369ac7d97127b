"""The figures show the means, errors and singular values of results."""

import json

from recipes.common.plots import draw
from recipes.report.__main__ import ROOT
from recipes.report.figures import FIGURES, RESULTS, drawn, state


def lines(panel):
    found = {line.get_label(): line for line in panel.get_lines()}
    return {
        str(label): ([*map(float, line.get_xdata())], [*map(float, line.get_ydata())])
        for label, line in found.items()
        if not str(label).startswith("_")
    }


def panels(figure):
    """The panels of a figure by their titles; each has names on its axes."""
    found = {panel.get_title(): panel for panel in figure.axes if panel.axison}
    assert all(panel.get_xlabel() and panel.get_ylabel() for panel in found.values())
    return found


def words(panel):
    return [text.get_text() for text in panel.texts]


def test_every_figure_of_the_paper_is_drawn_with_missing_runs(tmp_path):
    assert len(FIGURES) == 7
    for wanted in FIGURES:
        found = panels(drawn(wanted, tmp_path))
        for panel in found.values():
            assert words(panel) == ["ours: not run" if lines(panel) else "not run"]
        assert state(wanted, tmp_path) == "not run"
        for ending in ("svg", "png"):
            assert (ROOT / RESULTS / "figures" / f"{wanted['stem']}.{ending}").exists()


def sweep_of(root, name, tasks, runs=()):
    folder = root / RESULTS / name
    folder.mkdir(parents=True)
    (folder / "sweep.json").write_text(json.dumps({"tasks": tasks}))
    (folder / "runs.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs))


def test_the_papers_figures_show_results_where_there_are_some(tmp_path):
    grape = {"DP-GRAPE": {"scores": {"2": [91.0, 0.5, 3], "6": [93.0, 0.5, 3]}}}
    curve = [{"step": 50, "accuracy": 80.0}, {"step": 100, "accuracy": 90.0}]
    runs = [
        {"row": "DP-GRAPE", "task": "SST-2", "epsilon": epsilon, "result": {"curve": curve}}
        for epsilon in (2.0, 6.0)
    ]
    sweep_of(tmp_path, "printed_roberta", {"SST-2": grape}, runs)
    ranks = {"r = 4": {"scores": {"6": [85.0, None, 1]}}}
    sweep_of(tmp_path, "printed_roberta_rank", {"SST-2": ranks})
    vit_scores = {"DP-GRAPE": {"8": [81.0, None, 1]}, "Adam": {"inf": [95.0, None, 1]}, "MeZO": {}}
    vit_rows = {row: {"scores": scores} for row, scores in vit_scores.items()}
    sweep_of(tmp_path, "printed_vit", {"MNIST": vit_rows})
    memory = tmp_path / RESULTS / "memory" / "vit-base.json"
    memory.parent.mkdir()
    memory.write_text(json.dumps({"memory_curves": {"AdamW": {"50": 10**9, "200": 4 * 10**9}}}))
    pictures = {wanted["stem"]: panels(drawn(wanted, tmp_path)) for wanted in FIGURES}
    ablation = pictures["roberta_rank"]
    assert lines(ablation["SST-2"]) == {
        "ε = 6": ([4.0, 16.0], [85.0, 93.0]),
        "ε = 2": ([16.0], [91.0]),
    }
    bars = [c.get_segments() for c in ablation["SST-2"].collections]
    assert [tuple(bar[:, 1]) for bar in bars[0]] == [(85.0, 85.0), (92.5, 93.5)]
    assert words(ablation["SST-2"]) == [""]
    assert words(ablation["TREC"]) == ["not run"]
    steps = lines(pictures["roberta_convergence"]["SST-2, ε = 6"])
    assert steps == {"DP-GRAPE": ([50.0, 100.0], [80.0, 90.0])}
    vit = lines(pictures["vit_accuracy"]["MNIST"])
    assert vit["DP-GRAPE"] == ([8.0], [81.0])
    assert vit["Adam"][1] == [95.0, 95.0]  # not private: a line across the panel
    assert "MeZO" not in vit
    assert vit["the paper: DP-GRAPE"][1] == [63.9, 71.7, 76.5, 80.9]
    assert lines(pictures["vit_memory"]["ViT-Base"]) == {"AdamW": ([50.0, 200.0], [1.0, 4.0])}
    assert words(pictures["vit_memory"]["ViT-Base"]) == ["simulated"]
    states = {wanted["stem"]: state(wanted, tmp_path) for wanted in FIGURES}
    assert states["roberta_rank"] == "1 of 3 panels"
    assert states["vit_memory"] == "1 of 1 panels, simulated"


def test_spectra_have_a_panel_for_each_bound(tmp_path):
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


def test_a_label_has_one_style_in_all_panels():
    points = {0.0: (1.0, None, 1), 1.0: (2.0, 0.5, 2)}
    many = {name: dict.fromkeys("yx" if name == "b" else "xy", points) for name in "abcd"}
    figure = draw(many, "many", ("steps", "score"))
    styles = [
        {line.get_label(): (line.get_color(), line.get_marker()) for line in panel.get_lines()}
        for panel in figure.axes[:4]
    ]
    assert all(style["x"] == styles[0]["x"] != style["y"] for style in styles)
    assert [panel.axison for panel in figure.axes] == [True] * 4 + [False] * 2
