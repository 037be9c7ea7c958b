"""What the live view says of the pace, of workers and of lost trials holds."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from math import fsum
from typing import Any

import pytest
from rich.style import Style
from services.families import fleet_of
from services.played import S, console, searched, two_models

from shadho_celery.cli.live import (
    ENOUGH_ENDED,
    PACE_SECONDS,
    Fleet,
    LiveView,
    Pace,
    class_rows,
    class_table,
    pace_line,
    progress_line,
    running_lines,
    waiting_gangs,
    waiting_lines,
)
from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.settings import StudySettings
from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import Attempt, Lost, Outcome, Report, Result, Started
from shadho_celery.fleet.gangs import Seated
from shadho_celery.fleet.registry import Share, Worker
from shadho_celery.scheduler.plan import Plan, make_scheduler
from shadho_celery.scheduler.scheduler import Scheduler
from shadho_celery.scheduler.wishes import Demand
from shadho_celery.simulation.executor import SimulatedExecutor
from shadho_celery.store.sql import SqlStore
from shadho_celery.study.open import open_study
from shadho_celery.study.state import Limits, StudyState

# The time that is left


Seconds = Callable[[random.Random, str], tuple[float, S]]


def told(law: Seconds, slots: Mapping[str, int], *, trials: int, seed: int) -> list[tuple[float, float | None, float]]:
    """Play a study. Return by turn the part of its trials that have ended, the time left that is told, if any, and
    the real one. A `law` returns the seconds of a trial on a class, and how it ends.
    """
    clock = ManualClock(1000.0)

    def play(attempt: Attempt, name: str) -> Outcome:
        seconds, state = law(random.Random(f"{seed} {attempt.number}"), name)
        return Outcome(state=state, loss=1.0, seconds=seconds)

    space = two_models()
    study = open_study(SqlStore("sqlite://"), space.describe(), name="s", seed=1, clock=clock)
    executor = SimulatedExecutor(fleet_of(slots), play, clock)
    scheduler = make_scheduler(Plan.of(space, StudySettings(sampler="random"), Limits(trials=trials)), study, executor)
    pace = Pace(study, lambda: scheduler.limits)
    # Workers take their time to start.
    clock.sleep(30.0)
    said = []
    while not scheduler.done:
        scheduler.turn()
        pace.note()
        said.append((study.counted / trials, pace.seconds_left(), clock.now()))
    return [(part, left, clock.now() - at) for part, left, at in said if part < 1]


def pruned(chance: random.Random, name: str) -> tuple[float, S]:
    """Two thirds of the trials are short. A long one takes four times as long on a slow class, and half are pruned."""
    kind, ends = chance.random(), chance.random()
    if kind < 0.65:
        return (0.4, S.PRUNED) if ends < 0.6 else (1.5, S.COMPLETE)
    seconds = chance.choice([5.0, 10.0, 20.0]) / (1.0 if name == "cpu" else 4.0)
    return (seconds / 5, S.PRUNED) if ends < 0.5 else (seconds, S.COMPLETE)


LAWS: Mapping[str, tuple[Seconds, Mapping[str, int]]] = {
    "equal": (lambda chance, _: (10.0, S.COMPLETE), {"cpu": 4}),
    "exponential": (lambda chance, _: (chance.expovariate(0.1), S.COMPLETE), {"cpu": 4}),
    "lognormal": (lambda chance, _: (10 * chance.lognormvariate(0.0, 0.5), S.COMPLETE), {"cpu": 4}),
    "pruned": (pruned, {"gpu_large": 1, "cpu": 2}),
    "rare": (lambda chance, _: (100.0 if chance.random() < 0.2 else 1.0, S.COMPLETE), {"cpu": 4}),
}


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS)
def test_the_time_left_is_told_from_a_tenth_on_and_is_right_on_average(law: str) -> None:
    """The rate is that of 40 trials. Where a few rare ones take most of the time, it varies by a third. Where lengths
    differ much, the last slots end late, which is not told.
    """
    sums: dict[int, list[tuple[float, float]]] = {}
    for seed in range(3):
        for part, left, real in told(*LAWS[law], trials=200, seed=seed):
            if part >= 0.1:
                assert left is not None
                sums.setdefault(int(part * 5), []).append((left, real))
    for fifth, each in sums.items():
        most = 2.0 if fifth == 4 else 1.33
        assert 1 / most < fsum(left for left, _ in each) / fsum(real for _, real in each) < most, fifth


def test_the_time_left_of_a_short_study_is_told_from_a_tenth_on() -> None:
    for trials in (10, 40):
        for part, left, _ in told(*LAWS["pruned"], trials=trials, seed=0):
            assert part < 0.1 or left is not None


def test_the_time_left_is_not_told_while_nothing_runs() -> None:
    """As during an outage of the broker."""
    study, scheduler, _ = searched(turns=0, trials=1000)
    clock: Any = study.clock
    pace = Pace(study, lambda: scheduler.limits)
    for _ in range(ENOUGH_ENDED):
        end(study)
        clock.sleep(1.0)
        pace.note()
    assert pace.seconds_left() is not None
    clock.sleep(10.0)
    assert pace.seconds_left() is None


def test_the_pace_is_that_of_the_last_minutes_and_begins_with_the_first_trial() -> None:
    study, scheduler, _ = searched(turns=0, trials=1000)
    clock: Any = study.clock
    pace = Pace(study, lambda: scheduler.limits)
    clock.sleep(300.0)
    pace.note()
    assert (pace.ended, pace.a_minute) == (0, 0.0)
    for _ in range(20):
        end(study)
        clock.sleep(1.0)
        pace.note()
    assert pace.a_minute == pytest.approx(60.0)
    for _ in range(int(PACE_SECONDS)):
        end(study)
        clock.sleep(2.0)
        pace.note()
    assert pace.a_minute == pytest.approx(30.0, rel=0.02)


def end(study: StudyState) -> None:
    attempt = study.send(study.add("model=net", {}, seed=1), "gpu")
    outcome = Outcome(state=S.COMPLETE, loss=0.5, seconds=1.0)
    study.tell(Result(number=attempt.number, attempt=1, outcome=outcome, at=study.clock.wall()))


def test_a_resumed_study_is_not_said_to_have_no_trial_that_has_ended() -> None:
    study, scheduler, _ = searched(trials=10, turns=8)
    assert study.counted
    scheduler.stopping = False
    pace = Pace(study, lambda: scheduler.limits)
    assert pace_line(scheduler, pace, study.clock.now()) == "no trial has ended yet in this run"
    scheduler.limits = Limits(seconds=90.0, trials=1000)
    assert pace_line(scheduler, pace, study.clock.now()).endswith("in this run, at most 1 min 30 s left")


# Workers


def running(*workers: str) -> tuple[StudyState, Scheduler]:
    """A study whose trials run on these workers, one each, in class gpu."""
    study, scheduler, _ = searched(turns=0)
    for worker in workers:
        attempt = study.send(study.add("model=net", {}, seed=1), "gpu")
        study.tell(Started(number=attempt.number, attempt=1, host="h", at=study.clock.wall(), worker=worker))
    return study, scheduler


def fleet(**workers: Worker) -> Fleet:
    return Fleet(workers=lambda: workers, module="m")


def worker(**facts: Any) -> Worker:
    return Worker(**{"compute_class": "gpu", "slots": 2, "imports": ["m"], **facts})


def state(scheduler: Scheduler, known: Fleet) -> str:
    screen, text = console()
    screen.print(class_table(scheduler, known))
    [row] = [line for line in text.getvalue().splitlines() if "gpu" in line]
    return row.split("│")[-2].strip()


def test_the_state_of_a_class_without_a_worker_for_new_trials_says_why() -> None:
    study, scheduler = running("a")
    scheduler.classes = []
    for known, words in (
        (fleet(), "silent"),
        (fleet(a=worker(draining=True, quarantined=True)), "draining"),
        (fleet(a=worker(quarantined=True)), "quarantined"),
    ):
        assert state(scheduler, known) == words
    study.tell(Lost(number=0, attempt=1, reason="r"))
    for known, words, line in (
        (fleet(), "no worker", "no live worker"),
        (fleet(b=worker(imports=["x"])), "no worker has m", "no live worker has m"),
        (fleet(b=worker(protocol=1)), "no able worker", "no live worker can run this study"),
        (fleet(a=worker(draining=True)), "draining", "all live workers are draining"),
    ):
        assert state(scheduler, known) == words
        assert f"; {line}" in progress_line(scheduler, known)


def test_slots_that_other_studies_have_are_not_idle_and_it_is_said_whose_they_are() -> None:
    study, scheduler, _ = searched(turns=1)
    scheduler.classes = [ComputeClass(name="gpu", slots=8)]
    ours = Share(name="s", slots=1)
    theirs = {f"k{n}": Share(name=f"their {n}", slots=n) for n in (1, 2, 3)}
    assert state(scheduler, fleet(a=worker(studies={study.record.key: ours}))) in ("idle", "busy")
    for attempt in list(study.attempts):
        study.tell(Lost(number=attempt.number, attempt=1, reason="r"))
    shown = state(scheduler, fleet(a=worker(studies=theirs), b=worker(studies={"k3": Share(name="their 3", slots=2)})))
    assert shown == "study their 3 has 5 slots; study their 2 has 2 slots; 1 more"
    assert "(study their 1 has 1 slot)" in progress_line(scheduler, fleet(a=worker(studies={"k1": theirs["k1"]})))
    scheduler.classes = [ComputeClass(name="gpu", slots=6)]
    shown = state(scheduler, fleet(a=worker(studies=theirs), b=worker(studies={"k3": Share(name="their 3", slots=2)})))
    assert shown == "study their 3 has 5 slots; study their 2 has 1 slot; 1 more", "no more than there are free ones"
    some = fleet(a=worker(draining=True), b=worker())
    assert state(scheduler, some) == "idle; 1 worker is draining"


def test_a_class_without_a_worker_says_how_many_slots_of_it_are_wanted() -> None:
    study, scheduler, _ = searched(turns=1)
    scheduler.demand = Demand({}, study, scheduler.cost_model, scheduler.proposals)
    scheduler.demand.wanted = {"[/cpu]": 2, "cloud": 3}
    rows = {row.name: row.words for row in class_rows(scheduler, fleet())}
    assert rows["cloud"] == "no worker; 3 slots are wanted"
    assert "wanted" not in rows["[/cpu]"]
    assert "cloud: no worker; 3 slots are wanted" in progress_line(scheduler, fleet())


def test_the_classes_keep_their_order_whichever_is_fastest() -> None:
    _, scheduler, _ = searched(turns=1)
    order = ["gpu_large", "gpu_small", "cpu", "attic", "lab"]
    for names in (order, order[::-1]):
        scheduler.classes = [ComputeClass(name=name, slots=1) for name in names]
        assert [row.name for row in class_rows(scheduler, fleet()) if row.is_live] == order


def test_the_state_of_what_is_wrong_has_a_colour() -> None:
    _, scheduler = running("a")
    scheduler.classes = []
    [row, *_] = class_rows(scheduler, fleet(a=worker(draining=True)))
    assert (row.state, row.style) == ("draining", "yellow")
    assert Style.parse(class_rows(scheduler, fleet())[0].style)


# Trials


def test_running_trials_are_counted_beyond_the_first_and_tell_their_step_loss_and_worker() -> None:
    study, _ = running(*"abcdef")
    study.tell(Report(number=1, attempt=1, step=7, loss=0.123456789, at=1e9))
    study.tell(Report(number=1, attempt=2, step=9, loss=0.1, at=1e9))
    lines = running_lines(study, fleet(a=worker(), b=worker(draining=True)))
    assert len(lines) == 5
    assert lines[0] == "trial 0 runs on h (gpu), 0 s: model=net"
    assert lines[1] == "trial 1 runs on h (gpu), 0 s, step 7, loss 0.12346, its worker is draining: model=net"
    assert "its worker is silent" in lines[2]
    assert lines[4] == "and 2 more run"


def test_a_gang_tells_the_slots_that_it_has_and_wants_and_that_it_waits_for_no_backup() -> None:
    study, _ = running("a", "b", "c")
    gangs = {
        (0, 1): Seated(slots=3, taken=1, backups=1, backups_taken=0, waits=True),
        (1, 1): Seated(slots=3, taken=3, backups=2, backups_taken=1, waits=False),
        (2, 1): Seated(slots=2, taken=2, backups=1, backups_taken=0, waits=True),
    }
    known = Fleet(gangs=lambda: gangs)
    assert [line.partition(", 0 s, ")[2] for line in running_lines(study, known)] == [
        "waits for its gang, which has 1 of 3 slots: model=net",
        "has 3 of 3 slots and 1 of 2 backups: model=net",
        "waits for its gang, which has 2 of 2 slots and is starting: model=net",
    ]
    assert waiting_gangs(study, known) == [
        "trial 0 waits for its gang, which has 1 of 3 slots",
        "trial 2 waits for its gang, which has 2 of 2 slots and is starting",
    ]


def test_a_trial_that_waits_for_free_slots_tells_how_many_it_wants() -> None:
    study, scheduler, _ = searched(turns=0)
    study.send(study.add("model=net", {}, seed=1), "[/cpu]")
    scheduler.enqueue([study.add("model=net", {}, seed=1, slots=2)])
    scheduler.turn()
    assert waiting_lines(scheduler) == ["trial 1 waits for 2 slots of [/cpu]; 1 free"]
    screen, text = console()
    screen.print(LiveView(scheduler, two_models(), screen).picture())
    assert "trial 1 waits for 2 slots of [/cpu]" in text.getvalue()


def test_lost_trials_are_named_until_they_run_again() -> None:
    study, scheduler = running("a", "a", "b")
    screen, text = console()
    view = LiveView(scheduler, two_models(), screen)
    for number in (0, 1):
        study.tell(Lost(number=number, attempt=1, reason="its worker fell silent"))
    lost = view._lost
    assert [*lost.news()] == ["Warning: trials 0, 1 were lost on worker a: its worker fell silent"]
    screen.print(view.picture())
    assert "trials 0, 1 were lost; waiting for a free slot to run again" in text.getvalue()
    again = study.send(study.trial(0), "cpu")
    assert [*lost.news()] == [], "it is not running yet"
    study.tell(Started(number=0, attempt=again.attempt, host="h2", at=1e9, worker="c"))
    assert [*lost.news()] == ["trial 0, lost before, is running again on h2 (cpu)"]
    assert lost.lines == ["trial 1 was lost; waiting for a free slot to run again"]
    study.tell(Lost(number=0, attempt=again.attempt, reason="its worker was preempted", claimed=False, given_back=True))
    assert [*lost.news()] == ["trial 0 was given back by worker c: its worker was preempted"]
    assert lost.lines[1] == "trial 0 was given back; waiting for a free slot to run again"
