"""One private run: its parts, made once of the arguments, and its step.

The one place where a method's row decides which parts work together, and in which order a step uses
them. A Trainer drives it, and so do the memory planner and the benchmarks.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from statistics import mode
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dp_grape_hf.arguments import METHODS, DPGrapeArguments, OptimizerAndOptions, Update
from dp_grape_hf.distributed import from_first, group_size
from dp_grape_hf.errors import PrivacyError, UnsupportedModelError
from dp_grape_hf.gradients import (
    Compilation,
    FlatTensors,
    GradSampleMode,
    Inputs,
    LossFunction,
    PerSampleEngine,
    QueryEngine,
    SpotCheckedEngine,
    UnitEngine,
    batch_size_of,
    evaluating,
    make_engine,
    rows_of,
    tolerance_for,
)
from dp_grape_hf.ledger import Clipping, Ledger
from dp_grape_hf.mechanism import (
    STABILITY,
    LogicalBatch,
    PrivateMechanism,
    Signal,
    Turns,
    bound_of_part,
    factors_by_name,
    in_parts,
)
from dp_grape_hf.optimizers import (
    UPDATE_RULES,
    LowRankUpdates,
    ProjectedOptimizer,
)
from dp_grape_hf.phases import PROJECTORS, REDRAW, RELEASE, RELEASED, UPDATE, Observer
from dp_grape_hf.projections import (
    PRINCIPAL,
    Batches,
    PrincipalProjection,
    ProjectionSchedule,
    Projector,
    SavedProjection,
    feature_dimensions,
    input_dimensions,
    on_inputs,
    principal_directions,
    projection_targets,
    synthetic_batches,
)
from dp_grape_hf.publishing import Adapter
from dp_grape_hf.sharding import most_of_any, reshard
from dp_grape_hf.trainer.remembered import remembered_matrices

AtCapture = ProjectionSchedule | PrincipalProjection


class Outcome(NamedTuple):
    """The result of a step."""

    norm: Tensor  # L2, of the private gradients: free to log
    loss: Tensor  # the sum of the losses of the draw, sensitive


class Run:
    """The parts of a run, and its step.

    To make it is to try whether arguments and model go together. ``start`` and ``take`` add what a
    step needs.

    Args:
        args: the arguments of the run.
        model: on its device; parameters with ``requires_grad`` are trained.
        loss: ``(outputs, labels) -> (B,)``; chosen by the model's head if None.
        observer: looks on.
        public_inputs: makes what principal directions are measured on; synthetic inputs if None.
        clipped_apart: the module, if any, whose parameters are clipped apart from all others.
        **engine_options: of the per-sample engine, beside those that the arguments have.

    Attributes:
        rate_factors, gradient_factors: parameter name -> factor, where it is not 1.
        per_sample: computes losses and per-sample gradients, of examples.
        schedule: the projections at capture; None without any.
        update: what a plug-in does with private updates; None without one.
        projectors: parameter name -> projector, what per-sample gradients met at the last step.
        mechanism: makes a release of a logical batch; None before ``start``.
        signal: tells how much of the releases is more than noise.
        optimizer: what the release is handed to; None before ``take``.
        idle: what the model is run on while other processes have more; None if it is not sharded.

    Raises:
        PrivacyError: if arguments and model do not go together.
        UnsupportedModelError: as in ``PerSampleEngine``.
    """

    def __init__(
        self,
        args: DPGrapeArguments,
        model: nn.Module,
        loss: LossFunction | None = None,
        observer: Observer | None = None,
        public_inputs: Batches | None = None,
        clipped_apart: str | None = None,
        **engine_options: Any,
    ) -> None:
        self.args, self.model = args, model
        self.per_sample = _per_sample(args, model, loss, engine_options)
        if observer is not None:
            self.per_sample.observer = observer
        self._stepping = self.per_sample  # from ``start`` on it is watched
        self.trainable = self.per_sample.trainable
        update = METHODS[args.method].update
        self.update: Update | None = None if update is None else update(args, self.per_sample)
        usual = _optimizer(args)
        self.optimizer_cls_and_kwargs = (
            usual if self.update is None else self.update.optimizer(usual)
        )
        self.rate_factors, self.gradient_factors = (
            factors_by_name(option, getattr(args, option) or {}, self.trainable)
            for option in ("learning_rate_factors", "gradient_factors")
        )
        self._public_inputs = public_inputs or partial(
            synthetic_batches, model, None, args.projection_seed
        )
        self.schedule = _projections(
            args, model, self.trainable, self._public_inputs, clipped_apart
        )
        self.projectors: Mapping[str, Projector] = {}
        self.mechanism: PrivateMechanism | None = None
        self.signal = Signal()
        self.optimizer: torch.optim.Optimizer | None = None
        self._low_rank: LowRankUpdates | None = None
        self._places: tuple[Any, Any] | None = None  # of the layout, by name and by weight
        self.idle: Inputs | None = None

    def examine(self, number: int, batch: Inputs, size: int) -> None:
        """Compare gradients of a physical batch with gradients of its rows alone (``replay``).

        Args:
            number: of the step.
            batch: some examples.
            size: how many rows to examine; they are taken in turn.

        Raises:
            PrivacyError: as in ``PerSampleEngine.examine``, or if no example has a gradient.
            UnsupportedModelError: as in ``PerSampleEngine.examine``.
        """
        self.per_sample.use(number)
        count = batch_size_of(batch)
        batch = rows_of(batch, [row % count for row in range(max(size, count))])
        if not self.per_sample.examine(batch, self.projectors_at(number)):
            raise PrivacyError(
                "No example that was tried has a gradient: all are zero, or hold NaN or infinite "
                "numbers, so that noise alone would train the model. Look at the labels (all "
                "ignored?) and the weights (NaN?), and for statistics over a batch, which "
                "engine='functorch' takes over batches of one sample."
            )

    def stay_in_step(self, number: int, batch: Inputs) -> None:
        """Runs the model as often as the other processes do from this step on (``sharding``).

        The batch is the same in all processes.

        Raises:
            UnsupportedModelError: as in ``PerSampleEngine.stay_in_step``.
        """
        self.per_sample.stay_in_step(batch, self.projectors_at(number))
        reshard(self.model)
        self.idle = rows_of(batch, slice(1))

    def start(
        self,
        ledger: Ledger,
        noise_generator: torch.Generator,
        noise_slice: int | None = None,
    ) -> None:
        """Make the mechanism, and begin with the present weights.

        Args:
            ledger: where its releases are recorded.
            noise_generator: the secret stream of the noise, on the parameters' device.
            noise_slice: as in ``PrivateMechanism``.
        """
        self.signal = Signal(ledger.mechanism.bands)
        if METHODS[self.args.method].query is None:
            self._stepping = self._watched(ledger.mechanism.clipped_apart)
        units = self.args.privacy_unit_column is not None
        self.mechanism = PrivateMechanism(
            UnitEngine(self._stepping) if units else self._stepping,
            ledger=ledger,
            noise_generator=noise_generator,
            distributed=group_size() > 1,
            noise_slice=noise_slice,
        )

    def _watched(self, apart: str | None) -> SpotCheckedEngine:
        """Returns the engine, which now and then looks at a row once more, alone."""
        args = self.args
        assert args.max_grad_norm is not None
        bound = bound_of_part(args.max_grad_norm, apart)
        shortest = STABILITY if args.clipping == Clipping.AUTOMATIC else bound
        coins = random.Random(from_first(lambda: secrets.token_bytes(32)))
        factors = {name: self.gradient_factors.get(name, 1.0) for name in self.trainable}
        parts = in_parts(factors, apart).values()
        return SpotCheckedEngine(self.per_sample, tolerance_for(self.model), parts, shortest, coins)

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Returns an optimizer of all that is trained, and takes it."""
        cls, options = self.optimizer_cls_and_kwargs
        optimizer = cls(self.trainable.values(), **options)
        self.take(optimizer)
        return optimizer

    def take(self, optimizer: torch.optim.Optimizer, *, new: bool = True) -> None:
        """Hands releases to this optimizer from now on.

        The state of a projection that no seed makes again becomes a part of the optimizer's.

        Args:
            optimizer: of the class and with the arguments of ``optimizer_cls_and_kwargs``.
            new: whether it was just made, before its scheduler.
        """
        if new:
            factors = {self.trainable[n]: factor for n, factor in self.rate_factors.items()}
            scale_rates(optimizer, factors, chosen=self.args.chooses)
        self.optimizer = optimizer
        if self.mechanism is not None:
            own = self.schedule if self.update is None else self.update.projection
            if isinstance(own, SavedProjection):
                _save_with(optimizer, own)

    def use_rates(self, by_name: Mapping[str, float]) -> None:
        """Makes optimizers with these rates, by parameter name."""
        cls, options = self.optimizer_cls_and_kwargs
        most = mode(by_name.values())
        self.optimizer_cls_and_kwargs = cls, options | {"lr": most}
        self.rate_factors = {
            n: by_name[n] / most for n in self.trainable if by_name.get(n, most) != most
        }

    def projectors_at(self, number: int) -> Mapping[str, Projector]:
        """Returns the projectors that per-sample gradients meet at a step, counted from 0."""
        return {} if self.schedule is None else self.schedule.at(number)

    def bands_at_most(self) -> int:
        """Returns over how many steps noise may be correlated in half the memory of the weights.

        b - 1 steps are kept, and a sum of releases to tell signal by. Where a rule divides by the
        size of releases, as Adam does, noise that comes back is divided by another one, and 1 is
        best: MiniLM's head alone, TREC at epsilon 2, has 78.0 % with Adam, 76.2 with correlated
        noise (6 seeds each), and with momentum 79.4 and 81.7.
        """
        assert self.args.update_rule is not None
        if 2 in UPDATE_RULES[self.args.update_rule].moments.values():
            return 1
        placed = {} if self.schedule is None else self.schedule.placements
        numbers = sum(
            p.numel() * (placed[n].rank / placed[n].rows if n in placed else 1)
            for n, p in self.trainable.items()
        )
        weights = sum(p.numel() * p.dtype.itemsize for p in self.model.parameters())
        return max(1, int(weights / 2 / (4 * max(1, numbers))))

    @property
    def turns(self) -> Turns:
        """The examples that may be sampled for the next release."""
        return Turns() if self.mechanism is None else self.mechanism.turns

    @property
    def ranks(self) -> dict[str, int]:
        """Parameter name -> r, of the weights that are projected at capture."""
        placed = {} if self.schedule is None else self.schedule.placements
        return {name: place.rank for name, place in placed.items()}

    def abandon(self) -> None:
        """Drops the logical batch after an error, and makes the other processes fail as well."""
        assert self.mechanism is not None
        self.mechanism.abandon()

    def step(
        self,
        number: int,
        batch: LogicalBatch,
        prepare: Callable[[Any], Inputs] = lambda inputs: inputs,
    ) -> Outcome:
        """Makes one release from one draw, and hands it to the optimizer, which does not move yet.

        A collective call where the draw is spread over several processes.

        Args:
            number: of the step, from 0.
            batch: the draw, in physical batches; none, if it was empty.
            prepare: moves a physical batch to the device of the model.

        Raises:
            OtherProcessFailed: as in ``PrivateMechanism.release``.

        Guarantee:
            What the optimizer is given, and the norm, are functions of the release alone.
        """
        assert self.mechanism is not None
        self.turns.require_next(batch.turn)
        observer = self.per_sample.observer
        with observer.phase(REDRAW):
            self.per_sample.use(number)
            projectors = self.projectors_at(number)
            measured, self.projectors = projectors is not self.projectors, projectors
            if measured:
                self.signal.begin_anew()
            if measured and isinstance(self.schedule, PrincipalProjection):
                self.mechanism.ledger.note_projection(self.schedule.digest())
            observer.made(PROJECTORS, self.projectors)
            if self._low_rank is not None:
                self._low_rank.use(self.projectors)
            self.mechanism.begin(self.projectors)
        loss = torch.zeros((), device=self.per_sample.device)
        missing = 0
        if self.idle is not None:
            reshard(self.model)
            missing = most_of_any(len(batch), loss.device) - len(batch)
        for physical in batch:
            loss += self.mechanism.accumulate(prepare(physical)).sum()
        for _ in range(missing):
            self._keep_in_step()
        if self.idle is not None:
            reshard(self.model)
        with observer.phase(RELEASE):
            private_grads = self.mechanism.release()
        observer.made(RELEASED, private_grads)
        norm = self.signal.add(private_grads, self.mechanism.independent_std, self.gradient_factors)
        with observer.phase(UPDATE):
            self._hand_over(number, private_grads)
        return Outcome(norm, loss)

    def _keep_in_step(self) -> None:
        """Runs the model as often as a physical batch does, for nothing."""
        assert self.idle is not None
        passes = 2 if self.args.grad_sample_mode == GradSampleMode.GHOST else 1
        ignored: list[Any] = [lambda found: None] * passes
        self._stepping.stream(self.idle, self.projectors, *ignored)

    def _hand_over(self, number: int, private_grads: Mapping[str, Tensor]) -> None:
        """Gives the optimizer what was released.

        Guarantee:
            Only private gradients are seen: this is post-processing.
        """
        if self.update is not None:
            self.update.hand_over(self.optimizer, number, private_grads)
            return
        assert isinstance(self.optimizer, ProjectedOptimizer)
        projectors, weights = self.projectors, self.trainable
        flat = places = None
        if isinstance(private_grads, FlatTensors) and private_grads.layout is not None:
            flat, layout = private_grads.flat, private_grads.layout
            if self._places is None or self._places[0] != layout.places:
                by_weight = {weights[name]: place for name, place in layout.places.items()}
                self._places = layout.places, by_weight
            private_grads, places = private_grads.others, self._places[1]
        self.optimizer.receive(
            {weights[name]: gradient for name, gradient in private_grads.items()},
            {weights[name]: projector for name, projector in projectors.items()},
            *(flat, places),
        )

    # ---- What is kept beside the weights ----

    def keep_updates_apart(self) -> None:
        """Keeps updates in float32 beside weights of fewer bits whose modules the model calls.

        That is seen on inputs that are no example's, and so is the same in all processes.
        """
        if not isinstance(self.optimizer, ProjectedOptimizer):
            return
        self._low_rank = LowRankUpdates(self.model, self.optimizer)
        if self._low_rank:
            with suppress(Exception), evaluating(self.model), torch.no_grad():
                on_inputs(self.model, next(iter(self._public_inputs())))
            reshard(self.model)
            self._low_rank.leave_uncalled()
            self.per_sample.add_branches(self._low_rank.branches)

    def merge_(self) -> None:
        """Moves updates that are kept apart into the weights."""
        if self._low_rank is not None:
            self._low_rank.merge_()

    def adapter(self, steps: int) -> Adapter | None:
        """Returns what the model is saved as, if an adapter is asked for; None for all of it.

        Args:
            steps: of the run, before it begins.

        Raises:
            PrivacyError: the changes of this model have no low rank, or PEFT cannot save them.
        """
        args = self.args
        if args.save_as != "adapter":
            return None
        every = args.projection_update_steps
        adapter = Adapter.of(self.model, self.trainable.values(), self.ranks)
        adapter.require_smaller(self.ranks, periods=1 if every is None else -(-steps // every))
        return adapter

    def changes(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns what was added to projected weights, if the optimizer keeps it (``save_as``).

        Returns:
            Parameter name -> (m, R) and (R, n), whose product was added to it; see
            ``LowRankChanges``. What is kept apart and not merged yet is missing.
        """
        kept = self.optimizer.changes if isinstance(self.optimizer, ProjectedOptimizer) else None
        if kept is None:
            return {}
        return {name: kept.factors(w) for name, w in self.trainable.items() if w in kept}

    def stop(self) -> None:
        """Merges, and keeps no updates apart any longer."""
        if self._low_rank is not None:
            self._low_rank.remove()
            self._low_rank = None
            self.per_sample.add_branches({})


# ---- The parts, of the arguments ----


def _per_sample(
    args: DPGrapeArguments, model: nn.Module, loss: LossFunction | None, options: dict[str, Any]
) -> PerSampleEngine:
    """Returns what computes losses, and per-sample gradients or a plug-in's vectors.

    Raises:
        PrivacyError: if a private plug-in's engine is none that is examined.
    """
    row = METHODS[args.method]
    if row.query is not None:
        engine = row.query(args, model, loss)
        if row.private and not isinstance(engine, QueryEngine):
            raise PrivacyError(
                f"method={args.method!r} is private and computes with {type(engine).__name__}, "
                "whose vectors of samples nothing examines. Derive it from QueryEngine."
            )
        return engine
    if args.torch_compile:
        options = options | {"compilation": _compilation(args)}
    return make_engine(args.engine, model, loss, args.grad_sample_mode, **options)


def _compilation(args: DPGrapeArguments) -> Compilation:
    """Returns how the model is compiled."""
    rows = args.per_device_train_batch_size
    return Compilation(rows, args.torch_compile_backend, args.torch_compile_mode)


def _optimizer(args: DPGrapeArguments) -> OptimizerAndOptions:
    """Returns the usual optimizer's class and its options."""
    return ProjectedOptimizer, {
        "lr": args.learning_rate,
        "rounding_seed": args.projection_seed,
        "rule": args.update_rule,
        "keep_changes": args.save_as == "adapter",
        **rule_settings(args),
    }


def rule_settings(args: DPGrapeArguments) -> dict[str, Any]:
    """Returns the settings of the update rule."""
    assert args.update_rule is not None
    settings: dict[str, dict[str, Any]] = {
        "adam": {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon},
        "momentum": {"momentum": args.adam_beta1},
    }
    return settings.get(args.update_rule, {})


def _save_with(optimizer: torch.optim.Optimizer, projection: SavedProjection) -> None:
    """Makes the state of a projection a part of the optimizer's."""

    def add(_: Any, state: dict[str, Any]) -> None:
        state["projection"] = projection.state_dict()

    def take(_: Any, state: dict[str, Any]) -> None:
        if "projection" not in state:
            raise PrivacyError(
                "The checkpoint's optimizer has no state of the projection, without which the run "
                "cannot go on as it would have. Resume with the method and the options that "
                "the checkpoint was made with."
            )
        projection.load_state_dict(state["projection"])

    optimizer.register_state_dict_post_hook(add)
    optimizer.register_load_state_dict_pre_hook(take)


def _projections(
    args: DPGrapeArguments,
    model: nn.Module,
    trainable: Mapping[str, nn.Parameter],
    public_inputs: Batches,
    apart: str | None,
) -> AtCapture | None:
    """Returns the projections of a run at capture, if it has any."""
    assert args.projection is not None
    assert args.projection_rank is not None
    if not METHODS[args.method].projected_at_capture:
        return None
    targets = projection_targets(model, trainable, args.optim_target_modules)
    shapes = {name: tuple(trainable[name].shape) for name in targets}
    settings: dict[str, Any] = {
        "rank": args.projection_rank,
        "update_steps": args.projection_update_steps,
        "device": next(iter(trainable.values())).device,
    }
    if args.projection == PRINCIPAL:
        with _explaining(args):
            next(iter(public_inputs()))  # refuses a model of which it is not known what it reads
        whole = _whole(args, trainable, apart)
        shapes |= {name: tuple(trainable[name].shape) for name in whole}
        measure = partial(_principal, args, model, public_inputs, whole)
        dims = feature_dimensions(model)
        return PrincipalProjection(
            shapes, measure=measure, input_dims=dims, whole=whole, **settings
        )
    settings |= {
        "family": args.projection,
        "seed": args.projection_seed,
        "input_dims": input_dimensions(model),
    }
    return ProjectionSchedule(shapes, **settings)


def _whole(
    args: DPGrapeArguments, trainable: Mapping[str, nn.Parameter], apart: str | None
) -> list[str]:
    """Returns the weight that keeps all coordinates, evened out: of a head clipped apart.

    Features have most of their energy in a few directions, and a gradient is as long as what the
    head reads, so these would take most of C and of the noise in logits. A saved adapter has no
    place for a change that has all ranks.
    """
    weight = f"{apart}.weight"
    return [weight] if weight in trainable and args.save_as != "adapter" else []


def _principal(
    args: DPGrapeArguments,
    model: nn.Module,
    inputs: Batches,
    whole: Collection[str],
    ranks: Mapping[str, int],
) -> dict[str, Tensor]:
    """Returns P by weight name: in every process, P of the first.

    Raises:
        UnsupportedModelError: if the model cannot be run on the inputs.
    """

    def measured() -> dict[str, Tensor]:
        with evaluating(model), _explaining(args):
            found = principal_directions(model, ranks, inputs, args.projection_seed)
        return {n: own.evened() if n in whole else own.directions for n, own in found.items()}

    settings = {"ranks": {**ranks}, "whole": [*whole], "seed": args.projection_seed}
    matrices = remembered_matrices("principal directions", settings, measured)
    if group_size() > 1:
        for matrix in matrices.values():
            on_device = matrix.to(args.device)
            dist.broadcast(on_device, src=0)
            matrix.copy_(on_device)
    return matrices


@contextmanager
def _explaining(args: DPGrapeArguments) -> Iterator[None]:
    """Says what to do where a model cannot be run on inputs that are not its data."""
    try:
        yield
    except (PrivacyError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of any model's code
        raise UnsupportedModelError(
            f"projection={args.projection!r} runs the model on inputs that are not the data, and "
            f"that failed: {error!r}. Pass public_dataset= to the trainer, whose examples the "
            "model can read, or choose projection='gaussian'."
        ) from error


# Of a parameter group, and which of all parameters it has.
_FACTOR, _NUMBERS = "learning_rate_factor", "parameter_numbers"


def scale_rates(
    optimizer: torch.optim.Optimizer,
    factor_of: Mapping[nn.Parameter, float],
    *,
    chosen: bool = False,
) -> None:
    """Give some parameters other learning rates, in separate parameter groups.

    Updates are functions of private gradients, so their lengths are free to choose.

    Args:
        optimizer: just made, before its scheduler. It will refuse the state of one with others.
        factor_of: parameter -> factor.
        chosen: a saved state may have other factors, which then count: they were chosen on the
            weights of that time.
    """
    groups, count = [], 0
    for group in optimizer.param_groups:
        numbered = list(enumerate(group["params"], count))
        count += len(numbered)
        # The one that is logged, the first, is the rate of most.
        factors = sorted({factor_of.get(p, 1.0) for _, p in numbered} or {1.0}, key=_one_first)
        for factor in factors:
            own = [(n, p) for n, p in numbered if factor_of.get(p, 1.0) == factor]
            scaled = {"lr": group["lr"] * factor, "params": [p for _, p in own]}
            groups.append({**group, **scaled, _FACTOR: factor, _NUMBERS: [n for n, _ in own]})
    optimizer.param_groups[:] = groups
    optimizer.register_load_state_dict_pre_hook(partial(_require_same_factors, chosen=chosen))


def _one_first(factor: float) -> tuple[bool, float]:
    return factor != 1, factor


def _require_same_factors(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], *, chosen: bool
) -> None:
    """Refuses a checkpoint whose moments belong to other groups of parameters.

    Raises:
        PrivacyError: it was saved with other ``learning_rate_factors``.
    """
    ours = [(group[_FACTOR], group[_NUMBERS]) for group in optimizer.param_groups]
    theirs = [(group.get(_FACTOR, 1.0), group.get(_NUMBERS)) for group in state["param_groups"]]
    if chosen:
        ours, theirs = ([(0.0, numbers) for _, numbers in groups] for groups in (ours, theirs))
    if all(numbers is None for _, numbers in theirs):  # saved before these were
        ours, theirs = ([(factor, None) for factor, _ in groups] for groups in (ours, theirs))
    if ours != theirs:
        made, saved = ([(f, len(n or ())) for f, n in groups] for groups in (ours, theirs))
        raise PrivacyError(
            f"learning_rate_factors of this run make groups of (factor, parameters) {made}, and "
            f"the checkpoint has {saved}, or others of these numbers, whose moments do not fit. "
            "Pass the factors, and train the parameters, that it was saved with."
        )
