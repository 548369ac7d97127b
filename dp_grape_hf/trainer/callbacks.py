"""Callbacks: private logs, epsilon in the progress bar, and the end of the budget."""

import logging
import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ProgressCallback

from dp_grape_hf.accounting import expected_steps_per_epoch

logger = logging.getLogger(__name__)

PRIVATE_LOGS = {
    *("epsilon", "learning_rate", "epoch", "step", "grad_norm"),
    *(f"{name}{of}" for name in ("signal", "noise") for of in ("", "_body", "_head")),
    *("train_runtime", "train_samples_per_second", "train_steps_per_second"),
}
"""Keys that a private run may log, besides metrics of evaluation data."""

_LOGS_OF_THE_HOST = {
    *("loss", "train_loss", "total_flos", "num_input_tokens_seen", "train_tokens_per_second")
}
UPDATES_OF_EPSILON = 40  # per run, in the progress bar: each takes about 0.1 s


class Withheld(float):
    """A number that is written as "withheld"."""

    def __repr__(self) -> str:
        return "withheld"

    def __format__(self, spec: str) -> str:
        return f"{self!r}"


WITHHELD = Withheld("nan")
"""Replaces a number that is not private."""


class PrivateLogs(dict[str, Any]):
    """Logs in which a callback that reads the training loss finds "withheld"."""

    def __missing__(self, name: str) -> Any:
        if name in _LOGS_OF_THE_HOST:
            return WITHHELD
        raise KeyError(name)


class PrivateCallback(TrainerCallback):
    """Callback of every run: private logs, the count of epochs, and the end of the budget.

    It must be the first callback.

    Args:
        trainer: the trainer, a ``DPGrapeMixin``; a proxy, because a cycle would keep it alive.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._seen = set(_LOGS_OF_THE_HOST)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove values that are not known to be private from the logs.

        They are removed in place, because the host returns the same dictionary as metrics.
        """
        if not args.private:
            return
        metrics = tuple(f"{prefix}_" for prefix in self._trainer.metric_prefixes)
        for logs in (kwargs["logs"], *state.log_history[-1:]):  # the history has a copy
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

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Continue the count of epochs, and stop and save when the budget is spent.

        If it skips no data, as with banded noise, the host would count from the start of an epoch
        in a resumed run. The budget is spent before ``max_steps`` only if a run was killed: the
        ledger counts lost updates.
        """
        trainer = self._trainer
        if args.ignore_data_skip:
            steps = expected_steps_per_epoch(trainer.plan.mechanism.sample_rate)
            state.epoch = state.global_step / steps
        if trainer.releases_left() <= 0 and state.global_step < state.max_steps:
            logger.warning(
                "Training stops at step %d of %d: the budget of epsilon %g is spent, including "
                "releases that were lost in an interrupted run. The checkpoint is saved.",
                state.global_step,
                state.max_steps,
                args.target_epsilon,
            )
            control.should_training_stop = control.should_save = control.should_log = True


_ENOUGH = 6  # windows
_CLEAR = 2.0  # standard deviations
_GREW = 1.5  # later signal divided by the first: a run that diverged had 1.9, others 0.4


def grown(signals: Sequence[float], sampled: float) -> float:
    """Return the later signals of a run divided by the first; 0 if this is not known.

    The gradients of examples agree most at the start of training, and less as the model learns. If
    they agree more later, the steps are too long.

    Args:
        signals: the signal of each window, in order. The mean of the second half is compared with
            the first.
        sampled: the contribution of random sampling to each signal. Signals of about this size
            are not used.
    """
    later = signals[len(signals) // 2 :]
    if len(signals) < _ENOUGH or not signals[0] or min(later) < _CLEAR * sampled:
        return 0.0
    return fmean(later) / signals[0]


class WarnOfDivergence(TrainerCallback):
    """Callback that warns once if the signal in the private updates grows.

    This uses private updates alone, so it costs no privacy.

    Args:
        trainer: as for ``PrivateCallback``.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._warned = trainer, False

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compare the later windows of the run with the first."""
        windows = self._trainer.private_run.signal.windows
        if not args.private or self._warned or len(windows) < _ENOUGH:
            return
        own = self._trainer.plan.mechanism
        averaged = max(windows[-1].releases, 1) * own.expected_batch_size  # gradients
        sampled = own.max_grad_norm / math.sqrt(averaged)
        for group in ("body", "head", ""):
            signals = [w.strengths[group].signal for w in windows if group in w.strengths]
            if (times := grown(signals, sampled)) > _GREW:
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
    """The progress bar, below a table of the choices, with spent epsilon, signal and noise.

    Args:
        trainer: as for ``PrivateCallback``.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self._trainer, self._strength = trainer, ""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the choices of the run, and make the bar."""
        super().on_train_begin(args, state, control, **kwargs)
        bar: Any = self.training_bar
        if bar is not None and (text := self._trainer.table_of_choices()):
            bar.write(text)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Store the logged signal and noise for the progress bar."""
        if logs and "noise" in logs:
            groups = [g for g in ("_head", "_body") if f"noise{g}" in logs] or [""]
            shown = [
                f"{g[1:]} {logs[f'signal{g}']:.2g}/{logs[f'noise{g}']:.2g}".strip()
                for g in groups
                if f"signal{g}" in logs
            ]
            strengths = f"signal/noise {' '.join(shown)}" if shown else "signal not measurable yet"
            self._strength = f", {strengths}"
        super().on_log(args, state, control, logs=logs, **kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Advance the bar, and from time to time show the epsilon spent."""
        every = max(1, state.max_steps // UPDATES_OF_EPSILON)
        due = state.global_step % every == 0 or state.global_step == state.max_steps
        bar: Any = self.training_bar
        if bar is not None and args.private and due:
            target = f"/{args.target_epsilon:g}" if args.target_epsilon else ""
            epsilon = self._trainer.privacy_spent().epsilon
            bar.set_postfix_str(f"ε={epsilon:.3f}{target}{self._strength}", refresh=False)
        super().on_step_end(args, state, control, **kwargs)


def is_of_notebooks(callback: Any) -> bool:
    """Return whether a callback is the host's progress table for notebooks."""
    name = f"{type(callback).__module__}.{type(callback).__name__}"
    return name == "transformers.utils.notebook.NotebookProgressCallback"
