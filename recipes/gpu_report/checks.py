"""What ``gpu_report`` checks on a device: gradients and releases against the definition on a CPU.

The definition is autograd of the loss that a model computes for one sample alone, in float32 on the
CPU. Models, heads and data are those of ``recipes.models.zoo``.

Shapes: B samples in the batch.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.utils import is_flash_attn_2_available

from dp_grape_hf import per_sample_gradients
from dp_grape_hf.errors import UnsupportedModelError
from dp_grape_hf.gradients import PerSampleEngine, exact_products, make_engine
from dp_grape_hf.ledger import Ledger, Mechanism
from dp_grape_hf.mechanism import PrivateMechanism
from dp_grape_hf.projections import Projector
from recipes.gpu_report.quick import set_precision
from recipes.models.matrix import (
    dense,
    own_gradients,
    projectors_for,
    whole_error,
    worst_error,
)
from recipes.models.zoo import Batch, Row, rows

Check = Callable[[], dict[str, Any]]

BATCH_SIZE, RANK = 5, 4
EXACT, LOW = 1e-3, 0.2  # relative errors that float32 and bfloat16 arithmetic may have
"""Of RandLoRA, autograd in float32 alone is 5e-5 off what it is in float64; most others, 5e-6."""
SIGMA = 0.1  # of a release that is checked: small, so that subtracting the noise loses little
SPREAD = 5.0  # standard errors that the noise may be off; by chance once in 1.7 million checks
FEW = ("RoBERTa, sequence classification", "OPT, causal LM", "ViT, image classification")
LOW_PRECISION = (*FEW, "Llama, causal LM", "T5, seq2seq LM")


def checks(device: torch.device, only: str = "") -> dict[str, Check]:
    """Returns name -> check, which returns ``error`` and ``limit``, or why it was ``skipped``.

    Args:
        device: where the engine runs.
        only: a regular expression for the names of models and heads, ``family, head``.
    """
    entries = {str(row): row for row in rows() if re.search(only, str(row))}
    found: dict[str, Check] = {}
    for name, row in entries.items():
        for rank in (None, RANK):
            kind = "gradients" if rank is None else "projected gradients"
            found[f"{kind}: {name}"] = partial(gradients, row, device, rank)
    for name in LOW_PRECISION:
        if name in entries:
            row = entries[name]
            found[f"bfloat16 autocast: {name}"] = partial(autocast, row, device)
            found[f"flash attention of torch: {name}"] = partial(flash, row, device)
            found[f"flash_attn: {name}"] = partial(flash_attn, row, device)
    for name in FEW:
        if name in entries:
            found[f"release: {name}"] = partial(release, entries[name], device)
    return found


# ---- Gradients ----


def gradients(row: Row, device: torch.device, rank: int | None) -> dict[str, Any]:
    """Compares per-sample gradients in float32, projected if there is a rank."""
    model, batch = row.model(), row.batch(BATCH_SIZE)
    projectors = projectors_for(model, rank)
    there = next(model.parameters()).device  # weights of 4 and 8 bits are made where they are used
    with exact():
        _, own = own_gradients(model, _moved(batch, there), _placed(projectors, there))
    expected = {name: gradient.cpu() for name, gradient in own.items()}
    refused = row.refused("layerwise")
    try:
        with exact():
            _, found = per_sample_gradients(
                model.to(device), _moved(batch, device), projections=_placed(projectors, device)
            )
    except UnsupportedModelError as error:
        if refused is not None and refused in str(error):
            return {"skipped": "refused, as it should be"}
        raise
    return {"error": worst_error(dense(found, BATCH_SIZE, device), expected), "limit": EXACT}


def autocast(row: Row, device: torch.device) -> dict[str, Any]:
    """Compares per-sample gradients under bfloat16 autocast, a sample's as a whole."""
    model, batch = row.model(), row.batch(BATCH_SIZE)
    _, expected = own_gradients(model, batch)
    with torch.autocast(device.type, torch.bfloat16):
        _, found = per_sample_gradients(model.to(device), _moved(batch, device))
    return {"error": whole_error(dense(found, BATCH_SIZE, device), expected), "limit": LOW}


def flash(row: Row, device: torch.device) -> dict[str, Any]:
    """Compares per-sample gradients of bfloat16 weights with torch's flash attention only.

    The kernel takes no mask, so nothing is padded.
    """
    if device.type == "cuda" and not torch.backends.cuda.is_flash_attention_available():
        return {"skipped": "torch was built without it"}
    if row.family.name == "T5":
        return {"skipped": "T5 adds a bias to attention, which the kernel does not take"}
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return _low_precision(row.model(), _unpadded(row.batch(BATCH_SIZE)), device)


