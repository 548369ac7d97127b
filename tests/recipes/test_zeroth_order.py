"""The zeroth-order methods against their formulas, with every direction and model written out.

Shapes: B samples in a batch, K directions, T positions.
"""

import copy
import math

import pytest
import torch
from torch import nn

from dp_grape_hf.errors import PrivacyError, UnsupportedModelError
from dp_grape_hf.gradients import ANSWERS, loss_for
from dp_grape_hf.memory import WEIGHTS
from dp_grape_hf.memory.timeline import Timeline
from dp_grape_hf.phases import FORWARD
from dp_grape_hf.projections.seeds import projection_seed_for
from recipes.paper.methods import directions as directions_module
from recipes.paper.methods.directions import Directions
from recipes.paper.methods.zeroth_order import ZerothOrderEngine, ZerothOrderSGD
from tests.gradients.functions import Function
from tests.models.matrix import projectors_for
from tests.support.marks import slow_but
from tests.support.mechanism import make_private
from tests.support.models import IGNORED, TYPICAL, only
from tests.support.oracles import single_sample_gradients

SEED, MU = 7, 1e-3


def released(engine, step, batches):
    """Returns the private scalars (K,) of a logical batch, given its physical batches."""
    assert isinstance(engine.per_sample, ZerothOrderEngine)
    engine.per_sample.use(step)
    engine.begin({})
    for batch in batches:
        engine.accumulate(batch)
    release = engine.release()
    assert list(release) == [ANSWERS]
    return release[ANSWERS]


def tensors_of(model, step, count=1):
    """Returns the directions of a step by their definition, each whole: parameter name -> z.

    For weights of one block.
    """
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = []
    for number in range(count):
        z = {}
        for name, weight in weights.items():
            seed = projection_seed_for(SEED, step * count + number, name, 0)
            generator = torch.Generator().manual_seed(seed)
            z[name] = torch.randn(weight.shape, generator=generator).double()
        found.append(z)
    return found


def drawn(directions, weight, step, number=0):
    z = torch.full(weight.shape, math.nan)
    one_hot = [float(k == number) for k in range(directions.count)]
    for rows, block in directions.combined(weight, step, one_hot):
        z[rows] = block
    return z


def losses_at(model, inputs, z, distance, loss):
    moved = copy.deepcopy(model).eval()
    loss = loss or loss_for(moved)
    batch_size = len(next(iter(inputs.values())))
    with torch.no_grad():
        for name, value in z.items():
            weight = moved.get_parameter(name)
            weight.copy_(weight + distance * value)
        losses = []
        for i in range(batch_size):
            sample = {key: value[i : i + 1] for key, value in inputs.items()}
            labels = sample.pop("labels", None)
            losses.append(loss(moved(**sample), labels))
    return torch.cat(losses)


def differences(model, inputs, z, loss=None):
    """Returns the finite differences (B, K) by their definition."""
    sides = [[losses_at(model, inputs, one, side * MU, loss) for side in (1, -1)] for one in z]
    return torch.stack([(ahead - behind) / (2 * MU) for ahead, behind in sides], 1)


def snapshot(model):
    return {name: (p.detach().clone(), p._version) for name, p in model.named_parameters()}


def assert_untouched(model, before):
    for name, parameter in model.named_parameters():
        value, version = before[name]
        assert torch.equal(parameter, value), name
        assert parameter._version == version, name
        assert parameter.grad is None, name


@pytest.mark.parametrize("case", TYPICAL, ids=str)
def test_every_scalar_is_the_finite_difference_of_its_own_loss(case):
    """The oracle moves a copy of the model and runs each sample alone, in float64."""
    count = 2
    model, inputs = case.model().double(), case.batch(3)
    if "pixel_values" in inputs:
        inputs["pixel_values"] = inputs["pixel_values"].double()
    engine = ZerothOrderEngine(model, seed=SEED, n_directions=count)
    before = snapshot(model)
    engine.use(4)
    losses, gradients = engine(inputs, {})
    assert_untouched(model, before)
    z = tensors_of(model, 4, count)
    assert list(gradients) == [ANSWERS]
    expected = differences(model, inputs, z)  # loss functions of vocabularies work in float32
    torch.testing.assert_close(gradients[ANSWERS].values, expected, atol=2e-2, rtol=1e-3)
    single, _ = single_sample_gradients(model.eval(), inputs)
    torch.testing.assert_close(losses.double(), single.double(), atol=1e-3, rtol=1e-3)


