"""What a model does with the batch, found out by running it.

Which dimension of a tensor counts samples cannot be read off its shape: a table of T positions
looks like a batch wherever T equals B. It can be read off two runs, with two and with three copies
of one sample: what carries the batch grows in proportion, and a loss that looks at one sample only
stays the same. Whether samples are coupled shows in the gradient of one sample's loss in another's
coordinates, which must be zero.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dp_grape_hf.errors import PrivacyError, UnsupportedModelError
from dp_grape_hf.gradients.checks.guards import (
    DRAWS_BESIDE,
    configs_of,
    keeping_configs,
    keeping_random_state,
    seed_all,
)
from dp_grape_hf.gradients.forms import PerSampleGradient

ROUNDING = 1e-4  # of a loss, absolute
_NAMED = 5  # of parameters, at most, where an error or a warning lists them


def listed(names: Sequence[str]) -> str:
    """Returns the first names, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def rows_of(inputs: Mapping[str, Any], rows: Any) -> dict[str, Any]:
    """Returns the batch of these rows of another: numbers, a slice or a mask."""
    return {key: v[rows] if isinstance(v, Tensor) else v for key, v in inputs.items()}


def copies_of(inputs: Mapping[str, Any], size: int, sample: int = 0) -> dict[str, Any]:
    """Returns a batch of copies of one sample."""
    return rows_of(inputs, [sample] * size)


def first_two(inputs: Mapping[str, Any], first: int = 0) -> dict[str, Any]:
    """Returns a batch of two samples, the first two or those from ``first``; one is taken twice."""
    size = next(len(value) for value in inputs.values() if isinstance(value, Tensor))
    return rows_of(inputs, [first, min(first + 1, size - 1)])


def refuse_shared_gradients(gradients: Mapping[str, PerSampleGradient], other: int) -> None:
    """Refuses one sample's loss having a gradient in the coordinates of the other."""
    # NaN is not above 0: a sample with NaN values says nothing, and clipping leaves it out.
    if names := [n for n, g in gradients.items() if (g.squared_norm()[other] > 0).any()]:
        raise UnsupportedModelError(
            "The loss of one sample depends on its batch-mates: the loss or a layer couples "
            "samples, or a layer is given their positions in an order that mixes them. Clipping "
            f"then bounds nothing. It shows in the gradients of {listed(names)}."
        )


def refuse_coupled_losses(
    some: Tensor, others: Tensor, tolerance: float = 1e-2, rounding: float = ROUNDING
) -> None:
    """Refuses losses of the same samples that differ with what else is in the batch.

    Args:
        some: losses; where one of them is compared with several others, (1,).
        others: losses of the same samples in other company.
        tolerance: relative.
        rounding: absolute.
    """
    some, others = some.float().expand_as(others), others.float()
    if not torch.allclose(some, others, rtol=tolerance, atol=rounding, equal_nan=True):
        raise PrivacyError(
            "The loss of one and the same sample changes with the number or the contents of the "
            "samples in its batch: the loss or the model couples samples, so clipping bounds "
            "nothing. Compute each loss from that sample alone: divide by its own token count, not "
            "by a count over the batch. A loss that compares the samples of a batch with each "
            "other (contrastive, or a rank) has no gradient per sample: compare each with "
            "negatives in its own row, or of public data."
        )


