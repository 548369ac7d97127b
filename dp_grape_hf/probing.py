"""What a model does with the batch, found out by running it.

Which dimension of a tensor counts samples cannot be read off its shape: a table of T positions
looks like a batch wherever T equals B. It can be read off two runs, with two and with three copies
of one sample: what carries the batch grows in proportion, and a loss that looks at one sample only
stays the same. Whether samples are coupled shows in the gradient of one sample's loss in another's
coordinates, which must be zero.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dp_grape_hf.coins import keeping_random_state, seed_all
from dp_grape_hf.errors import PrivacyError, UnsupportedModelError
from dp_grape_hf.representations import PerSampleGradient


def rows_of(inputs: Mapping[str, Any], rows: Any) -> dict[str, Any]:
    """Returns the batch of these rows of another: numbers, a slice or a mask."""
    return {key: v[rows] if isinstance(v, Tensor) else v for key, v in inputs.items()}


def copies_of_first(inputs: Mapping[str, Any], size: int, sample: int = 0) -> dict[str, Any]:
    """Returns a batch of copies of the first sample, or of another."""
    return {
        key: value[sample : sample + 1].repeat(size, *[1] * (value.dim() - 1))
        if isinstance(value, Tensor)
        else value
        for key, value in inputs.items()
    }


def first_two(inputs: Mapping[str, Any], first: int = 0) -> dict[str, Any]:
    """Returns a batch of two samples, the first two or those from ``first``; one is taken twice."""
    two = rows_of(inputs, slice(first, first + 2))
    alone = any(len(v) == 1 for v in two.values() if isinstance(v, Tensor))
    return copies_of_first(two, 2) if alone else two


def refuse_shared_gradients(gradients: Mapping[str, PerSampleGradient], other: int) -> None:
    """Refuses one sample's loss having a gradient in the coordinates of the other."""
    # NaN is not above 0: a sample with NaN values says nothing, and clipping leaves it out.
    if names := [n for n, g in gradients.items() if g.squared_norm()[other] > 0]:
        raise UnsupportedModelError(
            "The loss of one sample depends on its batch-mates through "
            f"{', '.join(names)}: the loss or a layer couples samples, or a layer is given their "
            "positions in an order that mixes them. Clipping then bounds nothing."
        )


def refuse_coupled_losses(some: Tensor, others: Tensor, tolerance: float = 1e-2) -> None:
    """Refuses losses of the same samples that differ with what else is in the batch.

    Args:
        some: losses; where one of them is compared with several others, (1,).
        others: losses of the same samples in other company.
        tolerance: relative.
    """
    if not torch.allclose(
        some.float().expand_as(others), others.float(), rtol=tolerance, atol=1e-4, equal_nan=True
    ):
        raise PrivacyError(
            "The loss of one and the same sample changes with the number or the contents of the "
            "samples in its batch: the loss or the model couples samples, so clipping bounds "
            "nothing. Divide by each sample's own token count, not by a count over the batch."
        )


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switches dropout off, and restores mode and random state afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with keeping_random_state():
            yield
    finally:
        for module in training:
            module.training = True


class Selections(TorchDispatchMode):
    """Notes whether a pass selects positions by their values, so that their number varies."""

    seen = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        aten = torch.ops.aten
        if func is aten.index.Tensor:
            self.seen |= any(i is not None and i.dtype is torch.bool for i in args[1])
        self.seen |= func in (aten.nonzero.default, aten.masked_select.default)
        return func(*args, **(kwargs or {}))


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
    losses: Callable[[Mapping[str, Any]], Tensor], inputs: Mapping[str, Any], tolerance: float
) -> None:
    """Refuses a loss that depends on the others of a batch, in training mode and at full size.

    Half of the samples are replaced by copies of the one with the largest loss, or with the least:
    the others, which stay in their places with the random numbers of these, must not notice. Nor
    may the first two notice that there are no others.

    Args:
        losses: a batch -> one loss per sample, (B,).
        inputs: a batch of B different samples.
        tolerance: relative, for the comparison of two losses.

    Raises:
        PrivacyError: a loss changes with the others.
    """

    def run(rows: Tensor, seed: int = 0) -> Tensor:
        with keeping_random_state(), torch.no_grad(), WithoutDropout():
            seed_all(seed)
            return losses(rows_of(inputs, rows.tolist())).float()

    size = next(len(value) for value in inputs.values() if isinstance(value, Tensor))
    everyone = torch.arange(size)
    together = run(everyone)
    order = together.nan_to_num().argsort().cpu()
    for other in (order[-1], order[0]):
        for replaced in (order[::2], order[1::2]):
            rows = everyone.clone()
            rows[replaced] = other
            kept = (rows == everyone).to(together.device)
            refuse_coupled_losses(run(rows)[kept], together[kept], tolerance)
    if torch.equal(together.nan_to_num(), run(everyone, seed=1).nan_to_num()):
        refuse_coupled_losses(run(everyone[:2]), together[:2], tolerance)


Collator = Callable[[list[Any]], Mapping[str, Any]]


def refuse_mixing_collator(collate: Collator, examples: Sequence[Any]) -> None:
    """Refuses a collator that puts one example into another's row, as mixup does.

    Args:
        collate: the data collator.
        examples: at least three examples.
    """
    first, second, third = examples[:3]
    with_second, with_third = (_collate(collate, [first, other]) for other in (second, third))
    for key, left in with_second.items():
        right = with_third.get(key)
        if not (isinstance(left, Tensor) and isinstance(right, Tensor)) or left.dim() == 0:
            continue
        if len(left) != 2:
            raise PrivacyError(
                "The data collator made other rows than it was given examples, so a row is not "
                "an example and its clipping bounds nothing. Turn packing off."
            )
        # Equal numbers; NaN, which is not equal to itself, is no sign of mixing.
        if left.shape == right.shape and not torch.allclose(
            left[0], right[0], rtol=0, atol=0, equal_nan=True
        ):
            raise PrivacyError(
                f"The data collator makes {key!r} of one example depend on the other examples of "
                "its batch (mixup, say). An example would then contribute to several rows, and "
                "clipping rows would not bound it. Transform examples one by one."
            )


