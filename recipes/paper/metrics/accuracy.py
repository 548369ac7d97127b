"""The share of predictions that are the label, as a module of evaluate."""

from typing import Any

import datasets
import evaluate


class Accuracy(evaluate.Metric):
    """Accuracy, from 0 to 1."""

    def _info(self) -> evaluate.MetricInfo:
        label = datasets.Value("int32")
        features = datasets.Features({"predictions": label, "references": label})
        return evaluate.MetricInfo(
            description=__doc__, citation="", inputs_description="", features=features
        )

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, Any]:
        right = sum(found == label for found, label in zip(predictions, references, strict=True))
        return {"accuracy": right / len(references)}
