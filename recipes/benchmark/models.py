"""The models and batches that ``benchmark`` and ``gpu_report`` measure: shapes, random contents.

Shapes: B samples in the batch, T positions.
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    LlamaForCausalLM,
    OPTForCausalLM,
    RobertaForSequenceClassification,
    ViTForImageClassification,
)

Batch = dict[str, Tensor]

ROBERTA, OPT, LLAMA, VIT = "roberta", "opt", "llama", "vit"
TITLES = {
    ROBERTA: "RoBERTa classifier",
    OPT: "OPT causal language model",
    LLAMA: "Llama causal language model",
    VIT: "ViT image classifier",
}
DECODERS = (OPT, LLAMA)
PATCH = 16  # pixels on a side


@dataclass(frozen=True)
class Setting:
    """A model and its batch. Other sizes are the defaults of the model's config."""

    model: str = ROBERTA  # a name in ``TITLES``
    # hidden size. The feed-forward layers are four times as wide; in Llama, which has three
    # matrices in each, 11 / 4 times.
    hidden_size: int = 512
    layers: int = 6  # number of layers
    vocab_size: int = 5_000  # vocabulary of a language model
    batch_size: int = 16  # B, in one physical batch
    length: int = 64  # T, the tokens of a text or the patches of an image (a square number)
    rank: int = 16  # r of the projections
    heads: int = 0  # attention heads; 0 for one head per 64 of the hidden size
    max_length: int = 0  # rows of the position embeddings of a text model; 0 for ``length`` plus 8
    # dropout rate of hidden states and attention. OPT has none in attention, and Llama has none at
    # all.
    dropout: float = 0.0
    dtype: str = "float32"  # type of the weights, float32 or bfloat16
    # whether activations are computed again in the backward pass
    gradient_checkpointing: bool = False
    # whether matrix products are computed in bfloat16 with float32 weights (``bf16=True``)
    autocast: bool = False
    classes: ClassVar[Mapping[str, Any]] = {
        ROBERTA: RobertaForSequenceClassification,
        OPT: OPTForCausalLM,
        LLAMA: LlamaForCausalLM,
        VIT: ViTForImageClassification,
    }

    def __post_init__(self) -> None:
        if self.model == VIT and math.isqrt(self.length) ** 2 != self.length:
            raise ValueError(
                f"length={self.length} is the number of patches of a square image. Pass a square "
                "number, for example 64 or 196."
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type of the weights."""
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.dtype]

    def build(self, dtype: torch.dtype | None = None) -> Any:
        """Return the model with random weights, on the default device, in training mode."""
        cls = self.classes[self.model]
        return cls._from_config(self.config(), dtype=dtype or self.torch_dtype).train()

    def build_on(self, device: torch.device) -> Any:
        """Return the model on a device, with gradient checkpointing if the setting has it."""
        with device:
            model = self.build()
        if self.gradient_checkpointing:
            model.config.use_cache = False
            with warnings.catch_warnings():  # the new name of the method is not in all versions
                warnings.filterwarnings("ignore", "`gradient_checkpointing_enable` is deprecated")
                model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def inputs(self, batch_size: int | None = None, padded: bool = False) -> Batch:
        """Return a random batch with labels on the default device; if ``padded``, texts end so."""
        size = self.batch_size if batch_size is None else batch_size
        labels = torch.randint(0, 2, (size,))
        if self.model == VIT:
            side = PATCH * math.isqrt(self.length)
            pixels = torch.randn(size, 3, side, side, dtype=self.torch_dtype)
            return {"pixel_values": pixels, "labels": labels}
        ids = torch.randint(3, self.vocab_size, (size, self.length))
        mask = torch.ones_like(ids)
        if padded:
            ids[:, -1], mask[:, -1] = 1, 0
        if self.model in DECODERS:
            labels = ids.masked_fill(mask == 0, -100)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    def __str__(self) -> str:
        parts = [f"{TITLES[self.model]}, hidden {self.hidden_size}, {self.layers} layers"]
        parts += [] if self.model == VIT else [f"vocabulary {self.vocab_size}"]
        parts += [f"B={self.batch_size}", f"T={self.length}", f"r={self.rank}"]
        parts += [] if self.dtype == "float32" else [f"{self.dtype} weights"]
        parts += ["gradient checkpointing"] if self.gradient_checkpointing else []
        parts += ["bf16 autocast"] if self.autocast else []
        return ", ".join(parts)

    def config(self) -> Any:
        """Return the configuration of the model."""
        wide, heads = 4 * self.hidden_size, self.heads or max(1, self.hidden_size // 64)
        text = {
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_length or self.length + 8,
        }
        own: dict[str, Any] = {
            VIT: {"image_size": PATCH * math.isqrt(self.length), "patch_size": PATCH},
            ROBERTA: text | {"type_vocab_size": 1},
            OPT: text | {"word_embed_proj_dim": self.hidden_size, "ffn_dim": wide},
            LLAMA: text | {"num_key_value_heads": heads, "use_cache": False},
        }[self.model]
        dropout = ("hidden_dropout_prob", "attention_probs_dropout_prob")
        common = dict.fromkeys(["dropout"] if self.model == OPT else dropout, self.dropout)
        return AutoConfig.for_model(
            self.model,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.layers,
            num_attention_heads=heads,
            intermediate_size=wide if self.model != LLAMA else 11 * self.hidden_size // 4,
            **own,
            **common,
        )
