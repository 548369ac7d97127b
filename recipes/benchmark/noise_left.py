"""What correlated noise leaves in the weights, beside independent noise: predicted, and measured.

    python -m recipes.benchmark.noise_left --json recipes/benchmark/results/noise_left.json

A layer of 80,000 weights is trained by ``Run.step`` on empty draws, so that noise is all that moves
it: by momentum, at a rate that falls to 0 in a straight line. The root mean square of the final
weights with correlated noise is divided by that with independent noise of the same epsilon, at
delta 1e-5. Takes two minutes of a CPU core.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import get_scheduler

from dp_grape_hf import DPGrapeTrainingArguments
from dp_grape_hf.accounting import noise_left, what_arrives
from dp_grape_hf.arguments import PrivacyPlan, schedule_of
from dp_grape_hf.ledger import Ledger
from dp_grape_hf.mechanism import LogicalBatch
from dp_grape_hf.trainer import Run
from recipes.common.markdown import table
from recipes.common.provenance import write

BUDGETS = ((1024, 64, 200), (2644, 256, 100), (50_000, 1024, 2000))  # N, B, T
EPSILONS = (2.0, 6.0, 8.0)
NOISES = ("independent", "banded")
MOMENTUM = 0.9  # of the rule


def final_noise(
    noise: str, epsilon: float, size: int, batch: int, steps: int, folder: str
) -> dict[str, float]:
    """Returns the number of bands, and the root mean square of the weights, predicted and found."""
    model = nn.Linear(400, 200, bias=False)
    nn.init.zeros_(model.weight)
    args = DPGrapeTrainingArguments(
        output_dir=folder,
        noise=noise,
        target_epsilon=epsilon,
        target_delta=1e-5,
        expected_batch_size=batch,
        max_steps=steps,
        method="dp_adam",
        update_rule="momentum",
        learning_rate=1.0,
        use_cpu=True,
        report_to="none",
    )
    plan = PrivacyPlan(args, size)
    run = Run(args, model, lambda outputs, labels: outputs.sum(1))
    run.start(Ledger.start(plan.mechanism), torch.Generator().manual_seed(0))
    optimizer = run.make_optimizer()
    scheduler = get_scheduler("linear", optimizer, 0, steps)
    for number in range(steps):
        run.step(number, LogicalBatch([], []))
        optimizer.step()
        scheduler.step()
    mechanism = plan.mechanism
    left = noise_left(mechanism.bands, what_arrives(schedule_of(args, steps), MOMENTUM))
    weights: Tensor = model.weight.detach()
    return {
        "bands": len(mechanism.bands),
        "predicted": mechanism.noise_multiplier * mechanism.max_grad_norm * left / batch,
        "measured": float(weights.square().mean().sqrt()),
    }


def as_markdown(records: Sequence[dict[str, Any]]) -> str:
    """Returns the ratios of correlated to independent noise as a table in Markdown."""
    rows = []
    for record in records:
        plain, banded = (record[noise] for noise in NOISES)
        ratios = [f"{banded[of] / plain[of]:.3f}" for of in ("predicted", "measured")]
        budget = f"{record['N']:,}, {record['B']:,}, {record['T']:,}"
        rows.append([budget, f"{record['epsilon']:g}", f"{banded['bands']}", *ratios])
    return table(["N, B, T", "ε", "b", "left, predicted", "measured"], rows)


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Measures, prints the table, and returns what ``--json`` writes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the results to this file as well")
    options = parser.parse_args(argv)
    cells = [(*budget, epsilon) for budget in BUDGETS for epsilon in EPSILONS]
    records = []
    with tempfile.TemporaryDirectory() as folder:
        for size, batch, steps, epsilon in tqdm(cells, desc="budgets", disable=None):
            found = {
                noise: final_noise(noise, epsilon, size, batch, steps, folder) for noise in NOISES
            }
            records.append({"N": size, "B": batch, "T": steps, "epsilon": epsilon, **found})
    sys.stdout.write(as_markdown(records))
    if options.json is not None:
        write(options.json, records)
    return records


if __name__ == "__main__":
    main()
