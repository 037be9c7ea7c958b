"""What every benchmark prints: a table for people, and as the last line one JSON object for scripts."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

PACKAGES = ("celery", "kombu", "redis", "numpy", "hyperopt", "SQLAlchemy", "optuna")


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile; of a single value it is all three."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def goal(value: float, at_least: float | None = None, at_most: float | None = None) -> dict[str, Any]:
    """A figure beside what it should reach."""
    if at_least is not None:
        return {"value": value, "goal": f">= {at_least}", "reached": value >= at_least}
    assert at_most is not None
    return {"value": value, "goal": f"<= {at_most}", "reached": value <= at_most}


def finish(figures: Mapping[str, Any], goals: Mapping[str, Mapping[str, Any]], settings: Mapping[str, Any]) -> None:
    """Print the goals, and the last line."""
    print()
    for name, row in goals.items():
        print(f"{'reached' if row['reached'] else 'MISSED ':8s} {name}: {row['value']:.3g} (goal {row['goal']})")
    versions = {name: _version(name) for name in PACKAGES} | {"python": platform.python_version()}
    print(json.dumps({"figures": {**figures, "settings": dict(settings), "versions": versions}, "goals": dict(goals)}))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"
