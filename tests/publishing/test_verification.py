"""``dp-grape verify`` and ``dp-grape ledger``: what was changed is found, what was not is not."""

import hashlib
import json
import math
import os
import re
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from dp_grape_hf.accounting import ACCOUNTANTS, AccountantFailure, calibration
from dp_grape_hf.accounting.accountants import PLD, PRV
from dp_grape_hf.cli import verify as verify_command
from dp_grape_hf.cli.main import main
from dp_grape_hf.ledger import CARD_NAME, LEDGER_NAME, Ledger, ledger as ledger_module
from dp_grape_hf.publishing import ABSENT, MISMATCH, CardDetails, render, verify
from dp_grape_hf.publishing.model_files import ADAPTER, digests, is_weights
from dp_grape_hf.publishing.statement import BEGIN, END, TAG
from dp_grape_hf.publishing.verification import OK
from tests.support.ledgers import MECHANISM, edit, ledger_of, note_weights, rewrite
from tests.support.models import only
from tests.support.trainers import examples_of, make_trainer

WEIGHTS = "model.safetensors"


class _Once:
    """Makes an accountant once for all equal releases, as nearly all tests here have the same."""

    def __init__(self, accountant):
        self._made = cache(accountant)

    def __call__(self, blocks, counts, delta):
        return self._made(tuple(blocks), tuple(counts), delta)


@pytest.fixture(scope="module", autouse=True)
def remembered():
    with pytest.MonkeyPatch.context() as patch:
        for name in ("pld", "prv"):
            patch.setitem(ACCOUNTANTS, name, _Once(ACCOUNTANTS[name]))
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of 6 steps with checkpoints after 3 and 6, and the model saved beside its ledger."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    settings = {"target_epsilon": 6.0, "target_delta": 1e-5, "accountant": "prv", "max_steps": 6}
    saving = {"save_strategy": "steps", "save_steps": 3}
    trainer = make_trainer(folder, **settings | saving)
    trainer.train()
    trainer.save_model()
    return folder


@pytest.fixture
def run(trained, tmp_path):
    return Path(shutil.copytree(trained, tmp_path / "run"))


def _wrong(checks):
    return [check.what for check in checks if check.status == MISMATCH]


def _status(checks):
    return {check.what: check.status for check in checks}


OTHERS = "other folders"


def _saved(folder, mechanism=MECHANISM, steps=10, **start):
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"a": torch.zeros(3)}, folder / WEIGHTS)
    ledger = ledger_of(steps, mechanism, **start)
    note_weights(folder, ledger)
    (folder / CARD_NAME).write_text(render(ledger), encoding="utf-8")
    return ledger


@pytest.mark.parametrize("place", ["", "checkpoint-3"])
def test_a_run_agrees_with_itself(place, run):
    checks = verify(run / place)
    names = {check.what for check in checks if check.status == OK}
    assert {*_status(checks)} - names == ({OTHERS} if place == "" else set())
    assert {"chain", "guarantee", "epsilon by prv", "epsilon by pld", "card: statement"} <= names
    assert f"weights: {WEIGHTS}" in names
    assert "updates" in names
    assert ("ledger of the run" in names) == bool(place)


def test_a_ledger_alone_is_checked_for_its_chain_and_epsilon(run):
    (run / CARD_NAME).write_text("of another model")
    status = _status(verify(run / LEDGER_NAME))
    assert (status["chain"], status["epsilon by pld"]) == (OK, OK)
    assert status["card: statement"] == status["weights"] == status["guarantee"] == ABSENT


def test_what_is_not_there_is_absent_and_not_wrong(run):
    (run / CARD_NAME).unlink()
    (run / WEIGHTS).unlink()
    checks = verify(run)
    status = _status(checks)
    assert _wrong(checks) == []
    assert status["card: statement"] == status[f"weights: {WEIGHTS}"] == ABSENT


