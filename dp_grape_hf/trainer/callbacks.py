"""Callbacks around steps and runs: epsilon in the progress bar, stopping in time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any

from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import ProgressCallback

from dp_grape_hf.arguments import PrivacySpent
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.mechanism import Window

logger = logging.getLogger(__name__)

PRIVATE_LOGS = {
    *("epsilon", "learning_rate", "epoch", "step"),
    "grad_norm",
    *("signal", "signal_body", "signal_head", "noise", "noise_body", "noise_head"),  # of releases
    *("train_runtime", "train_samples_per_second", "train_steps_per_second"),
}
"""What a private run may log, beside metrics of evaluation data."""

_LOGS_OF_THE_HOST = {
    *("loss", "train_loss", "total_flos", "num_input_tokens_seen", "train_tokens_per_second")
}
UPDATES_OF_EPSILON = 40  # in the progress bar, per run: one takes the accountant about 0.1 s


class Withheld(float):
    """A number that is written as "withheld"."""

    def __repr__(self) -> str:
        return "withheld"

    def __format__(self, spec: str) -> str:
        return f"{self!r}"


WITHHELD = Withheld("nan")
"""In place of a number that is not private."""


class PrivateLogs(dict[str, Any]):
    """Logs of which callbacks may ask for the training loss, as many do: it reads "withheld"."""

    def __missing__(self, name: str) -> Any:
        if name in _LOGS_OF_THE_HOST:
            return WITHHELD
        raise KeyError(name)


class OnlyPrivateLogs(TrainerCallback):
    """Takes out of the logs what is not known to be private; no other callback may come before it.

    Args:
        prefixes: returns the prefixes of metrics that are computed now; empty outside evaluations.
    """

    def __init__(self, prefixes: Callable[[], Iterable[str]]) -> None:
        self._prefixes = prefixes
        self._seen = set(_LOGS_OF_THE_HOST)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Drops keys in place, as the host returns the same dictionary as metrics of training."""
        metrics = tuple(f"{prefix}_" for prefix in self._prefixes())
        for logs in (kwargs["logs"], *state.log_history[-1:]):  # the second is a copy
            for name in [n for n in logs if n not in PRIVATE_LOGS and not n.startswith(metrics)]:
                del logs[name]
                if name not in self._seen:
                    logger.warning(
                        "%r is not known to be private and was left out of the logs. Metrics of "
                        "evaluation data are logged by evaluate() and predict(), under their "
                        "metric_key_prefix. For debugging on public data, noise_multiplier=0 logs "
                        "everything.",
                        name,
                    )
                    self._seen.add(name)


class CountEpochs(TrainerCallback):
    """Has the epochs of a resumed run go on: the host counts from the beginning of one.

    It does so where it skips no data, as with banded noise. No other callback may come before.

    Args:
        steps: returns how many an epoch has.
    """

    def __init__(self, steps: Callable[[], int]) -> None:
        self._steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Sets the epoch to the updates made, in epochs."""
        if args.ignore_data_skip:
            state.epoch = state.global_step / self._steps()


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


def grown(signals: Sequence[float], sampled: float) -> float:
    """Returns how many times the first signal of a run its later ones are; 0 if that is not known.

    The gradients of examples agree most at the start of training, and less as the model learns. If
    they agree more later, steps are too long.

    Args:
        signals: of windows, in order. The first is compared with the mean of the second half.
        sampled: what the chance of sampling contributes to each. Those that may be nothing else
            say nothing.
    """
    later = signals[len(signals) // 2 :]
    if len(signals) < _ENOUGH or not signals[0] or min(later) < _CLEAR * sampled:
        return 0.0
    return fmean(later) / signals[0]


_ENOUGH = 6  # windows
_CLEAR = 2.0  # standard deviations
_GREW = 1.5  # times; TREC in a run that diverged: 1.9, in others 0.4


class WarnOfDivergence(TrainerCallback):
    """Warns once if the signal in the private gradients grows, which costs no privacy to see.

    Args:
        windows: returns what the releases between two logs held.
        sampled: returns the norm that sampling alone can give to the mean of so many releases.
    """

    def __init__(
        self, windows: Callable[[], Sequence[Window]], sampled: Callable[[int], float]
    ) -> None:
        self._windows, self._sampled, self._warned = windows, sampled, False

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compares the later windows of the run with its first."""
        if self._warned or not args.private:
            return
        windows = self._windows()
        if len(windows) < _ENOUGH:
            return
        sampled = self._sampled(windows[-1].releases)
        for group in ("body", "head", ""):
            signals = [w.strengths[group].signal for w in windows if group in w.strengths]
            times = grown(signals, sampled)
            if times > _GREW:
                self._warned = True
                logger.warning(
                    "Training seems to diverge: the signal in the private updates%s is %.2g times "
                    "as large as at the start. Lower the learning rate, or leave learning_rate "
                    "out, which is then chosen.",
                    f" of the {group}" if group else "",
                    times,
                )
                return


class PrivacyProgress(ProgressCallback):
    """The progress bar of the Trainer, followed by the spent epsilon, the signal and the noise.

    Args:
        privacy_spent: returns what was.
        opening: returns what is written above the bar.
    """

    def __init__(
        self, privacy_spent: Callable[[], PrivacySpent], opening: Callable[[], str]
    ) -> None:
        super().__init__()
        self._privacy_spent, self._opening = privacy_spent, opening
        self._strength = ""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Says what was chosen, and makes the bar."""
        super().on_train_begin(args, state, control, **kwargs)
        bar: Any = self.training_bar
        if bar is not None and (text := self._opening()):
            bar.write(text)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Keep the logged signal and noise."""
        if logs and "noise" in logs:
            groups = [g for g in ("_head", "_body") if f"noise{g}" in logs] or [""]
            shown = {g: logs[f"signal{g}"] for g in groups if f"signal{g}" in logs}
            self._strength = ", signal/noise " + " ".join(
                f"{g.removeprefix('_')} {shown[g]:.2g}/{logs[f'noise{g}']:.2g}".strip()
                for g in shown
            )
            if not shown:
                self._strength = ", signal not measurable yet"
        super().on_log(args, state, control, logs=logs, **kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Moves the bar, and now and then shows the epsilon spent."""
        every = max(1, state.max_steps // UPDATES_OF_EPSILON)
        due = state.global_step % every == 0 or state.global_step == state.max_steps
        bar: Any = self.training_bar
        if bar is not None and args.private and due:
            target = f"/{args.target_epsilon:g}" if args.target_epsilon else ""
            epsilon = self._privacy_spent().epsilon
            bar.set_postfix_str(f"ε={epsilon:.3f}{target}{self._strength}", refresh=False)
        super().on_step_end(args, state, control, **kwargs)


def is_of_notebooks(callback: Any) -> bool:
    """Whether a callback is the one that the Trainer shows its table in a notebook with."""
    name = f"{type(callback).__module__}.{type(callback).__name__}"
    return name == "transformers.utils.notebook.NotebookProgressCallback"


def refuse_early_stopping(callbacks: Iterable[Any], eval_data_is_public: bool) -> None:
    """Refuses to stop by a metric of evaluation data that was not declared public."""
    if not eval_data_is_public and any(isinstance(c, EarlyStoppingCallback) for c in callbacks):
        raise PrivacyError(
            "EarlyStoppingCallback: training would follow a metric of the evaluation data, which "
            "no epsilon covers. Set eval_data_is_public=True if that data is public; else take "
            "the callback out."
        )
