"""The earlier runs that a model comes from: finding their ledger, and asking what of it adds up."""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    HFValidationError,
    LocalEntryNotFoundError,
)
from torch import nn

from dp_grape_hf import accounting
from dp_grape_hf.accounting import rounded_up
from dp_grape_hf.distributed import from_first
from dp_grape_hf.errors import Choice, PrivacyError, require
from dp_grape_hf.ledger.entries import LEDGER_NAME, Run, released
from dp_grape_hf.ledger.ledger import Ledger
from dp_grape_hf.ledger.provenance import provenance_of

logger = logging.getLogger(__name__)


class EarlierData(Choice):
    """What a run's data may have in common with that of earlier ones: some examples, or none."""

    SAME = "same"
    OTHER = "other"


# What was trained in this process need not have been saved since.
_TRAINED: weakref.WeakKeyDictionary[nn.Module, Ledger] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Earlier:
    """The runs that a model comes from.

    Attributes:
        ledger: of the last of them, with those before it.
        where: what errors call it.
        same_data: whether this run may use examples that any of them used.
        resumed: whether the last of them is this very run, which is to go on.
    """

    ledger: Ledger
    where: str
    same_data: bool
    resumed: bool = False

    @property
    def runs(self) -> tuple[Run, ...]:
        """Those whose releases add up with the ones of this run."""
        if self.resumed:
            return self.ledger.composed_runs[:-1]
        return self.ledger.runs if self.same_data else ()

    @property
    def releases(self) -> list[accounting.Releases]:
        """What they released, as `accounting` wants it."""
        return released(self.runs)

    @property
    def not_private_reasons(self) -> list[str]:
        """Why no finite epsilon holds for them, if so."""
        return list(dict.fromkeys(reason for run in self.runs for reason in run.reasons))


def remember(model: nn.Module, ledger: Ledger) -> Ledger:
    """Notes that a run trains this model, for later trainers of it in the same process."""
    _TRAINED[model] = ledger
    return ledger


def was_trained(model: nn.Module) -> bool:
    """Whether a run of this process has released anything for this very model."""
    ledger = _TRAINED.get(model)
    return ledger is not None and ledger.steps > 0


def find_earlier(model: nn.Module, args: Any) -> Earlier | None:
    """Finds the ledger of the run that a model comes from; a collective call.

    The ledger is expected next to the weights, in the folder or the repository on the Hub that the
    model says it was loaded from, or where ``args.earlier_ledger`` says. A model that was saved
    without its ledger has a note in its configuration (``provenance``). An adapter of PEFT does not
    know its folder: there only the base model's is found.

    Args:
        model: as it is before training.
        args: a ``DPGrapeArguments``.

    Returns:
        What was found, or ``None`` if the model comes from no recorded run, or if the place that it
        was loaded from cannot be looked into and ``args.earlier_data`` is "other".

    Raises:
        PrivacyError: there is one, and ``args.earlier_data`` does not say whether it used the same
            data; or there is none, and it does; or whether there is one is not known, and it does
            not say that it would not matter; or the ledger cannot be read.
    """
    return from_first(lambda: _find(model, args))


def _find(model: nn.Module, args: Any) -> Earlier | None:
    try:
        named = args.earlier_ledger
        found = _of_model(model) if named is None else _newest(Path(named))
    except _NotKnown as unknown:
        if args.private and args.earlier_data != EarlierData.OTHER:
            raise PrivacyError(
                f"{unknown}, and earlier_data={args.earlier_data!r}. If there was no such run, or "
                "none that used an example of this run's data, say earlier_data='other'. If one "
                "did, say earlier_data='same', and where its ledger is by earlier_ledger."
            ) from unknown
        logger.info("%s. No earlier run is counted.", unknown)
        return None
    if found is None:
        require(
            args.earlier_data is None,
            f"earlier_data={args.earlier_data!r}, but no {LEDGER_NAME} of an earlier run was found "
            "where the model was loaded from. Name it by earlier_ledger, or leave earlier_data out "
            "if the model comes from no private run.",
        )
        return None
    ledger, where, folder = found
    if _is_resumed(ledger, folder, args):
        return Earlier(ledger, where, same_data=False, resumed=True)
    if args.earlier_data is None and args.private:
        raise PrivacyError(
            f"This model comes from an earlier run, which {where} records: {_spent(ledger)}. "
            "earlier_data=None: say whether the training data of this run has examples that were "
            "trained on there. earlier_data='same': it has, and what both runs spend adds up. "
            "earlier_data='other': it has none, so nothing adds up, and the ledger says so."
        )
    return Earlier(ledger, where, same_data=args.earlier_data != EarlierData.OTHER)


