"""Ways to break the mechanism, and what is to notice: a mutation suite, and its kill table.

A saboteur replaces one thing in the real code. A detector runs the real code and raises
``AssertionError`` if something is wrong with it. ``python -m tests.saboteurs`` prints which
detector notices which saboteur; the audits among them take a few seconds each.

Detectors use the secret streams of noise and coins, as runs do. Each statistic may be off by at
least six standard deviations before it counts, so a false alarm has a probability below 1e-8.

Shapes: B samples in a batch, T positions.
"""

import contextlib
import io
import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from scipy.optimize import brentq
from scipy.stats import norm
from torch import Tensor, nn
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from dp_grape_hf import (
    accounting,
    coins,
    engine,
    file_checks,
    mixin,
    representations,
    selfcheck,
    unit_engine,
)
from dp_grape_hf.audit import AuditSettings, audit
from dp_grape_hf.engine import Factors, PrivateEngine, add_weighted_sum_
from dp_grape_hf.engines import make_engine, per_sample_gradients
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.forms import Factored
from dp_grape_hf.ledger import Ledger
from dp_grape_hf.mechanism import Mechanism
from dp_grape_hf.norms import Gathered
from dp_grape_hf.per_sample import Gradients
from dp_grape_hf.projection import ProjectionSchedule, Projector
from dp_grape_hf.randomness import noise_generator
from dp_grape_hf.representations import Dense, GradientSum
from dp_grape_hf.sampling import PoissonBatchSampler
from dp_grape_hf.units import UNIT_OF_ROW
from dp_grape_hf.verify import MISMATCH, verify
from dp_grape_hf.weight_files import Tree, digests, is_weights
from tests.support.models import only
from tests.support.oracles import assert_gradients_equal, single_sample_gradients
from tests.support.trainers import make_trainer, no_loss, spy_releases

TOKENS, HIDDEN, WIDTH, POSITIONS = 12, 24, 40, 3
MECHANISM = Mechanism(
    noise_multiplier=1.0,
    sample_rate=1.0,
    max_grad_norm=0.5,
    expected_batch_size=4,
    num_samples=4,
    target_epsilon=None,
    target_delta=1e-5,
    accountant="rdp",
    engine="layerwise",
    projection="gaussian",
    projection_rank=4,
    projection_update_steps=100,
    projection_seed=0,
)


