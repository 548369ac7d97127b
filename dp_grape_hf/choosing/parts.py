"""Choose the trained parameters of a model, the optimizer, and the input of a new head."""

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from dp_grape_hf.errors import ERRORS
from dp_grape_hf.projections import MATRIX_LAYERS, accepted, on_inputs, output_embeddings

_OVER_RESIDUAL = 10.0  # size of the average, relative to the residual of the first position


def is_pretrained(model: Any) -> bool:
    """Return whether the weights of a model are pretrained.

    The weights of normalization layers are initialised as a constant, and training changes them. If
    there are no such layers, a model counts as pretrained if it has a ``name_or_path``. This name
    is less reliable: a model that was made from a configuration on the Hub has it too.
    """
    norms = [m for m in model.modules() if "Norm" in type(m).__name__]
    weights = [weight for m in norms if isinstance(weight := getattr(m, "weight", None), Tensor)]
    if not weights:
        return bool(getattr(model, "name_or_path", ""))
    return any(bool((weight != weight.flatten()[0]).any()) for weight in weights)


def rule_and_rank(*, pretrained: bool) -> dict[str, Any]:
    """Return the options ``update_rule`` and ``projection_rank`` for principal directions.

    Pretrained weights move in few directions, so a small rank suffices, and momentum averages the
    noise of several updates. Random weights move in more directions, and momentum overshoots.
    """
    rule, rank = ("momentum", 4) if pretrained else ("sgd", 16)
    return {"update_rule": rule, "projection_rank": rank}


def schedule(*, pretrained: bool) -> str:
    """Return the schedule of the learning rate, an ``lr_scheduler_type``.

    For pretrained weights, noise is the limit. Equal weights for all private updates then leave the
    least noise in their sum, so the learning rate is constant; a warm-up that you pass is kept.
    Random weights are limited by the length of a step, and converge as the steps become shorter.
    """
    return "constant_with_warmup" if pretrained else "linear"


class LastLayer(NamedTuple):
    """The linear layer of a model that runs last."""

    name: str
    module: nn.Module
    is_head: bool
    """Whether the model returns its output: logits, or a number. If the model returns something
    else, such as a similarity, the layer is a part of the body."""


@torch.no_grad()
def last_layer(model: nn.Module, batch: Mapping[str, Any]) -> LastLayer:
    """Return the linear layer that runs last, which computes the logits if it is a head.

    The model is in evaluation mode, and reads a batch of public inputs.

    Raises:
        ValueError: if no linear layer runs.
    """
    ran: list[tuple[str, Any]] = []
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if isinstance(module, MATRIX_LAYERS):
                note = partial(lambda entry, *call: ran.append(entry), (name, module))
                stack.callback(module.register_forward_hook(note).remove)
        outputs = on_inputs(model, batch)
    if not ran:
        raise ValueError(f"no linear layer of {type(model).__name__} ran")
    name, layer = ran[-1]
    width = int(layer.out_features if isinstance(layer, nn.Linear) else layer.nf)
    returned = [x for x in tree_leaves(outputs) if isinstance(x, Tensor)]
    is_head = width == 1 or any(x.dim() > 1 and x.shape[-1] == width for x in returned)
    return LastLayer(name, layer, is_head)


@torch.no_grad()
def reading_numbers(model: nn.Module, batch: Mapping[str, Any]) -> list[str]:
    """Return the names of linear layers that read the numbers of an example directly.

    With all parameters at zero, only the input of such a layer differs between examples. It may
    contain other values too, and the numbers may have passed a fixed transformation. The model is
    in evaluation mode, and reads synthetic or public inputs of at least two rows.
    """
    weights = dict(model.named_parameters())
    if not all(weight.is_floating_point() for weight in weights.values()):
        return []  # packed weights cannot be zero
    zeros = {n: w.new_zeros(()).expand(w.shape) for n, w in weights.items()}
    found: set[str] = set()

    def note(name: str, module: nn.Module, given: Any, named: Mapping[str, Any]) -> None:
        tensors = [x.nan_to_num() for x in (*given, *named.values()) if isinstance(x, Tensor)]
        if any((x != x[:1]).any() for x in tensors if x.dim()):
            found.add(name)

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if isinstance(module, MATRIX_LAYERS):
                hook = module.register_forward_pre_hook(partial(note, name), with_kwargs=True)
                stack.callback(hook.remove)
        stack.enter_context(suppress(*ERRORS))  # some code cannot run with zeros
        functional_call(model, zeros, (), accepted(model, batch))
    return sorted(found)


