"""Metrics of evaluate: those in here give the Hub's scores, and the Hub's own come first."""

import random
from pathlib import Path

import evaluate
import pytest
from sklearn.metrics import accuracy_score

from recipes.paper import metrics
from recipes.paper.metrics import metric

HERE = Path(metrics.__file__).parent
WORDS = [*"the a Water water! ice 3-5 35 1,000 U.S. naïve".split(), "", "The  cat"]


def score(answer, *golds):
    asked = {"id": "0", "answers": {"text": golds, "answer_start": [0] * len(golds)}}
    return metric("squad").compute(
        predictions=[{"id": "0", "prediction_text": answer}], references=[asked]
    )


@pytest.mark.parametrize(
    ("answer", "golds", "expected"),
    [
        ("frozen water", ("Frozen  water!",), 1.0),
        ("the frozen water", ("a frozen water",), 1.0),  # articles do not count
        ("water", ("frozen water",), 2 / 3),  # precision 1, recall 1/2
        ("very cold frozen water", ("frozen water",), 2 / 3),  # precision 1/2, recall 1
        ("water water", ("water", "ice"), 2 / 3),  # a word counts as often as it is there
        ("ice", ("frozen water", "ice"), 1.0),  # the right answer that fits best
        ("steam", ("frozen water", "ice"), 0.0),
        ("", ("ice",), 0.0),
        ("1,000", ("1000",), 1.0),
        ("3-5", ("35",), 1.0),  # punctuation goes without leaving a space
    ],
)
def test_f1_of_words(answer, golds, expected):
    found = score(answer, *golds)
    assert found["f1"] == pytest.approx(100 * expected)
    assert found["exact_match"] == 100 * (expected == 1.0)


def test_scores_of_answers_are_means_over_questions_whatever_their_order():
    asked, given = examples("squad", 50)
    alone = [
        score(a["prediction_text"], *q["answers"]["text"])
        for a, q in zip(given, asked, strict=True)
    ]
    found = metric("squad").compute(predictions=given[::-1], references=asked)
    for name in ("f1", "exact_match"):
        assert found[name] == pytest.approx(sum(one[name] for one in alone) / 50)
        assert 0 < found[name] < 100


def test_accuracy_is_that_of_scikit_learn():
    labels, given = examples("accuracy", 50)
    found = metric("accuracy").compute(predictions=given, references=labels)
    assert found == {"accuracy": pytest.approx(accuracy_score(labels, given))}


@pytest.mark.parametrize("name", ["accuracy", "squad"])
def test_scores_are_those_of_the_hubs_module(name):
    try:
        theirs = evaluate.load(name, module_type="metric", keep_in_memory=True)
    except (ConnectionError, FileNotFoundError):
        pytest.skip("The Hub's module is not in the cache of evaluate.")
    labels, given = examples(name, 200)
    expected = theirs.compute(predictions=given, references=labels)
    ours = evaluate.load(str(HERE / f"{name}.py"), keep_in_memory=True)
    assert ours.compute(predictions=given, references=labels) == pytest.approx(expected)


def test_the_hubs_module_comes_first(monkeypatch):
    monkeypatch.setattr(evaluate, "load", lambda *names, **options: names)
    assert metric("squad") == ("squad",)


def examples(name, count):
    """What is right, and random predictions."""
    chance = random.Random(0)

    def text():
        return " ".join(chance.choices(WORDS, k=chance.randrange(5)))

    if name == "accuracy":
        return tuple([chance.randrange(3) for _ in range(count)] for _ in range(2))
    golds = [[text() for _ in range(chance.randrange(1, 4))] for _ in range(count)]
    asked = [
        {"id": f"{i}", "answers": {"text": some, "answer_start": [0] * len(some)}}
        for i, some in enumerate(golds)
    ]
    return asked, [{"id": f"{i}", "prediction_text": text()} for i in range(count)]
