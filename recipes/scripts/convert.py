"""Makes a script that trains with transformers or TRL private, by other classes of the same names.

    python -m recipes.scripts.convert run_glue.py            # shows the change
    python -m recipes.scripts.convert run_glue.py --write    # makes it

``Trainer``, ``Seq2SeqTrainer``, the SFT, DPO and reward trainers of TRL, and their arguments are
imported from ``dp_grape_hf``, everything else from where it was. Modules beside the script that are
imported by it, and name these classes as well, are changed with it. The script then takes ``--eps``
and ``--delta``.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

BY_LIBRARY = {
    "transformers": {
        "Trainer": "DPGrapeTrainer",
        "TrainingArguments": "DPGrapeTrainingArguments",
        "Seq2SeqTrainer": "DPGrapeSeq2SeqTrainer",
        "Seq2SeqTrainingArguments": "DPGrapeSeq2SeqTrainingArguments",
    },
    "trl": {
        "SFTTrainer": "DPGrapeSFTTrainer",
        "SFTConfig": "DPGrapeSFTConfig",
        "DPOTrainer": "DPGrapeDPOTrainer",
        "DPOConfig": "DPGrapeDPOConfig",
        "RewardTrainer": "DPGrapeRewardTrainer",
        "RewardConfig": "DPGrapeRewardConfig",
    },
}
"""What stands in the place of a class of a library."""
OURS = {name: ours for classes in BY_LIBRARY.values() for name, ours in classes.items()}


def converted(source: str) -> str:
    """Returns the source of a module with the classes of ``OURS`` imported from this package.

    Raises:
        SyntaxError: if it is no Python.

    >>> print(converted("from transformers import AutoModel, Trainer\\n"), end="")
    from transformers import AutoModel
    from dp_grape_hf import DPGrapeTrainer as Trainer
    """
    lines = source.splitlines(keepends=True)
    for node in reversed(list(ast.walk(ast.parse(source)))):
        if isinstance(node, ast.ImportFrom):
            classes = BY_LIBRARY.get((node.module or "").partition(".")[0], {})
            taken = [alias for alias in node.names if alias.name in classes]
            if taken:
                assert node.end_lineno is not None
                first, last = node.lineno - 1, node.end_lineno
                kept = _without(lines[first:last], node, taken)
                lines[first:last] = [*kept, _import_of(taken, " " * node.col_offset)]
    return "".join(lines)


def _without(lines: list[str], node: ast.ImportFrom, taken: Sequence[ast.alias]) -> list[str]:
    """Returns the lines of an import without some names: as they were, where each has its line."""
    if len(taken) == len(node.names):
        return []
    rest = [alias for alias in node.names if alias not in taken]
    if not {alias.lineno for alias in taken} & {node.lineno, *(alias.lineno for alias in rest)}:
        gone = {alias.lineno - node.lineno for alias in taken}
        return [line for number, line in enumerate(lines) if number not in gone]
    left = ast.ImportFrom(node.module, rest, node.level)
    return [f"{' ' * node.col_offset}{ast.unparse(left)}\n"]


def _import_of(taken: Sequence[ast.alias], indent: str) -> str:
    names = [f"{OURS[alias.name]} as {alias.asname or alias.name}" for alias in taken]
    return f"{indent}from dp_grape_hf import {', '.join(names)}\n"


def modules_of(script: Path) -> list[Path]:
    """Returns a script and the modules beside it that it imports, directly or by one of them."""
    found = [script]
    for path in found:  # which grows
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module]
        names += [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
        beside = [script.parent / f"{name.partition('.')[0]}.py" for name in names]
        found += [other for other in dict.fromkeys(beside) if other.exists() and other not in found]
    return found


def changed(script: Path) -> dict[Path, str]:
    """Returns what a script and the modules beside it become, where that is not what they are.

    Raises:
        ValueError: if nothing is changed, because none of them imports a class of ``OURS``.
    """
    texts = {path: path.read_text(encoding="utf-8") for path in modules_of(script)}
    found = {path: new for path, text in texts.items() if (new := converted(text)) != text}
    if not found:
        raise ValueError(
            f"{script} imports none of {', '.join(OURS)} by name from transformers or TRL. If "
            "it has `import transformers`, write DPGrapeTrainer where it has transformers.Trainer."
        )
    return found


def diff_of(script: Path) -> str:
    """Returns the change of a script and of the modules beside it, as a unified diff."""
    parts = []
    for path, new in changed(script).items():
        old = path.read_text(encoding="utf-8").splitlines(keepends=True)
        lines = new.splitlines(keepends=True)
        parts += difflib.unified_diff(old, lines, path.name, path.name, n=1)
    return "".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Shows or makes the change of a script; returns 1 if there is none to make."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("script", type=Path)
    parser.add_argument("--write", action="store_true", help="change the files")
    options = parser.parse_args(argv)
    try:
        sys.stdout.write(diff_of(options.script))
        for path, text in changed(options.script).items() if options.write else ():
            path.write_text(text, encoding="utf-8")
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
