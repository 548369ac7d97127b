"""Synthetic public inputs (random tokens, 1/f noise) for measuring layers without data.

Texts are uniform random tokens between the special tokens that the tokenizer adds to a sentence.
Images and sound are noise with the spectrum of natural ones: amplitudes fall as one over the
frequency, with mean 0 and variance 1, as after the usual normalization. The constants of this
module define lengths and amounts.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from dp_grape_hf.errors import PrivacyError

LENGTHS = (8, 16, 24, 32, 48, 64, 96, 128)  # lengths of texts, in tokens
TOKENS = 144  # approximate number of tokens in a batch of texts
_SHORT, _TOKENS_OF_SHORT = 8, 1024
"""The number of tokens in a batch of texts of at most 8 tokens. A head reads one vector of each
text, and its P has all directions of these vectors, so many texts are needed."""
_PATCHES = 1024  # approximate number of patches in a batch of images
_BATCHES = 8
_SAMPLES_OF_SOUND = 16_000  # one second at 16 kHz

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class SyntheticInputs:
    """Batches of ``synthetic_batches``, the same in every call.

    They do not depend on any data, so results that are measured on them may be stored.
    """

    model: Any
    tokenizer: Any = None
    seed: int = 0

    def __call__(self) -> Iterator[Inputs]:
        """Yield the batches."""
        return synthetic_batches(self.model, self.tokenizer, self.seed)


def synthetic_batches(model: Any, tokenizer: Any = None, seed: int = 0) -> Iterator[Inputs]:
    """Yield batches of synthetic inputs of a model, the same for the same arguments.

    Args:
        model: a model of transformers, or one with a ``config`` and a ``main_input_name`` like it.
        tokenizer: the tokenizer of the model, or a processor that has one. Without it, the special
            tokens are read from the configuration, and a text ends with its end token.
        seed: a public seed.

    Raises:
        PrivacyError: if the model's ``main_input_name`` is unknown.
    """
    kind = getattr(model, "main_input_name", None)
    make = _MAKERS.get(str(kind)) if hasattr(model, "config") else None
    if make is None:
        raise PrivacyError(
            f"{type(model).__name__} has main_input_name={kind!r}, and synthetic inputs exist only "
            f"for {', '.join(_MAKERS)}. projection='principal' measures layers on them. Pass "
            "public_dataset= to the trainer, or choose projection='gaussian'."
        )
    generator = torch.Generator().manual_seed(seed)
    words = _Words(model.config, getattr(tokenizer, "tokenizer", tokenizer))
    for number in range(_BATCHES):
        inputs = make(model.config, words, number, generator)
        if chooses(model):
            inputs = {n: torch.stack([v, v.roll(1, 0)], 1) for n, v in inputs.items()}
        if getattr(model.config, "is_encoder_decoder", False):
            size = len(next(iter(inputs.values())))
            ids = words.draw(size, words.length(number), generator)
            inputs["decoder_input_ids"] = ids
        yield inputs


def first_texts(batch: Mapping[str, Any], tokens: int) -> Mapping[str, Any]:
    """Return the first texts of a batch, with about ``tokens`` tokens; other batches unchanged."""
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        return batch
    size, most = len(ids), max(1, tokens // ids.shape[1])
    return {
        name: value[:most] if isinstance(value, Tensor) and value.shape[:1] == (size,) else value
        for name, value in batch.items()
    }


def reads_synthetic(model: Any) -> bool:
    """Return whether ``synthetic_batches`` has all required inputs of the model's forward."""
    kind = getattr(model, "main_input_name", None)
    takes = signature(model.forward).parameters.values()
    given = {kind, "attention_mask", "decoder_input_ids"}
    variadic = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    needed = {p.name for p in takes if p.default is p.empty and p.kind not in variadic}
    named = {p.name for p in takes if p.kind not in variadic}
    any_name = any(p.kind in variadic for p in takes)
    makes_inputs = hasattr(model, "config") and kind in _MAKERS
    return makes_inputs and (any_name or kind in named) and needed <= given


