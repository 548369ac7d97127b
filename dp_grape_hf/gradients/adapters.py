"""The PEFT methods that this package supports, for error messages."""

from torch import nn

ADAPTERS = (
    *("LoRA", "DoRA", "IA3", "prompt tuning", "P-tuning", "prefix tuning", "LoHa", "LoKr", "OFT"),
    *("HRA", "VeRA", "RandLoRA", "FourierFT", "WaveFT", "VB-LoRA", "SHiRA", "C3A", "MiSS", "RoAd"),
    *("DeLoRA", "GraLoRA", "PSOFT", "LN tuning", "trainable tokens"),
)
"""PEFT methods whose gradients were compared with autograd."""


def advice(model: nn.Module) -> str:
    """Return a sentence that lists supported adapters, if the model has an adapter; else ""."""
    if not getattr(model, "peft_config", None):
        return ""
    return f" These adapters are supported: {', '.join(ADAPTERS)}."