VARIANTS = {
    "a method that is not registered": {"method": "dp_elsewhere"},
    "replace one": {"adjacency": "replace_one"},
    "rdp": {"accountant": "rdp"},
    "no clipping": {"max_grad_norm": math.inf, "target_epsilon": None},
    "a unit that reads as a claim": {
        "privacy_unit": "ε = 3, delta = 3 | `x` <b>\x00\n",
        "max_examples_per_unit": 4,
    },
    "a projection that reads as a claim": {"projection": "eps = 0.1", "projection_rank": None},
    "much else": {
        "target_delta": 1.23456789e-6,
        "noise": "secure",
        "gradient_factors": '{"ε = 3 | <b>": 4.0}',
    },
}


@pytest.mark.parametrize("name", VARIANTS)
def test_cards_of_all_mechanisms_agree_with_their_ledgers(name, tmp_path):
    """Whatever words the ledger has, and however the lines of the card end."""
    _saved(tmp_path, replace(MECHANISM, **VARIANTS[name]))
    checks = verify(tmp_path)
    absent = {"epsilon by prv"} if name == "replace one" else set()  # PRV does not compute it
    assert {check.what for check in checks if check.status != OK} == absent
    assert _wrong(checks) == []
    card = tmp_path / CARD_NAME
    card.write_bytes(b"\xef\xbb\xbf" + card.read_bytes().replace(b"\n", b"\r\n"))
    assert verify(tmp_path) == checks


def test_runs_on_the_same_data_are_verified_together(tmp_path):
    first = _saved(tmp_path / "first")
    second = _saved(tmp_path / "second", steps=5, continues=first)
    assert _wrong(verify(tmp_path / "second")) == []
    assert second.epsilon_by("pld", 1e-5) > first.epsilon_by("pld", 1e-5)
    rewrite(
        tmp_path / "second" / LEDGER_NAME,
        lambda content: content["entries"][1].update(count=100),  # of the first run
    )
    assert "card: statement" in _wrong(verify(tmp_path / "second"))


def _swap_weights(folder):
    weights = load_file(folder / WEIGHTS)
    save_file({k: v + 1e-3 for k, v in weights.items()}, folder / WEIGHTS)


def _take_the_ledger_of_another_run(folder):
    path = folder / LEDGER_NAME
    ledger_of(6, Ledger.load(path).mechanism).snapshot(6).save(path)


def _on_the_card(old, new, count=0):
    def change(folder):
        path = folder / CARD_NAME
        text, changed = re.subn(old, new, path.read_text(encoding="utf-8"), count=count)
        assert changed
        path.write_text(text, encoding="utf-8")

    return change


def _in_the_ledger(change, by=edit):
    return lambda folder: by(folder / LEDGER_NAME, lambda content: change(content["entries"]))


