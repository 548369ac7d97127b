"""Every update rule against its definition: moments stay what they are when P is redrawn."""

import itertools
import math

import pytest
import torch
from torch import nn

from dp_grape_hf.optimizers import UPDATE_RULES, ProjectedOptimizer
from dp_grape_hf.projections import Side
from tests.support.optimizers import (
    SHAPES,
    SIDES,
    assert_same,
    draw,
    flat_step,
    gradients,
    parameters,
    saved_and_loaded,
    step,
)

EVERY = 3
SETTINGS = {
    "adam": {"betas": (0.8, 0.9), "eps": 1e-4},
    "sgd": {},
    "momentum": {"momentum": 0.7},
    "rmsprop": {},
    "adagrad": {},
}


class Definition:
    """An optimizer in float64. Weights projected on the right are transposed."""

    def __init__(self, rule, lr, decay):
        self.rule, self.lr, self.decay = rule, lr, decay
        self.weights = {n: self.turned(n, p.detach().double()) for n, p in parameters().items()}
        self.first = dict.fromkeys(SHAPES, torch.zeros(()))
        self.second = dict.fromkeys(SHAPES, torch.zeros(()))
        self.count = 0

    @staticmethod
    def turned(name, value):
        return value.T if SIDES.get(name) is Side.RIGHT else value

    def step(self, number, projectors):
        self.count += 1
        for name, gradient in gradients(number, projectors).items():
            update = self.update(name, self.turned(name, gradient.double()))
            if name in projectors:
                update = projectors[name].matrix.double() @ update
            self.weights[name] = (1 - self.lr * self.decay) * self.weights[name] - self.lr * update

    def update(self, name, g):
        if self.rule == "sgd":
            return g
        if self.rule == "momentum":
            self.first[name] = SETTINGS["momentum"]["momentum"] * self.first[name] + g
            return self.first[name]
        if self.rule == "rmsprop":
            self.second[name] = 0.99 * self.second[name] + 0.01 * g**2
            return g / (self.second[name].sqrt() + 1e-8)
        if self.rule == "adagrad":
            self.second[name] = self.second[name] + g**2
            return g / (self.second[name].sqrt() + 1e-10)
        (beta1, beta2), t = SETTINGS["adam"]["betas"], self.count
        self.first[name] = beta1 * self.first[name] + (1 - beta1) * g
        self.second[name] = beta2 * self.second[name] + (1 - beta2) * g**2
        root = (self.second[name] / (1 - beta2**t)).sqrt()
        return self.first[name] / (1 - beta1**t) / (root + SETTINGS["adam"]["eps"])


def assert_defined(weights, definition, **bounds):
    for name, expected in definition.weights.items():
        torch.testing.assert_close(
            weights[name].detach().double(), definition.turned(name, expected), msg=name, **bounds
        )


def test_every_rule_is_tested_here():
    assert UPDATE_RULES.keys() == SETTINGS.keys()
    assert all(SETTINGS[name].keys() == rule.settings.keys() for name, rule in UPDATE_RULES.items())


def partly_flat_step(optimizer, weights, number, projectors):
    """Does what ``step`` does, with other gradients beside the vector at each step."""
    beside = [(), ("square",), ("vector",), ("vector", "number")][number % 4]
    flat_step(optimizer, weights, number, projectors, beside)


