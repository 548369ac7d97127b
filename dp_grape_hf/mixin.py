"""``DPGrapeMixin``: what a Trainer of transformers does otherwise when its training is private.

Put in front of a trainer (``Trainer``, ``Seq2SeqTrainer``, TRL's ``SFTTrainer``), it replaces the
places where that trainer breaks privacy. The sections follow ``transformers.Trainer``, so that each
override is found where the original is: construction and training here, data loading in
``drawing``, and from the training utilities on, where something leaves the run, in ``disclosure``.
There is no arithmetic here: ``assembly`` makes the parts that a method needs, ``sampling`` draws,
``engine`` clips and adds noise, ``ledger`` records.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.trainer_callback import ProgressCallback
from transformers.trainer_utils import TrainOutput

from dp_grape_hf.arguments import DPGrapeArguments, DPGrapeTrainingArguments
from dp_grape_hf.bad_data import explaining_bad_data
from dp_grape_hf.callbacks import (
    PrivacyProgress,
    SeeIterates,
    StopAtBudget,
    refuse_early_stopping,
)
from dp_grape_hf.checkpoints import (
    last_whole_checkpoint,
    require_whole_checkpoint,
    saving_a_checkpoint,
)
from dp_grape_hf.continuing import find_earlier, remember
from dp_grape_hf.disclosure import DisclosureMixin, TestGenerators, refuse_training_data
from dp_grape_hf.drawing import DrawingMixin
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.host_options import refuse_launcher, refuse_scheduler
from dp_grape_hf.ledger import Ledger
from dp_grape_hf.losses import LossFunction, loss_for, with_three_arguments
from dp_grape_hf.methods import METHODS, refuse_model
from dp_grape_hf.per_sample import batch_size_of
from dp_grape_hf.phases import Observer
from dp_grape_hf.plan import PrivacyPlan, check_dataset
from dp_grape_hf.probing import evaluating
from dp_grape_hf.processes import failing_together, from_first, require_agreement
from dp_grape_hf.randomness import forget_the_seed, noise_generator
from dp_grape_hf.run import Run
from dp_grape_hf.sampling import LogicalBatch
from dp_grape_hf.selfcheck import (
    check_gradients,
    collated_examples,
    examine_batch,
    examine_collator,
    examine_trainer_loss,
    require_each_once,
    warn_of_lost_updates,
)
from dp_grape_hf.trainer_loss import TrainerLoss


class DPGrapeMixin(DrawingMixin, DisclosureMixin):
    """Makes the training of a ``transformers.Trainer`` behind it differentially private.

    Args:
        model: as for the host; parameters with ``requires_grad`` are trained.
        args: an instance of ``arguments_class``.
        compute_loss_func: if given, ``f(outputs, labels)`` or ``f(outputs, labels,
            num_items_in_batch)``, whose last argument is None in training, must return one loss
            per sample, (B,), each computed from that sample alone.
        test_generators: for tests only; marks the ledger as not private.
        **kwargs: everything else that the host takes, except ``optimizers``: the optimizer is
            that of the method. For a scheduler of your own, set ``trainer.lr_scheduler`` to one
            made around ``trainer.create_optimizer()``.

    Attributes:
        private_run: the parts of the run; made anew when training starts.

    Guarantee:
        The weights after training are (epsilon, delta)-differentially private with respect to the
        training data, for adding or removing one example, or all of a unit's examples where
        ``privacy_unit_column`` is given, with the numbers of ``privacy_spent()``. So are ledger,
        progress bar and logs, unless ``log_unnoised_statistics`` asks otherwise; metrics in the
        logs are functions of the evaluation data, which epsilon does not cover. What an example
        contributes must be computed from its own data and from coins that are its own or public
        (``coins``): model and collator are examined for that before the first release.

    Raises:
        PrivacyError: if arguments, model and data together cannot keep the promise.
    """

    arguments_class: ClassVar[type[DPGrapeArguments]] = DPGrapeTrainingArguments
    observer: Observer | None = None
    """Looks on at the steps of runs that are made from now on."""

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
        test_generators: TestGenerators | None = None,
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
                "coordinates, which only ProjectedOptimizer understands. Choose a schedule by "
                "lr_scheduler_type, or set trainer.lr_scheduler to one made around "
                "trainer.create_optimizer()."
            )
        if compute_loss_func is not None and args.label_smoothing_factor:
            raise PrivacyError(
                f"label_smoothing_factor={args.label_smoothing_factor!r} and a compute_loss_func "
                "were given. Smooth in your own loss, or leave it out."
            )
        check_dataset(train_dataset)
        refuse_training_data(eval_dataset, [train_dataset], args)
        self._given_train_dataset = train_dataset
        super().__init__(
            model, args, data_collator, train_dataset, eval_dataset, processing_class, **kwargs
        )
        refuse_launcher(self)
        self._user_loss = with_three_arguments(compute_loss_func)
        if self._user_loss is not None:
            self.compute_loss_func = partial(_mean_loss, self._user_loss)  # in evaluation only
        refuse_model(args.method, self.model)
        self._test_generators = test_generators
        self.private_run = self._make_run()
        prepared: Any = self.train_dataset  # which the host may have made of what was passed
        if prepared is not None:
            check_dataset(prepared)
            self.plan = PrivacyPlan(args, self._dataset_size, find_earlier(self.model, args))
        self._add_callbacks()

    def _add_callbacks(self) -> None:
        refuse_early_stopping(self.callback_handler.callbacks, self.args.eval_data_is_public)
        me = weakref.proxy(self)  # a cycle would keep the model alive after the trainer
        if any(type(c) is ProgressCallback for c in self.callback_handler.callbacks):
            self.remove_callback(ProgressCallback)
            self.add_callback(PrivacyProgress(lambda: me.privacy_spent()))
        self.add_callback(StopAtBudget(lambda: me.releases_left()))
        if self.args.released_iterate != "last":
            self.add_callback(SeeIterates(lambda: me.private_run.iterate.update()))

    def _make_run(self) -> Run:
        """Makes the parts of a run for the model as it is, which refuses what does not fit."""
        loss: LossFunction | None = None
        if (user := self._user_loss) is not None:
            loss = partial(user, num_items_in_batch=None)

        elif not _is_hosts(type(self).compute_loss):
            me = weakref.proxy(self)
            loss = TrainerLoss(self.model, partial(type(self).compute_loss, me))
        elif self.args.label_smoothing_factor:
            loss = loss_for(self.model, label_smoothing=self.args.label_smoothing_factor)
        run = Run(self.args, self.model, loss, self.observer)
        self.optimizer_cls_and_kwargs = run.optimizer_cls_and_kwargs
        return run

    def create_accelerator_and_postprocess(self) -> None:
        """Keeps DDP away, which would average ``p.grad``; the engine reduces the clipped sum."""
        super().create_accelerator_and_postprocess()
        accelerator = weakref.proxy(self.accelerator)  # no cycle, as for the callbacks
        self.accelerator.prepare_model = partial(
            Accelerator.prepare_model, accelerator, evaluation_mode=True
        )

    # ---- Training ----

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> TrainOutput:
        """Resumes from the last checkpoint that is whole, if it is to find one itself.

        The original takes the last folder, which a run that was killed may have left half saved.
        ``training_loss`` of what is returned is None: the loss is no private quantity.
        """
        if resume_from_checkpoint is True:
            folder = str(self.args.output_dir)
            resume_from_checkpoint = from_first(lambda: last_whole_checkpoint(folder)) or True
        elif resume_from_checkpoint:
            require_whole_checkpoint(resume_from_checkpoint)
        try:
            with self._keeping_state(resumes=bool(resume_from_checkpoint)):
                output = super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.private_run.stop()
        keep = self.args.log_unnoised_statistics
        return output if keep else output._replace(training_loss=None)  # type: ignore[arg-type]

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Leaves a run that was resumed when complete as it is; the original makes a step more."""
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*args, **kwargs)

    def start(self, loader: DataLoader[Any] | None = None) -> nn.Module:
        """Starts a run without ``train()``, for a loop of one's own around ``training_step``.

        Args:
            loader: of ``get_train_dataloader()``. Collator, losses and gradients are examined on
                its first examples before there is a release; without it they are not.

        Returns:
            The model to pass to ``training_step``.
        """
        model: nn.Module = self._prepare_for_training(self.plan.steps, loader, None)[0]
        return model

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> Any:
        """Starts or resumes ledger and mechanism, before the optimizer is made."""
        trainable = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.plan.require_agreement(self._dataset_size, self.state.global_step, trainable)
        units = self._read_units_again()
        if units is not None:
            require_agreement({}, unsaid={"whose the examples are": units.checksum})
        if max_steps != self.plan.steps:
            raise PrivacyError(
                f"The run would take {max_steps} steps, but the noise was calibrated for "
                f"{self.plan.steps}. Set max_steps or num_train_epochs before making the "
                "trainer."
            )
        refuse_early_stopping(self.callback_handler.callbacks, self.args.eval_data_is_public)
        self._start_run(self._start_ledger(resume_from_checkpoint))
        if self._test_generators is None:
            forget_the_seed()
        prepared = super()._prepare_for_training(
            max_steps, train_dataloader, resume_from_checkpoint
        )
        refuse_scheduler(self.lr_scheduler, self.args.eval_data_is_public)
        run = self.private_run
        assert run.optimizer is not None
        require_each_once(run.optimizer, self.model, run.trainable)
        if not self.args.float32_updates and not METHODS[self.args.method].zeroth_order:
            warn_of_lost_updates(run.optimizer, run.trainable)
        if train_dataloader is not None:
            with (
                failing_together(run.abandon),
                explaining_bad_data(self.train_dataset, "Trying the first examples"),
            ):
                self._examine(train_dataloader)
        run.keep_updates_apart()
        return prepared

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Creates the optimizer of the method; the projection may be a part of its state."""
        new = self.optimizer is None
        optimizer = super().create_optimizer(*args, **kwargs)
        self.private_run.take(getattr(optimizer, "optimizer", optimizer), new=new)
        return optimizer

    def _finalize_training(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Moves what is kept beside the weights into them, before the best may be loaded."""
        self.private_run.stop()
        if self.private_run.iterate is not None:
            self.private_run.iterate.release_()
        return super()._finalize_training(*args, **kwargs)

    def _start_ledger(self, checkpoint: str | None) -> Ledger:
        before, updates = self.ledger if self.model_init is None else None, self.state.global_step
        self.ledger = Ledger.shared(
            lambda: self.plan.start_ledger(checkpoint, updates=updates, before=before)
        )
        self.plan.use_noise_of(self.ledger)
        if self._test_generators is not None:
            self.ledger.mark_not_private("test generators were passed: the noise is known")
        if self.args.log_unnoised_statistics:
            self.ledger.mark_not_private("un-noised training statistics were logged")
        return remember(self.model, self.ledger)

    def _start_run(self, ledger: Ledger) -> None:
        args = self.args
        # Anew: model_init may have made another model, and parameters may have been frozen since.
        self.private_run = run = self._make_run()
        if args.world_size > 1:
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                dist.broadcast(tensor.data, src=0)
        generators = self._test_generators
        noise = generators.noise if generators else noise_generator(args.device, args.secure_noise)
        run.start(ledger, noise)

    def _low_precision(self) -> bool:
        return self.args.bf16 or any(p.dtype is not torch.float32 for p in self.model.parameters())

    def _examine(self, loader: DataLoader[Any]) -> None:
        """Tries collator, losses and gradients on a few examples, before the first release."""
        args, step, row = self.args, self.state.global_step, METHODS[self.args.method]
        low = self._low_precision()
        if row.private:
            examine_collator(self._losses_in_evaluation, loader, low, self._units is not None)
        batch = collated_examples(loader, args.per_device_train_batch_size)
        batch = self._prepare_inputs(batch)
        run, per_sample = self.private_run, self.private_run.per_sample
        if isinstance(per_sample.loss, TrainerLoss):
            examine_trainer_loss(per_sample, per_sample.loss, batch)
        if row.private:
            projectors = {} if run.schedule is None else run.schedule.at(step)
            per_sample.use(step)
            self.model.train()
            examine_batch(per_sample, batch, projectors, low)
            if args.self_check and not row.zeroth_order:
                check_gradients(per_sample, batch, projectors, low)

    @torch.no_grad()
    def _losses_in_evaluation(self, batch: Any) -> Tensor:
        batch = self._prepare_inputs(batch)
        with evaluating(self.model):
            return self.private_run.per_sample.losses(self.model, batch, batch_size_of(batch))

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Draws as the original does; data set or collator may fail in one process only."""
        with (
            failing_together(self.private_run.abandon),
            explaining_bad_data(self.train_dataset, "Fetching a batch"),
        ):
            return super().get_batch_samples(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Says what to do where the original would fail for want of space."""
        with saving_a_checkpoint(str(self.args.output_dir)):
            super()._save_checkpoint(*args, **kwargs)

    def training_step(
        self,
        model: nn.Module,
        inputs: LogicalBatch,  # type: ignore[override]
        num_items_in_batch: Any = None,
    ) -> Tensor:
        """Makes one release from one Poisson draw, however many physical batches it takes.

        The original would differentiate one loss averaged over the batch. Returns 0 instead of the
        training loss, which is an un-noised function of the data.
        """
        with (
            failing_together(self.private_run.abandon),
            explaining_bad_data(self.train_dataset, "Computing the gradients of a batch"),
        ):
            return self._release(model, inputs)

    def _release(self, model: nn.Module, inputs: LogicalBatch) -> Tensor:
        if self.releases_left() <= 0:  # a callback may have overruled StopAtBudget
            raise PrivacyError(
                f"The budget of {self.plan.steps} releases is spent, and another was asked for. "
                "Take out the callback that resets control.should_training_stop."
            )
        model.train()
        done = self.private_run.step(self.state.global_step, inputs, self._prepare_inputs)
        self._private_norm = done.norm
        if not self.args.log_unnoised_statistics:
            return done.loss.zero_()
        return done.loss / max(inputs.num_examples, 1)


def _is_hosts(method: Callable[..., Any]) -> bool:
    """Whether a method of a trainer is none of the user's own."""
    return method.__module__.partition(".")[0] in ("dp_grape_hf", "transformers", "trl")


def _mean_loss(
    function: Callable[..., Tensor],
    outputs: Any,
    labels: Tensor | None,
    num_items_in_batch: Any = None,
) -> Tensor:
    """Returns the mean of a user's per-sample losses, which is what evaluation reports."""
    return function(outputs, labels, num_items_in_batch=num_items_in_batch).mean()
