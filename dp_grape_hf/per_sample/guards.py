"""What stays as it was while a model runs: random streams, and what is saved with weights."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dp_grape_hf.errors import PrivacyError, UnsupportedModelError
from dp_grape_hf.sharding import local

# ---- Random streams ----


@contextmanager
def keeping_random_state() -> Iterator[None]:
    """Restores the global streams of torch (on the CPU and GPUs), numpy and Python afterwards.

    Those of GPUs that are not in use stay alone: a worker of a data loader is a fork of a process
    that uses them, and may not.
    """
    host = host_streams()
    in_use = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    try:
        with torch.random.fork_rng(range(in_use)):
            yield
    finally:
        _set_host_streams(host)


def seed_all(seed: int) -> None:
    """Seeds the streams that ``keeping_random_state`` keeps, which the caller has done."""
    seed_torch(seed)
    random.seed(seed)
    np.random.seed(seed)


def seed_torch(seed: int) -> None:
    """Seeds torch's global streams, of the CPU and of GPUs that are in use.

    ``torch.manual_seed`` would seed the others when they are first used, and takes a hundred times
    as long, as it writes down for them where it was called.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


@contextmanager
def guarding_streams(reseeds: Callable[[], bool]) -> Iterator[None]:
    """Keeps the forward passes inside from numpy's and Python's streams, which collators draw from.

    Args:
        reseeds: whether the model is known, in the end, to set them to a fixed state: what it draws
            then is public, and the state from before is put back.

    Raises:
        PrivacyError: the model draws from them.
    """
    before = host_streams()
    yield
    if not all(map(same_state, before, host_streams())):
        _set_host_streams(before)
        if not reseeds():
            raise PrivacyError(DRAWS_BESIDE)


DRAWS_BESIDE = (
    "The model draws from random numbers of numpy or Python, or from a generator of its own: "
    "whose they are cannot be told. SpecAugment, for one, shares a coin among the samples of a "
    "physical batch, so that an example has influence on the gradients of others. Switch it "
    "off (apply_spec_augment=False in the config of a speech model), or draw numbers for each "
    "sample from torch's global stream."
)
"""Why a model with other streams than torch's is refused."""


def host_streams() -> tuple[Any, Any]:
    """Returns the states of the global streams of Python and numpy."""
    return random.getstate(), np.random.get_state()


def torch_streams() -> list[tuple[Tensor]]:
    """Returns the states of torch's global streams, of the CPU and of GPUs that are in use."""
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [(state,) for state in (torch.get_rng_state(), *on_gpus)]


def _set_host_streams(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])


def same_state(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Whether two states of one stream are equal."""
    return all(map(np.array_equal, left, right))


class TorchDraws(TorchDispatchMode):
    """Sees what is drawn from torch's global streams inside, and may change it."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        before = torch_streams()
        result = func(*args, **kwargs)
        if all(map(same_state, before, torch_streams())):
            return result  # attention without dropout, say
        return self.drawn(func, args, kwargs, result)

    def drawn(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Is shown a draw; returns what takes its place."""
        raise NotImplementedError


# ---- Caches ----


def caching_configs(model: nn.Module) -> list[Any]:
    """Returns the configurations inside a model that say whether it keeps what it computes."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return list({id(c): c for c in configs if hasattr(c, "use_cache")}.values())


@contextmanager
def without_cache(configs: Sequence[Any]) -> Iterator[None]:
    """Has models keep no keys, values and states for a text that nobody will go on writing.

    A layer writes them where no engine sees it: of all samples, and between other layers.

    Args:
        configs: of the models, from ``caching_configs``.
    """
    before = [config.use_cache for config in configs]
    try:
        for config in configs:
            config.use_cache = False
        yield
    finally:
        for config, use_cache in zip(configs, before, strict=True):
            config.use_cache = use_cache


# ---- Weights ----


@contextmanager
def refusing_changed_weights(model: nn.Module, thorough: bool) -> Iterator[None]:
    """Refuses a pass that changes a tensor which is saved with the weights.

    Running statistics, moving averages and codebooks are such tensors. They would leave the machine
    without noise, past clipping and accountant.

    A frozen quantised weight (of any subclass of a parameter) may be laid out elsewhere by a pass.
    What its layer says of it besides, such as scales, is made for each state dict, by some layouts
    with a loss, and is left out.

    Args:
        model: the model that runs inside the context.
        thorough: whether to compare contents, and not only torch's count of in-place changes,
            which a change through ``.data`` evades.
    """
    parameters = dict(model.named_parameters())
    packed = {
        name
        for name, parameter in parameters.items()
        if not parameter.requires_grad and type(parameter) is not nn.Parameter
    }
    layers = {name.rpartition(".")[0] for name in packed}
    known = parameters.keys() | {name for name, _ in model.named_buffers()}

    def fingerprint(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):  # what a module adds by get_extra_state
            return pickle.dumps(value)
        value = local(value)
        place = None if name in packed else value.data_ptr()
        return place, value._version, _contents(value) if thorough else None

    def state() -> dict[str, Any]:
        entries = model.state_dict(keep_vars=True).items()
        return {
            name: fingerprint(name, value)
            for name, value in entries
            if name in known or not any(name.startswith(f"{layer}.") for layer in layers)
        }

    before = state()
    yield
    after = state()
    if before == after:
        return
    for name, was in before.items():
        if after.get(name) != was:
            raise UnsupportedModelError(
                f"A training pass changed {name}, which is saved with the weights: it would "
                "publish a statistic of the training data without noise. Switch that statistic "
                "off (track_running_stats=False, for example)."
            )


def _contents(tensor: Tensor) -> str:
    """Returns a summary of a tensor's numbers; as text, for NaN is not equal to itself."""
    if hasattr(tensor, "__tensor_flatten__"):  # a wrapper of others, without numbers of its own
        return " ".join(_contents(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return repr(tensor.sum(dtype=wide).item())
