"""The models of the tests: a few that many suites iterate over, and the whole zoo.

To check another family, add a row to ``tests/models/families.yaml``; ``ROWS`` has one entry for
each of its tasks. ``CASES`` and ``TYPICAL`` stay small, because other suites multiply them.

Shapes: B samples in the batch, T positions.
"""

from dataclasses import dataclass

from torch import nn

from tests.models.zoo import (
    FIRST_WORD as FIRST_WORD,
    HEADS as HEADS,
    IGNORED as IGNORED,
    LABELS as LABELS,
    PAD as PAD,
    VOCABULARY as VOCABULARY,
    WIDE,
    Row,
    build as build,
    rows,
    texts as texts,
)

ROWS = rows()
BY_ROW = {str(entry): entry for entry in (*rows(WIDE), *ROWS)}


def row(name):
    """Returns the row of that family and task, written ``"BERT, masked LM"``."""
    return BY_ROW[name]


@dataclass(frozen=True)
class Case:
    name: str
    row: Row
    positions: int = 9  # T, for models that fix it

    def __str__(self):
        return self.name

    def model(self, seed=0, **changes):
        return self.row.model(seed, **{"num_hidden_layers": 2} | changes)

    def batch(self, batch_size, positions=9, **settings):
        return self.row.batch(batch_size, positions=positions, **settings)


CASES = [
    Case("roberta-classifier", row("RoBERTa, sequence classification")),
    Case("roberta-masked-lm", row("RoBERTa, masked LM")),
    Case("bert-classifier", row("BERT, sequence classification")),
    Case("opt", row("OPT, causal LM")),
    Case("gpt2", row("GPT-2, causal LM")),
    Case("llama", row("Llama, causal LM")),
    Case("vit", row("ViT, image classification"), positions=5),
]
BY_NAME = {case.name: case for case in CASES}
TYPICAL = [BY_NAME[name] for name in ("bert-classifier", "gpt2", "llama", "vit")]
"""One of each kind: of encoders, of tied tables and transposed weights, of RMSNorm, of images."""


def only(name):
    return BY_NAME[name]


def without_dropout(model):
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model
