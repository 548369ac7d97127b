"""Losses of pairs of a chosen and a rejected text: of reward models, and of DPO.

A pair is one example. A batch has the two texts of a pair as (B, 2, T), the chosen text first. The
model receives them as rows of a batch. The gradient of a pair is the sum of the gradients of its
two rows, before clipping.

Shapes: B pairs, T positions, V words in the vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.gradients.losses.heads import IGNORE_INDEX, Inputs, cross_entropy, next_tokens
from dp_grape_hf.gradients.losses.model_loss import ModelLoss

OfBatch = Callable[[Any, Inputs], Tensor]
"""``(model, pairs) -> scalar``: the mean loss of pairs in the format of ``by_halves``."""


def side_by_side(batch: Mapping[str, Any], size: int) -> Inputs:
    """Return a batch with the chosen texts in the first half of its rows as pairs, (B, 2, ...).

    Args:
        batch: a collated batch; a tensor has 2 B rows, or B rows, which are returned unchanged.
        size: B.

    Raises:
        PrivacyError: if a tensor has neither one nor two rows for each pair.
    """
    pairs: Inputs = {}
    for name, value in batch.items():
        rows = len(value) if isinstance(value, Tensor) and value.dim() else 0
        if rows not in (size, 2 * size):
            raise PrivacyError(
                f"The data collator made {name!r} of {size} pairs with {rows} rows. It must return "
                "two rows for each pair, all chosen texts before the rejected ones, or one row."
            )
        pairs[name] = torch.stack(value.chunk(2), 1) if rows == 2 * size else value
    return pairs


def by_halves(pairs: Mapping[str, Any]) -> Inputs:
    """Return pairs (B, 2, ...) as rows (2 B, ...), all chosen texts before the rejected ones."""
    texts = pairs["input_ids"].shape[:2]
    return {
        name: torch.cat([*value.unbind(1)]) if value.shape[:2] == texts else value
        for name, value in pairs.items()
    }


class PairLoss(ModelLoss):
    """Base class of per-sample losses of pairs.

    Args:
        of_batch: the loss of ordinary training without privacy.
    """

    def __init__(self, of_batch: OfBatch) -> None:
        self._of_batch = of_batch

    def split(self, inputs: Mapping[str, Any]) -> tuple[Inputs, Inputs]:
        """Return the model's inputs (2 B, T), with the rows of a pair together, and all inputs."""
        texts = {n: v.flatten(0, 1) for n, v in inputs.items() if n in _OF_MODEL}
        return {**texts, "use_cache": False}, dict(inputs)

    def of_batch(self, model: Callable[..., Any], inputs: Mapping[str, Any]) -> Tensor:
        """Return the loss of ordinary training without privacy, a scalar."""
        return self._of_batch(model, by_halves(inputs)).float().reshape(())


_OF_MODEL = ("input_ids", "attention_mask", "token_type_ids")


class RewardLoss(PairLoss):
    """``-log sigmoid(r - r' - margin) + c (r + r')^2`` of two rewards (Bradley and Terry).

    Args:
        of_batch: as in ``PairLoss``.
        centering: c, which keeps rewards near zero; None for 0.
    """

    name = "the loss of a pair of rewards"

    def __init__(self, of_batch: OfBatch, centering: float | None) -> None:
        super().__init__(of_batch)
        self._centering = centering or 0.0

    def __call__(self, outputs: Any, labels: Any) -> Tensor:
        """Return the losses (B,) of rewards (2 B, 1)."""
        chosen, rejected = outputs["logits"].float().reshape(-1, 2).unbind(1)
        margin = labels.get("margin", 0.0)
        losses = -functional.logsigmoid(chosen - rejected - margin)
        return losses + self._centering * (chosen + rejected).square()


@dataclass(frozen=True)
class Ratios:
    """The inputs of a DPO loss.

    Args:
        chosen: (B,), log of the ratio of the chosen text's probabilities under the model and the
            reference model.
        rejected: (B,), the same for the rejected text.
        sizes: (B, 2), number of tokens of each completion.
        likelihood: (B,), log-probability of the chosen text under the model.
        beta: factor of the log ratios.
        smoothing: the assumed share of pairs with a wrong preference.
        tau: temperature of ``discopop``.
    """

    chosen: Tensor
    rejected: Tensor
    sizes: Tensor
    likelihood: Tensor
    beta: float
    smoothing: float
    tau: float

    @property
    def margin(self) -> Tensor:
        """The difference of the log ratios, times beta."""
        return self.beta * (self.chosen - self.rejected)

    @property
    def mean_margin(self) -> Tensor:
        """The difference of the log ratios per token."""
        sizes = self.sizes.clamp(min=1)
        return self.chosen / sizes[:, 0] - self.rejected / sizes[:, 1]


