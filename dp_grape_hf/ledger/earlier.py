"""Find the ledger of a model's earlier private runs, and decide which of their costs add up."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError
from torch import nn

from dp_grape_hf import accounting
from dp_grape_hf.accounting import rounded_up
from dp_grape_hf.distributed import from_first
from dp_grape_hf.errors import Choice, PrivacyError, require
from dp_grape_hf.ledger.entries import LEDGER_NAME, RecordedRun, released
from dp_grape_hf.ledger.ledger import Ledger
from dp_grape_hf.ledger.provenance import parts_of, provenance_of, provenance_of_adapters

logger = logging.getLogger(__name__)


class EarlierData(Choice):
    """The statement whether a run may share training examples with earlier runs of the model."""

    SAME = "same"
    OTHER = "other"


_LEDGER = "_dp_grape_ledger"
"""The attribute of a module with the ledger of its run. ``copy.deepcopy`` copies the ledger too."""


@dataclass(frozen=True)
class Earlier:
    """The runs that a model comes from.

    Attributes:
        ledger: the ledger of the last run, which also contains the runs before it.
        where: the name of this ledger in error messages.
        same_data: True if this run may use examples that an earlier run used.
        resumed: True if this run resumes the last run.
    """

    ledger: Ledger
    where: str
    same_data: bool
    resumed: bool = False

    @property
    def all_runs(self) -> tuple[RecordedRun, ...]:
        """The earlier runs, also those on other data, without the run that is resumed."""
        return self.ledger.runs[:-1] if self.resumed else self.ledger.runs

    @property
    def runs(self) -> tuple[RecordedRun, ...]:
        """The earlier runs whose releases add up with the releases of this run."""
        if self.resumed:
            return self.ledger.composed_runs[:-1]
        return self.all_runs if self.same_data else ()

    @property
    def releases(self) -> list[accounting.Releases]:
        """The releases of these runs, as input for `accounting`."""
        return released(self.runs)

    @property
    def not_private_reasons(self) -> list[str]:
        """The reasons why these runs have no finite epsilon; empty if they have one."""
        return list(dict.fromkeys(reason for run in self.runs for reason in run.reasons))


def remember(model: nn.Module, ledger: Ledger) -> None:
    """Store the ledger of a run in all modules that it trains, for later trainers of any of them.

    Its file may not have been saved yet, and a part of the model may become a part of another one.
    """
    for module in model.modules():
        if any(parameter.requires_grad for parameter in module.parameters()):
            vars(module)[_LEDGER] = ledger


def remembered_ledgers(model: nn.Module) -> list[Ledger]:
    """Return the ledgers of the runs that trained this model, or a part of it, in this process."""
    every = (vars(module).get(_LEDGER) for module in model.modules())
    ledgers = {id(ledger): ledger for ledger in every if ledger is not None}.values()
    return [ledger for ledger in ledgers if ledger.steps]


def find_earlier(model: nn.Module, args: Any) -> Earlier | None:
    """Find the ledger of the run that a model comes from. All processes must call this together.

    The ledger is expected next to the weights, in the folder or the repository on the Hub from
    which the model was loaded, or at the path ``args.earlier_ledger``. A model that was saved
    without its ledger has a note in its config (``provenance``). A PEFT adapter does not store the
    folder that it was loaded from, so only the ledger of its base model is found.

    Args:
        model: the model before training.
        args: a ``DPGrapeArguments``.

    Returns:
        The earlier runs. ``None`` if the model comes from no recorded run, or if the place that it
        was loaded from cannot be read and ``args.earlier_data`` is "other".

    Raises:
        PrivacyError: in one of four cases. There is an earlier run, and ``args.earlier_data`` is
            not set. There is none, and ``args.earlier_data`` is set. The place cannot be read, and
            ``args.earlier_data`` is not "other". Or the ledger cannot be read.
    """
    return from_first(lambda: _find(model, args))


def _find(model: nn.Module, args: Any) -> Earlier | None:
    try:
        named = args.earlier_ledger
        earlier = _of_model(model) if named is None else _newest(Path(named))
    except _NotKnown as unknown:
        if args.private and args.earlier_data != EarlierData.OTHER:
            raise PrivacyError(
                f"{unknown}, and earlier_data={args.earlier_data!r}. If no earlier run used an "
                "example of this run's data, set earlier_data='other'. If one did, set "
                "earlier_data='same', and set earlier_ledger to the path of its ledger."
            ) from unknown
        logger.info("%s. No earlier run is counted.", unknown)
        return None
    if earlier is None:
        require(
            args.earlier_data is None,
            f"earlier_data={args.earlier_data!r}, but no {LEDGER_NAME} of an earlier run was found "
            "where the model was loaded from. Name it by earlier_ledger, or leave earlier_data out "
            "if the model comes from no private run.",
        )
        return None
    ledger, where, folder = earlier
    if _is_resumed(ledger, folder, args):
        return Earlier(ledger, where, same_data=False, resumed=True)
    if args.earlier_data is None and args.private:
        raise PrivacyError(
            f"This model comes from an earlier run, which {where} records: {_spent(ledger)}. "
            "earlier_data=None does not say whether both runs train on some of the same examples. "
            "Set earlier_data='same' if they do: the costs of both runs then add up. Set "
            "earlier_data='other' if they share no example: the costs do not add up, and the "
            "ledger says so."
        )
    return Earlier(ledger, where, same_data=args.earlier_data != EarlierData.OTHER)


def refuse_used_folder(args: Any, earlier: Earlier | None) -> None:
    """Refuse to start a new run in the folder of another run, whose spent budget would be lost.

    Call this when training starts. A trainer may be made to resume that run, if there is a
    checkpoint.

    Args:
        args: a ``DPGrapeArguments``.
        earlier: the runs that the model comes from.

    Raises:
        PrivacyError: the folder's ledger has releases of another private run, even if the new run
            is not private. Or that ledger cannot be read.
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
        f"output_dir={args.output_dir!r} belongs to another run, which {where} records: "
        f"{_spent(ledger)}. Resume that run by train(resume_from_checkpoint=...), or give this run "
        "a separate output_dir. If both use some of the same examples, also set "
        f"earlier_ledger={where!r} and earlier_data='same': their costs then add up. Delete the "
        "folder only if no result of that run was shown or used."
    )


