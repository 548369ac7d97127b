"""The GPU report works without a GPU, goes on where it stopped, and sees what is wrong."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import OPTForCausalLM, RobertaForMaskedLM

from dp_grape_hf import per_sample_gradients
from dp_grape_hf.gradients import functions
from dp_grape_hf.gradients.checks import spot_checks
from dp_grape_hf.mechanism import release
from recipes.gpu_report import __main__ as gpu_report
from recipes.gpu_report import quick
from recipes.gpu_report.__main__ import DONE, FAILED, NO_DEVICE, UNFINISHED
from recipes.gpu_report.checks import EXACT, checks
from recipes.gpu_report.models import SHAPES, TINY, WORDS
from recipes.gpu_report.table import render
from recipes.models.zoo import rows

CPU = torch.device("cpu")
ROBERTA = "RoBERTa, sequence classification"
COMMIT = "0123456789ab"
SOME = "tiny RoBERTa(?!.*correlated)|tiny OPT.*(adamw|dp_grape)$|tiny ViT.*dp_galore"
"""Each model and method; of ``recipes.benchmark`` are all that train with correlated noise."""
CELLS = ["--parts", "cells", "table", "--only=tiny ViT", "--steps=1"]


def report(folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit status of a tiny report, and what it has written."""
    status = gpu_report.main(
        ["--device=cpu", "--tiny", f"--output_dir={folder}", "--minutes=9", *options]
    )
    path = folder / "gpu_report-cpu.json"
    return status, json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder and the contents of a whole tiny report."""
    folder = tmp_path_factory.mktemp("report")
    with torch.random.fork_rng(devices=[]), pytest.MonkeyPatch.context() as patch:
        patch.setattr(spot_checks, "SHARE", 0)  # a pass that is watched takes a little more
        patch.setattr(gpu_report, "TINY_MODELS", "^RoBERTa, sequence")
        patch.setattr(gpu_report, "git_commit", lambda: COMMIT)
        status, found = report(folder, "--steps=2", "--minutes=99", f"--only={SOME}")
    assert status == DONE
    return folder, found


# ---- What is found ----


@pytest.mark.slow
def test_a_report_has_every_cell_measured_and_simulated(run: tuple[Path, dict[str, Any]]) -> None:
    _, found = run
    cells = gpu_report.cells_of(gpu_report.TINY, SOME)
    assert found["cells"].keys() == {str(cell) for cell in cells}
    simulated = {str(cell) for cell in cells if cell.way not in gpu_report.NOT_SIMULATED}
    assert found["simulations"].keys() == simulated
    for entry in found["cells"].values():
        assert entry["samples_per_second"] > 0
        assert entry["device"] == "CPU"
        assert entry["git_commit"] == COMMIT
        assert entry["versions"]["torch"] == torch.__version__.split("+")[0]


@pytest.mark.slow
def test_the_simulation_is_what_a_step_of_the_trainer_takes(
    run: tuple[Path, dict[str, Any]],
) -> None:
    _, found = run
    for key, simulated in found["simulations"].items():
        entry = found["cells"][key]
        assert entry["allocated"] == pytest.approx(simulated["allocated"], rel=0.01), key
        assert entry["first_step"]["allocated"] > 0, key


@pytest.mark.slow
def test_the_table_shows_cells_checks_and_where_they_are_from(
    run: tuple[Path, dict[str, Any]],
) -> None:
    folder, found = run
    text = (folder / "gpu_report-cpu.md").read_text(encoding="utf-8")
    assert text == render(found)
    assert f"; commit {COMMIT}\n" in text
    assert f"torch {torch.__version__.split('+')[0]}" in text
    assert "within 10% of the measured peak in 10 of 10 cells" in text
    assert "| projected gradients | 1 | 1 | " in text
    for line in text.splitlines():
        if line.startswith("| 4 | DP-GRAPE |"):
            assert len([cell for cell in line.split("|") if cell.strip()]) == 9  # none reserved


def test_every_model_of_the_zoo_is_checked() -> None:
    found = checks(CPU)
    assert all(f"gradients: {row}" in found for row in rows())
    assert all(f"projected gradients: {row}" in found for row in rows())
    assert sum(name.startswith("release") for name in found) == 3


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("RoBERTa-large, T=128", 0.35541),  # with the vocabulary head, without a pooler
        ("ViT-Base, 224 pixels", 0.0858),
        ("OPT-1.3B, T=512", 1.316),
        ("OPT-2.7B, T=512", 2.652),
        ("OPT-6.7B, T=512", 6.658),
    ],
)
def test_the_large_models_have_the_size_of_their_namesakes(name: str, billions: float) -> None:
    with torch.device("meta"):
        model = SHAPES[name].setting.build()
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(billions * 1e9, rel=0.001)


# ---- What is measured ----


def test_roberta_reads_its_words_at_the_mask() -> None:
    torch.manual_seed(0)
    setting = TINY["tiny RoBERTa"].setting
    model, batch = setting.build().eval(), setting.inputs(padded=True)
    assert batch["mask_pos"].tolist() == [8] * 16  # of T = 16
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    vocabulary = RobertaForMaskedLM.forward(model, **inputs).logits  # (B, T, V)
    found = model(**batch)
    torch.testing.assert_close(found.logits, vocabulary[:, 8, list(WORDS)])
    chance = found.logits.softmax(1)[torch.arange(16), batch["labels"]]
    torch.testing.assert_close(found.loss, -chance.log().mean())
    weights = dict(model.named_parameters())
    assert model.lm_head.decoder.weight is weights["roberta.embeddings.word_embeddings.weight"]


def test_opt_computes_logits_and_loss_at_an_answer_only() -> None:
    torch.manual_seed(0)
    setting = replace(TINY["tiny OPT, bfloat16, checkpointing"].setting, dtype="float32")
    model, batch = setting.build().eval(), setting.inputs(padded=True)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    assert mask.sum(1).tolist() == [31] * 16  # of T = 32; the first is padding
    assert not mask[:, 0].any()
    everywhere = OPTForCausalLM.forward(model, input_ids=ids, attention_mask=mask).logits
    found = model(**batch)
    assert found.logits.shape == (16, 9, 64)
    logarithms = everywhere[:, -9:-1].log_softmax(2)  # predict the last 8 tokens
    expected = -logarithms.gather(2, ids[:, -8:, None]).mean()
    torch.testing.assert_close(found.loss, expected)
    losses, _ = per_sample_gradients(model, batch)
    torch.testing.assert_close(losses.mean(), expected)


# ---- Going on ----


@pytest.mark.slow
def test_what_is_finished_is_not_done_again(
    run: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, found = run
    monkeypatch.setattr(gpu_report, "TINY_MODELS", "^RoBERTa, sequence")
    monkeypatch.setattr(gpu_report, "run", lambda work, *rest: pytest.fail("work") if work else 0)
    assert report(folder, f"--only={SOME}") == (DONE, found)


def test_what_was_found_elsewhere_is_done_anew(tmp_path: Path) -> None:
    path = tmp_path / "report.json"

    def known(device: str, simulated: str) -> tuple[bool, bool]:
        state = gpu_report.Report(path, device, simulated)
        return state.has("cells", "a"), state.has("simulations", "a")

    state = gpu_report.Report(path, "CPU", "cpu")
    for part in ("cells", "simulations"):
        state.add(part, "a", {})
    assert known("CPU", "cpu") == (True, True)
    assert known("another", "cpu") == (False, True)
    assert known("CPU", "cuda") == (True, False)
    state.versions = state.versions | {"torch": "1.0"}
    state.add("cells", "a", {})
    assert known("CPU", "cpu") == (False, True)


def test_a_report_that_runs_out_of_time_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = []
    monkeypatch.setattr(gpu_report, "measure", lambda cell, *rest: done.append(str(cell)) or {})
    ticks = iter([0.0, 1.0, 61.0])  # the start, and before each cell
    monkeypatch.setattr(gpu_report.time, "monotonic", lambda: next(ticks, 0.0))
    status, found = report(tmp_path, "--minutes=1", *CELLS)
    assert (status, len(found["cells"])) == (UNFINISHED, 1)
    assert "6 of 7 are left" in capsys.readouterr().out
    status, found = report(tmp_path, *CELLS)
    assert (status, len(found["cells"])) == (DONE, 7)
    assert len(done) == len(set(done)) == 7


def test_each_device_has_a_report_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_report, "measure", lambda cell, device, steps: {"seconds": 1.0})
    monkeypatch.setattr(gpu_report, "render", lambda parts: "")
    report(tmp_path, *CELLS)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H200"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        assert gpu_report.main([f"--output_dir={tmp_path}", "--tiny", *CELLS]) == DONE
    found = {
        path.name: {entry["device"] for entry in json.loads(path.read_text())["cells"].values()}
        for path in tmp_path.glob("*.json")
    }
    assert found == {
        "gpu_report-cpu.json": {"CPU"},
        "gpu_report-nvidia-h100-80gb-hbm3.json": {"NVIDIA H100 80GB HBM3"},
        "gpu_report-nvidia-h200.json": {"NVIDIA H200"},
    }
    assert {path.stem for path in tmp_path.glob("*.md")} == {name[:-5] for name in found}


def test_simulations_join_the_report_of_a_gpu_that_is_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu_report, "simulate", lambda cell, gpu: {"allocated": 1})
    path = tmp_path / "gpu_report-nvidia-h200.json"
    cells = {"a, B=1, adamw": {"device": "NVIDIA H200"}}
    path.write_text(json.dumps({"cells": cells}), encoding="utf-8")
    words = [f"--output_dir={tmp_path}", "--tiny", "--report=NVIDIA H200"]
    assert gpu_report.main([*words, "--parts", "simulations"]) == DONE
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["cells"] == cells
    assert len(found["simulations"]) == 19
    with pytest.raises(SystemExit):
        gpu_report.main([*words, "--parts", "cells", "simulations"])
    assert "what is measured here is of here" in capsys.readouterr().err


# ---- What goes wrong ----


def test_without_a_gpu_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_report.main([f"--output_dir={tmp_path}"]) == NO_DEVICE
    assert "torch sees no CUDA device here" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("failing", "where"), [("__init__", "making the model"), ("step", "the first step")]
)
def test_running_out_of_memory_is_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, where: str
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    cell = gpu_report.cells_of(gpu_report.TINY)[0]
    monkeypatch.setattr(gpu_report, "cells_of", lambda *args: [cell])
    monkeypatch.setattr(gpu_report.PlainTraining, failing, fail)
    status, found = report(tmp_path, *CELLS)
    assert status == DONE
    assert found["cells"][str(cell)]["out_of_memory"] == where
    text = (tmp_path / "gpu_report-cpu.md").read_text(encoding="utf-8")
    assert f"out of memory in {where}" in text


def test_an_unexpected_error_is_noted_and_the_cell_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("a kernel is missing")

    monkeypatch.setattr(gpu_report, "measure", broken)
    status, found = report(tmp_path, *CELLS)
    assert (status, len(found["cells"])) == (FAILED, 7)
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
    text = (tmp_path / "gpu_report-cpu.md").read_text(encoding="utf-8")
    assert "| gradients | 1 | 0 | " in text
    assert "gradients: a model failed" in text


# ---- The checks see what is wrong ----


def _wrong_rule(patch: pytest.MonkeyPatch) -> None:
    right = functions.product
    patch.setattr(functions, "product", lambda *args: 1.01 * right(*args))


def _wrong_clip(patch: pytest.MonkeyPatch) -> None:
    right = release.add_clipped_sum_
    patch.setattr(
        release,
        "add_clipped_sum_",
        lambda total, found, bound, *rest: right(total, found, 1.01 * bound, *rest),
    )


def _wrong_noise(patch: pytest.MonkeyPatch) -> None:
    right = release.add_noise_
    patch.setattr(release, "add_noise_", lambda values, std, *rest: right(values, 1.5 * std, *rest))


@pytest.mark.parametrize(
    ("check", "break_it"),
    [
        (f"projected gradients: {ROBERTA}", _wrong_rule),
        (f"release: {ROBERTA}", _wrong_clip),
        (f"release: {ROBERTA}", _wrong_noise),
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
    assert report(tmp_path / "right", "--parts", "checks")[0] == DONE
    break_it(monkeypatch)
    assert report(tmp_path / "wrong", "--parts", "checks")[0] == FAILED


# ---- Without a device ----

WITHOUT_DEVICE = """
import torch
from recipes.gpu_report import dry_run
from recipes.models.zoo import rows

