"""``DPGrapeDPOTrainer`` and ``DPGrapeRewardTrainer``: TRL's training on preferences, private.

An example is a pair of texts, as in TRL, and its two rows count together before there is a norm.
TRL prepares the data and computes what the reference model says; its own loss never runs on a
training batch, of which it would log rewards, margins and accuracies. It serves evaluation, and is
what the loss of single pairs is held against before the first release.

Needs ``pip install 'dp_grape_hf[sft]'``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

from dp_grape_hf.arguments import DPGrapeArguments, accepts_short_names
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.gradients import (
    PREFERENCES,
    REFERENCE,
    PairLoss,
    PreferenceLoss,
    RewardLoss,
    by_halves,
    evaluating,
    side_by_side,
)
from dp_grape_hf.trainer.sft import REFUSED_IF_SET, TRLArguments, TRLMixin

REFUSED_OF_REWARDS = {
    "activation_offloading": REFUSED_IF_SET["activation_offloading"],
    "label_smoothing_factor": "it is about words of a vocabulary, and TRL has no use for it; leave "
    "it at 0",
}
"""Name of an option of ``RewardConfig`` -> why it is refused, and what to do instead."""

REFUSED_OF_DPO = {
    **REFUSED_OF_REWARDS,
    "padding_free": REFUSED_IF_SET["padding_free"],
    "router_aux_loss_coef": "the load-balancing loss of experts averages over the tokens of the "
    "batch; set it to 0.0",
    "sync_ref_model": "it would copy weights beside which updates are kept; leave it at False",
    "use_weighting": "its weights of pairs are not known to this package; leave it at False",
    "ld_alpha": "its shares of long texts are not known to this package; leave it out",
}
"""Name of an option of ``DPOConfig`` -> why it is refused, and what to do instead."""


def _pairs(collator: Callable[[list[Any]], Any], examples: list[Any]) -> dict[str, Any]:
    """Puts the two texts of a pair side by side: (2 B, ...) as (B, 2, ...).

    The collator is TRL's, or one that gives rows in its order: all chosen texts, then the others.
    """
    return side_by_side(collator(examples), len(examples))


class _PairsMixin(TRLMixin):
    """The common part of trainers on pairs."""

    def _with_used_columns(self, dataset: Any, what: str) -> tuple[Any, Any]:
        if what == "public":
            raise PrivacyError(
                "public_dataset was given, and what it holds are no pairs of this trainer. Leave "
                "it out: synthetic inputs serve as well."
            )
        dataset, collator = super()._with_used_columns(dataset, what)
        return dataset, partial(_pairs, collator)

    def _own_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Returns the loss of TRL, and keeps it out of the logs."""
        before = self._metrics
        self._metrics = {mode: defaultdict(list) for mode in before}
        try:
            loss = super(TRLMixin, self).compute_loss(model, inputs)
        finally:
            self._metrics = before
        assert isinstance(loss, Tensor)
        return loss


# ---- Rewards ----


@accepts_short_names
@dataclass(repr=False)
class DPGrapeRewardConfig(TRLArguments, RewardConfig):  # type: ignore[misc]
    """``RewardConfig`` of a differentially private run; see ``DPGrapeArguments``.

    As in ``RewardConfig``, gradient checkpointing is on by default, and bfloat16
    autocast where a GPU has it.

    Raises:
        PrivacyError: also for activation offloading.
    """

    refused_if_set = DPGrapeArguments.refused_if_set | REFUSED_OF_REWARDS


class DPGrapeRewardTrainer(_PairsMixin, RewardTrainer):
    """TRL's ``RewardTrainer`` whose training is differentially private.

    Arguments, guarantee and errors are those of ``DPGrapeMixin``; ``args`` is a
    ``DPGrapeRewardConfig``. An example is a pair of texts, a row of ``train_dataset``; pairs that
    TRL drops for their length are not counted.
    """

    arguments_class: ClassVar[type[Any]] = DPGrapeRewardConfig

    def _loss_of_host(self) -> PairLoss:
        args: Any = self.args
        return RewardLoss(self._own_loss, args.center_rewards_coefficient)


