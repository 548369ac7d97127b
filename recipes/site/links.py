"""Rewrite the links of a page that is shown outside of the repository."""

import configparser
import posixpath
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]

_PARTS = re.compile(
    r"^ *```.*?^ *```$|^ {4}[^\n]*|`[^`\n]+`"  # code is left alone
    r"|(?P<comment><!--.*?-->\n?)|(?<=\]\()(?P<target>[^)\s]+)(?=\))|(?P<index>(?<=\])\[)",
    re.DOTALL | re.MULTILINE,
)


def repository() -> str:
    """Return the address of the repository, from setup.cfg."""
    config = configparser.RawConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    return config["metadata"]["url"]


def with_links(text: str, link: Callable[[str], str]) -> str:
    """Return the text of a page without comments, with each relative link replaced by ``link``.

    In ``[a][b]``, the second bracket is escaped, because no page uses such links.
    """

    def part(found: re.Match[str]) -> str:
        if found["comment"]:
            return ""
        if found["index"]:
            return "\\["
        if found["target"] and not found["target"].startswith(("https://", "http://")):
            return link(found["target"])
        return found[0]

    return _PARTS.sub(part, text)


def in_repository(target: str, page: str) -> str:
    """Return the address in the repository of a link of a page, which may end with an anchor."""
    path, _, anchor = target.partition("#")
    linked = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
    if not (ROOT / linked).exists():
        raise FileNotFoundError(f"{page} links {target}: there is no {linked}.")
    kind = "tree" if (ROOT / linked).is_dir() else "blob"
    if linked.endswith((".png", ".svg")):
        kind = "raw"
        linked += "?sanitize=true" * linked.endswith(".svg")  # GitHub sends text without it
    return f"{repository()}/{kind}/main/{linked}" + (f"#{anchor}" if anchor else "")
