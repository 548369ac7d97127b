"""Save the change that training made to a model as a PEFT adapter of the unchanged base model.

Training adds ``Z P^T`` or ``P Z`` to a projected weight, so the total change is the sum of one such
product for each P. This is LoRA's ``B A``, with a rank of r times the number of projections. The
modules of all other trained parameters are saved completely.

PEFT determines the tensor names and shapes: it adapts a copy of the model on the meta device. The
adapter of a run must have exactly these tensors. A model for which this fails is refused before
training.

Shapes: m x n a weight as stored, r the rank of one P, R the rank of the total change.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.projections import MATRIX_LAYERS, shared_parameters
from dp_grape_hf.publishing.model_files import ADAPTER

_PREFIX = "base_model.model."  # PEFT puts it before the name of a module
_BIAS = ".base_layer.bias"  # PEFT's name for the bias of a module with low-rank factors
_INSTEAD = "Save the complete model: save_as='model'."


def adapters_of(model: Any) -> Mapping[str, Any]:
    """Return the configs of a model's PEFT adapters, by the names of the adapters."""
    configs: Mapping[str, Any] = getattr(model, "peft_config", {})
    return configs


@dataclass(frozen=True)
class Adapter:
    """The modules of a model that an adapter contains, as low-rank factors or completely.

    Attributes:
        low_rank: path of a module -> the name of its weight, which gets low-rank factors.
        complete: paths of modules that are saved completely.
        biases: whether biases of the modules in ``low_rank`` were trained.
        tied: whether PEFT keeps modules in ``complete`` tied. Otherwise each is saved separately.
        base_shapes: the base model on the meta device: names and shapes without values.
    """

    low_rank: Mapping[str, str]
    complete: tuple[str, ...]
    biases: bool
    tied: bool
    base_shapes: nn.Module = field(repr=False, compare=False)

    @classmethod
    def of(
        cls, model: nn.Module, trained: Iterable[nn.Parameter], projected: Iterable[str]
    ) -> Adapter:
        """Return the adapter of a model before training, which will train some parameters.

        The change of parameters with a name in ``projected`` has low rank. Of these, the weights of
        ``nn.Linear`` and ``Conv1D`` get low-rank factors, unless they are shared or in a module
        that is saved completely.

        Raises:
            PrivacyError: no weight gets factors, or PEFT cannot save the model in this way.
        """
        if adapters_of(model):
            raise PrivacyError(
                "save_as='adapter' makes an adapter of the change of a run, but the model already "
                f"has an adapter of PEFT. Merge it first, by merge_and_unload(). {_INSTEAD}"
            )
        shared = shared_parameters(model)
        modules = dict(model.named_modules(remove_duplicate=False))
        low_rank = {}
        for name in projected:
            path, _, leaf = name.rpartition(".")
            module = modules[path]
            of_a_layer = path and leaf == "weight" and type(module) in MATRIX_LAYERS
            if of_a_layer and id(module.weight) not in shared:
                low_rank[path] = name
        # Path of a module -> one of its trained parameters; it must be saved completely.
        owners: dict[str, str] = {}
        ids, biases = {id(p) for p in trained}, set()
        for name, parameter in model.named_parameters(remove_duplicate=False):
            path, _, leaf = name.rpartition(".")
            if id(parameter) not in ids or low_rank.get(path) == name:
                continue
            if path in low_rank and leaf == "bias":
                biases.add(path)
            else:
                owners[path] = name
        if "" in owners:
            raise PrivacyError(
                f"save_as='adapter': {owners['']} is a parameter of the model itself, but PEFT "
                f"saves only submodules. Freeze it by requires_grad_(False). {_INSTEAD}"
            )
        # PEFT saves every module whose path ends with the given one, with all its submodules.
        saved = [path for path in modules if path.endswith(tuple(owners))] if owners else []
        complete = tuple(
            path for path in saved if not _is_in(path, [o for o in saved if o != path])
        )
        containing = [n for o, n in owners.items() if any(_is_in(path, [o]) for path in low_rank)]
        low_rank = {path: name for path, name in low_rank.items() if not _is_in(path, complete)}
        if not low_rank:
            raise PrivacyError(
                "save_as='adapter': no weight would be saved as low-rank factors. "
                + (
                    f"PEFT saves the complete module that contains {containing[0]}, and "
                    f"{len(containing)} such modules contain all projected weights. Freeze these "
                    "parameters. "
                    if containing
                    else "No projected weight is the weight of one linear layer alone. "
                )
                + _INSTEAD
            )
        weights = {path: getattr(modules[path], "weight", None) for path in complete}
        tied = [path for path, weight in weights.items() if id(weight) in shared]
        base_shapes = _without_numbers(model)
        adapter = cls(low_rank, complete, bool(biases & low_rank.keys()), bool(tied), base_shapes)
        try:
            adapter._adapted()  # PEFT may raise
        except PrivacyError:
            if not tied:
                raise
            adapter = replace(adapter, tied=False)
            adapter._adapted()
        return adapter

    def require_smaller(self, ranks: Mapping[str, int], periods: int) -> None:
        """Refuse a run whose factors would have at least as many elements as the weights.

        ``ranks`` maps names of weights to r; each weight has ``periods`` projections in the run.

        Raises:
            PrivacyError: the factors of a weight are not smaller than the weight.
        """
        for name in self.low_rank.values():
            m, n = self.base_shapes.get_parameter(name).shape
            rank = ranks[name] * periods
            if rank * (m + n) < m * n:
                continue
            most = (m * n - 1) // (ranks[name] * (m + n))
            advice = (
                f"Redraw less often, so that there are at most {most} projections: raise "
                "projection_update_steps (F)"
                if most
                else "Lower projection_rank (r)"
            )
            raise PrivacyError(
                f"save_as='adapter': the change of {name}, {m} x {n}, would have rank "
                f"{ranks[name]} x {periods} projections = {rank}. Its factors would have "
                f"{rank * (m + n)} numbers, and the weight has {m * n}. {advice}. {_INSTEAD}"
            )

    def save(
        self,
        tensors: Mapping[str, Tensor],
        factors: Mapping[str, tuple[Tensor, Tensor]],
        folder: Path,
    ) -> None:
        """Write ``adapter_model.safetensors`` and ``adapter_config.json``.

        ``peft.PeftModel.from_pretrained(base, folder)`` then returns the trained model, where
        ``base`` is the model before training.

        Args:
            tensors: the model's ``state_dict`` after training.
            factors: name of a weight -> (m, R) and (R, n), whose product was added to the weight.
                Unchanged weights are left out. Factors of a smaller R are padded with zeros.
            folder: the folder to write to; created if needed.

        Raises:
            PrivacyError: the model's modules changed since this adapter was made.
        """
        rank = max((left.shape[1] for left, _ in factors.values()), default=1)
        adapted, layout = self._adapted(rank)
        model, values = self.base_shapes, {}
        for path, name in self.low_rank.items():
            m, n = tensors[name].shape
            left, right = factors.get(name, (torch.zeros(m, 0), torch.zeros(0, n)))
            gap = rank - left.shape[1]
            left, right = functional.pad(left, (0, gap)), functional.pad(right, (0, 0, 0, gap))
            if isinstance(model.get_submodule(path), Conv1D):  # (in, out)
                left, right = right.T, left.T
            values[f"{_PREFIX}{path}.lora_A.weight"] = right
            values[f"{_PREFIX}{path}.lora_B.weight"] = left
            if self.biases and f"{path}.bias" in tensors:
                values[f"{_PREFIX}{path}{_BIAS}"] = tensors[f"{path}.bias"]
        for name, value in tensors.items():
            if _is_in(name, self.complete):
                values[f"{_PREFIX}{name}"] = value
        shapes = {name: tuple(value.shape) for name, value in values.items()}
        if wrong := sorted(name for name in layout if layout[name] != shapes.get(name)):
            raise PrivacyError(
                f"save_as='adapter': {wrong[0]} has shape {shapes.get(wrong[0])}, but PEFT expects "
                f"{layout[wrong[0]]}. The model was changed after the trainer was made. {_INSTEAD}"
            )
        folder.mkdir(parents=True, exist_ok=True)
        # Copied: a file of safetensors cannot contain shared tensors.
        copies = {k: v.detach().to("cpu", copy=True).contiguous() for k, v in values.items()}
        save_file(copies, folder / ADAPTER, metadata={"format": "pt"})
        config = adapted.peft_config["default"]
        config.inference_mode = True
        config.target_modules = sorted(config.target_modules)
        config.modules_to_save = list(self.complete) or None  # PEFT removed the tied modules
        config.base_model_name_or_path = getattr(model, "name_or_path", None) or None
        base = {"base_model_class": type(model).__name__, "parent_library": type(model).__module__}
        config.save_pretrained(str(folder), auto_mapping_dict=base)

    def _adapted(self, rank: int = 1) -> tuple[Any, dict[str, tuple[int, ...]]]:
        """Return PEFT's model around ``base_shapes``, and the shapes of its saved tensors."""
        import peft  # imported here, because it takes seconds

        model = copy.deepcopy(self.base_shapes)  # PEFT changes the model that it adapts
        layers = [model.get_submodule(path) for path in self.low_rank]
        config = peft.LoraConfig(
            r=rank,
            lora_alpha=rank,  # the scale of B A is then 1
            target_modules=sorted(self.low_rank),
            modules_to_save=list(self.complete) or None,
            bias="lora_only" if self.biases else "none",
            fan_in_fan_out=all(isinstance(layer, Conv1D) for layer in layers),
            ensure_weight_tying=self.tied,
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                adapted = peft.get_peft_model(model, config)
            except ValueError as error:
                raise PrivacyError(
                    f"save_as='adapter': PEFT cannot adapt this model: {error} {_INSTEAD}"
                ) from error
            saved = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
        # PEFT finds embeddings by their names, and warns if it finds none to tie.
        if self.tied and any("ensure_weight_tying" in f"{one.message}" for one in caught):
            raise PrivacyError(f"save_as='adapter': PEFT cannot tie {self.complete}. {_INSTEAD}")
        shapes = {name: tuple(value.shape) for name, value in saved.items()}
        expected = {f"{_PREFIX}{path}.lora_{x}.weight" for path in self.low_rank for x in "AB"}
        expected |= {
            f"{_PREFIX}{n}" for n in self.base_shapes.state_dict() if _is_in(n, self.complete)
        }
        # Biases may be missing: some versions of PEFT leave them out.
        if other := {name for name in shapes if not name.endswith(_BIAS)} ^ expected:
            raise PrivacyError(
                f"save_as='adapter': PEFT would not save exactly the trained tensors; {len(other)} "
                f"differ, such as {', '.join(sorted(other)[:3])}. Paths of modules of this model "
                f"end with the path of another module. {_INSTEAD}"
            )
        return adapted, shapes


def _is_in(path: str, places: Iterable[str]) -> bool:
    """Return whether a path is one of ``places`` or inside one of them."""
    return any(f"{path}.".startswith(f"{place}.") for place in places)


def _without_numbers(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the meta device, with shapes and types but no values."""
    copies: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        copied = nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty
        copies[id(tensor)] = copied.requires_grad_(tensor.requires_grad)
    return copy.deepcopy(model, copies)