CARD = {"card: statement"}
EPSILON = r"5\.999"
BY_BOTH = {"epsilon by prv", "epsilon by pld"}
TAMPERING = {
    "a count": (
        _in_the_ledger(lambda e: e[1].update(count=4)),
        {"chain", "budget"} | CARD | BY_BOTH,
    ),
    "delta": (
        _in_the_ledger(lambda e: e[0]["mechanism"].update(target_delta=1e-3)),
        {"chain"} | CARD,
    ),
    "no delta": (
        _in_the_ledger(
            lambda e: e[0]["mechanism"].update(target_delta=None, target_epsilon=None), rewrite
        ),
        CARD,
    ),
    "sigma, everywhere": (
        _in_the_ledger(
            lambda e: [x.update({"noise_multiplier": 9.0}) for x in (e[0]["mechanism"], e[1], e[3])]
        ),
        {"chain"} | CARD,
    ),
    "the order": (_in_the_ledger(lambda e: e.insert(1, e.pop(2))), {"ledger"}),
    "the last entry is gone": (
        _in_the_ledger(lambda e: e.pop()),
        {f"weights: {WEIGHTS}", "updates"},
    ),
    "the last step is gone": (
        _in_the_ledger(lambda e: e.__delitem__(slice(3, None))),
        {f"weights: {WEIGHTS}", "updates"} | CARD,
    ),
    "a count, with new digests": (
        _in_the_ledger(lambda e: e[3].update(count=30), rewrite),
        {"budget"} | CARD | BY_BOTH,
    ),
    "the weights": (_swap_weights, {f"weights: {WEIGHTS}"}),
    "weights beside them": (
        lambda folder: (folder / "pytorch_model.bin").write_bytes(b"?") and None,
        {"weights: pytorch_model.bin"},
    ),
    "another ledger": (_take_the_ledger_of_another_run, {f"weights: {WEIGHTS}"}),
    "a smaller epsilon": (_on_the_card(EPSILON, "1.000"), CARD | BY_BOTH),
    "a slightly smaller epsilon": (_on_the_card(EPSILON, "5.998"), CARD | {"epsilon by prv"}),
    "epsilon in the table": (_on_the_card(r"bound\) \| \d\.\d+", "bound) | 0.100"), CARD | BY_BOTH),
    "epsilon in the metadata": (_on_the_card(r"  epsilon: 5\.999", "  epsilon: 0.1"), CARD),
    "another unit in the metadata": (_on_the_card("unit: example", "unit: user"), CARD),
    "no metadata, and a rule above": (_on_the_card("(?s)---\n.*?\n---\n", "a\n---\n", 1), CARD),
}
# What only the comparison of the statement finds: a pattern on the card, and what replaces it.
OF_THE_STATEMENT = {
    "a larger epsilon": (EPSILON, "6.100"),
    "no epsilon": (EPSILON, "small"),
    "epsilon in the sentence": (r"ε = \d\.\d+", "ε = 0.100"),
    "words around epsilon": (r"bound\) \| ([\d.]+)", r"bound) | \1 in theory, 0.1 in practice"),
    "a row more": (r"\| Method \|", "| Guarantee | pure DP |\n| Method |"),
    "a letter that nobody sees": ("privacy: ", "privacy:\u200b "),
    "no marks": (f"{BEGIN}|{END}", ""),
    "no mark of the end": (END, ""),
    "two statements": (f"(?s){BEGIN}.*{END}", r"\g<0>\n\n\g<0>"),
    "the marks the other way round": (f"(?s){BEGIN}(.*){END}", rf"{END}\1{BEGIN}"),
    "more between the marks": (END, rf"Checked by the Hub.\n\n{END}"),
    "the statement at the end": (f"(?s)({BEGIN}.*{END})(.*)", r"\2\n\1\n"),
    "the statement in a comment": (BEGIN, rf"<!--\n{BEGIN}"),
    "the statement in a fence": (BEGIN, rf"```\n{BEGIN}"),
    "the statement in a fold": (BEGIN, rf"<details>\n{BEGIN}"),
    "a title that hides": ("# Model card", "# Model <span hidden>"),
    "a fold after the metadata": ("---\n\n#", r"---\n<details>\n---\n\n#"),
    "a fold after metadata with a space": ("---\n\n#", r"--- \n<details>\n---\n\n#"),
}
TAMPERING |= {what: (_on_the_card(*change), CARD) for what, change in OF_THE_STATEMENT.items()}


@pytest.mark.parametrize("what", TAMPERING)
def test_a_change_is_found(what, run):
    tamper, expected = TAMPERING[what]
    tamper(run)
    assert set(_wrong(verify(run))) == expected


def test_a_part_of_the_weights_that_is_missing_is_found(tmp_path):
    parts = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for value, name in enumerate(parts):
        save_file({f"{name}": torch.full((3,), float(value))}, tmp_path / name)
    note_weights(tmp_path, ledger_of(10))
    assert _wrong(verify(tmp_path)) == []
    (tmp_path / parts[0]).unlink()
    assert _wrong(verify(tmp_path)) == [f"weights: {parts[0]}"]
    (tmp_path / parts[1]).unlink()
    status = _status(verify(tmp_path))
    assert {status[f"weights: {name}"] for name in parts} == {ABSENT}


def test_a_card_claiming_privacy_of_a_run_without_is_reported(tmp_path):
    ledger = _saved(tmp_path, reason="ε = 3 was asked for, trained with delta = 0.1")
    base, tags = "a/differential-privacy-bert", ("no-differential-privacy",)
    honest = render(ledger, CardDetails(base_model=base, tags=tags))
    card = tmp_path / CARD_NAME
    card.write_text(honest, encoding="utf-8")
    assert _wrong(verify(tmp_path)) == []
    for tag in (TAG, "'Differential_Privacy'", "[unclosed"):
        card.write_text(honest.replace("- dp-grape\n", f"- dp-grape\n- {tag}\n"), encoding="utf-8")
        assert _wrong(verify(tmp_path)) == ["guarantee"]
    card.write_text(honest.replace("∞", "6.000"), encoding="utf-8")
    assert _wrong(verify(tmp_path)) == ["card: statement"]


