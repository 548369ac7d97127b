"""Keep random streams, configurations and modes unchanged while a model runs."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dp_grape_hf.errors import ERRORS, PrivacyError

# ---- Random streams ----


@contextmanager
def keeping_random_state() -> Iterator[None]:
    """Restore the global streams of torch (on the CPU and GPUs), numpy and Python afterwards.

    Streams of GPUs that are not in use are left alone, because a forked worker of a data loader
    must not use them.
    """
    host = host_streams()
    in_use = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    try:
        with torch.random.fork_rng(range(in_use)):
            yield
    finally:
        _set_host_streams(host)


def seed_all(seed: int) -> None:
    """Seed all global streams; call it inside ``keeping_random_state``."""
    seed_torch(seed)
    random.seed(seed)
    np.random.seed(seed)


def seed_torch(seed: int) -> None:
    """Seed torch's global streams, of the CPU and of GPUs that are in use.

    ``torch.manual_seed`` also seeds unused GPUs at their first use. It stores a stack trace for
    that, which takes a hundred times as long.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


@contextmanager
def guarding_streams(reseeds: Callable[[], bool]) -> Iterator[None]:
    """Check that forward passes inside do not draw from numpy's and Python's global streams.

    Args:
        reseeds: called afterwards; returns whether the model sets these streams to a fixed state.
            Its draws are then public, and the state from before is restored.

    Raises:
        PrivacyError: if the model draws from these streams.
    """
    before = host_streams()
    yield
    if not all(map(same_state, before, host_streams())):
        _set_host_streams(before)
        if not reseeds():
            raise PrivacyError(OTHER_STREAMS)


OTHER_STREAMS = (
    "The model draws random numbers from numpy or Python, or from its own generator. The samples "
    "of a physical batch may share such a number, as in SpecAugment, so that an example influences "
    "the gradients of others. Switch it off (apply_spec_augment=False in the config of a speech "
    "model), or draw numbers for each sample from torch's global stream."
)
"""The error for a model that draws from other streams than torch's global streams."""


def host_streams() -> tuple[Any, Any]:
    """Return the states of the global streams of Python and numpy."""
    return random.getstate(), np.random.get_state()


def torch_streams() -> list[tuple[Tensor]]:
    """Return the states of torch's global streams, of the CPU and of GPUs that are in use."""
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [(state,) for state in (torch.get_rng_state(), *on_gpus)]


def _set_host_streams(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])


def same_state(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Return whether two states of one stream are equal."""
    return all(map(np.array_equal, left, right))


class DrawInterceptor(TorchDispatchMode):
    """Intercept the draws from torch's global streams inside; a subclass may replace them."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        before = torch_streams()
        result = func(*args, **kwargs)
        if all(map(same_state, before, torch_streams())):
            return result  # for instance, attention without dropout
        return self.drawn(func, args, kwargs, result)

    def drawn(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Receive the result of a draw, and return the result to use in its place."""
        raise NotImplementedError


# ---- Configurations ----


def configs_of(model: nn.Module) -> list[Any]:
    """Return the configurations inside a model, each once."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return list({id(c): c for c in configs if hasattr(c, "__dict__")}.values())


@contextmanager
def keeping_configs(configs: Sequence[Any]) -> Iterator[None]:
    """Disable the KV cache inside, and restore the attributes of configurations afterwards.

    A configuration is saved with the weights, and some models write into it in a forward pass. Only
    generation needs the KV cache, and an engine cannot see it.

    Args:
        configs: the result of ``configs_of``.
    """
    before = [dict(vars(config)) for config in configs]
    try:
        for config in configs:
            if hasattr(config, "use_cache"):
                config.use_cache = False
        yield
    finally:
        for config, attributes in zip(configs, before, strict=True):
            now = vars(config)
            for name in now.keys() - attributes.keys():
                del now[name]
            now.update(attributes)


# ---- Modes ----


@contextmanager
def without_checkpointing(model: nn.Module) -> Iterator[None]:
    """Switch gradient checkpointing off inside, without a change of the model's hooks."""
    checkpointed = [m for m in model.modules() if vars(m).get("gradient_checkpointing")]
    try:
        for module in checkpointed:
            vars(module)["gradient_checkpointing"] = False
        yield
    finally:
        for module in checkpointed:
            vars(module)["gradient_checkpointing"] = True


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Set training or evaluation mode inside, and restore modes and configurations afterwards."""
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
    """Set evaluation mode inside, and restore modes and random state afterwards."""
    with in_mode(model, training=False), keeping_random_state():
        yield


def fails(function: Callable[[], Any]) -> bool:
    """Return whether a function raises one of ``ERRORS``, without gradients."""
    try:
        with torch.no_grad():
            function()
    except ERRORS:
        return True
    return False
