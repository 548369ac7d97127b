"""What only the layerwise engine does: rules per layer, sites, the probe, checkpointing."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dp_grape_hf import UnsupportedModelError, per_sample_gradients
from dp_grape_hf.gradients import Dense, flat
from dp_grape_hf.gradients.forms import GradientSum
from dp_grape_hf.gradients.layerwise import LayerwiseEngine
from dp_grape_hf.projections import Projector, Side
from tests.gradients.functions import Function, mean_output
from tests.support.models import only
from tests.support.oracles import assert_exact, assert_gradients_equal, single_sample_gradients

WIDTH = 6


check = partial(assert_exact, loss=mean_output)


def tokens(batch_size, positions=5):
    return {"x": torch.randint(0, 7, (batch_size, positions))}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpointing_is_an_error_and_not_a_wrong_gradient():
    model, inputs = only("gpt2").model(use_cache=False), only("gpt2").batch(2)
    model.activation_checkpointing_enable({"use_reentrant": True})
    with pytest.raises((RuntimeError, UnsupportedModelError), match=r"use_reentrant|requires_grad"):
        per_sample_gradients(model, inputs)


def test_a_checkpointed_block_may_run_twice():
    def compute(m, x):
        hidden = m.table(x)
        for _ in range(2):
            hidden = checkpoint(m.block, hidden, use_reentrant=False)
        return hidden @ m.table(x[:, :1]).transpose(1, 2)

    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH))
    model = Function(compute, table=nn.Embedding(7, WIDTH), block=block)
    check(model, tokens(3), {"block.0.weight": Projector(torch.randn(WIDTH, 2), Side.RIGHT)})


def flattened(m, x):
    """Its middle layers see (B, T) as one dimension, as in OPT's feed-forward."""
    hidden = m.table(x.flatten()).tanh()  # (B * T, WIDTH)
    return m.down(m.up(m.norm(hidden)).relu()).view(*x.shape, WIDTH)


def flattening(compute=flattened):
    layers = {"up": nn.Linear(WIDTH, 8), "down": nn.Linear(8, WIDTH), "norm": nn.LayerNorm(WIDTH)}
    return Function(compute, table=nn.Embedding(7, WIDTH), **layers)


def test_a_relative_position_table_is_refused_for_a_single_position():
    def attend(m, x):
        """Adds a table of (T, T) scores to each sample's own scores, and leaves out the softmax."""
        places = torch.arange(x.shape[1])
        scores = m.scores(places[:, None] - places[None] + 4).squeeze(-1)  # (T, T)
        hidden = m.table(x)
        return (hidden @ hidden.transpose(1, 2) + scores).tanh() @ hidden

    model = Function(attend, table=nn.Embedding(7, WIDTH), scores=nn.Embedding(9, 1))
    with pytest.raises(UnsupportedModelError, match=r"for scores\.weight.*couples the rows"):
        per_sample_gradients(model, tokens(3, 1), loss=mean_output)


def shared():
    """One layer run twice, and one table that is looked up, multiplied by, and looked up again."""

    def compute(m, x):
        hidden = m.table(x) + m.again(x[:, :1])
        hidden = m.twice(m.twice(hidden).tanh()).tanh()
        return torch.cat([m.head(hidden[:, :2]), m.small(hidden)], 1)

    table, again = nn.Embedding(7, WIDTH), nn.Embedding(7, WIDTH, padding_idx=0)
    head, small = (nn.Linear(WIDTH, 7, bias=False) for _ in range(2))
    again.weight = head.weight = small.weight = table.weight
    layers = {"again": again, "twice": nn.Linear(WIDTH, WIDTH), "head": head, "small": small}
    return Function(compute, table=table, **layers)


@pytest.mark.parametrize("positions", [2, 5])
def test_uses_of_one_weight_in_different_forms_add_up(positions, monkeypatch):
    check(shared(), tokens(4, positions))
    monkeypatch.setattr(flat, "MOST", 0)
    gradients = check(shared(), tokens(4, positions))
    assert isinstance(gradients["table.weight"], Dense if positions == 5 else GradientSum)


def gate(m, hidden, power, *, table, name="none", half=None):
    """Owns parameters itself and a child; takes keywords and constants; returns several things."""
    mixed = m.child(hidden) * (hidden * m.scale + table).sigmoid() ** power
    return mixed, name, {"logits": mixed @ m.matrix.T, "table": table}


def gated(flattened=False, compute=gate):
    """Hands its gate a tensor for each sample and a constant one, as long as the batch may be."""

    def outer(m, x):
        hidden, constant = m.table(x), torch.linspace(0, 1, 5 * WIDTH).view(5, WIDTH)
        if flattened:
            hidden, constant = hidden.flatten(0, 1), constant[0]
        mixed, name, more = m.gate(hidden, 2, table=constant, name="gate")
        assert name == "gate"
        return torch.cat([mixed, more["logits"]], -1).reshape(x.shape[0], -1) * more["table"].mean()

    weights = {"scale": torch.randn(WIDTH), "matrix": torch.randn(3, WIDTH)}
    own = Function(compute, **weights, child=nn.Linear(WIDTH, WIDTH))
    return Function(outer, table=nn.Embedding(7, WIDTH), gate=own)


