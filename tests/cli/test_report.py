"""A run on one page: the curve ends at what was spent, and what was logged is drawn."""

import sys
from dataclasses import replace

import pytest

from dp_grape_hf.cli import report
from dp_grape_hf.cli.main import main
from dp_grape_hf.trainer import logged
from tests.support.ledgers import MECHANISM, ledger_of
from tests.support.trainers import trained_in


def test_the_curve_ends_at_what_was_spent():
    own = replace(MECHANISM, accountant="rdp")
    first = ledger_of(30, own)
    both = ledger_of(10, replace(own, noise_multiplier=2.0), continues=first)
    steps, epsilons = report._curve(both, 1e-5)
    assert (steps[0], epsilons[0], steps[-1]) == (0, 0.0, 40)
    assert epsilons == sorted(epsilons)
    assert epsilons[-1] == pytest.approx(both.epsilon())
    assert epsilons[steps.index(30)] == pytest.approx(first.epsilon())


def test_a_run_is_drawn(tmp_path, monkeypatch, capsys):
    trainer = trained_in(tmp_path, accountant="rdp", logging_steps=1, max_steps=6)
    assert [line["step"] for line in logged(tmp_path) if "noise" in line] == [1, 2, 3, 4, 5, 6]
    drawn = []
    line = report._line
    monkeypatch.setattr(
        report, "_line", lambda *args, **style: (drawn.append(args[2]), line(*args, **style))
    )
    assert main(["report", str(tmp_path)]) == 0
    assert {"noise", "learning_rate"} == {*drawn} - {"signal"}  # it may not be measurable
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "report.md").read_text()
    assert "![The run](report.png)" in page
    assert f"epsilon after {trainer.ledger.steps} releases" in page
    assert "in the mean of all releases so far" in page
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["report", str(tmp_path)]) == 2
    assert "needs matplotlib" in capsys.readouterr().err
    (tmp_path / "trainer_state.json").unlink()
    assert main(["report", str(tmp_path)]) == 2
    assert "has no trainer_state.json" in capsys.readouterr().err
