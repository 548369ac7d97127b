"""What every test of a recipe starts from: its own cache of data sets, and no Hub of metrics."""

import datasets
import evaluate
import pytest


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(evaluate.config, "HF_EVALUATE_OFFLINE", True)
