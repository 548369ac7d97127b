"""Compute the share of per-sample gradient energy that r input directions of a layer keep.

For per-sample gradients G_i of a linear layer and a P with orthonormal columns, the share is
``sum_i |G_i P|^2 / sum_i |G_i|^2 = tr(P^T A P) / tr(A)``, where ``A = sum_i G_i^T G_i``. So one
pass over the gradients is enough for every P. The first eigenvectors of A keep the largest share.

Shapes: B samples in a batch, m x n the weight with n input features, r rank.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dp_grape_hf.gradients import (
    Dense,
    GradSampleMode,
    Inputs,
    LossFunction,
    evaluating,
    make_engine,
)
from dp_grape_hf.projections import (
    Batches,
    feature_dimensions,
    principal_directions,
    projection_targets,
)

Matrices = dict[str, Tensor]
"""Name of a projected weight -> matrix."""

SYNTHETIC, PUBLIC, DATA = "synthetic", "public", "data"
GRADIENTS, WEIGHTS, RANDOM = "gradients", "weights", "random"
SOURCES = {
    SYNTHETIC: "synthetic inputs",
    PUBLIC: "public data",
    DATA: "the data's own inputs (not private)",
    GRADIENTS: "the data's own gradients (not private, the bound)",
    WEIGHTS: "singular vectors of the weights",
    RANDOM: "random",
}
"""Source of P -> its name in tables."""


def projected_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights that are projected by default, and freeze all other parameters."""
    trainable = dict(model.named_parameters())
    targets = projection_targets(model, trainable)
    for name, parameter in trainable.items():
        parameter.requires_grad_(name in targets)
    return {name: trainable[name] for name in targets}


def gradient_moments(
    model: nn.Module, batches: Iterable[Inputs], loss: LossFunction | None = None
) -> Matrices:
    """Return ``A = sum_i G_i^T G_i``, (n, n) float32, of each trainable weight.

    Args:
        model: a model whose trainable parameters are weights of linear layers; dropout is off.
        batches: inputs with labels, on the model's device.
        loss: ``(outputs, labels) -> (B,)``; None for the loss of the model's head.
    """
    dimensions, moments = feature_dimensions(model), Matrices()
    engine = make_engine("layerwise", model, loss, grad_sample_mode=GradSampleMode.MATERIALISE)
    with evaluating(model):
        for inputs in batches:
            for name, gradient in engine(inputs, {})[1].items():
                assert isinstance(gradient, Dense), name
                values = _features_last(gradient.values.float(), dimensions.get(name, 1))
                rows = values.flatten(0, 1)  # (B m, n)
                moments[name] = (
                    moments[name].addmm_(rows.T, rows) if name in moments else (rows.T @ rows)
                )
    return moments


def _features_last(weight: Tensor, dimension: int) -> Tensor:
    return weight if dimension == 1 else weight.mT


def energies(moment: Tensor, directions: Tensor) -> tuple[float, float]:
    """Return ``tr(P^T A P)`` and ``tr(A)`` for A (n, n) and P (n, r)."""
    kept = (directions * (moment @ directions)).double().sum()
    return float(kept), float(moment.diagonal().double().sum())


# ---- Sources of P ----


def weight_directions(weights: Mapping[str, Tensor], ranks: Mapping[str, int]) -> Matrices:
    """Return the first right singular vectors of weights (m, n): (n, r), or fewer if m < r."""
    return {
        name: torch.linalg.svd(weights[name], full_matrices=False)[2][:rank].T
        for name, rank in ranks.items()
    }


def first_eigenvectors(moments: Mapping[str, Tensor], ranks: Mapping[str, int]) -> Matrices:
    """Return the first eigenvectors of A, (n, r): no P of this rank keeps more."""
    return {
        name: torch.linalg.eigh(moments[name])[1].flip(1)[:, :rank] for name, rank in ranks.items()
    }


def random_directions(
    weights: Mapping[str, Tensor], ranks: Mapping[str, int], seed: int
) -> Matrices:
    """Return random orthonormal columns, (n, r)."""
    found, generator = Matrices(), torch.Generator().manual_seed(seed)
    for name, rank in ranks.items():
        normal = torch.randn(weights[name].shape[1], rank, generator=generator)
        found[name] = torch.linalg.qr(normal)[0].to(weights[name])
    return found


def measure(
    model: Any,
    data: Sequence[Inputs],
    ranks: Sequence[int],
    inputs: Mapping[str, Batches],
    seed: int = 0,
    loss: LossFunction | None = None,
) -> dict[str, Any]:
    """Return the shares by source of P and by r, and the number of layers of each r.

    Args:
        model: a model of transformers. All parameters but the projected weights are frozen.
        data: batches with labels, for the per-sample gradients.
        ranks: the values of r. A layer with at most r input features has no share. P is computed
            for the largest r, and its first columns are used for the others.
        inputs: source of P -> batches without labels, for the layers' input activations.
        seed: seed of the random directions, and of the start of the principal directions.
        loss: ``(outputs, labels) -> (B,)``; None for the loss of the model's head.
    """
    dimensions = feature_dimensions(model)
    weights = {
        name: _features_last(weight.detach().float(), dimensions.get(name, 1))
        for name, weight in projected_weights(model).items()
    }
    moments = gradient_moments(model, data, loss)

    def principal(batches: Batches, ranks: Mapping[str, int]) -> Matrices:
        with evaluating(model):
            found = principal_directions(model, ranks, batches, seed)
        return {name: one.directions.to(weights[name]) for name, one in found.items()}

    sources: dict[str, Callable[[Mapping[str, int]], Matrices]] = {
        **{name: partial(principal, batches) for name, batches in inputs.items()},
        GRADIENTS: partial(first_eigenvectors, moments),
        WEIGHTS: partial(weight_directions, weights),
        RANDOM: partial(random_directions, weights, seed=seed),
    }
    widest = {
        name: max((r for r in ranks if r < weight.shape[1]), default=0)
        for name, weight in weights.items()
    }
    widest = {name: rank for name, rank in widest.items() if rank}
    layers = {str(r): sum(rank >= r for rank in widest.values()) for r in ranks}
    shares: dict[str, dict[str, Any]] = {}
    for source in (name for name in SOURCES if name in sources):
        found = sources[source](widest)
        shares[source] = {
            str(r): summary(
                energies(moments[name], found[name][:, :r])
                for name, rank in widest.items()
                if rank >= r
            )
            for r in ranks
            if layers[str(r)]
        }
    given = sorted({weight.shape[1] for weight in weights.values()})
    return {"given": given, "layers": layers, "shares": shares}


def summary(layers: Iterable[tuple[float, float]]) -> dict[str, float]:
    """Return the share of all layers together, and the median, minimum and maximum over layers."""
    kept, whole = zip(*layers, strict=True)
    values = [one / other for one, other in zip(kept, whole, strict=True)]
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    found["together"] = sum(kept) / sum(whole)
    return {name: round(value, 4) for name, value in found.items()}
