"""``DPGrapeTrainingArguments``: what is promised, by which method, and what each option may be."""

from __future__ import annotations

import functools
import json
import logging
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, TypeVar, get_type_hints

import torch
from transformers import TrainingArguments
from transformers.trainer_utils import SchedulerType

from dp_grape_hf.accounting import ACCOUNTANTS, DEFAULT, Adjacency
from dp_grape_hf.arguments.methods import METHODS, row_of
from dp_grape_hf.arguments.refusals import (
    REFUSED_IF_SET,
    reason_against_bands,
    refuse_contradictions,
    refuse_host_options,
    refuse_machine,
)
from dp_grape_hf.choosing import rule_and_rank, schedule
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.gradients import ENGINES, GradSampleMode
from dp_grape_hf.ledger import BANDED, Clipping, EarlierData
from dp_grape_hf.optimizers import UPDATE_RULES
from dp_grape_hf.projections import PRINCIPAL, PROJECTIONS

logger = logging.getLogger(__name__)

ALIASES = {
    "eps": "target_epsilon",
    "delta": "target_delta",
    "r": "projection_rank",
    "F": "projection_update_steps",
}
UPDATE_STEPS = 100
RANK = 16
HOST_RATE = 5e-5  # the default of transformers
INDEPENDENT = "independent"

BOUND = (
    "greater than 0: it bounds what each sample contributes, which the noise is calibrated to. "
    "Leave it at 1.0, or take clipping='automatic' if it is not to be tuned; not to clip at all, "
    "which 0 means in the Trainer, is max_grad_norm=inf with noise_multiplier=0"
)

_OF_P = ("projection", "projection_update_steps")
_NUMBERS = (int, float, int | None, float | None)
_OTHERS: dict[Any, str] = {bool: "True or False", str: "a text", str | None: "a text or None"}
_Class = TypeVar("_Class", bound=type)

if TYPE_CHECKING:
    _Host = TrainingArguments
else:  # a base with fields would override the defaults of the host that stands behind it
    _Host = object


class Valid(NamedTuple):
    """The range of an argument, beside its type; None is in all of them, and means not given."""

    needed: str
    holds: Callable[[Any], bool]


def one_of(choices: Iterable[str]) -> Valid:
    """Returns the range that is these texts."""
    known = list(choices)
    return Valid(f"one of {known}", known.__contains__)


AT_LEAST_1 = Valid("at least 1", lambda v: v >= 1)
POSITIVE = Valid("greater than 0, and finite", lambda v: 0 < v < math.inf)
NOT_NEGATIVE = Valid("0 or greater, and finite", lambda v: 0 <= v < math.inf)
BETWEEN_0_AND_1 = Valid("strictly between 0 and 1", lambda v: 0 < v < 1)


def short_name(alias: str) -> dict[str, Any]:
    """Returns what a field's metadata says so that ``--alias`` is accepted for it."""
    return {"aliases": [f"--{alias}"]}


