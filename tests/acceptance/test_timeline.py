"""The timeline of a fleet shows what its records say, with real workers of which one is killed."""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from acceptance.commands import Desk, until
from acceptance.commands import desk as make_desk

from shadho_celery.charts.chart import Chart
from shadho_celery.charts.study import CHARTS, StudyData
from shadho_celery.fleet.redis import connect
from shadho_celery.fleet.registry import Registry, Worker
from shadho_celery.results.study import StudyResults
from shadho_celery.store.sql import SqlStore

pytestmark = pytest.mark.timeout(240)

LARGE, SMALL, CPU = "large", "small", "cpu"
#: slots by class; each class is one worker, on a machine of its own
SLOTS = {LARGE: 1, SMALL: 2, CPU: 2}
HOSTS = {LARGE: "127.0.0.2", SMALL: "127.0.0.3", CPU: "127.0.0.4"}

#: Trials that are pruned, fail, hang until their worker is killed, and are late so that a copy starts. Each class has
#: a family that it is good at.
BODY = """
    seconds = {"left": 0.3, "right": 0.6}[params["side"]] / {"large": 2, "small": 1.5, "cpu": 1}[context.compute_class]
    time.sleep(seconds)
    if context.trial == 7: raise ValueError("it fails")
    if context.compute_class == "small" and context.trial >= 15: time.sleep(300)
    while context.trial == 45 and not context.is_copy and not context.should_stop(): time.sleep(0.02)
    if params["x"] > 0.85 and context.trial != 45:
        context.report(1, 1000.0)
        while not context.should_stop(): time.sleep(0.02)
"""

#: how an attempt is drawn, by its end
FORMS = {
    "complete": "filled",
    "pruned": "light",
    "failed": "crossed",
    "retried": "crossed",
    "lost": "hatched",
    "superseded": "outlined",
}


@pytest.fixture(name="desk")
def _desk(redis_url: str, no_orphans: None, tmp_path: Path) -> Iterator[Desk]:
    """A desk whose broker and channel are a Redis database of its own, cleared before that is."""
    with make_desk(tmp_path) as made:
        made.environment |= {"CELERY_BROKER_URL": redis_url, "SHADHO_REDIS_URL": redis_url}
        made.environment |= {"SHADHO_IMPORTS": "my_study", "SHADHO_LEASE_SECONDS": "3"}
        yield made


def read(desk: Desk, store: str = "shadho.db") -> StudyData:
    """Return the only study of a store."""
    opened = SqlStore(f"sqlite:///{desk.folder / store}", read_only=True)
    return StudyData(StudyResults(opened, *opened.records()))


def bars_of(chart: Chart) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each bar or strip of attempts of a timeline with the form in which it is drawn."""
    for series in chart.series:
        for row in zip(*series.columns.values(), strict=True) if series.name not in {"idle", "no worker"} else ():
            yield series.form, dict(zip(series.columns, row, strict=True))


def attempts_of(data: StudyData) -> list[dict[str, Any]]:
    """Return the rows of the table `attempts` that have started."""
    columns = data.study.records.attempts()
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return [row for row in rows if row["started_at"] is not None]


def test_the_timeline_of_real_workers_is_what_the_table_of_attempts_says(desk: Desk) -> None:
    desk.study(body=BODY.strip(), seconds=0.0, settings={"classes": [*SLOTS], "pruner": "threshold:100"})
    workers = {name: desk.worker(name, "-c", str(n), SHADHO_HOST=HOSTS[name]) for name, n in SLOTS.items()}
    with connect(desk.environment["SHADHO_REDIS_URL"]) as client:
        registry = Registry(client, Worker)
        until(lambda: len(registry.living()) == len(SLOTS), 60, desk.said)
    command = desk.launch("my_study", "--trials", "60", "--seed", "1", "--json")

    def is_hanging() -> bool:
        return sum(name == SMALL and number >= 15 for number, _, name, _ in desk.runs()) == SLOTS[SMALL]

    until(is_hanging, 90, desk.said)
    workers[SMALL].send(signal.SIGKILL)
    command.wait(120)
    assert command.code == 0, desk.said()
    data = read(desk)
    chart = CHARTS["timeline"].draw(data)
    assert "are joined" not in chart.note, "no attempt is so short"
    table = {(row["number"], row["attempt"]): row for row in attempts_of(data)}
    drawn = {(bar["number"], bar["attempt"]): (form, bar) for form, bar in bars_of(chart)}
    assert drawn.keys() == table.keys()
    rows = defaultdict(list)
    for key, (form, bar) in drawn.items():
        facts = table[key]
        assert (bar["start"], bar["end"]) == pytest.approx((facts["started_at"], facts["ended_at"]), abs=1e-3)
        named = chart.axes[1].categories[bar["y"]]
        assert named == f"{facts['compute_class']}, {facts['host']}, {facts['worker']}, slot {facts['slot']}"
        assert form == ("outlined" if facts["copy"] else FORMS[facts["end"]]), facts
        rows[named].append((bar["start"], bar["end"], facts["end"]))
    [outages] = [series.columns["y"] for series in chart.series if series.name == "no worker"]
    assert {chart.axes[1].categories[row].partition(",")[0] for row in outages} >= {SMALL}, "its worker was killed"
    ends = {facts["end"] for facts in table.values()}
    assert {"complete", "pruned", "failed", "lost", "superseded"} <= ends
    assert any(facts["copy"] for facts in table.values())
    assert len(rows) == sum(SLOTS.values())
    for name, spans in rows.items():
        spans.sort()
        for before, after in pairwise(spans):
            assert before[1] <= after[0], f"{name}: {before} and {after}"
    idle = next(series for series in chart.series if series.name == "idle").columns["idle"]
    for name, share in zip(chart.axes[1].categories, idle, strict=True):
        assert share == pytest.approx(1 - busy_share(data, name, rows[name]), abs=1e-6)


def busy_share(data: StudyData, row: str, spans: list[tuple[float, float, str]]) -> float:
    """Return the share of the time in which a slot was busy, while its worker was live, by the tables.

    `spans` have the start and the end of each attempt, and how it ended. Lost attempts do not count.
    """
    known = attempts_of(data)
    first, last = min(each["started_at"] for each in known), max(each["ended_at"] for each in known)
    sessions = data.study.records.sessions()
    of_worker = zip(sessions["worker"], sessions["since"], sessions["until"], strict=True)
    live = sum(min(until, last) - max(since, first) for worker, since, until in of_worker if f", {worker}," in row)
    return sum(end - start for start, end, how in spans if how != "lost") / live
