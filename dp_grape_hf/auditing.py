"""Audits a training run from outside: one run in, a lower bound on its epsilon out.

The audit of Steinke, Nasr and Jagielski (2023), *Privacy Auditing with One (1) Training Run*. Of m
canaries each is put into the training set by a fair coin. Who sees all the weights of the run then
guesses for k of the canaries whether they were in. If the run is (epsilon, delta)-differentially
private, no one is right too often, whatever the guesses are based on; so being right often refutes
small epsilons, at a stated level of confidence.

What is audited is the real thing: a ``DPGrapeTrainer`` trains, with its sampler, engine, ledger and
optimizer, and what it claims is what its own ``privacy_spent`` says. The model is made so that each
canary has coordinates of its own in every trainable tensor, and a gradient far longer than C. A
release then tells most that it can about each canary, with no canary in the way of another. The
optimizer is SGD with a learning rate of 1, so that two successive weights differ by a release.

What the projected layer is given is a constant. So principal directions of it are public, and no
audit here can tell whether those of a real run were measured on private data.

Shapes: m canaries, n of which are in; d numbers of a tensor, a row, belong to one canary.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy.stats import binom
from torch import Tensor, nn

from dp_grape_hf.arguments import DPGrapeTrainingArguments
from dp_grape_hf.errors import require
from dp_grape_hf.ledger import Clipping
from dp_grape_hf.mechanism import factors_by_name, secret_generator
from dp_grape_hf.projections import PRINCIPAL, Projector
from dp_grape_hf.sharding import whole
from dp_grape_hf.trainer import DPGrapeTrainer

AUDITED_METHODS = ("dp_grape", "dp_sgd")
"""Methods whose release is linear in the gradients of the canaries, with SGD as update rule."""
_WIDTH = 4  # d
_LENGTH = 30.0  # of a canary's gradient in each tensor, in units of C
_LARGEST = 40.0  # epsilon that bounds are searched up to
_GRID = 0.05  # and in which steps
_PHYSICAL = 256  # canaries in memory at once

# ---- The bound ----


def p_value(correct: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """Returns how likely so many correct guesses are at most if a run is (epsilon, delta)-private.

    Inclusion is by fair coins, k is fixed in advance, and the k canaries that are guessed may be
    chosen by all that the run released. With W ~ Binomial(k, e^epsilon / (1 + e^epsilon)), the
    correct guesses of randomised response,

        P[at least v are correct] <= P[W >= v] (1 + m delta P[W < v] / (v P[W = v])).

    For delta = 0 this is the theorem of Steinke, Nasr and Jagielski (2023) on pure privacy. The
    term for delta in their code, 2 m delta max_i P[v - i <= W < v] / i, is too small for some v
    (m = k = 3, v = 1, epsilon = 0: 3/4 delta, where a mechanism reaches 7/8 delta). So
    the bound here is another one, and the best there is. Proof: averaged over permutations of the
    canaries and over swaps of in and out, a mechanism is as private and as successful, and is given
    by the probabilities P_a of a correct guesses. A canary that changes sides makes a + 1 correct
    guesses of a, so privacy demands, of the sum over a = 0 ... k - 1,

        sum_a max(0, (a+1) P_{a+1} - e^epsilon (k-a) P_a) <= m delta.

    With r_a = P_a / P[W = a], the terms are b_a max(0, r_{a+1} - r_a), b_a = (a+1) P[W = a+1]: each
    rise of r has its price. Of what is paid for a rise after a < v, P[W >= v] P[W <= a] / b_a is
    gained. That grows with a, since b_{a-i} / b_a does (b is log-concave), and after v - 1 it
    falls. So the best is one rise, after v - 1; it is possible as long as r stays positive.

    Args:
        correct: v.
        guesses: k.
        canaries: m, also those that nothing is guessed of.
        epsilon: of the guarantee that is put to the test, at least 0 and finite.
        delta: of the same.

    Raises:
        PrivacyError: the counts contradict each other, or delta is out of range.
    """
    require(
        0 <= correct <= guesses <= canaries and guesses >= 1,
        f"{correct=}, {guesses=} and {canaries=} must not fall, and there must be a guess.",
    )
    require(0 <= delta < 1, f"{delta=} must lie in [0, 1).")
    if correct == 0:
        return 1.0
    w = binom(guesses, 1 / (1 + math.exp(-epsilon)))
    rise = math.exp(min(0.0, w.logcdf(correct - 1)) - w.logpmf(correct)) / correct
    return min(1.0, float(w.sf(correct - 1)) * (1 + canaries * delta * rise))


def epsilon_lower_bound(
    correct: int, guesses: int, canaries: int, delta: float, confidence: float = 0.95
) -> float:
    """Returns what epsilon of a run is at least, with a given confidence; 0 if nothing is shown.

    It is the largest multiple of 0.05, refined by bisection in the step after it, up to which every
    epsilon has a p-value of at most ``1 - confidence``. So it exceeds the epsilon of a private run
    with a probability of at most ``1 - confidence``.

    Args:
        correct: how many guesses were.
        guesses: their number, fixed before the run.
        canaries: m.
        delta: of the guarantee.
        confidence: in (0, 1).

    >>> round(epsilon_lower_bound(correct=95, guesses=100, canaries=1000, delta=1e-5), 2)
    2.17
    >>> epsilon_lower_bound(correct=50, guesses=100, canaries=1000, delta=1e-5)
    0.0
    """
    require(0 < confidence < 1, f"{confidence=} must lie in (0, 1), for example 0.95.")

    def refuted(epsilon: float) -> bool:
        return p_value(correct, guesses, canaries, epsilon, delta) <= 1 - confidence

    if not refuted(0.0):
        return 0.0
    low = 0.0
    while low < _LARGEST and refuted(low + _GRID):
        low += _GRID
    high = low + _GRID
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


# ---- The run ----


@dataclass(frozen=True)
class AuditSettings:
    """What is audited, and how thoroughly.

    Args:
        method: one of `AUDITED_METHODS`.
        clipping: ``flat`` or ``automatic``.
        target_epsilon: what the run is to claim; or give ``noise_multiplier``.
        noise_multiplier: sigma.
        delta: of the claim, below ``1 / canaries``.
        steps: releases of the run.
        sample_rate: q. With 1 every canary that is in is drawn in every step, which is where one
            run tells most.
        canaries: m.
        guesses: k, fixed before the run, so that the level of confidence needs no correction;
            None for m / 40, with which a run of one Gaussian release tells nearly most.
        confidence: of the lower bound.
        projection: of ``dp_grape``, as the trainer takes it; None for that of the method.
            ``principal`` is measured on the constant that the projected layer is given.
        projection_rank: r of ``dp_grape``.
        tables: how many tensors each canary has coordinates in, beside the projected one.
        gradient_factors: as the trainer takes them, by patterns of the names ``body`` and
            ``tables.0``, ...
        noise: ``independent`` or ``banded``, which needs ``target_epsilon`` and q below 1.

    Raises:
        PrivacyError: an argument is out of range. What the trainer refuses, it refuses.
    """

    method: str = "dp_grape"
    clipping: str = Clipping.FLAT
    target_epsilon: float | None = 2.0
    noise_multiplier: float | None = None
    delta: float = 1e-5
    steps: int = 4
    sample_rate: float = 1.0
    canaries: int = 20_000
    guesses: int | None = None
    confidence: float = 0.95
    projection: str | None = None
    projection_rank: int = 2
    tables: int = 3
    gradient_factors: dict[str, float] | str | None = None
    noise: str = "independent"

    def __post_init__(self) -> None:
        require(
            self.method in AUDITED_METHODS,
            f"method={self.method!r} cannot be audited this way; choose one of: "
            f"{', '.join(AUDITED_METHODS)}.",
        )
        require(self.steps >= 1, f"steps={self.steps} must be at least 1.")
        require(
            self.canaries >= _WIDTH,
            f"canaries={self.canaries} must be at least {_WIDTH}: the audited matrix has so many "
            "columns.",
        )
        require(self.tables >= 1, f"tables={self.tables} must be at least 1.")
        require(0 < self.sample_rate <= 1, f"sample_rate={self.sample_rate} must lie in (0, 1].")
        require(0 < self.confidence < 1, f"confidence={self.confidence} must lie in (0, 1).")
        require(
            1 <= self.projection_rank < _WIDTH,
            f"projection_rank={self.projection_rank} must lie in 1 ... {_WIDTH - 1}: the audited "
            f"matrix has {_WIDTH} columns.",
        )
        k, m = self.number_of_guesses, self.canaries
        require(1 <= k <= m, f"guesses={k} must lie in 1 ... canaries={m}.")

    @property
    def number_of_guesses(self) -> int:
        """k."""
        return self.guesses if self.guesses is not None else max(1, self.canaries // 40)


@dataclass(frozen=True)
class AuditResult:
    """What one audit found."""

    settings: AuditSettings
    claimed_epsilon: float
    noise_multiplier: float
    sample_rate: float
    steps: int
    included: int
    correct: int
    lower_bound: float

    @property
    def passed(self) -> bool:
        """Whether the run may be what it claims: the lower bound is not above the claim."""
        return self.lower_bound <= self.claimed_epsilon


def audit(settings: AuditSettings | None = None) -> AuditResult:
    """Trains on canaries, guesses which were in, and bounds the epsilon of that run from below.

    Guarantee:
        If the run keeps its claim, the result fails with a probability of at most
        ``1 - confidence``. That it passes proves nothing: it is one attack.
    """
    settings = settings or AuditSettings()
    coins = torch.rand(settings.canaries, generator=secret_generator()) < 0.5
    included = coins.nonzero().flatten()
    require(len(included) > 0, f"canaries={settings.canaries}: none was included. Ask for more.")
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(settings, included.tolist(), folder)
        trainer.train()
        trainer.see()
        spent = trainer.privacy_spent()
    guessed, says_in = guess(trainer.evidence, settings.number_of_guesses)
    correct = int((coins[guessed] == says_in).sum())
    counts = correct, len(guessed), settings.canaries
    return AuditResult(
        settings=settings,
        claimed_epsilon=spent.epsilon,
        noise_multiplier=spent.mechanism.noise_multiplier,
        sample_rate=spent.mechanism.sample_rate,
        steps=spent.steps,
        included=len(included),
        correct=correct,
        lower_bound=epsilon_lower_bound(*counts, settings.delta, settings.confidence),
    )


def guess(evidence: Tensor, guesses: int) -> tuple[Tensor, Tensor]:
    """Returns which canaries a guess is made of, (k,), and whether it says that they are in.

    Args:
        evidence: log likelihood ratio of in to out, (m,); what is farthest from 0 is guessed.
        guesses: k.
    """
    guessed = evidence.abs().topk(guesses).indices
    return guessed, evidence[guessed] > 0


def evidence_of(
    seen: Tensor, noise_multiplier: float, sample_rate: float, bands: Sequence[float] = (1.0,)
) -> Tensor:
    """Returns what all releases say about canaries: log P[seen | in] - log P[seen | out], (m,).

    With b bands the attacker takes the correlation out of the noise, whose coefficients are public:
    a canary that is drawn then shows itself in b steps, by the coefficients. Its group is one of b,
    each as likely as the others.

    Args:
        seen: each release along the unit vector of each canary, in units of C, (T, m).
        noise_multiplier: sigma.
        sample_rate: q.
        bands: the coefficients of the noise.
    """
    count, steps = len(bands), len(seen)
    # C r, whose noise is independent; nothing after the last step
    plain = seen.new_zeros(steps + count - 1, seen.shape[1])
    for back, coefficient in enumerate(bands):
        plain[back:steps] += coefficient * seen[: steps - back]
    shown, lengths = torch.zeros_like(seen), torch.zeros(steps, 1)
    for ahead, coefficient in enumerate(bands):
        shown += coefficient * plain[ahead : ahead + steps]
        lengths[: steps - ahead] += coefficient**2
    each = log_likelihood_ratio(
        shown / lengths, noise_multiplier / lengths.sqrt(), min(1.0, count * sample_rate)
    )
    groups = torch.stack([each[group::count].sum(0) for group in range(min(count, steps))])
    empty = groups.new_zeros(max(0, count - steps), seen.shape[1])  # groups that had no turn
    return torch.cat([groups, empty]).logsumexp(0) - math.log(count)


def log_likelihood_ratio(
    seen: Tensor, noise_multiplier: float | Tensor, sample_rate: float
) -> Tensor:
    """Returns what a release says about canaries: log P[seen | in] - log P[seen | out].

    A canary that is in is drawn with probability q, and what is seen of it is then N(1, sigma^2);
    otherwise N(0, sigma^2).

    Args:
        seen: the release along the unit vector of each canary, in units of C, (..., m).
        noise_multiplier: sigma, of each release if there are several, (..., 1).
        sample_rate: q.
    """
    sigma = torch.as_tensor(noise_multiplier, dtype=seen.dtype).clamp(min=1e-6)
    drawn = (2 * seen - 1) / (2 * sigma**2)
    if sample_rate == 1:
        return drawn
    rate = torch.tensor(sample_rate, dtype=drawn.dtype)
    return torch.logaddexp(torch.log1p(-rate), rate.log() + drawn)


# ---- The trainer ----


class CanaryModel(nn.Module):
    """A model in which canary i alone has a gradient in row i of a matrix and of tables.

    The matrix is given the same constant for all canaries, and canary i reads output i alone; it is
    projected on the side of its input. The loss, `_sum_of_logits`, is linear, so the gradients
    depend on no weight.
    """

    def __init__(self, canaries: int, tables: int) -> None:
        super().__init__()
        self.body = nn.Linear(_WIDTH, canaries, bias=False)
        self.tables = nn.ModuleList(nn.Embedding(canaries, _WIDTH) for _ in range(tables))
        for weight in self.parameters():
            nn.init.zeros_(weight)

    def forward(self, canary: Tensor) -> dict[str, Tensor]:
        """Returns logits (B, 1) of canaries (B,)."""
        outputs = self.body(self.body.weight.new_ones(len(canary), _WIDTH))  # (B, m)
        logits = outputs.gather(1, canary[:, None])
        for table in self.tables:
            logits = logits + table(canary).sum(1, keepdim=True)
        return {"logits": logits}


def _sum_of_logits(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Tensor:
    return _LENGTH / _WIDTH**0.5 * outputs["logits"].sum(1)


def _trainer(settings: AuditSettings, included: list[int], folder: str) -> _Auditor:
    budget: dict[str, Any] = {"noise_multiplier": settings.noise_multiplier}
    if settings.noise_multiplier is None:
        budget = {"target_epsilon": settings.target_epsilon}
    projected: dict[str, Any] = {
        "optim_target_modules": ["body"],
        "projection_rank": settings.projection_rank,
        "projection_update_steps": 2,
    }
    arguments = DPGrapeTrainingArguments(
        output_dir=folder,
        method=settings.method,
        projection=settings.projection,
        clipping=settings.clipping,
        noise=settings.noise,
        update_rule="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        gradient_factors=settings.gradient_factors,
        target_delta=settings.delta,
        num_samples=settings.canaries,
        expected_batch_size=max(1, round(settings.sample_rate * settings.canaries)),
        per_device_train_batch_size=_PHYSICAL,
        max_steps=settings.steps,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        **budget,
        **(projected if settings.method == "dp_grape" else {}),
    )
    return _Auditor(
        model=CanaryModel(settings.canaries, settings.tables),
        args=arguments,
        train_dataset=[{"canary": i, "labels": 0} for i in included],
        public_dataset=[{"canary": 0}] if arguments.projection == PRINCIPAL else None,
        compute_loss_func=_sum_of_logits,
    )


class _Auditor(DPGrapeTrainer):
    """Looks at the weights before each step and after the last one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._before: dict[str, Tensor] | None = None
        self._seen: list[Tensor] = []

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Sees the weights that the last step left."""
        self.see()
        return super().training_step(*args, **kwargs)

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Keeps the summary of the training to itself."""

    def see(self) -> None:
        """Sees the weights as they are, and what the step before made of those seen last."""
        now = {
            name: whole(weight.detach()).clone() for name, weight in self.model.named_parameters()
        }
        before, self._before = self._before, now
        if before is None:
            return
        own, size = self.plan.mechanism, self.args.logical_batch_size
        released = {name: (before[name] - now[name]) * size for name in now}  # the noisy sums
        public = self.private_run.projectors  # of the step before
        factors = factors_by_name("gradient_factors", own.factors_by_pattern, now)
        seen = along_canaries(released, public, own.max_grad_norm, factors)
        self._seen.append(seen)

    @property
    def evidence(self) -> Tensor:
        """What was seen says about canaries, (m,)."""
        own = self.plan.mechanism
        seen = torch.stack(self._seen)
        return evidence_of(seen, own.noise_multiplier, own.sample_rate, own.bands)


