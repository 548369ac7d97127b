"""Exact match and F1 of answers (Rajpurkar et al. 2016, section 6.1), as a module of evaluate.

Both compare words in lower case, without articles and punctuation. Of several right answers, the
one counts that an answer fits best.
"""

import re
import string
from collections import Counter
from typing import Any

import datasets
import evaluate

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Squad(evaluate.Metric):
    """Means of exact match and F1 over questions, in percent."""

    def _info(self) -> evaluate.MetricInfo:
        text, number = datasets.Value("string"), datasets.Value("int32")
        golds = datasets.Sequence({"text": text, "answer_start": number})
        features = datasets.Features(
            {
                "predictions": {"id": text, "prediction_text": text},
                "references": {"id": text, "answers": golds},
            }
        )
        return evaluate.MetricInfo(
            description=__doc__, citation="", inputs_description="", features=features
        )

    def _compute(self, predictions: list[Any], references: list[Any]) -> dict[str, Any]:
        answers = {row["id"]: words(row["prediction_text"]) for row in predictions}
        exact, f1 = 0.0, 0.0
        for row in references:
            found, golds = answers[row["id"]], map(words, row["answers"]["text"])
            scores = [(found == gold, word_f1(found, gold)) for gold in golds]
            exact += max(score[0] for score in scores)
            f1 += max(score[1] for score in scores)
        count = len(references)
        return {"exact_match": 100 * exact / count, "f1": 100 * f1 / count}


def words(text: str) -> list[str]:
    """Return the words that are compared."""
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def word_f1(found: list[str], wanted: list[str]) -> float:
    """Return the F1 of words, from 0 to 1; repeated words count repeatedly."""
    common = (Counter(found) & Counter(wanted)).total()
    return 2 * common / (len(found) + len(wanted)) if common else 0.0
