"""Build the source distribution and the wheel for PyPI, in ``dist``.

    make dist                          # python -m recipes.site.distributions

Setuptools uses README.md unchanged. Its links are relative, and PyPI does not support GitHub's
alerts. So both are built from a copy of the published files, in which links are absolute and alerts
are bold words.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from recipes.site.links import ROOT, in_repository, with_links

PUBLISHED = ("dp_grape_hf", "LICENSE", "pyproject.toml", "setup.cfg")
PAGE = "README.md"


def copy_published(folder: Path) -> None:
    """Copy the published files into an empty folder, and adapts the first page to PyPI."""
    for name in PUBLISHED:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder)
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    text = with_links(text, lambda target: in_repository(target, PAGE))
    text = re.sub(
        r"^> \[!(\w+)\]$", lambda kind: f"> **{kind[1].title()}:**", text, flags=re.MULTILINE
    )
    (folder / PAGE).write_text(text, encoding="utf-8")


def main() -> int:
    """Build the source distribution, and the wheel from it; pass options on to ``build``."""
    with tempfile.TemporaryDirectory() as folder:
        copy_published(Path(folder))
        command = [sys.executable, "-m", "build", "--outdir", str(ROOT / "dist")]
        return subprocess.run([*command, *sys.argv[1:], folder], check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
