"""The append-only record of a run's releases. Epsilon is computed from it, and never stored.

The live ledger is in the output folder. It is written before each release, so after a crash it may
contain one release too many, but never one too few. Each folder with weights contains a copy that
ends with the digests of the weights. The live ledger contains the entries of each copy. If training
resumes from a checkpoint, the releases made after the checkpoint still count.

A ledger records its run, and the earlier runs that it was started to continue. If you train on the
same data without declaring an earlier run, you have to add the costs up yourself.
"""

import math
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

from dp_grape_hf import accounting
from dp_grape_hf.accounting import ACCOUNTANTS, AccountantFailure, blocks_of, compose_epsilon
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
    RecordedRun,
    Resume,
    Start,
    Weights,
    broken,
    counts_on,
    extended,
    has_been_head,
    is_digest,
    now,
    released,
    runs_of,
    software_versions,
    with_releases,
)
from dp_grape_hf.ledger.record import (
    MAY_CHANGE_ON_RESUME,
    Mechanism,
    Release,
    require_same_mechanism,
)
from dp_grape_hf.ledger.storage import LiveFile, read_links, to_text, write_text


@dataclass
class Ledger:
    """The record of a run's releases. Make one with ``start``, ``load`` or ``resume``.

    Guarantee:
        ``steps`` never decreases, and a reason why the run is not private is never removed. The
        file contains public parameters and counts. It contains no secret seed, random draws, noise,
        batch sizes or losses.

    Attributes:
        links: the entries, each with its digest, oldest first.
        runs: the runs that the entries describe; this run is the last one.
    """

    links: tuple[Link, ...]
    _file: LiveFile | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check that the entries are consistent."""
        self.runs = runs_of(link.entry for link in self.links)

    # ---- Making one ----

    @classmethod
    def start(
        cls,
        mechanism: Mechanism,
        path: str | Path | None = None,
        *,
        reason: str = "",
        continues: Self | None = None,
        same_data: bool = True,
    ) -> Self:
        """Start the empty ledger of a new run, and write it if there is a ``path``.

        An existing ledger at ``path`` is renamed to ``privacy_ledger.before-<run id>.json``.

        Args:
            mechanism: The parameters of the run.
            path: The live file. ``None`` counts in memory only, as all ranks but the first do.
            reason: Why the run has no guarantee; empty if it has one.
            continues: The ledger of the run whose weights this run starts from, if any. The new
                ledger contains all its entries.
            same_data: Whether an earlier run used data of this run. Then the releases of all runs
                add up. Otherwise the earlier releases are recorded and not counted.

        Raises:
            PrivacyError: the runs have different adjacencies or privacy units, so that their
                epsilons do not add up; or a run of another process uses the same path.
        """
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
            path = Path(path)
            ledger._file = LiveFile(path)
            if path.exists():
                path.rename(path.with_name(f"{path.stem}.before-{ledger.run_id}{path.suffix}"))
            ledger._file.write(ledger.links, anew=True)
        return ledger

    @classmethod
    def shared(cls, make: Callable[[], Self]) -> Self:
        """Start or resume one ledger for all processes. All processes must call this together.

        Only the first process calls ``make``, and only its ledger writes the file. The other
        processes need not see the file. An error of ``make`` is raised in every process.
        """
        ledger = from_first(make)
        return ledger if is_first() else cls(ledger.links)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a ledger to examine it, even if it was edited (see ``fault``).

        Raises:
            PrivacyError: The file is missing or damaged, or its entries contradict each other.
        """
        return cls(read_links(path))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a ledger. Later entries are added in memory and not written to the file.

        Raises:
            PrivacyError: The file is missing, damaged or edited, or its entries contradict each
                other.
        """
        try:
            links = read_links(path)
            require((problem := broken(links)) is None, f"{problem}.")
            return cls(links)
        except PrivacyError as error:
            raise PrivacyError(
                f"no valid privacy ledger at {path}: {error} Without it, the epsilon spent is "
                "unknown. Pass the folder that a run saved to. Restore a lost file from a copy, or "
                "start a new run in another folder."
            ) from error

    @classmethod
    def resume(
        cls, live_path: str | Path, checkpoint_path: str | Path, mechanism: Mechanism, updates: int
    ) -> Self:
        """Continue the ledger of the run that wrote a checkpoint.

        Args:
            live_path: The live file. If it does not exist, the live file in the folder above the
                checkpoint is used. If that one does not exist either (the checkpoint was moved),
                the copy in the checkpoint is used.
            checkpoint_path: The copy inside the checkpoint.
            mechanism: The parameters of the run that resumes.
            updates: The number of updates in the checkpoint's weights.

        Guarantee:
            The result contains every release, and every reason for not being private, that either
            file contains.

        Raises:
            PrivacyError: A file is damaged, the files contradict each other, ``updates`` or
                ``mechanism`` differs from the files, or another process still trains this run.
        """
        file = LiveFile(Path(live_path))
        ledger = cls.load(checkpoint_path)
        require_same_mechanism(mechanism, ledger.mechanism, checkpoint_path)
        require(
            ledger.updates == updates,
            f"{updates=}, but {checkpoint_path} belongs to weights with {ledger.updates} updates. "
            "Resume from a folder whose files were saved together.",
        )
        reasons, newest = ledger.not_private_reasons, Path(checkpoint_path)
        found = {file.path: cls.load(file.path)} if file.path.exists() else {}
        # If the run resumes in another folder, the live ledger of its old folder may count releases
        # made after the checkpoint.
        old = newest.parent.parent / LEDGER_NAME
        if old.exists() and old.resolve() != file.path.resolve():
            if (other := cls.load(old)).run_id == ledger.run_id:
                found[old] = other
        for path, live in sorted(found.items(), key=lambda item: item[1].steps):
            both = f"{path} and {newest}"
            require(
                live.run_id == ledger.run_id,
                f"{both} belong to different runs, {live.run_id} and {ledger.run_id}. Resume in "
                "the run's own folder or in an empty one.",
            )
            require_same_mechanism(mechanism, live.mechanism, path)
            require(
                live.goes_on_from(ledger) or not ledger.has_releases_beyond(live),
                f"{both} contain {live.steps} and {ledger.steps} releases, and the first lacks "
                "some of the second: it was rolled back, or they are branches of one run. Restore "
                "its newest copy, or start a new run that continues one of them, and add up the "
                "epsilon of both.",
            )
            reasons += live.not_private_reasons
            ledger, newest = live, path
        ours, theirs = asdict(mechanism), asdict(ledger.mechanism)
        changes = {name: ours[name] for name in MAY_CHANGE_ON_RESUME if ours[name] != theirs[name]}
        missing = [r for r in dict.fromkeys(reasons) if r not in ledger.not_private_reasons]
        ledger._file = file
        ledger._append(
            *map(NotPrivate, missing),
            Resume(secrets.token_hex(8), updates, now(), software_versions(), changes),
        )
        return ledger

    # ---- Reading it ----

    @property
    def path(self) -> Path | None:
        """The live file, if there is one."""
        return None if self._file is None else self._file.path

    @property
    def mechanism(self) -> Mechanism:
        """The parameters of this run since it was last resumed."""
        return self.runs[-1].mechanism

    @property
    def run_id(self) -> str:
        """The unique identifier of this run."""
        return self.runs[-1].start.run_id

    @property
    def versions(self) -> dict[str, str]:
        """The versions of the software that this run began with, by package."""
        return dict(self.runs[-1].start.versions)

    @property
    def steps(self) -> int:
        """Number of releases of this run."""
        return self.runs[-1].steps

    @property
    def updates(self) -> int | None:
        """Number of updates in the weights last saved or resumed from; ``None`` before."""
        return self.runs[-1].updates

    @property
    def saved(self) -> list[Weights]:
        """The entries about saved weights, of all runs, oldest first."""
        return [link.entry for link in self.links if isinstance(link.entry, Weights)]

    @property
    def head(self) -> str:
        """The digest of the last entry. It depends on all entries."""
        return self.links[-1].digest

    @property
    def composed_runs(self) -> tuple[RecordedRun, ...]:
        """The runs whose releases add up. This run is the last of them."""
        same = self.runs[-1].start.continues == SAME_DATA
        return self.runs if same else self.runs[-1:]

    @property
    def not_private_reasons(self) -> list[str]:
        """The reasons why ``composed_runs`` have no finite epsilon; empty if they have one."""
        reasons = [reason for run in self.composed_runs for reason in run.reasons]
        return list(dict.fromkeys(reasons))

    @property
    def private(self) -> bool:
        """True if a finite epsilon holds."""
        return not self.not_private_reasons

    @property
    def composed(self) -> list[accounting.Releases]:
        """The releases of ``composed_runs``, as input for `accounting`."""
        return released(self.composed_runs)

    @property
    def earlier(self) -> list[accounting.Releases]:
        """The releases of ``composed_runs`` without this run."""
        return released(self.composed_runs[:-1])

    def epsilon(self, delta: float | None = None) -> float:
        """Return the accountant's upper bound on epsilon for all releases in ``composed_runs``.

        The bound holds at ``delta``, or at ``target_delta`` if ``delta`` is ``None``. It is
        infinite if the run is not private, and 0 before the first release.

        Raises:
            PrivacyError: Neither ``delta`` nor ``target_delta`` is given.
        """
        if not self.private:
            return math.inf
        delta = self.mechanism.target_delta if delta is None else delta
        if delta is None:
            raise PrivacyError("target_delta=None: epsilon needs a delta. Pass one, such as 1e-5.")
        return compose_epsilon(self.composed, delta=delta, accountant=self.mechanism.accountant)

    def known_epsilon(self) -> float | None:
        """Return ``epsilon()``; ``None`` without a delta, or if the accountant is not available."""
        try:
            return self.epsilon()
        except (AccountantFailure, PrivacyError, OverflowError):
            return None

    def epsilon_by(self, accountant: str, delta: float) -> float:
        """Return the upper bound on epsilon by one accountant, without falling back to another.

        Raises:
            AccountantFailure: The accountant finds no bound, or is not available.
        """
        if not self.private:
            return math.inf
        if accountant not in ACCOUNTANTS:
            raise AccountantFailure(f"{accountant!r} is unknown")
        blocks, counts = blocks_of(self.composed)
        epsilon = ACCOUNTANTS[accountant](blocks, counts, delta).epsilon(counts) if blocks else 0.0
        if not math.isfinite(epsilon):
            raise AccountantFailure(f"it returned {epsilon}")
        return max(0.0, epsilon)

    # ---- Checking it ----

    @property
    def fault(self) -> str | None:
        """A message about the first entry whose digest is wrong; ``None`` without an edit."""
        return broken(self.links)

    def has_ended_with(self, head: str) -> bool:
        """Return whether a digest is, or once was, the head of this ledger.

        Raises:
            PrivacyError: ``head`` is not a digest.
        """
        require(
            is_digest(head),
            f"{head=} must have 64 hex digits, because parts of digests can be equal. Pass the "
            "complete digest.",
        )
        return has_been_head(head, self.links)

    def goes_on_from(self, copy: Self) -> bool:
        """Return whether ``copy`` is this ledger, or a copy of an earlier state of it."""
        *sealed, last = copy.links
        now = self.links[len(sealed) : len(sealed) + 1]
        same = list(self.links[: len(sealed)]) == sealed and len(now) == 1
        return same and (now[0] == last or counts_on(last.entry, now[0].entry))

    def has_releases_beyond(self, other: Self) -> bool:
        """Return whether there are releases after the entries that both ledgers have in common."""
        pairs = enumerate(zip(self.links, other.links, strict=False))
        common = next((n for n, (ours, theirs) in pairs if ours != theirs), len(other.links))
        return any(isinstance(link.entry, Release) for link in self.links[common:])

    # ---- Writing it ----

    def record(self, steps: int = 1) -> None:
        """Record releases. Call this before you make them.

        Args:
            steps: the number of consecutive releases, at least 1.

        Guarantee:
            When it returns, the live file, if any, contains the releases. If it raises, do not make
            them.

        Raises:
            PrivacyError: if ``steps`` is out of range, or the live file cannot be written, or
                another process wrote it.
        """
        require(type(steps) is int and steps >= 1, f"{steps=} must be an integer of at least 1.")
        self.links = with_releases(self.links, self.mechanism, steps)
        self.runs[-1].sessions[-1] += steps
        if self._file is not None:
            self._file.write(self.links, anew=steps > 1)

    def mark_not_private(self, reason: str) -> None:
        """Record permanently that this run has no guarantee, and why."""
        if reason not in self.not_private_reasons:
            self._append(NotPrivate(reason))

    def note_projection(self, digest: str) -> None:
        """Record the P used from now on, if P cannot be drawn again from a seed.

        Args:
            digest: SHA-256 of P (``PrincipalProjection.digest``).

        Raises:
            PrivacyError: The run has another P, and never recomputes it.
        """
        recorded = self.runs[-1].projection
        if recorded == digest:
            return
        require(
            recorded is None or self.mechanism.projection_update_steps is not None,
            f"The projection has the digest {digest[:12]}, but this run used {recorded}. Resume "
            "from a checkpoint of the run: its optimizer state contains the projection.",
        )
        self._append(Projection(digest))

    def snapshot(self, updates: int, files: dict[str, str] | None = None) -> Self:
        """Record that weights were saved, and return the ledger, to be saved next to the weights.

        ``publishing.Publisher`` calls this and saves the copy.

        Args:
            updates: The number of updates in the weights.
            files: SHA-256 of each weight file by name.

        Raises:
            PrivacyError: There are more updates than releases, so some were not recorded.
        """
        weights = Weights(updates, files or {})
        if self.links[-1].entry != weights:
            self._append(weights)
        return self

    def save(self, path: str | Path) -> None:
        """Write the ledger to ``path``, completely or not at all, even if the power fails.

        The folder is created if needed. A killed process may leave the hidden file ``.<name>.tmp``
        in the folder. The next save replaces it.
        """
        write_text(Path(path), to_text(self.links))

    def _append(self, *entries: Entry) -> None:
        """Add entries, if they are consistent, and write the live file."""
        links = extended(self.links, *entries)
        self.runs = runs_of(link.entry for link in links)
        self.links = links
        if self._file is not None:
            self._file.write(self.links, anew=True)
