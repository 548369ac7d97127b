"""The share of per-sample gradient energy that r input directions keep, for several P.

    python -m recipes.subspace --model_name_or_path FacebookAI/roberta-large \\
        --dataset_path CogComp/trec --label_column coarse_label --output_dir runs/subspace

For every projected layer of a model: how much of its per-sample gradients lies in the first 4, 16
and 64 principal directions of what the layer is given when the model reads synthetic inputs (as
``projection="principal"`` does), public data or the data themselves, in as many singular vectors of
the weights, and in as many random directions; and the most that any P of that rank could keep.

Tasks: ``classification`` of texts, with a new head; ``mean``, the same with the head on the mean
over positions, for sentence encoders; ``causal_lm``, a text's own tokens; ``images``, with a new
head. One pass over the gradients, which are formed for every sample, and an n x n matrix for each
layer: all-MiniLM-L6-v2 takes two minutes of one processor, SmolLM2-135M ten.

What it writes are functions of the data without noise: for data that may be seen.
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
from recipes.paper.images import Batches as ImageBatches
from recipes.paper.images import Source, load_images
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
    """Measures, writes the record beside those of the folder, and draws all of them."""
    options = parse(argv)
    set_seed(options.seed)
    record = run(options)
    folder: Path = options.output_dir
    write(folder / f"{record['model']}-{record['data']}.json", record)
    draw(read_results(folder)).savefig(folder / FIGURE, dpi=130)
    sys.stdout.write(as_markdown([record]))
    return record


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model_name_or_path", required=True, help="a model of transformers")
    add("--task", choices=MODELS, default=CLASSIFICATION)
    add("--dataset_path", required=True, help="as in recipes.paper: a folder, or a name on the Hub")
    add("--public_dataset", help="likewise: public data of the same form, which P is measured on")
    add("--split", default="train")
    add("--text_column", help="default: the first that holds texts")
    add("--label_column", default="label")
    add("--samples", type=int, default=64, help="whose gradients are measured")
    add("--batch_size", type=int, default=8, help="how many of them at one time")
    add("--max_length", type=int, default=128, help="the most tokens of a text")
    add("--ranks", type=int, nargs="+", default=[4, 16, 64])
    add("--seed", type=int, default=0, help="of the samples, a new head and the random directions")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--output_dir", type=Path, default=Path("runs/subspace"))
    return parser.parse_args(argv)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Returns what was measured, and where it comes from."""
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
    """Returns some examples of a data set, drawn at random.

    Raises:
        ValueError: if it has no column of texts, or none of labels where they are needed.
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
    """Yields physical batches, with labels, on the device."""
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
    """Returns what a model reads."""
    return {name: value for name, value in inputs.items() if name != "labels"}


if __name__ == "__main__":
    logging.set_verbosity_error()
    main()
