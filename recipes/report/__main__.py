"""Render all tables of results, the table of options, and the model cards, in committed pages.

    make tables                        # python -m recipes.report
    python -m recipes.report --check

``PAGES`` are rendered whole. In any other page, the table NAME of ``TABLES`` is written between the
lines ``<!-- table: NAME -->`` and ``<!-- end -->``. Pages that differ from the results are written
anew and named, and the exit status is 1. ``--check`` writes nothing. Nothing is trained or measured
here: README.md explains how to run the recipes.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

from recipes.benchmark import kernels, timing
from recipes.common.markdown import score_text, table
from recipes.common.runs import read_lines
from recipes.common.sweep import Sweep
from recipes.digits import compare
from recipes.gpu_report import table as gpu
from recipes.paper import sweep
from recipes.report import cards, checks, figures, front_page, hours, studies, tables
from recipes.report.tables import CONFIGS, read_paper
from recipes.report.tables_gpu import Measured
from recipes.synthetic_text import card as synthetic_text

ROOT = Path(__file__).parents[2]
PAPER, STUDIES = Path("recipes/paper/results"), Path("recipes/studies/results")
MARKED = re.compile(r"^<!-- table: ([\w-]+) -->\n(.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL)
BEGIN = re.compile(r"^<!-- table: ", re.MULTILINE)


def _read(path: Path) -> Any:
    if path.suffix == ".jsonl":
        return read_lines(path)
    return json.loads(path.read_text(encoding="utf-8"))


def _of(pattern: str, render: Callable[[Any], str]) -> Callable[[Path], str]:
    """Returns what renders a file, or the list of all of a pattern with a star."""

    def rendered(root: Path) -> str:
        found = [_read(path) for path in sorted(root.glob(f"recipes/{pattern}"))]
        return render(found if "*" in pattern else found[0])

    return rendered


def _quoted(spec: Mapping[str, Any], root: Path) -> str:
    """Return a table of ``quoted.yaml``."""

    def cell(of: Any) -> str:
        if isinstance(of, str):
            if not of.startswith("= "):
                return of
            name, task, row, budget = of.removeprefix("= ").split(" > ")
            rows = _summary(root / STUDIES / name)["tasks"].get(task, {})
            score = rows.get(row, {}).get("scores", {}).get(budget)
            return spec["scores"].format(score[0]) if "scores" in spec else score_text(score)
        found = _read(root / "recipes" / of["of"])
        for key in of["at"].split(" > "):
            found = found[int(key)] if isinstance(found, list) else found[key]
        if "runs" in of:
            return score_text([*(of["times"] * value for value in found), of["runs"]])
        return of.get("as", "{:.1f}%").format(found * of.get("times", 1))

    return table(spec["head"], (map(cell, cells) for cells in spec["rows"]))


@cache
def _summary(folder: Path) -> dict[str, Any]:
    return Sweep(_read(folder / "sweep.json")["config"], folder).summary()


@cache
def _measured(root: Path) -> Measured:
    """Return what was measured on a GPU, and the simulated memory of the paper's models."""
    simulated = [_read(path) for path in sorted((root / PAPER / "memory").glob("*.json"))]
    curves = {found["model"]: found["memory_curves"] for found in simulated}
    return Measured(_read(root / "recipes" / GPU), curves)


@cache
def _costs(root: Path) -> list[hours.Cost]:
    plans = {name: sweep.read(CONFIGS / f"{name}.yaml") for name in PLANNED}
    return [*hours.costs(_measured(root), read_paper(), plans)]


def _first(text: str) -> str:
    """Returns what stands before the first empty line: the table without what is said below it."""
    return text.split("\n\n")[0]


PLANNED = (
    *("printed_roberta", "printed_opt", "printed_vit_fine_tune", "printed_vit"),
    *("printed_roberta_rank", "printed_roberta_quoted", "printed_opt_zeroth"),
    *("aggzo", "roberta_grid"),
)
"""The sweeps whose hours are told, in the order of their worth."""
SWEEPS = tuple(sorted(path.parent.name for path in (ROOT / STUDIES).glob("*/sweep.json")))
QUOTED = yaml.safe_load(Path(__file__).with_name("quoted.yaml").read_text(encoding="utf-8"))
DIGITS = {"digits": "compare", "digits-chosen": "chosen", "digits-epsilons": "epsilons"}
GPU = "gpu_report/results/nvidia-h100-80gb-hbm3.json"
MATRIX = "models/results/model_matrix.jsonl"