class Unvectorised(torch.autograd.Function):
    """The identity, written as vmap cannot run it."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


def looping(flattened=False, drops=False):
    def compute(m, hidden, *more, **others):
        x = Unvectorised.apply(hidden.add_(1))
        if drops:
            x = functional.dropout(x, 0.5, m.training)
        return gate(m, x - 1, *more, **others)

    return gated(flattened, compute)


@pytest.mark.parametrize("make", [gated, looping], ids=["under vmap", "one by one"])
@pytest.mark.parametrize("flattened", [False, True])
@pytest.mark.parametrize(("batch_size", "projected"), [(1, False), (3, False), (5, True)])
def test_a_module_with_parameters_of_its_own_is_exact(make, batch_size, flattened, projected):
    projectors = {
        "gate.child.weight": Projector(torch.randn(WIDTH, 2), Side.RIGHT),
        "gate.matrix": Projector(torch.randn(3, 1), Side.LEFT),
    }
    check(make(flattened), tokens(batch_size), projectors if projected else None)


def test_what_runs_for_one_sample_after_another_is_told_once(caplog):
    engine = LayerwiseEngine(looping(), mean_output)
    for _ in range(3):
        engine(tokens(3), {})
    (record,) = caplog.records
    assert "gate (Function) cannot be vectorised over samples (In order to use" in record.message
    assert "one sample after another" in record.message


def test_samples_that_run_separately_have_separate_dropout():
    engine = LayerwiseEngine(looping(drops=True), mean_output)
    inputs = {k: v[:1].repeat(3, 1) for k, v in tokens(1).items()}
    assert engine(inputs, {})[0].unique().numel() == 3


def routed():
    """A mixture of experts: how many positions an expert is given depends on the data."""

    def compute(m, x):
        hidden, outputs = m.table(x), torch.zeros(*x.shape, WIDTH)
        for i, expert in enumerate(m.experts):
            places = (x % 2 == i).nonzero(as_tuple=True)
            outputs = outputs.index_put(places, expert(hidden[x % 2 == i]))
        return outputs

    experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
    return Function(compute, table=nn.Embedding(7, WIDTH), experts=experts)


@pytest.mark.parametrize("odd", [(3, 2, 0), (3, 1, 2)], ids=["indivisible", "divisible"])
def test_layers_with_unequal_positions_per_sample_run_sample_by_sample(odd, caplog):
    x = torch.stack([torch.tensor([2] * n + [1] * (4 - n)) for n in odd])
    check(routed(), {"x": x})
    engine = LayerwiseEngine(routed(), mean_output)
    engine({"x": x[:1]}, {})  # at once, though one alone would be exact
    assert "the model (Function) cannot be vectorised" in caplog.records[-1].getMessage()
    expected = single_sample_gradients(engine.model, {"x": x}, None, mean_output)[1]
    assert_gradients_equal(engine({"x": x}, {})[1], expected)


def unused(what):
    """Owns a layer that it never calls, or whose result it drops, or an unused parameter."""

    def compute(m, x):
        hidden = m.table(x)
        if what == "a dropped result":
            m.extra(hidden)
        return m.extra(hidden) if what == "a parameter" else hidden

    extra = nn.Linear(WIDTH, WIDTH)
    if what == "a parameter":
        extra.extra = nn.Parameter(torch.zeros(3))  # then the generic rule takes the layer
    return Function(compute, table=nn.Embedding(7, WIDTH), extra=extra)


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("a layer", "extra.weight, extra.bias"),
        ("a dropped result", "extra.weight, extra.bias"),
        ("a parameter", "extra.extra"),
    ],
)
def test_a_trainable_parameter_without_part_in_the_loss_is_refused(what, names):
    with pytest.raises(UnsupportedModelError, match=rf"no part in the loss: {names}\."):
        per_sample_gradients(unused(what), tokens(3), loss=mean_output)
    model = unused(what)
    for name in names.split(", "):
        model.get_parameter(name).requires_grad_(False)
    check(model, tokens(3))


def test_a_layer_losing_its_batch_dimension_runs_in_its_parent():
    def compute(m, x):
        hidden = m.table(x)
        return hidden + m.linear(hidden if x.shape[1] < 5 else hidden[:1].sum(1))

    layers = {"table": nn.Embedding(7, WIDTH), "linear": nn.Linear(WIDTH, WIDTH)}
    engine = LayerwiseEngine(Function(compute, **layers), mean_output)
    for positions in (4, 5):  # all rows read the first from five positions on, but not alone
        batch = tokens(3, positions)
        expected = single_sample_gradients(engine.model, batch, None, mean_output)[1]
        assert_gradients_equal(engine(batch, {})[1], expected)


@pytest.mark.parametrize("probed", [True, False])
def test_a_failure_during_a_pass_leaves_the_model_unchanged(probed):
    fails = []

    def compute(m, x):
        hidden = flattened(m, x)
        if fails:
            raise RuntimeError("out of memory, say")
        return hidden

    model = flattening(compute)
    model.up.forward = custom = model.up.forward  # somebody else's wrapper
    model.norm.eval()
    engine = LayerwiseEngine(model, mean_output)
    if probed:
        engine(tokens(3), {})
    fails.append(1)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine(tokens(3), {})
    fails.clear()
    assert vars(model.up)["forward"] is custom
    assert not any("forward" in vars(m) for m in model.modules() if m is not model.up)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert [n for n, m in model.named_modules() if not m.training] == ["norm"]
    engine(tokens(3), {})
