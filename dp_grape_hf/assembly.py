"""What the arguments of a run are made into: engine, projections, optimizer.

The one place where a method's row decides which parts work together; ``mixin`` drives them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dp_grape_hf.arguments import DPGrapeArguments
from dp_grape_hf.batch_engine import BatchEngine
from dp_grape_hf.directions import DIRECTION, ZerothOrderSGD
from dp_grape_hf.engine import PrivateEngine
from dp_grape_hf.engines import make_engine
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.iterates import ITERATES, Iterate, LastIterate
from dp_grape_hf.ledger import Ledger
from dp_grape_hf.losses import LossFunction
from dp_grape_hf.methods import METHODS, Projected
from dp_grape_hf.optimizer import ProjectedOptimizer
from dp_grape_hf.per_sample import PerSampleEngine
from dp_grape_hf.placement import first_matches, ranks_for
from dp_grape_hf.plan import PrivacyPlan
from dp_grape_hf.projection import ProjectionSchedule, Projector
from dp_grape_hf.released_projection import ReleasedProjection
from dp_grape_hf.targets import input_dimensions, projection_targets
from dp_grape_hf.unit_engine import UnitEngine
from dp_grape_hf.zeroth_order import ZerothOrderEngine

Engine = PrivateEngine | BatchEngine
Savable = ReleasedProjection | Iterate


def make_engine_of_run(
    args: DPGrapeArguments,
    per_sample: PerSampleEngine,
    plan: PrivacyPlan,
    ledger: Ledger,
    noise_generator: torch.Generator,
) -> Engine:
    """Returns the engine of a method: the mechanism, or the batch's gradient without privacy."""
    distributed = args.world_size > 1
    row = METHODS[args.method]
    if not row.private and not row.zeroth_order:
        return BatchEngine(per_sample, ledger=ledger, distributed=distributed)
    if args.privacy_unit_column is not None:
        per_sample = UnitEngine(per_sample)
    return PrivateEngine(
        per_sample, ledger=ledger, noise_generator=noise_generator, distributed=distributed
    )


def per_sample_of_run(
    args: DPGrapeArguments, model: nn.Module, loss: LossFunction | None
) -> PerSampleEngine:
    """Returns what computes losses, and per-sample gradients or their stand-in."""
    row = METHODS[args.method]
    if row.zeroth_order:
        if row.private:
            _refuse_low_precision(args.method, model)
        return ZerothOrderEngine(
            model,
            loss,
            seed=args.projection_seed,
            perturbation=args.perturbation,
            n_directions=args.n_directions,
            distribution=args.direction_distribution,
        )
    return make_engine(args.engine, model, loss, args.grad_sample_mode)


def _refuse_low_precision(method: str, model: nn.Module) -> None:
    short = next((n for n, p in model.named_parameters() if p.dtype.itemsize < 4), None)
    if short is not None:
        raise PrivacyError(
            f"{short} is {model.get_parameter(short).dtype}, and {method=} magnifies the rounding "
            "of losses, which depends on batch-mates, beyond what clipping bounds. Load the model "
            "in float32."
        )