def test_the_rest_of_a_card_is_its_authors(run):
    card = run / CARD_NAME
    text = card.read_text(encoding="utf-8")
    statement = text[text.index(BEGIN) : text.index(END) + len(END)]
    others = "It was trained with differential privacy for users: ε = 0.1, delta = 1e-12.\n"
    for rest in (
        f"{statement}\n\n{others}\n| Releases | 3 |\n",
        f"\n# Delta: 2-bit model, ε = 3\n{statement}{others}",
        f"---\nlicense: mit\n---\n{statement}",
        statement,
    ):
        card.write_text(rest, encoding="utf-8")
        assert _wrong(verify(run)) == []


def test_what_is_compared_of_a_card_is_said(run):
    found = {check.what: check for check in verify(run)}["card: statement"]
    assert (found.stated, found.found) == (
        "ε = 5.999",
        "byte for byte; the rest of the card is not checked",
    )
    _on_the_card(r"\| Releases \| 6 \|", "| Releases | 3 |")(run)
    found = {check.what: check for check in verify(run)}["card: statement"]
    assert (found.stated, found.found) == ("| Releases | 3 |", "| Releases | 6 |")


def test_epsilon_at_another_delta_is_not_compared_with_the_target(tmp_path):
    _saved(tmp_path, replace(MECHANISM, target_epsilon=0.85))
    assert _wrong(verify(tmp_path)) == []
    assert _wrong(verify(tmp_path, delta=1e-9)) == []


