"""The example scripts of transformers, made private by a change of their imports, and run."""
