"""Per-sample losses: sample i's loss is the mean over the targets of sample i alone.

The loss that a Hugging Face model returns divides by a count over the whole batch. Then one
sample's gradient depends on the number of tokens of other samples, and clipping does not bound the
influence of one sample. So the model runs without labels, and the function of its head in ``heads``
computes the losses from its logits.

Shapes: B samples in the batch, T positions, of which at most K have a label, h hidden features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from dp_grape_hf.errors import PrivacyError, UnsupportedModelError
from dp_grape_hf.gradients.adapters import advice
from dp_grape_hf.gradients.losses.heads import (
    HEADS,
    IGNORE_INDEX,
    UNKNOWN_LOSSES,
    Head,
    Inputs,
    classification,
    is_regression,
)
from dp_grape_hf.gradients.losses.model_loss import ModelLoss, ReturnedLoss, returns_its_loss
from dp_grape_hf.gradients.rows import batch_size_of

LossFunction = Callable[[Any, Tensor | None], Tensor]
"""``(model outputs, labels) -> (B,)``: the type of a user's ``compute_loss_func``."""


@dataclass(frozen=True)
class HeadLoss(ModelLoss):
    """The per-sample loss of one model's head: ``(outputs, labels) -> (B,)``.

    Args:
        model: the model, without PEFT's wrapper.
        head: its head.
        label_smoothing: the Trainer's ``label_smoothing_factor``.
        virtual_tokens: number of positions without a label that PEFT puts before the text.
    """

    model: nn.Module
    head: Head
    label_smoothing: float = 0.0
    virtual_tokens: int = 0
    name: ClassVar[str] = "the head's loss per sample"

    @property
    def regresses(self) -> bool:
        """True if the head is a regression, by ``config.problem_type`` or its default."""
        config = getattr(self.model, "config", None)
        outputs = getattr(config, "num_labels", 0)
        return self.head.loss is classification and is_regression(config, outputs)

    def split(self, inputs: Mapping[str, Any]) -> tuple[Inputs, Tensor | None]:
        """Return the inputs to run the model with, and the labels; None for a batch without."""
        inputs = dict(inputs)
        found = [inputs.pop(name, None) for name in self.head.labels]
        if any(value is None for value in found):
            return inputs, None
        labels = found[0] if len(found) == 1 else torch.stack([x.flatten() for x in found], 1)
        if self.head.prepare is not None:
            inputs = self.head.prepare(self.model, inputs, labels)
        if self.head.describe is not None:
            labels = self.head.describe(self.model, inputs, labels)
        return with_patches(inputs), labels

    def __call__(self, outputs: Any, labels: Tensor | None) -> Tensor:
        """Return the losses (B,), float32.

        Raises:
            PrivacyError: if there are no labels, or a head with a label per position has another
                number of labels.
        """
        if labels is None:
            names = " and ".join(repr(name) for name in self.head.labels)
            raise PrivacyError(
                f"The batch has no {names}, which {type(self.model).__name__} needs for its loss. "
                "Add a column of that name or a data collator that makes it."
            )
        logits = self.logits(outputs)
        if self.head.targets is not None:
            labels = self.targets(labels, logits.shape[1])
        return self.of(logits, labels)

    def of(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the losses (B,) of logits and labels of the same positions."""
        extra = {"label_smoothing": self.label_smoothing} if self.head.smooths else {}
        config = getattr(self.model, "config", None)
        if self.head.targets is None:  # ``tokens`` converts the logits to float32 in parts
            logits = logits.float()
        return self.head.loss(logits, labels, config, **extra)

    def of_batch(self, model: Callable[..., Any], inputs: Mapping[str, Any]) -> Tensor | None:
        """Return the loss that the model itself returns if it receives labels, a scalar.

        None if it returns no loss, or if labels are smoothed, which models do not do.
        """
        takes = signature(self.model.forward).parameters
        named = any(p.kind is p.VAR_KEYWORD for p in takes.values()) or takes.keys() >= {
            *self.head.labels
        }
        if self.label_smoothing or not named or not inputs.keys() >= {*self.head.labels}:
            return None
        config: Any = getattr(self.model, "config", None)
        problem = getattr(config, "problem_type", None)
        outputs = model(**with_patches(dict(inputs)))
        if getattr(config, "problem_type", None) != problem:
            config.problem_type = problem  # models set it when they see labels
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs[0]
        return loss.float().reshape(()) if isinstance(loss, Tensor) and loss.numel() == 1 else None

    def logits(self, outputs: Any) -> Tensor:
        """Return the logits among the model's outputs."""
        names = self.head.logits
        if not isinstance(outputs, Mapping):
            found = list(outputs[: len(names)])
        elif missing := [name for name in names if name not in outputs]:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} returns no {', '.join(missing)}, so its loss is not "
                "known per sample. Pass compute_loss_func=f where f(outputs, labels) returns one "
                "loss per sample."
            )
        else:
            found = [outputs[name] for name in names]
        return found[0] if len(found) == 1 else torch.stack(found, 1)

    def fits(self, labels: Tensor, positions: int) -> bool:
        """Return whether the number of positions fits the labels, with PEFT's virtual tokens."""
        return labels.dim() == 2 and positions - labels.shape[1] in (0, self.virtual_tokens)

    def targets(self, labels: Tensor, positions: int) -> Tensor:
        """Return the label that each position predicts, (B, positions).

        PEFT's prompt tuning puts virtual tokens without labels before the text.
        """
        assert self.head.targets is not None
        if not self.fits(labels, positions):
            raise PrivacyError(
                f"The {labels.dim()}-dimensional labels are not one per position of the model. "
                f"{type(self.model).__name__} needs labels of shape (B, T), with {IGNORE_INDEX} "
                "at positions without a label."
            )
        missing = positions - labels.shape[1]
        return self.head.targets(functional.pad(labels, (missing, 0), value=IGNORE_INDEX))


