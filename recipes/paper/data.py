"""Loads a split of a task's data, from the Hub by name or from a folder, by the same call.

``--dataset_path`` is one of:

* nothing: the task's own data set of the Hub;
* the name of another data set of the Hub, with a colon and its configuration behind it where it has
  several: ``SetFit/sst5``, ``nyu-mll/glue:sst2``;
* a folder of ``<split>.jsonl`` files, with the columns of the Hub;
* a folder that ``DatasetDict.save_to_disk`` has left;
* any other folder that ``load_dataset`` reads, such as a download from the Hub.
"""

import re
from pathlib import Path
from typing import Any

from datasets import Dataset, concatenate_datasets, load_dataset, load_from_disk


def load_split(
    split: str, path: str | None, hub: str, config: str | None = None, revision: str | None = None
) -> Dataset:
    """Return a split of the data; ``a + b`` is two splits, one behind the other.

    ``path`` is what ``--dataset_path`` says, the others are the task's own data set.
    """
    split = split.replace(" ", "")  # which the library takes for a part of a name
    if path is None:
        return load_dataset(hub, config, split=split, revision=revision)
    folder, asked = Path(path), re.findall(r"(?:^|\+)([\w-]+)", split)
    found: Any = {file.stem: str(file) for file in folder.glob("*.jsonl")}
    saved = (folder / "dataset_dict.json").is_file()
    if saved:
        found = load_from_disk(path)
    if found and not {*asked} <= found.keys():
        raise ValueError(
            f"dataset_path={path!r} has the splits {sorted(found)}, and not {split!r}."
        )
    if saved:
        return concatenate_datasets([found[name] for name in asked])
    if found:
        return load_dataset("json", data_files={n: found[n] for n in asked}, split=split)
    name, chosen = path, None
    if ":" in path and not folder.is_dir():
        name, chosen = path.rsplit(":", 1)
    try:
        return load_dataset(name, chosen or (config if name == hub else None), split=split)
    except (FileNotFoundError, ConnectionError) as error:
        raise FileNotFoundError(
            f"dataset_path={name!r} is no folder, and the Hub gave no data of that name: {error}"
        ) from error
