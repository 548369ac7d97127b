"""What a model does with the batch, found out by running it.

Which dimension of a tensor counts samples cannot be read off its shape: a table of T positions
looks like a batch wherever T equals B. It can be read off two runs, with two and with three copies
of one sample: what carries the batch grows in proportion, and a loss that looks at one sample only
stays the same. Whether samples are coupled shows in the gradient of one sample's loss in another's
coordinates, which must be zero.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dp_grape_hf.errors import PrivacyError, UnsupportedModelError
from dp_grape_hf.representations import PerSampleGradient


def copies_of_first(inputs: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Returns a batch of copies of the first sample."""
    return {
        key: value[:1].repeat(size, *[1] * (value.dim() - 1))
        if isinstance(value, Tensor)
        else value
        for key, value in inputs.items()
    }


def first_two(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a batch of the first two samples, or of the only one twice."""
    two = {k: v[:2] if isinstance(v, Tensor) else v for k, v in inputs.items()}
    alone = any(len(v) == 1 for v in two.values() if isinstance(v, Tensor))
    return copies_of_first(inputs, 2) if alone else two


def leading_sizes(tree: Any) -> list[int]:
    """Returns the leading sizes of all tensors in a nest of containers."""
    return [t.shape[0] for t in tree_leaves(tree) if isinstance(t, Tensor) and t.dim() > 0]


def carries_batch(two: list[int], three: list[int]) -> list[bool]:
    """Returns which leading sizes grew in proportion from a batch of 2 to a batch of 3."""
    return [a * 3 == b * 2 for a, b in zip(two, three, strict=True)]


def refuse_shared_gradients(gradients: Mapping[str, PerSampleGradient], other: int) -> None:
    """Refuses one sample's loss having a gradient in the coordinates of the other."""
    # NaN is not above 0: a sample with NaN values says nothing, and clipping leaves it out.
    if names := [n for n, g in gradients.items() if g.squared_norm()[other] > 0]:
        raise UnsupportedModelError(
            "The loss of one sample depends on its batch-mates through "
            f"{', '.join(names)}: the loss or a layer couples samples, or a layer is given their "
            "positions in an order that mixes them. Clipping then bounds nothing."
        )


def refuse_coupled_losses(two: Tensor, three: Tensor) -> None:
    """Refuses a loss that changes when copies of the sample join the batch."""
    values = torch.cat([two, three]).float()
    if not torch.allclose(values, values[:1].expand(5), rtol=1e-2, atol=1e-4, equal_nan=True):
        raise PrivacyError(
            f"The loss of one and the same sample is {two[0]:.6g} in a batch of two copies and "
            f"{three[0]:.6g} in a batch of three: the loss couples samples, so clipping bounds "
            "nothing. Divide by each sample's own token count, not by a count over the batch."
        )


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switches dropout off, and restores mode and random state afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def refusing_changed_buffers(model: nn.Module) -> Iterator[None]:
    """Refuses a pass that changes a buffer which is saved with the weights.

    Running statistics of the training data are such buffers. They would leave the machine without
    noise, past clipping and accountant.
    """
    saved = model.state_dict().keys()
    before = {name: b.clone() for name, b in model.named_buffers() if name in saved}
    yield
    for name, buffer in model.named_buffers():
        if name in before and not torch.equal(before[name], buffer):
            raise UnsupportedModelError(
                f"A training pass changed the buffer {name}, which is saved with the weights: it "
                "would publish a statistic of the training data without noise. Switch that "
                "statistic off (track_running_stats=False, for example)."
            )
