"""Choices that a user need not make: batch, steps, trained layers, the input of a new head, rates.

All of it follows from N, epsilon, delta, passes over the data, the model and inputs that are
nobody's: no example has a say, so none of it costs privacy. The measure behind the rates is that
the noise of a whole run is known before it begins. What it does alone to what a model makes of its
inputs can be seen without data, and a rate is the largest at which that is bearable.
"""

from dp_grape_hf.choosing.hopeless import FIRST_POSITION, objections
from dp_grape_hf.choosing.parts import (
    average_at_first,
    clipped_apart,
    is_head,
    is_new_at_first,
    is_pretrained,
    output_layer,
    reading_numbers,
    rule_and_rank,
    schedule,
    train_matrices_only,
)
from dp_grape_hf.choosing.rates import (
    NUMBER,
    Noise,
    Rates,
    measure,
    measure_norms,
    push_of_signal,
    steps_of,
    walk_of_noise,
)
from dp_grape_hf.choosing.words import described, tabulated

__all__ = [
    "FIRST_POSITION",
    "NUMBER",
    "Noise",
    "Rates",
    "average_at_first",
    "clipped_apart",
    "described",
    "is_head",
    "is_new_at_first",
    "is_pretrained",
    "measure",
    "measure_norms",
    "objections",
    "output_layer",
    "push_of_signal",
    "reading_numbers",
    "rule_and_rank",
    "schedule",
    "steps_of",
    "tabulated",
    "train_matrices_only",
    "walk_of_noise",
]