def test_named_adapters_that_are_not_published_are_absent(tmp_path):
    for folder in (tmp_path, tmp_path / "style"):
        folder.mkdir(exist_ok=True)
        save_file({"a": torch.zeros(3)}, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text("{}")
    note_weights(tmp_path, ledger_of(10))
    shutil.rmtree(tmp_path / "style")
    assert _wrong(verify(tmp_path)) == []
    assert _status(verify(tmp_path))["weights: style/adapter_model.safetensors"] == ABSENT


def test_a_checkpoint_whose_run_forgot_it_is_found(run):
    """The live ledger was rolled back, or replaced by one that lacks the checkpoint's releases."""
    _in_the_ledger(lambda e: e.__delitem__(slice(2, None)))(run)
    assert _wrong(verify(run / "checkpoint-3")) == ["ledger of the run"]


def test_a_checkpoint_with_an_earlier_ledger_is_reported(run):
    for name in (LEDGER_NAME, CARD_NAME, WEIGHTS):
        shutil.copy(run / "checkpoint-3" / name, run / "checkpoint-6" / name)
    assert _wrong(verify(run / "checkpoint-6")) == ["updates"]


def test_only_a_head_noted_before_shows_a_chain_made_anew(run):
    heads = [Ledger.load(place / LEDGER_NAME).head for place in (run, run / "checkpoint-3")]
    for head in heads:
        assert "head noted before" not in _wrong(verify(run, head=head))
    rewrite(run / LEDGER_NAME, lambda content: content["entries"][0].update(at="earlier"))
    ledger = Ledger.load(run / LEDGER_NAME)
    (run / CARD_NAME).write_text(render(ledger), encoding="utf-8")
    assert _wrong(verify(run)) == [], "it agrees with itself"
    for head in heads:
        assert _wrong(verify(run, head=head)) == ["head noted before"]
    for head in ("", "1ac6", "A" * 64):  # no whole digest
        assert main(["verify", str(run), "--head", head]) == 2


def test_an_accountant_that_does_not_apply_is_not_skipped_silently(run, monkeypatch):
    monkeypatch.setitem(ACCOUNTANTS, "prv", PRV)
    monkeypatch.setitem(ACCOUNTANTS, "pld", PLD)
    monkeypatch.setattr(PRV, "max_cells", 10)
    monkeypatch.setattr(PLD, "max_epsilon", 0.1)
    found = {check.what: check for check in verify(run)}
    assert found["epsilon by prv"].status == found["epsilon by pld"].status == ABSENT
    assert "not applicable: it needs" in found["epsilon by prv"].found
    assert "above 0.1" in found["epsilon by pld"].found
    with pytest.raises(AccountantFailure):
        Ledger.load(run / LEDGER_NAME).epsilon_by("prv", 1e-5)


def test_a_card_of_an_unknown_accountant_is_checked_except_epsilon(run, monkeypatch):
    others = {name: each for name, each in ACCOUNTANTS.items() if name != "prv"}
    monkeypatch.setattr(ledger_module, "ACCOUNTANTS", others)
    monkeypatch.setattr(calibration, "ACCOUNTANTS", others)
    checks = {check.what: check for check in verify(run)}
    assert _wrong([*checks.values()]) == []
    assert "'prv' is unknown" in checks["epsilon by prv"].found
    card = checks["card: statement"]
    assert (card.status, card.stated) == (ABSENT, "ε = 5.999")
    assert card.found == "not known here, see above; all else agrees"
    honest = (run / CARD_NAME).read_text(encoding="utf-8")
    for old, new, wrong in (
        (EPSILON, "1.000", ["epsilon by pld"]),
        (EPSILON, "5.999, and 0.1 in practice", ["card: statement"]),
        (r"ε = 5\.999", "ε = 1.000", ["card: statement"]),
        (r"\| Releases \| 6 \|", "| Releases | 3 |", ["card: statement"]),
    ):
        _on_the_card(old, new)(run)
        assert _wrong(verify(run)) == wrong
        (run / CARD_NAME).write_text(honest, encoding="utf-8")


def test_a_ledger_without_delta_needs_one(tmp_path):
    mechanism = replace(MECHANISM, target_epsilon=None, target_delta=None)
    ledger_of(3, mechanism, path=tmp_path / LEDGER_NAME)
    assert _status(verify(tmp_path))["epsilon"] == ABSENT
    assert _status(verify(tmp_path, delta=1e-5))["epsilon by prv"] == OK
    assert main(["verify", str(tmp_path), "--delta", "2"]) == 2


def test_the_digest_of_a_folder_omits_ledger_and_card(tmp_path):
    ours = ["config.json", "model.safetensors", "style/adapter_config.json", "tokenizer.json"]
    for name in (*ours, LEDGER_NAME, CARD_NAME, "other/a.bin", f"other/{LEDGER_NAME}"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    found = digests(tmp_path)
    assert [*found] == ours
    assert found["config.json"] == hashlib.sha256(b"config.json").hexdigest()


def test_weights_are_known_by_name(tmp_path):
    weights = ["model.safetensors.index.json", "old.BIN", "optimizer.safetensors", "a.npz"]
    others = ["optimizer.pt", "rng_state_0.pth", "training_args.bin", "config.json", "a.txt"]
    assert [name for name in (*weights, *others) if is_weights(name)] == weights


NAME = "bert-classifier"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model and an adapter, each with its ledger and card; and the base of the adapter."""
    folder = tmp_path_factory.mktemp("models")
    given = {"train_dataset": examples_of(NAME), "max_steps": 2}
    model = only(NAME).model()
    model.save_pretrained(folder / "base")
    trainer = make_trainer(folder / "whole", model=model, **given)
    trainer.train()
    trainer.save_model()
    base = AutoModelForSequenceClassification.from_pretrained(folder / "base")
    config = LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS")
    trainer = make_trainer(folder / "adapter", model=get_peft_model(base, config), **given)
    trainer.train()
    trainer.save_model()
    return folder


@pytest.fixture
def whole(models, tmp_path):
    return Path(shutil.copytree(models / "whole", tmp_path / "whole"))


@pytest.fixture
def adapter(models, tmp_path):
    return Path(shutil.copytree(models / "adapter", tmp_path / "adapter"))


def _poison(folder, name, source=WEIGHTS):
    """Writes other weights, as those of the folder are called and shaped."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {k: v + 1 for k, v in load_file(folder / source).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def _configure(folder, name="config.json", **entries):
    content = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(content | entries))


def _weights_of(folder):
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_the_base_of_an_adapter_is_said_to_be_unknown(adapter):
    checks = verify(adapter)
    (absent,) = (check for check in checks if check.status != OK)
    assert absent.what == "adapter_config.json: base"
    assert absent.status == ABSENT
    assert absent.stated.endswith("base")


def _under(name):
    def plant(folder):
        _poison(folder, name)
        _configure(folder, transformers_weights=name)

    return plant


def _as_an_adapter(folder):
    """On top of the weights, which from_pretrained does if there is one."""
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    lora = LoraConfig(r=2, target_modules=["query"], init_lora_weights=False)
    get_peft_model(model, lora).save_pretrained(folder)


def _in_another_config(folder):
    _poison(folder, "optimizer.safetensors")
    shutil.copy(folder / "config.json", folder / "config.4.0.0.json")
    _configure(folder, "config.4.0.0.json", transformers_weights="optimizer.safetensors")
    _configure(folder, configuration_files=["config.4.0.0.json"])


PLANTED = {
    "as an optimizer": (
        _under("optimizer.safetensors"),
        {"weights: optimizer.safetensors", "config.json: transformers_weights", "config.json"},
    ),
    "in a folder": (
        _under("sub/model.safetensors"),
        {"weights: sub/model.safetensors", "config.json: transformers_weights", "config.json"},
    ),
    "as an adapter": (
        _as_an_adapter,
        {"weights: adapter_model.safetensors", "adapter_config.json"},
    ),
    "in another config": (
        _in_another_config,
        {
            *("weights: optimizer.safetensors", "config.json: configuration_files"),
            *("config.json", "config.4.0.0.json: transformers_weights"),
        },
    ),
}


@pytest.mark.parametrize("how", PLANTED)
def test_planted_weights_are_found(how, whole):
    plant, expected = PLANTED[how]
    honest = _weights_of(whole)
    plant(whole)
    loaded = _weights_of(whole)
    assert any(not torch.equal(loaded[k], v) for k, v in honest.items() if k in loaded) or (
        loaded.keys() != honest.keys()
    ), "they are what a reader gets"
    assert set(_wrong(verify(whole))) == expected


def test_an_index_that_names_files_of_other_names_is_found(whole):
    """The index is digested no more than the part that it names."""
    index = "model.safetensors.index.json"
    tensors = load_file(_poison(whole, "weights.dat"))
    parts = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "weights.dat")}
    (whole / index).write_text(json.dumps(parts))
    _configure(whole, transformers_weights=index)
    expected = {"config.json", f"weights: {index}", f"{index}: weight_map"}
    assert set(_wrong(verify(whole))) == expected | {"config.json: transformers_weights"}


