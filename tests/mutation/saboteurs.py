"""Ways to break the mechanism, and the ordinary tests that meet each.

A saboteur replaces one thing in the real code. ``saboteurs.yaml`` names the tests that should
notice; each must fail under its saboteur, by an assertion.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from dp_grape_hf.accounting import Releases
from dp_grape_hf.arguments import DPGrapeArguments
from dp_grape_hf.gradients import replay, units
from dp_grape_hf.gradients.checks import spot_checks, state, unused
from dp_grape_hf.ledger import Ledger
from dp_grape_hf.mechanism import (
    LogicalBatch,
    LogicalBatchCollator,
    PoissonBatchSampler,
    PrivateMechanism,
    clipping,
    collation,
    release as engine,
    sampling,
)
from dp_grape_hf.mechanism.banded import BandedNoise, Groups
from dp_grape_hf.mechanism.clipping import Factors, add_weighted_sum_
from dp_grape_hf.optimizers import ProjectedOptimizer
from dp_grape_hf.publishing import model_files, publisher, verification
from dp_grape_hf.publishing.model_files import is_weights
from dp_grape_hf.trainer import collators, mixin, overlap

Apply = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Saboteur:
    """A way to break the mechanism.

    Args:
        name: what is wrong then.
        apply: breaks it, until the patch is undone.
        tests: those that notice, as pytest names them but for the folder.
    """

    name: str
    apply: Apply
    tests: tuple[str, ...]

    def __str__(self):
        return self.name


def _with(owner, name, value):
    return lambda patch: patch.setattr(owner, name, value)


def _never(owner, name):
    return _with(owner, name, lambda *_, **__: None)


def _std_times(factor):
    original = engine.add_noise_

    def add_noise_(values, std, *rest):
        original(values, factor * std, *rest)

    return lambda patch: patch.setattr(engine, "add_noise_", add_noise_)


def _quiet_when_empty(patch):
    original = PrivateMechanism.release

    def release(self):
        sigma = self.noise_multiplier
        self.noise_multiplier = sigma if self._clipped_sum else 0.0
        result = original(self)
        self.noise_multiplier = sigma
        return result

    patch.setattr(PrivateMechanism, "release", release)


def _drawn_divisor(patch):
    counts = {}
    begin, accumulate, release = (
        getattr(PrivateMechanism, name) for name in ("begin", "accumulate", "release")
    )

    def begins(self, given):
        counts[id(self)] = 0
        begin(self, given)

    def accumulates(self, inputs):
        losses = accumulate(self, inputs)
        counts[id(self)] += len(losses)
        return losses

    def releases(self):
        expected = self.expected_batch_size
        self.expected_batch_size = max(1, counts.get(id(self), 0))
        result = release(self)
        self.expected_batch_size = expected
        return result

    patch.setattr(PrivateMechanism, "begin", begins)
    patch.setattr(PrivateMechanism, "accumulate", accumulates)
    patch.setattr(PrivateMechanism, "release", releases)


def _noise_from_seed(patch):
    def seeded(device="cpu", secure=False):
        return torch.Generator(device).manual_seed(42)  # the seed of the arguments

    patch.setattr(mixin, "noise_generator", seeded)


def _noise_again(patch):
    original, state = engine.add_noise_, torch.Generator().get_state()

    def add_noise_(values, std, generator, *rest):
        same = torch.Generator()
        same.set_state(state)
        original(values, std, same, *rest)

    patch.setattr(engine, "add_noise_", add_noise_)


def _without_replacement(patch):
    def draw(self):
        order = torch.randperm(self.num_samples, generator=self.generator).tolist()
        return sorted(order[: round(self.sample_rate * self.num_samples)])

    patch.setattr(PoissonBatchSampler, "draw", draw)


def _same_draw(patch):
    original = PoissonBatchSampler.draw

    def draw(self):
        first = vars(self).setdefault("_first", original(self))
        return list(first)

    patch.setattr(PoissonBatchSampler, "draw", draw)


def _unscaled_in_coordinates(patch):
    original = PrivateMechanism.release

    def release(self):
        std, sigma = self.independent_std, self.noise_multiplier
        self.noise_multiplier = 0.0
        result = original(self)
        self.noise_multiplier = sigma
        for name, value in result.items():
            rank = self.projectors[name].rank if name in self.projectors else 1
            value += std / rank**0.5 * torch.randn(value.shape)
        return result

    patch.setattr(PrivateMechanism, "release", release)


def _record_afterwards(patch):
    original, record = PrivateMechanism.release, Ledger.record

    def release(self):
        with pytest.MonkeyPatch.context() as later:
            later.setattr(Ledger, "record", lambda self, steps=1: None)
            result = original(self)
        record(self.ledger)
        return result

    patch.setattr(PrivateMechanism, "release", release)


def _record_every_second(patch):
    original = Ledger.record

    def record(self, steps=1):
        asked = vars(self)["_asked"] = vars(self).get("_asked", 0) + 1
        if asked % 2:
            original(self, steps)

    patch.setattr(Ledger, "record", record)


def _groups_by_index(patch):
    def init(self, num_samples, bands, generator):
        self.count = bands
        self._order = torch.cat([torch.arange(i, num_samples, bands) for i in range(bands)])
        sizes = [len(range(i, num_samples, bands)) for i in range(bands)]
        self._ends = torch.tensor(sizes).cumsum(0).tolist()

    patch.setattr(Groups, "__init__", init)


def _accounted_with(**changes):
    original = Releases.block
    return _with(Releases, "block", lambda self: original(replace(self, **changes)))


def _long_columns(patch):
    init = BandedNoise.__init__

    def longer(self, coefficients):
        init(self, [1.1 * c for c in coefficients])

    patch.setattr(BandedNoise, "__init__", longer)


def _noise_is_saved(patch):
    original = ProjectedOptimizer.state_dict
    made = []
    add = BandedNoise.add_

    def adds(self, *given):
        made.append(self)
        add(self, *given)

    def state_dict(self):
        return original(self) | {"noise": made[-1]._ring if made else []}

    patch.setattr(BandedNoise, "add_", adds)
    patch.setattr(ProjectedOptimizer, "state_dict", state_dict)


def _nan_is_finite(patch):
    def clip_factors(norms, max_grad_norm, automatic):
        return Factors((max_grad_norm / norms).nan_to_num(1.0).clamp(max=1.0), None)

    patch.setattr(clipping, "clip_factors", clip_factors)


def _large_matrices_unmeasured(patch):
    original = clipping.norms_of

    def norms_of(gradients, factors):
        return original({n: g for n, g in gradients.items() if len(g.shape) == 1}, factors)

    patch.setattr(clipping, "norms_of", norms_of)


def _factors_unmeasured(patch):
    original = clipping.norms_of
    patch.setattr(clipping, "norms_of", lambda gradients, factors: original(gradients))


def _factors_after_the_noise_alone(patch):
    original = PrivateMechanism.release

    def release(self):
        for name, factor in self.gradient_factors.items():
            if name in (total := self._clipped_sum or {}):
                total[name] /= factor  # what the release would multiply again
        return original(self)

    patch.setattr(PrivateMechanism, "release", release)


def _batch_is_clipped(patch):
    def add_clipped_sum_(total, gradients, bound, *rest):
        count = len(next(iter(gradients.values())).squared_norm())
        own = {}
        add_weighted_sum_(own, gradients, Factors(torch.ones(count), None))
        whole = math.sqrt(sum(value.square().sum().item() for value in own.values()))
        for name, value in own.items():
            value = value * min(1.0, bound / max(whole, 1e-12))
            total[name] = total[name] + value if name in total else value

    patch.setattr(engine, "add_clipped_sum_", add_clipped_sum_)


def _nothing_is_clipped(patch):
    def clip_factors(norms, max_grad_norm, automatic):
        finite = norms.isfinite()
        return Factors(torch.ones(int(finite.sum())), None if finite.all() else finite)

    patch.setattr(clipping, "clip_factors", clip_factors)


def _each_part_has_all_of_c(patch):
    original = engine.add_clipped_sum_

    def add_clipped_sum_(total, gradients, bound, *rest):
        *others, apart = rest
        for part in clipping.in_parts(gradients, apart).values():
            original(total, part, bound, *others)

    patch.setattr(engine, "add_clipped_sum_", add_clipped_sum_)


def _folders_unseen(patch):
    def files_in(folder):
        found, others = model_files.files_in(folder)
        return {name: found[name] for name in found if "/" not in name}, others

    patch.setattr(verification, "files_in", files_in)


def _configs_unread(patch):
    original = verification._of_the_digests

    def of_weights(saved, *files):
        return original(saved, *({n: each[n] for n in each if is_weights(n)} for each in files))

    patch.setattr(verification, "_of_the_digests", of_weights)


def _every_rank(rank):
    pretends = SimpleNamespace(get_rank=lambda: rank)
    return lambda patch: patch.setattr(engine, "dist", pretends)


def _together(collate, examples):
    split = collate._packed([1] * len(examples), [*range(len(examples))])
    batches = [collate.collate_rows.collator([examples[i] for i in some]) for some in split]
    return LogicalBatch(batches, [len(some) for some in split])


def _one_stream(patch):
    def with_separate_seeds(function, items, seeds=None):
        return [function(item) for item in items]

    for module in (collation, sampling):
        patch.setattr(module, "with_separate_seeds", with_separate_seeds)


def _frozen_by_the_first_example(patch):
    def public_inputs(self):
        return lambda: iter([self.data_collator([dict(self.train_dataset[0])])])

    patch.setattr(mixin.DPGrapeMixin, "_public_inputs", public_inputs)
    patch.setattr(unused, "_may_reach", lambda _: False)


def _measured_on_the_training_data(patch):
    def public_inputs(self):
        size = self.args.per_device_train_batch_size
        return mixin.public_batches(self.train_dataset, self.data_collator, size, self.label_names)

    patch.setattr(mixin.DPGrapeMixin, "_public_inputs", public_inputs)


BROKEN = {
    "noise is halved": _std_times(0.5),
    "noise is skipped on empty batches": _quiet_when_empty,
    "noise is seeded from args.seed": _noise_from_seed,
    "options can be changed during a run": _with(
        DPGrapeArguments, "__setattr__", object.__setattr__
    ),
    "noise is the same in every step": _noise_again,
    "noise in coordinates is divided by sqrt(r)": _unscaled_in_coordinates,
    "noise is added by every process": _every_rank(0),
    "noise is added by no process": _every_rank(1),
    "the drawn size is the divisor": _drawn_divisor,
    "nothing is clipped": _nothing_is_clipped,
    "a module that is clipped apart and the rest have all of C each": _each_part_has_all_of_c,
    "the batch is clipped, not the example": _batch_is_clipped,
    "what is not in the vector does not count in the norm": _large_matrices_unmeasured,
    "gradient factors do not count in the norm": _factors_unmeasured,
    "gradient factors do not meet the noise": _factors_after_the_noise_alone,
    "NaN passes the clip": _nan_is_finite,
    "a user's examples are clipped one by one": _with(
        units, "_of_units", lambda gradients, sizes: gradients
    ),
    "draws have a fixed size": _without_replacement,
    "every step has the same draw": _same_draw,
    "groups are by index": _groups_by_index,
    "bands are accounted at rate q": _accounted_with(bands=1),
    "columns are longer than 1": _long_columns,
    "a checkpoint holds earlier noise": _noise_is_saved,
    "the ledger is written after the release": _record_afterwards,
    "the ledger counts every second release": _record_every_second,
    "replaced examples cost as added ones": _accounted_with(adjacency="add_or_remove_one"),
    "a physical batch is collated as a whole": _with(LogicalBatchCollator, "__call__", _together),
    "examples are collated under one stream": _one_stream,
    "a collator that mixes is not tried": _never(collators, "refuse_other_rows"),
    "a run is not watched": _never(spot_checks.SpotCheckedEngine, "_chosen"),
    "a change of the model is not checked": _never(spot_checks.SpotCheckedEngine, "check_next"),
    "states are not compared": _with(state.StateGuard, "compare", lambda *_: None),
    "coins of an example follow from the global stream": _with(
        collation.with_separate_seeds, "__defaults__", (collation.repeatable_seeds,)
    ),
    "a model does not say that it was trained": _with(mixin, "note_provenance", lambda *_: None),
    "what is frozen depends on the first example": _frozen_by_the_first_example,
    "rows that two data sets share are not found": _with(
        overlap.TrainingRows, "shared_with", lambda *_, **__: ()
    ),
    "the names of metrics are logged at any time": _with(
        mixin.DPGrapeMixin, "metric_prefixes", ("eval",)
    ),
    "nobody's random numbers are changed": _with(replay, "_CHANGES", ()),
    "rows are tried in one order": _never(replay._Examination, "_compare_reordered"),
    "gradients are not compared with those of rows alone": _with(
        replay._Examination, "_wrong", lambda *_: ""
    ),
    "losses are not compared with those of rows alone": _with(
        replay._Examination, "_other_losses", lambda *_: False
    ),
    "principal directions are of the training data": _measured_on_the_training_data,
    "verify does not look into folders": _folders_unseen,
    "verify compares weights alone": _configs_unread,
    "a folder that changed after the model was saved is sent": _with(
        publisher, "_require_as_saved", lambda folder: None
    ),
}
"""Name of a saboteur -> what breaks the mechanism."""

_TABLE = Path(__file__).with_name("saboteurs.yaml").read_text(encoding="utf-8")
NOTICED = yaml.safe_load(_TABLE)
"""Name of a saboteur -> the tests that notice it."""

SABOTEURS = tuple(
    Saboteur(name, apply, tuple(NOTICED.get(name, ()))) for name, apply in BROKEN.items()
)
