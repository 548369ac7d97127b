"""What the heads of Hugging Face models compute: one function per kind of head.

A head's function returns one loss per sample, the mean over the sample's own targets, from logits
and labels. ``losses`` finds the head of a model and runs it.

To add a head, write a function ``(logits, labels, config) -> (B,)`` under ``@head("ForX")``.

Shapes: B samples in the batch, T positions, V words in the vocabulary or classes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional

from dp_grape_hf.errors import PrivacyError, UnsupportedModelError
from dp_grape_hf.per_sample.losses.cross_entropy import IGNORE_INDEX, cross_entropy

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Head:
    """What is known of the models whose class name ends in one way.

    Args:
        loss: ``(logits, labels, config) -> (B,)``, with ``label_smoothing=`` if ``smooths``.
        labels: the model inputs that are labels; several are stacked in dimension 1.
        logits: the model outputs the loss is computed from; several are stacked in dimension 1.
        smooths: whether the Trainer's label smoothing is defined for this head.
        targets: for a head with a label per position, which label (B, T) a position predicts.
        vocabulary: whether the logits are those of the output embeddings, position by position.
        prepare: ``(model, inputs, labels) -> inputs``, what the model derives from labels.
    """

    loss: Callable[..., Tensor]
    labels: tuple[str, ...] = ("labels",)
    logits: tuple[str, ...] = ("logits",)
    smooths: bool = False
    targets: Callable[[Tensor], Tensor] | None = None
    vocabulary: bool = False
    prepare: Callable[[Any, Inputs, Tensor], Inputs] | None = None


HEADS: dict[str, Head] = {}

UNKNOWN_LOSSES = {
    "XLNetLMHeadModel": "predicts words in the order of a permutation",
    "WithLMHeadModel": "predicts words with an adaptive softmax",
    "BlipTextLMHeadModel": "has label smoothing of its own",
    "ProphetNetForCausalLM": "predicts several words at once",
    "ProphetNetForConditionalGeneration": "predicts several words at once",
    "MusicgenForCausalLM": "predicts several codebooks",
    "MusicgenMelodyForCausalLM": "predicts several codebooks",
    "MusicgenForConditionalGeneration": "predicts several codebooks",
    "MusicgenMelodyForConditionalGeneration": "predicts several codebooks",
}
"""Class names that end like a known head, and what is different about their loss."""


def head(*suffixes: str, **facts: Any) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Registers the loss of the models whose class name ends with one of the suffixes.

    Of several suffixes that fit, the longest counts. ``facts`` are further fields of ``Head``.
    """

    def register(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        HEADS.update(dict.fromkeys(suffixes, Head(loss, **facts)))
        return loss

    return register


def next_tokens(labels: Tensor) -> Tensor:
    """Returns for each position the label of the next one, which it predicts; (B, T)."""
    return functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)


def own_tokens(labels: Tensor) -> Tensor:
    """Returns the labels, (B, T), where each position predicts its own."""
    return labels


def decoder_inputs(model: Any, inputs: Inputs, labels: Tensor) -> Inputs:
    """Adds the decoder's inputs as the model makes them of labels: shifted to the right.

    Raises:
        UnsupportedModelError: if the model is no encoder-decoder, or has a shift of another name.
    """
    name = type(model).__name__
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{name} is no encoder-decoder, so it is not known which label its positions predict. "
            "Pass compute_loss_func=f where f(outputs, labels) returns one loss per sample."
        )
    if {"decoder_input_ids", "decoder_inputs_embeds"} & inputs.keys():
        return inputs
    prepare = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    prepare = prepare or getattr(model, "_shift_right", None)
    if prepare is not None:
        return {**inputs, "decoder_input_ids": prepare(labels)}
    shift = getattr(sys.modules[type(model).__module__], "shift_tokens_right", None)
    if shift is None:
        raise UnsupportedModelError(
            f"It is not known how {name} makes its decoder's inputs of labels. Let the data "
            "collator add decoder_input_ids."
        )
    config = model.config
    shifted = shift(labels, config.pad_token_id, config.decoder_start_token_id)
    return {**inputs, "decoder_input_ids": shifted}