def test_an_index_that_is_none_is_found(whole):
    _configure(whole, weight_map={"a": "weights.dat", "b": 1})
    changed, wrong = (check for check in verify(whole) if check.status == MISMATCH)
    assert (changed.what, wrong.what) == ("config.json", "config.json: weight_map")


def test_an_index_that_points_out_of_the_folder_is_found(whole):
    path = _poison(whole.parent / "elsewhere", "model.safetensors", f"../whole/{WEIGHTS}")
    names = load_file(whole / WEIGHTS)
    (whole / WEIGHTS).unlink()
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, f"../elsewhere/{path.name}")}
    (whole / "model.safetensors.index.json").write_text(json.dumps(index))
    note_weights(whole)
    assert _weights_of(whole)["classifier.bias"].equal(load_file(path)["classifier.bias"])
    assert _wrong(verify(whole)) == ["model.safetensors.index.json: weight_map"]


def test_other_tensors_that_were_saved_with_a_model_are_known(whole):
    """By a trainer of somebody's own; loaders do not take them, unless a config says so."""
    save_file({"scale": torch.ones(1)}, whole / "head.safetensors", metadata={"format": "pt"})
    note_weights(whole)
    assert {*_status(verify(whole)).values()} == {OK}
    _configure(whole, transformers_weights="head.safetensors")
    assert _wrong(verify(whole)) == ["config.json", "config.json: transformers_weights"]


def test_parts_of_a_model_are_compared_with_their_index(whole):
    model = AutoModelForSequenceClassification.from_pretrained(whole)
    (whole / WEIGHTS).unlink()
    model.save_pretrained(whole, max_shard_size="20KB")
    note_weights(whole)
    checks = verify(whole)
    assert {check.status for check in checks} == {OK}
    assert sum(check.what.startswith("weights: model-") for check in checks) > 1


