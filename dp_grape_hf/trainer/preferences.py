"""``DPGrapeDPOTrainer`` and ``DPGrapeRewardTrainer``: TRL's training on preferences, private.

An example is a pair of texts, as in TRL. The gradients of its two rows are added before clipping.
TRL prepares the data and runs the reference model. Its loss never runs on a training batch, because
it would log rewards, margins and accuracies. It is used in evaluation, and before the first update
the loss of single pairs is compared with it.

Needs ``pip install 'dp_grape_hf[sft]'``.
"""

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
    without_checkpointing,
)
from dp_grape_hf.trainer.sft import REFUSED_IF_SET, TRLArguments, TRLMixin

REFUSED_OF_REWARDS = {
    "activation_offloading": REFUSED_IF_SET["activation_offloading"],
    "label_smoothing_factor": "it smooths classes, and a pair of texts has none; leave it at 0",
}
"""Name of an option of ``RewardConfig`` -> why it is not supported, and what to do instead."""

REFUSED_OF_DPO = {
    **REFUSED_OF_REWARDS,
    "padding_free": REFUSED_IF_SET["padding_free"],
    "router_aux_loss_coef": "the load-balancing loss of experts averages over the tokens of the "
    "batch; set it to 0.0",
    "sync_ref_model": "it would copy weights without their separately stored updates; leave it at "
    "False",
    "use_weighting": "the loss of single pairs does not support weights; leave it at False",
    "ld_alpha": "the loss of single pairs does not support weights of long texts; leave it out",
}
"""Name of an option of ``DPOConfig`` -> why it is not supported, and what to do instead."""


def _pairs(collator: Callable[[list[Any]], Any], examples: list[Any]) -> dict[str, Any]:
    """Return a collated batch of pairs: (2 B, ...) as (B, 2, ...).

    The collator returns rows in TRL's order: all chosen texts, then all rejected ones.
    """
    return side_by_side(collator(examples), len(examples))


class _PairsMixin(TRLMixin):
    """The common part of trainers on pairs."""

    def _with_used_columns(self, dataset: Any, what: str) -> tuple[Any, Any]:
        if what == "public":
            raise PrivacyError(
                "public_dataset was passed, and this trainer cannot read it: its examples are no "
                "pairs. Leave it out: synthetic inputs serve as well."
            )
        dataset, collator = super()._with_used_columns(dataset, what)
        return dataset, partial(_pairs, collator)

    def _loss_of_trl(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Return the loss of TRL, without logging its metrics."""
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
    """``RewardConfig`` of a differentially private run; see ``TRLArguments``.

    Raises:
        PrivacyError: also for activation offloading.
    """

    refused_if_set = DPGrapeArguments.refused_if_set | REFUSED_OF_REWARDS


class DPGrapeRewardTrainer(_PairsMixin, RewardTrainer):
    """TRL's ``RewardTrainer`` whose training is differentially private.

    Arguments, guarantee and errors are as in ``DPGrapeMixin``; ``args`` is a
    ``DPGrapeRewardConfig``. An example is a pair of texts, a row of ``train_dataset``. Pairs that
    TRL drops for their length are not counted.
    """

    arguments_class: ClassVar[type[Any]] = DPGrapeRewardConfig

    def _loss_of_host(self) -> PairLoss:
        args: Any = self.args
        return RewardLoss(self._loss_of_trl, args.center_rewards_coefficient)


# ---- Direct preference optimisation ----


@accepts_short_names
@dataclass(repr=False)
class DPGrapeDPOConfig(TRLArguments, DPOConfig):  # type: ignore[misc]
    """``DPOConfig`` of a differentially private run; see ``TRLArguments``.

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
        """Check the options of TRL, and then all others."""
        given: Any = self.loss_type
        names = [given] if isinstance(given, str) else given
        if unknown := [name for name in names if name not in PREFERENCES]:
            raise PrivacyError(
                f"loss_type={unknown!r} is not supported: aot and aot_unpaired sort the pairs of a "
                "batch, so one pair would influence others. Choose one or more of "
                f"{', '.join(PREFERENCES)}."
            )
        if self.f_divergence_type != "reverse_kl":
            raise PrivacyError(
                f"f_divergence_type={self.f_divergence_type!r} is not supported: the loss of "
                "single pairs is implemented for 'reverse_kl' only. Leave it at 'reverse_kl'."
            )
        self.router_aux_loss_coef = self.router_aux_loss_coef or 0.0  # None: as the model has it
        super().__post_init__()


class DPGrapeDPOTrainer(_PairsMixin, DPOTrainer):
    """TRL's ``DPOTrainer`` whose training is differentially private.

    Arguments, guarantee and errors are as in ``DPGrapeMixin``; ``args`` is a
    ``DPGrapeDPOConfig``, and ``ref_model`` and ``peft_config`` work as in ``DPOTrainer``. An
    example is a prompt with two answers, a row of ``train_dataset``. Rows that TRL drops for their
    length are not counted. The reference model runs without gradients and in evaluation mode, so
    its output for a text does not depend on other texts.

    Raises:
        PrivacyError: also for images in the data.
    """

    arguments_class: ClassVar[type[Any]] = DPGrapeDPOConfig

    def _loss_of_host(self) -> PairLoss:
        if self._is_vision_dataset:
            raise PrivacyError(
                "train_dataset has images, which DPGrapeDPOTrainer does not support: their patches "
                "cannot be assigned to pairs. Train on text alone."
            )
        if self.ref_model is not None:
            self.ref_model.eval()
        args: Any = self.args
        weights = args.loss_weights or [1.0] * len(self.loss_types)
        return PreferenceLoss(
            self._loss_of_trl,
            dict(zip(self.loss_types, weights, strict=True)),
            beta=args.beta,
            smoothing=args.label_smoothing,
            tau=args.discopop_tau,
        )

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Add the reference model's log probabilities of the texts to a training batch."""
        inputs = super()._prepare_inputs(inputs)
        if inputs["input_ids"].dim() < 3:  # in evaluation, batches have the form of TRL
            return inputs
        if self.precompute_ref_logps:
            reference = inputs.pop("ref_chosen_logps"), inputs.pop("ref_rejected_logps")
        else:
            with evaluating(self.model), without_checkpointing(self.model):
                model = self.ref_model or self.model
                reference = self.compute_ref_log_probs(model, by_halves(inputs))
        return {**inputs, REFERENCE: torch.stack(reference, 1)}

    def _loss_of_trl(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Return the loss of TRL, with the reference under the names that TRL reads."""
        names = ("ref_chosen_logps", "ref_rejected_logps")
        reference = dict(zip(names, inputs.pop(REFERENCE).chunk(2), strict=True))
        # TRL would switch checkpointing off and on again for each batch. Each time, transformers
        # adds hooks to the model, and a model that changes with private examples is refused.
        with without_checkpointing(model):
            return super()._loss_of_trl(model, {**inputs, **reference})
