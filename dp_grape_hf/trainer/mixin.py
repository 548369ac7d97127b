"""``DPGrapeMixin``: the overrides that make the training of a ``Trainer`` private.

Put the mixin in front of a trainer: ``Trainer``, ``Seq2SeqTrainer`` or TRL's ``SFTTrainer``. These
docstrings call that trainer the host. The mixin overrides the methods of the host that would break
privacy. Its sections have the order of ``transformers.Trainer``; ``sharded`` has the overrides for
several processes, and ``saving`` the overrides that save and upload. There is no arithmetic here:
``run`` makes the parts of a run and drives a step, ``chosen`` chooses trained parameters and
learning rates, ``mechanism`` samples, clips and adds noise, and ``ledger`` records. The overrides
after the training utilities write to logs, files or the Hub.
"""

import inspect
import logging
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.trainer_callback import ProgressCallback
from transformers.trainer_utils import PredictionOutput, TrainOutput

from dp_grape_hf.accounting import expected_steps_per_epoch
from dp_grape_hf.arguments import (
    METHODS,
    DPGrapeArguments,
    DPGrapeTrainingArguments,
    PrivacyPlan,
    PrivacySpent,
    check_dataset,
    refuse_model,
)
from dp_grape_hf.choosing import FIRST_POSITION, rate_warnings
from dp_grape_hf.distributed import failing_together, from_first, require_agreement
from dp_grape_hf.errors import PrivacyError, require
from dp_grape_hf.gradients import (
    OF_SINGLE_EXAMPLES,
    LossFunction,
    ModelLoss,
    ReturnedLoss,
    StateGuard,
    TrainerLoss,
    configs_of,
    evaluating,
    examine_trainer_loss,
    freeze_unused,
    keeping_configs,
    keeping_random_state,
    loss_for,
    losses_of,
    refuse_modules,
    refuse_reached,
    warm_up,
    with_three_arguments,
)
from dp_grape_hf.ledger import (
    LEDGER_NAME,
    Ledger,
    find_earlier,
    note_provenance,
    refuse_used_folder,
    remember,
    remembered_ledgers,
)
from dp_grape_hf.mechanism import (
    LogicalBatch,
    PoissonBatchSampler,
    Streams,
    Units,
    forget_the_seed,
    noise_generator,
    shared_sampling_generator,
)
from dp_grape_hf.optimizers import require_each_once
from dp_grape_hf.phases import Observer, progress
from dp_grape_hf.projections import PRINCIPAL, Batches, SyntheticInputs, reads_synthetic
from dp_grape_hf.sharding import is_sharded, reshard
from dp_grape_hf.trainer.bad_data import explaining_bad_data
from dp_grape_hf.trainer.callbacks import (
    WITHHELD,
    PrivacyProgress,
    PrivateCallback,
    PrivateLogs,
    WarnOfDivergence,
    is_of_notebooks,
)
from dp_grape_hf.trainer.checkpoints import (
    last_whole_checkpoint,
    refuse_longer_run,
    require_whole_checkpoint,
)
from dp_grape_hf.trainer.chosen import (
    Choices,
    choose_parts,
    find_rates,
    line_of,
    table_of,
    use_parts,
)
from dp_grape_hf.trainer.collators import batch_to_try, examine_collator, state_of
from dp_grape_hf.trainer.data import (
    HeldOut,
    description,
    loader_of,
    positions_of,
    public_batches,
    refuse_public_dataset,
    units_of,
)
from dp_grape_hf.trainer.inputs_by_form import InputsByForm, first_row, form_of
from dp_grape_hf.trainer.launcher import refuse_following_metrics, refuse_launcher
from dp_grape_hf.trainer.overlap import refuse_repeated
from dp_grape_hf.trainer.override_checks import is_hosts, require_overrides
from dp_grape_hf.trainer.remembered import remembering
from dp_grape_hf.trainer.rows import Unseen, warn_of_rows
from dp_grape_hf.trainer.run import PrivateRun
from dp_grape_hf.trainer.saving import SavingMixin
from dp_grape_hf.trainer.sharded import ShardingMixin

logger = logging.getLogger(__name__)