def refuse_reordering_collator(collate: Collator, examples: Sequence[Any]) -> None:
    """Refuses a collator whose rows are not in the order of its examples, or may not be.

    Where several rows are one privacy unit, they are told by their places.

    Args:
        collate: the data collator.
        examples: some examples, as different as the data has them; nothing is shown by one.
    """
    if len(examples) < 2:
        return
    rows, again = (_collate(collate, list(examples), seed=seed) for seed in (0, 1))
    backwards = _collate(collate, list(examples)[::-1])
    shown = False
    for key, value in rows.items():
        if not isinstance(value, Tensor) or value.dim() == 0 or not torch.equal(value, again[key]):
            continue  # of no sample, or drawn at random
        if not torch.equal(value.flip(0), backwards[key]):
            raise PrivacyError(
                f"The data collator gives {key!r} its rows in another order than that of the "
                "examples (sorted by length, say), so it is not known which of them are one "
                "privacy unit. Leave the order as it is."
            )
        shown |= not torch.equal(value, value.flip(0))
    if not shown:
        raise PrivacyError(
            "The data collator's rows are random, or alike for all examples that it was tried on, "
            "so it is not known whether they keep the order of the examples, and which of them are "
            "one privacy unit. Move what is random (masking, say) into the data set, or into the "
            "model."
        )


def refuse_padding_dependence(
    losses: Callable[[Mapping[str, Any]], Tensor],
    collate: Collator,
    examples: Sequence[Any],
    tolerance: float,
) -> None:
    """Refuses a model for which an example's loss depends on how far its batch is padded.

    The length of a batch is that of its longest example, so such a loss depends on batch-mates:
    with padding on the left and absolute positions, for example, or where padding is not masked.
    A collator that draws random numbers (it masks tokens, say) cannot be examined.

    Args:
        losses: a batch -> one loss per sample, (B,), without dropout.
        collate: the data collator.
        examples: some examples, of different lengths if there are any.
        tolerance: relative, for the comparison of two losses.
    """
    short, long = shortest_and_longest(collate, examples)
    alone, again = _collate(collate, [short]), _collate(collate, [short], seed=1)
    padded = _collate(collate, [short, long])
    tensors = {k: v for k, v in alone.items() if isinstance(v, Tensor) and v.dim() > 0}
    draws = any(not torch.equal(value, again[key]) for key, value in tensors.items())
    if draws or all(value.shape[1:] == padded[key].shape[1:] for key, value in tensors.items()):
        return
    by_itself, in_company = losses(alone)[0].float(), losses(padded)[0].float()
    if not torch.allclose(by_itself, in_company, rtol=tolerance, atol=0.1 * tolerance):
        raise PrivacyError(
            "The loss of an example changes when its batch is padded to the length of a longer "
            "example, so it depends on its batch-mates and clipping bounds nothing. Pad every "
            "example to one fixed length (padding='max_length'; for question answering there is no "
            "other way, as its softmax runs over the padding too), or pad on the right and give "
            "the model an attention_mask."
        )


def shortest_and_longest(collate: Collator, examples: Sequence[Any]) -> tuple[Any, Any]:
    """Returns two of some examples, by the size of what the collator makes of each alone."""

    def size(example: Any) -> int:
        leaves = tree_leaves(dict(_collate(collate, [example])))
        return max((t.numel() for t in leaves if isinstance(t, Tensor)), default=0)

    ordered = sorted(examples, key=size)
    return ordered[0], ordered[-1]


def _collate(collate: Collator, examples: list[Any], seed: int = 0) -> Mapping[str, Any]:
    """Collates with given random numbers, and leaves the random state as it was."""
    with keeping_random_state():
        seed_all(seed)
        return collate(examples)


@contextlib.contextmanager
def refusing_changed_weights(model: nn.Module, thorough: bool) -> Iterator[None]:
    """Refuses a pass that changes a tensor which is saved with the weights.

    Running statistics, moving averages and codebooks are such tensors. They would leave the machine
    without noise, past clipping and accountant.

    Args:
        model: the model that runs inside the context.
        thorough: whether to compare contents, and not only torch's count of in-place changes,
            which a change through ``.data`` evades.
    """

    def state() -> dict[str, tuple[Any, ...]]:
        return {
            name: (value.data_ptr(), value._version, _contents(value) if thorough else None)
            if isinstance(value, Tensor)
            else (pickle.dumps(value),)  # what a module adds by get_extra_state
            for name, value in model.state_dict(keep_vars=True).items()
        }

    before = state()
    yield
    after = state()
    if before == after:
        return
    for name, fingerprint in before.items():
        if after.get(name) != fingerprint:
            raise UnsupportedModelError(
                f"A training pass changed {name}, which is saved with the weights: it would "
                "publish a statistic of the training data without noise. Switch that statistic "
                "off (track_running_stats=False, for example)."
            )


def _contents(tensor: Tensor) -> str:
    """Returns a summary of a tensor's numbers; as text, for NaN is not equal to itself."""
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return repr(tensor.sum(dtype=wide).item())
