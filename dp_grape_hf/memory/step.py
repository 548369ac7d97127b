"""Peak memory of a training step, found by running it on tensors without contents.

The step runs the product: the model's own code, and the engine, projections and optimizer that the
Trainer makes of the same arguments. Under ``FakeTensorMode`` every tensor has its shape, type and
lifetime but no memory. So a model of any size is measured in seconds, without weights and without a
GPU. ``Step`` also runs on real tensors, to compare it with measurements of a device.

The simulation leaves out memory of a GPU that is not in tensors: the CUDA context, the
workspaces of matrix products and convolutions, fragmentation, and temporary memory inside a kernel.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from dp_grape_hf import phases
from dp_grape_hf.arguments import METHODS, DPGrapeTrainingArguments, PrivacyPlan
from dp_grape_hf.gradients import GradSampleMode, Inputs
from dp_grape_hf.ledger import Ledger
from dp_grape_hf.mechanism import LogicalBatch
from dp_grape_hf.memory.fakes import fake_tensors
from dp_grape_hf.memory.timeline import (
    ACTIVATIONS,
    OPTIMIZER,
    PER_SAMPLE,
    PROJECTIONS,
    SETUP,
    SUMS,
    WEIGHTS,
    Footprint,
    Timeline,
)
from dp_grape_hf.phases import BACKWARD, FORWARD, PROJECTORS, REDRAW, RELEASED, UPDATE, Observer
from dp_grape_hf.projections import PRINCIPAL
from dp_grape_hf.trainer import PrivateRun

ADAMW, DP_GRAPE, DP_ADAM, DP_ADAM_DENSE = "adamw", "dp_grape", "dp_adam", "dp_adam_dense"
COMPARED = (ADAMW, DP_GRAPE, DP_ADAM, DP_ADAM_DENSE)
"""The methods that are compared by default. ``dp_adam_dense`` is ``dp_adam`` with the gradient of
every weight formed for every sample, as by Opacus."""


@dataclass(frozen=True)
class Setting:
    """The method of a step, with its options.

    Args:
        method: a name in ``METHODS``; or ``adamw``, torch's optimizer on the gradient of the batch.
        batch_size: B, the physical batch.
        dtype: of the weights.
        gradient_checkpointing: whether the backward pass computes activations again.
        projection: family of a method that projects as it captures. The simulated step measures
            principal directions; a run measures them only once.
        rank: r of the projections, and of the adapter of a method that trains one.
        grad_sample_mode: of the training arguments.
        redraws: whether each step makes P anew, which takes most memory.
    """

    method: str = DP_GRAPE
    batch_size: int = 1
    dtype: torch.dtype = torch.float32
    gradient_checkpointing: bool = False
    projection: str = "gaussian"
    rank: int = 16
    grad_sample_mode: str = GradSampleMode.AUTO
    redraws: bool = True

    def arguments(self) -> DPGrapeTrainingArguments:
        """Return the arguments of a run with noise, without options that its method does not have.

        Raises:
            PrivacyError: for an unknown method.
        """
        given: dict[str, Any] = {}
        row = METHODS.get(self.method)
        if row is not None and row.private:
            given["noise_multiplier"] = 1.0
        if row is not None and row.projection == PRINCIPAL:
            given["projection"] = self.projection
        return DPGrapeTrainingArguments(
            method=self.method,
            target_delta=1e-9,
            accountant="rdp",  # the fastest; nothing reads its result
            max_steps=1,
            learning_rate=1e-3,  # given, so that no choice is made
            per_device_train_batch_size=self.batch_size,
            projection_rank=self.rank,
            projection_update_steps=1 if self.redraws else None,
            grad_sample_mode=self.grad_sample_mode,
            report_to="none",
            **given,
        )


def compared(name: str, setting: Setting) -> Setting:
    """Return the setting of a name: a method, ``adamw`` or ``dp_adam_dense``."""
    if name == DP_ADAM_DENSE:
        return replace(setting, method=DP_ADAM, grad_sample_mode=GradSampleMode.MATERIALISE)
    return replace(setting, method=name)


def prepared(model: Any, setting: Setting) -> nn.Module:
    """Return the model as a setting trains it, with checkpointing and a LoRA adapter.

    A new adapter is on all linear layers and has the rank of the setting. A model that has an
    adapter keeps it.
    """
    if setting.gradient_checkpointing:
        model.config.use_cache = False
        model.gradient_checkpointing_enable({"use_reentrant": False})
    row = METHODS.get(setting.method)
    if row is not None and row.adapter and not hasattr(model, "peft_config"):
        import peft  # not above, because that takes seconds

        config = peft.LoraConfig(
            r=setting.rank, lora_alpha=setting.rank, target_modules="all-linear"
        )
        with warnings.catch_warnings():  # peft reads a name that transformers has renamed
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
            model = peft.get_peft_model(model, config)
    trained: nn.Module = model
    return trained


class _Watch(Observer):
    """Report the phases of the step, and the purposes of tensors, to a timeline.

    In nested phases the outermost one counts.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline, self._inside = timeline, False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Enter a phase, which lasts until the next one; the setup does not end here."""
        inside, self._inside = self._inside, True
        if not inside and self._timeline.phase != SETUP:
            self._timeline.phase = name
        try:
            yield
        finally:
            self._inside = inside

    def computed(self, name: str, values: Mapping[str, Any]) -> None:
        """Label new tensors, or the tensors of new objects."""
        kind = {PROJECTORS: PROJECTIONS, phases.PER_SAMPLE: PER_SAMPLE, RELEASED: SUMS}[name]
        for value in values.values():
            for part in getattr(value, "parts", (value,)):
                tensors = part if isinstance(part, Tensor) else list(vars(part).values())
                self._timeline.label(kind, tensors)


@dataclass
class Step:
    """A training step of one method, with the optimizer's state allocated.

    Args:
        model: on any device, real or fake; ``prepared`` for the setting.
        inputs: a batch, labels included.
        setting: the setting of the step; the model has its dtype and gradient checkpointing.
        timeline: records allocations.

    Attributes:
        optimizer: the optimizer of the method.

    Raises:
        PrivacyError: for an unknown method, or a model that the engine refuses.
    """

    model: nn.Module
    inputs: Inputs
    setting: Setting
    timeline: Timeline = field(default_factory=Timeline)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.model.train()
        self.timeline.label(WEIGHTS, [*self.model.parameters(), *self.model.buffers()])
        self.timeline.label(ACTIVATIONS, dict(self.inputs))
        self._run = self._plain() if self.setting.method == ADAMW else self._of_trainer()
        self._label_state()

    def run(self) -> None:
        """Run the step once more: redraw, forward, backward, clip, release, update."""
        with self.timeline:
            self._run()
        self._label_state()  # the step may replace tensors, as counts of updates

    def _label_state(self) -> None:
        for state in self.optimizer.state.values():
            self.timeline.label(OPTIMIZER, list(state.values()))

    def _plain(self) -> Callable[[], None]:
        """AdamW with torch's fused kernel, which has no temporaries, as in the Trainer."""
        timeline = self.timeline
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = self.optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
        with timeline:  # allocates the optimizer's state
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(lambda p: timeline.label(SUMS, p.grad))

        def run() -> None:
            timeline.phase = FORWARD
            loss = self.model(**self.inputs).loss
            timeline.phase = BACKWARD
            loss.backward()
            timeline.phase = UPDATE
            optimizer.step()
            optimizer.zero_grad()

        return run

    def _of_trainer(self) -> Callable[[], None]:
        """Return the run that the Trainer makes from the same arguments."""
        setting, timeline = self.setting, self.timeline
        args = setting.arguments()
        run = PrivateRun(args, self.model, observer=_Watch(timeline))
        mechanism = PrivacyPlan(args, 2 * setting.batch_size).mechanism
        ledger = Ledger.start(mechanism, reason="a simulation")
        run.start(ledger, torch.Generator(run.per_sample.device))
        optimizer = self.optimizer = run.make_optimizer()
        run.store_updates_separately()
        with timeline:  # allocates the optimizer's state
            run.step(0, LogicalBatch([], []))
            optimizer.step()
        if run.mechanism is not None:
            timeline.label(OPTIMIZER, run.signal.buffers)
        run.per_sample.assume_examined(self.inputs)
        batch, numbers = LogicalBatch([self.inputs], [setting.batch_size]), count(1)

        def step() -> None:
            timeline.phase = REDRAW
            run.step(next(numbers), batch)
            timeline.phase = UPDATE
            optimizer.step()

        return step


def simulate(
    build: Callable[[torch.dtype], nn.Module],
    batch: Callable[[int], Inputs],
    setting: Setting,
    *,
    gpu: bool = True,
) -> Footprint:
    """Return the memory of a training step, on a GPU or a CPU, without running it on contents.

    ``build`` returns the model with weights of a dtype, and ``batch`` a batch of a size, whose
    floating-point inputs get that dtype.

    Raises:
        PrivacyError: for a combination that no run can have.
        UnsupportedModelError: if a shape in the model depends on the contents of its inputs.
    """
    timeline = Timeline()
    with fake_tensors(gpu):
        model = prepared(build(setting.dtype), setting)
        inputs = {
            name: value.to(setting.dtype) if value.is_floating_point() else value
            for name, value in batch(setting.batch_size).items()
        }
        step = Step(model, inputs, setting, timeline)
        step.run()
        return timeline.peak()  # before the step's tensors are freed
