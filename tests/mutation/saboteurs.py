"""Ways to break the mechanism, and the ordinary tests that meet each.

A saboteur replaces one thing in the real code. ``saboteurs.yaml`` names the tests that should
notice; each must fail under its saboteur, by an assertion.
"""

import contextlib
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
from dp_grape_hf.gradients import Dense, forms as representations, replay, units
from dp_grape_hf.gradients.checks import draws, sketches, spot_checks, state, unused
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
from dp_grape_hf.publishing import model_files, publisher, verification
from dp_grape_hf.publishing.model_files import is_weights
from dp_grape_hf.trainer import collators, inputs_by_form, mixin, overlap, remembered

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
    """Returns what gives an object another attribute."""
    return lambda patch: patch.setattr(owner, name, value)


def _never(owner, name):
    return _with(owner, name, lambda *_, **__: None)


def _std_times(factor):
    original = engine.add_noise_

    def add_noise_(values, std, *rest):
        original(values, factor * std, *rest)

    return lambda patch: patch.setattr(engine, "add_noise_", add_noise_)


def _std_of_mean(patch):
    original = engine.add_noise_

    def add_noise_(values, std, generator, divisor, *rest):
        original(values, std / divisor, generator, divisor, *rest)

    patch.setattr(engine, "add_noise_", add_noise_)


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


def _tied_once(patch):
    def part(self, total, factors):
        self.parts[0].add_weighted_sum_(total, factors)

    patch.setattr(GradientSum, "add_weighted_sum_", part)


def _tied_norm_without_cross_terms(patch):
    def squared_norm(self):
        return torch.stack([part.squared_norm() for part in self.parts]).sum(0)

    patch.setattr(representations.GradientSum, "squared_norm", squared_norm)


def _options_one_by_one(patch):
    def squared_norm(self):
        return (self.rows.square().sum(2) * self.cols.square().sum(2)).sum(1)

    patch.setattr(Factored, "squared_norm", squared_norm)


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


def _epochs(patch):
    waiting = []

    def draw(self):
        size = round(self.sample_rate * self.num_samples)
        if len(waiting) < size:
            waiting[:] = torch.randperm(self.num_samples, generator=self.generator).tolist()
        drawn, waiting[:] = waiting[:size], waiting[size:]
        return sorted(drawn)

    patch.setattr(PoissonBatchSampler, "draw", draw)


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


def _noise_before_clip(patch):
    _std_times(0.0)(patch)
    original = engine.add_clipped_sum_

    def add_clipped_sum_(total, gradients, bound, *rest):
        noisy = {}
        for name, gradient in gradients.items():
            count = len(gradient.squared_norm())
            whole = torch.stack([gradient.weighted_sum(row) for row in torch.eye(count)])
            noisy[name] = Dense(whole + bound * torch.randn_like(whole))
        original(total, noisy, bound, *rest)

    patch.setattr(engine, "add_clipped_sum_", add_clipped_sum_)


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


def _groups_anew(patch):
    original = PoissonBatchSampler._draw_of_group

    def draw(self, groups, number):
        if number % groups.count == 0:
            vars(groups).update(vars(Groups(self.num_samples, groups.count, self.generator)))
        return original(self, groups, number)

    patch.setattr(PoissonBatchSampler, "_draw_of_group", draw)


def _turns_from_the_start(patch):
    original = PoissonBatchSampler.draws

    def draws(self):
        real = self._turns
        turns = real()
        fresh = Turns(turns.bands)
        fresh._groups = turns.groups(self.num_samples, self.generator)
        self._turns = lambda: fresh
        yield from original(self)
        self._turns = real

    patch.setattr(PoissonBatchSampler, "draws", draws)


def _groups_of_a_loader(patch):
    original = PoissonBatchSampler.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        shared, made = self._turns, []

        def own():
            made.append(made[0] if made else Turns(shared().bands))
            made[0].releases = shared().releases
            return made[0]

        self._turns = own

    patch.setattr(PoissonBatchSampler, "__init__", init)


def _states_compared_once(patch):
    for module in (engine, sampling):
        patch.setattr(module, "StateGuard", _Blind)


class _Blind(state.StateGuard):
    """Compares nothing."""

    def compare(self, before):
        return None


def _seeded_once(patch):
    original, done = mixin.forget_the_seed, []

    def forget():
        if not done:
            original()
        done.append(True)

    patch.setattr(mixin, "forget_the_seed", forget)


