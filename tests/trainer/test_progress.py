"""What takes longer than half a second before the first step shows a progress bar."""

import pytest

from dp_grape_hf import phases
from dp_grape_hf.phases import advance, progress
from tests.support.choosing import model_of, trainer_of


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(phases, "_QUIET", 0.0)


def test_a_progress_bar_counts_passes_and_shows_inner_bars(capsys):
    for shown in (False, None):  # nothing is shown unless it is asked for
        with progress("Outer", shown=shown), progress("Inner"):
            advance(of=3)
    advance()
    assert not capsys.readouterr().err
    with progress("Outer", shown=True):
        advance()
        with progress("Inner"):
            advance(of=3)
            assert phases._bar.get().total == 3
    text = capsys.readouterr().err
    assert "Outer: 0 passes" in text
    assert "Inner: 0 passes" in text


@pytest.mark.parametrize("disable_tqdm", [False, True])
def test_a_trainer_shows_what_it_does_before_the_first_step(disable_tqdm, tmp_path, capsys):
    model = model_of("pretrained")
    trainer = trainer_of(tmp_path, model, disable_tqdm=disable_tqdm)
    trainer.train()
    text = capsys.readouterr().err
    for doing in ("Choosing learning rates", "Measuring input directions", "Examining the model"):
        assert (doing in text) is not disable_tqdm
