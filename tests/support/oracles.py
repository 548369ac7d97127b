"""The definition of a per-sample gradient, a loop over samples, and how to compare with it."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dp_grape_hf.gradients import loss_for, per_sample_gradients
from tests.models.matrix import dense, own_gradients, worst_error

TOLERANCE = 1e-5  # relative, float32


def single_sample_gradients(model, inputs, projectors=None, loss=None):
    """Returns losses (B,) and gradients (B, ...) of a loss, each sample alone by autograd."""
    loss = loss or loss_for(model)

    def loss_of(sample):
        labels = sample.pop("labels", None)
        return loss(model(**sample), labels).squeeze(0)

    return own_gradients(model, inputs, projectors, loss_of)


def relative_error(found, expected):
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, gradient in expected.items():
        assert found[name].shape == gradient.shape, (name, found[name].shape, gradient.shape)
    return worst_error(found, expected)


def assert_gradients_equal(gradients, expected, tolerance=TOLERANCE):
    """Checks both operations of every gradient: the weighted sum and the squared norm."""
    batch_size = next(iter(expected.values())).shape[0]
    error = relative_error(dense(gradients, batch_size), expected)
    assert error < tolerance, f"relative error {error:.2e}"
    squared = {name: gradient.squared_norm() for name, gradient in gradients.items()}
    totals = torch.stack([g.flatten(1).square().sum(1) for g in expected.values()]).sum(0)
    for name, gradient in expected.items():
        exact = gradient.flatten(1).square().sum(1)
        assert squared[name].dtype is torch.float32, name
        errors = (squared[name] - exact) / exact.maximum(1e-6 * totals).clamp(min=1e-30)
        allowed = 2 * max(tolerance, 1e-5)  # more above than below: a bound on rounding is added
        assert -allowed < errors.min() <= errors.max() < 5 * allowed, (
            f"{name}: squared norm off by {errors.min():.2e} to {errors.max():.2e}"
        )


def assert_exact(model, inputs, projectors=None, loss=None, engine="layerwise"):
    """Compares an engine with the loop over single samples; returns the engine's gradients."""
    losses, gradients = per_sample_gradients(
        model, inputs, projections=projectors, loss=loss, engine=engine
    )
    expected_losses, expected = single_sample_gradients(model, inputs, projectors, loss)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-6)
    assert_gradients_equal(gradients, expected)
    return gradients


class Largest(TorchDispatchMode):
    """Notes the most numbers that a tensor in memory had, of some types if they are given."""

    def __init__(self, *dtypes):
        super().__init__()
        self.dtypes, self.numbers = dtypes, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and (not self.dtypes or tensor.dtype in self.dtypes):
                size = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.numbers = max(self.numbers, min(size, tensor.numel()))  # of views, theirs
        return output
