"""Only what is on the list leaves the machine, and what arrives is whole.

The client is the real one; the Hub is ``tests.support.hub_server``, on the loopback interface.
"""

import json
import logging
import shutil
import struct
import tempfile
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import load, save_file
from torch import nn
from transformers import AutoModelForSequenceClassification, TrainerCallback

from dp_grape_hf.cli.main import main
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.ledger import LEDGER_NAME
from dp_grape_hf.mechanism import PrivateMechanism
from dp_grape_hf.publishing import Publisher
from dp_grape_hf.publishing.configs import is_hub_name, without_paths
from dp_grape_hf.trainer import DPGrapeTrainer
from dp_grape_hf.trainer.checkpoints import fault_of_checkpoint
from tests.support.collators import tokenizer
from tests.support.hub_server import TOKEN, Fault, metadata_errors, serve_as_the_hub
from tests.support.ledgers import OF_THE_TRAINER, edit, ledger_of, note_weights
from tests.support.marks import slow_but
from tests.support.models import only
from tests.support.trainers import assert_same_weights, examples_of, make_trainer, weights_of

pytestmark = [
    # The client's own upload of large files.
    pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload:DeprecationWarning")
]

REPO = "tester/private-model"
SEED = 918273645
MODEL = {
    *("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"),
    *(LEDGER_NAME, "README.md"),
}
INITIAL = {".gitattributes"}
NAME = "roberta-classifier"


@pytest.fixture
def hub(monkeypatch):
    with serve_as_the_hub(monkeypatch) as server:
        yield server


def trainer_of(folder, cls=DPGrapeTrainer, **changes):
    settings = {
        "model": only(NAME).model(num_hidden_layers=1),
        "train_dataset": examples_of(NAME),
        "processing_class": tokenizer(),
        "seed": SEED,
        "expected_batch_size": 8,
        "save_strategy": "steps",
        "save_steps": 2,
        "hub_model_id": REPO,
        "hub_token": TOKEN,
        "hub_always_push": True,
    }
    return make_trainer(folder, cls=cls, **settings | changes)


def trained(folder, **changes):
    trainer = trainer_of(folder, **{"save_strategy": "no", "max_steps": 1} | changes)
    trainer.train()
    return trainer


def nested(folder, names=MODEL):
    return {f"{folder}/{name}" for name in names}


