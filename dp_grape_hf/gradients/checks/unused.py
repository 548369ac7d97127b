"""Freezing of parameters that come with a model and take no part in its loss.

Examples are the mask token of a model that masks nothing, the embedding of SpecAugment if it is
off, and a decoder's attention to an encoder that does not exist. Noise alone would train such a
parameter. The list of trained parameters is published, so no private example may influence it. So
the choice uses the arguments of ``forward`` and synthetic or public inputs only. Parameters that
only some examples use (an expert, a branch that depends on a value) are not frozen.

The autograd graph of a forward pass shows which parameters the outputs depend on. No gradient is
computed.
"""

import logging
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from inspect import Parameter, signature
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

from dp_grape_hf.errors import ERRORS, UnsupportedModelError
from dp_grape_hf.gradients.checks.guards import in_mode, keeping_random_state
from dp_grape_hf.gradients.engine import PerSampleEngine
from dp_grape_hf.gradients.losses.losses import HeadLoss, LossFunction
from dp_grape_hf.sharding import parameters_in_passes

logger = logging.getLogger(__name__)


def freeze_unused(
    model: nn.Module, loss: LossFunction, batches: Iterable[Mapping[str, Any]]
) -> list[str]:
    """Freeze the trainable parameters that the loss does not depend on.

    A parameter is not frozen if a parameter with the same name up to numbers takes part: it may
    belong to an expert that received no token. It is frozen all the same if its module ran in every
    pass. Nothing is frozen if ``forward`` (with PEFT, of the inner model) has an argument that no
    batch contains and that may bring a parameter into the loss; labels, masks and positions do not
    count. Inputs that only ``**kwargs`` accepts are ignored.

    Args:
        model: the model. Its mode, its buffers and the random state do not change.
        loss: loss of the model's outputs; all outputs count, unless it is the loss of a head.
        batches: public inputs of the model. One row of the first and of the second batch is used.

    Returns:
        The names of the frozen parameters, which are also logged.

    Guarantee:
        The result is a function of the model, its loss and the batches, and of no training example.
    """
    owners = {
        f"{path}.{local}".lstrip("."): (module, parameter)
        for path, module in model.named_modules()
        for local, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad
    }
    passes: list[tuple[set[int], set[nn.Module]]] = []
    try:
        takes = signature(getattr(model, "get_base_model", lambda: model)().forward).parameters
        given = [_completed(batch, takes) for batch in islice(batches, 2)]
        if any(_may_reach(p) for name, p in takes.items() if not any(name in x for x in given)):
            return []  # the engine will refuse unused parameters instead
        for inputs, training in product(given, (False, True)):
            passes.append(_run(model, loss, inputs, training))
    except ERRORS:
        return []
    reached = {
        name for name, (_, p) in owners.items() if any(id(p) in found for found, _ in passes)
    }
    if not reached:
        return []  # no batch, or no parameter is trained
    ran_always = set.intersection(*(ran for _, ran in passes))
    modules_alike: defaultdict[str, set[nn.Module]] = defaultdict(set)  # pattern -> reached ones
    for name in reached:
        modules_alike[_pattern(name)].add(owners[name][0])

    def takes_no_part(name: str) -> bool:
        module, alike = owners[name][0], modules_alike[_pattern(name)]
        return not alike or (module in ran_always and module not in alike)

    unused = [name for name in owners if name not in reached and takes_no_part(name)]
    for name in unused:
        owners[name][1].requires_grad_(False)
    if unused:
        logger.warning(
            "These parameters take no part in the loss and were frozen: %s. Noise alone would have "
            "trained them.",
            ", ".join(unused),
        )
    return unused


