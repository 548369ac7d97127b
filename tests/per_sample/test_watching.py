"""A row that is computed once more alone is compared as it is clipped."""

import random

import pytest
import torch
from torch import Tensor, nn

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.per_sample import WatchedEngine, make_engine, tolerance_for, watching


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
    monkeypatch.setattr(watching, "SHARE", 1.0)
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


def test_the_coins_alone_say_which_batches_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes with sharded weights would wait for each other: batches differ, coins do not."""
    monkeypatch.setattr(watching, "SHARE", 0.5)
    model = nn.Linear(4, 1)
    passes = {}
    for rows in (1, 2, 5):
        engine = make_engine("layerwise", model, lambda outputs, labels: outputs.square().sum(1))
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
