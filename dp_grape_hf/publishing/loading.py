"""What transformers and PEFT read from a saved model, compared with the files that they should."""

import json
import logging
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers.utils import logging as host_logging

from dp_grape_hf.publishing.model_files import ADAPTER


class NotLoadable(Exception):
    """A folder cannot be loaded here, and why."""


def differences(folder: Path, names: Sequence[str]) -> list[str]:
    """Loads a model or an adapter as its users would, and compares every tensor with named files.

    It is loaded on the CPU, without a network and without code of its own. A model is then made
    from the tensors of the files alone, which are mapped into memory and not copied: transformers
    renames and joins tensors of some architectures, and treats both the same.

    Returns:
        What differs, as sentences; nothing if all tensors are those of the files, bit for bit.

    Raises:
        NotLoadable: there is no such model or adapter, or loading it fails.
    """
    try:
        with _quietly():
            tensors = {k: v for name in names for k, v in load_file(folder / name).items()}
            if ADAPTER in names:
                found = peft.load_peft_weights(str(folder), device="cpu")
                return _sentences("are not those of the files", _others(found, tensors))
            return _of_a_model(_class_of(folder), folder, tensors)
    except NotLoadable:
        raise
    except Exception as error:  # whatever the library thinks of it
        reason = next(iter(f"{error}".splitlines()), "")
        raise NotLoadable(f"{type(error).__name__}: {reason}") from error


def _of_a_model(model_class: Any, folder: Path, tensors: dict[str, Tensor]) -> list[str]:
    model = model_class.from_pretrained(folder, local_files_only=True)
    made, said = model_class.from_pretrained(
        None, config=model.config, state_dict=tensors, output_loading_info=True
    )
    return [
        *_sentences("are not those of the files", _others(model.state_dict(), made.state_dict())),
        *_sentences("are in no file, and are made anew", said["missing_keys"]),
        *_sentences("are in the files, and are not used", said["unexpected_keys"]),
    ]


def _class_of(folder: Path) -> Any:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise NotLoadable("there is no config.json") from error
    named = config.get("architectures")
    name = named[0] if named else None
    found = getattr(transformers, name, None) if isinstance(name, str) else None
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise NotLoadable(f"transformers has no architecture {name!r}")
    return found


def _others(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    both = found.keys() & expected.keys()
    return [
        name
        for name in sorted(found.keys() | expected.keys())
        if name not in both or not _same(found[name], expected[name])
    ]


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same bits, which those of NaN have, and 0 and -0 have not."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    bits = (tensor.detach().reshape(-1).view(torch.uint8) for tensor in (a, b))
    return torch.equal(*bits)


def _sentences(what: str, names: Collection[str]) -> list[str]:
    if not names:
        return []
    first = sorted(names)[:3]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return [f"{', '.join(first)}{more} {what}"]


@contextmanager
def _quietly() -> Iterator[None]:
    """Keeps what libraries say while they load out of a report."""
    level, bars = host_logging.get_verbosity(), host_logging.is_progress_bar_enabled()
    host_logging.set_verbosity(logging.CRITICAL)
    host_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        host_logging.set_verbosity(level)
        if bars:
            host_logging.enable_progress_bar()
