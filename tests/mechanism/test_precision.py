"""What the process has set for products of float32 does not change a release."""

import pytest
import torch

from dp_grape_hf.gradients.forms import Factored
from tests.support.mechanism import Given, make_private


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="of newer versions")
@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_tf32_set_by_the_user_does_not_change_clipping(precision: str) -> None:
    """The norm of a gradient that stays two factors is bounded with the rounding of products."""
    rows, cols = torch.randn(2, 1, 50, 8), torch.randn(2, 1, 50, 6)
    gradients = [Factored(row, col) for row, col in zip(rows, cols, strict=True)]
    before = torch.backends.fp32_precision
    found, products = [], dict[str, str]()
    for setting in (precision, before):
        torch.backends.fp32_precision = setting
        products[setting] = torch.backends.cuda.matmul.fp32_precision
    try:
        for setting in (before, precision):
            torch.backends.fp32_precision = setting
            engine = make_private(Given(weight=(8, 6)))
            engine.begin({})
            for gradient in gradients:
                engine.accumulate({"weight": gradient})
            found.append(engine.release()["weight"])
            assert torch.backends.fp32_precision == setting
            assert torch.backends.cuda.matmul.fp32_precision == products[setting]
    finally:
        torch.backends.fp32_precision = before
    assert torch.backends.cuda.matmul.fp32_precision == products[before]
    assert torch.equal(*found)
    assert found[0].norm() > 0
