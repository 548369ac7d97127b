import os
import shutil

import pytest
import torch
from transformers import TrainerState

from dp_grape_hf import PrivacyError, ProjectedOptimizer
from dp_grape_hf.accounting import find_noise_multiplier
from dp_grape_hf.arguments import plan
from dp_grape_hf.ledger import LEDGER_NAME, Ledger
from dp_grape_hf.mechanism import PrivateMechanism
from tests.support.faults import die, ending, run_until_killed
from tests.support.trainers import (
    RecordingTrainer,
    Watch,
    make_trainer,
    no_loss,
    points,
    trained_in,
)

SAVING = {"save_strategy": "steps", "save_steps": 3, "max_steps": 8}


def _stop_and_resume(folder, stop_at=3, **settings):
    """Returns the trainer that stopped after its checkpoint and the one that resumed from it."""
    stopped = trained_in(folder, callbacks=[Watch(stop_at=stop_at)], **SAVING | settings)
    resumed = make_trainer(folder, callbacks=[Watch()], **SAVING | settings)
    resumed.train(resume_from_checkpoint=True)
    return stopped, resumed


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    make_trainer(folder, callbacks=[Watch(stop_at=3)], **SAVING).train()
    return folder


@pytest.fixture
def folder(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.slow
def test_stopping_in_the_middle_of_an_epoch_keeps_its_length(tmp_path):
    """The draws that the host skips to get there are never used."""
    settings = SAVING | {"max_steps": -1, "num_train_epochs": 3, "cls": RecordingTrainer}
    stopped, resumed = _stop_and_resume(tmp_path, stop_at=9, **settings)
    assert len(stopped.draws) == 9
    assert len(resumed.draws) == 9
    assert resumed.state.global_step == resumed.ledger.steps == 18
    assert resumed.state.epoch == 3.0


def test_resuming_repeats_neither_noise_nor_coins(releases, tmp_path):
    settings = SAVING | {
        "compute_loss_func": no_loss,
        "cls": RecordingTrainer,
        "train_dataset": points(200),
        "per_device_train_batch_size": 100,
    }
    first = trained_in(tmp_path, callbacks=[Watch(stop_at=5)], **settings)
    for _ in range(2):  # twice from the same checkpoint, after step 3
        again = make_trainer(tmp_path, callbacks=[Watch(stop_at=5)], **settings)
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
        first.draws += again.draws
    assert len(releases) == len(first.draws) == 9
    for name in releases[0]:
        noise = torch.stack([release[name].flatten() for release in releases])
        assert len(noise.flatten().unique()) == noise.numel()
    assert len({tuple(draw) for draw in first.draws}) == 9
    assert again.ledger.steps == 9  # every release counts, lost or not
    assert again.state.global_step == 5


@pytest.mark.slow
def test_a_checkpoint_without_optimizer_state_keeps_the_account(tmp_path):
    _, resumed = _stop_and_resume(tmp_path, save_only_model=True)
    assert resumed.ledger.steps == resumed.state.global_step == 8


def test_a_spent_budget_leaves_nothing_to_release(releases, tmp_path):
    """Neither after the last checkpoint, nor after one that was made five releases before."""
    make_trainer(tmp_path, target_epsilon=4.0, **SAVING).train()
    releases.clear()
    finished = make_trainer(tmp_path, target_epsilon=4.0, **SAVING)
    finished.train(resume_from_checkpoint=True)
    assert finished.ledger.steps == finished.state.global_step == 8
    for path in tmp_path.glob("checkpoint-*"):
        if path.name != "checkpoint-3":
            shutil.rmtree(path)
    resumed = make_trainer(tmp_path, target_epsilon=4.0, **SAVING)
    with pytest.raises(PrivacyError, match=r"budget is spent: 8 releases of 8.* contains 3"):
        resumed.train(resume_from_checkpoint=True)
    assert releases == []


@pytest.mark.slow
def test_a_budgeted_run_cannot_be_prolonged(tmp_path):
    """More steps need more noise, and the first steps had less."""
    settings = {"target_epsilon": 4.0, "callbacks": [Watch(stop_at=3)]}
    make_trainer(tmp_path, **SAVING | settings).train()
    with pytest.raises(PrivacyError, match="would take 16 steps"):
        make_trainer(tmp_path, target_epsilon=4.0, **SAVING | {"max_steps": 16}).train(
            resume_from_checkpoint=True
        )


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.01, 0.97])
def test_a_resumed_run_keeps_its_noise_if_it_suffices(share, tmp_path, monkeypatch):
    """As when it began with another version, or by another accountant."""
    settings = SAVING | {"target_epsilon": 4.0}
    with monkeypatch.context() as patch:
        patch.setattr(
            plan, "find_noise_multiplier", lambda **given: share * find_noise_multiplier(**given)
        )
        begun = trained_in(tmp_path, **settings, callbacks=[Watch(stop_at=3)])
    resumed = make_trainer(tmp_path, **settings)
    if share < 1:
        with pytest.raises(PrivacyError, match=r"noise_multiplier=.*another `accountant`"):
            resumed.train(resume_from_checkpoint=True)
        return
    resumed.train(resume_from_checkpoint=True)
    noise = begun.plan.mechanism.noise_multiplier
    assert (
        resumed.plan.mechanism.noise_multiplier
        == resumed.ledger.mechanism.noise_multiplier
        == noise
    )
    assert resumed.private_run.mechanism.noise_multiplier == noise
    assert resumed.privacy_spent().epsilon == resumed.ledger.epsilon() < 4.0


