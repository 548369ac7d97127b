"""Layers as autograd functions whose backward pass returns a gradient for each sample.

The forward pass computes the layer's output. The backward pass computes, from the gradient of the
output, the gradients of per-sample coordinates Z_i at Z_i = 0. It never forms the gradient of a
weight.

Shapes: B samples, T positions, n inputs, m outputs, r rank. A layer's tensors may have any
dimensions before the last, as long as the samples are the first part of them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from dp_grape_hf.phases import is_cpu

Recompute = Callable[[Tensor], Tensor]

_SHORT = (torch.bfloat16, torch.float16)
_HAS_OUT_DTYPE = "out_dtype" in (torch.bmm.__doc__ or "")  # torch 2.8 and later


class Projected(torch.autograd.Function):
    """``y = x W^T + b + (x P) Z_i`` at Z_i = 0: the usual case of ``Linear``, with less overhead.

    Args of ``apply``: the first seven of ``Linear``; only ``bias``, ``constant`` and ``projected``
    may be None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        before: Tensor,
        constant: Tensor | None,
        z: Tensor,
        projected: Tensor | None,
    ) -> Tensor:
        if projected is None:
            projected = functional.linear(x, before, constant)
        ctx.save_for_backward(weight, projected)
        ctx.batch_size = z.shape[0]
        return functional.linear(x, weight, bias).detach()  # autograd views forbid in-place changes

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, projected = ctx.saved_tensors
        of_input = grad @ weight if ctx.needs_input_grad[0] else None
        rows, columns = (by_sample(x, ctx.batch_size) for x in (grad, projected))
        return of_input, None, None, None, None, product(columns, rows), None


class Linear(torch.autograd.Function):
    """``y = x W^T + b + (x P) (Z + Z_i)``, or ``+ x (Z + Z_i)^T P^T``, at Z_i = 0.

    Args of ``apply``:
        x: the input.
        weight: W, (m, n).
        bias: b, (m,), or None.
        before: matrix (k, n) that maps the input to the factor of Z: P^T, with a row of zeros if
            the bias is the last row of Z; None if this factor is the input itself.
        constant: (k,), added to the product with ``before``: zeros, and 1 for the bias.
        z: (B, k, m), (B, r, n) or (B, m, n), or None if the weight is not trained.
        projected: the factor of Z, (..., k), if it is available; else None.
        z_bias: (B, m), or None.
        after: P, (m, r), if the projection is on the output side.
        swapped: whether Z_i has the shape (m, n) of a weight that is not projected.
        shared: Z of all samples, (r, m) or (r, n), if the weight is ``W + lift(Z)``; or None.
        again: computes the input from ``argument``, which is stored in place of the input; or None.
        argument: the argument of ``again``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        before: Tensor | None,
        constant: Tensor | None,
        z: Tensor | None,
        projected: Tensor | None,
        z_bias: Tensor | None,
        after: Tensor | None,
        swapped: bool,
        shared: Tensor | None,
        again: Recompute | None,
        argument: Tensor | None,
    ) -> Tensor:
        output = functional.linear(x, weight, bias).detach()  # as in ``Projected``
        saved = projected
        if z is not None and saved is None:
            saved = x if before is None else functional.linear(x, before, constant)
        if shared is not None and before is not None:
            assert saved is not None
            output = _add_product(output, saved[..., : len(shared)], shared)
        elif shared is not None and after is not None:
            output = _add_product(output, functional.linear(x, shared), after.mT)
        if again is not None:
            saved = argument
        ctx.swapped, ctx.again = swapped, again
        ctx.trained = z is not None, z_bias is not None
        ctx.batch_size = _batch_size(z, z_bias)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(saved, after, weight, shared, before)
        else:
            ctx.save_for_backward(saved, after, None, None, None)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, after, weight, shared, before = ctx.saved_tensors
        of_input = grad @ weight if ctx.needs_input_grad[0] else None
        projected = None if after is None else grad @ after
        if of_input is not None and shared is not None:
            if projected is not None:
                of_input = _add_product(of_input, projected, shared)
            else:
                of_input = _add_product(of_input, grad @ shared.mT, before[: len(shared)])
        rows = by_sample(grad, ctx.batch_size)  # (B, T, m)
        of_z = of_bias = None
        if ctx.trained[0]:
            columns = saved if ctx.again is None else ctx.again(saved)
            columns = by_sample(columns, ctx.batch_size)
            if columns.dtype is not rows.dtype:
                columns = columns.to(rows.dtype)
            if projected is not None:
                of_z = product(by_sample(projected, ctx.batch_size), columns)
            elif ctx.swapped:
                of_z = product(rows, columns)
            else:
                of_z = product(columns, rows)
        if ctx.trained[1]:
            of_bias = rows.sum(1, dtype=torch.float32)
        return of_input, *(None,) * 4, of_z, None, of_bias, *(None,) * 5


class LayerNorm(torch.autograd.Function):
    """``y = normalised(x) (w + z_i) + b + c_i`` at z_i = 0 and c_i = 0.

    Args of ``apply``:
        x: the input.
        weight: w.
        bias: b, or None.
        eps: constant that is added to the variance.
        z: (B, *shape of w), or None if w is not trained.
        z_bias: (B, *shape of b), or None if b is not trained.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        z: Tensor | None,
        z_bias: Tensor | None,
    ) -> Tensor:
        output, mean, scale = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
        ctx.trained, ctx.eps = (z is not None, z_bias is not None), eps
        ctx.batch_size = _batch_size(z, z_bias)
        ctx.save_for_backward(x, mean, scale, weight, bias)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, scale, weight, bias = ctx.saved_tensors
        of_input = of_z = of_bias = None
        shape = weight.shape
        if ctx.needs_input_grad[0]:
            wanted = [True, False, False]
            of_input = torch.ops.aten.native_layer_norm_backward(
                grad.contiguous(), x, shape, mean, scale, weight, bias, wanted
            )[0]
        rows = grad.reshape(ctx.batch_size, -1, *shape)
        if ctx.trained[0]:
            if x.dtype is not torch.float32 and mean.dtype is torch.float32:  # on a GPU
                normalised = torch.sub(x, mean).mul_(scale)
            else:
                normalised = functional.layer_norm(x.float(), shape, eps=ctx.eps)
            of_z = normalised.reshape(rows.shape).mul_(rows).sum(1)
        if ctx.trained[1]:
            of_bias = rows.sum(1, dtype=torch.float32)
        return of_input, None, None, None, of_z, of_bias


