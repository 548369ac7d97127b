"""Simulate the private training of a head on fixed features of sentence pairs.

    python -m recipes.studies.pairs_head --model models/all-MiniLM-L6-v2 --data data/pairs_answers

``recipes.studies.pairs`` makes the data. The encoder is frozen and its features are computed once,
so that a run takes a fraction of a second: a linear head from zeros, automatic clipping, momentum
0.9, a constant rate at which noise alone adds 1.2 to a logit, and the noise and the sampling that
the package chooses. Its features are one of these:

* ``pair``: both texts in one input, read at the first position, which averages over the text;
* ``apart``: u, v, abs(u - v) and u v of the texts alone, each a mean over positions of length 1.

They are scaled by the power -1/4 of the energies that random tokens show, as the package scales
them. A head that is clipped apart from a body has a share of 0.71 of C, a head alone has all of it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from dp_grape_hf.accounting import Bands, correlated, find_bands, noise_left, release_weights
from recipes.common import markdown
from recipes.common.markdown import mean_and_error, score_text
from recipes.common.provenance import origin, write

RESULT = Path(__file__).with_name("results") / "pairs_head.json"
FEATURES, EPSILONS, EPOCHS, SHARES = ("pair", "apart"), (2, 8), (3, 10, 30), (1, 0.71)
CLASSES, BATCH, DELTA, MOMENTUM, LOGIT_NOISE, DRAWS = 3, 54, 1e-5, 0.9, 1.2, 4
LENGTH = 64  # tokens

Texts = Sequence[Mapping[str, Any]]


def main() -> None:
    """Compute the features, train on them, and write all scores."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="a sentence encoder like BERT")
    parser.add_argument("--data", type=Path, required=True, help="the folder of the pairs")
    parser.add_argument("--to", type=Path, default=RESULT, help="the file of the result")
    options = parser.parse_args()
    read = {
        split: [json.loads(line) for line in (options.data / f"{split}.jsonl").open()]
        for split in ("train", "validation", "test")
    }
    train, test = few_shot(read["train"]), [*read["validation"], *read["test"]]
    encoder = Encoder(options.model)
    public = encoder.random_pairs(256)
    found = []
    for kind in FEATURES:
        scale = evened(encoder(kind, public))
        inputs = [encoder(kind, rows) @ scale for rows in (train, test, public)]
        labels = [torch.tensor([row["label"] for row in rows]) for rows in (train, test)]
        for epsilon, epochs in product(EPSILONS, EPOCHS):
            bands = noise_of(epsilon, epochs, len(train))
            for share in SHARES:
                scores = [
                    trained(inputs, labels, bands, epochs, share, seed) for seed in range(DRAWS)
                ]
                about = {"features": kind, "epsilon": epsilon, "epochs": epochs, "share": share}
                found.append(about | {"accuracy": scores})
    write(options.to, {**origin(), "draws": DRAWS, "cells": found})


# ---- Features ----


def few_shot(rows: Texts) -> Texts:
    """Return the first 512 examples of each class."""
    return [row for k in range(CLASSES) for row in [r for r in rows if r["label"] == k][:512]]


