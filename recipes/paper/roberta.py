"""The paper's few-shot experiments with RoBERTa-large: six tasks, k = 512 examples a class.

    accelerate launch -m recipes.paper.roberta --task SST-2 --method dp_grape --target_epsilon 6 \\
        --seed 42 --save_model --output_dir runs/roberta

runs one cell of the paper's table of few-shot results (tab:roberta-fewshot-results). The seed draws
the examples as well. ``--zero_shot --method adam`` scores the untrained model. The dev split, the
next k examples of each class, is for choosing settings; it and the test split count as public.

``--save_model`` leaves a model that ``AutoModelForMaskedLM.from_pretrained`` loads. It classifies a
text by the logits of the label words at the mask of the prompt. With ``--head classification``,
``AutoModelForSequenceClassification`` loads it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from datasets import ClassLabel, Dataset
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
)
from transformers.hf_argparser import HfArg

from dp_grape_hf import DPGrapeTrainingArguments
from recipes.paper.data import load_split
from recipes.paper.experiment import (
    Experiment,
    ExperimentArguments,
    Family,
    Scores,
    accuracy,
    in_adapter,
    main,
)
from recipes.paper.roberta_prompts import (
    TASKS,
    Task,
    label_words,
    prompt,
    read_at_mask,
    read_the_mean,
)

PROMPT, CLASSIFICATION, MEAN = "prompt", "classification", "mean"
SPLIT_NOTE = (
    "The few-shot split is drawn by the paper's rule from the rows of another copy of the data, in "
    "another order: the same distribution, not the same examples."
)
TEST_ROWS, TEST_SEED = 1000, 42  # a larger test split is cut to so many rows, whatever the seed

Example = dict[str, Any]


@dataclass
class RobertaArguments(ExperimentArguments):
    """The trained parameters, and the number of examples."""

    head: Literal["prompt", "classification", "mean"] = HfArg(
        default=PROMPT,
        help=f"{PROMPT}: a masked language model fills in a template, as in the paper. "
        f"{CLASSIFICATION}: a new head on the texts alone, for any encoder, where the model "
        f"has it. {MEAN}: a new head on the mean over positions, for sentence encoders.",
    )
    k: int = HfArg(default=512, help="The number of training examples of a class.")
    max_length: int | None = HfArg(
        default=None, help="The most tokens of an example. Default: that of the task, 128 or 256."
    )
    train_split: str = HfArg(
        default="train",
        help="What training and dev examples are drawn from; a + b takes two splits.",
    )
    test_split: str | None = HfArg(
        default=None, help="What is tested on. Default: that of the task."
    )


def load(script: RobertaArguments, args: DPGrapeTrainingArguments) -> Experiment:
    """Returns the experiment: the task's few-shot split, and the model."""
    if script.zero_shot and script.head != PROMPT:
        raise ValueError(f"zero_shot=True needs head={PROMPT!r}: a new head knows nothing yet.")
    if script.save_model and script.head == MEAN:
        raise ValueError(
            f"save_model=True with head={MEAN!r}: no class of transformers reads the mean, so the "
            f"model would load as another one. Take head={PROMPT!r} or head={CLASSIFICATION!r}."
        )
    task = TASKS[script.task]
    tokenizer = AutoTokenizer.from_pretrained(script.model_name_or_path)
    pool = rows_of(task, script, script.train_split)
    tested = rows_of(task, script, script.test_split or task.test)
    of_train, of_dev = few_shot(pool["labels"], script.k, args.seed)
    chosen = {
        "train": pool[of_train],
        "dev": pool[of_dev],
        "test": tested[rows_tested(len(tested))],
    }
    splits = {name: encoded(rows, task, tokenizer, script) for name, rows in chosen.items()}
    if empty := [name for name, examples in splits.items() if not examples]:
        raise ValueError(f"k={script.k} leaves no examples for {', '.join(empty)}: lower --k.")
    collator = Collator(tokenizer, finds_mask=script.head == PROMPT)

    def score(model: nn.Module, split: str) -> Scores:
        examples = sorted(splits[split], key=lambda example: len(example["input_ids"]))
        found = accuracy(model, examples, collator, args.per_device_eval_batch_size)
        return {"accuracy": found}

    return Experiment(
        model=model_for(task, tokenizer, script, args).to(args.device),
        train=splits["train"],
        collator=collator,
        score=score,
        splits={name: len(splits[name]) for name in ("dev", "test")},
        loss=None if script.head == CLASSIFICATION else cross_entropy,
        tokenizer=tokenizer,
        notes=[SPLIT_NOTE],
    )


