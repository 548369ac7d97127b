"""What each of several processes does in ``test_processes``; started by a launcher.

    accelerate launch --multi_gpu --num_processes 2 -m tests.trainer.distributed.run FOLDER

Each scenario returns what the test wants to see; it is saved as ``FOLDER/<scenario>-<rank>.pt``. An
error is a result as well, and must leave the processes in step for the next scenario.
"""

import gc
import logging
import os
import sys
import time
import traceback
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback

from dp_grape_hf import DPGrapeTrainer, PrivacyError
from dp_grape_hf.distributed import group_size
from dp_grape_hf.ledger import Ledger
from dp_grape_hf.mechanism import Streams
from recipes.paper.methods import METHODS
from tests.support.models import only
from tests.support.trainers import (
    Examples,
    RecordingTrainer,
    TinyForSequenceClassification,
    Watch,
    examples_of,
    make_args,
    make_trainer,
    points,
    tiny,
)
from tests.trainer.distributed.traffic import per_call

RUN = {
    "train_dataset": points(48),
    "expected_batch_size": 6,
    "per_device_train_batch_size": 2,
    "max_steps": 8,  # one epoch: a resumed run then draws what an uninterrupted one does
    "noise_multiplier": None,
    "target_epsilon": 8.0,
    "cls": RecordingTrainer,
}
BANDED = RUN | {"noise": "banded", "projection": "identity", "max_steps": 12}
SAVED = RUN | {"save_strategy": "steps", "save_steps": 3}
STOPPED_AT = 3
UNEVEN = RUN | {
    "train_dataset": points(24),
    "expected_batch_size": 2,
    "per_device_train_batch_size": 1,
    "max_steps": 12,
    "seed_of_draws": 1,  # the first draws leave all processes but the first without an example
}
METHOD = {
    "train_dataset": points(24),
    "expected_batch_size": 4,
    "per_device_train_batch_size": 2,
    "learning_rate": 0.05,
    "max_steps": 5,
}
USERS = RUN | {
    "train_dataset": Examples(
        [{**row, "user": f"u{row['id'] ** 2 % 31}"} for row in points(48).examples]
    ),
    "privacy_unit_column": "user",
    "max_examples_per_unit": 2,
    "expected_batch_size": 5,
}
ROBERTA = {"projection_rank": 8, "expected_batch_size": 4, "max_steps": 3}
CHOSEN = dict.fromkeys(("learning_rate", "expected_batch_size", "max_grad_norm", "projection_rank"))
CHOSEN |= {"projection": "principal", "projection_update_steps": None, "max_steps": 3}


def roberta():
    """Returns a transformer and its data, without dropout: its masks differ between processes."""
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return {
        "model": only("roberta-classifier").model(**still),
        "train_dataset": examples_of("roberta-classifier", 12),
    }


def trained(folder, *, resume=None, stream=None, seed_of_draws=0, **settings):
    """Trains with known coins and noise; returns what the processes have to agree on.

    Args:
        folder: the output folder.
        resume: the checkpoint to resume from.
        stream: the state of the noise stream to start from.
        seed_of_draws: seeds coins and noise.
        settings: of ``make_trainer``.
    """
    generators, watch = Streams.seeded(seed_of_draws), settings.pop("watch", None) or Watch()
    if stream is not None:
        generators.noise.set_state(stream)
    settings.setdefault("model", TinyForSequenceClassification())
    trainer = make_trainer(folder, known_streams=generators, callbacks=[watch], **settings)
    trainer.train(resume_from_checkpoint=resume)
    return {
        "weights": watch.weights,
        "draws": getattr(trainer, "draws", []),
        "steps": trainer.state.global_step,
        "spent": trainer.privacy_spent(),
        "left": trainer.releases_left(),
        "run_id": trainer.ledger.run_id,
        "world_size": trainer.args.world_size,
        "noise": generators.noise.get_state(),
    }


EQUAL = {
    "equal": lambda: RUN | {"eval_dataset": points(7, seed=1), "eval_strategy": "epoch"},
    "equal_chosen": lambda: CHOSEN | roberta(),
    "equal_banded": lambda: BANDED,
    "uneven": lambda: UNEVEN,
    "users": lambda: USERS,
}


def equal(name, folder):
    return trained(folder / f"{name}-{group_size()}", **EQUAL[name]())


def named(function, name):
    scenario = partial(function, name)
    scenario.__name__ = name
    return scenario


def every_method(folder):
    return {
        method: trained(
            folder / f"{method}-{group_size()}", method=method, model=tiny(method), **METHOD
        )
        for method in METHODS
    }


