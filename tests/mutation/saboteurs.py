"""Ways to break the mechanism, and the ordinary tests that meet each.

A saboteur replaces one thing in the real code. Tests are named by file, function and parameters,
the quickest that should notice; each must fail under its saboteur, by an assertion.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dp_grape_hf.accounting import Releases, calibration
from dp_grape_hf.arguments import DPGrapeArguments
from dp_grape_hf.gradients import Dense, Gradients, forms as representations, replay, units
from dp_grape_hf.gradients.checks import (
    draws,
    sketches,
    spot_checks,
    state,
    unused,
)
from dp_grape_hf.gradients.forms import Factored, GradientSum
from dp_grape_hf.ledger import Ledger
from dp_grape_hf.mechanism import (
    EmptyDrawDataset,
    LogicalBatch,
    LogicalBatchCollator,
    PoissonBatchSampler,
    PrivateMechanism,
    Turns,
    clipping,
    collation,
    release as engine,
    sampling,
)
from dp_grape_hf.mechanism.banded import BandedNoise, Groups
from dp_grape_hf.mechanism.clipping import Factors, add_weighted_sum_
from dp_grape_hf.optimizers import ProjectedOptimizer
from dp_grape_hf.publishing import file_checks, hub, model_files
from dp_grape_hf.publishing.model_files import is_weights
from dp_grape_hf.trainer import collators, inputs_by_form, mixin, overlap, remembered


@dataclass(frozen=True)
class Saboteur:
    """A way to break the mechanism.

    Args:
        name: what is wrong then.
        apply: breaks it, until the patch is undone.
        tests: those that notice, as pytest names them but for the folder.
    """

    name: str
    apply: Callable[[pytest.MonkeyPatch], None]
    tests: tuple[str, ...]

    def __str__(self) -> str:
        return self.name


def _std_times(factor: float) -> Callable[[pytest.MonkeyPatch], None]:
    original = engine.add_noise_

    def add_noise_(values: Any, std: float, *rest: Any) -> None:
        original(values, factor * std, *rest)

    return lambda patch: patch.setattr(engine, "add_noise_", add_noise_)


def _std_of_mean(patch: pytest.MonkeyPatch) -> None:
    original = engine.add_noise_

    def add_noise_(values: Any, std: float, generator: Any, divisor: float, *rest: Any) -> None:
        original(values, std / divisor, generator, divisor, *rest)

    patch.setattr(engine, "add_noise_", add_noise_)


def _quiet_when_empty(patch: pytest.MonkeyPatch) -> None:
    original = PrivateMechanism.release

    def release(self: PrivateMechanism) -> dict[str, Tensor]:
        sigma = self.noise_multiplier
        self.noise_multiplier = sigma if self._clipped_sum else 0.0
        result = original(self)
        self.noise_multiplier = sigma
        return result

    patch.setattr(PrivateMechanism, "release", release)


def _drawn_divisor(patch: pytest.MonkeyPatch) -> None:
    counts: dict[int, int] = {}
    begin, accumulate, release = (
        getattr(PrivateMechanism, name) for name in ("begin", "accumulate", "release")
    )

    def begins(self: PrivateMechanism, given: Any) -> None:
        counts[id(self)] = 0
        begin(self, given)

    def accumulates(self: PrivateMechanism, inputs: Any) -> Tensor:
        losses: Tensor = accumulate(self, inputs)
        counts[id(self)] += len(losses)
        return losses

    def releases(self: PrivateMechanism) -> dict[str, Tensor]:
        expected = self.expected_batch_size
        self.expected_batch_size = max(1, counts.get(id(self), 0))
        result: dict[str, Tensor] = release(self)
        self.expected_batch_size = expected
        return result

    patch.setattr(PrivateMechanism, "begin", begins)
    patch.setattr(PrivateMechanism, "accumulate", accumulates)
    patch.setattr(PrivateMechanism, "release", releases)


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

    def add_noise_(values: Any, std: float, generator: Any, *rest: Any) -> None:
        same = torch.Generator()
        same.set_state(state)
        original(values, std, same, *rest)

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
        total: dict[str, Tensor], gradients: Gradients, bound: float, *rest: Any
    ) -> None:
        noisy: Gradients = {}
        for name, gradient in gradients.items():
            count = len(gradient.squared_norm())
            whole = torch.stack([gradient.weighted_sum(row) for row in torch.eye(count)])
            noisy[name] = Dense(whole + bound * torch.randn_like(whole))
        original(total, noisy, bound, *rest)

    patch.setattr(engine, "add_clipped_sum_", add_clipped_sum_)


def _unscaled_in_coordinates(patch: pytest.MonkeyPatch) -> None:
    original = PrivateMechanism.release

    def release(self: PrivateMechanism) -> dict[str, Tensor]:
        std, sigma = self.independent_std, self.noise_multiplier
        self.noise_multiplier = 0.0
        result = original(self)
        self.noise_multiplier = sigma
        for name, value in result.items():
            rank = self.projectors[name].rank if name in self.projectors else 1
            value += std / rank**0.5 * torch.randn(value.shape)
        return result

    patch.setattr(PrivateMechanism, "release", release)


def _users_one_by_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(units, "_of_units", lambda gradients, sizes: gradients)


def _record_afterwards(patch: pytest.MonkeyPatch) -> None:
    original, record = PrivateMechanism.release, Ledger.record

    def release(self: PrivateMechanism) -> dict[str, Tensor]:
        with pytest.MonkeyPatch.context() as later:
            later.setattr(Ledger, "record", lambda self, steps=1: None)
            result = original(self)
        record(self.ledger)
        return result

    patch.setattr(PrivateMechanism, "release", release)


def _record_every_second(patch: pytest.MonkeyPatch) -> None:
    original = Ledger.record

    def record(self: Ledger, steps: int = 1) -> None:
        asked = vars(self)["_asked"] = vars(self).get("_asked", 0) + 1
        if asked % 2:
            original(self, steps)

    patch.setattr(Ledger, "record", record)


def _groups_by_index(patch: pytest.MonkeyPatch) -> None:
    def init(self: Groups, num_samples: int, bands: int, generator: Any) -> None:
        self.count = bands
        self._order = torch.cat([torch.arange(i, num_samples, bands) for i in range(bands)])
        sizes = [len(range(i, num_samples, bands)) for i in range(bands)]
        self._ends = torch.tensor(sizes).cumsum(0).tolist()

    patch.setattr(Groups, "__init__", init)


def _groups_anew(patch: pytest.MonkeyPatch) -> None:
    original = PoissonBatchSampler._draw_of_group

    def draw(self: PoissonBatchSampler, groups: Groups, number: int) -> list[int]:
        if number % groups.count == 0:
            vars(groups).update(vars(Groups(self.num_samples, groups.count, self.generator)))
        return original(self, groups, number)

    patch.setattr(PoissonBatchSampler, "_draw_of_group", draw)


def _turns_from_the_start(patch: pytest.MonkeyPatch) -> None:
    original = PoissonBatchSampler.draws

    def draws(self: PoissonBatchSampler) -> Any:
        real = self._turns
        turns = real()
        fresh = Turns(turns.bands)
        fresh._groups = turns.groups(self.num_samples, self.generator)
        self._turns = lambda: fresh
        yield from original(self)
        self._turns = real

    patch.setattr(PoissonBatchSampler, "draws", draws)


def _groups_of_a_loader(patch: pytest.MonkeyPatch) -> None:
    original = PoissonBatchSampler.__init__

    def init(self: PoissonBatchSampler, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        shared, made = self._turns, []

        def own() -> Turns:
            made.append(made[0] if made else Turns(shared().bands))
            made[0].releases = shared().releases
            return made[0]

        self._turns = own

    patch.setattr(PoissonBatchSampler, "__init__", init)


def _states_uncompared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(state.StateGuard, "compare", lambda *_: None)


def _states_compared_once(patch: pytest.MonkeyPatch) -> None:
    for module in (engine, sampling):
        patch.setattr(module, "StateGuard", _Blind)


class _Blind(state.StateGuard):
    """Compares nothing."""

    def compare(self, before: Any) -> None:
        return None


def _seeded_once(patch: pytest.MonkeyPatch) -> None:
    original, done = mixin.forget_the_seed, []

    def forget() -> None:
        if not done:
            original()
        done.append(True)

    patch.setattr(mixin, "forget_the_seed", forget)


def _bands_at_rate_q(patch: pytest.MonkeyPatch) -> None:
    original = Releases.block

    def block(self: Releases) -> Any:
        return original(replace(self, bands=1))

    patch.setattr(Releases, "block", block)


def _long_columns(patch: pytest.MonkeyPatch) -> None:
    init = BandedNoise.__init__

    def longer(self: BandedNoise, coefficients: Any) -> None:
        init(self, [1.1 * c for c in coefficients])

    patch.setattr(BandedNoise, "__init__", longer)


def _noise_outlives(patch: pytest.MonkeyPatch) -> None:
    init, last = BandedNoise.__init__, []

    def remembers(self: BandedNoise, coefficients: Any) -> None:
        init(self, coefficients)
        self._ring = last[-1]._ring if last else None
        last.append(self)

    patch.setattr(BandedNoise, "__init__", remembers)


def _noise_is_saved(patch: pytest.MonkeyPatch) -> None:
    original = ProjectedOptimizer.state_dict
    made: list[BandedNoise] = []
    add = BandedNoise.add_

    def adds(self: BandedNoise, *given: Any) -> None:
        made.append(self)
        add(self, *given)

    def state_dict(self: ProjectedOptimizer) -> Any:
        return original(self) | {"noise": made[-1].buffers if made else []}

    patch.setattr(BandedNoise, "add_", adds)
    patch.setattr(ProjectedOptimizer, "state_dict", state_dict)


def _adjacency_ignored(patch: pytest.MonkeyPatch) -> None:
    original = calibration.Releases.block

    def block(self: calibration.Releases) -> Any:
        return original(replace(self, adjacency="add_or_remove_one"))

    patch.setattr(calibration.Releases, "block", block)


def _nan_is_finite(patch: pytest.MonkeyPatch) -> None:
    def clip_factors(norms: Tensor, max_grad_norm: float, automatic: bool) -> Factors:
        return Factors((max_grad_norm / norms).nan_to_num(1.0).clamp(max=1.0), None)

    patch.setattr(clipping, "clip_factors", clip_factors)


def _lost_rows_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Factors, "select", lambda self, gradient: (gradient, self.values))


def _large_matrices_unmeasured(patch: pytest.MonkeyPatch) -> None:
    original = clipping.norms_of

    def norms_of(gradients: Any, factors: Any) -> Tensor:
        return original({n: g for n, g in gradients.items() if len(g.shape) == 1}, factors)

    patch.setattr(clipping, "norms_of", norms_of)


def _factors_unmeasured(patch: pytest.MonkeyPatch) -> None:
    original = clipping.norms_of
    patch.setattr(clipping, "norms_of", lambda gradients, factors: original(gradients))


def _factors_after_the_noise_alone(patch: pytest.MonkeyPatch) -> None:
    original = PrivateMechanism.release

    def release(self: PrivateMechanism) -> dict[str, Tensor]:
        for name, factor in self.gradient_factors.items():
            if name in (total := self._clipped_sum or {}):
                total[name] /= factor  # what the release would multiply again
        return original(self)

    patch.setattr(PrivateMechanism, "release", release)


def _batch_is_clipped(patch: pytest.MonkeyPatch) -> None:
    def add_clipped_sum_(
        total: dict[str, Tensor], gradients: Gradients, bound: float, *rest: Any
    ) -> None:
        count = len(next(iter(gradients.values())).squared_norm())
        own: dict[str, Tensor] = {}
        add_weighted_sum_(own, gradients, Factors(torch.ones(count), None))
        whole = math.sqrt(sum(value.square().sum().item() for value in own.values()))
        for name, value in own.items():
            value = value * min(1.0, bound / max(whole, 1e-12))
            total[name] = total[name] + value if name in total else value

    patch.setattr(engine, "add_clipped_sum_", add_clipped_sum_)


def _nothing_is_clipped(patch: pytest.MonkeyPatch) -> None:
    def clip_factors(norms: Tensor, max_grad_norm: float, automatic: bool) -> Factors:
        finite = norms.isfinite()
        return Factors(torch.ones(int(finite.sum())), None if finite.all() else finite)

    patch.setattr(clipping, "clip_factors", clip_factors)


def _each_part_has_all_of_c(patch: pytest.MonkeyPatch) -> None:
    original = engine.add_clipped_sum_

    def add_clipped_sum_(
        total: dict[str, Tensor], gradients: Gradients, bound: float, *rest: Any
    ) -> None:
        *others, apart = rest
        for part in clipping.in_parts(gradients, apart).values():
            original(total, part, bound, *others)

    patch.setattr(engine, "add_clipped_sum_", add_clipped_sum_)


def _weights_of_an_optimizer_unseen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        file_checks,
        "is_weights",
        lambda name: is_weights(name) and not Path(name).name.startswith("optimizer."),
    )


def _folders_unseen(patch: pytest.MonkeyPatch) -> None:
    def files_in(folder: Path) -> tuple[dict[str, Path], list[str]]:
        found, others = model_files.files_in(folder)
        return {name: found[name] for name in found if "/" not in name}, others

    patch.setattr(file_checks, "files_in", files_in)


def _configs_unread(patch: pytest.MonkeyPatch) -> None:
    original = file_checks._of_the_digests

    def of_weights(saved: Any, *digests: Mapping[str, str]) -> Iterator[file_checks.Check]:
        return original(saved, *({n: d[n] for n in d if is_weights(n)} for d in digests))

    patch.setattr(file_checks, "_of_the_digests", of_weights)


def _every_rank(rank: int) -> Callable[[pytest.MonkeyPatch], None]:
    pretends = SimpleNamespace(get_rank=lambda: rank)
    return lambda patch: patch.setattr(engine, "dist", pretends)


def _together(collate: LogicalBatchCollator, examples: list[Any]) -> LogicalBatch:
    """Collates a physical batch as a whole."""
    split = collate._chunks([*range(len(examples))])
    batches = [collate.collate_rows.collator([examples[i] for i in some]) for some in split]
    return LogicalBatch(batches, [len(some) for some in split])


def _stretched_to_the_longest(patch: pytest.MonkeyPatch) -> None:
    original = LogicalBatchCollator.__call__

    def collate(self: LogicalBatchCollator, examples: list[Any]) -> LogicalBatch:
        lengths = [n for x in examples for n in collation._lengths(x).values()]
        with pytest.MonkeyPatch.context() as meanwhile:
            meanwhile.setattr(collation.Grid, "__call__", lambda *_: max(lengths))
            return original(self, examples)

    patch.setattr(LogicalBatchCollator, "__call__", collate)


def _columns_of_the_first(patch: pytest.MonkeyPatch) -> None:
    def stacked(rows: list[Any], pack: Any) -> Any:
        for some in pack([*range(len(rows))]):
            names = set.intersection(*(set(rows[i]) for i in some))
            batch = {name: torch.cat([rows[i][name] for i in some]) for name in names}
            yield collation.Stack(batch, some)

    patch.setattr(sampling, "stacked", stacked)


def _one_stream(patch: pytest.MonkeyPatch) -> None:
    def with_separate_seeds(function: Any, items: Any, seeds: Any = None) -> list[Any]:
        return [function(item) for item in items]

    for module in (collation, sampling):
        patch.setattr(module, "with_separate_seeds", with_separate_seeds)


def _fetched_at_once(patch: pytest.MonkeyPatch) -> None:
    def fetch(self: EmptyDrawDataset, indices: list[int]) -> list[Any]:
        many = getattr(self.dataset, "__getitems__", None)
        return many(indices) if many else [self.dataset[i] for i in indices]

    patch.setattr(EmptyDrawDataset, "__getitems__", fetch)


def _never(patch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    patch.setattr(module, name, lambda *_, **__: None)


def _two_rows_tried(patch: pytest.MonkeyPatch) -> None:
    original = replay.examine

    def examine(per_sample: Any, inputs: Any, projectors: Any) -> bool:
        return original(per_sample, {n: v[:2] for n, v in inputs.items()}, projectors)

    patch.setattr(replay, "examine", examine)
    _lengths_of_the_data_tried(patch)


def _lengths_of_the_data_tried(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(replay, "_of_other_lengths", lambda _, rows: rows)


def _signs_alone(patch: pytest.MonkeyPatch) -> None:
    original = sketches._vectors
    patch.setattr(sketches, "_vectors", lambda *where: original(*where)[:1].sign())


def _frozen_by_the_first_example(patch: pytest.MonkeyPatch) -> None:
    def public_inputs(self: Any) -> Any:
        return lambda: iter([self.data_collator([dict(self.train_dataset[0])])])

    patch.setattr(mixin.DPGrapeMixin, "_public_inputs", public_inputs)
    patch.setattr(unused, "_may_reach", lambda _: False)


def _signs_unseen(patch: pytest.MonkeyPatch) -> None:
    original = sketches.Sketches.of

    def of(self: sketches.Sketches, names: Any) -> Tensor:
        found: Tensor = original(self, names)
        return found[..., :1].expand_as(found)

    patch.setattr(sketches.Sketches, "of", of)


def _measured_on_the_training_data(patch: pytest.MonkeyPatch) -> None:
    def public_inputs(self: Any) -> Any:
        size = self.args.per_device_train_batch_size
        return mixin.public_batches(self.train_dataset, self.data_collator, size, self.label_names)

    patch.setattr(mixin.DPGrapeMixin, "_public_inputs", public_inputs)


def _kept_whatever_it_was_measured_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(remembered, "SyntheticInputs", object)


def _kept_of_trained_weights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(remembered, "was_trained", lambda model: False)


def _options_stay_open(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DPGrapeArguments, "__setattr__", object.__setattr__)


def _form_unwatched(dataset: Any, collator: Any, example: Any) -> dict[str, inputs_by_form.Form]:
    return inputs_by_form.form_of(None, collator, example)


def _streams_unguarded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine, "guarding_streams", lambda _: contextlib.nullcontext())


def _neighbours(case: str) -> str:
    size, _, name = case.partition("-")
    return f"test_neighbours.py::test_one_example_more_moves_the_sum_by_its_bound[{name}-{size}]"


REMEMBERS = "test_what_remembers_or_mixes_later_is_stopped_before_that_release"

SABOTEURS = (
    Saboteur(
        "noise is halved",
        _std_times(0.5),
        (
            "test_release.py::test_the_release_equals_its_definition[opt-unprojected]",
            "test_release.py::test_the_noise_has_its_std_in_every_single_coordinate",
        ),
    ),
    Saboteur(
        "noise is of the mean's size, on the sum",
        _std_of_mean,
        (
            "test_release.py::test_the_release_equals_its_definition[opt-unprojected]",
            "test_release.py::test_the_noise_has_its_std_in_every_single_coordinate",
        ),
    ),
    Saboteur(
        "noise is skipped on empty batches",
        _quiet_when_empty,
        ("test_release.py::test_an_empty_logical_batch_releases_noise_and_is_recorded",),
    ),
    Saboteur(
        "noise is seeded from args.seed",
        _noise_from_seed,
        ("test_privacy.py::test_the_arguments_seed_changes_neither_sampling_nor_noise",),
    ),
    Saboteur(
        "options can be changed during a run",
        _options_stay_open,
        ("test_privacy.py::test_a_callback_that_changes_an_option_ends_the_run",),
    ),
    Saboteur(
        "noise is the same in every step",
        _noise_again,
        ("test_release.py::test_no_two_releases_and_no_two_tensors_share_noise",),
    ),
    Saboteur(
        "noise is added before the clip",
        _noise_before_clip,
        ("test_release.py::test_the_release_equals_its_definition[opt-unprojected]",),
    ),
    Saboteur(
        "noise in coordinates is divided by sqrt(r)",
        _unscaled_in_coordinates,
        ("test_release.py::test_the_release_equals_its_definition[opt-projected]",),
    ),
    Saboteur(
        "noise is added by every process",
        _every_rank(0),
        ("test_release.py::test_the_first_of_two_processes_alone_adds_noise[1]",),
    ),
    Saboteur(
        "noise is added by no process",
        _every_rank(1),
        ("test_release.py::test_the_first_of_two_processes_alone_adds_noise[0]",),
    ),
    Saboteur(
        "the drawn size is the divisor",
        _drawn_divisor,
        ("test_release.py::test_the_release_equals_its_definition[opt-unprojected]",),
    ),
    Saboteur(
        "nothing is clipped",
        _nothing_is_clipped,
        (
            "test_release.py::test_the_release_equals_its_definition[opt-unprojected]",
            "test_audit.py::test_each_included_canary_is_seen_with_length_C[dp_sgd-flat-plain]",
        ),
    ),
    Saboteur(
        "a module that is clipped apart and the rest have all of C each",
        _each_part_has_all_of_c,
        ("test_release.py::test_per_group_clipping_gives_both_groups_half_of_c_squared[flat]",),
    ),
    Saboteur(
        "the batch is clipped, not the example",
        _batch_is_clipped,
        ("test_release.py::test_the_release_equals_its_definition[opt-unprojected]",),
    ),
    Saboteur(
        "what is not in the vector does not count in the norm",
        _large_matrices_unmeasured,
        (
            "test_release.py"
            "::test_a_finite_gradient_contributes_at_most_c_over_all_parameters[factored]",
        ),
    ),
    Saboteur(
        "gradient factors do not count in the norm",
        _factors_unmeasured,
        (
            "test_gradient_factors.py::test_the_release_equals_its_definition[projected-flat-stack]",
            "test_gradient_factors.py::test_one_more_sample_moves_the_sum_before_noise_within_c[all-flat]",
            "test_audit.py::test_each_included_canary_is_seen_with_length_C[dp_sgd-flat-factors]",
            "test_audit.py::test_each_included_canary_is_seen_with_length_C[principal-flat-factors]",
        ),
    ),
    Saboteur(
        "gradient factors do not meet the noise",
        _factors_after_the_noise_alone,
        (
            "test_gradient_factors.py::test_the_release_equals_its_definition[projected-flat-stack]",
            "test_gradient_factors.py::test_one_more_sample_moves_the_sum_before_noise_within_c[small-flat]",
            "test_audit.py::test_each_included_canary_is_seen_with_length_C[principal-flat-factors]",
        ),
    ),
    Saboteur(
        "NaN passes the clip",
        _nan_is_finite,
        ("test_release.py::test_a_bad_image_contributes_nothing_wherever_it_stands[nan-0]",),
    ),
    Saboteur(
        "rows that are not finite are multiplied by zero",
        _lost_rows_stay,
        (
            "test_grad_sample_modes.py"
            "::test_a_sample_that_is_not_finite_contributes_exactly_zero[True-auto]",
        ),
    ),
    Saboteur(
        "a tied gradient counts once",
        _tied_once,
        ("test_layerwise.py::test_uses_of_one_weight_in_different_forms_add_up[5]",),
    ),
    Saboteur(
        "a tied norm has no cross terms",
        _tied_norm_without_cross_terms,
        (
            "test_forms.py::test_norm_and_sum_equal_the_dense_gradients_in_float32"
            "[torch.float32-dense + factored]",
        ),
    ),
    Saboteur(
        "options are measured one by one",
        _options_one_by_one,
        (
            "test_forms.py::test_norm_and_sum_equal_the_dense_gradients_in_float32[torch.float32-factored]",
        ),
    ),
    Saboteur(
        "a user's examples are clipped one by one",
        _users_one_by_one,
        ("test_units.py::test_a_user_moves_the_sum_within_one_examples_bound[flat]",),
    ),
    Saboteur("epochs are shuffled", _epochs, ("test_sampling.py::test_batch_sizes_are_binomial",)),
    Saboteur(
        "draws have a fixed size",
        _without_replacement,
        ("test_sampling.py::test_batch_sizes_are_binomial",),
    ),
    Saboteur(
        "every step has the same draw",
        _same_draw,
        ("test_sampling.py::test_each_example_is_drawn_with_probability_q[0.3]",),
    ),
    Saboteur(
        "groups are by index",
        _groups_by_index,
        ("test_turns.py::test_groups_are_coins_of_each",),
    ),
    Saboteur(
        "groups are formed anew in each round",
        _groups_anew,
        ("test_turns.py::test_an_example_takes_part_at_most_once_in_b_steps[5]",),
    ),
    Saboteur(
        "turns do not know what was released",
        _turns_from_the_start,
        ("test_turns.py::test_an_interrupted_epoch_continues_with_the_next_releases_turn",),
    ),
    Saboteur(
        "bands are accounted at rate q",
        _bands_at_rate_q,
        (
            "test_bands.py::test_epsilon_equals_a_bth_of_the_steps_at_b_q[4-200]",
            "test_bands.py::test_epsilon_is_not_below_that_of_its_own_composition",
        ),
    ),
    Saboteur(
        "columns are longer than 1",
        _long_columns,
        (
            "test_turns.py::test_a_release_has_the_noise_that_is_predicted",
            "test_turns.py::test_noise_is_the_inverse_matrix_times_independent_noise",
        ),
    ),
    Saboteur(
        "noise goes on after resuming",
        _noise_outlives,
        ("test_banded.py::test_a_resumed_run_has_no_memory_of_noise",),
    ),
    Saboteur(
        "a checkpoint holds earlier noise",
        _noise_is_saved,
        ("test_banded.py::test_a_checkpoint_holds_no_noise",),
    ),
    Saboteur(
        "the ledger is written after the release",
        _record_afterwards,
        ("test_release.py::test_the_ledger_is_on_disk_before_the_noise_is_drawn",),
    ),
    Saboteur(
        "the ledger counts every second release",
        _record_every_second,
        ("test_release.py::test_one_logical_batch_is_one_release_in_the_ledger[[4]]",),
    ),
    Saboteur(
        "replaced examples cost as added ones",
        _adjacency_ignored,
        (
            "test_replace_one.py::test_epsilon_bounds_the_exact_divergence[1-rdp]",
            "test_replace_one.py::test_full_batches_have_twice_the_sensitivity[rdp]",
        ),
    ),
    Saboteur(
        "a physical batch is collated as a whole",
        lambda patch: patch.setattr(LogicalBatchCollator, "__call__", _together),
        (
            _neighbours("16-padding on the left, positions counted from there"),
            _neighbours("16-padding that nothing masks"),
            _neighbours("16-rows stretched to the longest"),
            _neighbours("16-a column that is None"),
            "test_collation.py::test_a_collators_random_draw_is_made_for_each_example",
        ),
    ),
    Saboteur(
        "a row is as long as the longest of its draw",
        _stretched_to_the_longest,
        (_neighbours("4-padding that nothing masks"), _neighbours("16-labels of tokens, padded")),
    ),
    Saboteur(
        "a physical batch has the columns of all its rows",
        _columns_of_the_first,
        (_neighbours("16-a column that is None"),),
    ),
    Saboteur(
        "examples are collated under one stream",
        _one_stream,
        ("test_collation.py::test_coins_of_one_example_are_nothing_to_the_next",),
    ),
    Saboteur(
        "examples are fetched all at once",
        _fetched_at_once,
        (
            _neighbours("16-a data set that pads"),
            "test_collation.py::test_a_data_set_is_read_one_example_at_a_time",
        ),
    ),
    Saboteur(
        "a collator that mixes is not tried",
        lambda patch: _never(patch, collators, "refuse_other_rows"),
        (_neighbours("4-mixed by the collator"),),
    ),
    Saboteur(
        "two rows are tried, in their order",
        _two_rows_tried,
        (_neighbours("16-sorted by length"),),
    ),
    Saboteur(
        "rows are tried at their own lengths",
        _lengths_of_the_data_tried,
        (_neighbours("16-sorted by length"),),
    ),
    Saboteur(
        "a run is not watched",
        lambda patch: _never(patch, spot_checks.SpotCheckedEngine, "_chosen"),
        (f"test_neighbours.py::{REMEMBERS}[mixes]",),
    ),
    Saboteur(
        "states are not compared",
        _states_uncompared,
        (
            f"test_neighbours.py::{REMEMBERS}[bank]",
            "test_memory.py::test_a_collator_that_remembers_releases_nothing[Noising-0]",
            "test_memory.py::test_a_data_set_that_remembers_releases_nothing[None]",
            "test_memory.py::test_a_model_that_its_first_batch_initialises_is_refused",
            "test_memory.py::test_a_loss_that_remembers_is_refused[where0]",
        ),
    ),
    Saboteur(
        "states are compared before the first step alone",
        _states_compared_once,
        (
            "test_memory.py::test_a_model_that_remembers_in_an_attribute_is_stopped[False]",
            "test_memory.py::test_a_collator_that_remembers_one_example_is_stopped_by_it[0]",
        ),
    ),
    Saboteur(
        "global streams are secret at the start alone",
        _seeded_once,
        ("test_memory.py::test_masks_are_secret_whatever_a_callback_seeds",),
    ),
    Saboteur(
        "coins of an example follow from the global stream",
        lambda patch: patch.setattr(
            collation.with_separate_seeds, "__defaults__", (collation.repeatable_seeds,)
        ),
        ("test_collation.py::test_coins_are_fresh_whatever_seed_is_set",),
    ),
    Saboteur(
        "a model does not say that it was trained",
        lambda patch: patch.setattr(mixin, "note_provenance", lambda *_: None),
        ("test_memory.py::test_a_note_is_there_from_the_first_step_on",),
    ),
    Saboteur(
        "groups belong to a loader",
        _groups_of_a_loader,
        ("test_banded.py::test_a_new_loader_has_the_groups_of_the_run",),
    ),
    Saboteur(
        "batches may come in any order",
        lambda patch: patch.setattr(Turns, "require_next", lambda *_: None),
        ("test_banded.py::test_a_batch_out_of_order_is_refused[twice]",),
    ),
    Saboteur(
        "what is frozen depends on the first example",
        _frozen_by_the_first_example,
        (
            "test_frozen.py::"
            "test_trained_parameters_do_not_depend_on_optional_inputs_of_examples[None-1]",
        ),
    ),
    Saboteur(
        "rows that two data sets share are not found",
        lambda patch: patch.setattr(overlap.TrainingRows, "shared_with", lambda *_, **__: ()),
        (
            "test_principal_runs.py::test_rows_of_the_training_data_are_not_public",
            "test_held_out.py::test_copies_in_any_form_are_told[shuffled]",
            "test_held_out.py::test_metrics_of_training_rows_are_refused[evaluate-list]",
        ),
    ),
    Saboteur(
        "the names of metrics are logged at any time",
        lambda patch: patch.setattr(mixin.DPGrapeMixin, "_prefixes", ("eval",)),
        ("test_logs.py::test_unknown_keys_are_dropped_from_logs_with_one_warning",),
    ),
    Saboteur(
        "losses in 16 bits may differ by anything",
        lambda patch: patch.setattr(
            engine.PerSampleEngine, "rounding_of_losses", lambda *_: float("inf")
        ),
        ("test_replay.py::test_coupling_shows_in_16_bits",),
    ),
    Saboteur(
        "nobody's random numbers are changed",
        lambda patch: patch.setattr(replay, "_CHANGES", ()),
        (
            "test_replayed_draws.py::test_a_coin_that_a_batch_shares_is_refused[layer drop-]",
            "test_replayed_draws.py::test_coins_that_others_use_are_refused[of any, rarely-]",
            "test_replayed_draws.py::test_a_small_influence_of_others_shows",
        ),
    ),
    Saboteur(
        "random numbers are not set to their bounds",
        lambda patch: _never(patch, draws, "_bounds"),
        (
            "test_replayed_draws.py::test_coins_that_others_use_are_refused[of any, rarely-]",
            "test_replayed_draws.py::test_coins_that_others_use_are_refused[of all, mostly-]",
            "test_replayed_draws.py::"
            "test_a_shared_coin_that_falls_rarely_is_refused[a small number]",
        ),
    ),
    Saboteur(
        "what a batch shares may decide something rarely",
        lambda patch: patch.setattr(replay, "SHARED", draws._EACH | {"randperm"}),
        tuple(
            f"test_replayed_draws.py::test_a_shared_coin_that_falls_rarely_is_refused[{name}]"
            for name in ("a number", "a size", "an order")
        ),
    ),
    Saboteur(
        "rows are tried in one order",
        lambda patch: _never(patch, replay._Examination, "_compare_reordered"),
        (
            "test_spot_checks.py::"
            "test_a_model_that_depends_on_row_positions_is_refused[one of many]",
        ),
    ),
    Saboteur(
        "gradients are not compared with those of rows alone",
        lambda patch: patch.setattr(replay._Examination, "_wrong", lambda *_: ""),
        (
            "test_replay.py::test_a_function_that_is_wrong_by_a_tenth_is_found[True]",
            "test_replay.py::test_a_rule_that_drops_a_term_is_found",
        ),
    ),
    Saboteur(
        "losses are not compared with those of rows alone",
        lambda patch: patch.setattr(replay._Examination, "_other_losses", lambda *_: False),
        ("test_replay.py::test_losses_that_depend_on_batch_mates_are_found",),
    ),
    Saboteur(
        "gradients are marked by signs alone",
        _signs_alone,
        (
            "test_replayed_draws.py::test_a_two_class_gradient_differs_from_its_negative_in_sketches[score]",
        ),
    ),
    Saboteur(
        "gradients show by their norms",
        _signs_unseen,
        ("test_replayed_draws.py::test_coins_that_others_use_are_refused[the mean, going back-]",),
    ),
    Saboteur(
        "rows are tried behind a head of zeros",
        lambda patch: patch.setattr(replay, "without_zeros", lambda _: contextlib.nullcontext()),
        (
            "test_replayed_draws.py::"
            "test_coins_that_others_use_are_refused[the mean, going back-zero head]",
        ),
    ),
    Saboteur(
        "a permutation of the batch is each one's own",
        lambda patch: patch.setattr(draws, "_EACH", draws._EACH | {"randperm"}),
        (
            "test_replayed_draws.py::"
            "test_coins_that_others_use_are_refused[parts of a permutation-]",
        ),
    ),
    Saboteur(
        "a generator of one's own is not seen",
        lambda patch: patch.setattr(draws, "is_public", lambda _: True),
        (
            "test_replayed_draws.py::test_a_model_with_its_own_generator_is_always_refused[layerwise]",
        ),
    ),
    Saboteur(
        "a loss has a median of the batch in it",
        _two_rows_tried,
        ("test_coupling.py::test_a_loss_that_ranks_the_batch_is_refused[4-mined]",),
    ),
    Saboteur(
        "a forward reseeds numpy's stream",
        _streams_unguarded,
        ("test_replayed_draws.py::test_bigbirds_seeds_do_not_reach_the_streams_of_collators",),
    ),
    Saboteur(
        "principal directions are of the training data",
        _measured_on_the_training_data,
        (
            "test_principal_runs.py::test_p_does_not_depend_on_the_training_data",
            "test_principal_runs.py::test_p_depends_only_on_initial_weights_and_synthetic_inputs",
        ),
    ),
    Saboteur(
        "results are kept for later runs whatever they were measured on",
        _kept_whatever_it_was_measured_on,
        (
            "test_remembered.py::test_what_was_measured_on_a_public_dataset_is_not_kept",
            "test_remembered.py::test_what_was_measured_on_other_inputs_is_not_kept",
        ),
    ),
    Saboteur(
        "results are kept of weights that were trained",
        _kept_of_trained_weights,
        ("test_remembered.py::test_of_weights_that_were_trained_nothing_is_kept",),
    ),
    Saboteur(
        "verify takes all that is called optimizer for a trainer's",
        _weights_of_an_optimizer_unseen,
        ("test_verification.py::test_planted_weights_are_found[as an optimizer]",),
    ),
    Saboteur(
        "verify does not look into folders",
        _folders_unseen,
        ("test_verification.py::test_planted_weights_are_found[in a folder]",),
    ),
    Saboteur(
        "verify compares weights alone",
        _configs_unread,
        (
            "test_verification.py::"
            "test_an_adapter_that_counts_otherwise_or_elsewhere_is_found[{'lora_alpha': 64}]",
            "test_verification.py::"
            "test_a_file_beside_the_weights_that_was_changed_is_found[config.json]",
        ),
    ),
    Saboteur(
        "synthetic inputs are as long as the first example",
        lambda patch: patch.setattr(inputs_by_form, "LENGTHS", ()),
        ("test_own_models.py::test_of_examples_neither_values_nor_lengths_reach_what_is_measured",),
    ),
    Saboteur(
        "reading the first example is not watched",
        lambda patch: patch.setattr(mixin, "form_of", _form_unwatched),
        ("test_own_models.py::test_data_that_remember_the_first_example_are_refused",),
    ),
    Saboteur(
        "a folder that changed after the model was saved is sent",
        lambda patch: patch.setattr(hub, "_require_as_saved", lambda folder: None),
        ("test_hub.py::test_a_folder_changed_after_saving_is_not_sent",),
    ),
)
