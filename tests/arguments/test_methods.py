"""The package's methods against their definitions, written out; and the table of methods.

Shapes: N examples, B samples in a batch, m x n a weight.
"""

import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import nn

from dp_grape_hf.arguments import METHODS, methods, register_method
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.gradients import ANSWERS, QueryEngine
from dp_grape_hf.ledger import Clipping
from dp_grape_hf.mechanism import Streams
from dp_grape_hf.trainer.run import scale_rates
from tests.support.marks import slow_but
from tests.support.mechanism import make_private
from tests.support.methods import (
    NOISY,
    OURS,
    PLAIN,
    PRIVATE,
    Moments,
    assert_same_steps,
    batch_of_all,
    definition,
    noise_for,
    noisy_run,
    plain_trainer,
    run,
)
from tests.support.models import row
from tests.support.trainers import (
    EXACT,
    Examples,
    TinyForSequenceClassification,
    Watch,
    assert_same_weights,
    make_trainer,
    owned,
    points,
    tiny,
    trained_in,
    weights_of,
)


def descent():
    return lambda step, private_grads: {n: 1e-2 * g for n, g in private_grads.items()}


def adam():
    moments = defaultdict(Moments)
    return lambda step, private_grads: {n: moments[n].update(g) for n, g in private_grads.items()}


@pytest.mark.parametrize(
    ("method", "update", "atol", "rtol"),
    [("dp_sgd", descent, 1e-6, 1e-5), ("dp_adam", adam, 1e-5, 1e-4)],
)
def test_a_private_method_is_its_definition(method, update, atol, rtol, tmp_path):
    found = noisy_run(tmp_path, method)
    expected = definition(found[0], 5, update())
    assert_same_steps(found[1:], expected, atol=atol, rtol=rtol)


def test_dp_grape_with_the_identity_is_dp_adam(tmp_path):
    one = noisy_run(tmp_path / "a", "dp_grape", projection="identity")
    other = noisy_run(tmp_path / "b", "dp_adam")
    assert_same_steps(one, other)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
def test_dp_adam_is_opacus(tmp_path, monkeypatch):
    optimizers = pytest.importorskip("opacus.optimizers.optimizer")
    from opacus.grad_sample import GradSampleModule

    found = noisy_run(tmp_path, "dp_adam")
    generator = torch.Generator().manual_seed(8)
    left = []

    def noise(std, reference, **_):
        if not left:
            weights = {n: p.detach() for n, p in model.named_parameters()}
            left.extend(noise_for(weights, float(std), generator))
        return left.pop(0).view_as(reference)

    monkeypatch.setattr(optimizers, "_generate_noise", noise)
    model = GradSampleModule(TinyForSequenceClassification())
    optimizer = optimizers.DPOptimizer(
        torch.optim.Adam(model.parameters(), lr=1e-2),
        noise_multiplier=2.0,
        max_grad_norm=0.5,
        expected_batch_size=24,
    )
    for actual in found[1:]:
        optimizer.zero_grad()
        model(**batch_of_all())["loss"].backward()
        optimizer.step()
        wanted = {n.removeprefix("_module."): w.detach() for n, w in model.named_parameters()}
        assert_same_weights(
            actual, wanted, atol=1e-5, rtol=1e-4
        )  # its factor has C / (norm + 1e-6)