@dataclass(repr=False)
class DPGrapeArguments(_Host):
    """What a private run needs to know, in front of ``TrainingArguments`` or a class made of it.

    Put it first among the bases, under ``accepts_short_names``, as ``DPGrapeTrainingArguments``
    does. Exactly one of ``target_epsilon`` and ``noise_multiplier`` is given. The short names
    ``eps``, ``delta``, ``r`` and ``F`` are accepted as keywords and on the command line.

    Other than in ``TrainingArguments``: ``max_grad_norm`` bounds each sample's gradient, not the
    batch's; ``gradient_accumulation_steps`` only multiplies the expected batch size and is then set
    to 1; an epoch has 1/q steps; ``optim`` is Adam in projected coordinates; an accelerator other
    than CUDA is left alone for the CPU, as the random numbers of no other were examined.

    Raises:
        PrivacyError: if a value is out of range, two values contradict each other, or an option
            would void the guarantee. The message names the option, its value and what to do.
    """

    # ---- The promise ----
    target_epsilon: Annotated[float | None, POSITIVE] = field(
        default=None,
        metadata={
            "help": "The privacy budget epsilon: the noise is calibrated so that the whole run "
            "spends at most this, and training stops there. Give this or noise_multiplier.",
            **short_name("eps"),
        },
    )
    target_delta: Annotated[float | None, BETWEEN_0_AND_1] = field(
        default=None,
        metadata={
            "help": "The delta at which epsilon holds; well below 1/N, for example 1e-5. No "
            "default: 1/N would depend on the data.",
            **short_name("delta"),
        },
    )
    noise_multiplier: Annotated[float | None, NOT_NEGATIVE] = field(
        default=None,
        metadata={
            "help": "sigma: noise std divided by max_grad_norm. Give this or target_epsilon. 0 "
            "trains without noise and without any guarantee, and the ledger says so."
        },
    )
    accountant: Annotated[str, one_of(ACCOUNTANTS)] = field(
        default=DEFAULT,
        metadata={"help": "pld, prv or rdp: each computes an upper bound on epsilon."},
    )

    # ---- The mechanism ----
    max_grad_norm: Annotated[float | None, Valid(BOUND, lambda v: v > 0)] = field(  # type: ignore[assignment]
        default=None,
        metadata={
            "help": "C: the L2 norm that each sample's gradient is clipped to, over all trainable "
            "parameters jointly. inf is allowed only with noise_multiplier=0. Default: 1.0."
        },
    )
    clipping: Annotated[str | None, one_of(Clipping)] = field(
        default=None,
        metadata={
            "help": "flat: max_grad_norm bounds a sample's gradient over all parameters jointly. "
            "automatic: every gradient is scaled to just below max_grad_norm, which then need not "
            "be tuned. Default: automatic where learning_rate is chosen and max_grad_norm not "
            "given, else flat."
        },
    )
    noise: Annotated[str | None, one_of([INDEPENDENT, BANDED])] = field(
        default=None,
        metadata={
            "help": "independent: of each step by itself. banded: correlated over as many steps as "
            "leave the least noise in the trained weights at the same epsilon, which the budget, N "
            "and the steps decide; later noise takes back a part of earlier noise. Each further "
            "step costs memory of the size of a release. independent where nothing is gained. "
            "Default: banded where learning_rate is chosen, weights are pretrained, that memory is "
            "at most half of theirs, and the update rule is not Adam; else independent."
        },
    )
    secure_noise: bool = field(
        default=False,
        metadata={
            "help": "Draw noise whose low bits cannot betray what it was added to: four draws in "
            "float64, their sum rounded to a public grid. Drawing then takes about 9 times as "
            "long on a CPU. In one process only."
        },
    )
    expected_batch_size: Annotated[int | None, AT_LEAST_1] = field(
        default=None,
        metadata={
            "help": "The mean size of the logical batch, q N, and the constant that gradients are "
            "divided by. Default: chosen where learning_rate is, from the passes over the data "
            "(num_train_epochs) and N; else per_device_train_batch_size * "
            "gradient_accumulation_steps * number of processes. per_device_train_batch_size itself "
            "bounds memory only."
        },
    )
    num_samples: Annotated[int | None, AT_LEAST_1] = field(
        default=None,
        metadata={
            "help": "The declared dataset size N, from which q = expected_batch_size / N follows. "
            "Default: the length of the training dataset, which treats that length as public."
        },
    )
    earlier_data: Annotated[str | None, one_of(EarlierData)] = field(
        default=None,
        metadata={
            "help": "Whether this run trains on examples that were used by the run that the model "
            f"comes from, or by those before it: {' or '.join(EarlierData)}. same: the privacy "
            "spent adds up, within target_epsilon. Needed where the model has a privacy ledger, or "
            "where that cannot be looked up (offline, say): other, if it has none."
        },
    )
    earlier_ledger: str | None = field(
        default=None,
        metadata={
            "help": "The privacy ledger of the run that the model comes from, where it does not "
            "lie in the folder or repository that the model was loaded from: adapters, and "
            "models built by hand."
        },
    )
    adjacency: Annotated[str, one_of(Adjacency)] = field(
        default=Adjacency.ADD_OR_REMOVE_ONE.value,
        metadata={
            "help": f"Which data sets are neighbours: {', '.join(Adjacency)}. Replacing one "
            "example changes up to twice as much as adding it, and takes up to twice the noise."
        },
    )
    privacy_unit_column: str | None = field(
        default=None,
        metadata={
            "help": "The column that says whose an example is, user_id say: what epsilon protects "
            "is then all examples of one value, which are drawn, and clipped, together. "
            "num_samples and expected_batch_size count these units. Default: each example is one."
        },
    )
    max_examples_per_unit: Annotated[int | None, AT_LEAST_1] = field(
        default=None,
        metadata={
            "help": "The most examples of a unit that one step uses, a random choice of them. "
            "Bounds memory and time. Default: all; needs privacy_unit_column."
        },
    )

    # ---- The method ----
    method: str = field(
        default="dp_grape",
        metadata={
            "help": f"Which method trains: {', '.join(METHODS)}, or a plug-in's. The recipes have "
            "the paper's comparisons as plug-ins (recipes.paper.methods)."
        },
    )
    learning_rate: Annotated[float | None, NOT_NEGATIVE] = field(  # type: ignore[assignment]
        default=None,
        metadata={
            "help": "The rate of most of what is trained. Default: chosen, and with it all that is "
            "not given of what is trained, batch, clipping, rank, rule and factors "
            f"(dp_grape_hf.choosing); {HOST_RATE:g} where there is no noise to choose by."
        },
    )
    lr_scheduler_type: Annotated[str | None, one_of(s.value for s in SchedulerType)] = field(  # type: ignore[assignment]
        default=None,
        metadata={
            "help": "How the rate changes over the run. Default: not at all for pretrained weights "
            "where learning_rate is chosen; else linear, as that of transformers."
        },
    )
    update_rule: Annotated[str | None, one_of(sorted(UPDATE_RULES))] = field(
        default=None,
        metadata={
            "help": "How private gradients move weights. Default: that of the method; chosen for "
            "principal directions where learning_rate is."
        },
    )
    learning_rate_factors: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "What the learning rate is multiplied by for some parameters: a mapping of "
            "name patterns to factors (as JSON on the command line), such as "
            '{"classifier": 20} for a head that is new.'
        },
    )
    gradient_factors: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "What gradients of some parameters are multiplied by before the clip, and "
            "divided by after the noise: a mapping of name patterns to factors (as JSON on the "
            'command line), such as {"classifier": 4}. Such a head has more of max_grad_norm, and '
            "a quarter of the noise. Costs no privacy."
        },
    )
    # ---- The projection ----
    projection: str | None = field(
        default=None,
        metadata={
            "help": f"Where P comes from. {PRINCIPAL}: the principal directions of what each layer "
            "is given when the model reads synthetic inputs, or a public_dataset of the trainer; "
            f"at random: {', '.join(sorted(PROJECTIONS))}. Default: that of the method."
        },
    )
    projection_rank: Annotated[int | None, AT_LEAST_1] = field(
        default=None,
        metadata={
            "help": "r: the rank of the projected gradients. A layer whose projected dimension is "
            f"not above r is not projected. Default: {RANK}; chosen for principal directions where "
            "learning_rate is.",
            **short_name("r"),
        },
    )
    projection_update_steps: Annotated[int | None, AT_LEAST_1] = field(
        default=None,
        metadata={
            "help": "F: make the projection anew every this many steps. Default: 100, and never "
            "for principal directions, which are then measured on the weights of the time.",
            **short_name("F"),
        },
    )
    projection_seed: Annotated[int, Valid("0 or greater", lambda v: v >= 0)] = field(
        default=0,
        metadata={"help": "The public seed of the projections; it stands in the ledger."},
    )

    # ---- The computation ----
    grad_sample_mode: Annotated[str, one_of(GradSampleMode)] = field(
        default=GradSampleMode.AUTO.value,
        metadata={
            "help": f"How clipping sees per-sample gradients: {', '.join(GradSampleMode)}. All "
            "make the same release. auto: for each layer the form that takes least."
        },
    )
    engine: Annotated[str, one_of(sorted(ENGINES))] = field(
        default="layerwise",
        metadata={
            "help": "How per-sample gradients are computed: layerwise (fast) or functorch (any "
            "model that vmap can trace)."
        },
    )

    # ---- What leaves the machine ----
    save_as: Annotated[str, one_of(["model", "adapter"])] = field(
        default="model",
        metadata={
            "help": "What save_model() and push_to_hub() write: model, all weights; or adapter, a "
            "LoRA adapter of PEFT with what the run changed, of rank r times the number of "
            "projections. Checkpoints hold all weights, to be resumed from."
        },
    )
    eval_data_is_public: bool = field(
        default=False,
        metadata={
            "help": "Declares that the evaluation data need no protection: metrics of these rows "
            "are not covered by epsilon. They may then be training rows, and the best checkpoint "
            "may be chosen by their metrics."
        },
    )

    refused_if_set: ClassVar[dict[str, str]] = REFUSED_IF_SET
    """Name of an option of the host -> why it is refused, and what to do instead."""

    def __post_init__(self) -> None:
        """Fills in defaults and refuses what would void the guarantee."""
        self._read_numbers()
        self._refuse_values()
        self._fill_in()
        refuse_contradictions(self)
        refuse_host_options(self)
        self._keep_to_examined_devices()
        super().__post_init__()
        refuse_machine(self)
        if (refuse := METHODS[self.method].refuse) is not None:
            refuse(self)
        if self.noise != INDEPENDENT:
            self.ignore_data_skip = True  # draws that are thrown away would be somebody's turn
        if self.private:  # the losses that it filters are withheld, and it has a GPU waited for
            self.logging_nan_inf_filter = False
        if self.gradient_checkpointing:  # both names of the option hold the same by now
            self._set_checkpointing_kwargs()
        accumulated = self.gradient_accumulation_steps != 1
        if self.expected_batch_size is not None and accumulated:
            raise PrivacyError(
                f"expected_batch_size={self.expected_batch_size!r} and "
                f"gradient_accumulation_steps={self.gradient_accumulation_steps!r} both set the "
                "size of the logical batch. Leave gradient_accumulation_steps at 1: the logical "
                "batch is split into physical batches of per_device_train_batch_size by itself."
            )
        if self.expected_batch_size is None and (accumulated or not self.chooses):
            self.expected_batch_size = (
                self.per_device_train_batch_size
                * self.gradient_accumulation_steps
                * self.world_size
            )
            if self.expected_batch_size < 1:
                raise PrivacyError(
                    f"expected_batch_size={self.expected_batch_size}, the product of "
                    f"per_device_train_batch_size={self.per_device_train_batch_size!r}, "
                    "gradient_accumulation_steps and the number of processes, must be at least 1."
                )
            self.gradient_accumulation_steps = 1
        if self.expected_batch_size is None:
            self._open |= {"expected_batch_size"}

    def suit_fresh_weights(self) -> None:
        """Chooses rule, rank, schedule and noise anew, for weights that are not pretrained.

        A step is what limits those, and less noise at the end gains nothing (``choosing``).
        """
        self.choose({"noise": INDEPENDENT} | self._chosen(pretrained=False))

    def measure_nothing(self, reason: str) -> None:
        """Chooses P at random, for a model that cannot be run on synthetic inputs.

        Raises:
            PrivacyError: principal directions were asked for; with the reason.
        """
        if self.projection == PRINCIPAL and "projection" not in self._open:
            raise PrivacyError(f"projection={self.projection!r}: {reason}")
        if self.projection == PRINCIPAL:
            row = METHODS[self.method]
            self.choose(
                {
                    "projection": "gaussian",
                    "projection_update_steps": UPDATE_STEPS,
                    "projection_rank": RANK,
                    "update_rule": row.update_rule,
                    "noise": INDEPENDENT,
                }
            )

    def choose(self, options: Mapping[str, Any]) -> None:
        """Sets the options that were not given, from a mapping of names to values."""
        for name in self._open & options.keys():
            setattr(self, name, options[name])

    @property
    def chosen_options(self) -> dict[str, Any]:
        """The options that were not given and are chosen, with their values so far."""
        return {name: getattr(self, name) for name in sorted(self._open)}

    @property
    def logical_batch_size(self) -> int:
        """The expected size of the logical batch, q N, which is known when a trainer is made."""
        assert self.expected_batch_size is not None
        return self.expected_batch_size

    @property
    def private(self) -> bool:
        """Whether noise is asked for."""
        return self.noise_multiplier != 0

    def _keep_to_examined_devices(self) -> None:
        if self.use_cpu or not torch.accelerator.is_available():
            return
        found = torch.accelerator.current_accelerator()
        if found is not None and found.type != "cuda":
            self.use_cpu = True
            logger.warning(
                "Training on the CPU: whether noise and dropout masks of the device %r are as "
                "secret and as random as the guarantee needs was not examined. use_cpu=True says "
                "the same without this warning.",
                found.type,
            )

    def _set_checkpointing_kwargs(self) -> None:
        kwargs: dict[str, Any] = dict(self.gradient_checkpointing_kwargs or {})  # type: ignore[arg-type]
        if kwargs.setdefault("use_reentrant", False):
            raise PrivacyError(
                "gradient_checkpointing_kwargs={'use_reentrant': True} hides the backward pass "
                "from the engine. Use {'use_reentrant': False}."
            )
        self.gradient_checkpointing_kwargs = kwargs
        if "activation_checkpointing_kwargs" in self.__dataclass_fields__:  # transformers >= 5.20
            self.activation_checkpointing_kwargs = kwargs

    def _read_numbers(self) -> None:
        """Converts our numbers from text, which is what YAML makes of 1e-5; refuses other types."""
        for name, kind in get_type_hints(DPGrapeArguments).items():
            value: Any = getattr(self, name, None)
            if kind in _OTHERS and not isinstance(value, kind):
                raise PrivacyError(f"{name}={value!r} must be {_OTHERS[kind]}.")
            if kind not in _NUMBERS or (value is None and kind not in (int, float)):
                continue
            whole = kind in (int, int | None)
            try:
                number = float(value)
                if isinstance(value, bool) or (whole and number != int(number)):
                    raise ValueError
            except (TypeError, ValueError, OverflowError):
                needed = "a whole number" if whole else "a number"
                raise PrivacyError(f"{name}={value!r} must be {needed}.") from None
            setattr(self, name, int(value) if whole else number)

    def _refuse_values(self) -> None:
        """Refuses the first argument that is out of the range that stands beside it."""
        for name, kind in get_type_hints(DPGrapeArguments, include_extras=True).items():
            value = getattr(self, name, None)
            for needed, holds in getattr(kind, "__metadata__", ()):
                if value is not None and not holds(value):
                    raise PrivacyError(f"{name}={value!r} must be {needed}.")

    def _fill_in(self) -> None:
        """Fills in what the method implies."""
        row = row_of(self.method)
        given = {n for n in _OF_P if getattr(self, n) is not None}
        if self.projection is None:
            self.projection = row.projection
        principal = self.projection == PRINCIPAL
        if self.projection_update_steps is None and not principal:
            self.projection_update_steps = UPDATE_STEPS
        # Whether what is not given is chosen, by the noise of the run (``choosing``).
        self.chooses = (
            self.learning_rate is None
            and row.private
            and row.query is None
            and self.noise_multiplier != 0
        )
        # A module whose parameters are clipped apart from all others.
        self.clipped_apart: str | None = None
        if self.noise is None and (not self.chooses or reason_against_bands(self)):
            self.noise = INDEPENDENT
        if self.learning_rate is None and not self.chooses:
            self.learning_rate = HOST_RATE
        defaults = {
            "update_rule": row.update_rule,
            "projection_rank": RANK,
            "lr_scheduler_type": SchedulerType.LINEAR.value,
        }
        chosen = self._chosen(pretrained=True) if self.chooses else {}
        self._open = {name for name in ("noise", *chosen) if getattr(self, name) is None}
        if self.chooses and principal:
            self._open |= {*_OF_P} - given
        for name, value in (defaults | chosen).items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.clipping is None:
            scaled = self.chooses and self.max_grad_norm is None
            self.clipping = (Clipping.AUTOMATIC if scaled else Clipping.FLAT).value
        if self.max_grad_norm is None:
            self.max_grad_norm = 1.0
        self._read_factors()
        if not row.private:
            self._set_not_private()

    def _chosen(self, *, pretrained: bool) -> dict[str, Any]:
        """Returns the options that are chosen where they are not given."""
        found = {"lr_scheduler_type": schedule(pretrained=pretrained)}
        if self.projection == PRINCIPAL:
            found |= rule_and_rank(pretrained=pretrained)
        return found

    def _read_factors(self) -> None:
        """Takes mappings of factors, which the command line gives as JSON."""
        for name in ("learning_rate_factors", "gradient_factors"):
            asked: Any = getattr(self, name)
            if asked is None:
                continue
            try:
                factors = json.loads(asked) if isinstance(asked, str) else dict(asked)
                good = all(_is_factor(*item) for item in factors.items())
            except (ValueError, TypeError, AttributeError):
                factors, good = {}, False
            if not (factors and good):
                raise PrivacyError(
                    f"{name}={asked!r} must map name patterns to factors that are positive and "
                    'finite, like {"classifier": 20}.'
                )
            setattr(self, name, factors)

    def _set_not_private(self) -> None:
        """Sets sigma to 0 and C to infinity, and refuses to promise anything."""
        options = {
            "target_epsilon": (None,),
            "noise_multiplier": (None, 0),
            "max_grad_norm": (1.0, math.inf),  # the first is the default
        }
        for name, allowed in options.items():
            value = getattr(self, name)
            if value not in allowed:
                raise PrivacyError(
                    f"{name}={value!r} contradicts method={self.method!r}, which neither clips nor "
                    "adds noise and has no finite epsilon. Leave it out, or choose a private "
                    f"method: {', '.join(name for name, row in METHODS.items() if row.private)}."
                )
        self.noise_multiplier, self.max_grad_norm = 0.0, math.inf