def test_positions_without_a_label_are_left_out_and_change_nothing():
    model, inputs = only("opt").model().double(), only("opt").batch(3)
    inputs["labels"][:, :-3] = IGNORED
    inputs["labels"][1, -2:] = IGNORED
    rows = []
    model.get_output_embeddings().register_forward_hook(
        lambda module, args, output: rows.append(output.shape[1])
    )
    engine = ZerothOrderEngine(model, seed=SEED)
    engine.use(0)
    scalars = engine(inputs, {})[1][ANSWERS].values
    assert [count for count in rows if count > 3] == [9]  # the model's own loss, looked at once
    expected = differences(model, inputs, tensors_of(model, 0))
    torch.testing.assert_close(scalars, expected, atol=2e-2, rtol=1e-3)


def squares(outputs, labels):
    assert labels is not None
    return (outputs - labels).square().sum(1)


def small_model(features=6, dtype=torch.float64):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Linear(features, features), nn.Tanh(), nn.Linear(features, 3)]
        return nn.Sequential(*layers).to(dtype)


def small_batch(size, features=6, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, features, generator=generator).to(dtype)
    return {"input": x, "labels": x[:, :3].roll(1, 1) + 0.5}


def small_engine(model, **settings):
    return ZerothOrderEngine(model, squares, seed=SEED, **settings)


def test_directions_are_standard_normal_and_differ_everywhere():
    """Means of 30,000 numbers: it fails by chance with probability below 1e-12."""
    weights = {name: nn.Parameter(torch.zeros(300, 100)) for name in ("a", "b")}
    directions = Directions(weights, SEED, count=2)
    places = [(w, step, k) for w in weights.values() for step in (0, 1) for k in (0, 1)]
    z = torch.stack([drawn(directions, *place).flatten() for place in places])
    torch.testing.assert_close(z @ z.T / z.shape[1], torch.eye(8), atol=0.05, rtol=0)
    assert torch.equal(drawn(Directions(weights, SEED, 2), weights["b"], 1, 1).flatten(), z[-1])
    other = drawn(Directions(weights, SEED + 1, 2), weights["b"], 1, 1).flatten()
    assert (other - z[-1]).std() > 1


def test_blocks_of_rows_make_up_the_weight_moved(monkeypatch):
    monkeypatch.setattr(directions_module, "_BLOCK", 8)
    weights = {
        "matrix": nn.Parameter(torch.randn(7, 3)),
        "columns": nn.Parameter(torch.randn(3, 7).t()),
        "long": nn.Parameter(torch.randn(2, 20)),
        "vector": nn.Parameter(torch.randn(19)),
        "number": nn.Parameter(torch.randn(())),
        "empty": nn.Parameter(torch.randn(0, 4)),
    }
    directions = Directions(weights, SEED)
    for name, weight in weights.items():
        z = drawn(directions, weight, 2)
        assert torch.isfinite(z).all(), name
        assert z.unique().numel() == z.numel(), name
        moved = directions.displaced(weight, 2, 0, 0.5)
        assert moved.stride() == weight.stride(), name
        torch.testing.assert_close(moved, weight.detach() + 0.5 * z, msg=name)