class DPGrapeMixin(SavingMixin, ShardingMixin):
    """Base class that makes the training of a ``transformers.Trainer`` differentially private.

    Args:
        model: ``torch.nn.Module``; parameters with ``requires_grad`` are trained. Its loss is known
            for all heads of transformers; for others, give ``compute_loss_func``.
        args: an instance of ``arguments_class``: epsilon, delta, epochs, and any other options.
        train_dataset: map-style, with a length: examples are sampled by their indices.
        compute_loss_func: if given, ``f(outputs, labels)`` or ``f(outputs, labels,
            num_items_in_batch)``, whose last argument is None in training, must return one loss
            per sample, (B,), each computed from that sample alone.
        public_dataset: with ``projection="principal"``, the data on which the principal directions
            are measured, instead of synthetic inputs. You declare it public: no epsilon protects
            its examples, and ledger and card say so.
        public_example: an example with the form (names, shapes, dtypes) of all examples. A model
            from outside transformers is measured on random inputs of this form. Without it, the
            form of the first training example counts as public.
        known_streams: generators of sampling and noise, for tests. The ledger then says that the
            run is not private.
        **kwargs: all other arguments of the host, of which ``model_init`` is called once, here. Do
            not pass ``optimizers``, because the method has its own optimizer. To use another
            scheduler, make it with ``trainer.create_optimizer()``, and set
            ``trainer.lr_scheduler``.

    Attributes:
        private_run: the parts of the run; made anew when training starts.

    Guarantee:
        The weights after training are (epsilon, delta)-differentially private with respect to the
        training data, with the numbers of ``privacy_spent()``. Neighbouring data sets differ by
        one example, or by all examples of a unit if ``privacy_unit_column`` is given. Ledger,
        progress bar and logs are private as well, except for metrics of evaluation data, which
        epsilon does not cover. The contribution of an example must depend on that example and on
        random numbers that it does not share with other examples. Model and collator are examined
        for this (``gradients.replay``) before the first private update. A run without noise has no
        guarantee, and logs everything.

    Raises:
        PrivacyError: arguments, model and data do not allow this guarantee; if possible, before any
            data are read.
    """

    arguments_class: ClassVar[type[DPGrapeArguments]] = DPGrapeTrainingArguments
    args: DPGrapeArguments
    plan: PrivacyPlan
    observer: Observer | None = None
    """Receives the phases of each step (``phases``), in runs that are made after it is set."""
    _given_train_dataset: Any = None  # the data set before the host prepared it
    metric_prefixes: tuple[str, ...] = ()  # prefixes of metrics, while an evaluation runs
    _public_dataset: Any = None
    _searched: frozenset[str] = frozenset()  # parameters among which unused ones were searched
    _warm: bool = False  # whether the model has run on public inputs in training mode
    _inputs: Batches | None = None  # random inputs, for a model from outside transformers
    _private_norm: Tensor = torch.zeros(())
    _known_streams: Streams | None = None
    _units_read: tuple[Any, Units] | None = None  # data set -> its units, read once
    _fetched: list[tuple[Tensor, int]] | None = None  # tensors of the next batch, and versions
    _noted: bool = False  # whether the model's config has the note on private training
    _frozen: tuple[str, ...] = ()  # trainable parameters that have no influence on the loss

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let overrides of ``evaluate`` and ``predict`` in a subclass log their metrics."""
        super().__init_subclass__(**kwargs)
        for name, prefix in (("evaluate", "eval"), ("predict", "test")):
            owner = next(base for base in cls.__mro__ if name in vars(base))
            if owner is cls or not issubclass(owner, DPGrapeMixin):
                setattr(cls, name, _as_evaluation(getattr(cls, name), prefix))

    def __init__(
        self,
        model: Any = None,
        args: DPGrapeArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        compute_loss_func: Callable[..., Tensor] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: Any = None,
        public_dataset: Any = None,
        public_example: Any = None,
        known_streams: Streams | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(args, self.arguments_class):
            raise PrivacyError(
                f"args is a {type(args).__name__}; pass a {self.arguments_class.__name__}, which "
                "carries target_epsilon and target_delta."
            )
        if tuple(optimizers) != (None, None) or optimizer_cls_and_kwargs is not None:
            raise PrivacyError(
                "An optimizer or its scheduler was passed, but private gradients are in projected "
                "coordinates, which only ProjectedOptimizer understands. Choose an update rule by "
                "optim ('sgd', 'adamw_torch') and a schedule by lr_scheduler_type, or set "
                "trainer.lr_scheduler to one made around trainer.create_optimizer()."
            )
        require(
            "loss" not in kwargs,
            "loss= was passed, an argument of SentenceTransformerTrainer. Most of its losses "
            "compare the texts of a batch with each other, so one example would influence the "
            "gradients of others. Let each row be a pair or a triplet, and let forward() return "
            "the loss of its rows, or pass compute_loss_func=f where f(outputs, labels) returns "
            "one loss per sample, of shape (B,).",
        )
        if compute_loss_func is not None and args.label_smoothing_factor:
            raise PrivacyError(
                f"label_smoothing_factor={args.label_smoothing_factor!r} and a compute_loss_func "
                "were given. Smooth in your own loss, or leave it out."
            )
        if args.label_smoothing_factor and isinstance(model, nn.Module):
            require(
                hasattr(model, "config"),
                f"label_smoothing_factor={args.label_smoothing_factor!r}, and the model, a "
                f"{type(model).__name__}, has no config, which says how its labels are meant. "
                "Smooth the labels in a compute_loss_func of your own, or leave it at 0.",
            )
        require_overrides(self)
        check_dataset(train_dataset)
        if train_dataset is not None and args.private and args.privacy_unit_column is None:
            refuse_repeated(train_dataset)
        self._held_out = HeldOut()
        self._held_out.require(eval_dataset, [train_dataset], args, "eval_dataset")
        refuse_public_dataset(public_dataset, train_dataset, args)
        self._given_train_dataset = train_dataset
        self._public_dataset, self._public_example = public_dataset, public_example
        super().__init__(  # by name, because TRL has further arguments in between
            model=model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            **kwargs,
        )
        self.model_init: Any = None  # the host would make another model when training starts
        self.publisher.set_model(self.model)
        refuse_launcher(self)
        refuse_following_metrics(self)
        self._user_loss = with_three_arguments(compute_loss_func)
        if self._user_loss is not None:
            self.compute_loss_func = partial(_mean_loss, self._user_loss)  # in evaluation only
            self.label_names = self.label_names or ["labels"]  # a forward may take none
        refuse_model(args.method, self.model)
        refuse_modules(self.model)  # now, as the first run of some takes a minute
        if isinstance(self._known_loss(), ReturnedLoss):  # for a batch of one example
            self.args = self.args.with_engine(OF_SINGLE_EXAMPLES)
        self._known_streams = known_streams
        self._refuse_used_folder()
        with self._progress("Trying the model"):
            self._try_one_example()
            self._make_parts()
        prepared: Any = self.train_dataset  # the host may have replaced the data set
        if prepared is not None:
            check_dataset(prepared)
            self._refuse_training_data(self.eval_dataset)  # the host may have replaced it
            if args.private and args.privacy_unit_column is None:
                warn_of_rows(prepared, self.processing_class or self.data_collator)
            self._make_plan()
        self._add_callbacks()

    def _add_callbacks(self) -> None:
        handler = self.callback_handler
        me = weakref.proxy(self)  # a cycle would keep the model alive after the trainer
        handler.callbacks.insert(0, PrivateCallback(me))
        if any(type(c) is ProgressCallback for c in handler.callbacks):
            self.remove_callback(ProgressCallback)
            self.add_callback(PrivacyProgress(me))
        for table in filter(is_of_notebooks, [*handler.callbacks]):
            from dp_grape_hf.trainer.notebook import PrivacyNotebookProgress  # needs IPython

            self.remove_callback(table)
            self.add_callback(PrivacyNotebookProgress())
        self.add_callback(WarnOfDivergence(me))

    @property
    def _clipped_apart(self) -> str | None:
        """The module with a separate clipping bound, if any."""
        return None if self._parts is None else self._parts.clipped_apart

    def _make_plan(self) -> None:
        """Make the plan of a run with the present parts; it may choose the batch size."""
        public = self._public_dataset
        public = None if public is None else description(public)
        earlier = find_earlier(self.model, self.args)
        most = self.private_run.bands_at_most()
        head = self._clipped_apart
        with self._progress("Calibrating the noise", "tries"):
            self.plan = PrivacyPlan(self.args, self._dataset_size, earlier, public, most, head)
        self.args = self.plan.args

    def _make_parts(self) -> None:
        """Choose the trained parameters, once per model, and make the parts of a run."""
        self._freeze_unused()
        if self._resumed is not None:
            use_parts(self.model, self._resumed.parts, instead_of=self._parts)
            self._parts = self._resumed.parts
        elif self._parts is None and self.args.chooses and self.train_dataset is not None:
            inputs = self._public_inputs()
            self._parts, self.args = choose_parts(self.model, self.args, inputs, self._frozen)
        self.private_run = self._make_run()

    def _take_choices(self, checkpoint: str) -> None:
        """Use the choices that a checkpoint contains, if any; a collective call."""
        choices = from_first(lambda: Choices.load(checkpoint))
        if choices is None or not self.args.chooses or self.train_dataset is None:
            return
        before = self.args.chosen_options, self._parts
        self.args = choices.applied_to(self.args, checkpoint)
        self._resumed = choices
        if before != (self.args.chosen_options, choices.parts):
            self._make_parts()
            self._make_plan()

    def _make_ready(self) -> None:
        """Make the parts of a run again, as you may have frozen parameters; choose the rates."""
        if is_sharded(self.model):
            return
        self._make_parts()
        self._choose_rates()

    def _make_run(self) -> PrivateRun:
        """Return the parts of a run for the model; raises an error for unsupported models."""
        inputs, head = self._public_inputs(), self._clipped_apart
        return PrivateRun(self.args, self.model, self._loss(), self.observer, inputs, head)

    def _loss(self) -> LossFunction | None:
        """Return the loss that was passed; None if the loss of the model's head is used."""
        loss: LossFunction | None = self._loss_of_host()
        overridden = not is_hosts(type(self).compute_loss)
        user = self._user_loss
        require(
            loss is None or (user is None and not overridden),
            f"{type(self).__name__} defines its own loss, and compute_loss_func or compute_loss() "
            "would replace it. Leave them out.",
        )
        if user is not None:
            loss = partial(user, num_items_in_batch=None)
        elif overridden:
            me = weakref.proxy(self)
            loss = TrainerLoss(self.model, partial(type(self).compute_loss, me))
        elif self.args.label_smoothing_factor:
            loss = loss_for(self.model, label_smoothing=self.args.label_smoothing_factor)
        return loss

    def _known_loss(self) -> LossFunction | None:
        """Return the loss of the run; None if it is unknown."""
        with suppress(PrivacyError):
            return self._loss() or loss_for(self.model)
        return None

    def _loss_of_host(self) -> ModelLoss | None:
        """Return the loss of the host, if it is not the loss of the model's head."""
        return None

    def _freeze_unused(self) -> None:
        """Freeze parameters that have no influence on the loss of public inputs.

        This does not depend on the training data. The first process decides: with
        ``cpu_ram_efficient_loading`` only that process has weights.
        """
        unused = from_first(self._find_unused)
        for name in unused:
            self.model.get_parameter(name).requires_grad_(False)
        self._frozen += tuple(unused)

    def _find_unused(self) -> list[str]:
        loss = self._known_loss()
        if self.train_dataset is None or loss is None:
            return []
        trainable = frozenset(n for n, p in self.model.named_parameters() if p.requires_grad)
        if self._searched >= trainable:
            return []
        self._searched = trainable
        with keeping_random_state():  # a collator of public data may draw random numbers
            return freeze_unused(self.model, loss, self._public_inputs()())

    def _public_inputs(self) -> Batches:
        """Return a function that makes the inputs for measuring principal directions."""
        dataset, args = self._public_dataset, self.args
        needed = self.train_dataset is not None and (args.chooses or args.projection == PRINCIPAL)
        if dataset is None and (reads_synthetic(self.model) or not needed):
            return SyntheticInputs(self.model, self.processing_class, args.projection_seed)
        if dataset is None:
            return self._inputs_by_form()
        dataset, collator = self._with_used_columns(dataset, "public")
        size = args.per_device_train_batch_size
        return public_batches(dataset, collator, size, self.label_names)

    def _inputs_by_form(self) -> Batches:
        """Return a function that makes random inputs with the form of an example."""
        if self._inputs is None:
            dataset, collator = self._with_used_columns(self.train_dataset, "training")
            example = self._public_example
            first = partial(dataset.__getitem__, 0) if example is None else lambda: example
            with explaining_bad_data(self.train_dataset, "Reading the first example"):
                forms = form_of(dataset, collator, first)
            seed = self.args.projection_seed
            self._inputs = InputsByForm(self.model, forms, seed)
        return self._inputs

    # ---- Choices ----

    def suggestion(self) -> str:
        """Return tables of the chosen options and learning rates, and warnings, as text.

        Learning rates are chosen, or measured if you pass them. Nothing is trained. Of the
        training data only the number of examples is used.

        Raises:
            PrivacyError: the method has no learning rates to choose, or several processes share
                the model.
        """
        self._make_ready()
        if self.rates is None:
            raise PrivacyError(
                f"method={self.args.method!r} has no learning rates to choose, or the model cannot "
                "be run on synthetic inputs. Pass public_dataset=, whose examples it can read."
            )
        table = table_of(self.rates, self.private_run, self.plan, self._parts)
        return table + "".join(f"\n{warning}\n" for warning in self._rate_warnings())

    def _choose_rates(self) -> None:
        """Choose learning rates by the noise of the run, or measure the noise at given ones."""
        run, plan = self.private_run, self.plan
        if self._resumed is not None:
            self.rates = self._resumed.rates
        else:
            inputs = self._public_inputs()
            kept = remembering(self.model, inputs, self._clipped_apart)
            with self._progress("Choosing learning rates"), kept:
                self.rates = find_rates(run, plan, inputs, self._parts)
        if self.args.chooses and self.rates is not None:
            run.use_rates(self.rates.by_name)
            plan.note_choice(line_of(self.rates, run))

    def _rate_warnings(self) -> list[str]:
        if self.rates is None:
            return []
        at_first = [FIRST_POSITION] * bool(self._parts is not None and self._parts.reads_first)
        return [*at_first, *rate_warnings(self.rates, chosen=self.args.chooses)]

    def table_of_choices(self) -> str:
        """Return the table shown before the first step; empty if nothing was chosen."""
        if not self.args.chooses or self.rates is None:
            return ""
        return table_of(self.rates, self.private_run, self.plan, self._parts)

    # ---- Data Loading ----

    @property
    def _units(self) -> Units | None:
        """The examples of each privacy unit; None if each example is a unit."""
        dataset = self.train_dataset
        if self.args.privacy_unit_column is None:
            return None
        if self._units_read is None or self._units_read[0] is not dataset:
            self._units_read = dataset, units_of(dataset, self.args)
        return self._units_read[1]

    @property
    def _dataset_size(self) -> int:
        """Number of privacy units in the training data."""
        counted: Any = self.train_dataset if self._units is None else self._units
        return len(counted)

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Return the declared N for a training loader; throughput would reveal its true size."""
        if isinstance(getattr(dataloader, "batch_sampler", None), PoissonBatchSampler):
            return int(self.plan.mechanism.num_samples)
        return super().num_examples(dataloader)

    def _with_used_columns(self, dataset: Any, what: str) -> tuple[Any, Callable[[list[Any]], Any]]:
        """Return a data set and its collator, without columns that the model does not take."""
        collator = self.data_collator
        if hasattr(dataset, "column_names") and hasattr(dataset, "set_format"):  # datasets.Dataset
            return self._remove_unused_columns(dataset, description=what), collator
        return dataset, self._get_collator_with_removed_columns(collator, description=what)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader that samples logical batches by Poisson sampling.

        It is not passed to ``accelerator.prepare``, which would shard the sampler again, and repeat
        examples to make batches equally large.
        """
        if self.train_dataset is None:
            raise ValueError("Trainer: training requires a train_dataset.")
        args = self.args
        dataset, collator = self._with_used_columns(self.train_dataset, "training")
        generator = (
            self._known_streams.sampling if self._known_streams else shared_sampling_generator()
        )
        me = weakref.proxy(self)
        draws = PoissonBatchSampler(
            self._dataset_size,
            self.plan.mechanism.sample_rate,
            steps=expected_steps_per_epoch(self.plan.mechanism.sample_rate),
            generator=generator,
            rank=args.process_index,
            world_size=args.world_size,
            turns=lambda: me.private_run.turns,
            units=self._units,
            max_examples_per_unit=args.max_examples_per_unit,
        )
        positions, secret = positions_of(self.model), self._known_streams is None
        return loader_of(draws, dataset, collator, args, positions, secret=secret)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Return the loader of the host; raises ``PrivacyError`` for training rows."""
        self._refuse_training_data(eval_dataset)
        return super().get_eval_dataloader(eval_dataset)

    def _refuse_training_data(self, dataset: Any, what: str = "eval_dataset") -> None:
        """Refuse data with training rows; None and a name mean ``eval_dataset``."""
        held: Any = self.eval_dataset if dataset is None else dataset
        if isinstance(held, str):
            held = self.eval_dataset[held]  # type: ignore[index]
        training_data = [self._given_train_dataset, self.train_dataset]
        self._held_out.require(held, training_data, self.args, what)

    # ---- Training ----

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> TrainOutput:
        """Train as the host does; with True, resume from the last complete checkpoint.

        The host would resume from the last folder, which a killed run may have saved in part.

        Returns:
            The output of the host. Its ``training_loss`` is NaN and prints as "withheld", because
            the loss is not private.
        """
        if resume_from_checkpoint is True:
            folder = str(self.args.output_dir)
            resume_from_checkpoint = from_first(lambda: last_whole_checkpoint(folder)) or True
        elif resume_from_checkpoint:
            require_whole_checkpoint(resume_from_checkpoint)
        self._resumed = None
        if resume_from_checkpoint and resume_from_checkpoint is not True:
            self._take_choices(resume_from_checkpoint)
        ledger, state = self.ledger, self.state
        try:
            output = super().train(resume_from_checkpoint, *args, **kwargs)
        except BaseException as error:
            if not resume_from_checkpoint and self.ledger is ledger:
                self.state = state  # the weights did not change, so their state stays
            if isinstance(error, PrivacyError):
                self._refused = self.ledger is None or not self.ledger.steps
            raise
        finally:
            self.private_run.stop()
        self._refused = False
        return output._replace(training_loss=WITHHELD) if self.args.private else output

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Make no step if the resumed run is complete; the host would make one."""
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*args, **kwargs)

    def start(self, loader: DataLoader[Any] | None = None) -> nn.Module:
        """Start a run without ``train()``, for a loop that you write around ``training_step``.

        Args:
            loader: the result of ``get_train_dataloader()``. Collator, losses and gradients are
                examined on its first examples. Without a loader, they are not examined.

        Returns:
            The model to pass to ``training_step``.
        """
        model: nn.Module = self._prepare_for_training(self.plan.steps, loader, None)[0]
        return model

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> Any:
        """Start or resume ledger and mechanism, and examine the model, before the first step."""
        self._require_as_planned(max_steps)
        self._refuse_early(train_dataloader, resume_from_checkpoint)
        self._make_ready()
        for warning in self._rate_warnings():
            logger.warning("%s", warning)
        self._start_ledger(resume_from_checkpoint)
        self._start_run()
        if self._known_streams is None:
            forget_the_seed()
        prepared = super()._prepare_for_training(
            max_steps, train_dataloader, resume_from_checkpoint
        )
        self._require_our_optimizer()
        self._examine_first(train_dataloader)
        self.private_run.store_updates_separately()
        self.model.train()
        return prepared

    def _try_one_example(self) -> None:
        """Run the first example, so that bad data raise an error before anything is measured.

        A loss of the host or of a subclass is tried when training starts, because it may need
        attributes that are set later.
        """
        known = is_hosts(type(self).compute_loss) and self._loss_of_host() is None
        has_rows = self.train_dataset is not None and not isinstance(self.train_dataset, Unseen)
        plain = METHODS[self.args.method].query is None and self._sharding is None
        loss = self._known_loss() if known and has_rows and plain else None
        if isinstance(loss, ReturnedLoss) or (loss is not None and self.args.chooses):
            from_first(partial(self._run_first_example, loss))

    def _refuse_used_folder(self) -> None:
        """Refuse the folder of another run early, if ``do_train`` is set and none can resume.

        Otherwise ``_refuse_early`` refuses it when training starts.
        """
        args, folder = self.args, Path(str(self.args.output_dir))

        def refuse() -> None:
            if (folder / LEDGER_NAME).is_file() and not any(folder.glob("checkpoint-*")):
                refuse_used_folder(args, find_earlier(self.model, args))

        if args.do_train and self.train_dataset is not None and not args.resume_from_checkpoint:
            from_first(refuse)

    def _run_first_example(self, loss: LossFunction) -> None:
        """Run the first example through collator, model and loss."""
        dataset, collator = self._with_used_columns(self.train_dataset, "training")
        guard = StateGuard(train_dataset=dataset, data_collator=collator)
        with (
            explaining_bad_data(self.train_dataset, "Trying the first example"),
            self._remembering_nothing(loss, guard),
        ):
            batch = self._prepare_inputs(first_row(collator, partial(dataset.__getitem__, 0)))
            if isinstance(loss, TrainerLoss):
                examine_trainer_loss(self.model, loss, batch)
                return
            with torch.no_grad(), evaluating(self.model):
                losses_of(self.model, loss, batch)

    def _refuse_early(self, loader: Any, checkpoint: str | None) -> None:
        """Check the folder and ``compute_loss`` before anything is measured or chosen."""
        if checkpoint is None:
            from_first(lambda: self.plan.refuse_start(remembered_ledgers(self.model)))
        loss = self.private_run.per_sample.loss
        early = loader is not None and self.args.chooses and self._sharding is None
        if early and isinstance(loss, TrainerLoss):
            from_first(partial(self._run_first_example, loss))

    def _require_our_optimizer(self) -> None:
        """Refuse a schedule that follows a metric, and an optimizer from another source."""
        refuse_following_metrics(self)
        run = self.private_run
        if run.optimizer is None:
            raise PrivacyError(
                f"{type(self).__name__}.create_optimizer() made an optimizer that does not receive "
                "private updates: it did not call super().create_optimizer(). Remove the "
                "override, or call super() and return its optimizer."
            )
        require_each_once(run.optimizer, self.model, run.trainable)

    def _examine_first(self, loader: Any) -> None:
        """Examine collator, losses and gradients on the first examples, if there is a loader.

        The states of collator, data set, model and loss are recorded before they see an example.
        """
        require(
            loader is not None or not is_sharded(self.model),
            "With fsdp the model must be examined on examples before the first step. Pass "
            "the loader of trainer.get_train_dataloader() to trainer.start().",
        )
        if loader is None:
            return
        run, private = self.private_run, METHODS[self.args.method].private
        step, loss = self.state.global_step, run.per_sample.loss
        size = max(2, self.args.per_device_train_batch_size)
        with (
            self._handling_data("Trying the first examples"),
            self._progress("Examining the model on the first examples"),
            self._remembering_nothing(loss, state_of(loader)),
        ):
            if private:
                examine_collator(loader)
            batch = self._prepare_inputs(batch_to_try(loader, size))
            refuse_reached(run.per_sample, batch, self._frozen)
            if isinstance(loss, TrainerLoss):
                examine_trainer_loss(self.model, loss, batch)
            if private:
                self.model.train()
                run.examine(step, batch, min(size, self._dataset_size))
            if private and is_sharded(self.model):
                self.model.train()
                run.stay_in_step(step, batch)

    def _progress(self, doing: str, unit: str = "passes") -> AbstractContextManager[None]:
        shown = not self.args.disable_tqdm and self.is_world_process_zero()
        return progress(doing, shown or None, unit)

    def _require_as_planned(self, max_steps: int) -> None:
        """Refuse changes of data and settings since the trainer was made; a collective call."""
        refuse_launcher(self)  # again, as a process group may have been made since
        trainable = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.plan.require_agreement(self._dataset_size, self.state.global_step, trainable)
        if (units := self._units) is not None:
            require(
                units_of(self.train_dataset, self.args).checksum == units.checksum,
                f"The values of privacy_unit_column={self.args.privacy_unit_column!r} in "
                "train_dataset have changed since the trainer was made. Make a new trainer.",
            )
            require_agreement({}, unsaid={"whose the examples are": units.checksum})
        require(
            max_steps == self.plan.steps,
            f"The run would take {max_steps} steps, but the noise was calibrated for "
            f"{self.plan.steps}. Set max_steps or num_train_epochs before making the trainer.",
        )
        refuse_following_metrics(self)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Create the optimizer of the method; its state may contain the projection."""
        new = self.optimizer is None
        if self.args.chooses and self.rates is None:
            self._choose_rates()
        self.optimizer_cls_and_kwargs = self.private_run.optimizer_cls_and_kwargs
        optimizer = super().create_optimizer(*args, **kwargs)
        self.private_run.take(getattr(optimizer, "optimizer", optimizer), new=new)
        return optimizer

    def _finalize_training(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Merge separately stored updates into the weights, then finish as the host does."""
        reshard(self.model)  # an evaluation may have gathered the weights
        self.private_run.stop()
        output = super()._finalize_training(*args, **kwargs)
        if self._noted:
            self._note_provenance(self.privacy_spent().epsilon)
        self.save_state()  # with the complete logs
        return output

    def _start_ledger(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self.args.target_epsilon is not None:
            refuse_longer_run(checkpoint, self.plan.steps)
        before, updates = remembered_ledgers(self.model), self.state.global_step
        self.ledger = Ledger.shared(
            lambda: self.plan.start_ledger(checkpoint, updates=updates, before=before)
        )
        self.publisher.set_model(self.model)
        self.publisher.ledger = self.ledger
        self.plan.use_noise_of(self.ledger.mechanism)
        if self._known_streams is not None:
            self.ledger.mark_not_private("test generators were passed: the noise is known")
        remember(self.model, self.ledger)
        self._noted = False

    def _start_run(self) -> None:
        """Start the mechanism, after the weights were moved to their devices."""
        self._spread_model()
        if is_sharded(self.model):
            reshard(self.model)
            self.private_run = self._make_run()
            if self.args.chooses and self.rates is not None:
                self.private_run.use_rates(self.rates.by_name)
        run, args, known = self.private_run, self.args, self._known_streams
        assert self.ledger is not None
        run.start(
            self.ledger, known.noise if known else noise_generator(args.device, args.secure_noise)
        )
        if self.rates is not None:
            run.signal.groups = {n: g.name for g in self.rates.groups for n in g.parameters}

    @contextmanager
    def _remembering_nothing(self, loss: LossFunction, data: StateGuard) -> Iterator[None]:
        """Refuse a model, a loss, a collator or a data set that stores data of an example."""
        if not METHODS[self.args.method].private:
            yield
            return
        if not self._warm:
            warm_up(self.model, self._public_inputs()())
            self._warm = True
        with (
            StateGuard(model=self.model, loss=loss).unchanged(thorough=True),
            data.unchanged(),
            keeping_configs(configs_of(self.model)),
        ):
            yield

    def _note_provenance(self, epsilon: float) -> None:
        assert self.ledger is not None
        private = self.ledger.private and self.args.private
        note_provenance(self.model, self.ledger, epsilon if private else math.inf)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Fetch batches as the host does; if one process fails, all fail."""
        with self._handling_data("Fetching a batch"):
            samples, count = super().get_batch_samples(*args, **kwargs)
        self._fetched = [(value, value._version) for batch in samples for value in batch.tensors]
        return samples, count

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save as the host does; an error says what to do, for instance about a full disk."""
        try:
            super()._save_checkpoint(*args, **kwargs)
        except Exception as error:
            error.add_note(
                f"A checkpoint in {self.args.output_dir} could not be saved. Earlier checkpoints "
                "are complete, and the ledger counts every release. Free some space if the disk "
                "is full, then continue with train(resume_from_checkpoint=True)."
            )
            raise

    def training_step(
        self,
        model: nn.Module,
        inputs: LogicalBatch,  # type: ignore[override]
        num_items_in_batch: Any = None,
    ) -> Tensor:
        """Make one private update from one sampled batch, in any number of physical batches.

        Returns:
            0 instead of the training loss, which is a function of the data without noise. In a
            run without noise, the mean loss.

        Raises:
            PrivacyError: the budget is spent.
        """
        with self._handling_data("Computing the gradients of a batch"):
            require(
                self.releases_left() > 0,  # a callback may have overruled ours
                f"The budget of {self.plan.steps} releases is spent, and a callback continues. "
                "Remove the callback that resets control.should_training_stop.",
            )
            fetched, self._fetched = self._fetched, None
            require(
                fetched is None
                or [(id(value), version) for value, version in fetched]
                == [(id(value), value._version) for value in inputs.tensors],
                f"training_step() of {type(self).__name__} received another batch than the loader "
                "made. Code that mixes the rows of a batch, as mixup does, lets one example change "
                "the gradients of others, and no check would see it. Change examples one by one in "
                "train_dataset or data_collator, or in the forward of the model.",
            )
            if not model.training:  # after an evaluation
                model.train()
            if self._known_streams is None:
                forget_the_seed()  # a callback may have set one
            done = self.private_run.step(self.state.global_step, inputs, self._on_device)
        self._private_norm = done.norm
        if not self._noted:  # from now on the note is saved with the config
            self._noted = True
            self._note_provenance(self.plan.epsilon_of_run)
        if self.args.private:
            return done.loss.zero_()
        return done.loss / max(inputs.num_examples, 1)

    def _on_device(self, physical: Any) -> Any:
        """Move a physical batch to the device, from pinned memory without waiting for a GPU."""
        moved = send_to_device(physical, self.args.device, non_blocking=True)
        return self._prepare_inputs(moved)

    @contextmanager
    def _handling_data(self, doing: str) -> Iterator[None]:
        """Let all processes fail if one fails, and add a note about the training data."""
        with (
            failing_together(self.private_run.abandon),
            explaining_bad_data(self.train_dataset, doing),
        ):
            yield

    # ---- Training Utilities ----

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """Return the norm of the private update, which must not be clipped again."""
        return self._private_norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Tensor:
        """Return the norm of the private update."""
        return self._private_norm

    def _track_num_input_tokens(self, inputs: LogicalBatch) -> None:
        """Count tokens of sampled batches, only in a run without noise."""
        for physical in () if self.args.private else inputs:
            super()._track_num_input_tokens(physical)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the expected size of a sampled batch, for the reported throughput."""
        return self.args.logical_batch_size

    # ---- Evaluation & Prediction ----

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **kwargs: Any,
    ) -> dict[str, float]:
        """Evaluate as the host does, and log metrics.

        Raises:
            PrivacyError: the data have training rows. This is checked here and when the loader is
                made, because the host may prepare other data in between.
        """
        self._refuse_training_data(eval_dataset)
        with self._logging(metric_key_prefix):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix, **kwargs)

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        **kwargs: Any,
    ) -> PredictionOutput:
        """Predict as the host does; raises ``PrivacyError`` for data with training rows."""
        self._refuse_training_data(test_dataset, "test_dataset")
        with self._logging(metric_key_prefix):
            return super().predict(test_dataset, ignore_keys, metric_key_prefix, **kwargs)

    @contextmanager
    def _logging(self, prefix: str) -> Iterator[None]:
        """Let metrics with this prefix, which are of evaluation data, be logged."""
        before = self.metric_prefixes
        self.metric_prefixes = (*before, prefix)
        try:
            yield
        finally:
            self.metric_prefixes = before

    # ---- Checkpoint Saving, Checkpoint Resuming ----

    def _save_rng_state(self, output_dir: str) -> None:
        """Save no random state: dropout masks are secret (``streams.forget_the_seed``)."""
        if self._known_streams is not None:
            super()._save_rng_state(output_dir)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Load no random state, for the same reason."""
        if self._known_streams is not None:
            super()._load_rng_state(checkpoint)

    # ---- Logging & Metrics ----

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with epsilon and noise, and with signal if it is measurable.

        ``PrivateCallback`` removes values that are not private.
        """
        if self.is_in_train and self.ledger is not None and self.args.private:
            logs["epsilon"] = self.privacy_spent().epsilon
            for group, strength in self.private_run.signal.take().items():
                of = f"_{group}" if group else ""
                measurable = {} if strength.signal == 0 else {f"signal{of}": strength.signal}
                logs |= {**measurable, f"noise{of}": strength.noise}
        shown = PrivateLogs(logs) if self.args.private else logs
        super().log(shown, start_time)
        if shown is not logs:  # the host returns ``logs`` as metrics
            logs.clear()
            logs.update(shown)

    def floating_point_ops(self, inputs: LogicalBatch) -> int:  # type: ignore[override]
        """Return 0 in a run with noise, because the count reveals the sizes of sampled batches."""
        batches = () if self.args.private else inputs
        count = super().floating_point_ops
        return sum(count(physical) for physical in batches)

    def privacy_spent(self) -> PrivacySpent:
        """Return an upper bound on the epsilon spent so far, and all that it depends on."""
        if self.train_dataset is None:
            raise PrivacyError(
                "train_dataset=None: nothing is trained, so no epsilon is spent. To train, pass "
                "train_dataset to the trainer."
            )
        return self.plan.spent(self.ledger)

    def releases_left(self) -> float:
        """Return how many more private updates the budget allows; infinite without a budget."""
        return self.plan.releases_left(self.ledger)

    # ---- Hyperparameter Search ----

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise ``PrivacyError``: the epsilon of one run does not cover a choice among several."""
        raise PrivacyError(
            "hyperparameter_search() compares the results of several runs, which the epsilon of "
            "one run does not cover. Tune on public data, or add up all runs (earlier_data='same')."
        )


def _as_evaluation(method: Callable[..., Any], prefix: str) -> Callable[..., Any]:
    """Return a method that lets metrics with its prefix be logged while it runs."""
    signature = inspect.signature(method)

    @wraps(method)
    def evaluation(self: DPGrapeMixin, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        with self._logging({**kwargs, **given.arguments}.get("metric_key_prefix", prefix)):
            return method(self, *args, **kwargs)

    return evaluation


def _mean_loss(
    function: Callable[..., Tensor],
    outputs: Any,
    labels: Tensor | None,
    num_items_in_batch: Any = None,
) -> Tensor:
    """Return the mean of a user's per-sample losses, for evaluation."""
    return function(outputs, labels, num_items_in_batch=num_items_in_batch).mean()
