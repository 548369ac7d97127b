"""The example scripts of transformers, converted by ``dp-grape convert`` and run."""
