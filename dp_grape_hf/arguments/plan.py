"""The privacy plan of a run: N, q, the number of steps and sigma, fixed before data is touched."""

from __future__ import annotations

import json
import logging
import math
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import IterableDataset
from transformers import get_scheduler
from transformers.trainer_utils import has_length

from dp_grape_hf.accounting import (
    EpsilonCurve,
    batch_and_steps,
    expected_steps_per_epoch,
    find_bands,
    find_noise_multiplier,
    refuse_large_delta,
    rounded_up,
)
from dp_grape_hf.arguments.arguments import INDEPENDENT, DPGrapeArguments
from dp_grape_hf.arguments.methods import METHODS
from dp_grape_hf.distributed import require_agreement
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.ledger import (
    BANDED,
    EXAMPLE,
    LEDGER_NAME,
    SECURE,
    Earlier,
    Ledger,
    Mechanism,
    refuse_used_folder,
    require_same_neighbours,
)
from dp_grape_hf.optimizers import UPDATE_RULES
from dp_grape_hf.projections import PRINCIPAL

logger = logging.getLogger(__name__)

# What the record of a mechanism takes from arguments of the same name.
_RECORDED = {f.name for f in fields(Mechanism)} & {f.name for f in fields(DPGrapeArguments)}


@dataclass(frozen=True)
class PrivacySpent:
    """What a run has spent so far: ``epsilon``, an upper bound, at ``delta``.

    It is that of ``steps`` releases of the ``mechanism``, and of earlier runs on the same data, and
    protects one ``mechanism.privacy_unit``.
    """

    epsilon: float
    delta: float | None
    steps: int
    mechanism: Mechanism

    @property
    def private(self) -> bool:
        """Whether there is a finite epsilon."""
        return math.isfinite(self.epsilon)


