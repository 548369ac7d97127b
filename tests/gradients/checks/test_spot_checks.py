"""A row that is computed once more alone is compared as it is clipped."""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.gradients import SpotCheckedEngine, make_engine, tolerance_for
from dp_grape_hf.gradients.checks import spot_checks
from tests.gradients.functions import Function


def leaks(m, x):
    """Its head reads another row, later; the gradient of its body is fifty times as long."""
    read = x + 0.2 * x.roll(1, 0) if m.later and len(x) > 1 else x
    return 50 * m.body(x) + m.head(read)


BODY, HEAD = ({f"{part}.{own}": 1.0 for own in ("weight", "bias")} for part in ("body", "head"))


@pytest.mark.parametrize(
    ("parts", "noticed"),
    [
        ([BODY | HEAD], False),
        ([BODY, HEAD], True),
        ([BODY | dict.fromkeys(HEAD, 50.0)], True),
        ([dict.fromkeys(BODY, 0.02) | HEAD], True),
    ],
    ids=["together", "apart", "head multiplied", "body multiplied"],
)
def test_a_leak_counts_as_much_as_the_clip_lets_through(parts, noticed, monkeypatch):
    monkeypatch.setattr(spot_checks, "SHARE", 1.0)
    model = Function(leaks, body=nn.Linear(64, 1), head=nn.Linear(64, 1), later=False)
    batch = {"x": torch.randn(3, 64)}
    engine = make_engine("layerwise", model, lambda outputs, labels: outputs.square().sum(1))
    engine(batch, {})
    model.later = True
    watched = SpotCheckedEngine(engine, tolerance_for(model), parts, 0.01, random.Random(0))
    if noticed:
        with pytest.raises(PrivacyError, match="differs from its gradient alone"):
            watched(batch, {})
    else:
        watched(batch, {})


def treats_some(which):
    """In training, turns the sign of rows that a function of B says."""

    def compute(m, x):
        if m.training:
            turned = x * (1 - 2 * which(len(x)).float())[:, None]
            x = functional.dropout(turned, 0.3)
        return m.head(x)

    return Function(compute, head=nn.Linear(4, 1))


def engine_of(model):
    return make_engine("layerwise", model, lambda outputs, labels: (outputs + 1).square().sum(1))


@pytest.mark.parametrize(
    ("which", "size"),
    [
        pytest.param(lambda size: torch.arange(size) % 2 == 1, 6, id="every second"),
        pytest.param(lambda size: torch.arange(size) == size - 1, 40, id="the last"),
        pytest.param(lambda size: torch.arange(size) == 15, 16, id="the last of a full batch"),
        pytest.param(lambda size: torch.arange(size) == 17, 40, id="one of many"),
    ],
)
def test_a_model_that_depends_on_row_positions_is_refused(which, size):
    with pytest.raises(PrivacyError, match=r"position|couples"):
        engine_of(treats_some(which)).examine({"x": torch.randn(size, 4)}, {})


def test_a_watched_row_may_not_be_treated_by_its_place(monkeypatch):
    """In batches of another size than was examined."""
    monkeypatch.setattr(spot_checks, "SHARE", 1.0)
    engine = engine_of(treats_some(lambda size: (torch.arange(size) % 2 == 1) & (size == 6)))
    assert engine.examine({"x": torch.randn(7, 4)}, {})
    parts = [dict.fromkeys(("head.weight", "head.bias"), 1.0)]
    watched = SpotCheckedEngine(engine, tolerance_for(engine.model), parts, 0.01, random.Random(0))

    def watch():
        for _ in range(10):  # one of them is of an odd row
            watched({"x": torch.randn(6, 4)}, {})

    with pytest.raises(PrivacyError, match="by its position"):
        watch()


def test_the_coins_alone_say_which_batches_are_watched(monkeypatch):
    """Processes with sharded weights would wait for each other: batches differ, coins do not."""
    monkeypatch.setattr(spot_checks, "SHARE", 0.5)
    model = nn.Linear(4, 1)
    passes = {}
    for rows in (1, 2, 5):
        engine = make_engine("layerwise", model, lambda outputs, labels: outputs.square().sum(1))
        engine.stay_in_step({"input": torch.randn(2, 4)}, {})
        parts = [dict.fromkeys(("weight", "bias"), 1.0)]
        coins = random.Random(0)
        watched = SpotCheckedEngine(engine, tolerance_for(model), parts, 0.01, coins)
        seen = []
        hook = model.register_forward_hook(lambda *call, seen=seen: seen.append(0))
        passes[rows] = []
        for _ in range(40):
            watched({"input": torch.randn(rows, 4)}, {})
            passes[rows].append(len(seen))
        hook.remove()
    assert passes[1] == passes[2] == passes[5]
    assert passes[1][-1] > 50
