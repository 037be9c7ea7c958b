"""A study of a fleet of three classes, made up: its trials lie in a store, its attempts are columns."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np
from hyperopt import hp

from services import columns
from shadho_celery.charts.columns import AttemptColumns
from shadho_celery.charts.study import StudyData
from shadho_celery.core.trial import Outcome, Report, Trial, TrialState
from shadho_celery.results.study import StudyResults
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import split
from shadho_celery.space.stored import to_json
from shadho_celery.store.base import Turn
from shadho_celery.store.sql import SqlStore
from shadho_celery.study.open import open_study

SPACE = hp.choice(
    "model",
    [
        {
            "name": "net",
            "rate": hp.loguniform("rate", -9, 0),
            "width": hp.quniform("width", 16, 512, 16),
            "act": hp.choice("act", ["relu", "tanh", "gelu"]),
            "dropout": hp.uniform("dropout", 0, 0.5),
        },
        {"name": "forest", "trees": hp.quniform("trees", 10, 500, 10), "depth": hp.quniform("depth", 2, 20, 1)},
        {"name": "svm", "C": hp.loguniform("C", -5, 10), "gamma": hp.loguniform("gamma", -10, 3)},
    ],
)
#: slots by class, and how many times as fast as a cpu a class runs a net, and anything else
SLOTS = {"gpu_large": 2, "gpu_small": 3, "cpu": 4}
SPEED = {"gpu_large": (12.0, 1.5), "gpu_small": (5.0, 1.2), "cpu": (1.0, 1.0)}
START = 1_790_000_000.0
ERROR = 'Traceback (most recent call last):\n  File "study.py", line 12, in objective\nValueError: singular matrix'


class Pictured(StudyData):
    """A study whose attempts are given."""

    def __init__(self, study: StudyResults, attempts: AttemptColumns) -> None:
        super().__init__(study)
        self.now, self._given = attempts.now, attempts

    def attempts(self) -> AttemptColumns:
        return self._given


def pictured(
    url: str, count: int = 200, space: object = SPACE, loss: float | None = None, reports: bool = True, **facts: Any
) -> Pictured:
    """Return a study of `count` trials: slots of a fleet that take the next trial when they are free.

    Every ninth trial of a net is pruned, one in 15 fails, one in 40 is lost once. `loss` is that of each third trial.
    """
    compiled = compile_space(space)
    subspaces = split(compiled)
    rng = np.random.default_rng(0)
    draws = {each.name: each.sample(rng, -(-count // len(subspaces))) for each in subspaces}
    free = [(START, place, name, slot) for place, (name, slot) in enumerate(_slots())]
    heapq.heapify(free)
    trials: list[Trial] = []
    rows: list[Mapping[str, Any]] = []
    said: list[Report] = []
    turns = itertools.cycle(draws)
    for number in range(count):
        subspace = next(turns)
        params = draws[subspace].pop()
        began, place, name, slot = heapq.heappop(free)
        host, own = f"{name.replace('_', '-')}-{slot // 2 + 1}", {}
        seconds = _seconds(params, name) * float(rng.lognormal(0, 0.15))
        if number % 40 == 25:
            lost = {"number": number, "attempt": 1, "started_at": began, "ended_at": began + 30.0, "end": "lost"}
            rows.append({**lost, "compute_class": name, "host": host, "worker": f"{host}.1", "slot": slot % 2})
            began, own = began + 30.0, {"attempt": 2}
        outcome = _outcome(number, params, seconds, rng, loss)
        until = began + (outcome.seconds or 0.0)
        end = str(outcome.state).lower()
        where = {"compute_class": name, "host": host}
        times = {"queued_at": began - 2 * float(rng.random()), "started_at": began, "ended_at": until}
        own |= {
            "number": number,
            "worker": f"{host}.1",
            "slot": slot % 2,
            "end": end,
            "predicted": _seconds(params, name),
        }
        rows.append({"attempt": 1, **where, **times, **own})
        made: dict[str, Any] = {"attempt": own.get("attempt", 1), "started_at": began, "finished_at": until}
        trials.append(
            Trial(
                number=number, subspace=subspace, params=params, state=outcome.state, outcome=outcome, **made, **where
            )
        )
        if reports and subspace == next(iter(draws)) and outcome.loss is not None:
            curve = enumerate(outcome.loss * (1 + np.exp(-np.arange(1, 9) / 2)), 1)
            said += [
                Report(number=number, attempt=made["attempt"], step=step, loss=float(each), at=began + step)
                for step, each in curve
            ]
        heapq.heappush(free, (until + 0.2, place, name, slot))
    with closing(SqlStore(url)) as store:
        found = open_study(store, compiled.describe(), module="", name="made", seed=0, tree=to_json(compiled), **facts)
        for start in range(0, count, 5000):
            store.write(found.record.key, 1, START, Turn(new=trials[start : start + 5000]))
        store.write(found.record.key, 1, START, Turn(reported=said))
        store.unlock(found.record.key, 1)
    opened = SqlStore(url, read_only=True)
    now = max((row["ended_at"] for row in rows), default=START)
    hosts = sorted({(row["compute_class"], row["host"]) for row in rows})
    slots = {host: len({row["slot"] for row in rows if row["host"] == host}) for _, host in hosts}
    sessions = [columns.session(name, slots[host], START, now, worker=f"{host}.1", host=host) for name, host in hosts]
    return Pictured(StudyResults(opened, opened.find("made")), columns.attempts(rows, sessions, now))


def _slots() -> Sequence[tuple[str, int]]:
    return [(name, slot) for name, count in SLOTS.items() for slot in range(count)]


def _seconds(params: Mapping[str, float], name: str) -> float:
    """Return how long a trial takes on a class: wide nets are what GPUs are for."""
    net, other = SPEED[name]
    if "width" in params:
        return (5 + params["width"] / 4) / net
    return (3 + params.get("trees", 100.0) / 25) / other


def _outcome(
    number: int, params: Mapping[str, float], seconds: float, rng: np.random.Generator, loss: float | None
) -> Outcome:
    if number % 15 == 7:
        return Outcome(state=TrialState.FAILED, error=ERROR, seconds=0.3 * seconds)
    if loss is not None and number % 3 == 0:
        return Outcome(state=TrialState.COMPLETE, loss=loss, seconds=seconds)
    value = 0.05 + 0.02 * float(rng.random())
    if "rate" in params:
        value += 0.04 * abs(np.log(params["rate"]) + 1.2) ** 1.2 + 0.1 * 16 / params["width"]
    elif "C" in params:
        value += 0.01 * abs(np.log(params["C"]) - 4) + 0.02 * abs(np.log(params["gamma"]) + 3)
    elif "trees" in params:
        value += 0.2 + 2 / params["trees"]
    state = TrialState.PRUNED if "rate" in params and number % 9 == 0 else TrialState.COMPLETE
    return Outcome(state=state, loss=float(value), seconds=0.4 * seconds if state is TrialState.PRUNED else seconds)
