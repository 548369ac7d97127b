"""What a private run logs: what is known to be private, and metrics of evaluation data."""

import logging

import pytest
from transformers import Trainer, TrainerCallback

from dp_grape_hf import DPGrapeTrainer
from dp_grape_hf.mechanism import Streams
from dp_grape_hf.trainer.callbacks import grown
from dp_grape_hf.trainer.mixin import DPGrapeMixin
from tests.support.trainers import Watch, make_trainer, points, trained_in

LEAK = 0.8642  # a number of the training data, wherever it turns up


class _Leaks(TrainerCallback):
    def __init__(self):
        self.trainer = None

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.log({"margin": LEAK, "train_accuracy": LEAK, "eval_train_loss": LEAK})


class _TalkativeHost(Trainer):
    """Adds to every log, behind the mixin."""

    def log(self, logs, *args):
        logs["tokens_seen"] = LEAK
        super().log(logs, *args)


class _Talkative(DPGrapeMixin, _TalkativeHost): ...


def leaking(folder, tracker, **settings):
    leaks = _Leaks()
    callbacks = [tracker, leaks]
    trainer = leaks.trainer = make_trainer(folder, cls=_Talkative, callbacks=callbacks, **settings)
    output = trainer.train()
    trainer.save_metrics("train", output.metrics)
    trainer.save_state()
    return trainer, output


def test_unknown_keys_are_dropped_from_logs_with_one_warning(caplog, tmp_path):
    tracker = Watch()
    trainer, output = leaking(tmp_path, tracker)
    assert len(tracker.logs) == 5, "one after each step, and the end"
    assert not [
        logs for logs in (*tracker.logs, *trainer.state.log_history) if LEAK in logs.values()
    ]
    assert LEAK not in output.metrics.values()
    for name in ("train_results.json", "all_results.json", "trainer_state.json"):
        assert str(LEAK) not in (tmp_path / name).read_text(), name
    said = [r.getMessage() for r in caplog.records if "not known to be private" in r.getMessage()]
    assert sorted(text.split("'")[1] for text in said) == [
        "eval_train_loss",
        "margin",
        "tokens_seen",
        "train_accuracy",
    ]
    assert all("noise_multiplier=0" in text and str(LEAK) not in text for text in said)


class _Asks(TrainerCallback):
    def __init__(self):
        self.read = []

    def on_log(self, args, state, control, **kwargs):
        logs = kwargs["logs"]
        if "eval_loss" not in logs:
            self.read.append(f"loss {logs['loss']:.4f} {logs.get('loss')}")
            with pytest.raises(KeyError):
                logs["accuracy"]


def test_withheld_values_of_the_trainer_are_left_out_without_warning(caplog, tmp_path):
    tracker, asks = Watch(), _Asks()
    trainer = make_trainer(
        tmp_path,
        callbacks=[tracker, asks],
        eval_dataset=points(seed=1),
        eval_strategy="steps",
        eval_steps=2,
    )
    output = trainer.train()
    assert {"train_runtime", "epsilon"} <= output.metrics.keys()
    assert sum("eval_loss" in logs for logs in tracker.logs) == 2
    assert not {"loss", "train_loss", "total_flos"} & {key for logs in tracker.logs for key in logs}
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert asks.read == ["loss withheld None"] * 5


def test_metrics_of_evaluation_data_are_logged_under_any_prefix(tmp_path):
    tracker = Watch()
    trainer = make_trainer(
        tmp_path, callbacks=[tracker], compute_metrics=lambda predicted: {"accuracy": 0.5}
    )
    trainer.evaluate({"near": points(seed=1), "far": points(seed=2)}, metric_key_prefix="held_out")
    for name, logs in zip(("near", "far"), trainer.state.log_history, strict=True):
        assert {f"held_out_{name}_loss", f"held_out_{name}_accuracy"} <= logs.keys()
        assert f"held_out_{name}_runtime" in logs
    assert tracker.logs[0].keys() == trainer.state.log_history[0].keys() - {"step"}


def test_a_prefix_holds_as_long_as_its_evaluation(tmp_path):
    def compute_metrics(predicted):
        trainer.log({f"{prefix}_so_far": 0.25, "other": LEAK})
        return {}

    trainer = make_trainer(tmp_path, compute_metrics=compute_metrics)
    for prefix, ask in (("dev", trainer.evaluate), ("train", trainer.predict)):
        ask(points(seed=1), metric_key_prefix=prefix)
        logged = [logs for logs in trainer.state.log_history if f"{prefix}_so_far" in logs]
        assert len(logged) == 1
        assert "other" not in logged[0]
        trainer.log({f"{prefix}_so_far": LEAK})
    assert LEAK not in [value for logs in trainer.state.log_history for value in logs.values()]


