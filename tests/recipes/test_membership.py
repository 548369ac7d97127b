"""The membership attacks against what they are defined as; the notebook's tests run them."""

import numpy as np
from scipy.stats import norm
from sklearn.metrics import roc_auc_score

from recipes.attacks import membership


def test_lira_compares_with_models_that_did_not_see_the_text():
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


def test_lira_finds_members_whose_texts_differ_in_difficulty():
    """Being in adds 2, which difficulties of standard deviation 5 hide from a threshold."""
    coins = np.random.default_rng(0)
    member = coins.random((8, 400)) < 0.5
    confidences = 5 * coins.normal(size=400) + 2 * member + 0.5 * coins.normal(size=(8, 400))
    scores = membership.lira(confidences, member)
    assert roc_auc_score(member.ravel(), confidences.ravel()) < 0.7
    assert roc_auc_score(member.ravel(), scores.ravel()) > 0.97


def test_words_are_known_without_a_vocabulary():
    first, again = (membership.encode("a good film", 1) for _ in range(2))
    assert first["input_ids"].tolist() == again["input_ids"].tolist()
    assert first["attention_mask"].sum() == 3
    assert first["input_ids"][3:].eq(membership.PAD).all()
    assert first["input_ids"][:3].ne(membership.PAD).all()
