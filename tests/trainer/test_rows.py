"""Rows of the training data that are not examples, of which the trainer warns when it is made."""

import logging

import datasets
import pytest
import torch
from datasets import Dataset, Features, Image, SplitInfo, concatenate_datasets
from torch.utils.data import ConcatDataset, Subset

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.trainer.overlap import refuse_repeated
from dp_grape_hf.trainer.rows import warn_of_rows
from tests.support.trainers import make_trainer, points

SOURCE = 24
BEGIN, END, PAD = 1, 2, 0
TEXTS = [[5 + (i + j) % 14 for j in range(6 + i % 4)] for i in range(SOURCE)]  # 6 to 9 tokens


class Tokens:
    bos_token_id, cls_token_id, eos_token_id, pad_token_id = BEGIN, None, END, PAD


class Processor:
    tokenizer = Tokens()


def data_of(rows, labels=None, **columns):
    """Returns a data set that was made from a split of so many texts, as ``map`` keeps it."""
    held = {"input_ids": rows, **({} if labels is None else {"labels": labels}), **columns}
    data = Dataset.from_dict(held, split=datasets.Split.TRAIN)
    data.info.splits = datasets.SplitDict(train=SplitInfo("train", num_examples=SOURCE))
    return data


def cut(*names):
    """Some texts cut into two rows, with columns that say which text a row is of."""
    parts = [(i, text[k:]) for i, text in enumerate(TEXTS) for k in (0, 3)[: 1 + (i % 3 == 0)]]
    columns = {"overflow_to_sample_mapping": [i for i, _ in parts]}
    columns["example_id"] = [f"e{i}" for i, _ in parts]
    named = {name: columns[name] for name in names}
    return data_of([part for _, part in parts], [len(part) % 2 for _, part in parts], **named)


def whole(of="e"):
    ids = [f"{of}{i}" for i in range(SOURCE)]
    return data_of(TEXTS, overflow_to_sample_mapping=[*range(SOURCE)], example_id=ids)


def packed(marks=(END,), size=12, texts=SOURCE):
    """All texts joined, with marks behind each, and cut into blocks."""
    tokens = [token for text in TEXTS[:texts] for token in (*text, *marks)]
    blocks = [tokens[i : i + size] for i in range(0, len(tokens) - size + 1, size)]
    return data_of(blocks, blocks)


def in_pairs(name):
    """Two texts a row, as TRL packs them, and where each ends."""
    pairs = list(zip(TEXTS[::2], TEXTS[1::2], strict=True))
    columns = {
        "seq_lengths": [[len(one), len(other)] for one, other in pairs],
        "position_ids": [[*range(len(one)), *range(len(other))] for one, other in pairs],
    }
    return data_of([one + other for one, other in pairs], **{name: columns[name]})


def alone():
    """What packing leaves of texts of which no two fit in a row, padded on either side."""
    rows = [[PAD, *row, PAD] for row in TEXTS]
    positions = [[1, *range(len(row)), 0] for row in TEXTS]
    return data_of(rows, seq_lengths=[[len(row)] for row in TEXTS], position_ids=positions)


def unpacked(texts, length, *first):
    """Each text in a row of its own, cut at one length."""
    rows = [[*first, *text[:length]] for text in TEXTS[:texts]]
    return data_of(rows, rows)


def tokens(*rows):
    return Dataset.from_dict({"input_ids": rows})


def windows(step, size=16):
    """Windows of long texts, with a prompt before each."""
    long = [[200 + 40 * i + j for j in range(40)] for i in range(SOURCE)]
    cuts = [text[k : k + size] for text in long for k in range(0, 40 - size + 1, step)]
    return tokens(*([*range(100, 112), *cut, *[PAD] * 3] for cut in cuts))


MAPPING, ID, PACKED = "overflow_to_sample_mapping", "example_id", "packed into blocks"
FROM_SPLIT = "has more rows than the split that it was made from"


@pytest.mark.parametrize(
    ("data", "tokenizer", "words"),
    [
        (cut(MAPPING), None, (f"'{MAPPING}' that is the same in rows", ID)),
        (cut(ID), None, (f"'{ID}' with values that several rows share", ID)),
        (cut(), None, (FROM_SPLIT, ID)),
        (packed(), Tokens(), ("in them that begins or ends a text", PACKED)),
        (packed((BEGIN,)), Processor(), ("in them that begins or ends a text", PACKED)),
        (in_pairs("seq_lengths"), None, ("'seq_lengths' with several lengths in a row", PACKED)),
        (in_pairs("position_ids"), None, ("'position_ids' that begins again within", PACKED)),
        (windows(6), None, ("overlap",)),
    ],
)
def test_rows_that_are_parts_or_blocks_are_warned_of(data, tokenizer, words, caplog):
    warn_of_rows(data, tokenizer)
    (record,) = caplog.records
    text = record.getMessage()
    assert all(part in text for part in (*words, "privacy_unit_column"))
    assert not any(word.isdigit() for word in text.replace(".", " ").split())  # N may be secret


