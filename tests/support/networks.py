"""Small networks, each with a gradient of its own shape, and what they are run on.

Shapes: B samples in a batch.
"""

import torch
from torch import nn
from torch.nn import functional

from tests.support.models import only

B = 6


class Stack(nn.Module):
    """Matrices that are short of positions and long of them, and a table that two layers share."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 16)
        self.first, self.again = nn.Linear(16, 24), nn.Linear(16, 11, bias=False)
        self.norm, self.last = nn.LayerNorm(24), nn.Linear(24, 16)
        self.again.weight = self.table.weight

    def forward(self, x):
        hidden = self.last(functional.gelu(self.norm(self.first(self.table(x)))))
        return self.again(hidden)


class Gate(nn.Module):
    """Has no rule, so it runs under vmap: a product with a matrix, a look-up, and a plain use."""

    def __init__(self):
        super().__init__()
        self.matrix, self.table = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(9, 8))
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x):
        values = functional.embedding(x, self.table)
        return functional.linear(values, self.matrix).tanh() * self.scale


class Twice(nn.Module):
    """Runs its layer once, and later twice."""

    times = 1

    def __init__(self):
        super().__init__()
        self.first, self.layer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        for _ in range(self.times):
            x = self.layer(x).tanh()
        return x


def total(outputs, labels):
    return outputs.flatten(1).sum(1)


def gated():
    return nn.Sequential(Gate(), nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 3))


def words():
    return {"x": torch.randint(0, 9, (B, 5))}


def sequence(build):
    model = build()
    inputs = words() if isinstance(model, Stack) else {"input": words()["x"]}
    return model, inputs, lambda outputs, labels: outputs.square().flatten(1).mean(1)


def of_zoo(name, positions):
    return only(name).model(), only(name).batch(B, positions), None


MODELS = {
    "stack": lambda: sequence(Stack),
    "under vmap": lambda: sequence(gated),
    "bert": lambda: of_zoo("bert-classifier", 9),
    "tied gpt2": lambda: of_zoo("gpt2", 9),
    "vit": lambda: of_zoo("vit", 5),
}


def flat(release):
    """Returns a release as if it were the gradients of a single sample, for a comparison."""
    return {name: value[None] for name, value in release.items()}
