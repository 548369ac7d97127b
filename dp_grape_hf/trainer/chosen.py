"""The choices of a run without a learning rate: parts of the model, and rates.

``dp_grape_hf.choosing`` has the rules; here the parts of a run are put into them. All of it follows
from inputs that are no example's, and from the noise of the run.

A run chooses once, at its start. Each checkpoint contains these choices, and a resumed run reads
them: the trained weights of a model that began with random weights look pretrained.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Collection, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import nn
from transformers.trainer_utils import SchedulerType

from dp_grape_hf.accounting import released_noise
from dp_grape_hf.arguments import METHODS, DPGrapeArguments, PrivacyPlan, schedule_of
from dp_grape_hf.choosing import (
    NUMBER,
    Noise,
    Rates,
    average_at_first,
    clipped_apart,
    described,
    is_head,
    is_new_at_first,
    is_pretrained,
    measure,
    measure_norms,
    output_layer,
    push_of_signal,
    tabulated,
    train_matrices_only,
    walk_of_noise,
)
from dp_grape_hf.distributed import from_first
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.gradients import evaluating, rows_of
from dp_grape_hf.mechanism import bound_of_part
from dp_grape_hf.projections import Batches, Projector, SyntheticInputs, first_texts
from dp_grape_hf.trainer.remembered import digest_of, remembered_value
from dp_grape_hf.trainer.run import Run, rule_settings

logger = logging.getLogger(__name__)

CHOICES_NAME = "run_choices.json"
_READ = 0, 5, 2
"""The batches of inputs that rates are measured on: every second of the first five."""
_TOKENS = 160
"""Of each of these batches, if they are synthetic texts. With 1,024, measuring the rates of MiniLM
takes five times as long, and they differ by 5 % at most."""


class Parts(NamedTuple):
    """The choices about the parts of a model."""

    pretrained: bool
    frozen: list[str]  # parameters that were trainable before
    averaged: str | None  # the layer that was made an average, which a new head reads
    clipped_apart: str | None  # the name of the head
    measured: bool = True  # whether the model can be run on synthetic inputs
    reads_first: bool = False  # whether a new head reads the first position of a text, for good
    has_head: bool = True  # whether the last linear layer puts out what the model returns


class Choices(NamedTuple):
    """All choices of a run. They are functions of the model before training and of public inputs.

    Attributes:
        options: name -> value of each option that was not given.
        factors: ``learning_rate_factors``, which the learning rates were chosen with.
        parts: of the model.
        rates: the learning rates.
    """

    options: dict[str, Any]
    factors: dict[str, float] | None
    parts: Parts
    rates: Rates

    def save(self, folder: Path) -> None:
        """Writes the choices into the folder of a checkpoint."""
        content = {"parts": self.parts._asdict(), "rates": self.rates.to_dict()}
        text = json.dumps(self._asdict() | content, indent=1)
        (folder / CHOICES_NAME).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> Choices | None:
        """Reads the choices from a checkpoint; None if it has none."""
        path = Path(folder) / CHOICES_NAME
        if not path.is_file():
            return None
        content = json.loads(path.read_text(encoding="utf-8"))
        content["parts"] = Parts(**content["parts"])
        content["rates"] = Rates.from_dict(content["rates"])
        return cls(**content)

    def applied_to(self, args: DPGrapeArguments, checkpoint: str | Path) -> DPGrapeArguments:
        """Returns the arguments of a resumed run, in which these are the options not given.

        Raises:
            PrivacyError: this run has other ``learning_rate_factors``.
        """
        if args.learning_rate_factors != self.factors:
            raise PrivacyError(
                f"learning_rate_factors of this run make groups of parameters by "
                f"{args.learning_rate_factors}, and those of the checkpoint {checkpoint} were made "
                f"by {self.factors}. The moments in its optimizer state do not fit. Pass the "
                "learning_rate_factors that the run began with."
            )
        return args.with_choices(self.options)


def choose_parts(
    model: Any, args: DPGrapeArguments, inputs: Batches, unused: Collection[str]
) -> tuple[Parts, DPGrapeArguments]:
    """Chooses what is trained, where a new head reads, and whether it is clipped apart.

    A collective call: the first process decides, which alone may have weights.

    Args:
        model: what is not to be trained is frozen.
        args: the arguments of the run.
        inputs: makes inputs that are no example's.
        unused: parameters that were frozen because they take no part in the loss.

    Returns:
        The choices, and the arguments with what follows from them.

    Raises:
        PrivacyError: the model cannot be run on these inputs, and principal directions, which need
            that, were asked for.
    """
    reasons: list[BaseException] = []

    def decide() -> Parts:
        pretrained = is_pretrained(model)
        with evaluating(model):
            try:
                name, layer, first = _output_layer(model, inputs)
                has_head = is_head(model, layer, first)
            except PrivacyError as error:
                reasons.append(error)
                return Parts(pretrained, [], None, None, measured=False, has_head=False)
            by_user = {n for n, p in model.named_parameters() if not p.requires_grad} - {*unused}
            frozen: list[str] = []
            if args.method == "dp_grape" and pretrained and not by_user:
                frozen = train_matrices_only(model, name)
            averaged = None
            saves_last_layer = args.save_as != "adapter" and not hasattr(model, "peft_config")
            reads_first = not saves_last_layer and is_new_at_first(model, layer, first)
            if saves_last_layer:
                averaged = average_at_first(model, layer, first)
            apart = clipped_apart(model, name) if has_head else None
            return Parts(
                pretrained, frozen, averaged, apart, reads_first=reads_first, has_head=has_head
            )

    parts = from_first(decide)
    if not parts.measured:
        reason = f"{next(iter(reasons), 'the first process cannot run the model')}"
        args = args.without_measuring(reason)
        if reasons:
            logger.warning(_NOT_MEASURED, type(model).__name__, _first_cause(reasons[0]))
    if not parts.pretrained:
        args = args.for_fresh_weights()
    use_parts(model, parts)
    return parts, args


_NOT_MEASURED = (
    "%s cannot be run on random inputs of the form of an example (%r), so its layers were not "
    "measured. The run takes a random P (gaussian) and a learning rate by the norms of "
    "weights and noise, and may learn less. Pass public_example= or public_dataset= to the "
    "trainer, which the model can read."
)


def _first_cause(error: BaseException) -> BaseException:
    return error if error.__cause__ is None else _first_cause(error.__cause__)


def use_parts(model: nn.Module, parts: Parts, instead_of: Parts | None = None) -> None:
    """Freezes what the choices name.

    Args:
        model: what is not to be trained is frozen.
        parts: the choices.
        instead_of: choices that were made for this model before. What only they froze is trained.
    """
    before = {*instead_of.frozen} if instead_of is not None else set()
    after = {*parts.frozen}
    for name, parameter in model.named_parameters():
        if name in before ^ after:  # what you froze or unfroze since stays
            parameter.requires_grad_(name in before)


def _output_layer(model: nn.Module, inputs: Batches) -> tuple[str, nn.Module, Mapping[str, Any]]:
    """Returns the layer that logits come from, and the batch that showed it.

    The model must be in evaluation mode.
    """
    try:
        first = next(iter(inputs()))
        if isinstance(inputs, SyntheticInputs):
            first = rows_of(first, slice(2))
        return *output_layer(model, first), first
    except Exception as error:  # of any model's code
        raise PrivacyError(
            "Learning rates are chosen by running the model on inputs that are not the data, and "
            f"that failed: {error!r}. Pass public_dataset= or public_example= to the trainer, "
            "which the model can read."
        ) from error


def find_rates(
    run: Run, plan: PrivacyPlan, inputs: Batches, parts: Parts | None = None
) -> Rates | None:
    """Returns the rates that the noise of a run allows, or what it does at given ones.

    A collective call.

    Args:
        run: its parts.
        plan: of the run.
        inputs: makes inputs that are no example's.
        parts: the choices about the model, if any were made.

    Returns:
        None for a run without noise in its gradients; and where rates are given, if several
        processes share the model, whose weights they may not all have yet, or if it cannot be run
        on these inputs.
    """
    args = run.args
    if not args.private or METHODS[args.method].query is not None:
        return None
    if args.world_size > 1:
        if not args.chooses:
            return None
        run.projectors_at(0)  # which all of them measure together

    def measured() -> Rates | None:
        try:
            with evaluating(run.model):
                return _found(run, _setting_of(run, plan, parts), inputs)
        except Exception:
            if args.chooses:
                raise
            return None  # nothing is known of inputs of this model, and nothing need be

    return from_first(measured)


class _Setting(NamedTuple):
    """All that rates depend on, besides the model, its inputs and P."""

    rule: str
    settings: dict[str, Any]  # of the rule
    schedule: list[float]  # what the rate is multiplied by at each step
    bands: tuple[float, ...]
    stds: dict[str, float]  # parameter name -> of the noise in each number, before it is correlated
    most: dict[str, float]  # parameter name -> the norm of the signal in a release at most
    given: dict[str, float] | None  # parameter name -> rate
    factors: dict[str, float]
    fresh: bool
    runs: bool  # whether the model can be run on the inputs
    has_head: bool
    regresses: bool


def _setting_of(run: Run, plan: PrivacyPlan, parts: Parts | None) -> _Setting:
    args, own = run.args, plan.mechanism
    parts = parts or Parts(is_pretrained(run.model), [], None, None)
    assert args.update_rule is not None
    limit = bound_of_part(own.max_grad_norm, own.clipped_apart)
    std = own.noise_multiplier * own.max_grad_norm / own.expected_batch_size
    given = None
    if not args.chooses:
        assert args.learning_rate is not None
        given = {n: args.learning_rate * run.rate_factors.get(n, 1.0) for n in run.trainable}
    return _Setting(
        rule=args.update_rule,
        settings=rule_settings(args),
        schedule=[float(factor) for factor in schedule_of(args, plan.steps)],
        bands=tuple(own.bands),
        stds={n: std / run.gradient_factors.get(n, 1.0) for n in run.trainable},
        most={n: limit / run.gradient_factors.get(n, 1.0) for n in run.trainable},
        given=given,
        factors=run.rate_factors,
        fresh=not parts.pretrained,
        runs=parts.measured,
        has_head=parts.has_head,
        regresses=getattr(run.per_sample.loss, "regresses", False),
    )


def _found(run: Run, own: _Setting, inputs: Batches) -> Rates:
    """Returns rates that an earlier run measured, or measures them."""
    projectors = run.projectors_at(0)  # a state that is loaded later brings its own
    matrices = {f"{name} {p.side}": p.matrix for name, p in projectors.items()}
    settings = own._asdict() | {"P": digest_of(matrices)}
    found = remembered_value(
        "learning rates",
        settings,
        lambda: _measured(run.model, run.trainable, projectors, inputs, own).to_dict(),
    )
    return Rates.from_dict(found)


def _measured(
    model: nn.Module,
    trainable: Mapping[str, nn.Parameter],
    projectors: Mapping[str, Projector],
    inputs: Batches,
    own: _Setting,
) -> Rates:
    """Measures rates. They may depend on nothing but the arguments."""
    output = _output_layer(model, inputs)[:2] if own.runs else None
    walks = {
        s: walk_of_noise(own.rule, own.settings, s, own.schedule, own.bands)
        for s in set(own.stds.values())
    }
    released = math.sqrt(np.square(released_noise(own.bands, len(own.schedule))).mean())
    noise = {
        n: Noise(trainable[n], s * released, walks[s], projectors.get(n))
        for n, s in own.stds.items()
    }
    about: dict[str, Any] = {
        "most": own.most,
        "push": lambda sizes: push_of_signal(own.rule, own.settings, sizes, own.schedule),
        "steps": sum(own.schedule),
        "fresh": own.fresh,
        "factors": own.factors,
    }
    if output is None:
        return measure_norms(model, noise, **about)
    return measure(
        model,
        output,
        _to_measure_on(inputs),
        noise,
        rates=own.given,
        regresses=own.regresses,
        has_head=own.has_head,
        **about,
    )


def _to_measure_on(inputs: Batches) -> list[Mapping[str, Any]]:
    """Returns a part of the inputs."""
    batches = list(islice(inputs(), *_READ)) or [next(iter(inputs()))]
    if not isinstance(inputs, SyntheticInputs):
        return batches
    return [first_texts(batch, _TOKENS) for batch in batches]


def table_of(rates: Rates, run: Run, plan: PrivacyPlan, parts: Parts | None) -> str:
    """Returns tables of a run as it will begin; ``parts`` are the choices about its model."""
    notes = []
    if parts is not None and parts.averaged is not None:
        notes.append(f"The head is new: {parts.averaged}, which it reads, is made an average.")
    whole = list(run.model.parameters())
    if frozen := sum(not p.requires_grad for p in whole):
        notes.append(f"{frozen} of {len(whole)} parameters stay as they are.")
    if rates.head is not None and rates.head.output == NUMBER:
        notes.append("Labels are numbers, and taken to be about 1 in size: scale them to that.")
    rule = run.args.update_rule or ""
    return tabulated(rates, plan.mechanism, plan.steps, rule, schedule_name(run.args), notes)


def line_of(rates: Rates, run: Run) -> str:
    """Returns what a ledger says of rates that were chosen."""
    return described(rates, schedule_name(run.args))


def schedule_name(args: DPGrapeArguments) -> str:
    """Returns the name of the schedule of the learning rate."""
    return SchedulerType(args.lr_scheduler_type).value
