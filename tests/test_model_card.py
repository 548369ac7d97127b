"""The card says what the ledger says: no more, and nothing rounded in the model's favour."""

import math
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from dp_grape_hf.ledger import LEDGER_NAME, Ledger, Mechanism
from dp_grape_hf.model_card import render

MECHANISM = Mechanism(
    noise_multiplier=1.0625,
    sample_rate=0.0625,
    max_grad_norm=0.375,
    expected_batch_size=64,
    num_samples=1024,
    target_epsilon=60.0,
    target_delta=1e-5,
    accountant="rdp",
    engine="layerwise",
    projection="gaussian",
    projection_rank=16,
    projection_update_steps=90,
    projection_seed=1234,
)
NO_NOISE = {"noise_multiplier": 0.0, "target_epsilon": None, "target_delta": None}


def ledger(steps: int = 137, **changes: Any) -> Ledger:
    ledger = Ledger.start(replace(MECHANISM, **changes))
    if steps:
        ledger.record(steps)
    return ledger


def rows(card: str) -> dict[str, str]:
    """Returns the table of a card."""
    found = re.findall(r"^\| (.+?) \| (.+?) \|$", card, re.MULTILINE)
    return {name: value for name, value in found if name != "Quantity"}


def claims_privacy(card: str) -> bool:
    tags = ModelCard(card).data.tags
    return "trained with differential privacy" in card or "differential-privacy" in tags


# ---- Metadata ----


@pytest.mark.parametrize("base_model", [None, "facebook/opt-125m", "roberta-base"])
def test_the_metadata_are_those_of_the_hub(base_model: str | None) -> None:
    card = ModelCard(render(ledger(), base_model))
    expected = {
        "library_name": "transformers",
        "tags": ["dp-grape", "differential-privacy"],
    }
    if base_model is not None:
        expected["base_model"] = base_model
    assert card.data.to_dict() == expected
    assert card.text.lstrip().startswith("# ")


def test_no_base_model_is_made_up() -> None:
    assert "base_model" not in render(ledger())


def test_a_card_is_the_same_each_time() -> None:
    one = ledger()
    assert render(one) == render(one)


# ---- Numbers ----


def test_every_number_is_that_of_the_ledger() -> None:
    one = ledger()
    found = rows(render(one))
    epsilon = one.epsilon()
    assert float(found.pop("ε spent (upper bound)")) == pytest.approx(epsilon, rel=1e-3)
    assert found == {
        "δ": "1e-05",
        "Adjacency": "add or remove one",
        "Privacy unit": "example",
        "Sampling": "poisson, rate q = 0.0625",
        "Dataset size N, as declared": "1024",
        "Expected batch size q N": "64",
        "Noise multiplier sigma": "1.0625",
        "Clipping norm C": "0.375",
        "Norms": "exact",
        "Releases": "137",
        "Projection": "gaussian, r = 16, F = 90",
        "Projection seed (public)": "1234",
        "Method": "dp_grape",
        "Accountant": "rdp",
    }


@pytest.mark.parametrize(
    "change",
    [
        {"noise_multiplier": 2.5},
        {"sample_rate": 0.125},
        {"max_grad_norm": 7.5},
        {"expected_batch_size": 33},
        {"num_samples": 2048},
        {"target_delta": 1e-7},
        {"accountant": "pld"},
        {"projection": "identity"},
        {"projection_rank": 3},
        {"projection_update_steps": 11},
        {"projection_seed": 9},
        {"privacy_unit": "author"},
        {"method": "dp_adam"},
    ],
    ids=str,
)
def test_no_number_is_a_constant_of_the_card(change: dict[str, Any]) -> None:
    assert rows(render(ledger(steps=3, **change))) != rows(render(ledger(steps=3)))
    assert next(iter(change)) in {field.name for field in fields(Mechanism)}


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 10, 20, 50, 137, 1000])
def test_the_epsilon_of_a_card_is_not_below_that_of_the_ledger(steps: int) -> None:
    one = ledger(steps)
    card = render(one)
    claimed = re.search(r"\*\*ε = ([\d.e+-]+)\*\*", card)
    assert claimed is not None
    assert one.epsilon() <= float(claimed[1]) <= one.epsilon() + 0.002
    assert rows(card)["ε spent (upper bound)"] == claimed[1]


def test_more_releases_are_a_larger_epsilon() -> None:
    cards = [rows(render(ledger(steps))) for steps in (1, 10, 100)]
    epsilons = [float(card["ε spent (upper bound)"]) for card in cards]
    assert epsilons == sorted(epsilons)
    assert len(set(epsilons)) == 3
    assert [card["Releases"] for card in cards] == ["1", "10", "100"]


