"""The append-only record of what a run released; epsilon is derived from it, never stored.

The live ledger lies in the output folder and is written before each release, so after a crash it
may hold one release too many and never one too few. Each checkpoint holds a copy that also says
how many updates its weights contain. Releases made after a checkpoint stay spent when training
resumes from it: the live ledger's count wins.

A ledger knows its own run only. Whoever trains twice on the same data, or resumes copies of one
checkpoint in several folders, has to add the runs up.
"""

import json
import math
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any, Self

from dp_grape_hf.accounting import Variant, compose_epsilon
from dp_grape_hf.errors import PrivacyError, require
from dp_grape_hf.mechanism import (
    ADDED_IN_VERSION,
    Mechanism,
    Release,
    check_fields,
    kinds_of,
    require_same_mechanism,
)
from dp_grape_hf.processes import from_first, is_first

LEDGER_NAME = "privacy_ledger.json"
SCHEMA_VERSION = 4
_PACKAGES = ("dp_grape_hf", "torch", "transformers", "prv-accountant")

_TEXTS = {"valid": ("non-empty texts", lambda x: all(type(t) is str and t for t in x))}
_TEXT_BY_KEY = {"valid": ("non-empty texts", lambda x: all(type(t) is str for t in x.values()))}


@dataclass
class Ledger:
    """What one run has released. Make one with ``start``, ``load`` or ``resume``.

    Guarantee:
        ``steps`` never falls, and a reason why the run is not private never goes away. The file
        holds public parameters and counts: no secret seed, coins, noise, batch sizes or losses.
    """

    mechanism: Mechanism
    run_id: str
    started_at: str
    versions: dict[str, str] = field(metadata=_TEXT_BY_KEY)
    releases: tuple[Release, ...] = ()
    updates: int | None = None
    not_private_reasons: list[str] = field(default_factory=list, metadata=_TEXTS)
    path: Path | None = None

    def __post_init__(self) -> None:
        """Checks that the parts belong together; adds the mechanism's own reasons."""
        check_fields(self)
        for release, name in product(self.releases, ("noise_multiplier", "sample_rate")):
            ours, theirs = getattr(self.mechanism, name), getattr(release, name)
            require(ours == theirs, f"releases: {name}={theirs!r}, but the mechanism: {ours!r}.")
        require(
            self.updates is None or 0 <= self.updates <= self.steps,
            f"updates={self.updates} must be a number from 0 to the {self.steps} releases.",
        )
        reasons = self.mechanism.reasons_not_private() + self.not_private_reasons
        self.not_private_reasons = list(dict.fromkeys(reasons))

    # ---- Making one ----

    @classmethod
    def start(
        cls,
        mechanism: Mechanism,
        path: str | Path | None = None,
        private: bool = True,
        reason: str = "",
    ) -> Self:
        """Starts the empty ledger of a new run, and writes it if there is a ``path``.

        The ledger of an earlier run at that place is kept, renamed to
        ``privacy_ledger.before-<run id>.json``.

        Args:
            mechanism: The parameters of the run.
            path: The live file; ``None`` counts in memory only, as all ranks but the first do.
            private: Whether the run claims a guarantee.
            reason: Why it does not; empty if it does.
        """
        require(private != bool(reason), f"{private=} contradicts {reason=}: give a reason if not")
        path = None if path is None else Path(path)
        ledger = cls(
            mechanism,
            run_id=secrets.token_hex(16),
            started_at=datetime.now(UTC).isoformat(timespec="seconds"),
            versions={package: _version(package) for package in _PACKAGES},
            not_private_reasons=[reason] if reason else [],
            path=path,
        )
        if path is not None and path.exists():
            path.rename(path.with_name(f"{path.stem}.before-{ledger.run_id}{path.suffix}"))
        ledger._persist()
        return ledger

    @classmethod
    def shared(cls, make: Callable[[], Self]) -> Self:
        """Starts or resumes one ledger for all processes; a collective call.

        Args:
            make: Calls ``start`` or ``resume``. Only the first process calls it, so only that one
                needs to see the files, and only that one's copy writes them; an error that it
                raises is raised in every process.
        """
        ledger = from_first(make)
        return ledger if is_first() else replace(ledger, path=None)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a ledger. What is recorded in it afterwards is not written back.

        Raises:
            PrivacyError: The file is missing, damaged or says something impossible.
        """
        try:
            return cls(**_decode(Path(path).read_text(encoding="utf-8")))
        except (OSError, ValueError, OverflowError, RecursionError) as error:
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
            PrivacyError: A file is damaged, the files contradict each other, or ``updates`` or
                the mechanism is not what they say.
        """
        ledger = cls.load(checkpoint_path)
        require_same_mechanism(mechanism, ledger.mechanism, checkpoint_path)
        require(
            ledger.updates == updates,
            f"{updates=}, but {checkpoint_path} belongs to weights with {ledger.updates} updates. "
            "Resume from a folder whose files were saved together.",
        )
        reasons = ledger.not_private_reasons
        for path in cls._live_files(live_path, checkpoint_path, ledger.run_id):
            live = cls.load(path)
            both = f"{path} and {checkpoint_path}"
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
            reasons += live.not_private_reasons
            ledger = replace(live, updates=updates, not_private_reasons=reasons)
        ledger = replace(ledger, mechanism=mechanism, path=Path(live_path))
        ledger._persist()
        return ledger

    @classmethod
    def _live_files(
        cls, live_path: str | Path, checkpoint_path: str | Path, run_id: str
    ) -> list[Path]:
        """Returns the live files that a resumed run must count, the one with most releases last.

        A run that goes on in another folder has one in the folder where the checkpoint lies, which
        may count releases that were made after the checkpoint.
        """
        live, old = Path(live_path), Path(checkpoint_path).parent.parent / LEDGER_NAME
        found = [live] if live.exists() else []
        if old.exists() and old.resolve() != live.resolve() and cls.load(old).run_id == run_id:
            found.append(old)
        return sorted(found, key=lambda path: cls.load(path).steps)

    # ---- Reading it ----

    @property
    def steps(self) -> int:
        """Number of releases recorded."""
        return sum(release.count for release in self.releases)

    @property
    def private(self) -> bool:
        """Whether a finite epsilon holds."""
        return not self.not_private_reasons

    def epsilon(self, delta: float | None = None) -> float:
        """Returns the accountant's upper bound on epsilon for all releases recorded.

        It holds at ``delta``, or at ``target_delta`` if that is ``None``. It is infinite if the
        run is not private, and 0 before the first release.
        """
        if not self.private:
            return math.inf
        delta = self.mechanism.target_delta if delta is None else delta
        if delta is None:
            raise PrivacyError("target_delta=None: epsilon needs a delta. Pass one, such as 1e-5.")
        own = self.mechanism
        variant = Variant(
            max_batch_size=own.max_batch_size,
            num_samples=own.num_samples,
            norm_directions=own.norm_directions,
            adjacency=own.adjacency,
        )
        releases = [(r.noise_multiplier, r.sample_rate, r.count, variant) for r in self.releases]
        return compose_epsilon(releases, delta=delta, accountant=self.mechanism.accountant)

    # ---- Writing it ----

    def record(self, steps: int = 1) -> None:
        """Records releases that are about to be made; call it before making them.

        Guarantee:
            When it returns, the file, if there is one, holds them. If it raises, do not release.
        """
        require(type(steps) is int and steps >= 1, f"{steps=} must be an integer of at least 1.")
        sigma, q = self.mechanism.noise_multiplier, self.mechanism.sample_rate
        self.releases = (Release(sigma, q, self.steps + steps),)
        self._persist()

    def mark_not_private(self, reason: str) -> None:
        """Notes for good that this run has no guarantee, and why."""
        require(reason != "", f"{reason=} must say why the run is not private.")
        if reason not in self.not_private_reasons:
            self.not_private_reasons.append(reason)
            self._persist()

    def snapshot(self, updates: int) -> Self:
        """Notes how many updates the weights being saved contain, and returns the ledger.

        For a checkpoint: ``ledger.snapshot(step).save(folder / LEDGER_NAME)``. Raises
        ``PrivacyError`` if there are more updates than releases: some were never recorded.
        """
        self.updates = replace(self, updates=updates).updates
        return self

    def save(self, path: str | Path) -> None:
        """Writes the ledger to ``path``, whole or not at all, even if the power fails.

        The folder is made if need be. A process that is killed may leave the hidden file
        ``.<name>.tmp`` beside it, which the next save replaces.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(_encode(self))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        if os.name == "posix":  # elsewhere a folder cannot be opened
            folder = os.open(path.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)

    def _persist(self) -> None:
        if self.path is not None:
            self.save(self.path)


# ---- The file: strict JSON ----


def _encode(ledger: Ledger) -> str:
    content = {"schema_version": SCHEMA_VERSION} | asdict(ledger)
    del content["path"]
    values = content["mechanism"].items()
    content["mechanism"] = {k: "Infinity" if value == math.inf else value for k, value in values}
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def _decode(text: str) -> dict[str, Any]:
    # NaN and Infinity are not JSON: they become texts, which no number may be.
    content = json.loads(text, parse_constant=repr)
    version: Any = content.get("schema_version") if isinstance(content, dict) else None
    known = type(version) is int and 1 <= version <= SCHEMA_VERSION
    require(
        known,
        f"schema_version={version!r} is not one of 1 ... {SCHEMA_VERSION}, the ones read here. A "
        "newer file needs a newer dp_grape_hf.",
    )
    del content["schema_version"]
    _require_keys(content, {f.name for f in fields(Ledger)} - {"path"}, "ledger")
    releases = content["releases"]
    require(isinstance(releases, list), f"releases={releases!r} must be a list.")
    content["releases"] = tuple(_build(Release, release, "releases") for release in releases)
    newer = (added for later, added in ADDED_IN_VERSION.items() if later > version)
    unsaid = {name: value for added in newer for name, value in added.items()}
    content["mechanism"] = _build(Mechanism, content["mechanism"], "mechanism", unsaid)
    return content


def _build(cls: type[Any], content: Any, where: str, unsaid: Mapping[str, Any] = {}) -> Any:
    _require_keys(content, {f.name for f in fields(cls)} - unsaid.keys(), where)
    content = {**content, **unsaid}
    for f in fields(cls):
        if content[f.name] == "Infinity" and float in kinds_of(f):
            content[f.name] = math.inf
    return cls(**content)


def _require_keys(content: Any, names: set[str], where: str) -> None:
    require(isinstance(content, dict), f"{where}={content!r} must be an object.")
    for name in sorted(content.keys() ^ names):
        problem = f"={content[name]!r} is unknown." if name in content else " is missing."
        raise PrivacyError(f"{where}: {name}{problem}")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
