"""Draws the pictures of the benchmarks, and by itself the README's: ``python tests/benchmarks/picture.py study.png``.

The picture of the README shows the dashboard. Its study is simulated: its scheduler, sampler and cost model are the
real ones, but its trials only let time pass on a simulated clock, which has come to the present when the picture is
taken.
"""

from __future__ import annotations

import dataclasses
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import flat
import matplotlib.pyplot as plt
import numpy as np
from figures import interval, make_parser
from hyperopt import hp
from msgspec.structs import replace
from PIL import Image
from services.browser import chromium
from services.families import with_settings
from workers import dashboard

from shadho_celery.core.settings import StudySettings
from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import Attempt, Outcome, TrialState
from shadho_celery.core.users import USER
from shadho_celery.scheduler.plan import Plan, make_scheduler
from shadho_celery.simulation.executor import Change, Fleet, SimulatedClass, SimulatedExecutor
from shadho_celery.simulation.simulation import Cluster, simulate
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import split
from shadho_celery.space.stored import to_json
from shadho_celery.store.sql import SqlStore
from shadho_celery.study.open import open_study
from shadho_celery.study.state import Limits, StudyState

SPACE = hp.choice(
    "model",
    [
        {
            "name": "net",
            "rate": hp.loguniform("rate", -9, 0),
            "width": hp.quniform("width", 16, 512, 16),
            "dropout": hp.uniform("dropout", 0, 0.5),
        },
        {"name": "forest", "trees": hp.quniform("trees", 10, 500, 10)},
        {"name": "svm", "C": hp.loguniform("C", -5, 10), "gamma": hp.loguniform("gamma", -10, 3)},
    ],
)
#: slots by class, the strongest first, and how many times as fast as a cpu a class runs a net, and anything else
SLOTS = {"gpu_large": 2, "gpu_small": 3, "cpu": 4}
SPEED = {"gpu_large": (16.0, 1.5), "gpu_small": (6.0, 1.2), "cpu": (1.0, 1.0)}
#: one in so many trials fails, and one in so many nets is pruned
FAILED, PRUNED = 29, 5
#: pixels of the picture; a point of its page has 1.5 pixels
WIDTH, HEIGHT, SCALE = 1240, 1000, 1.5
#: number of colours, with which the file is a third as large
COLOURS = 128


def main() -> None:
    """Draw what the command line asks for."""
    parser = make_parser(__doc__)
    parser.add_argument("target", type=Path, help="the picture, a PNG file")
    parser.add_argument("--trials", type=int, default=300)
    given = parser.parse_args()
    draw(given.target, given.trials)


def draw(target: Path, trials: int) -> None:
    """Play a study until three quarters of its trials have ended, and take a picture of its page."""
    os.environ[USER] = "anna"
    with tempfile.TemporaryDirectory() as folder:
        with played(f"sqlite:///{folder}/first.db", trials, 0.0) as (_, seconds):
            pass
        url = f"sqlite:///{folder}/study.db"
        with played(url, trials, time.time() - seconds) as (study, _), dashboard(Path(folder), url) as (_, address):
            photograph(address, study.record.name, target)


@contextmanager
def played(url: str, trials: int, start: float) -> Iterator[tuple[StudyState, float]]:
    """Yield a study that still runs, and the simulated seconds since its start."""
    space, clock = compile_space(SPACE), ManualClock(start)
    settings = StudySettings(sampler="tpe", classes=tuple(SLOTS))
    plan = Plan.of(space, settings, Limits(trials=trials))
    given = {**settings.in_force(), "trials": trials}
    store = SqlStore(url)
    study = open_study(store, space.describe(), name="digits", seed=1, tree=to_json(space), clock=clock, in_force=given)
    # A worker comes later than the others, and another one dies and comes back.
    given_changes = ((150, "cpu", 1), (300, "gpu_small", -1), (390, "gpu_small", 1))
    changes = [Change(at=start + at, compute_class=name, workers=workers) for at, name, workers in given_changes]
    fleet = Fleet(classes={name: SimulatedClass(workers=number) for name, number in SLOTS.items()}, changes=changes)
    executor = SimulatedExecutor(fleet, play, clock, recorder=study.recorder)
    scheduler = make_scheduler(plan, study, executor)
    # All events come from the executor.
    scheduler.turn_seconds = math.inf
    scheduler.update_classes()
    scheduler.fill()
    while study.counted < 3 * trials // 4:
        scheduler.turn()
    try:
        yield study, clock.now() - start
    finally:
        study.close()
        store.close()


def play(attempt: Attempt, compute_class: str) -> Outcome:
    """Return what a trial comes to: wide nets are what GPUs are for."""
    params, rng = attempt.params, np.random.default_rng(attempt.number)
    net, other = SPEED[compute_class]
    seconds = float(rng.lognormal(0, 0.2))
    loss = 0.05 + 0.02 * float(rng.random())
    if "width" in params:
        seconds *= (20 + params["width"]) / net
        loss += 0.04 * abs(math.log(params["rate"]) + 4) ** 1.2 + 1.6 / params["width"] + 0.1 * params["dropout"] ** 2
    elif "trees" in params:
        seconds *= (10 + params["trees"] / 8) / other
        loss += 0.12 + 2 / params["trees"]
    else:
        seconds *= 25 / other
        loss += 0.03 + 0.02 * abs(math.log(params["C"]) - 4) + 0.03 * abs(math.log(params["gamma"]) + 3)
    if attempt.number % FAILED == FAILED - 1:
        return Outcome(state=TrialState.FAILED, error="ValueError: singular matrix", seconds=0.3 * seconds)
    if "width" in params and loss > 0.2 and attempt.number % PRUNED:
        return Outcome(state=TrialState.PRUNED, loss=loss, seconds=0.3 * seconds)
    return Outcome(state=TrialState.COMPLETE, loss=loss, seconds=seconds)


