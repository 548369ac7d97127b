"""``dp-grape calibrate``: noise from a privacy budget, and the budget from noise."""

import argparse
import json
import math
from typing import Any, NamedTuple

from tqdm import tqdm

from dp_grape_hf.accountants import rounded_up
from dp_grape_hf.accounting import (
    ACCOUNTANTS,
    LEAST,
    Adjacency,
    EpsilonCurve,
    Releases,
    expected_steps_per_epoch,
    find_noise_multiplier,
)
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.tables import table
from dp_grape_hf.tuning import Trials, TrialsDistribution

DEFAULT_EPSILONS = (0.5, 1.0, 2.0, 4.0, 6.0, 8.0)

_CALIBRATE = """\
Turn a privacy budget into the noise that meets it, or noise into the budget it spends.

  N      num_samples           examples in the training set
  B      expected_batch_size   examples in a step, on average over steps
  q      sample_rate = B / N   chance that a given example takes part in a given step
  T      max_steps             noisy steps in all; an epoch is 1 / q of them, rounded up
  delta  target_delta          how often the promise may fail; far below 1 / N
  eps    target_epsilon        the promise: smaller is more private
  C      max_grad_norm         bound on what one example adds to the sum of gradients
  sigma  noise_multiplier      noise std on that sum is sigma * C, so sigma * C / B on the mean

More noise, fewer steps or a smaller q make eps smaller. C has no effect on it.
"""

_EXAMPLES = """\
What noise does a budget take, with 1024 examples, batches of 64 and 1000 steps?

  $ dp-grape calibrate --num_samples 1024 --expected_batch_size 64 \\
      --max_steps 1000 --delta 1e-5 --eps 2 6
  sample rate 0.0625, steps 1000, delta 1e-05, adjacency add_or_remove_one

  epsilon asked  noise multiplier  epsilon achieved  noise std on mean / C  accountant
              2            4.0520            1.9994                0.06331         pld
              6            1.6953            5.9985                0.02649         pld

And if norms are estimated from 64 random directions, as dp_jl does?

  $ dp-grape calibrate --num_samples 1024 --expected_batch_size 64 \\
      --max_steps 1000 --delta 1e-5 --eps 2 6 --norm_directions 64
  sample rate 0.0625, steps 1000, delta 1e-05, adjacency add_or_remove_one, norms from 64 directions

  epsilon asked  noise multiplier  epsilon achieved  noise std on mean / C  accountant
              2            4.1239            1.9994                0.06444         pld
              6            1.7315            5.9980                0.02705         pld

What does a given noise spend, over 3 epochs of the same data?

  $ dp-grape calibrate --num_samples 1024 --expected_batch_size 64 \\
      --num_train_epochs 3 --delta 1e-5 --noise_multiplier 1
  sample rate 0.0625, steps 48, delta 1e-05, adjacency add_or_remove_one

  noise multiplier  epsilon achieved  noise std on mean / C  accountant
               1            3.2405                0.01562         pld

And if the model published will be the best of several runs, 10 on average?

  $ dp-grape calibrate --num_samples 1024 --expected_batch_size 64 \\
      --max_steps 1000 --delta 1e-5 --eps 2 6 --num_trials 10
  sample rate 0.0625, steps 1000, delta 1e-05, adjacency add_or_remove_one
  the best of a geometric number of trials, 10 on average

  epsilon asked  noise multiplier  epsilon achieved  noise std on mean / C  accountant  of one run
              2            8.5849            1.9995                 0.1341         rdp      0.8550
              6            2.9615            5.9984                0.04627         rdp      2.9016

The guarantee covers everything computed from the noisy steps, however it is used, against someone
who sees every step and knows every other example. Two datasets count as neighbours if one has one
example more, or with --adjacency replace_one if one example of the one is another in the other; so
it is a change of twice the size, and takes up to twice the noise. It holds for Poisson sampling
only (each example drawn independently with probability q; batches vary in size), for noise nobody
can reproduce, and for one training run: tuning on the same data costs extra, and so does everything
else learnt from it. With --num_trials it holds for the best of K runs with the same noise, q and T,
where K is drawn once and kept secret (--draw_num_trials), the runs' other settings are drawn or
fixed before, and the score that chooses is computed on public data. Every epsilon is an upper bound
and every noise multiplier is rounded up.
"""


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    """Adds ``dp-grape calibrate``: noise from a budget, and the budget from noise."""
    parser.description, parser.epilog = _CALIBRATE, _EXAMPLES
    parser.set_defaults(run=_calibrate)
    parser.add_argument("--num_samples", type=int, metavar="N")
    sampling = parser.add_mutually_exclusive_group(required=True)
    sampling.add_argument("--expected_batch_size", type=float, metavar="B", help="with N: q = B/N")
    sampling.add_argument("--sample_rate", type=float, metavar="q", help="outright")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--max_steps", type=int, metavar="T")
    length.add_argument(
        "--num_train_epochs", type=float, metavar="E", help="T = E times 1/q, rounded up"
    )
    parser.add_argument("--target_delta", "--delta", type=float, required=True, metavar="delta")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument(
        "--target_epsilon",
        "--eps",
        type=float,
        nargs="+",
        metavar="eps",
        help="budgets to find the noise for (default: a table from "
        f"{DEFAULT_EPSILONS[0]:g} to {DEFAULT_EPSILONS[-1]:g})",
    )
    budget.add_argument(
        "--noise_multiplier",
        type=float,
        nargs="+",
        metavar="sigma",
        help="noise to find the budget for",
    )
    parser.add_argument(
        "--accountant",
        default=LEAST,
        metavar="name",
        help=f"{', '.join(ACCOUNTANTS)} (default: of those installed, the one with the least eps)",
    )
    parser.add_argument(
        "--adjacency",
        default=Adjacency.ADD_OR_REMOVE_ONE.value,
        metavar="name",
        help=f"{' or '.join(Adjacency)}: which datasets are neighbours (default: the first)",
    )
    parser.add_argument(
        "--norm_directions",
        type=int,
        metavar="k",
        help="random directions that dp_jl estimates norms from (default: norms are exact)",
    )
    parser.add_argument(
        "--num_trials",
        type=float,
        metavar="mean",
        help="publish only the best of a random number of such runs, of this mean: eps is then "
        "that of the best, found by rdp (Papernot and Steinke, 2022)",
    )
    parser.add_argument(
        "--trials_distribution",
        metavar="name",
        help=f"{', '.join(TrialsDistribution)}: how that number is drawn (default: the first)",
    )
    parser.add_argument(
        "--draw_num_trials",
        action="store_true",
        help="draw that number, once, and tell nobody: whoever draws again until it suits, or "
        "makes another number of runs, has not the eps shown",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


class _Row(NamedTuple):
    target_epsilon: float | None
    noise_multiplier: float
    epsilon: float
    noise_std_on_mean_over_max_grad_norm: float | None
    accountant: str
    epsilon_of_one_run: float | None


def _calibrate(args: argparse.Namespace) -> str:
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
        if args.target_delta >= 1 / num_samples:
            raise PrivacyError(
                f"target_delta={args.target_delta:g} is not below 1/{num_samples}: publishing one "
                "random example outright would satisfy it; choose a smaller one, for example "
                f"{0.01 / num_samples:.0e}."
            )
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
