"""The public parameters of a run's mechanism, and which of them a resumed run may change."""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import Field, asdict, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

from dp_grape_hf.accounting import Adjacency, Releases
from dp_grape_hf.errors import Choice, require
from dp_grape_hf.options import BOUND, COUNT, OPTIONS, POSITIVE, read

SECURE, BANDED = "secure", "banded"
EXAMPLE = "example"  # the privacy unit if no column is given
POISSON = "poisson"  # sampling: a logical batch includes each unit independently


class Clipping(Choice):
    """The kind of clipping that bounds each example's contribution; see `Mechanism`."""

    FLAT = "flat"
    AUTOMATIC = "automatic"


# Parameters that a resumed run may change, and why. All other parameters define the releases, so
# that the record would describe another mechanism; or they are the budget, which must be fixed
# before the first release is seen.
MAY_CHANGE_ON_RESUME = {
    "engine": "both engines compute the same release, up to rounding",
    "accountant": "it bounds the releases and does not change them",
}

# Parameters that the file leaves out where they are None, so that ledgers written before a
# parameter existed keep their digests.
LEFT_OUT_IF_NONE = (
    *("noise", "coefficients", "public_dataset", "gradient_factors", "clipped_apart", "chosen"),
)

# Hints for errors about parameters whose default depends on the run.
_HINTS = {
    "expected_batch_size": "The default of expected_batch_size grows with the number of "
    "processes. If you changed that number, pass the recorded value.",
    "noise_multiplier": "With target_epsilon, the accountant computes noise_multiplier for "
    "max_steps. For these steps it now needs more noise than was recorded. The run may have begun "
    "with another version of dp_grape_hf or another `accountant`.",
    "noise": "It is 'secure' with secure_noise=True, 'banded' with noise='banded' if correlation "
    "reduces the noise, and None otherwise.",
    "coefficients": "They are computed from the budget, the steps, the update rule and the "
    "schedule. Pass those that the run began with.",
}

_ROUNDING = 1e-12  # of the squared norm of the coefficients


def _are_coefficients(text: str) -> bool:
    try:
        coefficients = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if type(coefficients) is not list or not all(type(c) is float for c in coefficients):
        return False
    norm = math.fsum(c * c for c in coefficients)
    return len(coefficients) > 1 and coefficients[0] > 0 and norm <= 1 + _ROUNDING


_RATE = {"valid": ("in (0, 1]", lambda x: 0 < x <= 1)}
_NOISE = {"valid": (f"{SECURE} or {BANDED}", lambda x: x in (SECURE, BANDED))}
_COEFFICIENTS = {
    "valid": (
        "JSON of two numbers or more, the first positive, with an L2 norm of at most 1",
        _are_coefficients,
    )
}
_READ_ELSEWHERE = "Read the ledger with the version of dp_grape_hf that wrote it"
_GONE = {"valid": (f"None: this version cannot count it. {_READ_ELSEWHERE}", lambda x: False)}
_CLIPPING = {"valid": (f"one of {', '.join(Clipping)}. {_READ_ELSEWHERE}", lambda x: x in Clipping)}


