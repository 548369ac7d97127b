"""A mechanism as ledgers record it, and one at work: that of a step, and what it released.

Shapes: B samples in a batch.
"""

import math
from dataclasses import replace

import torch
from torch import nn

from dp_grape_hf.gradients import FlatGradients, FlatTensors, Layout, PerSampleEngine
from dp_grape_hf.ledger import Ledger, Mechanism
from dp_grape_hf.mechanism import PrivateMechanism

MECHANISM = Mechanism(
    noise_multiplier=1.0,
    sample_rate=0.5,
    max_grad_norm=1.0,
    expected_batch_size=4,
    num_samples=8,
    target_epsilon=None,
    target_delta=1e-5,
    accountant="rdp",
    engine="layerwise",
    projection="gaussian",
    projection_rank=8,
    projection_update_steps=100,
    projection_seed=0,
)
ROUNDING = 1e-6  # relative, by which float32 may exceed a bound


class Given(PerSampleEngine):
    """Hands out the gradients that the inputs hold, for parameters of the given shapes.

    Their forms are kept: the matrix of all gradients has no columns.
    """

    def __init__(self, **shapes):
        model = nn.ParameterDict({name: torch.zeros(shape) for name, shape in shapes.items()})
        super().__init__(model, lambda outputs, labels: outputs)
        self._empty = Layout({}, {})

    def layout(self, projectors):
        return self._empty

    def __call__(self, inputs, projectors):
        gradients = {name: inputs[name] for name in self.trainable}
        losses = next(iter(gradients.values())).squared_norm()
        flat = torch.zeros(len(losses), 0)
        return losses, FlatGradients(self._empty, flat, gradients, gradients)


def coins(seed=0):
    """Returns coins that are known, for draws that can be repeated."""
    return torch.Generator().manual_seed(seed)


def make_private(
    per_sample, *, seed=0, noise_generator=None, ledger=None, distributed=False, **own
):
    """Returns an engine whose release is the clipped sum itself, unless told otherwise.

    What is not named here is a field of its `Mechanism`.
    """
    mechanism = replace(MECHANISM, **{"noise_multiplier": 0.0, "expected_batch_size": 1.0} | own)
    generator = noise_generator or torch.Generator().manual_seed(seed)
    return PrivateMechanism(
        per_sample,
        ledger=ledger or Ledger.start(mechanism),
        noise_generator=generator,
        distributed=distributed,
    )


def released(engine, batches, projectors=None):
    engine.begin(projectors or {})
    for batch in batches:
        engine.accumulate(batch)
    return engine.release()


def joint_norm(tensors):
    return math.sqrt(sum(value.double().square().sum().item() for value in tensors.values()))


def distance(left, right):
    assert left.keys() == right.keys()
    return joint_norm({name: left[name] - right[name] for name in left})


def split(batch, sizes):
    parts = {key: value.split(list(sizes)) for key, value in batch.items()}
    return [{key: part[i] for key, part in parts.items()} for i in range(len(sizes))]


def sample_norms(gradients):
    """Returns the norms (B,) over all parameters jointly."""
    squared = [g.double().flatten(1).square().sum(1) for g in gradients.values()]
    return torch.stack(squared).sum(0).sqrt()


def in_order(release, values):
    """Returns by name what was given in the order in which a release meets the noise."""
    first, *rest = values
    assert [v.shape for v in values] == [release.flat.shape, *map(_shape, release.others.values())]
    return FlatTensors(release.layout, first, dict(zip(release.others, rest, strict=True)), release)


def _shape(value):
    return value.shape


def drawn_for(release, std, seed):
    """Returns the noise of a release by name, from a generator of that seed."""
    generator = torch.Generator().manual_seed(seed)
    values = [release.flat, *release.others.values()]
    drawn = [torch.empty(v.shape).normal_(0, std, generator=generator) for v in values]
    return in_order(release, drawn)
