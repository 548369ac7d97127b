"""Where a training step goes: forward, input gradients, projection, clip, noise, update, the rest.

The real step runs, and an observer of its phases times them; each part's time is without what runs
inside it and is timed by itself. The same is done with plain AdamW, for comparison.
"""

from __future__ import annotations

import copy
import functools
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tqdm import tqdm
from transformers import set_seed

from dp_grape_hf import phases
from dp_grape_hf.phases import Observer
from recipes.benchmark.methods import RANDOM, PlainTraining, PrivateTraining, now, quiet
from recipes.benchmark.models import Setting

FORWARD, BACKWARD = "forward", "input gradients"
PROJECTION, OTHERS = "projection", "biases, norms, embeddings, heads"
CLIP, NOISE, RECORD, UPDATE = "clip and sum", "noise", "record in the ledger", "update"
REDRAW, REST = "redraw of P, its share of a step", "rest"
PRIVATE_PHASES = (FORWARD, BACKWARD, PROJECTION, OTHERS, CLIP, NOISE, RECORD, UPDATE, REDRAW, REST)
OVERHEAD = (CLIP, NOISE, RECORD, UPDATE, REDRAW, REST)
"""What is neither forward, nor input gradients, nor the gradients of the weights by their rules."""

GOAL = 8.0  # percent of the step that the overhead stays under

WITH_WEIGHTS = "input and weight gradients"
PLAIN_PHASES = (FORWARD, WITH_WEIGHTS, CLIP, UPDATE, REST)

REDRAWS = 3

Seconds = defaultdict[str, float]  # phase -> sum


