"""Parameters of which only some run in ``make test``."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow_but(quick: Container[str], values: Iterable[Any]) -> list[Any]:
    """Returns parameters, marked slow but for those that are written as one of ``quick``."""
    return [
        pytest.param(value, id=str(value), marks=() if str(value) in quick else pytest.mark.slow)
        for value in values
    ]
