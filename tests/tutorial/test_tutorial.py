"""The notebooks of the tutorial: what is committed, and what a run of them finds."""

import json
import re

import pytest

pytest.importorskip("nbclient", reason="the tutorial is an optional extra")

import nbformat

from tests.tutorial.notebooks import (
    FOLDER,
    NOTEBOOKS,
    PICTURES,
    code_cells,
    execute,
    found,
    load,
    pictures,
    text_of,
)

PRIVATE, PUBLIC = "ε = 2", "no privacy"
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def check_classifier(numbers, text):
    """It learns under every budget, more from a larger one, and less than without privacy."""
    reached = numbers["private"]
    assert numbers["epsilon"] <= 4
    assert numbers["majority"] < 0.3
    assert reached[0.5] > 2 * numbers["majority"]
    assert reached[4] > 0.7
    assert reached[0.5] < reached[16] < numbers["without_privacy"]
    assert numbers["without_privacy"] > 0.85
    assert "Nothing disagrees." in text


def check_language_model(numbers, text):
    """The adapter makes private answers likelier, and drafts be written as they are."""
    before, after = numbers["before"], numbers["after"]
    assert after["perplexity"] < before["perplexity"] / 2
    assert before["as the clinic writes"] < 0.1
    assert after["as the clinic writes"] > 0.6
    assert numbers["merged_is_the_same"]
    assert "Nothing disagrees." in text


def check_what_epsilon_means(numbers, text):
    """Attacks beat chance without privacy, hardly with it, and no audit refutes a claim."""
    for attack in ("loss threshold", "LiRA"):
        public, private = (numbers["auc"][f"{way}, {attack}"] for way in (PUBLIC, PRIVATE))
        assert public > 0.62
        assert private < 0.6
        assert public - private > 0.06
    gap = {way: both["members"] - both["others"] for way, both in numbers["accuracy"].items()}
    assert gap[PRIVATE] < gap[PUBLIC] / 2
    assert numbers["tpr_at_fpr_0.01"] < numbers["allowed"]
    assert all(shown <= claimed for claimed, shown in numbers["audit"].values())
    assert max(shown for _, shown in numbers["audit"].values()) > 1


CHECKS = {1: check_classifier, 2: check_language_model, 3: check_what_epsilon_means}


@each_notebook
def test_a_committed_notebook_was_run(path):
    notebook = load(path)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    counts = [cell.execution_count for cell in cells]
    assert counts == [*range(1, len(cells) + 1)], "it was run from top to bottom, once"
    for cell in cells:
        assert not [o for o in cell.outputs if o.output_type == "error"]
        shows = re.search(r"\bprint\(|plt\.show\(|dp_grape\(|\.train\(\)\n", cell.source)
        assert cell.outputs or not shows, cell.source
    CHECKS[int(path.name[0])](found(notebook), text_of(notebook))


@each_notebook
def test_a_committed_notebook_has_no_noise_and_names_no_machine(path):
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"(?<![\w.\-{}])/(?:tmp|work|root|opt|home|Users|usr|var)/", text)
    outputs = [output for cell in code_cells(load(path)) for output in cell.outputs]
    assert not [o for o in outputs if o.get("name") == "stderr"]
    assert not re.search(r"Warning|\d+%\|", json.dumps(outputs))


@each_notebook
def test_a_committed_picture_is_that_of_its_notebook(path):
    shown = dict(pictures(path, load(path)))
    committed = {p.name: p.read_bytes() for p in PICTURES.glob(f"{path.stem}_*.png")}
    assert shown == committed
    assert shown


def test_the_page_shows_and_links_a_picture_of_each_notebook():
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"!\[.+?\]\((.+?)\)", page)
    assert [name for name in named if not (FOLDER / name).exists()] == []
    for path in NOTEBOOKS:
        assert f"]({path.name})" in page
        assert any(name.startswith(f"pictures/{path.stem}_") for name in named)


@each_notebook
def test_notebooks_refer_to_files_that_exist(path):
    prose = "".join(cell.source for cell in load(path).cells if cell.cell_type == "markdown")
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", prose) if "://" not in link]
    assert links
    assert [link for link in links if not (FOLDER / link.partition("#")[0]).exists()] == []


@pytest.mark.slow
@each_notebook
@pytest.mark.filterwarnings("ignore")  # of the libraries that start a kernel
def test_what_a_notebook_claims_is_found_again(path, tmp_path):
    notebook = load(path)
    execute(notebook, tmp_path)
    CHECKS[int(path.name[0])](found(notebook), text_of(notebook))
    assert all(content.startswith(b"\x89PNG") for _, content in pictures(path, notebook))


def test_library_messages_are_omitted_and_local_paths_are_refused(tmp_path):
    said = "import os, sys\nprint('a')\nprint('b', file=sys.stderr)\nprint('c')\n{'d': 1}"
    cells = [nbformat.v4.new_code_cell(source) for source in (said, "os.getcwd()")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    with pytest.raises(ValueError, match="names a path of this machine"):
        execute(notebook, tmp_path)
    stream, value = notebook.cells[0].outputs
    assert stream.text == "a\nc\n"
    assert value.data["text/plain"] == "{'d': 1}"