@head("ForSequenceClassification", "ForImageClassification", "ForAudioClassification", smooths=True)
def classification(
    logits: Tensor, labels: Tensor, config: Any, label_smoothing: float = 0.0
) -> Tensor:
    """Cross-entropy, or what ``config.problem_type`` asks for; (B, V) -> (B,)."""
    problem = getattr(config, "problem_type", None)
    if problem == "regression" or (problem is None and logits.shape[-1] == 1):
        _refuse_smoothing(label_smoothing, "regression")
        return (logits - labels.view_as(logits)).square().flatten(1).mean(1)
    if problem == "multi_label_classification" or labels.is_floating_point():
        _refuse_smoothing(label_smoothing, "multi-label classification")
        targets = labels.to(logits.dtype)
        losses = functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        return losses.mean(1)
    return choice(logits, labels, config, label_smoothing)


@head("ForMultipleChoice", smooths=True)
def choice(logits: Tensor, labels: Tensor, config: Any, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy of one choice or class per sample; (B, V) -> (B,)."""
    return functional.cross_entropy(
        logits, labels.view(-1), reduction="none", label_smoothing=label_smoothing
    )


@head(
    "ForQuestionAnswering",
    labels=("start_positions", "end_positions"),
    logits=("start_logits", "end_logits"),
)
def question_answering(logits: Tensor, labels: Tensor, config: Any) -> Tensor:
    """Mean cross-entropy of where the answer starts and ends; (B, 2, T), (B, 2) -> (B,).

    A place outside the text counts as zero, as where the answer was cut off.
    """
    positions = logits.shape[-1]
    places = labels.reshape(-1, 2).clamp(0, positions)
    losses = functional.cross_entropy(
        logits.flatten(0, 1), places.flatten(), reduction="none", ignore_index=positions
    )
    return losses.view_as(places).mean(1)


@head("ForTokenClassification", smooths=True, targets=own_tokens)
@head("ForMaskedLM", smooths=True, targets=own_tokens, vocabulary=True)
@head("ForCausalLM", "LMHeadModel", smooths=True, targets=next_tokens, vocabulary=True)
@head(  # decoders whose labels the user shifts
    *("BartForCausalLM", "BlenderbotForCausalLM", "BlenderbotSmallForCausalLM"),
    *("CpmAntForCausalLM", "MarianForCausalLM", "MvpForCausalLM", "PegasusForCausalLM"),
    *("PLBartForCausalLM", "TrOCRForCausalLM", "WhisperForCausalLM"),
    smooths=True,
    targets=own_tokens,
    vocabulary=True,
)
@head(
    *("ForConditionalGeneration", "EncoderDecoderModel", "MarianMTModel"),
    smooths=True,
    targets=own_tokens,
    vocabulary=True,
    prepare=decoder_inputs,
)
def tokens(logits: Tensor, targets: Tensor, config: Any, label_smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy over the sample's own targets; (B, T, V), (B, T) -> (B,)."""
    flat, chosen = logits.flatten(0, 1), targets.flatten()
    if label_smoothing:
        losses = functional.cross_entropy(
            flat.float(),
            chosen,
            reduction="none",
            ignore_index=IGNORE_INDEX,
            label_smoothing=label_smoothing,
        )
    else:
        losses = cross_entropy(flat, chosen)  # (B * T,), zero at ignored positions
    counts = (targets != IGNORE_INDEX).sum(1)
    return losses.view_as(targets).sum(1) / counts.clamp(min=1)


def _refuse_smoothing(label_smoothing: float, problem: str) -> None:
    if label_smoothing:
        raise PrivacyError(f"{label_smoothing=} is not defined for {problem}; set it to 0.")