class PrivacyPlan:
    """What the arguments mean for a dataset of a given size.

    Args:
        args: the arguments of the run.
        dataset_size: the length of the training dataset, used as N unless ``args.num_samples``
            declares another; with an ``args.privacy_unit_column`` the number of its values.
        earlier: the runs that the model comes from, if any (``find_earlier``). What they spent on
            the same data is within the target, and in every epsilon.
        public_dataset: what the projection is measured on, described, if not on synthetic inputs.
        most_bands: the most steps that noise may be correlated over where ``args.noise`` does not
            say that it is to be.
        clipped_apart: the module, if any, whose parameters are clipped apart from all others.

    Attributes:
        args: the arguments, with a batch size where it was to be chosen.
        steps: how many releases the run makes, and sigma was calibrated for.

    Raises:
        PrivacyError: if no such run can keep the promise.
    """

    def __init__(
        self,
        args: DPGrapeArguments,
        dataset_size: int,
        earlier: Earlier | None = None,
        public_dataset: str | None = None,
        most_bands: int | None = None,
        clipped_apart: str | None = None,
    ) -> None:
        self._public_dataset, self._most_bands = public_dataset, most_bands
        self._clipped_apart = clipped_apart
        self._earlier = earlier
        self._spent_before = [] if earlier is None else earlier.releases
        unit = "example" if args.privacy_unit_column is None else "unit"
        num_samples = args.num_samples or dataset_size
        given = args.max_steps if args.max_steps > 0 else None
        if args.expected_batch_size is None:
            passes = args.num_train_epochs
            size = batch_and_steps(num_samples, passes, steps=given)[0]
            args = args.with_choices({"expected_batch_size": size})
        self.args = args
        batch = args.logical_batch_size
        if batch > num_samples:
            raise PrivacyError(
                f"The expected batch size {batch} is larger than the {num_samples} training "
                f"{unit}s. Lower expected_batch_size, or per_device_train_batch_size and "
                "gradient_accumulation_steps, whose product with the number of processes it is."
            )
        delta = args.target_delta
        if args.private and delta is not None:
            refuse_large_delta(delta, num_samples, unit)
        epoch = expected_steps_per_epoch(batch / num_samples)
        self.steps = given or math.ceil(args.num_train_epochs * epoch)
        self._mechanism = self._asked(num_samples)
        if args.noise_multiplier is None:
            self._mechanism = self._calibrated()
        self._curve: EpsilonCurve | None = None
        if args.private and delta is not None:
            if earlier is not None and (earlier.same_data or earlier.resumed):
                require_same_neighbours(self._mechanism, earlier.runs)
            self._curve = self._curve_of_run()
            if self._spent_before and args.target_epsilon is not None:
                self._say_what_is_left()

    def _say_what_is_left(self) -> None:
        assert self._curve is not None
        spent, own = self._curve.epsilon(0), self._mechanism
        logger.warning(
            "earlier_data='same': target_epsilon=%g is for all runs on the data, and earlier ones "
            "spent %.4g of it. That leaves %.4g for the %d steps of this run, whose noise "
            "multiplier is %.4g (that of the last run: %.4g).",
            self.args.target_epsilon,
            rounded_up(spent),
            max(0.0, (self.args.target_epsilon or 0.0) - spent),
            self.steps,
            own.noise_multiplier,
            self._spent_before[-1].noise_multiplier,
        )

    def _calibrated(self) -> Mechanism:
        """Returns the mechanism with the noise that the budget asks for."""
        args = self.args
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
        asked = asdict(self._mechanism.releases(self.steps))
        del asked["noise_multiplier"], asked["bands"]
        budget: dict[str, Any] = {
            "target_epsilon": args.target_epsilon,
            "target_delta": args.target_delta,
            "accountant": args.accountant,
            "earlier": self._spent_before,
            **asked,
        }
        most = self._most_bands if args.noise is None else None
        if args.noise == INDEPENDENT or most == 1:
            return self._with_noise(find_noise_multiplier(**budget))
        found = find_bands(most=most, **self._workload(), **budget)
        several = len(found.coefficients) > 1
        return self._with_noise(
            found.noise_multiplier, json.dumps(found.coefficients) if several else None
        )

    def _workload(self) -> dict[str, Any]:
        """Returns what the weights make of releases, as ``what_arrives`` takes it."""
        args = self.args
        assert args.update_rule is not None
        averages = 1 in UPDATE_RULES[args.update_rule].moments.values()
        every = None
        if METHODS[args.method].projected:
            every = self._mechanism.projection_update_steps
        if every is not None and every < self.steps:
            logger.warning(
                "noise='banded' with a projection that is made anew every %d steps: later noise "
                "takes back earlier noise only between two of these. With projection='principal' "
                "it does so over the whole run.",
                every,
            )
        inertia = args.adam_beta1 if averages else 0.0
        return {"schedule": schedule_of(args, self.steps), "inertia": inertia, "period": every}

    def _with_noise(self, noise_multiplier: float, coefficients: str | None = None) -> Mechanism:
        plain = SECURE if self.args.secure_noise else None
        return replace(
            self._mechanism,
            noise_multiplier=noise_multiplier,
            noise=plain if coefficients is None else BANDED,
            coefficients=coefficients,
        )

    def _curve_of_run(self) -> EpsilonCurve:
        """Returns epsilon by this run's steps, in addition to earlier releases."""
        delta = self.args.target_delta
        assert delta is not None
        own = self._mechanism.releases(self.steps)
        return EpsilonCurve(own, delta, self.args.accountant, self._spent_before)

    def _asked(self, num_samples: int) -> Mechanism:
        """Returns what the arguments ask for; without noise, where that is still to be found."""
        args = self.args
        given = {name: getattr(args, name) for name in _RECORDED}
        if args.projection == "identity":
            given |= dict.fromkeys(
                ("projection_rank", "projection_update_steps", "projection_seed")
            )
        factors: Any = args.gradient_factors
        given |= {
            "noise_multiplier": args.noise_multiplier or 0.0,
            "sample_rate": args.logical_batch_size / num_samples,
            "expected_batch_size": args.logical_batch_size,
            "num_samples": num_samples,
            "projection_side": "input" if args.projection == PRINCIPAL else "smaller",
            "privacy_unit": args.privacy_unit_column or EXAMPLE,
            "noise": SECURE if args.secure_noise else None,  # bands are found with the noise
            "public_dataset": self._public_dataset,
            "clipped_apart": self._clipped_apart,
            "gradient_factors": None
            if factors is None
            else json.dumps({pattern: float(factor) for pattern, factor in factors.items()}),
        }
        return Mechanism(**given)

    @property
    def mechanism(self) -> Mechanism:
        """The public parameters of the run, as the ledger records them.

        The accountant is the one that answers: the one asked for, or the one in its place.
        """
        if self._curve is None:
            return self._mechanism
        self._curve.epsilon(self.steps)  # only then it is known whether the first can answer
        return replace(self._mechanism, accountant=self._curve.accountant)

    def require_agreement(
        self, dataset_size: int, updates: int, trainable: Mapping[str, Tensor]
    ) -> None:
        """Refuses processes whose draws and sums would not fit together; a collective call.

        ``updates`` is how many the weights contain.
        """
        facts: dict[str, object] = asdict(self.mechanism)
        # They follow from the others, and may depend on the kind of processor in the last digit.
        for name in ("noise_multiplier", "coefficients", "noise", "accountant"):
            del facts[name]
        names = repr([(name, tuple(weight.shape)) for name, weight in trainable.items()])
        facts |= {
            "the number of steps": self.steps,
            "the number of updates to go on from": updates,
            "the checksum of the trainable parameters": zlib.crc32(names.encode()),
            "dataloader_num_workers": self.args.dataloader_num_workers,
            "dataloader_prefetch_factor": self.args.dataloader_prefetch_factor,
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
            PrivacyError: if nothing is left to spend, a resumed ledger does not fit, or the folder
                is that of another run (``refuse_used_folder``).
        """
        live = Path(str(self.args.output_dir)) / LEDGER_NAME
        if checkpoint is not None:
            copy = Path(checkpoint) / LEDGER_NAME
            recorded = Ledger.load(copy)
            self._require_same_runs_before(copy, recorded)
            self._keep_noise(recorded.mechanism)
            self.note_choice(recorded.mechanism.chosen)  # those rates are in the checkpoint
            ledger = Ledger.resume(live, copy, self.mechanism, updates=updates)
        else:
            self.refuse_start(before)
            earlier = self._earlier
            ledger = Ledger.start(
                self.mechanism,
                path=live,
                continues=None if earlier is None else earlier.ledger,
                same_data=earlier is None or earlier.same_data,
            )
            self._advise_on_saving()
        left, bands = self.releases_left(ledger), len(ledger.mechanism.bands)
        if bands > 1 and 0 < left < self.steps - updates:
            logger.warning(
                "noise='banded': %g of the %d steps that are missing can be made. A resumed run "
                "begins a new round of %d steps, and the one that was left counts whole. With "
                "save_steps a multiple of %d none is lost but those after the checkpoint.",
                left,
                self.steps - updates,
                bands,
                bands,
            )
        if left <= 0 < self.steps - updates:
            raise PrivacyError(
                f"The budget is spent: {ledger.steps} releases of {self.steps} were made, "
                f"{updates} of which are in {checkpoint}; those made after it count as well. The "
                "checkpoint itself is private as it is; so are later ones of the same run."
            )
        return ledger

    def refuse_start(self, before: Ledger | None) -> None:
        """Refuses a new run whose budget would add to one that is forgotten.

        Args:
            before: the ledger of an earlier run of the same weights, if any.

        Raises:
            PrivacyError: that ledger has releases, or the folder is that of another run
                (``refuse_used_folder``).
        """
        if before is not None and before.steps:
            raise PrivacyError(
                f"This trainer has made {before.steps} releases on this model already, and the "
                "noise was calibrated for one run. Resume with resume_from_checkpoint, or make "
                "a new trainer: its budget then adds to the one spent."
            )
        refuse_used_folder(self.args, self._earlier)

    def _advise_on_saving(self) -> None:
        """Says which save_steps a run with banded noise can be resumed from without a loss."""
        args, bands = self.args, len(self.mechanism.bands)
        every = args.save_steps if args.save_steps >= 1 else math.ceil(args.save_steps * self.steps)
        if args.save_strategy == "steps" and every < self.steps and every % bands:
            logger.warning(
                "save_steps=%g is no multiple of %d, the number of steps in a round of this run's "
                "banded noise. A run that is resumed in the middle of a round loses up to %d of "
                "its steps, because a round that was begun counts whole. Set save_steps=%d, or "
                "another multiple of %d.",
                args.save_steps,
                bands,
                bands - 1,
                bands * max(1, round(every / bands)),
                bands,
            )

    def note_choice(self, chosen: str | None) -> None:
        """Has the ledger say what was chosen; call it before the ledger is started."""
        self._mechanism = replace(self._mechanism, chosen=chosen)

    def use_noise_of(self, mechanism: Mechanism) -> None:
        """Takes over the noise that the first process found or resumed: it alone adds any."""
        before, banded = self._mechanism, self.args.noise != INDEPENDENT
        coefficients = mechanism.coefficients if banded else None
        self._mechanism = self._with_noise(mechanism.noise_multiplier, coefficients)
        if self._mechanism != before:
            self._curve = self._curve and self._curve_of_run()

    def _keep_noise(self, recorded: Mechanism) -> None:
        """Goes on with the noise of a run that is resumed, where that keeps the budget.

        The accountant that found it may be another one than here, and may need less noise.
        """
        target, found = self.args.target_epsilon, self._mechanism
        if target is not None:
            self.use_noise_of(recorded)
            if self._curve is None or self._curve.epsilon(self.steps) > target:
                self.use_noise_of(found)

    def _require_same_runs_before(self, copy: Path, recorded: Ledger) -> None:
        if recorded.earlier != self._spent_before:
            ours, theirs = (
                sum(releases.steps for releases in each)
                for each in (self._spent_before, recorded.earlier)
            )
            raise PrivacyError(
                f"{copy} records that its run began with {theirs} earlier releases on the same "
                f"data, and this trainer counts {ours} (earlier_data={self.args.earlier_data!r}). "
                "Resume with the model, earlier_data and earlier_ledger that the run began with."
            )

    def spent(self, ledger: Ledger | None) -> PrivacySpent:
        """Returns epsilon for all that a ledger counts, earlier runs included."""
        steps, counted, own = 0, 0, self._mechanism
        private = self._earlier is None or not self._earlier.not_private_reasons
        if ledger is not None:
            steps, counted, own = ledger.steps, ledger.runs[-1].accounted.steps, ledger.mechanism
            private = ledger.private
        epsilon = math.inf
        if private and self._curve is not None:
            epsilon = self._curve.epsilon(counted)
        return PrivacySpent(epsilon, self.args.target_delta, steps, own)

    @property
    def epsilon_of_run(self) -> float:
        """Epsilon of all steps that are planned, earlier runs included."""
        return math.inf if self._curve is None else self._curve.epsilon(self.steps)

    def releases_left(self, ledger: Ledger | None) -> float:
        """Returns how many more releases the budget allows; infinite without a target epsilon."""
        if self.args.target_epsilon is None or ledger is None:
            return math.inf
        *before, now = ledger.sessions
        own = self._mechanism
        budget = own.counted([self.steps]) - own.counted(before)
        return min(self.steps - ledger.steps, budget - now)


def schedule_of(args: Any, steps: int) -> list[float]:
    """Returns what the rate is multiplied by at each step, by the scheduler that arguments ask for.

    One that follows a metric is taken for constant.
    """
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = get_scheduler(
        args.lr_scheduler_type,
        optimizer,
        num_warmup_steps=args.get_warmup_steps(steps),
        num_training_steps=steps,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,
    )
    factors = []
    for _ in range(steps):
        factors.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        if not isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step()
    return factors


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
