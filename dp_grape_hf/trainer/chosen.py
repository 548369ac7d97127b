"""The choices of a run without ``learning_rate``: trained parts of the model, and learning rates.

``dp_grape_hf.choosing`` has the rules, and this module applies them to the parts of a run. The
choices depend on the model, on public inputs and on the noise of the run.

A run chooses once, at its start. Each checkpoint contains these choices, and a resumed run reads
them. It could not make them again: the trained weights of a model that began with random weights
look pretrained.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from transformers.trainer_utils import SchedulerType

from dp_grape_hf.arguments import METHODS, DPGrapeArguments, PrivacyPlan, schedule_of
from dp_grape_hf.choosing import (
    NUMBER,
    LastLayer,
    Rates,
    Setting,
    average_at_first,
    clipped_apart,
    is_new,
    is_new_at_first,
    is_pretrained,
    last_layer,
    measure,
    rates_line,
    run_tables,
    train_matrices_only,
)
from dp_grape_hf.distributed import from_first
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.gradients import evaluating, rows_of
from dp_grape_hf.mechanism import bound_of_part
from dp_grape_hf.projections import MATRIX_LAYERS, Batches, SyntheticInputs, first_texts
from dp_grape_hf.trainer.remembered import digest_of, reused_or_made
from dp_grape_hf.trainer.run import PrivateRun, reading_public_inputs, rule_settings

logger = logging.getLogger(__name__)

CHOICES_NAME = "run_choices.json"
_READ = 0, 4, 2
"""Start, stop and step of the batches on which learning rates are measured. All eight batches, of
1,024 tokens each, change the rates by 3 % at most (MiniLM on TREC and SST-2, a ViT on digits)."""
_TOKENS = 80
"""Tokens of each of these batches, if they are synthetic texts."""


class Parts(NamedTuple):
    """The choices about the parts of a model."""

    pretrained: bool
    frozen: list[str]  # names of parameters that the choices froze
    averaged: str | None  # the last layer, if it was changed to an average over positions
    clipped_apart: str | None  # the name of the head
    measured: bool = True  # whether the model can be run on synthetic inputs
    reads_first: bool = False  # whether a new head reads only the first position of a text
    has_head: bool = True  # whether the last linear layer computes the model's outputs
    new_head: bool = False  # whether it is new, so that no earlier run has trained it


class Choices(NamedTuple):
    """All choices of a run: functions of the model before training and of public inputs.

    Attributes:
        options: name -> value of each chosen option.
        factors: ``learning_rate_factors``, with which the learning rates were chosen.
        parts: the choices about the model.
        rates: the learning rates.
    """

    options: dict[str, Any]
    factors: dict[str, float] | None
    parts: Parts
    rates: Rates

    def save(self, folder: Path) -> None:
        """Write the choices into the folder of a checkpoint."""
        content = {"parts": self.parts._asdict(), "rates": self.rates.to_dict()}
        text = json.dumps(self._asdict() | content, indent=1)
        (folder / CHOICES_NAME).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> Choices | None:
        """Read the choices from a checkpoint; None if it has none."""
        path = Path(folder) / CHOICES_NAME
        if not path.is_file():
            return None
        content = json.loads(path.read_text(encoding="utf-8"))
        content["parts"] = Parts(**content["parts"])
        content["rates"] = Rates.from_dict(content["rates"])
        return cls(**content)

    def applied_to(self, args: DPGrapeArguments, checkpoint: str | Path) -> DPGrapeArguments:
        """Return the arguments of a resumed run, with the chosen options.

        Raises:
            PrivacyError: this run has other ``learning_rate_factors``.
        """
        if args.learning_rate_factors != self.factors:
            raise PrivacyError(
                f"This run has learning_rate_factors="
                f"{args.learning_rate_factors}, and the checkpoint {checkpoint} was made "
                f"with {self.factors}, so its optimizer state does not fit. Pass the "
                "learning_rate_factors of the checkpoint."
            )
        return args.with_choices(self.options)


def choose_parts(
    model: Any, args: DPGrapeArguments, inputs: Batches, unused: Collection[str]
) -> tuple[Parts, DPGrapeArguments]:
    """Choose the trained parameters, the input of a new head, and whether to clip it separately.

    A collective call: the first process decides, because it may be the only one with weights.

    Args:
        model: parameters that are not to be trained are frozen.
        args: the arguments of the run.
        inputs: makes public inputs.
        unused: parameters that were frozen because they have no influence on the loss.

    Returns:
        The choices, and the arguments that follow from them.

    Raises:
        PrivacyError: the model cannot be run on these inputs, and you asked for principal
            directions, which need them.
    """
    reasons: list[BaseException] = []

    def decide() -> Parts:
        pretrained = is_pretrained(model)
        with evaluating(model):
            try:
                last, first = _last_layer(model, inputs)
            except PrivacyError as error:
                reasons.append(error)
                return Parts(pretrained, [], None, None, measured=False, has_head=False)
            by_user = {n for n, p in model.named_parameters() if not p.requires_grad} - {*unused}
            frozen: list[str] = []
            if args.method == "dp_grape" and pretrained and not by_user:
                frozen = train_matrices_only(model, last.name)
            averaged, reads_first = None, False
            if not hasattr(model, "peft_config"):
                averaged = average_at_first(model, last.module, first)
            else:  # the last layer would not be saved
                reads_first = is_new_at_first(model, last.module, first)
            together = not last.is_head or args.gradient_factors is not None
            head = None if together else clipped_apart(model, last.name)
            return Parts(
                *(pretrained, frozen, averaged, head),
                reads_first=reads_first,
                has_head=last.is_head,
                new_head=last.is_head and is_new(model, last.module),
            )

    parts = from_first(decide)
    if not parts.measured:
        reason = f"{next(iter(reasons), 'the first process cannot run the model')}"
        args = args.without_measuring(reason)
        if not any(isinstance(module, MATRIX_LAYERS) for module in model.modules()):
            logger.warning(_NO_LINEAR_LAYER, type(model).__name__)
        elif reasons:
            logger.warning(_NOT_MEASURED, type(model).__name__, _first_cause(reasons[0]))
    if not parts.pretrained:
        args = args.for_fresh_weights()
    use_parts(model, parts)
    return parts, args


_NO_LINEAR_LAYER = (
    "%s has no linear layer whose inputs could be measured. Its learning rate follows from the "
    "norms of weights and noise. Pass learning_rate if the model learns too little."
)
_NOT_MEASURED = (
    "%s cannot be run on random inputs with the form of an example (%r), so its layers were not "
    "measured. The run uses a random P (gaussian) and a learning rate by the norms of "
    "weights and noise, and may learn less. Pass public_example= or public_dataset= to the "
    "trainer, with inputs that the model can read."
)


def _first_cause(error: BaseException) -> BaseException:
    return error if error.__cause__ is None else _first_cause(error.__cause__)


def use_parts(model: nn.Module, parts: Parts, instead_of: Parts | None = None) -> None:
    """Freeze the parameters that the choices name.

    Args:
        model: its parameters are frozen or made trainable.
        parts: the choices.
        instead_of: earlier choices for this model. Parameters that only these froze are trained.
    """
    before = {*instead_of.frozen} if instead_of is not None else set()
    after = {*parts.frozen}
    for name, parameter in model.named_parameters():
        if name in before ^ after:  # others stay as the user set them
            parameter.requires_grad_(name in before)


def _last_layer(model: nn.Module, inputs: Batches) -> tuple[LastLayer, Mapping[str, Any]]:
    """Return the linear layer that runs last, and the batch used; in evaluation mode."""
    with reading_public_inputs("The choice of learning rates"):
        first = next(iter(inputs()))
        if isinstance(inputs, SyntheticInputs):
            first = rows_of(first, slice(2))
        return last_layer(model, first), first


def find_rates(
    run: PrivateRun, plan: PrivacyPlan, inputs: Batches, parts: Parts | None = None
) -> Rates | None:
    """Return the learning rates that the noise allows, or the effect of noise at given ones.

    A collective call.

    Args:
        run: the parts of the run.
        plan: the plan of the run.
        inputs: makes public inputs.
        parts: the choices about the model, if any were made.

    Returns:
        None for a run without noise in its gradients. If you pass learning rates, also None with
        several processes, and if the model cannot be run on these inputs.
    """
    args = run.args
    if not args.private or METHODS[args.method].query is not None:
        return None
    if args.world_size > 1:
        if not args.chooses:
            return None
        run.projectors_at(0)  # a collective call

    def measured() -> Rates | None:
        try:
            with evaluating(run.model):
                return _stored_or_measured(run, _setting_of(run, plan, parts), inputs)
        except Exception:
            if args.chooses:
                raise
            return None  # given learning rates need no measurement

    return from_first(measured)


def _setting_of(run: PrivateRun, plan: PrivacyPlan, parts: Parts | None) -> Setting:
    args, mechanism = run.args, plan.mechanism
    parts = parts or Parts(is_pretrained(run.model), [], None, None)
    assert args.update_rule is not None
    limit = bound_of_part(mechanism.max_grad_norm, mechanism.clipped_apart)
    std = mechanism.noise_multiplier * mechanism.max_grad_norm / mechanism.expected_batch_size
    given = None
    if not args.chooses:
        assert args.learning_rate is not None
        given = {n: args.learning_rate * run.rate_factors.get(n, 1.0) for n in run.trainable}
    return Setting(
        rule=args.update_rule,
        settings=rule_settings(args),
        schedule=[float(factor) for factor in schedule_of(args, plan.steps)],
        bands=tuple(mechanism.bands),
        stds={n: std / run.gradient_factors.get(n, 1.0) for n in run.trainable},
        most={n: limit / run.gradient_factors.get(n, 1.0) for n in run.trainable},
        given=given,
        factors=run.rate_factors,
        fresh=not parts.pretrained,
        runs=parts.measured,
        has_head=parts.has_head,
        regresses=getattr(run.per_sample.loss, "regresses", False),
        share=_share(plan, parts),
    )


def _share(plan: PrivacyPlan, parts: Parts) -> float:
    return 1.0 if parts.new_head else plan.share_of_rates


def _stored_or_measured(run: PrivateRun, setting: Setting, inputs: Batches) -> Rates:
    """Return learning rates that an earlier run measured, or measure them."""
    projectors = run.projectors_at(0)

    def made() -> dict[str, Any]:
        noise = setting.noise_of(run.trainable, projectors)
        last = _last_layer(run.model, inputs)[0] if setting.runs else None
        batches: list[Any] = []
        if setting.runs:
            batches = list(islice(inputs(), *_READ)) or [next(iter(inputs()))]
        if isinstance(inputs, SyntheticInputs):
            batches = [first_texts(batch, _TOKENS) for batch in batches]
        return measure(run.model, noise, setting, last, batches).to_dict()

    matrices = {f"{name} {p.side}": p.matrix for name, p in projectors.items()}
    settings = setting._asdict() | {"P": digest_of(matrices)}
    return Rates.from_dict(reused_or_made("learning rates", settings, made))


def table_of(rates: Rates, run: PrivateRun, plan: PrivacyPlan, parts: Parts | None) -> str:
    """Return tables of the learning rates and options with which a run will start, as text."""
    notes = []
    if parts is not None and parts.averaged is not None:
        notes.append(f"The head is new. {parts.averaged}, its input, becomes an average.")
    if parts is not None and (share := _share(plan, parts)) < 1:
        notes.append(f"Continues a private model: {share:.2g} of the learning rates of a new one.")
    parameters = list(run.model.parameters())
    if frozen := sum(not p.requires_grad for p in parameters):
        notes.append(f"{frozen} of {len(parameters)} parameters are frozen.")
    if rates.head is not None and rates.head.output == NUMBER:
        notes.append("Labels are numbers. Scale them to a size of about 1.")
    rule = run.args.update_rule or ""
    return run_tables(rates, plan.mechanism, plan.steps, rule, schedule_name(run.args), notes)


def line_of(rates: Rates, run: PrivateRun) -> str:
    """Return the text about chosen learning rates for the ledger."""
    return rates_line(rates, schedule_name(run.args))


def schedule_name(args: DPGrapeArguments) -> str:
    """Return the name of the schedule of the learning rate."""
    return SchedulerType(args.lr_scheduler_type).value
