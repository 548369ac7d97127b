"""Vision Transformers on MNIST, CIFAR-10 and CIFAR-100: the paper's pre-training and fine-tuning.

    accelerate launch -m recipes.paper.vit --task CIFAR-10 --method dp_grape --target_epsilon 8 \\
        --save_model --output_dir runs/vit

runs ViT-Base from scratch for 60 epochs, and ``--task CIFAR-10-fine-tune`` from a checkpoint of
ImageNet for 20 (Tables tab:vit-full-results and tab:vit-full-results-finetuning).

The paper reports the best test accuracy during training. Here the last weights count. A ``curve``
in the result shows the accuracy that a choice on test data would give. ``--held_out`` trains on
four fifths of the training data and scores the rest, for a search; the test data are not looked at.
The images that are scored count as public: no epsilon covers them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.utils.data import Subset, random_split
from transformers import AutoConfig, AutoModelForImageClassification, ViTConfig, ViTImageProcessor
from transformers.hf_argparser import HfArg

from dp_grape_hf import DPGrapeTrainingArguments
from recipes.paper.experiment import (
    Experiment,
    ExperimentArguments,
    Family,
    accuracy,
    in_adapter,
    main,
)
from recipes.paper.images import Batches, Images, Source, load_images

HELD_OUT = 0.2
PIXEL_MEAN, PIXEL_STD = 0.5, 0.5  # of pixels in [0, 1]; of the model, and not of private images
FINE_TUNE = "-fine-tune"
"""Ends the names of tasks whose preset starts from a checkpoint."""

_DATA = yaml.safe_load(Path(__file__).with_name("vit_tasks.yaml").read_text(encoding="utf-8"))
SOURCES = {name: Source(**source) for name, source in _DATA["sources"].items()}
SIZES: Mapping[str, Mapping[str, int]] = _DATA["sizes"]
"""Built-in sizes, for ``--from_scratch`` without a configuration from the Hub."""
_SHAPE = (
    *("image_size", "patch_size", "num_channels", "hidden_size", "num_hidden_layers"),
    *("num_attention_heads", "initializer_range"),
)


@dataclass
class ViTArguments(ExperimentArguments):
    """The transformer and the images that it is trained on."""

    from_scratch: bool = HfArg(
        default=False,
        help="Train from random weights: --model_name_or_path then names a configuration, "
        f"of the Hub, in a folder, or one of {', '.join(SIZES)}.",
    )
    image_size: int | None = HfArg(
        default=None, help="Images are resized to this. Default: the configuration's."
    )
    patch_size: int | None = HfArg(default=None, help="Pixels along a patch, from scratch.")
    num_channels: int | None = HfArg(
        default=None, help="1 or 3, from scratch; grey images fill all of them."
    )
    hidden_size: int | None = HfArg(
        default=None, help="Width, from scratch; the MLPs are four times as wide."
    )
    num_hidden_layers: int | None = HfArg(default=None, help="Layers, from scratch.")
    num_attention_heads: int | None = HfArg(default=None, help="Heads, from scratch.")
    initializer_range: float | None = HfArg(
        default=None,
        help="Standard deviation of the first weights, from scratch. Few and noisy steps "
        "want it near 1/sqrt(hidden_size).",
    )
    freeze_embeddings: bool = HfArg(
        default=False,
        help="Leave the class token and the position table as they are at the start, as the "
        "paper's authors' code does.",
    )
    train_examples: int | None = HfArg(
        default=None, help="Train on so many images, drawn by the seed. Default: all of them."
    )
    held_out: bool = HfArg(
        default=False, help="Hold a fifth of the training data out and score it, not the test data."
    )
    split_seed: int = HfArg(default=42, help="Of the fifth that is held out.")


# ---- The experiment ----


def load(script: ViTArguments, args: DPGrapeTrainingArguments) -> Experiment:
    """Returns a task with its model; exactly one split is scored, and the curve is of it."""
    if script.from_scratch and script.task.endswith(FINE_TUNE):
        raise ValueError(
            f"task={script.task!r} starts from a checkpoint. Give --from_scratch False and "
            f"--model_name_or_path, or the task {script.task.removesuffix(FINE_TUNE)!r}."
        )
    source = SOURCES[script.task.removesuffix(FINE_TUNE)]
    data = load_images(source, script.dataset_path)
    split, train, scored = "test", data["train"], data["test"]
    if script.held_out:
        generator = torch.Generator().manual_seed(script.split_seed)
        parts = random_split(train, [1 - HELD_OUT, HELD_OUT], generator)
        split, (train, scored) = "dev", parts
    if script.train_examples is not None:
        train = drawn(train, script.train_examples, args.seed)
    model = build_model(script, source.classes)
    config = model.config
    batches = Batches(config.image_size, config.num_channels, PIXEL_MEAN, PIXEL_STD)
    return Experiment(
        model=in_adapter(model, script, args, ["classifier"]),
        train=train,
        collator=batches,
        score=lambda model, _: {
            "accuracy": accuracy(model, scored, batches, args.per_device_eval_batch_size)
        },
        splits={split: len(scored)},
        tokenizer=processor_of(batches),
        notes=[
            f"{name}: images were stored as JPEG, which changes them a little"
            for name, images in data.items()
            if images.lossy
        ],
    )


def processor_of(batches: Batches) -> ViTImageProcessor:
    """Return a processor of transformers that makes of an image what ``batches`` does."""
    return ViTImageProcessor(
        size={"height": batches.size, "width": batches.size},
        image_mean=[batches.mean] * batches.channels,
        image_std=[batches.std] * batches.channels,
        do_convert_rgb=batches.channels == 3,
    )


def drawn(data: Images | Subset[Any], number: int, seed: int) -> Subset[Any]:
    """Returns so many examples of a data set, in a random order."""
    if not 0 < number <= len(data):
        raise ValueError(f"train_examples={number} must be from 1 to {len(data)}.")
    generator = torch.Generator().manual_seed(seed)
    return random_split(data, [number, len(data) - number], generator)[0]


def build_model(script: ViTArguments, classes: int) -> Any:
    """Returns the transformer with a head for so many classes."""
    name = script.model_name_or_path
    shape = {key: getattr(script, key) for key in _SHAPE if getattr(script, key) is not None}
    if script.from_scratch:
        built_in = name in SIZES and not Path(name).exists()
        shape = {**SIZES[name], **shape} if built_in else shape
        if "hidden_size" in shape:
            shape["intermediate_size"] = 4 * shape["hidden_size"]
        shape["num_labels"] = classes
        config = ViTConfig(**shape) if built_in else AutoConfig.from_pretrained(name, **shape)
        model = AutoModelForImageClassification.from_config(config)
    elif shape:
        options = ", ".join(f"{key}={value!r}" for key, value in shape.items())
        raise ValueError(
            f"{options}: the shape of model_name_or_path={name!r} is that of its checkpoint. "
            "Leave these out, or train --from_scratch."
        )
    else:
        model = AutoModelForImageClassification.from_pretrained(
            name, num_labels=classes, ignore_mismatched_sizes=True
        )
    if script.freeze_embeddings:
        embeddings = model.base_model.embeddings
        for table in (embeddings.cls_token, embeddings.position_embeddings):
            table.requires_grad_(False)
    return model


TASKS = (*SOURCES, f"CIFAR-10{FINE_TUNE}", f"CIFAR-100{FINE_TUNE}")
FAMILY = Family("vit", ViTArguments, TASKS, load)

if __name__ == "__main__":
    main(FAMILY)