def _accounted_with(**changes):
    original = Releases.block
    return _with(Releases, "block", lambda self: original(replace(self, **changes)))


def _long_columns(patch):
    init = BandedNoise.__init__

    def longer(self, coefficients):
        init(self, [1.1 * c for c in coefficients])

    patch.setattr(BandedNoise, "__init__", longer)


def _noise_outlives(patch):
    init, last = BandedNoise.__init__, []

    def remembers(self, coefficients):
        init(self, coefficients)
        self._ring = last[-1]._ring if last else None
        last.append(self)

    patch.setattr(BandedNoise, "__init__", remembers)


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
    """Collates a physical batch as a whole."""
    split = collate._packed([1] * len(examples), [*range(len(examples))])
    batches = [collate.collate_rows.collator([examples[i] for i in some]) for some in split]
    return LogicalBatch(batches, [len(some) for some in split])


def _stretched_to_the_longest(patch):
    original = LogicalBatchCollator.__call__

    def collate(self, examples):
        lengths = [s.length for x in examples for s in collation._sequences(x).values()]
        with pytest.MonkeyPatch.context() as meanwhile:
            meanwhile.setattr(collation.Grid, "__call__", lambda *_: max(lengths))
            return original(self, examples)

    patch.setattr(LogicalBatchCollator, "__call__", collate)


def _columns_of_the_first(patch):
    def stacked(rows, pack):
        for some in pack([*range(len(rows))]):
            names = set.intersection(*(set(rows[i]) for i in some))
            batch = {name: torch.cat([rows[i][name] for i in some]) for name in names}
            yield collation.Stack(batch, some)

    patch.setattr(sampling, "stacked", stacked)


def _one_stream(patch):
    def with_separate_seeds(function, items, seeds=None):
        return [function(item) for item in items]

    for module in (collation, sampling):
        patch.setattr(module, "with_separate_seeds", with_separate_seeds)


def _fetched_at_once(patch):
    def fetch(self, indices):
        many = getattr(self.dataset, "__getitems__", None)
        return many(indices) if many else [self.dataset[i] for i in indices]

    patch.setattr(EmptyDrawDataset, "__getitems__", fetch)


def _two_rows_tried(patch):
    original = replay.examine

    def examine(per_sample, inputs, projectors):
        return original(per_sample, {n: v[:2] for n, v in inputs.items()}, projectors)

    patch.setattr(replay, "examine", examine)
    _lengths_of_the_data_tried(patch)


def _lengths_of_the_data_tried(patch):
    patch.setattr(replay, "_of_other_lengths", lambda _, rows: rows)


def _signs_alone(patch):
    original = sketches._vectors
    patch.setattr(sketches, "_vectors", lambda *where: original(*where)[:1].sign())


def _frozen_by_the_first_example(patch):
    def public_inputs(self):
        return lambda: iter([self.data_collator([dict(self.train_dataset[0])])])

    patch.setattr(mixin.DPGrapeMixin, "_public_inputs", public_inputs)
    patch.setattr(unused, "_may_reach", lambda _: False)


def _signs_unseen(patch):
    original = sketches.Sketches.of

    def of(self, names):
        found = original(self, names)
        return found[..., :1].expand_as(found)

    patch.setattr(sketches.Sketches, "of", of)


def _measured_on_the_training_data(patch):
    def public_inputs(self):
        size = self.args.per_device_train_batch_size
        return mixin.public_batches(self.train_dataset, self.data_collator, size, self.label_names)

    patch.setattr(mixin.DPGrapeMixin, "_public_inputs", public_inputs)


def _form_unwatched(dataset, collator, example):
    return inputs_by_form.form_of(None, collator, example)


