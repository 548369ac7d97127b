"""A row that is computed once more alone is compared as it is clipped."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.gradients import WatchedEngine, make_engine, tolerance_for
from dp_grape_hf.gradients.checks import spot_checks
from dp_grape_hf.gradients.checks.spot_checks import ROWS


class Leaks(nn.Module):
    """Its head reads another row, later; the gradient of its body is fifty times as long."""

    later = False

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 1), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        read = x + 0.2 * x.roll(1, 0) if self.later and len(x) > 1 else x
        return 50 * self.body(x) + self.head(read)


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
def test_a_leak_counts_as_much_as_the_clip_lets_through(
    parts: list[dict[str, float]], noticed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spot_checks, "SHARE", 1.0)
    model, batch = Leaks(), {"x": torch.randn(3, 64)}
    engine = make_engine("layerwise", model, lambda outputs, labels: outputs.square().sum(1))
    engine(batch, {})
    model.later = True
    watched = WatchedEngine(engine, tolerance_for(model), parts, 0.01, random.Random(0))
    if noticed:
        with pytest.raises(PrivacyError, match="among others than alone"):
            watched(batch, {})
    else:
        watched(batch, {})


class TreatsSome(nn.Module):
    """In training, turns the sign of rows that a function of B says."""

    def __init__(self, which: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.head, self.which = nn.Linear(4, 1), which

    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            turned = input * (1 - 2 * self.which(len(input)).float())[:, None]
            input = functional.dropout(turned, 0.3)
        output: Tensor = self.head(input)
        return output


@pytest.mark.parametrize(
    ("which", "sizes"),
    [
        (lambda size: torch.arange(size) % 2 == 1, (6,)),
        (lambda size: torch.arange(size) == size - 1, (40,)),
        (lambda size: torch.arange(size) == 15, (9, 16)),
    ],
    ids=["every second", "the last", "the last of a full batch"],
)
def test_a_model_that_treats_a_row_by_its_place_is_refused(
    which: Callable[[int], Tensor], sizes: tuple[int, ...]
) -> None:
    watched = watching_over(TreatsSome(which))
    *before, last = sizes
    for size in before:
        watched({"input": torch.randn(size, 4)}, {})
    with pytest.raises(PrivacyError, match="by its place in the batch"):
        watched({"input": torch.randn(last, 4)}, {})


def test_some_rows_of_a_batch_that_is_larger_than_all_before_are_watched() -> None:
    model = TreatsSome(lambda size: torch.zeros(size))
    watched, seen = watching_over(model), list[int]()
    watched({"input": torch.randn(2, 4)}, {})
    hook = model.register_forward_hook(lambda module, args, output: seen.append(len(output)))
    for size in (3, 2, 3, 20, 5, 20):
        watched({"input": torch.randn(size, 4)}, {})
    hook.remove()
    assert seen == [3, 3, 1, 1, 1, 2, 3, 20, 20, *[1] * ROWS, 5, 20]


def watching_over(model: nn.Module) -> WatchedEngine:
    """Returns an engine that watches as few batches as it may."""
    engine = make_engine("layerwise", model, lambda outputs, labels: (outputs + 1).square().sum(1))
    parts = [dict.fromkeys(("head.weight", "head.bias"), 1.0)]
    return WatchedEngine(engine, tolerance_for(model), parts, 0.01, NeverWatch())


class NeverWatch(random.Random):
    """Coins that do not say to look."""

    def random(self) -> float:
        return 0.999


def test_the_coins_alone_say_which_batches_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes with sharded weights would wait for each other: batches differ, coins do not."""
    monkeypatch.setattr(spot_checks, "SHARE", 0.5)
    model = nn.Linear(4, 1)
    passes = {}
    for rows in (1, 2, 5):
        engine = make_engine("layerwise", model, lambda outputs, labels: outputs.square().sum(1))
        engine.stay_in_step({"input": torch.randn(2, 4)}, {})
        parts = [dict.fromkeys(("weight", "bias"), 1.0)]
        coins = random.Random(0)
        watched = WatchedEngine(engine, tolerance_for(model), parts, 0.01, coins)
        seen: list[int] = []
        hook = model.register_forward_hook(lambda *call, seen=seen: seen.append(0))
        passes[rows] = []
        for _ in range(40):
            watched({"input": torch.randn(rows, 4)}, {})
            passes[rows].append(len(seen))
        hook.remove()
    assert passes[1] == passes[2] == passes[5]
    assert passes[1][-1] > 50
