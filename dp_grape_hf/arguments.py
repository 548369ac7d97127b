"""``DPGrapeTrainingArguments``: what is promised, and which Hugging Face options would break it."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_type_hints

from transformers import TrainingArguments

from dp_grape_hf.accounting import ACCOUNTANTS, LEAST, Adjacency
from dp_grape_hf.continuing import EarlierData
from dp_grape_hf.contradictions import refuse_contradictions
from dp_grape_hf.engines import ENGINES
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.host_options import refuse_host_options, refuse_uploading_trackers
from dp_grape_hf.mechanism import Clipping, Sampling
from dp_grape_hf.method_arguments import MethodArguments, one_of, refuse_values, short_name
from dp_grape_hf.methods import METHODS
from dp_grape_hf.per_sample import GradSampleMode
from dp_grape_hf.tuning import Trials, TrialsDistribution

ALIASES = {
    "eps": "target_epsilon",
    "delta": "target_delta",
    "r": "projection_rank",
    "F": "projection_update_steps",
}

_NUMBERS = (int, float, int | None, float | None)
_OTHERS: dict[Any, str] = {bool: "True or False", str: "a text", str | None: "a text or None"}
_Class = TypeVar("_Class", bound=type)


@dataclass(repr=False)
class DPGrapeArguments(MethodArguments):
    """What a private run needs to know, in front of ``TrainingArguments`` or a class made of it.

    Put it first among the bases, under ``accepts_short_names``, as ``DPGrapeTrainingArguments``
    does. Exactly one of ``target_epsilon`` and ``noise_multiplier`` is given. The short names
    ``eps``, ``delta``, ``r`` and ``F`` are accepted as keywords and on the command line.

    Other than in ``TrainingArguments``: ``max_grad_norm`` bounds each sample's gradient, not the
    batch's; ``gradient_accumulation_steps`` only multiplies the expected batch size and is then set
    to 1; an epoch has 1/q steps; ``optim`` is Adam in projected coordinates.

    Raises:
        PrivacyError: if a value is out of range, two values contradict each other, or an option
            would void the guarantee. The message names the option, its value and what to do.
    """

    # ---- The promise ----
    target_epsilon: float | None = field(
        default=None,
        metadata={
            "help": "The privacy budget epsilon: the noise is calibrated so that the whole run "
            "spends at most this, and training stops there. Give this or noise_multiplier.",
            **short_name("eps"),
        },
    )
    target_delta: float | None = field(
        default=None,
        metadata={
            "help": "The delta at which epsilon holds; well below 1/N, for example 1e-5. No "
            "default: 1/N would depend on the data.",
            **short_name("delta"),
        },
    )
    noise_multiplier: float | None = field(
        default=None,
        metadata={
            "help": "sigma: noise std divided by max_grad_norm. Give this or target_epsilon. 0 "
            "trains without noise and without any guarantee, and the ledger says so."
        },
    )
    accountant: str = field(
        default=LEAST,
        metadata={"help": "prv, pld or rdp, each an upper bound, or the least of those installed."},
    )

    # ---- The mechanism ----
    max_grad_norm: float = field(
        default=1.0,
        metadata={
            "help": "C: the L2 norm that each sample's gradient is clipped to, over all trainable "
            "parameters jointly. inf is allowed only with noise_multiplier=0."
        },
    )
    clipping: str = field(
        default=Clipping.FLAT.value,
        metadata={
            "help": "flat: max_grad_norm bounds a sample's gradient over all parameters jointly. "
            "per_layer: each layer has a share of it, so that nothing per sample outlives its "
            "layer in the backward pass. That takes less memory and as much noise, and clips "
            "harder. automatic: every gradient is scaled to just below max_grad_norm, which then "
            "need not be tuned."
        },
    )
    secure_noise: bool = field(
        default=False,
        metadata={
            "help": "Draw noise whose low bits cannot betray what it was added to: four draws in "
            "float64, their sum rounded to a public grid. Drawing then takes about 10 times as "
            "long on a CPU. In one process only."
        },
    )
    expected_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "The mean size of the logical batch, q N, and the constant that gradients are "
            "divided by. Default: per_device_train_batch_size * gradient_accumulation_steps * "
            "number of processes. per_device_train_batch_size itself bounds memory only."
        },
    )
    sampling: str = field(
        default=Sampling.POISSON.value,
        metadata={
            "help": "How logical batches are drawn: poisson, or truncated_poisson, which keeps at "
            "most max_batch_size of those drawn, so that no step takes much longer than others."
        },
    )
    max_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "The most examples a logical batch of truncated_poisson keeps. Default: the "
            "smallest number that costs no noise; a smaller one is accounted for."
        },
    )
    num_samples: int | None = field(
        default=None,
        metadata={
            "help": "The declared dataset size N, from which q = expected_batch_size / N follows. "
            "Default: the length of the training dataset, which treats that length as public."
        },
    )
    earlier_data: str | None = field(
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
    num_trials: float | None = field(
        default=None,
        metadata={
            "help": "The mean of the secret, random number of equal runs of which this is one, and "
            "only the best will be published: epsilon is then that of the best. Scores to choose "
            "by must come from public data. See dp-grape calibrate --draw_num_trials."
        },
    )
    trials_distribution: str = field(
        default=TrialsDistribution.GEOMETRIC.value,
        metadata={"help": f"How that number was drawn: {', '.join(TrialsDistribution)}."},
    )

    adjacency: str = field(
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
    max_examples_per_unit: int | None = field(
        default=None,
        metadata={
            "help": "The most examples of a unit that one step uses, a random choice of them. "
            "Bounds memory and time. Default: all; needs privacy_unit_column."
        },
    )

    # ---- The computation ----
    grad_sample_mode: str = field(
        default=GradSampleMode.AUTO.value,
        metadata={
            "help": f"How clipping sees per-sample gradients: {', '.join(GradSampleMode)}. All "
            "make the same release. auto: for each layer the form that takes least."
        },
    )
    engine: str = field(
        default="layerwise",
        metadata={
            "help": "How per-sample gradients are computed: layerwise (fast) or functorch (any "
            "model that vmap can trace)."
        },
    )
    self_check: bool = field(
        default=True,
        metadata={
            "help": "At the first step, compare per-sample gradients and losses of two examples "
            "with those of plain autograd on one example at a time."
        },
    )

    # ---- What leaves the machine ----
    log_unnoised_statistics: bool = field(
        default=False,
        metadata={
            "help": "Log the raw training loss and the token counts of drawn batches. They are "
            "functions of private data without noise: for debugging on public data only. The "
            "ledger then says that what was logged is not private."
        },
    )
    eval_data_is_public: bool = field(
        default=False,
        metadata={
            "help": "Declares that the evaluation data is public, so that the best checkpoint may "
            "be chosen by it."
        },
    )

    def __post_init__(self) -> None:
        """Fills in defaults and refuses what would void the guarantee."""
        self._read_numbers()
        self._resolve_method()
        self._refuse_values()
        refuse_host_options(
            self,
            log_unnoised_statistics=self.log_unnoised_statistics,
            eval_data_is_public=self.eval_data_is_public,
        )
        super().__post_init__()
        refuse_uploading_trackers(self.report_to)
        if self.mixed_precision == "fp16":
            raise PrivacyError(
                "mixed_precision='fp16', from accelerate launch, is refused: its loss scaler skips "
                "steps on Inf, which depends on the data. Use --mixed_precision bf16."
            )
        row = METHODS[self.method]
        if row.zeroth_order and row.private and self.mixed_precision != "no":
            raise PrivacyError(
                f"mixed_precision={self.mixed_precision!r} with method={self.method!r} is refused: "
                "a finite difference magnifies the rounding of a loss, which depends on "
                "batch-mates, beyond what clipping bounds. Leave bf16 out."
            )
        self._refuse_secure_noise()
        if self.gradient_checkpointing:  # both names of the option hold the same by now
            self._set_checkpointing_kwargs()
        if self.expected_batch_size is None:
            self.expected_batch_size = (
                self.per_device_train_batch_size
                * self.gradient_accumulation_steps
                * self.world_size
            )
        elif self.gradient_accumulation_steps != 1:
            raise PrivacyError(
                f"expected_batch_size={self.expected_batch_size!r} and "
                f"gradient_accumulation_steps={self.gradient_accumulation_steps!r} both set the "
                "size of the logical batch. Leave gradient_accumulation_steps at 1: the logical "
                "batch is split into physical batches of per_device_train_batch_size by itself."
            )
        self.gradient_accumulation_steps = 1
        if self.logical_batch_size < 1:
            raise PrivacyError(
                f"expected_batch_size={self.logical_batch_size}, the product of "
                f"per_device_train_batch_size={self.per_device_train_batch_size!r}, "
                "gradient_accumulation_steps and the number of processes, must be at least 1."
            )

    @property
    def logical_batch_size(self) -> int:
        """The expected size of the logical batch, q N, which ``__post_init__`` has filled in."""
        assert self.expected_batch_size is not None
        return self.expected_batch_size

    @property
    def private(self) -> bool:
        """Whether noise is asked for."""
        return self.noise_multiplier != 0

    def _refuse_secure_noise(self) -> None:
        if self.secure_noise and not self.private:
            raise PrivacyError(
                f"secure_noise={self.secure_noise!r} contradicts "
                f"noise_multiplier={self.noise_multiplier!r}: there is no noise. Leave it out."
            )
        if self.secure_noise and self.world_size > 1:
            raise PrivacyError(
                f"secure_noise={self.secure_noise!r} with {self.world_size} processes is refused: "
                "what the others add to the noised sum would show its low bits. Train in one "
                "process, or leave it out."
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
        if self.max_grad_norm is None:
            raise PrivacyError("max_grad_norm=None: give C, the norm each sample is clipped to.")
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            raise PrivacyError(
                f"target_epsilon={self.target_epsilon!r} and "
                f"noise_multiplier={self.noise_multiplier!r}: give exactly one of them. "
                "target_epsilon=8.0 asks for a budget; noise_multiplier=0 for no privacy at all."
            )
        if self.private and self.target_delta is None:
            raise PrivacyError(
                "target_delta=None: an epsilon means nothing without its delta. Choose one well "
                "below 1/N, for example target_delta=1e-5."
            )
        refuse_values(
            self,
            ("target_epsilon", "greater than 0", lambda v: 0 < v < math.inf),
            ("target_delta", "strictly between 0 and 1", lambda v: 0 < v < 1),
            ("noise_multiplier", "0 or greater, and finite", lambda v: 0 <= v < math.inf),
            ("max_grad_norm", "greater than 0", lambda v: v > 0),
            ("expected_batch_size", "at least 1", lambda v: v >= 1),
            ("num_samples", "at least 1", lambda v: v >= 1),
            one_of("sampling", Sampling),
            ("max_batch_size", "at least 1", lambda v: v >= 1),
            ("projection_rank", "at least 1", lambda v: v >= 1),
            ("projection_update_steps", "at least 1", lambda v: v >= 1),
            ("projection_seed", "0 or greater", lambda v: v >= 0),
            one_of("engine", ENGINES),
            one_of("clipping", Clipping),
            one_of("adjacency", Adjacency),
            ("max_examples_per_unit", "at least 1", lambda v: v >= 1),
            one_of("grad_sample_mode", GradSampleMode),
            one_of("accountant", [LEAST, *ACCOUNTANTS]),
            one_of("trials_distribution", TrialsDistribution),
            one_of("earlier_data", EarlierData),
            optional=True,
        )
        if self.num_trials is not None:
            Trials(self.num_trials, self.trials_distribution)  # refuses what is none
            if not self.private:
                raise PrivacyError(
                    f"num_trials={self.num_trials!r} with noise_multiplier=0: without noise there "
                    "is no epsilon that choosing could add to. Leave it out."
                )
        refuse_contradictions(self)


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
    """``TrainingArguments`` of a differentially private run; see ``DPGrapeArguments``."""
