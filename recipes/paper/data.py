"""Loads a split of a task's data, from the Hub by name or from a folder, by the same call.

``--dataset_path`` is one of:

* nothing: the task's own data set of the Hub;
* the name of another data set of the Hub, with a colon and its configuration behind it where it has
  several: ``SetFit/sst5``, ``nyu-mll/glue:sst2``;
* a folder of ``<split>.jsonl`` files, with the columns of the Hub;
* a folder that ``DatasetDict.save_to_disk`` has left;
* any other folder that ``load_dataset`` reads, such as a download from the Hub.
"""

from __future__ import annotations

import re
from pathlib import Path

from datasets import Dataset, concatenate_datasets, load_dataset, load_from_disk


def load_split(
    split: str,
    path: str | None,
    hub: str,
    config: str | None = None,
    revision: str | None = None,
) -> Dataset:
    """Returns a split of the data.

    Args:
        split: its name; ``a + b`` for two splits, one behind the other.
        path: what ``--dataset_path`` says.
        hub: the task's own data set, with its configuration and revision.
    """
    split = split.replace(" ", "")  # which the library takes for a part of a name
    if path is None:
        return load_dataset(hub, config, split=split, revision=revision)
    name, chosen = path, None
    if ":" in path and not Path(path).is_dir():
        name, chosen = path.rsplit(":", 1)
    folder = Path(name)
    if not folder.is_dir():
        return _named(name, chosen or (config if name == hub else None), split)
    if files := {file.stem: str(file) for file in folder.glob("*.jsonl")}:
        return _lines(folder, files, split)
    if (folder / "dataset_dict.json").is_file():
        return _saved(folder, split)
    return load_dataset(name, chosen, split=split)


def _named(name: str, config: str | None, split: str) -> Dataset:
    try:
        return load_dataset(name, config, split=split)
    except (FileNotFoundError, ConnectionError) as error:
        raise FileNotFoundError(
            f"dataset_path={name!r} is no folder, and the Hub gave no data of that name: {error}"
        ) from error


def _lines(folder: Path, files: dict[str, str], split: str) -> Dataset:
    asked = re.findall(r"[\w-]+", split)
    wanted = {name: file for name, file in files.items() if name in asked}
    if not wanted:
        raise ValueError(
            f"dataset_path={str(folder)!r} has the splits {sorted(files)}, and not {split!r}."
        )
    return load_dataset("json", data_files=wanted, split=split)


def _saved(folder: Path, split: str) -> Dataset:
    parts = load_from_disk(str(folder))
    names = split.split("+")
    if any(name not in parts for name in names):
        raise ValueError(
            f"dataset_path={str(folder)!r} has the splits {sorted(parts)}, and not {split!r}."
        )
    return concatenate_datasets([parts[name] for name in names])
