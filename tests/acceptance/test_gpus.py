"""Trials that take several slots of one worker: real workers of one class on two machines, and embedded ones."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from acceptance.commands import Desk, until
from acceptance.commands import desk as make_desk

pytestmark = pytest.mark.timeout(120)

#: Trials of one, two and four slots. Each notes where and when it begins and ends, and the number of its threads.
STUDY = """
import os, time
from hyperopt import hp

SPACE = {"x": hp.uniform("x", 0, 1), "wide": hp.choice("wide", [1, 2, 4])}
STUDY = {"gpus": "wide", "sampler": "random"}

def note(*words):
    with open("slots.log", "a") as log:
        log.write(" ".join(map(str, (time.monotonic(), os.environ["HOST_OF_TEST"], *words))) + "\\n")

def objective(params, context):
    assert context.gpus == context.slots == params["wide"]
    note(params["wide"], os.environ["OMP_NUM_THREADS"])
    time.sleep(0.2)
    note(-params["wide"], os.environ["OMP_NUM_THREADS"])
    return params["x"]
"""


@pytest.fixture(name="desk")
def _desk(redis_url: str, no_orphans: None, tmp_path: Path) -> Iterator[Desk]:
    """A desk that is cleared before the Redis of its workers is."""
    with make_desk(tmp_path) as made:
        made.environment |= {"CELERY_BROKER_URL": redis_url, "SHADHO_REDIS_URL": redis_url}
        made.write("wide.py", STUDY)
        yield made


def notes(desk: Desk) -> list[tuple[str, int, int]]:
    """Host, slots (negative at the end of a trial) and threads, in the order of time."""
    lines = [line.split() for line in (desk.folder / "slots.log").read_text().splitlines()]
    return [(host, int(slots), int(threads)) for _, host, slots, threads in sorted(lines, key=lambda x: float(x[0]))]


def test_a_trial_gets_all_its_slots_on_one_machine_or_none(
    desk: Desk, redis_url: str, unique: Callable[[str], str]
) -> None:
    name = unique("cpu")
    for host, slots in {"a": "4", "b": "2"}.items():
        cores = {"SHADHO_CORES": slots, "SHADHO_HOST": host, "HOST_OF_TEST": host, "SHADHO_IMPORTS": "wide"}
        desk.worker(name, "-c", slots, **cores)
    with redis.Redis.from_url(redis_url) as client:
        until(lambda: len([*client.scan_iter("shadho:worker:*")]) == 2, 40, desk.said)
    command = desk.launch("wide", "--trials", "24", "--seed", "1", "--json").wait(90)
    assert command.code == 0, desk.said()
    assert command.json()["trials"]["complete"] == 24
    taken, most, widths = Counter[str](), Counter[str](), dict[str, set[int]]()
    for host, slots, threads in notes(desk):
        taken[host] += slots
        most[host] = max(most[host], taken[host])
        widths.setdefault(host, set()).add(abs(slots))
        assert threads == abs(slots), "a core for each slot"
    assert most == {"a": 4, "b": 2}, "each machine was full at some time, and never more"
    assert (widths["a"] >= {4}, 4 in widths["b"]) == (True, False)
    assert {trial["attempt"] for trial in desk.trials()} == {1}, desk.said()


#: Each trial returns its number of slots, which the scheduler chooses. It takes longer than the time between two
#: announcements of a worker, and as long on one slot as on four.
CHOSEN = """
import time
from hyperopt import hp

SPACE = {"x": hp.uniform("x", 0, 1)}
STUDY = {"gpus": [1, 2, 4], "sampler": "random"}

def objective(params, context):
    time.sleep(2)
    return {"loss": params["x"], "gpus": context.gpus}
