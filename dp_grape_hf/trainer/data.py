"""The data of a private run: its loader, what is public, and what must not be evaluated on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers.trainer_utils import seed_worker

from dp_grape_hf.arguments import DPGrapeArguments, check_dataset
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.mechanism import (
    EmptyDrawDataset,
    LengthOf,
    LogicalBatchCollator,
    PoissonBatchSampler,
    UnitBatchSampler,
    UnitCollator,
    UnitDataset,
    Units,
)
from dp_grape_hf.projections import PRINCIPAL, Batches, Inputs


def loader_of(
    draws: PoissonBatchSampler,
    dataset: Any,
    collator: Callable[[list[Any]], Any],
    args: Any,
    units: Units | None,
    length_of: LengthOf | None,
) -> DataLoader[Any]:
    """Returns a loader of logical batches.

    Args:
        draws: of examples, or of units where there are any.
        dataset: the examples.
        collator: of a physical batch.
        args: the arguments of the run.
        units: which examples are one privacy unit; None where each is one.
        length_of: as in ``LogicalBatchCollator``.
    """
    size = args.per_device_train_batch_size
    parts: dict[str, Any]
    if units is None:
        parts = {
            "dataset": EmptyDrawDataset(dataset),
            "batch_sampler": draws,
            "collate_fn": LogicalBatchCollator(collator, size, length_of),
        }
    else:
        parts = {
            "dataset": UnitDataset(dataset, args.privacy_unit_column),
            "batch_sampler": UnitBatchSampler(draws, units, args.max_examples_per_unit),
            "collate_fn": UnitCollator(collator, size),
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


_PUBLIC_EXAMPLES = 512


def public_batches(
    dataset: Any, collator: Callable[[list[Any]], Any], size: int, unused: Collection[str]
) -> Batches:
    """Returns what makes the inputs of a model from a dataset that was declared public.

    Args:
        dataset: its first 512 examples are used.
        collator: of a physical batch.
        size: of a batch.
        unused: the names of labels, which are left out.

    Raises:
        PrivacyError: if it cannot be read by index.
    """
    check_dataset(dataset)
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
    """Refuses a public dataset that is the training data, or that nothing would look at.

    Raises:
        PrivacyError: if it is the same object, or has the same contents by its fingerprint; or if
            nothing is measured.
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


def refuse_training_data(
    dataset: Any, training_data: Iterable[Any], args: DPGrapeArguments
) -> None:
    """Refuses to evaluate on the training data, whose metrics would be logged as they are.

    Args:
        dataset: an evaluation data set, or several by name.
        training_data: the training data set, as it was passed and as it is.
        args: the arguments of the run.

    Raises:
        PrivacyError: if they share an object that is neither declared public nor given up.
    """
    datasets = dataset.values() if isinstance(dataset, dict) else [dataset]
    ours = {id(data) for data in training_data if data is not None}
    if any(id(data) in ours for data in datasets) and not (
        args.eval_data_is_public or args.log_unnoised_statistics
    ):
        raise PrivacyError(
            "eval_dataset is the train_dataset: its metrics, which are logged, are un-noised "
            "functions of the training data. Hold out other examples. If all of the data is "
            "public, set eval_data_is_public=True."
        )
