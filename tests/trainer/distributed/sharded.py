"""What each of several processes with sharded weights does in ``test_sharding``.

As in ``run``, each scenario returns what the test wants to see.
"""

import os
import shutil
import sys
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dp_grape_hf import DPGrapeTrainer
from dp_grape_hf.gradients.checks import spot_checks
from dp_grape_hf.mechanism import Streams
from dp_grape_hf.optimizers import projected
from dp_grape_hf.projections import principal, probes
from dp_grape_hf.sharding import full_tensor
from tests.support.faults import die
from tests.support.models import only, row, without_dropout
from tests.support.trainers import Examples, Watch, adapted, examples_of, make_trainer
from tests.trainer.distributed import run
from tests.trainer.distributed.traffic import per_call

SHARDED = {"fsdp": True, "fsdp_config": {"version": 2}}
USUAL = {
    "expected_batch_size": 6,
    "per_device_train_batch_size": 2,
    "max_steps": 3,
    "learning_rate": 0.02,
    "projection_rank": 4,
}
UNEVEN = {"expected_batch_size": 2, "per_device_train_batch_size": 1, "max_steps": 6}


def _of_row(name):
    found = row(name)
    batch = found.batch(12)
    examples = [{key: value[i] for key, value in batch.items()} for i in range(12)]
    return {"model": without_dropout(found.model()), "train_dataset": Examples(examples)}


def _of_case(name, column=None):
    data = examples_of(name, 24)
    if column is not None:
        data = Examples([{**e, column: f"u{i % 9}"} for i, e in enumerate(data.examples)])
    return {"model": without_dropout(only(name).model()), "train_dataset": data}


RUNS = {
    "opt": (
        partial(_of_case, "opt"),
        {"projection_update_steps": 3, "weight_decay": 0.1, "max_steps": 4},
    ),
    "opt, dp_adam": (partial(_of_case, "opt"), {"method": "dp_adam"}),
    "opt, evaluated": (
        partial(_of_case, "opt"),
        {
            "eval_dataset": examples_of("opt", 5, seed=1),
            "eval_strategy": "steps",  # the last evaluation is between the last step and the end
            "eval_steps": 1,
        },
    ),
    "opt, uneven": (partial(_of_case, "opt"), UNEVEN | {"gradient_checkpointing": True}),
    "opt, units": (
        partial(_of_case, "opt", "user"),
        {"privacy_unit_column": "user", "max_examples_per_unit": 2, "expected_batch_size": 4},
    ),
    "llama, uneven": (partial(_of_case, "llama"), UNEVEN),
    "llama, LoRA": (
        lambda: _of_case("llama") | {"model": adapted(only("llama").model(), "q_proj")},
        {"method": "dp_lora"},
    ),
    "roberta, principal": (
        partial(_of_case, "roberta-classifier"),
        {"projection": "principal", "projection_update_steps": 2, "update_rule": "momentum"},
    ),
    "t5": (partial(_of_row, "T5, seq2seq LM"), {"expected_batch_size": 4}),
    "vit, dp_adam": (partial(_of_case, "vit"), {"method": "dp_adam"}),
}
"""What is trained in one process, and in several with sharded weights, and compared."""
IN_TWO = [name for name in RUNS if name not in ("llama, uneven", "llama, LoRA")]
"""Of these, what two processes train from end to end; the others are in scenarios of their own."""
SAVED = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
"""Of the runs ``RESUMED`` of these, which are stopped in the middle."""
RESUMED = ("opt", "llama, LoRA")


class WholeWeights(Watch):
    """Keeps whole weights, which every process helps to gather."""

    def on_train_end(self, args, state, control, **kwargs):
        self.keep(kwargs["model"])

    def keep(self, model):
        self.whole = sum(not isinstance(p, DTensor) for p in model.parameters())
        self.weights.append(
            {n: full_tensor(p.detach()).clone() for n, p in model.named_parameters()}
        )


def trained(folder, name, *, sharded=True, watch=None, **changes):
    """Trains one of ``RUNS`` with known coins and noise; returns what ``run.trained`` does."""
    make, settings = RUNS[name]
    watch = watch or WholeWeights()
    asked = SHARDED if sharded and "ACCELERATE_USE_FSDP" not in os.environ else {}
    with (  # P of random weights is worse conditioned on fewer tokens
        patch.object(probes, "TOKENS", 1024),
        patch.object(principal, "TOKENS", 1024),
    ):
        found = run.trained(folder, watch=watch, **make() | USUAL | settings | asked | changes)
    assert not sharded or watch.whole == 0, "replicated, although it was to be sharded"
    return found


def equal(name, folder):
    with patch.object(spot_checks, "SHARE", 0.3):  # whatever is watched, all stay in step
        return trained(folder / f"{name}-{dist.get_world_size()}", name)


