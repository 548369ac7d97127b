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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from statistics import mode
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dp_grape_hf.accounting import correlated, released_noise
from dp_grape_hf.choosing.parts import LastLayer
from dp_grape_hf.optimizers import UPDATE_RULES, moved_from_zero
from dp_grape_hf.phases import advance
from dp_grape_hf.projections import MATRIX_LAYERS, Projector, on_inputs, output_embeddings

DRIFT = 0.6
"""The largest relative change of the body's centred features: by the noise of the whole run, or by
the signal of one step."""

NOISE, STABILITY, GIVEN = "noise", "stability", "your choice"
"""The limits of a learning rate."""

_HEAD_STEP = 25.0
"""The largest move of an output in a step of nothing but signal, in units of its noise."""


LOGIT, NUMBER = "a logit", "a number"
"""The outputs of a classifier, and of a regression, whose labels should be about 1."""

OUTPUT_NOISE = {LOGIT: 1.2, NUMBER: 0.2}
"""Output of a head -> the standard deviation that noise alone may add to it."""

FRESH_WALK, FRESH_STEP = 2.7, 0.15
"""Limits for a model without pretrained weights: the noise that a run may add to a parameter, in
units of a weight that keeps the size of its input, and the length of a step of nothing but signal,
in units of the norm of such weights."""

_NUMBERS = 512  # simulated parameters, from which a standard deviation is computed
_TRIES, _CLOSE = 12, 0.03  # tries of a search, and the relative error at which it ends
_START = 0.1  # first move of a search, in units of the norm of a weight