class Indiscreet(DPGrapeTrainer):
    """Leaves in every folder what must not be published, under names old and new."""

    draws: list[list[int]]
    losses: list[list[float]]

    def training_step(self, model, inputs, *args):
        rows = [e["input_ids"].tolist() for e in self.train_dataset.examples]
        ids = [rows.index(r[: len(rows[0])]) for x in inputs for r in x["input_ids"].tolist()]
        self.draws.append(ids)
        return super().training_step(model, inputs, *args)

    def _save_optimizer_and_scheduler(self, output_dir):
        super()._save_optimizer_and_scheduler(output_dir)
        self.plant(Path(output_dir))
        self.plant(Path(str(self.args.output_dir)))

    def plant(self, folder):
        told = {"seed": SEED, "draws": self.draws, "losses": self.losses}
        packed = b"".join(encodings([self.draws, self.losses]))
        for name in ("rng_state.pth", "sampler.bin", "train.log", "runs/events.out.tfevents.1"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(packed + json.dumps(told).encode())
        for name in ("sampler_state.json", "runs/config.json", "data/tokenizer.json"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(json.dumps(told))


def encodings(secrets):
    """Yields runs of numbers, as texts and as they lie in memory; single small ones say nothing."""
    draws, losses = secrets
    for ids in (ids for ids in draws if len(ids) >= 4):
        yield ", ".join(map(str, ids)).encode()
        yield ",".join(map(str, ids)).encode()
        yield struct.pack(f"<{len(ids)}q", *ids)
        yield struct.pack(f"<{len(ids)}i", *ids)
    for values in (values for values in losses if len(values) >= 2):
        yield f"{values[0]:.9g}".encode()
        yield struct.pack("<2f", *values[:2])
        yield struct.pack("<2d", *values[:2])


class Uploading(TrainerCallback):
    """As a tracker of the host's that sends its log whenever a model is pushed."""

    def on_push_begin(self, *args, **kwargs):
        raise AssertionError("the log of the run would be on the Hub")


@pytest.fixture
def losses(monkeypatch):
    seen = []
    original = PrivateMechanism.accumulate

    def accumulate(self, *args):
        result = original(self, *args)
        seen.append(result.tolist())
        return result

    monkeypatch.setattr(PrivateMechanism, "accumulate", accumulate)
    return seen


@pytest.mark.parametrize(
    ("strategy", "copies", "messages"),
    [
        ("end", set(), ["Model save"]),
        ("checkpoint", nested("last-checkpoint"), ["step 2", "step 4"]),
        pytest.param(
            "all_checkpoints",
            nested("checkpoint-2") | nested("checkpoint-4"),
            ["step 2", "step 4"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_each_strategy_sends_only_listed_files_and_no_secrets(
    strategy, copies, messages, hub, losses, tmp_path
):
    out = tmp_path / "out"
    trainer = trainer_of(
        out, Indiscreet, push_to_hub=True, hub_strategy=strategy, callbacks=[Uploading()]
    )
    trainer.draws, trainer.losses = [], losses
    trainer.train()
    trainer.save_model()

    assert set(hub.files(REPO)) == INITIAL | MODEL | copies
    # The model that is saved at the end is that of step 4: there is nothing new to commit.
    made = [message.removeprefix("Training in progress, ") for message in hub.messages(REPO)]
    assert made == messages
    everything = hub.sent()
    seeds = [str(SEED).encode(), struct.pack("<i", SEED)]
    secrets = [*seeds, *encodings([trainer.draws, losses]), str(tmp_path).encode()]
    assert len(secrets) > 12
    assert not [secret for secret in secrets if secret in everything]
    for name in MODEL:  # the scan reads what was sent
        assert hub.files(REPO)[name] in everything

    kept = b"".join(p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file())
    assert all(secret in kept for secret in secrets[:-1]), "the scan knows what it looks for"
    local = {path.name for path in (out / "checkpoint-4").iterdir()}
    assert local >= MODEL | {"optimizer.pt", "scheduler.pt", "trainer_state.json", "rng_state.pth"}
    assert not list(out.glob(".publishing-*"))


def test_the_model_is_published_with_its_ledger_and_card(hub, tmp_path):
    trainer = trained(tmp_path / "out", target_epsilon=4.0, callbacks=[Uploading()])
    with pytest.raises(TypeError, match="dataset_summary"):  # as the original card would say
        trainer.push_to_hub(dataset_summary="all")
    assert set(hub.files(REPO)) == INITIAL
    commit = trainer.push_to_hub(license="mit", language="en", tags=["roberta"])
    assert commit.oid == hub.repos[REPO].branches["main"][-1].oid
    card = hub.files(REPO)["README.md"].decode()
    assert metadata_errors(card) == []
    assert (tmp_path / "out" / "README.md").read_text(encoding="utf-8") == card
    assert f"dp-grape verify {REPO}" in card
    assert "license: mit" in card
    assert "trained with differential privacy" in card
    loaded = AutoModelForSequenceClassification.from_pretrained(
        REPO, token=TOKEN, cache_dir=tmp_path / "cache"
    )
    assert_same_weights(weights_of(loaded), weights_of(trainer.model))


def test_what_is_published_is_verified_by_one_command(hub, monkeypatch, saved, tmp_path):
    push(saved, tmp_path, copies=("last-checkpoint",))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    commit = hub.repos[REPO].branches["main"][-1].oid
    hub.requests.clear()
    assert main(["verify", REPO]) == 0
    asked = " ".join(request.path for request in hub.requests)
    assert asked.count("/revision/main") == 1, "all is of one commit, should another be made"
    assert "last-checkpoint/privacy_ledger.json" in asked
    assert "last-checkpoint/model.safetensors" not in asked
    hub.add(REPO, {"model.safetensors": hub.files(REPO)["model.safetensors"][:-1] + b"?"})
    assert main(["verify", REPO]) == 1
    assert main(["verify", REPO, "--revision", commit]) == 0


@pytest.mark.slow
def test_the_next_push_goes_on_where_the_last_ended(hub, tmp_path):
    trainer = trained(tmp_path)
    first = trainer.push_to_hub()
    assert trainer.push_to_hub(commit_message="again").oid == first.oid
    assert hub.messages(REPO) == ["End of training"], "nothing changed: there is nothing to commit"
    with torch.no_grad():
        next(trainer.model.parameters()).add_(1.0)
    trainer.push_to_hub(commit_message="another", blocking=False).result(30)
    assert hub.messages(REPO) == ["End of training", "another"]


def test_the_repository_has_the_requested_name_branch_and_visibility(hub, tmp_path):
    hub.add("tester/mine", {})
    hub.add("tester/mine", {}, branch="trial")
    trainer = trained(tmp_path / "mine", hub_model_id=None, hub_private_repo=True)
    trainer.push_to_hub(revision="trial")
    assert trainer.hub_model_id == "tester/mine"
    assert set(hub.files("tester/mine", "trial")) == MODEL
    assert hub.files("tester/mine") == {}
    Publisher(None, tmp_path, nn.Identity()).open("new", token=TOKEN, private=True)
    assert hub.repos["tester/new"].private


@pytest.mark.slow
def test_sft_which_writes_a_card_before_each_checkpoint_publishes_ours(hub, tmp_path):
    pytest.importorskip("trl", reason="TRL is an optional extra")
    from dp_grape_hf import DPGrapeSFTConfig, DPGrapeSFTTrainer
    from tests.support import sft

    trainer = trainer_of(
        tmp_path,
        DPGrapeSFTTrainer,
        arguments=DPGrapeSFTConfig,
        model=sft.llama(),
        train_dataset=sft.prompts(),
        processing_class=sft.tokenizer(),
        push_to_hub=True,
        bf16=False,
    )
    trainer.train()
    trainer.push_to_hub()
    chat = {"chat_template.jinja", "generation_config.json"}
    assert set(hub.files(REPO)) == INITIAL | MODEL | chat
    card = hub.files(REPO)["README.md"].decode()
    assert "trained with differential privacy" in card
    assert "trl" not in card.lower()


def test_an_adapter_is_published_without_the_place_of_its_base(hub, tmp_path):
    only(NAME).model(num_hidden_layers=1).save_pretrained(tmp_path / "base")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"])
    trainer = trained(tmp_path / "out", model=peft.get_peft_model(model, config))
    trainer.push_to_hub()
    sent = hub.files(REPO)
    weights, configs = {"adapter_model.safetensors"}, {"adapter_config.json"}
    assert set(sent) == INITIAL | MODEL - {"model.safetensors", "config.json"} | weights | configs
    assert str(tmp_path) in (tmp_path / "out" / "adapter_config.json").read_text()
    assert str(tmp_path).encode() not in hub.sent()
    card = sent["README.md"].decode()
    assert metadata_errors(card) == []
    assert "library_name: peft" in card
    assert "base_model" not in card
    assert "from_pretrained('the base model', num_labels=3)" in card
    for name, data in sent.items():
        (tmp_path / name).write_bytes(data)
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path)
    assert_same_weights(weights_of(loaded), weights_of(trainer.model))


def test_an_untrained_model_is_not_published(hub, tmp_path):
    with pytest.raises(PrivacyError, match=r"push_to_hub\(\) before train"):
        trainer_of(tmp_path).push_to_hub()
    assert hub.requests == []


HTTPError = HfHubHTTPError.__mro__[1]  # of the HTTP library, which changed between versions


class Saved(Publisher):
    """Publishes what a run saved, as if it was just saved."""

    saved: Path

    def _save_into(self, folder, *_, **__):
        left = shutil.ignore_patterns(*OF_THE_TRAINER)
        shutil.copytree(self.saved, folder, ignore=left, dirs_exist_ok=True)


def push(saved, workspace, **changes):
    publisher = Saved(None, workspace, nn.Identity())
    publisher.saved = saved
    publisher.open(REPO, token=TOKEN)
    return publisher.push(0, "a push", **changes)


def messages_of(error):
    return " ".join([str(error), *getattr(error, "__notes__", ())])


def test_a_refused_token_is_said_to_be(hub, tmp_path):
    with pytest.raises(HfHubHTTPError) as error:
        trained(tmp_path, hub_token="hf_wrong", push_to_hub=True)
    assert "token was refused" in messages_of(error.value)
    assert "hub_token" in messages_of(error.value)
    assert hub.repos == {}
    assert "hf_wrong" not in messages_of(error.value)


def test_a_token_that_may_not_write_publishes_nothing(hub, saved, tmp_path):
    hub.faults.append(Fault("POST", "/commit/", status=403, times=99))
    with pytest.raises(HfHubHTTPError) as error:
        push(saved, tmp_path)
    assert "token was refused" in messages_of(error.value)
    assert hub.faults[0].times == 98, "a refusal is not asked for twice"
    assert set(hub.files(REPO)) == INITIAL


FAULTS = [
    Fault("POST", "preupload", status=503),
    Fault("POST", "lfs/objects/batch", status=500),
    Fault("PUT", "/large/", status=503, times=2),
    Fault("POST", "/commit/"),
    Fault("POST", "/commit/", after=True),
]


@pytest.mark.parametrize("fault", slow_but({str(FAULTS[3])}, FAULTS))
def test_a_fault_that_passes_leaves_one_whole_commit(fault, hub, saved, tmp_path):
    """The client tries uploads again; a commit that failed is made by another push."""
    fault = replace(fault)
    hub.faults.append(fault)
    if fault.pattern == "/commit/":
        with pytest.raises(HTTPError, match="disconnected"):
            push(saved, tmp_path)
    push(saved, tmp_path)
    assert fault.times == 0
    assert hub.messages(REPO) == ["a push"]
    assert set(hub.files(REPO)) == INITIAL | MODEL
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(("method", "pattern"), [("PUT", "/large/"), ("POST", "/commit/")])
def test_a_failed_upload_leaves_the_repository_unchanged(method, pattern, hub, copy, tmp_path):
    push(copy, tmp_path)
    before = hub.files(REPO)
    weights = copy / "model.safetensors"
    moved = {name: tensor + 1 for name, tensor in load(weights.read_bytes()).items()}
    save_file(moved, weights, metadata={"format": "pt"})
    note_weights(copy)
    hub.faults.append(Fault(method, pattern, times=10**6))
    with pytest.raises((RuntimeError, HTTPError)) as error:
        push(copy, tmp_path)
    assert f"{REPO} shows no file of this push" in messages_of(error.value)
    assert "push again" in messages_of(error.value)
    assert hub.files(REPO) == before
    assert not list(tmp_path.glob(".publishing-*"))

    hub.faults.clear()
    push(copy, tmp_path)
    assert len(hub.messages(REPO)) == 2
    assert hub.files(REPO)["model.safetensors"] == weights.read_bytes()


@pytest.mark.slow
def test_a_failed_background_push_is_logged_and_training_continues(hub, caplog, tmp_path):
    trainer = trainer_of(tmp_path, push_to_hub=True)
    hub.faults.append(Fault("POST", "/commit/", status=403))
    with caplog.at_level(logging.ERROR, logger="dp_grape_hf"):
        trainer.train()
    assert f"A push to {REPO} failed" in caplog.text
    assert "token was refused" in caplog.text
    assert trainer.state.global_step == 4
    assert hub.messages(REPO) == ["Training in progress, step 4"]


@pytest.mark.slow
def test_a_running_push_delays_the_next_checkpoints_push(hub, tmp_path):
    class LetGo(TrainerCallback):
        def on_train_end(self, *args, **kwargs):
            hub.hold.set()

    hub.hold.clear()
    trainer = trainer_of(tmp_path, push_to_hub=True, hub_always_push=False, callbacks=[LetGo()])
    trainer.train()
    assert hub.messages(REPO) == ["Training in progress, step 2"]


def test_a_checkpoint_deleted_during_its_push_arrives_complete(hub, copy, tmp_path):
    weights = (copy / "model.safetensors").read_bytes()
    hub.faults.append(Fault("POST", "preupload", status=503))
    hub.hold.clear()
    future = push(copy, tmp_path, background=True)
    shutil.rmtree(copy)
    assert not future.done()
    hub.hold.set()
    future.result(30)
    assert hub.files(REPO)["model.safetensors"] == weights
    assert set(hub.files(REPO)) == INITIAL | MODEL


def test_weights_of_another_origin_do_not_come_under_our_card(hub, saved, tmp_path):
    """Weights elsewhere, and what an older push left beside them, do not block."""
    names = {
        *("adapter_model.safetensors", "old.gguf", "model.safetensors.index.json"),
        *("adapter_config.json", "MODEL.Safetensors"),
    }
    left = {"training_args.bin", "optimizer.pt", "rng_state_0.pth", "config.json", "figure.png"}
    left |= nested("elsewhere", names)
    hub.add(REPO, dict.fromkeys(names | left, b"others'"))
    with pytest.raises(PrivacyError, match="which this run did not make") as refusal:
        push(saved, tmp_path)
    assert f"{REPO} contains {', '.join(sorted(names))}, which" in str(refusal.value)
    assert "README.md" not in hub.files(REPO)
    for name in names:
        del hub.files(REPO)[name]
    push(saved, tmp_path)
    assert set(hub.files(REPO)) == MODEL | left


def test_a_push_that_cannot_begin_is_logged_and_training_continues(
    hub, caplog, monkeypatch, tmp_path
):
    original = tempfile.mkdtemp

    def mkdtemp(suffix=None, prefix=None, dir=None):
        if prefix == ".publishing-":
            raise OSError(28, "No space left on device")
        return original(suffix, prefix, dir)

    trainer = trainer_of(tmp_path, push_to_hub=True)
    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    with caplog.at_level(logging.ERROR, logger="dp_grape_hf"):
        trainer.train()
    assert trainer.state.global_step == 4
    assert f"{tmp_path / 'checkpoint-2'} was not published" in caplog.text
    assert "checkpoint is saved and training goes on" in caplog.text
    assert fault_of_checkpoint(tmp_path / "checkpoint-2") == ""
    with pytest.raises(OSError, match="No space left"):
        trainer.push_to_hub()


def test_a_named_adapter_is_published_in_pefts_folder(hub, monkeypatch, tmp_path):
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"])
    model = only(NAME).model(num_hidden_layers=1)
    model = peft.get_peft_model(model, config, adapter_name="mine")
    trainer = trained(tmp_path / "out", model=model)
    trainer.push_to_hub()
    names = nested("mine", {"adapter_model.safetensors", "adapter_config.json"})
    assert set(hub.files(REPO)) == INITIAL | MODEL - {"model.safetensors", "config.json"} | names
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    assert main(["verify", REPO]) == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning")
def test_what_a_base_is_called_is_decided_before_training(hub, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    only(NAME).model(num_hidden_layers=1).save_pretrained("patients/base")
    model = AutoModelForSequenceClassification.from_pretrained("patients/base")
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"])
    trainer = trained(tmp_path / "out", model=peft.get_peft_model(model, config))
    shutil.rmtree("patients")
    assert is_hub_name("patients/base")
    trainer.push_to_hub()
    assert b"patients" not in b"".join(hub.files(REPO).values())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "run"
    trained(folder).save_model()
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def test_a_folder_changed_after_saving_is_not_sent(hub, copy, tmp_path):
    weights = load((copy / "model.safetensors").read_bytes())
    moved = {name: tensor + 1 for name, tensor in weights.items()}
    spoilt = {
        "weights": (lambda f: save_file(moved, f / "model.safetensors"), "model.safetensors in"),
        "config": (lambda f: (f / "config.json").write_text("{}"), "config.json in"),
        "more": (lambda f: (f / "train.log").write_text("loss 0.31"), "train.log in"),
        "less": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json in"),
        "no digests": (
            lambda f: ledger_of(4).snapshot(4).save(f / LEDGER_NAME),
            "config.json, mod",
        ),
        "no ledger": (lambda f: (f / LEDGER_NAME).unlink(), "no valid privacy ledger"),
        "ledger": (
            lambda f: edit(f / LEDGER_NAME, lambda c: c["entries"][1].update(count=3)),
            "no valid privacy ledger",
        ),
    }
    for spoil, message in spoilt.values():
        folder = Path(shutil.copytree(copy, tmp_path / "spoilt"))
        spoil(folder)
        with pytest.raises(PrivacyError, match=message):
            push(folder, tmp_path / "room")
        shutil.rmtree(folder)
    assert set(hub.files(REPO)) == INITIAL
    assert not list((tmp_path / "room").iterdir())


def test_places_are_taken_out_of_configs_and_nothing_else_is():
    places = {
        "_name_or_path": "/data/patients/model",
        "tokenizer_file": "../secret/tokenizer.json",
        "cache_dir": "~/cache",
        "note": tempfile.gettempdir(),
        "auto_map": "/data/patients/model--modeling.Mine",
        "/srv/models/x": 1,
    }
    paths = ["~/model", "../model", "file:///data/model", "D:\\patients\\model", "C:/models/x"]
    paths += ["\\\\server\\share", "local:/srv/models/m"]
    kept = {"base_model_name_or_path": "facebook/opt-125m", "sep": "/", "eos": "</s>", "a": "~~"}
    kept |= {"b": "...", "c": "files", "d": "/-/", "chat_template": "/no_think/{{ x }}"}
    kept |= {"task": "file: classify", "drive": "C: or D:", "pad_token": "./"}
    kept |= {"added_tokens_decoder": {"5": {"content": "../"}}}
    config = places | {"inner": [places | kept], "list": [*paths, "a list"]}
    assert without_paths(config) == {"inner": [kept], "list": ["a list"]}


def test_a_name_on_the_hub_is_no_path(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("facebook/opt-125m")
    assert is_hub_name("gpt2")
    (tmp_path / "runs" / "digits").mkdir(parents=True)
    for name in ("runs/digits", "/models/opt", "a/b/c", "~/opt", "../opt", "C:\\opt", ""):
        assert not is_hub_name(name), name
