"""Keep random streams, configurations and modes unchanged while a model runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dp_grape_hf.errors import PrivacyError

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


# ---- Configurations ----


def configs_of(model: nn.Module) -> list[Any]:
    """Returns the configurations inside a model, each once."""
    found = (getattr(module, "config", None) for module in model.modules())
    return list({id(c): c for c in found if hasattr(c, "__dict__")}.values())


@contextmanager
def keeping_configs(configs: Sequence[Any]) -> Iterator[None]:
    """Restores the attributes of configurations afterwards, and switches the KV cache off inside.

    A configuration is saved with the weights, and some models write into it in a forward pass.
    Keys and values of earlier tokens are of use in generation only; a layer would write them where
    no engine sees it.

    Args:
        configs: of the models, from ``configs_of``.
    """
    before = [dict(vars(config)) for config in configs]
    try:
        for config in configs:
            if hasattr(config, "use_cache"):
                config.use_cache = False
        yield
    finally:
        for config, attributes in zip(configs, before, strict=True):
            own = vars(config)
            for name in own.keys() - attributes.keys():
                del own[name]
            own.update(attributes)


# ---- Modes ----


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Runs a model in training or evaluation mode, and restores the mode of each module.

    Its configurations are restored as well.
    """
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        with keeping_configs(configs_of(model)):
            yield
    finally:
        for module, mode in before:
            module.training = mode


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switches dropout off, and restores mode and random state afterwards."""
    with in_mode(model, training=False), keeping_random_state():
        yield
