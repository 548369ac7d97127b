"""Runs the ordinary tests under each saboteur that they should notice, and prints the kill table.

    python -m tests.mutation [--json] [words of the saboteurs' names]

One process imports everything and forks for each saboteur, before any autograd has run in it.
"""

import argparse
import contextlib
import io
import json
import os
import sys
from pathlib import Path

import pytest

from tests.mutation.saboteurs import SABOTEURS

TESTS = Path(__file__).resolve().parents[1]
OPTIONS = [
    *("-q", "-p", "no:cacheprovider", f"--rootdir={TESTS.parent}"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # pytest runs more than once here
]


class Noticed:
    """Which tests failed by an assertion, or for want of an error: no other error counts."""

    def __init__(self):
        self.tests = set()

    def pytest_runtest_makereport(self, item, call):
        if call.excinfo and call.excinfo.errisinstance((AssertionError, pytest.fail.Exception)):
            self.tests.add(f"{item.path.name}::{item.nodeid.partition('::')[2]}")


def nodes(saboteurs):
    found = {}
    for test in (test for saboteur in saboteurs for test in saboteur.tests):
        name, _, rest = test.partition("::")
        (path,) = TESTS.rglob(name)
        found[f"{path}::{rest}"] = None
    return list(found)


def noticed_by(saboteur):
    """Returns for each of the saboteur's tests, run in a process of its own, whether it noticed."""
    end, start = os.pipe()
    if (child := os.fork()) == 0:
        said, noticed = io.StringIO(), Noticed()
        try:
            with contextlib.redirect_stdout(said), pytest.MonkeyPatch.context() as patch:
                saboteur.apply(patch)
                pytest.main([*OPTIONS, *nodes([saboteur])], plugins=[noticed])
            found = {test: test in noticed.tests for test in saboteur.tests}
            if not all(found.values()):
                sys.stderr.write(f"{saboteur}\n{said.getvalue()}")
            os.write(start, json.dumps(found).encode())
        finally:
            sys.stderr.flush()
            os._exit(0)
    os.close(start)
    with os.fdopen(end) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    found = json.loads(answer or "{}")
    return {test: found.get(test, False) for test in saboteur.tests}


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("words", nargs="*", help="only saboteurs whose name has one of these")
    given = parser.parse_args()
    chosen = [s for s in SABOTEURS if not given.words or any(w in s.name for w in given.words)]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = pytest.main([*OPTIONS, "--collect-only", *nodes(chosen)])
    if code:
        sys.stderr.write(said.getvalue())
        return 1
    table = {}
    for saboteur in chosen:
        table[saboteur.name] = noticed_by(saboteur)
        if not given.json:
            for test, noticed in table[saboteur.name].items():
                mark = "x" if noticed else "."
                sys.stdout.write(f"{mark}  {saboteur.name:<42}  {test}\n")
                sys.stdout.flush()
    if given.json:
        json.dump(table, sys.stdout)
    return int(not all(all(found.values()) for found in table.values()))


if __name__ == "__main__":
    sys.exit(main())
