"""The models that ``gpu_report`` measures: those of the recipes, by name, with their batches.

Shapes: B samples in the batch, T positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import OPTForCausalLM, RobertaForMaskedLM

from recipes.benchmark.models import OPT, ROBERTA, VIT, Batch, Setting
from recipes.paper.roberta_prompts import logits_at_mask, read_at_mask

WORDS = (3, 4)  # stand for the words of two labels
LAST = 9  # positions at the end of a text: an answer of 8 tokens, and the one before it
RANKS = (4, 16, 64, 256)  # of the paper's figure of memory, and of its authors' code


class RobertaPromptForSequenceClassification(RobertaForMaskedLM):
    """RoBERTa of the recipe ``roberta``: two words' logits at a mask, and with labels their loss.

    By its name it is a classifier, as which the package computes its loss for each sample.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        read_at_mask(self, WORDS)
        del self.forward  # it has no loss, which plain training needs; the one below has

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        mask_pos: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Any:
        """Returns the logits (B, 2), and the mean loss if there are labels (B,).

        Principal directions are measured on texts that are made up, which have no mask: the middle
        is then read.
        """
        if mask_pos is None:
            mask_pos = input_ids.new_full((len(input_ids),), input_ids.shape[1] // 2)
        outputs = logits_at_mask(self, input_ids, attention_mask, mask_pos)
        if labels is not None:
            outputs.loss = functional.cross_entropy(outputs.logits, labels)
        return outputs


class OPTAnswersForCausalLM(OPTForCausalLM):
    """OPT of the recipe ``opt``: its vocabulary head runs only where answers are predicted.

    Which positions these are does not depend on contents, which a simulation does not have.
    """

    def forward(self, *args: Any, **inputs: Any) -> Any:
        """Returns what OPT does at the last positions; the labels are those of these, (B, LAST)."""
        return super().forward(*args, logits_to_keep=LAST, **inputs)


class RecipeSetting(Setting):
    """A model and its batch, as the recipes have them: a mask is filled in, a text answered."""

    def inputs(self, batch_size: int | None = None, padded: bool = False) -> Batch:
        """Returns a random batch on the default device, labels included.

        Args:
            batch_size: B, if not the setting's own.
            padded: whether one position of each text is padding, OPT's first or RoBERTa's last.
        """
        batch = super().inputs(batch_size, padded)
        if self.model == ROBERTA:
            batch["mask_pos"] = torch.full_like(batch["labels"], self.length // 2)
        if self.model == OPT:
            batch = {name: value.flip(1) for name, value in batch.items()}
            batch["labels"] = batch["labels"][:, -LAST:]
        return batch

    def roberta(self) -> tuple[Any, Any]:
        return RobertaPromptForSequenceClassification, super().roberta()[1]

    def opt(self) -> tuple[Any, Any]:
        return OPTAnswersForCausalLM, super().opt()[1]


@dataclass(frozen=True)
class Shape:
    """A model, the batches it is measured with, and what else is measured.

    Args:
        setting: the model.
        batch_sizes: the batches; the first is measured before all others.
        ranks: further ones of DP-GRAPE; where there are any, the first batch has principal
            directions and correlated noise as well.
        compiled: the batch with which plain AdamW is compiled as well, which takes a minute; or 0.
    """

    setting: Setting
    batch_sizes: tuple[int, ...]
    ranks: tuple[int, ...] = ()
    compiled: int = 0


def _others(rank: int) -> tuple[int, ...]:
    return tuple(other for other in RANKS if other != rank)


def _opt(hidden_size: int, layers: int, **others: Any) -> Setting:
    return RecipeSetting(
        OPT,
        hidden_size=hidden_size,
        layers=layers,
        heads=32,
        vocab_size=50272,
        length=512,
        max_length=2048,
        dropout=0.1,
        **others,
    )


def _tiny(model: str, length: int = 16, **others: Any) -> Setting:
    return RecipeSetting(
        model, 32, layers=2, heads=2, vocab_size=64, length=length, rank=4, **others
    )


ROBERTA_LARGE = RecipeSetting(
    ROBERTA,
    hidden_size=1024,
    layers=24,
    heads=16,
    vocab_size=50265,
    length=128,
    max_length=514,
    dropout=0.1,
    rank=16,
)
VIT_BASE = RecipeSetting(VIT, hidden_size=768, layers=12, heads=12, length=196, rank=64)
SHAPES = {
    "RoBERTa-large, T=128": Shape(
        ROBERTA_LARGE, (40, 1, 2, 4, 8, 16, 32, 64, 96, 128), _others(16), compiled=40
    ),
    "ViT-Base, 224 pixels": Shape(VIT_BASE, (200, 1, 16, 50, 64, 128, 165, 500), _others(64)),
    "OPT-1.3B, T=512": Shape(_opt(2048, 24, rank=16), (8, 1, 4, 16), _others(16), compiled=8),
    "OPT-2.7B, T=512": Shape(_opt(2560, 32, rank=32), (4, 1, 8)),
    "OPT-6.7B, T=512": Shape(_opt(4096, 32, rank=64), (2, 1, 4, 8)),
    "OPT-6.7B, bfloat16, checkpointing, T=512": Shape(
        _opt(4096, 32, rank=64, dtype="bfloat16", gradient_checkpointing=True),
        (8, 1, 16),
        compiled=8,
    ),
}
"""The paper's models with its ranks. Its numbers of measured memory are those of RoBERTa-large at
B = 40 and ViT-Base at B = 200 and 500; 50 and 165 are what it has on a GPU of 24 GB."""
TINY = {
    "tiny RoBERTa": Shape(_tiny(ROBERTA, dropout=0.1), (4,), (2,)),
    "tiny OPT, bfloat16, checkpointing": Shape(
        _tiny(OPT, 32, dtype="bfloat16", gradient_checkpointing=True), (4,)
    ),
    "tiny ViT": Shape(_tiny(VIT), (4,)),
}
