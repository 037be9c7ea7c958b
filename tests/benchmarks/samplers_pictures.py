"""Draws the samplers' benchmark: regret by evaluation for each problem, and milliseconds of a suggestion by history."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

#: colours of our samplers; the peers are grey, each with a dash of its own
OURS = {"auto": "#1b7f5c", "gp": "#3a7ebf", "tpe": "#d07a1f"}
DASHES = ("--", ":", "-.", (0, (5, 1)), (0, (1, 3)))
#: regrets below it are drawn there: the scale is logarithmic
LEAST = 1e-9


def regrets(figures: Mapping[str, Any], target: Path) -> None:
    """Draw the median regret by evaluation, one panel a problem."""
    columns = min(4, len(figures))
    rows = -(-len(figures) // columns)
    figure, panels = plt.subplots(
        rows, columns, figsize=(3 * columns, 2.3 * rows), layout="constrained", squeeze=False, sharex=True
    )
    for panel in panels.flat[len(figures) :]:
        panel.set_visible(False)
    for panel, (name, row) in zip(panels.flat, figures.items(), strict=False):
        dashes = iter(DASHES)
        for algorithm, medians in row["median_regret"].items():
            look: dict[str, Any] = (
                {"color": OURS[algorithm], "linewidth": 2}
                if algorithm in OURS
                else {"color": "grey", "linewidth": 1, "linestyle": next(dashes)}
            )
            values = [max(value, LEAST) for value in medians.values()]
            panel.plot([int(at) for at in medians], values, label=algorithm, **look)
        panel.set_yscale("log")
        panel.set_title(name, fontsize=10)
    panels[-1, 0].set_xlabel("evaluations")
    panels[0, 0].set_ylabel("median regret")
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, ncols=len(labels), fontsize=8, loc="outside lower center")
    _save(figure, target)


def suggestion_times(figures: Mapping[str, Any], target: Path) -> None:
    """Draw the milliseconds of a suggestion by the length of the history, one line a sampler."""
    figure, panel = plt.subplots(figsize=(5, 3.2), layout="constrained")
    for name, row in figures.items():
        if isinstance(row, Mapping):
            panel.plot([int(at) for at in row], [*row.values()], marker=".", label=name, color=OURS.get(name, "grey"))
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel("trials so far")
    panel.set_ylabel("ms a suggestion")
    panel.legend(frameon=False, fontsize=8)
    _save(figure, target)


def _save(figure: Any, target: Path) -> None:
    for panel in figure.axes:
        panel.spines[["top", "right"]].set_visible(False)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)
    plt.close(figure)
    print(f"drawn: {target}")
