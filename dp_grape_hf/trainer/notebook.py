"""The live table of a notebook. To import this module takes IPython."""

from __future__ import annotations

from typing import Any

from transformers.utils.notebook import NotebookProgressCallback

from dp_grape_hf.trainer.callbacks import PRIVATE_LOGS


class PrivacyNotebookProgress(NotebookProgressCallback):
    """The table of the Trainer in a notebook, in which each column has its own name.

    The original cuts off what stands before the first underscore of a name, as the prefix of a
    metric. Epsilon, signal and noise have no prefix, so they get one here.
    """

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any
    ) -> None:
        """Writes a line into the table."""
        named = {
            f"private_{name}" if name in PRIVATE_LOGS else name: value
            for name, value in (metrics or {}).items()
            if name != "epoch"
        }
        super().on_evaluate(args, state, control, metrics=named, **kwargs)
