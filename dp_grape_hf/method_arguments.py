"""The arguments that choose a method and its projection; ``arguments`` adds the promise."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from transformers import TrainingArguments

from dp_grape_hf.directions import DirectionDistribution
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.iterates import ITERATES
from dp_grape_hf.methods import METHODS, Method, Projected
from dp_grape_hf.placement import ProjectionSide
from dp_grape_hf.projection import PROJECTIONS
from dp_grape_hf.released_projection import SVD
from dp_grape_hf.update_rules import UPDATE_RULES, AtRedraw

LEAST_PERTURBATION = 1e-4
NORM_DIRECTIONS = 64


def _projects(row: Method) -> bool:
    return row.projected is not None


# Options that mean nothing in some methods: what they are about, and the methods that do that.
_ONLY_FOR: dict[str, tuple[str, Callable[[Method], bool]]] = {
    "optim_target_modules": ("a projection", _projects),
    "project_embeddings": ("a projection", _projects),
    "projection_ranks": ("a projection", _projects),
    "learning_rate_factors": ("gradients by parameter", lambda row: not row.zeroth_order),
    "perturbation": ("finite differences", lambda row: row.zeroth_order),
    "n_directions": ("finite differences", lambda row: row.zeroth_order),
    "direction_distribution": ("finite differences", lambda row: row.zeroth_order),
    "norm_directions": ("estimates of norms", lambda row: row.norm_estimates),
}

if TYPE_CHECKING:
    _Host = TrainingArguments
else:  # a base with fields would override the defaults of the host that stands behind it
    _Host = object


def short_name(alias: str) -> dict[str, Any]:
    """Returns what a field's metadata says so that ``--alias`` is accepted for it."""
    return {"aliases": [f"--{alias}"]}


_Check = tuple[str, str, Callable[[Any], bool]]


def one_of(name: str, choices: Iterable[str]) -> _Check:
    """Returns the check, for `refuse_values`, that an argument is one of the choices."""
    known = list(choices)
    return name, f"one of {known}", known.__contains__


def refuse_values(args: Any, *checks: _Check, optional: bool = False) -> None:
    """Refuses the first argument that is out of range.

    Args:
        args: what has the arguments as attributes.
        checks: the name of each, what it must be in words, and whether a value is that.
        optional: whether None means that an argument was not given.
    """
    for name, needed, holds in checks:
        value = getattr(args, name)
        if not (optional and value is None) and not holds(value):
            raise PrivacyError(f"{name}={value!r} must be {needed}.")


