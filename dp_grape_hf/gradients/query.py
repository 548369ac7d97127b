"""The base class of plug-in engines, which compute a vector for each sample instead of a gradient.

The mechanism clips and sums these vectors and adds noise, as for gradients. So the sensitivity is
C, if a sample's vector depends on that sample alone. ``QueryEngine`` tests this on the first batch,
and checks the shape of every answer.

Shapes: B samples in the batch, K numbers for each.
"""

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.gradients.checks.guards import in_mode, keeping_random_state
from dp_grape_hf.gradients.engine import ROUNDING, Inputs, PerSampleEngine
from dp_grape_hf.gradients.flat import FlatGradients, Layout
from dp_grape_hf.gradients.losses.model_loss import ModelLoss
from dp_grape_hf.gradients.replay import COUPLED, refuse_other_loss, refuse_random
from dp_grape_hf.gradients.rows import batch_size_of, copies_of, first_two, rows_of
from dp_grape_hf.phases import FORWARD
from dp_grape_hf.projections import Projector

ANSWERS = "answers"
"""The name of the answers in a release, in place of a parameter name."""


class QueryEngine(PerSampleEngine):
    """An engine that computes a query of each sample. Subclasses define ``query`` and set ``size``.

    The model runs in evaluation mode and without gradients. A model that draws random numbers in
    evaluation mode is not supported.

    Guarantee:
        Row i of ``query`` must be a function of sample i and of public values alone: the weights,
        seeds and the number of the step. The engine compares rows of the first batch with the same
        samples in batches of their copies. This cannot prove it for all batches, so review a query
        as carefully as the mechanism.

    Attributes:
        size: K.
        magnified: the largest factor by which answers magnify the rounding error of a loss.
        read: names of the trainable parameters that a query has read.

    Raises:
        PrivacyError: as in ``PerSampleEngine``.
        UnsupportedModelError: as in ``PerSampleEngine``.
    """

    skips_unlabelled = True
    size: int
    magnified: float = 1.0
    read: set[str]

    @abstractmethod
    def query(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return losses (B,) and answers (B, K), both sensitive.

        Args:
            inputs: as in a call. ``self.losses`` runs the model on them.
        """

    def layout(self, projectors: Mapping[str, Projector]) -> Layout:
        """Return the layout of answers, which are one vector."""
        if self._laid_out is None:
            answers = {ANSWERS: torch.empty(self.size, device="meta")}
            self._laid_out = projectors, Layout(answers, {})
        return self._laid_out[1]

    def released_shapes(self, projectors: Mapping[str, Projector]) -> dict[str, tuple[int, ...]]:
        """Return the name and the shape (K,) of a release, which has one tensor."""
        return {ANSWERS: (self.size,)}

    def __call__(
        self, inputs: Inputs, projectors: Mapping[str, Projector]
    ) -> tuple[Tensor, FlatGradients]:
        """Return losses (B,) and answers (B, K), under ``ANSWERS`` (sensitive).

        Raises:
            PrivacyError: if there are projectors, if samples are coupled, or if there is not one
                row of K numbers for each sample.
            UnsupportedModelError: if a parameter takes no part in the loss, or its use is not seen.
        """
        if projectors:
            raise PrivacyError(
                f"There are projectors for {len(projectors)} parameters, but a query has no "
                "gradients to project. Switch the projection off."
            )
        self._examine_once(inputs, projectors)
        losses, answers = self._asked(inputs)
        return losses, FlatGradients(self.layout(projectors), answers, {}, [ANSWERS])

    def _asked(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        with self.observer.phase(FORWARD), in_mode(self.model, training=False), torch.no_grad():
            losses, answers = self.query(inputs)
        rows = batch_size_of(inputs)
        if losses.shape != (rows,) or answers.shape != (rows, self.size):
            raise PrivacyError(
                f"The query of {type(self).__name__} returned losses {tuple(losses.shape)} and "
                f"answers {tuple(answers.shape)} for {rows} samples. Each row is clipped "
                f"separately. Return one loss and one row of size={self.size} for each sample."
            )
        return losses, answers

    # ---- The first batch ----

    def _examine(self, inputs: Inputs, projectors: Mapping[str, Projector]) -> bool:
        count = batch_size_of(inputs)
        rows = [row % count for row in range(max(2, count + count % 2))]
        with in_mode(self.model, training=False):
            refuse_random(self, first_two(inputs))
            self._refuse_other_loss(inputs)
        two, three = (self._trial(copies_of(inputs, size))[0] for size in (2, 3))
        _refuse_coupled(two[:1], torch.cat([two, three]))
        self.refuse_unused(
            self.read,
            " If the model does use them, it uses them in code that PyTorch's function modes do "
            "not see (TorchScript, a custom kernel).",
        )
        losses, answers = self._trial(rows_of(inputs, rows))
        jitter = 4 * (answers - self._trial(rows_of(inputs, rows))[1]).abs().max()  # of sums
        for kept in (0, 1):  # every second sample also takes the place of its neighbour
            own, places = rows[kept::2], slice(kept, None, 2)
            doubled = rows_of(inputs, [row for row in own for _ in range(2)])
            alone, expected = (x[places] for x in self._trial(doubled))
            _refuse_coupled(alone, losses[places])
            # Rounding is the same in the same row of a batch of the same shape, in every dtype.
            rounding = 4 * torch.finfo(alone.dtype).eps * (1 + alone.abs()) * self.magnified
            allowed = 1e-4 * expected.abs() + jitter + rounding[:, None]
            if ((expected - answers[places]).abs() > allowed).any():
                raise PrivacyError(
                    "The answer of a sample changes with the contents of the other samples in its "
                    "batch. The loss, the model or the query couples samples, so clipping does not "
                    "bound the influence of one. Compute each answer from that sample alone."
                )
        pairs = losses.view(-1, 2)
        return count == 1 or bool((pairs.isfinite().all(1) & (pairs[:, 0] != pairs[:, 1])).any())

    def _refuse_other_loss(self, inputs: Inputs) -> None:
        if not isinstance(self.loss, ModelLoss):
            return
        for row in range(batch_size_of(inputs)):
            one = copies_of(inputs, 1, row)
            with torch.no_grad():
                expected = self.loss.of_batch(self.model, one)
                if expected is None:
                    return
                if expected.isfinite():  # for example, not without a label
                    refuse_other_loss(self, one, self.losses(one), expected[None])
                    return

    def _trial(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return losses and answers, with the same random numbers in every call."""
        with keeping_random_state():
            return self._asked(inputs)


def _refuse_coupled(some: Tensor, others: Tensor) -> None:
    """Refuse losses of the same samples that differ between batches."""
    some, others = some.float().expand_as(others), others.float()
    if not torch.allclose(some, others, 1e-2, ROUNDING, equal_nan=True):
        raise PrivacyError(COUPLED)
