"""Training goes on from a model of an earlier run: what adds up is asked, counted and recorded."""

import math
import os
import shutil
import signal
import time
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
from huggingface_hub import constants
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForSequenceClassification

from dp_grape_hf.accounting import Releases, compose_epsilon, find_noise_multiplier, rounded_up
from dp_grape_hf.arguments import PrivacyPlan
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.ledger import LEDGER_NAME, Ledger, find_earlier
from dp_grape_hf.ledger.entries import SAME_DATA
from dp_grape_hf.publishing import MISMATCH, render, verify
from tests.support.hub_server import TOKEN, Fault, serve_as_the_hub
from tests.support.ledgers import MECHANISM
from tests.support.models import only
from tests.support.trainers import (
    TinyForSequenceClassification,
    examples_of,
    make_args,
    make_trainer,
)

NAME = "bert-classifier"
DATA = examples_of(NAME, 24)
SAVING = {"save_strategy": "steps", "save_steps": 2}


def _trained(trainer):
    trainer.train()
    trainer.save_model()
    return Path(trainer.args.output_dir)


def _trainer(folder, model, **changes):
    """Of a model that knows where it was loaded from."""
    return make_trainer(folder, model=model, train_dataset=DATA, **changes)


def _load(folder):
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first") / "run"
    return _trained(_trainer(folder, only(NAME).model(), **SAVING))


@pytest.fixture
def first(first_run, tmp_path):
    return Path(shutil.copytree(first_run, tmp_path / "first"))


@pytest.mark.parametrize("place", ["", "checkpoint-2"])
def test_the_trainer_asks_which_data_an_earlier_run_used(place, first, tmp_path):
    with pytest.raises(PrivacyError) as refusal:
        _trainer(tmp_path / "second", _load(first / place))
    epsilon = Ledger.load(first / LEDGER_NAME).epsilon()
    text = str(refusal.value)
    assert f"{first / LEDGER_NAME}" in text, "the live ledger, which counts later releases as well"
    assert f"epsilon {math.ceil(epsilon * 1e4) / 1e4:g} at delta 0.001 in 4 releases" in text
    assert "earlier_data='same'" in text
    assert "earlier_data='other'" in text


def test_a_model_without_a_ledger_accepts_no_earlier_data(tmp_path):
    only(NAME).model().save_pretrained(tmp_path / "public")
    for model in (only(NAME).model(), _load(tmp_path / "public")):
        _trainer(tmp_path / "out", model)
        with pytest.raises(PrivacyError, match="earlier_data='other', but no"):
            _trainer(tmp_path / "out", model, earlier_data="other")


def test_a_method_without_privacy_voids_the_guarantee_of_later_runs(first, tmp_path):
    second = _trained(_trainer(tmp_path / "second", _load(first), method="adam"))
    ledger = Ledger.load(second / LEDGER_NAME)
    assert not ledger.private
    assert [run.steps for run in ledger.runs] == [4, 4]
    third = _trainer(tmp_path / "third", _load(second), earlier_data="same")
    assert third.privacy_spent().epsilon == math.inf
    assert not third.privacy_spent().private
    given = {"earlier_data": "same", "noise_multiplier": None, "target_epsilon": 5.0}
    with pytest.raises(PrivacyError, match=r"target_epsilon=5\.0 cannot be met"):
        _trainer(tmp_path / "third", _load(second), **given)
    fourth = _trainer(tmp_path / "fourth", _load(second), earlier_data="other")
    fourth.train()
    assert fourth.privacy_spent().private


def test_an_earlier_ledger_may_be_given_by_its_path(first, tmp_path):
    for path in (first, first / LEDGER_NAME):
        args = make_args(tmp_path, earlier_ledger=str(path), earlier_data="same")
        earlier = find_earlier(TinyForSequenceClassification(), args)
        assert earlier is not None
        assert earlier.releases == Ledger.load(first / LEDGER_NAME).composed
    args = make_args(tmp_path, earlier_ledger=str(first))
    with pytest.raises(PrivacyError, match="earlier_data=None"):
        find_earlier(TinyForSequenceClassification(), args)
    args = make_args(tmp_path, earlier_ledger=str(tmp_path / "nowhere"), earlier_data="same")
    with pytest.raises(PrivacyError, match=r"no valid privacy ledger at .*nowhere"):
        find_earlier(TinyForSequenceClassification(), args)


