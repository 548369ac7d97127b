"""Runs that end in the middle of something."""

import multiprocessing
import os
import signal


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def run_until_killed(function, *args):
    """Runs a function, which must not return, in a fork of a process that has only imported it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([function.__module__])
    process = context.Process(target=function, args=args, daemon=True)
    process.start()
    process.join(timeout=60)
    assert process.exitcode == -signal.SIGKILL


def ending(function, at_call, end, *, after=False):
    """Returns the function, which now calls ``end`` before or after call ``at_call``."""
    calls = 0

    def wrapped(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == at_call and not after:
            end()
        result = function(*args, **kwargs)
        if calls == at_call:
            end()
        return result

    return wrapped
