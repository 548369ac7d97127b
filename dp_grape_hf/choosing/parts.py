"""The parts of a model that are trained, and the input of a new head."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from dp_grape_hf.projections import MATRIX_LAYERS, accepted, on_inputs, output_embeddings

_OVER_RESIDUAL = 10.0  # times what the first position had before


def is_pretrained(model: Any) -> bool:
    """Whether weights come from somewhere.

    Weights of norms begin as a constant, and training moves them. The name that a model was loaded
    by says less: one that is made of a configuration from the Hub has it too. It counts where there
    are no norms.
    """
    norms = [m for m in model.modules() if "Norm" in type(m).__name__]
    weights = [weight for m in norms if isinstance(weight := getattr(m, "weight", None), Tensor)]
    if not weights:
        return bool(getattr(model, "name_or_path", ""))
    return any(bool((weight != weight.flatten()[0]).any()) for weight in weights)


def rule_and_rank(*, pretrained: bool) -> dict[str, Any]:
    """Returns the rule and the rank in principal directions, as options of these names.

    Pretrained weights move in few directions, by what many noisy releases agree on: TREC, epsilon
    2: momentum 85.7 %, Adam 78.2; rank 4 87.1, 16 85.3. Rank 1 has what 4 has: 0.1 points less in
    15 pairs of runs of seven tasks, 0.5 the error. Fresh ones move in more, and momentum has them
    overshoot. Digits, epsilon 2: SGD 88.5 %, momentum 80.9, Adam 81.6, each at its own rate.
    """
    rule, rank = ("momentum", 4) if pretrained else ("sgd", 16)
    return {"update_rule": rule, "projection_rank": rank}


def schedule(*, pretrained: bool) -> str:
    """Returns how the rate changes over the run, an ``lr_scheduler_type``.

    Where noise limits, all releases say much the same, and to weigh them alike leaves the least
    noise beside the signal: a rate that falls to 0 has 15 % more. TREC, epsilon 1: 88.7 %, falling
    86.9. Steps limit fresh weights, which settle as these shrink: digits, epsilon 2: 81.6 %,
    falling 87.7. A warm-up that is asked for is kept.
    """
    return "constant_with_warmup" if pretrained else "linear"


@torch.no_grad()
def output_layer(model: nn.Module, batch: Mapping[str, Any]) -> tuple[str, nn.Module]:
    """Returns name and module of the linear layer that runs last: logits come from it.

    Args:
        model: in evaluation mode.
        batch: inputs that are no example's.

    Raises:
        ValueError: if none runs.
    """
    ran: list[tuple[str, nn.Module]] = []
    hooks = [
        module.register_forward_hook(lambda m, args, out, own=(name, module): ran.append(own))
        for name, module in model.named_modules()
        if isinstance(module, MATRIX_LAYERS)
    ]
    try:
        on_inputs(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    if not ran:
        raise ValueError(f"no linear layer of {type(model).__name__} ran")
    return ran[-1]


@torch.no_grad()
def is_head(model: nn.Module, layer: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Whether a model returns what a layer puts out: logits, or a number.

    The last layer of a model that returns a similarity, say, is a part of its body.

    Args:
        model: in evaluation mode.
        layer: the linear layer that runs last.
        batch: inputs that are no example's.
    """
    read: Any = layer  # Conv1D has nf
    width = int(layer.out_features if isinstance(layer, nn.Linear) else read.nf)
    returned = [x for x in tree_leaves(on_inputs(model, batch)) if isinstance(x, Tensor)]
    return width == 1 or any(x.dim() > 1 and x.shape[-1] == width for x in returned)