def _is_factor(pattern: Any, value: Any) -> bool:
    number = type(value) in (int, float) and 0 < value <= sys.float_info.max
    return type(pattern) is str and number


def accepts_short_names(cls: _Class) -> _Class:
    """Lets a dataclass of arguments be made with ``eps``, ``delta``, ``r`` and ``F`` as keywords.

    Raises:
        PrivacyError: when an instance is made, if a quantity is given under both its names.
    """
    generated: Any = cls.__init__  # type: ignore[misc]

    @functools.wraps(generated)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        for short, name in ALIASES.items():
            if short in kwargs:
                if name in kwargs:
                    raise PrivacyError(
                        f"{short}={kwargs[short]!r} and {name}={kwargs[name]!r} are the same "
                        "quantity; give one of them."
                    )
                kwargs[name] = kwargs.pop(short)
        generated(self, *args, **kwargs)

    cls.__init__ = init  # type: ignore[misc]
    return cls


@accepts_short_names
@dataclass(repr=False)
class DPGrapeTrainingArguments(DPGrapeArguments, TrainingArguments):
    """``TrainingArguments`` of a differentially private run.

    ``eps``, ``delta`` and ``num_train_epochs`` are enough: without ``learning_rate`` all else that
    is not given is chosen (``dp_grape_hf.choosing``). Each field says in its metadata what it is:
    ``HfArgumentParser`` shows that for ``--help``, and the page of ``dp_grape_hf/arguments`` has
    all. What is other than in the host, and refused, is said of ``DPGrapeArguments``.

    >>> args = DPGrapeTrainingArguments(output_dir="out", eps=6.0, delta=1e-5, report_to="none")
    >>> args.target_epsilon, args.chooses, args.clipping
    (6.0, True, 'automatic')
    """
