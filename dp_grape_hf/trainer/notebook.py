"""The live table of metrics in a notebook. This module needs IPython."""

from typing import Any

from transformers.utils.notebook import NotebookProgressCallback

from dp_grape_hf.trainer.callbacks import PRIVATE_LOGS


class PrivacyNotebookProgress(NotebookProgressCallback):
    """The table of the Trainer in a notebook, with a separate column for each private value.

    The host removes the part of a name before the first underscore, which is the prefix of a
    metric. Epsilon, signal and noise have no prefix, so this class adds one.
    """

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any
    ) -> None:
        """Write a line into the table, with prefixed names of private values."""
        named = {
            f"private_{name}" if name in PRIVATE_LOGS else name: value
            for name, value in (metrics or {}).items()
            if name != "epoch"
        }
        super().on_evaluate(args, state, control, metrics=named, **kwargs)
