"""Peak memory of a training step, found by running it on tensors that have no contents.

What runs is the product: the model's own code, and the engine, projections and optimizer that the
Trainer makes of the same arguments. Under ``FakeTensorMode`` every tensor has its shape, type and
lifetime but no memory, so a model of any size is measured in seconds, without weights and without a
GPU. ``Step`` also runs on real tensors, for a comparison with what a device reports.

What a GPU takes beyond the sum of its tensors is not simulated: the CUDA context, the workspaces of
matrix products and convolutions, what the allocator loses to fragmentation, and temporary memory
inside a kernel.
"""

from __future__ import annotations

import json
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
from dp_grape_hf.errors import require
from dp_grape_hf.gradients import GradSampleMode, Inputs
from dp_grape_hf.ledger import BANDED, Ledger
from dp_grape_hf.mechanism import NOISE_SLICE, LogicalBatch
from dp_grape_hf.memory.fakes import fake_tensors
from dp_grape_hf.memory.packed import pack_
from dp_grape_hf.memory.processes import first_of
from dp_grape_hf.memory.timeline import (
    ACTIVATIONS,
    OPTIMIZER,
    PER_SAMPLE,
    PROJECTIONS,
    SUMS,
    WEIGHTS,
    Peak,
    Timeline,
)
from dp_grape_hf.optimizers import GPU_BLOCK, ProjectedOptimizer
from dp_grape_hf.phases import PROJECTORS, REDRAW, RELEASED, UPDATE, Observer
from dp_grape_hf.projections import PRINCIPAL
from dp_grape_hf.sharding import is_sharded, reshard, shard_
from dp_grape_hf.trainer import Run

ADAMW, DP_GRAPE, DP_ADAM, DP_ADAM_DENSE = "adamw", "dp_grape", "dp_adam", "dp_adam_dense"
COMPARED = (ADAMW, DP_GRAPE, DP_ADAM, DP_ADAM_DENSE)
"""What is compared unless something else is asked for. ``dp_adam_dense`` is ``dp_adam`` with the
gradient of every weight formed for every sample, as by Opacus."""


@dataclass(frozen=True)
class Setting:
    """What a step is run with.

    Args:
        method: a name in ``methods.METHODS``; or ``adamw``, torch's own optimizer, which is given
            the gradient of the batch.
        batch_size: B, the physical batch.
        dtype: of the weights.
        gradient_checkpointing: whether activations are computed again in the backward pass.
        projection: family of a method that projects as it captures; principal directions are
            measured in every step that is simulated, and in a run only once.
        rank: r of the projections, and of the adapter of a method that trains one.
        grad_sample_mode: as ``LayerwiseEngine`` has it.
        bits: of the weights of linear layers, 4 or 8, beside which a method that trains an adapter
            then trains B alone, as in that of ``principal_adapter``; None: those of ``dtype``.
        bands: over how many steps noise is correlated; what is kept of it is optimizer state.
        processes: how many share the weights (FSDP2), each with a physical batch of its own; the
            peak is that of one.
    """

    method: str = DP_GRAPE
    batch_size: int = 1
    dtype: torch.dtype = torch.float32
    gradient_checkpointing: bool = False
    projection: str = "gaussian"
    rank: int = 16
    grad_sample_mode: str = GradSampleMode.AUTO
    bits: int | None = None
    processes: int = 1
    bands: int = 1


def compared(name: str, setting: Setting) -> Setting:
    """Returns the setting with what a name is: a method, ``adamw`` or ``dp_adam_dense``."""
    if name == DP_ADAM_DENSE:
        return replace(setting, method=DP_ADAM, grad_sample_mode=GradSampleMode.MATERIALISE)
    return replace(setting, method=name)


