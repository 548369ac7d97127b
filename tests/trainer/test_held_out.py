"""Evaluation data hold no training rows; which rows two data sets share."""

import copy
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image as Picture
from torch.utils.data import ConcatDataset, Subset, random_split

from dp_grape_hf import PrivacyError
from dp_grape_hf.trainer.overlap import TrainingRows
from tests.support.trainers import Examples, make_args, make_trainer, points

ARGS = make_args("unused")


def shared(training_data, dataset):
    return [int(row) for row in TrainingRows(training_data, ARGS).shared_with(dataset, "eval")]


def texts(count=12, seed=0, **columns):
    words = np.random.default_rng(seed).integers(5, 99, (count, 6)).tolist()
    held = {"input_ids": words, "attention_mask": [[1] * 6] * count, "labels": [1] * count}
    return datasets.Dataset.from_dict(held | {"idx": range(count)} | columns)


def pictures(seed=0):
    values = np.random.default_rng(seed).integers(0, 255, (6, 4, 4, 3), dtype=np.uint8)
    features = datasets.Features({"image": datasets.Image()})
    return datasets.Dataset.from_dict({"image": [*map(Picture.fromarray, values)]}, features)


PARTS = {
    "whole": lambda data: data,
    "subset": lambda data: Subset(data, [7, 3]),
    "concatenated": lambda data: ConcatDataset([points(2, seed=1), Subset(data, [0])]),
    "list": lambda data: [dict(row) for row in data.examples[20:]],
    "dict": lambda data: {"far": points(3, seed=1), "near": Examples(data.examples[:1])},
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("ask", ["evaluate", "predict", "get_eval_dataloader"])
def test_metrics_of_training_rows_are_refused(ask, part, tmp_path):
    data = points()
    held = PARTS[part](data)
    if ask == "evaluate" or not isinstance(held, dict):
        with pytest.raises(PrivacyError, match="not covered by epsilon"):
            getattr(make_trainer(tmp_path, train_dataset=data), ask)(held)
    with pytest.raises(PrivacyError, match="training rows"):
        make_trainer(tmp_path, train_dataset=data, eval_dataset=held)
    for allowed in ({"eval_data_is_public": True}, {"noise_multiplier": 0.0}):
        trainer = make_trainer(tmp_path, train_dataset=data, eval_dataset=held, **allowed)
        if ask == "evaluate":
            assert trainer.evaluate(data)["eval_loss"] > 0


def test_data_that_became_evaluation_data_are_refused_as_well(tmp_path):
    trainer = make_trainer(tmp_path, eval_dataset={"unseen": points(5, seed=1)})
    assert trainer.evaluate("unseen")["eval_loss"] > 0
    trainer.eval_dataset["unseen"] = trainer.train_dataset
    with pytest.raises(PrivacyError, match="training rows"):
        trainer.evaluate("unseen")
    trainer.eval_dataset = trainer.train_dataset
    with pytest.raises(PrivacyError, match="training rows"):
        trainer.evaluate()


def test_the_error_counts_shared_rows_and_names_the_first(tmp_path):
    data = texts()
    held = datasets.concatenate_datasets([texts(2, seed=1), data.select([5, 3, 4])])
    with pytest.raises(PrivacyError, match=r"3 of its 5 rows .* eval_dataset\['a'\]\[2\]"):
        make_trainer(tmp_path, train_dataset=data, eval_dataset={"a": held})


def test_a_few_equal_contents_are_no_more_than_a_warning(tmp_path, caplog):
    """Texts occur more than once in real data; elements of the same object are never few enough."""
    data, others = texts(), texts(100, seed=1)
    held = datasets.concatenate_datasets([others, data.select([5, 3])])
    make_trainer(tmp_path, train_dataset=data, eval_dataset=held)
    assert "2 of its 102 rows" in caplog.text
    held = datasets.concatenate_datasets([others, data.select([5, 3, 4])])
    with pytest.raises(PrivacyError, match="3 of its 103 rows"):
        make_trainer(tmp_path, train_dataset=data, eval_dataset=held)
    rows = points()
    part = ConcatDataset([points(100, seed=1), Subset(rows, [5])])
    with pytest.raises(PrivacyError, match="1 of its 101 rows"):
        make_trainer(tmp_path, train_dataset=rows, eval_dataset=part)


def test_each_pair_of_data_sets_is_compared_once(tmp_path):
    class Counted(Examples):
        reads = 0

        def __getitem__(self, index):
            self.reads += 1
            return super().__getitem__(index)

    data, held = Counted(points().examples), Counted(points(6, seed=1).examples)
    trainer = make_trainer(tmp_path, train_dataset=data, eval_dataset={"a": held})
    before = data.reads, held.reads
    for dataset in (None, "a", held):
        trainer.get_eval_dataloader(dataset) if dataset else trainer.evaluate()
    assert (data.reads, held.reads) == (before[0], before[1] + len(held)), "one evaluation"
    trainer.predict(points(6, seed=2))
    assert data.reads <= before[0] + 1, "digests of training rows are kept"


def test_the_same_index_of_one_object_is_a_shared_example():
    class Augmented(Examples):
        def __getitem__(self, index):
            return {"x": torch.rand(3)}

    data = Augmented([{}] * 8)
    assert shared(data, Subset(ConcatDataset([data, data]), [9, 3])) == [0, 1]
    train, held = random_split(data, [5, 3])
    assert shared(train, held) == []
    assert shared(train, Subset(data, [*train.indices[:2], *held.indices])) == [0, 1]


def test_a_selection_is_compared_by_its_own_rows():
    data = texts(40)
    parts = data.train_test_split(0.25, seed=0)
    assert shared(parts["train"], parts["test"]) == []
    held = Subset(data.shuffle(seed=1), [3, 4])
    rows = {tuple(words) for words in parts["train"]["input_ids"]}
    expected = [n for n in (0, 1) if tuple(held[n]["input_ids"]) in rows]
    assert shared(parts["train"], held) == expected


def column(name, values, kind=None):
    table = pa.table({name: pa.array(values, kind)})
    return datasets.Dataset(table)


TIMES = np.array(["2020-01-01", "2021-01-01"], "datetime64[s]")
WORDS, OTHER = [[1, 2], [], None, [3]], [[9], [3], [1, 2]]


@pytest.mark.parametrize(
    ("training_data", "dataset", "expected"),
    [
        (column("x", WORDS, pa.list_(pa.int32())), column("x", OTHER), [1, 2]),
        (column("x", WORDS, pa.large_list(pa.uint8())), column("x", OTHER), [1, 2]),
        (column("x", [[1, 2], [2, 3]], pa.list_(pa.int64(), 2)), column("x", [[2, 3]]), [0]),
        (column("x", [[1.5, 2]]), column("x", [[2.0], [1.5, 2]], pa.list_(pa.float32())), [1]),
        (column("x", ["a", "", None]), column("x", ["", "a"], pa.large_string()), [1]),
        (column("x", [["ab", "c"]]), column("x", [["a", "bc"], ["ab", "c"]]), [1]),
        (column("x", [[[1], [2, 3]]]), column("x", [[[1, 2], [3]], [[1], [2, 3]]]), [1]),
        (column("x", [{"a": "b", "c": 1}]), column("x", [{"a": "b", "c": 2}]), []),
        (column("x", [{"a": "b", "c": 0}]), column("x", [{"a": "b", "c": 0}]), [0]),
        (column("x", [0.0, 1.5]), column("x", [1.5, 0.0, 2.5]), [0]),
        (column("x", [1, 2]), column("x", [1, 2]), []),
        (column("x", ["a", "b"]).add_column("y", [["c"], ["d"]]), column("y", [["d"]]), [0]),
        (column("x", TIMES), column("x", TIMES[1:]), [0]),  # a type that is not known
        (column("x", TIMES[:1]), column("x", TIMES[1:]), []),
    ],
)
def test_columns_and_rows_show_the_same_shared_rows(training_data, dataset, expected):
    assert shared(training_data, dataset) == expected
    assert shared(training_data.to_list(), dataset.to_list()) == expected


FORMS = {
    "loaded again": copy.deepcopy,
    "shuffled": lambda data: data.shuffle(seed=3),
    "inputs alone": lambda data: data.select_columns(["input_ids"]),
    "other labels": lambda data: texts(len(data), labels=[7] * len(data), idx=[*range(90, 102)]),
    "tensors": lambda data: data.with_format("torch"),
    "arrays": lambda data: [{"input_ids": np.array(ids)} for ids in data["input_ids"]],
    "tuples": lambda data: [{"input_ids": tuple(ids), "side": 1.5} for ids in data["input_ids"]],
    "transformed": lambda data: data.add_column("text", ["?"] * len(data)).with_transform(
        lambda batch: {"input_ids": batch["input_ids"][:2]}
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_copies_in_any_form_are_told(form):
    """Whichever of the two has it; labels, masks and numbers of rows tell nothing."""
    state, change = torch.get_rng_state(), FORMS[form]
    for pair in ((change(texts()), texts()), (texts(), change(texts()))):
        assert shared(*pair) == [*range(len(pair[1]))]
    assert shared(change(texts(seed=2)), texts(seed=3)) == []
    assert torch.equal(torch.get_rng_state(), state)


def test_copies_of_what_a_transform_makes_are_told():
    def pixels(batch):
        return {"pixel_values": [torch.tensor(np.asarray(image)) for image in batch["image"]]}

    data = pictures().with_transform(pixels)
    made = [{"pixel_values": data[i]["pixel_values"]} for i in (3, 5)]
    same = pictures().select([4])
    for copied in (made, same, same.with_transform(pixels)):
        assert shared(data, copied) == [*range(len(copied))]
    assert shared(pictures(), datasets.Dataset.from_list([*same])) == [0]
    assert shared(data, [pictures(seed=2).with_transform(pixels)[0]]) == []


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"idx": 0, "labels": 1}, {"idx": 0, "labels": 1}, False),  # numbers of rows and classes
        ({"text": "", "labels": 1}, {"text": "", "labels": 1}, False),
        ({"ids": [1, 2], "attention_mask": [1, 1]}, {"attention_mask": [1, 1]}, False),
        ({"user": "a", "text": "x"}, {"user": "a", "text": "y"}, False),
        ({"user": "a", "words": "x"}, {"user": "a", "text": "x"}, False),
        ({"age": 31, "height": 1.75}, {"age": 31, "height": 1.75, "labels": 1}, True),
        ({"labels": [4, 5]}, {"labels": [4, 5]}, True),
        ({"ids": [-1, 3], "labels": 1}, {"ids": [-2, 3], "labels": 1}, False),  # of one hash
        ({"age": -1, "height": -1.0}, {"age": -2, "height": -2.0}, False),
        (([1.5], 0), ([1.5], 0), True),
        (
            {"said": [{"role": "user"}], "raw": b"ab"},
            {"said": [{"role": "user"}], "raw": b"ab"},
            True,
        ),
    ],
)
def test_rows_are_the_same_by_what_tells_them_apart(one, other, same):
    """What many rows have alike is no overlap, and a unit's name is nobody's contents."""
    args = make_args("unused", privacy_unit_column="user", expected_batch_size=1)
    assert (TrainingRows([other], args).shared_with([one], "it").tolist() == [0]) is same


def test_encoded_images_are_compared_and_not_decoded(monkeypatch, tmp_path):
    values = np.random.default_rng(0).integers(0, 255, (6, 4, 4, 3), dtype=np.uint8)
    paths = [str(tmp_path / f"{n}.png") for n in range(6)]
    for path, value in zip(paths, values, strict=True):
        Picture.fromarray(value).save(path)
    features = datasets.Features({"image": datasets.Image()})
    files = datasets.Dataset.from_dict({"image": paths[:4]}, features=features)
    encoded = [{"bytes": Path(p).read_bytes(), "path": None} for p in paths[3:]]
    held = datasets.Dataset.from_dict({"image": encoded}, features=features)
    monkeypatch.delattr(datasets.Image, "decode_example")
    assert shared(files, held) == [0]
    assert shared(held, files) == [3]
