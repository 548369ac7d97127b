"""Default hyperparameters: batch size, steps, trained parameters, optimizer and learning rates.

All choices are functions of N, epsilon, delta, the number of epochs, the model and public inputs.
No training example is read, so the choices cost no privacy. The README of this subpackage gives the
reasons, and ``recipes/studies`` the experiments.

``parts`` chooses the trained parameters, the optimizer and the schedule. ``rates`` computes the
learning rates: the noise of a whole run is known before it begins, so its effect on the model can
be measured on public inputs. ``warnings`` lists settings that cannot work, and ``formatting``
prints the choices.
"""

from dp_grape_hf.choosing.formatting import rates_line, run_tables
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
    inputs_of,
    measure,
    measure_norms,
    push_of_signal,
    steps_of,
    walk_of_noise,
)
from dp_grape_hf.choosing.warnings import FIRST_POSITION, rate_warnings

__all__ = [
    "FIRST_POSITION",
    "NUMBER",
    "Noise",
    "Rates",
    "average_at_first",
    "clipped_apart",
    "inputs_of",
    "is_head",
    "is_new_at_first",
    "is_pretrained",
    "measure",
    "measure_norms",
    "output_layer",
    "push_of_signal",
    "rate_warnings",
    "rates_line",
    "reading_numbers",
    "rule_and_rank",
    "run_tables",
    "schedule",
    "steps_of",
    "train_matrices_only",
    "walk_of_noise",
]
