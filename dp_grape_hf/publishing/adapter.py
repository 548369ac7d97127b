"""A trained model as an adapter of PEFT: what training changed, beside a base that stays as it was.

A projected weight moves by ``Z P^T`` or ``P Z``, so its change over a run is the sum of one such
product for each P: LoRA's ``B A``, of rank r times the number of projections. All else that was
trained is saved whole, with the modules that it lies in.

PEFT makes the layout: it adapts a copy of the model that has no numbers, and what it would save of
that is filled in. So a model that it would adapt otherwise is refused before training.

Shapes: m x n a weight as stored, r the rank of one P, R that of a whole change.
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

_PREFIX = "base_model.model."  # PEFT's, before the name of a module
_BIAS = ".base_layer.bias"
_INSTEAD = "Save the whole model: save_as='model'."


def adapters_of(model: Any) -> Mapping[str, Any]:
    """Returns the configs of the adapters of PEFT that a model has, by their names."""
    configs: Mapping[str, Any] = getattr(model, "peft_config", {})
    return configs


@dataclass(frozen=True)
class Adapter:
    """Which modules of a model an adapter holds, and how.

    Attributes:
        low_rank: path of a module -> the name of its weight, which gets factors.
        whole: paths of modules that are saved as they are.
        biases: whether biases of the modules in ``low_rank`` were trained.
        tied: whether PEFT is to keep modules in ``whole`` tied; others that share are saved each.
        bare: the model, of shapes and types only.
    """

    low_rank: Mapping[str, str]
    whole: tuple[str, ...]
    biases: bool
    tied: bool
    bare: nn.Module = field(repr=False, compare=False)

    @classmethod
    def of(
        cls, model: nn.Module, trained: Iterable[nn.Parameter], projected: Iterable[str]
    ) -> Adapter:
        """Returns the adapter of a model.

        Args:
            model: before training.
            trained: its parameters that are trained.
            projected: the names of those whose change has low rank. Factors get the weights of
                ``nn.Linear`` and ``Conv1D`` among them that lie in no module that is saved whole,
                and have no other name.

        Raises:
            PrivacyError: no weight gets factors, or PEFT cannot save it so; with what to do.
        """
        if adapters_of(model):
            raise PrivacyError(
                "save_as='adapter' makes an adapter of what a run changed, and the model has an "
                f"adapter of PEFT already. Merge it first, by merge_and_unload(). {_INSTEAD}"
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
        ids, owners, biases = {id(p) for p in trained}, {}, set()
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
                f"save_as='adapter': {owners['']} is a parameter of the model itself, and PEFT "
                f"saves modules in it. Freeze it by requires_grad_(False). {_INSTEAD}"
            )
        # PEFT saves every module whose path ends so, and all that is in it.
        named = [path for path in modules if path.endswith(tuple(owners))] if owners else []
        whole = tuple(path for path in named if not _is_in(path, [o for o in named if o != path]))
        around = [n for o, n in owners.items() if any(_is_in(path, [o]) for path in low_rank)]
        low_rank = {path: name for path, name in low_rank.items() if not _is_in(path, whole)}
        if not low_rank:
            raise PrivacyError(
                "save_as='adapter': no weight's change would be saved as one of low rank. "
                + (
                    f"PEFT saves the whole module that {around[0]} is in, and {len(around)} such "
                    "modules have all projected weights in them: freeze these parameters. "
                    if around
                    else "No weight of a linear layer is projected and has only one name. "
                )
                + _INSTEAD
            )
        weights = {path: getattr(modules[path], "weight", None) for path in whole}
        tied = [path for path, weight in weights.items() if id(weight) in shared]
        bare = _without_numbers(model)
        found = cls(low_rank, whole, bool(biases & low_rank.keys()), bool(tied), bare)
        try:
            found._adapted()  # which PEFT may refuse
        except PrivacyError:
            if not tied:
                raise
            found = replace(found, tied=False)
            found._adapted()
        return found

    def require_smaller(self, ranks: Mapping[str, int], periods: int) -> None:
        """Refuses a run whose factors would have as many numbers as the weights.

        Args:
            ranks: name of a weight -> r.
            periods: how many P each weight meets.

        Raises:
            PrivacyError: naming the weight, the numbers and what to do.
        """
        for name in self.low_rank.values():
            m, n = self.bare.get_parameter(name).shape
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
                f"{ranks[name]} x {periods} projections = {rank}, and its factors {rank * (m + n)} "
                f"numbers, where the weight has {m * n}. {advice}. {_INSTEAD}"
            )

    def save(
        self,
        tensors: Mapping[str, Tensor],
        factors: Mapping[str, tuple[Tensor, Tensor]],
        folder: Path,
    ) -> None:
        """Writes ``adapter_model.safetensors`` and ``adapter_config.json``.

        ``peft.PeftModel.from_pretrained(base, folder)`` then is the trained model, for the base
        that training began with.

        Args:
            tensors: of the model's ``state_dict``, after training.
            factors: name of a weight -> (m, R) and (R, n), whose product was added to it; it is
                left out if nothing was. The adapter has the largest R; others gain zeros.
            folder: which is made if need be.

        Raises:
            PrivacyError: the model's modules are others than when this was made.
        """
        rank = max((left.shape[1] for left, _ in factors.values()), default=1)
        adapted, layout = self._adapted(rank)
        model, values = self.bare, {}
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
            if _is_in(name, self.whole):
                values[f"{_PREFIX}{name}"] = value
        shapes = {name: tuple(value.shape) for name, value in values.items()}
        if wrong := sorted(name for name in layout if layout[name] != shapes.get(name)):
            raise PrivacyError(
                f"save_as='adapter': {wrong[0]} has shape {shapes.get(wrong[0])}, and PEFT expects "
                f"{layout[wrong[0]]}. The model was changed after the trainer was made. {_INSTEAD}"
            )
        folder.mkdir(parents=True, exist_ok=True)
        # Copied, as a file of safetensors shares no tensors.
        kept = {k: v.detach().to("cpu", copy=True).contiguous() for k, v in values.items()}
        save_file(kept, folder / ADAPTER, metadata={"format": "pt"})
        config = adapted.peft_config["default"]
        config.inference_mode = True
        config.target_modules = sorted(config.target_modules)
        config.modules_to_save = list(self.whole) or None  # PEFT took out what is tied
        config.base_model_name_or_path = getattr(model, "name_or_path", None) or None
        made = {"base_model_class": type(model).__name__, "parent_library": type(model).__module__}
        config.save_pretrained(str(folder), auto_mapping_dict=made)

    def _adapted(self, rank: int = 1) -> tuple[Any, dict[str, tuple[int, ...]]]:
        """Returns PEFT's model of what is bare, and the shapes that it would save."""
        import peft  # not above, because that takes seconds

        model = copy.deepcopy(self.bare)  # PEFT changes what it adapts
        layers = [model.get_submodule(path) for path in self.low_rank]
        config = peft.LoraConfig(
            r=rank,
            lora_alpha=rank,  # so that B A counts once
            target_modules=sorted(self.low_rank),
            modules_to_save=list(self.whole) or None,
            bias="lora_only" if self.biases else "none",
            fan_in_fan_out=all(isinstance(layer, Conv1D) for layer in layers),
            ensure_weight_tying=self.tied,
        )
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                adapted = peft.get_peft_model(model, config)
            except ValueError as error:
                raise PrivacyError(
                    f"save_as='adapter': PEFT cannot adapt this model: {error} {_INSTEAD}"
                ) from error
            saved = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
        # It knows embeddings by their names, and says so where it finds none to tie.
        if self.tied and any("ensure_weight_tying" in f"{one.message}" for one in said):
            raise PrivacyError(f"save_as='adapter': PEFT cannot tie {self.whole}. {_INSTEAD}")
        shapes = {name: tuple(value.shape) for name, value in saved.items()}
        expected = {f"{_PREFIX}{path}.lora_{x}.weight" for path in self.low_rank for x in "AB"}
        expected |= {f"{_PREFIX}{n}" for n in self.bare.state_dict() if _is_in(n, self.whole)}
        # Biases may be missing: some versions of PEFT leave them out.
        if other := {name for name in shapes if not name.endswith(_BIAS)} ^ expected:
            raise PrivacyError(
                f"save_as='adapter': PEFT would save {', '.join(sorted(other)[:3])} and "
                f"{len(other)} such tensors in all otherwise than the run trained them, as names "
                f"of modules of this model end like others. {_INSTEAD}"
            )
        return adapted, shapes


def _is_in(path: str, places: Iterable[str]) -> bool:
    """Whether a path is one of some modules, or of what is in them."""
    return any(f"{path}.".startswith(f"{place}.") for place in places)


def _without_numbers(model: nn.Module) -> nn.Module:
    """Returns a copy of a model whose tensors have shapes and types only."""
    known: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        kept = nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty
        known[id(tensor)] = kept.requires_grad_(tensor.requires_grad)
    return copy.deepcopy(model, known)
