"""What goes wrong around a run: the budget is never under-counted, and no whole checkpoint is lost.

Processes that are killed are in ``test_resume``, edited ledgers in ``test_ledger``.
"""

import errno
import os
import shutil
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import TrainerCallback

from dp_grape_hf import PrivacyError
from dp_grape_hf.ledger import LEDGER_NAME, Ledger
from dp_grape_hf.publishing import publisher as publisher_module
from dp_grape_hf.trainer.checkpoints import (
    fault_of_checkpoint,
    last_whole_checkpoint,
    require_whole_checkpoint,
)
from tests.support.ledgers import note_weights
from tests.support.marks import slow_but
from tests.support.trainers import FEATURES, Examples, Watch, make_trainer, points, trained_in

SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 8}
RESUMED = SAVING | {"save_strategy": "no"}


class At(TrainerCallback):
    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step - 1:
            self.action()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run of four steps and its checkpoints after two and four; copy it before use."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    make_trainer(folder, callbacks=[Watch(stop_at=4)], **SAVING).train()
    return folder


@pytest.fixture
def run(stopped, tmp_path):
    shutil.copytree(stopped, tmp_path / "run")
    return tmp_path / "run"


def _empty(path):
    path.write_bytes(b"")


def _halve(path):
    os.truncate(path, path.stat().st_size // 2)


def _zero(path):
    path.write_bytes(bytes(path.stat().st_size))


def _make_a_folder(path):
    path.unlink()
    path.mkdir()


NEEDED = ("model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *((name, _halve) for name in NEEDED),
        *((NEEDED[0], damage) for damage in (_empty, _zero, _make_a_folder)),
    ],
)
def test_a_damaged_file_is_recognised(name, damage, run, caplog):
    assert fault_of_checkpoint(run / "checkpoint-4") == ""
    assert last_whole_checkpoint(str(run)) == str(run / "checkpoint-4")
    damage(run / "checkpoint-4" / name)
    assert name in fault_of_checkpoint(run / "checkpoint-4")
    assert last_whole_checkpoint(str(run)) == str(run / "checkpoint-2")
    assert f"{run / 'checkpoint-4'} is not complete and is skipped: {name}" in caplog.text
    require_whole_checkpoint(run / "checkpoint-2")
    with pytest.raises(
        PrivacyError, match=rf"checkpoint-4' is not complete: {name}.*pass True \(not"
    ):
        require_whole_checkpoint(run / "checkpoint-4")


@pytest.mark.parametrize("damage", [_halve, Path.unlink])
def test_without_the_ledger_of_a_checkpoint_nothing_is_released(damage, run, releases):
    """An older checkpoint would do, but whoever deletes the newest ledger should not choose it."""
    damage(run / "checkpoint-4" / LEDGER_NAME)
    with pytest.raises(PrivacyError, match=r"no valid privacy ledger.*Restore"):
        make_trainer(run, **RESUMED).train(resume_from_checkpoint=True)
    assert releases == []
    assert Ledger.load(run / LEDGER_NAME).steps == 4


def test_a_run_without_a_whole_checkpoint_says_so(run):
    for step in (2, 4):
        _halve(run / f"checkpoint-{step}" / "optimizer.pt")
    with pytest.raises(PrivacyError, match=r"No checkpoint in .*checkpoint-2: optimizer\.pt") as e:
        make_trainer(run, **RESUMED).train(resume_from_checkpoint=True)
    assert "Restore one from a copy" in str(e.value)
    assert Ledger.load(run / LEDGER_NAME).steps == 4
    assert last_whole_checkpoint(str(run / "nothing")) is None


OTHERS = {
    "training_args.bin": _empty,
    "README.md": _empty,
    "notes.json": lambda path: path.write_text("my notes"),
    "metrics.json": _empty,
    "samples.bin": lambda path: path.write_bytes(bytes(100)),
    "old.pt": _empty,
    "link.json": lambda path: path.symlink_to("nowhere"),
    ".ipynb_checkpoints/config.json": lambda path: path.write_text("{"),
}


