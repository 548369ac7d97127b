"""The privacy plan of a run: N, q, the number of steps and sigma, fixed before data are read."""

import json
import logging
import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
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
    expected_steps_per_epoch,
    find_bands,
    find_noise_multiplier,
    refuse_large_delta,
    rounded_up,
    usual_batch_size,
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

# The fields of a mechanism that have the value of the argument of the same name.
_RECORDED = {f.name for f in fields(Mechanism)} & {f.name for f in fields(DPGrapeArguments)}


@dataclass(frozen=True)
class PrivacySpent:
    """The privacy that a run has spent so far: ``epsilon``, an upper bound, at ``delta``.

    It covers ``steps`` releases of the ``mechanism`` and earlier runs on the same data, and
    protects one ``mechanism.privacy_unit``.
    """

    epsilon: float
    delta: float | None
    steps: int
    mechanism: Mechanism = field(repr=False)

    @property
    def private(self) -> bool:
        """True if epsilon is finite."""
        return math.isfinite(self.epsilon)


class PrivacyPlan:
    """Noise, number of steps and sampling rate for given arguments and a dataset size.

    Args:
        args: the arguments of the run.
        dataset_size: the length of the training dataset, or with ``args.privacy_unit_column`` the
            number of its values. It is N, unless ``args.num_samples`` declares another value.
        earlier: the earlier runs of the model, if any (``find_earlier``). Their cost on the same
            data is a part of the target and of every epsilon.
        public_dataset: a description of the data for measuring the projection; None for synthetic
            inputs.
        most_bands: the largest number of bands, if ``args.noise`` is None.
        clipped_apart: the module, if any, whose parameters are clipped separately from the others.

    Attributes:
        args: the arguments, with the batch size that was chosen, if it was not given.
        steps: the number of releases of the run, for which sigma is calibrated.

    Raises:
        PrivacyError: if no run can keep the budget.
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
            size = usual_batch_size(num_samples, args.num_train_epochs, given)
            args = args.with_choices({"expected_batch_size": size})
        self.args = args
        batch = args.logical_batch_size
        if batch > num_samples:
            raise PrivacyError(
                f"The expected batch size {batch} is larger than the {num_samples} training "
                f"{unit}s. Lower expected_batch_size. Its default is the product of "
                "per_device_train_batch_size, gradient_accumulation_steps and the number of "
                "processes."
            )
        delta = args.target_delta
        if args.private and delta is not None:
            refuse_large_delta(delta, num_samples, unit)
        epoch = expected_steps_per_epoch(batch / num_samples)
        self.steps = given or math.ceil(args.num_train_epochs * epoch)
        self._mechanism = self._uncalibrated(num_samples)
        if args.noise_multiplier is None:
            self._mechanism = self._calibrated()
        self._curve: EpsilonCurve | None = None
        if args.private and delta is not None:
            if earlier is not None and (earlier.same_data or earlier.resumed):
                require_same_neighbours(self._mechanism, earlier.runs)
            self._curve = self._curve_of_run()
            if self._spent_before and args.target_epsilon is not None:
                self._report_remaining_budget()

    def _report_remaining_budget(self) -> None:
        assert self._curve is not None
        spent = self._curve.epsilon(0)
        logger.warning(
            "earlier_data='same': target_epsilon=%g is the budget of all runs on the data, and "
            "earlier runs spent %.4g of it. This leaves %.4g for the %d steps of this run. Its "
            "noise multiplier is %.4g; the last run had %.4g.",
            self.args.target_epsilon,
            rounded_up(spent),
            max(0.0, (self.args.target_epsilon or 0.0) - spent),
            self.steps,
            self._mechanism.noise_multiplier,
            self._spent_before[-1].noise_multiplier,
        )

    def _calibrated(self) -> Mechanism:
        """Return the mechanism with the noise that the budget requires."""
        args = self.args
        assert args.target_epsilon is not None
        assert args.target_delta is not None
        reasons = [] if self._earlier is None else self._earlier.not_private_reasons
        if reasons:
            raise PrivacyError(
                f"target_epsilon={args.target_epsilon!r} cannot be met with earlier_data='same': "
                f"the earlier run has no guarantee ({'; '.join(reasons)}), so a run that starts "
                "from its weights has none either. Pass noise_multiplier instead, or start from "
                "the model before that run."
            )
        parameters = asdict(self._mechanism.releases(self.steps))
        del parameters["noise_multiplier"], parameters["bands"]
        budget: dict[str, Any] = {
            "target_epsilon": args.target_epsilon,
            "target_delta": args.target_delta,
            "accountant": args.accountant,
            "earlier": self._spent_before,
            **parameters,
        }
        most = self._most_bands if args.noise is None else None
        if args.noise == INDEPENDENT or most == 1:
            return self._with_noise(find_noise_multiplier(**budget))
        banded = find_bands(most=most, **self._workload(), **budget)
        several = len(banded.coefficients) > 1
        return self._with_noise(
            banded.noise_multiplier, json.dumps(banded.coefficients) if several else None
        )

    def _workload(self) -> dict[str, Any]:
        """Return how updates enter the weights: the arguments of ``release_weights``."""
        args = self.args
        assert args.update_rule is not None
        averages = 1 in UPDATE_RULES[args.update_rule].moments.values()
        every = None
        if METHODS[args.method].projected:
            every = self._mechanism.projection_update_steps
        if every is not None and every < self.steps:
            logger.warning(
                "noise='banded' with a projection that is redrawn every %d steps: noise cancels "
                "only between two redraws, so the gain is smaller. Use projection='principal', "
                "with which noise cancels over the whole run.",
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

    @property
    def share_of_rates(self) -> float:
        """The factor of the learning rates that the package chooses, from 1/2 to 1.

        An earlier run found the same weights with some precision p, and this run finds them with
        its own precision r (`Mechanism.precision`). The best mean of both gives this run the weight
        ``r / (p + r)``. The earlier run may have had another task, so the factor is 1/2 or more.
        """
        if self._earlier is None:
            return 1.0
        before = sum(run.mechanism.precision(run.steps) for run in self._earlier.all_runs)
        own = self.mechanism.precision(self.steps)
        return max(0.5, own / (before + own)) if before else 1.0

    def _curve_of_run(self) -> EpsilonCurve:
        """Return epsilon as a function of this run's steps, including earlier releases."""
        delta = self.args.target_delta
        assert delta is not None
        releases = self._mechanism.releases(self.steps)
        return EpsilonCurve(releases, delta, self.args.accountant, self._spent_before)

    def _uncalibrated(self, num_samples: int) -> Mechanism:
        """Return the mechanism of the arguments, with sigma = 0 if it is not calibrated yet."""
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
            "noise": SECURE if args.secure_noise else None,  # calibration sets banded noise
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

        If ``args.accountant`` fails, the recorded accountant is the one that replaced it.
        """
        if self._curve is None:
            return self._mechanism
        self._curve.epsilon(self.steps)  # this decides which accountant is used
        return replace(self._mechanism, accountant=self._curve.accountant)

    def require_agreement(
        self, dataset_size: int, updates: int, trainable: Mapping[str, Tensor]
    ) -> None:
        """Refuse to train if processes differ in settings. All processes must call this together.

        ``updates`` is the number of updates in the weights.
        """
        facts: dict[str, object] = asdict(self.mechanism)
        # These follow from the other values, and their last digit may depend on the processor.
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
        self, checkpoint: str | None, *, updates: int, before: Iterable[Ledger]
    ) -> Ledger:
        """Start the ledger of a run, or resume the ledger of a checkpoint.

        With several processes, only the first one calls it (``Ledger.shared``). ``updates`` is the
        number of updates in the checkpoint's weights; ``before`` is as for ``refuse_start``.

        Raises:
            PrivacyError: if the budget is spent, a resumed ledger does not fit, or as
                ``refuse_start``.
        """
        live = Path(str(self.args.output_dir)) / LEDGER_NAME
        if checkpoint is not None:
            copy = Path(checkpoint) / LEDGER_NAME
            recorded = Ledger.load(copy)
            self._require_same_runs_before(copy, recorded)
            self._keep_noise(recorded.mechanism)
            self.note_choice(recorded.mechanism.chosen)  # the checkpoint has these learning rates
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
                "noise='banded': the budget allows %g of the %d remaining steps. A resumed run "
                "begins a new round of %d steps, and the interrupted round counts as complete. Set "
                "save_steps to a multiple of %d to lose only the steps after a checkpoint.",
                left,
                self.steps - updates,
                bands,
                bands,
            )
        if left <= 0 < self.steps - updates:
            raise PrivacyError(
                f"The budget is spent: {ledger.steps} releases of {self.steps} were made, and "
                f"{checkpoint} contains {updates} of them. Releases after the checkpoint count "
                "too. You can use this checkpoint, or a later one of the run, as the private "
                "model."
            )
        return ledger

    def refuse_start(self, before: Iterable[Ledger]) -> None:
        """Refuse a new run that would not count the releases of an earlier run.

        Raises:
            PrivacyError: ``before``, the ledgers of runs that trained the same weights, have
                releases that this plan does not count; or the folder belongs to another run
                (``refuse_used_folder``).
        """
        for ledger in before:
            if self._earlier is None or ledger.has_releases_beyond(self._earlier.ledger):
                raise PrivacyError(
                    f"This trainer, or another one, has already made {ledger.steps} releases on "
                    "this model, and the plan of this run does not count them. Resume with "
                    "resume_from_checkpoint, or make a new trainer, which counts the epsilon "
                    "already spent."
                )
        refuse_used_folder(self.args, self._earlier)

    def _advise_on_saving(self) -> None:
        """Warn if checkpoints are saved in the middle of a round of banded noise."""
        args, bands = self.args, len(self.mechanism.bands)
        every = args.save_steps if args.save_steps >= 1 else math.ceil(args.save_steps * self.steps)
        if args.save_strategy == "steps" and every < self.steps and every % bands:
            logger.warning(
                "save_steps=%g is not a multiple of %d, the number of steps in a round of this "
                "run's banded noise. A run that resumes in the middle of a round loses up to %d of "
                "its steps, because an interrupted round counts as complete. Set save_steps=%d, or "
                "another multiple of %d.",
                args.save_steps,
                bands,
                bands - 1,
                bands * max(1, round(every / bands)),
                bands,
            )

    def note_choice(self, chosen: str | None) -> None:
        """Set the choices that the ledger records. Call it before the ledger is started."""
        self._mechanism = replace(self._mechanism, chosen=chosen)

    def use_noise_of(self, mechanism: Mechanism) -> None:
        """Use the noise of the first process's mechanism, as only the first process adds noise."""
        before, banded = self._mechanism, self.args.noise != INDEPENDENT
        coefficients = mechanism.coefficients if banded else None
        self._mechanism = self._with_noise(mechanism.noise_multiplier, coefficients)
        if self._mechanism != before:
            self._curve = self._curve and self._curve_of_run()

    def _keep_noise(self, recorded: Mechanism) -> None:
        """Use the noise of the resumed run, if it keeps the budget.

        The run may have been calibrated by another accountant, which needs less noise.
        """
        target, calibrated = self.args.target_epsilon, self._mechanism
        if target is not None:
            self.use_noise_of(recorded)
            if self._curve is None or self._curve.epsilon(self.steps) > target:
                self.use_noise_of(calibrated)

    def _require_same_runs_before(self, copy: Path, recorded: Ledger) -> None:
        if recorded.earlier != self._spent_before:
            ours, theirs = (
                sum(releases.steps for releases in each)
                for each in (self._spent_before, recorded.earlier)
            )
            raise PrivacyError(
                f"{copy} records {theirs} earlier releases on the same data before its run, but "
                f"this trainer counts {ours} (earlier_data={self.args.earlier_data!r}). Resume "
                "with the model, earlier_data and earlier_ledger that the run began with."
            )

    def spent(self, ledger: Ledger | None) -> PrivacySpent:
        """Return the privacy spent on all releases of a ledger, including earlier runs."""
        steps, counted, mechanism = 0, 0, self._mechanism
        private = self._earlier is None or not self._earlier.not_private_reasons
        if ledger is not None:
            steps, mechanism, private = ledger.steps, ledger.mechanism, ledger.private
            counted = ledger.runs[-1].accounted.steps
        epsilon = math.inf
        if private and self._curve is not None:
            epsilon = self._curve.epsilon(counted)
        return PrivacySpent(epsilon, self.args.target_delta, steps, mechanism)

    @property
    def epsilon_of_run(self) -> float:
        """Epsilon after all planned steps, including earlier runs."""
        return math.inf if self._curve is None else self._curve.epsilon(self.steps)

    def releases_left(self, ledger: Ledger | None) -> float:
        """Return how many more releases the budget allows; infinite without a target epsilon."""
        if self.args.target_epsilon is None or ledger is None:
            return math.inf
        *before, now = ledger.runs[-1].sessions
        budget = self._mechanism.counted([self.steps]) - self._mechanism.counted(before)
        return min(self.steps - ledger.steps, budget - now)


def schedule_of(args: Any, steps: int) -> list[float]:
    """Return the factor of the learning rate at each step, by the scheduler of the arguments.

    A scheduler that follows a metric counts as constant.
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
    """Refuse a training dataset without random access, which Poisson sampling needs."""
    if dataset is None:
        return
    by_index = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    if not (by_index and has_length(dataset)):
        raise PrivacyError(
            f"train_dataset is a {type(dataset).__name__} without random access: Poisson sampling "
            "reads examples by their index. Load it as a map-style dataset (streaming=False, or "
            "list(...))."
        )
    if len(dataset) == 0:
        raise PrivacyError("train_dataset is empty. Pass a dataset with at least one example.")
