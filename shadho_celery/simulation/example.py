"""Example of a cluster file, and the bound on its trials. The command's help shows both without importing numpy."""

from __future__ import annotations

from pathlib import Path

#: maximum number of trials of a file, set by memory and time
MOST_TRIALS = 10**9


def example() -> str:
    """Return an example of a cluster file, which explains every key."""
    return (Path(__file__).parent / "example.toml").read_text(encoding="utf-8")