class Probe(nn.Module):
    """A table, a projected matrix and a head; texts of one token repeat, so their rows add up."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.table = nn.Embedding(TOKENS, HIDDEN)
            self.body = nn.Linear(HIDDEN, WIDTH)
            self.head = nn.Linear(WIDTH, 2)

    def forward(self, ids: Tensor, scale: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.body(self.table(ids)))  # (B, T, m)
        return {"logits": self.head(hidden).sum(1) * scale[:, None]}


def texts(*scales: float, token: int | None = None) -> dict[str, Tensor]:
    """Returns a batch with one sample for each factor that its loss, and gradient, has."""
    ids = torch.arange(len(scales) * POSITIONS).view(-1, POSITIONS) % TOKENS
    if token is not None:
        ids = torch.full_like(ids, token)
    return {"ids": ids, "scale": torch.tensor(scales)}


def projectors() -> dict[str, Projector]:
    shapes = {"body.weight": (WIDTH, HIDDEN)}
    return ProjectionSchedule(shapes, rank=4, update_steps=1, seed=0).at(0)


def private_engine(
    sigma: float = 0.0,
    model: nn.Module | None = None,
    clipping: str = "flat",
    mode: str = "auto",
    distributed: bool = False,
    folder: str | None = None,
) -> PrivateEngine:
    """Returns the engine of a run with C = 0.5 and an expected batch of 4."""
    path = None if folder is None else Path(folder) / "privacy_ledger.json"
    plain = model is None or isinstance(model, Probe)
    loss = (lambda outputs, labels: outputs["logits"].sum(1)) if plain else None
    return PrivateEngine(
        make_engine("layerwise", model or Probe(), loss, grad_sample_mode=mode),
        ledger=Ledger.start(
            replace(MECHANISM, noise_multiplier=sigma, clipping=clipping), path=path
        ),
        noise_generator=noise_generator("cpu"),
        distributed=distributed,
    )


def released(private: PrivateEngine, *batches: Any, projected: bool = True) -> dict[str, Tensor]:
    private.begin(projectors() if projected else {})
    for batch in batches:
        private.accumulate(batch)
    return private.release()


def length(release: dict[str, Tensor]) -> float:
    """Returns the L2 norm of a release, times the expected batch size: that of the sum."""
    total = sum(value.double().square().sum().item() for value in release.values())
    return math.sqrt(total) * MECHANISM.expected_batch_size


def assert_noise(values: Sequence[Tensor], std: float) -> None:
    """Checks mean and standard deviation of independent normal numbers."""
    numbers = torch.cat([value.flatten() for value in values]).double()
    count = len(numbers)
    assert abs(numbers.mean().item()) < 7 * std / count**0.5, "the noise has a mean"
    found = numbers.square().mean().sqrt().item()
    assert abs(found / std - 1) < 7 / (2 * count) ** 0.5, f"the noise has std {found}, not {std}"


# ---- Detectors ----


def noise_has_its_size() -> None:
    """The release of examples without gradient is noise of std sigma C / (q N), everywhere."""
    private = private_engine(sigma=2.0)
    releases = [released(private, texts(0.0, 0.0)) for _ in range(25)]
    for name in releases[0]:
        assert_noise([release[name] for release in releases], 2.0 * 0.5 / 4)


def empty_batch_has_noise() -> None:
    """Nobody drawn: the release has the noise of any other."""
    private = private_engine(sigma=2.0)
    releases = [released(private) for _ in range(5)]
    assert_noise([value for release in releases for value in release.values()], 2.0 * 0.5 / 4)


def divisor_is_constant() -> None:
    """Twice the examples make twice the release: nothing is divided by the size of a draw."""
    one, three = (released(private_engine(), texts(*[1e3] * n, token=1)) for n in (1, 3))
    for name, value in one.items():
        torch.testing.assert_close(three[name], 3 * value, rtol=1e-4, atol=1e-6)
    assert abs(length(one) - 0.5) < 1e-3, f"{length(one)} should be C"


def one_example_adds_at_most_C() -> None:
    """With one example more the clipped sum moves by C at most, in all modes."""
    modes = [("flat", m) for m in ("auto", "ghost", "book_keeping", "materialise")]
    for clipping, mode in [*modes, ("per_layer", "auto"), ("automatic", "auto")]:
        rest = texts(1e-3, 5.0)  # factors of the gradients
        for scale in (1.0, 1e4):
            private = private_engine(clipping=clipping, mode=mode)
            before = released(private, rest, projected=mode == "auto")
            after = released(private, rest, texts(scale, token=2), projected=mode == "auto")
            moved = length({name: after[name] - before[name] for name in after})
            assert moved <= 0.5 * (1 + 1e-4), f"{clipping}, {mode}: {moved} is more than C"


def nan_adds_nothing() -> None:
    """An example without a finite gradient has no part in the sum."""
    private = private_engine()
    without, bad = released(private, texts(1.0)), {**texts(1.0, math.nan)}
    bad["ids"][1] = TOKENS - 1
    for name, value in released(private, bad).items():
        assert value.isfinite().all(), f"{name} is not finite"
        torch.testing.assert_close(value, without[name], rtol=1e-5, atol=1e-7)


def release_is_its_definition() -> None:
    """Clip each example's gradient by plain autograd, add up, divide."""
    model, batch = Probe(), texts(0.01, 1.0, 30.0, 4.0)
    given = projectors()
    loss = lambda outputs, labels: outputs["logits"].sum(1)  # noqa: E731
    _, gradients = single_sample_gradients(model, batch, given, loss)
    squared = torch.stack([g.flatten(1).square().sum(1) for g in gradients.values()]).sum(0)
    factors = (0.5 / squared.sqrt()).clamp(max=1)
    found = released(private_engine(), batch)
    for name, gradient in gradients.items():
        expected = torch.tensordot(factors, gradient, 1) / 4
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-6)


