"""Random numbers that examples share are refused, wherever they are drawn; one's own are not."""

import gc
import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BigBirdConfig,
    BigBirdForSequenceClassification,
)

from dp_grape_hf import PrivacyError, UnsupportedModelError, per_sample_gradients
from dp_grape_hf.gradients import Dense, keeping_random_state, make_engine
from dp_grape_hf.gradients.checks.sketches import FULL, Sketches, differing
from tests.gradients.functions import (
    Function,
    TinyFunctionForSequenceClassification,
    plain,
    squares,
)
from tests.support.mechanism import make_private
from tests.support.trainers import assert_refused, make_trainer

both = pytest.mark.parametrize("engine", ["layerwise", "functorch"])


def small(toss):
    def compute(m, x):
        hidden = m.first(x)
        tossed = m.training or isinstance(toss, nn.Module)
        return m.second(m.toss(hidden) if tossed else hidden)

    return Function(compute, first=nn.Linear(4, 6), second=nn.Linear(6, 2), toss=toss)


def with_zero_head(tosses, *few):
    """All of them behind a head of random numbers, and a few behind one of zeros."""
    params = [pytest.param(name, False, id=f"{name}-") for name in tosses]
    params += [pytest.param(name, True, id=f"{name}-zero head") for name in few]
    return pytest.mark.parametrize(("name", "zero"), params)


def gradients(toss, engine="layerwise", zero=False):
    """Returns what an engine computes of a model; behind a head of zeros all losses are equal."""
    model = small(toss).train()
    if zero:
        nn.init.zeros_(model.second.weight)
    return per_sample_gradients(model, {"x": torch.randn(5, 4)}, loss=squares, engine=engine)


def drops_paths(hidden):
    return hidden * (0.7 + torch.rand(len(hidden), 1)).floor() / 0.7


def drops_in_a_loop(hidden):
    return torch.stack([row * torch.rand(()) for row in hidden])


def along(dropped, hidden, dim):
    """Gives each sample four positions, in front of the samples or behind, and drops there."""
    positions = hidden.unsqueeze(dim).expand(*hidden.shape[:dim], 4, *hidden.shape[dim:])
    return dropped(positions).sum(dim)


def attends(hidden):
    heads = hidden.view(-1, 1, 3, 2)
    return functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3).flatten(1)


def recomputed(toss):
    return lambda hidden: checkpoint(toss, hidden, use_reentrant=False)


def dropout(hidden):
    return functional.dropout(hidden, 0.5)


OWN = {
    "dropout": dropout,
    "dropout of other kernels": lambda hidden: torch.native_dropout(hidden, 0.5, True)[0],
    "dropout, recomputed": recomputed(dropout),
    "noise": lambda hidden: hidden + torch.randn_like(hidden),
    "the global generator": lambda hidden: (
        hidden * torch.rand(hidden.shape, generator=torch.default_generator)
    ),
    "jitter": lambda hidden: hidden * torch.empty_like(hidden).uniform_(0.9, 1.1),
    "slopes": lambda hidden: functional.rrelu(hidden, training=True),
    "drop path": drops_paths,
    "bernoulli": lambda hidden: hidden * torch.bernoulli(torch.full_like(hidden[:, :1], 0.5)),
    "a choice in a row": lambda hidden: (
        hidden * torch.multinomial(torch.ones(len(hidden), 6), 2).sum(1, keepdim=True)
    ),
    "a soft choice in a row": lambda hidden: hidden * functional.gumbel_softmax(hidden, hard=True),
    "an order in a row": lambda hidden: hidden.gather(1, torch.rand(hidden.shape).argsort(1)),
    "attention": attends,
    "positions first": lambda hidden: along(dropout, hidden, 0),
    "samples first, flat": lambda hidden: along(
        lambda x: dropout(x.flatten(0, 1)).view_as(x), hidden, 1
    ),
    "layer drop at rate 0": lambda hidden: hidden if torch.rand([]) >= 0.0 else hidden * 0,
    "a loop over samples": drops_in_a_loop,
    "an order in a loop": lambda hidden: torch.stack([x[torch.randperm(6)] for x in hidden]),
}


@with_zero_head(OWN, "dropout", "drop path", "layer drop at rate 0")
def test_coins_of_ones_own_pass(name, zero):
    losses, _ = gradients(OWN[name], zero=zero)
    assert losses.shape == (5,)