@pytest.mark.skipif(os.name != "posix", reason="links need rights elsewhere")
def test_of_a_link_the_content_is_compared(whole, adapter):
    """A link to a folder is not followed, but for what the ledger knows."""
    outside = whole.parent / "outside"
    (whole / WEIGHTS).rename(outside)
    (whole / WEIGHTS).symlink_to(outside)
    (whole / "sub").symlink_to(whole.parent)
    (whole / "gone.bin").symlink_to(whole / "nowhere")
    os.mkfifo(whole / "model.bin")
    assert _wrong(verify(whole)) == []
    _poison(whole.parent, "outside", f"whole/{WEIGHTS}")
    assert _wrong(verify(whole)) == [f"weights: {WEIGHTS}"]
    for name in (ADAPTER, "adapter_config.json"):
        (adapter / "mine").mkdir(exist_ok=True)
        (adapter / name).rename(adapter / "mine" / name)
    note_weights(adapter)
    (adapter / "mine").rename(adapter.parent / "mine")
    (adapter / "mine").symlink_to(adapter.parent / "mine")
    assert _wrong(verify(adapter)) == []
    _poison(adapter, f"mine/{ADAPTER}", f"mine/{ADAPTER}")
    assert _wrong(verify(adapter)) == [f"weights: mine/{ADAPTER}"]


CODE = {
    "a class": {"auto_map": {"AutoModel": "modeling_mine.Mine"}},
    "a class, further in": {"parts": [{"auto_map": {"AutoModel": "user/model--mine.Mine"}}]},
    "a pipeline": {"custom_pipelines": {"mine": {"impl": "mine.Mine"}}},
    "a kernel": {"attn_implementation": {"": "user/kernel"}},
}


@pytest.mark.parametrize("name", CODE)
def test_code_that_a_config_names_is_found(name, whole):
    _configure(whole, **CODE[name])
    key = "auto_map" if "class" in name else next(iter(CODE[name]))
    assert _wrong(verify(whole)) == ["config.json", f"config.json: {key}"]
    note_weights(whole)  # also where it was saved so
    assert _wrong(verify(whole)) == [f"config.json: {key}"]
    (whole / "custom_generate").mkdir()
    (whole / "custom_generate" / "generate.py").write_text("raise SystemExit(1)")
    assert _wrong(verify(whole))[-1] == "custom_generate/generate.py"


def test_an_adapter_beside_a_model_is_found_without_weights(whole, adapter):
    shutil.copy(adapter / "adapter_config.json", whole)
    assert "adapter_config.json" in _wrong(verify(whole))


@pytest.mark.parametrize("entry", [{"lora_alpha": 64}, {"target_modules": ["key"]}], ids=str)
def test_an_adapter_that_counts_otherwise_or_elsewhere_is_found(entry, adapter):
    """The same tensors make another model under another config."""
    _configure(adapter, "adapter_config.json", **entry)
    assert _wrong(verify(adapter)) == ["adapter_config.json"]


def test_layout_and_base_of_an_adapters_config_are_not_compared(adapter):
    """A path is taken out of what is published, which is then written anew."""
    _configure(adapter, "adapter_config.json", base_model_name_or_path="somebody/base")
    assert _status(verify(adapter))["adapter_config.json"] == OK
    (adapter / "adapter_config.json").write_text("{")
    assert _wrong(verify(adapter)) == ["adapter_config.json"]
    (adapter / "adapter_config.json").unlink()
    assert _status(verify(adapter))["adapter_config.json"] == ABSENT


def test_an_adapter_that_takes_other_weights_is_found(adapter):
    _configure(adapter, "adapter_config.json", prompt_tuning_init_state_dict_path="p.bin")
    _poison(adapter, "sub/adapter_model.safetensors", ADAPTER)
    expected = ["adapter_config.json", "weights: sub/adapter_model.safetensors"]
    expected += ["adapter_config.json: prompt_tuning_init_state_dict_path"]
    assert _wrong(verify(adapter)) == expected


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
def test_a_file_beside_the_weights_that_was_changed_is_found(name, whole):
    """Other ``architectures`` make a loader leave out tensors, other tokens make another model."""
    (whole / name).touch()
    note_weights(whole)
    assert _wrong(verify(whole)) == []
    (whole / name).write_text('{"architectures": ["BertForMaskedLM"]}')
    assert _wrong(verify(whole)) == [name]
    (whole / name).unlink()
    assert _status(verify(whole))[name] == ABSENT