def tied_gradient_is_whole() -> None:
    """Both uses of a tied table count, in the gradient and in its norm, cross terms included."""
    case = only("opt")
    model, batch = case.model().eval(), case.batch(3)
    _, expected = single_sample_gradients(model, batch)
    _, found = per_sample_gradients(model, batch)
    assert_gradients_equal(found, expected)


def options_are_one_example() -> None:
    """The norm of an example that is several rows, or positions, is that of their sum."""
    for mode in ("auto", "book_keeping"):
        model, batch = Probe(), texts(1.0, 2.0, token=3)
        loss = lambda outputs, labels: outputs["logits"].sum(1)  # noqa: E731
        _, expected = single_sample_gradients(model, batch, None, loss)
        _, found = per_sample_gradients(model, batch, loss=loss, grad_sample_mode=mode)
        assert_gradients_equal(found, expected)


def a_user_is_clipped_once() -> None:
    """A privacy unit with three examples adds at most C."""
    private = private_engine()
    private.per_sample = unit_engine.UnitEngine(private.per_sample)
    batch = texts(1e3, 1e3, 1e3, token=4) | {UNIT_OF_ROW: torch.zeros(3, dtype=torch.long)}
    found = length(released(private, batch))
    assert found <= 0.5 * (1 + 1e-4), f"{found} is more than C"


def noise_is_fresh() -> None:
    """Neither two runs with one args.seed nor two steps of a run have the same noise."""
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),  # the Trainer prints its metrics
    ):
        releases = spy_releases(patch)
        for run in ("a", "b"):
            make_trainer(
                Path(folder) / run,
                compute_loss_func=no_loss,
                projection="identity",  # so that a release has numbers enough
                max_steps=2,
                logging_strategy="no",
                self_check=False,
                seed=42,
            ).train()
    flat = [torch.cat([value.flatten() for value in release.values()]) for release in releases]
    assert len(flat) == 4
    assert all(value.abs().max() > 0 for value in flat), "a step without noise"
    for i, left in enumerate(flat):
        for right in flat[i + 1 :]:
            alike = torch.nn.functional.cosine_similarity(left, right, dim=0).item()
            assert abs(alike) < 7 / len(left) ** 0.5, f"noise correlates: {alike}"


def draws_are_poisson() -> None:
    """Sizes vary as of independent coins, examples come equally often, draws are independent."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder, expected_batch_size=6, remove_unused_columns=False)
        loader = trainer.get_train_dataloader()
        drawn = []
        while len(drawn) < 600:
            for batch in loader:
                ids = [int(i) for physical in batch for i in physical["id"]]
                drawn.append(torch.zeros(24).index_fill_(0, torch.tensor(ids).long(), 1.0))
    draws = torch.stack(drawn[:600])  # (steps, N)
    q, sizes = 0.25, draws.sum(1)
    spread = sizes.var().item() / (24 * q * (1 - q))
    assert abs(spread - 1) < 7 * (2 / 600) ** 0.5, f"sizes vary {spread} times as they should"
    rates = draws.mean(0)
    assert ((rates - q).abs() < 7 * (q * (1 - q) / 600) ** 0.5).all(), f"drawn at rates {rates}"
    both = (draws[1:] * draws[:-1]).mean().item()
    allowed = 7 * (q**2 * (1 - q**2) / (24 * 599)) ** 0.5 * 1.5  # successive pairs share a draw
    assert abs(both - q**2) < allowed, f"drawn twice in a row at a rate of {both}, not {q**2}"


def ledger_knows_first() -> None:
    """A run that dies while its noise is drawn has its release in the ledger."""

    def dies(*args: Any) -> None:
        raise RuntimeError("out of power")

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        private = private_engine(1.0, folder=folder)
        patch.setattr(engine, "add_noise_", dies)
        with pytest.raises(RuntimeError, match="out of power"):
            released(private)
        assert Ledger.load(Path(folder) / "privacy_ledger.json").steps == 1


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Returns epsilon of a Gaussian mechanism (Balle and Wang 2018, Theorem 8)."""

    def excess(epsilon: float) -> float:
        left, right = norm.logcdf(mu / 2 - epsilon / mu), norm.logcdf(-mu / 2 - epsilon / mu)
        return math.exp(left) - math.exp(epsilon + right) - delta

    return float(brentq(excess, 0.0, 100.0))


