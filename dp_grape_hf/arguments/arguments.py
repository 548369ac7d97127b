"""``DPGrapeTrainingArguments``: the options of a private run, with their defaults and checks."""

import functools
import logging
import math
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import torch
from transformers import TrainingArguments
from transformers.trainer_utils import SchedulerType

from dp_grape_hf.arguments.methods import METHODS, row_of
from dp_grape_hf.arguments.refusals import (
    FIXED_OF_HOST,
    REFUSED_IF_SET,
    reason_against_bands,
    refuse_contradictions,
    refuse_host_options,
    refuse_machine,
    rule_of_optim,
)
from dp_grape_hf.choosing import rule_and_rank, schedule
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.ledger import Clipping
from dp_grape_hf.options import OPTIONS, read
from dp_grape_hf.projections import PRINCIPAL

logger = logging.getLogger(__name__)

ALIASES = {option.short: name for name, option in OPTIONS.items() if option.short is not None}
UPDATE_STEPS = 100
RANK = 16
HOST_RATE = 5e-5  # learning rate: the default of transformers
INDEPENDENT = "independent"

_OWN = {name for name, option in OPTIONS.items() if not option.of_host}
# Options that cannot change after they were checked. The Trainer sets some of its other options.
_FIXED = _OWN | FIXED_OF_HOST
_OF_P = ("projection", "projection_update_steps")
_Class = TypeVar("_Class", bound=type)

if TYPE_CHECKING:
    _Host = TrainingArguments
else:  # a base with fields would override the defaults of the class after it
    _Host = object


class _FromTable:
    """A placeholder that becomes a dataclass field with the default and help of its option."""

    def __set_name__(self, owner: type, name: str) -> None:
        option = OPTIONS[name]
        aliases = {} if option.short is None else {"aliases": [f"--{option.short}"]}
        metadata = {"help": option.help, **aliases}
        setattr(owner, name, field(default=option.default, metadata=metadata))


_IN_TABLE: Any = _FromTable()


