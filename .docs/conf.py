"""Settings of Sphinx for the documentation site: ``sphinx-build -W .docs build/docs``, then open build/docs/index.html.

A page may have two kinds of lines that are replaced when it is read. ``<!-- made: NAME -->`` stands for the text that
the function NAME of `reference` makes from the code. An ``{include}`` of a document beside the code stands for its
text, in which links to documents become links to their pages, also links to a README that leads to a page.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import reference  # noqa: E402

from shadho_celery import __version__  # noqa: E402

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "shadho_celery"
version = release = __version__
extensions = ["myst_parser"]
myst_heading_anchors = 4
# Two lines of JSON in one block are not JSON for Pygments.
suppress_warnings = ["misc.highlighting_failure"]

# `--trials` stays as it is.
smartquotes = False

html_theme = "furo"
html_title = f"shadho_celery {__version__}"
html_show_sphinx = html_show_copyright = html_copy_source = False
html_search_scorer = str(HERE / "search.js")

INCLUDE = re.compile(r"^```\{include\} (\S+)\n```$", re.MULTILINE)
MADE = re.compile(r"^<!-- made: (\w+) -->$", re.MULTILINE)
ARTICLE = re.compile(r'<article role="main".*?</article>', re.DOTALL)
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?\)")


def included(page: Path) -> Iterator[Path]:
    """Yield the documents that a page includes."""
    for name in INCLUDE.findall(page.read_text(encoding="utf-8")):
        yield (page.parent / name).resolve()


def leads_to() -> Iterator[tuple[Path, Path]]:
    """Yield each README beside the code, with the page to which it leads."""
    root = HERE.parent
    for document in (
        *root.glob("shadho_celery/*/README.md"),
        root / "deploy" / "README.md",
        root / "tests" / "README.md",
    ):
        if found := re.search(r"\]\((\S*\.docs/\S+\.md)\)", document.read_text(encoding="utf-8")):
            yield document, (document.parent / found[1]).resolve()


PAGES = {**dict(leads_to()), **{document: page for page in HERE.rglob("*.md") for document in included(page)}}


def moved(text: str, document: Path, page: Path) -> str:
    """Return the text of a document with links that are valid on a page."""

    def link(found: re.Match[str]) -> str:
        target = (document.parent / found[2]).resolve()
        target = PAGES.get(target, target)
        return f"{found[1]}{os.path.relpath(target, page.parent)}{found[3] or ''})"

    return LINK.sub(link, text)


def read(app: Sphinx, name: str, source: list[str]) -> None:
    """Replace the lines of a page that stand for other text."""
    page = Path(app.env.doc2path(name))
    for document in included(page):
        app.env.note_dependency(str(document))
        text = moved(document.read_text(encoding="utf-8"), document, page)
        source[0] = INCLUDE.sub(lambda _, text=text: text, source[0], count=1)
    source[0] = MADE.sub(lambda found: getattr(reference, found[1])(), source[0])


def write_texts(app: Sphinx, error: Exception | None) -> None:
    """Write pages.js, the texts of all pages by their addresses, for the excerpts of search.js."""
    if error is None and app.builder.name == "html":
        pages = sorted(map(app.builder.get_target_uri, app.env.found_docs))
        texts = {page: ARTICLE.findall((app.outdir / page).read_text(encoding="utf-8"))[0] for page in pages}
        (app.outdir / "pages.js").write_text(f"const PAGES = {json.dumps(texts)};\n", encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect `read` to the pages, and `write_texts` to their end."""
    app.connect("source-read", read)
    app.connect("build-finished", write_texts)
    return {"parallel_read_safe": True}
