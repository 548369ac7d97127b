"""What the ledger records of a run's mechanism, and what of it a resumed run may change."""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import Field, asdict, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

from dp_grape_hf.accounting import Adjacency, Releases
from dp_grape_hf.errors import Choice, require
from dp_grape_hf.options import BOUND, COUNT, OPTIONS, POSITIVE

SECURE, BANDED = "secure", "banded"
EXAMPLE = "example"  # the privacy unit, where no column names another
POISSON = "poisson"  # how a logical batch is drawn: each unit by a coin of its own


class Clipping(Choice):
    """What bounds the contribution of one example; see `Mechanism`."""

    FLAT = "flat"
    AUTOMATIC = "automatic"


# What may differ between a checkpoint and the run that resumes it, and why. Everything else
# either defines the release, so that the recorded numbers would describe another mechanism, or
# is the promised budget, which has to be fixed before the first release is seen.
MAY_CHANGE_ON_RESUME = {
    "engine": "both engines compute the same release, up to rounding",
    "accountant": "it bounds the releases and does not change them",
}

# Parameters that the file leaves out where they are None: most runs have none, and their entries,
# and digests, are as if these did not exist.
LEFT_OUT_IF_NONE = (
    *("noise", "coefficients", "public_dataset", "gradient_factors", "clipped_apart", "chosen"),
)

# What to say about a parameter whose default is not the same in every run.
_HINTS = {
    "expected_batch_size": "The default of expected_batch_size grows with the number of "
    "processes: after a change of that number, give the recorded value.",
    "noise_multiplier": "With target_epsilon it is found for max_steps by the accountant. With "
    "these steps, the accountant here needs more noise than was recorded. The run may have begun "
    "with another version of dp_grape_hf or another `accountant`.",
    "noise": "It is 'secure' with secure_noise=True, 'banded' with noise='banded' where that gains "
    "anything, and None else.",
    "coefficients": "They are found for the budget, the steps, the rule and the schedule: pass "
    "those that the run began with.",
}

_ROUNDING = 1e-12

# What float32 bears: further out, squares of gradients that count would be 0 or infinite.
_LEAST_FACTOR, _LARGEST_FACTOR = 1e-6, 1e6


