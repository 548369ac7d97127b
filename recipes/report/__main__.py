"""Renders every table of results in the committed pages from the committed results.

    make tables                        # python -m recipes.report
    python -m recipes.report --check

``PAGES`` are rendered whole. In any other page, what stands between two lines of its own,
``<!-- table: NAME -->`` and ``<!-- end -->``, is the table of that name in ``TABLES``. Pages that
were not what the results say are written anew and named, and the exit status is 1; ``--check``
writes nothing. Nothing is trained or measured: the recipes do that, README.md says how.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from recipes.attacks import membership
from recipes.benchmark import memory, noise_left, timing
from recipes.benchmark.methods import (
    ADAMW,
    COMPILED,
    CORRELATED,
    DP_GRAPE,
    LORA,
    OPAKE,
    PRINCIPAL,
)
from recipes.common.runs import read_lines
from recipes.common.sweep import Sweep
from recipes.digits import compare
from recipes.gpu_report import table as gpu
from recipes.models import host_tests, matrix
from recipes.paper import sweep
from recipes.report import tables
from recipes.report.findings import collect
from recipes.report.paper_match import read_paper
from recipes.scripts import rendering as scripts
from recipes.subspace import rendering as subspace

ROOT = Path(__file__).parents[2]
PAPER = Path("recipes/paper/results")
MARKED = re.compile(r"^<!-- table: ([\w-]+) -->\n(.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL)
BEGIN = re.compile(r"^<!-- table: ", re.MULTILINE)


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@cache
def _summary(folder: Path) -> dict[str, Any]:
    return Sweep(_json(folder / "sweep.json")["config"], folder).summary()


def _digits(root: Path, name: str = "compare") -> str:
    record = _json(root / f"recipes/digits/results/{name}.json")
    return compare.table(record["config"], record)


def _membership(root: Path) -> str:
    return membership.as_markdown(_json(root / "recipes/attacks/results/membership.json"))


def _benchmark(root: Path) -> str:
    return timing.as_markdown(_json(root / "recipes/benchmark/results/cpu.json")["results"])


def _measured(root: Path, what: str) -> list[Any]:
    """Returns the results of the benchmark whose files begin so."""
    folder = root / "recipes/benchmark/results"
    return [_json(path) for path in sorted(folder.glob(f"{what}_*.json"))]


def _scripts(root: Path) -> str:
    return scripts.as_markdown(_json(root / "recipes/scripts/results/scripts.json")["scripts"])


def _subspace(root: Path) -> str:
    return subspace.as_markdown(subspace.read_results(root / "recipes/subspace/results"))


def _matrix(root: Path) -> list[dict[str, Any]]:
    return read_lines(root / "recipes/models/results/model_matrix.jsonl")


def _host(root: Path) -> str:
    return host_tests.as_markdown(_json(root / "recipes/models/results/host_tests.json"))


def _first(text: str) -> str:
    """Returns what stands before the first empty line: the table without what is said below it."""
    return text.split("\n\n")[0]


GPU = "recipes/gpu_report/results"
OF_THE_PAPER = ("text", "text_trec", "vision")
SWEEPS = (
    *OF_THE_PAPER,
    "text_principal",
    "vision_principal",
    "text_chosen",
    "rte_chosen",
    "vision_chosen",
)

TABLES: Mapping[str, Callable[[Path], str]] = {
    "benchmark": _benchmark,
    "benchmark-compiled": lambda root: timing.times_table(
        _measured(root, "compiled"), (ADAMW, COMPILED, DP_GRAPE)
    ),
    "benchmark-correlated": lambda root: timing.times_table(
        _measured(root, "correlated"), (ADAMW, PRINCIPAL, CORRELATED)
    ),
    "benchmark-opake": lambda root: timing.times_table(
        _measured(root, "opake"), (ADAMW, DP_GRAPE, OPAKE)
    ),
    "benchmark-opake-lora": lambda root: timing.times_table(_measured(root, "opake"), LORA),
    "benchmark-principal": lambda root: timing.principal_table(_measured(root, "principal")),
    "gpu": lambda root: gpu.summary(_json(root / GPU / "gpu_report-nvidia-h100-80gb-hbm3.json")),
    "noise-left": lambda root: noise_left.as_markdown(
        _json(root / "recipes/benchmark/results/noise_left.json")
    ),
    "host-tests": _host,
    "digits": lambda root: _first(_digits(root)),
    "digits-chosen": lambda root: _first(_digits(root, "chosen")),
    "membership": lambda root: _first(_membership(root)),
    "memory-principal": lambda root: memory.as_markdown(_measured(root, "memory")),
    "memory-packed": lambda root: memory.of_few_bits(_measured(root, "packed")),
    "memory-messages": lambda root: memory.messages(_measured(root, "sharded")),
    "memory-sharded": lambda root: memory.by_processes(_measured(root, "sharded")),
    "scripts": _scripts,
    "subspace": _subspace,
    "models": lambda root: matrix.summarise(_matrix(root)),
    **{
        name: lambda root, name=name: sweep.wide_table(_summary(root / PAPER / name))
        for name in SWEEPS
    },
}
"""What a page may have between markers, by name: each from the root of the repository."""

PAGES: Mapping[str, Callable[[Path], str]] = {
    "recipes/digits/results/compare.md": _digits,
    "recipes/attacks/results/membership.md": _membership,
    "recipes/models/results/model_matrix.md": lambda root: matrix.render(_matrix(root)),
    "recipes/paper/results/paper_tables.md": lambda root: tables.render(
        collect([*(root / PAPER / name for name in OF_THE_PAPER), root / GPU]),
        read_paper(),
    ),
    **{
        f"{PAPER}/{name}/sweep.json": lambda root, name=name: sweep.as_json(
            _summary(root / PAPER / name)
        )
        for name in SWEEPS
    },
    **{
        f"{PAPER}/{name}/sweep.md": lambda root, name=name: sweep.as_markdown(
            _summary(root / PAPER / name)
        )
        for name in SWEEPS
    },
}
"""What is rendered as a whole, by path."""


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Renders the pages of a repository; returns 1 if one was stale."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(argv)
    changed = dict(stale(root))
    for path, text in changed.items():
        if options.check:
            sys.stderr.write(f"{path} is not what the results say: renew it with `make tables`\n")
        else:
            (root / path).write_text(text, encoding="utf-8")
            sys.stderr.write(f"{path} was not what the results say, and is written anew\n")
    return 1 if changed else 0


def stale(root: Path) -> Iterator[tuple[str, str]]:
    """Yields the path of each page that is not what the results say, and what it should be.

    Raises:
        ValueError: if a page asks for a table that is not known, or does not end one.
    """
    for path, render in PAGES.items():
        text = render(root)
        page = root / path
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            yield path, text
    rendered: dict[str, str] = {}
    for page in pages_of(root):
        path, old = str(page.relative_to(root)), page.read_text(encoding="utf-8")
        if len(MARKED.findall(old)) != len(BEGIN.findall(old)):
            raise ValueError(f"{path}: each <!-- table: NAME --> needs an <!-- end --> of its own.")
        for name, _ in MARKED.findall(old):
            if name not in TABLES:
                known = ", ".join(TABLES)
                raise ValueError(f"{path} asks for the table {name!r}; there are: {known}.")
            rendered.setdefault(name, TABLES[name](root).rstrip("\n"))
        new = MARKED.sub(
            lambda found: f"<!-- table: {found[1]} -->\n{rendered[found[1]]}\n<!-- end -->", old
        )
        if new != old:
            yield path, new


def pages_of(root: Path) -> list[Path]:
    """Returns the Markdown pages of the repository, without what lies in hidden folders."""
    below = (folder.rglob("*.md") for folder in root.glob("[!.]*") if folder.is_dir())
    return sorted([*root.glob("*.md"), *(page for pages in below for page in pages)])


if __name__ == "__main__":
    sys.exit(main())
