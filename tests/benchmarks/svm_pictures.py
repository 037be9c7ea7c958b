"""Draws SHADHO's experiment: models an hour by kernel, and hours to a loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from svm_record import KERNELS


def chart(found: Mapping[str, Sequence[Any]], target: Path) -> None:
    """A bar for each scheduler, a colour a kernel, a diamond at the even mix; beside it a dot for each seed."""
    targets = list(next(iter(found.values()))[0].hours_to)
    figure, axes = plt.subplots(
        1,
        1 + len(targets),
        figsize=(12, 3.6),
        sharey=True,
        layout="constrained",
        width_ratios=[2, *(1 for _ in targets)],
    )
    rows = np.arange(len(found))
    left = np.zeros(len(found))
    for kernel, colour in zip(KERNELS, plt.get_cmap("Set2").colors, strict=False):
        rates = np.array([np.mean([run.rates[kernel] for run in runs]) for runs in found.values()])
        axes[0].barh(rows, rates, 0.7, left, color=colour, label=kernel)
        left += rates
    even = [np.mean([run.even for run in runs]) for runs in found.values()]
    axes[0].plot(even, rows, "D", color="black", markersize=5, label="even mix")
    axes[0].set_xlabel("models an hour")
    axes[0].set_yticks(rows, list(found))
    axes[0].invert_yaxis()
    axes[0].legend(frameon=False, fontsize=8, ncols=5, loc="lower left", bbox_to_anchor=(-0.02, 1.0), columnspacing=1)
    for each, name in zip(axes[1:], targets, strict=True):
        for row, runs in zip(rows, found.values(), strict=True):
            hours = [run.hours_to[name] for run in runs]
            each.plot(hours, np.full(len(hours), row), ".", color="#1b7f5c", alpha=0.4)
            each.plot(np.median(hours), row, "|", color="black", markersize=14)
        each.set_xlabel(f"hours to\n{name}")
        each.set_xlim(left=0)
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)
    plt.close(figure)
    print(f"drawn: {target}")
