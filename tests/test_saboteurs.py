"""Every way to break the mechanism is noticed, and the sound one is not accused.

``python -m pytest tests/test_saboteurs.py -s`` prints the table of which check notices what;
``python -m tests.saboteurs`` the same with the audits in every cell.
"""

from collections.abc import Callable

import pytest

from tests.saboteurs import AUDITS, CHECKS, SABOTEURS, Saboteur, kill_table, notices

ROWS: dict[str, list[bool | None]] = {}


@pytest.fixture(scope="module", autouse=True)
def _table() -> object:
    yield
    print("\n\n" + kill_table((*CHECKS, *AUDITS), list(ROWS.items())))  # noqa: T201


def name_of(detector: Callable[[], None]) -> str:
    return detector.__name__


@pytest.mark.parametrize("detector", [*CHECKS, *AUDITS], ids=name_of)
def test_no_detector_accuses_the_sound_mechanism(detector: Callable[[], None]) -> None:
    row = ROWS.setdefault("(none)", [])
    row.append(True)
    detector()
    row[-1] = False


@pytest.mark.parametrize("saboteur", SABOTEURS, ids=str)
def test_a_saboteur_is_noticed(saboteur: Saboteur) -> None:
    found: list[bool | None] = [notices(check, saboteur) for check in CHECKS]
    found += [notices(a, saboteur) if a in saboteur.audits else None for a in AUDITS]
    ROWS[saboteur.name] = found
    assert any(found[: len(CHECKS)]), f"no check notices that {saboteur}"
    missed = [
        a.__name__ for a, seen in zip(AUDITS, found[len(CHECKS) :], strict=True) if seen is False
    ]
    assert not missed, f"{', '.join(missed)} should notice that {saboteur}"


@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_a_check_notices_something(check: Callable[[], None]) -> None:
    """A check that no saboteur fails may be one that cannot fail."""
    column = CHECKS.index(check)
    if len(ROWS) <= len(SABOTEURS):
        pytest.skip("needs the whole table: run all tests of this file in one process")
    assert any(found[column] for name, found in ROWS.items() if name != "(none)")