def _parsed(text: str) -> Any:
    """Returns what a text holds as JSON; ``None`` if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _are_factors(text: str) -> bool:
    found = _parsed(text)
    return (
        isinstance(found, dict)
        and found != {}
        and all(
            type(f) in (int, float) and _LEAST_FACTOR <= f <= _LARGEST_FACTOR
            for f in found.values()
        )
    )


def _are_coefficients(text: str) -> bool:
    found = _parsed(text)
    return (
        isinstance(found, list)
        and len(found) > 1
        and all(type(c) is float for c in found)
        and found[0] > 0
        and math.fsum(c * c for c in found) <= 1 + _ROUNDING
    )


_RATE = {"valid": ("in (0, 1]", lambda x: 0 < x <= 1)}
_NOISE = {"valid": (f"{SECURE} or {BANDED}", lambda x: x in (SECURE, BANDED))}
_COEFFICIENTS = {
    "valid": ("JSON of two numbers or more, the first positive, of length 1", _are_coefficients)
}
_FACTORS = {
    "valid": (
        f"JSON that maps name patterns to factors from {_LEAST_FACTOR:g} to {_LARGEST_FACTOR:g}",
        _are_factors,
    )
}
_NO_CAP = {
    "valid": (
        "None: what a cap costs is no longer known here. Read the ledger with the version of "
        "dp_grape_hf that wrote it",
        lambda x: False,
    )
}
_NO_ESTIMATES = {
    "valid": (
        "None: what clipping by estimated norms (method='dp_jl') costs is no longer known here. "
        "Read the ledger with the version of dp_grape_hf that wrote it",
        lambda x: False,
    )
}
_CLIPPING = {
    "valid": (
        f"one of {', '.join(Clipping)}; clipping per layer is gone, and a ledger with it is read "
        "by the version of dp_grape_hf that wrote it",
        lambda x: x in Clipping,
    )
}


@dataclass(frozen=True)
class Record:
    """What a ledger holds: a dataclass whose fields have the types and values that they may have.

    An integer may stand for a float. What a value may be, if not any but the empty text, stands in
    the ``valid`` metadata of its field, in words and as a test; else it is the range of the number
    in the table of options, if that has the name.
    """

    def __post_init__(self) -> None:
        for f in fields(self):
            value, kinds = getattr(self, f.name), kinds_of(f)
            if type(value) is int and float in kinds:
                value = float(value)
                object.__setattr__(self, f.name, value)
            names, fits = " or ".join(kind.__name__ for kind in kinds), isinstance(value, kinds)
            require(
                fits and type(value) is not bool, f"{f.name}={value!r} must be of type {names}."
            )
            text, holds = f.metadata.get("valid") or _range_of(f.name)
            require(value is None or holds(value), f"{f.name}={value!r} must be {text}.")


def _range_of(name: str) -> tuple[str, Callable[[Any], bool]]:
    """Returns the range of a number in the table of options; any but the empty text is in others.

    Texts have no choices here: a ledger may name what only other versions and plug-ins know.
    """
    option = OPTIONS.get(name)
    if option is None or option.range.kind not in (int, float):
        return "non-empty", lambda value: value != ""
    return option.range.needed, option.range.holds


def kinds_of(f: Field[Any]) -> tuple[type, ...]:
    """The classes a field may hold: ``(list,)`` for ``list[str]``, both sides of a union."""
    return get_args(f.type) if isinstance(f.type, UnionType) else (get_origin(f.type) or f.type,)


@dataclass(frozen=True)
class Mechanism(Record):
    """The public parameters of a run: what was promised, and all that defines a release.

    ``clipping`` is ``flat`` where gradients longer than C are scaled to it, by their norm over all
    parameters jointly, and ``automatic`` where each is scaled to a norm just below C.
    ``max_batch_size`` is None: older versions could cap a logical batch.
    ``projection_ranks`` says, as text, what differed from ``projection_rank`` in runs of older
    versions, which also let ``projection_side`` be asked for.
    ``privacy_unit`` is ``example``, or the column whose value says whose an example is:
    ``num_samples`` and ``expected_batch_size`` then count its values, and of each at most
    ``max_examples_per_unit`` examples enter a step.
    ``norm_directions`` is None: version 0.1 could clip by norms estimated from random directions.
    ``noise`` is ``secure`` where its low bits hide what it was added to, and ``banded`` where it is
    correlated over steps: ``coefficients`` are then those of its bands, as text
    (``accounting.banded``), and at each step one group of the examples is drawn from.
    ``projection_update_steps`` is None with ``principal`` directions that are measured once; they
    are those of inputs that are synthetic, or of the ``public_dataset`` of that description, whose
    examples no epsilon protects.
    ``gradient_factors`` says, as text, what gradients were multiplied by before the clip and
    divided by after the noise, by patterns of parameters' names.
    ``clipped_apart`` is a module whose parameters are clipped apart from all others, each of the
    two parts to C / sqrt(2).
    ``chosen`` says, in words, which rates were chosen without the data, by what, and for which
    schedule.
    """

    noise_multiplier: float
    sample_rate: float = field(metadata=_RATE)
    max_grad_norm: float = field(metadata={"valid": ("greater than 0", BOUND.holds)})
    expected_batch_size: float = field(metadata={"valid": POSITIVE[1:]})
    num_samples: int
    target_epsilon: float | None
    target_delta: float | None
    accountant: str
    engine: str
    projection: str
    projection_rank: int | None
    projection_update_steps: int | None
    projection_seed: int | None
    projection_device: str = "cpu"
    adjacency: str = Adjacency.ADD_OR_REMOVE_ONE.value
    privacy_unit: str = EXAMPLE
    sampling: str = POISSON
    method: str = "dp_grape"
    clipping: str = field(default=Clipping.FLAT.value, metadata=_CLIPPING)
    projection_side: str = "smaller"
    projection_ranks: str | None = None
    max_batch_size: int | None = field(default=None, metadata=_NO_CAP)
    norm_directions: int | None = field(default=None, metadata=_NO_ESTIMATES)
    max_examples_per_unit: int | None = None
    noise: str | None = field(default=None, metadata=_NOISE)
    coefficients: str | None = field(default=None, metadata=_COEFFICIENTS)
    public_dataset: str | None = None
    gradient_factors: str | None = field(default=None, metadata=_FACTORS)
    clipped_apart: str | None = None
    chosen: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            (self.noise == BANDED) == (self.coefficients is not None),
            f"noise={self.noise!r} contradicts coefficients={self.coefficients!r}.",
        )

    @property
    def projection_in_words(self) -> str:
        """The projection, its rank and how often it is made, for cards and tables."""
        if self.projection_rank is None:
            return self.projection
        every = self.projection_update_steps
        made = "made once" if every is None else f"F = {every}"
        return f"{self.projection}, r = {self.projection_rank}, {made}"

    @property
    def sampling_in_words(self) -> str:
        """The sampling scheme and its rate, for cards and tables."""
        rate, bands = f"rate q = {self.sample_rate:.6g}", len(self.bands)
        if bands == 1:
            return f"{self.sampling}, {rate}"
        member = f"{bands} q = {self.releases(1).counted_rate:.6g}"
        return (
            f"cyclic {self.sampling.capitalize()}, {bands} bands, {rate}: each {self.privacy_unit} "
            f"is in one of {bands} groups, which are random and secret; step t of a session "
            f"samples from group t mod {bands}, each member with probability {member}"
        )

    @property
    def factors_by_pattern(self) -> dict[str, float]:
        """What ``gradient_factors`` says: name pattern -> factor; the first that matches counts."""
        found: dict[str, float] = json.loads(self.gradient_factors or "{}")
        return found

    @property
    def remarks(self) -> dict[str, str]:
        """What only some runs have, for cards and tables: its name -> what it is."""
        steps = len(self.bands)
        noises = {
            SECURE: f"{SECURE}, four float64 draws for each number",
            BANDED: f"{BANDED}, {steps} steps: correlated by banded matrix factorization",
        }
        found = {
            "Not protected, as declared public": self.public_dataset,
            "Noise": noises.get(self.noise or ""),
            "Gradient factors": self.gradient_factors
            and f"{self.gradient_factors}, before the clip",
            "Clipped apart": self.clipped_apart
            and f"{self.clipped_apart} and the rest, each to C / √2",
            "Chosen without the data": self.chosen,
        }
        return {name: said for name, said in found.items() if said is not None}

    @property
    def bands(self) -> tuple[float, ...]:
        """The coefficients c_0 ... c_(b-1) of the noise; 1 alone where it is independent."""
        return tuple(json.loads(self.coefficients or "[1.0]"))

    def releases(self, steps: int) -> Releases:
        """Returns so many releases of this mechanism, as `accounting` wants them."""
        return Releases(
            self.noise_multiplier,
            self.sample_rate,
            steps,
            adjacency=self.adjacency,
            bands=len(self.bands),
        )

    def counted(self, sessions: Iterable[int]) -> int:
        """Returns how many steps are accounted for, of so many between a start and a resumption.

        Where noise is correlated, each begins with new groups and no memory of noise.
        """
        bands = len(self.bands)
        return sum(-(-steps // bands) * bands for steps in sessions)

    def reasons_not_private(self) -> list[str]:
        """Says why no finite epsilon holds for these parameters; empty if one does."""
        neighbours = " or ".join(map(repr, Adjacency))
        voided = {
            f"noise_multiplier is {self.noise_multiplier}": self.noise_multiplier == 0,
            f"max_grad_norm is {self.max_grad_norm}": math.isinf(self.max_grad_norm),
            f"sampling is {self.sampling!r}, not {POISSON!r}": self.sampling != POISSON,
            f"adjacency is {self.adjacency!r}, not {neighbours}": self.adjacency not in Adjacency,
        }
        return [reason for reason, holds in voided.items() if holds]


@dataclass(frozen=True)
class Release(Record):
    """``count`` releases in a row of the Poisson-subsampled Gaussian mechanism.

    ``sample_rate`` is q, of all examples together; the mechanism says whether they have groups.
    """

    noise_multiplier: float
    sample_rate: float = field(metadata=_RATE)
    count: int = field(metadata={"valid": COUNT[1:]})


def require_same_mechanism(given: Mechanism, recorded: Mechanism, path: str | Path) -> None:
    """Refuses to go on with parameters other than those that the file at ``path`` records."""
    ours, theirs = asdict(given), asdict(recorded)
    differences = [
        f"{name}={ours[name]!r} (recorded: {theirs[name]!r})"
        for name in ours
        if name not in MAY_CHANGE_ON_RESUME and ours[name] != theirs[name]
    ]
    hints = "".join(f" {hint}" for name, hint in _HINTS.items() if ours[name] != theirs[name])
    require(
        not differences,
        f"cannot resume the run recorded in {path} with {', '.join(differences)}. Its releases "
        f"were made with the recorded values: pass those, or start a new run.{hints}",
    )
