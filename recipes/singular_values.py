"""Singular values of a Vision Transformer's gradients, before and after they are made private.

    python -m recipes.vit_singular_values --config paper --task CIFAR-10 \
        --per_device_train_batch_size 50 --spectrum_path runs/vit_singular_values.json

reproduces the numbers of the left half of the paper's Figure fig:vit-svals: at the first step, the
largest 64 singular values of the gradient of each projected layer, averaged over layers, for
several bounds C and noise multipliers sigma, and without either. Noise fills the spectrum, which is
why a random projection loses no more than one computed by a singular value decomposition. The paper
names no grid for this model: the default is what its authors' code has for OPT-1.3B. Hardware: any;
with ViT-Base, 0.15 GB for each image of a physical batch.

It writes functions of the training data without noise among them: for data that may be seen.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import set_seed

from dp_grape_hf import DPGrapeTrainingArguments, per_sample_gradients
from dp_grape_hf.engine import add_clipped_sum_
from dp_grape_hf.targets import projection_targets
from recipes.experiment import Experiment, Family, parse, recorded
from recipes.vit import FAMILY, TRAINING_NOTE, ViTArguments, load

Sums = dict[str, Tensor]  # weight name -> gradient, (m, n)


@dataclass
class SpectrumArguments(ViTArguments):
    """Which gradients are looked at."""

    bounds: list[float] = field(
        default_factory=lambda: [0.01, 0.1, 1.0, 10.0, 100.0],
        metadata={"help": "The values of C, beside no clipping."},
    )
    noise_multipliers: list[float] = field(
        default_factory=lambda: [0.01, 0.1, 0.5, 1.0, 2.0, 5.0],
        metadata={"help": "The values of sigma at each C, beside no noise."},
    )
    top: int = field(
        default=64, metadata={"help": "How many singular values, from the largest on."}
    )
    spectrum_path: str = field(
        default="runs/vit_singular_values.json", metadata={"help": "The file that is written."}
    )


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Computes what the command line asks for, writes it, and returns it.

    Raises:
        FileExistsError: if the file is there.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    family = Family(FAMILY.name, SpectrumArguments, FAMILY.tasks, load)
    script, args = parse(family, ["--noise_multiplier", "0", *words])  # nothing is trained
    path = Path(script.spectrum_path)
    if path.exists():
        raise FileExistsError(f"{path} exists: move it, or give another --spectrum_path.")
    set_seed(args.seed)
    experiment = load(script, args)
    model = experiment.model.to(args.device).train()
    sums = clipped_sums(model, first_batch(experiment, args), [math.inf, *script.bounds])
    generator = torch.Generator().manual_seed(args.seed)
    spectra = [
        {"C": bound if math.isfinite(bound) else None, "sigma": sigma}
        | mean_spectrum(sums[bound], bound, sigma, args.logical_batch_size, script.top, generator)
        for bound in sums
        for sigma in ([0.0, *script.noise_multipliers] if math.isfinite(bound) else [0.0])
    ]
    result = {
        "script": asdict(script),
        "settings": recorded(args),
        "spectra": spectra,
        "notes": [
            "not private: raw gradients are among these",
            *(note for note in experiment.notes if note != TRAINING_NOTE),
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{path}\n")
    return result


def first_batch(
    experiment: Experiment, args: DPGrapeTrainingArguments
) -> Iterator[dict[str, Tensor]]:
    """Yields the physical batches of one logical batch, of exactly the expected size."""
    generator = torch.Generator().manual_seed(args.seed)
    order = torch.randperm(len(experiment.train), generator=generator)[: args.logical_batch_size]
    for chosen in order.split(args.per_device_train_batch_size):
        batch = experiment.collator([experiment.train[int(i)] for i in chosen])
        yield {name: value.to(args.device) for name, value in batch.items()}


@torch.no_grad()
def clipped_sums(
    model: nn.Module, batches: Iterable[Mapping[str, Tensor]], bounds: Sequence[float]
) -> dict[float, Sums]:
    """Returns the sum of clipped per-sample gradients of the projected weights, for each bound.

    Args:
        model: with the trainable parameters that norms are taken over.
        batches: inputs with labels.
        bounds: the values of C; ``inf`` for no clipping.
    """
    targets = projection_targets(model, {n: p for n, p in model.named_parameters()})
    sums: dict[float, Sums] = {bound: {} for bound in bounds}
    for inputs in batches:
        with torch.enable_grad():
            _, gradients = per_sample_gradients(model, inputs)
        for bound, total in sums.items():
            add_clipped_sum_(total, dict(gradients), bound)
    return {bound: {name: total[name] for name in targets} for bound, total in sums.items()}


def privatised(
    clipped_sum: Tensor, bound: float, sigma: float, size: int, generator: torch.Generator
) -> Tensor:
    """Returns ``(sum + N(0, (sigma C)^2)) / B``, or the plain mean if sigma is zero."""
    if sigma:
        noise = torch.randn(clipped_sum.shape, generator=generator).to(clipped_sum.device)
        clipped_sum = clipped_sum + sigma * bound * noise
    return clipped_sum / size


def singular_values(gradient: Tensor, top: int) -> Tensor:
    """Returns the largest singular values of a matrix, in falling order.

    Raises:
        ValueError: if it has fewer.
    """
    if top > min(gradient.shape):
        raise ValueError(
            f"top={top}: a matrix of {tuple(gradient.shape)} has fewer singular values."
        )
    return torch.linalg.svdvals(gradient)[:top]


def mean_spectrum(
    sums: Sums, bound: float, sigma: float, size: int, top: int, generator: torch.Generator
) -> dict[str, list[float]]:
    """Returns singular values averaged over layers, at one setting."""
    values = [
        singular_values(privatised(clipped, bound, sigma, size, generator), top).cpu()
        for clipped in sums.values()
    ]
    return {"singular_values": [float(f"{v:.6g}") for v in torch.stack(values).mean(0).tolist()]}


if __name__ == "__main__":
    main()
