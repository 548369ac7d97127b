"""``dp-grape verify``: compare a saved or published model with its ledger."""

import argparse
from glob import escape
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from dp_grape_hf.errors import PrivacyError, require
from dp_grape_hf.ledger import LEDGER_NAME
from dp_grape_hf.publishing import ABSENT, MISMATCH, SECOND_OPINION, verify
from dp_grape_hf.tables import table

_SECOND_OPINIONS = """\
The claim is the bound by the run's accountant, which the ledger names. Second opinions are bounds
by other accountants on the same releases. All are valid upper bounds on the same epsilon, so a
larger second opinion does not mean that the run spent more: that accountant adds more for its
numerical error, or its analysis is looser. It must agree with the claim to about 2 %.
"""


def run(args: argparse.Namespace) -> tuple[str, int]:
    """Return a table of the comparisons, and 1 if there is a mismatch."""
    place = Path(args.place)
    if not place.exists():
        place = _downloaded(args.place, args.revision)
    else:
        require(
            args.revision is None,
            f"revision={args.revision!r}: {place} is a local path, which has no revisions. Leave "
            "it out.",
        )
    checks = verify(place, delta=args.target_delta, head=args.head)
    wrong, absent = (
        sum(check.status == status for check in checks) for status in (MISMATCH, ABSENT)
    )
    all_of_them = f"of {len(checks)} checks"
    verdict = f"{wrong} {all_of_them} found a mismatch." if wrong else "Nothing disagrees."
    if absent:
        verdict += f" {absent} {all_of_them} had nothing to compare."
    rows = [("check", "", "stated", "found"), *checks]
    others = any(check.found.endswith(SECOND_OPINION) for check in checks)
    notes = f"{_SECOND_OPINIONS}\n" * others
    return f"{table(rows, most=(34, 8, 30))}\n{notes}{verdict}\n", int(wrong > 0)


def _downloaded(repo_id: str, revision: str | None) -> Path:
    """Download the files to verify from a repository on the Hub, and return their folder."""
    try:
        folder = snapshot_download(repo_id, revision=revision, allow_patterns=[f"*/{LEDGER_NAME}"])
        # Folders with a separate ledger, such as copies of checkpoints, are verified separately.
        others = [path.parent for path in Path(folder).rglob(f"*/{LEDGER_NAME}")]
        folder = snapshot_download(
            repo_id,
            revision=Path(folder).name,  # the same commit, even if there is a newer one
            ignore_patterns=[
                f"{escape(other.relative_to(folder).as_posix())}/*" for other in others
            ],
        )
    except (HFValidationError, HfHubHTTPError, OSError, ValueError) as error:
        raise PrivacyError(
            f"{repo_id!r} is not a local path, and cannot be read as a repository on the Hub: "
            f"{error}. Pass a folder, a ledger's file, or the name of a repository."
        ) from error
    return Path(folder)
