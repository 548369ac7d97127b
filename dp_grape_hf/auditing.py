"""Audit one training run, and return a lower bound on its epsilon.

This is the audit of Steinke, Nasr and Jagielski (2023), *Privacy Auditing with One (1) Training
Run*. Each of m canaries is included in the training set with probability 1/2. The attacker sees all
weights of the run, and guesses for k canaries whether they were included. If the run is (epsilon,
delta)-differentially private, the number of correct guesses is bounded with high probability, for
any attacker. So many correct guesses disprove small epsilons, at a given confidence.

The audit trains a real ``DPGrapeTrainer``, with its sampler, engine, ledger and optimizer. The
claim is the epsilon of its ``privacy_spent``. In the audited model, each canary has separate
coordinates in every trained tensor, and a gradient much longer than C. So canaries do not interfere
with each other, and a release reveals as much as possible about each. The optimizer is SGD with a
learning rate of 1, so successive weights differ by one release.

The input of the projected layer is a constant. So its principal directions are public, and an audit
cannot detect principal directions that another run computed on private data.

Shapes: m canaries, n of them included; a row of d elements of a tensor belongs to one canary.
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
from dp_grape_hf.sharding import full_tensor
from dp_grape_hf.trainer import DPGrapeTrainer

AUDITED_METHODS = ("dp_grape", "dp_sgd")
"""Methods whose releases are linear in the gradients of the canaries."""
_WIDTH = 4  # d
_LENGTH = 30.0  # norm of a canary's gradient in each tensor, in units of C
_LARGEST = 40.0  # largest epsilon of the search
_GRID = 0.05  # step of the search
_PHYSICAL = 256  # canaries of a physical batch

# ---- The bound ----


def p_value(correct: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """Return an upper bound on P[at least v correct guesses] for an (epsilon, delta)-private run.

    Each canary is included with probability 1/2. k is fixed in advance. The k canaries may be
    chosen by everything that the run released. With W ~ Binomial(k, e^epsilon / (1 + e^epsilon)),

        P[at least v are correct] <= P[W >= v] (1 + m delta P[W < v] / (v P[W = v])).

    For delta = 0 this is the theorem of Steinke, Nasr and Jagielski (2023) on pure privacy. The
    term for delta in their code, 2 m delta max_i P[v - i <= W < v] / i, is too small for some v
    (m = k = 3, v = 1, epsilon = 0: 3/4 delta, but a mechanism reaches 7/8 delta).

    Proof. Average the mechanism over permutations of the canaries, and over swaps of included and
    excluded. This changes neither privacy nor success. Let P_a be the probability of a correct
    guesses. Moving one canary to the other side turns a correct guesses into a + 1, so privacy
    implies sum_{a<k} max(0, (a+1) P_{a+1} - e^epsilon (k-a) P_a) <= m delta. With r_a = P_a /
    P[W = a] and b_a = (a+1) P[W = a+1], its terms are b_a max(0, r_{a+1} - r_a). An increase of r
    after a < v raises P[at least v correct] by P[W >= v] P[W <= a] / b_a per cost. This ratio grows
    with a up to v - 1 (b is log-concave), and falls after it. So one increase after v - 1 is best.

    Args:
        correct: v.
        guesses: k.
        canaries: m, including canaries without a guess.
        epsilon: epsilon of the tested guarantee, at least 0 and finite.
        delta: delta of the tested guarantee.

    Raises:
        PrivacyError: the counts contradict each other, or delta is out of range.
    """
    require(
        0 <= correct <= guesses <= canaries and guesses >= 1,
        f"{correct=}, {guesses=} and {canaries=} must satisfy 0 <= correct <= guesses <= canaries, "
        "with at least one guess.",
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
    """Return a lower bound on the epsilon of a run, at a given confidence; 0 if none was found.

    The search tests multiples of 0.05 up to the first one with a p-value above ``1 - confidence``,
    and refines the last interval by bisection. So the result exceeds the epsilon of a private run
    with a probability of at most ``1 - confidence``, in (0, 1). ``p_value`` explains the
    other arguments.

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
    """The settings of an audit.

    Args:
        method: one of `AUDITED_METHODS`.
        clipping: ``flat`` or ``automatic``.
        target_epsilon: the claim of the run; or pass ``noise_multiplier``.
        noise_multiplier: sigma.
        delta: delta of the claim, below ``1 / canaries``.
        steps: number of releases of the run.
        sample_rate: q. With 1, every included canary is sampled in every step, and a run reveals
            most.
        canaries: m.
        guesses: k, fixed before the run, so that the confidence needs no correction; None for
            m / 40.
        confidence: confidence of the lower bound.
        projection: option of the trainer for ``dp_grape``; None for the method's default.
            ``principal`` is computed on the constant input of the projected layer.
        projection_rank: r of ``dp_grape``.
        tables: the number of tensors that are not projected.
        gradient_factors: option of the trainer, by patterns of the names ``body``, ``tables.0``,
            ...
        noise: ``independent`` or ``banded``, which needs ``target_epsilon`` and q below 1.

    Raises:
        PrivacyError: an argument is out of range. The trainer raises it for unsupported options.
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
        k, m = self.number_of_guesses, self.canaries
        methods = ", ".join(AUDITED_METHODS)
        for holds, name, needed in (
            (self.method in AUDITED_METHODS, "method", f"cannot be audited; choose of: {methods}"),
            (self.steps >= 1, "steps", "must be at least 1, because the attack needs updates"),
            (m >= _WIDTH, "canaries", f"must be at least {_WIDTH}, the columns of the matrix"),
            (self.tables >= 1, "tables", "must be at least 1, because the audited model has some"),
            (0 < self.sample_rate <= 1, "sample_rate", "must lie in (0, 1]"),
            (0 < self.confidence < 1, "confidence", "must lie in (0, 1)"),
            (
                1 <= self.projection_rank < _WIDTH,
                "projection_rank",
                f"must lie in 1 ... {_WIDTH - 1}: the matrix has {_WIDTH} columns",
            ),
            (1 <= k <= m, "guesses", f"must lie in 1 ... canaries={m}: each is guessed once"),
        ):
            require(holds, f"{name}={getattr(self, name)!r} {needed}.")

    @property
    def number_of_guesses(self) -> int:
        """The number of guesses, k."""
        return self.guesses if self.guesses is not None else max(1, self.canaries // 40)


@dataclass(frozen=True)
class AuditResult:
    """The result of an audit."""

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
        """True if the lower bound does not contradict the claim."""
        return self.lower_bound <= self.claimed_epsilon


def audit(settings: AuditSettings | None = None) -> AuditResult:
    """Train on canaries, guess which were included, and return a lower bound on epsilon.

    Guarantee:
        If the claim of the run is true, the audit fails with a probability of at most
        ``1 - confidence``. An audit that passes proves nothing: it is one attack.

    Raises:
        PrivacyError: if no canary was included by chance.

    Source: Steinke, Nasr and Jagielski (2023); see the docstring of the module.
    """
    settings = settings or AuditSettings()
    is_in = torch.rand(settings.canaries, generator=secret_generator()) < 0.5
    included = is_in.nonzero().flatten()
    require(
        len(included) > 0,
        f"canaries={settings.canaries}: no canary was included. Use more canaries.",
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(settings, included.tolist(), folder)
        trainer.train()
        trainer.see()
        spent = trainer.privacy_spent()
    guessed, says_in = guess(trainer.evidence, settings.number_of_guesses)
    correct = int((is_in[guessed] == says_in).sum())
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
    """Return the canaries to guess, (k,), and the guesses: True for included.

    Args:
        evidence: log likelihood ratio of included to excluded, (m,). The k canaries with the
            largest absolute values are guessed.
        guesses: k.
    """
    guessed = evidence.abs().topk(guesses).indices
    return guessed, evidence[guessed] > 0


def evidence_of(
    seen: Tensor, noise_multiplier: float, sample_rate: float, bands: Sequence[float] = (1.0,)
) -> Tensor:
    """Return log P[seen | included] - log P[seen | excluded] of all releases, (m,).

    With b bands, the attacker removes the correlation of the noise by its public coefficients. A
    sampled canary then contributes to b steps, weighted by the coefficients. Its group is one of b
    equally likely ones.

    Args:
        seen: each release, projected on the direction of each canary, in units of C, (T, m).
        noise_multiplier: sigma.
        sample_rate: q.
        bands: the coefficients of the noise.
    """
    count, steps = len(bands), len(seen)
    # C times the releases, whose noise is independent; zeros after the last step
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
    empty = groups.new_zeros(max(0, count - steps), seen.shape[1])  # groups without a step
    return torch.cat([groups, empty]).logsumexp(0) - math.log(count)


def log_likelihood_ratio(
    seen: Tensor, noise_multiplier: float | Tensor, sample_rate: float
) -> Tensor:
    """Return log P[seen | included] - log P[seen | excluded] of one release.

    The release along a canary is N(1, sigma^2) if the canary is sampled, which has probability q
    for an included canary. Otherwise it is N(0, sigma^2).

    Args:
        seen: the release, projected on the direction of each canary, in units of C, (..., m).
        noise_multiplier: sigma; for several releases, (..., 1).
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
    """A model in which only canary i has a gradient in row i of a matrix and of tables.

    The input of the matrix is the same constant for all canaries, and canary i uses output i only.
    The matrix is projected on its input side. The loss, `_sum_of_logits`, is linear, so gradients
    do not depend on the weights.
    """

    def __init__(self, canaries: int, tables: int) -> None:
        super().__init__()
        self.body = nn.Linear(_WIDTH, canaries, bias=False)
        self.tables = nn.ModuleList(nn.Embedding(canaries, _WIDTH) for _ in range(tables))
        for weight in self.parameters():
            nn.init.zeros_(weight)

    def forward(self, canary: Tensor) -> dict[str, Tensor]:
        """Return the logits (B, 1) of canaries (B,)."""
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
    """A trainer that stores each release, from the weights before and after each step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._before: dict[str, Tensor] | None = None
        self._seen: list[Tensor] = []

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Store the release of the step before, then take a step."""
        self.see()
        return super().training_step(*args, **kwargs)

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Print no logs."""

    def see(self) -> None:
        """Store the current weights, and the release by which they changed since the last call."""
        now = {
            name: full_tensor(weight.detach()).clone()
            for name, weight in self.model.named_parameters()
        }
        before, self._before = self._before, now
        if before is None:
            return
        mechanism, size = self.plan.mechanism, self.args.logical_batch_size
        released = {name: (before[name] - now[name]) * size for name in now}  # the noisy sums
        public = self.private_run.projectors  # the projectors of the step before
        factors = factors_by_name("gradient_factors", mechanism.factors_by_pattern, now)
        seen = along_canaries(released, public, mechanism.max_grad_norm, factors)
        self._seen.append(seen)

    @property
    def evidence(self) -> Tensor:
        """The log likelihood ratio of each canary, included to excluded, (m,)."""
        mechanism = self.plan.mechanism
        seen = torch.stack(self._seen)
        return evidence_of(seen, mechanism.noise_multiplier, mechanism.sample_rate, mechanism.bands)


def along_canaries(
    released: Mapping[str, Tensor],
    projectors: Mapping[str, Projector],
    max_grad_norm: float,
    gradient_factors: Mapping[str, float],
) -> Tensor:
    """Return a release, projected on the direction of each canary, in units of C, (m,).

    A gradient G contributes ``project(G)`` to the release S, and the weights show ``lift(S)``.
    ``<S, project(G)> = <lift(S), G>``, so the projector is only needed for the norm of
    ``project(G)``. With a gradient factor f, G is ``f g``, and the weights show ``lift(S) / f``.

    Args:
        released: weight name -> the lifted noisy sum, (m, d); row i belongs to canary i.
        projectors: weight name -> projector of the step.
        max_grad_norm: C.
        gradient_factors: weight name -> f; missing names have f = 1.
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
