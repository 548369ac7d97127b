"""``dp-grape convert``: a training script made private by a change of its imports."""

from __future__ import annotations

import argparse
import ast
import difflib
from collections.abc import Sequence
from pathlib import Path

from dp_grape_hf.errors import PrivacyError, require

CLASSES = {
    "transformers": ("Trainer", "TrainingArguments", "Seq2SeqTrainer", "Seq2SeqTrainingArguments"),
    "trl": (
        *("SFTTrainer", "SFTConfig", "DPOTrainer", "DPOConfig"),
        *("RewardTrainer", "RewardConfig"),
    ),
}
"""The classes of each library that this package has a private version of, ``DPGrape`` + name."""

NEXT_STEPS = """
{changed} private classes under their old names. The rest of the script is unchanged.
{written}
Run the script with its usual options, and add those of a private run:

  --eps 8 --delta 1e-5            the privacy budget; delta far below 1 / N
  --expected_batch_size 1024      examples of one update: as many as your time allows
  --per_device_train_batch_size   examples at once: as many as fit into memory

Epsilon protects a row of the training data. If one example or one person has several rows, name
the column that tells them apart: --privacy_unit_column user_id.
"""


def run(args: argparse.Namespace) -> str:
    """Returns the changes as a diff, and what to do next; writes them with ``--write``."""
    found = changed(args.script)
    diff: list[str] = []
    for path, new in found.items():
        old = path.read_text(encoding="utf-8").splitlines(keepends=True)
        lines = new.splitlines(keepends=True)
        diff += difflib.unified_diff(old, lines, path.name, path.name, n=1)
        if args.write:
            path.write_text(new, encoding="utf-8")
    names = " and ".join(path.name for path in found)
    written = f"{names}: written." if args.write else "Nothing is written: add --write for that."
    changes = f"{names} {'imports' if len(found) == 1 else 'import'}"
    return "".join(diff) + NEXT_STEPS.format(changed=changes, written=written)


def changed(script: Path) -> dict[Path, str]:
    """Returns the new text of a script, and of the modules in its folder that change.

    Raises:
        PrivacyError: if the script is not there, or if a module is no Python, or if none of the
            modules imports one of ``CLASSES`` by name.
    """
    require(script.is_file(), f"{script} is no file: give the path of a training script.")
    try:
        texts = {path: path.read_text(encoding="utf-8") for path in modules_of(script)}
    except SyntaxError as error:
        raise PrivacyError(
            f"{error.filename}, line {error.lineno}, is no Python: {error.msg}. Correct it first."
        ) from error
    found = {path: new for path, text in texts.items() if (new := converted(text)) != text}
    names = ", ".join(name for classes in CLASSES.values() for name in classes)
    require(
        bool(found),
        f"{script} imports none of {names} by name from transformers or TRL. If it has `import "
        "transformers`, write DPGrapeTrainer where it has transformers.Trainer.",
    )
    return found


def modules_of(script: Path) -> list[Path]:
    """Returns a script and the modules in its folder that it imports, directly or indirectly."""
    found = [script]
    for path in found:  # the list grows while it is read
        names = []
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            if isinstance(node, ast.ImportFrom):
                names.append(node.module or "")
            elif isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
        beside = [script.parent / f"{name.partition('.')[0]}.py" for name in names]
        found += [other for other in dict.fromkeys(beside) if other.exists() and other not in found]
    return found


def converted(source: str) -> str:
    """Returns the source of a module that imports the private versions of ``CLASSES``.

    Raises:
        SyntaxError: if the source is no Python.

    >>> print(converted("from transformers import AutoModel, Trainer\\n"), end="")
    from transformers import AutoModel
    from dp_grape_hf import DPGrapeTrainer as Trainer
    """
    lines = source.splitlines(keepends=True)
    for node in reversed(list(ast.walk(ast.parse(source)))):  # later lines first
        if isinstance(node, ast.ImportFrom) and not node.level:
            known = CLASSES.get((node.module or "").partition(".")[0], ())
            taken = [alias for alias in node.names if alias.name in known]
            if taken:
                assert node.end_lineno is not None
                first, last = node.lineno - 1, node.end_lineno
                names = [f"DPGrape{a.name} as {a.asname or a.name}" for a in taken]
                ours = f"{' ' * node.col_offset}from dp_grape_hf import {', '.join(names)}\n"
                lines[first:last] = [*_without(lines[first:last], node, taken), ours]
    return "".join(lines)


def _without(lines: list[str], node: ast.ImportFrom, taken: Sequence[ast.alias]) -> list[str]:
    """Returns the lines of an import without some of its names.

    The other lines stay as they are if each removed name has a separate line.
    """
    rest = [alias for alias in node.names if alias not in taken]
    if not rest:
        return []
    gone = {alias.lineno for alias in taken}
    if not gone & {node.lineno, *(alias.lineno for alias in rest)}:
        return [line for number, line in enumerate(lines, node.lineno) if number not in gone]
    left = ast.ImportFrom(node.module, rest, node.level)
    return [f"{' ' * node.col_offset}{ast.unparse(left)}\n"]
