"""Stand-ins for weights ``W + lift(z_i)`` at z = 0 under vmap, without forming the sums.

The per-sample gradient of a weight is the derivative of one sample's loss in the coordinates z of
that sample. Under ``torch.func.vmap`` this would take B copies ``W + lift(z_i)`` of each weight,
although z is zero and all of them equal W. So the module's code receives a stand-in for the weight:

* ``linear``, ``addmm``, ``embedding`` and convolutions are linear in the weight. Their value is
  computed from W, for all samples at once, and a node at the output computes the derivative in z.
* Any other operation uses the sum ``W + lift(z)``, which is formed at its first use.

The operation decides, and not the module that owns the weight. So derivatives are also exact for a
tied weight, a subclass of ``nn.Linear`` and a use outside the owner's forward.

Shapes: B samples, T positions sharing the weight, m x n the weight as stored, r rank. A sample's
own tensors may have any dimensions before the last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from dp_grape_hf.gradients import functions
from dp_grape_hf.gradients.forms import Dense, Factored, Single, SparseRows, projected
from dp_grape_hf.projections import Projector, Side

Record = Callable[[str, Single], None]


def call_in_coordinates(
    module: nn.Module,
    forward: Callable[..., Any],
    coordinates: Mapping[str, Tensor],
    projectors: Mapping[str, Projector],
    record: Record,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Return one sample's ``forward(*args, **kwargs)`` with parameters ``W + lift(z)`` at z = 0.

    Call it inside one ``torch.func.vmap`` over the samples, and differentiate the result of vmap in
    z by ``torch.autograd``. The derivative at zero is exact; W itself is detached.

    Args:
        module: the module whose parameters are replaced during the call.
        forward: the function to call: ``module.forward``, or a function that runs the module.
        coordinates: the module's name of a parameter -> its coordinates, which are zero, require
            grad and are an argument that vmap maps over. Children's parameters have dotted names;
            a weight with several names appears under one of them.
        projectors: the same names -> projectors, for the projected parameters.
        record: receives gradients during the backward pass that are too large as gradients of z:
            name and gradient of one look-up in a table (``SparseRows``) or of one product with an
            unprojected matrix (``Factored``). The gradient of a weight is the sum of the recorded
            gradients and of the gradient of its z, if there is one.
        args: positional arguments of ``forward``.
        kwargs: keyword arguments of ``forward``.
    """
    weights = dict(module.named_parameters())
    stand_ins: dict[int, Tensor] = {
        id(weights[name]): _StandIn.of(weights[name], name, z, projectors.get(name), record)
        for name, z in coordinates.items()
    }
    return call_with(module, forward, stand_ins, args, kwargs or {})


