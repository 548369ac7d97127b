"""The paper's comparisons, as plug-ins of the package: importing this adds them to ``METHODS``.

``zeroth_order`` has DPZero, DP-ZO and MeZO, ``released`` naive DP-GaLore, D2P2, GaLore and FLORA,
and ``whole_batch`` Adam and LoRA without privacy. ``PaperArguments`` has their options.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from transformers.hf_argparser import HfArg

import dp_grape_hf
from dp_grape_hf import DPGrapeTrainingArguments, PrivacyError
from dp_grape_hf.arguments import Method, accepts_short_names, register_method
from recipes.paper.methods import released, whole_batch, zeroth_order
from recipes.paper.methods.zeroth_order import N_DIRECTIONS, PERTURBATION

for _rows in (zeroth_order.ROWS, released.ROWS, whole_batch.ROWS):
    for _name, _row in _rows.items():
        register_method(_name, _row)


METHODS: Mapping[str, Method] = dict(dp_grape_hf.METHODS)
"""The methods of the package, and the paper's."""

ZEROTH_ORDER = frozenset(zeroth_order.ROWS)
"""The methods that have ``OPTIONS``."""

OPTIONS = {"perturbation": PERTURBATION, "n_directions": N_DIRECTIONS}
"""What ``PaperArguments`` adds, and the defaults."""


@accepts_short_names
@dataclass(repr=False)
class PaperArguments(DPGrapeTrainingArguments):
    """``DPGrapeTrainingArguments``, with the options of the zeroth-order methods.

    Raises:
        PrivacyError: as in the base; and for these options out of range, or with another method.
    """

    perturbation: float = HfArg(
        default=PERTURBATION,
        help="mu: how far from the weights the losses of a zeroth-order method are taken.",
    )
    n_directions: int = HfArg(
        default=N_DIRECTIONS,
        help="K: along how many directions a zeroth-order method takes differences.",
    )

    def __post_init__(self) -> None:
        """Refuses values out of range before the base fills in defaults."""
        self.perturbation, self.n_directions = float(self.perturbation), int(self.n_directions)
        for name, default in OPTIONS.items():
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise PrivacyError(f"{name}={value!r} must be greater than 0, and finite.")
            if value != default and self.method not in ZEROTH_ORDER:
                raise PrivacyError(
                    f"{name}={value!r} is about finite differences, and method={self.method!r} "
                    "makes none. Leave it out."
                )
        super().__post_init__()


__all__ = ["METHODS", "OPTIONS", "ZEROTH_ORDER", "PaperArguments"]
