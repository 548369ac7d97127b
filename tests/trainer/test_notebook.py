"""The live table of a notebook: each column has its own name."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from tests.support.trainers import make_trainer, points


@pytest.fixture
def _notebook(monkeypatch):
    display = ModuleType("IPython.display")
    display.HTML = str
    display.display = lambda *args, **kwargs: SimpleNamespace(update=lambda *a, **k: None)
    package = ModuleType("IPython")
    package.display = display
    for name in ("transformers.utils.notebook", "dp_grape_hf.trainer.notebook"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", display)


@pytest.mark.usefixtures("_notebook")
def test_epsilon_has_a_column_of_its_name(tmp_path):
    from transformers.utils.notebook import NotebookProgressCallback

    class Host(NotebookProgressCallback):
        """Another callback, which stays."""

    trainer = make_trainer(
        tmp_path,
        eval_dataset=points(8, seed=1),
        callbacks=[NotebookProgressCallback(), Host()],
        eval_strategy="steps",
        eval_steps=2,
    )
    assert sum(type(c) is Host for c in trainer.callback_handler.callbacks) == 1
    assert not any(type(c) is NotebookProgressCallback for c in trainer.callback_handler.callbacks)
    (shown,) = (c for c in trainer.callback_handler.callbacks if "Privacy" in type(c).__name__)
    tables = []
    shown.on_train_end = lambda *args, **kwargs: tables.append(shown.training_tracker.inner_table)
    trainer.train()
    header, *_, last = tables[0]
    assert "" not in header
    assert len({*header}) == len(header)
    assert "Epsilon" in header
    assert float(last[header.index("Epsilon")]) == pytest.approx(
        trainer.privacy_spent().epsilon, rel=0.01
    )