WAYS = {"by name": (step,), "in one vector": (flat_step,), "by turns": (step, partly_flat_step)}


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("rule", SETTINGS)
def test_every_step_is_its_definition(rule, ways):
    """However gradients arrive, and if another optimizer goes on from the state.

    Also where an unchanged P comes as another object, as it does after a resume.
    """
    weights, projectors = parameters(), draw(0)
    for weight in weights.values():
        weight.grad = torch.full_like(weight, 1e6)  # which is never used
    settings = {"rule": rule, "weight_decay": 0.3, **SETTINGS[rule]}
    optimizer = ProjectedOptimizer(weights.values(), 0.1, **settings)
    definition = Definition(rule, 0.1, 0.3)
    for number in range(4 * EVERY):
        if number < EVERY or number % EVERY == 0:
            projectors = draw(number // EVERY)
        WAYS[ways][number % len(WAYS[ways])](optimizer, weights, number, projectors)
        definition.step(number, projectors)
        assert_defined(weights, definition, rtol=2e-5, atol=2e-5)
        counts = {int(optimizer.state[weight]["step"]) for weight in weights.values()}
        assert counts == {definition.count}
        numbers = sum(gradient.numel() for gradient in gradients(0, projectors).values())
        assert optimizer.state_bytes() == 4 * numbers * len(UPDATE_RULES[rule].moments)
        if ways == "by turns":
            state = saved_and_loaded(optimizer.state_dict())
            optimizer = ProjectedOptimizer(weights.values(), 0.1, **settings)
            optimizer.load_state_dict(state)


@pytest.mark.parametrize(
    ("rule", "settings", "reference"),
    [
        ("sgd", {}, torch.optim.SGD),
        ("momentum", {"momentum": 0.9}, torch.optim.SGD),
        ("adam", {"betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.3}, torch.optim.AdamW),
        ("adam", {"betas": (0.0, 0.0), "weight_decay": 0.0}, torch.optim.AdamW),
        ("rmsprop", {}, torch.optim.RMSprop),
        ("adagrad", {}, torch.optim.Adagrad),
    ],
)
def test_without_projectors_every_step_is_that_of_torch(rule, settings, reference):
    ours, theirs = parameters(), parameters()
    optimizer = ProjectedOptimizer(ours.values(), 0.1, rule=rule, **settings)
    other = reference(theirs.values(), lr=0.1, **settings)
    for number in range(8):
        step(optimizer, ours, number, {})
        for name, gradient in gradients(number, {}).items():
            theirs[name].grad = gradient
        other.step()
        assert_same(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("way", [step, flat_step])
@pytest.mark.parametrize("rule", SETTINGS)
def test_separately_stored_updates_equal_the_definition(rule, way):
    """In a period without rounding; moments, which rounding does not touch, at every step."""
    weights = parameters(torch.bfloat16)
    settings = SETTINGS[rule] | {"weight_decay": 0.3}
    optimizer = ProjectedOptimizer(weights.values(), 0.01, rule=rule, **settings)
    definition = Definition(rule, 0.01, 0.3)
    definition.weights = {
        name: definition.turned(name, weight.detach().double()) for name, weight in weights.items()
    }
    for number in range(3 * EVERY):
        if number % EVERY == 0:
            projectors = draw(number // EVERY)
        for name in SIDES:
            optimizer.store_separately(weights[name], projectors[name])
        before = {name: weights[name].detach().clone() for name in SIDES}
        way(optimizer, weights, number, projectors)
        definition.step(number, projectors)
        for name in SIDES:
            state = optimizer.state[weights[name]]
            whole = state["decay"] * weights[name].float() + projectors[name].lift(state["update"])
            assert torch.equal(weights[name], before[name])
            found = definition.turned(name, whole.detach().double())
            bound = 1e-5 if number < EVERY else 2**-6  # rounded at each redraw
            torch.testing.assert_close(found, definition.weights[name], rtol=bound, atol=bound)
            for key, power in UPDATE_RULES[rule].moments.items():
                needed = definition.first if power == 1 else definition.second
                found = definition.turned(name, state[key].double())
                torch.testing.assert_close(found, needed[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", ["adam", "sgd", "momentum"])  # their updates of ones are ones
def test_small_updates_of_bfloat16_weights_are_not_lost(rule):
    """Each is 1/2000 of the weight; 200 of them come to a tenth, give or take 5 deviations."""
    weight = nn.Parameter(torch.ones(2000, dtype=torch.bfloat16))
    optimizer = ProjectedOptimizer(
        [weight],
        1 / 2000,
        rule=rule,
        **SETTINGS[rule] | ({"momentum": 0.0} if rule == "momentum" else {}),
    )
    for _ in range(200):
        optimizer.receive({weight: torch.ones(2000)})
        optimizer.step()
    assert float(weight.detach().float().mean()) == pytest.approx(0.9, abs=0.01)


def test_the_state_of_another_rule_is_refused():
    weights = parameters()
    for saved, resumed in itertools.permutations(SETTINGS, 2):
        optimizer = ProjectedOptimizer(weights.values(), rule=saved)
        step(optimizer, weights, 0, {})
        other = ProjectedOptimizer(weights.values(), rule=resumed)
        with pytest.raises(ValueError, match=rf"rule='{resumed}'"):
            other.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "lion"}, "rule='lion' is not known"),
        ({"rule": "sgd", "betas": (0.9, 0.99)}, r"betas=\(0.9, 0.99\) is not a setting"),
        ({"rule": "momentum", "eps": 1e-8}, "eps=1e-08 is not a setting"),
        ({"rule": "momentum", "momentum": -1.0}, "momentum value: -1.0"),
        ({"rule": "momentum", "momentum": 1.0}, "momentum=1.0 is out of range"),
        ({"rule": "sgd", "lr": -1.0}, "learning rate: -1.0"),
        ({"lr": math.nan}, "learning rate: nan"),
        ({"betas": (1.0, 0.9)}, "beta parameter at index 0: 1.0"),
        ({"betas": (0.9, -0.1)}, "beta parameter at index 1: -0.1"),
        ({"eps": -1e-8}, "epsilon value: -1e-08"),
        ({"weight_decay": -0.1}, "weight_decay value: -0.1"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        ProjectedOptimizer(parameters().values(), **options)
