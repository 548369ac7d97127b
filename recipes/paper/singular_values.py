"""Singular values of a model's gradients, before and after they are made private.

    python -m recipes.paper.singular_values --family vit --config paper --task CIFAR-10 \\
        --per_device_train_batch_size 50
    python -m recipes.paper.singular_values --family opt --config paper --task SST2 \\
        --model_name_or_path facebook/opt-1.3b --expected_batch_size 500

reproduce the numbers of the two halves of the paper's Figure fig:vit-svals: at the first step, the
largest 64 singular values of the gradient of each projected layer, averaged over layers, for
several bounds C and noise multipliers sigma, and without either. The paper names neither its grids
nor OPT's batch: the defaults, and 500, are what its authors' code has for OPT-1.3B.

It writes functions of the training data without noise among them: for data that may be seen.
"""

import argparse
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, make_dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import set_seed
from transformers.hf_argparser import HfArg

from dp_grape_hf import DPGrapeTrainingArguments, per_sample_gradients
from dp_grape_hf.gradients import LossFunction
from dp_grape_hf.mechanism import add_clipped_sum_
from dp_grape_hf.projections import projection_targets
from recipes.common.provenance import origin, recorded, write
from recipes.paper.experiment import Experiment, freeze, parse

WHOLE = ("--method", "dp_adam", "--noise_multiplier", "0")
"""Gradients that nothing is projected of. The command line has precedence."""
Sums = dict[str, Tensor]  # weight name -> gradient, (m, n)


@dataclass
class SpectrumArguments:
    """The gradients to decompose, in addition to the arguments of a recipe."""

    bounds: list[float] = field(
        default_factory=lambda: [0.01, 0.1, 1.0, 10.0, 100.0],
        metadata={"help": "The values of C, beside no clipping."},
    )
    noise_multipliers: list[float] = field(
        default_factory=lambda: [0.01, 0.1, 0.5, 1.0, 2.0, 5.0],
        metadata={"help": "The values of sigma at each C, beside no noise."},
    )
    top: int = HfArg(default=64, help="How many singular values, from the largest on.")
    spectrum_path: str | None = HfArg(
        default=None, help="The file. Default: in runs, by model and task."
    )


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Compute what the command line asks for, write it, and return it."""
    script, args, experiment = loaded(argv)
    bounds, batches = [math.inf, *script.bounds], first_batch(experiment, args)
    sums = clipped_sums(experiment.model, batches, bounds, experiment.loss)
    generator, size = torch.Generator(args.device).manual_seed(args.seed), args.logical_batch_size
    spectra = []
    for bound, total in sums.items():
        for sigma in [0.0, *script.noise_multipliers] if math.isfinite(bound) else [0.0]:
            released = [privatised(g, bound, sigma, size, generator) for g in total.values()]
            setting = {"C": bound if math.isfinite(bound) else None, "sigma": sigma}
            spectra.append(setting | {"singular_values": mean_spectrum(released, script.top)})
    result = {
        "script": asdict(script),
        "settings": recorded(args),
        "spectra": spectra,
        **origin(),
        "notes": ["not private: raw gradients are among these", *experiment.notes],
    }
    name = f"{Path(script.model_name_or_path).name}-{script.task}"
    path = Path(script.spectrum_path or f"runs/singular_values-{name}.json")
    write(path, result)
    sys.stdout.write(f"{path}\n")
    return result


def loaded(argv: Sequence[str] | None) -> tuple[Any, DPGrapeTrainingArguments, Experiment]:
    """Load the experiment of a command line of a recipe, with ``--family`` before it."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--family", choices=("roberta", "opt", "vit"), required=True)
    chosen, words = first.parse_known_args(argv)
    known = import_module(f"recipes.paper.{chosen.family}").FAMILY
    both = make_dataclass("Arguments", [], bases=(SpectrumArguments, known.script))
    script, args = parse(replace(known, script=both), [*WHOLE, *words])
    set_seed(args.seed)
    experiment = known.load(script, args)
    freeze(experiment.model, script.frozen)
    experiment.model.to(args.device).train()
    return script, args, experiment


def first_batch(
    experiment: Experiment, args: DPGrapeTrainingArguments
) -> Iterator[dict[str, Tensor]]:
    """Yield the physical batches of one logical batch, of exactly the expected size."""
    generator = torch.Generator().manual_seed(args.seed)
    examples = experiment.train
    order = torch.randperm(len(examples), generator=generator)[: args.logical_batch_size]
    for chosen in order.split(args.per_device_train_batch_size):
        batch = experiment.collator([examples[int(i)] for i in chosen])
        yield {name: value.to(args.device) for name, value in batch.items()}


@torch.no_grad()
def clipped_sums(
    model: nn.Module,
    batches: Iterable[Mapping[str, Tensor]],
    bounds: Sequence[float],
    loss: LossFunction | None = None,
) -> dict[float, Sums]:
    """Return the sum of clipped per-sample gradients of the projected weights, for each bound C."""
    targets = projection_targets(model, {n: p for n, p in model.named_parameters()})
    sums: dict[float, Sums] = {bound: {} for bound in bounds}
    for inputs in batches:
        with torch.enable_grad():
            _, gradients = per_sample_gradients(model, inputs, loss=loss)
        for bound, total in sums.items():
            add_clipped_sum_(total, dict(gradients), bound)
    return {bound: {name: total[name] for name in targets} for bound, total in sums.items()}


def privatised(
    clipped_sum: Tensor, bound: float, sigma: float, size: int, generator: torch.Generator
) -> Tensor:
    """Returns ``(sum + N(0, (sigma C)^2)) / B``, or the plain mean if sigma is zero."""
    if sigma:
        device = clipped_sum.device
        noise = torch.randn(clipped_sum.shape, generator=generator, device=device)
        clipped_sum = clipped_sum + sigma * bound * noise
    return clipped_sum / size


def mean_spectrum(gradients: Iterable[Tensor], top: int) -> list[float]:
    """Return the largest singular values averaged over layers, with six digits."""
    values = torch.stack([torch.linalg.svdvals(g.double())[:top].cpu() for g in gradients])
    return [float(f"{value:.6g}") for value in values.mean(0).tolist()]


if __name__ == "__main__":
    main()
