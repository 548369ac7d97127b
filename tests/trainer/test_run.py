"""A step of a run: its order, who may look on, and that it needs no trainer."""

from contextlib import contextmanager

import pytest
import torch
from transformers import default_data_collator

from dp_grape_hf import phases
from dp_grape_hf.arguments import PrivacyPlan
from dp_grape_hf.ledger import Ledger
from dp_grape_hf.mechanism import LogicalBatch
from dp_grape_hf.trainer import PrivateRun
from tests.support.trainers import (
    EXACT,
    Releases,
    TinyForSequenceClassification,
    Watch,
    assert_same_weights,
    make_args,
    make_trainer,
    points,
    trained_in,
    weights_of,
)


class Notes(phases.Observer):
    """Notes the phases, each with those it lies in, and what is made when."""

    def __init__(self):
        self.seen = []
        self.inside = []

    @contextmanager
    def phase(self, name):
        self.inside.append(name)
        self.seen.append("/".join(self.inside))
        yield
        self.inside.pop()

    def computed(self, name, values):
        self.seen.append(f"computed {name}")


def private_run(folder, observer=None, **changes):
    args = make_args(folder, **changes)
    run = PrivateRun(args, TinyForSequenceClassification(), observer=observer)
    plan = PrivacyPlan(args, len(points()))
    ledger = Ledger.start(plan.mechanism, reason="a test")
    run.start(ledger, torch.Generator().manual_seed(0))
    run.make_optimizer()
    return run


def draw(*sizes):
    examples, batches, first = points(), [], 0
    for size in sizes:
        batches.append(default_data_collator([examples[i] for i in range(first, first + size)]))
        first += size
    return LogicalBatch([{k: b[k] for k in ("x", "labels")} for b in batches], sizes)


def test_a_step_has_its_phases_in_order(tmp_path):
    notes = Notes()
    run = private_run(tmp_path, notes)
    run.step(0, draw(4, 4))
    notes.seen.clear()  # what is done with the first batch only
    run.step(1, draw(4, 4))
    drawn = f"computed {phases.PROJECTORS}"
    outer = [name for name in notes.seen if "/" not in name and name != drawn]
    batch = [phases.FORWARD, phases.BACKWARD, f"computed {phases.PER_SAMPLE}", phases.CLIP]
    release = [phases.RELEASE, f"computed {phases.RELEASED}", phases.UPDATE]
    assert outer == [phases.REDRAW, *batch, *batch, *release]
    inner = [name for name in notes.seen if name.startswith((phases.REDRAW, phases.RELEASE))]
    assert inner == [phases.REDRAW, phases.RELEASE, f"{phases.RELEASE}/{phases.RECORD}"]


def test_a_run_releases_what_the_trainer_does(releases, tmp_path):
    make_trainer(tmp_path / "trainer", max_steps=1, **EXACT).train()
    run = private_run(tmp_path / "run", max_steps=1, **EXACT)
    run.per_sample.observer = found = Releases()
    done = run.step(0, draw(len(points())))
    assert len(releases) == 1
    assert_same_weights(found.releases[0], releases[0], atol=1e-6, rtol=1e-5)
    flat = torch.cat([value.flatten() for value in releases[0].values()])
    torch.testing.assert_close(done.norm, flat.norm())


@pytest.mark.slow
def test_a_trainer_that_stopped_resumes_itself(tmp_path):
    """Its optimizer is older than the run; the state of the projection is saved with it."""
    settings = EXACT | {"method": "dp_galore", "save_strategy": "steps", "save_steps": 1}
    whole = trained_in(tmp_path / "whole", **settings)
    stop = Watch(stop_at=2)
    trainer = trained_in(tmp_path / "stopped", **settings, callbacks=[stop])
    assert trainer.ledger.steps == 2
    stop.stop_at = None
    trainer.train(resume_from_checkpoint=True)
    assert trainer.ledger.steps == 4
    assert_same_weights(weights_of(trainer.model), weights_of(whole.model))