class _NotKnown(Exception):
    """The package could not look up whether a model has an earlier run; says why."""


_Found = tuple[Ledger, str, Path | None]


def _of_model(model: nn.Module) -> _Found | None:
    if trained := remembered_ledgers(model):
        found = [(Ledger(one.links), *_place_of(one)) for one in trained]
    elif note := provenance_of_adapters(model):
        raise _NotKnown(
            f"The config of an adapter of this model says that it was trained privately before, "
            f"with {note}, and PEFT does not say where the adapter was loaded from"
        )
    else:
        found = [one for part in parts_of(model) if (one := _of_part(part)) is not None]
    newest = max(found, key=lambda one: len(one[0].links), default=None)
    if newest and any(ledger.has_releases_beyond(newest[0]) for ledger, *_ in found):
        raise PrivacyError(
            "Parts of this model come from several private runs, and one ledger cannot add up "
            "their costs. Start from the model of one run."
        )
    return newest


def _place_of(ledger: Ledger) -> tuple[str, Path | None]:
    """Return the name of a ledger of this process in messages, and its folder."""
    path = ledger.path
    return ("the ledger of its trainer", None) if path is None else (f"{path}", path.parent)


def _of_part(model: nn.Module) -> _Found | None:
    """Look for the ledger of a model in the place that it was loaded from."""
    config = getattr(model, "config", None)
    revision = getattr(config, "_commit_hash", None)
    note = provenance_of(model)
    # Names of the place that the model was loaded from. PEFT's wrappers delegate to the model.
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
            newest = _newest(path)
            if note is None or newest[0].has_ended_with(note.get("ledger", newest[0].head)):
                return newest
    if unknown is not None:
        raise unknown
    if note is not None:
        raise _NotKnown(
            f"The config of this model says that it was trained privately before, with epsilon "
            f"{note.get('epsilon')} at delta {note.get('delta')}, but the place that the model was "
            f"loaded from does not contain the {LEDGER_NAME} of that run"
        )
    return None


def _from_hub(name: str, revision: str | None) -> Path | None:
    """Return the ledger of a repository, or ``None`` if it has none.

    Raises:
        _NotKnown: the request failed for another reason than a missing file. The Hub also reports
            private repositories as missing.
    """
    message = f"Whether {name!r}, where this model comes from, has a {LEDGER_NAME} is not known"
    try:
        return Path(hf_hub_download(name, LEDGER_NAME, revision=revision))
    except HFValidationError as error:
        reason = "no folder here has that name, and no repository can"
        raise _NotKnown(f"{message}: {reason}") from error
    except Exception as error:  # from the Hub's client, or from its HTTP library
        away = isinstance(error, LocalEntryNotFoundError)  # not in the cache, no answer of the Hub
        if isinstance(error, EntryNotFoundError) and not away:
            return None
        if revision is not None:
            cached = try_to_load_from_cache(name, LEDGER_NAME, revision=revision)
            if cached is _CACHED_NO_EXIST:  # the files of a commit never change
                return None
        cause = (error.__cause__ if away else None) or error
        reason = next(iter(f"{cause}".splitlines()), "")
        raise _NotKnown(f"{message} ({type(cause).__name__}: {reason})") from error


def _newest(place: Path) -> _Found:
    """Read a folder's ledger; for a checkpoint, the live ledger of its run in the folder above.

    A user may have chosen this checkpoint after seeing later ones. So the releases after the
    checkpoint count too.
    """
    path = place / LEDGER_NAME if place.is_dir() else place
    ledger, folder = Ledger.load(path), path.resolve().parent
    live = folder.parent / LEDGER_NAME
    if live.is_file():
        newer = Ledger.load(live)
        if newer.run_id == ledger.run_id and newer.goes_on_from(ledger):
            return newer, f"{live}", folder
    return ledger, f"{path}", folder


def _is_resumed(ledger: Ledger, folder: Path | None, args: Any) -> bool:
    """Return whether ``args`` show that this run resumes the run of a ledger."""
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
