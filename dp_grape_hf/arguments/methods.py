"""The table of methods: what each of the paper's comparisons is, as settings of one mechanism.

All of them use one sampler, one clipping and one source of noise (``mechanism``), one accountant
and one ledger, so one argument about sensitivity covers them: a sample contributes a vector of norm
at most C to the sum that meets the noise. Methods differ in what that vector is (the gradient, its
projection, a finite difference), and in what is done with the private sum afterwards, which is
post-processing and free.

To add a method, add a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dp_grape_hf.errors import Choice, PrivacyError


class Projected(Choice):
    """Where gradients are projected: each sample's, in the backward pass; or their private sum."""

    AT_CAPTURE = "capture"
    AFTER_RELEASE = "release"


@dataclass(frozen=True)
class Method:
    """A row of the table.

    Args:
        title: what people call it.
        source: where it is defined.
        private: whether samples are clipped and noise is added. If not, epsilon is infinite.
        projected: at capture, after the release, or None for full gradients.
        projection: the family that is used unless another is asked for.
        update_rule: the one that is used unless another is asked for.
        adapter: whether it trains a low-rank adapter, which PEFT has put into the model.
        zeroth_order: whether gradients are replaced by finite differences along random directions.
    """

    title: str
    source: str
    private: bool = True
    projected: Projected | None = None
    projection: str = "identity"
    update_rule: str = "adam"
    adapter: bool = False
    zeroth_order: bool = False


METHODS: Mapping[str, Method] = {
    "dp_grape": Method(
        "DP-GRAPE",
        "paper, Algorithms 1 and 2; there with projection gaussian",
        projected=Projected.AT_CAPTURE,
        projection="principal",
    ),
    "dp_adam": Method("DP-Adam", "paper, Appendix on DP-Adam; Abadi et al. 2016"),
    "dp_sgd": Method("DP-SGD", "Abadi et al. 2016", update_rule="sgd"),
    "dp_galore": Method(
        "naive DP-GaLore",
        "paper, Appendix on DP-GaLore; Zhao et al. 2024",
        projected=Projected.AFTER_RELEASE,
        projection="svd",
    ),
    "d2p2": Method(
        "D2P2-SGD",
        "Jiang et al. 2024",
        projected=Projected.AFTER_RELEASE,
        projection="gaussian",
        update_rule="sgd",
    ),
    "dp_lora": Method("DP-LoRA", "Yu et al. 2021", adapter=True),
    "dpzero": Method(
        "DPZero", "Zhang et al. 2024, Algorithm 2", update_rule="sgd", zeroth_order=True
    ),
    "dp_zo": Method("DP-ZO", "Tang et al. 2024", update_rule="sgd", zeroth_order=True),
    "adam": Method("Adam", "Kingma and Ba 2014", private=False),
    "lora": Method("LoRA", "Hu et al. 2021", private=False, adapter=True),
    "galore": Method(
        "GaLore",
        "Zhao et al. 2024",
        private=False,
        projected=Projected.AFTER_RELEASE,
        projection="svd",
    ),
    "flora": Method(
        "FLORA",
        "Hao et al. 2024",
        private=False,
        projected=Projected.AFTER_RELEASE,
        projection="gaussian",
    ),
    "mezo": Method(
        "MeZO", "Malladi et al. 2023", private=False, update_rule="sgd", zeroth_order=True
    ),
}


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
