"""Compute which models, heads and conditions have exact per-sample gradients, as a table.

    python -m tests.models.matrix
    python -m tests.models.matrix --only "BERT|Llama" --conditions full projected
    python -m tests.models.matrix --output recipes/models/results/model_matrix.jsonl

Every family of ``families.yaml`` runs with every task of its row through both engines. A cell is
the worst relative error of one sample's gradient of one parameter, compared with autograd of the
loss that the model itself returns for that sample alone; or it names the reason why the model is
refused. Under bfloat16 it is the error of a sample's whole gradient: what should be zero there is
rounding. Takes five minutes of one CPU core, needs no network and no data.
"""

import argparse
import contextlib
import json
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from tqdm import tqdm

from dp_grape_hf import UnsupportedModelError, per_sample_gradients
from dp_grape_hf.gradients import ENGINES
from dp_grape_hf.projections import ProjectionSchedule, default_targets
from recipes.report.checks import model_matrix
from tests.models.zoo import FAMILIES, WIDE, Row, as_models_take, rows

RANK = 4
BATCH_SIZE = 4
ENGINE_NAMES = sorted(ENGINES, reverse=True)  # the default one first


def own_gradients(model, inputs, projectors=None, loss_of=None):
    """Returns losses (B,) and gradients (B, ...) of the loss that the model itself computes.

    Each sample is a batch of its own, with its labels, through ordinary autograd. An unused
    parameter has gradient 0. ``loss_of`` computes another loss of such a batch.
    """
    loss_of = loss_of or (lambda sample: model(**as_models_take(sample)).loss)
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    losses = []
    found = {name: [] for name in weights}
    for i in range(len(next(v for v in inputs.values() if isinstance(v, Tensor)))):
        sample = {k: v[i : i + 1] if isinstance(v, Tensor) else v for k, v in inputs.items()}
        loss = loss_of(sample)
        losses.append(loss.detach())
        gradients = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
        for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
            gradient = torch.zeros_like(weight) if gradient is None else gradient
            projector = (projectors or {}).get(name)
            found[name].append(projector.project(gradient) if projector else gradient)
    return torch.stack(losses), {name: torch.stack(values) for name, values in found.items()}


def projectors_for(model, rank, seed=0):
    """Returns Gaussian projectors of the default targets; none where the rank is None."""
    if rank is None:
        return {}
    names = default_targets(model)
    shapes = {name: tuple(model.get_parameter(name).shape) for name in names}
    return ProjectionSchedule(shapes, rank=rank, update_steps=1, seed=seed).at(0)


def dense(found, batch_size, device=None):
    """Returns gradients (B, ...) on the CPU, read off weighted sums with one-hot factors."""
    one_hot = torch.eye(batch_size, device=device)
    return {
        name: torch.stack([gradient.weighted_sum(factors).cpu() for factors in one_hot])
        for name, gradient in found.items()
    }


def worst_error(found, expected):
    """Returns the largest relative error of one sample's gradient of one parameter.

    A gradient below 1e-2 of the sample's total counts as that: the rounding of the larger terms
    that it is computed from does not shrink with it, and is all that there is of a gradient that is
    zero in exact arithmetic, as that of a key's bias. NaN counts as infinite.
    """
    totals = torch.stack([g.flatten(1).norm(dim=1) for g in expected.values()]).norm(dim=0)  # (B,)
    worst = torch.zeros(())
    for name, gradient in expected.items():
        errors = (found[name] - gradient).flatten(1).norm(dim=1)
        scale = gradient.flatten(1).norm(dim=1).maximum(1e-2 * totals).clamp(min=1e-20)
        worst = worst.maximum((errors / scale).nan_to_num(nan=torch.inf).max())
    return worst.item()


def whole_error(found, expected):
    """Returns the largest relative error of one sample's gradient of all parameters together."""
    everything = (
        torch.cat([values[name].float().flatten(1) for name in expected], 1)
        for values in (found, expected)
    )
    return worst_error(*({"all": values} for values in everything))


@dataclass(frozen=True)
class Condition:
    """How a model is made and run; ``full`` is how it comes, all parameters unprojected."""

    rank: int | None = None
    model: Mapping[str, Any] = field(default_factory=dict)  # changes to the configuration
    batch: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[Any], None] = lambda model: None
    autocast: torch.dtype | None = None
    applies: Callable[[Row], bool] = lambda row: True


CONDITIONS = {
    "full": Condition(),
    "projected": Condition(rank=RANK),
    "eager attention": Condition(model={"attn_implementation": "eager"}),
    "left padding": Condition(
        batch={"padding": "left"}, applies=lambda row: "attention_mask" in row.batch(1)
    ),
    "checkpointing": Condition(
        model={"use_cache": False},
        prepare=lambda model: model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        ),
        applies=lambda row: (
            row.family.adapter is None and row.model().supports_gradient_checkpointing
        ),
    ),
    "bf16 autocast": Condition(autocast=torch.bfloat16),
}


def cell(row, condition, engine):
    """Returns the worst error, or why there is none, or None where the condition does not apply.

    A text is ``refused: `` and the reason, or ``fails: `` and an error that nobody expected.
    """
    if not condition.applies(row):
        return None
    model = row.model(**condition.model)
    inputs = row.batch(BATCH_SIZE, **condition.batch)
    projectors = projectors_for(model, condition.rank)
    condition.prepare(model)
    context = contextlib.nullcontext()
    if condition.autocast is not None:
        context = torch.autocast("cpu", condition.autocast)
    try:
        with context:
            _, gradients = per_sample_gradients(
                model, inputs, projections=projectors, engine=engine
            )
    except UnsupportedModelError as error:
        return f"refused: {error}"
    except (RuntimeError, TypeError, ValueError) as error:
        return f"fails: {type(error).__name__}: {error}".split("\n")[0]
    _, expected = own_gradients(row.model(**condition.model), inputs, projectors)
    error = worst_error if condition.autocast is None else whole_error
    return error(dense(gradients, BATCH_SIZE), expected)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="Regular expression for 'family, head'.")
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=list(CONDITIONS))
    parser.add_argument("--engines", nargs="+", choices=ENGINE_NAMES, default=ENGINE_NAMES)
    parser.add_argument("--output", type=Path, help="Also write the cells, to this JSONL file.")
    options = parser.parse_args(arguments)
    entries = [row for row in rows(FAMILIES + WIDE) if re.search(options.only, str(row))]
    wanted = [
        (row, condition, engine)
        for row in entries
        for condition in options.conditions
        for engine in options.engines
    ]
    torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    cells = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for row, condition, engine in tqdm(wanted, file=sys.stderr, unit="cell"):
                own = cells.setdefault(str(row), {})
                own[f"{condition}, {engine}"] = cell(row, CONDITIONS[condition], engine)
    finally:
        transformers.logging.set_verbosity(verbosity)
    lines = [
        {"model": row.family.name, "head": row.task, "cells": cells[str(row)]} for row in entries
    ]
    sys.stdout.write(model_matrix(lines))
    if options.output is not None:
        options.output.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
