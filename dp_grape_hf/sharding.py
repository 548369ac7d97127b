"""Weights that are sharded over processes by PyTorch's ``fully_shard`` (FSDP2).

Each process stores a block of rows of every parameter. A module has its full weights while it runs.
A collective call gathers them, and only the order of the calls matches it with the calls of other
processes. So all processes run the model equally often, whatever their shares of a sampled batch
are. A process that was one pass ahead would wait for ever, or would receive rows of another layer;
then the loss of one sample would depend on the number of sampled examples.

Every process has the full sums of gradients, noise, projections and projected coordinates. Only
weights, and tensors in the shape of a weight, are sharded.

Shapes: m x n the weight as stored, of which a process has k rows.
"""

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

_ADAPTERS_NAME = re.compile(r"\.(modules_to_save\.)?default(?=\.|$)")  # PEFT saves names without it


def is_sharded(model: nn.Module) -> bool:
    """Return whether the weights of a model are sharded over processes."""
    return isinstance(model, FSDPModule)


def plain_type(model: nn.Module) -> type[nn.Module]:
    """Return the class of a model without the subclass that ``fully_shard`` makes of it."""
    return type(model).__mro__[2] if isinstance(model, FSDPModule) else type(model)


def local(tensor: Tensor) -> Tensor:
    """Return the rows (k, n) of a tensor that this process stores, as a view."""
    if not isinstance(tensor, DTensor):
        return tensor
    rows: Tensor = cast(DTensor, tensor.detach()).to_local()
    return rows


