"""Results that later runs reuse: of what a file is a function, and what never gets into one."""

import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from torch import nn

from dp_grape_hf.ledger import remember
from dp_grape_hf.projections import SyntheticInputs
from dp_grape_hf.trainer import chosen, remembered, run
from dp_grape_hf.trainer.remembered import remembering, reused_or_made
from tests.support.choosing import model_of, saving_trainer_of, trainer_of
from tests.support.ledgers import ledger_of


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "dp_grape_hf"


@pytest.fixture
def measured(monkeypatch):
    calls = []

    def counted(owner, name):
        original = getattr(owner, name)

        def count(*args, **kwargs):
            calls.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, count)

    counted(run, "principal_directions")
    counted(chosen, "measure")
    return calls


BOTH = ["principal_directions", "measure"]
SLOW = pytest.mark.slow


def begun(folder, model=None, **changes):
    trainer = trainer_of(folder, model or model_of("pretrained"), **changes)
    trainer.start()
    return trainer


def files(folder):
    return {*folder.iterdir()} if folder.exists() else set()


def matrices(trainer):
    return {name: p.matrix for name, p in trainer.private_run.projectors_at(0).items()}


def test_a_second_run_reuses_the_measured_p_and_rates(tmp_path, folder, measured):
    one = begun(tmp_path / "one")
    assert measured == BOTH
    assert len(files(folder)) == 2
    other = begun(tmp_path / "other")
    assert measured == BOTH
    assert one.rates == other.rates
    assert all(torch.equal(p, matrices(other)[name]) for name, p in matrices(one).items())
    shared = [len({id(p) for p in matrices(trainer).values()}) for trainer in (one, other)]
    assert shared[0] == shared[1] < len(matrices(one))


def test_p_and_rates_do_not_depend_on_a_heads_weights(tmp_path, folder, measured, monkeypatch):
    one = begun(tmp_path / "one")
    model = model_of("pretrained")
    nn.init.normal_(model.classifier.weight)
    other = begun(tmp_path / "other", model)
    assert measured == BOTH
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "another home"))
    nn.init.normal_(model.classifier.weight)
    anew = begun(tmp_path / "anew", model)
    assert measured == 2 * BOTH
    assert one.rates == other.rates == anew.rates
    assert all(torch.equal(p, matrices(anew)[name]) for name, p in matrices(one).items())


def _changes_weights(model, changes):
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[7, 0] += 1e-3


def _layer(model):
    return model.bert.encoder.layer[0]


# Another buffer, attribute of a module, code (a hook is no part of a configuration), precision, and
# selection of parameters.
OTHER_MODELS = {
    "buffer": lambda model: model.register_buffer("more", torch.zeros(1)),
    "attribute": lambda model: setattr(_layer(model).attention.self, "scaling", 0.7),
    "code": lambda model: _layer(model).output.register_forward_hook(lambda m, x, out: out * 1.5),
    "precision": lambda model: model.bfloat16(),
    "trained": lambda model: _layer(model).output.dense.weight.requires_grad_(False),
}


def _option(**more):
    return lambda model, changes: changes.update(more)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    home = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HOME", str(home))
        begun(home / "run")
    return home / "dp_grape_hf"


@pytest.mark.parametrize(
    ("change", "anew"),
    [
        pytest.param(_changes_weights, BOTH, id="weight"),
        *(
            pytest.param(lambda model, _, change=change: change(model), BOTH, id=name, marks=SLOW)
            for name, change in OTHER_MODELS.items()
        ),
        pytest.param(_option(projection_seed=1), BOTH, id="seed", marks=SLOW),
        pytest.param(_option(projection_rank=2), BOTH, id="rank"),
        pytest.param(_option(eps=4.0), BOTH[1:], id="epsilon"),
        pytest.param(_option(num_train_epochs=3), BOTH[1:], id="steps", marks=SLOW),
        pytest.param(_option(num_samples=70), BOTH[1:], id="N", marks=SLOW),
        pytest.param(_option(warmup_steps=2), BOTH[1:], id="schedule", marks=SLOW),
        pytest.param(_option(learning_rate_factors={"classifier": 2.0}), BOTH[1:], id="factors"),
        pytest.param(_option(), [], id="nothing"),
    ],
)
def test_a_run_that_differs_measures_what_depends_on_it(
    change, anew, kept, folder, tmp_path, measured
):
    shutil.copytree(kept, folder)
    model, changes = model_of("pretrained"), {}
    change(model, changes)
    begun(tmp_path / "other", model, **changes)
    assert measured == anew


