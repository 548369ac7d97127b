"""What the first batch does not show: models that behave otherwise in a later one.

Each must be refused, or be right. Shapes: B samples, T positions.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dp_grape_hf.errors import PrivacyError, UnsupportedModelError
from dp_grape_hf.gradients.layerwise import LayerwiseEngine
from tests.gradients.functions import Function
from tests.support.oracles import assert_gradients_equal, single_sample_gradients

WIDTH, VOCABULARY = 8, 20


def cross_entropy(outputs: Tensor, labels: Tensor | None) -> Tensor:
    assert labels is not None
    return functional.cross_entropy(outputs, labels, reduction="none")


def texts(*lengths: int, positions: int = 6) -> dict[str, Tensor]:
    mask = (torch.arange(positions)[None] < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(1, VOCABULARY, mask.shape)
    return {"x": ids, "mask": mask, "labels": torch.randint(0, 3, (len(mask),))}


def check(engine: Any, batch: dict[str, Tensor]) -> None:
    expected = single_sample_gradients(engine.model, batch, None, engine.loss)[1]
    assert_gradients_equal(engine(batch, {})[1], expected)


# ---- What carries the batch changes ----


class Unpads(nn.Module):
    """Takes padding out, if there is any: then it sees positions without their samples."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if bool(mask.all()):
            hidden = self.layer(self.table(x)).tanh()
        else:
            keep = mask.bool()
            found = self.layer(self.table(x[keep])).tanh()
            hidden = torch.zeros(*x.shape, WIDTH).masked_scatter(keep[..., None], found)
        return self.head(hidden.sum(1))