class Setting(NamedTuple):
    """All that learning rates depend on, besides the model, its inputs and P."""

    rule: str
    settings: dict[str, Any]  # settings of the update rule
    schedule: list[float]  # the factor of the learning rate at each step
    bands: tuple[float, ...]  # coefficients of correlated noise
    stds: dict[str, float]  # parameter name -> std of independent noise in each element
    most: dict[str, float]  # parameter name -> bound on the norm of the signal in an update
    given: dict[str, float] | None  # parameter name -> learning rate that the user passed
    factors: dict[str, float]  # parameter name -> the user's factor of its learning rate
    fresh: bool  # whether the weights are random, not pretrained
    runs: bool  # whether the model can be run on public inputs
    has_head: bool  # whether the model returns the output of its last linear layer
    regresses: bool  # whether the labels are numbers
    # factor of the chosen rates, which is below 1 for a model that earlier private runs trained
    share: float = 1.0

    @property
    def steps(self) -> float:
        """The number of steps of full length: the sum of the schedule's factors."""
        return sum(self.schedule)

    def walk(self, std: float) -> float:
        """Return the standard deviation that the noise of a run adds to a parameter, at rate 1.

        The update rule runs on random noise. ``std`` is the standard deviation of the noise in each
        element of a private update, before it is correlated.
        """
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(len(self.schedule), _NUMBERS, generator=generator) * std
        noise = torch.from_numpy(correlated(self.bands, drawn.numpy())).float()
        moved = moved_from_zero(UPDATE_RULES[self.rule], self.settings, noise, self.schedule)
        return float(moved.square().mean().sqrt())

    def push(self, sizes: Tensor) -> Tensor:
        """Return how far constant gradients move parameters in a run, at a rate of 1.

        ``sizes`` are the gradients, of any shape, which is the shape of the result.
        """
        gradients = (sizes for _ in self.schedule)
        return -moved_from_zero(UPDATE_RULES[self.rule], self.settings, gradients, self.schedule)

    def one_step(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the change of weights in one step with constant gradients, at a rate of 1.

        An update rule treats all elements alike. So it runs on a table of sizes, and the results
        are interpolated. ``gradients`` has a tensor of any shape for each parameter name.
        """
        largest = max((float(z.abs().max()) for z in gradients.values()), default=0.0)
        if not largest:
            return {}
        sizes = torch.cat([torch.zeros(1), largest * torch.logspace(-8, 0, 65)])
        moved = self.push(sizes).div(self.steps).numpy()
        found = {}
        for name, z in gradients.items():
            step = np.interp(z.abs().numpy(), sizes.numpy(), moved)
            found[name] = torch.from_numpy(step).float() * -z.sign()
        return found

    def at(self, part: Iterable[str], rate: float) -> dict[str, float]:
        """Return the learning rates of some parameters: a chosen rate times the user's factors."""
        return {name: rate * self.factors.get(name, 1.0) for name in part}

    def noise_of(
        self, trainable: Mapping[str, nn.Parameter], projectors: Mapping[str, Projector]
    ) -> dict[str, Noise]:
        """Return the noise that the run adds to each trained parameter."""
        walks = {std: self.walk(std) for std in set(self.stds.values())}
        released = math.sqrt(np.square(released_noise(self.bands, len(self.schedule))).mean())
        return {
            name: Noise(trainable[name], std * released, walks[std], projectors.get(name))
            for name, std in self.stds.items()
        }


class Group(NamedTuple):
    """The properties of some parameters before a run."""

    name: str
    parameters: list[str]
    numbers: int  # elements to which noise is added
    rate: float  # learning rate
    noise: float  # norm of the noise in a private update
    most: float  # largest norm of the signal in a private update
    effect: float  # effect of the whole run's noise: relative change, or noise in the output
    limit: str = GIVEN  # the bound that limits the rate
    output: str | None = None  # of a head: LOGIT or NUMBER
    changes: str = "features"  # the quantity that ``effect`` is relative to, without an output
    reach: float = math.inf  # largest move of a head's output in the run, without noise


class Rates(NamedTuple):
    """Learning rates by parameter name, and the effect of the noise of the run at these rates."""

    by_name: dict[str, float]
    body: Group | None
    head: Group | None
    fresh: bool  # whether the weights are random, not pretrained

    @property
    def groups(self) -> list[Group]:
        """The groups that exist, of body and head."""
        return [group for group in (self.body, self.head) if group is not None]

    def to_dict(self) -> dict[str, Any]:
        """Return the rates as JSON data for ``from_dict``."""
        body, head = (group and group._asdict() for group in (self.body, self.head))
        return self._asdict() | {"body": body, "head": head}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Rates:
        """Return the rates from the result of ``to_dict``."""
        groups = {n: content[n] and Group(**content[n]) for n in ("body", "head")}
        return cls(**{**content, **groups})


class Noise(NamedTuple):
    """The noise that a run will add to one parameter."""

    parameter: nn.Parameter
    std: float  # standard deviation of the noise in each element of a private update
    walk: float  # standard deviation of each element after the run, at a rate of 1
    projector: Projector | None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the gradient to which noise is added."""
        own = self.parameter.shape
        return own if self.projector is None else self.projector.coordinate_shape(own)


Part = Mapping[str, Noise]
"""Parameter name -> its noise, of some trained parameters."""


def measure(
    model: nn.Module,
    noise: Part,
    setting: Setting,
    last: LastLayer | None = None,
    batches: Iterable[Mapping[str, Any]] = (),
) -> Rates:
    """Choose learning rates, or measure the effect of given ones.

    The model is in evaluation mode. Its weights are moved for the measurement, and restored.
    ``last`` is the linear layer that runs last, or None if the model cannot be run on public
    inputs, of which a few batches suffice. Without it, and for random weights without a head, one
    learning rate follows from norms: the noise of the run, and a single step of nothing but signal,
    may each change the weights by ``DRIFT`` of their norm.
    """
    chosen_fresh = setting.fresh and setting.given is None
    names: set[str] = set()
    if last is not None and setting.has_head and output_embeddings(model) is not last.module:
        names = {f"{last.name}.{own}" for own, _ in last.module.named_parameters()}
    head = {n: own for n, own in noise.items() if n in names}
    body = {n: own for n, own in noise.items() if n not in names}
    if last is None or (chosen_fresh and not head):
        if setting.fresh and any(isinstance(m, MATRIX_LAYERS) for m in model.modules()):
            bound = _of_fresh(model, noise, setting)
        else:
            norm = DRIFT * math.sqrt(_squared(noise))
            walked = math.sqrt(sum(_lifted(own) * own.walk**2 for own in noise.values()))
            bound = _Bound.lower(norm / walked, norm / _step_of_signal(noise, setting))
        rates = setting.at(noise, bound.rate * setting.share)
        return Rates(rates, _of_weights(noise, rates, setting, bound.limit), None, setting.fresh)
    features = _Features(model, last.module, [*batches], body)
    for_all = _of_fresh(model, noise, setting) if chosen_fresh else None
    of_body = _body(features, body, setting, for_all) if body else ({}, None)
    of_head = _head(features, head, setting, for_all) if head else ({}, None)
    return Rates(of_body[0] | of_head[0], of_body[1], of_head[1], setting.fresh)


def _settled(
    part: Part, setting: Setting, for_all: _Bound | None, bound: Callable[[], _Bound]
) -> tuple[dict[str, float], str]:
    """Return the rates of some parameters, and what limits them."""
    if setting.given is not None:
        return {n: setting.given[n] for n in part}, GIVEN
    lower = for_all or bound()
    return setting.at(part, lower.rate * setting.share), lower.limit


def _body(
    features: _Features, body: Part, setting: Setting, for_all: _Bound | None
) -> tuple[dict[str, float], Group]:
    """Return the learning rates of a body, which change its features by ``DRIFT`` at most."""

    @cache  # the result of a search's last try is reported as the effect
    def drift_of_noise(by_name: tuple[tuple[str, float], ...]) -> float:
        return features.drift(_random({n: body[n].walk * rate for n, rate in by_name}, body))

    def bound() -> _Bound:
        count = sum(own.parameter.numel() for own in body.values())
        start = _START * (math.sqrt(_squared(body) / count) or 1.0) / _walk(body)
        by_noise = _reaching(lambda rate: drift_of_noise(tuple((n, rate) for n in body)), start)
        one_step = setting.one_step(features.signal(setting.most))

        def drift_of_signal(rate: float) -> float:
            return features.drift((n, move * rate) for n, move in one_step.items())

        if one_step and drift_of_signal(by_noise) > DRIFT * (1 + _CLOSE):
            return _Bound(_reaching(drift_of_signal, by_noise / 10), STABILITY)
        return _Bound(by_noise, NOISE)

    own, limit = _settled(body, setting, for_all, bound)
    if setting.fresh:
        return own, _of_weights(body, own, setting, limit)
    effect = drift_of_noise((*own.items(),))
    return own, _group_of("body", body, own, setting, limit, effect)


def _head(
    features: _Features, head: Part, setting: Setting, for_all: _Bound | None
) -> tuple[dict[str, float], Group]:
    """Return the learning rates of a head, by the noise and the signal in its output."""
    output, before = NUMBER if setting.regresses else LOGIT, features.before
    noise = OUTPUT_NOISE[output]
    projected = (own.projector for own in head.values() if own.projector is not None)
    read = next((before @ own.matrix.to(before) for own in projected), before)
    size = max(float(read.square().sum(1).mean().sqrt()), 1e-6)
    walk, width = _walk(head), math.sqrt(before.shape[1])  # the gradient is along the input
    longest = torch.tensor([max(setting.most[n] for n in head) / width])
    reach = float(setting.push(longest)) * width * size  # at a rate of 1

    def bound() -> _Bound:
        return _Bound.lower(noise / (walk * size), _HEAD_STEP * noise * setting.steps / reach)

    own, limit = _settled(head, setting, for_all, bound)
    rate = max(own.values())
    group = _group_of("head", head, own, setting, limit, walk * rate * size)
    return own, group._replace(output=output, reach=rate * reach)


def _of_weights(part: Part, rates: Mapping[str, float], setting: Setting, limit: str) -> Group:
    """Return a body whose effect is the noise in its weights, in units of their norm."""
    walked = math.sqrt(sum(_lifted(own) * (own.walk * rates[n]) ** 2 for n, own in part.items()))
    effect = walked / max(math.sqrt(_squared(part)), 1e-12)
    return _group_of("body", part, rates, setting, limit, effect)._replace(changes="weights")


def _lifted(own: Noise) -> float:
    """Return the squared norm of lifted noise of variance 1."""
    numbers = math.prod(own.shape)
    if own.projector is None:
        return float(numbers)
    matrix = own.projector.matrix
    return numbers / own.projector.rank * float(matrix.float().square().sum())


def _walk(part: Part) -> float:
    return max(own.walk for own in part.values())


def _group_of(
    name: str,
    part: Part,
    rates: Mapping[str, float],
    setting: Setting,
    limit: str,
    effect: float,
) -> Group:
    numbers = {n: math.prod(own.shape) for n, own in part.items()}
    noise = math.sqrt(sum(numbers[n] * own.std**2 for n, own in part.items()))
    longest = max(setting.most[n] for n in part)
    total, rate = sum(numbers.values()), mode(rates.values())
    return Group(name, list(part), total, rate, noise, longest, effect, limit)


class _Bound(NamedTuple):
    """A learning rate, and the name of the bound that limits it."""

    rate: float
    limit: str

    @classmethod
    def lower(cls, noise: float, stability: float) -> _Bound:
        """Return the lower one of two rates."""
        return cls(stability, STABILITY) if stability < noise else cls(noise, NOISE)


def _reaching(drift: Callable[[float], float], start: float) -> float:
    """Return the learning rate at which the drift equals ``DRIFT``.

    The drift is about a power of the rate. The power is 1 if the drift is small (2 for a product of
    two trained factors), and smaller if the drift is close to 1.
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


def _of_fresh(model: nn.Module, noise: Part, setting: Setting) -> _Bound:
    """Return the learning rate of a model without pretrained weights, for all parameters.

    Its unit is the usual 1 / sqrt(n) of weights with n inputs. The initial weights may be smaller,
    too small for a few noisy steps.
    """
    layers: list[Any] = [m for m in model.modules() if isinstance(m, MATRIX_LAYERS)]
    outputs = sum(m.out_features if isinstance(m, nn.Linear) else m.nf for m in layers)
    norm = math.sqrt(outputs)  # norm of m n elements of variance 1 / n
    size = norm / math.sqrt(sum(m.weight.numel() for m in layers))
    by_step = FRESH_STEP * norm / _step_of_signal(noise, setting)
    return _Bound.lower(FRESH_WALK * size / _walk(noise), by_step)


def _step_of_signal(noise: Part, setting: Setting) -> float:
    """Return the length of a step of nothing but signal, at a rate of 1."""
    root = math.sqrt(sum(math.prod(own.shape) for own in noise.values()))
    longest = torch.tensor([max(setting.most.values()) / root])
    return float(setting.push(longest)) * root / setting.steps


def _squared(part: Part) -> float:
    """Return the squared norm of all weights together."""
    return sum(float(own.parameter.detach().float().square().sum()) for own in part.values())


class _Shown(Exception):
    """Ended forward pass, before the logits, which take long for large vocabularies."""


def inputs_of(model: nn.Module, layer: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Return the input activations of a layer for a batch, (rows, n), in float32.

    The layer and all that comes after it do not run.
    """
    seen: list[Tensor] = []

    def show(module: nn.Module, args: tuple[Any, ...]) -> None:
        seen.append(args[0].reshape(-1, args[0].shape[-1]).float())
        raise _Shown

    hook = layer.register_forward_pre_hook(show)
    try:
        with suppress(_Shown):
            on_inputs(model, batch)
    finally:
        hook.remove()
    return seen[0]


class _Features:
    """The inputs of the layer of the logits, and their drift when the weights of a body move.

    Attributes:
        before: (rows, n), float32, before any move.
    """

    def __init__(
        self, model: nn.Module, layer: nn.Module, inputs: list[Mapping[str, Any]], body: Part
    ) -> None:
        self._model, self._layer, self._inputs, self._body = model, layer, inputs, body
        self.before = self._all()

    def drift(self, moves: Iterable[tuple[str, Tensor]]) -> float:
        """Return the change of the centred features after moves of weights, divided by their norm.

        The moves, by parameter name, have the shape of the private gradients.
        """
        with _moved_by(moves, self._body):
            after = self._all()
        moved, known = (values - values.mean(0) for values in (after, self.before))
        found = float((moved - known).norm() / known.norm().clamp(min=1e-30))
        return found if math.isfinite(found) else math.inf

    def signal(self, most: Mapping[str, float]) -> dict[str, Tensor]:
        """Return a gradient with the largest norm that clipping allows, by parameter name.

        It is the gradient that separates two random halves of the inputs along a random direction
        of features, as the labels of two classes would. ``most`` has the largest norm of the signal
        in a private update, by parameter name.
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
                for batch in self._inputs[len(self._inputs) // 2 :][:1]:  # one batch suffices
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
        return inputs_of(self._model, self._layer, batch)


def _random(stds: Mapping[str, float], noise: Part) -> Iterator[tuple[str, Tensor]]:
    """Yield Gaussian moves, given parameter name -> their standard deviation."""
    generator = torch.Generator().manual_seed(0)
    for name, std in stds.items():
        yield name, torch.randn(noise[name].shape, generator=generator) * std


@contextmanager
def _moved_by(moves: Iterable[tuple[str, Tensor]], noise: Part) -> Iterator[None]:
    """Add moves to weights inside, and restore the weights afterwards."""
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
