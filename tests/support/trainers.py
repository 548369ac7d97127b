"""Tiny trainers: a model, a data set and arguments, each of which a test may replace.

Shapes: N examples, B samples in a batch.
"""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset
from transformers import TrainerCallback

from dp_grape_hf import DPGrapeTrainer, DPGrapeTrainingArguments, PrivacyError
from dp_grape_hf.phases import RELEASED, Observer
from dp_grape_hf.trainer.mixin import DPGrapeMixin
from recipes.paper.methods import METHODS, PaperArguments
from tests.support.models import only

FEATURES, WIDTH, CLASSES = 6, 8, 3
TRAINER_KEYWORDS = (
    "callbacks compute_loss_func compute_metrics data_collator eval_dataset known_streams loss "
    "model_init optimizers peft_config processing_class public_dataset public_example"
).split()


class TinyForSequenceClassification(nn.Module):
    """Two layers on plain features; ``id`` only travels with the example, for tests to see."""

    def __init__(self, seed=0):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.body = nn.Linear(FEATURES, WIDTH)
            self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x, labels=None, id=None):
        logits = self.head(torch.tanh(self.body(x)))
        if labels is None:
            return {"logits": logits}
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def adapted(model, *layers):
    """Returns a model with LoRA on some layers, none of whose weights are zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        adapter = get_peft_model(model, LoraConfig(r=2, target_modules=[*layers]))
        for name, weight in adapter.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(weight, std=0.1)  # or lora_A has no gradient at first
    return adapter


def tiny(method):
    model = TinyForSequenceClassification()
    return adapted(model, "body") if METHODS[method].adapter else model


class Examples(Dataset[dict[str, Any]]):
    def __init__(self, examples):
        self.examples = examples

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, index):
        return self.examples[index]


def points(num_samples=24, seed=0):
    """Returns labelled random points, of a rule that can be learnt; each knows its ``id``."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, FEATURES, generator=generator)
    labels = x[:, :CLASSES].argmax(1)
    return Examples([{"x": x[i], "labels": labels[i], "id": i} for i in range(num_samples)])


SIZES = (3, 1, 4, 1, 2, 5, 1, 7)  # of the units of the data below
OWNERS = [f"u{unit}" for unit, size in enumerate(SIZES) for _ in range(size)]


def owned(owners=OWNERS, seed=0):
    """Returns the points of some owners, in an order that keeps none of them together."""
    order = torch.randperm(len(owners), generator=torch.Generator().manual_seed(5)).tolist()
    rows = points(len(owners), seed).examples
    return Examples([rows[i] | {"user": owners[i], "id": i} for i in order])


def examples_of(name, num_samples=12, **settings):
    """Returns examples for the model of that name in ``tests.support.models``."""
    batch = only(name).batch(num_samples, **settings)
    return Examples([{key: v[i] for key, v in batch.items()} for i in range(num_samples)])


OF_HOST = {
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "dataloader_pin_memory": False,
}
"""Arguments of any quiet run on the CPU."""
QUIET = OF_HOST | {"target_delta": 1e-3, "accountant": "rdp"}
"""Those of a private run that chooses all that is not given."""
DEFAULTS = QUIET | {
    "per_device_train_batch_size": 4,
    "max_steps": 4,
    "learning_rate": 1e-2,
    "projection_rank": 2,
    "projection_update_steps": 3,
    "logging_steps": 1,
}
"""Those of a short run, unless a test gives others. The noise multiplier is 1 unless a budget or
the method says otherwise, and P of DP-GRAPE is Gaussian: it needs no inputs."""


def make_args(output_dir, arguments=None, chooses=False, **changes):
    settings = {"output_dir": str(output_dir)} | (QUIET if chooses else DEFAULTS)
    if chooses:
        return DPGrapeTrainingArguments(**settings | {"eps": 8.0} | changes)
    method = changes.get("method", "dp_grape")
    plain = method in METHODS and not METHODS[method].private
    settings["noise_multiplier"] = (
        None if plain or {"target_epsilon", "eps"} & changes.keys() else 1.0
    )
    if method == "dp_grape":
        settings["projection"] = "gaussian"
    if {"perturbation", "n_directions"} & changes.keys():
        arguments = arguments or PaperArguments
    return (arguments or DPGrapeTrainingArguments)(**settings | changes)


