"""Learning rates that a model tolerates: the lower one of two bounds.

**Noise.** The noise of a run is known before it begins: the standard deviation of each private
update, the steps, the update rule, the schedule. So one can add to the weights the noise of all
steps, and compare the last layer's input activations before and after, on synthetic inputs. They
change nearly as much on real inputs.

A larger learning rate carries more signal and more noise alike. So the bound depends on the model
and hardly on the task. For a new head it is a noise in the logits of about 1, the size of a label
there. If the head puts out numbers, it is a small part of a label.

**Stability.** If the noise is small, another bound holds: a single step must not undo the
pretraining. The largest step is one in which the clipped gradients of all examples agree. Clipping
bounds its length. Its direction comes from synthetic inputs.

A model with random weights has no pretraining that noise could destroy. One learning rate serves
all of it, with the same two bounds in units of its weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from statistics import mode
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dp_grape_hf.accounting import correlated
from dp_grape_hf.optimizers import UPDATE_RULES, moved_from_zero
from dp_grape_hf.phases import advance
from dp_grape_hf.projections import MATRIX_LAYERS, Projector, on_inputs, output_embeddings

DRIFT = 0.6
"""Of a body: relative change of centred features that a rate is chosen for. Noise alone may make
it over the run, and signal alone in one step."""

NOISE, STABILITY, GIVEN = "noise", "stability", "your choice"
"""The limits of a learning rate."""

_HEAD_STEP = 25.0
"""Times the noise that an output is to have: how far a step of nothing but signal may move it."""


class Output(NamedTuple):
    """The kind of output of a head, and the standard deviation that noise alone may add to it."""

    name: str
    noise: float


LOGIT = Output("a logit", 1.2)
"""MiniLM's head alone, TREC and SST-2 at epsilon 1, 2, 6, 24 seeds: within 0.4 points of the best
of 0.3 to 4 everywhere."""
NUMBER = Output("a number", 0.2)
"""Of a regression, whose labels are taken to be about 1. MiniLM's head alone, the five classes of
SST-5 as numbers, scaled to a deviation of 0.5 to 3, epsilon 1, 2, 6, 3 seeds: a correlation within
0.07 of the best of 0.05 to 0.3 everywhere; at 1.2 it is 0.47 where the best is 0.60."""

FRESH_WALK, FRESH_STEP = 2.7, 0.15
"""Of a model without pretrained weights, in units of weights that pass on what they are given at
its size: the most that the noise of a run adds to a number, and that a step of nothing but signal
moves all."""

_NUMBERS = 512  # that are walked, of which a standard deviation is taken
_TRIES, _CLOSE = 12, 0.03
_START = 0.1  # of the norm of a weight: the first move that is tried


def walk_of_noise(
    rule: str,
    settings: Mapping[str, Any],
    std: float,
    schedule: Sequence[float],
    bands: Sequence[float] = (1.0,),
) -> float:
    """Returns how far the noise of a run takes a number, as a standard deviation, at a rate of 1.

    The rule itself is run, on noise.

    Args:
        rule: a name in ``UPDATE_RULES``.
        settings: its own.
        std: of the noise in each number of a private gradient, before it is correlated.
        schedule: what the rate is multiplied by at each step.
        bands: the coefficients that it is correlated with over steps.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(len(schedule), _NUMBERS, generator=generator) * std
    noise = torch.from_numpy(correlated(bands, drawn.numpy())).float()
    moved = moved_from_zero(UPDATE_RULES[rule], settings, noise, schedule)
    return float(moved.square().mean().sqrt())


def push_of_signal(
    rule: str, settings: Mapping[str, Any], sizes: Tensor, schedule: Sequence[float]
) -> Tensor:
    """Returns how far a run with constant gradients moves numbers, at a rate of 1.

    Args:
        rule: a name in ``UPDATE_RULES``.
        settings: its own.
        sizes: of the gradients.
        schedule: what the rate is multiplied by at each step.

    Returns:
        The distances, of the shape of ``sizes``.
    """
    return -moved_from_zero(UPDATE_RULES[rule], settings, (sizes for _ in schedule), schedule)


