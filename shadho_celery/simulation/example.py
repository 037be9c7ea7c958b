"""Example of a cluster file."""

from __future__ import annotations

from pathlib import Path


def example() -> str:
    """Return an example of a cluster file, which explains every key."""
    return (Path(__file__).parent / "example.toml").read_text(encoding="utf-8")
