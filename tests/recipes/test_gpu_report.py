"""The GPU report works without a GPU, goes on where it stopped, and says what failed."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import OPTForCausalLM, RobertaForMaskedLM

from dp_grape_hf import per_sample_gradients
from recipes.benchmark.methods import train
from recipes.gpu_report import __main__ as gpu_report
from recipes.gpu_report.__main__ import DONE, FAILED, NO_DEVICE, UNFINISHED
from recipes.gpu_report.models import MODELS, WORDS
from recipes.gpu_report.table import as_markdown

CPU = torch.device("cpu")
TINY = {"hidden_size": 32, "layers": 2, "heads": 2, "vocab_size": 64}
PAIR = "--only=^RoBERTa-large, T=128, TF32: "


@pytest.fixture(autouse=True)
def _precision():
    before = torch.backends.fp32_precision
    yield
    gpu_report.set_precision(tf32=False)
    torch.backends.fp32_precision = before


def report(folder, *options):
    words = ["--device=cpu", "--tiny", f"--output_dir={folder}", "--steps=1", *options]
    status = gpu_report.main(words)
    path = folder / "cpu.json"
    return status, json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


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
def test_the_large_models_have_the_size_of_their_namesakes(name, billions):
    with torch.device("meta"):
        model = MODELS[name].build()
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(billions * 1e9, rel=0.001)


def test_roberta_reads_its_words_at_the_mask():
    torch.manual_seed(0)
    setting = replace(MODELS["RoBERTa-large, T=128"], **TINY, length=16, batch_size=4, dropout=0.0)
    model, batch = setting.build().eval(), setting.inputs(padded=True)
    assert batch["mask_pos"].tolist() == [8] * 4  # of T = 16
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    vocabulary = RobertaForMaskedLM.forward(model, **inputs).logits  # (B, T, V)
    found = model(**batch)
    torch.testing.assert_close(found.logits, vocabulary[:, 8, list(WORDS)])
    chance = found.logits.softmax(1)[torch.arange(4), batch["labels"]]
    torch.testing.assert_close(found.loss, -chance.log().mean())
    weights = dict(model.named_parameters())
    assert model.lm_head.decoder.weight is weights["roberta.embeddings.word_embeddings.weight"]


def test_opt_computes_logits_and_loss_at_an_answer_only():
    torch.manual_seed(0)
    setting = replace(MODELS["OPT-1.3B, T=512"], **TINY, length=32, batch_size=4, dropout=0.0)
    model, batch = setting.build().eval(), setting.inputs(padded=True)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    assert mask.sum(1).tolist() == [31] * 4  # of T = 32; the first is padding
    assert not mask[:, 0].any()
    everywhere = OPTForCausalLM.forward(model, input_ids=ids, attention_mask=mask).logits
    found = model(**batch)
    assert found.logits.shape == (4, 9, 64)
    logarithms = everywhere[:, -9:-1].log_softmax(2)  # predict the last 8 tokens
    expected = -logarithms.gather(2, ids[:, -8:, None]).mean()
    torch.testing.assert_close(found.loss, expected)
    losses, _ = per_sample_gradients(model, batch)
    torch.testing.assert_close(losses.mean(), expected)


def test_one_probe_of_each_model_comes_first():
    first = [str(row) for row in gpu_report.rows()][:12]
    both = ("AdamW", "DP-GRAPE")
    assert first == [
        *(f"RoBERTa-large, T=128, bf16: {method}" for method in both),
        *(f"OPT-6.7B, T=512, bfloat16 weights: {method}" for method in both),
        *(f"OPT-1.3B, T=512, bf16: {method}" for method in both),
        *(f"ViT-Base, 224 pixels, bf16: {method}" for method in both),
        "Llama of 8 billion parameters, LoRA, T=512, bfloat16 weights: AdamW",
        "Llama of 8 billion parameters, LoRA, T=512, bfloat16 weights: DP-LoRA",
        *(f"OPT-6.7B, T=512, bf16: {method}" for method in both),
    ]
    compiled = {row.precision for row in gpu_report.rows() if "torch_compile" in row.options}
    assert compiled == {"bf16, compiled", "bf16, CUDA graphs"}
    assert len({str(row) for row in gpu_report.rows()}) == len(gpu_report.rows())


@pytest.mark.slow
def test_steps_of_each_kind_stand_beside_those_of_adamw(tmp_path, capsys):
    kinds = "RoBERTa-large, T=128, (TF32|bf16|bf16, 4.*): |OPT-6.7B, T=512, bfloat16|Llama"
    status, found = report(tmp_path, f"--only={kinds}")
    assert status == DONE, found
    assert len(found) == 11
    for row in found:
        assert 0 < row["host_seconds"] <= row["seconds"]
        assert row["tf32"] == (row["precision"] == "TF32")
        assert row["device"] == "cpu"
        assert row["versions"]["torch"] == torch.__version__
        assert "git_commit" in row
    lines = capsys.readouterr().out.splitlines()
    assert lines == as_markdown(found).splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    own = ["AdamW", "DP-GRAPE, r=4"]
    assert [row[2] for row in rows] == [
        *(*own, *own, "AdamW", "DP-LoRA, r=4"),
        *("DP-GRAPE, principal, r=4", *own, *own),
    ]
    assert {row[-1] for row in rows if row[2] == "AdamW"} == {"1.00x"}
    assert all(row[-1].endswith("x") for row in rows)


def test_a_row_sets_the_precision_that_one_before_has_left(monkeypatch):
    seen = []
    monkeypatch.setattr(
        gpu_report, "_measured", lambda *_: {"": seen.append(torch.backends.cuda.matmul.allow_tf32)}
    )
    row = gpu_report.rows(tiny=True)[0]
    torch.backends.fp32_precision = "tf32"
    gpu_report.measure(row, CPU, 1)
    gpu_report.measure(replace(row, precision="TF32"), CPU, 1)
    assert seen == [False, True]


@pytest.mark.slow
def test_measuring_in_another_process_leaves_this_one_unchanged():
    row = replace(gpu_report.rows(tiny=True)[0], precision="TF32")
    gpu_report.set_precision(tf32=False)
    assert gpu_report.in_another_process(row, CPU, 1)["seconds"] > 0
    assert not torch.backends.cuda.matmul.allow_tf32


def test_a_report_that_runs_out_of_time_goes_on_later(tmp_path, monkeypatch):
    done = []

    def measure(row, *rest):
        done.append(str(row))
        return {"seconds": 1.0, "samples_per_second": 4.0}

    monkeypatch.setattr(gpu_report, "measure", measure)
    ticks = iter([0.0, 1.0, 61.0])  # the start, and before each row
    monkeypatch.setattr(gpu_report.time, "monotonic", lambda: next(ticks, 0.0))
    assert (report(tmp_path, "--minutes=1", PAIR)[0], len(done)) == (UNFINISHED, 1)
    status, found = report(tmp_path, PAIR)
    assert (status, len(found), len(done)) == (DONE, 2, 2)
    for changed in ("versions", "code", "host"):
        monkeypatch.setattr(gpu_report, changed, lambda *_: "another")
        del done[:]
        status, found = report(tmp_path, f"{PAIR}DP-GRAPE")  # AdamW of the same, as well
        assert (status, len(found), len(done)) == (DONE, 2, 2)
        assert {row[changed] for row in found} == {"another"}


def test_a_step_has_the_physical_batches_that_its_row_says(tmp_path):
    row = {str(row): row for row in gpu_report.rows(tiny=True)}[
        "OPT-1.3B, T=512, bf16, 4 physical batches: AdamW"
    ]
    seen = []
    model = row.setting.build()
    model.register_forward_pre_hook(
        lambda module, args, inputs: seen.append(len(inputs["input_ids"])), with_kwargs=True
    )
    steps = []
    much = {"steps": 2, "batches": 4, **row.options}
    train(model, row.setting, tmp_path, lambda: steps.append(len(seen)), **much)
    assert steps == [0, 4, 8]
    assert seen == [row.setting.batch_size // 4] * 8


def test_the_clock_omits_warmup_steps_and_pauses_between_steps(monkeypatch):
    clock, ticks = gpu_report._Clock(CPU, steps=3), iter(range(10**6))
    monkeypatch.setattr(gpu_report.time, "perf_counter", lambda: float(next(ticks)))
    for _ in range(clock.steps + 1):
        clock()
    assert clock.steps == gpu_report.WARMUP + 3
    assert clock.found() == {"seconds": 2.0, "host_seconds": 1.0}


def test_each_device_has_a_report_of_its_own(tmp_path, monkeypatch):
    found = {"seconds": 1.0, "samples_per_second": 4.0}
    monkeypatch.setattr(gpu_report, "measure", lambda *_: found)
    report(tmp_path, PAIR)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    assert gpu_report.main([f"--output_dir={tmp_path}", "--tiny", PAIR]) == DONE
    assert {path.name for path in tmp_path.iterdir()} == {"cpu.json", "nvidia-h100-80gb-hbm3.json"}


def test_without_a_gpu_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_report.main([f"--output_dir={tmp_path}"]) == NO_DEVICE
    assert "torch sees no CUDA device here" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), DONE, "out of memory"),
        (RuntimeError("a kernel is missing"), FAILED, "RuntimeError: a kernel is missing"),
    ],
)
def test_a_failed_row_is_tried_again_unless_out_of_memory(
    error, status, text, tmp_path, monkeypatch
):
    def fail(*args):
        tries.append(1)
        raise error

    tries = []
    monkeypatch.setattr(gpu_report, "_measured", fail)
    for _ in range(2):
        assert report(tmp_path, PAIR)[0] == status
    assert len(tries) == (2 if status == DONE else 4)
    assert text in as_markdown(report(tmp_path, PAIR)[1])
