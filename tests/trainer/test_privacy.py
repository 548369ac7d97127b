import json
import math
import pickle
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import TrainerCallback, TrainingArguments

from dp_grape_hf import PrivacyError
from dp_grape_hf.accounting import compute_epsilon
from dp_grape_hf.ledger import LEDGER_NAME, Ledger
from dp_grape_hf.mechanism import PoissonBatchSampler
from tests.support.models import only
from tests.support.trainers import (
    RecordingTrainer,
    Watch,
    assert_same_weights,
    examples_of,
    make_trainer,
    no_loss,
    points,
    trained_in,
    weights_of,
)

NUM_SAMPLES, BATCH, DELTA = 26, 8, 1e-3  # 3.25 draws make an epoch: N is not divisible
STEPS_PER_EPOCH = 4


def _spy_draws(monkeypatch):
    draws = []
    original = PoissonBatchSampler.draw

    def draw(self):
        draws.append(original(self))
        return draws[-1]

    monkeypatch.setattr(PoissonBatchSampler, "draw", draw)
    return draws


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize(
    ("steps", "settings"),
    [
        (14, {"max_steps": 14, "num_samples": 32, "per_device_train_batch_size": BATCH}),
        (
            3 * STEPS_PER_EPOCH,
            {
                "max_steps": -1,
                "num_train_epochs": 3,
                "per_device_train_batch_size": BATCH // 4,
                "gradient_accumulation_steps": 4,
                "dataloader_drop_last": True,
                "dataloader_num_workers": 2,
            },
        ),
    ],
)
def test_every_noisy_update_is_exactly_one_poisson_draw(
    steps, settings, monkeypatch, releases, tmp_path
):
    """More than three epochs; sizes are judged together.

    False alarm: below 1e-6 a case (five standard deviations of a binomial).
    """
    drawn, watch = _spy_draws(monkeypatch), Watch()
    trainer = trained_in(
        tmp_path,
        cls=RecordingTrainer,
        train_dataset=points(NUM_SAMPLES),
        callbacks=[watch],
        target_epsilon=3.0,
        target_delta=DELTA,
        **settings,
    )
    # An epoch that max_steps cuts short may leave draws that no update used, at its end only.
    assert trainer.draws == drawn[:steps]
    assert len(drawn) <= STEPS_PER_EPOCH * math.ceil(steps / STEPS_PER_EPOCH)
    for draw in trainer.draws:
        assert len(set(draw)) == len(draw)
    # Calibrated for, released, recorded, counted by the host, and seen by the weights.
    spent = trainer.privacy_spent()
    assert trainer.plan.steps == steps
    assert len(releases) == spent.steps == trainer.state.global_step == steps
    assert Ledger.load(tmp_path / LEDGER_NAME).steps == steps
    assert all(any(move.any() for move in moves.values()) for moves in watch.moves())
    # The rate that was accounted, by the declared N, is the rate that was drawn at.
    rate = BATCH / settings.get("num_samples", NUM_SAMPLES)
    assert spent.mechanism.sample_rate == rate
    assert Ledger.load(tmp_path / LEDGER_NAME).mechanism.sample_rate == rate
    mean = steps * NUM_SAMPLES * rate
    assert abs(sum(map(len, trainer.draws)) - mean) < 5 * math.sqrt(mean * (1 - rate))
    assert spent.epsilon <= 3.0
    promised = compute_epsilon(
        noise_multiplier=spent.mechanism.noise_multiplier,
        sample_rate=rate,
        steps=steps,
        delta=DELTA,
    )
    assert promised <= 3.0


def test_the_arguments_seed_changes_neither_sampling_nor_noise(tmp_path):
    runs = []
    for name in "ab":
        watch = Watch()
        trainer = trained_in(
            tmp_path / name,
            cls=RecordingTrainer,
            compute_loss_func=no_loss,
            callbacks=[watch],
            seed=7,
            data_seed=7,
            max_steps=8,
        )
        runs.append((watch, trainer.draws))
    (first, first_draws), (second, second_draws) = runs
    assert_same_weights(second.weights[0], first.weights[0])
    # Adam's first move is one of signs, of which a short vector has few.
    for move, other in zip(first.moves()[1:], second.moves()[1:], strict=True):
        assert not any((move[name] == other[name]).all() for name in move)
    # Eight equal draws of 24 examples at q = 1/6: below 1e-50.
    assert first_draws != second_draws


