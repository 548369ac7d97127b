"""What a model card states of its ledger: one sentence, and the rows of one table.

``model_card`` writes them; ``verify`` derives them again and compares each one, word for word.
"""

import math
import re

from dp_grape_hf.accounting import REPLACE_ONE
from dp_grape_hf.ledger import Ledger
from dp_grape_hf.mechanism import EXAMPLE, Mechanism

EPSILON_ROW = "ε spent (upper bound)"

_SPLIT = {"per_layer": ", split over the layers", "automatic": ", to which all are scaled"}
_MADE_BY = {"prv": "prv-accountant", "pld": "dp-accounting", "rdp": "dp_grape_hf"}


def without_guarantee(ledger: Ledger, epsilon: float) -> list[str]:
    """Returns why a ledger that spent ``epsilon`` supports no claim of privacy; empty: it does."""
    reasons = list(ledger.not_private_reasons)
    if math.isinf(epsilon) and not reasons:
        name = ledger.mechanism.accountant
        reasons = [f"the accountant {name} finds no finite ε for these releases"]
    return reasons


def rounded_up(epsilon: float) -> str:
    """Writes an upper bound so that it does not shrink on its way to the reader."""
    return "∞" if math.isinf(epsilon) else f"{math.ceil(epsilon * 1000) / 1000:.3f}"


def unit_of(mechanism: Mechanism) -> str:
    """Names what is protected, without an article."""
    if mechanism.privacy_unit == EXAMPLE:
        return EXAMPLE
    return f"`{plain(mechanism.privacy_unit)}` with all its examples"


def claim_of(mechanism: Mechanism, spent: str, reasons: list[str]) -> str:
    """Returns the sentence that says what is guaranteed, or that nothing is, and why."""
    if reasons:
        return f"**This model has no privacy guarantee** (ε = ∞): {'; '.join(map(plain, reasons))}."
    change = "replacing" if mechanism.adjacency == REPLACE_ONE else "adding or removing"
    return (
        f"This model was trained with differential privacy: **ε = {spent}** at "
        f"δ = {mechanism.target_delta:g}, for {change} one {unit_of(mechanism)} of the training "
        "data."
    )


def rows_of(ledger: Ledger, spent: str) -> dict[str, str]:
    """Returns the table: name -> cell."""
    mechanism = ledger.mechanism
    projection, seed = mechanism.projection, mechanism.projection_seed
    if mechanism.projection_rank is not None:
        projection += f", r = {mechanism.projection_rank}, F = {mechanism.projection_update_steps}"
    cap, known = mechanism.max_batch_size, mechanism.norm_directions
    most, package = mechanism.max_examples_per_unit, _MADE_BY.get(mechanism.accountant)
    version = ledger.versions.get(package or "", "version not recorded")
    unit = unit_of(mechanism)
    rows = {
        EPSILON_ROW: spent,
        "δ": "-" if mechanism.target_delta is None else f"{mechanism.target_delta:g}",
        "Adjacency": mechanism.adjacency.replace("_", " "),
        "Privacy unit": unit if most is None else f"{unit}, at most {most} in a step",
        "Sampling": f"{mechanism.sampling}, rate q = {mechanism.sample_rate:.6g}"
        + ("" if cap is None else f", at most {cap} at a time"),
        "Dataset size N, as declared": f"{mechanism.num_samples}",
        "Expected batch size q N": f"{mechanism.expected_batch_size:g}",
        "Noise multiplier sigma": f"{mechanism.noise_multiplier:.6g}",
        "Clipping norm C": f"{mechanism.max_grad_norm:g}{_SPLIT.get(mechanism.clipping, '')}",
        "Norms": "exact" if known is None else f"estimated from {known} random directions",
        "Releases": f"{ledger.steps}",
        "Projection": projection,
        "Projection seed (public)": "-" if seed is None else f"{seed}",
        "Method": mechanism.method,
        "Accountant": mechanism.accountant,
        "Accountant's software": "-" if package is None else f"{package} {version}",
    }
    if mechanism.noise is not None:
        rows["Noise"] = f"{mechanism.noise}, four float64 draws for each number"
    if mechanism.trials is not None:
        each = f"of {mechanism.steps_of_trial} releases each"
        rows["Chosen among trials"] = f"{mechanism.trials}, {each}, counted in ε"
    if earlier := ledger.composed_runs[:-1]:
        releases = sum(run.accounted[2] for run in earlier)
        rows["Earlier runs on the same data"] = (
            f"{len(earlier)}, with {releases} releases, counted in ε"
        )
    return {name: plain(value) for name, value in rows.items()}


def plain(text: str) -> str:
    """Returns a text that stays in its cell: a ledger's texts must not write the card."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;").strip()
