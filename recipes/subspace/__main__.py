"""Measure the share of per-sample gradient energy that r input directions keep, for several P.

    python -m recipes.subspace --family roberta --task TREC --public_dataset stanfordnlp/sst2

The recipe compares P of rank 4, 16 and 64 for every projected layer of a model:

* principal directions of the layer's input activations, on synthetic inputs (as
  ``projection="principal"``), on public data, or on the data themselves;
* singular vectors of the weights, and random directions;
* the best P of this rank, as a bound.

Model, task and data are those of a recipe of the paper. The first ``--expected_batch_size``
examples of a random order are measured, ``--per_device_train_batch_size`` at a time. The recipe
computes the full gradient of every example once, and stores an n x n matrix for each layer.
all-MiniLM-L6-v2 takes two minutes of one processor, SmolLM2-135M ten.

The results are functions of the data without noise. Use only public data.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from transformers.hf_argparser import HfArg
from transformers.utils import logging

from dp_grape_hf.gradients import Inputs
from dp_grape_hf.projections import Batches, synthetic_batches
from recipes.common.provenance import origin, write
from recipes.paper.experiment import first_batch, loaded
from recipes.subspace.energies import DATA, PUBLIC, SYNTHETIC, measure
from recipes.subspace.rendering import as_markdown, draw, read_results

FIGURE = "subspace.png"


@dataclass
class SubspaceArguments:
    """What is measured, and where it is written; beside the arguments of a recipe."""

    ranks: list[int] = field(default_factory=lambda: [4, 16, 64], metadata={"help": "Values of r."})
    measured_dir: str = HfArg(
        default="runs/subspace", help="Folder of the record and of the figure."
    )


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, write the record into the folder, and draw all records of the folder."""
    start = time.process_time()
    script, args, experiment = loaded(SubspaceArguments, argv)
    model = experiment.model
    data = list(first_batch(experiment, args, experiment.train))
    inputs: dict[str, Batches] = {
        SYNTHETIC: partial(synthetic_batches, model, experiment.tokenizer, args.seed),
        DATA: partial(map, inputs_alone, data),
    }
    if experiment.public is not None:
        public = list(first_batch(experiment, args, experiment.public))
        inputs[PUBLIC] = partial(map, inputs_alone, public)
    record = {
        "model": Path(script.model_name_or_path).name,
        "data": script.task,
        "public": script.public_dataset and Path(script.public_dataset).name,
        "samples": args.expected_batch_size,
        "seed": args.seed,
        **measure(model, data, script.ranks, inputs, args.seed, experiment.loss),
        "cpu_seconds": round(time.process_time() - start),
        **origin(),
    }
    folder = Path(script.measured_dir)
    write(folder / f"{record['model']}-{record['data']}.json", record)
    draw(read_results(folder)).savefig(folder / FIGURE, dpi=130)
    sys.stdout.write(as_markdown([record]))
    return record


def inputs_alone(batch: Inputs) -> Inputs:
    """Return a batch without labels and answers; the options of a question are rows."""
    inputs = {name: x for name, x in batch.items() if name not in ("labels", "answers")}
    return {n: x.flatten(0, 1) for n, x in inputs.items()} if "answers" in batch else inputs


if __name__ == "__main__":
    logging.set_verbosity_error()
    main()
