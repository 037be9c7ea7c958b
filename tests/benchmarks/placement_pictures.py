"""Draws the placement benchmark: how near each policy comes to the bound, who worked on what, and a flat space."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import flat
import matplotlib.pyplot as plt
import numpy as np
from msgspec.structs import replace
from services.families import with_settings

from shadho_celery.simulation.cluster_file import Cluster
from shadho_celery.simulation.simulation import simulate
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import split

COLOURS = {"cost": "#1b7f5c", "fifo": "#4c78a8", "paper": "#e08b3a", "push": "#9d9d9d"}
WORDS = {"cost": "cost (default)", "fifo": "fifo", "paper": "paper", "push": "queue per class, no spill-over"}
#: the Gantt view's workers of each class, and its minutes
GANTT_WORKERS, GANTT_MINUTES = 6, 60.0


def chart(results: Mapping[tuple[str, str], Sequence[Any]], target: Path) -> None:
    """Share of the linear program's bound by case and policy; the whiskers span the seeds."""
    cases = list(dict.fromkeys(case for case, _ in results))
    policies = list(dict.fromkeys(policy for _, policy in results))
    figure, axes = plt.subplots(figsize=(9.5, 0.55 + 0.75 * len(cases)), layout="constrained")
    height = 0.8 / len(policies)
    for place, policy in enumerate(policies):
        shares = [[run.share for run in results[case, policy]] for case in cases]
        means = np.array([np.mean(each) for each in shares])
        whiskers = [means - [min(each) for each in shares], [max(each) for each in shares] - means]
        rows = np.arange(len(cases)) + place * height
        axes.barh(rows, means, 0.92 * height, xerr=whiskers, color=COLOURS[policy], label=WORDS[policy])
        for row, mean in zip(rows, means, strict=True):
            axes.text(0.008, row, f"{mean:.2f}", va="center", color="white", fontsize=8)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(np.arange(len(cases)) + height * (len(policies) - 1) / 2, cases)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.08)
    axes.set_xlabel("trials completed in an even mix, as a share of the linear program's bound")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(policies), frameon=False)
    _save(figure, target)


#: ways to search a flat space, and parts of an hour between two points of the picture
WAYS = {"cost": "cost (default)", "hand-split": "cost, split by hand", "fifo": "fifo"}
STEPS_PER_HOUR = 12


def over_time(case: flat.Case, target: Path, seeds: int) -> None:
    """Share of the bound that a flat space reaches in each part of an hour; the bands span the seeds."""
    seconds = case.hours * 3600
    rate = case.best() / seconds
    steps = np.linspace(0.0, seconds, max(2, round(case.hours * STEPS_PER_HOUR)) + 1)
    figure, axes = plt.subplots(figsize=(9.5, 3.4), layout="constrained")
    for how, colour in zip(WAYS, (COLOURS["cost"], COLOURS["paper"], COLOURS["fifo"]), strict=True):
        split, policy = case.cut() if how == "hand-split" else case.cluster(), "fifo" if how == "fifo" else "cost"
        played = [simulate(split, policy=policy, seed=seed) for seed in range(seeds)]
        ended = [[trial.finished_at for trial in each.study.trials if trial.finished_at is not None] for each in played]
        shares = np.array([np.histogram(each, steps)[0] for each in ended]) / (rate * np.diff(steps))
        middles = (steps[1:] + steps[:-1]) / 7200
        axes.plot(middles, shares.mean(axis=0), color=colour, label=WAYS[how])
        axes.fill_between(middles, shares.min(axis=0), shares.max(axis=0), color=colour, alpha=0.2, linewidth=0)
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_xlim(0, case.hours)
    axes.set_xlabel("hours of a search that knows nothing at its start")
    axes.set_ylabel("trials, share of the bound")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(WAYS), frameon=False)
    _save(figure, target)


def gantt(cluster: Cluster, target: Path) -> None:
    """The first hour of a small fleet under each policy: a row a slot, a colour a family."""
    classes = {name: replace(each, workers=GANTT_WORKERS) for name, each in cluster.fleet.classes.items()}
    fleet = replace(cluster.fleet, classes=classes, changes=())
    small = dataclasses.replace(with_settings(cluster, seconds=GANTT_MINUTES * 60), fleet=fleet)
    policies = ("cost", "paper", "fifo")
    figure, all_axes = plt.subplots(len(policies), 1, figsize=(9.5, 7.5), sharex=True, layout="constrained")
    families = [subspace.name.removeprefix("family=") for subspace in split(compile_space(small.space))]
    colours = dict(zip(families, plt.get_cmap("Set2").colors, strict=False))
    for axes, policy in zip(all_axes, policies, strict=True):
        spans = _spans(small, policy)
        for family in families:
            mine = [(row, begin, end) for row, begin, end, name in spans if name == family]
            rows, begins, ends = (np.array(column) for column in zip(*mine, strict=True))
            label = f"{family}" if policy == "cost" else None
            axes.barh(rows, ends - begins, 0.9, begins, color=colours[family], edgecolor="white", lw=0.4, label=label)
        for place, name in enumerate(small.fleet.classes):
            axes.text(-0.4, (place + 0.5) * GANTT_WORKERS - 0.5, name, ha="right", va="center")
            if place:
                axes.axhline(place * GANTT_WORKERS - 0.5, color="black", linewidth=0.8)
        done = {family: sum(name == family and end <= GANTT_MINUTES for *_, end, name in spans) for family in families}
        axes.set_title(f"{policy}: {len(families) * min(done.values())} trials in an even mix", loc="left", fontsize=10)
        axes.set_yticks([])
        axes.invert_yaxis()
        axes.set_xlim(0, GANTT_MINUTES)
        axes.spines[["top", "right", "left"]].set_visible(False)
    all_axes[-1].set_xlabel("minutes")
    figure.legend(loc="outside upper center", ncols=len(families), frameon=False, fontsize=9)
    _save(figure, target)


def _spans(cluster: Cluster, policy: str) -> list[tuple[int, float, float, str]]:
    """Row, begin and end in minutes, and family of every trial that was begun."""
    played = simulate(cluster, policy=policy, seed=0)
    first = {name: place * GANTT_WORKERS for place, name in enumerate(cluster.fleet.classes)}
    spans = []
    for trial in played.study:
        if trial.started_at is not None and trial.host is not None:
            row = first[str(trial.compute_class)] + int(trial.host.rpartition(".")[2])
            ends = trial.finished_at if trial.finished_at is not None else played.seconds
            spans.append((row, trial.started_at / 60, ends / 60, trial.subspace.removeprefix("family=")))
    return spans


def _save(figure: Any, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)
    plt.close(figure)
    print(f"drawn: {target}")
