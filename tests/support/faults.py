"""Runs that end in the middle of something."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_until_killed(function: Callable[..., None], *args: Any) -> None:
    """Runs a function, which must not return, in a fork of a process that has only imported it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([function.__module__])
    process = context.Process(target=function, args=args, daemon=True)
    process.start()
    process.join(timeout=60)
    assert process.exitcode == -signal.SIGKILL


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
