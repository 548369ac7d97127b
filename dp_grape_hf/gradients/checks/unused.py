"""Parameters that come with a model and take no part in its loss.

The mask token of a model that masks nothing, the embedding of SpecAugment where that is off, a
decoder's attention to an encoder that is not there: noise alone would train them. Which they are is
decided without the training data, by the inputs that ``forward`` names and on inputs that are
nobody's: the world sees what is trained, and no private example may choose it, nor whether one has
an input that others lack. What only some examples use (an expert, a branch that asks for a value)
is not frozen.

The graph of a forward pass says which parameters its outputs were computed from. It is walked, not
differentiated, so no gradient is computed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from inspect import Parameter, signature
from itertools import islice
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
    """Freezes the trainable parameters that no output needs which the loss is computed from.

    A parameter is not frozen if another one of its name, but for numbers, takes part, unless its
    own module ran all the same: an expert that no token was sent to would be such a one. Nothing is
    frozen if ``forward`` (with PEFT, that of the model inside) names an input that no batch has and
    that may be what reaches a parameter: any but labels, masks, positions and the like. Inputs that
    only a ``**kwargs`` takes are not named.

    Args:
        model: the model; how it runs, its buffers and the random numbers stay as they are.
        loss: of the model's outputs; unless it is a head's, all outputs count.
        batches: inputs of the model that are public. One row of the first and of the second is
            used.

    Returns:
        The names of what was frozen, which are logged too.

    Guarantee:
        A function of the model, its loss and the batches: of no training example.
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
            return []  # then the engine refuses what it finds to be unused
        for inputs in given:
            for training in (False, True):
                passes.append(_run(model, loss, inputs, training))
    except ERRORS:
        return []
    reached = {
        name for name, (_, p) in owners.items() if any(id(p) in found for found, _ in passes)
    }
    if not reached:
        return []  # no batch, or a model of which nothing is trained
    ran_always = set.intersection(*(ran for _, ran in passes))
    unused = []
    for name, (module, parameter) in owners.items():
        alike = {other for other in reached if _pattern(other) == _pattern(name)}
        elsewhere = module in ran_always and all(owners[o][0] is not module for o in alike)
        if name not in reached and (not alike or elsewhere):
            parameter.requires_grad_(False)
            unused.append(name)
    if unused:
        logger.warning(
            "Frozen, as they take no part in the loss, so that noise alone would train them: %s.",
            ", ".join(unused),
        )
    return unused


def refuse_reached(
    engine: PerSampleEngine, inputs: Mapping[str, Any], frozen: Collection[str]
) -> None:
    """Refuses a batch whose losses need what was frozen because they would not.

    Args:
        engine: computes the losses of its model, which is in training mode.
        inputs: a batch of the model's keyword arguments.
        frozen: names, as ``freeze_unused`` returned them.

    Raises:
        UnsupportedModelError: if a loss was computed from one of these parameters.
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
            f"{', '.join(names)} was frozen, as no public input has it take part in the loss, "
            "and the training data do. Freeze it with requires_grad_(False) before the trainer is "
            "made if it is not to be trained."
        )


def _run(
    model: nn.Module, loss: LossFunction, inputs: Mapping[str, Any], training: bool
) -> tuple[set[int], set[nn.Module]]:
    """Returns the ids of the tensors the outputs were computed from, and the modules that ran."""
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
    """Returns the ids of the leaves that tensors were computed from."""
    nodes: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen, found = set(nodes), set()
    while nodes:
        node = nodes.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            found.add(id(leaf))
        further = {other for other, _ in node.next_functions if other is not None} - seen
        seen |= further
        nodes += further
    return found


_REACH_NOTHING = (
    *("attention_mask", "encoder_attention_mask", "decoder_attention_mask"),
    *("head_mask", "decoder_head_mask", "cross_attn_head_mask"),
    *("token_type_ids", "position_ids", "decoder_position_ids", "cache_position", "bbox"),
    *("inputs_embeds", "decoder_inputs_embeds", "encoder_outputs", "encoder_hidden_states"),
    *("past_key_values", "use_cache", "return_dict", "return_loss", "logits_to_keep"),
    *("interpolate_pos_encoding", "start_positions", "end_positions"),
)
"""Inputs of models of transformers that are made up where they are absent, or that are no examples'
but states and settings of a model. With labels, and outputs of any name, they are taken to reach no
parameter by themselves; data in which one does are refused by ``refuse_reached``."""


def _may_reach(parameter: Parameter) -> bool:
    """Whether an argument of ``forward`` may bring parameters into the outputs."""
    name = parameter.name
    return not (
        parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        or isinstance(parameter.default, bool | int | float | str)
        or name in _REACH_NOTHING
        or name.startswith("output_")
        or "label" in name
    )


def _completed(batch: Mapping[str, Any], takes: Mapping[str, Parameter]) -> dict[str, Tensor]:
    """Returns one row of a batch, of what a model takes, with what its decoder reads."""
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
    """Returns the name of a parameter without numbers: that of its like in other layers."""
    return re.sub(r"\d+", "*", name)
