"""What of a saved model may leave the machine: files by an allow-list, configs without places here.

A folder that a run saved holds more than a model: optimizer state, logs, pickled arguments with
their seed and token. Nothing is sent because it is there: a file is sent if its name is on the list
below, it is a plain file directly in the folder, and it has the format that its name says. Out of
configs are taken the places on this machine; those that name other weights are refused.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.ledger import CARD_NAME, LEDGER_NAME, Ledger
from dp_grape_hf.publishing.model_files import (
    ADAPTER,
    ADAPTER_CONFIG,
    INDEX,
    MODEL,
    digests,
    files_of_index,
    notes_of,
)

ALLOWED = {
    "weights": (
        MODEL,
        "model-[0-9][0-9][0-9][0-9][0-9]-of-[0-9][0-9][0-9][0-9][0-9].safetensors",
        INDEX,
    ),
    "adapter": (ADAPTER,),
    "config": ("config.json", "generation_config.json", ADAPTER_CONFIG),
    "tokenizer or processor": (
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
        *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model"),
        *("spiece.model", "sentencepiece.bpe.model", "sentencepiece.model", "spm.model"),
        *("spm_char.model", "source.spm", "target.spm", "prophetnet.tokenizer", "bpe.codes"),
        *("dict.txt", "emoji.json", "byte_maps.json", "entity_vocab.json", "target_vocab.json"),
        *("vocab-src.json", "vocab-tgt.json", "word_shape.json", "word_pronunciation.json"),
        *("normalizer.json", "chat_template.jinja", "chat_template.json"),
        *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
        "audio_tokenizer_config.json",
    ),
    "ledger": (LEDGER_NAME,),
    "card": (CARD_NAME,),
}
"""Kind of content -> patterns of names. Weights in pickles are missing: they can hold anything."""

Card = Callable[[Ledger], str]
OnHub = Callable[[str], bool]

_PLACE = re.compile(r"(name_or_path|_file|_path|_dir|^path|^dir|^file)$")
# Wherever it is written.
_PATH = re.compile(r"~\w*[/\\]|\.\.?/|(file|local):/|[A-Za-z]:[\\/]|\\\\\w|/[^/]+/[^/]")
# What transformers and PEFT read other weights, or another config, from.
_WEIGHTS = {"transformers_weights", "configuration_files", "prompt_tuning_init_state_dict_path"}
_CODE = {"auto_map", "custom_pipelines"}
_KERNEL = "_implementation"  # a repository with code, if it has a slash
_TEMPLATE = "chat_template"  # a text that may well begin with a slash


def kind_of(name: str) -> str | None:
    """Returns what kind of content a file of that name may be published as; None: it may not."""
    for kind, patterns in ALLOWED.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            return kind
    return None


# ---- What a config names ----


def is_hub_name(name: str) -> bool:
    """Whether a model's name can be one on the Hub: no path, and nothing that lies here."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not os.path.exists(name)


def without_paths(content: Any, on_hub: OnHub = is_hub_name, key: str = "") -> Any:
    """Returns the content of a config without the entries that name places on this machine.

    It stands under a ``key``; ``on_hub`` says whether a name can be one on the Hub.
    """
    if isinstance(content, dict):
        items = [item for item in content.items() if not _is_place(*item, on_hub)]
        return {name: without_paths(value, on_hub, name) for name, value in items}
    if isinstance(content, list):
        return [without_paths(i, on_hub, key) for i in content if not _is_place(key, i, on_hub)]
    return content


def weights_named(content: Any) -> Iterator[tuple[str, Any]]:
    """Yields the entries of a config that send loaders to weights of another name."""
    return _entries(content, lambda key, value: key in _WEIGHTS)


def code_named(content: Any) -> Iterator[tuple[str, Any]]:
    """Yields the entries of a config that have loaders run code which is not their library's."""
    return _entries(
        content,
        lambda key, value: key in _CODE or (key.endswith(_KERNEL) and "/" in json.dumps(value)),
    )


def _entries(content: Any, wanted: Callable[[str, Any], bool]) -> Iterator[tuple[str, Any]]:
    pairs = content.items() if isinstance(content, dict) else ()
    for key, value in pairs:
        if value and wanted(key, value):
            yield key, value
    for value in content if isinstance(content, list) else (value for _, value in pairs):
        yield from _entries(value, wanted)


def _is_place(key: str, value: Any, on_hub: OnHub) -> bool:
    """Whether a value is a path on this machine, or could be one of another, or its key is."""
    if _PATH.match(key):
        return True
    if not isinstance(value, str) or len(value) < 2 or key == _TEMPLATE:
        return False
    named = bool(_PLACE.search(key)) and not on_hub(value)
    return named or bool(_PATH.match(value)) or (os.path.isabs(value) and os.path.exists(value))