class Group(NamedTuple):
    """The properties of some parameters before a run."""

    name: str
    parameters: tuple[str, ...]
    numbers: int  # that meet noise
    rate: float
    noise: float  # norm of the noise in a release
    most: float  # norm that the signal in a release can have at most
    effect: float  # of the noise of the whole run: the drift of features, or in the output
    limit: str = GIVEN  # of the rate
    output: Output | None = None  # of a head
    changes: str = "features"  # what the effect is relative to, without an output
    reach: float = math.inf  # of a head: how far signal can move its output, if all is signal


class Rates(NamedTuple):
    """Learning rates by parameter name, and the effect of the noise of the run at these rates."""

    by_name: dict[str, float]
    body: Group | None
    head: Group | None
    fresh: bool  # whether the weights come from nowhere

    @property
    def groups(self) -> list[Group]:
        """Those that there are."""
        return [group for group in (self.body, self.head) if group is not None]

    def to_dict(self) -> dict[str, Any]:
        """Returns what JSON can hold, and ``from_dict`` reads."""
        body, head = (group and group._asdict() for group in (self.body, self.head))
        return self._asdict() | {"body": body, "head": head}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Rates:
        """Returns the rates that ``to_dict`` made this of."""
        return cls(**{**content, "body": _group(content["body"]), "head": _group(content["head"])})


def _group(content: Mapping[str, Any] | None) -> Group | None:
    if content is None:
        return None
    output = content["output"] and Output(*content["output"])
    return Group(**{**content, "parameters": tuple(content["parameters"]), "output": output})


