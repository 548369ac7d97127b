"""The supported families of models, and how exact their per-sample gradients are."""
