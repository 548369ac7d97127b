"""Experiments, one script each: ``accelerate launch -m recipes.<name>``."""