def test_dp_lora_without_noise_and_clipping_is_the_plain_trainer(tmp_path):
    expected = plain_trainer(tmp_path / "plain", tiny("dp_lora"), steps=5)
    found = run(tmp_path / "ours", "dp_lora", **EXACT, max_steps=5)
    assert_same_steps(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_the_package_has_its_methods_and_names_other_places():
    """In a process of its own, as an import of the recipes lasts."""
    code = """
from dp_grape_hf import METHODS, DPGrapeTrainingArguments, PrivacyError
names = [*METHODS]
try:
    DPGrapeTrainingArguments("x", method="dpzero", eps=2, delta=1e-5)
except PrivacyError as error:
    print(names, error)
import recipes.paper
DPGrapeTrainingArguments("x", method="dpzero", eps=2, delta=1e-5, report_to="none", use_cpu=True)
print("made")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"{[*OURS]} method='dpzero' must be one of" in done.stdout
    assert "run `import recipes.paper` first" in done.stdout
    assert done.stdout.endswith("made\n")


def test_a_method_of_the_package_cannot_be_replaced():
    with pytest.raises(PrivacyError, match="this name already belongs to DP-Adam"):
        register_method("dp_adam", METHODS["dp_sgd"])
    register_method("dp_adam", METHODS["dp_adam"])
    assert METHODS["dp_adam"].title == "DP-Adam"
    with pytest.raises(TypeError):
        METHODS["dp_adam"] = METHODS["dp_sgd"]


class Losses(QueryEngine):
    size = 2

    def query(self, inputs):
        losses = self.losses(inputs)
        self.read = {*self.trainable}
        return losses, torch.stack([losses] * 2, 1)


class TwoRows(Losses):
    def query(self, inputs):
        losses, answers = super().query(inputs)
        return losses, torch.cat([answers, answers])


class OfOthers(Losses):
    def query(self, inputs):
        losses, answers = super().query(inputs)
        return losses, answers - answers.mean(0)


def test_answers_are_clipped_as_gradients_are():
    engine = Losses(TinyForSequenceClassification())
    mechanism = make_private(engine, max_grad_norm=0.5, noise_multiplier=0.0, expected_batch_size=1)
    batch = {key: value for key, value in batch_of_all().items() if key in ("x", "labels")}
    mechanism.begin({})
    losses = mechanism.accumulate(batch)
    found = mechanism.release()[ANSWERS]
    each = torch.stack([losses] * 2, 1)
    factors = (0.5 / each.norm(dim=1)).clamp(max=1)
    assert (factors < 1).any()
    torch.testing.assert_close(found, factors @ each)


@pytest.mark.parametrize(
    ("engine", "words"),
    [(TwoRows, "one row of size=2 for each sample"), (OfOthers, "answer of a sample changes")],
)
def test_a_query_that_breaks_the_sensitivity_is_refused(engine, words):
    with pytest.raises(PrivacyError, match=words):
        engine(TinyForSequenceClassification())(batch_of_all(), {})


def test_a_private_plug_in_needs_an_engine_that_is_examined(tmp_path, monkeypatch):
    monkeypatch.setitem(methods._METHODS, "dp_batch", replace(METHODS["adam"], private=True))
    with pytest.raises(PrivacyError, match=r"'dp_batch' is private.*BatchEngine"):
        make_trainer(tmp_path, method="dp_batch")


@pytest.mark.parametrize(
    ("method", "clipping"),
    [
        pytest.param(m, c, marks=() if c == "flat" or m == "dp_grape" else pytest.mark.slow)
        for m, c in product(PRIVATE, Clipping)
    ],
)
def test_one_example_moves_the_release_by_at_most_c(method, clipping, tmp_path, releases):
    """The first of two runs has one example more; all are in every draw."""
    for number in (24, 23):
        run(
            tmp_path / str(number),
            method,
            train_dataset=Examples(points().examples[:number]),
            num_samples=24,
            per_device_train_batch_size=24,
            max_steps=1,
            max_grad_norm=0.1,
            clipping=clipping,
            known_streams=Streams.seeded(3),  # the noise of both runs is the same
        )
    moved = torch.cat([(releases[0][n] - releases[1][n]).flatten() for n in releases[0]]) * 24
    assert 0 < moved.norm() <= 0.1 * (1 + 1e-4)


@pytest.mark.parametrize("method", slow_but(("dp_grape", "dp_lora", "dpzero", "adam"), METHODS))
def test_physical_batches_do_not_change_what_is_released(method, tmp_path):
    whole, split = (
        run(
            tmp_path / str(size),
            method,
            expected_batch_size=24,
            per_device_train_batch_size=size,
            known_streams=Streams.seeded(5),
        )
        for size in (24, 5)
    )
    assert_same_steps(split, whole, atol=2e-4, rtol=1e-3)


def whole_and_resumed(folder, stop_at, **settings):
    def trainer(name, *callbacks):
        return make_trainer(
            folder / name,
            model=tiny(settings["method"]),
            callbacks=list(callbacks),
            save_strategy="steps",
            save_steps=stop_at,
            lr_scheduler_type="constant",
            **settings,
        )

    whole, resumed = trainer("whole"), trainer("stopped")
    whole.train()
    trainer("stopped", Watch(stop_at=stop_at)).train()
    resumed.train(resume_from_checkpoint=True)
    found, expected = (weights_of(each.model) for each in (resumed, whole))
    assert_same_weights(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("method", slow_but(("dp_grape",), METHODS))
def test_a_resumed_run_ends_like_an_uninterrupted_one(method, tmp_path):
    """Without noise, so that nothing but the method's own state decides."""
    exact = EXACT if METHODS[method].private else PLAIN
    whole_and_resumed(tmp_path, 4, **exact, method=method, max_steps=7)


@pytest.mark.parametrize("method", PRIVATE)
def test_an_empty_draw_releases_noise(method, tmp_path, releases):
    """q = 1e-9: nobody is drawn."""
    rare = {"num_samples": 10**9, "per_device_train_batch_size": 1, "target_delta": 1e-10}
    run(tmp_path, method, max_steps=2, **rare)
    assert len(releases) == 2
    assert all(value.abs().min() > 0 for release in releases for value in release.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "dp_garpe"}, "method='dp_garpe' must be one of"),
        ({"method": "dp_adam", "projection": "gaussian"}, r"projection='gaussian' must be one of"),
        ({"method": "dp_grape", "projection": "svd"}, "projection='svd' must be one of"),
        (
            {"method": "dp_adam", "optim_target_modules": "body"},
            "optim_target_modules='body' has no effect",
        ),
        ({"method": "adam", "noise_multiplier": None, "target_epsilon": 4.0}, "target_epsilon=4.0"),
        ({"method": "galore", "noise_multiplier": 1.0}, "noise_multiplier=1.0 contradicts"),
        ({"method": "adam", "noise_multiplier": None, "max_grad_norm": 0.5}, "max_grad_norm=0.5"),
        ({"learning_rate_factors": {"head": 0}}, "learning_rate_factors=.* must be a mapping"),
        ({"learning_rate_factors": "head"}, "learning_rate_factors=.head. must be a mapping"),
        ({"learning_rate_factors": {"tail": 2}}, "'tail': this pattern matches none"),
        ({"gradient_factors": {"head": -1}}, "gradient_factors=.* must be a mapping"),
        ({"gradient_factors": {"head": 10**400}}, "positive and finite"),
        ({"gradient_factors": {"head": 1e9}}, "factors from 1e-06 to 1e"),
        ({"gradient_factors": {"tail": 2}}, "gradient_factors='tail': this pattern matches none"),
        *(
            (
                {"method": method, "gradient_factors": {"head": 2}},
                f"acts on gradients that are clipped, and method='{method}' has none",
            )
            for method in ("dp_zo", "adam")
        ),
        ({"update_rule": "lion"}, "update_rule='lion' must be one of"),
        ({"n_directions": 2}, "n_directions=2 is about finite differences, and"),
        ({"max_examples_per_unit": 2}, "max_examples_per_unit=2 needs privacy_unit_column"),
        ({"privacy_unit_column": "example"}, "the ledger uses 'example'"),
        ({"privacy_unit_column": "id", "method": "adam"}, "is not private"),
        ({"privacy_unit_column": "id", "expected_batch_size": None}, "the batch size counts units"),
        (
            {"method": "dpzero", "grad_sample_mode": "materialise"},
            "grad_sample_mode='materialise' has no",
        ),
        ({"engine": "functorch", "torch_compile": True}, "engine='functorch' runs the model"),
        ({"method": "dpzero", "torch_compile_mode": "default"}, "torch_compile_mode='default'"),
        ({"method": "adam", "torch_compile_backend": "eager"}, "no per-sample gradients"),
        ({"adjacency": "replace"}, "adjacency='replace' must be one of"),
        ({"grad_sample_mode": "ghost"}, "grad_sample_mode='ghost' must be one of"),
    ],
)
def test_wrong_combinations_are_refused(changes, message, tmp_path):
    with pytest.raises(PrivacyError, match=message):
        make_trainer(tmp_path, **changes)


