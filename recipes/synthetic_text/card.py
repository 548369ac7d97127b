"""The card of a synthetic data set, as the ledger of its model supports it; a table of results."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from dp_grape_hf.accounting import Adjacency, rounded_up
from dp_grape_hf.ledger import EXAMPLE, LEDGER_NAME, Ledger
from dp_grape_hf.publishing import epsilon_text, metadata_of
from recipes.common.markdown import table


def render(ledger: Ledger, results: Mapping[str, Any], *, public: bool) -> str:
    """Return the card as Markdown with the Hub's metadata.

    Args:
        ledger: of the model that the texts were sampled from.
        results: of the recipe. Its numbers from real texts are shown only if these are public.
        public: whether the held-out real texts are.
    """
    mechanism = ledger.mechanism
    settings, counts = results["settings"], results["filter"]
    spent = epsilon_text(ledger.epsilon()) if ledger.private else "none"
    facts = metadata_of(ledger, spent) | {"unit": mechanism.privacy_unit}
    tags = ["synthetic", *(["differential-privacy"] if ledger.private else [])]
    metadata = {"task_categories": ["text-classification"], "tags": tags}
    metadata |= {"differential_privacy": facts} if ledger.private else {}
    front = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)
    rows = [
        *((name, f"{value}") for name, value in facts.items()),
        ("sampling", mechanism.sampling_in_words),
        ("private updates", f"{ledger.steps}"),
        ("labels", ", ".join(settings["labels"])),
        ("texts generated for each label", f"{settings['texts_per_label']}"),
        ("temperature, top_p", f"{settings['temperature']:g}, {settings['top_p']:g}"),
        *((f"texts: {name}", f"{count}") for name, count in counts.items()),
    ]
    return f"""---
{front}---

# Synthetic texts with labels

{_claim(ledger, facts)}

{table(["Quantity", "Value"], rows)}
{LEDGER_NAME} is the ledger of the language model. `dp-grape ledger .` computes ε from it again.

## What ε covers

* A language model was fine-tuned on private texts, each behind a control code with its label. This
  training is what ε bounds.
* Generation and filtering are post-processing: they read the trained model and synthetic texts, and
  no private text. So the data set has the ε of the model, and every use of it spends no more.
* The control codes and the number of texts for each label were declared. They do not come from the
  private texts, so the proportions of the labels are not those of the private data.

## What ε does not cover

* {_evaluation(results, public=public)}
* The choice of options, or of this data set, among several runs on the same private texts.
* The number of private texts, and the texts that the public base model was pretrained on.
* Other models or data sets that were made from the same private texts: their ε adds up.
"""


def _claim(ledger: Ledger, facts: Mapping[str, Any]) -> str:
    if not ledger.private:
        return (
            f"**These texts have no privacy guarantee**: {'; '.join(ledger.not_private_reasons)}."
        )
    replaced = ledger.mechanism.adjacency == Adjacency.REPLACE_ONE
    unit = f"`{facts['unit']}` with all its rows"
    if facts["unit"] == EXAMPLE:
        unit = "row (a row is an example: declared by the user)"
    return (
        "These texts were sampled from a model that was trained with differential privacy: "
        f"**ε = {facts['epsilon']}** at δ = {facts['delta']:g}, for "
        f"{'replacing' if replaced else 'adding or removing'} one {unit} of the private "
        "training data."
    )


def _evaluation(results: Mapping[str, Any], *, public: bool) -> str:
    if not public:
        return (
            "Evaluation on real texts. No such number is on this card, because the texts were not "
            "declared public. If you publish one, ε does not cover it."
        )
    found = results["evaluation"]
    return (
        "Evaluation on real texts, which their owner declares public. A classifier that was "
        f"trained on these texts alone labels {found['accuracy']['synthetic']:.1%} of "
        f"{found['texts']['test']} held-out real texts right."
    )


# ---- Results ----


def as_markdown(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the results of several runs as one table."""
    found: dict[str, list[str]] = {}  # what real texts alone give is in several records
    for record in records:
        evaluation, spent = record["evaluation"], record["privacy"]
        counts, scores = evaluation["texts"], evaluation["accuracy"]
        distances = {name: f"{d:.3f}" for name, d in evaluation["frechet_distance"].items()}
        real, kept = f"{counts['real']:,}", f"{counts['synthetic']:,}"
        found |= {
            "real texts, without privacy": ["∞", real, _percent(scores["real"]), distances["real"]]
        }
        if "direct" in scores:
            epsilon = f"{rounded_up(evaluation['epsilon_of_direct'], 2):g}"
            title = "real texts, privately"
            found[title] = [epsilon, real, _percent(scores["direct"]), ""]
        title, epsilon = "synthetic texts of the public model as it is", "0"
        if spent is not None:
            epsilon = f"{rounded_up(spent['epsilon'], 2):g}" if spent["private"] else "∞"
            title = f"synthetic texts, ε = {epsilon}"
        found[title] = [epsilon, kept, _percent(scores["synthetic"]), distances["synthetic"]]
    head = ["Classifier trained on", "ε", "Texts", "Accuracy on real texts", "Fréchet distance"]
    return table(head, ([title, *cells] for title, cells in found.items()))


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"
