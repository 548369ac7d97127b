"""``dp-grape calibrate``: noise from a privacy budget, and the budget from noise."""

import argparse
import json
import math
from typing import Any

from tqdm import tqdm

from dp_grape_hf.accounting import (
    EpsilonCurve,
    Releases,
    expected_steps_per_epoch,
    find_bands,
    find_noise_multiplier,
    refuse_large_delta,
    rounded_up,
    usual_batch_size,
)
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.tables import table

DEFAULT_EPSILONS = (0.5, 1.0, 2.0, 4.0, 6.0, 8.0)


_CYCLIC = """
Sampling is cyclic Poisson: each example is in one of b groups (bands), and each step samples
from one group, each member with probability b q. Epsilon is that of ceil(steps / b)
Poisson-subsampled Gaussian releases ("releases") at the sampling rate b q ("at rate").
"""


def run(args: argparse.Namespace) -> str:
    """Return the table of noise multipliers and epsilons as text, or as JSON with ``--json``."""
    sample_rate, batch_size, steps = _rate_and_steps(args)
    plan: dict[str, Any] = {
        "sample_rate": sample_rate,
        "steps": steps,
        "adjacency": args.adjacency,
    }
    workload = _workload(args, steps)
    budget = {"target_delta": args.target_delta, "accountant": args.accountant, **plan}
    rows: list[dict[str, Any]] = []
    given = args.noise_multiplier or args.target_epsilon or DEFAULT_EPSILONS
    for value in tqdm(given, disable=None):
        target: float | None = value
        coefficients: tuple[float, ...] = (1.0,)
        left: float | None = None
        if args.noise_multiplier is not None:
            target, sigma = None, value
        elif workload is None:
            sigma = rounded_up(find_noise_multiplier(target_epsilon=value, **budget))
        else:
            coefficients, sigma, left = find_bands(target_epsilon=value, **budget, **workload)
            sigma = rounded_up(sigma)
        releases = Releases(sigma, **plan, bands=len(coefficients))
        curve = EpsilonCurve(releases, args.target_delta, args.accountant)
        one_size = batch_size is not None and len(coefficients) == 1
        row = {
            "target_epsilon": target,
            "noise_multiplier": sigma,
            "epsilon": curve.epsilon(steps),
            "noise_std_on_mean_over_max_grad_norm": sigma / batch_size if one_size else None,
            "accountant": curve.accountant,
            "coefficients": coefficients,
            "noise_left": left,  # in the final weights, relative to independent noise
            "accounted_releases": releases.counted,
            "accounted_sample_rate": releases.counted_rate,
        }
        rows.append(row)
    if not args.json:
        cells = [_cells(row) for row in rows]
        shown = table([[*cells[0]], *([*line.values()] for line in cells)], ">")
        return (
            f"sample rate {sample_rate:.6g}, steps {steps}, delta {args.target_delta:g}, "
            f"adjacency {args.adjacency}\n\n{shown}{'' if workload is None else _CYCLIC}"
        )
    for row in rows:  # JSON has no infinity; Python, R and JavaScript all read the string back
        row["epsilon"] = "inf" if row["epsilon"] == math.inf else row["epsilon"]
    return json.dumps({**plan, "delta": args.target_delta, "rows": rows}, indent=2) + "\n"


def _cells(row: dict[str, Any]) -> dict[str, str]:
    """Return the cells of a line of the table, by the titles of their columns."""
    asked, std = row["target_epsilon"], row["noise_std_on_mean_over_max_grad_norm"]
    cells = {} if asked is None else {"epsilon asked": f"{asked:g}"}
    cells["noise multiplier"] = f"{row['noise_multiplier']:{'.6g' if asked is None else '.4f'}}"
    cells["epsilon achieved"] = f"{rounded_up(row['epsilon']):.4f}"
    if row["noise_left"] is None:  # correlated noise differs from step to step
        cells["noise std on mean / C"] = "-" if std is None else f"{std:.4g}"
    cells["accountant"] = row["accountant"]
    if row["noise_left"] is not None:
        cells["bands"] = f"{len(row['coefficients'])}"
        cells["releases"] = f"{row['accounted_releases']}"
        cells["at rate"] = f"{row['accounted_sample_rate']:.6g}"
        cells["left"] = f"{row['noise_left']:.3f}"
    return cells


def _workload(args: argparse.Namespace, steps: int) -> dict[str, Any] | None:
    """Return schedule and momentum for banded noise; None for independent noise."""
    if args.noise != "banded":
        if args.momentum is not None:
            raise PrivacyError(
                f"momentum={args.momentum!r} has an effect with --noise banded only. Leave it out."
            )
        return None
    if args.noise_multiplier is not None:
        raise PrivacyError(
            f"noise='banded' with noise_multiplier={args.noise_multiplier!r}: the number of bands "
            "is computed for a budget. Pass --target_epsilon instead."
        )
    momentum = 0.9 if args.momentum is None else args.momentum
    if not 0 <= momentum < 1:
        raise PrivacyError(f"{momentum=} must be at least 0 and below 1, for example 0.9.")
    return {"schedule": [1 - step / steps for step in range(steps)], "inertia": momentum}


def _rate_and_steps(args: argparse.Namespace) -> tuple[float, float | None, int]:
    """Return the sampling rate, the expected batch size if it is known, and the steps."""
    num_samples: int | None = args.num_samples
    batch_size: float | None = args.expected_batch_size
    sample_rate: float
    if num_samples is not None:
        refuse_large_delta(args.target_delta, num_samples)
    if batch_size is None and args.sample_rate is None:
        if num_samples is None or args.num_train_epochs is None:
            raise PrivacyError(
                "Without expected_batch_size and sample_rate, the batch size is computed from "
                "--num_samples and --num_train_epochs. Pass both, or pass --expected_batch_size "
                "or --sample_rate."
            )
        batch_size = usual_batch_size(num_samples, args.num_train_epochs)
    if batch_size is None:
        sample_rate = args.sample_rate
        batch_size = None if num_samples is None else sample_rate * num_samples
    elif num_samples is None:
        raise PrivacyError(
            f"expected_batch_size={batch_size:g} alone does not give the sampling rate. Pass "
            "--num_samples as well, or --sample_rate instead."
        )
    else:
        sample_rate = batch_size / num_samples
    if args.max_steps is not None:
        return sample_rate, batch_size, args.max_steps
    num_train_epochs: float = args.num_train_epochs
    epoch = expected_steps_per_epoch(sample_rate)
    return sample_rate, batch_size, math.ceil(num_train_epochs * epoch)