def test_adapters_and_model_init_ask_for_the_earlier_data_too(first, tmp_path):
    adapter = get_peft_model(_load(first), LoraConfig(r=2, target_modules=["query"]))
    with pytest.raises(PrivacyError, match="earlier_data=None"):
        _trainer(tmp_path / "second", adapter, method="dp_lora")
    with pytest.raises(PrivacyError, match="earlier_data=None"):
        make_trainer(tmp_path / "second", train_dataset=DATA, model_init=lambda: _load(first))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_loaded_adapter_asks_for_the_ledger_of_its_run(tmp_path):
    """PEFT does not say where it was loaded from, so its config has a note."""
    settings = LoraConfig(r=2, target_modules=["query"])
    adapter = get_peft_model(only(NAME).model(), settings)
    folder = _trained(_trainer(tmp_path / "first", adapter, method="dp_lora"))
    assert find_earlier(get_peft_model(only(NAME).model(), settings), make_args(tmp_path)) is None
    loaded = PeftModel.from_pretrained(only(NAME).model(), folder, is_trainable=True)
    assert loaded.peft_config["default"].peft_version.startswith(f"{peft.__version__}@dp_grape")
    with pytest.raises(PrivacyError, match=r"an adapter of this model .* epsilon .* at delta 0.00"):
        find_earlier(loaded, make_args(tmp_path))
    named = make_args(tmp_path, earlier_data="same", earlier_ledger=str(folder))
    earlier = find_earlier(loaded, named)
    assert earlier is not None
    assert [run.steps for run in earlier.runs] == [4]


def test_a_part_of_another_model_asks_for_earlier_data(first, tmp_path):
    with pytest.raises(PrivacyError, match="earlier_data=None"):
        find_earlier(nn.Sequential(_load(first)), make_args(tmp_path))
    trainers = [make_trainer(tmp_path / name) for name in ("one", "other")]
    for trainer in trainers:
        trainer.train()
    with pytest.raises(PrivacyError, match="come from several private runs"):
        find_earlier(nn.Sequential(*(t.model for t in trainers)), make_args(tmp_path))


@pytest.mark.parametrize("derived", [nn.Module.train, deepcopy, nn.Sequential])
def test_earlier_runs_of_this_process_are_known_without_folder(derived, tmp_path):
    model = TinyForSequenceClassification()
    early = make_trainer(tmp_path / "early", model=model)  # has released nothing yet
    trainer = make_trainer(tmp_path / "first", model=model)
    trainer.train()
    trainer.save_model()
    with pytest.raises(PrivacyError, match="or another one, has already made 4 releases"):
        early.train()
    with pytest.raises(PrivacyError, match="earlier_data=None"):
        find_earlier(derived(model), make_args(tmp_path / "second"))
    second = make_trainer(tmp_path / "second", model=model, earlier_data="same")
    assert second.privacy_spent().epsilon == pytest.approx(trainer.privacy_spent().epsilon)


class _OfHub(TinyForSequenceClassification):
    name_or_path = "user/model"


class _OfNowhere(TinyForSequenceClassification):
    name_or_path = "a folder/that is/gone"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with serve_as_the_hub(monkeypatch) as server:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


def _go_offline(hub, patch):
    patch.setattr(constants, "HF_HUB_OFFLINE", True)


def _failing(**how):
    return lambda hub, patch: hub.faults.append(Fault("HEAD", LEDGER_NAME, times=99, **how))


