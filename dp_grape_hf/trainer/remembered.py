"""Results of the start of a run that later runs reuse: P, and learning rates.

Measuring them takes most of the time before the first step. Both are pure functions of the initial
weights, of synthetic inputs and of public settings. So each result is stored in a file in the
Hugging Face cache. The name of the file is the SHA-256 of everything that the result depends on:

* the names, dtypes, shapes and bytes of all parameters and buffers; but not the bytes of a head,
  which neither P nor rates depend on, and which each run begins with other random numbers in;
* the classes and simple attributes of all modules, and the configuration;
* the inputs, byte by byte, and the model's outputs, or the inputs of that head, for two rows of
  them, which depend on code that no configuration names;
* the settings: seed, ranks, trained parameters, noise, optimizer, schedule and so on;
* the source code of this package, the versions of torch and transformers, and the device.

Guarantee:
    A file does not depend on training examples. Results are stored only inside ``remembering``,
    only if the inputs are a ``SyntheticInputs``, and only before this process has trained the
    weights. The initial weights count as public, as everywhere in this package.

    Someone who changes the files can make a run learn less, but epsilon still holds: it holds for
    any public P, and learning rates only scale private updates. Noise multipliers are not stored,
    because a wrong one would break epsilon.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch
import transformers
from huggingface_hub import constants
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dp_grape_hf.choosing import inputs_of
from dp_grape_hf.gradients import evaluating, rows_of
from dp_grape_hf.ledger import remembered_ledgers
from dp_grape_hf.projections import Batches, SyntheticInputs, on_inputs

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MOST_BYTES = 2**30  # of the folder; the files that were used longest ago are removed first

_Fingerprint = Callable[[], str | None]
_fingerprint: ContextVar[_Fingerprint | None] = ContextVar("fingerprint", default=None)


@contextmanager
def remembering(model: nn.Module, inputs: Batches, head: str | None = None) -> Iterator[None]:
    """Context in which the functions below store and reuse results, if the inputs are synthetic.

    Args:
        model: the model. Code inside must not change it permanently.
        inputs: the inputs on which results are measured.
        head: the layer whose outputs the model returns, if nothing else uses its parameters.
    """

    @cache  # the weights do not change inside
    def fingerprint() -> str | None:
        if not isinstance(inputs, SyntheticInputs) or remembered_ledgers(model):
            return None
        try:
            return _fingerprint_of(model, inputs, head)
        except Exception as error:  # code of any model
            logger.info("Results are neither reused nor stored: %r", error)
            return None

    token = _fingerprint.set(fingerprint)
    try:
        yield
    finally:
        _fingerprint.reset(token)


def reused_or_made(what: str, settings: Mapping[str, Any], make: Callable[[], T]) -> T:
    """Return the result of ``make``, from an earlier run if it was stored.

    Args:
        what: the name of the result.
        settings: all that the result depends on, besides model and inputs; values of JSON.
        make: returns tensors, numbers and texts, in lists and dictionaries.
    """
    fingerprint = _fingerprint.get()
    model_and_inputs = None if fingerprint is None else fingerprint()
    if model_and_inputs is None:
        return make()
    facts = json.dumps([what, settings, model_and_inputs, *_surroundings()], sort_keys=True)
    name = f"{hashlib.sha256(facts.encode()).hexdigest()}.pt"
    path = Path(constants.HF_HOME) / "dp_grape_hf" / name
    try:
        stored: T = _read(path)
        logger.info("The %s were measured by an earlier run (%s).", what, path)
        return stored
    except FileNotFoundError:
        pass
    except Exception as error:  # torch.load raises many kinds for a damaged file
        logger.info("%s cannot be read (%r), and is written again.", path, error)
    made = make()
    try:
        _write(path, made)
    except (OSError, RuntimeError) as error:  # torch.save raises the second on a full disk
        logger.info("The %s are not stored for later runs: %r.", what, error)
    return made


# ---- Digests of everything that a result depends on ----


def _fingerprint_of(model: Any, inputs: SyntheticInputs, head: str | None) -> str | None:
    """Return a digest of a model and its inputs; None if this process lacks some weights."""
    digest = hashlib.sha256()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
        if not plain or tensor.is_meta or tensor.is_quantized:
            return None  # sharded over processes, packed, or without numbers
        of_head = head is not None and name.startswith(f"{head}.")
        _add(digest, name, tensor[:0] if of_head and tensor.dim() else tensor)
        digest.update(f"{tuple(tensor.shape)}\n".encode())
    for name, module in model.named_modules():
        digest.update(f"{name}\n{_in_words(module)}\n".encode())
    digest.update(f"{getattr(model, 'config', None)}".encode())
    batches = list(inputs())
    for batch in batches:
        for name, value in batch.items():
            _add(digest, name, value)
    two = rows_of(batches[0], slice(2))
    with torch.no_grad(), evaluating(model):
        read: Any = (
            on_inputs(model, two)
            if head is None
            else inputs_of(model, model.get_submodule(head), two)
        )
    for number, value in enumerate(tree_leaves(read)):
        if isinstance(value, Tensor):
            _add(digest, f"{number}", value)
    return digest.hexdigest()


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256, in hex, of tensors with their names, dtypes and shapes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        _add(digest, name, tensor)
    return digest.hexdigest()


def _add(digest: Any, name: str, tensor: Tensor) -> None:
    values = tensor.detach().cpu().contiguous()
    digest.update(f"{name}\n{values.dtype}\n{tuple(values.shape)}\n".encode())
    digest.update(values.reshape(-1).view(torch.uint8).numpy().data)


def _in_words(module: nn.Module) -> str:
    """Return the class of a module, and its attributes that are a number or a text."""
    simple = int | float | str | torch.dtype | None
    values = {n: v for n, v in vars(module).items() if isinstance(v, simple) and n != "training"}
    return f"{type(module).__module__}.{type(module).__qualname__} {sorted(values.items())}"


@cache
def _surroundings() -> tuple[str, ...]:
    """Return the dependencies of results that are the same for all runs of a process."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return package_digest(), torch.__version__, transformers.__version__, device


def package_digest() -> str:
    """Return the SHA-256, in hex, of the modules of this package and their names."""
    digest = hashlib.sha256()
    folder = Path(__file__).parent.parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()


# ---- Files ----


def _read(path: Path) -> Any:
    """Return the result in a file, and note that it was used."""
    result = torch.load(path, map_location="cpu", weights_only=True)
    with suppress(OSError):
        os.utime(path)
    return result


def _write(path: Path, result: Any) -> None:
    """Write a file atomically, and remove the least recently used files above the bound."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{uuid4()}.part")
    try:
        torch.save(result, part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    size = 0
    for used in sorted(path.parent.iterdir(), key=lambda p: p.stat().st_mtime, reverse=True):
        size += used.stat().st_size
        if size > _MOST_BYTES:
            used.unlink(missing_ok=True)