def on_inputs(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    """Run a model on a batch, without inputs that its forward does not name; return its output.

    Args:
        model: the model, on one device.
        batch: the inputs; tensors are moved to the device of the model.
    """
    return model(**accepted(model, batch))


def accepted(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of a batch that the forward of a model has a name for, on its device."""
    device = next(model.parameters()).device
    parameters = signature(model.forward).parameters.values()
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    inputs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}
    return {k: v for k, v in inputs.items() if k in names or not names}


def chooses(model: Any) -> bool:
    """Return whether a model reads the options of a question together, (B, options, T)."""
    return type(model).__name__.endswith("ForMultipleChoice")


class _Words:
    """The tokens of a vocabulary, and the first and last tokens of a sentence."""

    def __init__(self, config: Any, tokenizer: Any) -> None:
        text_config = (
            config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
        )
        size = getattr(text_config, "vocab_size", None) or 2
        self._before: list[int] = []
        if not hasattr(tokenizer, "all_special_ids"):  # no tokenizer, or an image processor
            named = {part: getattr(text_config, f"{part}_token_id", None) for part in _SPECIAL}
            lists = {part: ids if isinstance(ids, list) else [ids] for part, ids in named.items()}
            special = {token for ids in lists.values() for token in ids}
            ends = lists["eos"][:1]
            self._after = [token for token in ends if token is not None and 0 <= token < size]
        else:
            size = min(size, len(tokenizer))
            special = set(tokenizer.all_special_ids)
            ids = tokenizer("a")["input_ids"]
            inner = [n for n, token in enumerate(ids) if token not in special] or [len(ids)]
            self._before, self._after = ids[: inner[0]], ids[inner[-1] + 1 :]
        self._tokens = torch.tensor([t for t in range(size) if t not in special] or [0])
        tables = [getattr(text_config, f"max_{kind}", None) for kind in _POSITIONS]
        # Some models count positions from the index of the padding token.
        pad = getattr(text_config, "pad_token_id", None) or 0
        self._most = max(1, min((n - pad - 1 for n in tables if n), default=max(LENGTHS)))

    def length(self, number: int) -> int:
        """Return the length of the texts of a batch."""
        return min(LENGTHS[number % len(LENGTHS)], self._most)

    def draw(self, size: int, length: int, generator: torch.Generator) -> Tensor:
        """Return random texts, (size, length)."""
        chosen = torch.randint(len(self._tokens), (size, length), generator=generator)
        ids = self._tokens[chosen]
        if length > len(self._before) + len(self._after):
            ids[:, : len(self._before)] = torch.tensor(self._before, dtype=ids.dtype)
            ids[:, length - len(self._after) :] = torch.tensor(self._after, dtype=ids.dtype)
        return ids


_POSITIONS = ("position_embeddings", "target_positions")
_SPECIAL = ("pad", "bos", "eos", "cls", "sep", "mask", "unk", "decoder_start")


def _text(config: Any, words: _Words, number: int, generator: torch.Generator) -> Inputs:
    length = words.length(number)
    tokens = _TOKENS_OF_SHORT if length <= _SHORT else TOKENS
    ids = words.draw(max(1, tokens // length), length, generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _image(config: Any, words: _Words, number: int, generator: torch.Generator) -> Inputs:
    vision_config = getattr(config, "vision_config", config)
    size, patch = vision_config.image_size, getattr(vision_config, "patch_size", None) or 16
    sides = (size, size) if isinstance(size, int) else (size[0], size[1])
    patch = patch if isinstance(patch, int) else patch[0]
    count = max(1, _PATCHES * patch**2 // (sides[0] * sides[1]))
    shape = (min(count, _PATCHES // 8), getattr(vision_config, "num_channels", 3), *sides)
    return {"pixel_values": natural_noise(shape, 2, generator)}


def _spectrogram(config: Any, words: _Words, number: int, generator: torch.Generator) -> Inputs:
    shape = (2, config.num_mel_bins, 2 * config.max_source_positions)
    return {"input_features": natural_noise(shape, 2, generator)}


def _sound(config: Any, words: _Words, number: int, generator: torch.Generator) -> Inputs:
    if hasattr(config, "num_mel_bins"):  # the model reads a spectrogram as input_values
        shape = (2, config.max_length, config.num_mel_bins)
        return {"input_values": natural_noise(shape, 2, generator)}
    return {"input_values": natural_noise((8, _SAMPLES_OF_SOUND), 1, generator)}


_MAKERS: dict[str, Callable[[Any, _Words, int, torch.Generator], Inputs]] = {
    "input_ids": _text,
    "pixel_values": _image,
    "input_features": _spectrogram,
    "input_values": _sound,
}


def natural_noise(shape: tuple[int, ...], dims: int, generator: torch.Generator) -> Tensor:
    """Return noise with amplitudes of one over the frequency, mean 0 and variance 1.

    Args:
        shape: the shape of the result.
        dims: the number of last dimensions that are space or time.
        generator: a generator on the CPU.
    """
    over = tuple(range(-dims, 0))
    spectrum = torch.fft.rfftn(torch.randn(shape, generator=generator), dim=over)
    squared = torch.zeros(())
    for dim in over:
        frequencies_of = torch.fft.rfftfreq if dim == -1 else torch.fft.fftfreq
        frequency = frequencies_of(shape[dim]).reshape([-1] + [1] * (-1 - dim))
        squared = squared + frequency.square()
    least = 1 / max(shape[-dims:])
    noise = torch.fft.irfftn(spectrum / squared.sqrt().clamp(min=least), s=shape[-dims:], dim=over)
    noise = noise - noise.mean(over, keepdim=True)
    return noise / noise.std(over, keepdim=True).clamp(min=1e-12)
