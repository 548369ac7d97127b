"""What happens around steps: the epsilon in the progress bar, and the stop at the budget."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ProgressCallback

from dp_grape_hf.plan import PrivacySpent

logger = logging.getLogger(__name__)

UPDATES_OF_EPSILON = 40  # in the progress bar, per run: one takes the accountant about 0.1 s


class StopAtBudget(TrainerCallback):
    """Stops training when the budget allows no further release.

    That happens before ``max_steps`` only if releases were lost when a run was killed: they count.
    """

    def __init__(self, releases_left: Callable[[], float]) -> None:
        self._releases_left = releases_left

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends and saves the run, and says so, once nothing is left."""
        if self._releases_left() <= 0 and state.global_step < state.max_steps:
            logger.warning(
                "Training stops at step %d of %d: the budget of epsilon %g is spent, releases that "
                "were lost in an interrupted run included. The checkpoint is saved.",
                state.global_step,
                state.max_steps,
                args.target_epsilon,
            )
            control.should_training_stop = True
            control.should_save = True
            control.should_log = True


class PrivacyProgress(ProgressCallback):
    """The progress bar of the Trainer, with the epsilon spent behind it."""

    def __init__(self, privacy_spent: Callable[[], PrivacySpent]) -> None:
        super().__init__()
        self._privacy_spent = privacy_spent

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Moves the bar, and now and then shows the epsilon spent."""
        every = max(1, state.max_steps // UPDATES_OF_EPSILON)
        due = state.global_step % every == 0 or state.global_step == state.max_steps
        bar: Any = self.training_bar
        if bar is not None and args.private and due:
            target = f"/{args.target_epsilon:g}" if args.target_epsilon else ""
            epsilon = self._privacy_spent().epsilon
            bar.set_postfix_str(f"ε={epsilon:.3f}{target}", refresh=False)
        super().on_step_end(args, state, control, **kwargs)
