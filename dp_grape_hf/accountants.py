"""The accountants: what many releases cost together, each answer an upper bound on ε.

They are interchangeable; to add one, subclass `Accountant` in this file. `accounting` is where
they are asked: it checks the arguments, falls back and calibrates.
"""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
from prv_accountant import PRVAccountant
from prv_accountant.privacy_random_variables import PrivacyRandomVariable
from scipy.special import ndtr

from dp_grape_hf import renyi, replace_one
from dp_grape_hf.tuning import Trials

ACCOUNTANTS: dict[str, type["Accountant"]] = {}
"""Every accountant by name; subclasses of `Accountant` enter themselves."""


ONCE = ((1.0, 1.0),)
"""The sensitivity of the plain mechanism: that of one clipped contribution, for certain."""


class Block(NamedTuple):
    """What equal releases have in common.

    Each is a Poisson subsampled Gaussian that reveals its sensitivity. ``sensitivities`` is the
    law of it, as (probability, sensitivity in units of the clipping norm) from the smallest to the
    largest: see `truncated` and `estimated_norms`. Where it is infinite, nothing is hidden if the
    example is drawn. With ``replaces``, neighbours replace one example: see `replace_one`. With
    ``trials``, all releases of the block are one run, and what is published is the best of a random
    number of such runs: see `tuning`. Two such blocks do not merge.
    """

    noise_multiplier: float
    sample_rate: float
    sensitivities: tuple[tuple[float, float], ...] = ONCE
    replaces: bool = False
    trials: Trials | None = None

    def parts(self) -> list[tuple[float, float]]:
        """Returns the mixture a release is: (probability, noise multiplier), none impossible."""
        return [(p, self.noise_multiplier / size) for p, size in self.sensitivities if p > 0]

    def up_to(self, limit: float) -> tuple["Block", float]:
        """Leaves out the releases that include the example at a sensitivity above ``limit``.

        Returns:
            What a release is given that it is none of those, and the probability that it is one.
            The smallest sensitivity always stays.
        """
        smallest = self.sensitivities[0]
        rest = tuple(part for part in self.sensitivities[1:] if part[1] <= limit)
        rare = sum(p for p, size in self.sensitivities[1:] if size > limit)
        if not rare:
            return self, 0.0
        # Of the larger ones, those that do not include the example stay. They cost nothing, so
        # they may be taken for the smallest; each of the others grows a little more likely.
        rest = tuple((p / (1 - rare * self.sample_rate), size) for p, size in rest)
        least = (max(0.0, 1 - math.fsum(p for p, _ in rest)), smallest[1])
        return self._replace(sensitivities=(least, *rest)), rare * self.sample_rate


class AccountantFailure(Exception):
    """An accountant cannot answer this question; its fallback is asked instead."""


class Accountant(ABC):
    """Bounds ε of ``counts[i]`` releases of ``blocks[i]``, all of them with noise.

    A subclass names itself, ``class Mine(Accountant, name="mine")``, may name an optional module
    it ``requires`` (the extra to install bears the accountant's name), and raises
    `AccountantFailure` rather than hang or return anything that is not an upper bound.
    """

    requires: ClassVar[str | None] = None
    fallback: ClassVar[str] = "rdp"

    def __init_subclass__(cls, *, name: str) -> None:
        assert name not in ACCOUNTANTS, f"two accountants are called {name!r}"
        ACCOUNTANTS[name] = cls

    @abstractmethod
    def __init__(self, blocks: Sequence[Block], max_counts: Sequence[int], delta: float) -> None:
        """Prepares for up to ``max_counts[i]`` > 0 releases of ``blocks[i]``."""

    @abstractmethod
    def epsilon(self, counts: Sequence[int]) -> float:
        """Returns an upper bound on ε, where ``0 < counts[i] <= max_counts[i]``."""


def is_installed(accountant: str) -> bool:
    """Whether the optional module an accountant needs, if any, can be imported."""
    module = ACCOUNTANTS[accountant].requires
    return module is None or find_spec(module) is not None


class PRV(Accountant, name="prv"):
    """Composition of privacy random variables (Gopi et al., 2021): the upper bound.

    It includes the method's own error, 0.01 in ε and δ/1000 in δ. Sensitivities that are rarer
    than δ/10000 in all are charged to δ.
    """

    fallback = "pld"
    epsilon_error = 0.01
    max_cells = 3_000_000  # about 5 s and half a GB

    def __init__(self, blocks: Sequence[Block], max_counts: Sequence[int], delta: float) -> None:
        _refuse_trials(blocks)
        blocks, ever = _without_rare(blocks, max_counts, delta)
        _refuse_little_noise(blocks)
        delta = _what_is_left(delta, ever)
        self._delta, delta_error, steps = delta, delta / 1000, sum(max_counts)
        # The domain of Gopi et al., remark 5.6, from our RDP: the library's own may not return.
        tails = [RDP([block], [1], delta_error / (8 * steps)).epsilon([1]) for block in blocks]
        whole = RDP(blocks, max_counts, delta_error / 4).epsilon(max_counts)
        half_width = max(whole, *tails, self.epsilon_error) + 3
        mesh = self.epsilon_error / math.sqrt(steps / 2 * math.log(12 / delta_error))
        if not (cells := 2 * half_width / mesh) <= self.max_cells:
            raise AccountantFailure(f"it needs {cells:.1e} cells, more than {self.max_cells:.0e}")
        with _quiet():
            self._accountant = PRVAccountant(
                prvs=[_PrivacyLoss(block) for block in blocks],
                max_self_compositions=list(max_counts),
                eps_error=self.epsilon_error,
                delta_error=delta_error,
                eps_max=half_width,
            )

    def epsilon(self, counts: Sequence[int]) -> float:
        with _quiet():
            _, _, upper = self._accountant.compute_epsilon(self._delta, list(counts))
        return float(upper)