def loss_for(model: nn.Module, label_smoothing: float = 0.0) -> HeadLoss | ReturnedLoss:
    """Return the per-sample loss of a model, chosen by its class name.

    If the name of a user's class is not known, the loss is the one that the model returns for a
    batch of one example.

    Args:
        model: the model, with PEFT's wrapper or without.
        label_smoothing: the share of the loss, in [0, 1), that is a mean over the vocabulary.

    Raises:
        UnsupportedModelError: if the loss of this head is not known per sample.
        PrivacyError: if label smoothing is not defined for this head.
    """
    base: Any = model
    if hasattr(base, "get_base_model"):  # PEFT
        base = base.get_base_model()
    name = type(base).__name__
    fitting = [suffix for suffix in (*HEADS, *UNKNOWN_LOSSES) if name.endswith(suffix)]
    suffix = max(fitting, key=len, default="")
    if suffix not in HEADS:
        if _is_contrastive(base):
            raise UnsupportedModelError(
                f"The loss of {name} is not known per sample: it is contrastive, and compares the "
                "samples of a batch with each other, so there are no per-sample gradients to clip. "
                "Train a head on its features (a model ForImageClassification), or pass "
                "compute_loss_func=f where f(outputs, labels) returns one loss per sample, of "
                "shape (B,), and compares each with negatives in its row or of public data."
            )
        if not suffix and returns_its_loss(base) and not label_smoothing:
            return ReturnedLoss(base)
        why = f" (it {UNKNOWN_LOSSES[suffix]})" if suffix else ""
        raise UnsupportedModelError(
            f"The loss of {name} is not known per sample{why}. Pass compute_loss_func=f where "
            "f(outputs, labels) returns one loss per sample, of shape (B,), each computed from "
            "that sample alone. The package knows the losses of models whose names end with: "
            f"{', '.join(sorted(HEADS))}."
        )
    if suffix == "ForConditionalGeneration" and _reads_on(base):
        suffix = "ForCausalLM"
    head = HEADS[suffix]
    if label_smoothing and not head.smooths:
        raise PrivacyError(f"{label_smoothing=} is not defined for {name}. Set it to 0.")
    return HeadLoss(base, head, label_smoothing, _virtual_tokens(model))


def _reads_on(model: Any) -> bool:
    """Return whether a model generates text with a decoder alone, after images or sounds."""
    config: Any = getattr(model, "config", None)
    encodes = getattr(config, "is_encoder_decoder", False)
    return not encodes and hasattr(config, "get_text_config") and config.get_text_config() != config


def _is_contrastive(model: nn.Module) -> bool:
    """Return whether the loss of a model is contrastive and off by default, as for CLIP."""
    asked = signature(model.forward).parameters.get("return_loss")
    return asked is not None and asked.default is not True


def _virtual_tokens(model: Any) -> int:
    """Return the number of positions that PEFT adds before the text, in the model's outputs."""
    config = getattr(model, "active_peft_config", None)
    if config is None or not config.is_prompt_learning:
        return 0
    if config.peft_type == "CPT":
        raise UnsupportedModelError(
            "The loss of PEFT's CPT weighs the tokens of its context, and is not known per "
            f"sample. Use prompt tuning, or pass compute_loss_func.{advice(model)}"
        )
    in_outputs = config.task_type != "SEQ_2_SEQ_LM"  # there the encoder reads the prompt
    return config.num_virtual_tokens if in_outputs else 0


def split(loss: LossFunction, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], Tensor | None]:
    """Return the inputs to run the model with, and the labels, for any loss."""
    if isinstance(loss, ModelLoss):
        return loss.split(inputs)
    inputs = dict(inputs)
    labels = inputs.pop("labels", None)
    return inputs, labels