def along_canaries(
    released: Mapping[str, Tensor],
    projectors: Mapping[str, Projector],
    max_grad_norm: float,
    gradient_factors: Mapping[str, float],
) -> Tensor:
    """Returns a release along the clipped gradient of each canary, in units of C, (m,).

    A gradient G is released as ``project(G)``, and the release S was lifted before it was seen:
    ``<S, project(G)> = <lift(S), G>``. So only the length of ``project(G)`` takes the projector.
    With a gradient factor f, G is ``f g``, and S is f times what was released.

    Args:
        released: weight name -> the lifted noisy sum, (m, d), of which row i is canary i's.
        projectors: those of the step, by weight name.
        max_grad_norm: C.
        gradient_factors: weight name -> f; 1 for those that are missing.
    """
    products, squares = [], []
    for name, value in released.items():
        factor = gradient_factors.get(name, 1.0)
        full = torch.full_like(value, factor * _LENGTH / _WIDTH**0.5)
        coordinates = projectors[name].project(full) if name in projectors else full
        products.append((factor * value * full).sum(1))
        squares.append(coordinates.square().sum(1))
    along, lengths = torch.stack(products), torch.stack(squares)  # (tensors, m)
    return along.sum(0) / (lengths.sum(0).sqrt() * max_grad_norm)
