"""Training from losses alone: one number per sample and direction, from forward passes.

A step has K public random directions z_k over all trainable parameters. Sample i's coordinates are
the finite differences of its loss, which cost two forward passes and no backward pass:

    s_ik = (loss_i(W + mu z_k) - loss_i(W - mu z_k)) / (2 mu),    W -= lr / K * sum_k g_k z_k

where g is the private mean of the s_i that ``mechanism`` releases like any other gradient: clipped
to C jointly over the K directions, summed, with noise. MeZO (Malladi et al. 2023) is this without
clip and noise. DPZero (Zhang et al. 2024, Algorithm 2) has one direction. DP-ZO (Tang et al. 2024)
clips the difference of the losses, not the quotient: its threshold is ``2 mu C`` in terms of C
here. Clipping several directions jointly is the order of DP-AggZO (Bao et al. 2025). As for
every method, neighbours differ by one sample that is added or removed. So the noise has std
``sigma C`` and not ``2 sigma C``.

The engine never writes to the weights. While a pass runs, each operation that reads a weight is
given a copy ``W + mu z``, which is freed after it. So the weights stay what they were, bit for bit.

Shapes: B samples in the batch, K directions, d trainable parameters.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dp_grape_hf import METHODS, PrivacyError
from dp_grape_hf.arguments import Method, OptimizerAndOptions, Update
from dp_grape_hf.gradients import (
    ANSWERS,
    METADATA,
    Inputs,
    LossFunction,
    PerSampleEngine,
    QueryEngine,
)
from dp_grape_hf.projections import is_short, round_at_random, rounding_generator
from recipes.paper.methods.directions import Directions

LEAST_PERTURBATION = 1e-4
PERTURBATION, N_DIRECTIONS = 1e-3, 1
"""The defaults of the options of these methods: mu, in the unit of a weight, and K."""


class ZerothOrderEngine(QueryEngine):
    """Per-sample finite differences of the loss along the directions of a step.

    Call ``use`` once for each logical batch, before its physical batches. Dropout is off, as in
    MeZO and DPZero.

    Args:
        model: as in ``PerSampleEngine``.
        loss: as in ``PerSampleEngine``.
        seed: the public seed of the directions.
        perturbation: mu, how far from the weights the losses are taken; in the unit of a weight.
        n_directions: K.

    Raises:
        UnsupportedModelError: as in ``PerSampleEngine``.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction | None = None,
        *,
        seed: int,
        perturbation: float = PERTURBATION,
        n_directions: int = N_DIRECTIONS,
    ) -> None:
        super().__init__(model, loss)
        self.perturbation, self.magnified = perturbation, 1 / perturbation
        self.directions = Directions(self.trainable, seed, n_directions)
        self.size = n_directions
        self._step: int | None = None
        self.read = set()

    def use(self, step: int) -> None:
        """Choose the directions of this step of training, until the next call."""
        self._step = step

    def query(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Returns losses (B,) and finite differences (B, K).

        A loss is the mean over the sample's passes, at ``W + mu z_k`` and ``W - mu z_k``.

        Raises:
            PrivacyError: without ``use``.
        """
        if self._step is None:
            raise PrivacyError("use(step) was not called: it is not known which directions to try.")
        mu = self.perturbation
        losses, differences = [], []
        for number in range(self.directions.count):
            sides = []
            for distance in (mu, -mu):
                with _Displaced(self.directions, self._step, number, distance) as displaced:
                    side = self.losses(inputs).detach()
                sides.append(side if side.dtype is torch.float64 else side.float())
                self.read |= displaced.used
            ahead, behind = sides
            losses.append((ahead + behind) / 2)
            differences.append((ahead - behind) / (2 * mu))
        return torch.stack(losses).mean(0), torch.stack(differences, 1)


class _Displaced(TorchFunctionMode):
    """Gives every operation that reads a trainable parameter ``W + distance * z`` in its place.

    A direction along some of the uses of a weight would be another direction. Operations are where
    all uses meet: tied weights, and modules that read the weights of others.
    """

    def __init__(self, directions: Directions, step: int, number: int, distance: float) -> None:
        super().__init__()
        self._directions = directions
        self._where = step, number, distance
        self.used: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if func in METADATA or name == "__set__":
            return func(*args, **kwargs)
        if name == "__get__":
            value = func(*args)
            if not isinstance(value, Tensor):  # a shape, a device: no copy for that
                return value
        return func(*self._replace(args), **{k: self._replace(v) for k, v in kwargs.items()})

    def _replace(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            name = self._directions.name_of(value)
            if name is None:
                return value
            self.used.add(name)
            return self._directions.displaced(value, *self._where)
        if type(value) in (tuple, list):
            return type(value)(self._replace(item) for item in value)
        return value


class ZerothOrderSGD(torch.optim.Optimizer):
    """Moves the weights along the directions of a step, by the private scalars of its release.

    ``W -= lr / K * sum_k g_k z_k`` with decoupled weight decay. It has no state: the directions
    are drawn anew. It is post-processing: it sees private numbers only, and costs no privacy. A
    bfloat16 or float16 weight is rounded at random at every step, without bias, so that updates
    below its precision count on average.

    Args:
        params: parameters or parameter groups, which may set ``lr`` and ``weight_decay``.
        directions: the directions of the engine whose release it receives.
        lr: the learning rate; the default is the rate of DPZero's and MeZO's experiments.
        weight_decay: decoupled; a step multiplies the weight by ``1 - lr * weight_decay``.
        rounding_seed: the public seed of the rounding.
    """

    def __init__(
        self,
        params: Iterable[Any],
        directions: Directions,
        lr: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        rounding_seed: int = 0,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.directions = directions
        self._rounding_seed = rounding_seed
        self._received: tuple[list[float], int] | None = None

    def receive(self, private_scalars: Tensor, step: int) -> None:
        """Takes the private scalars (K,) of a release, and the step whose directions they are of.

        Raises:
            PrivacyError: if there is not one scalar per direction.
        """
        if private_scalars.shape != (self.directions.count,):
            raise PrivacyError(
                f"The private scalars have shape {tuple(private_scalars.shape)}, and a step has "
                f"{self.directions.count} directions. Hand over the release under {ANSWERS!r}."
            )
        self._received = private_scalars.tolist(), step

    def state_bytes(self) -> int:
        """Returns 0: nothing is kept from step to step."""
        return 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates the parameters from the scalars received, once.

        Raises:
            PrivacyError: if nothing was received since the last step: there was no release.
        """
        if closure is not None:
            raise PrivacyError("A closure would evaluate without noise; it is not supported.")
        if self._received is None:
            raise PrivacyError("step() without receive(): there is no private scalar to apply.")
        (scalars, step), self._received = self._received, None
        rounded = 0
        for group in self.param_groups:
            lr = float(group["lr"])
            decay = 1 - lr * group["weight_decay"]
            coefficients = [-lr * scalar / len(scalars) for scalar in scalars]
            for weight in group["params"]:
                if self.directions.name_of(weight) is None:
                    continue
                for rows, update in self.directions.combined(weight, step, coefficients):
                    if is_short(weight):
                        number = (step << 32) + rounded
                        coins = rounding_generator(self._rounding_seed, number, weight.device)
                        total = weight[rows].float().mul_(decay).add_(update)
                        weight[rows] = round_at_random(total, weight.dtype, coins)
                        rounded += 1
                    else:
                        weight[rows].mul_(decay).add_(update)


# ---- The rows ----


def _engine(args: Any, model: nn.Module, loss: LossFunction | None) -> ZerothOrderEngine:
    short = next((n for n, p in model.named_parameters() if is_short(p)), None)
    if METHODS[args.method].private and short is not None:
        raise PrivacyError(
            f"{short} is {model.get_parameter(short).dtype}, and method={args.method!r} "
            "magnifies the rounding of losses, which depends on batch-mates, beyond what "
            "clipping bounds. Load the model in float32."
        )
    return ZerothOrderEngine(
        model,
        loss,
        seed=args.projection_seed,
        perturbation=getattr(args, "perturbation", PERTURBATION),
        n_directions=getattr(args, "n_directions", N_DIRECTIONS),
    )


class _AlongDirections(Update):
    """Moves the weights along the directions of the engine."""

    def __init__(self, args: Any, engine: PerSampleEngine) -> None:
        assert isinstance(engine, ZerothOrderEngine)
        self._directions = engine.directions

    def optimizer(self, usual: OptimizerAndOptions) -> OptimizerAndOptions:
        options = {name: usual[1][name] for name in ("lr", "rounding_seed")}
        return ZerothOrderSGD, options | {"directions": self._directions}

    def hand_over(self, optimizer: Any, step: int, private_grads: Mapping[str, Tensor]) -> None:
        optimizer.directions = self._directions  # it may come from an earlier run
        optimizer.receive(private_grads[ANSWERS], step)


def _refuse(args: Any) -> None:
    private = METHODS[args.method].private
    perturbation = getattr(args, "perturbation", PERTURBATION)
    if private and perturbation < LEAST_PERTURBATION:
        raise PrivacyError(
            f"{perturbation=} is below {LEAST_PERTURBATION:g}: the rounding of a loss, which "
            "batch-mates have an influence on, is divided by it and would count for more than the "
            "clip allows."
        )
    if args.update_rule != "sgd":
        raise PrivacyError(
            f"update_rule={args.update_rule!r} needs gradients, which method={args.method!r} "
            "has not. Leave it out."
        )
    if private and args.mixed_precision != "no":
        raise PrivacyError(
            f"mixed_precision={args.mixed_precision!r} with method={args.method!r} is refused: "
            "a finite difference magnifies the rounding of a loss, which depends on "
            "batch-mates, beyond what clipping bounds. Leave bf16 out."
        )


_USUAL: dict[str, Any] = {"update_rule": "sgd", "update": _AlongDirections}
_USUAL |= {"query": _engine, "refuse": _refuse}

ROWS = {
    "dpzero": Method("DPZero", "Zhang et al. 2024, Algorithm 2", **_USUAL),
    "dp_zo": Method("DP-ZO", "Tang et al. 2024", **_USUAL),
    "mezo": Method("MeZO", "Malladi et al. 2023", private=False, **_USUAL),
}