# ---- Direct preference optimisation ----


@accepts_short_names
@dataclass(repr=False)
class DPGrapeDPOConfig(TRLArguments, DPOConfig):  # type: ignore[misc]
    """``DPOConfig`` of a differentially private run; see ``DPGrapeArguments``.

    As in ``DPOConfig``, gradient checkpointing is on by default, and bfloat16
    autocast where a GPU has it.
    ``router_aux_loss_coef`` is 0 unless given.

    Raises:
        PrivacyError: also for a ``loss_type`` in which pairs of a batch are sorted, for an
            ``f_divergence_type`` other than ``reverse_kl``, for ``padding_free``,
            ``sync_ref_model``, ``use_weighting``, ``ld_alpha``, activation offloading and a
            load-balancing loss of experts.
    """

    refused_if_set = DPGrapeArguments.refused_if_set | REFUSED_OF_DPO
    router_aux_loss_coef: float | None = field(
        default=0.0,
        metadata={"help": "Must be 0: the load-balancing loss of experts averages over the batch."},
    )

    def __post_init__(self) -> None:
        """Refuses what belongs to this host, and then what belongs to all."""
        given: Any = self.loss_type
        names = [given] if isinstance(given, str) else given
        if unknown := [name for name in names if name not in PREFERENCES]:
            raise PrivacyError(
                f"loss_type={unknown!r} is refused: aot and aot_unpaired sort the pairs of a "
                f"batch, which couples them. Choose of {', '.join(PREFERENCES)}."
            )
        if self.f_divergence_type != "reverse_kl":
            raise PrivacyError(
                f"f_divergence_type={self.f_divergence_type!r} is refused: its loss is not known "
                "to this package. Leave it at 'reverse_kl'."
            )
        self.router_aux_loss_coef = self.router_aux_loss_coef or 0.0  # None: as the model has it
        super().__post_init__()


class DPGrapeDPOTrainer(_PairsMixin, DPOTrainer):
    """TRL's ``DPOTrainer`` whose training is differentially private.

    Arguments, guarantee and errors are those of ``DPGrapeMixin``; ``args`` is a
    ``DPGrapeDPOConfig``, and ``ref_model`` and ``peft_config`` are taken as by ``DPOTrainer``. An
    example is a prompt with two answers, a row of ``train_dataset``; rows that TRL drops for their
    length are not counted. The reference model runs without gradient and in evaluation mode, on
    each text by itself.

    Raises:
        PrivacyError: also for images in the data.
    """

    arguments_class: ClassVar[type[Any]] = DPGrapeDPOConfig

    def _loss_of_host(self) -> PairLoss:
        if self._is_vision_dataset:
            raise PrivacyError(
                "train_dataset has images, whose patches are not told apart by pairs. Train on "
                "text alone."
            )
        if self.ref_model is not None:
            self.ref_model.eval()
        args: Any = self.args
        weights = args.loss_weights or [1.0] * len(self.loss_types)
        return PreferenceLoss(
            self._own_loss,
            dict(zip(self.loss_types, weights, strict=True)),
            beta=args.beta,
            smoothing=args.label_smoothing,
            tau=args.discopop_tau,
        )

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Adds what the reference model says of the texts of a training batch."""
        inputs = super()._prepare_inputs(inputs)
        if inputs["input_ids"].dim() < 3:  # in evaluation, whose batches are TRL's
            return inputs
        if self.precompute_ref_logps:
            reference = inputs.pop("ref_chosen_logps"), inputs.pop("ref_rejected_logps")
        else:
            with evaluating(self.model):
                model = self.ref_model or self.model
                reference = self.compute_ref_log_probs(model, by_halves(inputs))
        return {**inputs, REFERENCE: torch.stack(reference, 1)}

    def _own_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Hands the reference on in the form of TRL, which looks there if it was precomputed."""
        names = ("ref_chosen_logps", "ref_rejected_logps")
        reference = dict(zip(names, inputs.pop(REFERENCE).chunk(2), strict=True))
        return super()._own_loss(model, {**inputs, **reference})