class Noise(NamedTuple):
    """The noise that a run will add to one parameter."""

    parameter: nn.Parameter
    std: float  # of the noise in each number of a release
    walk: float  # of each number over the run, at a rate of 1
    projector: Projector | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the numbers that meet noise."""
        own = self.parameter.shape
        return own if self.projector is None else self.projector.coordinate_shape(own)


def measure(
    model: nn.Module,
    output: tuple[str, nn.Module],
    batches: Iterable[Mapping[str, Any]],
    noise: Mapping[str, Noise],
    *,
    most: Mapping[str, float],
    push: Callable[[Tensor], Tensor],
    steps: float,
    rates: Mapping[str, float] | None = None,
    fresh: bool = False,
    factors: Mapping[str, float] | None = None,
    regresses: bool = False,
    has_head: bool = True,
) -> Rates:
    """Chooses rates, or says what given ones do.

    The weights are moved for that, and put back.

    Args:
        model: in evaluation mode.
        output: name and module of the layer that logits come from.
        batches: inputs that are no example's; a few suffice.
        noise: parameter name -> its noise, of all that is trained.
        most: parameter name -> the norm of the signal in a release at most, of all that it is
            clipped with.
        push: how far gradients that stay move numbers over the run, at a rate of 1.
        steps: of the run, each counted as the schedule has it.
        rates: by parameter name, if they are given.
        fresh: whether the weights come from nowhere.
        factors: parameter name -> factor on its rate, which is the user's.
        regresses: whether the head puts out numbers that labels are, and no logits.
        has_head: whether the layer is a head, whose outputs the model returns.
    """
    factors = factors or {}
    name, layer = output
    kind = NUMBER if regresses else LOGIT
    embeds = output_embeddings(model) is layer or not has_head
    of_head = set() if embeds else {f"{name}.{own}" for own, _ in layer.named_parameters()}
    head = {n: own for n, own in noise.items() if n in of_head}
    body = {n: own for n, own in noise.items() if n not in of_head}
    features = _Features(model, layer, list(batches), body)
    before = features.before
    projected = (own.projector for own in head.values() if own.projector is not None)
    read = next((before @ own.matrix.to(before) for own in projected), before)
    size = max(float(read.square().sum(1).mean().sqrt()), 1e-6)

    one = None
    if fresh and rates is None:
        one = _of_fresh(model, noise.values(), max(most.values()), push, steps)

    def given(part: Mapping[str, Noise], rate: float) -> dict[str, float]:
        return {n: rate * factors.get(n, 1.0) for n in part}

    def settled(
        part: Mapping[str, Noise], bound: Callable[[], _Bound]
    ) -> tuple[dict[str, float], str]:
        if rates is not None:
            return {n: rates[n] for n in part}, GIVEN
        lower = one or bound()
        return given(part, lower.rate), lower.limit

    @cache  # the last try of a search is the effect that is reported
    def drift_of_noise(by_name: tuple[tuple[str, float], ...]) -> float:
        return features.drift(_random({n: body[n].walk * rate for n, rate in by_name}, body))

    def bound_of_body() -> _Bound:
        start = _START * _root_mean_square(body) / _walk(body)
        by_noise = _reaching(lambda rate: drift_of_noise((*given(body, rate).items(),)), start)
        one_step = steps_of(features.signal(most), push, steps)

        def drift_of_signal(rate: float) -> float:
            own = given(body, rate)
            return features.drift((n, move * own[n]) for n, move in one_step.items())

        if one_step and drift_of_signal(by_noise) > DRIFT * (1 + _CLOSE):
            return _Bound(_reaching(drift_of_signal, by_noise / 10), STABILITY)
        return _Bound(by_noise, NOISE)

    found: dict[str, float] = {}
    groups: dict[str, Group] = {}
    if body:
        own, limit = settled(body, bound_of_body)
        found |= own
        effect = drift_of_noise((*own.items(),))
        groups["body"] = _group_of("body", body, own, most, limit, effect)
    if head:
        walk, width = _walk(head), math.sqrt(before.shape[1])  # its gradient is along its input
        longest = torch.tensor([max(most[n] for n in head) / width])
        reach = float(push(longest)) * width * size  # at a rate of 1

        def bound_of_head() -> _Bound:
            by_noise = kind.noise / (walk * size)
            return _Bound.lower(by_noise, _HEAD_STEP * kind.noise * steps / reach)

        own, limit = settled(head, bound_of_head)
        found |= own
        rate = max(own.values())
        group = _group_of("head", head, own, most, limit, walk * rate * size)
        groups["head"] = group._replace(output=kind, reach=rate * reach)
    return Rates(found, groups.get("body"), groups.get("head"), fresh)


def measure_norms(
    model: nn.Module,
    noise: Mapping[str, Noise],
    *,
    most: Mapping[str, float],
    push: Callable[[Tensor], Tensor],
    steps: float,
    fresh: bool,
    factors: Mapping[str, float] | None = None,
) -> Rates:
    """Chooses one rate by norms alone, for a model that cannot be run on synthetic inputs.

    The two bounds are those of weights: the noise of the run, and a step of nothing but signal,
    change them by ``DRIFT`` of their norm at most.

    Args:
        model: the model.
        noise: parameter name -> its noise, of all that is trained.
        most: parameter name -> the norm of the signal in a release at most.
        push: how far gradients that stay move numbers over the run, at a rate of 1.
        steps: of the run, each counted as the schedule has it.
        fresh: whether the weights come from nowhere.
        factors: parameter name -> factor on its rate, which is the user's.
    """
    norm = math.sqrt(_squared(noise))
    walked = math.sqrt(sum(_lifted(own) * own.walk**2 for own in noise.values()))
    longest = max(most.values())
    if fresh and any(isinstance(m, MATRIX_LAYERS) for m in model.modules()):
        bound = _of_fresh(model, noise.values(), longest, push, steps)
    else:
        step = _step_of_signal(noise.values(), longest, push, steps)
        bound = _Bound.lower(DRIFT * norm / walked, DRIFT * norm / step)
    rates = {n: bound.rate * (factors or {}).get(n, 1.0) for n in noise}
    effect = bound.rate * walked / max(norm, 1e-12)
    group = _group_of("body", noise, rates, most, bound.limit, effect)
    return Rates(rates, group._replace(changes="weights"), None, fresh)


def _lifted(own: Noise) -> float:
    """Returns the squared norm of lifted noise of variance 1."""
    numbers = math.prod(own.shape)
    if own.projector is None:
        return float(numbers)
    matrix = own.projector.matrix
    return numbers / own.projector.rank * float(matrix.float().square().sum())


def _walk(part: Mapping[str, Noise]) -> float:
    return max(own.walk for own in part.values())


def _group_of(
    name: str,
    part: Mapping[str, Noise],
    rates: Mapping[str, float],
    most: Mapping[str, float],
    limit: str,
    effect: float,
) -> Group:
    numbers = {n: math.prod(own.shape) for n, own in part.items()}
    squared = sum(numbers[n] * own.std**2 for n, own in part.items())
    longest = max(most[n] for n in part)
    rate = mode(rates.values())
    total = sum(numbers.values())
    return Group(name, tuple(part), total, rate, math.sqrt(squared), longest, effect, limit)


class _Bound(NamedTuple):
    """A rate, and what limits it."""

    rate: float
    limit: str

    @classmethod
    def lower(cls, noise: float, stability: float) -> _Bound:
        """Returns the lower one of two rates."""
        return cls(stability, STABILITY) if stability < noise else cls(noise, NOISE)


def _reaching(drift: Callable[[float], float], start: float) -> float:
    """Returns the rate at which the drift is the one that is wanted.

    Drift is about a power of the rate: 1 where it is small (2 of two factors), less as it nears 1.
    """
    rate, low, high, power = start, 0.0, math.inf, 1.0
    known: tuple[float, float] | None = None
    for _ in range(_TRIES):
        found = max(drift(rate), 1e-12)
        if abs(found / DRIFT - 1) < _CLOSE:
            break
        if known is not None and found < math.inf:
            power = math.log(found / known[1]) / math.log(rate / known[0])
            power = min(max(power, 0.25), 2.0)
        low, high = (max(low, rate), high) if found < DRIFT else (low, min(high, rate))
        known = (rate, found) if found < math.inf else None
        step = rate * min(max((DRIFT / found) ** (1 / power), 0.1), 300)
        rate = step if low < step < high else math.sqrt(low * high)
    return rate


def _of_fresh(
    model: nn.Module,
    noise: Collection[Noise],
    most: float,
    push: Callable[[Tensor], Tensor],
    steps: float,
) -> _Bound:
    """Returns the one rate of a model without pretrained weights.

    Its measure is not what the weights are at the start, which may be too small for a few noisy
    steps, but the usual 1 / sqrt(n) of weights with n inputs.
    """
    layers: list[Any] = [m for m in model.modules() if isinstance(m, MATRIX_LAYERS)]
    outputs = sum(m.out_features if isinstance(m, nn.Linear) else m.nf for m in layers)
    norm = math.sqrt(outputs)  # m n numbers of variance 1 / n
    size = norm / math.sqrt(sum(m.weight.numel() for m in layers))
    step = _step_of_signal(noise, most, push, steps)
    walk = max(own.walk for own in noise)
    return _Bound.lower(FRESH_WALK * size / walk, FRESH_STEP * norm / step)


def _step_of_signal(
    noise: Iterable[Noise], most: float, push: Callable[[Tensor], Tensor], steps: float
) -> float:
    """Returns how long a step of nothing but signal is, at a rate of 1."""
    root = math.sqrt(sum(math.prod(own.shape) for own in noise))
    return float(push(torch.tensor([most / root]))) * root / steps


def steps_of(
    gradients: Mapping[str, Tensor], push: Callable[[Tensor], Tensor], steps: float
) -> dict[str, Tensor]:
    """Returns the move of weights in a step of a run with constant gradients, at a rate of 1.

    A rule treats all numbers alike. So it is run on a table of sizes, which is read in between.
    """
    largest = max((float(z.abs().max()) for z in gradients.values()), default=0.0)
    if not largest:
        return {}
    sizes = torch.cat([torch.zeros(1), largest * torch.logspace(-8, 0, 65)])
    moved = push(sizes).div(steps).numpy()
    found = {}
    for name, z in gradients.items():
        step = np.interp(z.abs().numpy(), sizes.numpy(), moved)
        found[name] = torch.from_numpy(step).float() * -z.sign()
    return found


def _root_mean_square(part: Mapping[str, Noise]) -> float:
    count = sum(own.parameter.numel() for own in part.values())
    return math.sqrt(_squared(part) / count) or 1.0


def _squared(part: Mapping[str, Noise]) -> float:
    """Returns the squared norm of all weights together."""
    return sum(float(own.parameter.detach().float().square().sum()) for own in part.values())


class _Shown(Exception):
    """Ends a pass that has shown what it was for: the logits of large vocabularies take long."""


class _Features:
    """The last layer's input activations, and their drift when the weights move.

    Args:
        model: in evaluation mode.
        layer: that logits come from.
        inputs: synthetic inputs.
        body: parameter name -> its noise, of the parameters that are moved.

    Attributes:
        before: (rows, n), float32, before any move.
    """

    def __init__(
        self,
        model: nn.Module,
        layer: nn.Module,
        inputs: list[Mapping[str, Any]],
        body: Mapping[str, Noise],
    ) -> None:
        self._model, self._layer, self._inputs, self._body = model, layer, inputs, body
        self.before = self._all()

    def drift(self, moves: Iterable[tuple[str, Tensor]]) -> float:
        """Returns how far moves of weights take centred features, in units of their norm.

        Args:
            moves: parameter names, and the move of each in the space that noise is added in.
        """
        with _moved_by(moves, self._body):
            after = self._all()
        moved, known = (values - values.mean(0) for values in (after, self.before))
        found = float((moved - known).norm() / known.norm().clamp(min=1e-30))
        return found if math.isfinite(found) else math.inf

    def signal(self, most: Mapping[str, float]) -> dict[str, Tensor]:
        """Returns a gradient that is as long as clipping lets it be, by parameter name.

        It is the gradient that separates two random halves of the inputs along a random direction
        of features, as a label of two classes would.

        Args:
            most: parameter name -> the norm of the signal in a release at most.
        """
        generator = torch.Generator().manual_seed(0)
        known: dict[str, Tensor] = {}

        def keep(name: str, own: Noise) -> Callable[[nn.Parameter], None]:
            def project(parameter: nn.Parameter) -> None:
                assert parameter.grad is not None
                gradient, parameter.grad = parameter.grad.detach().float(), None
                z = gradient if own.projector is None else own.projector.project(gradient)
                known[name] = known.get(name, 0) + z.cpu()

            return project

        hooks = [
            own.parameter.register_post_accumulate_grad_hook(keep(name, own))
            for name, own in self._body.items()
        ]
        along = torch.randn(self.before.shape[1], generator=generator)
        try:
            with torch.enable_grad():
                for batch in self._inputs[len(self._inputs) // 2 :][:1]:  # says nearly the same
                    rows = self._of(batch)
                    sides = torch.randint(2, (len(rows), 1), generator=generator) * 2 - 1
                    if rows.requires_grad:
                        (rows * (sides * along).to(rows)).sum().backward()
        finally:
            for hook in hooks:
                hook.remove()
        squared = sum(float(z.square().sum()) / most[n] ** 2 for n, z in known.items())
        if not (squared and math.isfinite(squared)):
            return {}
        return {n: z / math.sqrt(squared) for n, z in known.items()}

    @torch.no_grad()
    def _all(self) -> Tensor:
        return torch.cat([self._of(batch) for batch in self._inputs])

    def _of(self, batch: Mapping[str, Any]) -> Tensor:
        advance()
        seen: list[Tensor] = []

        def show(module: nn.Module, args: tuple[Any, ...]) -> None:
            seen.append(args[0].reshape(-1, args[0].shape[-1]).float())
            raise _Shown

        hook = self._layer.register_forward_pre_hook(show)
        try:
            with suppress(_Shown):
                on_inputs(self._model, batch)
        finally:
            hook.remove()
        return seen[0]


def _random(stds: Mapping[str, float], noise: Mapping[str, Noise]) -> Iterator[tuple[str, Tensor]]:
    """Yields Gaussian moves: parameter name -> their standard deviation."""
    generator = torch.Generator().manual_seed(0)
    for name, std in stds.items():
        yield name, torch.randn(noise[name].shape, generator=generator) * std


@contextmanager
def _moved_by(moves: Iterable[tuple[str, Tensor]], noise: Mapping[str, Noise]) -> Iterator[None]:
    """Adds moves to weights for a while."""
    kept: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, move in moves:
            weight, projector = noise[name].parameter, noise[name].projector
            kept[name] = weight.detach().to("cpu", copy=True)
            move = move.to(weight.device)
            if projector is None:
                weight.add_(move.to(weight.dtype))
            else:
                projector.add_lifted_(weight, move)
        try:
            yield
        finally:
            for name, weights in kept.items():
                noise[name].parameter.copy_(weights)
