"""Every method against its definition, written out; and suites over the table of methods.

Shapes: N examples, B samples in a batch, m x n a weight.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Trainer,
    TrainingArguments,
    Wav2Vec2Config,
    Wav2Vec2ForSequenceClassification,
)

from dp_grape_hf.arguments import METHODS
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.ledger import Clipping
from dp_grape_hf.mechanism import Streams
from dp_grape_hf.projections.seeds import projection_generator
from dp_grape_hf.trainer.run import scale_rates
from tests.support.marks import slow_but
from tests.support.oracles import single_sample_gradients
from tests.support.trainers import (
    EXACT,
    Examples,
    TinyForSequenceClassification,
    Watch,
    assert_same_weights,
    make_trainer,
    owned,
    points,
    spy_releases,
    tiny,
    weights_of,
)

PRIVATE = [name for name, row in METHODS.items() if row.private]
each_method = pytest.mark.parametrize(
    "method", slow_but(("dp_grape", "dp_lora", "dpzero", "adam"), METHODS)
)
NOT_PRIVATE = [name for name, row in METHODS.items() if not row.private]
PLAIN = {"per_device_train_batch_size": 24}
"""Arguments of a run that is not private, on all of ``points`` at every step."""

Weights = dict[str, Tensor]
Update = Callable[[int, Weights], Weights]


def run(folder: Path, method: str, **changes: Any) -> list[Weights]:
    """Trains the tiny model; returns its weights before and after every step."""
    watch = Watch()
    model = changes.pop("model", None)
    trainer = make_trainer(
        folder,
        method=method,
        model=tiny(method) if model is None else model,
        callbacks=[watch],
        lr_scheduler_type="constant",
        **changes,
    )
    trainer.train()
    return watch.weights


def assert_same_steps(
    found: Iterable[Weights], expected: Iterable[Weights], **tolerance: float
) -> None:
    """Compares weights after every step."""
    for one, other in zip(found, expected, strict=True):
        assert_same_weights(one, other, **tolerance)


def whole_and_resumed(folder: Path, stop_at: int, **settings: Any) -> None:
    """Compares a run with one that was stopped and resumed."""

    def trainer(name: str, *callbacks: Watch) -> Any:
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


def batch_of_all() -> dict[str, Tensor]:
    """Returns all of ``points`` as one batch."""
    examples = points().examples
    return {key: torch.stack([e[key] for e in examples]) for key in ("x", "labels")}


# ---- Definitions ----


class Moments:
    """Adam of one array of numbers, as in the textbook; 1e-2 is the learning rate of the tests."""

    def __init__(self) -> None:
        self.first = self.second = torch.zeros(())
        self.step = 0

    def update(self, gradient: Tensor) -> Tensor:
        """Returns what is taken off the weight."""
        self.step += 1
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.999 * self.second + 0.001 * gradient**2
        first, second = self.first / (1 - 0.9**self.step), self.second / (1 - 0.999**self.step)
        return 1e-2 * first / (second.sqrt() + 1e-8)


def singular_vectors(gradient: Tensor, rank: int) -> Tensor:
    """Returns the leading singular vectors on the side of the smaller dimension, in columns."""
    left, _, right = torch.linalg.svd(gradient, full_matrices=False)
    return right[:rank].T if gradient.shape[0] >= gradient.shape[1] else left[:, :rank]


def along(gradient: Tensor, basis: Tensor, update: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns the update of the projected gradient, lifted."""
    if len(basis) == gradient.shape[1]:
        return update(gradient @ basis) @ basis.T
    return basis @ update(basis.T @ gradient)


