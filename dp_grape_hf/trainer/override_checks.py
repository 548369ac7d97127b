"""The methods of the Trainer that a private run overrides, and a check that they exist.

Many of these methods are private to transformers, which may rename them in any release. Then the
override would never be called, without an error: a checkpoint would contain the random state again,
or a log the training loss. So a missing method raises an error, also with new versions of
transformers. ``tests/trainer/test_override_checks.py`` reads the Trainer of every supported
release, and checks that it has the methods, calls them, and passes the arguments of the overrides.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from dp_grape_hf.errors import PrivacyError

if TYPE_CHECKING:
    from transformers import Trainer as Host
else:

    class Host:
        """The last base class of this package: the classes after it are the host's."""


OVERRIDES = (
    *("create_accelerator_and_postprocess", "_move_model_to_device", "train", "_run_epoch"),
    *("_prepare_for_training", "create_optimizer", "_finalize_training"),
    *("get_batch_samples", "training_step", "floating_point_ops", "log"),
    *("get_train_dataloader", "get_eval_dataloader", "num_examples"),
    *("_clip_grad_norm", "_get_grad_norm", "_track_num_input_tokens"),
    *("get_total_train_batch_size", "evaluate", "predict", "evaluation_loop"),
    *("_save_checkpoint", "_save_rng_state", "_load_rng_state", "_save_optimizer_and_scheduler"),
    *("_load_from_checkpoint", "_load_best_model", "save_model", "_save"),
    *("init_hf_repo", "create_model_card", "push_to_hub"),  # the original uploads whole folders
    *("_push_from_checkpoint", "_finish_current_push", "hyperparameter_search"),
)
"""All methods of ``transformers.Trainer`` that ``DPGrapeMixin`` and its bases override."""


_FORBIDDEN = {
    **dict.fromkeys(
        ("get_train_dataloader", "_get_dataloader", "_get_train_sampler"),
        "epsilon holds only for batches that the trainer samples itself. Remove the override; to "
        "change examples, change train_dataset or data_collator, and for evaluation override "
        "get_eval_dataloader()",
    ),
    **dict.fromkeys(
        ("get_optimizer_cls_and_kwargs", "create_optimizer_and_scheduler"),
        "only the optimizer of the method takes private gradients. Remove the override, and "
        "choose by update_rule, learning_rate and lr_scheduler_type",
    ),
    **dict.fromkeys(
        ("_prepare_inputs", "_prepare_input", "get_batch_samples"),
        "code that mixes the rows of a batch there, as mixup does, lets one example change the "
        "gradients of others, and no check would see it. Remove the override, and change examples "
        "one by one in train_dataset or data_collator, or in the forward of the model",
    ),
}
"""Methods that a subclass must not override, and why."""


def is_hosts(method: Callable[..., Any]) -> bool:
    """Return whether this package, transformers or TRL defines a method."""
    return method.__module__.partition(".")[0] in ("dp_grape_hf", "transformers", "trl")


def require_overrides(trainer: Host) -> None:
    """Check that the host has all overridden methods, and that a subclass overrides none of them.

    Args:
        trainer: a trainer, whose host comes after all mixins.

    Raises:
        PrivacyError: the host has no such method, or a subclass overrides a forbidden method.
    """
    for name, why in _FORBIDDEN.items():
        if not is_hosts(getattr(trainer, name, require_overrides)):  # some are not in all versions
            raise PrivacyError(
                f"{type(trainer).__name__} overrides {name}(), which private training does not "
                f"allow: {why}."
            )
    host = super(Host, trainer)
    if missing := [f"{name}()" for name in OVERRIDES if not callable(getattr(host, name, None))]:
        raise PrivacyError(
            f"The Trainer of transformers {version('transformers')} has no {', '.join(missing)}, "
            "which a private run overrides. Another method may do its work now, without privacy. "
            "Install an older transformers."
        )