@pytest.mark.parametrize(
    "make",
    [
        lambda: whole().shuffle(seed=0).select(range(12)),
        lambda: unpacked(12, 9),
        lambda: unpacked(SOURCE, 6),  # as many as there were
        lambda: unpacked(12, 6, 1),
        lambda: packed((), texts=12),  # nothing shows it
        alone,
        lambda: data_of(rows := [text + [PAD] * (9 - len(text)) for text in TEXTS[:12]], rows),
        lambda: unpacked(12, 6).add_column("user", [*"ab"] * 6),
        lambda: unpacked(4, 6),  # too few to tell
        lambda: datasets.concatenate_datasets([whole(), whole("other")]),
        lambda: Dataset.from_dict({"x": [[0.5] * 6] * 9, "labels": [1] * 9}),
        lambda: [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 24,
        lambda: tokens(*[[BEGIN, 7, 8, END, PAD]] * 9),
        lambda: tokens(*[[PAD, PAD, BEGIN, 7, END]] * 9),
        lambda: tokens(*[[BEGIN, PAD, PAD, PAD, END]] * 9),
        lambda: tokens(*[[7, 8, 9, 9, 9]] * 9),
        lambda: tokens(*[[7] * i + [END, 8, 9, END] for i in range(1, 12)]),  # conversations
        lambda: windows(16),
        lambda: windows(40),
    ],
)
def test_rows_that_are_examples_are_not_warned_of(make, caplog):
    data = make()
    for tokenizer in (None, Tokens()):
        warn_of_rows(data, tokenizer)
    assert not caplog.records


def test_the_size_of_a_loaded_split_is_known_after_map(tmp_path, caplog):
    (tmp_path / "train.json").write_text('{"text": "a b"}\n{"text": "c d"}\n')
    files = {"data_files": str(tmp_path / "train.json"), "cache_dir": str(tmp_path / "cache")}
    data = datasets.load_dataset("json", split="train", **files)
    warn_of_rows(data.map(lambda rows: {"text": rows["text"]}, batched=True))
    assert not caplog.records
    words = data.map(lambda rows: {"text": " ".join(rows["text"]).split()}, batched=True)
    warn_of_rows(words)
    assert FROM_SPLIT in caplog.text


@pytest.mark.parametrize(
    ("settings", "warns"),
    [
        ({}, 1),
        ({"privacy_unit_column": "example_id", "expected_batch_size": 4}, 0),
        ({"method": "adam", "noise_multiplier": None, "target_delta": None}, 0),
    ],
)
def test_only_private_runs_without_a_unit_are_warned(settings, warns, tmp_path, caplog):
    make_trainer(tmp_path, train_dataset=cut(ID), **settings)
    assert sum(r.levelno >= logging.WARNING for r in caplog.records) == warns


POINTS, TABLE = points(), Dataset.from_dict({"x": list(range(24))})
REPEATED = {
    "Subset": Subset(POINTS, [0, 1, 1]),
    "ConcatDataset": ConcatDataset([POINTS, Subset(POINTS, [3])]),
    "select": TABLE.select([5, 2, 5]),
    "filter": concatenate_datasets([TABLE, TABLE.filter(lambda row: row["x"] < 3)]),
    "flattened": concatenate_datasets([TABLE, TABLE.select([7]).flatten_indices(), TABLE]),
    "tables": ConcatDataset([TABLE, TABLE.select([3])]),
}


@pytest.mark.parametrize("name", REPEATED)
def test_an_element_in_several_rows_is_refused(name):
    with pytest.raises(PrivacyError, match="an element of a data set in several rows"):
        refuse_repeated(REPEATED[name])


def test_only_private_runs_without_a_unit_refuse_repeated_elements(tmp_path):
    halves = [Subset(POINTS, range(12)), Subset(POINTS, range(12, 24))]
    copy = Dataset.from_dict({"x": list(range(24))})
    thirds = [TABLE.shard(3, number) for number in range(3)]
    for sound in (
        *(ConcatDataset(halves), TABLE.select([5, 2]), ConcatDataset([POINTS, points()])),
        *(concatenate_datasets([copy, TABLE]).shuffle(), concatenate_datasets(thirds)),
        concatenate_datasets([TABLE.add_column("part", [n] * 24) for n in range(2)]),
    ):
        refuse_repeated(sound)
    twice = ConcatDataset([POINTS, POINTS])
    make_trainer(tmp_path, train_dataset=twice, noise_multiplier=0.0)
    by_owner = {"privacy_unit_column": "id", "expected_batch_size": 4}
    make_trainer(tmp_path, train_dataset=twice, **by_owner)
    with pytest.raises(PrivacyError, match="in several rows"):
        make_trainer(tmp_path, train_dataset=twice)


def test_blocks_are_recognized_by_the_tokenizer_of_the_collator(tmp_path, caplog):
    make_trainer(tmp_path, train_dataset=packed(), data_collator=Processor())
    assert PACKED in caplog.text


def test_no_row_is_transformed_or_decoded_to_look_at_it(caplog):
    """A transform may toss coins, and read files."""
    data = packed()
    data.set_transform(lambda rows: pytest.fail("it was fetched"))
    warn_of_rows(data, Tokens())
    assert len(caplog.records) == 1
    broken = [{"bytes": b"no image", "path": None}] * 9
    data = Dataset.from_dict({"image": broken}, features=Features({"image": Image()}))
    with pytest.raises(OSError, match="cannot identify"):
        data[:9]
    warn_of_rows(data, Tokens())