@dataclass(frozen=True)
class Record:
    """A dataclass for entries of a ledger that checks the types and values of its fields.

    An integer is accepted for a float. The ``valid`` metadata of a field give its range, as text
    and as a test. Without them, a number has the range of the option of its name, if there is one,
    and a text must not be empty.
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
    """Return the range of a number from the table of options; other values must not be empty.

    Choices of texts are not checked: a ledger may contain names of other versions and plug-ins.
    """
    option = OPTIONS.get(name)
    if option is None or option.range.kind not in (int, float):
        return "non-empty", lambda value: value != ""
    return option.range.needed, option.range.holds


def kinds_of(f: Field[Any]) -> tuple[type, ...]:
    """Return the classes that a field accepts: ``(list,)`` for ``list[str]``, both of a union."""
    return get_args(f.type) if isinstance(f.type, UnionType) else (get_origin(f.type) or f.type,)


@dataclass(frozen=True)
class Mechanism(Record):
    """The public parameters of a run: the budget, and the parameters that define a release.

    Attributes:
        clipping: ``flat`` scales gradients with a norm above C, over all parameters jointly, to C.
            ``automatic`` scales every gradient to a norm just below C.
        max_batch_size: None. Older versions could cap a logical batch.
        projection_ranks: of older versions: ranks that differ from ``projection_rank``, as text.
        projection_side: of older versions: which side of a weight is projected.
        privacy_unit: ``example``, or the column whose value is the privacy unit of an example.
            ``num_samples`` and ``expected_batch_size`` then count units.
        max_examples_per_unit: the largest number of examples of one unit in one step.
        norm_directions: None. Version 0.1 could clip by estimated norms.
        noise: ``secure`` if the noise is rounded to a grid, ``banded`` if it is correlated over
            steps, None otherwise.
        coefficients: of ``banded`` noise, as JSON (``accounting.banded``). Each step then samples
            from one group of the examples.
        projection_update_steps: None if ``principal`` directions are measured once.
        public_dataset: the description of the data on which ``principal`` directions are measured,
            which epsilon does not protect. None for synthetic inputs.
        gradient_factors: JSON that maps patterns of parameter names to the factors by which
            gradients are multiplied before the clip and divided after the noise.
        clipped_apart: a module whose parameters are clipped separately from all others. Both parts
            are clipped to C / sqrt(2).
        chosen: which learning rates were chosen without the data, how, and for which schedule.
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
    max_batch_size: int | None = field(default=None, metadata=_GONE)
    norm_directions: int | None = field(default=None, metadata=_GONE)
    max_examples_per_unit: int | None = None
    noise: str | None = field(default=None, metadata=_NOISE)
    coefficients: str | None = field(default=None, metadata=_COEFFICIENTS)
    public_dataset: str | None = None
    gradient_factors: str | None = None
    clipped_apart: str | None = None
    chosen: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        read("gradient_factors", self.gradient_factors)
        require(
            (self.noise == BANDED) == (self.coefficients is not None),
            f"noise={self.noise!r} contradicts coefficients={self.coefficients!r}.",
        )

    @property
    def projection_in_words(self) -> str:
        """The projection, its rank and the steps between redraws, for cards and tables."""
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
        """``gradient_factors`` as a mapping: name pattern -> factor. The first match counts."""
        factors: dict[str, float] = json.loads(self.gradient_factors or "{}")
        return factors

    @property
    def remarks(self) -> dict[str, str]:
        """Additional rows for cards and tables, which only some runs have: name -> text."""
        steps = len(self.bands)
        noises = {
            SECURE: f"{SECURE}, four float64 draws for each number",
            BANDED: f"{BANDED}, {steps} steps: correlated by banded matrix factorization",
        }
        texts = {
            "Not protected, as declared public": self.public_dataset,
            "Noise": noises.get(self.noise or ""),
            "Gradient factors": self.gradient_factors
            and f"{self.gradient_factors}, before the clip",
            "Clipped separately": self.clipped_apart
            and f"{self.clipped_apart} and the rest, each to C / √2",
            "Chosen without the data": self.chosen,
        }
        return {name: text for name, text in texts.items() if text is not None}

    @property
    def bands(self) -> tuple[float, ...]:
        """The coefficients c_0 ... c_(b-1) of the noise; ``(1.0,)`` if it is independent."""
        return tuple(json.loads(self.coefficients or "[1.0]"))

    def releases(self, steps: int) -> Releases:
        """Return ``steps`` releases of this mechanism, as input for `accounting`."""
        sigma, q, adjacency = self.noise_multiplier, self.sample_rate, self.adjacency
        return Releases(sigma, q, steps, adjacency=adjacency, bands=len(self.bands))

    def precision(self, steps: int) -> float:
        """Return how precisely ``steps`` releases show the mean of clipped gradients: 1 / variance.

        The unit is 1 / C^2. With bands, a noise of sigma in each release adds up to about
        ``sigma sqrt(steps) / sum(bands)``.
        """
        sigma = self.noise_multiplier / sum(self.bands)
        return self.expected_batch_size**2 * steps / sigma**2 if sigma else math.inf

    def counted(self, sessions: Iterable[int]) -> int:
        """Return the number of steps to account for, given the number of releases of each session.

        With b bands, each session counts as a multiple of b steps: it begins with new groups, and
        with noise that is independent of the sessions before it.
        """
        bands = len(self.bands)
        return sum(-(-steps // bands) * bands for steps in sessions)

    def reasons_not_private(self) -> list[str]:
        """Return why these parameters have no finite epsilon; empty if they have one."""
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
    """The entry of ``count`` consecutive releases of the Poisson-subsampled Gaussian mechanism."""

    noise_multiplier: float
    sample_rate: float = field(metadata=_RATE)
    count: int = field(metadata={"valid": COUNT[1:]})


def require_same_mechanism(given: Mechanism, recorded: Mechanism, path: str | Path) -> None:
    """Refuse to resume with parameters that differ from those recorded in the file at ``path``."""
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
        f"used the recorded values. Pass those, or start a new run.{hints}",
    )