def refuse_used_folder(args: Any, earlier: Earlier | None) -> None:
    """Refuses a new run in the folder of another, whose budget would be forgotten.

    That the folder holds a run is no reason yet to refuse a trainer: it may resume that run.

    Args:
        args: a ``DPGrapeArguments``.
        earlier: the runs that the model comes from.

    Raises:
        PrivacyError: the folder's ledger has releases of a private run, and this one, which may
            be without privacy, does not go on with it; or that ledger cannot be read.
    """
    live = Path(str(args.output_dir)) / LEDGER_NAME
    if earlier is not None and earlier.resumed:
        ledger, where = earlier.ledger, earlier.where
    elif live.is_file():
        ledger, where = Ledger.load(live), f"{live}"
        if not (ledger.private and ledger.steps):
            return
    else:
        return
    raise PrivacyError(
        f"output_dir={args.output_dir!r} is that of another run, which {where} records: "
        f"{_spent(ledger)}. Go on with it by train(resume_from_checkpoint=...), or give this run "
        "an output_dir of its own. If both use some of the same examples, say so by "
        f"earlier_ledger={where!r} and earlier_data='same': what they spend then adds up. Delete "
        "the folder instead only if nothing that came of that run was shown or used."
    )


class _NotKnown(Exception):
    """Whether a model comes from an earlier run could not be looked up, and why."""


_Found = tuple[Ledger, str, Path | None]


def _of_model(model: nn.Module) -> _Found | None:
    trained = _TRAINED.get(model)
    if trained is not None and trained.steps:
        where = "the ledger of its trainer" if trained.path is None else f"{trained.path}"
        return Ledger(trained.links), where, trained.path and trained.path.parent
    config = getattr(model, "config", None)
    revision = getattr(config, "_commit_hash", None)
    note = provenance_of(model)
    # Where it says that it was loaded from; PEFT's wrappers ask the model inside.
    names = getattr(model, "name_or_path", None), getattr(config, "_name_or_path", None)
    unknown = None
    for name in dict.fromkeys(name for name in names if isinstance(name, str) and name):
        folder = Path(name)
        try:
            path = folder / LEDGER_NAME if folder.is_dir() else _from_hub(name, revision)
        except _NotKnown as failure:
            unknown = failure
            continue
        if path is not None and path.is_file():
            found = _newest(path)
            if note is None or found[0].has_ended_with(note.get("ledger", found[0].head)):
                return found
    if unknown is not None:
        raise unknown
    if note is not None:
        raise _NotKnown(
            f"The config of this model says that it was trained privately before, with epsilon "
            f"{note.get('epsilon')} at delta {note.get('delta')}, and the {LEDGER_NAME} of that "
            "run is not where the model was loaded from"
        )
    return None


def _from_hub(name: str, revision: str | None) -> Path | None:
    """Returns the ledger of a repository, or ``None`` if it has none.

    Raises:
        _NotKnown: what failed does not tell whether it has one. The Hub says of private
            repositories, too, that they are not there.
    """
    what = f"Whether {name!r}, where this model comes from, has a {LEDGER_NAME} is not known"
    try:
        return Path(hf_hub_download(name, LEDGER_NAME, revision=revision))
    except HFValidationError as error:
        raise _NotKnown(f"{what}: no folder here has that name, and no repository can") from error
    except Exception as error:  # of the client, or of whatever it sends requests with
        away = isinstance(error, LocalEntryNotFoundError)  # from the cache, and not looked up
        if isinstance(error, EntryNotFoundError) and not away:
            return None
        if revision is not None:
            cached = try_to_load_from_cache(name, LEDGER_NAME, revision=revision)
            if cached is _CACHED_NO_EXIST:  # of that commit, which does not change
                return None
        cause = (error.__cause__ if away else None) or error
        reason = next(iter(f"{cause}".splitlines()), "")
        raise _NotKnown(f"{what} ({type(cause).__name__}: {reason})") from error


def _newest(place: Path) -> _Found:
    """Reads a folder's ledger, or the live one of its run above the checkpoint that it lies in.

    Which checkpoint to go on from is chosen by whoever saw the later ones, so all releases count.
    """
    path = place / LEDGER_NAME if place.is_dir() else place
    ledger, folder = Ledger.load(path), path.resolve().parent
    live = folder.parent / LEDGER_NAME
    if live.is_file():
        whole = Ledger.load(live)
        if whole.run_id == ledger.run_id and whole.goes_on_from(ledger):
            return whole, f"{live}", folder
    return ledger, f"{path}", folder


def _is_resumed(ledger: Ledger, folder: Path | None, args: Any) -> bool:
    """Whether a ledger is of the run that ``args`` are about to resume, as far as can be told."""
    checkpoint = args.resume_from_checkpoint
    if isinstance(checkpoint, str) and folder is not None:
        if Path(checkpoint).resolve() == folder.resolve():
            return True
    live = Path(str(args.output_dir)) / LEDGER_NAME
    return live.is_file() and Ledger.load(live).run_id == ledger.run_id


def _spent(ledger: Ledger) -> str:
    if not ledger.private:
        return f"it has no guarantee ({'; '.join(ledger.not_private_reasons)})"
    spent = ledger.known_epsilon()
    epsilon = "epsilon not known here" if spent is None else f"epsilon {rounded_up(spent):g}"
    return f"{epsilon} at delta {ledger.mechanism.target_delta} in {ledger.steps} releases"
