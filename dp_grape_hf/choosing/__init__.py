"""Default hyperparameters: batch size, steps, trained parameters, optimizer and learning rates.

All choices are functions of N, epsilon, delta, the number of epochs, the model and public inputs.
No training example is read, so the choices cost no privacy. The README of this subpackage gives the
reasons, and ``recipes/studies`` the experiments.

``parts`` chooses the trained parameters, the optimizer and the schedule. ``rates`` computes the
learning rates: the noise of a whole run is known before it begins, so its effect on the model can
be measured on public inputs. ``warnings`` lists settings that cannot work, and ``formatting``
prints the choices.
"""

from dp_grape_hf.choosing.formatting import (
    rates_line as rates_line,
    run_tables as run_tables,
)
from dp_grape_hf.choosing.parts import (
    LastLayer as LastLayer,
    average_at_first as average_at_first,
    clipped_apart as clipped_apart,
    is_new as is_new,
    is_new_at_first as is_new_at_first,
    is_pretrained as is_pretrained,
    last_layer as last_layer,
    reading_numbers as reading_numbers,
    rule_and_rank as rule_and_rank,
    schedule as schedule,
    train_matrices_only as train_matrices_only,
)
from dp_grape_hf.choosing.rates import (
    NUMBER as NUMBER,
    Rates as Rates,
    Setting as Setting,
    inputs_of as inputs_of,
    measure as measure,
)
from dp_grape_hf.choosing.warnings import (
    FIRST_POSITION as FIRST_POSITION,
    rate_warnings as rate_warnings,
)
