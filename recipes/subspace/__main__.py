"""Measure the share of per-sample gradient energy that r input directions keep, for several P.

    python -m recipes.subspace --model_name_or_path FacebookAI/roberta-large \\
        --dataset_path CogComp/trec --label_column coarse_label --output_dir runs/subspace

The recipe compares P of rank 4, 16 and 64 for every projected layer of a model:

* principal directions of the layer's input activations, on synthetic inputs (as
  ``projection="principal"``), on public data, or on the data themselves;
* singular vectors of the weights, and random directions;
* the best P of this rank, as a bound.

Tasks: ``classification`` of texts, with a new head; ``mean``, the same with the head on the mean
over positions, for sentence encoders; ``causal_lm``, the tokens of a text; ``images``, with a new
head. The recipe computes the full gradient of every sample once, and stores an n x n matrix for
each layer. all-MiniLM-L6-v2 takes two minutes of one processor, SmolLM2-135M ten.

The results are functions of the data without noise. Use only public data.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, Value
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    set_seed,
)
from transformers.utils import logging

from dp_grape_hf.gradients import IGNORE_INDEX, Inputs
from dp_grape_hf.projections import Batches, synthetic_batches
from recipes.common.provenance import origin, write
from recipes.paper.data import load_split
from recipes.paper.images import Batches as ImageBatches, Source, load_images
from recipes.paper.roberta import cross_entropy
from recipes.paper.roberta_prompts import read_the_mean
from recipes.subspace.energies import DATA, PUBLIC, SYNTHETIC, measure
from recipes.subspace.rendering import as_markdown, draw, read_results

CLASSIFICATION, MEAN, CAUSAL_LM, IMAGES = "classification", "mean", "causal_lm", "images"
MODELS: Mapping[str, Any] = {
    CLASSIFICATION: AutoModelForSequenceClassification,
    MEAN: AutoModelForSequenceClassification,
    CAUSAL_LM: AutoModelForCausalLM,
    IMAGES: AutoModelForImageClassification,
}
FIGURE = "subspace.png"
PIXEL_MEAN, PIXEL_STD = 0.5, 0.5  # of pixels in [0, 1], as in recipes.paper.vit

Examples = Sequence[tuple[Any, int]]
"""Texts or images, each with its label."""


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, write the record into the folder, and draw all records of the folder."""
    options = parse(argv)
    set_seed(options.seed)
    record = run(options)
    folder: Path = options.output_dir
    write(folder / f"{record['model']}-{record['data']}.json", record)
    draw(read_results(folder)).savefig(folder / FIGURE, dpi=130)
    sys.stdout.write(as_markdown([record]))
    return record


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model_name_or_path", required=True, help="a model of transformers")
    add("--task", choices=MODELS, default=CLASSIFICATION)
    add("--dataset_path", required=True, help="as in recipes.paper: a folder, or a name on the Hub")
    add("--public_dataset", help="public data of the same form, on which P is computed")
    add("--split", default="train")
    add("--text_column", help="default: the first column of texts")
    add("--label_column", default="label")
    add("--samples", type=int, default=64, help="number of samples")
    add("--batch_size", type=int, default=8, help="samples in memory at a time")
    add("--max_length", type=int, default=128, help="largest number of tokens of a text")
    add("--ranks", type=int, nargs="+", default=[4, 16, 64])
    add("--seed", type=int, default=0, help="seed of samples, new head and random directions")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--output_dir", type=Path, default=Path("runs/subspace"))
    return parser.parse_args(argv)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return the shares, with settings and provenance."""
    name, start = options.model_name_or_path, time.process_time()
    examples = load(options, options.dataset_path)
    config = AutoConfig.from_pretrained(name)
    tokenizer = None if options.task == IMAGES else AutoTokenizer.from_pretrained(name)
    if tokenizer is not None and tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    classes = {} if options.task == CAUSAL_LM else {"num_labels": 1 + max(y for _, y in examples)}
    model = MODELS[options.task].from_pretrained(
        name, dtype=torch.float32, ignore_mismatched_sizes=True, **classes
    )
    if options.task == MEAN:
        model = read_the_mean(model, model.config.num_labels)
    model = model.to(options.device)
    encode = partial(batches_of, config=config, tokenizer=tokenizer, options=options)
    data = list(encode(examples))
    inputs: dict[str, Batches] = {
        SYNTHETIC: partial(synthetic_batches, model, tokenizer, options.seed),
        DATA: partial(map, without_labels, data),
    }
    if options.public_dataset is not None:
        public = list(encode(load(options, options.public_dataset)))
        inputs[PUBLIC] = partial(map, without_labels, public)
    loss = cross_entropy if options.task == MEAN else None
    measured = measure(model, data, options.ranks, inputs, options.seed, loss)
    return {
        "model": Path(name).name,
        "data": Path(options.dataset_path).name,
        "public": options.public_dataset and Path(options.public_dataset).name,
        **{key: getattr(options, key) for key in ("task", "samples", "max_length", "seed")},
        **measured,
        "cpu_seconds": round(time.process_time() - start),
        **origin(),
    }


# ---- Data ----


def load(options: argparse.Namespace, path: str) -> Examples:
    """Return random examples of a data set.

    Raises:
        ValueError: if it has no column of texts, or no column of labels and needs one.
    """
    generator = torch.Generator().manual_seed(options.seed)
    if options.task == IMAGES:
        source = Source(path, "image", options.label_column, sys.maxsize)
        images = load_images(source, path)[options.split]
        chosen = torch.randperm(len(images), generator=generator)[: options.samples].tolist()
        return [(images.pixels[i], int(images.labels[i])) for i in chosen]
    rows: Dataset = load_split(options.split, path, path)
    column, label = options.text_column, options.label_column
    texts = [name for name, feature in rows.features.items() if feature == Value("string")]
    column = column or next(iter(texts), None)
    labelled = options.task != CAUSAL_LM and path == options.dataset_path
    for needed in [column, *([label] if labelled else [])]:
        if needed not in rows.features:
            raise ValueError(
                f"{path} has no column {needed!r} in {sorted(rows.features)}: give --text_column "
                "or --label_column."
            )
    chosen = torch.randperm(len(rows), generator=generator)[: options.samples].tolist()
    return [(rows[i][column], rows[i][label] if labelled else 0) for i in chosen]


def batches_of(
    examples: Examples, config: Any, tokenizer: Any, options: argparse.Namespace
) -> Iterator[Inputs]:
    """Yield physical batches, with labels, on the device."""
    for start in range(0, len(examples), options.batch_size):
        contents, labels = zip(*examples[start : start + options.batch_size], strict=True)
        if options.task == IMAGES:
            collate = ImageBatches(config.image_size, config.num_channels, PIXEL_MEAN, PIXEL_STD)
            batch = collate(
                [
                    {"pixel_values": pixels, "labels": torch.tensor(label)}
                    for pixels, label in zip(contents, labels, strict=True)
                ]
            )
        else:
            batch = dict(
                tokenizer(
                    list(contents),
                    truncation=True,
                    max_length=options.max_length,
                    padding=True,
                    padding_side="right",
                    return_tensors="pt",
                )
            )
            batch["labels"] = torch.tensor(labels)
            if options.task == CAUSAL_LM:
                counted = batch["attention_mask"].bool()
                batch["labels"] = batch["input_ids"].masked_fill(~counted, IGNORE_INDEX)
        yield {name: value.to(options.device) for name, value in batch.items()}


def without_labels(inputs: Inputs) -> Inputs:
    """Return the inputs without labels."""
    return {name: value for name, value in inputs.items() if name != "labels"}


if __name__ == "__main__":
    logging.set_verbosity_error()
    main()
