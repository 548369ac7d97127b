"""Tensors without contents: every operation runs on them and computes nothing."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from dp_grape_hf.errors import UnsupportedModelError
from dp_grape_hf.phases import simulated_gpu


@contextmanager
def fake_tensors(gpu: bool = True) -> Iterator[None]:
    """Make every new tensor a fake one on the CPU, with a shape and a type but no memory.

    A fake GPU needs a build of torch for GPUs. So tensors are on a fake CPU, which stands for a GPU
    (``phases.simulated_gpu``). The two functions that need a different amount of memory on a GPU
    are replaced by the kernels of CUDA: attention, which stores no T x T matrix, and dropout, whose
    mask has one byte per number. Function modes cannot replace them: they do not see a backward
    pass, which may compute activations again.

    Args:
        gpu: whether the CPU stands for a GPU.

    Raises:
        UnsupportedModelError: if a shape depends on the contents of a tensor.
    """
    try:
        with ExitStack() as stack:
            # A fake tensor has no address: code that compares addresses reads 0, with a warning.
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            # Transformers renames this method; the old name is the one that all versions have.
            warnings.filterwarnings("ignore", "`gradient_checkpointing_enable` is deprecated")
            # What fake tensors cannot do: be objects of another subclass, have numbers, and be
            # swapped by ``Module.to`` while something refers to them weakly.
            patches: list[tuple[Any, str, Any]] = [
                (FakeTensor, "as_subclass", _as_subclass),
                (FakeTensor, "numpy", _numpy),
                (torch.utils, "swap_tensors", torch._C._swap_tensor_impl),
            ]
            if gpu:
                stack.enter_context(simulated_gpu())
                attention = partial(_attention, functional.scaled_dot_product_attention)
                patches.append((functional, "dropout", _dropout))
                patches.append((functional, "scaled_dot_product_attention", attention))
            for one in patches:
                stack.enter_context(_replaced(*one))
            stack.enter_context(FakeTensorMode())
            stack.enter_context(_Answers())
            yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UnsupportedModelError(
            f"The memory of this model depends on the contents of its inputs ({error}), which a "
            "simulation does not have."
        ) from error


@contextmanager
def _replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Use another function in place of an attribute."""
    is_own, original = name in vars(owner), getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, original)
        else:  # inherited
            delattr(owner, name)


class _Answers(TorchDispatchMode):
    """Answer questions about contents, which fake tensors lack: nothing is unusual.

    ``any()`` is False (no number is out of range), every other condition holds
    (``isfinite().all()``: no sample is left out; ``allclose``: a norm layer computes what its name
    says), and numbers are 1. Transformers does not ask fake tensors whether a mask masks anything:
    it makes the mask, as for a batch with padding.
    """

    def __init__(self) -> None:
        super().__init__()
        self._any = WeakIdKeyDictionary()  # results of any()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        aten = torch.ops.aten
        if func is aten._local_scalar_dense.default:
            value = args[0]
            if value.dtype is torch.bool:
                return value not in self._any
            return 1.0 if value.is_floating_point() else 1
        if func in (aten.equal.default, aten.allclose.default):
            return True
        output = func(*args, **(kwargs or {}))
        if func.overloadpacket is aten.any:
            self._any[output] = True
        return output


def _as_subclass(tensor: Tensor, cls: type[Tensor]) -> Tensor:
    """``Tensor.as_subclass`` of a fake tensor, which is an object of a subclass already.

    The engine replaces weights by such objects, and reads only their metadata. Memory that is not
    written to stays virtual.
    """
    with _disable_current_modes():
        real = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        return real.as_subclass(cls)


def _numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    """``Tensor.numpy`` of a fake tensor: zeros, for the digest of a measured projection."""
    return np.zeros(tensor.shape, np.float32)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """``functional.dropout`` with a mask of booleans, as on a GPU."""
    return torch.native_dropout(input, p, True)[0] if training and p else input


def _attention(
    original: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``functional.scaled_dot_product_attention`` by CUDA's memory-efficient kernel."""
    if query.dim() != 4 or not torch.backends.cuda.mem_efficient_sdp_enabled():
        return original(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:  # every layer makes a mask of numbers
            numbers = torch.zeros_like(attn_mask, dtype=query.dtype)
            attn_mask = numbers.masked_fill_(attn_mask.logical_not(), float("-inf"))
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    differentiable = any(x.requires_grad for x in (query, key, value))
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(
        query, key, value, attn_mask, differentiable, dropout_p, is_causal, scale=scale
    )[0]