def claim_covers_the_releases() -> None:
    """What the ledger claims is at least epsilon of the Gaussian mechanism that was run."""
    for adjacency, moved in (("add_or_remove_one", 1), ("replace_one", 2)):
        private = private_engine(4.0)
        mechanism = replace(MECHANISM, noise_multiplier=4.0, adjacency=adjacency)
        private.ledger = Ledger.start(mechanism)
        for _ in range(4):
            released(private, texts(1.0))
        true = gaussian_epsilon(moved * 4**0.5 / 4.0, 1e-5)
        claimed = private.ledger.epsilon()
        assert claimed >= true - 1e-6, f"{adjacency}: claims {claimed}, and spends {true}"


def noise_is_added_once() -> None:
    """Of two processes the first adds noise, and the second nothing."""
    for rank, has_noise in ((0, True), (1, False)):
        dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
        try:
            release = released(private_engine(1.0, distributed=True))
        finally:
            dist.destroy_process_group()
        assert (length(release) > 0) == has_noise, f"rank {rank}: {has_noise=} expected"


def planted_weights_are_noticed() -> None:
    """`dp-grape verify` finds weights that the ledger does not digest, whatever their names."""
    planted = ("optimizer.safetensors", "pytorch_model.bin", "sub/model.safetensors", "notes.txt")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sub").mkdir()
        save_file({"a": torch.zeros(3)}, folder / "model.safetensors")
        ledger = Ledger.start(replace(MECHANISM, target_delta=None))  # epsilon would take a second
        ledger.record()
        ledger.snapshot(1, digests(folder)).save(folder / "privacy_ledger.json")
        assert _mismatches(folder) == set()
        for number, place in enumerate(planted):
            save_file({"a": torch.full((3,), number + 1.0)}, folder / place)
        assert _mismatches(folder) == {f"weights: {place}" for place in planted}


def _mismatches(folder: Path) -> set[str]:
    return {check.what for check in verify(folder) if check.status == MISMATCH}


class Tossing(Probe):
    """Drops its head for a whole batch, one time in ten."""

    def forward(self, ids: Tensor, scale: Tensor) -> dict[str, Tensor]:
        kept = torch.rand(()) >= 0.1 if self.training else 1.0
        return super().forward(ids, scale * kept)


class Reseeding(Probe):
    """Draws from numpy, which it seeds before, as BigBird does."""

    def forward(self, ids: Tensor, scale: Tensor) -> dict[str, Tensor]:
        np.random.seed(0)
        return super().forward(ids, scale * float(np.random.rand()))


def _refused(run: Callable[[], object]) -> bool:
    try:
        run()
    except PrivacyError:
        return True
    return False


def a_shared_coin_is_refused() -> None:
    """One more example would change what the others draw, which moves their sum past the clip."""
    loss = lambda outputs, labels: outputs["logits"].sum(1)  # noqa: E731
    tossed = make_engine("layerwise", Tossing().train(), loss)
    assert _refused(lambda: tossed(texts(1.0, 2.0, 3.0), {})), "a batch shares a coin"


def a_median_in_the_loss_is_refused() -> None:
    """The harder half of a batch is another one when there is one example more."""

    def mined(outputs: Any, labels: Tensor) -> Tensor:
        losses = functional.cross_entropy(outputs["logits"], labels, reduction="none")
        return losses * (losses >= losses.median())

    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder, compute_loss_func=mined, max_steps=1)
        assert _refused(trainer.train), "a loss depends on how others rank"


def a_forward_leaves_numpys_stream_alone() -> None:
    """What a collator draws after a forward pass is none of what the pass has seeded."""
    private = private_engine(model=Reseeding().train())
    np.random.seed(int.from_bytes(os.urandom(4), "little"))
    before = np.random.get_state()[1].copy()
    released(private, texts(1.0, 2.0), projected=False)
    assert np.array_equal(np.random.get_state()[1], before), "the collator's coins are public"


