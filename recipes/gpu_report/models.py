"""The models that ``gpu_report`` measures: the models of the recipes, with their batches.

Shapes: B samples in the batch, T positions.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from torch.nn import functional
from transformers import OPTForCausalLM, RobertaForMaskedLM

from recipes.benchmark.models import OPT, ROBERTA, Batch, Setting
from recipes.paper.roberta_prompts import logits_at_mask, read_at_mask

WORDS = (3, 4)  # token ids that stand for the words of two labels
LAST = 9  # positions at the end of a text: an answer of 8 tokens, and the one before it


class RobertaPromptForSequenceClassification(RobertaForMaskedLM):
    """RoBERTa of the recipe ``roberta``: two words' logits at a mask, and with labels their loss.

    Its name makes it a classifier, so that the package computes the loss of each sample as one.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        read_at_mask(self, WORDS)
        del self.forward  # has no loss, which plain training needs; the method below has one

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        mask_pos: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Any:
        """Return the logits (B, 2), and the mean loss if there are labels (B,).

        The synthetic texts that principal directions are measured on have no mask: their middle
        is read.
        """
        if mask_pos is None:
            mask_pos = input_ids.new_full((len(input_ids),), input_ids.shape[1] // 2)
        outputs = logits_at_mask(self, input_ids, attention_mask, mask_pos)
        if labels is not None:
            outputs.loss = functional.cross_entropy(outputs.logits, labels)
        return outputs


class OPTAnswersForCausalLM(OPTForCausalLM):
    """OPT of the recipe ``opt``: its vocabulary head runs only where answers are predicted."""

    def forward(self, *args: Any, **inputs: Any) -> Any:
        """Return what OPT computes at the last positions; labels have the shape (B, LAST)."""
        return super().forward(*args, logits_to_keep=LAST, **inputs)


class RecipeSetting(Setting):
    """A model and its batch as the recipes have them: a mask is filled in, a text answered."""

    classes = Setting.classes | {
        ROBERTA: RobertaPromptForSequenceClassification,
        OPT: OPTAnswersForCausalLM,
    }

    def inputs(self, batch_size: int | None = None, padded: bool = False) -> Batch:
        """Return a random batch; if ``padded``, OPT's first or RoBERTa's last token is padding."""
        batch = super().inputs(batch_size, padded)
        if self.model == ROBERTA:
            batch["mask_pos"] = torch.full_like(batch["labels"], self.length // 2)
        if self.model == OPT:
            batch = {name: value.flip(1) for name, value in batch.items()}
            batch["labels"] = batch["labels"][:, -LAST:]
        return batch


PLAN: Mapping[str, Any] = yaml.safe_load(
    Path(__file__).with_name("plan.yaml").read_text(encoding="utf-8")
)
MODELS: dict[str, Setting] = {
    name: (Setting if "LoRA" in name else RecipeSetting)(**options)
    for name, options in PLAN["models"].items()
}
"""The paper's models with its ranks, and a Llama whose adapter of rank 16 is trained."""
