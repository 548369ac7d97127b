"""How useful synthetic texts are: embeddings, accuracy of a classifier, Fréchet distance.

Shapes: n texts, d numbers in an embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from ot.gaussian import bures_wasserstein_distance
from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from transformers import AutoModel, AutoTokenizer

from dp_grape_hf import DPGrapeTrainer, DPGrapeTrainingArguments

HASHES = 512
FOLDS = 5
_LEAST_VARIANCE = 1e-8  # added in each direction, as rounding makes some variances negative

Vectors = NDArray[np.float64]


@dataclass
class Texts:
    """Texts with labels and embeddings: (n, d)."""

    texts: list[str]
    labels: list[str]
    vectors: Vectors

    def __getitem__(self, chosen: Sequence[int]) -> Texts:
        """Return some of the texts."""
        texts, labels = ([column[i] for i in chosen] for column in (self.texts, self.labels))
        return Texts(texts, labels, self.vectors[list(chosen)])


@torch.no_grad()
def embed(texts: Sequence[str], model: str | None, batch_size: int = 64) -> Vectors:
    """Return embeddings of norm 1, (n, d): each is computed from its own text alone.

    Args:
        texts: n of them.
        model: a public encoder, whose outputs are averaged over positions. None: counts of hashed
            words, for which no vocabulary is learnt.
    """
    if model is None:
        hashes = HashingVectorizer(n_features=HASHES, alternate_sign=False)
        return hashes.transform(texts).toarray()
    tokenizer = AutoTokenizer.from_pretrained(model)
    encoder = AutoModel.from_pretrained(model).eval()
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # little padding
    found = np.empty((len(texts), encoder.config.hidden_size))
    for first in range(0, len(order), batch_size):
        some = order[first : first + batch_size]
        batch = tokenizer(
            [texts[i] for i in some], return_tensors="pt", padding=True, truncation=True
        )
        mask = batch["attention_mask"][:, :, None]
        mean = (encoder(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
        found[some] = normalize(mean)
    return found


def frechet_distance(one: Vectors, other: Vectors) -> float:
    """Return the squared Fréchet distance of the Gaussians with the moments of two samples.

    It grows when samples shrink, so compare distances of samples of the same sizes only. Source:
    Heusel et al. 2017, equation 6; POT has it as the Bures-Wasserstein distance.
    """
    least = _LEAST_VARIANCE * np.eye(one.shape[1])
    covariances = [np.cov(vectors, rowvar=False) + least for vectors in (one, other)]
    return float(bures_wasserstein_distance(one.mean(0), other.mean(0), *covariances)) ** 2


# ---- Classifiers of embeddings ----


def _classifier() -> Any:
    return LogisticRegression(C=10.0, max_iter=1000, class_weight="balanced")


def accuracy(train: Texts, test: Texts) -> float:
    """Return the share of test texts that a classifier of other texts labels right."""
    if len({*train.labels}) < 2:
        raise ValueError(
            f"The {len(train.labels)} texts to train a classifier on have less than two labels. "
            "Generate more texts, or filter less."
        )
    return float(_classifier().fit(train.vectors, train.labels).score(test.vectors, test.labels))


def agreeing(texts: Texts) -> list[int]:
    """Return which texts a classifier of the other texts gives their own label."""
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0)
    found = cross_val_predict(_classifier(), texts.vectors, texts.labels, cv=folds)
    return [i for i, label in enumerate(texts.labels) if found[i] == label]


class _Head(nn.Module):
    """A linear classifier of embeddings, from zero."""

    def __init__(self, size: int, num_labels: int) -> None:
        super().__init__()
        self.head = nn.Linear(size, num_labels)
        nn.init.zeros_(self.head.weight)

    def forward(self, vectors: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of the labels (n,)."""
        return cross_entropy(self.head(vectors), labels)


def private_accuracy(
    train: Texts, test: Texts, names: Sequence[str], args: DPGrapeTrainingArguments
) -> tuple[float, float]:
    """Train a linear classifier of embeddings privately; return its accuracy and its epsilon.

    This is another private run on the same data, so its epsilon adds to the first one.
    """
    model = _Head(train.vectors.shape[1], len(names))
    rows, tested = (
        [
            {"vectors": vector, "labels": torch.tensor(names.index(label))}
            for vector, label in zip(_scaled(texts.vectors), texts.labels, strict=True)
        ]
        for texts in (train, test)
    )
    trainer = DPGrapeTrainer(model, args, train_dataset=rows)
    trainer.train()
    found = model.head(torch.stack([row["vectors"] for row in tested])).argmax(1)
    right = [int(i) == int(row["labels"]) for i, row in zip(found, tested, strict=True)]
    return sum(right) / len(right), trainer.privacy_spent().epsilon


def _scaled(vectors: Vectors) -> Tensor:
    """Return embeddings with entries near 1, as the synthetic inputs have them.

    The trainer chooses learning rates on synthetic inputs of the form of an example.
    """
    return torch.tensor(vectors * vectors.shape[1] ** 0.5, dtype=torch.float32)
