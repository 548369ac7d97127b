"""Every way to break the mechanism is noticed by the ordinary tests that meet it.

``python -m tests.mutation`` prints the table.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation.saboteurs import BROKEN, NOTICED, SABOTEURS


@pytest.fixture(scope="module")
def table():
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutation", "--json"],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    sys.stderr.write(done.stderr)
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("saboteur", SABOTEURS, ids=str)
def test_a_saboteur_is_noticed(saboteur, table):
    missed = [test for test, noticed in table[saboteur.name].items() if not noticed]
    assert not missed, f"{', '.join(missed)} should notice that {saboteur}"


def test_every_saboteur_in_the_table_exists():
    assert NOTICED.keys() == BROKEN.keys()