assert dry_run.main(["--only", "^RoBERTa, seq"]) == 0
(row,) = (row for row in rows() if str(row) == "RoBERTa, sequence classification")
setting = dry_run.settings()[0]

def with_constant():
    model = row.model()
    model.classifier.register_forward_hook(lambda module, args, output: output + torch.ones(3))
    return model

def with_stream():
    model, stream = row.model(), torch.Generator("cpu")
    model.classifier.register_forward_hook(
        lambda module, args, output: output + torch.empty_like(output).normal_(generator=stream)
    )
    return model

for build in (row.model, with_constant, with_stream):
    print(dry_run.run(build, row.batch(dry_run.BATCH), setting).partition(": ")[0] or "one device")
"""


@pytest.mark.slow
def test_a_step_on_an_absent_device_is_on_no_other_and_a_mixture_is_found() -> None:
    """In a process of its own: a device that torch knows it never forgets."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_DEVICE], capture_output=True, text=True, check=False
    )
    assert "0 refused, 0 not simulated, 0 on two devices" in done.stdout, done.stderr
    expected = ["one device", "WRONG", "WRONG"]
    assert done.stdout.splitlines()[-3:] == expected, done.stderr


# ---- Steps ----


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_steps_of_each_kind_stand_beside_those_of_adamw(tmp_path: Path) -> None:
    kinds = "^(RoBERTa-large, bf16|RoBERTa-large, TF32|OPT-6.7B, bfloat16 weights|Llama.*): "
    before = torch.backends.fp32_precision
    try:
        status, found = report(
            tmp_path, "--parts", "quick", "table", "--steps=1", f"--only={kinds}"
        )
    finally:
        torch.backends.fp32_precision = before
    assert status == DONE
    assert len(found["quick"]) == 8
    for name, entry in found["quick"].items():
        assert 0 < entry["host_seconds"] <= entry["seconds"]
        assert entry["tf32"] == ("TF32" in name)
    lines = (tmp_path / "gpu_report-cpu.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "x |" in line]
    assert [row[1] for row in rows] == ["AdamW", "DP-GRAPE"] * 3 + ["AdamW", "DP-LoRA"]
    assert {row[-1] for row in rows if row[1] == "AdamW"} == {"1.00x"}


def test_a_row_sets_the_precision_that_one_before_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        quick, "_measured", lambda *_: {"": seen.append(torch.backends.cuda.matmul.allow_tf32)}
    )
    row = next(iter(quick.rows_of(tiny=True).values()))
    try:
        torch.backends.fp32_precision = "tf32"
        quick.measure(row, CPU, 1)
        quick.measure(replace(row, tf32=True), CPU, 1)
    finally:
        quick.set_precision(tf32=False)
    assert seen == [False, True]