class Experts(nn.Module):
    """Sends each sample to one of two layers, which drop: how many each gets, the values tell."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.drops = nn.ModuleList([nn.Dropout(0.5), nn.Dropout(0.5)])

    def forward(self, hidden):
        chosen, found = (hidden[:, 0] > 0).long(), torch.zeros_like(hidden)
        for number, (layer, drop) in enumerate(zip(self.layers, self.drops, strict=True)):
            rows = (chosen == number).nonzero()[:, 0]
            found = found.index_add(0, rows, drop(layer(hidden[rows])))
        return found


@pytest.mark.parametrize("trained", [True, False], ids=["one by one", "frozen"])
def test_dropout_in_experts_that_run_for_all_samples_is_refused(trained):
    """Trained experts run for one sample after another, frozen ones for all at once."""
    model = small(functional.relu).train()
    model.first = nn.Sequential(model.first, nn.Dropout(0.5), Experts().requires_grad_(trained))
    with nullcontext() if trained else pytest.raises(PrivacyError, match="inside of experts"):
        per_sample_gradients(model, {"x": torch.randn(5, 4)}, loss=squares)


def test_equal_sizes_of_different_draws_are_no_shared_coin():
    """Two copies of a text of nine words have as many numbers as three of a text of six."""

    def compute(m, x, y):
        x, y = (functional.dropout(m.layer(t).flatten(0, 1), 0.5, m.training) for t in (x, y))
        return x.view(-1, 36).square().mean(1) + y.view(-1, 24).square().mean(1)

    model = Function(compute, layer=nn.Linear(4, 4))
    inputs = {"x": torch.randn(3, 9, 4), "y": torch.randn(3, 6, 4)}
    losses, _ = per_sample_gradients(model, inputs, loss=lambda outputs, _: outputs)
    assert losses.shape == (3,)


@pytest.mark.parametrize("row", [0, 1, 3])
def test_a_row_without_labels_draws_as_often_as_others(row):
    """The loss that the model returns for it is not a number, so the row runs again."""
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    model = BertForMaskedLM(BertConfig(vocab_size=20, num_hidden_layers=1, **sizes)).train()
    tokens = torch.randint(20, (4, 6))
    labels = tokens.index_fill(0, torch.tensor(row), -100)
    losses, _ = per_sample_gradients(model, {"input_ids": tokens, "labels": labels})
    assert losses.eq(0).nonzero().tolist() == [[row]]


def drops_layers(hidden):
    return hidden if torch.rand([]) >= 0.05 else hidden * 0


def drops_the_batch(hidden):
    """``StochasticDepth(mode="batch")``, as torchvision computes it."""
    noise = torch.empty([1] * hidden.dim(), dtype=hidden.dtype).bernoulli_(0.9)
    return hidden * noise.div_(0.9)


def turns(toss):
    """Changes the signs of samples by one coin or by as many, so that no gradient's norm tells."""

    def turn(hidden):
        signs = 1 - 2 * torch.as_tensor(toss(len(hidden))).float()
        return hidden * (signs[:, None] if signs.dim() else signs)

    return turn


SHARED = {
    "layer drop": drops_layers,
    "layer drop, recomputed": recomputed(drops_layers),
    "stochastic depth of a batch": drops_the_batch,
    "layer drop beside dropout": lambda hidden: functional.dropout(drops_layers(hidden), 0.5),
    "a mask of features": lambda hidden: hidden * (torch.rand(6) > 0.1),
    "one scale": lambda hidden: hidden * torch.empty(1).uniform_(0.9, 1.1),
    "a permutation": lambda hidden: hidden[:, torch.randperm(6)],
    "an angle": lambda hidden: hidden + torch.randint(2, ()),
    "rarely, a number": turns(lambda _: torch.randint(1000, ()) == 7),
    "rarely, a size": turns(lambda _: torch.randn(()).abs() > 4),
    "rarely, a time": turns(lambda _: torch.empty(1).exponential_()[0] > 9),
    "rarely, an order": turns(lambda _: (torch.randperm(7) == torch.arange(7)).all()),
    "rarely, a biased coin": turns(lambda _: torch.full((), 1e-4).bernoulli()),
    "rarely, a small number": turns(lambda _: torch.rand(()) < 1e-4),
}


