"""What the live view says of the pace, of workers and of lost trials holds."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from rich.style import Style
from services.played import S, console, searched, two_models

from shadho_celery.cli.live import (
    Fleet,
    LiveView,
    class_rows,
    class_table,
    pace_line,
    progress_line,
    running_lines,
    waiting_gangs,
    waiting_lines,
)
from shadho_celery.cli.pace import LEAST_ENDED, PACE_SECONDS, Pace
from shadho_celery.core.clock import ManualClock
from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.settings import StudySettings
from shadho_celery.core.trial import Attempt, Lost, Outcome, Report, Result, Started
from shadho_celery.fleet.gangs import Seated
from shadho_celery.scheduler.demand import Demand
from shadho_celery.scheduler.plan import Plan, make_scheduler
from shadho_celery.scheduler.scheduler import Scheduler
from shadho_celery.simulation.executor import SimulatedExecutor
from shadho_celery.store.sql import SqlStore
from shadho_celery.study.limits import Limits
from shadho_celery.study.open import open_study
from shadho_celery.study.state import StudyState
from shadho_celery.transport.registry import Share, Worker

# The time that is left


def told(
    seconds: Callable[[random.Random, int], float], trials: int, slots: int = 4
) -> tuple[list[float | None], float]:
    """Return by turn the ratio of the time left that is told to the real one; and the part of turns that tell it."""
    chance, drawn, clock = random.Random(0), dict[int, float](), ManualClock(1000.0)

    def play(attempt: Attempt, _: str) -> Outcome:
        drawn.setdefault(attempt.number, seconds(chance, attempt.number))
        return Outcome(state=S.COMPLETE, loss=1.0, seconds=drawn[attempt.number])

    space = two_models()
    study = open_study(SqlStore("sqlite://"), space.describe(), name="s", seed=1, clock=clock)
    executor = SimulatedExecutor({"cpu": slots}, play, clock)
    scheduler = make_scheduler(Plan.of(space, StudySettings(sampler="random"), Limits(trials=trials)), study, executor)
    pace = Pace(study, lambda: scheduler.limits)
    # Workers take their time to start.
    clock.sleep(30.0)
    said: list[tuple[float, float | None]] = []
    while not scheduler.done:
        scheduler.turn()
        pace.note()
        said.append((clock.now(), pace.seconds_left()))
    ratios = [None if left is None else left / max(1.0, clock.now() - at) for at, left in said[:-4]]
    return ratios, sum(each is not None for each in ratios) / len(ratios)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("law", "part"),
    [
        (lambda chance, _: 10.0, 0.6),
        (lambda chance, _: chance.expovariate(0.1), 0.7),
        (lambda chance, _: 10 * chance.lognormvariate(0.0, 0.5), 0.8),
    ],
    ids=["equal", "exponential", "lognormal"],
)
def test_the_time_left_is_right_within_a_factor_of_two(law: Callable[[random.Random, int], float], part: float) -> None:
    for trials, least in ((60, 0.05), (300, part)):
        ratios, known = told(law, trials)
        found = [each for each in ratios if each is not None]
        assert known > least
        assert sum(0.5 <= each <= 2.0 for each in found) >= 0.9 * len(found)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 4, 16])
def test_the_time_left_is_not_told_where_a_fifth_of_the_trials_take_a_hundred_times_longer(slots: int) -> None:
    ratios, _ = told(lambda chance, _: 100.0 if chance.random() < 0.2 else 1.0, 200, slots)
    assert sum(each is not None and not 0.5 <= each <= 2.0 for each in ratios) <= 0.01 * len(ratios)


def test_the_time_left_is_not_told_while_nothing_runs() -> None:
    """As during an outage of the broker."""
    study, scheduler, _ = searched(turns=0, trials=1000)
    clock: Any = study.clock
    pace = Pace(study, lambda: scheduler.limits)
    for _ in range(LEAST_ENDED):
        end(study)
        clock.sleep(1.0)
        pace.note()
    assert pace.seconds_left() is not None
    clock.sleep(10.0)
    assert pace.seconds_left() is None


def test_the_time_left_is_not_told_while_trials_run_that_take_far_longer_than_those_before() -> None:
    """Quick trials end first, so that they alone are seen at the start."""
    ratios, known = told(lambda _, number: 1.0 if number % 4 else 60.0, 20)
    assert known < 0.1
    ratios, _ = told(lambda _, number: 1.0 if number < 19 else 60.0, 20)
    assert ratios[-1] is None, "the last trial runs for longer than any before"


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
    assert LEAST_ENDED > 1


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