class Encoder:
    """A frozen encoder, whose last layer also has a copy that averages over the text."""

    def __init__(self, path: str) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        self._plain = AutoModel.from_pretrained(path).eval()
        self._averaging = AutoModel.from_pretrained(path).eval()
        query = self._averaging.encoder.layer[-1].attention.self.query
        with torch.no_grad():  # equal attention to all positions
            query.weight.zero_()
            query.bias.zero_()

    def __call__(self, kind: str, rows: Texts) -> Tensor:
        """Return the features of pairs: (rows, n)."""
        one, other = [row["premise"] for row in rows], [row["hypothesis"] for row in rows]
        if kind == "pair":
            return self._encoded(self._averaging, one, other)[:, 0]
        u, v = (self._encoded(self._plain, texts)[:, 1] for texts in (one, other))
        u, v = (torch.nn.functional.normalize(x, dim=1) for x in (u, v))
        return torch.cat([u, v, (u - v).abs(), u * v], 1)

    @torch.no_grad()
    def _encoded(self, model: Any, *texts: Sequence[str]) -> Tensor:
        """Return the first position and the mean over positions: (rows, 2, width)."""
        found = []
        for start in range(0, len(texts[0]), 64):
            inputs = self._tokenizer(
                *(some[start : start + 64] for some in texts),
                truncation=True,
                max_length=LENGTH,
                padding=True,
                return_tensors="pt",
            )
            hidden, mask = model(**inputs).last_hidden_state, inputs["attention_mask"].unsqueeze(2)
            mean = (hidden * mask).sum(1) / mask.sum(1)
            found.append(torch.stack([hidden[:, 0], mean], 1))
        return torch.cat(found)

    def random_pairs(self, count: int) -> Texts:
        """Return pairs of random tokens."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(1000, len(self._tokenizer), (2, count, 14), generator=generator)
        one, other = ([self._tokenizer.decode(row) for row in some] for some in ids)
        return [{"premise": p, "hypothesis": h} for p, h in zip(one, other, strict=True)]


def evened(public: Tensor) -> Tensor:
    """Return the map that scales directions by the power -1/4 of their public energy: (n, n)."""
    energies, directions = torch.linalg.eigh(public.T @ public / len(public))
    return directions * (energies / energies.mean() + 0.1) ** -0.25


# ---- Private training ----


def noise_of(epsilon: float, epochs: int, examples: int) -> Bands:
    """Return the noise that the package chooses for a budget."""
    rate = BATCH / examples
    steps = round(epochs / rate)
    return find_bands(
        target_epsilon=epsilon,
        target_delta=DELTA,
        sample_rate=rate,
        steps=steps,
        schedule=[1.0] * steps,
        inertia=MOMENTUM,
    )


def trained(
    inputs: Sequence[Tensor],
    labels: Sequence[Tensor],
    bands: Bands,
    epochs: int,
    share: float,
    seed: int,
) -> float:
    """Return the test accuracy in percent of a head that was trained privately.

    Args:
        inputs: features of the training, test and public data, (rows, n).
        labels: of the training and test data, (rows,).
        bands: the noise.
        epochs: how often the training data are read, on average.
        share: of C for the head.
        seed: of the sampling and the noise.
    """
    generator = torch.Generator().manual_seed(seed)
    (train, test, public), (own, true) = inputs, labels
    count, rate = len(bands.coefficients), BATCH / len(train)
    steps, (rows, width) = round(epochs / rate), train.shape
    group = torch.randint(count, (rows,), generator=generator)
    fresh = torch.randn(steps, width * CLASSES, generator=generator)
    noise = torch.from_numpy(correlated(bands.coefficients, fresh.double().numpy())).float()
    noise = noise.view(steps, width, CLASSES) * bands.noise_multiplier / share
    left = noise_left(bands.coefficients, release_weights([1.0] * steps, MOMENTUM))
    size = public.square().sum(1).mean().sqrt().item()
    step = LOGIT_NOISE / (size * left * bands.noise_multiplier / share)
    weight, velocity = torch.zeros(2, width, CLASSES)
    for t in range(steps):
        drawn = (group == t % count) & (torch.rand(rows, generator=generator) < count * rate)
        x, y = train[drawn], own[drawn]
        error = (x @ weight).softmax(1) - torch.nn.functional.one_hot(y, CLASSES)
        length = x.norm(dim=1) * error.norm(dim=1)
        summed = x.T @ (error / length.clamp_min(1e-12).unsqueeze(1))
        velocity = MOMENTUM * velocity + summed + noise[t]
        weight = weight - step * velocity
    return 100 * float(((test @ weight).argmax(1) == true).float().mean())


def as_markdown(record: Mapping[str, Any]) -> str:
    """Return a table: a line for features, share and epochs, a column for each budget."""
    scores = {
        (cell["features"], cell["share"], cell["epochs"], cell["epsilon"]): cell["accuracy"]
        for cell in record["cells"]
    }
    rows = [
        [
            *(kind, f"{share:g}", f"{epochs}"),
            *(score_text(mean_and_error(scores[kind, share, epochs, e])) for e in EPSILONS),
        ]
        for kind, share, epochs in product(FEATURES, SHARES, EPOCHS)
    ]
    titles = ["Features of the head", "Share of C", "Epochs"]
    return markdown.table([*titles, *(f"ε = {epsilon}" for epsilon in EPSILONS)], rows)


if __name__ == "__main__":
    main()