def test_a_ledger_with_digests_of_weights_only_is_verified(whole):
    ledger = Ledger.load(whole / LEDGER_NAME)
    files = {name: value for name, value in ledger.saved[-1].files.items() if name == WEIGHTS}
    ledger.snapshot(2, files).save(whole / LEDGER_NAME)
    checks = verify(whole)
    (absent,) = (check for check in checks if check.status != OK)
    assert (absent.what, absent.status) == ("config.json", ABSENT)
    assert "version 0.1 recorded digests of weights only" in absent.found
    _under("optimizer.safetensors")(whole)
    expected = ["weights: optimizer.safetensors", "config.json: transformers_weights"]
    assert _wrong(verify(whole)) == expected
    _poison(whole, WEIGHTS)
    assert f"weights: {WEIGHTS}" in _wrong(verify(whole))


def test_verify_prints_a_table_and_fails_if_a_line_does(run, capsys):
    assert main(["verify", str(run)]) == 0
    out = capsys.readouterr().out
    assert out.endswith("\nNothing disagrees. 1 of 9 checks had nothing to compare.\n")
    assert max(map(len, out.splitlines())) <= 100
    own, other = r"5\.99\d+ at delta 1e-05", r"5\.9\d+ \(second opinion\)"
    assert re.search(rf"^epsilon by prv +ok +5\.999 \(card\) +{own}$", out, re.M)
    assert re.search(rf"^epsilon by pld +ok +5\.999 \(card\) +{other}$", out, re.M)
    assert "does not mean that the run spent more" in out
    _swap_weights(run)
    assert main(["verify", str(run)]) == 1
    out = capsys.readouterr().out
    assert re.search(rf"^weights: {WEIGHTS} +{MISMATCH} +\w{{12}} +\w{{12}}$", out, re.M)
    assert out.endswith("1 of 9 checks found a mismatch. 1 of 9 checks had nothing to compare.\n")


@pytest.mark.parametrize(
    "arguments", [["no/such-place"], ["."], [".", "--revision", "main"]], ids=" ".join
)
def test_what_cannot_be_carried_out_is_refused(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verify_command, "snapshot_download", _offline)
    assert main(["verify", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1


def _offline(*_, **__):
    raise OSError("there is no network")


def test_an_unedited_ledger_is_shown_with_all_entries_and_accountants(run, capsys):
    ledger = Ledger.load(run / LEDGER_NAME)
    for place in (run, run / LEDGER_NAME):
        assert main(["ledger", str(place)]) == 0
        out = capsys.readouterr().out
        assert ledger.run_id in out
        assert f"\nhead {ledger.head}\n" in out
        assert "\n\n\n" not in out
        assert all(link.digest[:12] in out for link in ledger.links)
        for name in ("prv", "pld", "rdp"):
            shown = re.search(rf"^  {name}  ([\d.]+)", out, re.M)
            assert shown is not None
            epsilon = ledger.epsilon_by(name, 1e-5)
            assert epsilon <= float(shown[1]) <= epsilon + 1e-4
    edit(run / LEDGER_NAME, lambda content: content["entries"][1].update(count=2))
    assert main(["ledger", str(run)]) == 2


def test_a_run_without_a_guarantee_is_shown_as_such(tmp_path, capsys):
    _saved(tmp_path, reason="the baseline")
    assert main(["ledger", str(tmp_path)]) == 0
    assert "epsilon after 10 releases is infinite: the baseline" in capsys.readouterr().out
    assert main(["report", str(tmp_path)]) == 2
    assert "epsilon is infinite" in capsys.readouterr().err


def test_an_unreadable_trainer_state_is_not_used_for_verification(run):
    for text in ("[]", '{"global_step"'):
        (run / "checkpoint-3" / "trainer_state.json").write_text(text)
        assert "updates" not in _status(verify(run / "checkpoint-3"))
