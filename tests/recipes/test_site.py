"""The site: it is built without a warning, its links lead somewhere, and it needs nothing else."""

import json
import re
import subprocess
import sys
from dataclasses import dataclass, fields
from functools import reduce
from urllib.parse import urlsplit

import pytest

import dp_grape_hf
from dp_grape_hf import DPGrapeTrainingArguments
from recipes.site import messages
from recipes.site.links import ROOT, in_repository, repository, with_links


@dataclass
class Html:
    """A page of the site; mkdocs itself checks its links."""

    text: str

    def __post_init__(self):
        from bs4 import BeautifulSoup, Comment  # comes with mkdocs, as nbconvert needs it

        soup = BeautifulSoup(self.text, "html.parser")
        self.ids = {tag["id"] for tag in soup.find_all(id=True)}
        self.loaded = [tag["src"] for tag in soup.find_all(["img", "script"], src=True)]
        kinds = ("stylesheet", "icon", "preload")
        self.loaded += [tag["href"] for tag in soup.find_all("link", rel=kinds)]
        self.comments = soup.find_all(string=lambda text: isinstance(text, Comment))
        for tag in soup.find_all(["code", "pre", "script", "style"]):
            tag.extract()
        self.prose = soup.get_text()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, and its pages by path."""
    pytest.importorskip("mkdocs", reason="make site and make test-all install it")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(
        [*command, "--config-file", "recipes/site/mkdocs.yml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr[-4000:]
    pages = {path: Html(path.read_text(encoding="utf-8")) for path in folder.rglob("*.html")}
    return folder, pages


@pytest.mark.slow
def test_the_site_loads_nothing_from_elsewhere(site):
    folder, pages = site
    loaded = {target for html in pages.values() for target in html.loaded}
    assert loaded
    assert not {target for target in loaded if urlsplit(target)[:2] != ("", "")}
    for page, html in pages.items():
        # The theme's script asks api.github.com for the stars of a link with this mark.
        assert 'data-md-component="source"' not in html.text, page
    for sheet in folder.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet


@pytest.mark.slow
def test_comments_alerts_and_formulas_are_no_text_of_a_page(site):
    folder, pages = site
    for page, html in pages.items():
        ours = [comment for comment in html.comments if not comment.startswith("! Font Awesome")]
        assert not ours, page
        assert not re.search(r"<!--|\[!|\\[a-z]+\{|\\[(\[]", html.prose), page
    title = '<p class="admonition-title">Warning</p>'
    assert f'<div class="admonition warning">\n{title}' in pages[folder / "index.html"].text
    text = pages[folder / "recipes/guide/dp_sgd/index.html"].text
    assert re.search(r'<div class="arithmatex"><math [^>]*display="block"', text)
    text = pages[folder / "dp_grape_hf/choosing/index.html"].text
    assert re.search(r'<span class="arithmatex"><math [^>]*display="inline".*?<msqrt>', text)


@pytest.mark.slow
def test_a_section_lists_each_page_once(site):
    folder, pages = site
    text = pages[folder / "recipes/guide/index.html"].text
    listed = re.findall(r'<a href="(\w+)/" class="md-nav__link">', text)
    assert len(listed) == len({*listed}) > 5


@pytest.mark.slow
def test_the_search_of_the_site_finds_pages_options_and_names(site):
    folder, pages = site
    index = json.loads((folder / "search/search_index.json").read_text(encoding="utf-8"))
    found = {entry["location"]: entry["title"] + entry["text"] for entry in index["docs"]}
    for location in found:
        path, _, anchor = location.partition("#")
        html = pages[folder / path / "index.html"]
        assert not anchor or anchor in html.ids, location
    searched = {folder / page / "index.html" for page in found if "#" not in page}
    for page in pages:
        path = page.relative_to(folder)
        left_out = path.match("recipes/*/results/*/*") or path.match("model_cards/*/*")
        assert (page in searched) != left_out or page.name != "index.html", path
    assert "epsilon" in found["reference/arguments/#target_epsilon"]
    assert "PrivacySpent" in found["reference/trainers/#dp_grape_hf.DPGrapeTrainer.privacy_spent"]
    assert "ε" in found["dp_grape_hf/mechanism/#the-guarantee"]


@pytest.mark.slow
def test_the_reference_has_every_option_with_its_help(site):
    folder, pages = site
    html = pages[folder / "reference/arguments/index.html"]
    said = " ".join(html.prose.split())
    for option in fields(DPGrapeTrainingArguments):
        if option.name in DPGrapeTrainingArguments.__mro__[1].__annotations__:
            assert option.name in html.ids
            assert option.metadata["help"].split(". ")[0] in said, option.name


def test_the_reference_names_what_the_package_exports():
    page = (ROOT / "recipes/site/pages/reference/index.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\[(\w+)\]\(", page))
    assert {*dp_grape_hf.__all__} - named <= {"DPGrapeSeq2SeqTrainingArguments"}


def test_a_link_is_replaced_where_it_is_one():
    text = (
        "[a](b.md), `[a](b.md)` [c](https://d)\n<!-- not run: e -->\n```\n[a](b.md)\n```\nx[1][2]"
    )
    assert with_links(text, str.upper) == (
        "[a](B.MD), `[a](b.md)` [c](https://d)\n```\n[a](b.md)\n```\nx[1]\\[2]"
    )


def test_files_and_folders_have_an_address_in_the_repository():
    base, page = repository(), "recipes/subspace/README.md"
    assert in_repository("../README.md#a", page) == f"{base}/blob/main/recipes/README.md#a"
    assert in_repository("results", page) == f"{base}/tree/main/recipes/subspace/results"
    picture = in_repository("results/subspace.png", page)
    assert picture == f"{base}/raw/main/recipes/subspace/results/subspace.png"
    drawing = in_repository("../guide/method.svg", page)
    assert drawing == f"{base}/raw/main/recipes/guide/method.svg?sanitize=true"
    with pytest.raises(FileNotFoundError, match="there is no recipes/subspace/nothing"):
        in_repository("nothing", page)


def test_the_list_of_messages_has_errors_and_warnings(tmp_path):
    module = tmp_path / "module.py"
    module.write_text(
        "raise PrivacyError(f'{size=} is larger than ' + f'{limit} rows. Lower it.')\n"
        "require(done, 'the run is not done. Train first.')\n"
        "logger.warning('%d of the steps are %.4g apart', 1, 2)\n"
        "raise PrivacyError(f'{error}')\nraise KeyError('this is not a message')\n"
        "warnings.append('The rate is too large. Lower it.')\n"
        "names.append('this is a part of a message')\n"
    )
    assert list(messages.messages(module)) == [
        "size=… is larger than … rows. Lower it.",
        "the run is not done. Train first.",
        "… of the steps are … apart",
        "The rate is too large. Lower it.",
    ]
    page = messages.section()
    for text in (
        "### Messages of ledger\n",
        "Nothing will be learnt: if all examples agreed",
        "target_delta=None: epsilon has no meaning",
        "save_steps=… is not a",
    ):
        assert text in page


NOT_OURS = {"Per sample gradient is not initialized"}  # of Opacus
EXAMPLES = {"MyModel": "…", "eval_dataset": "…"}  # values in headings, to which pages link


def test_messages_quoted_by_the_questions_page_exist():
    every = [text for path in messages.PACKAGE.rglob("*.py") for text in messages.messages(path)]
    page = (ROOT / "recipes" / "guide" / "questions.md").read_text(encoding="utf-8")
    prose = " ".join(re.sub(r"```.*?```|`[^`]*`", " ", page, flags=re.DOTALL).split())
    quoted = {text for text in re.findall(r'"([^"]+)"', prose) if len(text.split()) >= 4}
    assert len(quoted) > 20
    for text in quoted - NOT_OURS:
        wanted = reduce(lambda known, name: known.replace(name, EXAMPLES[name]), EXAMPLES, text)
        assert any(wanted in message for message in every), text
