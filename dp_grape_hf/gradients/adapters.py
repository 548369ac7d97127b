"""What is known of PEFT's methods: which of them train, for whoever has one that does not."""

from __future__ import annotations

from torch import nn

ADAPTERS = (
    *("LoRA", "DoRA", "IA3", "prompt tuning", "P-tuning", "prefix tuning", "LoHa", "LoKr", "OFT"),
    *("HRA", "VeRA", "RandLoRA", "FourierFT", "WaveFT", "VB-LoRA", "SHiRA", "C3A", "MiSS", "RoAd"),
    *("DeLoRA", "GraLoRA", "PSOFT", "LN tuning", "trainable tokens"),
)
"""PEFT's methods whose gradients were compared with autograd, each in a model."""


def advice(model: nn.Module) -> str:
    """Returns what to add to the refusal of a model: other adapters, if it has one of PEFT's."""
    if not getattr(model, "peft_config", None):
        return ""
    return f" Adapters that are known to work: {', '.join(ADAPTERS)}."