def local_rows(tensor: Tensor) -> slice:
    """Return the range of rows of a tensor that this process stores."""
    if not isinstance(tensor, DTensor):
        return slice(0, len(tensor) if tensor.dim() else 1)
    mesh = tensor.device_mesh
    start = min(-(-len(tensor) // mesh.size()) * mesh.get_local_rank(), len(tensor))
    return slice(start, start + len(local(tensor)))


def rows_here(full: Tensor, like: Tensor) -> Tensor:
    """Return this process's rows of a full tensor, if the tensor ``like`` is sharded."""
    return full[local_rows(like)] if isinstance(like, DTensor) else full


def spread(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a full tensor sharded as the weight ``like``; unchanged if ``like`` is not sharded."""
    if not isinstance(like, DTensor) or isinstance(tensor, DTensor):
        return tensor
    result = torch.zeros_like(like, dtype=tensor.dtype)
    local(result).copy_(rows_here(tensor, like))
    return result


def full_tensor(value: Any) -> Any:
    """Return a tensor with all of its rows; a collective call for a sharded tensor."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def gathered(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values to save, with a full tensor on the CPU in place of each sharded tensor.

    A collective call if a tensor is sharded. Only the first process, which writes files, keeps the
    full tensors; in the others they are empty.
    """
    result, full_tensors = {}, {}
    for name, value in values.items():
        if isinstance(value, DTensor):
            if id(value) not in full_tensors:
                full = full_tensor(value.detach())
                full = full.cpu() if is_first() else full.new_empty(0, device="cpu")
                full_tensors[id(value)] = full
            result[name] = full_tensors[id(value)]
        else:
            result[name] = value.detach() if isinstance(value, Tensor) else value
    return result


def gathered_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a model, with full tensors on the CPU; see ``gathered``."""
    reshard(model)
    return gathered(model.state_dict(keep_vars=True))  # with it, tied weights are one tensor


@torch.no_grad()
def load_rows_(model: nn.Module, folder: str | Path) -> None:
    """Load this process's rows of weights from files that hold the full weights.

    Raises:
        UnsupportedModelError: if no file has a parameter that is trained.
    """
    reshard(model)
    names: dict[Tensor, set[str]] = {}
    for kind in (model.named_parameters, model.named_buffers):
        for name, tensor in kind(remove_duplicate=False):
            names.setdefault(tensor, set()).update((name, _ADAPTERS_NAME.sub("", name)))
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            saved = set(file.keys())
            for tensor in [tensor for tensor, names_of in names.items() if names_of & saved]:
                rows = file.get_slice(next(iter(names.pop(tensor) & saved)))
                local(tensor).copy_(rows[local_rows(tensor)] if tensor.dim() else rows[...])
    if unseen := [min(names_of) for tensor, names_of in names.items() if tensor.requires_grad]:
        raise UnsupportedModelError(
            f"{folder} has no weights of {', '.join(unseen[:5])}, which are trained. Load a folder "
            "that holds all trained weights of this model."
        )


def reshard(model: nn.Module) -> None:
    """Free gathered weights, so that the model's parameters are the stored ones.

    After a pass without a backward pass, some weights are still gathered. An update of the stored
    weights would not reach them.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def parameters_in_passes(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that a pass uses, by name; for a sharded model, the gathered ones.

    A collective call for a sharded model: it gathers the weights of one module after another.
    """
    if not is_sharded(model):
        return dict(model.named_parameters())
    reshard(model)
    gathered = {n: p for n, p in model.named_parameters() if not isinstance(p, DTensor)}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            gathered |= {n: p for n, p in model.named_parameters() if not isinstance(p, DTensor)}
            module.reshard()
    return gathered


def most_of_any(count: int, device: torch.device) -> int:
    """Return the largest ``count`` of all processes; a collective call."""
    most = torch.tensor([count], device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most.item())


# ---- Sharding ----


def mesh_of(device: torch.device) -> DeviceMesh:
    """Return the mesh of all processes, for ``shard_``; ``device`` is this process's."""
    return init_device_mesh(device.type, (dist.get_world_size(),))


def shard_(
    model: nn.Module,
    device: torch.device,
    mesh: DeviceMesh,
    layers: Collection[str] | None = None,
    reshard_after_forward: bool = True,
) -> None:
    """Copy the weights of the first process to all processes, and shard them, in place.

    The device holds the full weights of one layer at a time, never of the model. Weights outside of
    layers (embedding tables, the last norm, a head) stay gathered from the forward pass to the end
    of the backward pass.

    Args:
        model: the model, with the weights to train in the first process. In other processes they
            may be on the meta device, where transformers puts them with
            ``cpu_ram_efficient_loading``.
        device: the device that this process computes on.
        mesh: the result of ``mesh_of``.
        layers: class names of the layers; None for those that a model of transformers lists.
        reshard_after_forward: whether a layer is gathered again for its backward pass.

    Raises:
        PrivacyError: if a weight is quantised, if the model has no such layer, or if one layer
            contains another.
    """
    if packed := [name for name, p in model.named_parameters() if not p.is_floating_point()]:
        raise PrivacyError(
            f"{packed[0]} is quantised. Its packed rows cannot be sharded over processes. Leave "
            "fsdp out: every process then stores the full quantised model."
        )
    layers = _layers_of(model) if layers is None else layers
    units = [m for m in model.modules() if type(m).__name__ in layers and m is not model]
    inside = [u for unit in units for u in unit.modules() if u is not unit and u in {*units}]
    if not units or inside:
        problem = "has one inside of another" if inside else "has none"
        raise PrivacyError(
            f"Of the layers {sorted(layers)} to shard, {type(model).__name__} {problem}. Name "
            'the class of its blocks by fsdp_config={"transformer_layer_cls_to_wrap": [...]}.'
        )
    for unit in units:
        take_from_first_(unit, device)
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard_after_forward)
    take_from_first_(model, device)
    fully_shard(model, mesh=mesh)
    if hasattr(model, "generate"):
        dist.fsdp.register_fsdp_forward_method(model, "generate")
    vars(model)["_is_fsdp_managed_module"] = True  # generate() then runs equally often everywhere


def _layers_of(model: nn.Module) -> set[str]:
    """Return the class names of layers that a model of transformers lists.

    Classes that contain an embedding table are left out. A table may be used outside of its module,
    and a module that runs under one rule with a table (patches and their positions) cannot be
    gathered separately.
    """
    tables = {
        getattr(model, f"get_{which}_embeddings", lambda: None)() for which in ("input", "output")
    }
    with_table = {type(m).__name__ for m in model.modules() if tables & {*m.modules()}}
    return {*(getattr(model, "_no_split_modules", None) or ())} - with_table


def take_from_first_(unit: nn.Module, device: torch.device) -> None:
    """Move tensors that are not sharded yet to the device, with the first process's values."""
    for tensor in (*unit.parameters(), *unit.buffers()):
        if isinstance(tensor, DTensor):
            continue
        if tensor.is_meta:
            moved = torch.empty_like(tensor, device=device)
            if isinstance(tensor, nn.Parameter):
                moved = nn.Parameter(moved, tensor.requires_grad)
            torch.utils.swap_tensors(tensor, moved)
        elif tensor.device != device:
            tensor.data = tensor.data.to(device)
        dist.broadcast(tensor.data, src=0)
