"""What the first batch does not show: models that behave otherwise in a later one.

Each must be refused, or be right. Shapes: B samples, T positions.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

from dp_grape_hf.errors import PrivacyError, UnsupportedModelError
from dp_grape_hf.gradients.layerwise import LayerwiseEngine
from tests.gradients.functions import Function
from tests.support.oracles import assert_gradients_equal, single_sample_gradients

WIDTH, VOCABULARY = 8, 20


def cross_entropy(outputs, labels):
    assert labels is not None
    return functional.cross_entropy(outputs, labels, reduction="none")


def texts(*lengths, positions=6):
    mask = (torch.arange(positions)[None] < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(1, VOCABULARY, mask.shape)
    return {"x": ids, "mask": mask, "labels": torch.randint(0, 3, (len(mask),))}


def check(engine, batch):
    expected = single_sample_gradients(engine.model, batch, None, engine.loss)[1]
    assert_gradients_equal(engine(batch, {})[1], expected)


def classifier(compute, **layers):
    table, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 3)
    return Function(compute, table=table, **layers, head=head)


def unpads(m, x, mask):
    """Takes padding out, if there is any: then it sees positions without their samples."""
    if bool(mask.all()):
        hidden = m.layer(m.table(x)).tanh()
    else:
        keep = mask.bool()
        found = m.layer(m.table(x[keep])).tanh()
        hidden = torch.zeros(*x.shape, WIDTH).masked_scatter(keep[..., None], found)
    return m.head(hidden.sum(1))


def test_equal_lengths_at_first_do_not_vouch_for_later_batches(caplog):
    engine = LayerwiseEngine(classifier(unpads, layer=nn.Linear(WIDTH, WIDTH)), cross_entropy)
    check(engine, texts(12, 12, positions=12))
    assert not caplog.text
    for lengths in ((6, 6), (6, 2), (5, 7)):
        check(engine, texts(*lengths, positions=14))
    assert "the model (Function) cannot be vectorised" in caplog.text


def unpadded(m, hidden, mask):
    """Runs layers on positions without their samples, inside a module that knows the samples."""
    keep = mask.bool()
    found = m.norm(m.layer(hidden[keep])).tanh()
    return torch.zeros_like(hidden).masked_scatter(keep[..., None], found)


def test_positions_that_were_selected_are_left_to_the_module_around(caplog):
    def compute(m, x, mask):
        """Gives a module positions with their samples."""
        return m.head(m.block(m.table(x), mask).sum(1))

    block = Function(unpadded, layer=nn.Linear(WIDTH, WIDTH), norm=nn.LayerNorm(WIDTH))
    engine = LayerwiseEngine(classifier(compute, block=block), cross_entropy)
    for batch in (texts(6, 6), texts(6, 2), texts(4, 1, positions=7)):
        check(engine, batch)
    assert "block (Function) cannot be vectorised" in caplog.text


def masked(m, x, mask):
    """Owns a parameter, and is given one mask for all samples, or one for each."""
    return ((m.layer(x) * m.scale) @ x.transpose(-1, -2) + mask).softmax(-1) @ x


def attends(every):
    """Makes a mask for each sample only where there is padding; ``every`` time if asked."""

    def compute(m, x, mask):
        seen = torch.full((x.shape[1], x.shape[1]), -1e4).triu(1)[None]  # (1, T, T)
        if every or not bool(mask.all()):
            seen = seen + (1 - mask.float())[:, None, :] * -1e4  # (B, T, T)
        return m.head(m.masked(m.table(x), seen).reshape(len(x), -1, WIDTH).mean(1))

    attention = Function(masked, scale=torch.ones(WIDTH), layer=nn.Linear(WIDTH, WIDTH))
    return LayerwiseEngine(classifier(compute, masked=attention), cross_entropy)


def test_a_mask_of_each_sample_does_not_reach_the_others():
    engine = attends(every=False)
    check(engine, texts(6, 6, 6))
    check(engine, texts(6, 4, 2))
    check(attends(every=True), texts(6, 4, 2))


def test_texts_of_other_lengths_do_not_repeat_the_detection():
    engine = attends(every=True)
    check(engine, texts(6, 4, 2))
    calls = []
    engine._learn = lambda *args: calls.append(1)
    for positions in (9, 3, 12):
        check(engine, texts(3, 2, 3, 1, positions=positions))
    assert not calls


def positions_first(m, x, mask):
    """Flattens positions before samples, which is the same where there is one position."""
    hidden = m.table(x).transpose(0, 1).reshape(-1, WIDTH)
    return m.head(m.layer(hidden).tanh().view(x.shape[1], -1, WIDTH).mean(0))


def test_an_order_of_rows_that_shows_later_is_refused_then():
    model = classifier(positions_first, layer=nn.Linear(WIDTH, WIDTH))
    engine = LayerwiseEngine(model, cross_entropy)
    check(engine, texts(1, 1, 1, positions=1))

    with pytest.raises(UnsupportedModelError, match="couples the rows of a batch"):
        engine(texts(5, 5, 5), {})


def centred(m, x):
    hidden = m.layer(x).tanh()
    return m.head(hidden - hidden.mean(0, keepdim=True))


@pytest.mark.parametrize("samples", [2, 4])
@pytest.mark.parametrize("broken", ["nothing to learn", "nan"])
def test_samples_without_gradients_do_not_vouch_for_a_model(broken, samples):
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


@pytest.mark.parametrize("inplace", [False, True])
def test_an_activation_changed_in_place_is_not_recomputed(inplace):
    batch = {"x": torch.randn(6, 5), "labels": torch.randint(0, 3, (6,))}

    def compute(m, x):
        hidden = m.act(m.up(x))
        return m.head(m.down(hidden if inplace else hidden.masked_fill_(x[:, :1] > 0, 0)))

    layers = {"up": nn.Linear(5, 8), "down": nn.Linear(8, 8), "head": nn.Linear(8, 3)}
    model = Function(compute, act=nn.SiLU(inplace=inplace), **layers)
    check(LayerwiseEngine(model, cross_entropy, recompute_activations=True), batch)


class GatedRMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(WIDTH)), 1e-6

    def forward(self, x, gate=None):
        normalised = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (normalised if gate is None else normalised * gate.sigmoid())


def test_a_layer_given_a_second_tensor_loses_its_rule():
    def compute(m, x, mask):
        hidden = m.table(x)
        gates = (hidden.flip(1),) if x.shape[1] > 4 else ()
        return m.head(m.norm(hidden, *gates).tanh().mean(1))

    for lengths in ((6, 3), (3, 6)):
        engine = LayerwiseEngine(classifier(compute, norm=GatedRMSNorm()), cross_entropy)
        for positions in lengths:
            check(engine, texts(2, 2, 2, positions=positions))