BROKEN = {
    "noise is halved": _std_times(0.5),
    "noise is of the mean's size, on the sum": _std_of_mean,
    "noise is skipped on empty batches": _quiet_when_empty,
    "noise is seeded from args.seed": _noise_from_seed,
    "options can be changed during a run": _with(
        DPGrapeArguments, "__setattr__", object.__setattr__
    ),
    "noise is the same in every step": _noise_again,
    "noise is added before the clip": _noise_before_clip,
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
    "rows that are not finite are multiplied by zero": _with(
        Factors, "select", lambda self, gradient: (gradient, self.values)
    ),
    "a tied gradient counts once": _tied_once,
    "a tied norm has no cross terms": _tied_norm_without_cross_terms,
    "options are measured one by one": _options_one_by_one,
    "a user's examples are clipped one by one": _with(
        units, "_of_units", lambda gradients, sizes: gradients
    ),
    "epochs are shuffled": _epochs,
    "draws have a fixed size": _without_replacement,
    "every step has the same draw": _same_draw,
    "groups are by index": _groups_by_index,
    "groups are formed anew in each round": _groups_anew,
    "turns do not know what was released": _turns_from_the_start,
    "bands are accounted at rate q": _accounted_with(bands=1),
    "columns are longer than 1": _long_columns,
    "noise goes on after resuming": _noise_outlives,
    "a checkpoint holds earlier noise": _noise_is_saved,
    "the ledger is written after the release": _record_afterwards,
    "the ledger counts every second release": _record_every_second,
    "replaced examples cost as added ones": _accounted_with(adjacency="add_or_remove_one"),
    "a physical batch is collated as a whole": _with(LogicalBatchCollator, "__call__", _together),
    "a row is as long as the longest of its draw": _stretched_to_the_longest,
    "a physical batch has the columns of all its rows": _columns_of_the_first,
    "examples are collated under one stream": _one_stream,
    "examples are fetched all at once": _fetched_at_once,
    "a collator that mixes is not tried": _never(collators, "refuse_other_rows"),
    "two rows are tried, in their order": _two_rows_tried,
    "rows are tried at their own lengths": _lengths_of_the_data_tried,
    "a run is not watched": _never(spot_checks.SpotCheckedEngine, "_chosen"),
    "states are not compared": _with(state.StateGuard, "compare", lambda *_: None),
    "states are compared before the first step alone": _states_compared_once,
    "global streams are secret at the start alone": _seeded_once,
    "coins of an example follow from the global stream": _with(
        collation.with_separate_seeds, "__defaults__", (collation.repeatable_seeds,)
    ),
    "a model does not say that it was trained": _with(mixin, "note_provenance", lambda *_: None),
    "groups belong to a loader": _groups_of_a_loader,
    "batches may come in any order": _with(Turns, "require_next", lambda *_: None),
    "what is frozen depends on the first example": _frozen_by_the_first_example,
    "rows that two data sets share are not found": _with(
        overlap.TrainingRows, "shared_with", lambda *_, **__: ()
    ),
    "the names of metrics are logged at any time": _with(
        mixin.DPGrapeMixin, "metric_prefixes", ("eval",)
    ),
    "losses in 16 bits may differ by anything": _with(
        engine.PerSampleEngine, "rounding_of_losses", lambda *_: float("inf")
    ),
    "nobody's random numbers are changed": _with(replay, "_CHANGES", ()),
    "random numbers are not set to their bounds": _never(draws, "_bounds"),
    "what a batch shares may decide something rarely": _with(
        replay, "SHARED", draws._EACH | {"randperm"}
    ),
    "rows are tried in one order": _never(replay._Examination, "_compare_reordered"),
    "gradients are not compared with those of rows alone": _with(
        replay._Examination, "_wrong", lambda *_: ""
    ),
    "losses are not compared with those of rows alone": _with(
        replay._Examination, "_other_losses", lambda *_: False
    ),
    "gradients are marked by signs alone": _signs_alone,
    "gradients show by their norms": _signs_unseen,
    "rows are tried behind a head of zeros": _with(
        replay, "without_zeros", lambda _: contextlib.nullcontext()
    ),
    "a permutation of the batch is each one's own": _with(
        draws, "_EACH", draws._EACH | {"randperm"}
    ),
    "a generator of one's own is not seen": _with(draws, "is_public", lambda _: True),
    "a loss has a median of the batch in it": _two_rows_tried,
    "a forward reseeds numpy's stream": _with(
        engine, "guarding_streams", lambda _: contextlib.nullcontext()
    ),
    "principal directions are of the training data": _measured_on_the_training_data,
    "results are kept for later runs whatever they were measured on": _with(
        remembered, "SyntheticInputs", object
    ),
    "results are kept of weights that were trained": _with(
        remembered, "remembered_ledgers", lambda model: []
    ),
    "verify takes all that is called optimizer for a trainer's": _with(
        verification,
        "is_weights",
        lambda name: is_weights(name) and not Path(name).name.startswith("optimizer."),
    ),
    "verify does not look into folders": _folders_unseen,
    "verify compares weights alone": _configs_unread,
    "synthetic inputs are as long as the first example": _with(inputs_by_form, "LENGTHS", ()),
    "reading the first example is not watched": _with(mixin, "form_of", _form_unwatched),
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