def _exo(of: Ratios) -> Tensor:
    won, lost = functional.logsigmoid(of.margin), functional.logsigmoid(-of.margin)
    kept, flipped = torch.tensor([1 - of.smoothing, of.smoothing]).log().tolist()
    return won.exp() * (won - kept) + lost.exp() * (lost - flipped)


def _nca(of: Ratios) -> Tensor:
    chosen, rejected = of.beta * of.chosen, of.beta * of.rejected
    either = functional.logsigmoid(-chosen) + functional.logsigmoid(-rejected)
    return -functional.logsigmoid(chosen) - either / 2


def _robust(of: Ratios) -> Tensor:
    flipped = of.smoothing * functional.logsigmoid(-of.margin)
    right = (1 - of.smoothing) * functional.logsigmoid(of.margin)
    return (flipped - right) / (1 - 2 * of.smoothing)


def _discopop(of: Ratios) -> Tensor:
    share = torch.sigmoid(of.margin / of.tau)
    return -(1 - share) * functional.logsigmoid(of.margin) + share * torch.exp(-of.margin)


PREFERENCES: dict[str, Callable[[Ratios], Tensor]] = {
    "sigmoid": lambda of: -functional.logsigmoid(of.margin),
    "sigmoid_norm": lambda of: -functional.logsigmoid(of.beta * of.mean_margin),
    "hinge": lambda of: (1 - of.margin).relu(),
    "ipo": lambda of: (of.mean_margin - 0.5 / of.beta).square(),
    "exo_pair": _exo,
    "nca_pair": _nca,
    "robust": _robust,
    "bco_pair": lambda of: (
        -functional.logsigmoid(of.beta * of.chosen) - functional.logsigmoid(-of.beta * of.rejected)
    ),
    "sppo_hard": lambda of: (
        (of.chosen - 0.5 / of.beta).square() + (of.rejected + 0.5 / of.beta).square()
    ),
    "apo_zero": lambda of: (
        1 - torch.sigmoid(of.beta * of.chosen) + torch.sigmoid(of.beta * of.rejected)
    ),
    "apo_down": lambda of: 1 + torch.sigmoid(of.beta * of.chosen) - torch.sigmoid(of.margin),
    "discopop": _discopop,
    "sft": lambda of: -of.likelihood / of.sizes[:, 0].clamp(min=1),
}
"""The per-pair losses (B,) of DPO and its variants, by the names of TRL."""

REFERENCE = "reference_logps"
"""Name of the entry of a batch with the texts' log-probabilities under the reference, (B, 2)."""


class PreferenceLoss(PairLoss):
    """The loss of direct preference optimisation (Rafailov et al. 2023) and its variants.

    Args:
        of_batch: as in ``PairLoss``.
        weights: name in ``PREFERENCES`` -> weight in the sum of losses.
        **settings: ``beta``, ``smoothing`` and ``tau`` of ``Ratios``.
    """

    name = "the loss of a pair of texts"

    def __init__(self, of_batch: OfBatch, weights: Mapping[str, float], **settings: float) -> None:
        super().__init__(of_batch)
        self._weights, self._settings = weights, settings

    def __call__(self, outputs: Any, labels: Any) -> Tensor:
        """Return the losses (B,) of logits (2 B, T, V)."""
        mask = labels["completion_mask"].flatten(0, 1)
        words = labels["input_ids"].flatten(0, 1).masked_fill(mask == 0, IGNORE_INDEX)
        targets = next_tokens(words)
        logits = outputs["logits"][:, -targets.shape[1] :]  # after the virtual tokens of a prompt
        losses = cross_entropy(logits.flatten(0, 1), targets.flatten()).view_as(targets)
        likelihoods = -losses.sum(1).unflatten(0, (-1, 2))  # (B, 2)
        chosen, rejected = (likelihoods - labels[REFERENCE]).unbind(1)
        sizes = labels["completion_mask"].sum(2)
        of = Ratios(chosen, rejected, sizes, likelihoods[:, 0], **self._settings)
        return torch.stack([w * PREFERENCES[name](of) for name, w in self._weights.items()]).sum(0)
