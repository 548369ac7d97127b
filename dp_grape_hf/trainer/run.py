"""One private run: its parts, made from the arguments, and its step.

The row of a method in ``METHODS`` selects the parts. ``PrivateRun.step`` defines the order in which
a step uses them. The Trainer, the memory planner and the benchmarks all use this class.
"""

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
from dp_grape_hf.choosing import last_layer, reading_numbers
from dp_grape_hf.distributed import from_first, group_size
from dp_grape_hf.errors import PrivacyError, UnsupportedModelError
from dp_grape_hf.gradients import (
    Compilation,
    FlatTensors,
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
from dp_grape_hf.optimizers import UPDATE_RULES, LowRankUpdates, ProjectedOptimizer
from dp_grape_hf.phases import PROJECTORS, REDRAW, RELEASE, RELEASED, UPDATE, Observer
from dp_grape_hf.projections import (
    PRINCIPAL,
    Batches,
    PrincipalProjection,
    ProjectionSchedule,
    Projector,
    SavedProjection,
    SyntheticInputs,
    input_dimensions,
    on_inputs,
    principal_directions,
    projection_targets,
)
from dp_grape_hf.sharding import most_of_any, reshard
from dp_grape_hf.trainer.inputs_by_form import InputsByForm
from dp_grape_hf.trainer.remembered import reused_or_made

AtCapture = ProjectionSchedule | PrincipalProjection


class Outcome(NamedTuple):
    """The result of a step."""

    norm: Tensor  # L2 norm of the private update, a scalar; private
    loss: Tensor  # sum of the losses of the sampled batch, a scalar; not private


class PrivateRun:
    """The parts of a run, and its step.

    The constructor checks that arguments and model fit each other. Then ``start`` makes the
    mechanism, and ``take`` receives the optimizer. A step needs both.

    Args:
        args: the arguments of the run.
        model: on its device; parameters with ``requires_grad`` are trained.
        loss: ``(outputs, labels) -> (B,)``; chosen by the model's head if None.
        observer: receives the phases of a step.
        public_inputs: makes the inputs on which principal directions are measured; synthetic
            inputs if None.
        clipped_apart: the module, if any, whose parameters have a separate clipping bound.

    Attributes:
        rate_factors, gradient_factors: parameter name -> factor, where it is not 1.
        per_sample: the engine, which computes losses and gradients of single examples.
        schedule: the projections in the backward pass; None without any.
        update: what a plug-in does with private updates; None without a plug-in.
        projectors: parameter name -> projector of the last step.
        mechanism: makes the private update of a logical batch; None before ``start``.
        signal: estimates the signal in the private updates.
        optimizer: receives the private updates; None before ``take``.
        idle: one row on which the model runs while other processes have more physical batches;
            None if the model is not sharded.

    Raises:
        PrivacyError: arguments and model do not fit each other.
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
    ) -> None:
        self.args, self.model = args, model
        self.per_sample = _per_sample(args, model, loss)
        if observer is not None:
            self.per_sample.observer = observer
        self._checked_engine = self.per_sample  # ``start`` adds spot checks
        self.trainable = self.per_sample.trainable
        update = METHODS[args.method].update
        self.update: Update | None = None if update is None else update(args, self.per_sample)
        default: OptimizerAndOptions = (
            ProjectedOptimizer,
            {
                "lr": args.learning_rate,
                "rounding_seed": args.projection_seed,
                "rule": args.update_rule,
                **rule_settings(args),
            },
        )
        self.optimizer_cls_and_kwargs = (
            default if self.update is None else self.update.optimizer(default)
        )
        self.rate_factors, self.gradient_factors = (
            factors_by_name(option, getattr(args, option) or {}, self.trainable)
            for option in ("learning_rate_factors", "gradient_factors")
        )
        self._public_inputs = public_inputs or SyntheticInputs(model, None, args.projection_seed)
        self.schedule = _projections(
            args, model, self.trainable, self._public_inputs, clipped_apart
        )
        self.projectors: Mapping[str, Projector] = {}
        self.mechanism: PrivateMechanism | None = None
        self.signal = Signal()
        self.optimizer: torch.optim.Optimizer | None = None
        self._low_rank: LowRankUpdates | None = None
        self._places: tuple[Any, Any] = None, {}  # a layout, and its places by weight
        self.idle: Inputs | None = None

    def examine(self, number: int, batch: Inputs, size: int) -> None:
        """Compare gradients of a physical batch with gradients of its rows alone (``replay``).

        Args:
            number: the step, from 0.
            batch: some examples.
            size: the number of rows to examine; rows repeat if the batch has fewer.

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
        """Let all processes run a sharded model equally often, from this step on (``sharding``).

        Args:
            number: the step, from 0.
            batch: some examples, the same in all processes.

        Raises:
            UnsupportedModelError: as in ``PerSampleEngine.stay_in_step``.
        """
        self.per_sample.stay_in_step(batch, self.projectors_at(number))
        reshard(self.model)
        self.idle = rows_of(batch, slice(1))

    def start(self, ledger: Ledger, noise_generator: torch.Generator) -> None:
        """Make the mechanism, and begin with the present weights.

        Args:
            ledger: records the private updates.
            noise_generator: the secret generator of the noise, on the parameters' device.
        """
        self.signal = Signal(ledger.mechanism.bands)
        if METHODS[self.args.method].query is None:
            self._checked_engine = self._with_spot_checks(ledger.mechanism.clipped_apart)
        units = self.args.privacy_unit_column is not None
        self.mechanism = PrivateMechanism(
            UnitEngine(self._checked_engine) if units else self._checked_engine,
            ledger=ledger,
            noise_generator=noise_generator,
            distributed=group_size() > 1,
        )

    def _with_spot_checks(self, head: str | None) -> SpotCheckedEngine:
        """Return the engine with spot checks: some rows are computed again, alone."""
        args = self.args
        assert args.max_grad_norm is not None
        bound = bound_of_part(args.max_grad_norm, head)
        least_norm = STABILITY if args.clipping == Clipping.AUTOMATIC else bound
        generator = random.Random(from_first(lambda: secrets.token_bytes(32)))
        factors = {name: self.gradient_factors.get(name, 1.0) for name in self.trainable}
        parts = in_parts(factors, head).values()
        tolerance = tolerance_for(self.model)
        return SpotCheckedEngine(self.per_sample, tolerance, parts, least_norm, generator)

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Return a new optimizer of all trained parameters, and use it."""
        cls, options = self.optimizer_cls_and_kwargs
        optimizer = cls(self.trainable.values(), **options)
        self.take(optimizer)
        return optimizer

    def take(self, optimizer: torch.optim.Optimizer, *, new: bool = True) -> None:
        """Use this optimizer from now on.

        If no seed reproduces the projection, its state becomes a part of the optimizer's state.

        Args:
            optimizer: with the class and the arguments of ``optimizer_cls_and_kwargs``.
            new: whether it was just made, and has no scheduler yet.
        """
        if new:
            factors = {self.trainable[n]: factor for n, factor in self.rate_factors.items()}
            scale_rates(optimizer, factors, chosen=self.args.chooses)
        self.optimizer = optimizer
        if self.mechanism is not None:
            projection = self.schedule if self.update is None else self.update.projection
            if isinstance(projection, SavedProjection):
                _save_with(optimizer, projection)

    def use_rates(self, by_name: Mapping[str, float]) -> None:
        """Use these learning rates, by parameter name, for optimizers made from now on."""
        cls, options = self.optimizer_cls_and_kwargs
        most = mode(by_name.values())
        self.optimizer_cls_and_kwargs = cls, options | {"lr": most}
        self.rate_factors = {
            n: by_name[n] / most for n in self.trainable if by_name.get(n, most) != most
        }

    def projectors_at(self, number: int) -> Mapping[str, Projector]:
        """Return the projectors of per-sample gradients at a step, counted from 0."""
        return {} if self.schedule is None else self.schedule.at(number)

    def bands_at_most(self) -> int:
        """Return the most bands b of correlated noise that fit into half the memory of the weights.

        The noise of b - 1 steps is stored, and a sum of updates for ``signal``, in float32. The
        result is 1 for Adam, which divides each update by its size: later noise then does not
        cancel earlier noise.
        """
        assert self.args.update_rule is not None
        if 2 in UPDATE_RULES[self.args.update_rule].moments.values():
            return 1
        placed = self._placements
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
        return {name: place.rank for name, place in self._placements.items()}

    @property
    def _placements(self) -> Mapping[str, Any]:
        return {} if self.schedule is None else self.schedule.placements

    def abandon(self) -> None:
        """Drop the logical batch after an error, and let the other processes fail as well."""
        assert self.mechanism is not None
        self.mechanism.abandon()

    def step(
        self,
        number: int,
        batch: LogicalBatch,
        prepare: Callable[[Any], Inputs] = lambda inputs: inputs,
    ) -> Outcome:
        """Make one private update from a logical batch, and pass it to the optimizer.

        The weights move later, when ``optimizer.step()`` is called. With several processes, this
        is a collective call.

        Args:
            number: the step, from 0.
            batch: the sampled batch, in physical batches; without any if it is empty.
            prepare: moves a physical batch to the device of the model.

        Raises:
            OtherProcessFailed: as in ``PrivateMechanism.release``.

        Guarantee:
            The optimizer's input and the norm are functions of the private update alone.
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
            observer.computed(PROJECTORS, self.projectors)
            if self._low_rank is not None:
                self._low_rank.set_projectors(self.projectors)
            self.mechanism.begin(self.projectors)
        loss = torch.zeros((), device=self.per_sample.device)
        missing = 0
        if self.idle is not None:
            reshard(self.model)
            missing = most_of_any(len(batch), loss.device) - len(batch)
        for physical in batch:
            loss += self.mechanism.accumulate(prepare(physical)).sum()
        if self.idle is not None:
            for _ in range(missing):  # as often as the other processes; the results are discarded
                self._checked_engine(self.idle, self.projectors)
            reshard(self.model)
        with observer.phase(RELEASE):
            private_grads = self.mechanism.release()
        observer.computed(RELEASED, private_grads)
        norm = self.signal.add(private_grads, self.mechanism.independent_std, self.gradient_factors)
        with observer.phase(UPDATE):
            self._hand_over(number, private_grads)
        return Outcome(norm, loss)

    def _hand_over(self, number: int, private_grads: FlatTensors) -> None:
        """Pass the private update to the optimizer.

        Guarantee:
            This is post-processing: it uses the private update and public values alone.
        """
        if self.update is not None:
            self.update.hand_over(self.optimizer, number, private_grads)
            return
        assert isinstance(self.optimizer, ProjectedOptimizer)
        weights, layout = self.trainable, private_grads.layout
        if self._places[0] is not layout:
            self._places = layout, {weights[name]: x for name, x in layout.places.items()}
        self.optimizer.receive(
            {weights[name]: gradient for name, gradient in private_grads.others.items()},
            {weights[name]: projector for name, projector in self.projectors.items()},
            *(private_grads.flat, self._places[1]),
        )

    # ---- Updates stored separately ----

    def store_updates_separately(self) -> None:
        """Store updates of 16-bit weights separately, in float32, where a module is called.

        Public inputs show which modules the model calls, so all processes agree.
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
        """Merge separately stored updates into the weights."""
        if self._low_rank is not None:
            self._low_rank.merge_()

    def stop(self) -> None:
        """Merge updates, and no longer store them separately."""
        if self._low_rank is not None:
            self._low_rank.remove()
            self._low_rank = None
            self.per_sample.add_branches({})


# ---- Parts made from the arguments ----


def _per_sample(
    args: DPGrapeArguments, model: nn.Module, loss: LossFunction | None
) -> PerSampleEngine:
    """Return the engine: for per-sample gradients, or for the vectors of a plug-in.

    Raises:
        PrivacyError: the engine of a private plug-in is not a ``QueryEngine``.
    """
    row = METHODS[args.method]
    if row.query is not None:
        engine = row.query(args, model, loss)
        if row.private and not isinstance(engine, QueryEngine):
            raise PrivacyError(
                f"method={args.method!r} is private and computes with {type(engine).__name__}, "
                "whose vectors are not examined. Derive the engine from QueryEngine."
            )
        return engine
    options: dict[str, Any] = {}
    if args.torch_compile:
        rows = args.per_device_train_batch_size
        how = Compilation(rows, args.torch_compile_backend, args.torch_compile_mode)
        options["compilation"] = how
    return make_engine(args.engine, model, loss, args.grad_sample_mode, **options)


def rule_settings(args: DPGrapeArguments) -> dict[str, Any]:
    """Return the settings of the update rule."""
    assert args.update_rule is not None
    settings: dict[str, dict[str, Any]] = {
        "adam": {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon},
        "momentum": {"momentum": args.adam_beta1},
    }
    return settings.get(args.update_rule, {})


def _save_with(optimizer: torch.optim.Optimizer, projection: SavedProjection) -> None:
    """Make the state of a projection a part of the optimizer's state."""

    def add(_: Any, state: dict[str, Any]) -> None:
        state["projection"] = projection.state_dict()

    def take(_: Any, state: dict[str, Any]) -> None:
        if "projection" not in state:
            raise PrivacyError(
                "The checkpoint's optimizer state has no projection, so the run cannot continue "
                "with the same P. Resume with the method and the options with which "
                "the checkpoint was made."
            )
        projection.load_state_dict(state["projection"])

    optimizer.register_state_dict_post_hook(add)
    optimizer.register_load_state_dict_pre_hook(take)


def _projections(
    args: DPGrapeArguments,
    model: nn.Module,
    trainable: Mapping[str, nn.Parameter],
    public_inputs: Batches,
    head: str | None,
) -> AtCapture | None:
    """Return the projections in the backward pass, if the method has any."""
    assert args.projection is not None
    assert args.projection_rank is not None
    if not METHODS[args.method].projected_at_capture:
        return None
    targets = projection_targets(model, trainable, args.optim_target_modules)
    if args.projection == PRINCIPAL:
        with reading_public_inputs(f"projection={args.projection!r}"):
            unfit = from_first(lambda: _without_directions(args, model, public_inputs))
        targets = [name for name in targets if name not in unfit]
    shapes = {name: tuple(trainable[name].shape) for name in targets}
    settings: dict[str, Any] = {
        "rank": args.projection_rank,
        "update_steps": args.projection_update_steps,
        "device": next(iter(trainable.values())).device,
    }
    if args.projection != PRINCIPAL:
        settings |= {"family": args.projection, "seed": args.projection_seed}
        return ProjectionSchedule(shapes, input_dims=input_dimensions(model), **settings)
    # A head with its own clipping bound has a square P, partially whitened: features have most of
    # their energy in a few directions, which would take most of C.
    weight = f"{head}.weight"
    square = [weight] if weight in trainable else []
    shapes |= {name: tuple(trainable[name].shape) for name in square}
    measure = partial(_principal, args, model, public_inputs, square)
    settings |= {"measure": measure, "square": square}
    dims = input_dimensions(model, of_features=True)
    return PrincipalProjection(shapes, input_dims=dims, **settings)


def _without_directions(args: DPGrapeArguments, model: nn.Module, inputs: Batches) -> list[str]:
    """Return the weights that are not projected in a model from outside transformers.

    These are the last layer, if the model returns its output, as in transformers' models; and
    layers that read the numbers of an example, or its pixels. The directions of synthetic numbers
    are random, and 16 of them would lose most of an example.

    Raises:
        PrivacyError: the inputs of the model are unknown.
    """
    batch = next(iter(inputs()))
    if args.optim_target_modules is not None or isinstance(inputs, SyntheticInputs):
        return []  # the user or the configuration names them; inputs are tokens, images or sound
    with evaluating(model):
        batch = rows_of(batch, slice(2))
        last = last_layer(model, batch)
        unfit = [last.name] if last.is_head else []
        if isinstance(inputs, InputsByForm):
            unfit += reading_numbers(model, batch)
    return [f"{name}.weight".lstrip(".") for name in unfit]


def _principal(
    args: DPGrapeArguments,
    model: nn.Module,
    inputs: Batches,
    square: Collection[str],
    ranks: Mapping[str, int],
) -> dict[str, Tensor]:
    """Return P by weight name, computed by the first process for all processes.

    Raises:
        UnsupportedModelError: the model cannot be run on the inputs.
    """

    def measured() -> dict[str, Tensor]:
        with evaluating(model), reading_public_inputs(f"projection={args.projection!r}"):
            principal = principal_directions(model, ranks, inputs, args.projection_seed)
        return {n: p.whitened() if n in square else p.directions for n, p in principal.items()}

    settings = {"ranks": {**ranks}, "square": [*square], "seed": args.projection_seed}
    matrices = reused_or_made("principal directions", settings, measured)
    if group_size() > 1:
        for matrix in matrices.values():
            on_device = matrix.to(args.device)
            dist.broadcast(on_device, src=0)
            matrix.copy_(on_device)
    return matrices


@contextmanager
def reading_public_inputs(purpose: str) -> Iterator[None]:
    """Raise an error that says what to do if the model cannot be run on public inputs."""
    try:
        yield
    except (PrivacyError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # code of any model
        raise UnsupportedModelError(
            f"{purpose} runs the model on public inputs, and that failed: {error!r}. Pass "
            "public_dataset= or public_example= to the trainer, with inputs that the model can "
            "read, or set learning_rate and projection='gaussian'."
        ) from error


# Keys of a parameter group: its factor, and the indices of its parameters among all.
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
        optimizer: just made, without a scheduler. It will refuse a state with other factors.
        factor_of: parameter -> factor.
        chosen: whether the package chose the factors. A saved state may then have other factors,
            which are used.
    """
    every = (p for group in optimizer.param_groups for p in group["params"])
    number_of = {p: number for number, p in enumerate(every)}
    groups = []
    for group in optimizer.param_groups:
        by_factor: dict[float, list[nn.Parameter]] = {}
        for p in group["params"]:
            by_factor.setdefault(factor_of.get(p, 1.0), []).append(p)
        # The first group has factor 1, because its learning rate is logged.
        for factor in sorted(by_factor or {1.0}, key=lambda factor: (factor != 1, factor)):
            members = by_factor.get(factor, [])
            scaled = {"lr": group["lr"] * factor, "params": members}
            numbers = [number_of[p] for p in members]
            groups.append({**group, **scaled, _FACTOR: factor, _NUMBERS: numbers})
    optimizer.param_groups[:] = groups
    optimizer.register_load_state_dict_pre_hook(partial(_require_same_factors, chosen=chosen))


def _require_same_factors(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], *, chosen: bool
) -> None:
    """Refuse a checkpoint whose optimizer state has other parameter groups.

    Raises:
        PrivacyError: the state was saved with other ``learning_rate_factors``.
    """
    numbered = any(_NUMBERS in group for group in state["param_groups"])  # older versions: none
    ours, theirs = (
        [
            (0.0 if chosen else group.get(_FACTOR, 1.0), group.get(_NUMBERS) if numbered else None)
            for group in groups
        ]
        for groups in (optimizer.param_groups, state["param_groups"])
    )
    if ours != theirs:
        made, saved = ([(f, len(n or ())) for f, n in groups] for groups in (ours, theirs))
        raise PrivacyError(
            f"learning_rate_factors of this run make groups of (factor, parameters) {made}, and "
            f"the checkpoint has {saved}, so its optimizer state does not fit. "
            "Pass the factors, and train the parameters, of the checkpoint."
        )
