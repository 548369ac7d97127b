"""Runs that end in the middle of something."""

from collections.abc import Callable
from typing import Any


def ending(
    function: Callable[..., Any], at_call: int, end: Callable[[], Any], *, after: bool = False
) -> Any:
    """Returns the function, which now calls ``end`` before or after call ``at_call``."""
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at_call and not after:
            end()
        result = function(*args, **kwargs)
        if calls == at_call:
            end()
        return result

    return wrapped
