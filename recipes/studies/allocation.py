"""Compare the noise that random allocation, Poisson sampling and correlated noise leave in weights.

    pip install PLD_accounting==2.0
    python -m recipes.studies.allocation

Random allocation gives each example to exactly one of the t steps of an epoch, at random. Its noise
multiplier comes from PLD_accounting (Feldman and Shenfeld, ICML 2026, arXiv 2602.17284), and a
simulation of the privacy loss checks it. Nothing is trained. Two minutes on one core.

With Poisson sampling at rate 1/t, batches have the same size on average. For each number of steps
and each budget, the script finds the noise multipliers and writes the noise in the weights relative
to independent noise with Poisson sampling, for momentum 0.9 and a constant learning rate: after the
last step, and as the root mean square over all steps.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from dp_grape_hf.accounting import find_bands, find_noise_multiplier, noise_left, release_weights
from recipes.common import markdown
from recipes.common.provenance import git_commit, versions, write

RESULT = Path(__file__).with_name("results") / "allocation.json"
EPSILONS, STEPS, EPOCHS, DELTA, MOMENTUM = (1.0, 2.0), (10, 20, 40), 3, 1e-5, 0.9
ACCURACY = 1e-3  # relative, of a noise multiplier
SAMPLES = 2**19  # of the privacy loss, in each direction


def main() -> None:
    """Compute all cells and write them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--to", type=Path, default=RESULT, help="the file of the result")
    options = parser.parse_args()
    cells = [cell(epsilon, steps) for epsilon, steps in product(EPSILONS, STEPS)]
    made = {"versions": versions("PLD_accounting"), "git_commit": git_commit()}
    about = {"epochs": EPOCHS, "delta": DELTA, "momentum": MOMENTUM, "samples": SAMPLES}
    write(options.to, {**made, **about, "cells": cells})


def cell(epsilon: float, steps: int) -> dict[str, Any]:
    """Return the noise multipliers and the noise that they leave, at one budget."""
    budget: Any = {"target_epsilon": epsilon, "target_delta": DELTA}
    run: Any = {"sample_rate": 1 / steps, "steps": EPOCHS * steps}
    poisson = find_noise_multiplier(**budget, **run)
    allocation = allocated(epsilon, steps, poisson)
    constant = np.ones(EPOCHS * steps)
    bands = find_bands(**budget, **run, schedule=constant, inertia=MOMENTUM)
    each = [
        release_weights(constant * (np.arange(len(constant)) <= step), MOMENTUM)
        for step in range(len(constant))
    ]
    ratio = bands.noise_multiplier / poisson

    def left(weights: Any) -> float:
        return ratio * noise_left(bands.coefficients, weights) / noise_left((1.0,), weights)

    return {
        "epsilon": epsilon,
        "steps": steps,
        "sigma": {"poisson": poisson, "allocation": allocation, "banded": bands.noise_multiplier},
        "bands": len(bands.coefficients),
        "left": {
            "allocation": [allocation / poisson] * 2,
            "banded": [left(each[-1]), left(np.concatenate(each))],
        },
        "simulated_delta": simulated(epsilon, steps, allocation),
    }


def allocated(epsilon: float, steps: int, poisson: float) -> float:
    """Return the smallest noise multiplier for which PLD_accounting's upper bound is the budget."""
    from PLD_accounting import (
        AllocationSchemeConfig,
        ConvolutionMethod,
        PrivacyParams,
        gaussian_allocation_epsilon_configurable,
    )

    config = AllocationSchemeConfig(
        loss_discretization=1e-3, tail_truncation=1e-8, convolution_method=ConvolutionMethod.FFT
    )
    low, high = 0.5 * poisson, 1.5 * poisson
    while high > low * (1 + ACCURACY):
        middle = math.sqrt(low * high)
        params = PrivacyParams(sigma=middle, num_steps=steps, num_epochs=EPOCHS, delta=DELTA)
        upper = gaussian_allocation_epsilon_configurable(params=params, config=config)
        low, high = (low, middle) if upper <= epsilon else (middle, high)
    return high


def simulated(epsilon: float, steps: int, sigma: float) -> dict[str, tuple[float, float]]:
    """Return δ of random allocation at ε for both neighbours, by simulation, with standard errors.

    With an example, the release of an epoch is ``e_i + sigma z`` for a random step i, without it
    ``sigma z``. The privacy loss is the sum of the logarithm of ``mean_i exp((x_i - 1/2) /
    sigma^2)`` over the epochs. Samples come from shifted means and are weighted by the ratio of the
    densities, because a loss as large as ε is rare.
    """
    random = np.random.default_rng(0)
    batch = 2**14
    found: dict[str, list[np.ndarray]] = {"remove": [], "add": []}
    for _ in range(SAMPLES // batch):
        for direction, values in found.items():
            loss, weight = np.zeros(batch), np.zeros(batch)
            for _ in range(EPOCHS):
                x = sigma * random.standard_normal((batch, steps))
                if direction == "remove":  # from e_i, with a mean of 3.5 instead of 1
                    x[np.arange(batch), random.integers(steps, size=batch)] += 3.5
                    ratio = log_ratio(x, 1.0, sigma)
                    loss, weight = loss + ratio, weight + ratio - log_ratio(x, 3.5, sigma)
                else:  # from zero, with a mean of -s for all steps
                    shift = 1.0 / math.sqrt(steps)
                    x -= shift
                    loss = loss - log_ratio(x, 1.0, sigma)
                    weight += (2 * shift * x.sum(1) + steps * shift**2) / (2 * sigma**2)
            values.append(np.exp(weight) * np.maximum(0.0, -np.expm1(epsilon - loss)))
    return {
        direction: (float(np.mean(all_)), float(np.std(all_) / math.sqrt(np.size(all_))))
        for direction, all_ in found.items()
    }


def log_ratio(x: np.ndarray, mean: float, sigma: float) -> np.ndarray:
    """Return the log density of a random ``mean * e_i`` relative to zero mean: (rows,)."""
    exponents = (mean * x - mean**2 / 2) / sigma**2
    top = exponents.max(1)
    ratio: np.ndarray = top + np.log(np.exp(exponents - top[:, None]).mean(1))
    return ratio


def as_markdown(record: Mapping[str, Any]) -> str:
    """Return the table: noise multipliers, noise in the weights, and the simulated δ."""
    rows = []
    for found in record["cells"]:
        sigma, left = found["sigma"], found["left"]
        worst, error = max(found["simulated_delta"].values())
        rows.append(
            [
                f"{found['epsilon']:g}",
                f"{found['steps']}",
                *(f"{sigma[name]:.2f}" for name in ("poisson", "allocation", "banded")),
                f"{left['allocation'][0]:.2f}",
                *(f"{value:.2f}" for value in left["banded"]),
                f"{worst / record['delta']:.2f} ± {error / record['delta']:.2f}",
            ]
        )
    titles = ["ε", "Steps per epoch", "Noise multiplier, Poisson", "random allocation"]
    titles += ["correlated noise", "Noise left by random allocation", "by correlated noise"]
    titles += ["the same, over the run", "δ of random allocation, simulated / asked"]
    return markdown.table(titles, rows)


if __name__ == "__main__":
    main()
