"""The recipes run offline for a few steps, and what they print and leave behind is true."""

import json
import re

import pytest
import torch
from transformers import ViTForImageClassification

from dp_grape_hf import Ledger
from dp_grape_hf.ledger import LEDGER_NAME
from recipes.digits import train as digits

SMALL = {
    **{
        "projection_rank": 8,
        "max_steps": 3,
        "expected_batch_size": 64,
        "per_device_train_batch_size": 40,
    },
    **{"use_cpu": True, "accountant": "rdp", "disable_tqdm": True},
}


def parse(output_dir, **options):
    given = SMALL | {"output_dir": output_dir} | options
    return digits.parse([f"--{name}={value}" for name, value in given.items()])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits")
    with torch.random.fork_rng(devices=[]):
        return folder, digits.main(parse(folder))


@pytest.mark.slow
def test_digits_reports_the_privacy_of_its_ledger(run):
    folder, results = run
    ledger = Ledger.load(folder / LEDGER_NAME)
    assert ledger.private
    assert ledger.steps == results["privacy"]["steps"] == 3
    assert results["privacy"]["epsilon"] == pytest.approx(ledger.epsilon())
    assert results["privacy"]["epsilon"] <= 8.0
    assert results["privacy"]["delta"] == ledger.mechanism.target_delta == 1e-5
    assert results["privacy"]["adjacency"] == ledger.mechanism.adjacency
    assert results["settings"]["update_rule"]  # as chosen
    assert json.loads((folder / "results.json").read_text(encoding="utf-8")) == results
    assert re.search(r"(?m)^epsilon spent +\d\.\d+ at delta 1e-05$", digits.report(results))


def test_digits_leaves_a_checkpoint_that_loads(run):
    folder, results = run
    model = ViTForImageClassification.from_pretrained(folder)
    _, test = digits.load_data()
    assert digits.accuracy_of(model, test) == results["metric"]["value"]
    assert "ε = " in (folder / "README.md").read_text(encoding="utf-8")


def test_digits_shows_the_optimizers_state_beside_adams(run):
    folder, results = run
    model = ViTForImageClassification.from_pretrained(folder)
    parameters = sum(p.numel() for p in model.parameters())
    assert results["parameters"] == parameters
    assert results["state_bytes"] == 0  # of SGD, which is chosen here
    assert f"0.0 KiB, of Adam {8 * parameters / 1024:.1f} KiB" in digits.report(results)


def test_a_config_with_an_unknown_option_is_refused(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("target_epsilom: 8.0\n", encoding="utf-8")
    with pytest.raises(ValueError, match="target_epsilom"):
        digits.parse([f"--config={config}"])


def test_the_split_is_reproducible_and_disjoint():
    (train, test), (again, _) = digits.load_data(), digits.load_data()
    assert (len(train), len(test)) == (1437, 360)
    assert all(
        torch.equal(a["pixel_values"], b["pixel_values"]) for a, b in zip(train, again, strict=True)
    )
    assert all(-1 <= example["pixel_values"].min() for example in test)
    assert all(example["pixel_values"].max() <= 1 for example in test)
