"""Runs of a method, its definition written out, and what every method has to keep.

Shapes: N examples, B samples in a batch, m x n a weight.
"""

import torch
from transformers import Trainer, TrainingArguments

from dp_grape_hf.mechanism import Streams
from recipes.paper.methods import METHODS
from tests.support.oracles import single_sample_gradients
from tests.support.trainers import (
    OF_HOST,
    TinyForSequenceClassification,
    Watch,
    assert_same_weights,
    points,
    tiny,
    trained_in,
)

OURS = ("dp_grape", "dp_adam", "dp_sgd", "dp_lora")
"""The methods of the package."""

PRIVATE = tuple(name for name, row in METHODS.items() if row.private)
"""Those of the package and the paper's comparisons that are private."""

PLAIN = {"per_device_train_batch_size": 24}
"""Arguments of a run that is not private, on all of ``points`` at every step."""


def run(folder, method, **changes):
    """Trains the tiny model; returns its weights before and after every step."""
    watch = Watch()
    model = changes.pop("model", None)
    settings = {"method": method, "model": tiny(method) if model is None else model}
    trained_in(folder, callbacks=[watch], lr_scheduler_type="constant", **settings, **changes)
    return watch.weights


def assert_same_steps(found, expected, **tolerance):
    for one, other in zip(found, expected, strict=True):
        assert_same_weights(one, other, **tolerance)


def batch_of_all():
    examples = points().examples
    return {key: torch.stack([e[key] for e in examples]) for key in ("x", "labels")}


def noisy_sum(weights, noise, max_grad_norm):
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


def noise_for(weights, std, generator):
    """Returns noise for each weight; the gradients of all lie in one vector, which is drawn."""
    sizes = [w.numel() for w in weights.values()]
    drawn = torch.empty(sum(sizes)).normal_(0, std, generator=generator).split(sizes)
    return [own.view(w.shape) for own, w in zip(drawn, weights.values(), strict=True)]


def definition(start, steps, update, *, max_grad_norm=0.5, std=1.0):
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


def noisy_run(folder, method, **changes):
    """Runs a method with noise that ``definition`` can draw again."""
    settings = NOISY | {"known_streams": Streams.seeded(7)} | changes
    return run(folder, method, **settings)


class Moments:
    """Adam of one array of numbers, as in the textbook; 1e-2 is the learning rate of the tests."""

    def __init__(self):
        self.first = self.second = torch.zeros(())
        self.step = 0

    def update(self, gradient):
        self.step += 1
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.999 * self.second + 0.001 * gradient**2
        first, second = self.first / (1 - 0.9**self.step), self.second / (1 - 0.999**self.step)
        return 1e-2 * first / (second.sqrt() + 1e-8)


def plain_trainer(folder, model, steps, data=None, watch=None, **settings):
    """Trains with the Trainer of transformers on all of the data at every step."""
    data, watch = data or points(), watch or Watch()
    settings = {"learning_rate": 1e-2, "lr_scheduler_type": "constant"} | settings
    settings |= {"per_device_train_batch_size": len(data), "max_steps": steps, "logging_steps": 1}
    args = TrainingArguments(str(folder), max_grad_norm=0.0, **OF_HOST, **settings)
    Trainer(model, args, train_dataset=data, callbacks=[watch]).train()
    return watch.weights