@contextlib.contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Runs a model in training or evaluation mode, and restores that of each module afterwards.

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


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switches dropout off, and restores mode and random state afterwards."""
    with in_mode(model, training=False), keeping_random_state():
        yield


class Selections(TorchDispatchMode):
    """Follows what a pass computes of positions that it selects by their values.

    How many they are varies with the values, and so does what a row of such a tensor belongs to.
    What is read from one as a number, or of its size, may have any influence afterwards.
    """

    def __init__(self) -> None:
        super().__init__()
        self._memory: dict[int, StorageWeakRef] = {}  # which outlives no tensor
        self._everything = False
        self._reads = _Reads(self)

    def __enter__(self) -> Selections:
        self._reads.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._reads.__exit__(*error)

    def reach(self, value: Any) -> bool:
        """Returns whether a tensor was, or may have been, computed of selected positions."""
        if self._everything or not isinstance(value, Tensor):
            return self._everything
        if value.layout is not torch.strided:  # it has no memory of one piece
            return True
        known = self._memory.get(value.untyped_storage()._cdata)
        return known is not None and not known.expired()

    def note_read(self, value: Any) -> None:
        """Notes that the program has seen the numbers of a tensor."""
        self._everything |= self.reach(value)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result, aten = func(*args, **(kwargs or {})), torch.ops.aten
        selects = func in (aten.nonzero.default, aten.masked_select.default)
        if func is aten.index.Tensor:
            selects = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        if func is aten._local_scalar_dense.default:
            self.note_read(args[0])
        elif selects or any(map(self.reach, tree_leaves((args, kwargs)))):
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                    storage = StorageWeakRef(leaf.untyped_storage())
                    self._memory[storage.cdata] = storage
        return result


class _Reads(TorchFunctionMode):
    """Notices what dispatch does not show: a list or an array of a tensor, and how large it is."""

    def __init__(self, selections: Selections) -> None:
        super().__init__()
        self._selections = selections

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _READ:
            self._selections.note_read(args[0])
        return func(*args, **(kwargs or {}))


_READ = {
    *(Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__iter__, Tensor.__len__),
    *(Tensor.size, Tensor.numel, Tensor.nelement, torch.numel),
    vars(Tensor.__base__)["shape"].__get__,
}


class WithoutDropout(TorchFunctionMode):
    """Lets a model in training mode run without dropout."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is functional.scaled_dot_product_attention:
            kwargs.update(zip(("attn_mask", "dropout_p", "is_causal"), args[3:], strict=False))
            args, kwargs["dropout_p"] = args[:3], 0.0
        return func(*args, **kwargs)


_DROPOUTS = {
    *(functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d),
    *(functional.alpha_dropout, functional.feature_alpha_dropout),
}


def refuse_coupled_batch(
    losses: Callable[[Mapping[str, Any]], Tensor],
    inputs: Mapping[str, Any],
    tolerance: float,
    rounding: float = ROUNDING,
) -> None:
    """Refuses a loss that depends on the others of a batch, in training mode and at full size.

    Half of the samples are replaced by copies of the one with the largest loss, or with the least:
    the others, which stay in their places with the random numbers of these, must not notice. Nor
    may the first two notice that there are no others.

    Args:
        losses: a batch -> one loss per sample, (B,).
        inputs: a batch of B different samples.
        tolerance: relative, for the comparison of two losses.
        rounding: absolute, likewise.

    Raises:
        PrivacyError: a loss changes with the others, or though nothing does.
    """

    def run(rows: Tensor, seed: int = 0) -> Tensor:
        with keeping_random_state(), torch.no_grad(), WithoutDropout():
            seed_all(seed)
            return losses(rows_of(inputs, rows.tolist())).float()

    size = next(len(value) for value in inputs.values() if isinstance(value, Tensor))
    everyone = torch.arange(size)
    together = run(everyone)
    if not torch.allclose(together, run(everyone), rtol=tolerance, atol=rounding, equal_nan=True):
        raise PrivacyError(DRAWS_BESIDE)
    order = together.nan_to_num().argsort().cpu()
    for other in (order[-1], order[0]):
        for replaced in (order[::2], order[1::2]):
            rows = everyone.clone()
            rows[replaced] = other
            kept = (rows == everyone).to(together.device)
            refuse_coupled_losses(run(rows)[kept], together[kept], tolerance, rounding)
    if torch.equal(together.nan_to_num(), run(everyone, seed=1).nan_to_num()):
        refuse_coupled_losses(run(everyone[:2]), together[:2], tolerance, rounding)
