"""The paper's formulas of memory by hand, and simulations held against real runs."""

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import RobertaConfig

from dp_grape_hf.gradients import GradSampleMode
from dp_grape_hf.memory import (
    ADAMW,
    OPTIMIZER,
    PROJECTIONS,
    ModelOfConfig,
    Setting,
    prepared,
    simulate,
)
from recipes.gpu_report.models import MODELS
from recipes.paper import memory, memory_curves
from recipes.paper.methods import METHODS
from tests.support.models import only
from tests.support.trainers import examples_of, trained_in

BLOCK = 512  # bytes that a tensor is rounded up to
SIZE, LENGTH = 4, 12
CONFIG = RobertaConfig(
    **{"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"intermediate_size": 64, "max_position_embeddings": 20},
    architectures=["RobertaForSequenceClassification"],
)
SETTING = Setting(batch_size=SIZE, rank=8)


@pytest.fixture(scope="module")
def model():
    return ModelOfConfig(CONFIG, None, LENGTH)


def test_the_formulas_are_those_of_the_papers_table():
    # Of weights of 6 x 10 and 12 x 4, projected along 6 and 4 to rank 2, and a bias of 6.
    full, coordinates = 60 + 6 + 48, 2 * 10 + 6 + 2 * 12
    sizes = {"B": 5, "sum m n": full, "r sum n": coordinates, "r sum m": 2 * 6 + 2 * 4}
    sizes["r max m"] = 2 * 6
    values = {m: tuple(memory.formulas_of(m, sizes).values()) for m in memory.FORMULAS}
    assert values == {
        "adam": (4 * full, 8 * full, 0),
        "galore": (4 * full, 8 * coordinates, 4 * (2 * 6 + 2 * 4)),
        "dp_adam": (20 * full, 8 * full, 0),
        "dp_galore": (20 * full, 8 * coordinates, 4 * (2 * 6 + 2 * 4)),
        "dp_grape": (20 * coordinates, 8 * coordinates, 4 * 2 * 6),
    }


def test_a_model_is_projected_as_the_trainer_projects_it(model):
    numbers = sum(p.numel() for p in model.build(torch.float32).parameters())
    # Four attention matrices, two of the feed-forward, and the dense layer of the head.
    square, wide = 5 * 32 * 32, 2 * 32 * 64
    kept = numbers - square - wide + 8 * (5 * 32 + 2 * 64)
    assert [*memory.sizes_of(model, SETTING).values()] == [SIZE, numbers, kept, 8 * 7 * 32, 8 * 32]


@pytest.fixture(scope="module")
def rows(model):
    found = memory.every_method(SETTING)
    memory.compare(model, found)
    return found


def one(rows, method, mode="auto"):
    (found,) = (
        row for row in rows if (row.setting.method, row.setting.grad_sample_mode) == (method, mode)
    )
    return found


@pytest.mark.slow
def test_every_row_of_the_table_is_simulated_and_shown(rows, model):
    assert {row.setting.method for row in rows} == {ADAMW, *METHODS}
    assert [row.refused for row in rows] == [""] * len(rows)
    assert all(row.footprint is not None for row in rows)
    assert len({row.title for row in rows}) == len(rows)
    text = memory.as_text(rows, memory.sizes_of(model, SETTING))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    assert all(sum(line.startswith(f"{row.title}  ") for line in lines) >= 2 for row in rows)
    assert lines[0].split() == "a step peak, MiB reached in".split()
    assert "B * r sum n" in text
    for method in ("dp_adam", "dp_sgd"):
        modes = [row.setting.grad_sample_mode for row in rows if row.setting.method == method]
        assert modes == list(GradSampleMode)


@pytest.mark.slow
def test_what_is_simulated_is_what_the_formulas_say(rows, model):
    tensors = 200  # of weights, moments and step counts together, each up to a block larger
    sizes = memory.sizes_of(model, SETTING)
    compared_with = {
        "adam": one(rows, ADAMW),
        "galore": one(rows, "galore"),
        "dp_adam": one(rows, "dp_adam", "materialise"),
        "dp_galore": one(rows, "dp_galore"),
        "dp_grape": one(rows, "dp_grape"),
    }
    for method, row in compared_with.items():
        said, found = memory.formulas_of(method, sizes), memory.simulated_of(row.footprint)
        assert 0 <= found["optimizer"] - said["optimizer"] <= BLOCK * tensors, method
        if method != "dp_grape":  # which keeps P of all layers, and the formula one at a time
            assert 0 <= found["projectors"] - said["projectors"] <= BLOCK * tensors, method
    assert one(rows, "dp_grape").footprint.at_end[PROJECTIONS] == 4 * sizes["r sum m"]
    plain, said = one(rows, ADAMW).footprint, memory.formulas_of("adam", sizes)
    assert 0 <= plain.gradients - said["gradients"] <= BLOCK * tensors
    # Gradients per sample, and at the same time a part of their sum.
    dense = one(rows, "dp_adam", "materialise").footprint.gradients
    said = memory.formulas_of("dp_adam", sizes)
    assert said["gradients"] <= dense <= said["gradients"] * (1 + 1 / SIZE) + BLOCK * tensors


@pytest.mark.slow
def test_an_unsupported_combination_is_refused_in_its_row(model):
    setting = Setting(batch_size=SIZE, dtype=torch.bfloat16)
    found = memory.every_method(setting)
    refused, possible = few = [one(found, "dpzero"), one(found, "dp_sgd")]
    memory.compare(model, few)
    text = memory.as_text(few, memory.sizes_of(model, setting))
    assert "Load the model in float32" in refused.refused
    assert possible.refused == ""
    assert f"\nDPZero: {refused.refused}\n" in text


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_real_trainer_keeps_what_is_simulated(method, tmp_path):
    case = only("roberta-classifier")
    setting = Setting(method, 4, rank=2)
    simulated = simulate(lambda dtype: case.model(), case.batch, setting)
    trainer = trained_in(
        tmp_path,
        model=prepared(case.model(), setting),
        train_dataset=examples_of("roberta-classifier"),
        **{"method": method, "max_steps": 1, "per_device_train_batch_size": 4},
    )
    optimizer, run = trainer.optimizer.optimizer, trainer.private_run
    kept = [x for s in optimizer.state.values() for x in s.values() if isinstance(x, Tensor)]
    storages = {s.data_ptr(): s for s in (x.untyped_storage() for x in kept)}  # moments share one
    assert simulated.at_end[OPTIMIZER] == sum(map(in_blocks, storages.values()))
    assert optimizer.state_bytes() == sum(x.nbytes for x in kept if x.dim() > 0)
    projectors = run.update.at(0, {}) if hasattr(run.update, "at") else run.projectors
    matrices = [projector.matrix for projector in projectors.values()]
    assert bool(matrices) == (METHODS[method].projection != "identity")
    assert simulated.at_end[PROJECTIONS] == sum(map(in_blocks, matrices))


def in_blocks(kept):
    size = kept.nbytes if isinstance(kept, Tensor) else kept.nbytes()
    return -(-size // BLOCK) * BLOCK


@pytest.mark.slow
def test_the_command_names_the_model_and_its_batch(tmp_path, monkeypatch, capsys):
    CONFIG.save_pretrained(tmp_path)
    one = memory.every_method(SETTING)[:1]
    monkeypatch.setattr(memory, "every_method", lambda setting: one)
    memory.main(f"--model_name_or_path {tmp_path} --batch_size 4 --seq_len 8".split())
    text = capsys.readouterr().out
    assert "\nbatch 4, 8 tokens" in text
    assert "\nAdamW  " in text


@pytest.mark.slow
def test_curves_have_the_peak_of_each_method_and_batch(tmp_path, monkeypatch):
    name, plan = "RoBERTa-large, T=128", memory_curves.PLAN
    small = {"hidden_size": 64, "layers": 1, "heads": 2, "vocab_size": 64, "length": 8}
    monkeypatch.setattr(memory_curves, "MODELS", {name: replace(MODELS[name], **small)})
    few = {name: {"batches": [2, 32], "ranks": [4]}}
    monkeypatch.setattr(memory_curves, "PLAN", {**plan, "models": few})
    memory_curves.main(["--output_dir", str(tmp_path)])
    (path,) = tmp_path.glob("*.json")
    assert path.name == "roberta-large.json"
    curves = json.loads(path.read_text())["memory_curves"]
    assert list(curves) == [*plan["methods"], "DP-GRAPE, r = 4"]
    assert all(found["2"] <= found["32"] for found in curves.values())
    assert curves["DP-Adam, materialised"]["32"] > curves["DP-GRAPE, r = 4"]["32"]
