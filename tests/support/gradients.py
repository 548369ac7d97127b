"""Gradients of a weight in each form, and their definition."""

import torch

from dp_grape_hf.gradients import Dense
from dp_grape_hf.gradients.forms import Factored, GradientSum, SparseRows

B, ROWS, COLS = 4, 7, 5  # samples, and an m x n weight


def dense(positions=1, dtype=torch.float32):
    return Dense(torch.randn(B, ROWS, COLS).to(dtype))


def factored(positions=6, dtype=torch.float32):
    rows, cols = torch.randn(B, positions, ROWS), torch.randn(B, positions, COLS)
    return Factored(rows.to(dtype), cols.to(dtype))


def sparse_rows(positions=11, dtype=torch.float32):
    """More positions than rows, so that indices repeat in every sample."""
    indices = torch.randint(0, ROWS, (B, positions))
    return SparseRows(indices, torch.randn(B, positions, COLS).to(dtype), ROWS)


FORMS = {"dense": dense, "factored": factored, "sparse rows": sparse_rows}


def materialised(gradient):
    """Returns the gradients (B, m, n), from the definition of each form."""
    if isinstance(gradient, GradientSum):
        return torch.stack([materialised(part) for part in gradient.parts]).sum(0)
    if isinstance(gradient, Dense):
        return gradient.values.float()
    if isinstance(gradient, Factored):
        return torch.einsum("btm,btn->bmn", gradient.rows.float(), gradient.cols.float())
    table = torch.zeros(gradient.values.shape[0], ROWS, COLS)
    for b, row in enumerate(gradient.indices):
        for t, index in enumerate(row):
            table[b, index] += gradient.values[b, t].float()
    return table