def _audit_passes(settings: AuditSettings, most: int = 3) -> None:
    """Fails if one of several audits refutes the claim: each is right with 95 % confidence.

    The bound of a sound run stays about five standard deviations below its claim at these sizes.
    """
    for _ in range(most):
        result = audit(settings)
        shown = f"epsilon is {result.lower_bound:.2f} at least, not {result.claimed_epsilon:.2f}"
        assert result.passed, shown


def audit_of_flat_clipping() -> None:
    """The one-run audit, of DP-GRAPE."""
    _audit_passes(AuditSettings(steps=1, canaries=16_000, tables=1))


def audit_of_per_layer_clipping() -> None:
    """The one-run audit, of a model with nine layers that are clipped one by one."""
    settings = AuditSettings(clipping="per_layer", steps=2, canaries=4000, tables=8)
    _audit_passes(settings, most=1)


CHECKS: tuple[Callable[[], None], ...] = (
    noise_has_its_size,
    empty_batch_has_noise,
    noise_is_fresh,
    noise_is_added_once,
    divisor_is_constant,
    one_example_adds_at_most_C,
    nan_adds_nothing,
    release_is_its_definition,
    tied_gradient_is_whole,
    options_are_one_example,
    a_user_is_clipped_once,
    draws_are_poisson,
    ledger_knows_first,
    claim_covers_the_releases,
    planted_weights_are_noticed,
    a_shared_coin_is_refused,
    a_median_in_the_loss_is_refused,
    a_forward_leaves_numpys_stream_alone,
)
AUDITS: tuple[Callable[[], None], ...] = (audit_of_flat_clipping, audit_of_per_layer_clipping)


# ---- Saboteurs ----


@dataclass(frozen=True)
class Saboteur:
    """A way to break the mechanism.

    Args:
        name: what is wrong then.
        apply: breaks it, until the patch is undone.
        audits: those that notice. The checks that do are found by running them.
    """

    name: str
    apply: Callable[[pytest.MonkeyPatch], None]
    audits: tuple[Callable[[], None], ...] = ()

    def __str__(self) -> str:
        return self.name


def _std_times(factor: float) -> Callable[[pytest.MonkeyPatch], None]:
    original = engine.add_noise_

    def add_noise_(values: Any, std: float, generator: Any, divisor: float = 1.0) -> None:
        original(values, factor * std, generator, divisor)

    return lambda patch: patch.setattr(engine, "add_noise_", add_noise_)


def _std_of_mean(patch: pytest.MonkeyPatch) -> None:
    original = engine.add_noise_

    def add_noise_(values: Any, std: float, generator: Any, divisor: float = 1.0) -> None:
        original(values, std / divisor, generator, divisor)

    patch.setattr(engine, "add_noise_", add_noise_)


def _quiet_when_empty(patch: pytest.MonkeyPatch) -> None:
    original = PrivateEngine.release

    def release(self: PrivateEngine) -> dict[str, Tensor]:
        sigma = self.noise_multiplier
        self.noise_multiplier = sigma if self._clipped_sum else 0.0
        result = original(self)
        self.noise_multiplier = sigma
        return result

    patch.setattr(PrivateEngine, "release", release)


def _undivided_bound(patch: pytest.MonkeyPatch) -> None:
    original = PrivateEngine._add

    def add(self: PrivateEngine, total: Any, gradients: Gradients, bound: float) -> None:
        original(self, total, gradients, self.max_grad_norm)

    patch.setattr(PrivateEngine, "_add", add)


def _drawn_divisor(patch: pytest.MonkeyPatch) -> None:
    counts: dict[int, int] = {}
    begin, accumulate, release = (
        getattr(PrivateEngine, name) for name in ("begin", "accumulate", "release")
    )

    def begins(self: PrivateEngine, given: Any) -> None:
        counts[id(self)] = 0
        begin(self, given)

    def accumulates(self: PrivateEngine, inputs: Any) -> Tensor:
        losses: Tensor = accumulate(self, inputs)
        counts[id(self)] += len(losses)
        return losses

    def releases(self: PrivateEngine) -> dict[str, Tensor]:
        expected = self.expected_batch_size
        self.expected_batch_size = max(1, counts.get(id(self), 0))
        result: dict[str, Tensor] = release(self)
        self.expected_batch_size = expected
        return result

    patch.setattr(PrivateEngine, "begin", begins)
    patch.setattr(PrivateEngine, "accumulate", accumulates)
    patch.setattr(PrivateEngine, "release", releases)


