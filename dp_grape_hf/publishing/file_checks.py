"""Whether the files of a saved model are those that its ledger digests, and what loaders take.

Part of ``verification``.

Guarantee:
    Files that are or may be weights, wherever they lie in a folder and whatever their names, are
    known to the ledger by their bytes, or are reported. So are links, an adapter's config that says
    something else than when it was saved, and what in a config sends a loader to other weights or
    to code. What is loaded from the folder has the digested tensors.
    Folders with a ledger of their own are left to that.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from dp_grape_hf.ledger import Ledger, Weights
from dp_grape_hf.publishing.loading import NotLoadable, differences
from dp_grape_hf.publishing.model_files import (
    ADAPTER,
    ADAPTER_CONFIG,
    config_digest,
    digest,
    files_of_index,
    is_loaded,
    json_of,
    may_be_weights,
    tree,
)
from dp_grape_hf.publishing.staging import code_named, weights_named

OK, MISMATCH, ABSENT = "ok", "MISMATCH", "absent"
_CONFIG = re.compile(r"config.*\.json$|\.index\.json$")
_GENERATE = "custom_generate/generate.py"  # which transformers runs if it may run code


class Check(NamedTuple):
    """One comparison: what somebody states, what was found, and whether the two agree.

    ``status`` is `OK`, `MISMATCH`, or `ABSENT` where there is nothing to compare.
    """

    what: str
    status: str
    stated: str
    found: str


def of_the_files(ledger: Ledger, folder: Path | None) -> Iterator[Check]:
    """Compares all weights of a folder with those that its ledger digests, and what is loaded."""
    if folder is None:
        yield Check("weights", ABSENT, "-", "a file was given, not a folder")
        return
    files, links, others = tree(folder)
    names = {path: path.relative_to(folder).as_posix() for path in (*files, *links, *others)}
    for link in links:
        found = "a link, or no plain file; put the file itself there"
        yield Check(f"link: {names[link]}", MISMATCH, "-", found)
    digests = {names[path]: digest(path) for path in files if may_be_weights(path)}
    saved = ledger.saved
    files_then = saved[-1].files if saved else {}
    config_then = {n: d for n, d in files_then.items() if PurePosixPath(n).name == ADAPTER_CONFIG}
    recorded = {n: d for n, d in files_then.items() if n not in config_then}
    yield from _of_the_weights(saved, recorded, digests)
    yield from _of_the_configs(folder, config_then)
    configs = {names[path]: json_of(path) for path in files if _CONFIG.search(path.name)}
    code = [*_of_the_code(configs, names.values())]
    yield from code
    for name, content in configs.items():
        yield from _of_a_config(PurePosixPath(name), content, recorded)
    whole = {name for name, ours in recorded.items() if digests.get(name) == ours}
    yield from _of_loading(folder, recorded, whole, bool(code))
    if others:
        found = "each has a ledger of its own: verify it by its path"
        yield Check("other folders", ABSENT, ", ".join(names[o] for o in others), found)


def _of_the_weights(
    saved: list[Weights], recorded: Mapping[str, str], found: Mapping[str, str]
) -> Iterator[Check]:
    places = {PurePosixPath(name).parent for name in found}
    for name in sorted(recorded.keys() | found.keys()):
        what, ours = f"weights: {name}", recorded.get(name)
        if name not in found:
            part = PurePosixPath(name).parent in places  # of weights whose other parts are here
            yield Check(what, MISMATCH if part else ABSENT, str(ours)[:12], "no such file here")
        elif ours is None:
            known = [other for other in recorded if recorded[other] == found[name]]
            text = f", as {known[0]}" if known else ""
            status, stated = (OK, "known") if known else (MISMATCH, "unknown to the ledger")
            yield Check(what, status, stated, found[name][:12] + text)
        else:
            earlier = [entry.updates for entry in saved if entry.files.get(name) == found[name]]
            same = ours == found[name]
            text = f", saved after {earlier[-1]} updates" if earlier and not same else ""
            yield Check(what, OK if same else MISMATCH, ours[:12], found[name][:12] + text)
    if not recorded and not found:
        yield Check("weights", ABSENT, "-", "no weight files, and none recorded")


def _of_the_configs(folder: Path, recorded: Mapping[str, str]) -> Iterator[Check]:
    """Compares the configs of adapters with those that their weights were saved with."""
    for name, ours in sorted(recorded.items()):
        if not (folder / name).is_file():
            yield Check(name, ABSENT, ours[:12], "no such file here")
            continue
        found = config_digest(folder / name)
        yield Check(name, OK if found == ours else MISMATCH, ours[:12], found[:12])


# ---- What sends a loader elsewhere ----


def _of_the_code(configs: Mapping[str, Any], names: Collection[str]) -> Iterator[Check]:
    for name, content in configs.items():
        for key, value in code_named(content):
            found = "code, which may load anything and is not in the ledger"
            yield Check(f"{name}: {key}", MISMATCH, _short(value), found)
    if _GENERATE in names:
        yield Check(_GENERATE, MISMATCH, "-", "code, which is not in the ledger")


def _of_a_config(path: PurePosixPath, content: Any, recorded: Mapping[str, str]) -> Iterator[Check]:
    entries = content if isinstance(content, dict) else {}
    for key, value in weights_named(content):
        found = "sends loaders to a file that the ledger does not stand for"
        yield Check(f"{path}: {key}", MISMATCH, _short(value), found)
    if "weight_map" in entries:
        what, sent = f"{path}: weight_map", set()
        try:
            sent = files_of_index(content)
        except ValueError as error:
            yield Check(what, MISMATCH, _short(entries["weight_map"]), f"{error}")
        if other := sorted(part for part in sent if f"{path.parent / part}" not in recorded):
            yield Check(what, MISMATCH, _short(other), "not among the weights of the ledger")
    if path.name == ADAPTER_CONFIG:
        beside = [known for known in map(PurePosixPath, recorded) if known.parent == path.parent]
        if not any("adapter_model." in known.name for known in beside):
            found = "makes loaders take an adapter"
            yield Check(f"{path}", MISMATCH, "unknown to the ledger", found)
        found = "the ledger is of the adapter: it does not know the weights of its base"
        base = entries.get("base_model_name_or_path")
        yield Check(f"{path}: base", ABSENT, _short(base), found)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# ---- What is loaded ----


def _of_loading(
    folder: Path, recorded: Mapping[str, str], whole: set[str], code: bool
) -> Iterator[Check]:
    """Compares what ``from_pretrained`` gives with the digested files, where these are there."""
    tensors = [name for name in recorded if is_loaded(PurePosixPath(name).name)]
    for place in sorted({PurePosixPath(name).parent for name in tensors}):
        names = [n for n in tensors if PurePosixPath(n).parent == place]
        where = "" if place == PurePosixPath() else f" from {place}"
        if f"{place / ADAPTER}" in names:
            names = [f"{place / ADAPTER}"]
        what, stated = f"what is loaded{where}", ", ".join(sorted(names))
        try:
            if not whole.issuperset(names):
                raise NotLoadable("its files are not all here, as they were saved")
            if code:
                raise NotLoadable("its config names code, which is not run")
            problems = differences(folder / place, [PurePosixPath(name).name for name in names])
        except NotLoadable as failure:
            yield Check(what, ABSENT, stated, f"cannot be loaded: {failure}")
            continue
        found = "; ".join(problems) or "the same tensors"
        yield Check(what, MISMATCH if problems else OK, stated, found)
