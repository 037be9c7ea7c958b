"""Where the documents are that tests compare with the code, or whose commands and blocks of code they run."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]

#: by name, mostly that of a room: the document
DOCUMENTS = {
    "readme": ROOT / "README.md",
    **{path.parent.name: path for path in sorted(ROOT.glob("shadho_celery/*/README.md"))},
    "deploy": ROOT / "deploy" / "README.md",
    "tests": ROOT / "tests" / "README.md",
    "operate": ROOT / "deploy" / "OPERATE.md",
}


def text_of(name: str) -> str:
    """Return the text of a document."""
    return DOCUMENTS[name].read_text(encoding="utf-8")
