"""A small Vision Transformer on handwritten digits: the demo, and every method beside it."""