def test_files_of_others_do_not_make_a_checkpoint_unusable(run):
    for name, write in OTHERS.items():
        path = run / "checkpoint-4" / name
        path.parent.mkdir(exist_ok=True)
        write(path)
        assert fault_of_checkpoint(run / "checkpoint-4") == "", name


def test_every_file_that_was_saved_is_compared(run):
    folder = run / "checkpoint-4"
    (folder / "mine").mkdir()
    (folder / "mine" / "adapter_model.safetensors").write_bytes(b"1")
    note_weights(folder)
    assert fault_of_checkpoint(folder) == ""
    (folder / "mine" / "adapter_model.safetensors").write_bytes(b"2")
    assert "adapter_model.safetensors has another digest" in fault_of_checkpoint(folder)
    (folder / "mine" / "adapter_model.safetensors").unlink()
    assert "adapter_model.safetensors is damaged" in fault_of_checkpoint(folder)


needs_dev_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


def _fill(path):
    """Makes every write to a file fail as on a full disk, with an error of the kernel's."""
    path.parent.mkdir(exist_ok=True)
    path.symlink_to("/dev/full")


REPLACE, SAVE_FILE = os.replace, safetensors.torch.save_file


def _save_half(state, path, *args, **kwargs):
    SAVE_FILE(state, path, *args, **kwargs)
    _halve(Path(path))
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _replace_all_but_the_ledger(source, target):
    if Path(target) == Path(target).parent.parent / "checkpoint-4" / LEDGER_NAME:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    REPLACE(source, target)


@needs_dev_full
@pytest.mark.parametrize(
    "name", slow_but(("optimizer.pt",), [LEDGER_NAME, "model.safetensors", "optimizer.pt"])
)
def test_a_full_disk_leaves_the_earlier_checkpoint_and_count_intact(
    name, tmp_path, monkeypatch, releases
):
    path = tmp_path / "checkpoint-4" / name

    def fill():
        if name == "model.safetensors":  # written elsewhere first
            monkeypatch.setattr(publisher_module, "save_file", _save_half)
        elif name == LEDGER_NAME:
            monkeypatch.setattr(os, "replace", _replace_all_but_the_ledger)
        else:
            _fill(path)

    trainer = make_trainer(tmp_path, callbacks=[At(4, fill)], **SAVING)
    with pytest.raises((OSError, RuntimeError, PrivacyError)) as failure:
        trainer.train()
    assert "Free some space" in failure.value.__notes__[0]
    assert len(releases) == 4 == Ledger.load(tmp_path / LEDGER_NAME).steps
    assert fault_of_checkpoint(tmp_path / "checkpoint-2") == ""
    monkeypatch.setattr(publisher_module, "save_file", SAVE_FILE)
    monkeypatch.setattr(os, "replace", REPLACE)
    if path.is_symlink():  # space again, and what was written of the file
        path.unlink()
        path.write_bytes(b"")
    resumed = make_trainer(tmp_path, **RESUMED)
    if name in NEEDED or not (tmp_path / "checkpoint-4" / "trainer_state.json").exists():
        assert last_whole_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-2")
    resumed.train(resume_from_checkpoint=True)
    made_since = 8 - (4 if last_whole_checkpoint(str(tmp_path)).endswith("4") else 2)
    assert resumed.ledger.steps == 4 + made_since == len(releases)


def test_the_last_checkpoint_is_chosen_by_step_not_by_time(run):
    tomorrow = time.time() + 86_400
    os.utime(run / "checkpoint-2", (tomorrow, tomorrow))
    assert last_whole_checkpoint(str(run)) == str(run / "checkpoint-4")


def test_examples_without_gradients_are_not_used_for_checks(tmp_path):
    """Nor do they move the weights: ``test_release``."""
    nowhere = [{**e, "x": torch.full((FEATURES,), float("inf"))} for e in points(24).examples]
    nowhere[0] = points(24).examples[0]
    trainer = trained_in(tmp_path, train_dataset=Examples(nowhere))
    assert all(weight.isfinite().all() for weight in trainer.model.parameters())
    assert trainer.ledger.steps == 4