class UsesElsewhere(nn.Module):
    """Reads weights outside of the modules that own them, transposed, joined and as data."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.inner = nn.Linear(4, 4)
        self.joined = nn.ParameterList([torch.randn(2, 4), torch.randn(3, 4)])
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        hidden = self.table(x).mean(1)  # (B, 4)
        hidden = hidden.to(self.inner.weight.dtype) @ self.inner.weight.T + self.inner.bias.data
        hidden = hidden @ torch.cat(list(self.joined)).t() @ self.table.weight.detach()
        return self.scale * hidden


class OwnFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight):
        return input @ weight


WORDS = torch.tensor([[0, 1, 2], [2, 3, 3], [4, 1, 0]])
VECTORS = torch.linspace(-1, 1, 36).view(3, 3, 4)
USES = {
    "elsewhere": (UsesElsewhere, WORDS),
    "recurrent": (
        lambda: Function(lambda m, x: m.lstm(x)[0][:, -1], lstm=nn.LSTM(4, 3, batch_first=True)),
        VECTORS,
    ),
    # with a fast path for evaluation, which reads the weight of a module that it does not call
    "attention": (
        lambda: Function(
            lambda m, x: m.layer(x).mean(1),
            layer=nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.5),
        ),
        VECTORS,
    ),
    "own function": (
        lambda: Function(
            lambda m, x: OwnFunction.apply(x, m.layer.weight).mean(1),
            layer=nn.Linear(4, 4, bias=False),
        ),
        VECTORS,
    ),
}


@pytest.mark.parametrize(("make", "x"), USES.values(), ids=USES)
def test_every_use_of_a_weight_is_moved_alike(make, x):
    torch.manual_seed(0)
    model = make().double()
    batch = {"x": x.double() if x.is_floating_point() else x}

    def loss(outputs, labels):
        return outputs.square().sum(1)

    engine = ZerothOrderEngine(model, loss, seed=SEED)
    engine.use(1)
    before = snapshot(model)
    _, gradients = engine(batch, {})
    assert_untouched(model, before)
    assert model.training
    assert all(module.training for module in model.modules())
    expected = differences(model, batch, tensors_of(model, 1), loss)
    assert (expected.abs() > 1e-3).all()
    torch.testing.assert_close(gradients[ANSWERS].values, expected, rtol=1e-9, atol=1e-9)


def test_a_parameter_that_no_operation_reads_is_refused():
    model = small_model()
    model[0].spare = nn.Linear(6, 3)
    model[2].register_forward_hook(lambda m, args, output: output + len(model[0].spare.weight))
    engine = small_engine(model)
    engine.use(0)
    with pytest.raises(UnsupportedModelError, match=r"spare\.weight, 0\.spare\.bias"):
        engine(small_batch(3), {})


def taken(step, given):
    timeline = Timeline()
    timeline.label(WEIGHTS, given)
    timeline.phase = FORWARD
    with timeline:
        step()
    return timeline.peak().total - timeline.peak().at_end[WEIGHTS]


@pytest.mark.slow
def test_no_more_than_the_weights_of_one_operation_are_copied(monkeypatch):
    monkeypatch.setattr(directions_module, "_BLOCK", 4000)
    features, depth = 200, 8
    model = nn.Sequential(*[nn.Linear(features, features) for _ in range(depth)])
    weight = model[0].weight.nbytes
    x, scalars = torch.ones(2, features), torch.ones(2)
    engine = ZerothOrderEngine(model, lambda outputs, _: outputs.sum(1), seed=SEED, n_directions=2)
    optimizer = ZerothOrderSGD(model.parameters(), engine.directions)
    engine.use(0)
    given = [*model.parameters(), x, scalars]
    assert weight < taken(lambda: engine({"input": x}, {}), given) < 1.4 * weight
    optimizer.receive(scalars, 0)
    assert 0 < taken(optimizer.step, given) < 0.5 * weight


class OfTheBatch(nn.Module):
    """Adds a multiple of a statistic of the batch to every sample."""

    def __init__(self, share, statistic):
        super().__init__()
        self.layer, self.share, self.statistic = nn.Linear(6, 3), share, statistic

    def forward(self, input):
        return self.layer(input) + self.share * self.statistic(self.layer(input))


STATISTICS = {
    "mean": lambda outputs: outputs.mean(0),
    "total": lambda outputs: outputs.sum(0),
    "number": lambda outputs: torch.full_like(outputs, len(outputs)),
    "shifted": lambda outputs: outputs.roll(1, 0),
}


SAME = "loss of a sample changes"
OTHERS = "answer of a sample changes"


@pytest.mark.parametrize(
    ("statistic", "share", "dtype", "message"),
    [
        *((statistic, 1.0, torch.float32, SAME) for statistic in STATISTICS),
        ("mean", 7e-3, torch.float32, OTHERS),
        ("total", 3e-3, torch.float32, OTHERS),
        ("shifted", 3e-3, torch.float32, OTHERS),
        *(("total", share, torch.bfloat16, f"couples samples|{SAME}") for share in (1.0, 3e-3)),
    ],
)
def test_coupled_samples_are_refused(statistic, share, dtype, message):
    """In low precision too: rounding is the same in the same row of a batch of the same shape."""
    torch.manual_seed(0)
    engine = small_engine(OfTheBatch(share, STATISTICS[statistic]).to(dtype))
    engine.use(0)
    inputs = small_batch(4, dtype=dtype)
    inputs["input"][1:] *= 5
    with pytest.raises(PrivacyError, match=message):
        engine(inputs, {})


def test_coupling_is_refused_once_two_samples_are_seen():
    """One sample shows nothing, and two equal ones neither: the probe waits for others."""
    torch.manual_seed(0)
    engine = small_engine(OfTheBatch(1.0, STATISTICS["mean"]).double())
    engine.use(0)
    inputs = small_batch(4)
    engine({key: value[:1] for key, value in inputs.items()}, {})
    engine({key: value[[0, 0]] for key, value in inputs.items()}, {})
    with pytest.raises(PrivacyError, match="couples samples"):
        engine(inputs, {})


def test_only_the_first_batch_is_probed():
    model, inputs = small_model(), small_batch(4)
    passes = []
    model.register_forward_pre_hook(lambda module, args, kwargs: passes.append(1), with_kwargs=True)
    engine = small_engine(model)
    engine.use(0)
    engine(inputs, {})
    assert len(passes) > 2
    passes.clear()
    engine(inputs, {})
    assert len(passes) == 2


@pytest.mark.parametrize("case", slow_but(("gpt2",), TYPICAL))
def test_models_that_couple_nothing_pass_in_low_precision(case):
    """Rounding differs between batches, and a small mu magnifies it."""
    model, inputs = case.model().bfloat16(), case.batch(4)
    if "pixel_values" in inputs:
        inputs["pixel_values"] = inputs["pixel_values"].bfloat16()
    engine = ZerothOrderEngine(model, seed=SEED)
    before = snapshot(model)
    engine.use(0)
    engine(inputs, {})
    assert_untouched(model, before)
    engine = ZerothOrderEngine(case.model(), seed=SEED)
    engine.use(0)
    with torch.autocast("cpu", torch.bfloat16):
        engine(case.batch(4), {})


def test_five_steps_equal_the_formula_with_the_noise_given():
    """DPZero and DP-ZO, written out on a copy of the model; MeZO is the case of sigma = 0.

    The weights of the last layer have a rate and a decay of their own.
    """
    clips = set()
    for sigma, bound, count, frozen in (
        *((0.8, 2.0, 1, False), (0.8, 2.0, 3, True), (0.0, math.inf, 1, False)),
    ):
        model = small_model()
        model[0].requires_grad_(not frozen)
        expected = copy.deepcopy(model)
        engine = small_engine(model, n_directions=count)
        own = {"noise_multiplier": sigma, "max_grad_norm": bound, "expected_batch_size": 5}
        private = make_private(engine, **own, seed=11)
        last = {"params": [*model[2].parameters()], "lr": 0.02, "weight_decay": 0.5}
        groups = [last] if frozen else [last, {"params": [*model[0].parameters()]}]
        optimizer = ZerothOrderSGD(groups, engine.directions, lr=0.01, weight_decay=0.1)
        generator = torch.Generator().manual_seed(11)
        for step in range(5):
            inputs = small_batch(3 + step % 2)
            optimizer.receive(released(private, step, [inputs]), step)
            optimizer.step()
            z = tensors_of(expected, step, count)
            per_sample = differences(expected, inputs, z, squares)
            factors = (bound / per_sample.norm(dim=1)).clamp(max=1)
            clips |= {*(factors < 1).tolist()}
            clipped = per_sample * factors[:, None]
            noise = torch.zeros(count)
            if sigma:
                noise.normal_(0, sigma * bound, generator=generator)
            g = (clipped.sum(0) + noise) / 5
            with torch.no_grad():
                for name in z[0]:
                    weight = expected.get_parameter(name)
                    lr, decay = (0.02, 0.5) if name.startswith("2.") else (0.01, 0.1)
                    weight.mul_(1 - lr * decay)
                    for one, scalar in zip(z, g, strict=True):
                        weight.sub_(lr / count * scalar * one[name])
            for name, weight in expected.named_parameters():
                found = model.get_parameter(name)
                torch.testing.assert_close(found, weight, rtol=1e-5, atol=1e-6, msg=name)
        assert optimizer.state_dict()["state"] == {}
    assert clips == {False, True}


def test_small_updates_of_a_low_precision_weight_count_on_average():
    """Mean of 20,000 roundings: fails by chance with probability below 1e-6."""
    weight = nn.Parameter(torch.ones(20_000, 2, dtype=torch.bfloat16))
    directions = Directions({"weight": weight}, SEED)
    z = drawn(directions, weight, 0)
    optimizer = ZerothOrderSGD([weight], directions, lr=1e-5)
    optimizer.receive(torch.tensor([1.0]), 0)
    optimizer.step()
    slope = ((weight.detach().float() - 1) * z).mean().item()
    assert slope == pytest.approx(-1e-5, rel=0.6)


def test_an_update_needs_one_release_and_its_steps_directions():
    model = small_model()
    engine = small_engine(model, n_directions=2)
    optimizer = ZerothOrderSGD(model.parameters(), engine.directions)
    with pytest.raises(PrivacyError, match="without receive"):
        optimizer.step()
    with pytest.raises(PrivacyError, match=r"shape \(1,\)"):
        optimizer.receive(torch.ones(1), 0)
    optimizer.receive(torch.ones(2), 0)
    with pytest.raises(PrivacyError, match="closure"):
        optimizer.step(lambda: 0.0)
    optimizer.step()
    with pytest.raises(PrivacyError, match="without receive"):
        optimizer.step()
    with pytest.raises(PrivacyError, match=r"use\(step\)"):
        engine(small_batch(2), {})


def test_projectors_are_refused():
    model = small_model()
    engine = small_engine(model)
    engine.use(0)
    with pytest.raises(PrivacyError, match="no gradients to project"):
        engine(small_batch(2), projectors_for(model, 2))
