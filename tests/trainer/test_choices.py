"""A resumed run reads from its checkpoint what the run chose at its start."""

import shutil
from functools import partial

import pytest
from transformers import BertForSequenceClassification

from dp_grape_hf import PrivacyError
from dp_grape_hf.arguments import plan
from dp_grape_hf.trainer.chosen import CHOICES_NAME, Choices
from tests.support.choosing import EVERY, model_of, saving_trainer_of
from tests.support.marks import slow_but

WEIGHTS = ("fresh", "pretrained")


def choices_of(trainer):
    rates = {}
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    for group in trainer.optimizer.param_groups:
        rates |= {names[id(p)]: group["initial_lr"] for p in group["params"]}
    trained = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    assert sorted(trained) == sorted(rates)
    rule = trainer.args.update_rule
    own, schedule = trainer.plan, trainer.args.lr_scheduler_type
    return trained, rates, rule, trainer.private_run.ranks, schedule, own.mechanism, own.steps


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Trainers that stopped after their first checkpoint, by their weights."""
    trainers = {}
    for weights in WEIGHTS:
        folder = tmp_path_factory.mktemp(weights)
        trainers[weights] = saving_trainer_of(folder, model_of(weights), stop_at=EVERY)
        trainers[weights].train()
    return trainers


@pytest.fixture
def begin(stopped, tmp_path):
    """Returns one of these trainers, and copies the folder of its run to ``tmp_path``."""

    def copied(weights):
        shutil.copytree(stopped[weights].args.output_dir, tmp_path, dirs_exist_ok=True)
        return stopped[weights]

    return copied


@pytest.mark.parametrize("weights", WEIGHTS)
def test_resuming_keeps_the_choices_even_for_another_model(begin, weights, tmp_path, monkeypatch):
    """One is loaded from the checkpoint of a fresh model, the other made by ``model_init``.

    Also if another version would choose another batch. Nothing is measured: ``test_remembered``.
    """
    begun = begin(weights)
    monkeypatch.setattr(plan, "usual_batch_size", lambda *args: 5)
    model = partial(model_of, "fresh")
    if weights == "fresh":
        model = BertForSequenceClassification.from_pretrained(tmp_path / f"checkpoint-{EVERY}")
    resumed = saving_trainer_of(tmp_path, model)
    assert resumed.plan.mechanism != begun.plan.mechanism
    resumed.train(resume_from_checkpoint=True)
    assert choices_of(resumed) == choices_of(begun)


@pytest.mark.slow
def test_a_run_that_was_resumed_is_resumed_once_more(begin, tmp_path):
    """An option that was given in between, as it was chosen, stays known as chosen."""
    begun = begin("fresh")
    between = saving_trainer_of(tmp_path, model_of("fresh"), stop_at=2 * EVERY, projection_rank=16)
    between.train(resume_from_checkpoint=True)
    paths = [tmp_path / f"checkpoint-{n * EVERY}" / CHOICES_NAME for n in (1, 2)]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    again = saving_trainer_of(tmp_path, model_of("pretrained"))
    again.train(resume_from_checkpoint=True)
    assert choices_of(again) == choices_of(begun)


@pytest.mark.parametrize("weights", slow_but(("pretrained",), WEIGHTS))
def test_a_checkpoint_without_choices_is_resumed(begin, weights, tmp_path):
    begin(weights)
    (tmp_path / f"checkpoint-{EVERY}" / CHOICES_NAME).unlink()
    resumed = saving_trainer_of(tmp_path, model_of(weights))
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step > EVERY


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate_factors": {"classifier": 3}}, "This run has learning_rate_factors"),
        ({"projection_rank": 2}, r"projection_rank=2 \(recorded: 16\)"),
        ({"expected_batch_size": 8}, r"expected_batch_size=8.* \(recorded: 9"),
    ],
)
def test_other_options_than_those_chosen_are_refused(begin, changes, message, tmp_path, releases):
    begin("fresh")
    with pytest.raises(PrivacyError, match=message):
        saving_trainer_of(tmp_path, model_of("fresh"), **changes).train(resume_from_checkpoint=True)
    assert releases == []


def test_other_trained_parameters_than_those_chosen_are_refused(begin, tmp_path):
    begin("fresh")
    model = model_of("fresh")
    model.bert.embeddings.requires_grad_(False)
    with pytest.raises(PrivacyError, match="train the parameters"):
        saving_trainer_of(tmp_path, model).train(resume_from_checkpoint=True)


def test_choices_are_in_checkpoints_and_are_never_published(begin, tmp_path):
    trainer = begin("pretrained")
    trainer.save_model(str(tmp_path / "saved"))
    choices = Choices.load(tmp_path / f"checkpoint-{EVERY}")
    assert choices is not None
    assert (choices.parts, choices.rates) == (trainer._parts, trainer.rates)
    assert choices.options == trainer.args.chosen_options
    assert not (tmp_path / "saved" / CHOICES_NAME).exists()
    assert CHOICES_NAME not in trainer.ledger.saved[-1].files, "what is published"


def test_a_checkpoint_with_cut_choices_is_not_whole(begin, tmp_path):
    begin("fresh")
    path = tmp_path / f"checkpoint-{EVERY}" / CHOICES_NAME
    path.write_text(path.read_text()[:-9])
    with pytest.raises(PrivacyError, match=CHOICES_NAME):
        saving_trainer_of(tmp_path, model_of("fresh")).train(resume_from_checkpoint=True)


def test_a_run_with_a_learning_rate_has_no_choices(tmp_path):
    saving_trainer_of(tmp_path, model_of("fresh"), stop_at=EVERY, learning_rate=1e-3).train()
    assert Choices.load(tmp_path / f"checkpoint-{EVERY}") is None
