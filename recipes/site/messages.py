"""List the errors and warnings of the package, read from its source code."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

from recipes.common.markdown import bullets
from recipes.site.links import ROOT

PACKAGE = ROOT / "dp_grape_hf"
TEXT_OF = {
    **{"PrivacyError": 0, "UnsupportedModelError": 0, "ValueError": 0, "require": 1, "warning": 0},
    "append": 0,  # of warnings that are collected first
}
"""Name of a function -> position of the message among its arguments."""
TABLES = ("REFUSED_",)
"""Beginnings of the names of tables: name of an option -> why its value is not supported."""
VALUE = "…"
LEAST_WORDS = 4  # of a message; shorter texts are parts of messages


def text_of(node: ast.expr, constants: Mapping[str, str]) -> str:
    """Return the text of an expression, with ``VALUE`` for each part that is not a literal."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[.\d]*[sdgir]", VALUE, node.value)
    if isinstance(node, ast.Name):
        return constants.get(node.id, VALUE)
    if isinstance(node, ast.FormattedValue):
        return text_of(node.value, constants)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part, constants) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left, constants) + text_of(node.right, constants)
    return VALUE


def messages(module: Path) -> Iterator[str]:
    """Yield the distinct messages of a module, in the order of the source code."""
    tree = ast.parse(module.read_text("utf-8"))
    constants = {**shared_texts(), **_texts(tree)}
    yield from dict.fromkeys([*_called(tree, constants), *_of_tables(tree, constants)])


def section() -> str:
    """Return the list of all messages in Markdown, with a heading for each subpackage."""
    sections: dict[str, list[str]] = {}
    for module in sorted(PACKAGE.rglob("*.py")):
        subpackage = module.relative_to(PACKAGE).parts[0].removesuffix(".py")
        sections.setdefault(subpackage, []).extend(messages(module))
    lists = [
        f"### Messages of {name}\n\n" + "\n".join(bullets(texts))
        for name, texts in sections.items()
        if texts
    ]
    return "\n\n".join(lists) + "\n"


@cache
def shared_texts() -> dict[str, str]:
    """Return the text of each string constant of the package's modules, by name."""
    found = [_texts(ast.parse(path.read_text("utf-8"))) for path in sorted(PACKAGE.rglob("*.py"))]
    return {name: text for texts in found for name, text in texts.items() if name.isupper()}


def _texts(tree: ast.Module) -> dict[str, str]:
    """Return the text of each variable that a module assigns once, and a text."""
    assigned = [*_assigned(ast.walk(tree))]
    counts = Counter(name for name, _ in assigned)
    found = ((name, text_of(value, {})) for name, value in assigned if counts[name] == 1)
    return {name: text for name, text in found if len(_words(text)) >= LEAST_WORDS}


def _called(tree: ast.Module, constants: Mapping[str, str]) -> Iterator[str]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda call: call.lineno):
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        at = TEXT_OF.get(name, len(call.args))
        text = " ".join(text_of(call.args[at], constants).split()) if at < len(call.args) else ""
        part = name == "append" and text[-1:] not in (".", VALUE)
        if len(_words(text)) >= LEAST_WORDS and not part:
            yield text


def _of_tables(tree: ast.Module, constants: Mapping[str, str]) -> Iterator[str]:
    for name, table in _assigned(tree.body):
        if name.startswith(TABLES) and isinstance(table, ast.Dict):
            for key, value in zip(table.keys, table.values, strict=True):
                if isinstance(key, ast.Constant):
                    reason = text_of(value, constants)
                    yield f"{key.value}={VALUE} is not supported: {reason}."


def _assigned(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    """Yield name and value of the assignments among nodes."""
    for node in nodes:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if isinstance(targets[0], ast.Name) and isinstance(value, ast.expr):
            yield targets[0].id, value


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]{2,}", text)
