"""Tiny models of all supported families, and how exact their per-sample gradients are."""
