"""Synthetic text: what the filters keep, what the card promises, and the whole recipe offline."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from datasets import load_dataset
from scipy.linalg import sqrtm

from dp_grape_hf import Ledger
from dp_grape_hf.cli.main import main as dp_grape
from dp_grape_hf.ledger import LEDGER_NAME
from recipes.synthetic_text import card
from tests.support.ledgers import ledger_of
from tests.support.sft import WORDS, llama, send_nothing, tokenizer

pytest.importorskip("trl", reason="TRL is an optional extra")
from recipes.synthetic_text import evaluation, pipeline

LABELS = ["w0", "w1"]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def folder(tmp_path):
    """A tiny language model in ``model``, and labelled texts in ``data``."""
    llama().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    coins = np.random.default_rng(0)
    for split, count in (("train", 64), ("test", 32)):
        rows = [
            {"text": " ".join(coins.choice(WORDS[2 + 10 * (i % 2) :][:10], 4)), "label": i % 2}
            for i in range(count)
        ]
        write_lines(tmp_path / "data" / f"{split}.jsonl", rows)
    return tmp_path


def parse(folder, **options):
    given = {
        **{"model_name_or_path": folder / "model", "dataset_path": folder / "data"},
        **{"output_dir": folder / "out", "target_epsilon": 8.0},
        **{"target_delta": 1e-3, "max_steps": 2, "expected_batch_size": 16, "max_length": 12},
        **{"texts_per_label": 40, "per_device_eval_batch_size": 16, "min_words": 1},
        **{"agreement": False},
        **{"learning_rate": 1e-2, "accountant": "rdp", "noise": "independent"},
        **{"gradient_checkpointing": False, "use_cpu": True, "disable_tqdm": True},
        **{"report_to": "none", "dataloader_pin_memory": False, "save_strategy": "no"},
        **options,
    }
    words = [f"--{name}={value}" for name, value in given.items() if value is not None]
    return pipeline.parse([*words, "--labels", *LABELS])


def test_the_command_line_wins_over_the_config(folder):
    config = Path(pipeline.__file__).with_name("trec.yaml")
    script, args = parse(folder, config=config)
    assert (args.target_epsilon, args.max_length, script.labels) == (8.0, 12, LABELS)
    assert (script.label_column, args.eval_data_is_public) == ("coarse_label", True)
    _, args = parse(folder, config=config, target_epsilon=None, noise_multiplier=1.0)
    assert (args.target_epsilon, args.noise_multiplier) == (None, 1.0)


def test_a_missing_option_is_named(folder):
    with pytest.raises(ValueError, match="--model_name_or_path"):
        parse(folder, model_name_or_path=None)


def test_labels_must_be_declared(folder):
    script, _ = parse(folder)
    assert {*pipeline.real_texts(script, "train")["label"]} == {*LABELS}
    script.labels = LABELS[:1]
    with pytest.raises(ValueError, match="other labels than 0 to 0"):
        pipeline.real_texts(script, "train")


@pytest.mark.parametrize("rank", [None, 6])
def test_vllm_samples_as_many_texts_of_each_label(rank, folder, monkeypatch):
    """A stand-in for vLLM, which needs a GPU."""
    seen = {}

    class Engine:
        def __init__(self, **options):
            seen.update(options)

        def generate(self, prompts, sampling, lora_request):
            seen["lora"] = lora_request
            ends = ["stop", "length"] * (sampling.n // 2)
            return [
                SimpleNamespace(
                    outputs=[SimpleNamespace(text=f" {p}", finish_reason=e) for e in ends]
                )
                for p in prompts
            ]

    vllm = SimpleNamespace(LLM=Engine, SamplingParams=lambda **options: SimpleNamespace(**options))
    request = SimpleNamespace(LoRARequest=lambda *options: options)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.lora", SimpleNamespace(request=request))
    monkeypatch.setitem(sys.modules, "vllm.lora.request", request)
    script, args = parse(folder, vllm=True, lora_rank=rank, control_codes=None)
    found = pipeline.generate_by_vllm(script, args, folder / "out")
    assert [row["label"] for row in found] == [label for label in LABELS for _ in range(40)]
    assert found[:2] == [{"text": "w0", "label": "w0", "ended": end} for end in (True, False)]
    adapter = ("private", 1, str(folder / "out"))
    model = (folder / "out", None, None) if rank is None else (folder / "model", 8, adapter)
    assert (Path(seen["model"]), seen.get("max_lora_rank"), seen["lora"]) == model


def test_each_filter_drops_what_it_is_for(folder):
    script, _ = parse(folder, min_words=2, agreement=True)
    good = [
        {"text": f"{word} number {i}", "label": label, "ended": True}
        for label, word in zip(LABELS, ("cat", "dog"), strict=True)
        for i in range(30)
    ]
    wrong = {"text": "dog number 99", "label": LABELS[0], "ended": True}
    cut, short = ({**good[0], "ended": False}, {**good[0], "text": "cat"})
    twice = {**good[1], "text": " CAT  number 1"}
    kept, counts = pipeline.filtered([*good, wrong, cut, short, twice], script)
    assert {*kept.texts} == {row["text"] for row in good[:1] + good[2:]} | {twice["text"]}
    assert [*counts.values()] == [64, 63, 62, 61, 60]
    script.agreement = False
    kept, counts = pipeline.filtered([*good, wrong, cut, short, twice], script)
    assert wrong["text"] in kept.texts
    assert "labels agree" not in counts


def test_the_distance_is_frechets():
    coins = np.random.default_rng(0)
    one, other = coins.normal(size=(40, 3)), coins.normal(size=(50, 3)) * [1, 2, 3] + 1
    assert evaluation.frechet_distance(one, one) == pytest.approx(0, abs=1e-9)
    assert evaluation.frechet_distance(one, np.add(one, [3, 0, 4])) == pytest.approx(25)
    first, second = np.cov(one.T), np.cov(other.T)
    expected = np.square(one.mean(0) - other.mean(0)).sum()
    expected += np.trace(first + second - 2 * sqrtm(first @ second).real)
    assert evaluation.frechet_distance(one, other) == pytest.approx(expected)


def test_an_embedding_depends_on_its_own_text_alone():
    together = evaluation.embed(["a cat", "a dog and a cat"], None)
    assert together.shape == (2, evaluation.HASHES)
    assert np.array_equal(together[:1], evaluation.embed(["a cat"], None))
    assert np.linalg.norm(together, axis=1) == pytest.approx(1)


def test_a_classifier_of_one_label_is_refused():
    texts = evaluation.Texts(["a", "b"], ["x", "x"], np.eye(2))
    with pytest.raises(ValueError, match="less than two labels"):
        evaluation.accuracy(texts, texts)


def results_of(**changes):
    settings = {"labels": LABELS, "texts_per_label": 5, "temperature": 1.0, "top_p": 0.9}
    found = {"accuracy": {"real": 0.987, "synthetic": 0.654}, "texts": {"test": 321}}
    return {"settings": settings, "filter": {"generated": 10}, "evaluation": found, **changes}


def test_the_card_carries_the_ledger():
    ledger = ledger_of(2)
    text = card.render(ledger, results_of(), public=True)
    front = yaml.safe_load(text.split("---\n")[1])["differential_privacy"]
    assert ledger.epsilon() <= front["epsilon"] <= ledger.epsilon() + 1e-3
    assert front["delta"] == ledger.mechanism.target_delta
    assert front["unit"] == ledger.mechanism.privacy_unit
    assert front["adjacency"] == "add_or_remove_one"
    assert f"**ε = {front['epsilon']}**" in text
    assert "Generation and filtering are post-processing" in text
    assert "65.4% of 321 held-out real texts" in text
    assert "98.7" not in text  # of a classifier of private texts


def test_the_card_shows_nothing_of_texts_that_are_not_public():
    text = card.render(ledger_of(2), results_of(evaluation=None), public=False)
    assert "If you publish one, ε does not cover it." in text


def test_the_card_of_a_run_without_privacy_claims_none():
    ledger = ledger_of(2, reason="a test")
    text = card.render(ledger, results_of(), public=True)
    assert "no privacy guarantee" in text
    assert "differential" not in text.split("---\n")[1]


def test_the_table_has_what_real_texts_give_once():
    found = {"texts": {"real": 4935, "synthetic": 20}, "accuracy": {"real": 0.9, "synthetic": 0.5}}
    found["frechet_distance"] = {"real": 0.1, "synthetic": 0.25}
    direct = {**found, "accuracy": {**found["accuracy"], "direct": 0.8}, "epsilon_of_direct": 7.996}
    spent = {"private": True, "epsilon": 7.996}
    records = [
        {"evaluation": direct, "privacy": spent},
        {"evaluation": found, "privacy": spent | {"private": False}},
        {"evaluation": found, "privacy": None},
    ]
    assert card.as_markdown(records).splitlines()[2:] == [
        "| real texts, without privacy | ∞ | 4,935 | 90.0 | 0.100 |",
        "| real texts, privately | 8 | 4,935 | 80.0 |  |",
        "| synthetic texts, ε = 8 | 8 | 20 | 50.0 | 0.250 |",
        "| synthetic texts, ε = ∞ | ∞ | 20 | 50.0 | 0.250 |",
        "| synthetic texts of the public model as it is | 0 | 20 | 50.0 | 0.250 |",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("lora_rank", [None, 2])
def test_private_texts_become_a_data_set_with_its_ledger(lora_rank, folder, monkeypatch):
    send_nothing(monkeypatch)
    script, args = parse(folder, lora_rank=lora_rank, compare_direct=lora_rank is None)
    results = pipeline.main(script, args)
    out = folder / "out"
    ledger = Ledger.load(out / "dataset" / LEDGER_NAME)
    assert ledger.private
    assert ledger.steps == 2
    assert results["privacy"]["epsilon"] == pytest.approx(ledger.epsilon())
    assert dp_grape(["verify", str(out)]) == 0
    assert dp_grape(["ledger", str(out / "dataset")]) == 0
    rows = load_dataset("json", data_files=str(out / "dataset/train.jsonl"), split="train")
    assert len(rows) == [*results["filter"].values()][-1] > 0
    assert {*rows["label"]} <= {*LABELS}
    text = (out / "dataset/README.md").read_text(encoding="utf-8")
    assert "was not" not in text.split("## What ε covers")[0]
    assert f"{results['evaluation']['accuracy']['synthetic']:.1%}" not in text
    assert json.loads((out / "results.json").read_text(encoding="utf-8")) == results
    assert str(folder) not in json.dumps(results["settings"] | {"output_dir": ""})
    if lora_rank is None:
        assert results["evaluation"]["epsilon_of_direct"] <= 8.0
        again = parse(folder, train=False, model_name_or_path=out, output_dir=folder / "again")
        assert pipeline.main(*again)["privacy"] == results["privacy"]
        assert Ledger.load(folder / "again/dataset" / LEDGER_NAME).links == ledger.links
    else:
        assert (out / "adapter_config.json").exists()


def test_a_public_model_as_it_is_gives_no_data_set(folder):
    results = pipeline.main(*parse(folder, train=False))
    assert results["privacy"] is None
    assert not (folder / "out/dataset").exists()
    assert results["filter"]["generated"] == 80


@pytest.mark.slow
def test_an_encoder_gives_the_same_embedding_in_any_batch(tmp_path):
    llama().model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    texts = ["w1 w2", "w3", "w4 w5 w6 w7"]
    together = evaluation.embed(texts, str(tmp_path))
    alone = np.concatenate([evaluation.embed([text], str(tmp_path)) for text in texts])
    assert together == pytest.approx(alone, abs=1e-5)