def test_what_may_change_on_resume_may_change(folder):
    changes = {"engine": "functorch", "accountant": "prv", "expected_batch_size": 4}
    resumed = make_trainer(folder, **SAVING | changes | {"per_device_train_batch_size": 1})
    resumed.train(resume_from_checkpoint=True)
    assert resumed.ledger.steps == 8


# Checkpoints are made after steps 2, 4, 6; these moments lie at or before the second of them.
# (what is replaced, the call that dies, whether after it was made)
MOMENTS = {
    "before a release is recorded": (Ledger, "record", 4, False),
    "after a release is recorded, before it is made": (Ledger, "record", 4, True),
    "before the gradient reaches the weights": (ProjectedOptimizer, "step", 3, False),
    "while weights are saved": (torch, "save", 5, False),
    "before the state of the trainer is saved": (TrainerState, "save_to_json", 2, False),
    "after a checkpoint": (TrainerState, "save_to_json", 2, True),
}


def _train(folder, moment):
    """Runs in a process of its own; notes each release in a file as soon as it is made."""
    torch.set_num_threads(1)
    report = os.open(folder.parent / "reported", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    original = PrivateMechanism.release

    def release(self):
        result = original(self)
        os.write(report, b".")
        return result

    PrivateMechanism.release = release
    owner, name, at_call, after = MOMENTS[moment]
    setattr(owner, name, ending(getattr(owner, name), at_call, die, after=after))
    make_trainer(folder, target_epsilon=4.0, **SAVING | {"save_steps": 2}).train()


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_killed_at_this_moment_resumes_without_undercounting(
    moment, releases, caplog, tmp_path
):
    """Resumed by ``True``; every noisy update of both processes is in the ledger."""
    folder = tmp_path / "run"
    run_until_killed(_train, folder, moment)
    reported = (tmp_path / "reported").stat().st_size
    recorded = Ledger.load(folder / LEDGER_NAME).steps
    assert 2 <= reported < 8
    assert reported <= recorded <= reported + 1
    resumed = make_trainer(folder, target_epsilon=4.0, **SAVING | {"save_steps": 2})
    resumed.train(resume_from_checkpoint=True)
    updates_before = resumed.state.global_step - len(releases)
    assert updates_before >= 2  # the first checkpoint, or a later one
    assert resumed.ledger.steps == recorded + len(releases)
    assert reported + len(releases) <= resumed.ledger.steps == 8
    assert Ledger.load(folder / LEDGER_NAME).steps == 8
    assert resumed.privacy_spent().epsilon <= 4.0
    lost = recorded - updates_before
    assert resumed.state.global_step == 8 - lost
    assert resumed.releases_left() == 0
    if lost:
        assert f"stops at step {8 - lost} of 8" in caplog.text
        saved = Ledger.load(folder / f"checkpoint-{8 - lost}" / LEDGER_NAME)
        assert (saved.updates, saved.steps) == (8 - lost, 8)


def test_epochs_continue_in_a_run_that_skips_no_data(tmp_path):
    settings = {"ignore_data_skip": True, "max_steps": 8, "logging_steps": 1}
    _, resumed = _stop_and_resume(tmp_path / "resumed", stop_at=4, **settings)
    whole = trained_in(tmp_path / "whole", **SAVING | settings)
    expected, found = (
        [log["epoch"] for log in trainer.state.log_history if "grad_norm" in log]
        for trainer in (whole, resumed)
    )
    assert found[-4:] == pytest.approx(expected[-4:])
