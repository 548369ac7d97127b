"""A row is made of its own example and of coins of its own, whoever else was drawn."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForMultipleChoice,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    default_data_collator,
)

from dp_grape_hf import PrivacyError
from dp_grape_hf.mechanism import Grid, LogicalBatchCollator, RowCollator, collation
from dp_grape_hf.trainer.collators import refuse_other_rows
from recipes.paper.opt_tasks import Collator as OptionsCollator
from tests.support.collators import longest_first, tokenizer


def ids(length, seed=0):
    return torch.randint(5, 60, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def text(length, i):
    return {"input_ids": ids(length, i), "attention_mask": [1] * length, "labels": i % 3}


def mixup(examples):
    x = torch.tensor([e["x"] for e in examples])
    return {"x": 0.7 * x + 0.3 * x.flip(0), "labels": torch.tensor([e["labels"] for e in examples])}


def normalised(examples):
    x = torch.tensor([e["x"] for e in examples])
    return {"x": x - x.mean(), "labels": torch.tensor([e["labels"] for e in examples])}


def tokens(length, i):
    return text(length, i) | {"labels": [i % 3] * length}


def summary(length, i):
    return text(length, i) | {"labels": ids(2 + i % 11, i)}


def question(length, i):
    options = [ids(length + k, i + k) for k in range(3)]
    return {"input_ids": options, "attention_mask": [[1] * len(o) for o in options], "label": i % 3}


def options(length, i):
    rows = [ids(length + k, i + k) for k in range(2)]
    return {"input_ids": rows, "answers": [ids(1 + i % 2, i), ids(2, i)], "labels": i % 2}


def numbers(length, i):
    return {"x": [float(length), float(i)], "labels": i % 2}


def with_holes(length, i):
    row = text(8, i)
    return row | {"attention_mask": None} if length > 12 else row


def boxes(length, i):
    return tokens(length, i) | {"labels": 1, "bbox": [[k, 1, 2, 3] for k in range(length)]}


def with_boxes(examples):
    longest = max(len(e["bbox"]) for e in examples)
    padded = [e["bbox"] + [[0] * 4] * (longest - len(e["bbox"])) for e in examples]
    texts = [{k: v for k, v in e.items() if k != "bbox"} for e in examples]
    return dict(DataCollatorWithPadding(tokenizer())(texts)) | {"bbox": torch.tensor(padded)}


COLLATORS = {
    "padded right": (DataCollatorWithPadding(tokenizer()), text),
    "padded left": (DataCollatorWithPadding(tokenizer("left")), text),
    "tokens": (DataCollatorForTokenClassification(tokenizer()), tokens),
    "summaries": (DataCollatorForSeq2Seq(tokenizer()), summary),
    "options": (DataCollatorForMultipleChoice(tokenizer()), question),
    "options of OPT": (OptionsCollator(1), options),
    "next words": (DataCollatorForLanguageModeling(tokenizer(), mlm=False), text),
    "flat": (DataCollatorWithFlattening(), lambda n, i: {"input_ids": ids(n, i)}),
    "boxes": (with_boxes, boxes),
    "a column is None": (default_data_collator, with_holes),
    "stretched": (longest_first, text),
    "mixed": (mixup, numbers),
    "normalised": (normalised, numbers),
}
each_collator = pytest.mark.parametrize("name", COLLATORS)
LENGTHS = (3, 30, 8, 9, 17, 17, 41, 5, 12, 24, 16, 2)


def rows_of(batches):
    return [
        {k: v[i].tolist() if isinstance(v, Tensor) else v for k, v in batch.items()}
        for batch, size in zip(batches, batches.sizes, strict=True)
        for i in range(size)
    ]


@each_collator
def test_a_row_does_not_notice_who_else_is_drawn(name):
    collator, make = COLLATORS[name]
    collate = LogicalBatchCollator(collator, 3)
    examples = [make(length, i) for i, length in enumerate(LENGTHS)]
    everyone = rows_of(collate(examples))
    for left_out in range(len(examples)):
        rest = rows_of(collate(examples[:left_out] + examples[left_out + 1 :]))
        own = rows_of(collate([examples[left_out]]))
        assert sorted(map(str, rest + own)) == sorted(map(str, everyone))


@each_collator
def test_a_row_equals_the_example_collated_alone_up_to_padding(name):
    collator, make = COLLATORS[name]
    examples = [make(length, i) for i, length in enumerate(LENGTHS)]
    if name in ("stretched", "mixed", "normalised"):
        with pytest.raises(PrivacyError, match="from other examples"):
            refuse_other_rows(RowCollator(collator), examples)
    else:
        refuse_other_rows(RowCollator(collator), examples)


@pytest.mark.parametrize("name", ["padded left", "options", "boxes", "next words"])
def test_texts_have_few_lengths(name):
    collator, make = COLLATORS[name]
    batches = LogicalBatchCollator(collator, 100)(
        [make(n, i) for n in range(1, 65) for i in (0, 1)]
    )
    lengths = [batch["input_ids"].shape[-1] for batch in batches]
    assert lengths[-7:] == [64, 48, 32, 24, 16, 12, 8]
    assert lengths == sorted(set(lengths), reverse=True)  # each once, the longest first
    assert sum(batches.sizes) == 128


def test_the_grid_pads_by_less_than_a_half():
    lengths = [Grid()(n) for n in range(1, 3000)]
    assert lengths == sorted(lengths)
    assert all(n <= grid < n + 8 or grid < 1.5 * n for n, grid in enumerate(lengths, 1))
    assert len(set(lengths)) < 20


def test_padding_stays_within_the_positions_of_a_model():
    longest = 43
    own = RowCollator(COLLATORS["padded left"][0], Grid(longest))
    for length in range(1, longest + 1):
        expected = min(Grid()(length), longest)
        assert own([text(length, 0)])["input_ids"].shape == (1, expected)
    assert own([text(longest + 1, 0)])["input_ids"].shape[1] >= longest + 1  # the model's affair


def test_what_a_collator_pads_together_stays_within_the_positions_too():
    def joined(examples):
        rows = [torch.tensor(e["prompt_ids"] + e["answer_ids"]) for e in examples]
        return {"input_ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)}

    example = {"prompt_ids": ids(9), "answer_ids": ids(9)}
    assert RowCollator(joined)([example])["input_ids"].shape == (1, 24)
    assert RowCollator(joined, Grid(20))([example])["input_ids"].shape == (1, 18)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_lists_arrays_and_tensors_are_padded_alike(kind):
    def pads(examples):
        rows = [torch.as_tensor(e["input_ids"]) for e in examples]
        labels = torch.stack([torch.as_tensor(e["labels"]) for e in examples])
        return {"input_ids": torch.nn.utils.rnn.pad_sequence(rows, True), "labels": labels}

    classes = kind([0.0, 1.0, 0.0])  # one number for each class, which is no sequence
    row = RowCollator(pads)([{"input_ids": kind([7] * 5), "labels": classes}])
    assert row["input_ids"].tolist() == [[7] * 5 + [0] * 3]
    assert row["labels"].shape == (1, 3)


def test_an_example_is_not_changed_by_its_collator():
    def takes_out(examples):
        labels = [e.pop("labels") for e in examples]
        return dict(COLLATORS["padded left"][0](examples)) | {"labels": torch.tensor(labels)}

    example = text(5, 0)
    assert RowCollator(takes_out)([example])["input_ids"].shape == (1, 8)
    assert example == text(5, 0)


@pytest.mark.parametrize(
    ("collator", "reason"),
    [
        (lambda examples: {"x": torch.zeros(2 * len(examples), 3)}, "'x'.*another number of rows"),
        (lambda examples: {"x": torch.zeros(3, 1)[: len(examples) - 1]}, "another number of rows"),
        (lambda examples: {"x": torch.tensor(1.0)}, "'x'.*with no row"),
        (lambda examples: torch.zeros(len(examples)), "returned a Tensor.*mapping"),
    ],
)
def test_what_has_no_row_for_an_example_is_refused(collator, reason):
    with pytest.raises(PrivacyError, match=reason):
        LogicalBatchCollator(collator, 4)([1, 2, 3])


def test_an_error_of_a_collator_is_its_own():
    def fails(examples):
        raise ValueError("of the collator")

    with pytest.raises(ValueError, match="of the collator"):
        LogicalBatchCollator(fails, 4)([text(3, 0)])


def test_a_unit_is_collated_by_itself():
    collator, make = COLLATORS["padded left"]
    units = [[make(3, 0), make(20, 1)], [make(5, 2)], [make(9, 3), make(4, 4)], [make(24, 5)]]
    collate = LogicalBatchCollator(collator, 8, of_units=True)
    everyone = rows_of(collate(units))
    assert sorted(len(row["input_ids"]) for row in everyone) == [8, 12, 12, 24, 24, 24]
    for left_out in range(len(units)):
        rest = collate(units[:left_out] + units[left_out + 1 :])
        contents = [{**row, "privacy_unit_of_row": 0} for row in rows_of(rest)]
        own = [{**row, "privacy_unit_of_row": 0} for row in rows_of(collate([units[left_out]]))]
        all_rows = [{**row, "privacy_unit_of_row": 0} for row in everyone]
        assert sorted(map(str, contents + own)) == sorted(map(str, all_rows))


def _states():
    return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]


def _coins():
    return [float(torch.rand([])), random.random(), float(np.random.rand())]


def test_coins_of_one_example_are_nothing_to_the_next():
    """Whatever it draws, seeds or rewinds: nobody after it has other coins for that."""

    def tosses(how):
        if how == "seeds":
            torch.manual_seed(0), random.seed(0), np.random.seed(0)
        coins = _coins()
        return coins + _coins() if how == "more" else coins

    found = []
    for how in ("less", "more", "seeds"):
        torch.manual_seed(5)
        items, seeds = [how, "less"], collation.repeatable_seeds
        first, second = collation.with_separate_seeds(tosses, items, seeds)
        found.append((second, _coins()[0]))
        assert second[0] != first[0]
    assert found[0] == found[1] == found[2]


def test_coins_are_fresh_whatever_seed_is_set():
    before, flat = _states(), []
    for _ in range(2):
        torch.manual_seed(0)
        made = collation.with_separate_seeds(lambda _: _coins(), range(3))
        flat += [coin for coins in made for coin in coins]
    assert len(set(flat)) == len(flat)
    assert _states()[1:] == before[1:]


def test_a_collators_random_draw_is_made_for_each_example():
    def crops(examples):
        start = int(torch.randint(8, ()))
        return {"x": torch.tensor([e["x"] for e in examples])[:, start : start + 4]}

    (batch,) = LogicalBatchCollator(crops, 100)([{"x": list(range(12))}] * 64)
    assert {int(row[0]) for row in batch["x"]} == set(range(8))  # missed by chance: below 0.002