HOURS = """# Hours of the paper's sweeps

Rendered by `make tables`: steps times batch over throughput, on one H100, in float32. Scoring and
loading come on top.
"""

TABLES: Mapping[str, Callable[[Path], str]] = {
    "adapter-rules": _of("studies/results/adapters.json", studies.adapter_rules),
    "allocation": _of("studies/results/allocation.json", studies.allocation),
    "head-texts": _of("studies/results/head_texts.json", studies.head_texts),
    "pairs-head": _of("studies/results/pairs_head.json", studies.pairs_head),
    "benchmark": _of("benchmark/results/cpu*.json", timing.as_markdown),
    "benchmark-compiled": _of("benchmark/results/compiled_*.json", timing.as_markdown),
    "benchmark-kernels": _of("benchmark/results/kernels.json", kernels.as_markdown),
    "benchmark-lora": _of("benchmark/results/lora_*.json", timing.as_markdown),
    "benchmark-launches": _of("benchmark/results/launches_*.json", timing.as_markdown),
    "benchmark-principal": _of("benchmark/results/principal_*.json", timing.as_markdown),
    "gpu": _of(GPU, gpu.as_markdown),
    "time-and-memory": lambda root: front_page.time_and_memory(
        *(
            _read(root / "recipes" / name)
            for name in (GPU, "benchmark/results/cpu.json", "benchmark/results/lora_roberta.json")
        )
    ),
    "host-tests": _of("models/results/host_tests.json", checks.host_tests),
    **{
        table: _of(f"digits/results/{name}.json", lambda record: _first(compare.table(record)))
        for table, name in DIGITS.items()
    },
    "membership": _of("attacks/results/membership.json", studies.membership),
    **{
        f"memory-{kind}": _of(f"benchmark/results/{kind}_*.json", studies.memory)
        for kind in ("dense", "packed", "sharded")
    },
    "scripts": _of(
        "scripts/results/scripts.json", lambda run: checks.converted_scripts(run["scripts"])
    ),
    "subspace": _of("subspace/results/*.json", studies.subspace),
    "synthetic-text": _of("synthetic_text/results/trec_*.json", synthetic_text.as_markdown),
    "models": _of(MATRIX, checks.model_families),
    "hours": lambda root: hours.by_sweep(_costs(root)),
    "paper-tables": lambda root: tables.state(
        tables.our_cells(root / PAPER), _measured(root), read_paper()
    ),
    "paper-figures": figures.as_markdown,
    "options": lambda _: front_page.options(),
    **{name: partial(_quoted, spec) for name, spec in QUOTED.items()},
    **{
        name: lambda root, name=name: sweep.wide_table(_summary(root / STUDIES / name))
        for name in SWEEPS
        if not name.startswith("nothing_set")  # which a table of its own shows
    },
}
"""What a page may have between markers, by name: each from the root of the repository."""

PAGES: Mapping[str, Callable[[Path], str]] = {
    "recipes/digits/results/compare.md": _of("digits/results/compare.json", compare.table),
    "recipes/models/results/model_matrix.md": _of(MATRIX, checks.model_matrix),
    f"{PAPER}/hours.md": lambda root: f"{HOURS}\n{hours.by_row(_costs(root))}",
    f"{PAPER}/paper_tables.md": lambda root: tables.render(
        tables.our_cells(root / PAPER), _measured(root), read_paper()
    ),
    **{
        f"{cards.CARDS}/{name}/README.md": lambda root, name=name: cards.card(root, name)
        for name in cards.DETAILS
    },
    **{
        f"{STUDIES}/{name}/sweep.{ending}": lambda root, name=name, render=render: render(
            _summary(root / STUDIES / name)
        )
        for name in SWEEPS
        for ending, render in (
            ("json", lambda found: json.dumps(found, indent=1) + "\n"),
            ("md", sweep.as_markdown),
        )
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
    """Yield the path of each page that differs from the results, and its new text."""
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
