"""A step on a device that is not there, and what it finds."""

import re
import subprocess
import sys

import pytest

WITHOUT_DEVICE = """
import torch
from tests.models import dry_run
from tests.models.zoo import rows

assert dry_run.main(["--only", "^RoBERTa, seq"]) == 0
(row,) = (row for row in rows() if str(row) == "RoBERTa, sequence classification")
setting = dry_run.settings()[0]

def with_constant():
    model = row.model()
    model.classifier.register_forward_hook(lambda module, args, output: output + torch.ones(3))
    return model

def with_stream():
    model, stream = row.model(), torch.Generator("cpu")
    model.classifier.register_forward_hook(
        lambda module, args, output: output + torch.empty_like(output).normal_(generator=stream)
    )
    return model

for build in (row.model, with_constant, with_stream):
    print(dry_run.run(build, row.batch(dry_run.BATCH), setting).partition(": ")[0] or "one device")
"""


@pytest.mark.slow
def test_a_dry_step_finds_tensors_on_two_devices():
    """In a process of its own: a device that torch knows it never forgets."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_DEVICE], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[1:] == ["one device", "WRONG", "WRONG"], done.stderr
    assert re.fullmatch(r"\d+ on one device", done.stdout.splitlines()[0])
