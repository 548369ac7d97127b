"""Measure the share of the gradients in a low-dimensional subspace of input directions."""