def call_for_one(
    module: nn.Module,
    forward: Callable[..., Any],
    coordinates: Mapping[str, Tensor],
    projectors: Mapping[str, Projector],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Do the same as ``call_in_coordinates`` for one sample, outside vmap and for any code.

    Autograd computes the full gradient of each weight for this sample, and the gradient in z is its
    projection.

    Args:
        module: as in ``call_in_coordinates``.
        forward: as in ``call_in_coordinates``.
        coordinates: as in ``call_in_coordinates``, of this sample.
        projectors: as in ``call_in_coordinates``.
        args: positional arguments of ``forward``.
        kwargs: keyword arguments of ``forward``.
    """
    weights = dict(module.named_parameters())
    at_zero: dict[int, Tensor] = {
        id(weights[name]): _WeightAtZero.apply(z, weights[name].detach(), projectors.get(name))
        for name, z in coordinates.items()
    }
    return call_with(module, forward, at_zero, args, kwargs)


def call_with(
    module: nn.Module,
    forward: Callable[..., Any],
    replacements: Mapping[int, Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call a function while some parameters of a module are replaced, under all of their names.

    Args:
        module: the module.
        forward: the function.
        replacements: id of a parameter -> the tensor in its place.
        args: positional arguments of ``forward``.
        kwargs: keyword arguments of ``forward``.
    """
    # One entry for each module that holds a weight, even if two paths lead to the module.
    places = {
        ".".join(filter(None, ["module", path, local])): replacements[id(parameter)]
        for path, owner in module.named_modules()
        for local, parameter in owner._parameters.items()
        if id(parameter) in replacements
    }
    call = _Call(module)
    return functional_call(call, places, (forward, *args), dict(kwargs), tie_weights=False)


def zero_coordinates(weight: Tensor, projector: Projector | None, batch_size: int) -> Tensor:
    """Return zero coordinates of a weight for each sample, (B, ...), which take no memory."""
    shape = projector.coordinate_shape(weight.shape) if projector else weight.shape
    zero = torch.zeros((), device=weight.device)
    return zero.expand(batch_size, *shape).requires_grad_()


def outside_vmap(
    batched: Tensor, function: Callable[..., tuple[Tensor, int | None]], *tensors: Tensor | None
) -> Tensor:
    """Call a function on the tensors of all samples, from inside vmap over the samples.

    Args:
        batched: any tensor that vmap maps over.
        function: takes each of the tensors with the samples in dimension 0; returns a tensor and
            its dimension of samples, None if it is the same for all samples. Its operations are
            differentiated as usual.
        tensors: tensors of one sample, as seen inside vmap.
    """
    return _Outside.apply(batched, function, *tensors)


class _Outside(torch.autograd.Function):
    @staticmethod
    def forward(batched: Tensor, function: Any, *tensors: Tensor | None) -> Tensor:
        raise AssertionError("the first argument is batched, so the rule for vmap is called")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Do nothing: the operations of the function are differentiated."""

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, batched: Tensor, function: Any, *tensors: Tensor | None
    ) -> tuple[Tensor, int | None]:
        def of_all(tensor: Tensor | None, dim: int | None) -> Tensor | None:
            if tensor is None:
                return None
            if dim is None:
                return tensor.expand(info.batch_size, *tensor.shape)
            return tensor.movedim(dim, 0)

        return function(*map(of_all, tensors, in_dims[2:]))


class _WeightAtZero(torch.autograd.Function):
    """``W + lift(z)`` at z = 0."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, weight: Tensor, projector: Projector | None) -> Tensor:
        ctx.projector = projector
        return weight.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grad = grad.to_dense().float() if grad.is_sparse else grad.float()
        return (ctx.projector.project(grad) if ctx.projector else grad), None, None


class _Call(nn.Module):
    """A module whose forward calls a function, for ``functional_call``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)


METADATA = {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_contiguous, Tensor.__len__),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size, Tensor.get_device),
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_meta", "itemsize")
    ),
}
"""Methods and attributes of a weight that do not depend on its values."""

_REQUIRES_GRAD = vars(Tensor.__base__)["requires_grad"].__get__


class _StandIn(Tensor):
    """A weight W, detached, that stands for ``W + lift(z)`` of one sample."""

    weight: Tensor
    label: str
    z: Tensor  # inside vmap
    projector: Projector | None
    record: Record
    _sum: Tensor | None

    @classmethod
    def of(
        cls, parameter: Tensor, label: str, z: Tensor, projector: Projector | None, record: Record
    ) -> _StandIn:
        """Return the stand-in of a parameter."""
        weight = parameter.detach()
        self = weight.as_subclass(cls)
        self.weight, self.label, self.z = weight, label, z
        self.projector, self.record, self._sum = projector, record, None
        return self

    def formed(self) -> Tensor:
        """Return ``W + lift(z)``."""

        def compute(z: Tensor) -> tuple[Tensor, int]:
            delta = self.projector.lift(z) if self.projector else z
            return self.weight + delta.to(self.weight.dtype), 0

        if not torch.is_grad_enabled():  # this sum has no derivative, so it is not kept
            return outside_vmap(self.z, compute, self.z)
        if self._sum is None:
            self._sum = outside_vmap(self.z, compute, self.z)
        return self._sum

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _REQUIRES_GRAD:
            return True
        if func in METADATA:
            return super().__torch_function__(func, types, args, kwargs)
        if func in _OPERATIONS:
            output = _OPERATIONS[func](*args, **kwargs)
            if output is not None:
                return output
        args, kwargs = tree_map_only(_StandIn, _StandIn.formed, (args, kwargs))
        return func(*args, **kwargs)


# ---- Operations that are linear in the weight: value from W, derivative in z ----


class AtZero(torch.autograd.Function):
    """The identity, with the derivative of an added term that is linear in zero coordinates.

    ``derivative(grad_output, saved)`` returns one gradient for each of the coordinates.
    """

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, saved: Tensor, derivative: Any, *coordinates: Tensor
    ) -> Tensor:
        ctx.save_for_backward(saved)
        ctx.derivative = derivative
        return output.detach()  # no autograd view, so that in-place operations may follow

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return grad_output, None, None, *ctx.derivative(grad_output, *ctx.saved_tensors)


def _plain(weight: Any) -> Any:
    return weight.weight if isinstance(weight, _StandIn) else weight


def _computed(weight: Any) -> bool:
    """Return whether a weight was computed from others, so that it differs between samples."""
    batched: bool = isinstance(weight, Tensor) and not isinstance(weight, _StandIn)
    return batched and torch._C._functorch.is_batchedtensor(weight)


def _moving(*weights: Any) -> list[Tensor]:
    """Return the coordinates of the stand-ins among some weights."""
    return [weight.z for weight in weights if isinstance(weight, _StandIn)]


def _positions(tensor: Tensor, last: int = 1) -> Tensor:
    """Return (B, ..., *last) as (B, T, *last), for any number of last dimensions."""
    end = tensor.dim() - last
    return tensor.reshape(len(tensor), tensor.shape[1:end].numel(), *tensor.shape[end:])


def _of_coordinates(weight: _StandIn, gradient: Single) -> Tensor | None:
    """Return a gradient as one of z if it is dense; else record it."""
    if isinstance(gradient, Dense):
        return gradient.values
    weight.record(weight.label, gradient)
    return None


def _addmm(
    input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1, out: Any = None
) -> Tensor | None:
    """Return ``b + x W``, as in GPT-2's ``Conv1D``: a linear layer with weight W^T."""
    if input.dim() != 1 or (beta, alpha, out) != (1, 1, None):
        return None
    return _product(mat1, mat2, input, transposed=True)


def _product(
    input: Tensor, weight: Any, bias: Any = None, *, transposed: bool = False
) -> Tensor | None:
    """Return ``x M^T + b``, where M is W, or W^T if ``transposed`` (its coordinates are then Z^T).

    With a projection on the right side of M, ``x (M + Z P^T)^T = x M^T + (x P) Z^T``. With one on
    the left side, ``x (M + P Z)^T = x M^T + (x Z^T) P^T``.
    """
    if isinstance(input, _StandIn) or _computed(weight) or _computed(bias):
        return None
    trained = isinstance(weight, _StandIn)
    projector = weight.projector if trained else None
    on_input = projector is not None and (projector.side is Side.RIGHT) != transposed
    before = projector if on_input else None

    def derivative(grad: Tensor, saved: Tensor) -> tuple[Tensor | None, ...]:
        rows, cols, found = _positions(grad), _positions(saved), []
        if trained:
            matrix = Factored(cols, rows) if transposed else Factored(rows, cols)
            gradient = projected(matrix, projector, done=before is not None)
            found.append(_of_coordinates(weight, gradient))
        if isinstance(bias, _StandIn):
            found.append(rows.sum(1, dtype=torch.float32))
        return tuple(found)

    def compute(x: Tensor, *coordinates: Tensor) -> tuple[Tensor, int]:
        matrix = _plain(weight).T if transposed else _plain(weight)
        saved = x.detach()
        if before:
            saved = saved @ before.matrix.to(saved.dtype)  # here, because x is in the cache
        output = functional.linear(x, matrix, _plain(bias))
        return AtZero.apply(output, saved, derivative, *coordinates), 0

    coordinates = _moving(weight, bias)
    return outside_vmap(coordinates[0], compute, input, *coordinates)


def _embedding(
    input: Tensor,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    """Return ``y_t = W[index_t]``."""
    projector: Projector | None = weight.projector
    if max_norm is not None or scale_grad_by_freq:
        return None
    num_rows = weight.weight.shape[0]

    def derivative(grad: Tensor, indices: Tensor) -> tuple[Tensor | None]:
        indices, values = _positions(indices, last=0), _positions(grad)
        if padding_idx is not None:  # this row is a constant, as in autograd
            padding = indices == padding_idx % num_rows
            values = values.masked_fill(padding[:, :, None], 0)
        return (
            _of_coordinates(weight, projected(SparseRows(indices, values, num_rows), projector)),
        )

    def compute(indices: Tensor, z: Tensor) -> tuple[Tensor, int]:
        output = functional.embedding(indices, weight.weight)
        return AtZero.apply(output, indices, derivative, z), 0

    return outside_vmap(weight.z, compute, input, weight.z)


def _convolution(function: Callable[..., Tensor], dims: int) -> Callable[..., Tensor | None]:
    """Return a convolution over ``dims`` dimensions, with a backward pass for each sample."""

    def operation(
        input: Tensor,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor | None:
        if isinstance(input, _StandIn) or _computed(weight) or _computed(bias):
            return None
        if isinstance(padding, str) or getattr(weight, "projector", None) is not None:
            return None
        sizes = [[x] * dims if isinstance(x, int) else x for x in (stride, padding, dilation)]

        def derivative(grad: Tensor, images: Tensor, batch_size: int) -> tuple[Tensor, ...]:
            found = []
            if isinstance(weight, _StandIn):
                shapes = weight.shape, groups, batch_size
                found.append(functions.of_kernels(images, grad, *shapes, *sizes))
            if isinstance(bias, _StandIn):
                places = grad.unflatten(0, (batch_size, -1)).flatten(3)  # (B, b, m, places)
                found.append(places.sum((1, 3), dtype=torch.float32))
            return tuple(found)

        def compute(x: Tensor, *coordinates: Tensor) -> tuple[Tensor, int]:
            sample = x.shape[: -dims - 1]  # (B,) or (B, b)
            images = x.reshape(-1, *x.shape[-dims - 1 :])
            output = function(images, _plain(weight), _plain(bias), *sizes, groups)
            of_batch = partial(derivative, batch_size=len(x))
            output = AtZero.apply(output, images.detach(), of_batch, *coordinates)
            return output.unflatten(0, sample), 0

        coordinates = _moving(weight, bias)
        return outside_vmap(coordinates[0], compute, input, *coordinates)

    return operation


_OPERATIONS: dict[Any, Callable[..., Tensor | None]] = {
    functional.linear: _product,
    torch.addmm: _addmm,
    functional.embedding: _embedding,
    functional.conv1d: _convolution(functional.conv1d, 1),
    functional.conv2d: _convolution(functional.conv2d, 2),
    functional.conv3d: _convolution(functional.conv3d, 3),
}
