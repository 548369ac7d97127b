"""Compare the accuracy, time and memory of all methods on the same data, budgets and steps.

    python -m recipes.digits.compare --output_dir runs/compare

``recipes/digits/compare.yaml`` defines the runs, and ``chosen.yaml`` (``--config``) a run without a
search. If a row has a grid of learning rates, the recipe searches it once, at one budget and with
another seed, on a held-out part of the training data. The final runs train on all training data and
are tested once. Epsilon does not cover the search; the recipe prints its number of runs. Each
finished run is a line of ``runs.jsonl``, so you can interrupt and restart the recipe. Hardware: a
CPU core, an hour.
"""

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sklearn.model_selection import train_test_split
from transformers import set_seed

from dp_grape_hf import DPGrapeTrainer
from recipes.common import markdown
from recipes.common.provenance import origin, with_adapter, write
from recipes.common.sweep import Cell, Sweep
from recipes.digits.train import accuracy_of, build_model, load_data
from recipes.paper.methods import PaperArguments
from recipes.paper.sweep import read

CONFIG = Path(__file__).with_name("compare.yaml")
TASK = "digits"
HELD_OUT = 0.2  # share of the training data on which the search scores
LORA_RANK = 16


def main(argv: Sequence[str] | None = None) -> None:
    """Make the missing runs, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", type=Path, default=CONFIG, help="file that defines the runs")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/compare"))
    options = parser.parse_args(argv)
    runs = Digits(read(options.config), options.output_dir)
    for stage in (runs.search, runs.final):
        runs.complete(stage())
    record = summary(runs)
    text = table(record)
    write(options.output_dir / "compare.json", record)
    (options.output_dir / "compare.md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)


# ---- Runs ----


class Digits(Sweep):
    """The runs of a file such as ``compare.yaml``, in this process."""

    def run(self, cell: Cell) -> dict[str, Any]:
        """Train once; return accuracy, epsilon spent, seconds and bytes."""
        options, seed = dict(cell.settings), cell.seed
        held_out = options.pop("held_out", False)
        examples, scored = load_data()
        if held_out:
            examples, scored = train_test_split(examples, test_size=HELD_OUT, random_state=seed)
        set_seed(seed)
        model = with_adapter(build_model(), options["method"], LORA_RANK, head=["classifier"])
        with tempfile.TemporaryDirectory() as folder:
            options |= {"target_epsilon": cell.epsilon, "seed": seed, "projection_seed": seed}
            args = PaperArguments(**options, output_dir=folder)
            trainer = DPGrapeTrainer(model, args, train_dataset=examples)
            start = time.process_time()  # processor time, as several runs share the machine
            trainer.train()
            seconds = time.process_time() - start
        spent = trainer.privacy_spent()
        run = trainer.private_run
        shapes = run.per_sample.released_shapes(run.projectors_at(0))
        accuracy = accuracy_of(trainer.model, scored)
        return {
            "metrics": {"dev" if held_out else "test": {"accuracy": accuracy}},
            "epsilon": None if math.isinf(spent.epsilon) else spent.epsilon,
            "seconds": seconds,
            "release_bytes": 4 * sum(math.prod(shape) for shape in shapes.values()),
            "state_bytes": trainer.optimizer.optimizer.state_bytes(),
        }


# ---- Rendering ----


def summary(runs: Digits) -> dict[str, Any]:
    """Return means and standard errors over the seeds, by row and budget."""
    found: dict[str, list[dict[str, Any]]] = {}
    for cell in runs.final():
        found.setdefault(cell.row, []).append(runs.result(cell))
    rows = {
        name: {
            "learning_rate": row["settings"].get("learning_rate"),
            "seconds": statistics.median(result["seconds"] for result in found[name]),
            "release_bytes": found[name][0]["release_bytes"],
            "state_bytes": found[name][0]["state_bytes"],
            "accuracy": {budget: score[:2] for budget, score in row["scores"].items()},
        }
        for name, row in runs.summary()["tasks"][TASK].items()
    }
    return {
        **origin(),
        "config": runs.config,
        "runs": {"search": len(list(runs.search())), "final": sum(map(len, found.values()))},
        "rows": rows,
    }


def table(record: Mapping[str, Any]) -> str:
    """Return the comparison as a table in Markdown, with a caption."""
    config = record["config"]
    budgets = [f"{epsilon:g}" for epsilon in config["final"]["epsilons"]] + ["inf"]
    titles = [f"ε = {b}".replace("inf", "∞") for b in budgets]
    rows = []
    for name, row in record["rows"].items():
        rate = row["learning_rate"]
        rows.append(
            [
                name,
                "chosen" if rate is None else f"{rate:g}",
                *(_accuracy_text(row["accuracy"].get(budget)) for budget in budgets),
                *(f"{row[kind] / 1024:.1f} KiB" for kind in ("release_bytes", "state_bytes")),
                f"{row['seconds']:.1f}",
            ]
        )
    shared, runs, seeds = config["arguments"], record["runs"], config["final"]["seeds"]
    head = ["Method", "Learning rate", *titles, "Release", "State", "Seconds"]
    return (
        f"{markdown.table(head, rows)}\n"
        f"Test accuracy in percent, mean and standard error over {len(seeds)} seeds; "
        f"{_length(shared)}, δ = {shared['target_delta']:g}. Release: numbers that "
        "noise is added to. State: the optimizer's. Seconds: of a processor, median of the "
        f"runs. The search cost {runs['search']} runs at ε = {config['search']['epsilon']:g} "
        "on held-out training data, which no ε here covers; the final ones are "
        f"{runs['final']}. {record['date']}, torch {record['versions']['torch']}.\n"
    )


def _accuracy_text(found: Sequence[float | None] | None) -> str:
    """Return a mean and its error in percent, if there are any."""
    return " ± ".join(f"{100 * value:.1f}" for value in found or () if value is not None)


def _length(shared: dict[str, Any]) -> str:
    if "max_steps" not in shared:
        return f"{shared['num_train_epochs']} passes"
    size, rank = shared["expected_batch_size"], shared["projection_rank"]
    return f"{shared['max_steps']} steps, expected batch {size}, r = {rank}"


if __name__ == "__main__":
    main()
