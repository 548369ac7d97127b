"""A small Vision Transformer trained privately, from scratch, on handwritten digits.

    accelerate launch -m recipes.digits --output_dir runs/digits

The data are the 1,797 real images of 8 x 8 pixels that scikit-learn bundles; nothing is downloaded.
Hardware: one CPU core, ten seconds. Expected: test accuracy of 92 % (ten runs: 88.9 to 93.6 %) at
epsilon 8 and delta 1e-5. ``recipes/digits/config.yaml`` has the defaults. You can pass every option
of ``DPGrapeTrainingArguments`` on the command line.

The test images count as public: epsilon does not cover them.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification, default_data_collator, set_seed

from dp_grape_hf import DPGrapeTrainer, DPGrapeTrainingArguments
from dp_grape_hf.tables import table
from recipes.common.provenance import parsed, recorded, spent_as_json, versions, write
from recipes.paper.methods import PaperArguments

CONFIG = Path(__file__).with_name("config.yaml")
FLOAT = 4  # bytes of a float32 number

Example = dict[str, Tensor]


def main(args: DPGrapeTrainingArguments) -> dict[str, Any]:
    """Train, save, load back and report; return the content of ``results.json``."""
    set_seed(args.seed)  # the initial weights; sampling and noise have no seed
    train, test = load_data()
    trainer = DPGrapeTrainer(build_model(), args, train_dataset=train)
    start = time.perf_counter()
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    seconds = time.perf_counter() - start
    trainer.save_model()
    accuracy = accuracy_of(trainer.model, test)  # in all processes, as weights may be sharded
    if not trainer.is_world_process_zero():
        return {}
    loaded = ViTForImageClassification.from_pretrained(args.output_dir).to(args.device)
    if accuracy_of(loaded, test) != accuracy:
        raise RuntimeError(
            f"The checkpoint in {args.output_dir} is not the model that was trained."
        )
    results = {
        "task": "digits",
        "metric": {"name": "test accuracy", "value": accuracy, "examples": len(test)},
        "privacy": spent_as_json(trainer.privacy_spent()),
        "seconds": round(seconds, 2),
        "parameters": sum(p.numel() for p in loaded.parameters()),
        "state_bytes": trainer.optimizer.optimizer.state_bytes(),
        "settings": recorded(trainer.args),
        "versions": versions(),
        "checkpoint": args.output_dir,
    }
    write(Path(args.output_dir) / "results.json", results)
    sys.stdout.write(report(results))
    return results


# ---- Model and data ----


def build_model() -> ViTForImageClassification:
    """Return an untrained transformer that splits an image into four patches of 4 x 4 pixels."""
    config = ViTConfig(
        image_size=8,
        patch_size=4,
        num_channels=1,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        # Near 1/sqrt(hidden_size). From the usual 0.02, a hundred noisy steps do not learn enough.
        initializer_range=0.1,
        id2label={digit: str(digit) for digit in range(10)},
        label2id={str(digit): digit for digit in range(10)},
    )
    return ViTForImageClassification(config)


def load_data() -> tuple[list[Example], list[Example]]:
    """Return training and test examples, 80/20, with pixels in [-1, 1]."""
    digits = load_digits()
    # The largest grey value, 16, is a property of the format, and not computed from the images.
    pixels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1  # (N, 1, 8, 8)
    labels = torch.tensor(digits.target)
    examples = [
        {"pixel_values": image, "labels": label}
        for image, label in zip(pixels, labels, strict=True)
    ]
    train, test = train_test_split(examples, test_size=0.2, random_state=0)
    return train, test


@torch.no_grad()
def accuracy_of(model: nn.Module, examples: Sequence[Example]) -> float:
    """Return the accuracy of the model on the examples, as a share."""
    batch = default_data_collator(list(examples))
    device = next(model.parameters()).device
    logits = model.eval()(pixel_values=batch["pixel_values"].to(device)).logits
    return int((logits.argmax(-1).cpu() == batch["labels"]).sum()) / len(examples)


# ---- Reporting ----


def report(results: Mapping[str, Any]) -> str:
    """Return a table of the results, and code that loads the checkpoint, as text."""
    spent, folder = results["privacy"], results["checkpoint"]
    rate, batch = spent["sample_rate"], spent["expected_batch_size"]
    rows = {
        "test accuracy": f"{results['metric']['value']:.1%} of {results['metric']['examples']}",
        "epsilon spent": f"{spent['epsilon']:.4g} at delta {spent['delta'] or 0:g}",
        "noise multiplier": f"{spent['noise_multiplier']:.4g}",
        "sampling rate q": f"{rate:.4g}, on average {batch:g} of {batch / rate:.0f} images a step",
        "steps": f"{spent['steps']}",
        "seconds": f"{results['seconds']:.1f}",
        "optimizer state": f"{results['state_bytes'] / 1024:.1f} KiB, of Adam "
        f"{2 * FLOAT * results['parameters'] / 1024:.1f} KiB",
    }
    return f"""
{table(rows.items())}
Saved in {folder}: weights, config, privacy_ledger.json, README.md (the model card)
and results.json. Loaded back, the model has the same accuracy:

    from transformers import ViTForImageClassification
    model = ViTForImageClassification.from_pretrained("{folder}")
"""


# ---- The command line ----


def parse(argv: Sequence[str] | None = None) -> DPGrapeTrainingArguments:
    """Return the arguments of ``main``: command line over ``--config`` over defaults."""
    (args,) = parsed(argv, CONFIG, PaperArguments)
    return args
