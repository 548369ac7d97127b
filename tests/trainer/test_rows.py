"""Rows of the training data that are not examples, of which the trainer warns when it is made."""

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from datasets import Dataset, Features, Image

from dp_grape_hf.trainer.rows import warn_of_rows
from tests.support.trainers import make_trainer

Batch = dict[str, list[Any]]
SOURCE = 24


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Texts of 6 to 9 tokens that begin in their own ways, from a file, as scripts load them."""
    folder = tmp_path_factory.mktemp("texts")
    rows = [
        {"id": f"e{i}", "text": [5 + (i + j) % 14 for j in range(6 + i % 4)]} for i in range(SOURCE)
    ]
    (folder / "train.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"train": str(folder / "train.json")}
    return datasets.load_dataset("json", data_files=files, cache_dir=str(folder / "cache"))["train"]


def mapped(dataset: Dataset, function: Callable[[Batch], Batch]) -> Dataset:
    return dataset.map(function, batched=True, remove_columns=dataset.column_names)


def cut(texts: Batch) -> Batch:
    """Cuts some texts into two rows, and says which text a row is of, as tokenizers do."""
    parts = [
        (i, text[k:]) for i, text in enumerate(texts["text"]) for k in (0, 3)[: 1 + (i % 3 == 0)]
    ]
    return {
        "input_ids": [part for _, part in parts],
        "labels": [len(part) % 2 for _, part in parts],
        "overflow_to_sample_mapping": [i for i, _ in parts],
        "example_id": [texts["id"][i] for i, _ in parts],
    }


def whole(texts: Batch) -> Batch:
    rows, numbers = texts["text"], range(len(texts["text"]))
    return {
        "input_ids": rows,
        "attention_mask": [[1] * len(row) for row in rows],
        "overflow_to_sample_mapping": list(numbers),
        "example_id": texts["id"],
    }


BEGIN, END, PAD = 1, 2, 0


class Tokens:
    bos_token_id, cls_token_id, eos_token_id, pad_token_id = BEGIN, None, END, PAD


class Processor:
    tokenizer = Tokens()


def packed(texts: Batch, marks: tuple[int, ...] = (END,), size: int = 12) -> Batch:
    """Joins all texts, with marks behind each, and cuts them into blocks."""
    tokens = [token for text in texts["text"] for token in (*text, *marks)]
    blocks = [tokens[i : i + size] for i in range(0, len(tokens) - size + 1, size)]
    return {"input_ids": blocks, "attention_mask": [[1] * size] * len(blocks), "labels": blocks}


def in_pairs(texts: Batch) -> Batch:
    """Two texts a row, as TRL packs them, and where each ends."""
    pairs = list(zip(texts["text"][::2], texts["text"][1::2], strict=True))
    return {
        "input_ids": [one + other for one, other in pairs],
        "seq_lengths": [[len(one), len(other)] for one, other in pairs],
        "position_ids": [[*range(len(one)), *range(len(other))] for one, other in pairs],
    }


def alone(texts: Batch) -> Batch:
    """What packing leaves of texts of which no two fit in a row, padded on either side."""
    rows = texts["text"]
    return {
        "input_ids": [[PAD, *row, PAD] for row in rows],
        "seq_lengths": [[len(row)] for row in rows],
        "position_ids": [[1, *range(len(row)), 0] for row in rows],
    }


def without(function: Callable[[Batch], Batch], *names: str) -> Callable[[Batch], Batch]:
    return lambda texts: {k: v for k, v in function(texts).items() if k not in names}


def said(
    dataset: Any, folder: Path, caplog: pytest.LogCaptureFixture, **settings: Any
) -> list[str]:
    """What a trainer that is made with the data warns of."""
    make_trainer(folder / "out", train_dataset=dataset, **settings)
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


MAPPING, ID = "overflow_to_sample_mapping", "example_id"


@pytest.mark.parametrize(
    ("makes", "words"),
    [
        (without(cut, ID), "'overflow_to_sample_mapping' that is the same in rows"),
        (without(cut, MAPPING), "'example_id' with values that several rows share"),
        (without(cut, ID, MAPPING), "has more rows than the split that it was made from"),
    ],
)
def test_rows_of_one_example_are_warned_of(
    makes: Callable[[Batch], Batch],
    words: str,
    loaded: Dataset,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (warning,) = said(mapped(loaded, makes), tmp_path, caplog)
    assert words in warning
    assert "privacy_unit_column='example_id'" in warning
    assert not any(word.isdigit() for word in warning.replace(".", " ").split())  # N may be secret


@pytest.mark.parametrize(
    ("makes", "tokenizer", "words"),
    [
        (packed, Tokens(), "in them that begins or ends a text"),
        (partial(packed, marks=(BEGIN,)), Processor(), "in them that begins or ends a text"),
        (without(in_pairs, "position_ids"), None, "'seq_lengths' with several lengths in a row"),
        (without(in_pairs, "seq_lengths"), None, "'position_ids' that begins again within a row"),
    ],
)
def test_blocks_of_packed_texts_are_warned_of(
    makes: Callable[[Batch], Batch],
    tokenizer: Any,
    words: str,
    loaded: Dataset,
    caplog: pytest.LogCaptureFixture,
) -> None:
    warn_of_rows(mapped(loaded, makes), tokenizer)
    (record,) = caplog.records
    assert words in record.getMessage()
    assert "packed into blocks" in record.getMessage()
    assert "privacy_unit_column" in record.getMessage()


def unpacked(length: int, first: int | None = None) -> Callable[[Batch], Batch]:
    """Each text in a row of its own, cut at one length."""

    def function(texts: Batch) -> Batch:
        rows = [([] if first is None else [first]) + text[:length] for text in texts["text"]]
        return {"input_ids": rows, "attention_mask": [[1] * len(r) for r in rows], "labels": rows}

    return function


def padded(texts: Batch) -> Batch:
    rows = [text + [0] * (9 - len(text)) for text in texts["text"]]
    mask = [[1] * len(text) + [0] * (9 - len(text)) for text in texts["text"]]
    return {"input_ids": rows, "attention_mask": mask, "labels": rows}


def tokens(*rows: list[int]) -> Dataset:
    return Dataset.from_dict({"input_ids": rows})


def others(texts: Batch) -> Batch:
    named = {ID: [f"other-{name}" for name in texts["id"]]}
    return whole({**texts, "text": [text[::-1] for text in texts["text"]]}) | named


@pytest.mark.parametrize(
    "makes",
    [
        lambda data: mapped(data, whole).shuffle(seed=0).select(range(12)),
        lambda data: mapped(data.select(range(12)), unpacked(9)),
        lambda data: mapped(data, unpacked(6)),  # as many as there were
        lambda data: mapped(data.select(range(12)), unpacked(6, first=1)),
        lambda data: mapped(data.select(range(12)), partial(packed, marks=())),  # nothing shows it
        lambda data: mapped(data, alone),
        lambda data: mapped(data.select(range(12)), padded),
        lambda data: mapped(data.select(range(12)), unpacked(6)).add_column("user", [*"ab"] * 6),
        lambda data: mapped(data.select(range(4)), unpacked(6)),  # too few to tell
        lambda data: datasets.concatenate_datasets([mapped(data, whole), mapped(data, others)]),
        lambda data: Dataset.from_dict({"x": [[0.5] * 6] * 9, "labels": [1] * 9}),
        lambda data: [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 24,
        lambda data: tokens(*[[BEGIN, 7, 8, END, PAD]] * 9),
        lambda data: tokens(*[[PAD, PAD, BEGIN, 7, END]] * 9),
        lambda data: tokens(*[[BEGIN, PAD, PAD, PAD, END]] * 9),
        lambda data: tokens(*[[7, 8, 9, 9, 9]] * 9),
        lambda data: tokens(*[[7] * i + [END, 8, 9, END] for i in range(1, 12)]),  # conversations
    ],
)
def test_rows_that_are_examples_are_not_warned_of(
    makes: Callable[[Dataset], Any], loaded: Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    data = makes(loaded)
    for tokenizer in (None, Tokens()):
        warn_of_rows(data, tokenizer)
    assert not caplog.records


@pytest.mark.parametrize(
    "settings",
    [
        {"privacy_unit_column": "example_id", "expected_batch_size": 4},
        {"method": "adam", "noise_multiplier": None, "target_delta": None},
    ],
)
def test_runs_with_a_unit_or_without_privacy_are_not_warned(
    settings: dict[str, Any], loaded: Dataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert said(mapped(loaded, cut), tmp_path, caplog, **settings) == []


def test_no_row_is_transformed_to_look_at_it(
    loaded: Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    """A transform may toss coins, and read files."""
    data = mapped(loaded, packed)
    data.set_transform(lambda rows: pytest.fail("it was fetched"))
    warn_of_rows(data, Tokens())
    assert len(caplog.records) == 1


def test_no_image_is_decoded_to_look_for_packed_texts() -> None:
    features = Features({"image": Image()})
    broken = [{"bytes": b"no image", "path": None}] * 9
    data = Dataset.from_dict({"image": broken}, features=features)
    with pytest.raises(OSError, match="cannot identify"):
        data[:9]
    warn_of_rows(data, Tokens())


def windows(texts: Batch, step: int, size: int = 16) -> Batch:
    """Windows of long texts, with a prompt before each."""
    prompt = list(range(100, 112))
    long = [[200 + 40 * i + j for j in range(40)] for i in range(len(texts["text"]))]
    cuts = [text[k : k + size] for text in long for k in range(0, 40 - size + 1, step)]
    return {"input_ids": [prompt + cut + [PAD] * 3 for cut in cuts]}


@pytest.mark.parametrize(("step", "alarm"), [(6, True), (16, False), (40, False)])
def test_a_warning_reports_overlapping_windows_but_not_shared_prompts(
    step: int, alarm: bool, loaded: Dataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = Dataset.from_list(loaded.to_list()).map(
        partial(windows, step=step), batched=True, remove_columns=["id", "text"]
    )
    warn_of_rows(rows)
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert ["overlap" in w and "privacy_unit_column" in w for w in warnings] == [True] * alarm
    assert not any(char.isdigit() for w in warnings for char in w)
