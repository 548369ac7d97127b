"""The tasks of the OPT recipe: prompts, splits, and the tokens that a model sees of them.

Prompts, answers and splits are as in Malladi et al. (2023), "Fine-tuning language models with
just forward passes" (MeZO); the paper builds on it. A classification is a choice among options,
each of which is an answer to the same prompt; a question for text has one answer to learn from.

To add a task, add a function that reads a row of its data, and a row in ``TASKS``.

Shapes: B examples, O options of each, T tokens of the longest text, K of the longest answer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dp_grape_hf.gradients import IGNORE_INDEX
from recipes.paper.data import load_split

Row = Mapping[str, Any]
Example = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """An example as text."""

    prompt: str  # what comes before an answer
    # the answers to choose from; of a task that generates, the one to learn from
    options: tuple[str, ...]
    label: int = 0  # which option is right
    golds: tuple[str, ...] = ()  # of a task that generates, all answers that count as right


@dataclass(frozen=True)
class Task:
    """A data set, and how its rows are read."""

    # the name of the data set of the Hub, and of its configuration if it has several
    hub: tuple[str, ...]
    read: Callable[[Row], Question]  # makes a question of a row
    generates: bool = False  # whether an answer is generated, and compared with several right ones


# ---- Prompts ----


def sst2(row: Row) -> Question:
    """Is a sentence of a film review negative (0) or positive (1)?"""
    return Question(f"{row['sentence'].strip()} It was", (" terrible", " great"), row["label"])


def boolq(row: Row) -> Question:
    """Yes or no, after a passage."""
    question = row["question"]
    question = question[:1].upper() + question[1:] + ("" if question.endswith("?") else "?")
    return Question(f"{row['passage']} {question}\n", ("Yes", "No"), 0 if row["answer"] else 1)


def squad(row: Row) -> Question:
    """A few words out of a paragraph."""
    prompt = (
        f"Title: {row['title']}\nContext: {row['context']}\n"
        f"Question: {row['question'].strip()}\nAnswer:"
    )
    golds = tuple(row["answers"]["text"])
    return Question(prompt, (f" {golds[0]}\n",), golds=golds)


def drop(row: Row) -> Question:
    """A few words or a number, from counting and comparing in a passage."""
    prompt = f"Passage: {row['passage']}\nQuestion: {row['question'].strip()}\nAnswer:"
    golds = tuple(row["answers_spans"]["spans"])
    return Question(prompt, (f" {golds[0]}\n",), golds=golds)


TASKS: Mapping[str, Task] = {
    "SST2": Task(("nyu-mll/glue", "sst2"), sst2),
    "BoolQ": Task(("google/boolq",), boolq),
    "SQuAD": Task(("rajpurkar/squad",), squad, generates=True),
    "DROP": Task(("ucinlp/drop",), drop, generates=True),
}


# ---- Splits ----


def load_splits(
    task: Task,
    path: str | None,
    seed: int,
    sizes: Mapping[str, int],
    test_split: str = "validation",
) -> dict[str, list[Question]]:
    """Returns the questions of ``train``, ``dev`` and ``test``.

    ``train`` and behind it ``dev`` begin a seeded permutation of the training data; ``test`` begins
    one, of the same seed, of the validation data, which may have fewer rows than asked for.
    """
    rows, tests = (load_split(split, path, *task.hub) for split in ("train", test_split))
    train, dev = sizes["train"], sizes["dev"]
    if len(rows) < train + dev:
        raise ValueError(
            f"There are {len(rows)} training rows, and num_train={train} and num_dev={dev} take "
            f"{train + dev}. Give --num_train and --num_dev so that both fit."
        )
    chosen = permutation(len(rows), seed)
    tested = permutation(len(tests), seed)[: sizes["test"]]
    picked = {
        "train": rows.select(chosen[:train]),
        "dev": rows.select(chosen[train : train + dev]),
        "test": tests.select(tested),
    }
    return {name: [task.read(row) for row in part] for name, part in picked.items()}


def permutation(size: int, seed: int) -> list[int]:
    """Returns the permutation that NumPy's global generator makes of a seed."""
    order: list[int] = np.random.RandomState(seed).permutation(size).tolist()
    return order