class Clock:
    """Adds up the time of phases; a phase inside another stops the other's time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: list[str] = []
        self._last = (0.0, 0.0)
        self.seconds: Seconds = defaultdict(float)
        self.cpu_seconds: Seconds = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts what runs inside to this phase."""
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def timed(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        """Returns the function, whose calls count to the phase."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.phase(phase):
                return function(*args, **kwargs)

        return run

    def take(self) -> tuple[Seconds, Seconds]:
        """Returns the sums by phase, seconds and processor time, and starts anew."""
        taken = self.seconds, self.cpu_seconds
        self.seconds, self.cpu_seconds = defaultdict(float), defaultdict(float)
        return taken

    def _turn(self) -> None:
        time = now(self._device)
        if self._open:
            self.seconds[self._open[-1]] += time[0] - self._last[0]
            self.cpu_seconds[self._open[-1]] += time[1] - self._last[1]
        self._last = time


PART = {
    phases.FORWARD: FORWARD,
    phases.BACKWARD: BACKWARD,
    phases.PROJECT: PROJECTION,
    phases.GRADIENTS: OTHERS,
    phases.CLIP: CLIP,
    phases.RELEASE: NOISE,
    phases.RECORD: RECORD,
}
"""Phase of a run -> the part that its time counts to; that of others counts to the rest."""


class Timers(Observer):
    """Counts the time of the phases of a run while ``clock`` is set."""

    clock: Clock | None = None

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Starts the clock of a part."""
        if self.clock is None or name not in PART:
            return super().phase(name)
        return self.clock.phase(PART[name])


def profile(setting: Setting, rounds: int, warmup: int, device: torch.device) -> dict[str, Any]:
    """Returns the median seconds of each phase of a private and of a plain step.

    Steps without timers alternate with them and show what the timers cost.
    """
    set_seed(0)
    original = setting.build_on(device)
    with device:
        batch = setting.inputs()
    clock = Clock(device)
    found: dict[str, list[tuple[Seconds, Seconds]]] = {"private": [], "plain": []}
    untimed: dict[str, list[float]] = {"private": [], "plain": []}
    with tempfile.TemporaryDirectory() as folder, quiet():
        where = Path(folder) / "private"
        private = PrivateTraining(copy.deepcopy(original), setting, batch, where, **RANDOM)
        plain = PlainTraining(copy.deepcopy(original), setting, batch, Path(folder) / "plain")
        steps = {"private": _private_step(private, clock), "plain": _plain_step(plain, clock)}
        for kind, training in (("private", private), ("plain", plain)):
            for _ in range(max(1, warmup)):
                training.step()
                steps[kind]()
                clock.take()
        for _ in tqdm(range(rounds), desc="rounds", file=sys.stderr, disable=None):
            for kind, training in (("private", private), ("plain", plain)):
                start = now(device)[0]
                training.step()
                untimed[kind].append(now(device)[0] - start)
                steps[kind]()
                found[kind].append(clock.take())
        redraw = _redraw(private, device)
    result: dict[str, Any] = {}
    for kind, parts_of in (("private", PRIVATE_PHASES), ("plain", PLAIN_PHASES)):
        steps_of = {
            of: [taken[i] for taken in found[kind]]
            for i, of in enumerate(("seconds", "cpu_seconds"))
        }
        result[kind] = {
            of: {phase: statistics.median(step[phase] for step in taken) for phase in parts_of}
            for of, taken in steps_of.items()
        } | {"untimed_step_seconds": statistics.median(untimed[kind]), "rounds": rounds}
    for of, value in zip(("seconds", "cpu_seconds"), redraw, strict=True):
        result["private"][of][REDRAW] = value
    for parts in result.values():
        for of in ("seconds", "cpu_seconds"):
            parts[of.replace("seconds", "percent")] = _percent(parts[of])
    shares = result["private"]
    for of in ("percent", "cpu_percent"):
        shares[f"overhead_{of}"] = sum(shares[of][phase] for phase in OVERHEAD)
    return result


def _private_step(training: PrivateTraining, clock: Clock) -> Callable[[], None]:
    def step() -> None:
        timers.clock = clock
        with clock.phase(REST):
            training.release()
            with clock.phase(UPDATE):
                training.update()
            training.finish()
        timers.clock = None

    timers = Timers()
    training.trainer.private_run.per_sample.observer = timers
    return step


def _plain_step(training: PlainTraining, clock: Clock) -> Callable[[], None]:
    trainer = training.trainer
    forward = clock.timed(trainer.compute_loss, FORWARD)
    backward = clock.timed(trainer.accelerator.backward, WITH_WEIGHTS)

    def step() -> None:
        with (
            mock.patch.object(trainer, "compute_loss", forward),
            mock.patch.object(trainer.accelerator, "backward", backward),
            clock.phase(REST),
        ):
            training.differentiate()
            with clock.phase(CLIP):
                training.clip()
            with clock.phase(UPDATE):
                training.update()
            training.finish()

    return step


def _redraw(training: PrivateTraining, device: torch.device) -> tuple[float, float]:
    """Returns what drawing all projections takes, seconds and processor time, divided by F."""
    schedule = training.trainer.private_run.schedule
    assert schedule is not None
    every = training.trainer.args.projection_update_steps
    step = training.trainer.state.global_step
    taken = []
    for number in range(1, REDRAWS + 1):
        start = now(device)
        schedule.at(step + number * every)
        taken.append([b - a for a, b in zip(start, now(device), strict=True)])
    wall, cpu = (statistics.median(values) / every for values in zip(*taken, strict=True))
    return wall, cpu


def _percent(seconds: dict[str, float]) -> dict[str, float]:
    total = sum(seconds.values()) or 1.0
    return {phase: 100 * value / total for phase, value in seconds.items()}


def profile_table(result: dict[str, Any], setting: Setting) -> str:
    """Returns the profile as text, one line per phase."""
    lines = [str(setting)]
    for kind, title in (("private", "DPGrapeTrainer"), ("plain", "Trainer, AdamW (not private)")):
        parts = result[kind]
        lines.append(f"{title:<34}{'median':>12}{'of the step':>14}{'of its CPU time':>18}")
        for phase, seconds in parts["seconds"].items():
            lines.append(
                f"  {phase:<32}{1000 * seconds:>9.2f} ms{parts['percent'][phase]:>12.1f} %"
                f"{parts['cpu_percent'][phase]:>16.1f} %"
            )
        total, untimed = sum(parts["seconds"].values()), parts["untimed_step_seconds"]
        lines.append(f"  {'all':<32}{1000 * total:>9.2f} ms")
        lines.append(f"  {'a step without timers':<32}{1000 * untimed:>9.2f} ms")
    shares = result["private"]
    lines.append(
        f"overhead ({'; '.join(OVERHEAD)}): {shares['overhead_percent']:.1f} % of the step, "
        f"{shares['overhead_cpu_percent']:.1f} % of its CPU time; the goal is under {GOAL:.0f} %"
    )
    return "\n".join(lines) + "\n"