class _Own(DPGrapeTrainer):
    """Evaluates by itself, as the trainers of question answering scripts do."""

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        loader = self.get_eval_dataloader(eval_dataset)
        output = self.evaluation_loop(loader, "own", metric_key_prefix=metric_key_prefix)
        self.log({**output.metrics, f"{metric_key_prefix}_exact": 0.25})
        self.callback_handler.on_evaluate(self.args, self.state, self.control, output.metrics)
        return output.metrics


class _Predicts:
    """Logs with a name of its own, in front of a private trainer."""

    def predict(self, test_dataset, **kwargs):
        self.log({"test_exact": 0.5, f"{kwargs.get('metric_key_prefix')}_exact": 0.5})


class _OwnBoth(_Predicts, _Own): ...


@pytest.mark.parametrize("cls", [_Own, _OwnBoth])
def test_an_own_evaluation_logs_its_metrics(cls, tmp_path):
    held = points(5, seed=1)
    settings = {"eval_dataset": held, "eval_strategy": "steps", "eval_steps": 2}
    trainer = trained_in(tmp_path, cls=cls, **settings)
    trainer.evaluate(held, None, "dev")
    trainer.log({"eval_exact": LEAK, "dev_exact": LEAK, "test_exact": LEAK})
    if cls is _OwnBoth:
        trainer.predict(held)
        trainer.predict(held, metric_key_prefix="far")
    logged = [(k, v) for logs in trainer.state.log_history for k, v in logs.items() if "exact" in k]
    predicted = [("test_exact", 0.5), ("far_exact", 0.5)] if cls is _OwnBoth else []
    assert logged == [("eval_exact", 0.25)] * 2 + [("dev_exact", 0.25), *predicted]
    assert sum("eval_loss" in logs for logs in trainer.state.log_history) == 2


def test_throughput_is_of_the_declared_number_of_examples(tmp_path):
    """The true one would follow from ``train_samples_per_second`` and the runtime."""
    trainer = make_trainer(
        tmp_path, num_samples=30, max_steps=-1, num_train_epochs=2, expected_batch_size=5
    )
    loader = trainer.get_train_dataloader()
    examples, trained = trainer.set_initial_training_values(trainer.args, loader)[2:4]
    assert (examples, trained) == (30, 60)
    held = trainer.get_eval_dataloader(points(17, seed=1))
    assert trainer.num_examples(held) == 17


@pytest.mark.parametrize(
    ("signals", "sampled", "times"),
    [
        ([0.09, 0.09, 0.06, 0.04, 0.03, 0.02], 0.0, 0.3 / 0.9),  # a run that learns
        ([0.08, 0.1, 0.2, 0.2, 0.2, 0.2], 0.04, 2.5),  # one that diverges
        ([0.08, 0.1, 0.2, 0.2, 0.2], 0.04, 0.0),  # too few
        ([0.0, 0.1, 0.2, 0.2, 0.2, 0.2], 0.04, 0.0),  # the first was not told from noise
        ([0.08, 0.1, 0.2, 0.2, 0.0, 0.2], 0.04, 0.0),  # one of the later ones was not
        ([0.08, 0.1, 0.2, 0.2, 0.2, 0.2], 0.11, 0.0),  # which may be the chance of sampling
    ],
    ids=str,
)
def test_signal_is_compared_with_that_of_the_start(signals, sampled, times):
    assert grown(signals, sampled) == pytest.approx(times)


def quadratic(outputs, labels, num_items_in_batch=None):
    return outputs["logits"].sum(1).square()


def test_a_run_that_diverges_warns_once(caplog, tmp_path):
    """All examples agree on a quadratic, which steps that are too long overshoot more and more."""
    settings = {"max_steps": 12, "logging_steps": 2, "noise_multiplier": 1e-4, "update_rule": "sgd"}
    settings |= {"expected_batch_size": 20, "max_grad_norm": 1e6, "lr_scheduler_type": "constant"}
    for learning_rate, warns in ((0.3, 1), (0.003, 0)):
        caplog.clear()
        make_trainer(
            tmp_path / str(warns),
            learning_rate=learning_rate,
            compute_loss_func=quadratic,
            known_streams=Streams.seeded(),
            **settings,
        ).train()
        said = [r.message for r in caplog.records if "seems to diverge" in r.message]
        assert len(said) == warns
