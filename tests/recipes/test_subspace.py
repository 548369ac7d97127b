"""Shares of gradient energy against single-sample autograd, and the recipe from end to end."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.projections import synthetic_batches
from recipes.subspace import __main__ as subspace
from recipes.subspace.energies import (
    DATA,
    GRADIENTS,
    PUBLIC,
    RANDOM,
    SOURCES,
    SYNTHETIC,
    WEIGHTS,
    energies,
    first_eigenvectors,
    gradient_moments,
    measure,
    projected_weights,
    summary,
)
from recipes.subspace.rendering import as_markdown, read_results
from tests.support import images as mnist, questions
from tests.support.models import only


@pytest.mark.parametrize(
    ("name", "dropout"), [("bert-classifier", "hidden_dropout_prob"), ("gpt2", "resid_pdrop")]
)
def test_shares_are_those_of_single_samples(name: str, dropout: str) -> None:
    """|G P|^2 of each sample's own gradient, by autograd of its own loss, with dropout off."""
    model, batch = only(name).model(**{dropout: 0.1}), only(name).batch(4)
    weights = projected_weights(model)
    stored_in_out = name == "gpt2"
    shapes = {n: w.shape[::-1] if stored_in_out else w.shape for n, w in weights.items()}
    ranks = dict.fromkeys(weights, 3)
    random = {n: torch.linalg.qr(torch.randn(s[1], 3))[0] for n, s in shapes.items()}
    halves = [{k: v[at] for k, v in batch.items()} for at in (slice(0, 2), slice(2, 4))]
    moments = gradient_moments(model, halves)
    best = first_eigenvectors(moments, ranks)
    model.eval()
    kept = {n: torch.zeros(2) for n in weights}
    whole = dict.fromkeys(weights, torch.zeros(()))
    for i in range(4):
        one = {k: v[i : i + 1] for k, v in batch.items()}
        gradients = torch.autograd.grad(model(**one).loss, list(weights.values()))
        for name, stored in zip(weights, gradients, strict=True):
            gradient = stored.T if stored_in_out else stored
            for j, directions in enumerate((random[name], best[name])):
                kept[name][j] += (gradient @ directions).square().sum()
            whole[name] = whole[name] + gradient.square().sum()
    for name in weights:
        expected = kept[name] / whole[name]
        both = [energies(moments[name], p[name]) for p in (random, best)]
        found = torch.tensor([part / all_of_it for part, all_of_it in both])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
        assert found[1] >= found[0]


def test_layers_with_few_inputs_have_no_share_of_many_directions() -> None:
    model, batch = only("bert-classifier").model(), only("bert-classifier").batch(4)
    inputs = {SYNTHETIC: lambda: synthetic_batches(model)}
    found = measure(model, [batch], [4, 32], inputs)
    assert found["given"] == [32, 64]
    assert found["layers"] == {"4": 2 * 6 + 1, "32": 2}  # the pooler is one
    assert list(found["shares"]) == [SYNTHETIC, GRADIENTS, WEIGHTS, RANDOM]
    for source in found["shares"].values():
        for values in source.values():
            assert 0 <= values["min"] <= values["median"] <= values["max"] <= 1
            assert values["min"] <= values["together"] <= values["max"]
    bound, random = (found["shares"][name]["4"]["median"] for name in (GRADIENTS, RANDOM))
    assert bound > 2 * random


def test_a_summary_weighs_layers_together_by_their_energy() -> None:
    found = summary([(1.0, 2.0), (1.0, 8.0), (3.0, 10.0)])
    assert found == {"median": 0.3, "min": 0.125, "max": 0.5, "together": 0.25}


# ---- The recipe ----

SMALL = {
    **{"noise_multiplier": 1, "expected_batch_size": 6, "per_device_train_batch_size": 4},
    "use_cpu": True,
}


def words(family: str, folder: Path, **options: Any) -> list[str]:
    given = {"measured_dir": folder / "out", **SMALL, **options}
    return [f"--family={family}", *(f"--{k}={v}" for k, v in given.items()), "--ranks", "2", "4"]


@pytest.mark.slow
def test_texts_are_measured_drawn_and_rendered(tmp_path: Path) -> None:
    questions.save_model_and_questions(tmp_path / "opt")
    data = tmp_path / "opt" / "SST2"
    sizes = {"num_train": 8, "num_dev": 2, "num_eval": 2}
    options = {"model_name_or_path": tmp_path / "opt", "dataset_path": data, "config": "ours"}
    record = subspace.main(words("opt", tmp_path, task="SST2", **options, **sizes))
    assert list(record["shares"]) == [name for name in SOURCES if name != PUBLIC]
    assert (record["model"], record["data"], record["public"]) == ("opt", "SST2", None)
    assert json.loads((tmp_path / "out" / "opt-SST2.json").read_text()) == record
    assert (tmp_path / "out" / "subspace.png").stat().st_size > 10_000
    table = as_markdown(read_results(tmp_path / "out"))
    assert table.count("\n") == 2 + len(record["shares"])
    whole = record["shares"][DATA]["2"]["together"]
    assert f"| opt, SST2 | {SOURCES[DATA]} | {whole:.0%} (" in table


def test_images_are_measured(tmp_path: Path) -> None:
    (tmp_path / "mnist").mkdir()
    mnist.write_mnist(tmp_path / "mnist", mnist.both_splits((8, 8), counts=(20, 10)))
    given = mnist.words(tmp_path, tmp_path / "mnist", public_dataset=tmp_path / "mnist")
    here = [f"--measured_dir={tmp_path / 'out'}", "--ranks", "2", "4"]
    record = subspace.main(["--family=vit", *given, *here])
    assert list(record["shares"]) == list(SOURCES)
    shares = {source: record["shares"][source]["4"]["median"] for source in record["shares"]}
    assert shares[GRADIENTS] == max(shares.values())
    assert shares[DATA] > shares[RANDOM]


def test_a_model_without_projected_layers_is_refused() -> None:
    with pytest.raises(PrivacyError):
        gradient_moments(nn.Sequential(nn.LayerNorm(3)).requires_grad_(False), [])