class PLD(Accountant, name="pld"):
    """Privacy loss distributions of dp-accounting, rounded pessimistically, in both directions.

    Sensitivities that are rarer than δ/10000 in all are charged to δ.
    """

    requires = "dp_accounting"
    interval = 1e-4
    interval_of_many = 1e-3  # for mixtures of many parts, each of which takes its time
    max_epsilon = 1000.0  # about 10 s

    def __init__(self, blocks: Sequence[Block], max_counts: Sequence[int], delta: float) -> None:
        _refuse_trials(blocks)
        blocks, ever = _without_rare(blocks, max_counts, delta)
        _refuse_little_noise(blocks)
        delta = _what_is_left(delta, ever)
        rough = RDP(blocks, max_counts, delta).epsilon(max_counts)
        if not rough <= self.max_epsilon:
            raise AccountantFailure(f"epsilon may reach {rough:.3g}, above {self.max_epsilon:g}")
        many = any(len(block.sensitivities) > 2 for block in blocks)
        self._interval = self.interval_of_many if many else self.interval
        self._blocks, self._delta = blocks, delta

    def epsilon(self, counts: Sequence[int]) -> float:
        with _quiet():
            first, *others = (
                self._of_one_release(block).self_compose(count)
                for block, count in zip(self._blocks, counts, strict=True)
            )
            for other in others:
                first = first.compose(other)
            return float(first.get_epsilon_for_delta(self._delta))

    def _of_one_release(self, block: Block) -> Any:
        from dp_accounting.pld import privacy_loss_distribution as losses

        adjacency = "REPLACE_ONE" if block.replaces else "ADD_OR_REMOVE_ONE"
        mixture, total = None, 0.0
        for weight, sigma in block.parts():
            part = losses.from_gaussian_mechanism(
                standard_deviation=sigma,
                value_discretization_interval=self._interval,
                sampling_prob=block.sample_rate,
                neighboring_relation=losses.NeighborRel[adjacency],
            )
            total += weight
            mixture = part if mixture is None else part.compute_mixture(mixture, weight / total)
        return mixture


class RDP(Accountant, name="rdp"):
    """Rényi differential privacy (Mironov et al., 2019): a few percent loose, never fails.

    Converted to (ε, δ) by theorem 21 of Balle et al. (2020). Rare releases of large sensitivity
    weigh heavily in high moments; where the smaller, they are charged to δ instead.
    """

    def __init__(self, blocks: Sequence[Block], max_counts: Sequence[int], delta: float) -> None:
        self._blocks, self._delta = blocks, delta

    def epsilon(self, counts: Sequence[int]) -> float:
        bounds = []
        for limit in _limits(self._blocks):
            blocks, ever = _charged(self._blocks, counts, limit)
            if ever < self._delta:
                moments = [
                    _log_moments_of_run(block, n) for block, n in zip(blocks, counts, strict=True)
                ]
                bounds.append(_convert(moments, _what_is_left(self._delta, ever)))
        return min(bounds, default=math.inf)


# ---- What is charged to δ ----


def _limits(blocks: Sequence[Block]) -> list[float]:
    """Returns the finite sensitivities that occur, from the smallest to the largest."""
    return sorted({size for block in blocks for _, size in block.sensitivities} - {math.inf})


def _charged(
    blocks: Sequence[Block], counts: Sequence[int], limit: float
) -> tuple[list[Block], float]:
    """Returns the releases without those above ``limit``, and how probable any of those are.

    Whether a release includes the example at a sensitivity above the limit is as likely with the
    example as without it, if coins are thrown for it nevertheless. So if p is the probability that
    any does, δ(ε) <= p + (1 - p) δ'(ε), δ' being that of the others.

    Of a random number of trials, as many count as are made on average: (1 - p)^K is convex in K.
    Given that none does, K is distributed as before, with a smaller mean.
    """
    left, rare = zip(*(block.up_to(limit) for block in blocks), strict=True)
    with np.errstate(divide="ignore"):  # a certain event leaves log(0)
        never = np.log1p(-np.array(rare))
    trials = [1.0 if block.trials is None else block.trials.mean for block in blocks]
    return list(left), -math.expm1(float(np.dot(np.multiply(counts, trials), never)))


