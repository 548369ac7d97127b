"""The table of training methods, to which plug-ins can add rows.

All methods use the same sampler, clipping, noise (``mechanism``), accountant and ledger. So one
sensitivity argument covers them: a sample contributes a vector of norm at most C to the sum to
which noise is added. Methods differ in two things. One is the vector: the gradient, its projection
or the vector of a query. The other is the use of the private sum, which is post-processing and
costs no privacy. A plug-in can choose only these two.

To add a method to the package, add a row. ``register_method`` adds one from outside.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.gradients import LossFunction, PerSampleEngine
from dp_grape_hf.projections import PRINCIPAL, PROJECTIONS, SavedProjection

OptimizerAndOptions = tuple[type[torch.optim.Optimizer], dict[str, Any]]


class Update:
    """Base class for a plug-in's use of private updates: post-processing, which costs no privacy.

    One object is made for each run. It receives private updates only, and no samples.

    Attributes:
        projection: a projection whose state is saved with the optimizer's state; None if there is
            no projection.
    """

    projection: SavedProjection | None = None

    def optimizer(self, usual: OptimizerAndOptions) -> OptimizerAndOptions:
        """Return the class of the optimizer and its options.

        Args:
            usual: ``ProjectedOptimizer``, with options from the training arguments.
        """
        return usual

    def hand_over(self, optimizer: Any, step: int, private_grads: Mapping[str, Tensor]) -> None:
        """Pass a private update to the optimizer, before ``optimizer.step()``.

        Args:
            optimizer: an object of the class that ``optimizer`` returned.
            step: the number of the step, from 0.
            private_grads: name -> private update, with the engine's ``released_shapes``.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Method:
    """A row of the table of methods.

    Args:
        title: the name of the method in the literature.
        source: where it is defined.
        private: whether gradients are clipped and noise is added. If not, epsilon is infinite.
        projection: the default of the option ``projection``.
        projections: the allowed values of ``projection``.
        update_rule: the default of the option ``update_rule``.
        adapter: whether the method trains a LoRA adapter that PEFT added to the model.
        query: of a plug-in: returns the engine whose vectors replace per-sample gradients, given
            arguments, model and loss. For a private method it must return a ``QueryEngine``.
        update: of a plug-in: returns an ``Update``, given arguments and engine. Per-sample
            gradients are then not projected, because the plug-in projects private updates.
        refuse: of a plug-in: raises ``PrivacyError`` for arguments that it does not support.
    """

    title: str
    source: str
    private: bool = True
    projection: str = "identity"
    projections: Collection[str] = ("identity",)
    update_rule: str = "adam"
    adapter: bool = False
    query: Callable[[Any, nn.Module, LossFunction | None], PerSampleEngine] | None = None
    update: Callable[[Any, PerSampleEngine], Update] | None = None
    refuse: Callable[[Any], None] | None = None

    @property
    def projected(self) -> bool:
        """True if the method projects per-sample gradients or, in a plug-in, private updates."""
        return set(self.projections) != {"identity"}

    @property
    def projected_at_capture(self) -> bool:
        """True if the method projects per-sample gradients in the backward pass."""
        return self.projected and self.update is None


_METHODS = {
    "dp_grape": Method(
        "DP-GRAPE",
        "paper, Algorithms 1 and 2; there with projection gaussian",
        projection=PRINCIPAL,
        projections=(PRINCIPAL, *PROJECTIONS),
    ),
    "dp_adam": Method("DP-Adam", "paper, Appendix on DP-Adam; Abadi et al. 2016"),
    "dp_sgd": Method("DP-SGD", "Abadi et al. 2016", update_rule="sgd"),
    "dp_lora": Method("DP-LoRA", "Yu et al. 2021", adapter=True),
}
METHODS: Mapping[str, Method] = MappingProxyType(_METHODS)
"""Name -> row: the methods of the package and the registered plug-ins."""


def register_method(name: str, method: Method) -> None:
    """Add a plug-in's row to the table, so that ``method=name`` selects it.

    Guarantee:
        A plug-in does not change clipping, noise, sampling, accounting or the ledger: they treat
        the vectors of its query like gradients. ``QueryEngine`` documents the requirements on a
        query.

    Raises:
        PrivacyError: if the name already has another row.
    """
    if _METHODS.setdefault(name, method) != method:
        raise PrivacyError(
            f"register_method({name!r}): this name already belongs to {_METHODS[name].title}. "
            "Choose another name."
        )


def row_of(method: str) -> Method:
    """Return the row of a method.

    Raises:
        PrivacyError: if there is no such method.
    """
    if method not in METHODS:
        raise PrivacyError(
            f"{method=} must be one of {sorted(METHODS)}. The paper's comparisons (dpzero, "
            "dp_galore and others) are plug-ins: run `import recipes.paper` first, in a checkout "
            "of the repository."
        )
    return METHODS[method]


def _refuse_draws_of_a_batch(model: nn.Module) -> None:
    """Refuse a config with which the model shares a random draw between the rows of a batch.

    Running the model would find such draws too, but only one at a time.
    """
    config: dict[str, Any] = getattr(getattr(model, "config", None), "__dict__", {})
    off: dict[str, Any] = {
        name: 0.0 for name in config if name.endswith("layerdrop") and config[name]
    }
    masks = any(config.get(f"mask_{of}_prob") for of in ("time", "feature"))
    if config.get("apply_spec_augment") and masks:
        off["apply_spec_augment"] = False
    if off:
        shared = " and ".join(f"{name}={config[name]!r}" for name in off)
        needed = ", ".join(f"{name}={value!r}" for name, value in off.items())
        raise PrivacyError(
            f"{shared} in the model's config: the examples of a batch would share a random draw, "
            "so an example's gradient would depend on its batch. Load the model with "
            f"from_pretrained(..., {needed})."
        )


def refuse_model(method: str, model: nn.Module) -> None:
    """Refuse a model that a method cannot train.

    Raises:
        PrivacyError: if weights are sharded or on several devices, if the examples of a batch share
            random draws, or if a method for adapters has no adapter to train.
    """
    places: dict[torch.device, str] = {}
    for name, weight in model.named_parameters():
        if isinstance(weight, DTensor):
            raise PrivacyError(
                f"{name} is sharded over processes, for instance by tp_plan or distributed_config, "
                "so clipping would see only a part of each gradient. Load the whole model in every "
                "process. If it is too large for a device, set fsdp=True and "
                'fsdp_config={"version": 2}, which shard it.'
            )
        places.setdefault(weight.device, name)
    if len(places) > 1:
        listed = ", ".join(f"{name} on {device}" for device, name in places.items())
        raise PrivacyError(
            f"The model's weights are on several devices ({listed}), for instance by device_map. "
            "Load it without device_map, and start one process for each device. If the model is "
            'too large for one device, set fsdp=True and fsdp_config={"version": 2}, which shard '
            "its weights."
        )
    if METHODS[method].private:
        _refuse_draws_of_a_batch(model)
    if not METHODS[method].adapter:
        return
    trainable = [name for name, weight in model.named_parameters() if weight.requires_grad]
    if not any("lora_" in name for name in trainable):
        raise PrivacyError(
            f"{method=} trains a LoRA adapter, but the model has none. Add one by "
            "peft.get_peft_model(model, LoraConfig(...)), or choose method='dp_adam'."
        )
