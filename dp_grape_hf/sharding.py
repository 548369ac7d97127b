"""Weights that are spread over processes: what each process has of them, and staying in step.

PyTorch's ``fully_shard`` (FSDP2) leaves each process a block of rows of every parameter. A module
has whole weights while it runs, and to gather them is a collective call, matched with those of the
other processes by order alone. So all processes run the model equally often, whatever their shares
of a draw are: one that was a pass ahead would wait for ever, or be given rows of another layer, and
then the loss of one sample would depend on how many others were drawn.

Sums of gradients, noise, projections and what is kept in projected coordinates are whole in every
process; a weight, and what is kept in its shape, is not.

Shapes: m x n the weight as stored, of which a process has k rows.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from dp_grape_hf.distributed import is_first
from dp_grape_hf.errors import PrivacyError, UnsupportedModelError

_ADAPTERS_NAME = re.compile(r"\.(modules_to_save\.)?default(?=\.|$)")  # which PEFT leaves out


def is_sharded(model: nn.Module) -> bool:
    """Whether the weights of a model are spread over processes."""
    return isinstance(model, FSDPModule)


def plain_type(model: nn.Module) -> type[nn.Module]:
    """Returns the class of a model, as it was before ``fully_shard`` made a subclass of it."""
    return type(model).__mro__[2] if isinstance(model, FSDPModule) else type(model)


def local(tensor: Tensor) -> Tensor:
    """Returns what this process has of a tensor, (k, n), as an alias."""
    if not isinstance(tensor, DTensor):
        return tensor
    rows: Tensor = cast(DTensor, tensor.detach()).to_local()
    return rows


def local_rows(tensor: Tensor) -> slice:
    """Returns which rows of a tensor this process has."""
    if not isinstance(tensor, DTensor):
        return slice(0, len(tensor) if tensor.dim() else 1)
    mesh, last = tensor.device_mesh, tensor.device_mesh.ndim - 1  # the dimension that rows are in
    start = min(-(-len(tensor) // mesh.size(last)) * mesh.get_local_rank(last), len(tensor))
    return slice(start, start + len(local(tensor)))


def rows_here(whole: Tensor, like: Tensor) -> Tensor:
    """Returns what this process has of a whole tensor that is spread as another."""
    return whole[local_rows(like)] if isinstance(like, DTensor) else whole


def spread(tensor: Tensor, like: Tensor) -> Tensor:
    """Returns a whole tensor spread as the weight of its shape is, or as it is if that is not."""
    if not isinstance(like, DTensor) or isinstance(tensor, DTensor):
        return tensor
    result = torch.zeros_like(like, dtype=tensor.dtype)
    local(result).copy_(rows_here(tensor, like))
    return result


def whole(value: Any) -> Any:
    """Returns a tensor with all of its rows; a collective call for one that is spread."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def gathered(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what is to be saved, with whole tensors on the CPU in place of those that are spread.

    A collective call where there are any. Only the first process, which writes, keeps them; in the
    others they are empty.
    """
    found, known = {}, {}
    for name, value in values.items():
        if isinstance(value, DTensor):
            if id(value) not in known:
                full = whole(value.detach())
                known[id(value)] = full.cpu() if is_first() else full.new_empty(0, device="cpu")
            found[name] = known[id(value)]
        else:
            found[name] = value.detach() if isinstance(value, Tensor) else value
    return found


def gathered_weights(model: nn.Module) -> dict[str, Tensor]:
    """Returns all that is saved of a model, whole and on the CPU; see ``gathered``."""
    reshard(model)
    return gathered(model.state_dict(keep_vars=True))  # so that what is tied is one tensor


@torch.no_grad()
def load_rows_(model: nn.Module, folder: str | Path) -> None:
    """Loads the rows that this process has from weights that were saved as a whole.

    Raises:
        UnsupportedModelError: if a parameter that is trained is in none of the files.
    """
    reshard(model)
    names: dict[Tensor, set[str]] = {}
    for kind in (model.named_parameters, model.named_buffers):
        for name, tensor in kind(remove_duplicate=False):
            names.setdefault(tensor, set()).update((name, _ADAPTERS_NAME.sub("", name)))
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            saved = set(file.keys())
            for tensor in [tensor for tensor, known in names.items() if known & saved]:
                rows = file.get_slice(next(iter(names.pop(tensor) & saved)))
                local(tensor).copy_(rows[local_rows(tensor)] if tensor.dim() else rows[...])
    if unseen := [min(known) for tensor, known in names.items() if tensor.requires_grad]:
        raise UnsupportedModelError(f"{folder} has no weights of {', '.join(unseen[:5])}.")


def reshard(model: nn.Module) -> None:
    """Frees whole weights, so that the parameters of the model are those that are kept.

    After a pass without a backward pass some are whole, and what a step writes would not reach
    them.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def parameters_in_passes(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters that a pass uses, by name: others than those that are kept.

    A collective call, in which one module after another has whole weights.
    """
    if not is_sharded(model):
        return dict(model.named_parameters())
    reshard(model)
    found = {n: p for n, p in model.named_parameters() if not isinstance(p, DTensor)}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            found |= {n: p for n, p in model.named_parameters() if not isinstance(p, DTensor)}
            module.reshard()
    return found


def most_of_any(count: int, device: torch.device) -> int:
    """Returns the largest of the numbers that the processes have; a collective call."""
    most = torch.tensor([count], device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most.item())


# ---- Sharding ----


def mesh_of(device: torch.device, replicas: int = 1) -> DeviceMesh:
    """Returns how the processes lie to each other.

    Args:
        device: that this process computes on.
        replicas: groups of processes, each of which has all weights (HSDP).

    Raises:
        PrivacyError: if the processes make no such groups.
    """
    size = dist.get_world_size()
    if size % replicas:
        raise PrivacyError(
            f"dp_replicate_size={replicas} does not divide the number of processes, {size}. Set a "
            "number of replicas that does."
        )
    shape = (replicas, size // replicas) if replicas > 1 else (size,)
    names = ("replicas", "rows")[-len(shape) :]
    return init_device_mesh(device.type, shape, mesh_dim_names=names)


def shard_(
    model: nn.Module,
    device: torch.device,
    mesh: DeviceMesh,
    layers: Collection[str] | None = None,
    reshard_after_forward: bool = True,
) -> None:
    """Gives every process the weights of the first, and leaves it its rows of them, in place.

    One layer after another is whole on the device, the model never. What is in no layer (tables,
    the last norm, a head) is whole from the forward pass to the end of the backward pass.

    Args:
        model: with the weights to train in the first process; in others they may be on the meta
            device, as transformers leaves them with ``cpu_ram_efficient_loading``.
        device: that this process computes on.
        mesh: as ``mesh_of`` makes it.
        layers: the names of classes whose modules have whole weights one at a time; those that a
            model of transformers says it has if None.
        reshard_after_forward: whether a layer is gathered again for its backward pass.

    Raises:
        PrivacyError: if the model has no such module, or one in another.
    """
    if packed := [name for name, p in model.named_parameters() if not p.is_floating_point()]:
        raise PrivacyError(
            f"{packed[0]} is quantised, and its rows are no rows of numbers that could be spread "
            "over processes. Leave fsdp out: a quantised model is whole in every process."
        )
    layers = _layers_of(model) if layers is None else layers
    units = [m for m in model.modules() if type(m).__name__ in layers and m is not model]
    inside = [u for unit in units for u in unit.modules() if u is not unit and u in {*units}]
    if not units or inside:
        found = "one inside of another" if inside else "none"
        raise PrivacyError(
            f"Of the layers {sorted(layers)} to shard, {type(model).__name__} has {found}. Name "
            'the class of its blocks by fsdp_config={"transformer_layer_cls_to_wrap": [...]}.'
        )
    for unit in units:
        take_from_first_(unit, device)
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard_after_forward)
    take_from_first_(model, device)
    fully_shard(model, mesh=mesh)
    if hasattr(model, "generate"):
        dist.fsdp.register_fsdp_forward_method(model, "generate")
    vars(model)["_is_fsdp_managed_module"] = True  # generate() asks for it, to stay in step


def _layers_of(model: nn.Module) -> set[str]:
    """Returns the classes of layers that a model of transformers says it has.

    Without those around its tables: a table may be used outside, and what runs under one rule with
    a table (patches and their positions, say) must be no unit.
    """
    tables = {
        getattr(model, f"get_{which}_embeddings", lambda: None)() for which in ("input", "output")
    }
    around = {type(m).__name__ for m in model.modules() if tables & {*m.modules()}}
    return {*(getattr(model, "_no_split_modules", None) or ())} - around


def take_from_first_(unit: nn.Module, device: torch.device) -> None:
    """Puts what is not sharded yet on the device, as it is in the first process."""
    for tensor in (*unit.parameters(), *unit.buffers()):
        if isinstance(tensor, DTensor):
            continue
        if tensor.is_meta:
            there = torch.empty_like(tensor, device=device)
            if isinstance(tensor, nn.Parameter):
                there = nn.Parameter(there, tensor.requires_grad)
            torch.utils.swap_tensors(tensor, there)
        elif tensor.device != device:
            tensor.data = tensor.data.to(device)
        dist.broadcast(tensor.data, src=0)