def _walk(value):
    found = [value]
    if isinstance(value, dict):
        inner = [*value.keys(), *value.values()]
    elif isinstance(value, (list, tuple, set)):
        inner = value
    else:
        inner = vars(value).values() if isinstance(value, TrainingArguments) else ()
    for item in inner:
        found += _walk(item)
    return found


class _TakeStates(TrainerCallback):
    """Notes the states of the secret generators at each save, as a thief would like to."""

    def __init__(self):
        self.trainer = None
        self.states = []

    def take(self, args, state, control, **kwargs):
        sampler = self.trainer.callback_handler.train_dataloader.batch_sampler
        for generator in (self.trainer.private_run.mechanism._noise_generator, sampler.generator):
            self.states.append(torch.Generator.get_state(generator))

    on_train_begin = on_step_end = on_save = take


def test_no_checkpoint_file_contains_a_secret_generators_state(tmp_path):
    thief = _TakeStates()
    thief.trainer = make_trainer(
        tmp_path, save_strategy="steps", save_steps=2, callbacks=[thief], max_steps=4
    )
    thief.trainer.train()
    thief.trainer.save_model()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"optimizer.pt", "training_args.bin"} <= {path.name for path in files}
    assert not [path for path in files if path.name.startswith("rng_state")]
    assert len(thief.states) >= 10
    # A state is a header of 24 bytes and 624 words of 32 bits, stored in 64 bits each.
    pieces = set()
    for state in thief.states:
        words = np.frombuffer(state.numpy().tobytes()[24 : 24 + 8 * 624], dtype="<u8")
        for start in (0, 100, 300, 600):
            chunk = words[start : start + 8]
            assert chunk.any()
            pieces |= {chunk.tobytes(), chunk.astype("<u4").tobytes()}
    for path in files:
        content = path.read_bytes()
        assert not [piece for piece in pieces if piece in content], path
        if path.suffix not in (".pth", ".pt", ".bin"):
            continue
        for value in _walk(torch.load(path, weights_only=False)):
            assert not isinstance(value, torch.Generator)
            if isinstance(value, torch.Tensor) and value.dtype == torch.uint8:
                assert not any(value.equal(state) for state in thief.states)


PUBLIC_KEYS = {
    *("epoch", "epsilon", "grad_norm", "signal", "noise", "learning_rate", "step"),
    *("train_runtime", "train_samples_per_second", "train_steps_per_second"),
}


def test_logs_and_cards_show_the_spent_epsilon_and_nothing_private(releases, capsys, tmp_path):
    tracker, settings = Watch(), {"save_strategy": "steps", "save_steps": 2}
    trainer = make_trainer(
        tmp_path, callbacks=[tracker], target_epsilon=4.0, disable_tqdm=False, **settings
    )
    assert trainer.privacy_spent().epsilon == 0
    output = trainer.train()
    trainer.save_model()
    # Nothing that is not private.
    assert math.isnan(output.training_loss), "it is not 0 either"
    assert f"{output.training_loss:.4f} {output.training_loss}" == "withheld withheld"
    assert f"{pickle.loads(pickle.dumps(output)).training_loss}" == "withheld"
    assert set(output.metrics) <= PUBLIC_KEYS
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    for logs in (*tracker.logs, *trainer.state.log_history, *state["log_history"]):
        assert set(logs) <= PUBLIC_KEYS
    assert state["total_flos"] == trainer.state.total_flos == 0
    assert state["num_input_tokens_seen"] == 0
    for name in (LEDGER_NAME, "README.md"):
        text = (tmp_path / "checkpoint-4" / name).read_text().lower()
        for word in ("loss", "flos", "input_tokens", '"grad_norm"'):
            assert word not in text
    norms = [logs["grad_norm"] for logs in tracker.logs if "grad_norm" in logs]
    expected = [math.sqrt(sum(v.square().sum() for v in r.values())) for r in releases]
    assert norms == pytest.approx(expected, rel=1e-5)
    # Everywhere the epsilon that is spent.
    epsilons = [logs["epsilon"] for logs in tracker.logs]
    assert epsilons == sorted(epsilons)
    assert len(set(epsilons)) == 4
    spent = trainer.privacy_spent()
    assert epsilons[-1] == spent.epsilon
    assert 3.9 < spent.epsilon <= 4.0
    assert spent.private
    assert trainer.ledger.private
    assert (spent.steps, spent.delta, spent.mechanism.max_grad_norm) == (4, 1e-3, 1.0)
    assert spent.epsilon == pytest.approx(trainer.ledger.epsilon(), abs=0.02)
    assert f"ε={spent.epsilon:.3f}/4, signal" in capsys.readouterr().err
    for step in (2, 4):
        folder = tmp_path / f"checkpoint-{step}"
        ledger = Ledger.load(folder / LEDGER_NAME)
        assert ledger.steps == ledger.updates == step
        claimed = re.search(r"ε = ([0-9.]+)", (folder / "README.md").read_text())
        assert claimed is not None
        assert ledger.epsilon() <= float(claimed[1]) < ledger.epsilon() + 0.002


