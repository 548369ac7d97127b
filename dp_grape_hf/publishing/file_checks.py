"""Compare the files of a saved model with the digests in its ledger. Part of ``verification``.

Guarantee:
    Each file that was saved with the model has the digest that the ledger recorded, or is reported.
    Each other file with a name of weights, anywhere in the folder, is reported too. So is each
    config that makes a loader read files whose digests are not in the ledger, or run code.
    Folders with a separate ledger are not checked.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from dp_grape_hf.ledger import Ledger, Weights
from dp_grape_hf.publishing.configs import BASE, CODE, WEIGHTS, json_of, sent_elsewhere
from dp_grape_hf.publishing.model_files import (
    ADAPTER_CONFIG,
    CONFIG,
    digest,
    files_in,
    is_weights,
)

OK, MISMATCH, ABSENT = "ok", "MISMATCH", "absent"
_CONFIG = re.compile(r"config.*\.json$|\.index\.json$")
_ELSEWHERE = {
    CODE: "code, which may load anything and is not in the ledger",
    WEIGHTS: "makes loaders read a file that is not in the ledger",
}
_GENERATE = "custom_generate/generate.py"  # transformers runs it if trust_remote_code is set


class Check(NamedTuple):
    """One comparison of a stated value with the value found.

    ``status`` is `OK`, `MISMATCH`, or `ABSENT` if there is nothing to compare.
    """

    what: str
    status: str
    stated: str
    found: str


def of_the_files(ledger: Ledger, folder: Path | None) -> Iterator[Check]:
    """Compare the files of a folder with the digests in its ledger."""
    if folder is None:
        yield Check("weights", ABSENT, "-", "a file was given, not a folder")
        return
    files, others = files_in(folder)
    saved = ledger.saved
    recorded = saved[-1].files if saved else {}
    files |= {name: folder / name for name in recorded if (folder / name).is_file()}  # linked files
    digests = {n: digest(files[n]) for n in files if n in recorded or is_weights(n)}
    yield from _of_the_digests(saved, recorded, digests)
    if CONFIG in files and CONFIG not in recorded:
        found = "not in the ledger; version 0.1 recorded digests of weights only"
        yield Check(CONFIG, ABSENT, "-", found)
    for name, path in files.items():
        if _CONFIG.search(path.name):
            yield from _of_a_config(PurePosixPath(name), json_of(path), recorded)
    if _GENERATE in files:
        yield Check(_GENERATE, MISMATCH, "-", "code, which is not in the ledger")
    if others:
        found = "each has a separate ledger: verify it by its path"
        yield Check("other folders", ABSENT, ", ".join(others), found)


def _of_the_digests(
    saved: list[Weights], recorded: Mapping[str, str], digests_now: Mapping[str, str]
) -> Iterator[Check]:
    places = {PurePosixPath(name).parent for name in digests_now if is_weights(name)}
    # Two saves of the same model may differ: a published one has no local paths.
    now = [entry.files for entry in saved if entry.updates == saved[-1].updates]
    for name in sorted(recorded.keys() | digests_now.keys()):
        ours, weights = recorded.get(name), is_weights(name)
        what = f"weights: {name}" if weights else name
        if name not in digests_now:
            part = weights and PurePosixPath(name).parent in places  # other weights are here
            yield Check(what, MISMATCH if part else ABSENT, str(ours)[:12], "no such file here")
        elif ours is None:
            same_digest = [other for other in recorded if recorded[other] == digests_now[name]]
            text = f", as {same_digest[0]}" if same_digest else ""
            status, stated = (OK, "known") if same_digest else (MISMATCH, "unknown to the ledger")
            yield Check(what, status, stated, digests_now[name][:12] + text)
        else:
            earlier = [
                entry.updates for entry in saved if entry.files.get(name) == digests_now[name]
            ]
            same = any(files.get(name) == digests_now[name] for files in now)
            text = f", saved after {earlier[-1]} updates" if earlier and not same else ""
            stated = digests_now[name] if same else ours
            yield Check(what, OK if same else MISMATCH, stated[:12], digests_now[name][:12] + text)
    if not any(map(is_weights, {**recorded, **digests_now})):
        yield Check("weights", ABSENT, "-", "no weight files, and none recorded")


def _of_a_config(path: PurePosixPath, content: Any, recorded: Mapping[str, str]) -> Iterator[Check]:
    """Report the entries of a config that make a loader read other weights or run code."""
    entries = content if isinstance(content, dict) else {}
    for key, value, to in sent_elsewhere(content):
        yield Check(f"{path}: {key}", MISMATCH, _short(value), _ELSEWHERE[to])
    if "weight_map" in entries:
        sent = entries["weight_map"]
        parts = sent.values() if isinstance(sent, dict) else [sent]
        other = {str(part) for part in parts if f"{path.parent / str(part)}" not in recorded}
        if other:
            found = "not among the weights of the ledger"
            yield Check(f"{path}: weight_map", MISMATCH, _short(sorted(other)), found)
    if path.name == ADAPTER_CONFIG:
        same_folder = [n for n in map(PurePosixPath, recorded) if n.parent == path.parent]
        if not any("adapter_model." in known.name for known in same_folder):
            found = "makes loaders load an adapter"
            yield Check(f"{path}", MISMATCH, "unknown to the ledger", found)
        found = "the ledger records the adapter, and not the weights of its base model"
        yield Check(f"{path}: base", ABSENT, _short(entries.get(BASE)), found)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
