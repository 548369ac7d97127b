"""Measurements on a GPU: gradients, memory, time."""
