"""Parameters of which only some run in ``make test``."""

import pytest


def slow_but(quick, values):
    """Returns parameters, marked slow but for those that are written as one of ``quick``."""
    return [
        pytest.param(value, id=str(value), marks=() if str(value) in quick else pytest.mark.slow)
        for value in values
    ]