# ---- Data ----


def rows_of(task: Task, script: RobertaArguments, split: str) -> Dataset:
    """Returns a split: ``texts``, a list of one or two, and ``labels`` in the task's order.

    Rows without a label (-1, as SNLI has) are left out.
    """
    data = load_split(split, script.dataset_path, task.path, task.name, task.revision)
    feature = data.features[task.label]
    names = feature.names if isinstance(feature, ClassLabel) else task.names
    if set(names) != set(task.words):
        raise ValueError(f"The data have the labels {names}; the task has {list(task.words)}.")
    order = {number: list(task.words).index(name) for number, name in enumerate(names)}
    labels = np.array(data[task.label])
    if wrong := set(labels.tolist()) - {*order, -1}:
        raise ValueError(f"Column {task.label!r} has {sorted(wrong)}, which are no labels.")
    kept = np.flatnonzero(labels >= 0)
    columns = [data[column] for column in task.texts]
    return Dataset.from_dict(
        {
            "texts": [[column[i] for column in columns] for i in kept.tolist()],
            "labels": [order[label] for label in labels[kept].tolist()],
        }
    )


def few_shot(labels: Sequence[int], k: int, seed: int) -> tuple[list[int], list[int]]:
    """Returns the first k rows of each class in a random order, and the next k.

    A class with less than k rows is in the training split only.
    """
    by_class: dict[int, list[int]] = {}
    labels = list(labels)
    for row in np.random.RandomState(seed).permutation(len(labels)).tolist():
        by_class.setdefault(labels[row], []).append(row)
    train = [row for rows in by_class.values() for row in rows[:k]]
    dev = [row for rows in by_class.values() for row in rows[k : 2 * k]]
    return train, dev


def rows_tested(count: int) -> list[int]:
    """Returns the rows of a test split that are used: all, or a thousand of them."""
    if count <= TEST_ROWS:
        return list(range(count))
    return np.random.RandomState(TEST_SEED).permutation(count)[:TEST_ROWS].tolist()


def encoded(
    rows: dict[str, list[Any]], task: Task, tokenizer: Any, script: RobertaArguments
) -> list[Example]:
    """Returns examples of rows: prompts, or the texts alone as the tokenizer joins them."""
    examples = []
    for texts, label in zip(rows["texts"], rows["labels"], strict=True):
        if script.head == PROMPT:
            inputs = {"input_ids": prompt(task, tokenizer, texts, script.max_length)}
        else:
            longest = script.max_length or task.max_length
            inputs = dict(tokenizer(*texts, truncation=True, max_length=longest))
        examples.append({**inputs, "labels": label})
    return examples


class Collator:
    """Pads a batch to its longest example, and says where the mask of each prompt is."""

    def __init__(self, tokenizer: Any, finds_mask: bool) -> None:
        self._pad = DataCollatorWithPadding(tokenizer)
        self._mask = tokenizer.mask_token_id if finds_mask else None

    def __call__(self, examples: list[Example]) -> dict[str, Tensor]:
        """Returns the batch."""
        batch = dict(self._pad(examples))
        if self._mask is not None:
            batch["mask_pos"] = (batch["input_ids"] == self._mask).int().argmax(1)
        return batch


# ---- The model ----


def model_for(
    task: Task, tokenizer: Any, script: RobertaArguments, args: DPGrapeTrainingArguments
) -> Any:
    """Returns the model with its head, in an adapter if the method trains one."""
    path = script.model_name_or_path
    if script.head == PROMPT:
        model = AutoModelForMaskedLM.from_pretrained(path)
        model = read_at_mask(model, label_words(task, tokenizer))
        return in_adapter(model, script, args, tokenizer=tokenizer)
    names = dict(enumerate(task.words))
    model = AutoModelForSequenceClassification.from_pretrained(
        path, id2label=names, label2id={name: label for label, name in names.items()}
    )
    if script.head == MEAN:
        model = read_the_mean(model, len(task.words))
    return in_adapter(model, script, args, ["classifier"], tokenizer)


def cross_entropy(outputs: Any, labels: Tensor | None) -> Tensor:
    """Returns the loss of each sample, (B,)."""
    assert labels is not None
    return functional.cross_entropy(outputs.logits.float(), labels, reduction="none")


FAMILY = Family("roberta", RobertaArguments, tuple(TASKS), load)

if __name__ == "__main__":
    main(FAMILY)
