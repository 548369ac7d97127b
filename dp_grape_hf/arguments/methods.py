"""The table of methods: what each is, as settings of one mechanism; and how plug-ins add rows.

All of them use one sampler, one clipping and one source of noise (``mechanism``), one accountant
and one ledger, so one argument about sensitivity covers them: a sample contributes a vector of norm
at most C to the sum that meets the noise. Methods differ in what that vector is (the gradient, its
projection, the answer to a query), and in what is done with the private sum afterwards, which is
post-processing and free. A plug-in can choose these two, and nothing else.

To add a method to the package, add a row. ``register_method`` adds one from outside.
"""

from __future__ import annotations

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
    """What a plug-in does with private sums: post-processing, which costs no privacy.

    One object is made for each run. It sees private updates only, and no sample.

    Attributes:
        projection: a projection whose state is saved with the optimizer's; None without any.
    """

    projection: SavedProjection | None = None

    def optimizer(self, usual: OptimizerAndOptions) -> OptimizerAndOptions:
        """Returns the optimizer's class and its options.

        Args:
            usual: ``ProjectedOptimizer``, with the options that the arguments ask for.
        """
        return usual

    def hand_over(self, optimizer: Any, step: int, private_grads: Mapping[str, Tensor]) -> None:
        """Gives the optimizer a private update; it moves the weights when it is stepped.

        Args:
            optimizer: an object of the class that ``optimizer`` returned.
            step: the number of the step, from 0.
            private_grads: the private update by name, of the engine's ``released_shapes``.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Method:
    """A row of the table.

    Args:
        title: what people call it.
        source: where it is defined.
        private: whether samples are clipped and noise is added. If not, epsilon is infinite.
        projection: the family of projections that is used unless another is asked for.
        projections: the families that may be asked for.
        update_rule: the one that is used unless another is asked for.
        adapter: whether it trains a low-rank adapter, which PEFT has put into the model.
        query: of a plug-in: makes the engine whose vectors replace per-sample gradients, given
            arguments, model and loss. Of a private method it is a ``QueryEngine``.
        update: of a plug-in: makes what is done with private sums, given arguments and engine.
            Per-sample gradients are then not projected: the projection is the plug-in's.
        refuse: of a plug-in: raises ``PrivacyError`` for arguments that it cannot take.
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
        """Whether it projects anything: samples' gradients or, in a plug-in, private sums."""
        return set(self.projections) != {"identity"}

    @property
    def projected_at_capture(self) -> bool:
        """Whether each sample's gradient is projected, in the backward pass."""
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
"""Name -> row: the methods of the package, and those that were registered."""


def register_method(name: str, method: Method) -> None:
    """Adds a plug-in's row to the table, so that ``method=name`` asks for it.

    Guarantee:
        A plug-in has no part in clipping, noise, sampling, accounting and the ledger: these act on
        the vectors that its query returns, as on any gradient. ``QueryEngine`` says what is asked
        of a query.

    Raises:
        PrivacyError: if the name has another row already.
    """
    if _METHODS.setdefault(name, method) != method:
        raise PrivacyError(
            f"register_method({name!r}): this name belongs to {_METHODS[name].title}. Choose "
            "another name."
        )


def row_of(method: str) -> Method:
    """Returns the row of a method.

    Raises:
        PrivacyError: if there is none.
    """
    if method not in METHODS:
        raise PrivacyError(
            f"{method=} must be one of {sorted(METHODS)}. The paper's comparisons (dpzero, "
            "dp_galore and others) are plug-ins: run `import recipes.paper` first, in a checkout "
            "of the repository."
        )
    return METHODS[method]


def _refuse_draws_of_a_batch(model: nn.Module) -> None:
    """Refuses what a configuration lets a model draw once for all rows of a batch.

    Running the model would tell as well, but one draw after another.
    """
    config: dict[str, Any] = getattr(getattr(model, "config", None), "__dict__", {})
    off: dict[str, Any] = {
        name: 0.0 for name in config if name.endswith("layerdrop") and config[name]
    }
    masks = any(config.get(f"mask_{of}_prob") for of in ("time", "feature"))
    if config.get("apply_spec_augment") and masks:
        off["apply_spec_augment"] = False
    if off:
        found = " and ".join(f"{name}={config[name]!r}" for name in off)
        needed = ", ".join(f"{name}={value!r}" for name, value in off.items())
        raise PrivacyError(
            f"{found} in the model's config: one draw for a whole batch couples its examples. Load "
            f"the model with from_pretrained(..., {needed})."
        )


def refuse_model(method: str, model: nn.Module) -> None:
    """Refuses a model that a method cannot train, or that would make it another method.

    Raises:
        PrivacyError: for weights that are spread over processes or devices; and for an adapter
            method, if the model has no adapter or trains other weights.
    """
    places: dict[torch.device, str] = {}
    for name, weight in model.named_parameters():
        if isinstance(weight, DTensor):
            raise PrivacyError(
                f"{name} is spread over processes, by tp_plan or distributed_config say: clipping "
                "would see a part of each gradient. Load all of it in every process. If it is "
                'too large for a device, fsdp=True and fsdp_config={"version": 2} spread it.'
            )
        places.setdefault(weight.device, name)
    if len(places) > 1:
        found = ", ".join(f"{name} on {device}" for device, name in places.items())
        raise PrivacyError(
            f"The model's weights are on several devices ({found}), by device_map say. Load it "
            "without; several processes then train it together, each on a device. If it is too "
            'large for one, fsdp=True and fsdp_config={"version": 2} spread its weights.'
        )
    if METHODS[method].private:
        _refuse_draws_of_a_batch(model)
    if not METHODS[method].adapter:
        return
    trainable = [name for name, weight in model.named_parameters() if weight.requires_grad]
    if not any("lora_" in name for name in trainable):
        raise PrivacyError(
            f"{method=} trains a LoRA adapter, and the model has none. Make it with "
            "peft.get_peft_model(model, LoraConfig(...)), or choose method='dp_adam'."
        )
