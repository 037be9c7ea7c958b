"""Where the documents are that tests compare with the code, or whose commands and blocks of code they run."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
SITE = ROOT / ".docs"

#: by name, mostly that of a room: the document
DOCUMENTS = {
    "readme": ROOT / "README.md",
    "charts": SITE / "guide" / "charts.md",
    "cli": SITE / "guide" / "commands.md",
    "dashboard": SITE / "guide" / "dashboard.md",
    "fidelity": SITE / "understand" / "budgets.md",
    "integrations": SITE / "guide" / "integrations.md",
    "objective": SITE / "guide" / "objective.md",
    "scripts": SITE / "guide" / "scripts.md",
    "losses": SITE / "guide" / "losses.md",
    "placement": SITE / "understand" / "placement.md",
    "program": SITE / "guide" / "program.md",
    "ranks": SITE / "guide" / "ranks.md",
    "runner": SITE / "guide" / "processes.md",
    "samplers": SITE / "understand" / "samplers.md",
    "simulation": SITE / "understand" / "simulation.md",
    "training": SITE / "guide" / "training.md",
    "deploy": SITE / "operate" / "fleet.md",
    "workers": SITE / "operate" / "workers.md",
    "elastic": SITE / "operate" / "elastic.md",
    "keys": SITE / "operate" / "keys.md",
    "monitoring": SITE / "operate" / "monitoring.md",
    "tests": SITE / "tests.md",
    "operate": SITE / "operate" / "book.md",
    "json": SITE / "reference" / "json.md",
}


def text_of(name: str) -> str:
    """Return the text of a document."""
    return DOCUMENTS[name].read_text(encoding="utf-8")
