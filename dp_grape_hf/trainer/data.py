"""The data of a private run: its loader, what is public, and what must not be evaluated on."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers.trainer_utils import seed_worker

from dp_grape_hf.arguments import DPGrapeArguments, check_dataset
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.mechanism import (
    EmptyDrawDataset,
    Grid,
    LogicalBatchCollator,
    PoissonBatchSampler,
    UnitBatchSampler,
    UnitCollator,
    UnitDataset,
    Units,
    read_units,
    refuse_large_unit,
    repeatable_seeds,
    secret_seeds,
)
from dp_grape_hf.per_sample import keeping_random_state
from dp_grape_hf.projections import PRINCIPAL, Batches, Inputs
from dp_grape_hf.publishing import adapters_of
from dp_grape_hf.trainer.bad_data import explaining_bad_data

_MANY = 4  # physical batches a step, from which more of them cost less than padding does


def loader_of(
    draws: PoissonBatchSampler,
    dataset: Any,
    collator: Callable[[list[Any]], Any],
    args: Any,
    units: Units | None,
    longest: int | None,
    *,
    secret: bool,
) -> DataLoader[Any]:
    """Returns a loader of logical batches.

    Args:
        draws: of examples, or of units where there are any.
        dataset: the examples.
        collator: of a physical batch.
        args: of the run.
        units: which examples are one privacy unit; None where each is one.
        longest: how many positions the model has, if that is limited.
        secret: whether random numbers of data set and collator are secret; a test repeats a run.
    """
    size = args.per_device_train_batch_size
    batches = args.logical_batch_size / draws.world_size / size  # by the declared numbers alone
    grid = Grid(longest, parts=2 if batches >= _MANY else 1)
    seeds = secret_seeds if secret else repeatable_seeds
    parts: dict[str, Any]
    if units is None:
        parts = {
            "dataset": EmptyDrawDataset(dataset, seeds),
            "batch_sampler": draws,
            "collate_fn": LogicalBatchCollator(collator, size, grid, seeds),
        }
    else:
        parts = {
            "dataset": UnitDataset(dataset, args.privacy_unit_column, seeds),
            "batch_sampler": UnitBatchSampler(draws, units, args.max_examples_per_unit),
            "collate_fn": UnitCollator(collator, size, grid, seeds),
        }
    return DataLoader(
        **parts,
        num_workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory and torch.accelerator.is_available(),
        persistent_workers=args.dataloader_persistent_workers,
        prefetch_factor=args.dataloader_prefetch_factor,
        worker_init_fn=partial(
            seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index
        ),
    )


def units_of(dataset: Any, args: DPGrapeArguments) -> Units:
    """Returns which examples are one privacy unit, by the column that arguments name.

    Raises:
        PrivacyError: a unit has more examples than a physical batch holds.
    """
    assert args.privacy_unit_column is not None
    units = read_units(dataset, args.privacy_unit_column)
    most = min(units.largest, args.max_examples_per_unit or units.largest)
    refuse_large_unit(most, args.per_device_train_batch_size)
    return units


def positions_of(model: nn.Module) -> int | None:
    """Returns how many positions an input of a model may have; None without a limit that is known.

    Padding that every example gets must not exceed it. Of a table of positions that counts from
    behind its index of padding (RoBERTa's), some rows are not reached, and the virtual tokens of an
    adapter take positions, too.
    """
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    most = getattr(config, "max_position_embeddings", None)
    if not isinstance(most, int):
        return None
    unreached = [
        module.padding_idx + 1
        for name, module in model.named_modules()
        if "position" in name
        and isinstance(module, nn.Embedding)
        and module.padding_idx is not None
    ]
    adapters = adapters_of(model).values()
    virtual = sum(getattr(adapter, "num_virtual_tokens", None) or 0 for adapter in adapters)
    return most - max(unreached, default=0) - virtual


def name_labels(model: nn.Module, dataset: Any) -> None:
    """Gives a classifier the names of its labels, if the data set has them and the model has not.

    The names are those of the data set's columns and not of its examples: ``ClassLabel``.
    """
    columns = getattr(dataset, "features", None) or {}
    found = (getattr(columns.get(name), "names", None) for name in ("labels", "label"))
    names: list[str] | None = next(filter(None, found), None)
    config: Any = getattr(model, "config", None)
    unnamed = {number: f"LABEL_{number}" for number in range(len(names or ()))}
    if names and getattr(config, "id2label", None) == unnamed:
        config.id2label = dict(enumerate(names))
        config.label2id = {name: number for number, name in enumerate(names)}


_PUBLIC_EXAMPLES = 512


def public_batches(
    dataset: Any, collator: Callable[[list[Any]], Any], size: int, unused: Collection[str]
) -> Batches:
    """Returns what makes inputs of ``size`` rows from the first 512 rows of a public dataset.

    Names that are ``unused``, those of labels, are left out.
    """
    examples = range(min(len(dataset), _PUBLIC_EXAMPLES))

    def batches() -> Iterator[Inputs]:
        for start in range(0, len(examples), size):
            inputs = collator([dataset[i] for i in examples[start : start + size]])
            yield {name: value for name, value in inputs.items() if name not in unused}

    return batches


def description(dataset: Any) -> str:
    """Returns what a ledger calls a dataset: its name, if it has one, and its size."""
    name = getattr(getattr(dataset, "info", None), "dataset_name", None)
    return f"{name or type(dataset).__name__}, {len(dataset)} examples"


def refuse_public_dataset(dataset: Any, training_data: Any, args: DPGrapeArguments) -> None:
    """Refuses a public dataset that has rows of the training data, or that nothing would look at.

    The rows that are used of it are compared with all of the training data as it was passed, by a
    hash of what both hold under the same names, but for labels.

    Raises:
        PrivacyError: if it is the same object, or has the same contents by its fingerprint; if a
            row has the contents of a training example; or if nothing is measured.
    """
    if dataset is None:
        return
    if args.projection != PRINCIPAL:
        raise PrivacyError(
            f"public_dataset was given, and projection={args.projection!r} measures nothing on it. "
            f"Leave it out, or choose projection={PRINCIPAL!r}."
        )
    prints = [getattr(data, "_fingerprint", None) for data in (dataset, training_data)]
    if dataset is training_data or (prints[0] is not None and prints[0] == prints[1]):
        raise PrivacyError(
            "public_dataset is the train_dataset, whose examples would shape the projection "
            "without noise. Give other data, which are public, or leave it out: synthetic inputs "
            "serve as well."
        )
    check_dataset(dataset)
    if training_data is not None and (shared := _shared(dataset, training_data, args)) is not None:
        raise PrivacyError(
            f"public_dataset[{shared}] has the contents of an example of train_dataset, which "
            "would shape the projection without noise. Take out of public_dataset what is not "
            "public, give other data, or leave it out: synthetic inputs serve as well."
        )


def _shared(dataset: Any, training_data: Any, args: DPGrapeArguments) -> int | None:
    """Returns the index of the first public row that has the contents of a training example.

    They are compared as they are stored, or as they are read if nothing is stored in both.
    """
    with keeping_random_state():  # data sets may draw
        for stored in (True, False):
            public = list(_rows(dataset, stored, most=_PUBLIC_EXAMPLES))
            first = next(_rows(training_data, stored, most=1), {})
            names = _contents(public, [n for n in first if n != args.privacy_unit_column])
            if not names:
                continue
            places = {_digest(row, names): n for n, row in reversed([*enumerate(public)])}
            places.pop(None, None)  # of empty rows
            with explaining_bad_data(training_data, "Comparing it with public_dataset"):
                digests = (_digest(row, names) for row in _rows(training_data, stored, names))
                found = {places[digest] for digest in digests if digest in places}
            return min(found, default=None)
    return None


_ROWS = 256  # read at once


def _rows(
    dataset: Any, stored: bool, names: list[Any] | None = None, most: int | None = None
) -> Iterator[Mapping[Any, Any]]:
    """Yields examples by name; those of a ``datasets.Dataset`` as they are stored, if asked to."""
    count = len(dataset) if most is None else min(len(dataset), most)
    if stored and hasattr(dataset, "select_columns"):
        plain = dataset.with_format(None)
        plain = plain if names is None else plain.select_columns(names)
        for name, kind in plain.features.items():
            if getattr(kind, "decode", False) and type(kind).__name__ != "Image":  # sounds, films
                plain = plain.cast_column(name, replace(kind, decode=False))
        for start in range(0, count, _ROWS):
            batch = plain[start : min(start + _ROWS, count)]
            for row in zip(*batch.values(), strict=True):
                yield dict(zip(batch, row, strict=True))
    else:
        for example in (dataset[i] for i in range(count)):
            named = example if hasattr(example, "keys") else getattr(example, "__dict__", None)
            yield dict(enumerate(example)) if named is None else named


_BESIDE = re.compile("label|_mask$|token_type_ids$|position_ids$")  # alike in many rows


def _contents(rows: Sequence[Mapping[Any, Any]], names: Sequence[Any]) -> list[Any]:
    """Returns under which names rows hold what tells them apart: more than single numbers.

    Labels only if there is nothing else; single numbers only if some have fractions.
    """
    inputs = [name for name in names if not _BESIDE.search(str(name))]
    labels = [name for name in names if "label" in str(name)]
    held = {name: [_canonical(row.get(name)) for row in rows] for name in (*inputs, *labels)}
    for some in (inputs, labels):
        if found := [n for n in some if any(x and not isinstance(x, int | float) for x in held[n])]:
            return found
    return inputs if any(isinstance(x, float) for n in inputs for x in held[n]) else []


def _digest(row: Mapping[Any, Any], names: Sequence[Any]) -> bytes | None:
    """Returns a hash of what a row holds under these names; None if that is nothing."""
    held = [_canonical(row.get(name)) for name in names]
    return blake2b(repr(held).encode(), digest_size=16).digest() if any(held) else None


def _canonical(value: Any) -> Any:
    """Returns a value in the one form that it has in every library; None if it is empty."""
    if isinstance(value, str | bytes | None):
        return value or None
    if isinstance(value, Mapping):
        items = {str(key): _canonical(value[key]) for key in sorted(value, key=str)}
        return {key: item for key, item in items.items() if item is not None} or None
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.float() if value.is_floating_point() else value  # bfloat16 is torch's alone
    try:
        array = np.asarray(value)
    except (RuntimeError, TypeError, ValueError):  # of several lengths, say
        array = np.asarray(None)
    if array.dtype.kind in "bui":
        array = array.astype(np.int64)
    elif array.dtype.kind == "f":
        with np.errstate(over="ignore"):
            array = array.astype(np.float32)
    elif isinstance(value, list | tuple) or array.ndim:
        return [_canonical(item) for item in value] or None
    else:
        return value
    if array.ndim == 0:
        return array.item()
    return (array.shape, blake2b(array.tobytes()).digest()) if array.size else None


def refuse_training_data(
    dataset: Any, training_data: Iterable[Any], args: DPGrapeArguments
) -> None:
    """Refuses to evaluate on the training data, whose metrics would be logged as they are.

    Unless they are declared public, or the run has no noise.

    Args:
        dataset: an evaluation data set, or several by name.
        training_data: as it was passed, and as it is.
        args: of the run.
    """
    datasets = dataset.values() if isinstance(dataset, dict) else [dataset]
    ours = {id(data) for data in training_data if data is not None}
    public = args.eval_data_is_public or not args.private
    if any(id(data) in ours for data in datasets) and not public:
        raise PrivacyError(
            "eval_dataset is the train_dataset: its metrics, which are logged, are un-noised "
            "functions of the training data. Hold out other examples. If all of the data is "
            "public, set eval_data_is_public=True."
        )
