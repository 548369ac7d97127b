"""The data of a private run: its loader, public data, and rows that must not be evaluated on."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
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
from dp_grape_hf.projections import PRINCIPAL, Batches, Inputs
from dp_grape_hf.publishing import adapters_of
from dp_grape_hf.trainer.overlap import TrainingRows

logger = logging.getLogger(__name__)

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
    if training_data is None:
        return
    shared = TrainingRows(training_data, args).shared_with(
        dataset, "public_dataset", most=_PUBLIC_EXAMPLES
    )
    if len(shared):
        raise PrivacyError(
            f"public_dataset[{shared[0]}] has the contents of an example of train_dataset, which "
            "would shape the projection without noise. Take out of public_dataset what is not "
            "public, give other data, or leave it out: synthetic inputs serve as well."
        )


_REMEMBERED = 64  # pairs of data sets that were compared
_COINCIDENCE = 0.02  # of the rows, which may have the contents of training rows by chance


class HeldOut:
    """Refuses evaluation data with training rows; compares each pair of data sets once."""

    def __init__(self) -> None:
        self._training: list[TrainingRows] = []
        self._apart: deque[tuple[Any, Any]] = deque(maxlen=_REMEMBERED)

    def require(
        self, dataset: Any, training_data: Iterable[Any], args: DPGrapeArguments, what: str
    ) -> None:
        """Refuse metrics of training rows, which are computed and logged without noise.

        Texts occur more than once in real data. A few evaluation rows that have the contents of
        training rows, and are other elements of other objects, get a warning only.

        Unless ``eval_data_is_public`` declares that epsilon does not cover them, or the run has no
        noise. Data without a length or without an index are not compared.

        Args:
            dataset: evaluation data, or several data sets by name.
            training_data: as it was passed, and as the host has prepared it.
            args: of the run.
            what: the evaluation data, in the message.

        Raises:
            PrivacyError: with the number of the shared rows, and the first of them.
        """
        if args.eval_data_is_public or not args.private:
            return
        datasets = dataset if isinstance(dataset, dict) else {None: dataset}
        for name, held in datasets.items():
            called = what if name is None else f"{what}[{name!r}]"
            for data in training_data:
                self._require_apart(held, data, args, called)

    def _require_apart(self, held: Any, data: Any, args: DPGrapeArguments, what: str) -> None:
        if data is None or any(held is h and data is d for h, d in self._apart):
            return
        if isinstance(held, IterableDataset) or not hasattr(held, "__len__"):
            return
        known = next((rows for rows in self._training if rows.data is data), None)
        if known is None:
            known = TrainingRows(data, args)
            self._training.append(known)
        if len(shared := known.shared_with(held, what)):
            found = (
                f"{what} has training rows: {len(shared)} of its {len(held)} rows are in "
                f"train_dataset, too, the first of which is {what}[{shared[0]}]. Metrics of these "
                "rows are not covered by epsilon, as they are computed and logged without noise. "
            )
            if len(shared) > _COINCIDENCE * len(held) or len(known.elements_of(held)):
                raise PrivacyError(
                    f"{found}Take these rows out of one of the two data sets: a row whose contents "
                    "are in both counts as a training row. Or set eval_data_is_public=True, which "
                    "declares that metrics of the evaluation data need no protection."
                )
            logger.warning(
                "%sIf they are other records that happen to have the same contents, nothing is "
                "wrong. Otherwise take them out of one of the two data sets.",
                found,
            )
        self._apart.append((held, data))