def initial(folder):
    """Weights that differ before training are the first process's afterwards."""
    watch = Watch()
    model = TinyForSequenceClassification(seed=dist.get_rank())
    model.register_buffer("table", torch.full((2,), float(dist.get_rank())))
    make_trainer(folder / "initial", model=model, max_steps=1, callbacks=[watch]).train()
    return watch.weights, model.table


def private_bytes(folder):
    log = []
    settings = {"logging_strategy": "no", "max_steps": 4, "per_device_train_batch_size": 2}
    with per_call(DPGrapeTrainer, "_run_epoch", log):
        make_trainer(folder / "bytes", **ROBERTA | settings, **roberta()).train()
    return log


@contextmanager
def refusing_files():
    """Lets the first process alone look at ledgers."""

    def refuse(*args, **kwargs):
        raise AssertionError("only the first process reads and writes ledgers")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() > 0:
            patch.setattr(Ledger, "load", refuse)
            patch.setattr(Ledger, "save", refuse)
        yield


def save(folder):
    with refusing_files():
        return trained(folder / "saved-2", watch=Watch(stop_at=STOPPED_AT), **SAVED)


def resume(folder):
    state = torch.load(folder / "noise.pt")
    with refusing_files():
        return trained(folder / "saved-1-for-2", resume=True, stream=state, **SAVED)


class Broken(Examples):
    """Data that can no longer be read in the second process, once it is ``armed``."""

    armed = False

    def __getitem__(self, index):
        if dist.get_rank() == 1 and self.armed:
            raise OSError("the disk of the second machine is gone")
        return super().__getitem__(index)


class Arm(TrainerCallback):
    def __init__(self, data):
        self.data = data

    def on_step_end(self, args, state, control, **kwargs):
        self.data.armed = True


def broken_data(folder):
    data = Broken(points(24).examples)
    make_trainer(
        folder / "broken-data", train_dataset=data, expected_batch_size=20, callbacks=[Arm(data)]
    ).train()


class CouplesInOneForSequenceClassification(TinyForSequenceClassification):
    def forward(self, x, labels=None, id=None):
        if dist.get_rank() == 1:
            x = x - x.mean(0)
        return super().forward(x, labels)


def refused_model(folder):
    make_trainer(
        folder / "refused-model",
        model=CouplesInOneForSequenceClassification(),
        expected_batch_size=20,
    ).train()


def unwritable_ledger(folder):
    def refuse(self, steps=1):
        raise OSError("no space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr(Ledger, "record", refuse)
        make_trainer(folder / "unwritable-ledger").train()


def damaged_ledger(folder):
    return trained(folder / "damaged", resume=str(folder / "damaged" / "checkpoint-3"), **SAVED)


def other_data(folder):
    make_trainer(
        folder / "other-data", train_dataset=points(24 + dist.get_rank()), num_samples=30
    ).train()


def other_users(folder):
    """As many users and examples, of which one belongs to somebody else."""
    rows = [row | {"user": int(i == dist.get_rank())} for i, row in enumerate(points(9).examples)]
    settings = {"privacy_unit_column": "user", "max_examples_per_unit": 2}
    make_trainer(
        folder / "other-users", train_dataset=Examples(rows), expected_batch_size=1, **settings
    ).train()


def other_arguments(folder):
    make_trainer(folder / "other-arguments", max_grad_norm=1.0 + dist.get_rank()).train()


SCENARIOS = [
    *(named(equal, name) for name in EQUAL),
    *(every_method, initial, private_bytes),
    *(save, resume),
    *(broken_data, refused_model, unwritable_ledger, damaged_ledger),
    *(other_data, other_users, other_arguments),
]
"""What two processes do, in this order."""


def main(folder, scenarios):
    """Joins the group that the environment names, as the Trainer does, and runs its scenarios."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    gc.freeze()  # the Trainer collects garbage often: not among all that was imported
    make_args(folder)
    rank, size = dist.get_rank(), dist.get_world_size()
    for scenario in scenarios:
        started = time.monotonic()
        try:
            outcome = {"result": scenario(Path(folder))}
        except Exception as error:
            private = isinstance(error, PrivacyError)
            outcome = {"error": f"{error}", "private": private, "trace": traceback.format_exc()}
        outcome["seconds"] = time.monotonic() - started
        torch.save(outcome, f"{folder}/{scenario.__name__}-{rank}-of-{size}.pt")
        if not dist.is_initialized():  # failed with sharded weights, and has left the others
            return
    dist.barrier()
    dist.destroy_process_group()


def main_of(rank, world_size, port, folder, scenarios):
    """Runs ``main`` in a process that no launcher has told its place."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    os.environ.update({name: f"{value}" for name, value in place.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": f"{world_size}"})
    main(folder, scenarios)


if __name__ == "__main__":
    main(sys.argv[1], SCENARIOS)