def _arguments_of(setting: Setting, redraws: bool) -> DPGrapeTrainingArguments:
    """Returns the arguments of a run with some noise; what a method does not do is left out."""
    asked: dict[str, Any] = {}
    row = METHODS.get(setting.method)
    if row is not None and row.private:
        asked["noise_multiplier"] = 1.0
    if row is not None and row.projection == PRINCIPAL:
        asked["projection"] = setting.projection
    return DPGrapeTrainingArguments(
        method=setting.method,
        target_delta=1e-9,
        accountant="rdp",  # the quickest; nobody asks for its answer
        max_steps=1,
        learning_rate=1e-3,  # given, as nothing is to be chosen
        per_device_train_batch_size=setting.batch_size,
        projection_rank=setting.rank,
        projection_update_steps=1 if redraws else None,
        grad_sample_mode=setting.grad_sample_mode,
        report_to="none",
        **asked,
    )


def prepared(model: Any, setting: Setting) -> nn.Module:
    """Returns the model as a setting trains it: with checkpointing, and with a LoRA adapter.

    The adapter is on all linear layers and has the rank of the setting.

    Raises:
        PrivacyError: for quantised weights that are to move.
    """
    if setting.gradient_checkpointing:
        model.config.use_cache = False
        model.gradient_checkpointing_enable({"use_reentrant": False})
    row = METHODS.get(setting.method)
    adapts = row is not None and row.adapter
    require(
        adapts or setting.bits is None,
        f"bits={setting.bits} with method={setting.method!r}: weights in few bits cannot move. "
        "Take dp_lora, which trains an adapter beside them, or leave bits out.",
    )
    if adapts:
        import peft  # not above, because that takes seconds

        config = peft.LoraConfig(
            r=setting.rank, lora_alpha=setting.rank, target_modules="all-linear"
        )
        if setting.bits is not None:
            pack_(model, setting.bits)
        with warnings.catch_warnings():  # peft reads a name that transformers has renamed
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
            model = peft.get_peft_model(model, config)
        if setting.bits is not None:
            for name, weight in model.named_parameters():
                weight.requires_grad_("lora_B" in name)
    trained: nn.Module = model
    return trained


# ---- One step ----


class _Watch(Observer):
    """Tells a timeline where in the step it is, and what the memory of tensors is for.

    Of phases within one another the outermost counts.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline, self._inside = timeline, False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Enters a phase, which lasts until the next one; the phase ``setup`` is not left."""
        inside, self._inside = self._inside, True
        if not inside and self._timeline.phase != "setup":
            self._timeline.phase = name
        try:
            yield
        finally:
            self._inside = inside

    def made(self, what: str, values: Mapping[str, Any]) -> None:
        """Labels the tensors that were made, or that objects which were made consist of."""
        kind = {PROJECTORS: PROJECTIONS, phases.PER_SAMPLE: PER_SAMPLE, RELEASED: SUMS}[what]
        for value in values.values():
            for part in getattr(value, "parts", (value,)):
                own = part if isinstance(part, Tensor) else list(vars(part).values())
                self._timeline.label(kind, own)