@torch.no_grad()
def reading_numbers(model: nn.Module, batch: Mapping[str, Any]) -> list[str]:
    """Return the names of linear layers that read the numbers of an example directly.

    With all parameters at zero, only the input of such a layer differs between examples. It may
    contain other values too, and the numbers may have passed a fixed transformation.

    Args:
        model: in evaluation mode.
        batch: synthetic or public inputs, of at least two rows.
    """
    weights = dict(model.named_parameters())
    if not all(weight.is_floating_point() for weight in weights.values()):
        return []  # packed weights cannot be zero
    zeros = {n: w.new_zeros(()).expand(w.shape) for n, w in weights.items()}
    found: set[str] = set()

    def note(name: str, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        tensors = [x.nan_to_num() for x in (*given, *named.values()) if isinstance(x, Tensor)]
        if any((x != x[:1]).any() for x in tensors if x.dim()):
            found.add(name)

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if isinstance(module, MATRIX_LAYERS):
                seen = partial(note, name)
                hook = module.register_forward_pre_hook(
                    lambda module, given, named, seen=seen: seen(given, named), with_kwargs=True
                )
                stack.callback(hook.remove)
        functional_call(model, zeros, (), accepted(model, batch))
    return sorted(found)


def train_matrices_only(model: Any, output: str) -> list[str]:
    """Freezes all but the matrices of the linear layers and the layer that logits come from.

    A table of embeddings is most of a model's numbers and of its noise, and few examples say
    anything of it; the first principal directions of a matrix move its outputs as a bias would.
    With all else frozen TREC has 89.9 %, with biases and norms 88.1, with embeddings in principal
    directions 89.7.

    A model of which the user froze anything is left as it is, and so is one without pretrained
    weights, whose embeddings say nothing yet.

    Args:
        model: may have parameters that are frozen.
        output: name of the layer that logits come from.

    Returns:
        The names of the frozen parameters.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    vocabulary = output_embeddings(model)
    kept: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, MATRIX_LAYERS) and module is not vocabulary:
            own = module.parameters() if name == output else [module.weight]
            kept.update(id(p) for p in own)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    frozen = [p for p in model.parameters() if id(p) not in kept - tables and p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    return [names[id(p)] for p in frozen]


def clipped_apart(model: nn.Module, output: str) -> str | None:
    """Returns the name of a new head whose gradient is clipped apart from that of all else.

    How long the gradient of a pretrained body is, beside that of its head, changes as the head
    grows, from two to twenty times. Clipped together, the body would leave the head next to
    nothing of C, or need a factor that no other model has use for. Clipped apart, each has the
    same for the whole run. With it, and features evened out, at epsilon 2: SmolLM2 on SST-2 88.6 %,
    with 0.3 of the body's gradient 81.6; Whisper on spoken digits 98.5, with 0.3 of it 77.3.

    Args:
        model: what is not trained is frozen.
        output: name of the layer that logits come from.

    Returns:
        None if the head is no layer of its own, nothing else is trained, or the weights come from
        nowhere.
    """
    head = model.get_submodule(output)
    if output_embeddings(model) is head or not is_pretrained(model):
        return None
    own = {id(p) for p in head.parameters()}
    trained = {id(p) in own for p in model.parameters() if p.requires_grad}
    return output if trained == {True, False} else None


# ---- Where a new head reads ----


@torch.no_grad()
def average_at_first(model: Any, output: nn.Module, batch: Mapping[str, Any]) -> str | None:
    """Lets a new head on the first position of a text encoder read an average over the text.

    An encoder that was trained for something else has little of a text's meaning at its first
    position, and bringing it there takes more of the body than an epsilon allows. So the last layer
    becomes an average: with queries that are zero it attends to all positions alike, its values are
    what it is given, and its feed-forward part adds nothing; a pooler behind it passes that on. The
    model's class and configuration stay, and training may move all of it. A linear probe of MiniLM
    has 71.4 % of TREC (73.8 of SST-2) at the first position as it was and 91.4 (79.4) then; at the
    mean of the last layer's outputs, 88.4 (77.7).

    Args:
        model: in evaluation mode.
        output: the layer that logits come from.
        batch: inputs that are no example's.

    Returns:
        The name of that layer; None if the head is not new, does not read the first position of a
        text encoder, or the layers are made as none of those that are known.
    """
    body, last = _body(model), None
    names: tuple[str, ...] = ()
    if body is not None:
        last, names = _last_layer(body)
    if last is None or not names or not is_new_at_first(model, output, batch):
        return None
    query, value, mixed, after, *norms = (last.get_submodule(name) for name in names)
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


@torch.no_grad()
def is_new_at_first(model: Any, output: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Whether a head is new, and reads the first position of a pretrained text encoder.

    Args:
        model: in evaluation mode, with PEFT around it or without.
        output: the layer that logits come from.
        batch: inputs that are no example's.
    """
    bias, body = getattr(output, "bias", None), _body(model)
    is_new = bias is not None and not bias.any() and output_embeddings(model) is not output
    if body is None or not is_new or not is_pretrained(model):
        return False
    return _reads_first(model, body, output, batch)


def _body(model: Any) -> Any:
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    return getattr(base, getattr(base, "base_model_prefix", "") or "-", None)


# In a layer: queries, values, what mixes the heads, what ends the feed-forward part, two norms.
_NAMES = (
    # BERT, RoBERTa, ELECTRA, XLM-RoBERTa, CamemBERT
    (
        *("attention.self.query", "attention.self.value", "attention.output.dense", "output.dense"),
        *("attention.output.LayerNorm", "output.LayerNorm"),
    ),
    # DistilBERT
    (
        *("attention.q_lin", "attention.v_lin", "attention.out_lin", "ffn.lin2"),
        *("sa_layer_norm", "output_layer_norm"),
    ),
    # MPNet
    (
        *("attention.attn.q", "attention.attn.v", "attention.attn.o", "output.dense"),
        *("attention.LayerNorm", "output.LayerNorm"),
    ),
    # DeBERTa
    (
        *("attention.self.query_proj", "attention.self.value_proj", "attention.output.dense"),
        *("output.dense", "attention.output.LayerNorm", "output.LayerNorm"),
    ),
)


def _last_layer(body: Any) -> tuple[Any, tuple[str, ...]]:
    """Returns the last layer of a text encoder and the names in it, if it is one of those above."""
    for stack in (getattr(body, "encoder", None), getattr(body, "transformer", None)):
        layers = getattr(stack, "layer", None)
        if isinstance(layers, nn.ModuleList) and len(layers) and (names := _names_in(layers[-1])):
            return layers[-1], names
    return None, ()


def _names_in(layer: nn.Module) -> tuple[str, ...]:
    """Returns the names of the parts of a layer; none, if it is made otherwise."""
    modules = dict(layer.named_modules())
    for names in _NAMES:
        parts = [modules.get(name) for name in names]
        square = isinstance(parts[2], nn.Linear) and parts[2].in_features == parts[2].out_features
        if None not in parts and square:
            return names
    return ()


def _reads_first(model: Any, body: nn.Module, output: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Whether logits depend on a whole text, but by its first position alone."""
    ids = batch.get("input_ids")
    if ids is None or ids.dim() != 2 or ids.shape[1] < 4:
        return False
    batch = {n: v[:2] if isinstance(v, Tensor) and v.dim() else v for n, v in batch.items()}
    ids = ids[:2]
    seen: list[Tensor] = []

    def read(ids: Tensor, *, blank: bool = False) -> Tensor:
        def alter(module: nn.Module, args: Any, found: Any) -> None:
            if blank:
                found[0][:, 1:] = 0

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
    as_it_is = read(ids)
    blanked, changed = read(ids, blank=True), read(other)
    whole = as_it_is.dim() == 2 and not torch.equal(as_it_is, changed)
    return whole and torch.equal(as_it_is, blanked)
