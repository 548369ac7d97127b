"""What of a saved model may leave the machine, by an allow-list, and its upload as one commit.

A folder that a run saved holds more than a model: optimizer state, logs, pickled arguments with
their seed and token. Nothing is sent because it is there: a file is sent if its name is on the list
below, it is a plain file directly in the folder, and it has the format that its name says.

A publication is one commit, which the Hub shows whole or not at all. So the weights never appear
without the ledger and the card that speak for them, and a push that fails leaves what was there.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from safetensors import SafetensorError

from dp_grape_hf.config_paths import OnHub, is_hub_name, weights_named, without_paths
from dp_grape_hf.entries import CARD_NAME, LEDGER_NAME
from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.ledger import Ledger
from dp_grape_hf.weight_files import (
    ADAPTER,
    ADAPTER_CONFIG,
    INDEX,
    MODEL,
    digests,
    files_of_index,
    is_weights,
    notes_of,
)

logger = logging.getLogger(__name__)

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

_WAITS = (1.0, 4.0)  # seconds before a failed commit is tried again

Card = Callable[[Ledger], str]


def kind_of(name: str) -> str | None:
    """Returns what kind of content a file of that name may be published as; None: it may not."""
    for kind, patterns in ALLOWED.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            return kind
    return None


# ---- From a folder of a run to what may be seen ----


def stage(folder: Path, into: Path, card: Card, on_hub: OnHub = is_hub_name) -> Ledger:
    """Copies what may be published of a saved model, and writes the card that its ledger supports.

    Weights, tokenizer and ledger are copied byte by byte. Local paths are taken out of the copies
    of the configs (PEFT notes there where the base model was loaded from).

    Args:
        folder: where a run saved its model; everything that is not on the list stays there.
        into: an empty folder.
        card: writes the card from the ledger that lies beside the weights.
        on_hub: whether a name in a config can be one on the Hub.

    Returns:
        That ledger.

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
    return ledger


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
    return name.endswith((".json", ".txt", ".jinja")) and kind_of(name) != "weights"


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


# ---- The upload ----