# ---- From a folder of a run to what may be seen ----


def stage(folder: Path, into: Path, card: Card, on_hub: OnHub = is_hub_name) -> None:
    """Copies what may be published of a saved model, and writes the card that its ledger supports.

    Weights, tokenizer and ledger are copied byte by byte. Local paths are taken out of the copies
    of the configs (PEFT notes there where the base model was loaded from).

    Args:
        folder: where a run saved its model; everything that is not on the list stays there.
        into: an empty folder.
        card: writes the card from the ledger that lies beside the weights.
        on_hub: whether a name in a config can be one on the Hub.

    Raises:
        PrivacyError: there is no complete ledger or no complete set of weights of one model, the
            weights are not those that it was saved with, a name on the list is a link or no file,
            a config sends loaders to other weights, or safetensors carry notes of their own.
    """
    found = {path.name: path for path in sorted(folder.iterdir()) if kind_of(path.name)}
    for path in found.values():
        if path.is_symlink() or not path.is_file():
            raise PrivacyError(
                f"{path} is a link or no plain file, so its content is that of another place. "
                "Replace it by the file itself, or delete it, and publish again."
            )
    _check_weights(folder, found)
    ledger = Ledger.load(folder / LEDGER_NAME)
    if ledger.updates is None:
        raise PrivacyError(
            f"{folder / LEDGER_NAME} says updates=None: it was not saved together with these "
            "weights, and does not speak for them. Save the model first, with save_model()."
        )
    texts = {name: _text(path, on_hub) for name, path in found.items() if _is_text(name)}
    into.mkdir(parents=True, exist_ok=True)
    for name, path in found.items():
        if name in texts:
            (into / name).write_bytes(texts[name])
        else:
            shutil.copyfile(path, into / name)
    _require_recorded(ledger, into, folder)
    (into / CARD_NAME).write_text(card(ledger), encoding="utf-8")


def _check_weights(folder: Path, found: dict[str, Path]) -> None:
    weights = {name for name in found if name.endswith(".safetensors")}
    if INDEX in found:
        try:
            index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            whole = weights == files_of_index(index)
        except ValueError as error:
            raise PrivacyError(f"{folder / INDEX} is no index of weights: {error!r}") from error
    else:
        whole = weights in ({MODEL}, {ADAPTER})
    alone = ADAPTER_CONFIG not in found or weights == {ADAPTER}
    if not (whole and weights and alone):
        more = "" if alone else f" and {ADAPTER_CONFIG}"
        raise PrivacyError(
            f"{folder} holds {sorted(weights) or 'no weights'}{more}, which are not the weights "
            "of one saved model: model.safetensors, or the parts that its index names, or one "
            "adapter. Save into an empty folder, or delete what an earlier run left there."
        )
    for name in weights:
        try:
            notes = notes_of(folder / name)
        except (SafetensorError, OSError) as error:
            raise PrivacyError(f"{folder / name} is no whole safetensors file: {error}") from error
        if unknown := sorted(k for k, v in notes.items() if (k, v) != ("format", "pt")):
            raise PrivacyError(
                f"{folder / name} carries the notes {unknown} beside its tensors, and nothing says "
                "what they tell. Save the weights without metadata."
            )


def _is_text(name: str) -> bool:
    loaded = kind_of(name) in ("weights", "ledger")  # which have a format of their own
    return name.endswith((".json", ".txt", ".jinja")) and not loaded


def _text(path: Path, on_hub: OnHub) -> bytes:
    """Returns what a file holds, a config without local paths, if it is what its name says."""
    data = path.read_bytes()
    try:
        text = data.decode()
        content = json.loads(text) if path.suffix == ".json" else None
    except ValueError as error:
        raise PrivacyError(
            f"{path} does not hold what its name says, so it is not published: {error}. Save the "
            "model again, or delete that file."
        ) from error
    if not path.name.endswith("config.json"):
        return data
    clean = without_paths(content, on_hub)
    for key, value in weights_named(clean):
        raise PrivacyError(
            f"{path} says {key}={value!r}, so loaders would take weights that the ledger does not "
            "speak for. Take that entry out of it, and publish again."
        )
    if clean != content:
        return f"{json.dumps(clean, indent=2, ensure_ascii=False)}\n".encode()
    return data


def _require_recorded(ledger: Ledger, staged: Path, folder: Path) -> None:
    """Holds copied weights against the digests noted when they were saved."""
    recorded, found = ledger.saved[-1].files if ledger.saved else {}, digests(staged)
    if other := ", ".join(name for name in found if recorded.get(name) != found[name]):
        raise PrivacyError(
            f"{other} in {folder} changed since {LEDGER_NAME} was saved, which does not "
            "speak for these weights. Save them again, with trainer.save_model()."
        )