def test_a_run_without_noise_logs_all_and_claims_nothing(tmp_path):
    tracker = Watch()
    trainer = trained_in(
        tmp_path,
        model=only("bert-classifier").model(num_hidden_layers=1),
        train_dataset=examples_of("bert-classifier"),
        callbacks=[tracker],
        noise_multiplier=0.0,
        target_delta=None,
        include_num_input_tokens_seen="all",
    )
    trainer.save_model()
    trainer.log({"margin": 0.5})
    assert tracker.logs.pop()["margin"] == 0.5
    logs = tracker.logs[0] | tracker.logs[-1]
    assert logs["loss"] > 0
    assert logs["train_loss"] > 0
    assert logs["total_flos"] > 0
    assert logs["num_input_tokens_seen"] > 0
    assert "epsilon" not in logs
    assert not Ledger.load(tmp_path / LEDGER_NAME).private
    assert trainer.privacy_spent().epsilon == math.inf
    assert not trainer.privacy_spent().private
    assert "no privacy guarantee" in (tmp_path / "README.md").read_text()


@pytest.mark.slow
def test_a_second_call_of_train_is_refused(tmp_path):
    trainer = trained_in(tmp_path)
    weights = weights_of(trainer.model)
    with pytest.raises(PrivacyError, match="4 releases"):
        trainer.train()
    assert_same_weights(weights_of(trainer.model), weights)
    trainer.save_model()
    saved = Ledger.load(tmp_path / LEDGER_NAME)
    assert trainer.state.global_step == saved.steps == saved.updates == 4


def test_a_length_changed_after_calibration_is_refused(releases, tmp_path):
    trainer = make_trainer(tmp_path, target_epsilon=4.0)
    trainer.args = replace(trainer.args, max_steps=8)
    with pytest.raises(PrivacyError, match="calibrated for 4"):
        trainer.train()
    assert releases == []


def test_a_callback_that_changes_an_option_ends_the_run(tmp_path):
    class LessNoise(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            args.noise_multiplier = 0.1

    trainer = make_trainer(tmp_path, callbacks=[LessNoise()])
    with pytest.raises(PrivacyError, match=r"noise_multiplier=0\.1: it is 1\.0"):
        trainer.train()
    assert trainer.ledger.steps == 1
    assert trainer.args.noise_multiplier == trainer.ledger.mechanism.noise_multiplier == 1.0


def test_a_callback_that_never_stops_cannot_overdraw_the_budget(tmp_path):
    class GoOn(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = False

    trainer = make_trainer(tmp_path, target_epsilon=4.0, max_steps=4, callbacks=[GoOn()])
    with pytest.raises(PrivacyError, match="budget"):  # 6 draws make an epoch
        trainer.train()
    assert trainer.ledger.steps == 4
    assert trainer.privacy_spent().epsilon <= 4.0
