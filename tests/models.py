"""A zoo of tiny models: to check another one, add a row to ``CASES``.

Shapes: B samples in the batch, T positions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
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

VOCABULARY, HIDDEN, HEADS, LABELS, MAX_POSITIONS = 60, 32, 4, 3, 40
PAD, FIRST_WORD = 1, 5
IGNORED = -100

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A model and its data; both factories are deterministic and leave the global seed alone."""

    name: str
    model: Callable[..., PreTrainedModel]  # (seed=0, **changes to the configuration)
    batch: Callable[..., Batch]  # (B, T=positions, seed=0, padding="right")
    positions: int = 9  # T, for models that fix it
    broadcasts: tuple[str, ...] = ()  # tables that are looked up once for all samples
    heads: int = HEADS

    def __str__(self) -> str:
        return self.name


# ---- Models ----


def build(cls: Any, config: Any, settings: dict[str, Any], seed: int = 0, **changes: Any) -> Any:
    """Returns a model in training mode, with no parameter at a special value such as 0 or 1."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = cls(config(**{**settings, **changes}))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.train()


BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": 2 * HIDDEN,
    "max_position_embeddings": MAX_POSITIONS,
    "num_labels": LABELS,
    "pad_token_id": PAD,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
OPT = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "word_embed_proj_dim": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "ffn_dim": 2 * HIDDEN,
    "max_position_embeddings": MAX_POSITIONS,
    "pad_token_id": PAD,
    "dropout": 0.0,
}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": HIDDEN,
    "n_layer": 2,
    "n_head": HEADS,
    "n_positions": MAX_POSITIONS,
    "pad_token_id": PAD,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 2,
    "intermediate_size": 2 * HIDDEN,
    "max_position_embeddings": MAX_POSITIONS,
    "pad_token_id": PAD,
}
VIT = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": 2 * HIDDEN,
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 1,
    "num_labels": LABELS,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}

# ---- Data ----


def texts(
    batch_size: int,
    positions: int = 9,
    seed: int = 0,
    padding: str = "right",
    *,
    target: str,
) -> Batch:
    """Returns random texts, the second and every third after it padded on one side.

    ``target`` says what the labels are: ``class``, ``masked`` tokens or all of the ``tokens``. No
    text is shorter than 4 tokens: a causal model that predicts one token attends to one, so that
    all gradients of its queries and keys are zero but for rounding.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(FIRST_WORD, VOCABULARY, (batch_size, positions), generator=generator)
    mask = torch.ones_like(ids)
    for i in range(1, batch_size, 3):
        length = min(4, positions) + max(0, positions - 4) * i // (batch_size + 1)
        mask[i, length:] = 0
        if padding == "left":
            mask[i] = mask[i].flip(0)
    ids[mask == 0] = PAD
    classes = torch.randint(0, LABELS, (batch_size,), generator=generator)
    tokens = ids.masked_fill(mask == 0, IGNORED)
    if target == "masked":
        chosen = torch.rand(ids.shape, generator=generator) < 0.4
        chosen[torch.arange(batch_size), mask.argmax(1)] = True  # at least one in each text
        tokens = tokens.masked_fill(~chosen, IGNORED)
    labels = classes if target == "class" else tokens
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def images(batch_size: int, positions: int = 5, seed: int = 0, padding: str = "right") -> Batch:
    """Returns random images of 2 x 2 patches; there is nothing to pad."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(batch_size, 1, 8, 8, generator=generator)
    return {
        "pixel_values": pixels,
        "labels": torch.randint(0, LABELS, (batch_size,), generator=generator),
    }


# ---- The table ----

CASES = [
    Case(
        "roberta-classifier",
        partial(build, RobertaForSequenceClassification, RobertaConfig, BERT),
        partial(texts, target="class"),
    ),
    Case(
        "roberta-masked-lm",
        partial(build, RobertaForMaskedLM, RobertaConfig, BERT),
        partial(texts, target="masked"),
    ),
    Case(
        "bert-classifier",
        partial(build, BertForSequenceClassification, BertConfig, BERT),
        partial(texts, target="class"),
        broadcasts=("bert.embeddings.position_embeddings.weight",),
    ),
    Case(
        "opt",
        partial(build, OPTForCausalLM, OPTConfig, OPT),
        partial(texts, target="tokens"),
    ),
    Case(
        "gpt2",
        partial(build, GPT2LMHeadModel, GPT2Config, GPT2),
        partial(texts, target="tokens"),
        broadcasts=("transformer.wpe.weight",),
    ),
    Case(
        "llama",
        partial(build, LlamaForCausalLM, LlamaConfig, LLAMA),
        partial(texts, target="tokens"),
    ),
    Case(
        "vit",
        partial(build, ViTForImageClassification, ViTConfig, VIT),
        images,
        positions=5,
    ),
]
BY_NAME = {case.name: case for case in CASES}


def only(name: str) -> Case:
    """Returns the case of that name."""
    return BY_NAME[name]
