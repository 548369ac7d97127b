"""Every representation, and every sum of them, against the dense tensors they stand for."""

import itertools

import pytest
import torch

from dp_grape_hf.gradients import Dense
from dp_grape_hf.gradients.forms import Factored, GradientSum, SparseRows, add
from tests.support.gradients import COLS, FORMS, ROWS, B, factored, materialised


def check(gradient, expected):
    factors = torch.rand(len(expected))
    norm, total = gradient.squared_norm(), gradient.weighted_sum(factors)
    assert norm.dtype is total.dtype is torch.float32
    squared = expected.square().sum((1, 2))
    torch.testing.assert_close(norm, squared, rtol=1e-4, atol=1e-4)
    assert (norm >= squared * (1 - 1e-6)).all()  # the bound on rounding is added, not taken off
    torch.testing.assert_close(total, torch.einsum("b,bmn->mn", factors, expected))


each_form = pytest.mark.parametrize("form", FORMS)
each_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str
)
COMBINATIONS = [
    names for count in (1, 2) for names in itertools.combinations_with_replacement(FORMS, count)
]
each_combination = pytest.mark.parametrize("names", COMBINATIONS, ids=" + ".join)


@each_combination
@each_dtype
def test_norm_and_sum_equal_the_dense_gradients_in_float32(names, dtype):
    parts = [FORMS[name](dtype=dtype) for name in names]
    check(add(parts), torch.stack([materialised(part) for part in parts]).sum(0))
    for part in parts:
        check(part, materialised(part))


@each_combination
def test_products_with_vectors_are_those_of_the_dense_gradients(names):
    gradient = add([FORMS[name]() for name in names])
    dense = materialised(gradient)
    left, right = torch.randn(3, dense.shape[1]), torch.randn(3, dense.shape[2])
    expected = torch.einsum("bmn,km,kn->bk", dense, left, right)
    found = gradient.products([left, right])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@each_combination
def test_selected_samples_keep_their_gradients(names):
    gradient = add([FORMS[name]() for name in names])
    samples = torch.tensor([2, 0, 2])
    check(gradient.select(samples), materialised(gradient)[samples])


@each_combination
def test_add_merges_uses_of_one_form_and_changes_no_value(names):
    uses = [FORMS[name](positions=i + 2) for i, name in enumerate(names)]
    total = add(uses)
    assert isinstance(total, Dense) == ("dense" in names)
    assert isinstance(total, GradientSum) == ({*names} == {"factored", "sparse rows"})
    check(total, torch.stack([materialised(use) for use in uses]).sum(0))


@each_form
def test_gradients_that_cancel_have_a_norm_near_zero_never_negative(form):
    gradient = FORMS[form](dtype=torch.float32)
    minus = {
        "dense": lambda g: Dense(-g.values),
        "factored": lambda g: Factored(-g.rows, g.cols),
        "sparse rows": lambda g: SparseRows(g.indices, -g.values, g.num_rows),
    }[form](gradient)
    scale = gradient.squared_norm().max()
    norm = add([gradient, minus]).squared_norm()
    assert (norm >= 0).all()
    assert (norm <= 1e-4 * scale).all()


def test_a_dense_gradient_may_have_any_number_of_dimensions():
    values = torch.randn(B, 2, 3, 4, 5)
    gradient = Dense(values)
    torch.testing.assert_close(gradient.squared_norm(), values.square().sum((1, 2, 3, 4)))
    assert gradient.weighted_sum(torch.ones(B)).shape == (2, 3, 4, 5)


@pytest.mark.parametrize("positions", [1, 2, 3, 4, 5, 50])
def test_the_cheapest_form_has_the_same_gradient_and_fewest_numbers(positions):
    gradient = factored(positions)
    cheapest = gradient.cheapest()
    check(cheapest, materialised(gradient))
    numbers = {Factored: positions * (ROWS + COLS), Dense: ROWS * COLS}
    assert numbers[type(cheapest)] == min(numbers.values())


def test_large_half_precision_values_do_not_overflow_norms_or_sums():
    big = torch.full((B, 3, ROWS), 300.0, dtype=torch.float16)
    cols = torch.full((B, 3, COLS), 300.0, dtype=torch.float16)
    for gradient in (
        Factored(big, cols),
        Dense(big),
        SparseRows(torch.zeros(B, 3).long(), cols, 2),
    ):
        assert gradient.squared_norm().isfinite().all()
        assert gradient.weighted_sum(torch.ones(B)).isfinite().all()
    check(Factored(big, cols), materialised(Factored(big, cols)))