def flash_attn(row: Row, device: torch.device) -> dict[str, Any]:
    """Compares per-sample gradients of bfloat16 weights with the package flash_attn."""
    if not is_flash_attn_2_available():
        return {"skipped": "the package flash_attn is not installed"}
    try:
        model = row.model(attn_implementation="flash_attention_2")
    except ValueError as error:  # of transformers, where the model has no support for it
        return {"skipped": str(error)}
    return _low_precision(model, row.batch(BATCH_SIZE), device, reference=row.model())


def _low_precision(
    model: nn.Module, batch: Batch, device: torch.device, reference: nn.Module | None = None
) -> dict[str, Any]:
    reference = copy.deepcopy(model if reference is None else reference)
    _, expected = own_gradients(reference.bfloat16().float(), batch)
    inputs = {
        name: value.bfloat16() if value.is_floating_point() else value
        for name, value in _moved(batch, device).items()
    }
    _, found = per_sample_gradients(model.bfloat16().to(device), inputs)
    return {"error": whole_error(dense(found, BATCH_SIZE, device), expected), "limit": LOW}


def _unpadded(batch: Batch) -> Batch:
    """Returns the batch as if nothing were padding."""
    if "attention_mask" not in batch:
        return batch
    return {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}


# ---- A release ----


def release(row: Row, device: torch.device) -> dict[str, Any]:
    """Compares a whole release, in two physical batches, with clipped sums computed on the CPU.

    Its noise is what the same generator gives an empty draw; the spread of that noise is checked
    as well.
    """
    model, batch = row.model(), row.batch(BATCH_SIZE)
    projectors = projectors_for(model, RANK)
    _, per_sample_grads = own_gradients(model, batch, projectors)
    per_sample = make_engine("layerwise", model.to(device))
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in per_sample_grads.values()]).norm(dim=0)
    bound = norms.median().item()  # one half of the samples is clipped, the other is not
    factors = (bound / norms).clamp(max=1.0)
    expected = {n: torch.einsum("b,b...->...", factors, g) for n, g in per_sample_grads.items()}
    placed = _placed(projectors, device)
    with exact():
        engine = _engine(per_sample, bound, device)
        engine.begin(placed)
        for part in (slice(0, 2), slice(2, None)):
            engine.accumulate(_moved({key: v[part] for key, v in batch.items()}, device))
        released = engine.release()
    empty = _engine(per_sample, bound, device)
    empty.begin(placed)
    noise = empty.release()
    found = {name: BATCH_SIZE * (released[name] - noise[name]).cpu()[None] for name in released}
    numbers = torch.cat([value.flatten() for value in noise.values()]).double()
    spread = (BATCH_SIZE * numbers.std() / (SIGMA * bound)).item()
    allowed = SPREAD / math.sqrt(2 * len(numbers))
    if abs(spread - 1) > allowed:
        raise AssertionError(
            f"the noise has {spread:.4f} times the standard deviation it should have; it may be "
            f"off by {allowed:.4f}"
        )
    error = worst_error(found, {name: value[None] for name, value in expected.items()})
    return {"error": error, "limit": EXACT, "noise_std_over_expected": spread}


def _engine(
    per_sample: PerSampleEngine, max_grad_norm: float, device: torch.device
) -> PrivateMechanism:
    mechanism = Mechanism(
        noise_multiplier=SIGMA,
        sample_rate=0.5,
        max_grad_norm=max_grad_norm,
        expected_batch_size=BATCH_SIZE,
        num_samples=2 * BATCH_SIZE,
        target_epsilon=None,
        target_delta=None,
        accountant="prv",
        engine="layerwise",
        projection="gaussian",
        projection_rank=RANK,
        projection_update_steps=1,
        projection_seed=0,
    )
    return PrivateMechanism(
        per_sample,
        ledger=Ledger.start(mechanism, private=False, reason="a check whose noise is known"),
        noise_generator=torch.Generator(device).manual_seed(1),
    )


# ---- Common ----


def exact() -> AbstractContextManager[None]:
    """Makes float32 products float32, where the device would round their factors to TF32.

    Convolutions stay exact afterwards; each row and cell of the report sets what it has.
    """
    set_precision(tf32=False)
    return exact_products()


def _placed(projectors: Mapping[str, Projector], device: torch.device) -> dict[str, Projector]:
    return {name: Projector(p.matrix.to(device), p.side) for name, p in projectors.items()}


def _moved(batch: Batch, device: torch.device) -> Batch:
    return {name: value.to(device) for name, value in batch.items()}
