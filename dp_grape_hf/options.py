"""The table of all options: name, type, range, default and meaning.

The training arguments and their checks, ``dp-grape``, the checks of the ledger, and the page of
``dp_grape_hf/arguments`` use this table. It imports nothing slow, so that the command line starts
without torch. Tests compare the choices with the code.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from dp_grape_hf.errors import PrivacyError, require

# ---- Ranges ----


class Range(NamedTuple):
    """The allowed values: their type, their description after "must be", and a test."""

    kind: type
    needed: str
    holds: Callable[[Any], bool] = lambda value: True

    def option(self, meaning: str, default: Any = None, otherwise: str = "", **more: Any) -> Option:
        """Return an option of this range.

        Args:
            meaning: the help text.
            default: the default value; None if the package chooses.
            otherwise: the help text about the value of None.
            **more: other fields of ``Option``.
        """
        return Option(self, meaning, default, otherwise, **more)


def one_of(*choices: str) -> Range:
    """Return a range of texts with these choices."""
    return Range(str, f"one of {', '.join(map(repr, choices))}", choices.__contains__)


TEXT, FLAG = Range(str, "a text"), Range(bool, "True or False")
FACTORS = Range(
    dict,
    "a mapping of name patterns to factors that are positive and finite, or its JSON, like "
    '{"classifier": 20}',
)
# Outside of this range, squared float32 gradients would underflow to 0 or overflow to infinity.
GRADIENT_FACTORS = FACTORS._replace(
    needed="a mapping of name patterns to factors from 1e-06 to 1e+06, or its JSON",
    holds=lambda v: all(1e-6 <= factor <= 1e6 for factor in v.values()),
)
COUNT = Range(int, "at least 1, and at most 10**15", lambda v: 1 <= v <= 10**15)
SEED = Range(int, "0 or greater", lambda v: v >= 0)
POSITIVE = Range(float, "greater than 0, and finite", lambda v: 0 < v < math.inf)
NOT_NEGATIVE = Range(float, "0 or greater, and finite", lambda v: 0 <= v < math.inf)
DELTA = Range(float, "between 0 and 1, and a normal number", lambda v: sys.float_info.min <= v < 1)
BOUND = Range(
    float,
    "greater than 0: it bounds each sample's gradient, and the noise is proportional to it. Leave "
    "it at 1.0, or set clipping='automatic', with which it needs no tuning. To train without "
    "clipping (0 in the Trainer), set max_grad_norm=inf and noise_multiplier=0",
    lambda v: v > 0,
)


# ---- Options ----


class Option(NamedTuple):
    """One option.

    Args:
        range: the allowed values and their type.
        meaning: in Markdown. ``dp-grape`` shows the first sentence.
        default: None if there is none, or if it depends on other options.
        otherwise: a description of the default, if ``default`` is None.
        short: a second, short name.
        of_host: whether it is an option of ``TrainingArguments`` without changes.
    """

    range: Range
    meaning: str
    default: Any = None
    otherwise: str = ""
    short: str | None = None
    of_host: bool = False

    @property
    def help(self) -> str:
        """The meaning and the default as plain text."""
        return _plain(self.meaning + (f" Default: {self.otherwise}." if self.otherwise else ""))

    @property
    def brief(self) -> str:
        """The first sentence of the meaning as plain text, without its full stop."""
        return _plain(self.meaning).partition(". ")[0].rstrip(".")


def read(name: str, value: Any) -> Any:
    """Return a value converted to the type of its option, for texts from YAML or a command line.

    Raises:
        PrivacyError: the value has another type, or is out of range.
    """
    (kind, needed, holds), default = OPTIONS[name].range, OPTIONS[name].default
    if value is None and default is None:
        return None
    try:
        parsed = _READERS[kind](value) if kind in _READERS else value
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        raise PrivacyError(f"{name}={value!r} must be {_IN_WORDS[kind]}.") from None
    require(isinstance(parsed, kind) and holds(parsed), f"{name}={parsed!r} must be {needed}.")
    return parsed


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError
    return float(value)


def _integer(value: Any) -> int:
    number = _number(value)
    if number != int(number):
        raise ValueError
    return int(value)


def _factors(value: Any) -> dict[str, float]:
    factors = json.loads(value) if isinstance(value, str) else dict(value)
    if not factors or not all(_is_factor(*item) for item in factors.items()):
        raise ValueError
    return dict(factors)


def _is_factor(pattern: Any, value: Any) -> bool:
    number = type(value) in (int, float) and 0 < value <= sys.float_info.max
    return type(pattern) is str and number


_READERS: dict[type, Callable[[Any], Any]] = {int: _integer, float: _number, dict: _factors}
_IN_WORDS = {int: "a whole number", float: "a number", dict: FACTORS.needed}


def _plain(markdown: str) -> str:
    return re.sub(r"\[([^]]+)\]\([^)]+\)|`", r"\1", markdown)


# ---- The table ----

OPTIONS: dict[str, Option] = {
    # The privacy budget
    "target_epsilon": POSITIVE.option(
        "The privacy budget epsilon of the whole run. The noise is calibrated for it, and training "
        "stops there. Pass exactly one of this and `noise_multiplier`.",
        short="eps",
    ),
    "target_delta": DELTA.option(
        "The delta at which epsilon holds, well below 1/N, for example 1e-5. It is required: 1/N "
        "would depend on the data.",
        short="delta",
    ),
    "noise_multiplier": NOT_NEGATIVE.option(
        "sigma: the noise's standard deviation divided by C. With 0 there is no privacy, and the "
        "ledger says so.",
        otherwise="calibrated for target_epsilon",
    ),
    "accountant": one_of("pld", "prv", "rdp").option(
        "`pld`, `prv` or `rdp`, each of which computes an upper bound on epsilon. "
        "[Accounting](../accounting/README.md) compares them.",
        "pld",
    ),
    # The mechanism
    "max_grad_norm": BOUND.option(
        "C: the L2 norm to which each example's gradient is clipped, over all parameters jointly. "
        "`inf` is allowed only with `noise_multiplier=0`.",
        otherwise="1.0",
    ),
    "clipping": one_of("flat", "automatic").option(
        "`flat`, or `automatic`: every gradient is scaled to just below C, which then needs no "
        "tuning under Adam. The sensitivity is always C.",
        otherwise="automatic if learning_rate is chosen and max_grad_norm is not given, else flat",
    ),
    "noise": one_of("independent", "banded").option(
        "`independent`, or `banded`: [noise that is correlated over "
        "steps](../mechanism/README.md#correlated-noise). The number of steps is the one that "
        "leaves the least noise in the trained weights; `independent` if correlation gains "
        "nothing. Each further step takes memory of the size of a private update.",
        otherwise="banded if learning_rate is chosen, weights are pretrained, correlation takes at "
        "most half of their memory, and the update rule is not Adam; else independent",
    ),
    "secure_noise": FLAG.option(
        "Rounds the noise to a public grid, so that its low bits cannot betray the sum to which it "
        "was added. Takes about 9 times as long to draw on a CPU. One process only.",
        False,
    ),
    "expected_batch_size": COUNT.option(
        "B: the mean size of the sampled batch, q N, and the constant by which sums are divided.",
        otherwise="chosen if learning_rate is; else the product of per_device_train_batch_size, "
        "gradient_accumulation_steps and the number of processes",
    ),
    "per_device_train_batch_size": COUNT.option(
        "The size of the physical batches into which a sampled batch is split. Changes memory "
        "only.",
        8,
        of_host=True,
    ),
    "num_samples": COUNT.option(
        "N: the number of training examples, as declared in public. The sampling rate is "
        "q = `expected_batch_size` / N.",
        otherwise="the length of the training dataset, which is then treated as public",
    ),
    "max_steps": COUNT.option(
        "T: the number of private updates.",
        otherwise="from num_train_epochs",
        of_host=True,
    ),
    "num_train_epochs": POSITIVE.option(
        "E: the number of epochs. An epoch is 1/q private updates, rounded up.",
        3.0,
        of_host=True,
    ),
    "earlier_data": one_of("same", "other").option(
        "For a model from a private run: whether its training data are the `same` or `other` "
        "([ledger](../ledger/README.md#several-runs)). With `same` the privacy spent adds up, "
        "within `target_epsilon`. Pass `other` if the model has no ledger and this cannot be "
        "looked up, for example offline.",
    ),
    "earlier_ledger": TEXT.option(
        "The path of that run's ledger, if it is not next to the weights: for adapters, and models "
        "built by hand.",
    ),
    "adjacency": one_of("add_or_remove_one", "replace_one").option(
        "`add_or_remove_one` or `replace_one`: which data sets are neighbours. Replacing one "
        "example changes up to twice as much as adding it, and takes up to twice the noise.",
        "add_or_remove_one",
    ),
    "privacy_unit_column": TEXT.option(
        "The column that holds the person of each example, if epsilon is to protect persons "
        "([mechanism](../mechanism/README.md)). All examples of one value are sampled and clipped "
        "together. `num_samples` and `expected_batch_size` count these units.",
        otherwise="each example is one unit",
    ),
    "max_examples_per_unit": COUNT.option(
        "The most examples of a unit that one step takes, a random choice of them. Bounds memory "
        "and time; needs `privacy_unit_column`.",
        otherwise="all",
    ),
    # The method
    "method": TEXT.option(
        "The training method: `dp_grape`, `dp_adam`, `dp_sgd`, `dp_lora` ([methods](#methods)), or "
        "the name of a [plug-in](#plug-ins).",
        "dp_grape",
    ),
    "learning_rate": NOT_NEGATIVE.option(
        "The learning rate of most trained parameters. If you pass it, the package chooses "
        "nothing.",
        otherwise="[chosen](../choosing/README.md), with everything else that you do not pass; "
        "5e-05 if there is no noise by which it could be chosen",
    ),
    "lr_scheduler_type": TEXT.option(
        "The schedule of the learning rate: any of transformers that does not follow a metric.",
        otherwise="constant for pretrained weights if learning_rate is chosen, else linear",
    ),
    "update_rule": one_of("adagrad", "adam", "momentum", "rmsprop", "sgd").option(
        "How private updates move weights: `adam`, `momentum`, `sgd`, `rmsprop` or `adagrad` "
        "([optimizers](../optimizers/README.md)). transformers' `optim` can name the last three.",
        otherwise="chosen for principal directions and LoRA if learning_rate is, else that of the "
        "method",
    ),
    "learning_rate_factors": FACTORS.option(
        'Factors of the learning rate by name patterns, such as `{"classifier": 20}` for a new '
        "head (JSON on the command line). Costs no privacy.",
    ),
    "gradient_factors": GRADIENT_FACTORS.option(
        "Factors of gradients before the clip, by name patterns, undone after the noise "
        '([mechanism](../mechanism/README.md)). `{"classifier": 4}` gives the head more of C and '
        "a quarter of the noise (JSON on the command line). Costs no privacy.",
    ),
    # The projection
    "projection": TEXT.option(
        "[The kind of P](../projections/README.md). `principal`: principal directions of the "
        "layers' input activations, measured on synthetic inputs or a `public_dataset` of the "
        "trainer. At random: `gaussian`, `gaussian_over_r`. `identity` projects nothing.",
        otherwise="that of the method; principal for dp_grape",
    ),
    "projection_rank": COUNT.option(
        "r: the rank of the projected gradients. A layer whose projected dimension is at most r is "
        "not projected.",
        otherwise="chosen for principal directions if learning_rate is, else 16",
        short="r",
    ),
    "projection_update_steps": COUNT.option(
        "F: the number of steps after which P is computed or drawn again. Principal directions are "
        "then measured on the weights of that step.",
        otherwise="100; never for principal directions",
        short="F",
    ),
    "projection_seed": SEED.option(
        "The public seed of the projections and of synthetic inputs, which the ledger holds. "
        "Independent of sampling and noise.",
        0,
    ),
    "optim_target_modules": TEXT.option(
        "The matrices to project: names, patterns, or `all-linear`.",
        otherwise="linear layers of the body",
        of_host=True,
    ),
    # The computation
    "grad_sample_mode": one_of("auto", "materialise").option(
        "The form of per-example gradients; the private update is the same. `auto`: for each layer "
        "the form that takes the least memory (book-keeping). `materialise`: the gradient of every "
        "weight for every example.",
        "auto",
    ),
    "engine": one_of("functorch", "layerwise").option(
        "How per-example gradients are computed: `layerwise` (fast), or `functorch` (the literal "
        "definition, for any model that vmap can trace; [gradients](../gradients/README.md)).",
        "layerwise",
    ),
    # What leaves the machine
    "eval_data_is_public": FLAG.option(
        "Declares that the evaluation data need no protection: metrics of these rows are not "
        "covered by epsilon. You need it before training may follow an evaluation metric, and to "
        "evaluate on training rows.",
        False,
    ),
}
"""Name -> option, in the order of the page."""
