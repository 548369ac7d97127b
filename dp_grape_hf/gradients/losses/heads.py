"""The per-sample losses of the heads of Hugging Face models: one function for each kind of head.

The function of a head computes one loss per sample from logits and labels: the mean over the
sample's own targets. ``losses`` finds the head of a model and runs it.

To add a head, write a function ``(logits, labels, config) -> (B,)`` under ``@head("ForX")``.

Shapes: B samples in the batch, T positions, V words in the vocabulary or classes.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from dp_grape_hf.errors import PrivacyError, UnsupportedModelError

IGNORE_INDEX = -100

# ---- Cross-entropy over a vocabulary ----

# Torch's cross-entropy keeps the log-probabilities, and forms their gradient and the gradient of
# the logits: three float32 tensors of the size of the logits. This one keeps the logits, which
# exist anyway, and one number per position. The gradient then overwrites the logits.

_AT_ONCE = 2**24  # logits that are converted to float32 in one operation


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return ``-log softmax(logits)[target]`` per position, (N,), float32; 0 at ignored positions.

    The backward pass overwrites ``logits``, unless the graph is kept.

    Args:
        logits: (N, V), of any floating-point dtype; the computation is in float32.
        targets: (N,), integers below V, or ``IGNORE_INDEX``.
    """
    losses: Tensor = _CrossEntropy.apply(logits, targets)[0]
    return losses


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        parts = logits.split(_rows(logits))
        sums = torch.cat([part.float().logsumexp(1) for part in parts])  # (N,)
        picked = logits.gather(1, targets.clamp(min=0)[:, None])[:, 0].float()
        return (sums - picked).masked_fill(targets == IGNORE_INDEX, 0.0), sums

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, _: Any) -> tuple[Tensor, None]:
        """Return ``(softmax(logits) - one_hot(target)) * grad_output``, in the logits' memory.

        If the graph is kept for another backward pass, the logits are not overwritten. If another
        operation needs the logits, autograd raises an error because they were changed.
        """
        logits, targets, sums = ctx.saved_tensors
        scale = grad_output.masked_fill(targets == IGNORE_INDEX, 0.0)[:, None]
        index = targets.clamp(min=0)[:, None]
        kept = torch._C._autograd._get_current_graph_task_keep_graph()
        reused = logits.is_contiguous() and not kept
        gradient = logits.detach() if reused else torch.empty_like(logits)
        parts = (x.split(_rows(logits)) for x in (gradient, logits, sums[:, None], index, scale))
        for out, part, total, target, factor in zip(*parts, strict=True):
            in_place = out.dtype is torch.float32
            exact = out if in_place else torch.empty_like(out, dtype=torch.float32)
            torch.sub(part, total, out=exact).exp_()  # the probabilities
            exact.scatter_add_(1, target, torch.full_like(total, -1.0)).mul_(factor)
            if not in_place:
                out.copy_(exact)
        return gradient, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, logits: Tensor, targets: Tensor) -> tuple[Any, Any]:
        """Flatten the positions of all samples: no position depends on another."""
        size = info.batch_size
        logits, targets = (
            x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip((logits, targets), in_dims, strict=True)
        )
        outputs = _CrossEntropy.apply(logits.flatten(0, 1), targets.flatten())
        return tuple(x.unflatten(0, (size, -1)) for x in outputs), (0, 0)


