"""The models of the tests: a few that many suites iterate over, and the whole zoo.

To check another family, add a row to ``tests/models/families.yaml``; ``ROWS`` has one entry for
each of its tasks. ``CASES`` and ``TYPICAL`` stay small, because other suites multiply them.

Shapes: B samples in the batch, T positions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
)

from tests.models.zoo import (
    BERT,
    FIRST_WORD as FIRST_WORD,
    GPT2,
    HEADS as HEADS,
    IGNORED as IGNORED,
    LABELS as LABELS,
    LLAMA,
    OPT,
    PAD as PAD,
    VIT,
    VOCABULARY as VOCABULARY,
    WIDE,
    Batch,
    Row,
    build,
    images,
    rows,
    texts,
)


@dataclass(frozen=True)
class Case:
    """A model and its data; both factories are deterministic and leave the global seed alone."""

    name: str
    model: Callable[..., PreTrainedModel]  # (seed=0, **changes to the configuration)
    batch: Callable[..., Batch]  # (B, T=positions, seed=0, padding="right")
    positions: int = 9  # T, for models that fix it

    def __str__(self) -> str:
        return self.name


def _of_texts(name: str, cls: Any, config: Any, settings: Any, target: str) -> Case:
    return Case(name, partial(build, cls, config, settings), partial(texts, target=target))


CASES = [
    _of_texts("roberta-classifier", RobertaForSequenceClassification, RobertaConfig, BERT, "class"),
    _of_texts("roberta-masked-lm", RobertaForMaskedLM, RobertaConfig, BERT, "masked"),
    _of_texts("bert-classifier", BertForSequenceClassification, BertConfig, BERT, "class"),
    _of_texts("opt", OPTForCausalLM, OPTConfig, OPT, "tokens"),
    _of_texts("gpt2", GPT2LMHeadModel, GPT2Config, GPT2, "tokens"),
    _of_texts("llama", LlamaForCausalLM, LlamaConfig, LLAMA, "tokens"),
    Case("vit", partial(build, ViTForImageClassification, ViTConfig, VIT), images, positions=5),
]
BY_NAME = {case.name: case for case in CASES}
TYPICAL = [BY_NAME[name] for name in ("bert-classifier", "gpt2", "llama", "vit")]
"""One of each kind: of encoders, of tied tables and transposed weights, of RMSNorm, of images."""


def only(name: str) -> Case:
    return BY_NAME[name]


def without_dropout(model: nn.Module) -> nn.Module:
    """Returns the model, whose dropout layers pass on all they are given."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


ROWS = rows()
BY_ROW = {str(entry): entry for entry in (*rows(WIDE), *ROWS)}


def row(name: str) -> Row:
    """Returns the row of that family and task, written ``"BERT, masked LM"``."""
    return BY_ROW[name]