@dataclass(repr=False)
class DPGrapeArguments(_Host):
    """The options of a private run, as a base class before ``TrainingArguments`` or a subclass.

    Make it the first base, and decorate the class by ``accepts_short_names``, as
    ``DPGrapeTrainingArguments`` does. Pass exactly one of ``target_epsilon`` and
    ``noise_multiplier``. The short names ``eps``, ``delta``, ``r`` and ``F`` are accepted as
    keywords and on the command line.

    Differences from ``TrainingArguments``:

    * ``max_grad_norm`` bounds the gradient of each sample, not of the batch.
    * ``gradient_accumulation_steps`` only multiplies the expected batch size, and is then set to 1.
    * An epoch is 1/q steps.
    * ``optim`` is Adam in the projected space.
    * Accelerators other than CUDA are not used, because their random numbers were not examined.

    Raises:
        PrivacyError: if a value is out of range, two values contradict each other, or an option
            would void the guarantee.
    """

    # The fields of the table of options, in its order.
    target_epsilon: float | None = _IN_TABLE
    target_delta: float | None = _IN_TABLE
    noise_multiplier: float | None = _IN_TABLE
    accountant: str = _IN_TABLE
    max_grad_norm: float | None = _IN_TABLE  # type: ignore[assignment]
    clipping: str | None = _IN_TABLE
    noise: str | None = _IN_TABLE
    secure_noise: bool = _IN_TABLE
    expected_batch_size: int | None = _IN_TABLE
    num_samples: int | None = _IN_TABLE
    earlier_data: str | None = _IN_TABLE
    earlier_ledger: str | None = _IN_TABLE
    adjacency: str = _IN_TABLE
    privacy_unit_column: str | None = _IN_TABLE
    max_examples_per_unit: int | None = _IN_TABLE
    method: str = _IN_TABLE
    learning_rate: float | None = _IN_TABLE  # type: ignore[assignment]
    lr_scheduler_type: str | None = _IN_TABLE  # type: ignore[assignment]
    update_rule: str | None = _IN_TABLE
    learning_rate_factors: dict[str, Any] | str | None = _IN_TABLE
    gradient_factors: dict[str, Any] | str | None = _IN_TABLE
    projection: str | None = _IN_TABLE
    projection_rank: int | None = _IN_TABLE
    projection_update_steps: int | None = _IN_TABLE
    projection_seed: int = _IN_TABLE
    grad_sample_mode: str = _IN_TABLE
    engine: str = _IN_TABLE
    eval_data_is_public: bool = _IN_TABLE

    refused_if_set: ClassVar[dict[str, str]] = REFUSED_IF_SET
    """Name of an option of ``TrainingArguments`` -> why it is refused, and what to do instead."""
    _fixed = False  # True after the checks of an instance

    def __post_init__(self) -> None:
        """Fill in defaults, and refuse options that would void the guarantee."""
        for name in _OWN:
            setattr(self, name, read(name, getattr(self, name)))
        self.update_rule = rule_of_optim(self.optim, self.update_rule)
        self._fill_in()
        refuse_contradictions(self)
        refuse_host_options(self)
        self._keep_to_examined_devices()
        super().__post_init__()
        refuse_machine(self)
        if (refuse := METHODS[self.method].refuse) is not None:
            refuse(self)
        if self.noise != INDEPENDENT:
            self.ignore_data_skip = True  # a skipped batch would use up the turn of its group
        if self.private:  # losses are not logged, and the filter would synchronise with the GPU
            self.logging_nan_inf_filter = False
        if self.gradient_checkpointing:  # both names of the option have the same value here
            self._set_checkpointing_kwargs()
        accumulated = self.gradient_accumulation_steps != 1
        if self.expected_batch_size is not None and accumulated:
            raise PrivacyError(
                f"expected_batch_size={self.expected_batch_size!r} and "
                f"gradient_accumulation_steps={self.gradient_accumulation_steps!r} both set the "
                "size of the logical batch. Leave gradient_accumulation_steps at 1: the trainer "
                "splits the logical batch into physical batches of per_device_train_batch_size."
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
        self._fixed = True

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; refuse to change an option after the arguments were checked.

        Raises:
            PrivacyError: the option has another value already.
        """
        fixed = self._fixed and (name in _FIXED or name in self.refused_if_set)
        if fixed and value != (now := getattr(self, name)):
            raise PrivacyError(
                f"{name}={value!r}: it is {now!r} and cannot be changed any more, because the "
                "noise and the ledger depend on it. Make new arguments by "
                f"dataclasses.replace(args, {name}=...), and a new trainer with them."
            )
        super().__setattr__(name, value)

    def for_fresh_weights(self) -> Self:
        """Return arguments with the choices for weights that are not pretrained (``choosing``)."""
        return self.with_choices({"noise": INDEPENDENT} | self._chosen(pretrained=False))

    def without_measuring(self, reason: str) -> Self:
        """Return arguments with a random P, for a model that cannot run on synthetic inputs.

        Raises:
            PrivacyError: ``projection="principal"`` was passed explicitly.
        """
        if self.projection != PRINCIPAL:
            return self
        if "projection" not in self._open:
            raise PrivacyError(f"projection={self.projection!r}: {reason}")
        return self.with_choices(
            {
                "projection": "gaussian",
                "projection_update_steps": UPDATE_STEPS,
                "projection_rank": RANK,
                "update_rule": METHODS[self.method].update_rule,
                "noise": INDEPENDENT,
            }
        )

    def with_engine(self, engine: str) -> Self:
        """Return a copy with another engine, for a loss that needs it."""
        chosen = copy(self)
        vars(chosen)["engine"] = engine
        return chosen

    def with_choices(self, options: Mapping[str, Any]) -> Self:
        """Return a copy with these values, by name, for the options that were not given."""
        chosen = copy(self)
        vars(chosen).update({name: options[name] for name in self._open & options.keys()})
        return chosen

    @property
    def chosen_options(self) -> dict[str, Any]:
        """The options that the package chooses, by name, with their current values."""
        return {name: getattr(self, name) for name in sorted(self._open)}

    @property
    def logical_batch_size(self) -> int:
        """The expected size of the logical batch, q N; it is set when a trainer is made."""
        assert self.expected_batch_size is not None
        return self.expected_batch_size

    @property
    def private(self) -> bool:
        """True if the run adds noise."""
        return self.noise_multiplier != 0

    def _keep_to_examined_devices(self) -> None:
        if self.use_cpu or not torch.accelerator.is_available():
            return
        device = torch.accelerator.current_accelerator()
        if device is not None and device.type != "cuda":
            self.use_cpu = True
            logger.warning(
                "Training on the CPU, not on the device %r: it was not examined whether the random "
                "numbers of this device are random enough for the noise. Set use_cpu=True to avoid "
                "this warning.",
                device.type,
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

    def _fill_in(self) -> None:
        """Fill in the defaults of the method, and the options that the package chooses."""
        row = row_of(self.method)
        given = {n for n in _OF_P if getattr(self, n) is not None}
        if self.projection is None:
            self.projection = row.projection
        principal = self.projection == PRINCIPAL
        if self.projection_update_steps is None and not principal:
            self.projection_update_steps = UPDATE_STEPS
        # Whether the package chooses the options that were not given, by the noise of the run.
        self.chooses = (
            self.learning_rate is None
            and row.private
            and row.query is None
            and self.noise_multiplier != 0
        )
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
        if not row.private:
            self._set_not_private()

    def _chosen(self, *, pretrained: bool) -> dict[str, Any]:
        """Return the choices for options that were not given."""
        choices = {"lr_scheduler_type": schedule(pretrained=pretrained)}
        if self.projection == PRINCIPAL:
            choices |= rule_and_rank(pretrained=pretrained)
        elif METHODS[self.method].adapter:
            rule = rule_and_rank(pretrained=True)["update_rule"]
            choices["update_rule"] = rule if pretrained else METHODS[self.method].update_rule
        return choices

    def _set_not_private(self) -> None:
        """Set sigma to 0 and C to infinity, and refuse a budget."""
        options = {
            "target_epsilon": (None,),
            "noise_multiplier": (None, 0),
            "max_grad_norm": (1.0, math.inf),  # the first is the default
        }
        for name, allowed in options.items():
            value = getattr(self, name)
            if value not in allowed:
                raise PrivacyError(
                    f"{name}={value!r} contradicts method={self.method!r}, which does not clip, "
                    "adds no noise and has no finite epsilon. Leave it out, or choose a private "
                    f"method: {', '.join(name for name, row in METHODS.items() if row.private)}."
                )
        self.noise_multiplier, self.max_grad_norm = 0.0, math.inf


def accepts_short_names(cls: _Class) -> _Class:
    """Make a dataclass of arguments accept the keywords ``eps``, ``delta``, ``r`` and ``F``.

    Raises:
        PrivacyError: when an instance is made with both names of an option.
    """
    generated: Any = cls.__init__  # type: ignore[misc]

    @functools.wraps(generated)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        for short, name in ALIASES.items():
            if short in kwargs:
                if name in kwargs:
                    raise PrivacyError(
                        f"{short}={kwargs[short]!r} and {name}={kwargs[name]!r} are two names of "
                        "one option. Pass one of them."
                    )
                kwargs[name] = kwargs.pop(short)
        generated(self, *args, **kwargs)

    cls.__init__ = init  # type: ignore[misc]
    return cls


@accepts_short_names
@dataclass(repr=False)
class DPGrapeTrainingArguments(DPGrapeArguments, TrainingArguments):
    """``TrainingArguments`` of a differentially private run.

    Pass ``eps``, ``delta`` and ``num_train_epochs``. Without ``learning_rate``, the package chooses
    the other options (``dp_grape_hf.choosing``). ``dp_grape_hf.options`` documents each option;
    ``HfArgumentParser`` shows the same texts for ``--help``. ``DPGrapeArguments`` lists the
    differences from ``TrainingArguments``.

    >>> args = DPGrapeTrainingArguments(output_dir="out", eps=6.0, delta=1e-5, report_to="none")
    >>> args.target_epsilon, args.chooses, args.clipping
    (6.0, True, 'automatic')
    """
