"""The weights of a model that are projected: a default choice, or patterns of names."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D
from transformers.trainer_utils import check_target_module_exists

from dp_grape_hf.errors import PrivacyError


def projection_targets(
    model: nn.Module, trainable: Mapping[str, nn.Parameter], wanted: str | list[str] | None = None
) -> list[str]:
    """Return the names of the weights to project.

    Args:
        model: the model.
        trainable: name -> trainable parameter, each once.
        wanted: ``optim_target_modules``: names or regular expressions of modules, or
            ``all-linear``. None selects ``default_targets``.

    Raises:
        PrivacyError: if ``wanted`` matches nothing.
    """
    if wanted is None:
        return default_targets(model)
    names = [
        f"{path}.weight"
        for path, module in model.named_modules()
        if isinstance(module, (*MATRIX_LAYERS, nn.Embedding))
        and (wanted == "all-linear" or check_target_module_exists(wanted, path))
    ]
    names = [name for name in names if name in trainable]
    if not names:
        raise PrivacyError(
            f"optim_target_modules={wanted!r} matches no trainable linear layer or embedding. "
            "Give names or regular expressions of modules, or leave it out."
        )
    return names


def input_dimensions(model: nn.Module, of_features: bool = False) -> dict[str, int]:
    """Return weight name -> the dimension of the layer's input, if it is not 1.

    ``Conv1D`` stores (in, out), and the input of an embedding is the vocabulary. With
    ``of_features``, an embedding has the dimension of its output instead, which is 1.
    """
    kinds: tuple[type[nn.Module], ...] = (Conv1D,) if of_features else (Conv1D, nn.Embedding)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    modules: Any = (module for module in model.modules() if isinstance(module, kinds))
    return {names[id(module.weight)]: 0 for module in modules}


def default_targets(model: Any) -> list[str]:
    """Return the names of the weights that are projected by default.

    These are the trainable weights of the linear layers in the body of the model. Output embeddings
    are not projected, and neither is a head with one output for each label, as in the paper
    (Appendix, experimental details): their gradients already have low rank.
    """
    output = output_embeddings(model)
    labels = getattr(getattr(model, "config", None), "num_labels", None)
    shared, body = shared_parameters(model), getattr(model, "base_model_prefix", "")
    targets = []
    for name, module in model.named_modules():
        if not isinstance(module, MATRIX_LAYERS) or module is output:
            continue
        weight: Any = module.weight
        outside = f".{body}." not in f".{name}." if body else "." not in name
        is_head = outside and name and labels in tuple(weight.shape)
        if weight.requires_grad and not is_head and id(weight) not in shared:
            targets.append(f"{name}.weight" if name else "weight")
    return targets


def output_embeddings(model: Any) -> nn.Module | None:
    """Return the layer with a logit for each word of a vocabulary, if the model has one."""
    layer: nn.Module | None = getattr(model, "get_output_embeddings", lambda: None)()
    return layer


def shared_parameters(model: nn.Module) -> set[int]:
    """Return the ids of parameters that have more than one name in the model."""
    seen: set[int] = set()
    shared: set[int] = set()
    names: Iterable[tuple[str, nn.Parameter]] = model.named_parameters(remove_duplicate=False)
    for _, parameter in names:
        (shared if id(parameter) in seen else seen).add(id(parameter))
    return shared


MATRIX_LAYERS: tuple[type[nn.Module], ...] = (nn.Linear, Conv1D)
