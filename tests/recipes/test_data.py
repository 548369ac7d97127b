"""The data of a task come from the Hub by name, or from a folder of any kind, by the same call."""

import json

import pytest
from datasets import Dataset, DatasetDict

from recipes.paper import data
from recipes.paper.data import load_split

ROWS = {
    "train": [{"text": f"a {i}", "label": i % 2} for i in range(3)],
    "validation": [{"text": "b", "label": 1}],
    "test": [{"text": "c", "other": 0.5}],  # of other columns, as test splits without labels are
}
HUB = ("nyu-mll/glue", "sst2", "v1")


def as_lines(folder):
    for split, rows in ROWS.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(text)
    return str(folder)


def as_saved(folder):
    parts = {split: Dataset.from_list(rows) for split, rows in ROWS.items()}
    DatasetDict(parts).save_to_disk(folder / "saved")
    return str(folder / "saved")


def as_parquet(folder):
    (folder / "data").mkdir()
    for split in ("train", "validation"):
        Dataset.from_list(ROWS[split]).to_parquet(
            folder / "data" / f"{split}-00000-of-00001.parquet"
        )
    return str(folder)


def as_two_configurations(folder):
    """A download from the Hub, of which the card says what its configurations are."""
    as_parquet(folder)
    names = "".join(
        f"- config_name: {name}\n  data_files:\n  - split: train\n    path: data/{path}-*\n"
        f"  - split: validation\n    path: data/validation-*\n"
        for name, path in (("first", "validation"), ("second", "train"))
    )
    (folder / "README.md").write_text(f"---\nconfigs:\n{names}---\n")
    return f"{folder}:second"


@pytest.mark.parametrize("kind", [as_lines, as_saved, as_parquet, as_two_configurations])
def test_a_folder_is_read_whatever_it_holds(kind, tmp_path):
    path = kind(tmp_path)
    assert load_split("train", path, *HUB).to_list() == ROWS["train"]
    both = load_split("train + validation", path, *HUB)
    assert both.to_list() == [*ROWS["train"], *ROWS["validation"]]


@pytest.mark.parametrize("kind", [as_lines, as_saved])
def test_a_missing_split_is_refused_with_the_existing_ones(kind, tmp_path):
    message = r"has the splits \['test', 'train', 'validation'\], and not 'dev'"
    with pytest.raises(ValueError, match=message):
        load_split("dev", kind(tmp_path), *HUB)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (None, ("nyu-mll/glue", "sst2", {"split": "train", "revision": "v1"})),
        ("someone/glue:sst2", ("someone/glue", "sst2", {"split": "train"})),
        ("nyu-mll/glue", ("nyu-mll/glue", "sst2", {"split": "train"})),
        ("nyu-mll/glue:rte", ("nyu-mll/glue", "rte", {"split": "train"})),
    ],
)
def test_what_is_no_folder_is_asked_of_the_hub(path, expected, monkeypatch):
    asked = []

    def load_dataset(name, config, **others):
        asked.append((name, config, others))
        return Dataset.from_list(ROWS["train"])

    monkeypatch.setattr(data, "load_dataset", load_dataset)
    assert load_split("train", path, *HUB).to_list() == ROWS["train"]
    assert asked == [expected]


@pytest.mark.parametrize("error", [FileNotFoundError, ConnectionError])
def test_neither_folder_nor_name_is_said_so(error, monkeypatch):
    def load_dataset(*args, **others):
        raise error("cannot be reached")

    monkeypatch.setattr(data, "load_dataset", load_dataset)
    message = "dataset_path='data/sts2' is no folder, and the Hub gave .*: cannot be reached"
    with pytest.raises(FileNotFoundError, match=message):
        load_split("train", "data/sts2", *HUB)