"""


def test_of_a_list_each_number_is_tried_and_the_best_is_kept_to_and_the_objective_gets_what_is_recorded(
    desk: Desk, redis_url: str, unique: Callable[[str], str]
) -> None:
    name = unique("cpu")
    desk.write("chosen.py", CHOSEN)
    desk.worker(name, "-c", "4", SHADHO_CORES="4", SHADHO_HOST="a", SHADHO_IMPORTS="chosen")
    with redis.Redis.from_url(redis_url) as client:
        until(lambda: len([*client.scan_iter("shadho:worker:*")]) == 1, 40, desk.said)
    command = desk.launch("chosen", "--trials", "20", "--seed", "1", "--json").wait(90)
    assert command.code == 0, desk.said()
    assert command.json()["trials"]["complete"] == 20
    trials = desk.trials()
    assert [json.loads(trial["metrics"])["gpus"] for trial in trials] == [trial["slots"] for trial in trials]
    slots = Counter(trial["slots"] for trial in trials)
    assert {*slots} == {1, 2, 4}
    assert slots[1] > 10


def test_several_workers_of_one_machine_share_its_trials_and_none_is_sent_twice(
    desk: Desk, redis_url: str, unique: Callable[[str], str]
) -> None:
    """A trial of two slots waits for the worker that has them, also where the other one gets its message."""
    name = unique("cpu")
    text = STUDY.replace("[1, 2, 4]", "[1, 2]").replace(
        "time.sleep(0.2)", "time.sleep(2.0 if params['wide'] == 1 else 0.2)"
    )
    desk.write("wide.py", text)
    for worker in "12":
        facts = {"SHADHO_CORES": "2", "SHADHO_HOST": "a", "HOST_OF_TEST": worker, "SHADHO_IMPORTS": "wide"}
        desk.worker(name, "-c", "2", **facts)
    with redis.Redis.from_url(redis_url) as client:
        until(lambda: len([*client.scan_iter("shadho:worker:*")]) == 2, 40, desk.said)
    command = desk.launch("wide", "--trials", "16", "--seed", "1", "--json").wait(90)
    assert command.code == 0, desk.said()
    assert command.json()["trials"]["complete"] == 16
    taken, wide = Counter[str](), set[str]()
    for worker, slots, _ in notes(desk):
        taken[worker] += slots
        wide |= {worker} if slots == 2 else set()
        assert taken[worker] <= 2
    # Which of the two has the slots first depends on the load of the machine.
    assert wide
    assert {trial["attempt"] for trial in desk.trials()} == {1}, desk.said()


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        ("lambda params: 1 / 0", "}: ZeroDivisionError: division by zero (wide.py:6); fix it"),
        ("lambda params: None", "STUDY['gpus'] gives None; a trial takes a whole number of gpus from 1"),
        ("lambda params: 1.5", "STUDY['gpus'] gives 1.5"),
        ("'nothing'", "STUDY['gpus'] is 'nothing', which is not a key of the params"),
        (
            "3",
            "STUDY['gpus'] gives a trial 3 slots of one class, and no class has that many here; give --workers",
        ),
        ("-1", "gpus: -1 is not allowed; give a number from 1, a key or a function"),
        ("[1, 0]", "gpus: [1, 0] is not allowed; a list needs whole numbers from 1, such as [1, 2, 4]"),
        ("2, 'slots': 2", "slots may be on several workers and gpus are on one; leave out one of the two"),
    ],
)
def test_a_number_of_gpus_that_cannot_be_is_told_in_one_line(desk: Desk, gpus: str, said: str) -> None:
    text = STUDY.replace('"gpus": "wide"', f'"gpus": {gpus}')
    assert text != STUDY
    desk.write("wide.py", text)
    answer = desk.told("run", "wide", "--local", "--workers", "cpu=2", "--trials", "2")
    assert answer.code == 2, answer.err
    assert said in answer.err
    assert len(answer.messages) == 1


def test_a_rare_trial_that_is_wider_than_any_worker_fails_and_the_others_go_on(desk: Desk) -> None:
    """No worker can join those of this machine. A sampler may draw such a point as well as a user may enqueue it."""
    rare = "lambda params: 9 if params['x'] > 0.985 else 1"
    desk.write("wide.py", STUDY.replace('"gpus": "wide"', f'"gpus": {rare}').replace('params["wide"]', "1"))
    desk.write("points.json", json.dumps([{"x": 0.99, "wide": 0}]))
    words = ("wide", "--local", "--workers", "cpu=2", "--trials", "4", "--enqueue", "points.json", "--seed", "0")
    desk.environment["HOST_OF_TEST"] = "a"
    answer = desk.told("run", *words)
    assert answer.code == 0, answer.err
    first, *others = desk.trials()
    assert first["state"] == "FAILED"
    assert "it takes 9 slots of one class, and no class has that many here; give --workers cpu=9" in first["error"]
    assert [trial["state"] for trial in others] == ["COMPLETE"] * 3
