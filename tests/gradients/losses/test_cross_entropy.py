"""Cross-entropy over a vocabulary against torch's own."""

import pytest
import torch
from torch.nn import functional

from dp_grape_hf.gradients import IGNORE_INDEX, cross_entropy
from dp_grape_hf.gradients.losses import heads

N, V = 12, 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("at_once", [1, 3 * V, 2**22], ids=["row by row", "three rows", "whole"])
def test_values_and_gradients_are_those_of_torch(dtype, at_once, monkeypatch):
    monkeypatch.setattr(heads, "_AT_ONCE", at_once)
    logits = (10 * torch.randn(N, V)).to(dtype).requires_grad_()
    targets, weights = torch.randint(0, V, (N,)), torch.rand(N)
    targets[::3] = IGNORE_INDEX
    expected = functional.cross_entropy(logits.float(), targets, reduction="none")
    losses = cross_entropy(logits, targets)
    assert losses.dtype is torch.float32
    torch.testing.assert_close(losses, expected)
    gradients = [torch.autograd.grad((x * weights).sum(), logits)[0] for x in (losses, expected)]
    assert gradients[0].dtype is dtype
    torch.testing.assert_close(*gradients)
    assert not gradients[0][::3].any(), "an ignored position has a gradient"


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    losses = cross_entropy(logits, torch.tensor([1]))
    assert losses.item() == 2e4
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    torch.testing.assert_close(gradient, torch.tensor([[1.0, -1.0, 0.0]]))


def test_a_broken_position_stays_broken_and_breaks_no_other():
    logits = torch.randn(3, V)
    logits[1, 2] = torch.nan
    losses = cross_entropy(logits, torch.tensor([0, 1, 2]))
    assert losses.isnan().tolist() == [False, True, False]
