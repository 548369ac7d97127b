"""The GPU report works without a GPU, goes on where it stopped, and sees what is wrong."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dp_grape_hf import engine
from dp_grape_hf.layer_rules import LinearRule
from recipes import gpu_report
from recipes.gpu_report import DONE, FAILED, NO_DEVICE, SHAPES, UNFINISHED
from recipes.gpu_report_checks import EXACT, checks
from recipes.gpu_report_table import render
from recipes.model_zoo import rows

CPU = torch.device("cpu")
ROBERTA = "RoBERTa, sequence classification"
CELLS = ["--parts", "cells", "table", "--only=tiny ViT", "--steps=1"]


def report(folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit status of a tiny report, and what it has written."""
    status = gpu_report.main(
        ["--device=cpu", "--tiny", f"--output_dir={folder}", "--minutes=9", *options]
    )
    path = folder / "gpu_report.json"
    return status, json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder and the contents of a whole tiny report."""
    folder = tmp_path_factory.mktemp("report")
    with torch.random.fork_rng(devices=[]), pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_report, "TINY_MODELS", "^RoBERTa, sequence")
        status, found = report(folder, "--steps=2")
    assert status == DONE
    return folder, found


# ---- What is found ----


def test_a_report_has_every_cell_measured_and_simulated(run: tuple[Path, dict[str, Any]]) -> None:
    _, found = run
    keys = {str(cell) for cell in gpu_report.cells_of(gpu_report.TINY)}
    assert found["cells"].keys() == found["simulations"].keys() == keys
    for entry in found["cells"].values():
        assert entry["samples_per_second"] > 0
        assert entry["device"] == "CPU"
        assert entry["versions"]["torch"] == torch.__version__.split("+")[0]


def test_the_simulation_is_what_a_step_of_the_trainer_takes(
    run: tuple[Path, dict[str, Any]],
) -> None:
    _, found = run
    for key, entry in found["cells"].items():
        simulated = found["simulations"][key]["allocated"]
        # Two backward passes with recomputed activations hold a tenth more for a tiny model.
        off = 0.1 if "checkpointing" in key and "ghost" in key else 0.01
        assert entry["allocated"] == pytest.approx(simulated, rel=off), key
        assert entry["first_step"]["allocated"] > 0, key


def test_the_table_shows_cells_checks_and_where_they_are_from(
    run: tuple[Path, dict[str, Any]],
) -> None:
    folder, found = run
    text = (folder / "gpu_report.md").read_text(encoding="utf-8")
    assert text == render(found)
    assert f"torch {torch.__version__.split('+')[0]}" in text
    assert "within 10% of the measured peak in 17 of 17 cells" in text
    assert "| projected gradients | 1 | 1 | " in text
    for line in text.splitlines():
        if line.startswith("| 4 | DP-GRAPE |"):
            assert len([cell for cell in line.split("|") if cell.strip()]) == 9  # none reserved


def test_every_model_of_the_zoo_is_checked() -> None:
    found = checks(CPU)
    assert all(f"gradients: {row}" in found for row in rows())
    assert all(f"projected gradients: {row}" in found for row in rows())
    assert sum(name.startswith("release") for name in found) == 6


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("RoBERTa-large, T=128", 0.355),
        ("ViT-Base, 224 pixels", 0.0858),
        ("OPT-1.3B, T=512", 1.316),
        ("OPT-2.7B, T=512", 2.652),
        ("OPT-6.7B, bfloat16, checkpointing, T=512", 6.658),
    ],
)
def test_the_large_models_have_the_size_of_their_namesakes(name: str, billions: float) -> None:
    with torch.device("meta"):
        model = SHAPES[name].setting.build()
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(billions * 1e9, rel=0.003)


# ---- Going on ----


def test_what_is_finished_is_not_done_again(
    run: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, found = run
    monkeypatch.setattr(gpu_report, "TINY_MODELS", "^RoBERTa, sequence")
    monkeypatch.setattr(gpu_report, "run", lambda work, *rest: pytest.fail("work") if work else 0)
    assert report(folder) == (DONE, found)


@pytest.mark.parametrize("changed", ["versions", "device"])
def test_what_was_found_elsewhere_is_done_anew(
    run: tuple[Path, dict[str, Any]], changed: str, tmp_path: Path
) -> None:
    _, found = run
    entry = next(iter(found["cells"].values()))
    key = next(iter(found["cells"]))
    other = {"versions": {**entry["versions"], "torch": "1.0"}, "device": "another"}[changed]
    path = tmp_path / "gpu_report.json"
    path.write_text(json.dumps(found | {"cells": {key: entry | {changed: other}}}))
    state = gpu_report.Report(path, "CPU", "cpu")
    assert not state.has("cells", key)
    assert state.has("simulations", key)
    assert not gpu_report.Report(path, "CPU", "cuda").has("simulations", key)


def test_a_report_that_runs_out_of_time_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = []
    monkeypatch.setattr(gpu_report, "measure", lambda cell, *rest: done.append(str(cell)) or {})
    ticks = iter([0.0, 1.0, 61.0])  # the start, and before each cell
    monkeypatch.setattr(gpu_report.time, "monotonic", lambda: next(ticks, 0.0))
    status, found = report(tmp_path, "--minutes=1", *CELLS)
    assert (status, len(found["cells"])) == (UNFINISHED, 1)
    assert "5 of 6 are left" in capsys.readouterr().out
    status, found = report(tmp_path, *CELLS)
    assert (status, len(found["cells"])) == (DONE, 6)
    assert len(done) == len(set(done)) == 6


def test_again_forgets_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count: list[int] = []
    monkeypatch.setattr(gpu_report, "measure", lambda *args: count.append(1) or {})
    report(tmp_path, *CELLS)
    report(tmp_path, "--again", *CELLS)
    assert len(count) == 12


# ---- What goes wrong ----


def test_without_a_gpu_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_report.main([f"--output_dir={tmp_path}"]) == NO_DEVICE
    assert "torch sees no CUDA device here" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_simulation_needs_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    parts = ["--parts", "simulations", "table", "--tiny", "--only=tiny ViT"]
    assert gpu_report.main([f"--output_dir={tmp_path}", *parts]) == DONE
    assert "| 4 | DP-GRAPE |" in (tmp_path / "gpu_report.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("where", ["making the model", "the first step", "a step"])
def test_running_out_of_memory_is_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    steps: list[int] = []
    allowed = {"making the model": 0, "the first step": 0, "a step": 1}[where]

    class Training(gpu_report.PlainTraining):
        def step(self) -> None:
            steps.append(1)
            if len(steps) > allowed:
                raise torch.OutOfMemoryError("CUDA out of memory")
            super().step()

    if where == "making the model":

        def make(*args: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")
    else:
        make = Training
    cell = gpu_report.cells_of(gpu_report.TINY)[0]
    monkeypatch.setattr(gpu_report, "cells_of", lambda *args: [cell])
    monkeypatch.setitem(gpu_report.WAYS, cell.method, replace(cell.way, make=make))
    status, found = report(tmp_path, *CELLS)
    assert status == DONE
    assert found["cells"][str(cell)]["out_of_memory"] == where
    assert f"out of memory in {where}" in (tmp_path / "gpu_report.md").read_text(encoding="utf-8")


def test_an_unexpected_error_is_noted_and_the_cell_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("a kernel is missing")

    monkeypatch.setattr(gpu_report, "measure", broken)
    status, found = report(tmp_path, *CELLS)
    assert (status, len(found["cells"])) == (FAILED, 6)
    assert "a kernel is missing" in capsys.readouterr().err
    monkeypatch.setattr(gpu_report, "measure", lambda *args: {})
    status, found = report(tmp_path, *CELLS)
    assert status == DONE
    assert not any("failed" in entry for entry in found["cells"].values())


@pytest.mark.parametrize("error", [1.0, float("nan")])
def test_a_check_that_is_off_fails_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: float
) -> None:
    wrong = {"gradients: a model": lambda: {"error": error, "limit": EXACT}}
    monkeypatch.setattr(gpu_report, "checks", lambda *args: wrong)
    status, _ = report(tmp_path, "--parts", "checks", "table")
    assert status == FAILED
    text = (tmp_path / "gpu_report.md").read_text(encoding="utf-8")
    assert "| gradients | 1 | 0 | " in text
    assert "gradients: a model failed" in text


# ---- The checks see what is wrong ----


def _wrong_rule(patch: pytest.MonkeyPatch) -> None:
    save = LinearRule.save
    patch.setattr(LinearRule, "save", lambda *args: 1.01 * save(*args))


def _wrong_clip(patch: pytest.MonkeyPatch) -> None:
    right = engine.add_clipped_sum_
    patch.setattr(
        engine,
        "add_clipped_sum_",
        lambda total, found, bound, *rest: right(total, found, 1.01 * bound, *rest),
    )


def _wrong_noise(patch: pytest.MonkeyPatch) -> None:
    right = engine.add_noise_
    patch.setattr(engine, "add_noise_", lambda values, std, *rest: right(values, 1.5 * std, *rest))


@pytest.mark.parametrize(
    ("check", "break_it"),
    [
        (f"gradients: {ROBERTA}", _wrong_rule),
        (f"projected gradients: {ROBERTA}", _wrong_rule),
        (f"release, flat: {ROBERTA}", _wrong_rule),
        (f"release, flat: {ROBERTA}", _wrong_clip),
        (f"release, per_layer: {ROBERTA}", _wrong_clip),
        (f"release, flat: {ROBERTA}", _wrong_noise),
    ],
)
def test_a_check_fails_if_the_engine_is_wrong(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    check: str,
    break_it: Callable[[pytest.MonkeyPatch], None],
) -> None:
    one = {check: checks(CPU, ROBERTA)[check]}
    monkeypatch.setattr(gpu_report, "checks", lambda *args: one)
    assert report(tmp_path, "--parts", "checks", "--again")[0] == DONE
    break_it(monkeypatch)
    assert report(tmp_path, "--parts", "checks", "--again")[0] == FAILED