def public_galore(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports galore-torch, whose 8-bit optimizer, not needed here, wants a library for GPUs."""
    if find_spec("bitsandbytes") is None:
        for name in ("bitsandbytes", "bitsandbytes.optim", "bitsandbytes.optim.optimizer"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        stub: Any = sys.modules["bitsandbytes.optim.optimizer"]
        stub.Optimizer2State = object
    return pytest.importorskip("galore_torch")


def test_galore_is_the_public_implementation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step for step, with a redraw in between. Its eps counts before the bias correction."""
    reference = public_galore(monkeypatch)
    found = run(tmp_path, "galore", **PLAIN, max_steps=5, adam_epsilon=1e-12)
    model = TinyForSequenceClassification()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    settings = {"rank": 2, "update_proj_gap": 3, "scale": 1.0, "proj_type": "std"}
    optimizer = reference.GaLoreAdamW(
        [{"params": others}, {"params": matrices, **settings}],
        lr=1e-2,
        eps=1e-12,
        no_deprecation_warning=True,
    )
    for actual in found[1:]:
        batch = batch_of_all()
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        optimizer.step()
        wanted = {name: weight.detach() for name, weight in model.named_parameters()}
        assert_same_weights(actual, wanted, atol=2e-5, rtol=1e-4)


def noisy_sum(weights: Weights, noise: Iterable[Tensor], max_grad_norm: float) -> Weights:
    """Returns ``(sum_i clip(g_i, C) + noise) / B`` over all of ``points``, sample by sample."""
    model = TinyForSequenceClassification()
    model.load_state_dict(weights)
    _, gradients = single_sample_gradients(model, batch_of_all())
    flat = torch.cat([g.flatten(1) for g in gradients.values()], 1)
    factors = (max_grad_norm / flat.norm(dim=1)).clamp(max=1)
    return {
        name: (torch.einsum("b,b...->...", factors, g) + n) / len(factors)
        for (name, g), n in zip(gradients.items(), noise, strict=True)
    }


def noise_for(weights: Weights, std: float, generator: torch.Generator) -> list[Tensor]:
    """Returns noise for each weight; the gradients of all lie in one vector, which is drawn."""
    sizes = [w.numel() for w in weights.values()]
    drawn = torch.empty(sum(sizes)).normal_(0, std, generator=generator).split(sizes)
    return [own.view(w.shape) for own, w in zip(drawn, weights.values(), strict=True)]


def definition(
    start: Weights, steps: int, update: Update, *, max_grad_norm: float = 0.5, std: float = 1.0
) -> Iterable[Weights]:
    """Yields the weights after each step of a method: clip, add noise of that ``std``, update."""
    weights = dict(start)
    generator = torch.Generator().manual_seed(8)
    for step in range(steps):
        noise = noise_for(weights, std, generator)
        moves = update(step, noisy_sum(weights, noise, max_grad_norm))
        weights = {name: weights[name] - moves[name] for name in weights}
        yield dict(weights)


NOISY = {
    "noise_multiplier": 2.0,
    "max_grad_norm": 0.5,
    "per_device_train_batch_size": 24,
    "max_steps": 5,
}


def noisy_run(folder: Path, method: str, **changes: Any) -> list[Weights]:
    """Runs a method with noise that ``definition`` can draw again."""
    settings = NOISY | {"known_streams": Streams.known(7)} | changes
    return run(folder, method, **settings)


def descent() -> Update:
    return lambda step, private_grads: {n: 1e-2 * g for n, g in private_grads.items()}


def adam() -> Update:
    moments: dict[str, Moments] = defaultdict(Moments)
    return lambda step, private_grads: {n: moments[n].update(g) for n, g in private_grads.items()}


def along_singular_vectors() -> Update:
    """GaLore (Zhao et al. 2024, Algorithm 2, alpha = 1): SVD of the gradient every few steps."""
    moments: dict[str, Moments] = defaultdict(Moments)
    bases: Weights = {}

    def update(step: int, private_grads: Weights) -> Weights:
        if step % 3 == 0:
            matrices = {n: g for n, g in private_grads.items() if g.dim() == 2}
            bases.update({n: singular_vectors(g, 2) for n, g in matrices.items()})
        return {
            n: along(g, bases[n], moments[n].update) if n in bases else moments[n].update(g)
            for n, g in private_grads.items()
        }

    return update


def along_random_directions() -> Update:
    """SGD along the random projection of the private gradient."""

    def update(step: int, private_grads: Weights) -> Weights:
        moves = {}
        for name, gradient in private_grads.items():
            if gradient.dim() == 2:
                generator = projection_generator(0, step // 3, name)
                p = torch.randn(min(gradient.shape), 2, generator=generator) / 2**0.5
                gradient = along(gradient, p, lambda projected: projected)
            moves[name] = 1e-2 * gradient
        return moves

    return update


@pytest.mark.parametrize(
    ("method", "update", "atol", "rtol"),
    [
        ("dp_sgd", descent, 1e-6, 1e-5),
        ("dp_adam", adam, 1e-5, 1e-4),
        ("dp_galore", along_singular_vectors, 2e-5, 1e-4),
        ("d2p2", along_random_directions, 1e-6, 1e-5),
    ],
)
def test_a_private_method_is_its_definition(
    method: str, update: Callable[[], Update], atol: float, rtol: float, tmp_path: Path
) -> None:
    found = noisy_run(tmp_path, method)
    expected = definition(found[0], 5, update())
    assert_same_steps(found[1:], expected, atol=atol, rtol=rtol)


def test_galore_is_its_definition(tmp_path: Path) -> None:
    found = run(tmp_path, "galore", **PLAIN, max_steps=7)
    exact = {"max_grad_norm": float("inf"), "std": 0.0}
    expected = definition(found[0], 7, along_singular_vectors(), **exact)
    assert_same_steps(found[1:], expected, atol=2e-5, rtol=1e-4)


def test_dp_grape_with_the_identity_is_dp_adam(tmp_path: Path) -> None:
    one = noisy_run(tmp_path / "a", "dp_grape", projection="identity")
    other = noisy_run(tmp_path / "b", "dp_adam")
    assert_same_steps(one, other)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
def test_dp_adam_is_opacus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same batches, same noise: per-sample gradients, clipping, sum, noise and Adam of Opacus."""
    optimizers = pytest.importorskip("opacus.optimizers.optimizer")
    from opacus.grad_sample import GradSampleModule

    found = noisy_run(tmp_path, "dp_adam")
    generator = torch.Generator().manual_seed(8)
    left: list[Tensor] = []

    def noise(std: float, reference: Tensor, **_: Any) -> Tensor:
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


# ---- The counterparts that are not private ----


def plain_trainer(folder: Path, model: nn.Module, steps: int) -> list[Weights]:
    """Trains with the Trainer of transformers on all of ``points`` at every step."""
    watch = Watch()
    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=24,
        max_steps=steps,
        learning_rate=1e-2,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    Trainer(model, args, train_dataset=points(), callbacks=[watch]).train()
    return watch.weights


@pytest.mark.parametrize("method", ["adam", "lora"])
def test_a_counterpart_is_the_plain_trainer(method: str, tmp_path: Path) -> None:
    """With PEFT, if it is LoRA."""
    expected = plain_trainer(tmp_path / "plain", tiny(method), steps=5)
    found = run(tmp_path / "ours", method, **PLAIN, max_steps=5)
    assert_same_steps(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("private", "plain"), [("dp_adam", "adam"), ("dp_lora", "lora"), ("dp_galore", "galore")]
)
def test_a_private_method_without_noise_and_clipping_is_its_counterpart(
    private: str, plain: str, tmp_path: Path
) -> None:
    one = run(tmp_path / "a", private, **EXACT, max_steps=5)
    other = run(tmp_path / "b", plain, **PLAIN, max_steps=5)
    assert_same_steps(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("method", NOT_PRIVATE)
def test_a_method_that_is_not_private_says_so(method: str, tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, method=method, model=tiny(method), noise_multiplier=None, max_steps=2
    )
    trainer.train()
    trainer.save_model()
    spent = trainer.privacy_spent()
    assert not spent.private
    assert spent.epsilon == float("inf")
    assert trainer.ledger.mechanism.method == method
    assert trainer.ledger.steps == 2
    card = (tmp_path / "README.md").read_text()
    assert "**This model has no privacy guarantee**" in card


# ---- Suites over the table ----


def neighbour(num_samples: int) -> dict[str, Any]:
    """Returns arguments of a run on the first examples, each of which is in every draw."""
    return {
        "train_dataset": Examples(points().examples[:num_samples]),
        "num_samples": 24,
        "expected_batch_size": 24,
        "per_device_train_batch_size": 24,
        "max_steps": 1,
        "noise_multiplier": 1.0,
        "known_streams": Streams.known(3),  # the noise of both runs is the same
    }


@pytest.mark.parametrize(
    ("method", "clipping"),
    [
        pytest.param(m, c, marks=() if c == "flat" or m == "dp_grape" else pytest.mark.slow)
        for m, c in product(PRIVATE, Clipping)
    ],
)
def test_one_example_moves_the_release_by_at_most_c(
    method: str, clipping: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    releases = spy_releases(monkeypatch)
    for number in (24, 23):
        settings = neighbour(number) | {"max_grad_norm": 0.1, "clipping": clipping}
        run(tmp_path / str(number), method, **settings)
    moved = torch.cat([(releases[0][n] - releases[1][n]).flatten() for n in releases[0]]) * 24
    assert 0 < moved.norm() <= 0.1 * (1 + 1e-4)


@each_method
def test_physical_batches_do_not_change_what_is_released(method: str, tmp_path: Path) -> None:
    whole, split = (
        run(
            tmp_path / str(size),
            method,
            expected_batch_size=24,
            per_device_train_batch_size=size,
            known_streams=Streams.known(5),
        )
        for size in (24, 5)
    )
    assert_same_steps(split, whole, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("method", slow_but(("dp_grape",), METHODS))
def test_a_run_that_is_resumed_ends_where_it_would_have_ended(method: str, tmp_path: Path) -> None:
    """Without noise, so that nothing but the method's own state decides."""
    exact = EXACT if METHODS[method].private else PLAIN
    whole_and_resumed(tmp_path, 4, **exact, method=method, max_steps=7)


@pytest.mark.parametrize("method", slow_but(("dp_grape",), METHODS))
def test_a_tiny_model_learns(method: str, tmp_path: Path) -> None:
    exact = EXACT if METHODS[method].private else PLAIN
    rate = 0.5 if METHODS[method].update_rule == "sgd" else 3e-2
    weights = run(tmp_path, method, **exact, max_steps=40, learning_rate=rate)
    model = tiny(method)
    losses = []
    for state in (weights[0], weights[-1]):
        model.load_state_dict(state, strict=False)
        losses.append(model(**batch_of_all())["loss"].item())
    assert losses[1] < 0.8 * losses[0]


@pytest.mark.parametrize("method", PRIVATE)
def test_an_empty_draw_releases_noise(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """q = 1e-9: nobody is drawn."""
    releases = spy_releases(monkeypatch)
    run(
        tmp_path,
        method,
        num_samples=10**9,
        expected_batch_size=1,
        per_device_train_batch_size=1,
        max_steps=2,
        target_delta=1e-10,
    )
    assert len(releases) == 2
    assert all(value.abs().min() > 0 for release in releases for value in release.values())


# ---- Refusals ----


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "dp_garpe"}, "method='dp_garpe' must be one of"),
        ({"method": "dp_adam", "projection": "gaussian"}, r"projection='gaussian' must be one of"),
        ({"method": "dp_grape", "projection": "svd"}, "projection='svd' must be one of"),
        ({"method": "dp_adam", "optim_target_modules": "body"}, "optim_target_modules='body' is"),
        ({"method": "adam", "noise_multiplier": None, "target_epsilon": 4.0}, "target_epsilon=4.0"),
        ({"method": "galore", "noise_multiplier": 1.0}, "noise_multiplier=1.0 contradicts"),
        ({"method": "adam", "noise_multiplier": None, "max_grad_norm": 0.5}, "max_grad_norm=0.5"),
        ({"learning_rate_factors": {"head": 0}}, "must map name patterns to factors that are pos"),
        ({"learning_rate_factors": "head"}, "learning_rate_factors='head' must map"),
        ({"learning_rate_factors": {"tail": 2}}, "'tail': this pattern matches none of the param"),
        (
            {"method": "dpzero", "learning_rate_factors": {"head": 2}},
            "is about gradients by parameter, and method='dpzero' makes none",
        ),
        ({"gradient_factors": {"head": -1}}, "gradient_factors=.* must map name patterns to fact"),
        ({"gradient_factors": {"head": 10**400}}, "factors that are positive and finite"),
        ({"gradient_factors": {"head": 1e9}}, "name patterns to factors from 1e-06 to 1e"),
        ({"gradient_factors": {"tail": 2}}, "gradient_factors='tail': this pattern matches none"),
        *(
            (
                {"method": method, "gradient_factors": {"head": 2}},
                f"is about gradients that are clipped, and method='{method}' makes none",
            )
            for method in ("dp_zo", "adam")
        ),
        ({"update_rule": "adagrad"}, "update_rule='adagrad' must be one of"),
        ({"n_directions": 2}, "n_directions=2 is about finite differences, and"),
        ({"max_examples_per_unit": 2}, "max_examples_per_unit=2 needs privacy_unit_column"),
        ({"privacy_unit_column": "example"}, "a column other than 'example'"),
        ({"privacy_unit_column": "id", "method": "adam"}, "protects nobody"),
        ({"privacy_unit_column": "id", "expected_batch_size": None}, "it counts units"),
        ({"method": "dpzero", "grad_sample_mode": "ghost"}, "'dpzero' does not compute"),
        ({"engine": "functorch", "grad_sample_mode": "ghost"}, "not a mode of engine='functorch'"),
        ({"engine": "functorch", "torch_compile": True}, "engine='functorch' runs the model"),
        ({"grad_sample_mode": "ghost", "torch_compile": True}, "two backward passes"),
        ({"method": "dpzero", "torch_compile_mode": "default"}, "torch_compile_mode='default'"),
        ({"method": "adam", "torch_compile_backend": "eager"}, "no per-sample gradients"),
        ({"adjacency": "replace"}, "adjacency='replace' must be one of"),
        ({"grad_sample_mode": "hooks"}, "grad_sample_mode='hooks' must be one of"),
    ],
)
def test_wrong_combinations_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(PrivacyError, match=message):
        make_trainer(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bf16": True}, "mixed_precision='bf16' with method="),
        ({"perturbation": 1e-5}, "perturbation=1e-05 is below 0.0001"),
        ({"update_rule": "adam"}, "update_rule='adam' needs gradients"),
        ({"model": TinyForSequenceClassification().bfloat16()}, "Load the model in float32"),
    ],
    ids=["autocast", "small steps", "adam", "bfloat16"],
)
def test_rounding_that_a_finite_difference_would_magnify_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(PrivacyError, match=message):
        make_trainer(tmp_path, method="dpzero", **changes)


