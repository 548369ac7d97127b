"""The membership attacks against what they are defined as, and the recipe from end to end."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

from recipes.attacks import membership

SMALL = ["--pool", "120", "--models", "3", "--epochs", "12", "--steps", "3", "--batch", "30"]


# ---- Statistics ----


def test_a_rate_counts_who_is_above_the_threshold() -> None:
    members, others = np.array([5.0, 3.0, 2.0, 0.5]), np.arange(100.0) / 25  # up to 3.96
    found, none = membership.measure(members, others)["at"]
    assert (found["true_positives"], found["false_positives"]) == (1, 1)
    assert found["tpr"] == 0.25
    assert (none["true_positives"], none["false_positives"]) == (1, 0)


def test_tied_scores_are_not_accused_beyond_the_rate() -> None:
    found = membership.measure(np.ones(10), np.ones(10))
    assert [point["true_positives"] for point in found["at"]] == [0, 0]
    assert [point["false_positives"] for point in found["at"]] == [0, 0]
    assert found["auc"] == 0.5


def test_the_bound_on_attacks_uses_both_sides_of_the_guarantee() -> None:
    """The bound is reached by a randomised response of that epsilon."""
    epsilon = 1.5
    truth = math.exp(epsilon) / (1 + math.exp(epsilon))
    assert membership.bound(1 - truth, epsilon, 0.0) == pytest.approx(truth)
    assert membership.bound(0.001, epsilon, 1e-5) == pytest.approx(math.exp(1.5) * 0.001 + 1e-5)
    assert membership.bound(1.0, epsilon, 1e-5) == 1.0
    assert membership.bound(0.001, None, 1e-5) == 1.0


# ---- LiRA ----


def test_lira_compares_with_models_that_did_not_see_the_text() -> None:
    member = np.array([[1, 0], [0, 1], [0, 0], [0, 0]], dtype=bool)
    confidences = np.array([[9.0, 1.0], [2.0, 7.0], [4.0, 3.0], [3.0, 5.0]])
    found = membership.lira(confidences, member)
    outside = [[2.0, 4.0, 3.0], [3.0, 5.0]]  # of the shadows of model 0
    centred = [x - np.mean(own) for own in outside for x in own]
    expected = (
        norm.logcdf((9.0 - 3.0) / np.std(centred)),
        norm.logcdf((1.0 - 4.0) / np.std(centred)),
    )
    np.testing.assert_allclose(found[0], expected, rtol=1e-9)


def test_lira_finds_members_whose_texts_differ_in_difficulty() -> None:
    """Being in adds 2, which difficulties of standard deviation 5 hide from a threshold."""
    coins = np.random.default_rng(0)
    member = coins.random((8, 400)) < 0.5
    confidences = 5 * coins.normal(size=400) + 2 * member + 0.5 * coins.normal(size=(8, 400))
    plain = membership.measure(confidences[member], confidences[~member])["auc"]
    scores = membership.lira(confidences, member)
    assert plain < 0.7
    assert membership.measure(scores[member], scores[~member])["auc"] > 0.97


# ---- The recipe ----


@pytest.mark.slow
def test_members_are_found_without_privacy_and_hardly_with_it(tmp_path: Path) -> None:
    results = membership.main([*SMALL, "--epsilons", "2", "--output_dir", str(tmp_path)])
    plain, private = results["ways"]["Adam, no privacy"], results["ways"]["DP-GRAPE, ε = 2"]
    assert plain["epsilon_spent"] is None
    assert 1.9 < private["epsilon_spent"] <= 2
    assert plain["accuracy_of_members"] > 0.95 > plain["accuracy_of_others"] + 0.1
    assert plain["attacks"]["loss"]["auc"] > max(0.65, private["attacks"]["loss"]["auc"])
    assert plain["attacks"]["lira"]["auc"] > 0.6
    for attack in (*plain["attacks"].values(), *private["attacks"].values()):
        for point in attack["at"]:
            assert point["members"] + point["others"] == 3 * 120
            assert point["tpr"] == point["true_positives"] / point["members"]
            assert point["false_positives"] <= point["fpr"] * point["others"]
    written = json.loads((tmp_path / "membership.json").read_text(encoding="utf-8"))
    assert written == json.loads(json.dumps(results))
    table = (tmp_path / "membership.md").read_text(encoding="utf-8")
    assert table == membership.as_markdown(written)
    assert table.count("| DP-GRAPE, ε = 2 | ") == 2
    assert (tmp_path / "membership.png").read_bytes().startswith(b"\x89PNG")


def test_the_path_of_the_data_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    untrained = (membership.BagForSequenceClassification(), 1.0)
    monkeypatch.setattr(membership, "train", lambda *given: untrained)
    rows = [{"text": f"word{i} good", "label": i % 2} for i in range(60)]
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    options = ["--pool", "60", "--models", "3", "--epsilons", "8", "--dataset_path", str(folder)]
    results = membership.main([*options, "--output_dir", str(tmp_path)])
    assert results["data"] == "texts"
    assert str(tmp_path) not in (tmp_path / "membership.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"models": 2}, "models=2: an attack needs"), ({"dataset_path": "x"}, "No such file")],
    ids=str,
)
def test_what_cannot_be_run_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        membership.run(membership.Settings(**settings))


def test_too_few_texts_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "good", "label": 1}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="pool=10, but there are only 1 texts"):
        membership.load(membership.Settings(dataset_path=str(tmp_path), pool=10))


def test_words_are_known_without_a_vocabulary() -> None:
    first, again = (membership.encode("a good film", 1) for _ in range(2))
    assert first["input_ids"].tolist() == again["input_ids"].tolist()
    assert first["attention_mask"].sum() == 3
    assert first["input_ids"][3:].eq(membership.PAD).all()
    assert first["input_ids"][:3].ne(membership.PAD).all()
