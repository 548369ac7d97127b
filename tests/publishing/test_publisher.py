"""What a Publisher refuses; that it publishes without a Trainer is on the page of its room."""

from pathlib import Path

import pytest
import torch
from torch import nn

from dp_grape_hf import Ledger, PrivacyError
from dp_grape_hf.publishing import Adapter, Publisher
from tests.support.ledgers import MECHANISM


def test_nothing_is_saved_without_a_ledger(tmp_path: Path) -> None:
    publisher = Publisher(None, tmp_path, nn.Linear(2, 2))
    for save in (publisher.save, publisher.record, publisher.write_card):
        with pytest.raises(PrivacyError, match="ledger=None: without a ledger no card"):
            save(1)
    assert not list(tmp_path.iterdir())


def test_an_adapter_is_not_saved_without_what_training_changed(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    weight = model.get_parameter("0.weight")
    adapter = Adapter.of(model, [weight], ["0.weight"])
    ledger = Ledger.start(MECHANISM)
    publisher = Publisher(ledger, tmp_path, model, adapter=adapter)
    with pytest.raises(PrivacyError, match="changes=None"):
        publisher.save(0)
    publisher.save(0, changes={"0.weight": (torch.ones(8, 1), torch.ones(1, 8))})
    assert (tmp_path / "adapter_model.safetensors").is_file()
    assert ledger.updates == 0


def test_nothing_is_pushed_before_a_repository_is_open(tmp_path: Path) -> None:
    publisher = Publisher(Ledger.start(MECHANISM), tmp_path, nn.Linear(2, 2))
    with pytest.raises(PrivacyError, match=r"push\(\) before open\(\)"):
        publisher.push()
    publisher.wait()  # for nothing
    assert not publisher.busy