def _tied_once(patch: pytest.MonkeyPatch) -> None:
    def part(self: GradientSum, total: Tensor, factors: Tensor) -> None:
        self.parts[0].add_weighted_sum_(total, factors)

    patch.setattr(GradientSum, "add_weighted_sum_", part)


def _tied_norm_without_cross_terms(patch: pytest.MonkeyPatch) -> None:
    def squared_norm(self: GradientSum) -> Tensor:
        return torch.stack([part.squared_norm() for part in self.parts]).sum(0)

    patch.setattr(representations.GradientSum, "squared_norm", squared_norm)


def _options_one_by_one(patch: pytest.MonkeyPatch) -> None:
    def squared_norm(self: Factored) -> Tensor:
        return (self.rows.square().sum(2) * self.cols.square().sum(2)).sum(1)

    patch.setattr(Factored, "squared_norm", squared_norm)


def _noise_from_seed(patch: pytest.MonkeyPatch) -> None:
    def seeded(device: Any = "cpu", secure: bool = False) -> torch.Generator:
        return torch.Generator(device).manual_seed(42)  # the seed of the arguments

    patch.setattr(mixin, "noise_generator", seeded)


def _noise_again(patch: pytest.MonkeyPatch) -> None:
    original, state = engine.add_noise_, torch.Generator().get_state()

    def add_noise_(values: Any, std: float, generator: Any, divisor: float = 1.0) -> None:
        same = torch.Generator()
        same.set_state(state)
        original(values, std, same, divisor)

    patch.setattr(engine, "add_noise_", add_noise_)


def _epochs(patch: pytest.MonkeyPatch) -> None:
    waiting: list[int] = []

    def draw(self: PoissonBatchSampler) -> list[int]:
        size = round(self.sample_rate * self.num_samples)
        if len(waiting) < size:
            waiting[:] = torch.randperm(self.num_samples, generator=self.generator).tolist()
        drawn, waiting[:] = waiting[:size], waiting[size:]
        return sorted(drawn)

    patch.setattr(PoissonBatchSampler, "draw", draw)


def _without_replacement(patch: pytest.MonkeyPatch) -> None:
    def draw(self: PoissonBatchSampler) -> list[int]:
        order = torch.randperm(self.num_samples, generator=self.generator).tolist()
        return sorted(order[: round(self.sample_rate * self.num_samples)])

    patch.setattr(PoissonBatchSampler, "draw", draw)


def _same_draw(patch: pytest.MonkeyPatch) -> None:
    original = PoissonBatchSampler.draw

    def draw(self: PoissonBatchSampler) -> list[int]:
        first: list[int] = vars(self).setdefault("_first", original(self))
        return list(first)

    patch.setattr(PoissonBatchSampler, "draw", draw)


def _noise_before_clip(patch: pytest.MonkeyPatch) -> None:
    _std_times(0.0)(patch)
    original = engine.add_clipped_sum_

    def add_clipped_sum_(
        total: dict[str, Tensor], gradients: Gradients, bound: float, automatic: bool = False
    ) -> None:
        noisy: Gradients = {}
        for name, gradient in gradients.items():
            count = len(gradient.squared_norm())
            whole = torch.stack([gradient.weighted_sum(row) for row in torch.eye(count)])
            noisy[name] = Dense(whole + bound * torch.randn_like(whole))
        original(total, noisy, bound, automatic)

    patch.setattr(engine, "add_clipped_sum_", add_clipped_sum_)


def _unscaled_in_coordinates(patch: pytest.MonkeyPatch) -> None:
    original = PrivateEngine.release

    def release(self: PrivateEngine) -> dict[str, Tensor]:
        std, sigma = self.noise_std, self.noise_multiplier
        self.noise_multiplier = 0.0
        result = original(self)
        self.noise_multiplier = sigma
        for name, value in result.items():
            rank = self.projectors[name].rank if name in self.projectors else 1
            value += std / rank**0.5 * torch.randn(value.shape)
        return result

    patch.setattr(PrivateEngine, "release", release)


