"""List the errors and warnings of the package, read from its source code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from recipes.common.markdown import bullets
from recipes.site.links import ROOT

PACKAGE = ROOT / "dp_grape_hf"
TEXT_OF = {"PrivacyError": 0, "UnsupportedModelError": 0, "require": 1, "warning": 0}
"""Name of a function -> position of the message among its arguments."""
VALUE = "…"
LEAST_WORDS = 4  # of a message; shorter texts are parts of messages
INTRODUCTION = f"""# Messages

Search this page for an error or a warning that you see. Each message says what happened, why, and
what to do. {VALUE} stands for a value of your run. The page of
[questions and answers](../recipes/guide/questions.md) explains frequent messages.
"""


def text_of(node: ast.expr) -> str:
    """Return the text of an expression, with ``VALUE`` for each part that is not a literal."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[.\d]*[sdgir]", VALUE, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return VALUE


def messages(module: Path) -> Iterator[str]:
    """Yield the distinct messages of a module, in the order of the source code."""
    calls = [n for n in ast.walk(ast.parse(module.read_text("utf-8"))) if isinstance(n, ast.Call)]
    seen = set()
    for call in sorted(calls, key=lambda call: call.lineno):
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        at = TEXT_OF.get(name, len(call.args))
        text = " ".join(text_of(call.args[at]).split()) if at < len(call.args) else ""
        if len(re.findall(r"[^\W\d_]{2,}", text)) >= LEAST_WORDS and text not in seen:
            seen.add(text)
            yield text


def page() -> str:
    """Return the page of all messages in Markdown, with a section for each subpackage."""
    sections: dict[str, list[str]] = {}
    for module in sorted(PACKAGE.rglob("*.py")):
        subpackage = module.relative_to(PACKAGE).parts[0].removesuffix(".py")
        sections.setdefault(subpackage, []).extend(messages(module))
    lists = [
        f"## {name}\n\n" + "\n".join(bullets(texts)) for name, texts in sections.items() if texts
    ]
    return "\n\n".join([INTRODUCTION, *lists]) + "\n"
