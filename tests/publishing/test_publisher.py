"""What a Publisher refuses; its page tests that it publishes without a Trainer."""

import json
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel

from dp_grape_hf import Ledger, PrivacyError
from dp_grape_hf.ledger import LEDGER_NAME
from dp_grape_hf.publishing import MISMATCH, Publisher, verify
from dp_grape_hf.publishing.configs import clean_configs, is_hub_name
from tests.support.ledgers import MECHANISM


def test_nothing_is_saved_without_a_ledger(tmp_path):
    publisher = Publisher(None, tmp_path, nn.Linear(2, 2))
    for save in (publisher.save, publisher.write_card):
        with pytest.raises(PrivacyError, match="ledger=None: without a ledger"):
            save(1)
    assert not list(tmp_path.iterdir())


def test_what_was_saved_stays_until_all_is_written(monkeypatch, tmp_path):
    model = nn.Linear(2, 2)
    publisher = Publisher(ledger := Ledger.start(MECHANISM), tmp_path, model)
    publisher.save(0)
    assert [*ledger.saved[-1].files] == ["model.safetensors"]
    assert Ledger.load(tmp_path / LEDGER_NAME).head == ledger.head
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with torch.no_grad():
        model.weight.add_(1)
    with monkeypatch.context() as patch:
        patch.setattr(Publisher, "_card", Mock(side_effect=OSError(28, "No space left")))
        with pytest.raises(OSError, match="No space left"):
            publisher.save(0)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "mine.txt"):
        (tmp_path / name).write_text("{}")
    publisher.save(0)
    assert {path.name for path in tmp_path.iterdir()} == {*before, "mine.txt"}
    assert before["model.safetensors"] != (tmp_path / "model.safetensors").read_bytes()
    assert MISMATCH not in {check.status for check in verify(tmp_path)}


def test_local_paths_in_configs_are_not_published_and_verification_passes(tmp_path, monkeypatch):
    model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=0, num_attention_heads=2))
    model.config.backbone = str(tmp_path)
    publisher = Publisher(Ledger.start(MECHANISM), tmp_path / "here", model)
    publisher.repo_id = "user/model"
    there = tmp_path / "there"
    monkeypatch.setattr(Publisher, "_send", lambda self, folder, *_: folder.rename(there))
    publisher.save(0)
    publisher.push(0)
    for place in ("here", "there"):
        content = json.loads((tmp_path / place / "config.json").read_text())
        assert ("backbone" in content) == (place == "here")
        assert MISMATCH not in {check.status for check in verify(tmp_path / place)}


def test_a_config_that_names_other_weights_is_not_published(tmp_path):
    (tmp_path / "config.json").write_text('{"transformers_weights": "optimizer.safetensors"}')
    with pytest.raises(PrivacyError, match=r"config\.json says transformers_weights"):
        clean_configs(tmp_path, is_hub_name)


def test_nothing_is_pushed_before_a_repository_is_open(tmp_path):
    publisher = Publisher(Ledger.start(MECHANISM), tmp_path, nn.Linear(2, 2))
    with pytest.raises(PrivacyError, match=r"push\(\) was called before open\(\)"):
        publisher.push(0)
    publisher.wait()  # for nothing
    assert not publisher.busy
