"""Errors end in logs, so they hold no numbers that depend on the training data."""

import re

import pytest
import torch

from dp_grape_hf import PrivacyError
from dp_grape_hf.gradients import UNIT_OF_ROW, loss_for
from dp_grape_hf.gradients.losses.losses import checked
from dp_grape_hf.gradients.rows import batch_size_of
from dp_grape_hf.gradients.units import _split
from dp_grape_hf.mechanism import (
    LogicalBatchCollator,
    PoissonBatchSampler,
    read_units,
    refuse_large_unit,
)
from tests.support.models import only

ODD = re.compile(r"37|41|43")  # every size below is one of them
ROWS = torch.zeros(37, 2)


def _other_labels():
    loss = loss_for(only("opt").model())
    return loss({"logits": torch.zeros(37, 43, 8)}, torch.zeros(37, 41, dtype=torch.long))


def _packed(examples):
    return {"x": ROWS}


def _draws_of_others():
    units = read_units([{"user": i} for i in range(41)], "user")
    PoissonBatchSampler(37, 0.5, 1, torch.Generator(), units=units)


FAILURES = {
    "leading sizes": lambda: batch_size_of({"x": ROWS, "labels": torch.zeros(41)}),
    "a loss per row": lambda: checked(torch.zeros(37), 41),
    "a loss per token": lambda: checked(torch.zeros(37, 43), 37),
    "labels of other positions": _other_labels,
    "packed rows": lambda: LogicalBatchCollator(_packed, 8)([{}] * 3),
    "rows of units": lambda: _split({UNIT_OF_ROW: torch.arange(41), "x": ROWS}),
    "a large unit": lambda: refuse_large_unit(41, 8),
    "draws of other units": _draws_of_others,
}


@pytest.mark.parametrize("failure", FAILURES)
def test_an_error_holds_no_size_of_the_data(failure):
    with pytest.raises((PrivacyError, ValueError)) as refusal:
        FAILURES[failure]()
    assert not ODD.search(str(refusal.value)), refusal.value
