"""The append-only record of what a run released; epsilon is derived from it, never stored.

The live ledger lies in the output folder and is written before each release, so after a crash it
may hold one release too many and never one too few. Each folder with weights holds a copy that
ends with their digests; the live one contains what each copy says, as its entries are chained
(`entries` says what that shows, and what it cannot). Releases made after a checkpoint stay spent
when training resumes from it: the live ledger's count wins.

A ledger knows its own run, and the runs that it was started to continue. Whoever trains on the same
data without saying so has to add the runs up.
"""

import math
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

from dp_grape_hf import accounting
from dp_grape_hf.accounting import (
    ACCOUNTANTS,
    AccountantFailure,
    blocks_of,
    compose_epsilon,
)
from dp_grape_hf.distributed import from_first, is_first
from dp_grape_hf.errors import PrivacyError, require
from dp_grape_hf.ledger.entries import (
    LEDGER_NAME,
    OTHER_DATA,
    SAME_DATA,
    Entry,
    Link,
    NotPrivate,
    Projection,
    Resume,
    Run,
    Start,
    Weights,
    broken,
    extended,
    goes_on,
    has_been_head,
    is_digest,
    lacks_releases,
    now,
    released,
    runs_of,
    software_versions,
    with_releases,
)
from dp_grape_hf.ledger.record import (
    MAY_CHANGE_ON_RESUME,
    Mechanism,
    require_same_mechanism,
)
from dp_grape_hf.ledger.storage import (
    RunLock,
    Written,
    append_line,
    hold,
    line_of,
    read_links,
    to_text,
    write_text,
)


