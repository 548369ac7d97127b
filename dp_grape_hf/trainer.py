"""``DPGrapeTrainer``: the Hugging Face Trainer, replaced in the places where it breaks privacy.

The sections follow ``transformers.Trainer``, so that each override is found where the original is.
There is no arithmetic here: ``sampling`` draws, ``engine`` clips and adds noise, ``ledger``
records.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_callback import ProgressCallback
from transformers.trainer_utils import (
    TrainOutput,
    check_target_module_exists,
    seed_worker,
)

from dp_grape_hf.arguments import DPGrapeTrainingArguments
from dp_grape_hf.callbacks import (
    PrivacyProgress,
    StopAtBudget,
    last_whole_checkpoint,
    refuse_early_stopping,
)
from dp_grape_hf.engine import PrivateEngine, private_norm
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.layer_rules import MATRIX_LAYERS
from dp_grape_hf.ledger import LEDGER_NAME, Ledger
from dp_grape_hf.losses import LossFunction, with_three_arguments
from dp_grape_hf.model_card import render
from dp_grape_hf.optimizer import ProjectedAdam
from dp_grape_hf.per_sample import batch_size_of, make_engine
from dp_grape_hf.plan import PrivacyPlan, PrivacySpent, check_dataset
from dp_grape_hf.probing import (
    evaluating,
    refuse_mixing_collator,
    refuse_padding_dependence,
)
from dp_grape_hf.projection import ProjectionSchedule, default_targets
from dp_grape_hf.randomness import forget_the_seed, noise_generator, shared_sampling_generator
from dp_grape_hf.sampling import (
    EmptyDrawDataset,
    LogicalBatch,
    LogicalBatchCollator,
    PoissonBatchSampler,
    expected_steps_per_epoch,
)

logger = logging.getLogger(__name__)

EXAMINED = 16  # examples that the data collator is tried on before training

_UNNOISED = ("loss", "train_loss", "total_flos", "num_input_tokens_seen", "train_tokens_per_second")


@dataclass(frozen=True)
class TestGenerators:
    """Seeded streams for tests. Whoever knows them can subtract the noise: nothing is private."""

    sampling: torch.Generator
    noise: torch.Generator


class DPGrapeTrainer(Trainer):
    """A ``transformers.Trainer`` whose training is differentially private.

    Args:
        model: as for ``Trainer``; parameters with ``requires_grad`` are trained.
        args: a ``DPGrapeTrainingArguments``.
        compute_loss_func: if given, ``f(outputs, labels)`` or ``f(outputs, labels,
            num_items_in_batch)``, whose last argument is None in training, must return one loss
            per sample, (B,), each computed from that sample alone.
        test_generators: for tests only; marks the ledger as not private.
        **kwargs: everything else that ``Trainer`` takes, except ``optimizers``: the optimizer is
            ``ProjectedAdam``. For a scheduler of your own, set ``trainer.lr_scheduler`` to one made
            around ``trainer.create_optimizer()``.

    Guarantee:
        The weights after training are (epsilon, delta)-differentially private with respect to the
        training data, for adding or removing one example, with the numbers of ``privacy_spent()``.
        So are ledger, progress bar and logs, unless ``log_unnoised_statistics`` asks otherwise;
        metrics in the logs are functions of the evaluation data, which epsilon does not cover.

    Raises:
        PrivacyError: if arguments, model and data together cannot keep the promise.
    """

    args: DPGrapeTrainingArguments
    model: nn.Module

    def __init__(
        self,
        model: nn.Module | None = None,
        args: DPGrapeTrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        compute_loss_func: Callable[..., Tensor] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        test_generators: TestGenerators | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(args, DPGrapeTrainingArguments):
            raise PrivacyError(
                f"args is a {type(args).__name__}; pass a DPGrapeTrainingArguments, which carries "
                "target_epsilon and target_delta."
            )
        if tuple(optimizers) != (None, None) or kwargs.get("optimizer_cls_and_kwargs") is not None:
            raise PrivacyError(
                "An optimizer or its scheduler was passed, but private gradients are in projected "
                "coordinates, which only ProjectedAdam understands. Choose a schedule by "
                "lr_scheduler_type, or set trainer.lr_scheduler to one made around "
                "trainer.create_optimizer()."
            )
        check_dataset(train_dataset)
        adam = {
            "lr": args.learning_rate,
            "betas": (args.adam_beta1, args.adam_beta2),
            "eps": args.adam_epsilon,
        }
        super().__init__(
            model,
            args,
            data_collator,
            train_dataset,
            eval_dataset,
            processing_class,
            compute_loss_func=with_three_arguments(compute_loss_func),
            **kwargs | {"optimizer_cls_and_kwargs": (ProjectedAdam, adam)},
        )
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise PrivacyError(
                "DeepSpeed or FSDP was asked for by the launcher. Sharded weights are not "
                "supported yet; use accelerate launch with plain multi-process training."
            )
        if args.gradient_accumulation_steps != 1:
            raise PrivacyError(
                f"The accelerator's configuration asks for {args.gradient_accumulation_steps=}; "
                "set expected_batch_size instead. Each draw must be one update."
            )
        if args.n_gpu > 1:
            raise PrivacyError(
                f"{args.n_gpu=}: DataParallel splits a batch behind the engine's back. Start one "
                "process per GPU with accelerate launch, or set CUDA_VISIBLE_DEVICES to one GPU."
            )
        self.ledger: Ledger | None = None  # made when training starts
        self._test_generators = test_generators
        self._engine: PrivateEngine | None = None
        self._private_norm = torch.zeros(())
        self._per_sample = make_engine(args.engine, self.model, self._per_sample_loss())
        if train_dataset is not None:
            self.plan = PrivacyPlan(args, len(train_dataset))
        refuse_early_stopping(self.callback_handler.callbacks, args.eval_data_is_public)
        me = weakref.proxy(self)  # a cycle would keep the model alive after the trainer
        if any(type(c) is ProgressCallback for c in self.callback_handler.callbacks):
            self.remove_callback(ProgressCallback)
            self.add_callback(PrivacyProgress(lambda: me.privacy_spent()))
        self.add_callback(StopAtBudget(lambda: me.releases_left()))

    def _per_sample_loss(self) -> LossFunction | None:
        user = self.compute_loss_func
        if user is None:
            return None
        return lambda outputs, labels: user(outputs, labels, num_items_in_batch=None)

    def create_accelerator_and_postprocess(self) -> None:
        """Keeps DDP away, which would average ``p.grad``; the engine reduces the clipped sum."""
        super().create_accelerator_and_postprocess()
        accelerator = weakref.proxy(self.accelerator)  # no cycle, as for the callbacks
        self.accelerator.prepare_model = partial(
            Accelerator.prepare_model, accelerator, evaluation_mode=True
        )

    # ---- Data Loading ----

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
        generators = self._test_generators
        sampler = PoissonBatchSampler(
            len(dataset),
            self.plan.sample_rate,
            steps=expected_steps_per_epoch(self.plan.sample_rate),
            generator=generators.sampling
            if generators
            else shared_sampling_generator(device=args.device),
            rank=args.process_index,
            world_size=args.world_size,
        )
        return DataLoader(
            EmptyDrawDataset(dataset),
            batch_sampler=sampler,
            collate_fn=LogicalBatchCollator(collator, args.per_device_train_batch_size),
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and torch.accelerator.is_available(),
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            worker_init_fn=partial(
                seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index
            ),
        )

    # ---- Training ----

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> TrainOutput:
        """Resumes from the last checkpoint that is whole, if it is to find one itself.

        The original takes the last folder, which a run that was killed may have left half saved.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_whole_checkpoint(str(self.args.output_dir)) or True
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Leaves a run that was resumed when complete as it is; the original makes a step more."""
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*args, **kwargs)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> Any:
        """Starts or resumes ledger and mechanism, before the optimizer is made."""
        if max_steps != self.plan.steps:
            raise PrivacyError(
                f"The run would take {max_steps} steps, but the noise was calibrated for "
                f"{self.plan.steps}. Set max_steps or num_train_epochs before making the "
                "trainer."
            )
        refuse_early_stopping(self.callback_handler.callbacks, self.args.eval_data_is_public)
        self._start_engine(self._start_ledger(resume_from_checkpoint))
        if train_dataloader is not None:
            self._examine_collator(train_dataloader)
        if self._test_generators is None:
            forget_the_seed()
        prepared = super()._prepare_for_training(
            max_steps, train_dataloader, resume_from_checkpoint
        )
        scheduler = type(self.lr_scheduler).__name__
        follows = scheduler in ("ReduceLROnPlateau", "GreedyLR")
        if follows and not self.args.eval_data_is_public:
            raise PrivacyError(
                f"The {scheduler} follows a metric of the evaluation data, "
                "which no epsilon covers. Set eval_data_is_public=True if that data is public."
            )
        return prepared

    def _start_ledger(self, checkpoint: str | None) -> Ledger:
        args, writes, mechanism = self.args, self.is_world_process_zero(), self.plan.mechanism()
        live = Path(str(args.output_dir)) / LEDGER_NAME
        if checkpoint is not None:
            copy, updates = Path(checkpoint) / LEDGER_NAME, self.state.global_step
            self.ledger = Ledger.resume(live, copy, mechanism, updates=updates, write=writes)
        elif self.ledger is not None and self.ledger.steps and self.model_init is None:
            raise PrivacyError(
                f"This trainer has made {self.ledger.steps} releases on this model already, and "
                "the noise was calibrated for one run. Resume with resume_from_checkpoint, or make "
                "a new trainer: its budget then adds to the one spent."
            )
        else:
            if live.exists() and writes:
                logger.warning(
                    "%s is of an earlier run; it is kept under another name. If that run used the "
                    "same data, the budgets of both add up.",
                    live,
                )
            self.ledger = Ledger.start(mechanism, path=live if writes else None)
        if self._test_generators is not None:
            self.ledger.mark_not_private("test generators were passed: the noise is known")
        if args.log_unnoised_statistics:
            self.ledger.mark_not_private("un-noised training statistics were logged")
        if self.releases_left() <= 0 < self.plan.steps - self.state.global_step:
            raise PrivacyError(
                f"The budget is spent: {self.ledger.steps} releases of {self.plan.steps} were "
                f"made, {self.state.global_step} of which are in {checkpoint}; those made "
                "after it count as well. The checkpoint itself is private as it is; so are later "
                "ones of the same run."
            )
        return self.ledger

    def _start_engine(self, ledger: Ledger) -> None:
        args, device = self.args, self.args.device
        # Anew: model_init may have made another model, and parameters may have been frozen since.
        self._per_sample = make_engine(args.engine, self.model, self._per_sample_loss())
        if args.world_size > 1:
            for parameter in self.model.parameters():
                dist.broadcast(parameter.data, src=0)
        shapes = {name: tuple(self.model.get_parameter(name).shape) for name in self._targets()}
        self._schedule = ProjectionSchedule(
            shapes,
            family=args.projection,
            rank=args.projection_rank,
            update_steps=args.projection_update_steps,
            seed=args.projection_seed,
            device=device,
        )
        generators = self._test_generators
        self._engine = PrivateEngine(
            self._per_sample,
            max_grad_norm=args.max_grad_norm,
            noise_multiplier=self.plan.noise_multiplier,
            expected_batch_size=args.logical_batch_size,
            ledger=ledger,
            noise_generator=generators.noise if generators else noise_generator(device),
            distributed=args.world_size > 1,
        )

    def _examine_collator(self, loader: DataLoader[Any]) -> None:
        """Tries the collator on a few examples: it must not make examples depend on each other."""
        dataset: Any = loader.dataset
        step = max(1, len(dataset) // EXAMINED)
        examples = [dataset[i] for i in range(0, len(dataset), step)][:EXAMINED]
        collate = loader.collate_fn.collator  # type: ignore[union-attr]
        if len(examples) >= 3:
            refuse_mixing_collator(collate, examples)
        low = self.args.bf16 or any(p.dtype is not torch.float32 for p in self.model.parameters())

        @torch.no_grad()
        def losses(batch: Any) -> Tensor:
            batch = self._prepare_inputs(batch)
            with evaluating(self.model):
                return self._per_sample.losses(self.model, batch, batch_size_of(batch))

        refuse_padding_dependence(losses, collate, examples, tolerance=5e-2 if low else 1e-3)

    def _targets(self) -> list[str]:
        """Returns the names of the weights to project: ``optim_target_modules``, or our choice."""
        wanted = self.args.optim_target_modules
        if wanted is None:
            return default_targets(self.model, MATRIX_LAYERS)
        names = [
            f"{path}.weight"
            for path, module in self.model.named_modules()
            if isinstance(module, (*MATRIX_LAYERS, nn.Embedding))
            and (wanted == "all-linear" or check_target_module_exists(wanted, path))
        ]
        names = [name for name in names if name in self._per_sample.trainable]
        if not names:
            raise PrivacyError(
                f"optim_target_modules={wanted!r} matches no trainable linear layer or embedding. "
                "Give names or regular expressions of modules, or leave it out."
            )
        return names

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
        assert self._engine is not None
        if self.releases_left() <= 0:  # a callback may have overruled StopAtBudget
            raise PrivacyError(
                f"The budget of {self.plan.steps} releases is spent, and another was asked for. "
                "Take out the callback that resets control.should_training_stop."
            )
        model.train()
        engine = self._engine
        optimizer: ProjectedAdam = self.optimizer.optimizer  # type: ignore[union-attr]
        engine.begin(self._schedule.at(self.state.global_step))
        total = torch.zeros((), device=self.args.device)
        for physical, size in zip(inputs, inputs.sizes, strict=True):
            losses = engine.accumulate(self._prepare_inputs(physical))
            if len(losses) != size:
                raise PrivacyError(
                    f"The data collator made {len(losses)} rows of {size} examples, so a row is "
                    "not an example and its clipping bounds nothing. Turn packing off."
                )
            total += losses.sum()
        private_grads = engine.release()
        self._private_norm = private_norm(private_grads)
        trainable = self._per_sample.trainable
        optimizer.receive(
            {trainable[name]: value for name, value in private_grads.items()},
            {trainable[name]: projector for name, projector in engine.projectors.items()},
        )
        if not self.args.log_unnoised_statistics:
            return total.zero_()
        return total / max(inputs.num_examples, 1)

    # ---- Training Utilities ----

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """Reports the norm of the private gradient; clipping again would be wrong."""
        return self._private_norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Tensor:
        """Reports the norm of the private gradient, as ``_clip_grad_norm`` does."""
        return self._private_norm

    def _track_num_input_tokens(self, inputs: LogicalBatch) -> None:
        """Counts tokens of drawn batches only if un-noised statistics are asked for."""
        for physical in inputs if self.args.log_unnoised_statistics else ():
            super()._track_num_input_tokens(physical)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Returns the expected size of a draw, which throughput is reported for."""
        return self.args.logical_batch_size

    # ---- Checkpoint Saving, Checkpoint Resuming ----

    def _save_rng_state(self, output_dir: str) -> None:
        """Saves no random state: dropout masks are secret (``randomness.forget_the_seed``)."""
        if self._test_generators is not None:
            super()._save_rng_state(output_dir)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Loads no random state, for the same reason."""
        if self._test_generators is not None:
            super()._load_rng_state(checkpoint)

    # ---- Saving & Serialization ----

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        """Saves as the original does, with the ledger and the card beside the weights."""
        super()._save(output_dir, state_dict)
        if self.args.should_save and self.ledger is not None:
            folder = Path(str(self.args.output_dir) if output_dir is None else output_dir)
            self.ledger.snapshot(self.state.global_step).save(folder / LEDGER_NAME)
            self._write_card(folder)

    def _write_card(self, folder: Path) -> None:
        assert self.ledger is not None
        base = getattr(getattr(self.model, "config", None), "_name_or_path", "") or None
        if base is not None and os.path.exists(base):
            base = None  # a local path is nobody else's business
        (folder / "README.md").write_text(render(self.ledger, base), encoding="utf-8")

    # ---- Logging & Metrics ----

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds epsilon, and drops what is an un-noised function of the training data."""
        if not self.args.log_unnoised_statistics:
            for name in _UNNOISED:
                logs.pop(name, None)
        if self.is_in_train and self.ledger is not None and self.args.private:
            logs["epsilon"] = self.privacy_spent().epsilon
        super().log(logs, start_time)

    def floating_point_ops(self, inputs: LogicalBatch) -> int:  # type: ignore[override]
        """Returns 0 unless un-noised statistics are asked for: the count tells the drawn sizes."""
        batches = inputs if self.args.log_unnoised_statistics else ()
        return sum(super(DPGrapeTrainer, self).floating_point_ops(physical) for physical in batches)

    def privacy_spent(self) -> PrivacySpent:
        """Returns epsilon so far, an upper bound, and all it depends on."""
        if self.train_dataset is None:
            raise PrivacyError("train_dataset=None: nothing is trained, so nothing is spent.")
        return self.plan.spent(self.ledger)

    def releases_left(self) -> float:
        """Returns how many more releases the budget allows; infinite without a target epsilon."""
        return self.plan.releases_left(self.ledger)

    # ---- Hub Integration ----

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Writes our card; the original has a column of training losses."""
        if self.is_world_process_zero() and self.ledger is not None:
            self._write_card(Path(str(self.args.output_dir)))

    def push_to_hub(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuses: the original uploads the whole folder, logs and optimizer state included."""
        raise PrivacyError(
            "push_to_hub() is refused: it would upload optimizer state and logs with the weights. "
            "Upload the weights, config, tokenizer, privacy_ledger.json and README.md of "
            f"{self.args.output_dir} with huggingface_hub's upload_folder(allow_patterns=...)."
        )

    # ---- Hyperparameter Search ----

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuses: choosing the best of several private runs is not covered by any one ledger."""
        raise PrivacyError(
            "hyperparameter_search() chooses among runs by their results, which the epsilon of one "
            "run does not cover. Tune on public data, or account for every run and add them up."
        )
