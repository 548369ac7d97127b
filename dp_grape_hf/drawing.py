"""Where a private run draws its batches: the data loading of a trainer, and nothing else of it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader
from transformers.trainer_utils import seed_worker

from dp_grape_hf.accounting import expected_steps_per_epoch
from dp_grape_hf.errors import require
from dp_grape_hf.plan import check_dataset
from dp_grape_hf.randomness import shared_sampling_generator
from dp_grape_hf.sampling import (
    EmptyDrawDataset,
    LengthOf,
    LogicalBatchCollator,
    PoissonBatchSampler,
)
from dp_grape_hf.units import (
    UnitBatchSampler,
    UnitCollator,
    UnitDataset,
    Units,
    read_units,
    refuse_large_unit,
)

if TYPE_CHECKING:
    from transformers import Trainer

    _Host = Trainer
else:
    _Host = object


class DrawingMixin(_Host):
    """Draws batches by Poisson sampling where the host would shuffle."""

    args: Any
    plan: Any
    _test_generators: Any
    _units_read: tuple[Any, Units] | None = None  # the data set they were read from, and they

    # ---- Data Loading ----

    @property
    def _units(self) -> Units | None:
        """Which examples are one privacy unit; None where each is one. Reads a data set once."""
        args = self.args
        dataset: Any = self.train_dataset
        if args.privacy_unit_column is None:
            return None
        if self._units_read is None or self._units_read[0] is not dataset:
            check_dataset(dataset)
            units = read_units(dataset, args.privacy_unit_column)
            most = args.max_examples_per_unit or units.largest
            refuse_large_unit(min(units.largest, most), args.per_device_train_batch_size)
            self._units_read = dataset, units
        units = self._units_read[1]
        require(
            len(dataset) == units.num_examples,
            "The length of train_dataset has changed since "
            f"privacy_unit_column={args.privacy_unit_column!r} was read. Make a new trainer.",
        )
        return units

    def _read_units_again(self) -> Units | None:
        """Reads the units anew, and refuses data that was changed since the trainer was made."""
        before, self._units_read = self._units, None
        after = self._units
        require(
            before is None or after is None or before.checksum == after.checksum,
            f"Whose the examples are by privacy_unit_column={self.args.privacy_unit_column!r} has "
            "changed since the trainer was made. Make a new trainer.",
        )
        return after

    @property
    def _dataset_size(self) -> int:
        """Number of privacy units in the training data."""
        counted: Any = self.train_dataset if self._units is None else self._units
        return len(counted)

    @property
    def _length_of(self) -> LengthOf | None:
        """How to tell the length of an example, if physical batches are to have like lengths."""
        if self.args.train_sampling_strategy != "group_by_length":
            return None
        return LengthOf(getattr(self.model, "main_input_name", "input_ids"))

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Returns N for the training data, as declared; throughput would tell its true size."""
        draws = getattr(dataloader, "batch_sampler", None)
        if isinstance(draws, PoissonBatchSampler | UnitBatchSampler):
            return int(self.plan.mechanism.num_samples)
        return super().num_examples(dataloader)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Returns a loader of Poisson draws.

        It does not go through ``accelerator.prepare``, which would re-shard the sampler and repeat
        examples to make batches even.
        """
        if self.train_dataset is None:
            raise ValueError("Trainer: training requires a train_dataset.")
        dataset: Any = self.train_dataset
        collator, args = self.data_collator, self.args
        if hasattr(dataset, "column_names") and hasattr(dataset, "set_format"):  # datasets.Dataset
            dataset = self._remove_unused_columns(dataset, description="training")
        else:
            collator = self._get_collator_with_removed_columns(collator, description="training")
        self.plan.require_size(self._dataset_size)
        generators = self._test_generators
        draws = PoissonBatchSampler(
            self._dataset_size,
            self.plan.mechanism.sample_rate,
            steps=expected_steps_per_epoch(self.plan.mechanism.sample_rate),
            generator=generators.sampling
            if generators
            else shared_sampling_generator(device=args.device),
            rank=args.process_index,
            world_size=args.world_size,
            max_batch_size=self.plan.mechanism.max_batch_size,
        )
        parts: dict[str, Any]
        if (units := self._units) is None:
            parts = {
                "dataset": EmptyDrawDataset(dataset),
                "batch_sampler": draws,
                "collate_fn": LogicalBatchCollator(
                    collator, args.per_device_train_batch_size, self._length_of
                ),
            }
        else:
            parts = {
                "dataset": UnitDataset(dataset, args.privacy_unit_column),
                "batch_sampler": UnitBatchSampler(draws, units, args.max_examples_per_unit),
                "collate_fn": UnitCollator(collator, args.per_device_train_batch_size),
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