@pytest.mark.parametrize("method", ["dp_lora", "lora"])
def test_an_adapter_method_wants_an_adapter(method, tmp_path):
    with pytest.raises(PrivacyError, match=r"peft\.get_peft_model"):
        make_trainer(tmp_path, method=method)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "patterns", "factors"),
    [
        ("dp_grape", '{"head": 3}', {"head.weight": 3.0, "head.bias": 3.0}),
        (
            "dp_sgd",
            {"body.weight": 0.5, "*.bias": 2},
            {"body.weight": 0.5, "body.bias": 2.0, "head.bias": 2.0},
        ),
        ("adam", {"*": 4}, dict.fromkeys(weights_of(TinyForSequenceClassification()), 4.0)),
    ],
)
def test_parameters_that_match_move_so_many_times_as_far(method, patterns, factors, tmp_path):
    """In the first step, where all starts from the same weights and gradients."""
    settings = NOISY if METHODS[method].private else PLAIN
    one, other = (
        run(
            tmp_path / f"{given}",
            method,
            known_streams=Streams.seeded(7),
            **settings | {"max_steps": 1},
            learning_rate_factors=given,
        )
        for given in (None, patterns)
    )
    for name, start in one[0].items():
        expected = factors.get(name, 1.0) * (one[1][name] - start)
        torch.testing.assert_close(other[1][name] - start, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.slow
def test_rates_of_their_own_survive_a_checkpoint(tmp_path):
    settings = {**EXACT, "method": "dp_grape", "max_steps": 6}
    whole_and_resumed(tmp_path, 3, **settings, learning_rate_factors={"head": 3})


def test_moments_of_other_parameters_of_the_same_shape_are_refused():
    layers = [nn.Parameter(torch.zeros(3)) for _ in range(3)]

    def optimizer(factor_of):
        made = torch.optim.SGD(layers, lr=0.1)
        scale_rates(made, factor_of)
        return made

    first, second = ({layers[n]: 3.0} for n in (0, 1))
    state = optimizer(first).state_dict()
    optimizer(first).load_state_dict(state)
    with pytest.raises(PrivacyError, match=r"\[\(1\.0, 2\), \(3\.0, 1\)\]"):
        optimizer(second).load_state_dict(state)


def test_a_checkpoint_from_before_the_factors_goes_on_without_any():
    weights = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    groups = [{"params": weights}, {"params": []}]  # the second without weight decay
    state = torch.optim.SGD(groups, lr=0.1).state_dict()
    new = torch.optim.SGD(groups, lr=0.2)
    scale_rates(new, {})
    new.load_state_dict(state)
    assert [group["lr"] for group in new.param_groups] == [0.1, 0.1]


def test_the_rate_that_is_logged_is_one_that_is_used(tmp_path):
    settings = NOISY | {"method": "dp_grape", "max_steps": 1, "learning_rate": 1e-3}
    trainer = make_trainer(tmp_path, **settings, learning_rate_factors={"*": 4})
    trainer.create_optimizer()
    assert {group["lr"] for group in trainer.optimizer.param_groups} == {4e-3}
    assert all(group["params"] for group in trainer.optimizer.param_groups)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        *({"method": method} for method in ("dp_grape", "dp_lora")),
        {"method": "dp_adam", "grad_sample_mode": "materialise"},
        {"method": "dp_adam", "engine": "functorch"},
        {"privacy_unit_column": "user", "expected_batch_size": 4},
    ],
    ids=str,
)
def test_a_factor_of_all_parameters_divides_the_clipping_norm(changes, tmp_path, releases):
    """clip(4 g, C) / 4 is clip(g, C / 4), bit by bit, and so is the noise."""
    settings = {"method": "dp_grape", "noise_multiplier": 0.5, "max_steps": 2} | changes
    if "privacy_unit_column" in changes:
        settings |= {"train_dataset": owned(), "per_device_train_batch_size": 8}
    for name, bound, factors in (("whole", 0.5, '{"*": 4}'), ("quarter", 0.125, None)):
        trained_in(
            tmp_path / name,
            model=tiny(settings["method"]),
            known_streams=Streams.seeded(7),
            max_grad_norm=bound,
            gradient_factors=factors,
            **settings,
        )
    (*whole, _, _), quarter = releases, releases[2:]
    assert len(whole) == len(quarter) == 2
    assert_same_steps(whole, quarter)


def test_factors_are_recorded_in_one_form_and_resumed_in_any(tmp_path):
    settings = NOISY | {"method": "dp_grape", "max_steps": 2, "save_strategy": "steps"}
    first = trained_in(tmp_path, **settings, save_steps=1, gradient_factors={"head": 3})
    assert first.ledger.mechanism.gradient_factors == '{"head": 3.0}'
    again = make_trainer(tmp_path, **settings, gradient_factors='{"head": 3.0}')
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert again.ledger.steps == 3


def test_batch_wide_draws_of_speech_models_are_refused_together(tmp_path):
    """Both options in one message, when the trainer is made; masks of rate 0 draw nothing."""

    def make(**drawn):
        model = row("Wav2Vec2, classification of waves").model(apply_spec_augment=True, **drawn)
        return make_trainer(tmp_path, model=model)

    with pytest.raises(PrivacyError, match=r"layerdrop=0\.0, apply_spec_augment=False"):
        make(layerdrop=0.1)
    with pytest.raises(PrivacyError, match=r"layerdrop=0\.0\)"):
        make(layerdrop=0.1, mask_time_prob=0.0)
    make(layerdrop=0.0, mask_time_prob=0.0)