def spread(folder):
    """Returns how many parameters each process has whole, and its share of all numbers."""
    trainer = make_trainer(
        folder / "spread", **_of_case("opt"), **USUAL | SHARDED | {"eval_strategy": "no"}
    )
    trainer.evaluate(examples_of("opt", 5, seed=1))  # also before there is a run
    trainer.train()
    weights = list(trainer.model.parameters())
    mine = sum(w.to_local().numel() for w in weights if isinstance(w, DTensor))
    texts = trainer.model.generate(torch.tensor([[2, 5, 6]]), max_new_tokens=3, min_new_tokens=3)
    return {
        "whole": sum(not isinstance(w, DTensor) for w in weights),
        "share": mine / sum(w.numel() for w in weights),
        "generated": texts.shape,
        "metrics": trainer.evaluate(examples_of("opt", 5, seed=1)),
    }


def save(folder):
    found = {}
    for name in RESUMED:
        found[name] = trained(
            folder / f"{name}-sharded", name, watch=WholeWeights(stop_at=2), **SAVED
        )
        if dist.get_rank() == 0:
            for purpose in ("kept", "for-1", "for-3"):
                shutil.copytree(folder / f"{name}-sharded", folder / f"{name}-sharded-{purpose}")
        dist.barrier()
    return found


SOURCES = {2: "whole", 3: "sharded"}
"""World size -> whose checkpoints it goes on from: those of one process, or of two."""


def resume(folder):
    size, noise, found = dist.get_world_size(), torch.load(folder / "noise.pt"), {}
    for name in RESUMED:
        place = folder / f"{name}-{SOURCES[size]}-for-{size}"
        found[name] = trained(place, name, resume=True, stream=noise[name], **SAVED)
    return found


def loaded_by_the_first(folder):
    """Trains a model that has weights in the first process only, as its loading may leave it."""
    make, _ = RUNS["opt"]
    parts = make()
    if dist.get_rank() > 0:
        parts["model"] = parts["model"].to("meta")
        parts["model"].tie_weights()
    settings = {"fsdp_config": {"version": 2, "cpu_ram_efficient_loading": True}}
    return trained(folder / "loaded", "opt", **settings | parts)


def autocast(folder):
    """Trains in bfloat16 with weights that are sharded, and that are not, the same batches."""
    return [
        trained(folder / f"autocast-{s}", "llama, uneven", sharded=s, bf16=True, max_steps=3)
        for s in (True, False)
    ]


def rounded(folder):
    found = []
    for sharded in (True, False):
        changes = {"model": _of_case("opt")["model"].bfloat16()}
        with patch.object(projected, "_BLOCK", 3 * 32):
            name = f"rounded-{sharded}"
            found.append(trained(folder / name, "opt", sharded=sharded, **changes)["weights"][-1])
    return found


def bytes_of_a_step(folder):
    log = []
    settings = USUAL | SHARDED | {"per_device_train_batch_size": 24, "logging_strategy": "no"}
    with per_call(DPGrapeTrainer, "training_step", log), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            spot_checks, "SHARE", 0
        )  # a pass that is watched gathers the weights once more
        make_trainer(folder / "bytes", **_of_case("opt"), **settings).train()
    return log


def killed(folder):
    def kill(*call):
        if armed.armed:
            die()

    make, settings = RUNS["opt"]
    parts, armed = make(), run.Broken([])
    if dist.get_rank() == 1:
        parts["model"].model.decoder.layers[1].fc1.register_forward_hook(kill)
    settings = USUAL | settings | SHARDED | {"callbacks": [run.Arm(armed)]}
    make_trainer(folder / "killed", known_streams=Streams.seeded(0), **parts, **settings).train()


def broken_data(folder):
    """To be the last: the process group is gone afterwards."""
    data = run.Broken(examples_of("opt", 24).examples)
    settings = USUAL | SHARDED | {"expected_batch_size": 20, "callbacks": [run.Arm(data)]}
    settings |= {"model": only("opt").model(), "train_dataset": data}
    make_trainer(folder / "broken", known_streams=Streams.seeded(0), **settings).train()


SCENARIOS = {
    "two": [
        *(run.named(equal, name) for name in IN_TWO),
        *(loaded_by_the_first, autocast, rounded, spread, save, resume),
        *(bytes_of_a_step, broken_data),
    ],
    "three": [run.named(equal, "llama, uneven"), resume],
    "killed": [killed],
}


def main_of(rank, world_size, port, folder, name):
    """Runs scenarios in a process that no launcher has told its place."""
    run.main_of(rank, world_size, port, folder, SCENARIOS[name])


if __name__ == "__main__":
    run.main(sys.argv[1], SCENARIOS["three"])