@dataclass
class Ledger:
    """What one run has released. Make one with ``start``, ``load`` or ``resume``.

    Guarantee:
        ``steps`` never falls, and a reason why the run is not private never goes away. The file
        holds public parameters and counts: no secret seed, coins, noise, batch sizes or losses.

    Attributes:
        links: the entries, each with its digest, oldest first.
        path: the live file, if there is one.
        runs: what they say of each run, this one last.
    """

    links: tuple[Link, ...]
    path: Path | None = None
    _written: tuple[Written, ...] = field(default=(), repr=False, compare=False)  # one is there
    _lock: RunLock | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Checks that the entries belong together."""
        self.runs = runs_of(link.entry for link in self.links)

    # ---- Making one ----

    @classmethod
    def start(
        cls,
        mechanism: Mechanism,
        path: str | Path | None = None,
        private: bool = True,
        reason: str = "",
        continues: Self | None = None,
        same_data: bool = True,
    ) -> Self:
        """Starts the empty ledger of a new run, and writes it if there is a ``path``.

        The ledger of an earlier run at that place is kept, renamed to
        ``privacy_ledger.before-<run id>.json``.

        Args:
            mechanism: The parameters of the run.
            path: The live file; ``None`` counts in memory only, as all ranks but the first do.
            private: Whether the run claims a guarantee.
            reason: Why it does not; empty if it does.
            continues: The ledger of the run whose weights this one starts from, if any. The new
                one holds all that it holds.
            same_data: Whether any of those earlier runs used data of this one. Then the releases
                of all add up; otherwise those of the earlier runs are recorded only.

        Raises:
            PrivacyError: ``private`` and ``reason`` contradict each other, the runs are about
                neighbours of different kinds, whose epsilons do not add up, or a run of another
                process is still going on at that place.
        """
        require(private != bool(reason), f"{private=} contradicts {reason=}: give a reason if not")
        start = Start(
            run_id=secrets.token_hex(16),
            at=now(),
            versions=software_versions(),
            mechanism=mechanism,
            continues=None if continues is None else SAME_DATA if same_data else OTHER_DATA,
        )
        entries = [start, NotPrivate(reason)] if reason else [start]
        ledger = cls(extended(() if continues is None else continues.links, *entries))
        if path is not None:
            ledger.path = path = Path(path)
            ledger._lock = hold(path)
            if path.exists():
                path.rename(path.with_name(f"{path.stem}.before-{ledger.run_id}{path.suffix}"))
            ledger._persist()
        return ledger

    @classmethod
    def shared(cls, make: Callable[[], Self]) -> Self:
        """Starts or resumes one ledger for all processes, by ``make``; a collective call.

        Only the first process calls ``make``, so only that one needs to see the files, and only
        that one's copy writes them; an error that it raises is raised in every process.
        """
        ledger = from_first(make)
        return ledger if is_first() else cls(ledger.links)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Reads a ledger to examine it: unlike ``load``, also one that was edited (see ``fault``).

        Raises:
            PrivacyError: The file is missing, damaged or says something impossible.
        """
        return cls(read_links(path))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a ledger. What is recorded in it afterwards is not written back.

        Raises:
            PrivacyError: The file is missing, damaged, was edited or says something impossible.
        """
        try:
            links = read_links(path)
            require((problem := broken(links)) is None, f"{problem}.")
            return cls(links)
        except PrivacyError as error:
            raise PrivacyError(
                f"no valid privacy ledger at {path}: {error} Without it the privacy spent is "
                "unknown. Restore the file from a copy, or start a new run elsewhere."
            ) from error

    @classmethod
    def resume(
        cls,
        live_path: str | Path,
        checkpoint_path: str | Path,
        mechanism: Mechanism,
        updates: int,
    ) -> Self:
        """Continues the ledger of the run that wrote a checkpoint.

        Args:
            live_path: The live file. If there is none, the one in the checkpoint's own run folder
                counts, and if that is not there either (the checkpoint was moved), the copy.
            checkpoint_path: The copy inside the checkpoint.
            mechanism: The parameters of the run that resumes.
            updates: How many updates the checkpoint's weights contain.

        Guarantee:
            No release that either file holds is forgotten, and no reason for not being private.

        Raises:
            PrivacyError: A file is damaged, the files contradict each other, ``updates`` or the
                mechanism is not what they say, or the run is still going on in another process.
        """
        lock = hold(Path(live_path))
        ledger = cls.load(checkpoint_path)
        require_same_mechanism(mechanism, ledger.mechanism, checkpoint_path)
        require(
            ledger.updates == updates,
            f"{updates=}, but {checkpoint_path} belongs to weights with {ledger.updates} updates. "
            "Resume from a folder whose files were saved together.",
        )
        reasons, newest = ledger.not_private_reasons, Path(checkpoint_path)
        live_ledgers = cls._live_ledgers(Path(live_path), Path(checkpoint_path), ledger.run_id)
        for path, live in live_ledgers.items():
            both = f"{path} and {newest}"
            require(
                live.run_id == ledger.run_id,
                f"{both} are of different runs, {live.run_id} and {ledger.run_id}. Resume in the "
                "run's own folder or in an empty one.",
            )
            require_same_mechanism(mechanism, live.mechanism, path)
            require(
                live.steps >= ledger.steps,
                f"{both} hold {live.steps} and {ledger.steps} releases: the first was rolled back. "
                "Restore its newest copy.",
            )
            require(
                not lacks_releases(live.links, ledger.links),
                f"{both} are branches of one run: each holds releases that the other lacks, so "
                "neither counts all. Start a new run that continues one, and add up the privacy of "
                "both.",
            )
            reasons += live.not_private_reasons
            ledger, newest = live, path
        ours, theirs = asdict(mechanism), asdict(ledger.mechanism)
        changes = {name: ours[name] for name in MAY_CHANGE_ON_RESUME if ours[name] != theirs[name]}
        missing = [r for r in dict.fromkeys(reasons) if r not in ledger.not_private_reasons]
        ledger.path, ledger._lock = Path(live_path), lock
        ledger._append(
            *map(NotPrivate, missing),
            Resume(secrets.token_hex(8), updates, now(), software_versions(), changes),
        )
        return ledger

    @classmethod
    def _live_ledgers(cls, live: Path, checkpoint: Path, run_id: str) -> dict[Path, Self]:
        """Returns those that a resumed run must count, by file, the one with most releases last.

        A run that goes on in another folder has one in the folder where the checkpoint lies, which
        may count releases that were made after the checkpoint.
        """
        found = {live: cls.load(live)} if live.exists() else {}
        old = checkpoint.parent.parent / LEDGER_NAME
        if old.exists() and old.resolve() != live.resolve():
            other = cls.load(old)
            if other.run_id == run_id:
                found[old] = other
        return dict(sorted(found.items(), key=lambda item: item[1].steps))

    # ---- Reading it ----

    @property
    def mechanism(self) -> Mechanism:
        """The parameters of this run, as they are since it was last resumed."""
        return self.runs[-1].mechanism

    @property
    def run_id(self) -> str:
        """What tells this run from all others."""
        return self.runs[-1].start.run_id

    @property
    def started_at(self) -> str:
        """When this run began, in UTC, to the second."""
        return self.runs[-1].start.at

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the software that this run began with, by package."""
        return dict(self.runs[-1].start.versions)

    @property
    def steps(self) -> int:
        """Number of releases of this run."""
        return self.runs[-1].steps

    @property
    def sessions(self) -> tuple[int, ...]:
        """Number of releases of this run from its start, and from each resumption, to the next."""
        return tuple(self.runs[-1].sessions)

    @property
    def updates(self) -> int | None:
        """How many updates the weights contain that were last saved, or resumed from."""
        return self.runs[-1].updates

    @property
    def saved(self) -> list[Weights]:
        """The weights that were saved, of all runs, oldest first, with the digests of each."""
        return [link.entry for link in self.links if isinstance(link.entry, Weights)]

    @property
    def head(self) -> str:
        """The digest of the last entry, which all entries before it determine."""
        return self.links[-1].digest

    @property
    def composed_runs(self) -> tuple[Run, ...]:
        """The runs whose releases add up with those of this one, which is the last of them."""
        same = self.runs[-1].start.continues == SAME_DATA
        return self.runs if same else self.runs[-1:]

    @property
    def not_private_reasons(self) -> list[str]:
        """Why no finite epsilon holds for this run and those that add up with it, if so."""
        reasons = [reason for run in self.composed_runs for reason in run.reasons]
        return list(dict.fromkeys(reasons))

    @property
    def private(self) -> bool:
        """Whether a finite epsilon holds."""
        return not self.not_private_reasons

    @property
    def composed(self) -> list[accounting.Releases]:
        """All releases that add up, as `accounting` wants them."""
        return released(self.composed_runs)

    @property
    def earlier(self) -> list[accounting.Releases]:
        """Those of them that runs before this one made."""
        return released(self.composed_runs[:-1])

    def epsilon(self, delta: float | None = None) -> float:
        """Returns the accountant's upper bound on epsilon for all releases recorded.

        Those of earlier runs on the same data are among them. It holds at ``delta``, or at
        ``target_delta`` if that is ``None``. It is infinite if the run is not private, and 0 before
        the first release.
        """
        if not self.private:
            return math.inf
        delta = self.mechanism.target_delta if delta is None else delta
        if delta is None:
            raise PrivacyError("target_delta=None: epsilon needs a delta. Pass one, such as 1e-5.")
        return compose_epsilon(self.composed, delta=delta, accountant=self.mechanism.accountant)

    def known_epsilon(self) -> float | None:
        """Returns ``epsilon()``; ``None`` without a delta, or if its accountant is not there."""
        try:
            return self.epsilon()
        except (AccountantFailure, PrivacyError, OverflowError):
            return None

    def epsilon_by(self, accountant: str, delta: float) -> float:
        """Returns the bound on ``epsilon`` of one accountant, and of no other in its place.

        Raises:
            AccountantFailure: that accountant cannot bound it, or is not there.
        """
        if not self.private:
            return math.inf
        if accountant not in ACCOUNTANTS:
            raise AccountantFailure(f"{accountant!r} is unknown")
        blocks, counts = blocks_of(self.composed)
        if not blocks:
            return 0.0
        epsilon = ACCOUNTANTS[accountant](blocks, counts, delta).epsilon(counts)
        if not math.isfinite(epsilon):
            raise AccountantFailure(f"it returned {epsilon}")
        return max(0.0, epsilon)

    # ---- Checking it ----

    @property
    def fault(self) -> str | None:
        """Where the digests first fail to fit the entries, one of which was edited; or ``None``."""
        return broken(self.links)

    def has_ended_with(self, head: str) -> bool:
        """Whether a digest is its head, or was at some time.

        Raises:
            PrivacyError: ``head`` is no digest.
        """
        require(is_digest(head), f"{head=} must be all 64 hex digits of a digest.")
        return has_been_head(head, self.links)

    def goes_on_from(self, copy: Self) -> bool:
        """Whether this is the ledger that a copy was taken of, now or at some time."""
        return goes_on(self.links, copy.links)

    # ---- Writing it ----

    def record(self, steps: int = 1) -> None:
        """Records releases that are about to be made; call it before making them.

        Guarantee:
            When it returns, the file, if there is one, holds them. If it raises, do not release.
        """
        require(type(steps) is int and steps >= 1, f"{steps=} must be an integer of at least 1.")
        self.links = with_releases(self.links, self.mechanism, steps)
        self.runs[-1].sessions[-1] += steps
        self._persist(line_of(self.links[-1]) if steps == 1 else None)

    def mark_not_private(self, reason: str) -> None:
        """Notes for good that this run has no guarantee, and why."""
        if reason not in self.not_private_reasons:
            self._append(NotPrivate(reason))

    def note_projection(self, digest: str) -> None:
        """Notes the P that gradients meet from now on, if no seed makes it again.

        Args:
            digest: SHA-256 of its numbers (``PrincipalProjection.digest``).

        Raises:
            PrivacyError: The run has another one, and never makes it anew.
        """
        known = self.runs[-1].projection
        if known == digest:
            return
        require(
            known is None or self.mechanism.projection_update_steps is not None,
            f"the projection has the digest {digest[:12]}, and this run was made with {known}. "
            "Resume from a checkpoint of the run, whose optimizer state holds the projection.",
        )
        self._append(Projection(digest))

    def snapshot(self, updates: int, files: dict[str, str] | None = None) -> Self:
        """Notes that weights were saved, and returns the ledger, whose copy belongs beside them.

        ``publishing.Publisher`` does, and saves that copy.

        Args:
            updates: How many updates the weights contain.
            files: SHA-256 of each weight file by name.

        Raises:
            PrivacyError: There are more updates than releases: some were never recorded.
        """
        weights = Weights(updates, files or {})
        if self.links[-1].entry != weights:
            self._append(weights)
        return self

    def save(self, path: str | Path) -> None:
        """Writes the ledger to ``path``, whole or not at all, even if the power fails.

        The folder is made if need be. A process that is killed may leave the hidden file
        ``.<name>.tmp`` beside it, which the next save replaces.
        """
        write_text(Path(path), to_text(self.links))

    def _append(self, *entries: Entry) -> None:
        """Adds entries, if they fit, and writes the live file."""
        links = extended(self.links, *entries)
        self.runs = runs_of(link.entry for link in links)
        self.links = links
        self._persist()

    def _persist(self, line: str | None = None) -> None:
        """Writes the live file; refuses one that changed since this run last wrote it.

        Args:
            line: What is new, if no more than that has to be added to the file.
        """
        if self.path is None:
            return
        known = None
        if self._written and self.path.exists():
            known = next((one for one in self._written if one.is_in(self.path)), None)
            require(
                known is not None,
                f"{self.path} is not as this run wrote it last: another run was started in its "
                "folder, or the file was edited. Give each run an output_dir of its own.",
            )
        try:  # after an error, either may be there
            if line is None or known is None:
                text = to_text(self.links)
                self._written += (Written.of(text),)
                write_text(self.path, text)
                self._written = self._written[-1:]
            else:
                self._written = (known._replace(more=line.encode()),)
                append_line(self.path, known.size, line)
                self._written = (known.and_line(line),)
        except OSError as error:
            raise PrivacyError(
                f"{self.path} cannot be written: {error}. The release that was to be recorded, if "
                "any, was not made. Make room, then resume with resume_from_checkpoint."
            ) from error
