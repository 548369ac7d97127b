"""The tests that transformers has of its Trainer, run against this package."""
