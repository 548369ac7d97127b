"""The model card: what the ledger says, and nothing that the training data could leak through.

The text is in ``model_card.md``, beside this file; here are the numbers and what they allow to say.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from dp_grape_hf.accounting import REPLACE_ONE
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.ledger import Ledger
from dp_grape_hf.mechanism import EXAMPLE, Mechanism
from dp_grape_hf.verify import RUNS_ROW, TRIALS_ROW, earlier_runs

_TEMPLATE = Path(__file__).with_suffix(".md")
_SPLIT = {"per_layer": ", split over the layers", "automatic": ", to which all are scaled"}
_MADE_BY = {"prv": "prv-accountant", "pld": "dp-accounting", "rdp": "dp_grape_hf"}
_SOURCES = {
    True: "Computed on evaluation data that its owner declares public.",
    False: "Computed on data that was not declared public: **no ε covers these figures**.",
}


@dataclass(frozen=True)
class CardDetails:
    """What a publisher declares beside the ledger. Nothing here is computed from training data.

    ``metrics`` appear only with ``metrics_are_public``, which says whether the evaluation data they
    were computed on is public. ``repo_id``, ``base_model`` and ``datasets`` are names on the Hub;
    ``pipeline_tag`` is the Hub's name of a task, such as text-classification.

    Raises:
        PrivacyError: metrics are given without saying whether their data is public.
    """

    repo_id: str | None = None
    model_name: str | None = None
    base_model: str | None = None
    adapter: bool = False
    language: str | list[str] | None = None
    license: str | None = None
    pipeline_tag: str | None = None
    datasets: str | list[str] | None = None
    tags: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    metrics_are_public: bool | None = None

    def __post_init__(self) -> None:
        if self.metrics and self.metrics_are_public is None:
            raise PrivacyError(
                f"metrics={dict(self.metrics)!r} with metrics_are_public=None: say whether the "
                "data they were computed on is public. A card never shows them without."
            )


def declare(
    details: CardDetails,
    eval_data_is_public: bool,
    language: str | list[str] | None = None,
    license: str | None = None,
    tags: str | list[str] | None = None,
    model_name: str | None = None,
    finetuned_from: str | None = None,
    tasks: str | list[str] | None = None,
    *,
    dataset: str | list[str] | None = None,
    dataset_name: str | list[str] | None = None,
    metrics: Mapping[str, float] | None = None,
) -> CardDetails:
    """Returns details with more declared, in the words of ``Trainer.create_model_card``.

    Args:
        details: what was declared before; what is None below stays as it is.
        eval_data_is_public: whether the data of ``metrics`` is.
        language: of the model; the next three as the Hub calls them, too.
        license: of the weights.
        tags: besides our own.
        model_name: the title.
        finetuned_from: the base model.
        tasks: the Hub shows one, the first.
        dataset: names on the Hub.
        dataset_name: the same, as TRL calls it.
        metrics: name -> value, such as ``{"accuracy": 0.9}``.
    """
    task = tasks[0] if isinstance(tasks, list) and tasks else tasks
    return replace(
        details,
        language=language or details.language,
        license=license or details.license,
        tags=((tags,) if isinstance(tags, str) else tuple(tags)) if tags else details.tags,
        model_name=model_name or details.model_name,
        base_model=finetuned_from or details.base_model,
        pipeline_tag=task if task and isinstance(task, str) else details.pipeline_tag,
        datasets=dataset or dataset_name or details.datasets,
        metrics=metrics or details.metrics,
        metrics_are_public=eval_data_is_public if metrics else details.metrics_are_public,
    )


def render(
    ledger: Ledger, details: CardDetails | None = None, *, updates: int | None = None
) -> str:
    """Returns the card of a saved model as Markdown with the Hub's metadata.

    Args:
        ledger: the ledger saved with the weights.
        details: what the publisher declares beside it.
        updates: how many updates the weights contain, if the ledger was not saved with any.

    Raises:
        PrivacyError: the ledger is incomplete: it belongs to no weights, or has no δ.
    """
    details = details or CardDetails()
    if ledger.updates is None and updates is None:
        raise PrivacyError(
            "updates=None: this ledger was not saved with any weights, so there is no model that "
            "it could speak for. Take the one that lies beside the weights, or call save_model()."
        )
    mechanism, epsilon = ledger.mechanism, ledger.epsilon()
    reasons = list(ledger.not_private_reasons)
    if math.isinf(epsilon) and not reasons:
        reasons = [f"the accountant {mechanism.accountant} finds no finite ε for these releases"]
    private = not reasons
    # Rounded up: an upper bound must not shrink on its way to the reader.
    spent = f"{math.ceil(epsilon * 1000) / 1000:.3f}" if private else "∞"
    own_tags = ["dp-grape", "differential-privacy"] if private else ["dp-grape"]
    theirs = [
        tag
        for tag in details.tags
        if re.sub(r"[\s_]+", "-", tag.strip().lower()) != "differential-privacy"
    ]
    data = ModelCardData(
        library_name="peft" if details.adapter else "transformers",
        tags=own_tags + theirs,
        base_model=details.base_model,
        language=details.language,
        license=details.license,
        pipeline_tag=details.pipeline_tag,
        datasets=details.datasets,
    )
    if details.base_model is not None:
        data["base_model_relation"] = "adapter" if details.adapter else "finetune"
    versions = [f"{_plain(k)} {_plain(v)}" for k, v in sorted(ledger.versions.items())]
    named = mechanism.privacy_unit != EXAMPLE
    unit = f"`{_plain(mechanism.privacy_unit)}` with all its examples" if named else EXAMPLE
    card = ModelCard.from_template(
        data,
        template_path=str(_TEMPLATE),
        title=_plain(details.model_name or "Model card"),
        claim=_claim(mechanism, spent, unit, reasons),
        private=private,
        quantities=_quantities(ledger, spent, unit),
        unit=f"one {unit}",
        units="units" if named else "examples",
        trials=mechanism.trials is not None,
        runs=len(ledger.composed_runs),
        repo_id=details.repo_id,
        metrics=[(_plain(name), f"{value:.4g}") for name, value in details.metrics.items()],
        metrics_source=_SOURCES[details.metrics_are_public is True],
        software=", ".join(versions),
    )
    return f"{card}\n"


def _claim(mechanism: Mechanism, spent: str, unit: str, reasons: list[str]) -> str:
    if reasons:
        return (
            f"**This model has no privacy guarantee** (ε = ∞): {'; '.join(map(_plain, reasons))}."
        )
    change = "replacing" if mechanism.adjacency == REPLACE_ONE else "adding or removing"
    return (
        f"This model was trained with differential privacy: **ε = {spent}** at "
        f"δ = {mechanism.target_delta:g}, for {change} one {unit} of the training data."
    )


def _quantities(ledger: Ledger, spent: str, unit: str) -> list[tuple[str, str]]:
    """Returns the rows of the table, which ``dp-grape verify`` reads again."""
    mechanism = ledger.mechanism
    projection, seed = mechanism.projection, mechanism.projection_seed
    if mechanism.projection_rank is not None:
        projection += f", r = {mechanism.projection_rank}, F = {mechanism.projection_update_steps}"
    cap, known = mechanism.max_batch_size, mechanism.norm_directions
    most, package = mechanism.max_examples_per_unit, _MADE_BY.get(mechanism.accountant)
    version = ledger.versions.get(package or "", "version not recorded")
    rows = {
        "ε spent (upper bound)": spent,
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
    if mechanism.trials is not None:
        each = f"of {mechanism.steps_of_trial} releases each"
        rows[TRIALS_ROW] = f"{mechanism.trials}, {each}, counted in ε"
    if len(ledger.composed_runs) > 1:
        rows[RUNS_ROW] = earlier_runs(ledger)
    return [(name, _plain(value)) for name, value in rows.items()]


def _plain(text: str) -> str:
    """Returns a text that stays in its cell: a ledger's texts must not write the card."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;").strip()
