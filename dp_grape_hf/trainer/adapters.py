"""DP-GRAPE for frozen weights: ``W + Z P^T``, for instance with a W in 4 or 8 bits.

A run of DP-GRAPE with one P adds ``Z P^T`` to a weight. This is LoRA's ``B A`` with a fixed A. Make
the adapter first, and ``method="dp_lora"`` trains Z.
"""

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
    """Return a model with a LoRA adapter whose A has the principal directions of layer inputs.

    Args:
        model: a model of transformers, quantised or not.
        rank: r, the rank of the adapter in all layers.
        tokenizer: as in ``synthetic_batches``.
        inputs: makes the public inputs on which the directions are measured; synthetic if None.
        seed: the seed of synthetic inputs.
        train_directions: whether to train A too, as in LoRA. Otherwise A stays P^T, B is Z, and
            the run equals DP-GRAPE with principal directions.
        **config: more options of ``peft.LoraConfig``. By default all linear layers except the
            output layer get an adapter. Adapters of a head start at random, as in LoRA.

    Guarantee:
        The adapter depends on the model, the inputs and the seed, and on no training example.
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
