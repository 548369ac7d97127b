"""Cross-entropy over a vocabulary, in little memory.

Torch's own keeps the log-probabilities, and forms their gradient and that of the logits: three
float32 tensors of the size of the logits. This one keeps the logits, which exist anyway, and one
number per position; the gradient then takes the logits' place in memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE_INDEX = -100

_AT_ONCE = 2**22  # logits converted to float32 at once


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns ``-log softmax(logits)[target]`` per position, float32; 0 where it is ignored.

    Args:
        logits: (N, V), of any floating-point dtype; computed with in float32.
        targets: (N,), integers below V, or ``IGNORE_INDEX``.
    """
    losses: Tensor = _CrossEntropy.apply(logits, targets)[0]
    return losses


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        parts = logits.split(_rows(logits))
        sums = torch.cat([part.float().logsumexp(1) for part in parts])  # (N,)
        picked = logits.gather(1, targets.clamp(min=0)[:, None])[:, 0].float()
        return (sums - picked).masked_fill(targets == IGNORE_INDEX, 0.0), sums

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, _: Any) -> tuple[Tensor, None]:
        """Returns ``(softmax(logits) - one_hot(target)) * grad_output``, in place of the logits.

        Where the graph is kept for another backward pass, which needs them, they stay. If anything
        else still needed the logits, autograd would notice that they were changed.
        """
        logits, targets, sums = ctx.saved_tensors
        scale = grad_output.masked_fill(targets == IGNORE_INDEX, 0.0)[:, None]
        index = targets.clamp(min=0)[:, None]
        kept = torch._C._autograd._get_current_graph_task_keep_graph()
        reused = logits.is_contiguous() and not kept
        gradient = logits.detach() if reused else torch.empty_like(logits)
        parts = (x.split(_rows(logits)) for x in (gradient, logits, sums[:, None], index, scale))
        for out, part, total, target, factor in zip(*parts, strict=True):
            in_place = out.dtype is torch.float32
            exact = out if in_place else torch.empty_like(out, dtype=torch.float32)
            torch.sub(part, total, out=exact).exp_()  # the probabilities
            exact.scatter_add_(1, target, torch.full_like(total, -1.0)).mul_(factor)
            if not in_place:
                out.copy_(exact)
        return gradient, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, logits: Tensor, targets: Tensor) -> tuple[Any, Any]:
        """Takes the positions of all samples for those of one: no position looks at another."""
        size = info.batch_size
        logits, targets = (
            x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip((logits, targets), in_dims, strict=True)
        )
        outputs = _CrossEntropy.apply(logits.flatten(0, 1), targets.flatten())
        return tuple(x.unflatten(0, (size, -1)) for x in outputs), (0, 0)


def _rows(logits: Tensor) -> int:
    return max(1, _AT_ONCE // logits.shape[1])
