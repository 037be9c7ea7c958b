"""Placement on real workers: trials go to the class that is good at them, and classes come and go in mid-study."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from acceptance.commands import Command, Desk, until
from acceptance.commands import desk as make_desk

from shadho_celery.fleet.redis import connect
from shadho_celery.fleet.registry import Registry, Worker

pytestmark = pytest.mark.timeout(240)

#: A study of three families; a trial's seconds are those of its family on its class, more or less by a half.
STUDY = """
import os, time
from hyperopt import hp

SECONDS = {seconds}
SPACE = hp.choice("family", [{{"family": name, "size": hp.uniform(name, 0.5, 1.5)}} for name in sorted(SECONDS)])
STUDY = {settings}

def note(*words):
    with open({log!r}, "a") as log:
        log.write("\\t".join(map(str, words)) + "\\n")

def objective(params, context):
    note("began", context.trial, context.attempt, context.compute_class, os.getpid())
    time.sleep(SECONDS[params["family"]][context.compute_class] * params["size"])
    note("ended", context.trial, context.attempt, context.compute_class, os.getpid())
    return params["size"]
"""

LARGE, SMALL, CPU = CLASSES = ("large", "small", "cpu")

#: each family's own class; the classes' own order is another one, so that no policy has it right by taking turns
GOOD_AT = {"convolution": CPU, "recurrent": LARGE, "trees": SMALL}


@pytest.fixture(name="desk")
def _desk(redis_url: str, no_orphans: None, tmp_path: Path) -> Iterator[Desk]:
    """A desk whose broker and channel are a Redis database of its own, cleared before that is."""
    with make_desk(tmp_path) as made:
        made.environment |= {"CELERY_BROKER_URL": redis_url, "SHADHO_REDIS_URL": redis_url}
        yield made


def write_study(desk: Desk, seconds: Mapping[str, Mapping[str, float]], classes: tuple[str, ...] = CLASSES) -> None:
    """`seconds` by family and class; `classes` are those that the study expects, the strongest first."""
    log = str(desk.folder / "runs.log")
    desk.write(
        "my_study.py", STUDY.format(seconds=seconds, settings={"classes": classes, "sampler": "random"}, log=log)
    )


def start_workers(desk: Desk, slots: Mapping[str, int]) -> dict[str, Command]:
    """Workers by class, once they have announced themselves."""
    before = set(living(desk))
    started = {name: desk.worker(name, "-c", str(n), SHADHO_IMPORTS="my_study") for name, n in slots.items()}
    until(lambda: set(living(desk)) >= before | set(slots), 40, desk.said)
    return started


def living(desk: Desk) -> list[str]:
    """Classes of the live workers."""
    registry = Registry(connect(desk.environment["SHADHO_REDIS_URL"]), Worker)
    return [worker.compute_class for worker in registry.living().values()]


def on_own_class(trials: list[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """By family, its trials that ran on the class that is fast at it, and all of them."""
    families = {trial["number"]: trial["subspace"].partition("=")[2] for trial in trials}
    total = Counter(families.values())
    own = Counter(families[t["number"]] for t in trials if t["compute_class"] == GOOD_AT[families[t["number"]]])
    return {family: (own[family], total[family]) for family in GOOD_AT}


def test_by_default_most_trials_run_where_they_are_fast(desk: Desk) -> None:
    """Three workers, each good at one of three families, which the study finds out; its order of classes does not."""
    seconds = {family: {name: 0.1 if name == own else 0.4 for name in CLASSES} for family, own in GOOD_AT.items()}
    write_study(desk, seconds)
    start_workers(desk, dict.fromkeys(CLASSES, 1))
    command = desk.launch("my_study", "--trials", "90", "--seed", "3", "--json").wait(120)
    assert command.code == 0, desk.said()
    assert command.json()["trials"]["complete"] == 90
    own = on_own_class(desk.trials())
    assert {family: total for family, (_, total) in own.items()} == dict.fromkeys(GOOD_AT, 30)
    assert all(count > total / 2 for count, total in own.values()), own
    assert sum(count for count, _ in own.values()) > 60, own


@pytest.mark.slow
def test_what_waits_for_a_class_that_vanishes_is_handed_back(desk: Desk) -> None:
    """Its worker is killed: others run what waited there, and the study has its exact number of trials."""
    write_study(desk, dict.fromkeys(GOOD_AT, dict.fromkeys(CLASSES, 0.1)))
    workers = start_workers(desk, {LARGE: 1, SMALL: 2, CPU: 1})
    command = desk.launch("my_study", "--trials", "120", "--json")
    until(lambda: sum(name == SMALL for _, _, name, _ in desk.runs()) >= 20, 40, desk.said)
    began = time.monotonic()
    workers[SMALL].send(signal.SIGKILL)
    # Its slots' processes end a moment later than it does.
    slots = {pid for _, _, name, pid in desk.runs() if name == SMALL}
    until(lambda: slots.isdisjoint(desk.processes()), 10, desk.said)
    killed = len(desk.runs())
    assert command.wait(150).code == 0, desk.said()
    print(f"the study ended {time.monotonic() - began:.1f} s after the worker had been killed")
    counts = command.json()["trials"]
    assert counts == {"total": 120, "complete": 120, "failed": 0, "pruned": 0, "cancelled": 0}
    ended = Counter(number for number, *_ in desk.runs("ended"))
    # Its slots lived a moment longer than the worker that would have passed their results on.
    unheard = {number for number, _, name, pid in desk.runs("ended") if name == SMALL and pid in slots}
    assert set(ended) == set(range(120))
    assert {number for number, times in ended.items() if times > 1} <= unheard, "each ended once but for those"
    assert sum(ended.values()) <= 120 + 2, "one in each of the two slots"
    assert SMALL not in {name for _, _, name, _ in desk.runs()[killed:]}
    trials = desk.trials()
    handed_back = [trial for trial in trials if trial["attempt"] > 1 and not trial["lost"]]
    lost = [trial for trial in trials if trial["lost"]]
    print(f"{len(handed_back)} waited there and were handed back, {len(lost)} ran there and were lost")
    assert handed_back, "something waited there, as trials are so short"
    assert len(lost) <= 2, "no more than it had slots"
    assert all(trial["compute_class"] != SMALL for trial in handed_back + lost)