def test_another_version_of_the_package_measures_anew(
    kept, folder, tmp_path, measured, monkeypatch
):
    shutil.copytree(kept, folder)
    monkeypatch.setattr(remembered, "_surroundings", lambda: ("other code",))
    begun(tmp_path / "other")
    assert measured == BOTH


def test_what_was_measured_on_a_public_dataset_is_not_kept(tmp_path, folder, measured):
    public = [
        {"attention_mask": torch.ones(8), "input_ids": torch.arange(n, n + 8)} for n in (5, 9)
    ]
    for name in ("one", "other"):
        trainer = trainer_of(tmp_path / name, model_of("pretrained"))
        trainer._public_dataset = public
        trainer._make_ready()
    assert measured == 2 * BOTH
    assert not files(folder)


def test_of_weights_that_were_trained_nothing_is_kept(folder):
    model = model_of("pretrained")
    ledger = ledger_of(1)
    for trained, kept in ((False, 1), (True, 1)):
        if trained:
            remember(model, ledger)
            with torch.no_grad():
                model.classifier.weight += 1
        with remembering(model, SyntheticInputs(model)):
            reused_or_made("number", {}, lambda: 1)
        assert len(files(folder)) == kept


def test_outside_of_the_start_of_a_run_nothing_is_kept(folder):
    assert reused_or_made("number", {}, lambda: 1) == 1
    assert not files(folder)


def test_a_resumed_run_neither_measures_nor_looks_up(tmp_path, folder, measured):
    saving_trainer_of(tmp_path, model_of("pretrained"), stop_at=3).train()
    assert measured == BOTH
    for path in files(folder):
        path.unlink()
    resumed = saving_trainer_of(tmp_path, model_of("pretrained"), stop_at=4)
    resumed.train(resume_from_checkpoint=True)
    assert measured == BOTH
    assert not files(folder)


@pytest.fixture
def start():
    model = model_of("pretrained")
    with remembering(model, SyntheticInputs(model)):
        yield model


def _never():
    raise AssertionError("it is kept, and was computed again")


def _torn(content):
    return content[: len(content) // 2]


@pytest.mark.parametrize("damage", [_torn, lambda _: b"", lambda _: b"\x80\x05 junk"])
@pytest.mark.usefixtures("start")
def test_a_damaged_file_is_ignored_and_written_anew(damage, folder):
    numbers = {"a": torch.arange(6.0).reshape(2, 3)}
    reused_or_made("numbers", {}, lambda: numbers)
    (path,) = files(folder)
    path.write_bytes(damage(path.read_bytes()))
    assert torch.equal(reused_or_made("numbers", {}, lambda: numbers)["a"], numbers["a"])
    assert torch.equal(reused_or_made("numbers", {}, _never)["a"], numbers["a"])


@pytest.mark.usefixtures("start")
def test_a_file_holds_values_exactly():
    value = {"a": [0.1, float("inf"), None], "b": 1e-300}
    assert reused_or_made("value", {}, lambda: value) == value
    assert reused_or_made("value", {}, _never) == value


@pytest.mark.usefixtures("start")
def test_a_folder_that_cannot_be_written_is_no_error(folder, monkeypatch):
    def full(self, target):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        assert reused_or_made("number", {}, lambda: 1) == 1
    assert not files(folder)
    folder.rmdir()
    folder.write_text("a file in its place")
    assert reused_or_made("number", {}, lambda: 2) == 2


def test_processes_that_write_the_same_file_do_not_meet(folder):
    """Here they are threads, which share the folder just as well."""
    together, expected = threading.Barrier(4), torch.randn(64, 64)

    def make():
        together.wait(30)
        return expected.clone()

    def begin(model):
        with remembering(model, SyntheticInputs(model)):
            return [reused_or_made("numbers", {}, how) for how in (make, _never)]

    models = [model_of("pretrained") for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = [tensor for both in pool.map(begin, models) for tensor in both]
    assert all(torch.equal(own, expected) for own in found)
    assert len(files(folder)) == 1


@pytest.mark.usefixtures("start")
def test_what_was_used_longest_ago_goes_first(folder, monkeypatch):
    monkeypatch.setattr(remembered, "_MOST_BYTES", 12_000)
    for n in (1, 2, 1, 3):  # 1 is used again
        reused_or_made("numbers", {"n": n}, lambda n=n: torch.full((1000,), float(n)))
        time.sleep(0.02)  # file systems tell times apart that lie further apart than some ms
    assert len(files(folder)) == 2
    for n in (1, 3):
        reused_or_made("numbers", {"n": n}, _never)
    with pytest.raises(AssertionError, match="computed again"):
        reused_or_made("numbers", {"n": 2}, _never)
