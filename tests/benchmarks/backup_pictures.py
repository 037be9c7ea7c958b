"""Draws what backup workers bring: seconds to a test accuracy against their number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from backup_simulation import TARGET


def chart(backups: Sequence[int], lines: Mapping[str, Sequence[float]], target: Path) -> None:
    """A line for each law of stragglers; its least value is marked."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for place, (name, seconds) in enumerate(lines.items()):
        dashed = "no cancel" in name
        colour = ("#1b7f5c", "#e08b3a")[place // 2]
        axes.plot(backups, seconds, color=colour, linestyle="--" if dashed else "-", label=name)
        least = min(range(len(seconds)), key=lambda row: seconds[row])
        axes.plot(backups[least], seconds[least], "o", color=colour, fillstyle="none" if dashed else "full")
    axes.set_yscale("log")
    axes.set_yticks([3, 5, 10, 20, 50], ["3", "5", "10", "20", "50"])
    axes.minorticks_off()
    axes.set_xlabel("backup workers of 100 workers in all")
    axes.set_ylabel(f"seconds to a test accuracy of {TARGET}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)
    plt.close(figure)
