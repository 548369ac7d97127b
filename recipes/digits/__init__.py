"""A small Vision Transformer on handwritten digits: a demo, and a comparison of all methods."""