FAILURES = {
    "401": (lambda hub, patch: patch.setenv("HF_TOKEN", "hf_wrong"), "NotFoundError: 401"),
    "503": (_failing(status=503), "HfHubHTTPError: Server error"),
    "no connection": (_failing(), "RemoteProtocolError"),
    "no such repository": (lambda hub, patch: hub.repos.clear(), "RepositoryNotFoundError: 404"),
    "offline": (_go_offline, "OfflineModeIsEnabled"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_look_up_that_fails_is_no_answer(name, hub, tmp_path, monkeypatch):
    hub.add("user/model", {"config.json": b"{}"})
    fail, reason = FAILURES[name]
    fail(hub, monkeypatch)
    with pytest.raises(PrivacyError) as refusal:
        find_earlier(_OfHub(), make_args(tmp_path))
    text = str(refusal.value)
    assert "user/model" in text
    assert reason in text
    assert "\n" not in text
    assert "earlier_data='other'" in text
    assert "earlier_ledger" in text
    with pytest.raises(PrivacyError, match=r"and earlier_data='same'.*set earlier_ledger"):
        find_earlier(_OfHub(), make_args(tmp_path, earlier_data="same"))
    assert find_earlier(_OfHub(), make_args(tmp_path, earlier_data="other")) is None
    assert find_earlier(_OfHub(), make_args(tmp_path, method="adam")) is None
    assert find_earlier(_OfHub(), make_args(tmp_path, noise_multiplier=0.0)) is None


def test_offline_the_cache_knows_that_a_commit_lacks_a_ledger(hub, tmp_path, monkeypatch):
    hub.add("user/model", {"config.json": b"{}"})
    commit = hub.repos["user/model"].branches["main"][-1].oid
    model = _OfHub()
    model.config = SimpleNamespace(_commit_hash=commit)
    assert find_earlier(model, make_args(tmp_path)) is None
    with pytest.raises(PrivacyError, match="earlier_data='other', but no"):
        find_earlier(model, make_args(tmp_path, earlier_data="other"))
    _go_offline(hub, monkeypatch)
    assert find_earlier(model, make_args(tmp_path)) is None
    for other in ("0" * 40, None):
        model.config = SimpleNamespace(_commit_hash=other)
        with pytest.raises(PrivacyError, match="OfflineModeIsEnabled"):
            find_earlier(model, make_args(tmp_path))


def test_a_ledger_in_the_cache_is_read_offline(hub, first, tmp_path, monkeypatch):
    hub.add("user/model", {LEDGER_NAME: (first / LEDGER_NAME).read_bytes()})
    for _ in range(2):
        with pytest.raises(PrivacyError, match=r"comes from an earlier run.* in 4 releases"):
            find_earlier(_OfHub(), make_args(tmp_path))
        _go_offline(hub, monkeypatch)


def test_a_folder_that_is_gone_cannot_be_looked_into(tmp_path):
    with pytest.raises(PrivacyError, match=r"a folder/that is/gone.*no folder here"):
        find_earlier(_OfNowhere(), make_args(tmp_path))
    assert find_earlier(_OfNowhere(), make_args(tmp_path, earlier_data="other")) is None


@pytest.mark.slow
def test_on_the_same_data_the_budget_covers_both_runs(first, tmp_path, caplog):
    before = Ledger.load(first / LEDGER_NAME)
    spent = before.epsilon()
    target = spent + 2.0
    alone = PrivacyPlan(make_args(tmp_path, target_epsilon=target), 24).mechanism.noise_multiplier
    second = _trainer(
        tmp_path / "second",
        _load(first),
        noise_multiplier=None,
        target_epsilon=target,
        earlier_data="same",
    )
    assert second.privacy_spent().epsilon == pytest.approx(spent)
    assert second.plan.mechanism.noise_multiplier > 1.02 * alone
    said = next(r.getMessage() for r in caplog.records if "This leaves" in r.getMessage())
    assert f"target_epsilon={target:g} is the budget of all runs" in said
    assert f"spent {rounded_up(spent):.4g} of it. This leaves 2 for the 4 steps" in said
    assert f"noise multiplier is {second.plan.mechanism.noise_multiplier:.4g}" in said
    second.train()
    now = second.privacy_spent().epsilon
    assert target * (1 - 1e-3) <= now <= target
    assert second.releases_left() == 0
    ledger = Ledger.load(tmp_path / "second" / LEDGER_NAME)
    assert ledger.epsilon() == pytest.approx(now)
    assert ledger.runs[-1].start.continues == SAME_DATA
    assert [run.steps for run in ledger.composed_runs] == [4, 4]
    own = second.plan.mechanism
    whole = [*before.composed, Releases(own.noise_multiplier, own.sample_rate, 4)]
    assert now == pytest.approx(compose_epsilon(whole, delta=1e-3, accountant="rdp"))
    second.save_model()
    assert "| Earlier runs on the same data | 1, with 4 releases" in render(second.ledger)
    assert MISMATCH not in {check.status for check in verify(tmp_path / "second")}


def test_a_budget_already_spent_is_refused_with_both_numbers(first, tmp_path):
    spent = Ledger.load(first / LEDGER_NAME).epsilon()
    with pytest.raises(PrivacyError, match=rf"target_epsilon=0.5 is spent .* {spent:.4g} at"):
        _trainer(
            tmp_path / "second",
            _load(first),
            noise_multiplier=None,
            target_epsilon=0.5,
            earlier_data="same",
        )


def test_runs_about_other_neighbours_are_refused_before_training(first, tmp_path):
    given = {"adjacency": "replace_one"}
    with pytest.raises(PrivacyError, match="adjacency='replace_one'"):
        _trainer(tmp_path / "second", _load(first), earlier_data="same", **given)
    _trainer(tmp_path / "second", _load(first), earlier_data="other", **given)


def test_noise_is_found_where_earlier_releases_leave_little(tmp_path):
    earlier = [Releases(2.0, 0.1, 100)]
    used = compose_epsilon(earlier, delta=1e-5, accountant="rdp")
    given = {"sample_rate": 0.1, "steps": 50, "accountant": "rdp"}
    target = used * 1.01
    sigma = find_noise_multiplier(
        target_epsilon=target, target_delta=1e-5, earlier=earlier, **given
    )
    whole = compose_epsilon([*earlier, Releases(sigma, 0.1, 50)], delta=1e-5, accountant="rdp")
    assert target * (1 - 1e-3) <= whole <= target
    with pytest.raises(PrivacyError, match="is spent already"):
        find_noise_multiplier(target_epsilon=used, target_delta=1e-5, earlier=earlier, **given)


@pytest.mark.slow
@pytest.mark.parametrize("target", [None, 8.0])
def test_a_resumed_run_is_not_a_new_one(target, first, tmp_path):
    out = tmp_path / "second"
    given = {**SAVING, "noise_multiplier": None if target else 1.0, "target_epsilon": target}
    second = _trainer(out, _load(first), earlier_data="same", **given)
    second.train()
    spent, checkpoint = second.privacy_spent(), out / "checkpoint-2"
    del second
    (out / "checkpoint-4").rename(tmp_path / "away")
    before = Ledger.load(out / LEDGER_NAME).steps
    for source, answer in ((first, "same"), (checkpoint, None), (checkpoint, "same")):
        resumed = _trainer(out, _load(source), earlier_data=answer, **given)
        assert resumed.plan.mechanism.noise_multiplier == spent.mechanism.noise_multiplier
    if target is None:
        resumed.train(resume_from_checkpoint=str(checkpoint))
        assert resumed.ledger.steps == before + 2
        assert [run.steps for run in resumed.ledger.composed_runs] == [4, before + 2]
        assert resumed.privacy_spent().epsilon > spent.epsilon
        assert resumed.privacy_spent().epsilon == pytest.approx(resumed.ledger.epsilon())


def test_a_second_run_in_a_folder_is_refused_with_remedy(tmp_path):
    """A trainer of that folder may be made, as it may evaluate or resume."""
    first = _trained(make_trainer(tmp_path / "out", **SAVING))
    live = first / LEDGER_NAME
    before = live.read_text()
    weights = {path: path.read_bytes() for path in first.glob("*.safetensors")}
    refused = make_trainer(first)
    with pytest.raises(PrivacyError) as refusal:
        refused.train()
    text = str(refusal.value)
    assert text.startswith(f"output_dir={str(first)!r} belongs to another run, which {live}")
    assert "in 4 releases. Resume that run by train(resume_from_checkpoint=...), or give" in text
    assert live.read_text() == before
    answers = {"earlier_ledger": str(live), "earlier_data": "same"}
    assert all(f"{name}={value!r}" in text for name, value in answers.items())
    with pytest.raises(PrivacyError, match=r"save_model\(\) after"):
        refused.save_model()
    assert weights == {path: path.read_bytes() for path in first.glob("*.safetensors")}
    second = make_trainer(tmp_path / "second", **answers)
    second.train()
    assert [run.steps for run in second.ledger.composed_runs] == [4, 4]
    resumed = make_trainer(first, **SAVING)
    resumed.train(resume_from_checkpoint=str(first / "checkpoint-2"))
    assert resumed.ledger.steps == 6


@pytest.mark.slow
def test_a_folder_without_releases_may_be_used_again(tmp_path):
    Ledger.start(MECHANISM, tmp_path / LEDGER_NAME)
    for settings in ({"noise_multiplier": 0.0}, {"method": "adam"}, {}):
        make_trainer(tmp_path, **settings).train()
    with pytest.raises(PrivacyError, match="belongs to another run"):  # and would be set aside
        make_trainer(tmp_path, method="adam").train()
    (tmp_path / LEDGER_NAME).write_text("{")
    with pytest.raises(PrivacyError, match="no valid privacy ledger"):
        make_trainer(tmp_path).train()


@pytest.mark.slow
def test_a_resumed_run_counts_what_it_began_with(first, tmp_path):
    out = tmp_path / "second"
    _trainer(out, _load(first), earlier_data="same", **SAVING).train()
    resumed = _trainer(out, only(NAME).model(), **SAVING)
    with pytest.raises(PrivacyError, match=r"4 earlier releases.* counts 0"):
        resumed.train(resume_from_checkpoint=str(out / "checkpoint-2"))


def _in_a_fork(path, end):
    """Starts a run in another process, and returns its exit code: 1 if it was refused.

    ``end`` is called with the number of the process while that holds the run, if it does.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            ledger = Ledger.start(MECHANISM, path)
        except PrivacyError as error:
            os._exit(1 if "another process that still runs" in str(error) else 2)
        os.write(write, b"held")
        time.sleep(60)
        os._exit(int(ledger.steps))
    os.close(write)
    with os.fdopen(read) as pipe:
        if pipe.read(4) == "held":
            end(child)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _kill(process):
    os.kill(process, signal.SIGKILL)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_run_of_another_living_process_is_not_joined(tmp_path):
    path = tmp_path / LEDGER_NAME

    def refused(process):
        content = path.read_text()
        with pytest.raises(PrivacyError, match="another process that still runs"):
            Ledger.start(MECHANISM, path)
        with pytest.raises(PrivacyError, match="another process that still runs"):
            Ledger.resume(path, tmp_path / "copy", MECHANISM, updates=0)
        assert path.read_text() == content
        _kill(process)

    assert _in_a_fork(path, refused) == -signal.SIGKILL
    mine = Ledger.start(MECHANISM, path)
    again = Ledger.start(MECHANISM, path)  # the same process is not locked out
    again.record()
    assert _in_a_fork(path, _kill) == 1
    del mine, again
    assert _in_a_fork(path, _kill) == -signal.SIGKILL  # nobody holds it any more


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_that_ends_leaves_the_lock_with_its_parent(tmp_path):
    path = tmp_path / LEDGER_NAME
    ledger = Ledger.start(MECHANISM, path)
    child = os.fork()
    if child == 0:
        del ledger
        os._exit(0)
    os.waitpid(child, 0)
    ledger.record()
    assert _in_a_fork(path, _kill) == 1
