"""List the errors and warnings of the package, read from its source code."""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from recipes.common.markdown import bullets
from recipes.site.links import ROOT

PACKAGE = ROOT / "dp_grape_hf"
VALUE = "…"  # stands for each part of a message that is not a literal
_TEXT_OF = {
    **{"PrivacyError": 0, "UnsupportedModelError": 0, "ValueError": 0, "require": 1, "warning": 0},
    "append": 0,  # of warnings that are collected first
}
"""Name of a function -> position of the message among its arguments."""
_TABLE = "REFUSED_"  # beginning of the names of tables: option -> why a value is not supported
# Four words; shorter texts are no messages.
_WORDS = re.compile(r"(?:[^\W\d_]{2,}(?![^\W\d_]).*?){4}", re.DOTALL)


def section() -> str:
    """Return the list of all messages in Markdown, with a heading for each subpackage."""
    sections: dict[str, list[str]] = {}
    for module in sorted(PACKAGE.rglob("*.py")):
        subpackage = module.relative_to(PACKAGE).parts[0].removesuffix(".py")
        sections.setdefault(subpackage, []).extend(messages(module))
    lists = (f"### Messages of {n}\n\n{bullets(t)}" for n, t in sections.items() if t)
    return "\n".join(lists)


def messages(module: Path) -> list[str]:
    """Return the distinct messages of a module, in the order of the source code."""
    tree = ast.parse(module.read_text("utf-8"))
    return [*dict.fromkeys(_found(tree, _shared() | _constants(tree)))]


def _found(tree: ast.Module, known: Mapping[str, str]) -> Iterator[str]:
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    for call in sorted(calls, key=lambda call: call.lineno):
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        for argument in call.args[_TEXT_OF.get(name, len(call.args)) :][:1]:
            text = " ".join(_text(argument, known).split())
            if _WORDS.search(text) and (name != "append" or text.endswith((".", VALUE))):
                yield text
    for name, table in _assigned(tree):
        if name.startswith(_TABLE) and isinstance(table, ast.Dict):
            for key, value in zip(table.keys, table.values, strict=True):
                if isinstance(key, ast.Constant):
                    yield f"{key.value}={VALUE} is not supported: {_text(value, known)}."


def _text(node: ast.expr, known: Mapping[str, str]) -> str:
    """Return the text of an expression, with ``VALUE`` for each part that is not a literal."""
    match node:
        case ast.Constant(str(text)):
            return re.sub(r"%[.\d]*[sdgir]", VALUE, text)
        case ast.Name(name):
            return known.get(name, VALUE)
        case ast.FormattedValue(value):
            return _text(value, known)
        case ast.JoinedStr(parts):
            return "".join(_text(part, known) for part in parts)
        case ast.BinOp(left, ast.Add(), right):
            return _text(left, known) + _text(right, known)
    return VALUE


@cache
def _shared() -> dict[str, str]:
    """Return the text of each constant of the package's modules, by name."""
    trees = [ast.parse(path.read_text("utf-8")) for path in sorted(PACKAGE.rglob("*.py"))]
    found = (pair for tree in trees for pair in _constants(tree).items())
    return {name: text for name, text in found if name.isupper()}


def _constants(tree: ast.Module) -> dict[str, str]:
    """Return the text of each variable that a module assigns once."""
    texts: dict[str, str] = {}
    for name, value in _assigned(tree):
        texts[name] = VALUE if name in texts else _text(value, {})
    return {name: text for name, text in texts.items() if _WORDS.search(text)}


def _assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield name and value of a module's assignments, also with a type."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign([ast.Name(name)], value) | ast.AnnAssign(ast.Name(name), _, value):
                if value is not None:
                    yield name, value
