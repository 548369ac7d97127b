"""A reader of a card computes its epsilon from the rows alone, with another library.

Oracle: dp-accounting composes the releases that the rows name; no ledger and no code of this
package is asked.
"""

import re
from dataclasses import replace

import pytest

from dp_grape_hf.ledger import LEDGER_NAME, Ledger
from dp_grape_hf.publishing import render
from tests.support.cards import rows
from tests.support.ledgers import MECHANISM, ledger_of
from tests.support.marks import slow_but

dp_event = pytest.importorskip("dp_accounting.dp_event")
pld = pytest.importorskip("dp_accounting.pld.pld_privacy_accountant")
rdp = pytest.importorskip("dp_accounting.rdp.rdp_privacy_accountant")

# Numbers of many digits, so that a row that rounds too much shows.
INDEPENDENT = replace(
    MECHANISM,
    accountant="pld",
    noise_multiplier=1.4271828182845904,
    sample_rate=19 / 750,
    num_samples=750,
    expected_batch_size=19,
)
BANDED = replace(INDEPENDENT, noise="banded", coefficients=f"{[12**-0.5] * 12}")
USERS = {"privacy_unit": "user", "max_examples_per_unit": 4}
CASES = {
    "independent": (INDEPENDENT, (120,)),
    "independent, by rdp": (replace(INDEPENDENT, accountant="rdp"), (120,)),
    "independent, resumed": (INDEPENDENT, (70, 50)),
    "banded": (BANDED, (120,)),
    "banded, resumed": (BANDED, (65, 55)),
    "banded, resumed twice": (BANDED, (65, 30, 25)),
    "users": (replace(INDEPENDENT, **USERS), (120,)),
    "banded, users": (replace(BANDED, **USERS), (65, 55)),
}
ACCOUNTED = re.compile(r"(\d+) releases at sampling rate (\S+) with sigma ([\d.e+-]+)")


def _of_sessions(folder, mechanism, sessions):
    """Returns the ledger of a run that was resumed after each session but the last."""
    live, copy = folder / LEDGER_NAME, folder / "checkpoint-1" / LEDGER_NAME
    ledger = ledger_of(sessions[0], mechanism, path=live)
    for steps in sessions[1:]:
        ledger.snapshot(1).save(copy)
        ledger = Ledger.resume(live, copy, mechanism, updates=1)
        ledger.record(steps)
    assert tuple(ledger.runs[-1].sessions) == sessions
    return ledger


def _blocks(found):
    sampling = re.fullmatch(r"poisson, rate q = (\S+)", found["Sampling"])
    if sampling is not None:
        own = f"{found['Releases']} releases at sampling rate {sampling[1]}"
        own += f" with sigma {found['Noise multiplier sigma']}"
    else:
        own = found["Accounted as"]
    text = f"{own}; {found.get('Earlier runs on the same data', '')}"
    return [(int(n), float(rate), float(sigma)) for n, rate, sigma in ACCOUNTED.findall(text)]


def _recomputed(found):
    accountants = {"pld": pld.PLDAccountant, "rdp": rdp.RdpAccountant}
    accountant = accountants[found["Accountant"]]()
    for releases, rate, sigma in _blocks(found):
        event = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(sigma))
        accountant.compose(event, releases)
    epsilon = accountant.get_epsilon(float(found["δ"]))
    return epsilon


def _agrees(card):
    """The card says an upper bound, in three digits that are rounded up."""
    found = rows(card)
    claimed, recomputed = float(found["ε spent (upper bound)"]), _recomputed(found)
    assert claimed * (1 - 5e-3) - 1e-3 <= recomputed <= claimed * (1 + 1e-4)


@pytest.mark.parametrize("case", slow_but({"independent", "banded, resumed"}, CASES))
def test_the_rows_of_a_card_suffice_for_its_epsilon(case, tmp_path):
    _agrees(render(_of_sessions(tmp_path, *CASES[case]), updates=1))


@pytest.mark.slow
def test_the_rows_of_a_card_cover_earlier_runs(tmp_path):
    first = _of_sessions(tmp_path, BANDED, (65, 55))
    second = ledger_of(40, INDEPENDENT, continues=first)
    last = ledger_of(30, BANDED, continues=second)
    found = rows(render(last, updates=1))
    assert [releases for releases, *_ in _blocks(found)] == [3, 11, 40]
    _agrees(render(last, updates=1))


def test_sampling_of_correlated_noise_is_cyclic():
    said = rows(render(ledger_of(120, BANDED), updates=1))["Sampling"]
    assert "cyclic Poisson, 12 bands" in said
    assert "12 q = 0.304" in said