def _users_one_by_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(unit_engine, "_of_units", lambda gradients, sizes: gradients)


def _record_afterwards(patch: pytest.MonkeyPatch) -> None:
    original, record = PrivateEngine.release, Ledger.record

    def release(self: PrivateEngine) -> dict[str, Tensor]:
        with pytest.MonkeyPatch.context() as later:
            later.setattr(Ledger, "record", lambda self, steps=1: None)
            result = original(self)
        record(self.ledger)
        return result

    patch.setattr(PrivateEngine, "release", release)


def _record_every_second(patch: pytest.MonkeyPatch) -> None:
    original = Ledger.record

    def record(self: Ledger, steps: int = 1) -> None:
        asked = vars(self)["_asked"] = vars(self).get("_asked", 0) + 1
        if asked % 2:
            original(self, steps)

    patch.setattr(Ledger, "record", record)


def _adjacency_ignored(patch: pytest.MonkeyPatch) -> None:
    original = accounting.Releases.block

    def block(self: accounting.Releases) -> Any:
        return original(replace(self, adjacency="add_or_remove_one"))

    patch.setattr(accounting.Releases, "block", block)


def _nan_is_finite(patch: pytest.MonkeyPatch) -> None:
    def clip_factors(norms: Tensor, max_grad_norm: float, automatic: bool) -> Factors:
        return Factors((max_grad_norm / norms).nan_to_num(1.0).clamp(max=1.0), None)

    patch.setattr(engine, "clip_factors", clip_factors)


def _small_tensors_unmeasured(patch: pytest.MonkeyPatch) -> None:
    def squared_norm(self: Gathered) -> Tensor:
        large = [g.squared_norm().float() for g in self.large.values()]
        assert self.small is not None
        return torch.stack(large or [self.small.squared_norm() * 0]).sum(0)

    patch.setattr(Gathered, "squared_norm", squared_norm)


def _batch_is_clipped(patch: pytest.MonkeyPatch) -> None:
    def add_clipped_sum_(
        total: dict[str, Tensor], gradients: Gradients, bound: float, automatic: bool = False
    ) -> None:
        count = len(next(iter(gradients.values())).squared_norm())
        own: dict[str, Tensor] = {}
        add_weighted_sum_(own, Gathered.of(gradients), Factors(torch.ones(count), None))
        whole = math.sqrt(sum(value.square().sum().item() for value in own.values()))
        for name, value in own.items():
            value = value * min(1.0, bound / max(whole, 1e-12))
            total[name] = total[name] + value if name in total else value

    patch.setattr(engine, "add_clipped_sum_", add_clipped_sum_)


def _nothing_is_clipped(patch: pytest.MonkeyPatch) -> None:
    def clip_factors(norms: Tensor, max_grad_norm: float, automatic: bool) -> Factors:
        finite = norms.isfinite()
        return Factors(torch.ones(int(finite.sum())), None if finite.all() else finite)

    patch.setattr(engine, "clip_factors", clip_factors)


def _weights_known_by_name(patch: pytest.MonkeyPatch) -> None:
    trainers = ("optimizer.", "scheduler.", "training_args.")

    def may_be_weights(path: Path) -> bool:
        return is_weights(path.name) and not path.name.startswith(trainers)

    patch.setattr(file_checks, "may_be_weights", may_be_weights)


def _folders_unseen(patch: pytest.MonkeyPatch) -> None:
    original = file_checks.tree

    def tree(folder: Path) -> Tree:
        found = original(folder)
        return found._replace(files=[path for path in found.files if path.parent == folder])

    patch.setattr(file_checks, "tree", tree)


def _every_rank(rank: int) -> Callable[[pytest.MonkeyPatch], None]:
    pretends = SimpleNamespace(get_rank=lambda: rank)
    return lambda patch: patch.setattr(engine, "dist", pretends)


def _coins_unseen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(coins, "_TRIALS", 0)  # shared draws are found, and not tried


def _pairs_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(selfcheck, "refuse_coupled_batch", lambda *_, **__: None)


