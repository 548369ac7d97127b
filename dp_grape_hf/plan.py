"""The privacy plan of a run: N, q, the number of steps and sigma, fixed before data is touched."""

from __future__ import annotations

import json
import logging
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset
from transformers.trainer_utils import has_length

from dp_grape_hf.accounting import (
    EpsilonCurve,
    Release,
    Variant,
    expected_steps_per_epoch,
    find_noise_multiplier,
    smallest_batch_cap,
)
from dp_grape_hf.arguments import DPGrapeArguments
from dp_grape_hf.continuing import Earlier
from dp_grape_hf.entries import require_same_neighbours
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.ledger import LEDGER_NAME, Ledger
from dp_grape_hf.mechanism import (
    EXAMPLE,
    SECURE,
    Mechanism,
    Sampling,
    refuse_estimates_by_layer,
)
from dp_grape_hf.processes import require_agreement

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PrivacySpent:
    """What a run has spent so far: ``epsilon``, an upper bound, protects a ``privacy_unit``."""

    epsilon: float
    delta: float | None
    steps: int
    noise_multiplier: float
    sample_rate: float
    expected_batch_size: float
    max_grad_norm: float
    adjacency: str
    privacy_unit: str
    private: bool


class PrivacyPlan:
    """What the arguments mean for a dataset of a given size.

    Args:
        args: the arguments of the run.
        dataset_size: the length of the training dataset, used as N unless ``args.num_samples``
            declares another; with an ``args.privacy_unit_column`` the number of its values.
        earlier: the runs that the model comes from, if any (``find_earlier``). What they spent on
            the same data is within the target, and in every epsilon.

    Attributes:
        num_samples: N.
        sample_rate: q = expected batch size / N.
        max_batch_size: the cap of the logical batch, if there is one.
        steps: how many releases the run makes, and sigma was calibrated for.
        noise_multiplier: sigma.

    Raises:
        PrivacyError: if no such run can keep the promise.
    """

    def __init__(
        self, args: DPGrapeArguments, dataset_size: int, earlier: Earlier | None = None
    ) -> None:
        self._args = args
        self._earlier = earlier
        self._spent_before = [] if earlier is None else earlier.releases
        self._units = "examples" if args.privacy_unit_column is None else "units"
        refuse_estimates_by_layer(args.norm_directions, args.clipping)
        self.num_samples = args.num_samples or dataset_size
        batch = args.logical_batch_size
        if batch > self.num_samples:
            raise PrivacyError(
                f"The expected batch size {batch} is larger than the {self.num_samples} training "
                f"{self._units}. Lower expected_batch_size, or per_device_train_batch_size and "
                "gradient_accumulation_steps, whose product with the number of processes it is."
            )
        delta = args.target_delta
        if args.private and delta is not None and delta >= 1 / self.num_samples:
            raise PrivacyError(
                f"target_delta={delta} is not below 1/{self.num_samples}: releasing one random "
                f"{self._units.removesuffix('s')} outright would satisfy it. Choose a smaller one, "
                "for example 1e-5."
            )
        self.sample_rate = batch / self.num_samples
        epoch = expected_steps_per_epoch(self.sample_rate)
        epochs = math.ceil(args.num_train_epochs * epoch)
        self.steps = args.max_steps if args.max_steps > 0 else epochs
        self.max_batch_size = self._max_batch_size()
        self.require_size(dataset_size)
        self.noise_multiplier = self._noise_multiplier()
        self._curve: EpsilonCurve | None = None
        if args.private and delta is not None:
            if earlier is not None and (earlier.same_data or earlier.resumed):
                require_same_neighbours(self._mechanism(args.accountant), earlier.runs)
            self._curve = self._curve_after(self._spent_before)

    def _noise_multiplier(self) -> float:
        args = self._args
        if args.noise_multiplier is not None:
            return float(args.noise_multiplier)
        assert args.target_epsilon is not None
        assert args.target_delta is not None
        reasons = [] if self._earlier is None else self._earlier.not_private_reasons
        if reasons:
            raise PrivacyError(
                f"target_epsilon={args.target_epsilon!r} cannot be met with earlier_data='same': "
                f"the earlier run has no guarantee ({'; '.join(reasons)}), so whatever comes from "
                "it has none. Give noise_multiplier instead, or begin with a model from before "
                "that run."
            )
        return find_noise_multiplier(
            target_epsilon=args.target_epsilon,
            target_delta=args.target_delta,
            sample_rate=self.sample_rate,
            steps=self.steps,
            accountant=args.accountant,
            earlier=self._spent_before,
            **self._variant(),
        )

    def _curve_after(self, releases: Sequence[Release]) -> EpsilonCurve:
        """Returns epsilon by this run's steps, in addition to earlier releases."""
        assert self._args.target_delta is not None
        return EpsilonCurve(
            self.noise_multiplier,
            self.sample_rate,
            self._args.target_delta,
            self.steps,
            self._args.accountant,
            earlier=releases,
            **self._variant(),
        )

    def _variant(self) -> Variant:
        """Returns in what the releases differ from the plain ones."""
        return Variant(
            max_batch_size=self.max_batch_size,
            num_samples=self.num_samples,
            norm_directions=self._args.norm_directions,
            adjacency=self._args.adjacency,
            num_trials=self._args.num_trials,
            trials_distribution=self._trials_distribution,
        )

    @property
    def _trials_distribution(self) -> str | None:
        return None if self._args.num_trials is None else self._args.trials_distribution

    def require_size(self, dataset_size: int) -> None:
        """Refuses more examples than a cap was accounted for; call it before every use of them."""
        if self.max_batch_size is not None and dataset_size > self.num_samples:
            raise PrivacyError(
                f"num_samples={self.num_samples} is below the number of training {self._units}: "
                "how often a capped batch is full depends on it. Declare at least that, in a new "
                "trainer."
            )

    def _max_batch_size(self) -> int | None:
        """Returns the cap of the logical batch; unless one is given, one that costs no noise."""
        args = self._args
        if args.sampling != Sampling.TRUNCATED_POISSON:
            return None
        if args.max_batch_size is not None:
            return args.max_batch_size
        return smallest_batch_cap(
            sample_rate=self.sample_rate,
            num_samples=self.num_samples,
            steps=self.steps,
            delta=args.target_delta or 1 / (10 * self.num_samples),
        )

    def mechanism(self) -> Mechanism:
        """Returns the public parameters that the ledger records."""
        return self._mechanism(self._accountant_in_use())

    def _mechanism(self, accountant: str) -> Mechanism:
        args = self._args
        assert args.projection is not None  # the arguments have filled it in
        projects = args.projection != "identity"
        return Mechanism(
            noise_multiplier=self.noise_multiplier,
            sample_rate=self.sample_rate,
            max_grad_norm=args.max_grad_norm,
            expected_batch_size=args.logical_batch_size,
            num_samples=self.num_samples,
            target_epsilon=args.target_epsilon,
            target_delta=args.target_delta,
            accountant=accountant,
            engine=args.engine,
            projection=args.projection,
            projection_rank=args.projection_rank if projects else None,
            projection_update_steps=args.projection_update_steps if projects else None,
            projection_seed=args.projection_seed if projects else None,
            clipping=args.clipping,
            method=args.method,
            projection_side=args.projection_side,
            projection_ranks=_as_text(args.projection_ranks),
            sampling=args.sampling,
            max_batch_size=self.max_batch_size,
            adjacency=args.adjacency,
            privacy_unit=args.privacy_unit_column or Mechanism.privacy_unit,
            max_examples_per_unit=args.max_examples_per_unit,
            norm_directions=args.norm_directions,
            num_trials=args.num_trials,
            trials_distribution=self._trials_distribution,
            steps_of_trial=None if args.num_trials is None else self.steps,
            noise=SECURE if args.secure_noise else None,
        )

    def _accountant_in_use(self) -> str:
        """Returns the accountant asked for, or the one that has to answer in its place."""
        if self._curve is None:
            return self._args.accountant
        self._curve.epsilon(self.steps)  # only then it is known whether the first can answer
        return self._curve.accountant

    def require_agreement(
        self, dataset_size: int, updates: int, trainable: Mapping[str, Tensor]
    ) -> None:
        """Refuses processes whose draws and sums would not fit together; a collective call.

        Args:
            dataset_size: the length of this process's training dataset.
            updates: how many updates the weights contain.
            trainable: parameter name -> parameter.
        """
        self.require_size(dataset_size)
        facts: dict[str, object] = asdict(self.mechanism())
        # They follow from the others, and may depend on the kind of processor in the last digit.
        del facts["noise_multiplier"], facts["accountant"]
        names = repr([(name, tuple(weight.shape)) for name, weight in trainable.items()])
        facts |= {
            "the number of steps": self.steps,
            "the number of updates to go on from": updates,
            "the checksum of the trainable parameters": zlib.crc32(names.encode()),
            "dataloader_num_workers": self._args.dataloader_num_workers,
            "dataloader_prefetch_factor": self._args.dataloader_prefetch_factor,
        }
        require_agreement(facts, unsaid={"the length of train_dataset": dataset_size})

    def start_ledger(
        self, checkpoint: str | None, *, updates: int, before: Ledger | None
    ) -> Ledger:
        """Starts the ledger of a run, or resumes the one of a checkpoint.

        With several processes the first calls it for all of them (``Ledger.shared``).

        Args:
            checkpoint: the folder to resume from, if any.
            updates: how many updates its weights contain.
            before: the ledger of an earlier run of the same weights, if any.

        Raises:
            PrivacyError: if nothing is left to spend, or a resumed ledger does not fit.
        """
        live = Path(str(self._args.output_dir)) / LEDGER_NAME
        if checkpoint is not None:
            copy = Path(checkpoint) / LEDGER_NAME
            recorded = Ledger.load(copy)
            self._require_same_runs_before(copy, recorded)
            self._keep_noise(recorded.mechanism.noise_multiplier)
            ledger = Ledger.resume(live, copy, self.mechanism(), updates=updates)
        elif before is not None and before.steps:
            raise PrivacyError(
                f"This trainer has made {before.steps} releases on this model already, and the "
                "noise was calibrated for one run. Resume with resume_from_checkpoint, or make "
                "a new trainer: its budget then adds to the one spent."
            )
        else:
            if live.exists():
                logger.warning(
                    "%s is of an earlier run; it is kept under another name. If that run used the "
                    "same data, the budgets of both add up.",
                    live,
                )
            earlier = self._earlier
            if earlier is not None and earlier.resumed:
                raise PrivacyError(
                    f"This model comes from the run that {earlier.where} records, and the output "
                    "folder is that run's own. Go on with train(resume_from_checkpoint=...), or "
                    "give a run that continues it an output_dir of its own."
                )
            ledger = Ledger.start(
                self.mechanism(),
                path=live,
                continues=None if earlier is None else earlier.ledger,
                same_data=earlier is None or earlier.same_data,
            )
        if self.releases_left(ledger) <= 0 < self.steps - updates:
            raise PrivacyError(
                f"The budget is spent: {ledger.steps} releases of {self.steps} were made, "
                f"{updates} of which are in {checkpoint}; those made after it count as well. The "
                "checkpoint itself is private as it is; so are later ones of the same run."
            )
        return ledger

    def use_noise_of(self, ledger: Ledger) -> None:
        """Takes over the noise that the first process found or resumed: it alone adds any."""
        self._use_noise(ledger.mechanism.noise_multiplier)

    def _use_noise(self, noise_multiplier: float) -> None:
        if noise_multiplier != self.noise_multiplier:
            self.noise_multiplier = noise_multiplier
            self._curve = self._curve and self._curve_after(self._spent_before)

    def _keep_noise(self, recorded: float) -> None:
        """Goes on with the noise of a run that is resumed, where that keeps the budget.

        The accountants that found it may not be those that are here, and may say otherwise.
        """
        target, found = self._args.target_epsilon, self.noise_multiplier
        if target is not None:
            self._use_noise(recorded)
            if self._curve is None or self._curve.epsilon(self.steps) > target:
                self._use_noise(found)

    def _require_same_runs_before(self, copy: Path, recorded: Ledger) -> None:
        if recorded.earlier != self._spent_before:
            ours, theirs = (
                sum(r[2] for r in each) for each in (self._spent_before, recorded.earlier)
            )
            raise PrivacyError(
                f"{copy} records that its run began with {theirs} earlier releases on the same "
                f"data, and this trainer counts {ours} (earlier_data={self._args.earlier_data!r}). "
                "Resume with the model, earlier_data and earlier_ledger that the run began with."
            )

    def spent(self, ledger: Ledger | None) -> PrivacySpent:
        """Returns epsilon for all that a ledger counts, earlier runs included.

        A trial of several counts whole from its start, as in ``Ledger.epsilon``.
        """
        steps = ledger.steps if ledger else 0
        if ledger is None:
            private = self._earlier is None or not self._earlier.not_private_reasons
        else:
            private = ledger.private
        epsilon = math.inf
        if private and self._curve is not None:
            whole = self.steps if ledger and self._args.num_trials is not None else 0
            epsilon = self._curve.epsilon(max(steps, whole))
        return PrivacySpent(
            epsilon=epsilon,
            delta=self._args.target_delta,
            steps=steps,
            noise_multiplier=self.noise_multiplier,
            sample_rate=self.sample_rate,
            expected_batch_size=self._args.logical_batch_size,
            max_grad_norm=self._args.max_grad_norm,
            adjacency=self._args.adjacency,
            privacy_unit=self._args.privacy_unit_column or EXAMPLE,
            private=private and self._curve is not None,
        )

    def releases_left(self, ledger: Ledger | None) -> float:
        """Returns how many more releases the budget allows; infinite without a target epsilon."""
        if self._args.target_epsilon is None or ledger is None:
            return math.inf
        return self.steps - ledger.steps


def _as_text(ranks: Any) -> str | None:
    return None if ranks is None else json.dumps(ranks)


def check_dataset(dataset: Any) -> None:
    """Refuses a training dataset that Poisson sampling cannot draw from by index."""
    if dataset is None:
        return
    by_index = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    if not (by_index and has_length(dataset)):
        raise PrivacyError(
            f"train_dataset is a {type(dataset).__name__} without random access: Poisson sampling "
            "draws each example by its index. Load it as a map-style dataset "
            "(streaming=False, or list(...))."
        )
    if len(dataset) == 0:
        raise PrivacyError("train_dataset is empty; there is nothing to train on.")