def test_the_spent_epsilon_is_printed_and_not_the_budget() -> None:
    card = render(ledger(steps=2, target_epsilon=57.25))
    assert "57.25" not in card


def test_a_model_without_a_release_has_spent_nothing() -> None:
    card = render(ledger(steps=0))
    assert float(rows(card)["ε spent (upper bound)"]) == 0
    assert rows(card)["Releases"] == "0"


def test_a_bound_that_is_split_over_the_layers_is_said_to_be() -> None:
    name = "Clipping norm C"
    assert "split" not in rows(render(ledger()))[name]
    assert rows(render(ledger(clipping="per_layer")))[name].endswith(", split over the layers")


def test_no_projection_has_no_rank() -> None:
    changes = {
        "projection": "identity",
        "projection_rank": None,
        "projection_update_steps": None,
        "projection_seed": None,
    }
    found = rows(render(ledger(**changes)))
    assert "None" not in "".join(found.values())
    assert found["Projection"] == "identity"
    assert found["Projection seed (public)"] == "-"


# ---- The claim ----


def test_a_private_run_says_epsilon_delta_and_unit() -> None:
    card = render(ledger(privacy_unit="author"))
    assert claims_privacy(card)
    assert "∞" not in card
    assert "δ = 1e-05" in card
    assert "adding or removing one `author` with all its examples" in card
    capped = render(ledger(privacy_unit="author", max_examples_per_unit=4))
    assert rows(capped)["Privacy unit"].endswith("all its examples, at most 4 in a step")


def test_a_run_that_protects_from_replacement_says_so() -> None:
    card = render(ledger(adjacency="replace_one", accountant="rdp"))
    assert "for replacing one example of the training data" in card
    assert "adding" not in card


def test_estimated_norms_are_said_to_be() -> None:
    assert rows(render(ledger()))["Norms"] == "exact"
    card = render(ledger(norm_directions=64, accountant="rdp"))
    assert rows(card)["Norms"] == "estimated from 64 random directions"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (NO_NOISE, "noise_multiplier is 0.0"),
        ({**NO_NOISE, "target_delta": 1e-5}, "noise_multiplier is 0.0"),
        ({**NO_NOISE, "max_grad_norm": math.inf}, "max_grad_norm is inf"),
        ({"sampling": "shuffled"}, "shuffled"),
        ({"adjacency": "substitute"}, "substitute"),
    ],
    ids=["no noise", "no noise, delta", "no bound", "sampling", "adjacency"],
)
def test_a_run_without_a_guarantee_never_says_private(changes: dict[str, Any], reason: str) -> None:
    card = render(ledger(**changes))
    assert not claims_privacy(card)
    assert "no privacy guarantee" in card
    assert reason in card
    assert rows(card)["ε spent (upper bound)"] == "∞"
    assert ModelCard(card).data.tags == ["dp-grape"]


def test_all_reasons_against_a_guarantee_are_given() -> None:
    one = ledger()
    assert claims_privacy(render(one))
    one.mark_not_private("test generators were passed")
    one.mark_not_private("un-noised statistics were logged")
    card = render(one)
    assert not claims_privacy(card)
    assert "test generators were passed; un-noised statistics were logged" in card


# ---- What is not in it ----


@pytest.mark.parametrize("changes", [{}, NO_NOISE], ids=["private", "not private"])
def test_a_card_holds_no_loss_metric_time_or_place(changes: dict[str, Any]) -> None:
    one = ledger(**changes)
    card = render(one, "facebook/opt-125m")
    words = set(re.findall(r"[a-z_]+", card.lower()))
    assert not words & {"loss", "losses", "accuracy", "perplexity", "f1", "eval", "grad_norm"}
    assert one.run_id not in card
    assert one.started_at not in card
    assert ModelCard(card).data.eval_results is None
    assert "model-index" not in card


def test_a_card_says_what_epsilon_does_not_cover_and_where_the_record_is() -> None:
    card = render(ledger())
    assert "Not covered by ε" in card
    assert "privacy_ledger.json" in card
    for package, version in ledger().versions.items():
        assert f"{package} {version}" in card


# ---- The cards that are committed ----

CARDS = sorted((Path(__file__).parent.parent / "model_cards").glob("*/README.md"))


@pytest.mark.parametrize("path", CARDS, ids=[path.parent.name for path in CARDS])
def test_a_committed_card_is_what_its_ledger_renders(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == render(Ledger.load(path.parent / LEDGER_NAME))


def test_there_are_committed_cards() -> None:
    assert CARDS
