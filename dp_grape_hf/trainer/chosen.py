"""What a run chooses where no learning rate is given: parts of the model, and rates.

``dp_grape_hf.choosing`` has the rules; here the parts of a run are put into them. All of it follows
from inputs that are no example's, and from the noise of the run.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from itertools import islice
from typing import Any

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
    is_pretrained,
    measure,
    output_layer,
    push_of_signal,
    tabulated,
    train_matrices_only,
    walk_of_noise,
)
from dp_grape_hf.distributed import from_first
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.mechanism import bound_of_part
from dp_grape_hf.per_sample import evaluating
from dp_grape_hf.projections import Batches
from dp_grape_hf.trainer.run import Run, rule_settings

_READ = 5  # batches of inputs that rates are measured on


def choose_parts(
    model: Any, args: DPGrapeArguments, inputs: Batches, unused: Collection[str]
) -> str | None:
    """Chooses what is trained, where a new head reads, and whether it is clipped apart.

    A collective call: the first process decides, which alone may have weights.

    Args:
        model: what is not to be trained is frozen.
        args: what is chosen is filled in.
        inputs: makes inputs that are no example's.
        unused: parameters that were frozen because they take no part in the loss.

    Returns:
        The name of the layer that was made an average, which a new head reads; None for none.

    Raises:
        PrivacyError: if the model cannot be run on these inputs.
    """
    if not from_first(lambda: is_pretrained(model)):
        args.suit_fresh_weights()

    def decide() -> tuple[list[str], str | None, str | None]:
        with evaluating(model):
            name, layer = _output_layer(model, inputs)
            by_user = {n for n, p in model.named_parameters() if not p.requires_grad} - {*unused}
            frozen: list[str] = []
            if args.method == "dp_grape" and is_pretrained(model) and not by_user:
                frozen = train_matrices_only(model, name)
            averaged = None
            if args.save_as != "adapter" and not hasattr(model, "peft_config"):
                averaged = average_at_first(model, layer, next(iter(inputs())))
            return frozen, averaged, clipped_apart(model, name)

    frozen, averaged, head = from_first(decide)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    if args.gradient_factors is None and args.norm_directions is None:
        args.clipped_apart = head
    return averaged


def _output_layer(model: nn.Module, inputs: Batches) -> tuple[str, nn.Module]:
    """Returns the layer that logits come from, the model being in evaluation mode."""
    try:
        return output_layer(model, next(iter(inputs())))
    except Exception as error:  # of any model's code
        raise PrivacyError(
            "learning_rate=None: rates are chosen by running the model on inputs that are not "
            f"the data, and that failed: {error!r}. Give learning_rate, or pass "
            "public_dataset= to the trainer, whose examples the model can read."
        ) from error


def find_rates(run: Run, plan: PrivacyPlan, inputs: Batches) -> Rates | None:
    """Returns the rates that the noise of a run allows, or what it does at given ones.

    A collective call.

    Returns:
        None for a run without noise in its gradients; and where rates are given, if several
        processes share the model, whose weights they may not all have yet, or if it cannot be run
        on these inputs.
    """
    args = run.args
    if not args.private or METHODS[args.method].zeroth_order:
        return None
    if args.world_size > 1:
        if not args.chooses:
            return None
        run.projectors_at(0)  # which all of them measure together

    def measured() -> Rates | None:
        try:
            with evaluating(run.model):
                return _measured(run, plan, _output_layer(run.model, inputs), inputs)
        except Exception:
            if args.chooses:
                raise
            return None  # nothing is known of inputs of this model, and nothing need be

    return from_first(measured)


def _measured(run: Run, plan: PrivacyPlan, output: tuple[str, nn.Module], inputs: Batches) -> Rates:
    args, own, schedule = run.args, plan.mechanism, schedule_of(run.args, plan.steps)
    assert args.update_rule is not None
    rule, settings = args.update_rule, rule_settings(args)
    limit = bound_of_part(own.max_grad_norm, own.clipped_apart)
    std = own.noise_multiplier * own.max_grad_norm / own.expected_batch_size
    stds = {n: std / run.gradient_factors.get(n, 1.0) for n in run.trainable}
    walks = {s: walk_of_noise(rule, settings, s, schedule, own.bands) for s in set(stds.values())}
    released = math.sqrt(np.square(released_noise(own.bands, plan.steps)).mean())
    projectors = run.projectors_at(0)  # a state that is loaded later brings its own
    given = None
    if not args.chooses:
        assert args.learning_rate is not None
        given = {n: args.learning_rate * run.rate_factors.get(n, 1.0) for n in stds}
    return measure(
        run.model,
        output,
        islice(inputs(), _READ),
        {
            n: Noise(run.trainable[n], s * released, walks[s], projectors.get(n))
            for n, s in stds.items()
        },
        most={n: limit / run.gradient_factors.get(n, 1.0) for n in stds},
        push=lambda size: push_of_signal(rule, settings, size, schedule),
        steps=sum(schedule),
        rates=given,
        fresh=not is_pretrained(run.model),
        factors=run.rate_factors,
        regresses=getattr(run.per_sample.loss, "regresses", False),
    )


def table_of(rates: Rates, run: Run, plan: PrivacyPlan, averaged: str | None) -> str:
    """Returns tables of a run as it will begin; ``averaged`` is the layer made an average."""
    notes = []
    if averaged is not None:
        notes.append(f"The head is new: {averaged}, which it reads, is made an average.")
    whole = list(run.model.parameters())
    if frozen := sum(not p.requires_grad for p in whole):
        notes.append(f"{frozen} of {len(whole)} parameters stay as they are.")
    if rates.head is not None and rates.head.output is NUMBER:
        notes.append("Labels are numbers, and taken to be about 1 in size: scale them to that.")
    rule = run.args.update_rule or ""
    return tabulated(rates, plan.mechanism, plan.steps, rule, _schedule(run.args), notes)


def line_of(rates: Rates, run: Run) -> str:
    """Returns what a ledger says of rates that were chosen."""
    return described(rates, _schedule(run.args))


def _schedule(args: DPGrapeArguments) -> str:
    return SchedulerType(args.lr_scheduler_type).value