def photograph(address: str, name: str, target: Path) -> None:
    """Write the top of a study's page to a file."""
    with chromium() as browser:
        context = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT}, device_scale_factor=SCALE)
        page = context.new_page()
        page.goto(address)
        page.get_by_role("link", name=name).click()
        # The last one of the charts.
        page.get_by_role("heading", name="The loss over dropout").wait_for()
        page.mouse.move(0, 0)
        page.screenshot(path=target)
        context.close()
    with Image.open(target) as picture:
        picture.convert("RGB").quantize(COLOURS).save(target, optimize=True)


# Placement: how near each policy comes to the bound, who worked on what, and a flat space

POLICY_COLOURS = {"cost": "#1b7f5c", "fifo": "#4c78a8", "paper": "#e08b3a", "push": "#9d9d9d"}
WORDS = {"cost": "cost (default)", "fifo": "fifo", "paper": "paper", "push": "queue per class, no spill-over"}
#: the Gantt view's workers of each class, and its minutes
GANTT_WORKERS, GANTT_MINUTES = 6, 60.0


def shares_of_the_bound(results: Mapping[tuple[str, str], Sequence[Any]], target: Path) -> None:
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
        axes.barh(rows, means, 0.92 * height, xerr=whiskers, color=POLICY_COLOURS[policy], label=WORDS[policy])
        for row, mean in zip(rows, means, strict=True):
            axes.text(0.008, row, f"{mean:.2f}", va="center", color="white", fontsize=8)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(np.arange(len(cases)) + height * (len(policies) - 1) / 2, cases)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.08)
    axes.set_xlabel("trials completed in an even mix, as a share of the linear program's bound")
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
    for how, colour in zip(WAYS, (POLICY_COLOURS[name] for name in ("cost", "paper", "fifo")), strict=True):
        cluster, policy = case.cut() if how == "hand-split" else case.cluster(), "fifo" if how == "fifo" else "cost"
        played = [simulate(cluster, policy=policy, seed=seed) for seed in range(seeds)]
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


# Training: what staleness costs, what backups bring, and both against the time; with 95 % intervals

GREEN, ORANGE, BLUE = "#1b7f5c", "#e08b3a", "#3b6ea8"


def staleness(figures: Mapping[str, Any], target: Path) -> None:
    """Test error against staleness: at one rate, and at the best rate for each."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    stale = [row["staleness"] for row in figures.values()]
    for name, key, colour in (("one rate", "error_at_one_rate", ORANGE), ("best rate for each", "error_tuned", GREEN)):
        _line(axes, stale, [row[key] for row in figures.values()], name, colour)
    axes.set_xlabel("mean staleness of a gradient, in steps")
    axes.set_ylabel("test error, %")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    _save(figure, target)


def backups(figures: Mapping[str, Any], target: Path) -> None:
    """Seconds to the target against the number of backups."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    _line(axes, figures["backups"], figures["seconds"], None, GREEN)
    axes.set_yscale("log")
    ticks = [50, 100, 200, 500, 1000]
    axes.set_yticks(ticks, list(map(str, ticks)))
    axes.minorticks_off()
    axes.set_xlabel("backup workers of 50 workers in all")
    axes.set_ylabel(f"seconds to a test accuracy of {figures['accuracy']}")
    _save(figure, target)


def against(figures: Mapping[str, Any], target: Path) -> None:
    """Mean test accuracy against the time."""
    courses: Mapping[str, Sequence[Sequence[tuple[float, float]]]] = figures["courses"]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for (name, runs), colour in zip(courses.items(), (GREEN, ORANGE, BLUE), strict=True):
        moments = np.linspace(1, min(run[-1][0] for run in runs), 200)
        curves = [np.interp(moments, *zip(*run, strict=True)) for run in runs]
        axes.plot(moments, np.mean(curves, axis=0), color=colour, label=name)
    axes.axhline(figures["accuracy"], color="#999", linewidth=0.8)
    axes.set_ylim(0.8, 1.0)
    axes.set_xlabel("seconds")
    axes.set_ylabel("test accuracy")
    axes.legend(frameon=False)
    _save(figure, target)


def _line(axes: Any, x: Sequence[float], runs: Sequence[Sequence[float]], name: str | None, colour: str) -> None:
    means = [float(np.mean(each)) for each in runs]
    reach = [[mean - interval(each)[0] for mean, each in zip(means, runs, strict=True)]]
    axes.errorbar(x, means, yerr=reach * 2, color=colour, marker="o", markersize=4, capsize=2, label=name)


#: by the name of the picture
TRAINING: Mapping[str, Callable[[Mapping[str, Any], Path], None]] = {
    "staleness": staleness,
    "backups": backups,
    "against": against,
}


def _save(figure: Any, target: Path) -> None:
    for panel in figure.axes:
        panel.spines[["top", "right"]].set_visible(False)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)
    plt.close(figure)
    print(f"drawn: {target}")


if __name__ == "__main__":
    main()