# ---- Tokens ----


@dataclass(frozen=True)
class Encoder:
    """Makes tokens of questions.

    A text that is too long loses tokens on the left, but not the first ones, which every row has.
    """

    tokenizer: Any  # of the model
    max_length: int  # the most tokens of a row
    first: tuple[int, ...] = ()  # the ids that every row begins with

    def prompt(self, question: Question) -> list[int]:
        """Returns the ids of what comes before the answer."""
        return self._cut(self._ids(question.prompt))

    def example(self, question: Question) -> Example:
        """Returns ids to read for each option, the ids of the answers, and the label.

        An answer's tokens are those that the text has more with it than without. The last one is
        only predicted: options of one token are all predicted from the same text, which is there
        once.
        """
        before = len(self._ids(question.prompt))
        texts, answers = [], []
        for option in question.options:
            ids = self._ids(question.prompt + option)
            row, length = self._cut(ids), len(ids) - before
            if not 0 < length < len(row):
                raise ValueError(
                    f"The answer {option!r} takes {length} of the {len(row)} tokens of its row, "
                    f"with max_length={self.max_length}; the prompt needs some, and so does it."
                )
            texts.append(row[:-1])
            answers.append(row[-length:])
        if all(text == texts[0] for text in texts):
            texts = texts[:1]
        return {"input_ids": texts, "answers": answers, "labels": question.label}

    def _ids(self, text: str) -> list[int]:
        # Of spaces only: the line break at its end is the part of an answer that says it is over.
        return list(self.tokenizer(text.strip(" "), add_special_tokens=False)["input_ids"])

    def _cut(self, ids: list[int]) -> list[int]:
        return [*self.first, *ids[-(self.max_length - len(self.first)) :]]


def first_tokens(tokenizer: Any, bos_token_id: int | None) -> tuple[int, ...]:
    """Returns the ids that a row begins with: the given one, or what the tokenizer puts there."""
    return tuple(tokenizer("")["input_ids"]) if bos_token_id is None else (bos_token_id,)


def left_padded(
    rows: Sequence[Sequence[int]], pad: int, multiple: int = 1, least: int = 1
) -> tuple[Tensor, Tensor]:
    """Return ids (N, T) and their mask; T is a multiple of ``multiple``, at least ``least``."""
    width = -(-max(least, *map(len, rows)) // multiple) * multiple
    ids = torch.full((len(rows), width), pad)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :] = torch.tensor(row)
        mask[i, width - len(row) :] = 1
    return ids, mask


@dataclass(frozen=True)
class Collator:
    """Puts examples into one batch, padded on the left: all answers end behind the last column."""

    pad: int  # the id of the padding
    multiple: int = 8  # what the number of columns T is a multiple of
    # what the number of columns K is a multiple of. Only examples of the same shape share a
    # physical batch. So where answers differ in length, a coarse grid saves passes.
    answers: int = 1

    def __call__(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """Returns ids and mask (B, O or 1, T), answers (B, O, K) behind them, labels (B,)."""
        every = [answer for example in examples for answer in example["answers"]]
        answers, _ = left_padded(every, IGNORE_INDEX, self.answers)
        texts = [text for example in examples for text in example["input_ids"]]
        ids, mask = left_padded(texts, self.pad, self.multiple, least=answers.shape[1])
        tensors = {"input_ids": ids, "attention_mask": mask, "answers": answers}
        batch = {name: x.unflatten(0, (len(examples), -1)) for name, x in tensors.items()}
        return {**batch, "labels": torch.tensor([example["labels"] for example in examples])}