def test_equal_lengths_at_first_do_not_vouch_for_later_batches(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """From then on the whole model runs for one sample after another."""
    engine = LayerwiseEngine(Unpads(), cross_entropy)
    check(engine, texts(12, 12, positions=12))
    assert not caplog.text
    for lengths in ((6, 6), (6, 2), (5, 7)):
        check(engine, texts(*lengths, positions=14))
    assert "the model (Unpads) cannot be vectorised" in caplog.text


class Unpadded(nn.Module):
    """Runs layers on positions without their samples, inside a module that knows the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        keep = mask.bool()
        found = self.norm(self.layer(hidden[keep])).tanh()
        return torch.zeros_like(hidden).masked_scatter(keep[..., None], found)


def classifier(compute: Callable[..., Tensor], **layers: nn.Module) -> nn.Module:
    table, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 3)
    return Function(compute, table=table, **layers, head=head)


def test_positions_that_were_selected_are_left_to_the_module_around(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def compute(m: Any, x: Tensor, mask: Tensor) -> Tensor:
        """Gives a module positions with their samples."""
        return m.head(m.block(m.table(x), mask).sum(1))

    engine = LayerwiseEngine(classifier(compute, block=Unpadded()), cross_entropy)
    for batch in (texts(6, 6), texts(6, 2), texts(4, 1, positions=7)):
        check(engine, batch)
    assert "block (Unpadded) cannot be vectorised" in caplog.text


class Masked(nn.Module):
    """Owns a parameter, and is given one mask for all samples, or one for each."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = (self.layer(x) * self.scale) @ x.transpose(-1, -2) + mask
        return scores.softmax(-1) @ x


def attends(every: bool) -> LayerwiseEngine:
    """Makes a mask for each sample only where there is padding; ``every`` time if asked."""

    def compute(m: Any, x: Tensor, mask: Tensor) -> Tensor:
        seen = torch.full((x.shape[1], x.shape[1]), -1e4).triu(1)[None]  # (1, T, T)
        if every or not bool(mask.all()):
            seen = seen + (1 - mask.float())[:, None, :] * -1e4  # (B, T, T)
        return m.head(m.masked(m.table(x), seen).reshape(len(x), -1, WIDTH).mean(1))

    return LayerwiseEngine(classifier(compute, masked=Masked()), cross_entropy)


def test_a_mask_of_each_sample_does_not_reach_the_others() -> None:
    engine = attends(every=False)
    check(engine, texts(6, 6, 6))
    check(engine, texts(6, 4, 2))
    check(attends(every=True), texts(6, 4, 2))


def test_texts_of_other_lengths_do_not_repeat_the_detection() -> None:
    engine = attends(every=True)
    check(engine, texts(6, 4, 2))
    calls: list[int] = []
    engine._learn = lambda *args: calls.append(1)  # type: ignore[assignment,method-assign,func-returns-value]
    for positions in (9, 3, 12):
        check(engine, texts(3, 2, 3, 1, positions=positions))
    assert not calls


def positions_first(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    """Flattens positions before samples, which is the same where there is one position."""
    hidden = m.table(x).transpose(0, 1).reshape(-1, WIDTH)
    return m.head(m.layer(hidden).tanh().view(x.shape[1], -1, WIDTH).mean(0))


def test_an_order_of_rows_that_shows_later_is_refused_then() -> None:
    model = classifier(positions_first, layer=nn.Linear(WIDTH, WIDTH))
    engine = LayerwiseEngine(model, cross_entropy)
    check(engine, texts(1, 1, 1, positions=1))

    with pytest.raises(UnsupportedModelError, match="couples the rows of a batch"):
        engine(texts(5, 5, 5), {})


def centred(m: Any, x: Tensor) -> Tensor:
    hidden = m.layer(x).tanh()
    return m.head(hidden - hidden.mean(0, keepdim=True))


@pytest.mark.parametrize("samples", [2, 4])
@pytest.mark.parametrize("broken", ["nothing to learn", "nan"])
def test_samples_without_gradients_do_not_vouch_for_a_model(broken: str, samples: int) -> None:
    layers = {"layer": nn.Linear(5, WIDTH), "head": nn.Linear(WIDTH, 3)}
    engine = LayerwiseEngine(Function(centred, **layers), cross_entropy)
    batch = {"x": torch.randn(samples, 5), "labels": torch.zeros(samples, dtype=torch.long)}
    if broken == "nan":
        batch["x"][:2] = torch.nan
    else:
        batch["labels"][:2] = -100
    if samples == 2:  # there is nothing to see yet
        engine(batch, {})
        batch = {"x": torch.randn(4, 5), "labels": torch.zeros(4, dtype=torch.long)}
    with pytest.raises(PrivacyError, match="couples"):
        engine(batch, {})


# ---- Gradients that would be missing ----


class ChangedInPlace(nn.Module):
    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.inplace, self.act = inplace, nn.SiLU(inplace=inplace)
        self.up, self.down, self.head = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.up(x))
        return self.head(
            self.down(hidden if self.inplace else hidden.masked_fill_(x[:, :1] > 0, 0))
        )


@pytest.mark.parametrize("inplace", [False, True])
def test_an_activation_changed_in_place_is_not_recomputed(inplace: bool) -> None:
    batch = {"x": torch.randn(6, 5), "labels": torch.randint(0, 3, (6,))}
    model = ChangedInPlace(inplace)
    check(LayerwiseEngine(model, cross_entropy, recompute_activations=True), batch)


class GatedRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(WIDTH)), 1e-6

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        normalised = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (normalised if gate is None else normalised * gate.sigmoid())


def test_a_layer_given_a_second_tensor_loses_its_rule() -> None:
    def compute(m: Any, x: Tensor, mask: Tensor) -> Tensor:
        hidden = m.table(x)
        gates = (hidden.flip(1),) if x.shape[1] > 4 else ()
        return m.head(m.norm(hidden, *gates).tanh().mean(1))

    for lengths in ((6, 3), (3, 6)):
        engine = LayerwiseEngine(classifier(compute, norm=GatedRMSNorm()), cross_entropy)
        for positions in lengths:
            check(engine, texts(2, 2, 2, positions=positions))
