"""Hooks of mkdocs that add the repository's pages, the notebooks and the reference to the site.

The hooks copy no files and write only the site. Pages keep their paths, so links between pages
work. A link to any other file points to the repository.
"""

import posixpath
import re
from html import unescape
from pathlib import Path

import nbformat
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

from dp_grape_hf.options import OPTIONS
from recipes.site import messages
from recipes.site.links import ROOT, in_repository, repository, with_links

LINKED = [
    *("recipes/*/results/*.md", "model_cards/*/README.md"),
    *("recipes/**/*.png", "recipes/**/*.svg"),
]
"""Files of the site that are not in its navigation and its search."""

FORMULA = re.compile(
    r'(?P<start><(?P<tag>span|div) class="arithmatex">)\\[(\[](?P<tex>.*?)\\[)\]](?=</)', re.DOTALL
)
"""A formula in the output of pymdownx.arithmatex."""

PLACE = "<!-- options -->"
"""The place of the options in the page of the arguments."""
MESSAGES = "<!-- messages -->"
"""The place of all messages in the page of questions and answers."""

SUBPACKAGE = """# {0}

The [glossary](../recipes/guide/glossary.md) defines the terms of this page.

::: dp_grape_hf.{0}
    options:
      show_root_heading: false
      show_root_toc_entry: false
"""
SUBPACKAGES = {path.parent.name for path in ROOT.glob("dp_grape_hf/*/README.md")}
REFERENCE = {
    f"reference/{name}.md": SUBPACKAGE.format(name)
    for name in sorted(SUBPACKAGES - {"arguments", "cli", "trainer"} | {"auditing", "errors"})
}
"""Path -> text of a reference page. ``arguments`` and ``trainer`` have written pages instead."""


# ---- Hooks of mkdocs ----


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the navigation, and the link to the repository."""
    seen: set[str] = set()
    config.nav = []
    for title, patterns in config.extra["navigation"].items():
        if title == "Reference":
            paths = [*patterns, *REFERENCE]
        else:
            paths = [path for path in matching(patterns) if path not in seen]
            seen.update(paths)
        pages = [path.replace(".ipynb", ".md") for path in paths]
        config.nav.append({title: pages[0] if len(pages) == 1 else pages})
    config.repo_url, config.repo_name = repository(), "dp_grape_hf"
    config.extra["social"] = [{"icon": "fontawesome/brands/github", "link": repository()}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, their pictures and the reference."""
    sections = config.extra["navigation"].values()
    for path in matching([*(pattern for section in sections for pattern in section), *LINKED]):
        if path.endswith(".ipynb"):
            add_notebook(path, files, config)
        else:
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    for path, text in REFERENCE.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Take comments away, and leads links to files that are not of the site to the repository."""
    source = page.file.src_uri
    if any(Path(source).match(pattern) for pattern in LINKED):
        page.meta.setdefault("search", {})["exclude"] = True

    def link(target: str) -> str:
        path, hash_sign, anchor = target.partition("#")
        shown = path.replace(".ipynb", ".md")
        linked = posixpath.normpath(posixpath.join(posixpath.dirname(source), shown))
        if not path or files.get_file_from_path(linked):
            return shown + hash_sign + anchor
        return in_repository(target, source)

    generated = markdown.replace(PLACE, options())
    if MESSAGES in generated:
        generated = generated.replace(MESSAGES, messages.section())
    return with_links(generated, link)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace formulas by MathML, which browsers show without a script."""

    def mathml(found: re.Match[str]) -> str:
        display = "block" if found["tag"] == "div" else "inline"
        return found["start"] + convert(unescape(found["tex"]).strip(), display=display)

    return FORMULA.sub(mathml, html)


def on_post_page(output: str, page: Page | None, config: MkDocsConfig) -> str:
    """Stop the theme's script from requesting stars and forks from GitHub on every visit."""
    return output.replace(' data-md-component="source"', "")


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    """Do the same on pages of the theme, such as 404.html."""
    return on_post_page(output_content, None, config)


# ---- Generated pages ----


def matching(patterns: list[str]) -> list[str]:
    """Return the distinct paths of matching files, relative to the root of the repository."""
    paths = (path for pattern in patterns for path in sorted(ROOT.glob(pattern)))
    return list(dict.fromkeys(path.relative_to(ROOT).as_posix() for path in paths))


def add_notebook(path: str, files: Files, config: MkDocsConfig) -> None:
    """Add a notebook as a page, with its pictures, without running it."""
    name = path.removesuffix(".ipynb")
    # Names of pictures begin with the name of their notebook, as a folder has several notebooks.
    resources = {"unique_key": posixpath.basename(name), "output_files_dir": ""}
    notebook = nbformat.read(ROOT / path, as_version=4)
    notebook.metadata["language_info"] = {"name": "python"}  # of the code's fences
    text, made = MarkdownExporter().from_notebook_node(notebook, resources)
    files.append(File.generated(config, f"{name}.md", content=text))
    for picture, data in made["outputs"].items():
        place = posixpath.join(posixpath.dirname(path), picture)
        files.append(File.generated(config, place, content=data))


def options() -> str:
    """Return a section with the help text, the short name and the default of each option."""
    parts = []
    for name, option in OPTIONS.items():
        if option.of_host:
            continue  # which transformers describes
        said = [f"short name `--{option.short}`"] if option.short else []
        said += [option.range.needed]
        said += [] if option.default is None else [f"default `{option.default!r}`"]
        parts += [f"### `{name}`", option.help, f"*{'; '.join(said)}*"]
    return "\n\n".join(parts)
