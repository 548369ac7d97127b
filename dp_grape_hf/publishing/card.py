"""The model card: what the ledger says, and nothing that the training data could leak through.

What ``statement`` says stands between two marks, and the tag `statement.TAG` if it is of a
guarantee. The rest is for the publisher to keep, change or take out.

The text is in ``card.md``, beside this file; here are the numbers and what they allow to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.ledger import EXAMPLE, Ledger
from dp_grape_hf.publishing.statement import (
    TAG,
    epsilon_text,
    is_tag,
    marked,
    plain,
    statement_of,
    unit_of,
    without_guarantee,
)

_TEMPLATE = Path(__file__).with_suffix(".md")


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
    dataset_tags: str | list[str] | None = None,
    dataset: str | list[str] | None = None,
    dataset_args: str | list[str] | None = None,
    *,
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
        dataset_tags: names on the Hub.
        dataset: the same, unless ``dataset_tags`` are given, beside which it is a title.
        dataset_args: configurations of a data set, for which the card has no place.
        dataset_name: the same as ``dataset_tags``, as TRL calls it.
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
        datasets=dataset_tags or dataset or dataset_name or details.datasets,
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
    reasons, spent = without_guarantee(ledger, epsilon), epsilon_text(epsilon)
    private = not reasons
    own_tags = ["dp-grape", TAG] if private else ["dp-grape"]
    theirs = [tag for tag in details.tags if not is_tag(tag)]
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
    versions = [f"{plain(k)} {plain(v)}" for k, v in sorted(ledger.versions.items())]
    card = ModelCard.from_template(
        data,
        template_path=str(_TEMPLATE),
        title=plain(details.model_name or "Model card"),
        statement=marked(statement_of(ledger, spent, reasons)),
        private=private,
        unit=f"one {unit_of(mechanism)}",
        units="examples" if mechanism.privacy_unit == EXAMPLE else "units",
        runs=len(ledger.composed_runs),
        repo_id=details.repo_id,
        metrics=[(plain(name), f"{float(value):.4g}") for name, value in details.metrics.items()],
        metrics_are_public=details.metrics_are_public,
        software=", ".join(versions),
    )
    return f"{card}\n"