def make_trainer(
    output_dir, *, cls=DPGrapeTrainer, arguments=None, model=None, train_dataset=None, **changes
):
    """Returns a trainer of ``TinyForSequenceClassification`` on ``points``.

    ``changes`` are keywords of the trainer or of its arguments, whichever they name; ``arguments``
    is the class of the latter.
    """
    keywords = {name: changes.pop(name) for name in TRAINER_KEYWORDS if name in changes}
    if model is None and "model_init" not in keywords:
        model = TinyForSequenceClassification()
    return cls(
        model=model,
        args=make_args(output_dir, arguments, **changes),
        train_dataset=points() if train_dataset is None else train_dataset,
        **keywords,
    )


def trained_in(folder, **changes):
    trainer = make_trainer(folder, **changes)
    trainer.train()
    return trainer


def assert_refused(trainer, match, error=PrivacyError):
    """Training stops with a matching error before the first release."""
    with pytest.raises(error, match=match):
        trainer.train()
    assert trainer.ledger.steps == 0


EXACT = {
    "noise_multiplier": 0,
    "max_grad_norm": float("inf"),
    "per_device_train_batch_size": 24,  # all of ``points``: q = 1
}
"""Arguments of a run without any chance in it but the projection."""


def no_loss(outputs, labels, num_items_in_batch=None):
    """A loss (B,) whose gradient is next to nothing: whatever moves is noise."""
    return outputs["logits"].sum(1) * 1e-12


class RecordingTrainer(DPGrapeTrainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.draws = []

    def training_step(self, model, inputs, num_items_in_batch=None):
        ids = [int(i) for physical in inputs for i in physical["id"]]
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.draws.append(ids)
        return loss


class Watch(TrainerCallback):
    """Keeps logs, and the weights before the first and after every step."""

    def __init__(self, stop_at=None):
        self.stop_at = stop_at
        self.logs = []
        self.weights = []
        self.events = []
        for name in ("epoch_end", "evaluate", "save"):
            setattr(self, f"on_{name}", lambda *_, name=name, **__: self.events.append(name))

    def keep(self, model):
        self.weights.append(weights_of(model))

    def on_train_begin(self, args, state, control, **kwargs):
        self.events.append("train_begin")
        self.keep(kwargs["model"])

    def on_step_end(self, args, state, control, **kwargs):
        self.events.append("step_end")
        self.keep(kwargs["model"])
        if state.global_step == self.stop_at:
            control.should_training_stop = True

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))

    def moves(self):
        """Returns what each step added to the weights."""
        pairs = zip(self.weights, self.weights[1:], strict=False)
        return [{name: new[name] - old[name] for name in new} for old, new in pairs]


def assert_turns(draws, bands):
    """Nobody takes part twice in as many steps as there are bands; returns who took part, last."""
    last = {}
    for step, draw in enumerate(draws):
        for one in draw:
            assert step - last.get(one, -bands) >= bands
            last[one] = step
    return last


class Releases(Observer):
    def __init__(self):
        self.releases = []

    def computed(self, name, values):
        if name == RELEASED:
            self.releases.append({n: value.clone() for n, value in values.items()})


def weights_of(model):
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def assert_same_weights(actual, expected, **tolerance):
    """Compares two dictionaries of weights, exactly unless a tolerance is given."""
    tolerance = tolerance or {"atol": 0.0, "rtol": 0.0}
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, **tolerance, msg=lambda m, n=name: n + m)
    assert actual.keys() == expected.keys()


def spy_releases(monkeypatch):
    """Returns a list that every release of trainers that are made later is copied to."""
    seen = Releases()
    monkeypatch.setattr(DPGrapeMixin, "observer", seen)
    return seen.releases