@dataclass(repr=False)
class MethodArguments(_Host):
    """Which method trains, and how gradients are projected.

    Raises:
        PrivacyError: if there is no such method, or an option belongs to another one.
    """

    # ---- The method ----
    method: str = field(
        default="dp_grape",
        metadata={
            "help": f"Which method trains: {', '.join(METHODS)}. Of these "
            f"{', '.join(name for name, row in METHODS.items() if not row.private)} are not "
            "private: they are for comparison, on data that may be seen."
        },
    )
    update_rule: str | None = field(
        default=None,
        metadata={"help": "How private gradients move weights. Default: that of the method."},
    )
    learning_rate_factors: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "What the learning rate is multiplied by for some parameters: a mapping of "
            "name patterns to factors (as JSON on the command line), such as "
            '{"classifier": 20} for a head that is new.'
        },
    )
    perturbation: float = field(
        default=1e-3,
        metadata={
            "help": "mu: how far from the weights the losses of a zeroth-order method are taken."
        },
    )
    n_directions: int = field(
        default=1,
        metadata={"help": "K: along how many directions a zeroth-order method takes differences."},
    )
    direction_distribution: str = field(
        default=DirectionDistribution.GAUSSIAN.value,
        metadata={
            "help": "Of the directions of a zeroth-order method: "
            f"{', '.join(DirectionDistribution)}."
        },
    )
    norm_directions: int | None = field(
        default=None,
        metadata={
            "help": "Of dp_jl: from how many random directions the norm of a sample's gradient is "
            f"estimated. Fewer take more noise. Default: {NORM_DIRECTIONS}."
        },
    )
    moments_at_redraw: str = field(
        default=AtRedraw.KEEP.value,
        metadata={
            "help": "What becomes of the optimizer's moments when the projection is redrawn: "
            "keep, reset, or reproject (carried into the new subspace)."
        },
    )
    noise_correction: bool = field(
        default=False,
        metadata={
            "help": "Subtract the known variance of the noise from Adam's second moment, as "
            "DP-AdamBC does (Tang et al. 2024). Costs no privacy."
        },
    )
    released_iterate: str = field(
        default="last",
        metadata={
            "help": f"Which weights training ends with: {', '.join(sorted(ITERATES))}. An average "
            "takes noise out of them; all of them cost the same privacy."
        },
    )
    average_decay: float = field(
        default=0.99,
        metadata={
            "help": "Of the exponential moving average; 1 averages all steps alike. Used with "
            "released_iterate=average."
        },
    )

    # ---- The projection ----
    projection: str | None = field(
        default=None,
        metadata={
            "help": f"The family of projections: {', '.join(sorted(PROJECTIONS))}. Default: that "
            "of the method."
        },
    )
    projection_rank: int = field(
        default=16,
        metadata={
            "help": "r: the rank of the projected gradients. A layer whose projected dimension is "
            "not above r is not projected.",
            **short_name("r"),
        },
    )
    projection_ranks: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Ranks by layer: a mapping of name patterns to r (as JSON on the command "
            "line), in front of projection_rank."
        },
    )
    projection_side: str = field(
        default=ProjectionSide.SMALLER.value,
        metadata={
            "help": "Which dimension of a weight is projected: "
            f"{', '.join(ProjectionSide)} (of the layer)."
        },
    )
    projection_update_steps: int = field(
        default=100,
        metadata={"help": "F: resample the projection every this many steps.", **short_name("F")},
    )
    projection_seed: int = field(
        default=0,
        metadata={"help": "The public seed of the projections; it stands in the ledger."},
    )
    project_embeddings: bool = field(
        default=False,
        metadata={
            "help": "Project embeddings and vocabulary heads as well. That takes less memory where "
            "the vocabulary is large; the paper leaves them unprojected."
        },
    )
    float32_updates: bool = field(
        default=False,
        metadata={
            "help": "Keep the updates of bfloat16 weights in float32 beside them, in coordinates, "
            "until the projection is redrawn, so that small ones are not lost to rounding."
        },
    )

    def _resolve_method(self) -> None:
        """Fills in what the method implies, and refuses what contradicts it."""
        if self.method not in METHODS:
            raise PrivacyError(f"method={self.method!r} must be one of {sorted(METHODS)}.")
        row = METHODS[self.method]
        families = sorted(families_of(row))
        if self.projection is None:
            self.projection = row.projection
        if self.projection not in families:
            raise PrivacyError(
                f"projection={self.projection!r} must be one of {families} with "
                f"method={self.method!r}. Leave it out, or choose another method."
            )
        if self.update_rule is None:
            self.update_rule = row.update_rule
        refuse_values(
            self,
            one_of("update_rule", UPDATE_RULES),
            one_of("projection_side", ProjectionSide),
            one_of("moments_at_redraw", AtRedraw),
            one_of("released_iterate", ITERATES),
            ("average_decay", "from 0 to 1", lambda v: 0 <= v <= 1),
            ("perturbation", "positive and finite", lambda v: 0 < v < math.inf),
            ("n_directions", "at least 1", lambda v: v >= 1),
            one_of("direction_distribution", DirectionDistribution),
        )
        refuse_values(
            self,
            ("norm_directions", "at least 1", lambda v: v >= 1),
            optional=True,
        )
        self._read_ranks()
        self._read_factors()
        defaults = {f.name: f.default for f in fields(self)}
        for name, (what, makes) in _ONLY_FOR.items():
            value = getattr(self, name)
            if value and value != defaults[name] and not makes(row):
                raise PrivacyError(
                    f"{name}={value!r} is about {what}, and method={self.method!r} makes none. "
                    "Leave it out."
                )
        if row.norm_estimates and self.norm_directions is None:
            self.norm_directions = NORM_DIRECTIONS
        if self.released_iterate != "last" and self.load_best_model_at_end:
            raise PrivacyError(
                f"released_iterate={self.released_iterate!r} and load_best_model_at_end=True both "
                "say which weights training ends with. Choose one."
            )
        if self.released_iterate != "last" and self.float32_updates:
            raise PrivacyError(
                f"released_iterate={self.released_iterate!r} would round the updates that "
                "float32_updates=True keeps apart at every step. Choose one."
            )
        if row.zeroth_order and row.private and self.perturbation < LEAST_PERTURBATION:
            raise PrivacyError(
                f"perturbation={self.perturbation!r} is below {LEAST_PERTURBATION:g}: the rounding "
                "of a loss, which batch-mates have an influence on, is divided by it and would "
                "count for more than the clip allows."
            )
        if row.zeroth_order and self.update_rule != row.update_rule:
            raise PrivacyError(
                f"update_rule={self.update_rule!r} needs gradients, which method={self.method!r} "
                "has not. Leave it out."
            )
        if self.noise_correction and (self.update_rule != "adam" or not row.private):
            raise PrivacyError(
                f"noise_correction=True corrects Adam's second moment for noise; there is none in "
                f"method={self.method!r} with update_rule={self.update_rule!r}. Leave it out."
            )
        if not row.private:
            self._set_not_private()

    def _read_ranks(self) -> None:
        """Reads what the command line gives as text."""
        asked: Any = self.projection_ranks
        if asked is None:
            return
        wrong = PrivacyError(
            f"projection_ranks={asked!r} must map name patterns to ranks of at least 1, like "
            '{"query": 8}.'
        )
        self.projection_ranks = _mapping(asked, wrong, lambda r: type(r) is int and r >= 1)

    def _read_factors(self) -> None:
        asked: Any = self.learning_rate_factors
        if asked is None:
            return
        wrong = PrivacyError(
            f"learning_rate_factors={asked!r} must map name patterns to factors that are "
            'positive and finite, like {"classifier": 20}.'
        )
        self.learning_rate_factors = _mapping(
            asked, wrong, lambda v: type(v) in (int, float) and 0 < v < math.inf
        )

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
        for name, value in (("noise_multiplier", 0.0), ("max_grad_norm", math.inf)):
            setattr(self, name, value)


def _mapping(asked: Any, wrong: Exception, good: Callable[[Any], bool]) -> dict[str, Any]:
    """Returns a mapping, which the command line gives as JSON; raises ``wrong`` if it is not so."""
    try:
        found = json.loads(asked) if isinstance(asked, str) else dict(asked)
        holds = bool(found) and all(good(value) for value in found.values())
    except (ValueError, TypeError, AttributeError):
        raise wrong from None
    if not holds or not all(type(name) is str for name in found):
        raise wrong
    return found


def families_of(method: Method) -> set[str]:
    """Returns the families of projections that a method may use."""
    if method.projected is None:
        return {"identity"}
    if method.projected == Projected.AT_CAPTURE:
        return set(PROJECTIONS)
    return set(PROJECTIONS) - {"identity"} | {SVD}
