"""The tables of results in the committed pages are what the committed results say."""

import json
import shutil

import pytest

from recipes.report import __main__ as report
from recipes.report.__main__ import PAGES, ROOT, TABLES, main, pages_of


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A repository with the committed results, and no page but those that are rendered whole."""
    root = tmp_path_factory.mktemp("repository")
    unwanted = shutil.ignore_patterns("*.py", "*.png", "README.md", "__pycache__")
    shutil.copytree(ROOT / "recipes", root / "recipes", ignore=unwanted)
    return root


@pytest.fixture
def page(results):
    path = results / "README.md"
    path.write_text("No table.\n")
    return path


def test_the_committed_pages_are_not_stale():
    assert main(["--check"]) == 0


def test_every_table_is_on_some_page():
    text = "".join(page.read_text(encoding="utf-8") for page in pages_of(ROOT))
    missing = [name for name in TABLES if f"\n<!-- table: {name} -->\n|" not in text]
    assert missing == []


def test_a_stale_table_is_named_and_renewed(page, monkeypatch, capsys):
    monkeypatch.setattr(report, "PAGES", {})
    stale = "Before.\n<!-- table: vision -->\n| old |\n<!-- end -->\nAfter `<!-- table: x -->`.\n"
    page.write_text(stale)
    assert main(["--check"], page.parent) == 1
    assert "README.md is not what the results say: renew it with `make tables`" in (
        capsys.readouterr().err
    )
    assert page.read_text() == stale
    assert main([], page.parent) == 1
    assert "README.md was not what the results say, and is written anew" in capsys.readouterr().err
    text = page.read_text()
    assert text.startswith("Before.\n<!-- table: vision -->\n| Task | Method |")
    assert "| CIFAR-10 | DP-Adam | 38.9 [1] |" in text
    assert text.endswith(" |\n<!-- end -->\nAfter `<!-- table: x -->`.\n")
    assert main([], page.parent) == 0


def test_whole_pages_are_of_results_alone(results, page, monkeypatch):
    """``sweep.json`` also says what was run; its scores are those of the runs."""
    some = {
        path: render
        for path, render in PAGES.items()
        if "vision/" in path or "recipes/digits" in path
    }
    monkeypatch.setattr(report, "PAGES", some)
    committed = {path: (results / path).read_text(encoding="utf-8") for path in some}
    for path, text in committed.items():
        if path.endswith(".json"):
            (results / path).write_text(json.dumps(json.loads(text) | {"tasks": {}, "search": []}))
        else:
            (results / path).unlink()
    assert main([], results) == 1
    assert {path: (results / path).read_text(encoding="utf-8") for path in some} == committed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- table: nothing -->\n<!-- end -->\n", r"README\.md asks for the table 'nothing'"),
        ("<!-- table: digits -->\n| a |\n", r"README\.md: each <!-- table: NAME --> needs an"),
    ],
)
def test_a_wrong_marker_is_refused(page, text, message, monkeypatch):
    monkeypatch.setattr(report, "PAGES", {})
    page.write_text(text)
    with pytest.raises(ValueError, match=message):
        main(["--check"], page.parent)
