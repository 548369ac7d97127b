"""Runs of a method, its definition written out, and what every method has to keep.

Shapes: N examples, B samples in a batch, m x n a weight.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from dp_grape_hf.mechanism import Streams
from recipes.paper.methods import METHODS
from tests.support.oracles import single_sample_gradients
from tests.support.trainers import (
    EXACT,
    Examples,
    TinyForSequenceClassification,
    Watch,
    assert_same_weights,
    make_trainer,
    points,
    spy_releases,
    tiny,
    weights_of,
)

OURS = ("dp_grape", "dp_adam", "dp_sgd", "dp_lora")
"""The methods of the package."""

PRIVATE = tuple(name for name, row in METHODS.items() if row.private)
"""Those of the package and the paper's comparisons that are private."""

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


# ---- What every method keeps ----


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


def moves_by_at_most_c(method: str, clipping: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """One example more moves the release by at most C."""
    releases = spy_releases(patch)
    for number in (24, 23):
        settings = neighbour(number) | {"max_grad_norm": 0.1, "clipping": clipping}
        run(folder / str(number), method, **settings)
    moved = torch.cat([(releases[0][n] - releases[1][n]).flatten() for n in releases[0]]) * 24
    assert 0 < moved.norm() <= 0.1 * (1 + 1e-4)


def is_the_same_in_any_split(method: str, folder: Path) -> None:
    """Physical batches do not change what is released."""
    whole, split = (
        run(
            folder / str(size),
            method,
            expected_batch_size=24,
            per_device_train_batch_size=size,
            known_streams=Streams.known(5),
        )
        for size in (24, 5)
    )
    assert_same_steps(split, whole, atol=2e-4, rtol=1e-3)


def resumes_where_it_stopped(method: str, folder: Path) -> None:
    """Without noise, so that nothing but the method's own state decides."""
    exact = EXACT if METHODS[method].private else PLAIN
    whole_and_resumed(folder, 4, **exact, method=method, max_steps=7)


def learns(method: str, folder: Path) -> None:
    """The loss falls."""
    exact = EXACT if METHODS[method].private else PLAIN
    rate = 0.5 if METHODS[method].update_rule == "sgd" else 3e-2
    weights = run(folder, method, **exact, max_steps=40, learning_rate=rate)
    model = tiny(method)
    losses = []
    for state in (weights[0], weights[-1]):
        model.load_state_dict(state, strict=False)
        losses.append(model(**batch_of_all())["loss"].item())
    assert losses[1] < 0.8 * losses[0]


def releases_noise_alone(method: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """q = 1e-9: nobody is drawn."""
    releases = spy_releases(patch)
    run(
        folder,
        method,
        num_samples=10**9,
        expected_batch_size=1,
        per_device_train_batch_size=1,
        max_steps=2,
        target_delta=1e-10,
    )
    assert len(releases) == 2
    assert all(value.abs().min() > 0 for release in releases for value in release.values())
