"""The model card: what the ledger says, and nothing that the training data could leak through."""

from __future__ import annotations

import math

from dp_grape_hf.accounting import REPLACE_ONE
from dp_grape_hf.ledger import Ledger
from dp_grape_hf.mechanism import EXAMPLE


def render(ledger: Ledger, base_model: str | None = None) -> str:
    """Returns the card of a checkpoint as Markdown with Hub metadata.

    Args:
        ledger: the ledger saved with the weights.
        base_model: the model that training started from, if it has a Hub name.
    """
    mechanism, epsilon = ledger.mechanism, ledger.epsilon()
    # Rounded up: an upper bound must not shrink on its way to the reader.
    spent = "∞" if math.isinf(epsilon) else f"{math.ceil(epsilon * 1000) / 1000:.3f}"
    tags = ["dp-grape", "differential-privacy"] if ledger.private else ["dp-grape"]
    metadata = ["---", "library_name: transformers", "tags:", *(f"- {tag}" for tag in tags)]
    if base_model:
        metadata.append(f"base_model: {base_model}")
    metadata.append("---")
    change = "replacing" if mechanism.adjacency == REPLACE_ONE else "adding or removing"
    most = mechanism.max_examples_per_unit
    unit = mechanism.privacy_unit
    if unit != EXAMPLE:
        unit = f"`{unit}` with all its examples"
    if ledger.private:
        claim = (
            f"This model was trained with differential privacy: **ε = {spent}** at "
            f"δ = {mechanism.target_delta:g}, for {change} one {unit} of the training data."
        )
    else:
        claim = (
            "**This model has no privacy guarantee** (ε = ∞): "
            f"{'; '.join(ledger.not_private_reasons)}."
        )
    projection, seed = mechanism.projection, mechanism.projection_seed
    if mechanism.projection_rank is not None:
        projection += f", r = {mechanism.projection_rank}, F = {mechanism.projection_update_steps}"
    split = {"per_layer": ", split over the layers", "automatic": ", to which all are scaled"}
    cap, known = mechanism.max_batch_size, mechanism.norm_directions
    capped = "" if cap is None else f", at most {cap} at a time"
    rows = [
        ("ε spent (upper bound)", spent),
        ("δ", "-" if mechanism.target_delta is None else f"{mechanism.target_delta:g}"),
        ("Adjacency", mechanism.adjacency.replace("_", " ")),
        ("Privacy unit", unit if most is None else f"{unit}, at most {most} in a step"),
        ("Sampling", f"{mechanism.sampling}, rate q = {mechanism.sample_rate:.6g}{capped}"),
        ("Dataset size N, as declared", f"{mechanism.num_samples}"),
        ("Expected batch size q N", f"{mechanism.expected_batch_size:g}"),
        ("Noise multiplier sigma", f"{mechanism.noise_multiplier:.6g}"),
        ("Clipping norm C", f"{mechanism.max_grad_norm:g}{split.get(mechanism.clipping, '')}"),
        ("Norms", "exact" if known is None else f"estimated from {known} random directions"),
        ("Releases", f"{ledger.steps}"),
        ("Projection", projection),
        ("Projection seed (public)", "-" if seed is None else f"{seed}"),
        ("Method", mechanism.method),
        ("Accountant", mechanism.accountant),
    ]
    table = [
        "| Quantity | Value |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows),
    ]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(ledger.versions.items()))
    return "\n".join(
        [
            *metadata,
            "",
            "# Model card",
            "",
            claim,
            "",
            "## Privacy",
            "",
            *table,
            "",
            "The record that these numbers are derived from is `privacy_ledger.json`, beside the "
            "weights.",
            "",
            "Not covered by ε: the choice of hyper-parameters over several runs, metrics computed "
            "on private data, preprocessing that looked at the training data, and the dataset "
            "size N where it is itself private.",
            "",
            f"Software: {versions}.",
            "",
        ]
    )