def _without_rare(
    blocks: Sequence[Block], counts: Sequence[int], delta: float
) -> tuple[list[Block], float]:
    """Charges to δ as many of the largest sensitivities as are hardly ever met."""
    for limit in _limits(blocks):
        left, ever = _charged(blocks, counts, limit)
        if ever <= delta / 10000:
            return left, ever
    raise AccountantFailure(f"unbounded sensitivities are likelier than {delta / 10000:.0e}")


def _what_is_left(delta: float, ever: float) -> float:
    """Returns the δ' with ``delta = ever + (1 - ever) δ'``."""
    return (delta - ever) / (1 - ever)


# ---- What the accountants share ----


class _PrivacyLoss(PrivacyRandomVariable):
    """The privacy loss log P/Q of one release, distributed as P; P includes the example."""

    def __init__(self, block: Block) -> None:
        self._block = block
        weights, sigmas = zip(*block.parts(), strict=True)
        self._weights, self._sigmas = np.array(weights), np.array(sigmas)

    def cdf(self, t: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Returns the probability of a loss of at most ``t``, elementwise."""
        t, q = np.asarray(t, dtype=np.float64), self._block.sample_rate
        log_ratio = _log_ratio_of_loss(t, q)
        total = np.zeros_like(t)
        # A single number is asked for often; then all parts go at once.
        rows = max(1, 100_000 // t.size)
        for start in range(0, len(self._weights), rows):
            sigmas = self._sigmas[start : start + rows].reshape(-1, *[1] * t.ndim)
            if self._block.replaces:
                z = replace_one.output_of_loss(t, sigmas, q)
            else:
                z = 0.5 + sigmas**2 * log_ratio
            probabilities = q * ndtr((z - 1) / sigmas) + (1 - q) * ndtr(z / sigmas)
            total += np.tensordot(self._weights[start : start + rows], probabilities, axes=1)
        return total


@np.errstate(over="ignore", divide="ignore")
def _log_ratio_of_loss(t: npt.NDArray[np.float64], q: float) -> npt.NDArray[np.float64]:
    """Returns x where the loss of the add-or-remove-one pair, log(1 - q + q e^x), is t.

    At an output z it is x = (z - 1/2) / sigma^2. No loss is below log(1 - q); there x is -inf.
    """
    small = np.log1p(np.maximum(np.expm1(np.minimum(t, 1.0)) / q, -1.0))
    large = t - math.log(q) + np.log1p((q - 1) * np.exp(-np.maximum(t, 1.0)))
    return np.where(t < 1, small, large)


def _log_moments_of_mixture(block: Block) -> npt.NDArray[np.float64]:
    log_moments = renyi.log_moments_of_replacement if block.replaces else renyi.log_moments
    moments = [
        math.log(weight) + log_moments(sigma, block.sample_rate) for weight, sigma in block.parts()
    ]
    return np.asarray(np.logaddexp.reduce(moments))


def _log_moments_of_run(block: Block, count: int) -> npt.NDArray[np.float64]:
    run = count * _log_moments_of_mixture(block)
    return run if block.trials is None else block.trials.log_moments(run, renyi.ORDERS)


def _convert(moments: Sequence[npt.NDArray[np.float64]], delta: float) -> float:
    """Returns ε at ``delta`` for runs with these log moments."""
    total = sum(moments, np.zeros_like(renyi.ORDERS))
    bounds = (total - math.log(delta) - np.log(renyi.ORDERS)) / (renyi.ORDERS - 1)
    bounds = bounds + np.log1p(-1 / renyi.ORDERS)
    return max(0.0, float(np.where(np.isnan(bounds), np.inf, bounds).min()))


def rounded_up(value: float, digits: int = 4) -> float:
    """Rounds an upper bound for print, never down: what is printed keeps the promise."""
    return math.ceil(value * 10**digits) / 10**digits if math.isfinite(value) else value


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the warnings of a library and turns its errors into `AccountantFailure`."""
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            yield
    except (RuntimeError, ValueError, AssertionError, ArithmeticError, MemoryError) as error:
        raise AccountantFailure(f"{type(error).__name__}: {error}") from error


def _refuse_trials(blocks: Sequence[Block]) -> None:
    for block in blocks:
        if block.trials is not None:
            raise AccountantFailure(f"{block.trials}: known for Renyi moments only, which rdp has")


def _refuse_little_noise(blocks: Sequence[Block]) -> None:
    least = min(sigma for block in blocks for _, sigma in block.parts())
    if least < 0.1:  # numerical convolution would take minutes to find an epsilon in the hundreds
        reach = max(size for block in blocks for _, size in block.sensitivities)
        at = f" at {reach:.3g} times the sensitivity" if reach > 1 else ""
        raise AccountantFailure(f"noise_multiplier={least:g}{at} is below 0.1")