class RMSNorm(torch.autograd.Function):
    """``y = x / rms(x) (c + w + z_i)`` at z_i = 0, over the last dimension.

    Args of ``apply``:
        x: the input.
        weight: w, (n,).
        eps: constant that is added to the mean square.
        offset: c, 0 or 1.
        dtype: dtype of the output.
        z: (B, n).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        eps: float,
        offset: float,
        dtype: torch.dtype,
        z: Tensor,
    ) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        factor = weight.float() + offset if offset else weight.float()
        ctx.save_for_backward(x, scale, factor)
        ctx.batch_size = z.shape[0]
        return ((wide * scale) * factor).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, factor = ctx.saved_tensors
        normalised, wide = x.float() * scale, grad.float()
        of_input = None
        if ctx.needs_input_grad[0]:
            of_normalised = wide * factor
            along = (of_normalised * normalised).mean(-1, keepdim=True)
            of_input = (of_normalised - normalised * along).mul_(scale).to(x.dtype)
        of_z = normalised.mul_(wide)
        return of_input, None, None, None, None, by_sample(of_z, ctx.batch_size).sum(1)


def _batch_size(z: Tensor | None, z_bias: Tensor | None) -> int:
    taps = z_bias if z is None else z
    assert taps is not None
    return taps.shape[0]


def by_sample(tensor: Tensor, batch_size: int) -> Tensor:
    """Return (B, ..., n) or (B * T, n) as (B, T, n)."""
    if tensor.dim() == 3 and tensor.shape[0] == batch_size:
        return tensor
    return tensor.reshape(batch_size, -1, tensor.shape[-1])


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Add ``left @ right`` to a tensor in place, and return it."""
    rows = left.reshape(-1, left.shape[-1])
    total.view(-1, total.shape[-1]).addmm_(rows, right)
    return total


def _stands_for_gpu(tensor: Tensor) -> bool:
    """Return whether a tensor on the CPU is simulated on a GPU; compiled code never is."""
    return tensor.is_cpu and not torch.compiler.is_compiling() and not is_cpu(tensor.device)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left_i^T right_i`` of each sample, (B, k, m), float32."""
    if left.dtype in _SHORT and _HAS_OUT_DTYPE and (left.is_cuda or _stands_for_gpu(left)):
        return torch.bmm(left.mT, right, out_dtype=torch.float32)
    return torch.bmm(left.mT, right).float()


def of_kernels(
    images: Tensor,
    grad: Tensor,
    shape: torch.Size,
    groups: int,
    batch_size: int,
    stride: Any,
    padding: Any,
    dilation: Any,
) -> Tensor:
    """Return the gradient of a convolution's weight for each sample, (B, *shape).

    One backward convolution computes all of them: every sample is a group.

    Args:
        images: the input, (b, channels, ...), with b / B images for each sample.
        grad: the gradient of the output.
        shape: the shape of the weight.
        groups: as in ``functional.conv2d``.
        batch_size: B.
        stride, padding, dilation: as in ``functional.conv2d``, one number for each dimension.
    """

    def joined(x: Tensor) -> Tensor:  # (b / B, B * channels, ...)
        return x.unflatten(0, (batch_size, -1)).transpose(0, 1).flatten(1, 2)

    kernels = (batch_size * shape[0], *shape[1:])
    gradient = torch.ops.aten.convolution_backward(
        *(joined(grad), joined(images.to(grad.dtype))),
        grad.new_zeros(()).expand(kernels),  # the weight; only its shape is read
        *(None, stride, padding, dilation, False, [0] * len(stride)),
        *(batch_size * groups, (False, True, False)),
    )[1]
    return gradient.unflatten(0, (batch_size, shape[0]))
