"""Pictures of the played gangs: what staleness costs, what backups bring, and both against the time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from backup_played import TARGET
from figures import interval

GREEN, ORANGE, BLUE = "#1b7f5c", "#e08b3a", "#3b6ea8"


def staleness(figures: Mapping[str, Any], target: Path) -> None:
    """Test error against staleness: at one rate, and at the best rate for each; with 95 % intervals."""
    rows = [row for name, row in figures.items() if name.endswith("replicas")]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    stale = [row["staleness"] for row in rows]
    for name, key, colour in (("one rate", "error_at_one_rate", ORANGE), ("best rate for each", "error_tuned", GREEN)):
        _line(axes, stale, [row[key] for row in rows], name, colour)
    axes.set_xlabel("mean staleness of a gradient, in steps")
    axes.set_ylabel("test error, %")
    axes.set_ylim(bottom=0)
    _save(figure, axes, target)


def backups(figures: Mapping[str, Any], target: Path) -> None:
    """Seconds to the target against the number of backups, with 95 % intervals."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    _line(axes, figures["backups"], figures["seconds"], "", GREEN)
    axes.set_yscale("log")
    ticks = [50, 100, 200, 500, 1000]
    axes.set_yticks(ticks, list(map(str, ticks)))
    axes.minorticks_off()
    axes.set_xlabel("backup workers of 50 workers in all")
    axes.set_ylabel(f"seconds to a test accuracy of {TARGET}")
    _save(figure, axes, target)


def against(courses: Mapping[str, Sequence[Sequence[tuple[float, float]]]], target: Path) -> None:
    """Mean test accuracy against the time."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for (name, runs), colour in zip(courses.items(), (GREEN, ORANGE, BLUE), strict=True):
        moments = np.linspace(1, min(run[-1][0] for run in runs), 200)
        curves = [np.interp(moments, *zip(*run, strict=True)) for run in runs]
        axes.plot(moments, np.mean(curves, axis=0), color=colour, label=name)
    axes.axhline(TARGET, color="#999", linewidth=0.8)
    axes.set_ylim(0.8, 1.0)
    axes.set_xlabel("seconds")
    axes.set_ylabel("test accuracy")
    _save(figure, axes, target)


def _line(axes: Any, x: Sequence[float], runs: Sequence[Sequence[float]], name: str, colour: str) -> None:
    means = [float(np.mean(each)) for each in runs]
    reach = [[mean - interval(each)[0] for mean, each in zip(means, runs, strict=True)]]
    axes.errorbar(x, means, yerr=reach * 2, color=colour, marker="o", markersize=4, capsize=2, label=name or None)


def _save(figure: Any, axes: Any, target: Path) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)
    plt.close(figure)


#: by the name of the picture
DRAWN: Mapping[str, Callable[[Any, Path], None]] = {"staleness": staleness, "backups": backups, "against": against}