@dataclass
class Step:
    """A training step of one method, with the optimizer's state in place.

    Args:
        model: the model, on any device, real or fake; ``prepared`` for the setting.
        inputs: a batch of it, labels included.
        setting: what to run; its dtype and gradient checkpointing are the model's affair.
        timeline: records what is allocated.
        noise_slice: as in ``add_noise_``.
        recompute_activations: as ``LayerwiseEngine`` has it.
        redraws: whether each step makes P anew, which takes most memory.

    Attributes:
        optimizer: the optimizer of the method, whose state is in place.

    Raises:
        PrivacyError: for an unknown method, or a model that the engine refuses.
    """

    model: nn.Module
    inputs: Inputs
    setting: Setting
    timeline: Timeline = field(default_factory=Timeline)
    noise_slice: int | None = None
    recompute_activations: bool | None = None
    redraws: bool = True
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.model.train()
        self.timeline.label(WEIGHTS, [*self.model.parameters(), *self.model.buffers()])
        self.timeline.label(ACTIVATIONS, dict(self.inputs))
        self._run = self._plain() if self.setting.method == ADAMW else self._of_trainer()
        for state in self.optimizer.state.values():
            self.timeline.label(OPTIMIZER, list(state.values()))

    def run(self) -> None:
        """Runs the step once more: redraw, forward, backward, clip, release, update."""
        with self.timeline:
            self._run()

    def _plain(self) -> Callable[[], None]:
        """AdamW with torch's fused kernel, which has no temporaries, as the Trainer has it."""
        timeline = self.timeline
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = self.optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
        with timeline:
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(lambda p: timeline.label(SUMS, p.grad))

        def run() -> None:
            timeline.phase = "forward"
            loss = self.model(**self.inputs).loss
            timeline.phase = "backward"
            loss.backward()
            timeline.phase = "update"
            optimizer.step()
            optimizer.zero_grad()

        return run

    def _of_trainer(self) -> Callable[[], None]:
        """The run that the Trainer makes of the same arguments."""
        setting, timeline = self.setting, self.timeline
        args = _arguments_of(setting, self.redraws)
        recompute: Any = {"recompute_activations": self.recompute_activations}
        run = Run(args, self.model, observer=_Watch(timeline), **recompute)
        mechanism = PrivacyPlan(args, 2 * setting.batch_size).mechanism
        if setting.bands > 1 and METHODS[args.method].private:
            some = json.dumps([setting.bands**-0.5] * setting.bands)
            mechanism = replace(mechanism, noise=BANDED, coefficients=some)
        ledger = Ledger.start(mechanism, private=False, reason="a simulation")
        noise = torch.Generator(run.per_sample.device)
        run.start(ledger, noise, self.noise_slice)
        optimizer = self.optimizer = run.make_optimizer()
        if isinstance(optimizer, ProjectedOptimizer) and self.noise_slice is not None:
            optimizer.numbers_at_once = GPU_BLOCK
        run.keep_updates_apart()
        with timeline:  # which makes the state of the optimizer
            run.step(0, LogicalBatch([], []))
            optimizer.step()
        if run.mechanism is not None:
            timeline.label(OPTIMIZER, [*run.mechanism.kept_noise, *run.signal.kept])
        run.per_sample.assume_probed(self.inputs)
        if is_sharded(self.model):
            run.idle = self.inputs
            reshard(self.model)
        timeline.phase = "setup"
        batch, numbers = LogicalBatch([self.inputs], [setting.batch_size]), count(1)

        def step() -> None:
            timeline.phase = REDRAW
            run.step(next(numbers), batch)
            timeline.phase = UPDATE
            optimizer.step()

        return step


# ---- Its simulation ----


@dataclass(frozen=True, kw_only=True)
class Footprint(Peak):
    """What a simulated step takes."""

    gradients: int  # bytes, the most at one time: per sample, and summed
    optimizer: int  # bytes kept from step to step
    projectors: int  # bytes kept from step to step
    flops: int  # of products, convolutions and attention
    sent: Mapping[str, int]  # collective -> bytes, as ``Timeline`` counts them


def simulate(
    build: Callable[[torch.dtype], nn.Module],
    batch: Callable[[int], Inputs],
    setting: Setting,
    *,
    gpu: bool = True,
) -> Footprint:
    """Returns what a training step takes, without running it on contents.

    Args:
        build: returns the model with weights of that dtype.
        batch: returns a batch of that size; floating-point inputs get the weights' dtype.
        setting: what to run.
        gpu: whether attention and dropout take the memory that they take on a GPU, or on a CPU.

    Raises:
        PrivacyError: for a combination that no run can have.
        UnsupportedModelError: if a shape in the model depends on the contents of its inputs.
    """
    timeline = Timeline()
    with first_of(setting.processes, timeline.resized) as mesh, fake_tensors(gpu):
        model = prepared(build(setting.dtype), setting)
        if mesh is not None:
            shard_(model, torch.device("cpu"), mesh)
        inputs = {
            name: value.to(setting.dtype) if value.is_floating_point() else value
            for name, value in batch(setting.batch_size).items()
        }
        at_once = NOISE_SLICE if gpu else None  # on the CPU, where fake tensors are, less at once
        step = Step(model, inputs, setting, timeline, at_once, recompute_activations=gpu)
        step.run()  # and what it keeps is counted while there is a step
        return Footprint(
            **vars(timeline.peak()),
            gradients=timeline.most(PER_SAMPLE, SUMS),
            optimizer=timeline.kept(OPTIMIZER),
            projectors=timeline.kept(PROJECTIONS),
            flops=timeline.flops,
            sent=timeline.sent,
        )
