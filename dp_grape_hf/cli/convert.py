"""``dp-grape convert``: make a training script private by changing its imports."""

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
Run the script with its usual options, and add the options of a private run:

  --eps 8 --delta 1e-5            the privacy budget; delta far below 1 / N
  --per_device_train_batch_size   examples in memory at a time: as many as fit

Leave out learning_rate, in the script too. The package then chooses it, and the batch size.
Epsilon protects a row of the training data. If one example or one person has several rows, name
the column that tells them apart: --privacy_unit_column user_id.
"""


def run(args: argparse.Namespace) -> str:
    """Return the changes as a diff, and the next steps; write the changes with ``--write``."""
    new_texts = changed(args.script)
    diff: list[str] = []
    for path, new in new_texts.items():
        old = path.read_text(encoding="utf-8").splitlines(keepends=True)
        lines = new.splitlines(keepends=True)
        diff += difflib.unified_diff(old, lines, path.name, path.name, n=1)
        if args.write:
            path.write_text(new, encoding="utf-8")
    names = " and ".join(path.name for path in new_texts)
    written = f"{names}: written." if args.write else "No file was changed: add --write for that."
    changes = f"{names} {'imports' if len(new_texts) == 1 else 'import'}"
    return "".join(diff) + NEXT_STEPS.format(changed=changes, written=written)


def changed(script: Path) -> dict[Path, str]:
    """Return path -> new text for a script and the modules in its folder that change.

    Raises:
        PrivacyError: if the script does not exist, a module has a syntax error, or no module
            imports one of ``CLASSES`` by name.
    """
    require(script.is_file(), f"{script} does not exist. Pass the path of a training script.")
    try:
        texts = {path: path.read_text(encoding="utf-8") for path in modules_of(script)}
    except SyntaxError as error:
        raise PrivacyError(
            f"{error.filename}, line {error.lineno}, has a syntax error: {error.msg}. Correct it "
            "first."
        ) from error
    new_texts = {path: new for path, text in texts.items() if (new := converted(text)) != text}
    names = ", ".join(name for classes in CLASSES.values() for name in classes)
    require(
        bool(new_texts),
        f"{script} imports none of {names} by name from transformers or TRL. If it has `import "
        "transformers`, replace transformers.Trainer by dp_grape_hf.DPGrapeTrainer.",
    )
    return new_texts


def modules_of(script: Path) -> list[Path]:
    """Return a script and the modules in its folder that it imports, directly or indirectly."""
    modules = [script]
    for path in modules:  # the loop appends to the list
        names = []
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            if isinstance(node, ast.ImportFrom):
                names.append(node.module or "")
            elif isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
        paths = dict.fromkeys(script.parent / f"{name.partition('.')[0]}.py" for name in names)
        modules += [other for other in paths if other.exists() and other not in modules]
    return modules


def converted(source: str) -> str:
    """Return the source of a module, with imports of ``CLASSES`` replaced by private versions.

    Raises:
        SyntaxError: if the source is not valid Python.

    >>> print(converted("from transformers import AutoModel, Trainer\\n"), end="")
    from transformers import AutoModel
    from dp_grape_hf import DPGrapeTrainer as Trainer
    """
    lines = source.splitlines(keepends=True)
    for node in reversed(list(ast.walk(ast.parse(source)))):  # later lines first
        if isinstance(node, ast.ImportFrom) and not node.level:
            classes = CLASSES.get((node.module or "").partition(".")[0], ())
            replaced = [alias for alias in node.names if alias.name in classes]
            if replaced:
                assert node.end_lineno is not None
                first, last = node.lineno - 1, node.end_lineno
                names = [f"DPGrape{a.name} as {a.asname or a.name}" for a in replaced]
                ours = f"{' ' * node.col_offset}from dp_grape_hf import {', '.join(names)}\n"
                lines[first:last] = [*_without(lines[first:last], node, replaced), ours]
    return "".join(lines)


def _without(lines: list[str], node: ast.ImportFrom, removed: Sequence[ast.alias]) -> list[str]:
    """Return the lines of an import without some of its names.

    The other lines are not changed if each removed name has a separate line.
    """
    rest = [alias for alias in node.names if alias not in removed]
    if not rest:
        return []
    gone = {alias.lineno for alias in removed}
    if not gone & {node.lineno, *(alias.lineno for alias in rest)}:
        return [line for number, line in enumerate(lines, node.lineno) if number not in gone]
    left = ast.ImportFrom(node.module, rest, node.level)
    return [f"{' ' * node.col_offset}{ast.unparse(left)}\n"]