def _streams_unguarded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine, "guarding_streams", lambda _: contextlib.nullcontext())


SABOTEURS = (
    Saboteur("noise is halved", _std_times(0.5), (audit_of_flat_clipping,)),
    Saboteur("noise is of the mean's size, on the sum", _std_of_mean, AUDITS),
    Saboteur("noise is skipped on empty batches", _quiet_when_empty),
    Saboteur("noise is seeded from args.seed", _noise_from_seed),
    Saboteur("noise is the same in every step", _noise_again),
    Saboteur("noise is added before the clip", _noise_before_clip),
    Saboteur("noise in coordinates is divided by sqrt(r)", _unscaled_in_coordinates),
    Saboteur("noise is added by every process", _every_rank(0)),
    Saboteur("noise is added by no process", _every_rank(1)),
    Saboteur("the drawn size is the divisor", _drawn_divisor),
    Saboteur("nothing is clipped", _nothing_is_clipped, AUDITS),
    Saboteur("each layer is clipped to all of C", _undivided_bound, (audit_of_per_layer_clipping,)),
    Saboteur("the batch is clipped, not the example", _batch_is_clipped),
    Saboteur("small tensors do not count in the norm", _small_tensors_unmeasured),
    Saboteur("NaN passes the clip", _nan_is_finite),
    Saboteur("a tied gradient counts once", _tied_once),
    Saboteur("a tied norm has no cross terms", _tied_norm_without_cross_terms),
    Saboteur("options are measured one by one", _options_one_by_one),
    Saboteur("a user's examples are clipped one by one", _users_one_by_one),
    Saboteur("epochs are shuffled", _epochs),
    Saboteur("draws have a fixed size", _without_replacement),
    Saboteur("every step has the same draw", _same_draw),
    Saboteur("the ledger is written after the release", _record_afterwards),
    Saboteur("the ledger counts every second release", _record_every_second),
    Saboteur("replaced examples cost as added ones", _adjacency_ignored),
    Saboteur("a physical batch shares a coin", _coins_unseen),
    Saboteur("a loss has a median of the batch in it", _pairs_alone),
    Saboteur("a forward reseeds numpy's stream", _streams_unguarded),
    Saboteur("verify knows weights by their names", _weights_known_by_name),
    Saboteur("verify does not look into folders", _folders_unseen),
)


# ---- The table ----


def notices(detector: Callable[[], None], saboteur: Saboteur | None) -> bool:
    """Whether a detector raises ``AssertionError`` about the broken, or the sound, mechanism."""
    with torch.random.fork_rng(devices=[]), pytest.MonkeyPatch.context() as patch:
        torch.manual_seed(0)
        if saboteur is not None:
            saboteur.apply(patch)
        try:
            detector()
        except AssertionError:
            return True
        return False


def kill_table(
    detectors: Sequence[Callable[[], None]], rows: Sequence[tuple[str, Sequence[bool | None]]]
) -> str:
    """Returns the table as text: x where a detector noticed, a dot where not, blank if not run."""
    width = max(len(name) for name, _ in rows)
    marks = {True: "x", False: ".", None: " "}
    lines = [f"{i + 1:>3}  {d.__name__.replace('_', ' ')}" for i, d in enumerate(detectors)]
    head = " " * width + "".join(f"{i + 1:>4}" for i in range(len(detectors)))
    body = [
        f"{name:<{width}}" + "".join(f"{marks[noticed]:>4}" for noticed in found)
        for name, found in rows
    ]
    return "\n".join([*lines, "", head, *body]) + "\n"


def main() -> int:
    """Prints the whole table; returns 1 if a saboteur goes unnoticed or a sound run does not."""
    detectors = (*CHECKS, *AUDITS)
    rows: list[tuple[str, list[bool | None]]] = []
    for saboteur in (None, *SABOTEURS):
        found: list[bool | None] = [notices(detector, saboteur) for detector in detectors]
        rows.append((str(saboteur or "(none)"), found))
    sys.stdout.write(kill_table(detectors, rows))
    return int(any(rows[0][1]) or not all(any(found) for _, found in rows[1:]))


if __name__ == "__main__":
    sys.exit(main())
