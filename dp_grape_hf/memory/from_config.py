"""A model that is given by its configuration alone, and batches with the shapes of real ones."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from dp_grape_hf.errors import PrivacyError, require
from dp_grape_hf.gradients import choice, classification, is_regression, loss_for
from dp_grape_hf.memory.fakes import fake_tensors
from dp_grape_hf.projections import reads_synthetic, synthetic_batches

_CHOICES = 4  # options of a multiple-choice question


class ModelOfConfig:
    """A model of a configuration: ``build`` makes it, and ``batch`` makes its inputs.

    Args:
        config: the model's configuration.
        head: the end of the name of a class ``AutoModelFor...``, such as ``causal-lm``; None for
            the architecture that the config names, or a classifier (``class_of``).
        seq_len: T, the number of tokens of a text.

    Attributes:
        name: name of the model's class.
        parameters: number of parameters.
        length: description of a sample's length.

    Raises:
        PrivacyError: if there is no model with that head, no head, or an unknown kind of inputs.
        UnsupportedModelError: if the package has no per-sample loss for the head.
    """

    def __init__(self, config: Any, head: str | None, seq_len: int) -> None:
        self._config, self._seq_len = config, seq_len
        self._shape: tuple[int, ...] = (seq_len,)
        most = getattr(config, "max_position_embeddings", None) or seq_len
        require(seq_len <= most, f"{seq_len=} is more than the model's {most} positions.")
        cls = class_of(config) if head is None else auto_class(head)
        self._make = cls.from_config if hasattr(cls, "from_config") else cls._from_config
        self.length = f"{seq_len} tokens"
        with fake_tensors():
            model: Any = self.build(torch.float32)
            self.name, self._input = type(model).__name__, model.main_input_name
            require(
                reads_synthetic(model),
                f"{self.name} takes {self._input}, and the simulation makes only batches of texts, "
                "images and sound.",
            )
            if self._input != "input_ids":
                self._shape = next(synthetic_batches(model))[self._input].shape[1:]
        if self._input == "pixel_values":
            self.length = "{}x{} pixels".format(*self._shape[-2:])
        self.parameters = sum(p.numel() for p in model.parameters())
        loss: Any = loss_for(model)  # the loss of a head, because transformers defines the class
        self._head = loss.head

    def build(self, dtype: torch.dtype) -> nn.Module:
        """Return the model, with weights of that type."""
        try:
            model: nn.Module = self._make(self._config, dtype=dtype)
        except ValueError as error:
            raise PrivacyError(
                f"{type(self._config).__name__} makes no {self._make.__self__.__name__}: "
                f"{str(error).splitlines()[0]}"
            ) from error
        return model

    def batch(self, size: int) -> dict[str, Tensor]:
        """Return B = ``size`` samples, with labels as the head takes them."""
        choices = (_CHOICES,) if self._head.loss is choice else ()
        inputs = {self._input: torch.zeros(size, *choices, *self._shape)}
        if self._input == "input_ids":
            words = getattr(self._config.get_text_config(), "vocab_size", 2)
            ids = torch.randint(words, (size, *choices, *self._shape))
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        labels = torch.zeros(size, dtype=torch.long)
        if self._head.targets is not None:
            labels = torch.zeros(size, self._seq_len, dtype=torch.long)
        elif self._head.loss is classification:
            columns, problem = self._config.num_labels, self._config.problem_type
            if problem == "multi_label_classification" or is_regression(self._config, columns):
                labels = torch.zeros(size, columns)
        return inputs | dict.fromkeys(self._head.labels, labels)


def read_config(option: str, name: str, num_labels: int | None) -> Any:
    """Return the configuration of a model, with ``num_labels`` unless that is None.

    Raises:
        PrivacyError: if there is none; it names the ``option`` that has the name.
    """
    try:
        config = transformers.AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise PrivacyError(
            f"{option}={name!r} has no config that transformers can read: "
            f"{str(error).splitlines()[0].rstrip('.')}. Pass the folder that a model was saved to, "
            "or its name on the Hub."
        ) from error
    if num_labels is not None:
        config.num_labels = num_labels
    return config


def class_of(config: Any) -> Any:
    """Return the class that a configuration names, or a classifier if it names one without a head.

    Raises:
        PrivacyError: if there is neither.
    """
    name = (config.architectures or [""])[0]
    if ("For" in name or name.endswith("HeadModel")) and hasattr(transformers, name):
        return getattr(transformers, name)
    for kind in ("Sequence", "Image", "Audio"):
        classifier = getattr(transformers, f"AutoModelFor{kind}Classification")
        if type(config) in classifier._model_mapping:
            return classifier
    raise PrivacyError(
        f"The config names the architecture {name!r}, which has no head, and {config.model_type} "
        "has no classifier in Transformers. Give --head, for example causal-lm."
    )


def auto_class(head: str) -> Any:
    """Return the class ``AutoModelFor...`` of a head, as ``causal-lm``.

    Raises:
        PrivacyError: if there is none.
    """
    wanted = "automodelfor" + head.replace("-", "")
    name = next((name for name in dir(transformers) if name.lower() == wanted), None)
    if name is None:
        raise PrivacyError(
            f"{head=} is the end of no AutoModelFor... in Transformers; an example of one is "
            "sequence-classification."
        )
    return getattr(transformers, name)
