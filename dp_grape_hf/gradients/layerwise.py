"""The layerwise engine: per-sample gradients from one forward and one backward pass of the batch.

``layers`` finds the modules that own parameters, and learns how the model calls them. ``passes``
runs them, with one rule per layer type. This module controls both, and refuses a model whose
gradients would be wrong.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dp_grape_hf.errors import UnsupportedModelError
from dp_grape_hf.gradients import replay
from dp_grape_hf.gradients.checks.guards import evaluating
from dp_grape_hf.gradients.compiled import Compilation, CompiledModel, NotCompiledError
from dp_grape_hf.gradients.definition import NotVectorisedError
from dp_grape_hf.gradients.engine import GradSampleMode, Inputs, PerSampleEngine
from dp_grape_hf.gradients.flat import FlatGradients
from dp_grape_hf.gradients.layers import Sites, UnknownTensorError, replaced_forwards, shapes_of
from dp_grape_hf.gradients.losses.losses import LossFunction
from dp_grape_hf.gradients.passes import Pass
from dp_grape_hf.gradients.plans import Branch, Plans
from dp_grape_hf.gradients.rows import batch_size_of, rows_of
from dp_grape_hf.gradients.rules import RECOMPUTABLE
from dp_grape_hf.phases import BACKWARD, is_cpu
from dp_grape_hf.projections import Projector

logger = logging.getLogger(__name__)


class LayerwiseEngine(PerSampleEngine):
    """The engine with one rule per layer type; see the module's docstring.

    Args:
        model: as in ``PerSampleEngine``.
        loss: as in ``PerSampleEngine``.
        recompute_activations: whether a layer recomputes its input in the backward pass, if the
            layer needs the full input and the input is the output of a cheap activation function
            (GELU). By default on all devices except CPUs.
        grad_sample_mode: as in ``PerSampleEngine``.
        compilation: how to compile the model; None for no compilation.
    """

    skips_unlabelled = True

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction | None = None,
        recompute_activations: bool | None = None,
        grad_sample_mode: str = GradSampleMode.AUTO,
        compilation: Compilation | None = None,
    ) -> None:
        super().__init__(model, loss, grad_sample_mode)
        if recompute_activations is None:
            recompute_activations = not is_cpu(self.device)
        again = RECOMPUTABLE if recompute_activations else ()
        self._activations = [module for module in model.modules() if type(module) in again]
        self._sites = Sites(model, self._names)
        self._plans: Plans | None = None
        self._branches: Mapping[nn.Module, Branch] = {}
        self._compiled: CompiledModel | None = None
        if compilation is not None:
            self._compiled = CompiledModel(model, self._sites, compilation)
            # The number of labels depends on values, which a compiled graph cannot read.
            self.skips_unlabelled = False
        self._learnt = False  # whether the sample dimensions of tensors are known
        self._learnt_anew = False  # whether calls were learnt since the last examination
        self._looping = 0  # number of modules that run sample by sample

    def __call__(
        self, inputs: Inputs, projectors: Mapping[str, Projector]
    ) -> tuple[Tensor, FlatGradients]:
        self._prepare(inputs, projectors)
        if self._compiled is not None:
            try:
                return self._compiled_pass(self._compiled, inputs, projectors)
            except NotCompiledError:
                pass
        losses, gradients = self.unchecked(inputs, projectors)
        if self._learnt_anew and not self.examine(inputs, projectors):
            self._examined.clear()
        return losses, gradients

    def _compiled_pass(
        self, compiled: CompiledModel, inputs: Inputs, projectors: Mapping[str, Projector]
    ) -> tuple[Tensor, FlatGradients]:
        plans = self._plans_for(projectors)
        if self.in_step or compiled.refused:
            raise NotCompiledError
        run, shapes = self._make_pass(inputs, projectors, plans), shapes_of(inputs)
        losses, parts = compiled.differentiate(inputs, shapes, run, plans, self.losses)
        return losses, self.laid_out(parts, run.captured, projectors, losses)

    def used_by_value(self) -> set[str]:
        return {name for site in self._sites if site.loops for name in site.parameters.values()}

    def stay_in_step(self, inputs: Inputs, projectors: Mapping[str, Projector]) -> None:
        """Make every later call run the model exactly once.

        All passes that depend on data run on this batch. A later call that needs another pass
        raises an error.

        Raises:
            UnsupportedModelError: if the examination of the batch was not conclusive.
        """
        self._prepare(inputs, projectors)
        if self._examined.get(self.model.training, 0) < min(batch_size_of(inputs), 2):
            raise UnsupportedModelError(
                "No two of the tested examples have gradients that are not zero, so they do not "
                "show whether the model mixes examples. With fsdp, this must be known before the "
                "first step. Check the labels of the data set, or remove fsdp."
            )
        for padded in (False, True):  # a model may leave out a mask that masks nothing
            masked = rows_of(_with_masks(inputs, padded), slice(2))
            self._learn(masked, 0)
            self.examine(masked, projectors)
        self.in_step = True

    def _examine(self, inputs: Inputs, projectors: Mapping[str, Projector]) -> bool:
        if not self._learnt:
            self._learn(inputs, 0)
        conclusive = replay.examine(self, inputs, projectors)
        self._learnt_anew = False
        return conclusive

    def _prepare(self, inputs: Inputs, projectors: Mapping[str, Projector]) -> None:
        if not self.in_step:
            self._examine_once(inputs, projectors)
        self._warn_of_loops()

    def _warn_of_loops(self) -> None:
        looping = [site for site in self._sites if site.loops]
        if len(looping) > self._looping:
            logger.warning(
                "%s%s cannot be vectorised over samples (%s), and will run for one sample after "
                "another. The gradients are exact, but a physical batch of B samples takes B times "
                "as long there.",
                looping[0].label,
                f" and {len(looping) - 1} more" if looping[1:] else "",
                looping[0].loops,
            )
            self._looping = len(looping)

    def unchecked(
        self, inputs: Inputs, projectors: Mapping[str, Projector]
    ) -> tuple[Tensor, FlatGradients]:
        samples = iter(range(batch_size_of(inputs)))
        while True:
            try:
                return self._try_pass(inputs, projectors)
            except NotVectorisedError:  # at most once for each site, which loops from now on
                if self.in_step:
                    raise
                self.restarts += 1
            except UnknownTensorError as error:  # for example, a mask that no sample needed so far
                if self.in_step:
                    raise UnsupportedModelError(
                        f"{error} To learn about it, the model would have to run once more than in "
                        "other processes. Remove fsdp."
                    ) from error
                if (sample := next(samples, None)) is None:
                    raise UnsupportedModelError(
                        f'{error} Freeze it with requires_grad_(False), or use engine="functorch".'
                    ) from error
                self._learn(inputs, sample)
                self._learnt_anew = True
                self.restarts += 1

    def _try_pass(
        self, inputs: Inputs, projectors: Mapping[str, Projector]
    ) -> tuple[Tensor, FlatGradients]:
        plans = self._plans_for(projectors)
        run = self._make_pass(inputs, projectors, plans)
        with (
            self._sites.installed(run.forward_of),
            replaced_forwards(self._activations, lambda _, forward: partial(run.remember, forward)),
            self._with_branches(),
        ):
            losses = self.losses(inputs)
            with self.observer.phase(BACKWARD):
                parts = run.differentiate(losses.sum())
        if self._compiled is not None:
            self._compiled.learn(shapes_of(inputs), run)
        losses = losses.detach()
        return losses, self.laid_out(parts, run.captured, projectors, losses)

    def _make_pass(self, inputs: Inputs, projectors: Mapping[str, Projector], plans: Plans) -> Pass:
        return Pass(
            *(self.trainable, projectors, plans, batch_size_of(inputs), shapes_of(inputs)),
            *(self.in_form, self.observer),
        )

    def add_branches(self, branches: Mapping[nn.Module, Branch]) -> None:
        self._branches, self._plans = branches, None

    @contextmanager
    def _with_branches(self) -> Iterator[None]:
        """Let layers compute their branches inside; reset branches and cached inputs afterwards."""
        try:
            yield
        finally:
            if self._plans is not None:
                self._plans.shared.forget()
            for branch in self._branches.values():
                branch.leave()

    def _plans_for(self, projectors: Mapping[str, Projector]) -> Plans:
        if self._plans is None or self._plans.projectors is not projectors:
            self._plans = Plans(self.layout(projectors), projectors, self._branches)
        return self._plans

    # ---- The first batch ----

    def assume_examined(self, inputs: Inputs) -> None:
        """Learn the sample dimensions of tensors, without checks."""
        super().assume_examined(inputs)
        self._learn(inputs, 0)

    def _learn(self, inputs: Inputs, sample: int) -> None:
        """Learn the calls of sites from passes with two and three samples.

        Args:
            inputs: a batch.
            sample: number of the sample that is used, after the first sample, once or twice.
        """

        def run_model(size: int) -> Tensor:
            rows = [0, *[sample] * (size - 1)]
            return self.losses(rows_of(inputs, rows))

        with evaluating(self.model):
            with torch.no_grad():  # shows errors in the data, and whether positions can be skipped
                run_model(2)
            self._sites.learn(run_model, shapes_of(inputs))
        self._learnt = True


def _with_masks(inputs: Inputs, padded: bool) -> dict[str, Any]:
    """Return the inputs with attention masks that hide the last position if ``padded``, or none."""
    masked = dict(inputs)
    for name, mask in inputs.items():
        if name.endswith("attention_mask") and mask.dim() == 2 and mask.shape[1] > 1:
            masked[name] = torch.ones_like(mask)
            masked[name][:, -1] = int(not padded)
    return masked
