"""Synthetic inputs for a model from outside transformers: random values in the form of an example.

``projections.probes`` knows the inputs of the models of transformers. For another model, its
forward shows the names of the inputs, and an example shows the shape and the dtype of each. The
values are random. The vocabulary has the size of the embedding that reads the tokens.

The form is public only if all examples share it. So the first dimension of an input, the length of
a text, is replaced by fixed lengths if the model can be run on these. All other dimensions count as
public.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from inspect import Parameter, signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from dp_grape_hf.errors import ERRORS, PrivacyError
from dp_grape_hf.gradients import StateGuard, evaluating, is_target, keeping_random_state, seed_all
from dp_grape_hf.projections import LENGTHS, Inputs, natural_noise, on_inputs

_BATCHES = 8
_TOKENS, _NUMBERS = 1024, 2**18  # per batch, about
_ROWS = 128  # per batch, at most


class Form(NamedTuple):
    """Shape and dtype of an input, which count as public."""

    shape: tuple[int, ...]  # the shape of one example
    dtype: torch.dtype


def form_of(dataset: Any, collator: Callable[[list[Any]], Any], example: Any) -> dict[str, Form]:
    """Return the form of each input of a collated example, by name.

    Args:
        dataset: the training data. Its state must not change.
        collator: the collator of the run. Its state must not change either.
        example: returns the example.

    Raises:
        PrivacyError: the data set or the collator changed its state.
    """
    with StateGuard(train_dataset=dataset, data_collator=collator).unchanged():
        batch = first_row(collator, example)
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    return {n: Form(tuple(v.shape[1:]), v.dtype) for n, v in tensors.items() if len(v) == 1}


def first_row(collator: Callable[[list[Any]], Any], example: Callable[[], Any]) -> dict[str, Any]:
    """Return the batch of one example; the state of random numbers does not change."""
    with keeping_random_state():
        seed_all(0)
        row = example()
        return dict(collator([dict(row) if isinstance(row, Mapping) else row]))


class InputsByForm:
    """Batches of random inputs of one form, the same at every call.

    Args:
        model: the model that reads them.
        forms: the form of each input, by name. Labels are left out unless the forward needs them.
        seed: a public seed.

    Raises:
        PrivacyError: at the first call: the model cannot be run on such inputs.
    """

    def __init__(self, model: nn.Module, forms: Mapping[str, Form], seed: int) -> None:
        takes = signature(model.forward).parameters
        demanded = {n for n, p in takes.items() if p.default is Parameter.empty}
        self._model, self._seed = model, seed
        self._forms = {
            name: form
            for name, form in forms.items()
            if name in takes and (not is_target(name) or name in demanded)
        }
        self._shapes: list[dict[str, tuple[int, ...]]] = []
        self._words: dict[str, int] = {}  # input name -> rows of the embedding that reads it

    def __call__(self) -> Iterator[Inputs]:
        """Yield the batches."""
        if not self._shapes:
            self._measure()
        generator = torch.Generator().manual_seed(self._seed)
        for number in range(_BATCHES):
            yield self._batch(self._shapes[number % len(self._shapes)], generator)

    def _measure(self) -> None:
        """Determine the vocabulary of each input, and the lengths that the model takes."""
        given = {name: form.shape for name, form in self._forms.items()}
        try:
            self._words = self._run(given)
            self._run(given)  # again, with tokens of the full vocabulary
        except (PrivacyError, *ERRORS) as error:
            raise PrivacyError(
                f"{type(self._model).__name__} cannot be run on random inputs with the form of an "
                f"example, {_in_words(self._forms)}: {type(error).__name__}: {error}. Pass "
                "public_dataset= or public_example= to the trainer, with inputs that it can read."
            ) from error
        free: set[int] = set()
        for size in {shape[0] for shape in given.values() if shape}:
            if any(self._takes(_with_length(given, {size}, n)) for n in LENGTHS if n != size):
                free.add(size)
        lengths = [_with_length(given, free, n) for n in LENGTHS] if free else []
        self._shapes = [shapes for shapes in lengths if self._takes(shapes)] or [given]

    def _takes(self, shapes: dict[str, tuple[int, ...]]) -> bool:
        with suppress(PrivacyError, *ERRORS):
            self._run(shapes)
            return True
        return False

    def _run(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, int]:
        """Run the model on one row, and return the vocabulary sizes (``_Reads``)."""
        batch = self._batch(shapes, torch.Generator().manual_seed(self._seed), rows=1)
        device = next(self._model.parameters()).device
        batch = {name: value.to(device) for name, value in batch.items()}
        with torch.no_grad(), evaluating(self._model), _Reads(batch) as reads:
            on_inputs(self._model, batch)
        return reads.words

    def _batch(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        generator: torch.Generator,
        rows: int | None = None,
    ) -> Inputs:
        if rows is None:
            texts = max((s[0] for s in shapes.values() if 0 < len(s) < 3), default=1)
            numbers = max((torch.Size(s).numel() for s in shapes.values()), default=1)
            rows = max(2, min(_ROWS, _TOKENS // max(texts, 1), _NUMBERS // max(numbers, 1)))
        return {
            name: self._values(name, (rows, *shape), generator) for name, shape in shapes.items()
        }

    def _values(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        dtype = self._forms[name].dtype
        if dtype.is_floating_point:
            if len(shape) > 3:  # images, and inputs with the same number of dimensions
                return natural_noise(shape, 2, generator).to(dtype)
            return torch.randn(shape, generator=generator).to(dtype)
        words = self._words.get(name)
        if words is None:  # not read by an embedding: a mask
            return (
                torch.zeros(shape, dtype=dtype) if is_target(name) else torch.ones(shape).to(dtype)
            )
        return torch.randint(words, shape, generator=generator).to(dtype)


class _Reads(TorchFunctionMode):
    """Records which embedding reads which input, and checks the range of tokens.

    A token outside the range would stop a GPU. Here it raises an ``IndexError``.

    Args:
        batch: the inputs, on the device of the model.
    """

    def __init__(self, batch: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names = {v.untyped_storage().data_ptr(): n for n, v in batch.items()}
        self.words: dict[str, int] = {}
        """Name of an input -> rows of the smallest embedding that reads it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (functional.embedding, functional.embedding_bag):
            tokens, weight = args[:2]
            if tokens.numel() and int(tokens.max()) >= len(weight):
                raise IndexError(f"an embedding has {len(weight)} rows, and no more tokens")
            if (name := self._names.get(tokens.untyped_storage().data_ptr())) is not None:
                self.words[name] = min(len(weight), self.words.get(name, len(weight)))
        return func(*args, **(kwargs or {}))


def _with_length(
    shapes: Mapping[str, tuple[int, ...]], sizes: set[int], length: int
) -> dict[str, tuple[int, ...]]:
    """Return shapes with ``length`` as first dimension, if it was one of ``sizes``."""
    return {n: (length, *s[1:]) if s and s[0] in sizes else s for n, s in shapes.items()}


def _in_words(forms: Mapping[str, Form]) -> str:
    return ", ".join(
        f"{name} {str(form.dtype).removeprefix('torch.')} of {len(form.shape)} dimensions"
        for name, form in forms.items()
    )