def refuse_reached(
    engine: PerSampleEngine, inputs: Mapping[str, Any], frozen: Collection[str]
) -> None:
    """Refuse a batch whose losses depend on a parameter that ``freeze_unused`` froze.

    Args:
        engine: computes the losses of its model, which is in training mode.
        inputs: a batch of the model's keyword arguments.
        frozen: the result of ``freeze_unused``.

    Raises:
        UnsupportedModelError: if a loss depends on one of these parameters.
    """
    if not frozen:
        return
    used = parameters_in_passes(engine.model)
    parameters = {name: used[name] for name in frozen}
    with ExitStack() as restoring:
        restoring.enter_context(keeping_random_state())
        for parameter in parameters.values():
            restoring.callback(parameter.requires_grad_, parameter.requires_grad)
            parameter.requires_grad_(True)
        reached = _reached([engine.losses(inputs)])
    if names := [name for name, p in parameters.items() if id(p) in reached]:
        raise UnsupportedModelError(
            f"{', '.join(names)} was frozen, because the loss of synthetic inputs does not depend "
            "on it, but the loss of the training data does. If it need not be trained, freeze it "
            "with requires_grad_(False) before you create the trainer."
        )


def _run(
    model: nn.Module, loss: LossFunction, inputs: Mapping[str, Any], training: bool
) -> tuple[set[int], set[nn.Module]]:
    """Return the ids of the parameters that the outputs depend on, and the modules that ran."""
    ran: set[nn.Module] = set()
    parameter = next(p for p in model.parameters() if p.is_floating_point())
    inputs = {
        name: value.to(parameter.device, parameter.dtype if value.is_floating_point() else None)
        for name, value in inputs.items()
    }
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with ExitStack() as stack:
        stack.enter_context(in_mode(model, training))
        stack.enter_context(keeping_random_state())
        stack.enter_context(torch.enable_grad())
        noting = register_module_forward_hook(lambda module, *call: ran.add(module))
        stack.callback(noting.remove)
        outputs = functional_call(model, buffers, (), inputs)
        used = [loss.logits(outputs)] if isinstance(loss, HeadLoss) else tree_leaves(outputs)
    return _reached(x for x in used if isinstance(x, Tensor)), ran


def _reached(tensors: Iterable[Tensor]) -> set[int]:
    """Return the ids of the leaves of the autograd graph of some tensors."""
    nodes: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen, leaves = set(nodes), set()
    while nodes:
        node = nodes.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.add(id(leaf))
        further = {other for other, _ in node.next_functions if other is not None} - seen
        seen |= further
        nodes += further
    return leaves


_REACH_NOTHING = (
    *("attention_mask", "encoder_attention_mask", "decoder_attention_mask"),
    *("head_mask", "decoder_head_mask", "cross_attn_head_mask"),
    *("token_type_ids", "position_ids", "decoder_position_ids", "cache_position", "bbox"),
    *("inputs_embeds", "decoder_inputs_embeds", "encoder_outputs", "encoder_hidden_states"),
    *("past_key_values", "use_cache", "return_dict", "return_loss", "logits_to_keep"),
    *("interpolate_pos_encoding", "start_positions", "end_positions"),
)
"""Inputs of models of transformers that have a default, or are states and settings of a model. The
package assumes that these inputs, and labels, bring no further parameter into the loss.
``refuse_reached`` refuses data for which this is wrong."""


def _may_reach(parameter: Parameter) -> bool:
    """Return whether an argument of ``forward`` may bring parameters into the outputs."""
    name = parameter.name
    return not (
        parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        or isinstance(parameter.default, bool | int | float | str)
        or name in _REACH_NOTHING
        or name.startswith("output_")
        or "label" in name
    )


def _completed(batch: Mapping[str, Any], takes: Mapping[str, Parameter]) -> dict[str, Tensor]:
    """Return the model's inputs of one row of a batch, with inputs of a decoder."""
    made = {name: value[:1] for name, value in batch.items() if isinstance(value, Tensor)}
    read = made.get("input_ids", torch.zeros(1, 1))
    made.setdefault("decoder_input_ids", torch.zeros_like(read, dtype=torch.long))
    takes_any = any(p.kind is Parameter.VAR_KEYWORD for p in takes.values())
    return {
        name: value
        for name, value in made.items()
        if name in takes or (takes_any and name in batch)
    }


def _pattern(name: str) -> str:
    """Return the name of a parameter with ``*`` for numbers, which is equal in all layers."""
    return re.sub(r"\d+", "*", name)