def losses_of(model: Callable[..., Any], loss: LossFunction, inputs: Mapping[str, Any]) -> Tensor:
    """Run a model on a batch; return its losses (B,)."""
    if isinstance(loss, ReturnedLoss):
        return loss.each(model, inputs)
    given, labels = split(loss, inputs)
    return checked(loss(model(**given), labels), batch_size_of(inputs))


def with_patches(inputs: Inputs) -> Inputs:
    """Return inputs with the patches of all images flattened, if the batch has them by sample.

    Qwen-VL needs the patches (P, d) of all images, and the sizes (n, 3) of the images. A batch has
    them by sample as (B, P / B, d) and (B, n / B, 3).
    """
    flat = dict(inputs)
    for sizes, patches in _PATCHES.items():
        if sizes in inputs and inputs[sizes].dim() == 3:
            flat |= {name: inputs[name].flatten(0, 1) for name in (sizes, patches)}
    return flat


_PATCHES = {"image_grid_thw": "pixel_values", "video_grid_thw": "pixel_values_videos"}


# ---- Logits at labelled positions only ----


class LabelledPositions:
    """Context of a forward pass that computes the vocabulary's logits only at labelled positions.

    Most positions of a masked language model, or of training on completions, have no label. Inside
    this context, the output embeddings receive (B, K, h) of the hidden states (B, T, h): the
    labelled positions of each sample, filled up with ignored positions. K is the largest number of
    labels of a sample. Losses and gradients do not change.

    Args:
        loss: the loss of the model.
        labels: the labels of the batch.
    """

    def __init__(self, loss: HeadLoss, labels: Tensor) -> None:
        self._loss, self._labels = loss, labels
        self._targets: Tensor | None = None  # (B, K), once the output embeddings were called

    def __enter__(self) -> LabelledPositions:
        self._hook = None
        find = getattr(self._loss.model, "get_output_embeddings", None)
        embeddings = find() if self._loss.head.vocabulary and find is not None else None
        if isinstance(embeddings, nn.Module):
            self._hook = embeddings.register_forward_pre_hook(self._gather)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._hook is not None:
            self._hook.remove()

    def losses(self, outputs: Any) -> Tensor | None:
        """Return the losses (B,); None if the logits do not fit to the labelled positions."""
        if self._targets is None:
            return self._loss(outputs, self._labels)
        logits = self._loss.logits(outputs)
        if logits.shape[:2] != self._targets.shape:
            return None
        return self._loss.of(logits, self._targets)

    def _gather(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        hidden = args[0] if len(args) == 1 else None
        if not isinstance(hidden, Tensor) or hidden.dim() != 3 or len(hidden) != len(self._labels):
            return None
        if not self._loss.fits(self._labels, hidden.shape[1]):
            return None
        targets = self._loss.targets(self._labels, hidden.shape[1])  # (B, T)
        ignored = targets == IGNORE_INDEX
        most = max(1, targets.shape[1] - int(ignored.sum(1).min()))  # K
        if 4 * most > 3 * targets.shape[1]:
            return None
        # Sort instead of selecting by value, which ``Selections`` would track.
        chosen = torch.argsort(ignored.byte(), dim=1, stable=True)[:, :most]
        self._targets = targets.gather(1, chosen)
        return (hidden.gather(1, chosen[:, :, None].expand(-1, -1, hidden.shape[2])),)


# ---- The user's loss ----


def with_three_arguments(function: Callable[..., Tensor] | None) -> Any:
    """Return the user's loss with the three arguments of the Trainer, if it takes only two."""
    if function is None or "num_items_in_batch" in signature(function).parameters:
        return function
    if any(p.kind is p.VAR_KEYWORD for p in signature(function).parameters.values()):
        return function

    def called(outputs: Any, labels: Tensor | None, num_items_in_batch: Any = None) -> Tensor:
        return function(outputs, labels)

    return called


def checked(loss: Tensor, batch_size: int) -> Tensor:
    """Return the losses if there is one per sample.

    Raises:
        PrivacyError: for any other shape; a batch mean cannot be split into per-sample losses.
    """
    if not isinstance(loss, torch.Tensor) or loss.shape != (batch_size,):
        kind = type(loss).__name__
        if isinstance(loss, torch.Tensor):
            same = loss.dim() == 1
            kind = "tensor of another length" if same else f"{loss.dim()}-dimensional tensor"
        raise PrivacyError(
            f"The loss is a {kind}, but clipping needs one loss per sample, shape (B,). Return "
            "losses without reducing over the batch (reduction='none', then a mean over each "
            "sample's own tokens)."
        )
    return loss