class Repository:
    """A model repository on the Hub, which receives only what `stage` lets through.

    Making one creates the repository if there is none.

    Args:
        name: ``user/model``, or ``model`` for one of the user that the token belongs to.
        token: a token that may write; None takes the one that ``hf auth login`` saved.
        private: whether a repository that is created is private; None leaves it to the Hub.

    Raises:
        Exception: what ``huggingface_hub`` raises, with a note that says what it means here.
    """

    def __init__(self, name: str, *, token: str | None = None, private: bool | None = None) -> None:
        self._api = HfApi(library_name="dp_grape_hf")
        self._token = token
        self._pushes: list[Future[CommitInfo]] = []
        try:
            url = self._api.create_repo(name, token=token, private=private, exist_ok=True)
        except Exception as error:
            error.add_note(f"The repository {name} could not be made or opened. {_advice(error)}")
            raise
        self.repo_id = url.repo_id

    @property
    def busy(self) -> bool:
        """Whether a push in the background is not done."""
        return any(not push.done() for push in self._pushes)

    def wait(self) -> None:
        """Waits for the pushes in the background. A failed one has been logged when it failed."""
        wait(self._pushes)
        self._pushes.clear()

    def publish(
        self,
        folder: Path,
        card: Card,
        *,
        workspace: Path,
        message: str,
        places: Sequence[str] = ("",),
        token: str | None = None,
        revision: str | None = None,
        background: bool = False,
        on_hub: OnHub = is_hub_name,
    ) -> CommitInfo | Future[CommitInfo]:
        """Publishes a saved model in one commit; the folder may change once this has returned.

        Args:
            folder: as for `stage`, and so are ``card`` and ``on_hub``.
            workspace: a folder with room for a copy, which is there until the push is done.
            message: the commit's.
            places: the folders in the repository, each of which receives the same files.
            token: another than the repository's.
            revision: the branch, which must exist; None is the main one.
            background: whether to return at once, with a future. Pushes are made one by one.

        Raises:
            PrivacyError: as `stage`, or the repository holds weights of another origin.
            Exception: what ``huggingface_hub`` raises, with a note that says what it means here.
        """
        staged = Path(tempfile.mkdtemp(prefix=".publishing-", dir=workspace))
        try:
            stage(folder, staged / "model", card, on_hub)
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        rest = staged, tuple(places), message, token or self._token, revision
        if not background:
            return self._send(*rest)
        push: Future[CommitInfo] = self._api.run_as_future(self._send, *rest)
        push.add_done_callback(self._report)
        self._pushes = [*(p for p in self._pushes if not p.done()), push]
        return push

    def _report(self, push: Future[CommitInfo]) -> None:
        if not push.cancelled() and (error := push.exception()) is not None:
            notes = " ".join(getattr(error, "__notes__", ()))
            logger.error("A push to %s failed: %s %s", self.repo_id, error, notes)

    def _send(
        self,
        staged: Path,
        places: tuple[str, ...],
        message: str,
        token: str | None,
        revision: str | None,
    ) -> CommitInfo:
        try:
            files = sorted((staged / "model").iterdir())
            targets = {PurePosixPath(place, file.name): file for place in places for file in files}
            self._refuse_foreign_weights(targets, token, revision)
            pauses = iter(_WAITS)
            while True:
                try:
                    # Made anew, as the client marks what it has sent. What has arrived is not sent
                    # again, so a commit whose answer was lost is not made twice.
                    adds = [CommitOperationAdd(str(to), file) for to, file in targets.items()]
                    return self._api.create_commit(
                        self.repo_id, adds, commit_message=message, token=token, revision=revision
                    )
                except Exception as error:
                    pause = next(pauses, None)
                    if pause is None or _is_final(error):
                        raise
                    logger.warning("Trying to push again in %g s: %s", pause, error)
                    time.sleep(pause)
        except PrivacyError:
            raise
        except Exception as error:
            error.add_note(
                f"Nothing of this push is visible in {self.repo_id}, unless only the answer was "
                f"lost; then all of it is. What was published before is as it was. "
                f"{_advice(error)}"
            )
            raise
        finally:
            shutil.rmtree(staged, ignore_errors=True)

    def _refuse_foreign_weights(
        self, targets: dict[PurePosixPath, Path], token: str | None, revision: str | None
    ) -> None:
        there = self._api.list_repo_files(self.repo_id, token=token, revision=revision)
        places = {target.parent for target in targets}
        others = {path for name in there if (path := PurePosixPath(name)).parent in places}
        found = others - targets.keys()
        if foreign := sorted(
            str(p) for p in found if is_weights(p.name) or p.name.lower() == ADAPTER_CONFIG
        ):
            raise PrivacyError(
                f"{self.repo_id} holds {', '.join(foreign)}, which this run did not make, and the "
                "card and ledger beside them would seem to speak for them. Delete them there, or "
                "publish under another hub_model_id."
            )


def _statuses(error: BaseException) -> list[int]:
    chain: BaseException | None = error
    found: list[int] = []
    while chain is not None:
        if isinstance(chain, HfHubHTTPError):
            found.append(chain.response.status_code)
        chain = chain.__cause__
    return found


def _is_final(error: Exception) -> bool:
    """Whether the same request would fail again: it was refused, or could not be made."""
    refused = any(400 <= s < 500 and s not in (408, 409, 412, 429) for s in _statuses(error))
    return refused or isinstance(error, ValueError | TypeError | OfflineModeIsEnabled)


def _advice(error: Exception) -> str:
    if any(status in (401, 403) for status in _statuses(error)):
        return (
            "The token was refused: pass one that may write to this repository as hub_token, or "
            "log in with hf auth login."
        )
    return "The model is saved on this machine; push again with trainer.push_to_hub()."