@with_zero_head(SHARED, "layer drop", "one scale")
def test_a_coin_that_a_batch_shares_is_refused(name, zero):
    with pytest.raises(PrivacyError, match="once for all samples of a physical batch"):
        gradients(SHARED[name], zero=zero)


def antithetic(count):
    half = torch.rand((count + 1) // 2)
    return torch.cat([half, 1 - half])[:count] < 0.5


SIGNS = {
    "one for all": turns(lambda count: torch.rand([]) < 0.5),
    "the first": turns(lambda count: torch.rand(count)[0] < 0.5),
    "the mean": turns(lambda count: torch.rand(count).mean() < 0.5),
    "the largest": turns(lambda count: torch.randint(2, (count,)).max()),
    "the parity": turns(lambda count: torch.randint(2, (count,)).sum() % 2),
    "in opposite pairs": turns(antithetic),
    "in strata": turns(lambda n: (torch.rand(1) + torch.arange(n) / n) % 1 < 0.5),
    "half of them": turns(lambda count: torch.randperm(count) < count // 2),
    "half of them, by rank": turns(lambda count: torch.rand(count).argsort() < count // 2),
    "parts of a permutation": turns(lambda n: torch.randperm(2 * n).view(n, 2)[:, 0] % 2),
    "the neighbour's": turns(lambda count: torch.rand(count).roll(1) < 0.5),
    "sums": turns(lambda count: torch.rand(count).cumsum(0) % 1 < 0.5),
    "sorted": turns(lambda count: torch.rand(count).sort().values < 0.5),
    "shares": turns(lambda count: torch.randn(count).softmax(0) < 0.3),
    "a choice among samples": turns(
        lambda n: torch.arange(n) == torch.multinomial(torch.ones(n), 1)
    ),
    "the largest of masks": turns(lambda count: dropout(torch.ones(count, 1)).amax() > 0),
    "the opposite one's, of its positions": turns(
        lambda count: torch.rand(4 * count).view(4, -1).mean(0).flip(0) < 0.5
    ),
    "of any, rarely": turns(lambda count: (torch.rand(count) < 0.02).any()),
    "of any, rarely, beside dropout": lambda hidden: dropout(
        turns(lambda count: (torch.rand(count, 6) < 1e-4).any())(hidden)
    ),
    "of all, mostly": turns(lambda count: (torch.rand(count) < 0.98).all()),
    "of a biased coin": turns(lambda count: torch.full((count,), 0.02).bernoulli().amax()),
    "the mean, going back": lambda hidden: (
        hidden.detach() + SIGNS["the mean"](hidden - hidden.detach())
    ),
    "the last of a loop": turns(lambda count: [torch.rand([]) < 0.5 for _ in range(count)][-1]),
}


@with_zero_head(
    SIGNS, "one for all", "half of them", "sorted", "of any, rarely", "the mean, going back"
)
def test_coins_that_others_use_are_refused(name, zero):
    with pytest.raises(PrivacyError, match=r"of a physical batch|couples"):
        gradients(SIGNS[name], zero=zero)


@pytest.mark.parametrize("name", ["score", "classifier", "qa_outputs", *map(str, range(100))])
def test_a_two_class_gradient_differs_from_its_negative_in_sketches(name):
    """A head of two classes has the rows g and -g."""
    row = torch.randn(1, 1, 6)
    rows = []
    for sign in (1, -1):
        sketches = Sketches(torch.device("cpu"))
        sketches({f"{name}.weight": Dense(sign * torch.cat([row, -row], 1))})
        rows.append(sketches.of(sketches.names))
    assert differing(*rows, FULL).all()


def test_a_small_influence_of_others_shows():
    with pytest.raises(PrivacyError, match="each sample of a physical batch, and uses them for"):
        gradients(lambda hidden: hidden * (1 + 1e-4 * torch.rand(len(hidden)).mean()))


class Noisy(Function):
    """Has a weight of its own, a single number, and a coin: it runs under vmap."""

    def __init__(self, toss):
        def compute(m, hidden):
            return hidden * m.scale * (1 - 2 * toss().float() if m.training else 1)

        super().__init__(compute, scale=torch.ones(()))


@both
def test_a_draw_under_vmap_is_refused_if_samples_share_it(engine):
    gradients(Noisy(lambda: torch.rand(1) < 0.5), engine)  # vmap gives each its own
    with pytest.raises(PrivacyError, match=r"\(rand in Noisy\) once for all"):
        gradients(Noisy(lambda: torch.rand([]) < 0.5), engine)


def test_a_model_is_examined_in_training_mode_after_evaluation_mode():
    engine = make_engine("layerwise", small(drops_layers).eval(), squares)
    engine({"x": torch.randn(3, 4)}, {})
    engine.model.train()
    with pytest.raises(PrivacyError, match="once for all samples"):
        engine({"x": torch.randn(3, 4)}, {})


@both
def test_after_an_example_without_gradient_the_next_is_tried(engine):
    def loss(outputs, labels):
        assert labels is not None
        return squares(outputs, None) * labels

    inputs = {"x": torch.randn(3, 4), "labels": torch.tensor([0.0, 0.0, 1.0])}
    computes = make_engine(engine, small(SIGNS["one for all"]).train(), loss)
    with pytest.raises(PrivacyError, match="for all samples of a physical batch"):
        computes(inputs, {})
    computes({"x": inputs["x"], "labels": torch.zeros(3)}, {})
    with pytest.raises(PrivacyError, match="for all samples of a physical batch"):
        computes(inputs, {})


@pytest.mark.parametrize(
    ("toss", "expected"),
    [(dropout, [*[1] * 4, *[3] * 3, 5, 5]), (functional.relu, [*[1] * 3, 5, 5])],
    ids=["drawing", "drawing nothing"],
)
def test_the_passes_of_the_examination(toss, expected):
    """Four rows alone and three copies, or three rows if nothing is drawn; the batch, twice."""
    sizes = []

    def counting(hidden):
        sizes.append(len(hidden))
        return toss(hidden)

    gradients(counting)
    assert [*expected, 5] == sizes  # the last is no part of it


@pytest.mark.parametrize("name", ["dropout", "dropout, recomputed", "a loop over samples"])
def test_nothing_of_the_examination_is_kept_until_garbage_is_collected(name):
    def tensors():
        gradients(OWN[name])
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        tensors()  # fills caches
        assert tensors() == tensors()
    finally:
        gc.enable()


@pytest.mark.parametrize("fails", [False, True], ids=["", "a pass fails"])
def test_zero_weights_are_replaced_for_the_check_and_restored_exactly(fails):
    seen = []

    def toss(hidden):
        seen.append(any(bool((p == 0).all()) for p in model.parameters()))
        if fails and not seen[-1]:
            raise OSError("on purpose")
        return dropout(hidden)

    model = small(toss).train()
    with torch.no_grad():
        model.second.bias.zero_()
        model.first.weight.zero_().neg_()  # -0.0
    model.first.requires_grad_(False)
    before = [(p._version, p.detach().clone()) for p in model.parameters()]
    with pytest.raises(OSError, match="on purpose") if fails else nullcontext():
        per_sample_gradients(model, {"x": torch.randn(5, 4)}, loss=squares)
    assert not all(seen)
    for weight, (version, values) in zip(model.parameters(), before, strict=True):
        assert weight._version == version
        assert torch.equal(weight, values)
        assert torch.equal(weight.signbit(), values.signbit())


def rewinds_numpy(hidden):
    state = np.random.get_state()
    hidden = hidden * float(np.random.rand())
    np.random.set_state(state)
    return hidden


@both
def test_a_draw_without_torch_is_refused_under_a_zero_head(engine):
    bits = random.Random(0)  # which no stream gives, like the clock and the operating system
    with pytest.raises(PrivacyError, match="random numbers from numpy or Python"):
        gradients(turns(lambda _: bits.random() < 0.5), engine, zero=True)


def seeds_torch(hidden):
    torch.manual_seed(0)
    return functional.dropout(hidden, 0.5)


def seeds_torch_alone(hidden):
    torch.manual_seed(0)
    return hidden


def rewinds_torch(hidden):
    with torch.random.fork_rng():
        return functional.dropout(hidden, 0.5)


STREAMS = {
    "numpy": (lambda hidden: hidden * float(np.random.rand()), "numpy or Python"),
    "Python": (lambda hidden: hidden * random.random(), "numpy or Python"),
    "numpy, rewound": (rewinds_numpy, "numpy or Python"),
    "torch, seeded": (seeds_torch, "seeds torch's global random numbers"),
    "torch, seeded alone": (seeds_torch_alone, "seeds torch's global random numbers"),
    "torch, rewound": (rewinds_torch, "seeds torch's global random numbers"),
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_forward_that_draws_beside_torch_or_seeds_is_refused(name):
    toss, words = STREAMS[name]
    with pytest.raises(PrivacyError, match=words):
        gradients(toss)


def noisy(noise, in_training_only=False):
    def compute(m, x, labels):
        quiet = in_training_only and not m.training
        return plain(m, x if quiet else noise(x), labels)

    return TinyFunctionForSequenceClassification(compute)


_OWN = torch.Generator().manual_seed(0)


def draws_from_a_generator(hidden):
    return hidden * torch.rand(hidden.shape, generator=_OWN)


@both
def test_a_model_with_its_own_generator_is_always_refused(engine):
    with pytest.raises(PrivacyError, match="its own generator"):
        gradients(lambda hidden: hidden + 0 * torch.rand(6, generator=_OWN), engine)


NOISE = {
    "rand_like in ": lambda x: x * (torch.rand_like(x) > 0.3),
    "uniform in ": lambda x: x + 1e-3 * torch.zeros_like(x).uniform_(-1, 1),
    "bernoulli in ": dropout,
}
OTHER_NOISE = {
    "numpy or Python": lambda x: x + torch.from_numpy(np.random.rand(*x.shape)).float(),
    "_OWN of": draws_from_a_generator,
}


@pytest.mark.parametrize("noise", NOISE)
@both
def test_noise_of_ones_own_in_evaluation_mode_is_no_obstacle(noise, engine, tmp_path):
    make_trainer(tmp_path, model=noisy(NOISE[noise]), engine=engine).train()


@pytest.mark.parametrize(
    ("method", "noise"),
    [
        *(("dpzero", noise) for noise in NOISE | OTHER_NOISE),
        *(("dp_grape", n) for n in OTHER_NOISE),
    ],
)
def test_other_noise_in_evaluation_mode_is_refused(method, noise, tmp_path):
    """A method without gradients refuses noise of each sample as well."""
    trainer = make_trainer(tmp_path, model=noisy((NOISE | OTHER_NOISE)[noise]), method=method)
    if noise in NOISE:
        assert_refused(trainer, f"{noise}.*in training mode only", UnsupportedModelError)
    else:
        assert_refused(trainer, noise)


def test_bigbirds_seeds_do_not_reach_the_streams_of_collators():
    """Its random blocks come from numpy, which it seeds with the number of the layer."""
    config = BigBirdConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=64, attention_type="block_sparse",
        block_size=2, num_random_blocks=1, num_labels=3, sep_token_id=2,
    )  # fmt: skip
    model = BigBirdForSequenceClassification(config).train()
    model.bert.pooler.requires_grad_(False)  # which its head leaves out
    engine = make_private(make_engine("layerwise", model))
    inputs = {"input_ids": torch.randint(5, 30, (3, 32)), "labels": torch.tensor([0, 1, 2])}
    np.random.seed(3)
    expected = np.random.RandomState(3).rand(2)
    engine.begin({})
    found = []
    for _ in range(2):
        engine.accumulate(inputs)
        assert engine.per_sample.reseeds_host
        found.append(np.random.rand())
    assert found == expected.tolist()


def test_a_later_draw_without_torch_is_refused():
    draws = [False]
    model = small(lambda hidden: hidden * float(np.random.rand()) if draws[0] else hidden)
    engine = make_private(make_engine("layerwise", model.train(), squares))
    engine.begin({})
    engine.accumulate({"x": torch.randn(3, 4)})
    engine.release()
    draws[0] = True
    engine.begin({})
    with pytest.raises(PrivacyError, match="numpy or Python"):
        engine.accumulate({"x": torch.randn(3, 4)})


@pytest.mark.parametrize("in_use", [False, True])
def test_streams_of_gpus_are_kept_where_they_are_in_use(in_use, monkeypatch):
    """A worker of a data loader sees the GPUs, and must not ask them: it is a fork."""
    asked, restored = [], []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    monkeypatch.setattr(torch.cuda, "get_rng_state", asked.append)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: restored.append(device))
    with keeping_random_state():
        pass
    assert asked == restored == [0, 1] * in_use
