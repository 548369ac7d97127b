"""Write the model card of a private model from its ledger, without any training data.

The statement (see ``statement``) is between two marks. The card has the tag `statement.TAG` if the
run has a guarantee. The publisher may keep, change or remove the rest of the card.

The text of the card is the template ``card.md`` in this folder.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.utils import yaml_dump

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.ledger import EXAMPLE, Ledger
from dp_grape_hf.publishing.statement import (
    METADATA,
    TAG,
    epsilon_text,
    is_tag,
    marked,
    metadata_of,
    plain,
    read_metadata,
    statement_in,
    statement_of,
    unit_of,
    without_guarantee,
)

_TEMPLATE = Path(__file__).with_suffix(".md")


@dataclass(frozen=True)
class CardDetails:
    """Information for the card that is not in the ledger. Nothing is computed from training data.

    Attributes:
        repo_id: the model's name on the Hub; ``base_model`` and ``datasets`` are names there, too.
        pipeline_tag: the Hub's name of the task, such as text-classification. By default it follows
            from ``model_class``, the name of the model's class.
        metrics: name -> value.
        metrics_are_public: whether the evaluation data of ``metrics`` are public.
        num_labels: the number of labels of the model's head, for the code that loads an adapter.
        hyperparameters: name -> value of settings that are not in the ledger.

    Raises:
        PrivacyError: ``metrics`` are given without ``metrics_are_public``.
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
    model_class: str | None = None
    num_labels: int | None = None
    hyperparameters: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.metrics and self.metrics_are_public is None:
            raise PrivacyError(
                f"metrics={dict(self.metrics)!r} with metrics_are_public=None: the card has to "
                "say whether the evaluation data are public. Set metrics_are_public."
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
    """Return updated card details, from the arguments of ``Trainer.create_model_card``.

    Arguments that are None do not change the details. Only the first one of ``tasks`` is used.
    ``dataset_tags`` are names of data sets on the Hub, and have precedence over ``dataset``;
    ``dataset_name`` is TRL's name for them. ``dataset_args`` are ignored, because the card does not
    show configurations of data sets. ``metrics`` has a value for each name, such as ``{"accuracy":
    0.9}``, and ``eval_data_is_public`` says whether their data are public.
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
    """Return the card of a saved model as Markdown with the Hub's metadata.

    ``ledger`` is the one saved with the weights, and ``details`` are not in it. Pass ``updates``,
    the number of updates in the weights, if the ledger does not record saved weights.

    Raises:
        PrivacyError: the number of updates is not known, or the ledger has no δ.
    """
    details = details or CardDetails()
    if ledger.updates is None and updates is None:
        raise PrivacyError(
            "updates=None: this ledger does not record saved weights, so it describes no model. "
            "Use the ledger that is next to the weights, or call save_model() first."
        )
    mechanism, epsilon = ledger.mechanism, ledger.epsilon()
    reasons, spent = without_guarantee(ledger, epsilon), epsilon_text(epsilon)
    private, title = not reasons, plain(details.model_name or "Model card")
    own_tags = ["dp-grape", TAG] if private else ["dp-grape"]
    theirs = [tag for tag in details.tags if not is_tag(tag)]
    task = details.pipeline_tag or _task_of(details.model_class)
    results = _results(details, task)
    index: dict[str, Any] = {"eval_results": results, "model_name": title} if results else {}
    claim: dict[str, Any] = {METADATA: metadata_of(ledger, spent)} if private else {}
    data = ModelCardData(
        library_name="peft" if details.adapter else "transformers",
        tags=own_tags + theirs,
        base_model=details.base_model,
        language=details.language,
        license=details.license,
        pipeline_tag=task,
        datasets=details.datasets,
        **index,
        **claim,
    )
    if details.base_model is not None:
        data["base_model_relation"] = "adapter" if details.adapter else "finetune"
    versions = [f"{plain(k)} {plain(v)}" for k, v in sorted(ledger.versions.items())]
    card = ModelCard.from_template(
        data,
        template_path=str(_TEMPLATE),
        title=title,
        statement=marked(statement_of(ledger, spent, reasons)),
        private=private,
        unit=f"one {unit_of(mechanism)}",
        units="examples" if mechanism.privacy_unit == EXAMPLE else "units",
        runs=len(ledger.composed_runs),
        repo_id=details.repo_id,
        usage=_usage(details, task),
        hyperparameters=[(plain(n), plain(v)) for n, v in details.hyperparameters.items()],
        metrics=[(plain(name), f"{float(value):.4g}") for name, value in details.metrics.items()],
        metrics_are_public=details.metrics_are_public,
        software=", ".join(versions),
    )
    return f"{card}\n"


def renewed(written: str, rendered: str, declared: Collection[str] = ()) -> str:
    """Return the existing card with a new statement and claim, and otherwise unchanged text.

    ``rendered`` is the card that ``render`` makes from the ledger. Its claim, and its values of the
    keys ``declared``, replace those in the metadata. Other metadata are added if they are missing.

    Raises:
        PrivacyError: ``written`` does not have exactly one statement, or has unreadable metadata.
    """
    stated, data = statement_in(written), read_metadata(written)
    if data is None:
        raise PrivacyError(
            "The metadata between the two lines '---' at the top of the card cannot be read as "
            "YAML. Correct them, or move the card away and write a new one."
        )
    ours = read_metadata(rendered) or {}
    theirs = [tag for tag in data.get("tags") or [] if not is_tag(f"{tag}")]
    replaced = {METADATA, *declared}
    data = {n: ours.get(n) if n in replaced else value for n, value in data.items()}
    data |= {n: value for n, value in ours.items() if n not in data}
    data["tags"] = [*dict.fromkeys([*ours.get("tags", []), *theirs])]
    data = {n: value for n, value in data.items() if value is not None}
    text = ModelCard(written, ignore_metadata_errors=True).text.strip("\n")
    text = text.replace(marked(stated), marked(statement_in(rendered)))
    return f"---\n{yaml_dump(data, sort_keys=False).strip()}\n---\n\n{text}\n"


_TASKS = {
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMaskedLM": "fill-mask",
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForImageClassification": "image-classification",
    "ForAudioClassification": "audio-classification",
}


def _task_of(model_class: str | None) -> str | None:
    """Return the Hub's name of the task of a model class; None if it is not known."""
    name = model_class or ""
    return next((task for end, task in _TASKS.items() if name.endswith(end)), None)


def _results(details: CardDetails, task: str | None) -> list[EvalResult] | None:
    """Return public metrics for the model index of the Hub; None if there are none."""
    if not details.metrics or not details.metrics_are_public or task is None:
        return None
    names = [details.datasets] if isinstance(details.datasets, str) else details.datasets
    dataset = names[0] if names else "evaluation data"
    return [
        EvalResult(
            task_type=task,
            dataset_type=dataset,
            dataset_name=dataset,
            metric_type=name,
            metric_value=value,
        )
        for name, value in details.metrics.items()
    ]


def _usage(details: CardDetails, task: str | None) -> str | None:
    """Return code that loads the model; None if neither class nor task is known."""
    place = repr(details.repo_id or ".")
    if details.model_class is None or not details.model_class.isidentifier():
        if task is None:
            return None
        return f"from transformers import pipeline\n\nmodel = pipeline({task!r}, model={place})"
    lines = [f"from transformers import {details.model_class}"]
    if details.adapter:
        base = repr(details.base_model or "the base model")
        if details.num_labels is not None:  # without it, a new head has two labels
            base += f", num_labels={details.num_labels}"
        lines += ["from peft import PeftModel", ""]
        lines += [f"base = {details.model_class}.from_pretrained({base})"]
        lines += [f"model = PeftModel.from_pretrained(base, {place})"]
    else:
        lines += ["", f"model = {details.model_class}.from_pretrained({place})"]
    return "\n".join(lines)
