"""DP-GRAPE for Hugging Face: private training for less than the price of non-private training."""

from dp_grape_hf import functorch, layerwise  # noqa: F401  (they register the engines)
from dp_grape_hf.errors import PrivacyError, UnsupportedModelError
from dp_grape_hf.per_sample import per_sample_gradients

__all__ = ["PrivacyError", "UnsupportedModelError", "per_sample_gradients"]
