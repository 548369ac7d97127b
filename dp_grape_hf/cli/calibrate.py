"""``dp-grape calibrate``: noise from a privacy budget, and the budget from noise."""

import argparse
import json
import math
from typing import Any, NamedTuple

from tqdm import tqdm

from dp_grape_hf.accounting import (
    EpsilonCurve,
    Releases,
    Trials,
    TrialsDistribution,
    expected_steps_per_epoch,
    find_noise_multiplier,
    refuse_large_delta,
    rounded_up,
)
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.tables import table

DEFAULT_EPSILONS = (0.5, 1.0, 2.0, 4.0, 6.0, 8.0)


class _Row(NamedTuple):
    target_epsilon: float | None
    noise_multiplier: float
    epsilon: float
    noise_std_on_mean_over_max_grad_norm: float | None
    accountant: str
    epsilon_of_one_run: float | None


def run(args: argparse.Namespace) -> str:
    """Returns the table, or JSON."""
    sample_rate, batch_size, steps = _rate_and_steps(args)
    delta: float = args.target_delta
    noise: list[float] | None = args.noise_multiplier
    plain: dict[str, Any] = {
        "adjacency": args.adjacency,
        "norm_directions": args.norm_directions,
    }
    variant, trials = plain.copy(), _trials(args)
    if trials is not None:
        variant["num_trials"] = trials.mean
        variant["trials_distribution"] = trials.distribution
    rows: list[_Row] = []
    for asked in tqdm(noise or args.target_epsilon or DEFAULT_EPSILONS, disable=None):
        sigma: float = asked
        if noise is None:
            found = find_noise_multiplier(
                target_epsilon=asked,
                target_delta=delta,
                sample_rate=sample_rate,
                steps=steps,
                accountant=args.accountant,
                **variant,
            )
            sigma = rounded_up(found)
        releases = Releases(sigma, sample_rate, steps, **variant)
        curve = EpsilonCurve(releases, delta, args.accountant)
        target = asked if noise is None else None
        on_mean = None if batch_size is None else sigma / batch_size
        epsilon, one_run = curve.epsilon(steps), None
        if trials is not None:
            alone = Releases(sigma, sample_rate, steps, **plain)
            one_run = EpsilonCurve(alone, delta, args.accountant).epsilon(steps)
        rows.append(_Row(target, sigma, epsilon, on_mean, curve.accountant, one_run))
    drawn = trials.draw() if trials is not None and args.draw_num_trials else None
    if args.json:
        # JSON has no infinity; Python, R and JavaScript all read the string back.
        dicts = [
            {name: "inf" if value == math.inf else value for name, value in row._asdict().items()}
            for row in rows
        ]
        result = {"sample_rate": sample_rate, "steps": steps, "delta": delta, **variant}
        if drawn is not None:
            result["num_trials_drawn"] = drawn
        return json.dumps({**result, "rows": dicts}, indent=2) + "\n"
    columns = {
        "noise multiplier": [
            f"{row.noise_multiplier:{'.4f' if noise is None else '.6g'}}" for row in rows
        ],
        "epsilon achieved": [f"{rounded_up(row.epsilon):.4f}" for row in rows],
        "noise std on mean / C": [
            "-" if (std := row.noise_std_on_mean_over_max_grad_norm) is None else f"{std:.4g}"
            for row in rows
        ],
        "accountant": [row.accountant for row in rows],
    }
    if noise is None:
        columns = {"epsilon asked": [f"{row.target_epsilon:g}" for row in rows], **columns}
    if trials is not None:
        columns["of one run"] = [
            f"{rounded_up(one):.4f}" for row in rows if (one := row.epsilon_of_one_run) is not None
        ]
    directions = args.norm_directions
    estimated = "" if directions is None else f", norms from {directions} directions"
    chosen = "" if trials is None else f"\n{trials}"
    text = (
        f"sample rate {sample_rate:.6g}, steps {steps}, delta {delta:g}, "
        f"adjacency {args.adjacency}{estimated}{chosen}\n\n"
        + table(zip(*([title, *cells] for title, cells in columns.items()), strict=True), ">")
    )
    return text if drawn is None else f"{text}\nSecret number of runs to make: {drawn}\n"


def _trials(args: argparse.Namespace) -> Trials | None:
    if args.num_trials is not None:
        return Trials(args.num_trials, args.trials_distribution or TrialsDistribution.GEOMETRIC)
    if args.trials_distribution is not None or args.draw_num_trials:
        raise PrivacyError(
            f"trials_distribution={args.trials_distribution!r} and draw_num_trials="
            f"{args.draw_num_trials!r} need the mean of that number; give --num_trials."
        )
    return None


def _rate_and_steps(args: argparse.Namespace) -> tuple[float, float | None, int]:
    """Returns the sample rate, the expected batch size where it is known, and the steps."""
    num_samples: int | None = args.num_samples
    batch_size: float | None = args.expected_batch_size
    sample_rate: float
    if num_samples is not None:
        if num_samples < 1:
            raise PrivacyError(f"{num_samples=} must be positive; count the training examples.")
        refuse_large_delta(args.target_delta, num_samples)
    if batch_size is None:
        sample_rate = args.sample_rate
        batch_size = None if num_samples is None else sample_rate * num_samples
    elif num_samples is None:
        raise PrivacyError(
            f"expected_batch_size={batch_size:g} says nothing about privacy on its own; add "
            "--num_samples, or give --sample_rate instead."
        )
    else:
        sample_rate = batch_size / num_samples
    if args.max_steps is not None:
        return sample_rate, batch_size, args.max_steps
    num_train_epochs: float = args.num_train_epochs
    if not 0 < num_train_epochs < math.inf:
        raise PrivacyError(f"{num_train_epochs=} must be positive and finite.")
    epoch = expected_steps_per_epoch(sample_rate)
    return sample_rate, batch_size, math.ceil(num_train_epochs * epoch)
