"""The six few-shot tasks as prompts: data, templates, label words, and heads.

The templates come from LM-BFF (Gao et al. 2021), as in MeZO, DPZero and the paper. A model
fills in the mask, and the logits of a few words there, one per label, are the logits of the labels.

Shapes: B samples in the batch, T positions, h hidden features, L labels.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput

FIRST, SECOND, MASK = "<first>", "<second>", "<mask>"
"""What a template has in the place of the texts, and of the word to fill in."""

ROOM = 18  # positions that a shortened prompt keeps for all but the first text: 128 - 110 of TREC


@dataclass(frozen=True)
class Task:
    """A task, its data and its prompts: a row of ``roberta_tasks.yaml``."""

    path: str  # of the data set at the Hub
    texts: Sequence[str]  # the columns of its texts
    # of the labels, by their number at the Hub; used where the data do not tell
    names: Sequence[str]
    words: Mapping[str, str]  # label name -> the word for it; the order of the labels here
    template: Sequence[str]  # pieces of the prompt
    write: Callable[..., tuple[str, ...]]  # texts -> how they stand in the prompt
    max_length: int  # the most tokens of a prompt
    name: str | None = None  # of its configuration at the Hub
    label: str = "label"  # the column of its label
    first_length: int | None = None  # the most tokens of its first text
    test: str = "validation"  # the split that stands for the test split
    revision: str | None = None  # of the data set at the Hub

    def lengths(self, max_length: int | None) -> tuple[int, int | None]:
        """Returns the most tokens of a prompt and of its first text.

        Args:
            max_length: if given, instead of the task's own. The first text then gets that less
                ``ROOM``, so that the mask is not cut off.
        """
        if max_length is None:
            return self.max_length, self.first_length
        if max_length <= ROOM:
            raise ValueError(f"{max_length=} must be above {ROOM}, which the template may need.")
        return max_length, max_length - ROOM


_WRITE: Mapping[str, Callable[..., tuple[str, ...]]] = {
    "as_it_is": lambda first: (first,),
    "as_answer": lambda first: (f" {first}",),  # to other words
    # A premise without its last character, which is a full stop, and a hypothesis
    "as_question": lambda one, two: (one[:-1], f" {two[:1].lower()}{two[1:]}"),
}
_ROWS = yaml.safe_load(Path(__file__).with_name("roberta_tasks.yaml").read_text(encoding="utf-8"))
TASKS: Mapping[str, Task] = {
    name: Task(**row | {"write": _WRITE[row["write"]]}) for name, row in _ROWS.items()
}


# ---- Prompts ----


def prompt(
    task: Task, tokenizer: Any, texts: Sequence[str], max_length: int | None = None
) -> list[int]:
    """Returns the tokens of a prompt of some texts; what is too long is cut off at its end."""
    most, most_first = task.lengths(max_length)
    written = task.write(*texts)
    tokens = [tokenizer.cls_token_id]
    for piece in task.template:
        if piece == MASK:
            tokens.append(tokenizer.mask_token_id)
        elif piece == FIRST:
            tokens += tokenizer.encode(written[0], add_special_tokens=False)[:most_first]
        elif piece == SECOND:
            tokens += tokenizer.encode(written[1], add_special_tokens=False)
        elif len(piece) == 1:  # as a token of its own, whatever it follows
            sign = tokenizer.convert_tokens_to_ids(piece)
            if sign in (None, tokenizer.unk_token_id):
                raise ValueError(f"The tokenizer has no token {piece!r}, which the template needs.")
            tokens.append(sign)
        else:
            tokens += tokenizer.encode(piece, add_special_tokens=False)
    tokens = [*tokens, tokenizer.sep_token_id][:most]
    if tokenizer.mask_token_id not in tokens:
        raise ValueError(
            f"The prompt for {texts[0][:60]!r}... has more than {most} tokens before its mask. "
            f"Give --max_length: the first text is then cut to {ROOM} tokens less."
        )
    return tokens


def label_words(task: Task, tokenizer: Any) -> list[int]:
    """Returns the token of each label's word, with the space before it."""
    found = {
        word: tokenizer.encode(f" {word}", add_special_tokens=False) for word in task.words.values()
    }
    unknown = tokenizer.unk_token_id
    if wrong := [word for word, ids in found.items() if len(ids) != 1 or ids == [unknown]]:
        raise ValueError(
            f"The tokenizer has no single token for the label words {wrong} of this task, with a "
            "space before them. Take a model whose tokenizer has them, or --head classification."
        )
    return [ids[0] for ids in found.values()]


# ---- The head ----


def read_at_mask(model: Any, words: Sequence[int]) -> Any:
    """Makes a masked language model return the logits of some words at the mask, (B, L).

    Only its forward changes, to ``logits_at_mask``: it saves and loads as the model it is.
    """
    _vocabulary_head(model)
    words_of_labels = torch.tensor(words, device=model.device)
    model.register_buffer("words_of_labels", words_of_labels, persistent=False)
    model.forward = MethodType(logits_at_mask, model)
    return model


def logits_at_mask(
    self: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    mask_pos: Tensor | None = None,
    token_type_ids: Tensor | None = None,
) -> SequenceClassifierOutput:
    """Returns the logits of the labels' words, (B, L); a forward of a masked language model.

    The vocabulary head runs at one position per sample: ``mask_pos`` (B,), or the first position if
    it is None. So its logits take 1/T of the memory, and so does its gradient, which has rank 1.
    """
    if mask_pos is None:
        mask_pos = torch.zeros_like(input_ids[:, 0])
    types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
    encoded = self.base_model(input_ids=input_ids, attention_mask=attention_mask, **types)
    hidden = torch.take_along_dim(encoded[0], mask_pos[:, None, None], 1)  # (B, 1, h)
    vocabulary = _vocabulary_head(self)(hidden)[:, 0]  # (B, V)
    return SequenceClassifierOutput(logits=vocabulary.index_select(1, self.words_of_labels))


def read_the_mean(model: Any, labels: int) -> Any:
    """Makes a sequence classifier read the mean of its encoder's outputs; its head is new.

    Sentence encoders are trained to have their meaning there, and not at the first position.
    """
    model.classifier = nn.Linear(model.config.hidden_size, labels)
    nn.init.normal_(model.classifier.weight, std=model.config.initializer_range)
    nn.init.zeros_(model.classifier.bias)
    if getattr(model.base_model, "pooler", None) is not None:
        model.base_model.pooler = None
    model.forward = MethodType(logits_of_mean, model)
    return model


def logits_of_mean(
    self: Any, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
) -> SequenceClassifierOutput:
    """Returns the logits of the labels, (B, L), of the mean over the positions of each sample."""
    types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
    hidden = self.base_model(input_ids=input_ids, attention_mask=attention_mask, **types)[0]
    weights = (attention_mask / attention_mask.sum(1, keepdim=True)).to(hidden.dtype)  # (B, T)
    return SequenceClassifierOutput(logits=self.classifier((hidden * weights[..., None]).sum(1)))


def _vocabulary_head(model: Any) -> nn.Module:
    heads = [child for child in model.children() if child is not model.base_model]
    if len(heads) != 1:
        raise ValueError(
            f"{type(model).__name__} computes its vocabulary's logits by {len(heads)} modules, not "
            "by one as RoBERTa and BERT. Use --head classification."
        )
    return heads[0]