def _rows(logits: Tensor) -> int:
    return max(1, _AT_ONCE // logits.shape[1])


Inputs = dict[str, Any]


@dataclass(frozen=True)
class Head:
    """The loss of the models whose class name ends with one suffix.

    Args:
        loss: ``(logits, labels, config) -> (B,)``, with ``label_smoothing=`` if ``smooths``.
        labels: the model inputs that are labels; several are stacked in dimension 1.
        logits: the model outputs that the loss needs; several are stacked in dimension 1.
        smooths: whether the Trainer's label smoothing is defined for this head.
        targets: for a head with a label per position, ``labels -> (B, T)``: the label that each
            position predicts.
        vocabulary: whether the logits are the output of the output embeddings at each position.
        prepare: ``(model, inputs, labels) -> inputs``: adds the inputs that the model derives from
            labels.
        describe: ``(model, inputs, labels) -> labels``: adds values of the inputs that the loss
            needs.
    """

    loss: Callable[..., Tensor]
    labels: tuple[str, ...] = ("labels",)
    logits: tuple[str, ...] = ("logits",)
    smooths: bool = False
    targets: Callable[[Tensor], Tensor] | None = None
    vocabulary: bool = False
    prepare: Callable[[Any, Inputs, Tensor], Inputs] | None = None
    describe: Callable[[Any, Inputs, Tensor], Tensor] | None = None


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
"""Class names that end like a supported head, and how their loss differs."""


def head(*suffixes: str, **facts: Any) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Register the loss of the models whose class name ends with one of the suffixes.

    If several suffixes fit, the longest counts.

    Args:
        *suffixes: ends of class names.
        **facts: further fields of ``Head``.
    """

    def register(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        HEADS.update(dict.fromkeys(suffixes, Head(loss, **facts)))
        return loss

    return register


def next_tokens(labels: Tensor) -> Tensor:
    """Return the label of the next position for each position, (B, T)."""
    return functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)


def own_tokens(labels: Tensor) -> Tensor:
    """Return the labels (B, T) unchanged: each position predicts its own label."""
    return labels


def decoder_inputs(model: Any, inputs: Inputs, labels: Tensor) -> Inputs:
    """Add the decoder's inputs, which the model makes by shifting the labels to the right.

    Raises:
        UnsupportedModelError: if the model is no encoder-decoder, or its shift is not known.
    """
    name = type(model).__name__
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{name} is no encoder-decoder. The label that each position predicts is not known. "
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
            f"{name} has no known function that makes decoder inputs from labels. Let the data "
            "collator add decoder_input_ids."
        )
    config = model.config
    shifted = shift(labels, config.pad_token_id, config.decoder_start_token_id)
    return {**inputs, "decoder_input_ids": shifted}


def with_frames(model: Any, inputs: Inputs, labels: Tensor) -> Tensor:
    """Return labels (B, 1 + L): the number of logit frames of each sound, and the labels (B, L).

    Raises:
        UnsupportedModelError: if the number of frames of a sound is not known.
    """
    names = ("_get_feat_extract_output_lengths", "_get_subsampling_output_length")
    frames = next((f for name in names if (f := getattr(model, name, None)) is not None), None)
    if frames is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no known function for the number of frames of a sound, "
            "which its loss needs. Pass compute_loss_func=f where f(outputs, labels) returns one "
            "loss per sample."
        )
    mask = inputs.get("attention_mask")
    if mask is None:
        mask = torch.ones_like(inputs[model.main_input_name][:, :, None].flatten(2)[:, :, 0])
    return torch.cat([frames(mask.sum(1).long())[:, None].to(labels.dtype), labels], 1)


def is_regression(config: Any, outputs: int) -> bool:
    """Return whether a classifier is a regression, by the rule of transformers."""
    problem = getattr(config, "problem_type", None)
    return problem == "regression" or (problem is None and outputs == 1)


@head("ForSequenceClassification", "ForImageClassification", "ForAudioClassification", smooths=True)
def classification(
    logits: Tensor, labels: Tensor, config: Any, label_smoothing: float = 0.0
) -> Tensor:
    """Return the loss of ``config.problem_type``, by default cross-entropy; (B, V) -> (B,)."""
    problem = getattr(config, "problem_type", None)
    if is_regression(config, logits.shape[-1]):
        _refuse_smoothing(label_smoothing, "regression")
        return (logits - labels.view_as(logits)).square().flatten(1).mean(1)
    if problem == "multi_label_classification" and not labels.is_floating_point():
        raise PrivacyError(
            f"The labels are {str(labels.dtype).removeprefix('torch.')}, but problem_type="
            "'multi_label_classification' needs floats. The model itself fails on them too, also "
            "in evaluation. Make the labels float when you make the rows, for example "
            "[float(label) for label in labels]."
        )
    if problem == "multi_label_classification" or labels.is_floating_point():
        _refuse_smoothing(label_smoothing, "multi-label classification")
        targets = labels.to(logits.dtype)
        losses = functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        return losses.mean(1)
    return choice(logits, labels, config, label_smoothing)


@head("ForMultipleChoice", smooths=True)
def choice(logits: Tensor, labels: Tensor, config: Any, label_smoothing: float = 0.0) -> Tensor:
    """Return the cross-entropy of one choice or class per sample; (B, V) -> (B,)."""
    return functional.cross_entropy(
        logits, labels.view(-1), reduction="none", label_smoothing=label_smoothing
    )


@head(
    "ForQuestionAnswering",
    labels=("start_positions", "end_positions"),
    logits=("start_logits", "end_logits"),
)
def question_answering(logits: Tensor, labels: Tensor, config: Any) -> Tensor:
    """Return the mean cross-entropy of the answer's start and end; (B, 2, T), (B, 2) -> (B,).

    A position outside the text (of an answer that was cut off) has loss zero.
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
    """Return the mean cross-entropy over each sample's targets; (B, T, V), (B, T) -> (B,)."""
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


@head("ForCTC", describe=with_frames)
def alignment(logits: Tensor, labels: Tensor, config: Any) -> Tensor:
    """Return the CTC loss of each sound; (B, T, V), (B, 1 + L) -> (B,).

    The text consists of the labels that are neither ignored nor the blank.
    ``config.ctc_loss_reduction="mean"`` divides by its length, as torch does. A text that does not
    fit into the frames has an infinite loss, or loss zero with ``config.ctc_zero_infinity``.
    """
    frames, targets, blank = labels[:, 0], labels[:, 1:], config.pad_token_id
    left_out = (targets == IGNORE_INDEX) | (targets == blank)
    order = torch.argsort(left_out.byte(), dim=1, stable=True)  # the text first
    lengths = (~left_out).sum(1)
    losses = functional.ctc_loss(
        logits.log_softmax(-1).transpose(0, 1),
        targets.masked_fill(left_out, blank).gather(1, order),
        frames,
        lengths,
        blank=blank,
        reduction="none",
        zero_infinity=config.ctc_zero_infinity,
    )
    return losses / lengths.clamp(min=1) if config.ctc_loss_reduction == "mean" else losses


def with_the_mask(model: Any, inputs: Inputs, labels: Tensor) -> Inputs:
    """Return inputs with the mask of patches (B, patches), ``bool_masked_pos``, from the labels."""
    return {**inputs, "bool_masked_pos": labels}


def masked_pixels(model: Any, inputs: Inputs, labels: Tensor) -> Tensor:
    """Return images (B, C, H, W) with one channel more, which is 1 where a patch is masked."""
    pixels, patch = inputs["pixel_values"], model.config.patch_size
    side = model.config.image_size // patch
    mask = labels.reshape(-1, side, side).to(pixels.dtype)
    mask = mask.repeat_interleave(patch, 1).repeat_interleave(patch, 2)
    return torch.cat([pixels, mask[:, None]], 1)


@head(
    "ForMaskedImageModeling",
    labels=("bool_masked_pos",),
    logits=("reconstruction",),
    prepare=with_the_mask,
    describe=masked_pixels,
)
def masked_image(logits: Tensor, labels: Tensor, config: Any) -> Tensor:
    """Return the mean absolute error of masked pixels; (B, C, H, W), (B, C + 1, H, W) -> (B,)."""
    pixels, mask = labels[:, :-1], labels[:, -1:]
    errors = ((logits - pixels).abs() * mask).flatten(1).sum(1)
    return errors / (mask.flatten(1).sum(1) + 1e-5) / config.num_channels


def with_images(model: Any, inputs: Inputs, labels: Tensor) -> Inputs:
    """Return the inputs of a model that masks by noise, and whose labels are its images.

    Raises:
        UnsupportedModelError: if the batch has no noise. The model would draw it in evaluation mode
            too, and the loss of an example would be random.
    """
    if "noise" not in inputs:
        raise UnsupportedModelError(
            f"{type(model).__name__} draws the masked patches again in every pass, so the loss of "
            "an example is random. Let the data collator draw them for each example: "
            "noise=torch.rand(B, patches)."
        )
    return {**inputs, "pixel_values": labels}


def masked_patches(model: Any, inputs: Inputs, labels: Tensor) -> Tensor:
    """Return patches (B, T, d) with one number more, which is 1 where a patch is masked."""
    patches, noise = model.patchify(labels), inputs["noise"]
    if model.config.norm_pix_loss:
        means, variances = patches.mean(-1, keepdim=True), patches.var(-1, keepdim=True)
        patches = (patches - means) / (variances + 1e-6).sqrt()
    kept = int(noise.shape[1] * (1 - model.config.mask_ratio))
    masked = noise.argsort(1).argsort(1) >= kept
    return torch.cat([patches, masked[:, :, None].to(patches.dtype)], 2)


@head(
    "ViTMAEForPreTraining", labels=("pixel_values",), prepare=with_images, describe=masked_patches
)
def masked_autoencoding(logits: Tensor, labels: Tensor, config: Any) -> Tensor:
    """Return the mean squared error of masked patches; (B, T, d), (B, T, d + 1) -> (B,)."""
    patches, masked = labels[:, :, :-1], labels[:, :, -1]
    errors = (logits - patches).square().mean(2)
    return (errors * masked).sum(1) / masked.sum(1)


def _refuse_smoothing(label_smoothing: float, problem: str) -> None:
    if label_smoothing:
        raise PrivacyError(f"{label_smoothing=} is not defined for {problem}. Set it to 0.")
