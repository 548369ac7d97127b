"""Which accountant answers for a composition of releases: one asked for, or that with the least ε.

Guarantee:
    Each accountant bounds from above the one true ε that a composition has at its δ, so whichever
    answers, it is a bound, and so is the least of several. Which one has the least depends on the
    public numbers of the releases and on what is installed, never on data.
"""

import logging
import math
from collections.abc import Sequence

from dp_grape_hf.accounting.accountants import (
    ACCOUNTANTS,
    LAST_RESORT,
    LEAST,
    Accountant,
    AccountantFailure,
    Block,
    is_installed,
)

logger = logging.getLogger(__name__)


class Composition:
    """What answers for one composition: the accountant asked for, or that with the least bound.

    The least is found once, for ``max_counts``, and answers for all counts: so ε grows with them,
    and those that are slow or lose are asked once. One that fails is replaced by the least of the
    others, with a notice. Answers are remembered.
    """

    def __init__(
        self, blocks: Sequence[Block], max_counts: Sequence[int], delta: float, accountant: str
    ) -> None:
        self._asked, self._arguments = accountant, (blocks, max_counts, delta)
        self._noiseless = any(block.noise_multiplier == 0 for block in blocks)
        self._chosen: tuple[str, Accountant] | None = None
        self._failures: dict[str, AccountantFailure] = {}
        self._answers: dict[tuple[int, ...], float] = {}

    @property
    def accountant(self) -> str:
        """The accountant that answers; the one asked for where nothing has to be computed."""
        nothing = self._noiseless or not self._arguments[0]
        return self._asked if nothing else self._choice()[0]

    def epsilon(self, counts: Sequence[int]) -> float:
        """Returns the bound on ``counts[i]`` releases of block i, each above 0."""
        key = tuple(counts)
        while key not in self._answers:
            if self._noiseless:
                return math.inf
            name, chosen = self._choice()
            try:
                self._answers[key] = _bound(name, chosen, counts)
            except AccountantFailure as failure:
                self._chosen = None
                self._note(name, failure)
        return self._answers[key]

    def _choice(self) -> tuple[str, Accountant]:
        while self._chosen is None:
            blocks, max_counts, delta = self._arguments
            answers = []
            for name in self._candidates():
                try:
                    built = ACCOUNTANTS[name](blocks, max_counts, delta)
                    answers.append((_bound(name, built, max_counts), name, built))
                except AccountantFailure as failure:
                    self._note(name, failure)
            if answers:
                epsilon, name, built = min(answers, key=lambda answer: answer[0])
                self._chosen = name, built
                self._answers[tuple(max_counts)] = epsilon
                if self._failures and (self._asked != LEAST or name == LAST_RESORT):
                    failures = ", ".join(f"{name} ({why})" for name, why in self._failures.items())
                    logger.warning(
                        f"Epsilon cannot be bounded here by {failures}; using {name} instead, "
                        "which is an upper bound too."
                    )
        return self._chosen

    def _candidates(self) -> list[str]:
        """Returns the one asked for, unless it failed, or else all that are there and have not."""
        names = [self._asked] if self._asked not in (LEAST, *self._failures) else ACCOUNTANTS
        return [name for name in names if is_installed(name) and name not in self._failures]

    def _note(self, name: str, failure: AccountantFailure) -> None:
        if name == LAST_RESORT:
            raise failure
        self._failures[name] = failure


def _bound(name: str, accountant: Accountant, counts: Sequence[int]) -> float:
    epsilon = accountant.epsilon(counts)
    if not math.isfinite(epsilon) and name != LAST_RESORT:
        raise AccountantFailure(f"it returned {epsilon}")
    return max(0.0, epsilon)
