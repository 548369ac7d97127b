"""DP-GRAPE beside weights that cannot move: ``W + Z P^T`` with a W in 4 or 8 bits, say.

A run of DP-GRAPE with one P adds ``Z P^T`` to a weight, which is LoRA's ``B A`` with an A that
stays as it is. Where W itself can be trained, ``method="dp_grape"`` does so, and
``save_as="adapter"`` saves the change. Where it cannot, the adapter is there from the start, and
``method="dp_lora"`` trains Z.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from dp_grape_hf.gradients import evaluating, keep_laid_out_for_training
from dp_grape_hf.projections import Batches, principal_directions, synthetic_batches


def principal_adapter(
    model: Any,
    rank: int = 16,
    *,
    tokenizer: Any = None,
    inputs: Batches | None = None,
    seed: int = 0,
    train_directions: bool = False,
    **config: Any,
) -> Any:
    """Returns a model in a LoRA adapter whose A has the principal directions of what layers read.

    Args:
        model: of transformers, quantised or not.
        rank: r, of all layers.
        tokenizer: as in ``synthetic_batches``.
        inputs: what the directions are measured on, which must be public; synthetic if None.
        seed: of synthetic inputs.
        train_directions: whether A is trained too, as in LoRA. Otherwise it is P^T for good, B is
            Z, and the change is that of DP-GRAPE with principal directions.
        **config: more for ``peft.LoraConfig``; all linear layers but the output's get an adapter.
            Those of a head start at random, as in LoRA, and are trained.

    Guarantee:
        The adapter is a function of the model, the inputs and the seed: of no training example.
    """
    from peft import LoraConfig, get_peft_model  # not above, because that takes seconds

    batches = inputs or partial(synthetic_batches, model, tokenizer, seed)
    options: dict[str, Any] = {"target_modules": "all-linear", "lora_alpha": rank} | config
    adapted: Any = get_peft_model(model, LoraConfig(r=rank, **options))
    base = adapted.get_base_model()
    body = {*getattr(base, "base_model", base).modules()}
    layers = {
        f"{path}.base_layer.weight": layer
        for path, layer in base.named_modules()
        if "default" in getattr(layer, "lora_A", ()) and layer in body
    }
    keep_laid_out_for_training(base)
    with evaluating(base):
        found = principal_directions(base, dict.fromkeys(layers, rank), batches, seed)
    with torch.no_grad():
        for name, principal in found.items():
            a = layers[name].lora_A["default"].weight
            a.copy_(principal.directions.T).requires_grad_(train_directions)
    return adapted
