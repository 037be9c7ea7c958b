"""Example of a cluster file, and the bound on its trials: what the help of the command shows, without numpy."""

from __future__ import annotations

from pathlib import Path

#: most trials of a file, given by memory and time
MOST_TRIALS = 10**9


def example() -> str:
    """Return an example of a cluster file, which explains every key."""
    return (Path(__file__).parent / "example.toml").read_text(encoding="utf-8")