@pytest.mark.parametrize("method", ["dp_lora", "lora"])
def test_an_adapter_method_wants_an_adapter(method: str, tmp_path: Path) -> None:
    with pytest.raises(PrivacyError, match=r"has none\. Make it with peft\.get_peft_model"):
        make_trainer(tmp_path, method=method)


# ---- Learning rates ----


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
def test_parameters_that_match_move_so_many_times_as_far(
    method: str, patterns: Any, factors: dict[str, float], tmp_path: Path
) -> None:
    """In the first step, where all starts from the same weights and gradients."""
    settings = NOISY if METHODS[method].private else PLAIN
    one, other = (
        run(
            tmp_path / f"{given}",
            method,
            known_streams=Streams.known(7),
            **settings | {"max_steps": 1},
            learning_rate_factors=given,
        )
        for given in (None, patterns)
    )
    for name, start in one[0].items():
        expected = factors.get(name, 1.0) * (one[1][name] - start)
        torch.testing.assert_close(other[1][name] - start, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.slow
def test_rates_of_their_own_survive_a_checkpoint(tmp_path: Path) -> None:
    settings = {**EXACT, "method": "dp_grape", "max_steps": 6}
    whole_and_resumed(tmp_path, 3, **settings, learning_rate_factors={"head": 3})


def test_other_rates_than_those_of_the_checkpoint_are_refused(tmp_path: Path) -> None:
    settings = NOISY | {"method": "dp_grape", "max_steps": 2, "save_strategy": "steps"}
    first = make_trainer(tmp_path, **settings, save_steps=1, learning_rate_factors={"head": 3})
    first.train()
    for factors in (None, {"head": 4}, {"body": 3}):
        trainer = make_trainer(tmp_path, **settings, learning_rate_factors=factors)
        with pytest.raises(PrivacyError, match="learning_rate_factors of this run make groups of"):
            trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_moments_of_other_parameters_of_the_same_shape_are_refused() -> None:
    layers = [nn.Parameter(torch.zeros(3)) for _ in range(3)]

    def optimizer(factor_of: dict[nn.Parameter, float]) -> torch.optim.Optimizer:
        made = torch.optim.SGD(layers, lr=0.1)
        scale_rates(made, factor_of)
        return made

    first, second = ({layers[n]: 3.0} for n in (0, 1))
    state = optimizer(first).state_dict()
    optimizer(first).load_state_dict(state)
    with pytest.raises(PrivacyError, match=r"\[\(1\.0, 2\), \(3\.0, 1\)\], or others of"):
        optimizer(second).load_state_dict(state)


def test_a_checkpoint_from_before_the_factors_goes_on_without_any() -> None:
    weights = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    groups: Any = [{"params": weights}, {"params": []}]  # the second without weight decay
    state = torch.optim.SGD(groups, lr=0.1).state_dict()
    new = torch.optim.SGD(groups, lr=0.2)
    scale_rates(new, {})
    new.load_state_dict(state)
    assert [group["lr"] for group in new.param_groups] == [0.1, 0.1]


def test_the_rate_that_is_logged_is_one_that_is_used(tmp_path: Path) -> None:
    settings = NOISY | {"method": "dp_grape", "max_steps": 1, "learning_rate": 1e-3}
    trainer = make_trainer(tmp_path, **settings, learning_rate_factors={"*": 4})
    trainer.create_optimizer()
    assert {group["lr"] for group in trainer.optimizer.param_groups} == {4e-3}
    assert all(group["params"] for group in trainer.optimizer.param_groups)


# ---- Gradient factors ----


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        *({"method": method} for method in ("dp_grape", "dp_lora")),
        {"method": "dp_adam", "grad_sample_mode": "ghost"},
        {"method": "dp_adam", "engine": "functorch"},
        {"privacy_unit_column": "user", "expected_batch_size": 4},
    ],
    ids=str,
)
def test_a_factor_of_all_parameters_divides_the_clipping_norm(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """clip(4 g, C) / 4 is clip(g, C / 4), bit by bit, and so is the noise."""
    releases = spy_releases(monkeypatch)
    settings = {"method": "dp_grape", "noise_multiplier": 0.5, "max_steps": 2} | changes
    if "privacy_unit_column" in changes:
        settings |= {"train_dataset": owned(), "per_device_train_batch_size": 8}
    for name, bound, factors in (("whole", 0.5, '{"*": 4}'), ("quarter", 0.125, None)):
        trainer = make_trainer(
            tmp_path / name,
            model=tiny(settings["method"]),
            known_streams=Streams.known(7),
            max_grad_norm=bound,
            gradient_factors=factors,
            **settings,
        )
        trainer.train()
    (*whole, _, _), quarter = releases, releases[2:]
    assert len(whole) == len(quarter) == 2
    assert_same_steps(whole, quarter)


def test_other_factors_than_those_of_the_checkpoint_are_refused(tmp_path: Path) -> None:
    settings = NOISY | {"method": "dp_grape", "max_steps": 2, "save_strategy": "steps"}
    first = make_trainer(tmp_path, **settings, save_steps=1, gradient_factors={"head": 3})
    first.train()
    assert first.ledger.mechanism.gradient_factors == '{"head": 3.0}'
    again = make_trainer(tmp_path, **settings, gradient_factors='{"head": 3.0}')
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    for factors in (None, {"head": 4}, {"body": 3}):
        trainer = make_trainer(tmp_path, **settings, gradient_factors=factors)
        with pytest.raises(
            PrivacyError, match=r"gradient_factors=.*recorded: '\{\"head\": 3\.0\}'"
        ):
            trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_what_a_speech_model_draws_for_a_whole_batch_is_told_at_once(tmp_path: Path) -> None:
    """Both options in one message, when the trainer is made; masks of rate 0 draw nothing."""
    sizes = {"num_hidden_layers": 1, "conv_dim": (16, 16), "num_feat_extract_layers": 2}
    sizes |= {"conv_stride": (5, 4), "conv_kernel": (10, 8), "num_conv_pos_embedding_groups": 2}
    sizes |= {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32}

    def make(**drawn: Any) -> Any:
        config = Wav2Vec2Config(**sizes, num_conv_pos_embeddings=4, **drawn)
        return make_trainer(tmp_path, model=Wav2Vec2ForSequenceClassification(config))

    with pytest.raises(PrivacyError, match=r"layerdrop=0\.0, apply_spec_augment=False"):
        make()
    with pytest.raises(PrivacyError, match=r"from_pretrained\(\.\.\., layerdrop=0\.0\)"):
        make(mask_time_prob=0.0)
    make(layerdrop=0.0, mask_time_prob=0.0)