def train_matrices_only(model: Any, output: str) -> list[str]:
    """Freeze all parameters except the matrices of linear layers and the layer of the logits.

    A table of embeddings has most of a model's parameters, so it receives most of the noise, and
    few examples have a gradient there. The first principal directions of a matrix can move the
    layer's output as a bias would.

    The caller leaves out a model in which you froze a parameter, and a model without pretrained
    weights, because its embeddings must be trained. ``output`` is the name of the layer that
    computes the logits.

    Returns:
        The names of the parameters that this function froze.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    vocabulary = output_embeddings(model)
    trained: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, MATRIX_LAYERS) and module is not vocabulary:
            parameters = module.parameters() if name == output else [module.weight]
            trained.update(id(p) for p in parameters)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    frozen = [p for p in model.parameters() if id(p) not in trained - tables and p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    return [names[id(p)] for p in frozen]


def clipped_apart(model: nn.Module, output: str) -> str | None:
    """Return the name of a new head that must be clipped separately from all other parameters.

    The gradient of a pretrained body is two to twenty times as long as the gradient of its head,
    and the ratio changes as the head grows. If they were clipped together, the body would leave
    little of C to the head. If they are clipped separately, their shares of C stay constant.
    ``output`` is the name of the layer that computes the logits.

    Returns:
        None if the head is not a separate layer, if nothing else is trained, or if the weights are
        not pretrained.
    """
    head = model.get_submodule(output)
    if output_embeddings(model) is head or not is_pretrained(model):
        return None
    of_head = {id(p) for p in head.parameters()}
    trained = {id(p) in of_head for p in model.parameters() if p.requires_grad}
    return output if trained == {True, False} else None


# ---- The input of a new head ----


@torch.no_grad()
def average_at_first(model: Any, output: nn.Module, batch: Mapping[str, Any]) -> str | None:
    """Make a new head that reads the first position of a text encoder read an average of all.

    The first position of an encoder without a pretrained head contains little of a text's meaning,
    and training would need more private updates than the budget allows to change this. So this
    function sets the weights of the last layer: with queries of zero it attends equally to all
    positions, its values are its inputs, and its feed-forward part adds nothing. A pooler behind it
    becomes the identity. The class and the configuration of the model do not change, and training
    may change all these weights. The arguments are those of ``is_new_at_first``.

    Returns:
        The name of the last layer. None if the head is not new, if it does not read the first
        position of a text encoder, or if the structure of the layers is unknown.
    """
    body = _body(model)
    found = [] if body is None else _last_layer(body)
    if not found or not is_new_at_first(model, output, batch):
        return None
    last, query, value, mixed, after, *norms = found
    for linear in (query, value, mixed, after):
        for parameter in linear.parameters():
            parameter.zero_()
    for linear, size in ((value, 1.0), (mixed, _OVER_RESIDUAL)):
        nn.init.eye_(linear.weight)
        linear.weight.mul_(size)
    for norm in norms:
        nn.init.ones_(norm.weight)
        nn.init.zeros_(norm.bias)
    pooler = getattr(getattr(body, "pooler", None), "dense", None)
    if isinstance(pooler, nn.Linear) and pooler.in_features == pooler.out_features:
        nn.init.eye_(pooler.weight)
        nn.init.zeros_(pooler.bias)
    return next(name for name, module in model.named_modules() if module is last)


def is_new(model: Any, output: nn.Module) -> bool:
    """Return whether the layer that computes the logits is a new head: its bias is zero."""
    bias = getattr(output, "bias", None)
    return bias is not None and not bias.any() and output_embeddings(model) is not output


@torch.no_grad()
def is_new_at_first(model: Any, output: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Return whether a head is new and reads the first position of a pretrained text encoder.

    Args:
        model: the model, in evaluation mode, with or without a PEFT adapter.
        output: the layer that computes the logits.
        batch: public inputs.
    """
    body = _body(model)
    if body is None or not is_new(model, output) or not is_pretrained(model):
        return False
    return _reads_first(model, body, output, batch)


def _body(model: Any) -> Any:
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    return getattr(base, getattr(base, "base_model_prefix", "") or "-", None)


# Parts of a layer: queries, values, output projections of attention and feed-forward, two norms.
_NAMES = (
    # BERT, RoBERTa, ELECTRA, XLM-RoBERTa, CamemBERT
    "attention.self.query attention.self.value attention.output.dense output.dense "
    "attention.output.LayerNorm output.LayerNorm",
    # DistilBERT
    "attention.q_lin attention.v_lin attention.out_lin ffn.lin2 sa_layer_norm output_layer_norm",
    # MPNet
    "attention.attn.q attention.attn.v attention.attn.o output.dense attention.LayerNorm "
    "output.LayerNorm",
    # DeBERTa
    "attention.self.query_proj attention.self.value_proj attention.output.dense output.dense "
    "attention.output.LayerNorm output.LayerNorm",
)


def _last_layer(body: Any) -> list[Any]:
    """Return the last layer of a text encoder, and its parts; empty if the structure is unknown."""
    for stack in (getattr(body, "encoder", None), getattr(body, "transformer", None)):
        layers = getattr(stack, "layer", None)
        if not isinstance(layers, nn.ModuleList) or not len(layers):
            continue
        modules = dict(layers[-1].named_modules())
        for names in _NAMES:
            parts = [modules.get(name) for name in names.split()]
            mixed = parts[2]
            square = isinstance(mixed, nn.Linear) and mixed.in_features == mixed.out_features
            if square and None not in parts:
                return [layers[-1], *parts]
    return []


def _reads_first(model: Any, body: nn.Module, output: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Return whether logits depend on the whole text, but only by the first position."""
    ids = batch.get("input_ids")
    if ids is None or ids.dim() != 2 or ids.shape[1] < 4:
        return False
    batch = {n: v[:2] if isinstance(v, Tensor) and v.dim() else v for n, v in batch.items()}
    ids = ids[:2]
    seen: list[Tensor] = []

    def read(ids: Tensor, *, blank: bool = False) -> Tensor:
        def alter(module: nn.Module, args: Any, outputs: Any) -> None:
            if blank:
                outputs[0][:, 1:] = 0

        hooks = [
            output.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone())),
            body.register_forward_hook(alter),
        ]
        try:
            on_inputs(model, {**batch, "input_ids": ids, "attention_mask": torch.ones_like(ids)})
        finally:
            for hook in hooks:
                hook.remove()
        return seen[-1]

    other = ids.clone()
    other[:, -2] = ids[:, 1]
    unchanged = read(ids)
    blanked, changed = read(ids, blank=True), read(other)
    depends_on_text = unchanged.dim() == 2 and not torch.equal(unchanged, changed)
    return depends_on_text and torch.equal(unchanged, blanked)