def optimizer_of_run(
    args: DPGrapeArguments, per_sample: PerSampleEngine
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Returns the optimizer's class and its arguments."""
    common = {
        "lr": args.learning_rate,
        "float32_updates": args.float32_updates,
        "rounding_seed": args.projection_seed,
    }
    if isinstance(per_sample, ZerothOrderEngine):
        return ZerothOrderSGD, common | {"directions": per_sample.directions}
    assert args.update_rule is not None
    settings: dict[str, dict[str, Any]] = {
        "adam": {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon},
        "momentum": {"momentum": args.adam_beta1},
    }
    return ProjectedOptimizer, {
        **common,
        "rule": args.update_rule,
        "moments_at_redraw": args.moments_at_redraw,
        "noise_correction": args.noise_correction,
        **settings.get(args.update_rule, {}),
    }


def follow(optimizer: torch.optim.Optimizer, per_sample: PerSampleEngine) -> None:
    """Makes an optimizer that was made before draw the directions together with the engine."""
    if isinstance(optimizer, ZerothOrderSGD) and isinstance(per_sample, ZerothOrderEngine):
        optimizer.directions = per_sample.directions


def iterate_of_run(args: DPGrapeArguments, trainable: Mapping[str, nn.Parameter]) -> Iterate | None:
    """Returns what chooses the weights that training ends with; None for those of its last step."""
    name = args.released_iterate
    if name == LastIterate.name:
        return None
    settings: dict[str, dict[str, Any]] = {"average": {"decay": args.average_decay}}
    return ITERATES[name](trainable, **settings.get(name, {}))


def save_with(optimizer: torch.optim.Optimizer, parts: Mapping[str, Savable]) -> None:
    """Makes the state of other parts of a run a part of the optimizer's, under their names."""

    def add(_: Any, state: dict[str, Any]) -> None:
        state.update({name: part.state_dict() for name, part in parts.items()})

    def take(_: Any, state: dict[str, Any]) -> None:
        for name, part in parts.items():
            if name not in state:
                raise PrivacyError(
                    f"The checkpoint's optimizer has no state of the {name}, without which the run "
                    "cannot go on as it would have. Resume with the method and the options that "
                    "the checkpoint was made with."
                )
            part.load_state_dict(state[name])

    optimizer.register_state_dict_post_hook(add)
    optimizer.register_load_state_dict_pre_hook(take)


class Projections:
    """The projections of a run, at capture or after the release.

    Args:
        args: the arguments of the run.
        model: the model.
        trainable: its trainable parameters by name.
        device: where projections are used.
    """

    def __init__(
        self,
        args: DPGrapeArguments,
        model: nn.Module,
        trainable: Mapping[str, nn.Parameter],
        device: torch.device,
    ) -> None:
        assert args.projection is not None
        self._trainable = trainable
        self._noise_correction = args.noise_correction
        where = METHODS[args.method].projected
        targets = []
        if where is not None:
            targets = projection_targets(
                model, trainable, args.optim_target_modules, args.project_embeddings
            )
        shapes = {name: tuple(trainable[name].shape) for name in targets}
        settings: dict[str, Any] = {
            "family": args.projection,
            "rank": _ranks(args, shapes),
            "update_steps": args.projection_update_steps,
            "seed": args.projection_seed,
            "device": device,
            "side": args.projection_side,
            "input_dims": input_dimensions(model),
        }
        self.schedule: ProjectionSchedule | None = None
        self.released: ReleasedProjection | None = None
        if where == Projected.AT_CAPTURE:
            self.schedule = ProjectionSchedule(shapes, **settings)
        elif where == Projected.AFTER_RELEASE:
            self.released = ReleasedProjection(shapes, **settings)

    def at_capture(self, step: int) -> Mapping[str, Projector]:
        """Returns the projectors that per-sample gradients meet at a step, counted from 0."""
        return {} if self.schedule is None else self.schedule.at(step)

    def hand_over(
        self,
        optimizer: torch.optim.Optimizer,
        step: int,
        private_grads: dict[str, Tensor],
        noise_std: float,
    ) -> None:
        """Gives the optimizer what was released, projected if that is due only now.

        Args:
            optimizer: made of ``optimizer_of_run``.
            step: counted from 0.
            private_grads: by name, the release.
            noise_std: of the noise in each of its numbers.

        Guarantee:
            Only private gradients are seen: this is post-processing.
        """
        if isinstance(optimizer, ZerothOrderSGD):
            optimizer.receive(private_grads[DIRECTION], step)
            return
        assert isinstance(optimizer, ProjectedOptimizer)
        projectors = self.at_capture(step)
        stds = dict.fromkeys(private_grads, noise_std) if self._noise_correction else {}
        if self.released is not None:
            projectors = self.released.at(step, private_grads)
            for name, projector in projectors.items():
                private_grads[name] = projector.project(private_grads[name])
                if stds:  # a column of P of length 1 leaves the noise as it is
                    stds[name] *= float(projector.matrix.norm()) / projector.rank**0.5
        weights = self._trainable
        optimizer.receive(
            {weights[name]: gradient for name, gradient in private_grads.items()},
            {weights[name]: projector for name, projector in projectors.items()},
            noise_std={weights[name]: std for name, std in stds.items()},
        )


# Of a parameter group, and which of all parameters it has.
_FACTOR, _NUMBERS = "learning_rate_factor", "parameter_numbers"


def rate_factors(args: DPGrapeArguments, names: Iterable[str]) -> dict[str, float]:
    """Returns the factor of the learning rate of each parameter that a pattern matches.

    Args:
        args: of the run; of its ``learning_rate_factors`` the first pattern that matches counts.
        names: of all parameters that are trained.

    Raises:
        PrivacyError: for a pattern that is never the first to match.
    """
    factors: Any = args.learning_rate_factors or {}
    first = first_matches(
        list(names), factors, "learning_rate_factors", "the parameters that are trained"
    )
    return {name: factors[match] for name, match in first.items() if match is not None}


def scale_rates(optimizer: torch.optim.Optimizer, factor_of: Mapping[nn.Parameter, float]) -> None:
    """Gives some parameters learning rates of their own, in parameter groups of their own.

    Updates are functions of private gradients, so their lengths are free to choose.

    Args:
        optimizer: just made, before its scheduler. It will refuse the state of one with others.
        factor_of: parameter -> factor.
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
    optimizer.register_load_state_dict_pre_hook(_require_same_factors)


def _one_first(factor: float) -> tuple[bool, float]:
    return factor != 1, factor


def _require_same_factors(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Refuses a checkpoint whose moments belong to other groups of parameters.

    Raises:
        PrivacyError: it was saved with other ``learning_rate_factors``.
    """
    ours = [(group[_FACTOR], group[_NUMBERS]) for group in optimizer.param_groups]
    theirs = [(group.get(_FACTOR, 1.0), group.get(_NUMBERS)) for group in state["param_groups"]]
    if all(numbers is None for _, numbers in theirs):  # saved before these were
        ours, theirs = ([(factor, None) for factor, _ in groups] for groups in (ours, theirs))
    if ours != theirs:
        made, saved = ([(f, len(n or ())) for f, n in groups] for groups in (ours, theirs))
        raise PrivacyError(
            f"learning_rate_factors of this run make groups of (factor, parameters) {made}, and "
            f"the checkpoint has {saved}, or others of these numbers, whose moments do not fit. "
            "Pass the factors, and train the parameters, that it was saved with."
        )


def _ranks(args: DPGrapeArguments, shapes: Mapping[str, tuple[int, ...]]) -> int | dict[str, int]:
    """Returns r, or the rank of every weight where ``projection_ranks`` says more."""
    asked = args.projection_ranks
    if isinstance(asked, Mapping):
        return ranks_for(shapes, args.projection_rank, asked)
    return args.projection_rank
