"""The data of a private run: its loader, public data, and evaluation data."""

import logging
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

_MANY = 4  # physical batches per step, above which splitting by length costs less than padding


def loader_of(
    draws: PoissonBatchSampler,
    dataset: Any,
    collator: Callable[[list[Any]], Any],
    args: Any,
    longest: int | None,
    *,
    secret: bool,
) -> DataLoader[Any]:
    """Return a loader of logical batches.

    Args:
        draws: samples examples, or units with a ``privacy_unit_column``.
        dataset: the examples.
        collator: makes a physical batch.
        args: the arguments of the run.
        longest: the number of positions that the model has; None without a limit.
        secret: whether random numbers of data set and collator are secret; tests repeat a run.
    """
    size = args.per_device_train_batch_size
    # Computed from declared numbers only.
    batches = args.logical_batch_size / draws.world_size / size
    # Each length takes a compilation, so compiled runs have fewer.
    grid = Grid(longest, parts=2 if batches >= _MANY and not args.torch_compile else 1)
    seeds = secret_seeds if secret else repeatable_seeds
    column = args.privacy_unit_column
    of_units = column is not None
    return DataLoader(
        EmptyDrawDataset(dataset, seeds, column),
        batch_sampler=draws,
        collate_fn=LogicalBatchCollator(collator, size, grid, seeds, of_units),
        num_workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory and torch.accelerator.is_available(),
        persistent_workers=args.dataloader_persistent_workers,
        prefetch_factor=args.dataloader_prefetch_factor,
        worker_init_fn=partial(
            seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index
        ),
    )


def units_of(dataset: Any, args: DPGrapeArguments) -> Units:
    """Return the examples of each privacy unit, by the column ``privacy_unit_column``.

    Raises:
        PrivacyError: a unit has more examples than a physical batch holds.
    """
    assert args.privacy_unit_column is not None
    units = read_units(dataset, args.privacy_unit_column)
    most = min(units.largest, args.max_examples_per_unit or units.largest)
    refuse_large_unit(most, args.per_device_train_batch_size)
    return units


def positions_of(model: nn.Module) -> int | None:
    """Return how many positions an input of a model may have; None if no limit is known.

    Padding must not exceed the limit. In a table of positions that starts after its padding index
    (RoBERTa's), the first rows are not used. The virtual tokens of an adapter use positions, too.
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


_PUBLIC_EXAMPLES = 512


def public_batches(
    dataset: Any, collator: Callable[[list[Any]], Any], size: int, unused: Collection[str]
) -> Batches:
    """Return a function that makes batches of ``size`` rows from the first 512 public examples.

    The batches do not contain the ``unused`` names, which are labels.
    """
    examples = range(min(len(dataset), _PUBLIC_EXAMPLES))

    def batches() -> Iterator[Inputs]:
        for start in range(0, len(examples), size):
            inputs = collator([dataset[i] for i in examples[start : start + size]])
            yield {name: value for name, value in inputs.items() if name not in unused}

    return batches


def description(dataset: Any) -> str:
    """Return the description of a data set for the ledger: its name, if any, and its size."""
    name = getattr(getattr(dataset, "info", None), "dataset_name", None)
    return f"{name or type(dataset).__name__}, {len(dataset)} examples"


def refuse_public_dataset(dataset: Any, training_data: Any, args: DPGrapeArguments) -> None:
    """Refuse a public data set that has training rows, or that the projection does not use.

    The rows that are used are compared with all training rows, by hashes of the contents of
    columns that both have, without labels.

    Raises:
        PrivacyError: a row is a training example, or has the contents of one; or the projection
            measures nothing.
    """
    if dataset is None:
        return
    if args.projection != PRINCIPAL:
        raise PrivacyError(
            f"public_dataset was passed, and projection={args.projection!r} does not use it. "
            f"Leave it out, or choose projection={PRINCIPAL!r}."
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
            "would shape the projection without noise. Remove private rows from public_dataset, "
            "pass other data, or leave it out: synthetic inputs serve as well."
        )


_COINCIDENCE = 0.02  # share of rows that may equal training rows by chance


class HeldOut:
    """Check that evaluation data have no training rows; compares each pair of data sets once."""

    def __init__(self) -> None:
        self._training: dict[int, TrainingRows] = {}  # id of the data, which stay alive -> rows

    def require(
        self, dataset: Any, training_data: Iterable[Any], args: DPGrapeArguments, what: str
    ) -> None:
        """Refuse evaluation data with training rows: metrics are logged without noise.

        Real data contain some texts more than once. So a few evaluation rows with the contents of
        training rows only lead to a warning, if they are elements of other objects. Nothing is
        compared if ``eval_data_is_public`` is set, if the run has no noise, or if the data have
        no length or no index.

        Args:
            dataset: evaluation data, or several data sets by name.
            training_data: the data as passed, and as prepared by the host.
            args: the arguments of the run.
            what: the name of the evaluation data in messages.

        Raises:
            PrivacyError: there are shared rows; it says how many, and which is the first.
        """
        if args.eval_data_is_public or not args.private:
            return
        datasets = dataset if isinstance(dataset, dict) else {None: dataset}
        for name, held in datasets.items():
            if isinstance(held, IterableDataset) or not hasattr(held, "__len__"):
                continue
            called = what if name is None else f"{what}[{name!r}]"
            for data in training_data:
                if data is None:
                    continue
                if id(data) not in self._training:
                    self._training[id(data)] = TrainingRows(data, args)
                rows = self._training[id(data)]
                if not any(held is known for known in rows.disjoint):
                    _refuse_shared(rows, held, called)
                    rows.disjoint.append(held)


def _refuse_shared(rows: TrainingRows, held: Any, what: str) -> None:
    """Refuse evaluation data with training rows, or warn if they may be equal by chance."""
    shared = rows.shared_with(held, what)
    if not len(shared):
        return
    finding = (
        f"{what} has training rows: {len(shared)} of its {len(held)} rows are in train_dataset, "
        f"too; the first is {what}[{shared[0]}]. Metrics of these rows are not covered by "
        "epsilon: they are logged without noise. "
    )
    if len(shared) > _COINCIDENCE * len(held) or len(rows.elements_of(held)):
        raise PrivacyError(
            f"{finding}Remove these rows from one of the two data sets, or set "
            "eval_data_is_public=True, which declares that the evaluation data need no protection."
        )
    logger.warning(
        "%sIf they are different records with the same contents, nothing is wrong. Otherwise "
        "remove them from one of the two data sets.",
        finding,
    )
