"""Ctrl-C at any moment of a search leaves a study whole, unlocked, and ready to be resumed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hyperopt import hp

from shadho_celery import Study, load_study, minimize
from shadho_celery.core.trial import TrialState
from shadho_celery.program.interrupts import Interrupts
from shadho_celery.scheduler.scheduler import Scheduler
from shadho_celery.store.sql import SqlStore
from shadho_celery.study.open import open_study
from shadho_celery.study.state import StudyState

S = TrialState
MINE: dict[str, Any] = {"store": "sqlite:///shadho.db", "study": "mine"}
SPACE = {"x": hp.uniform("x", -1, 1)}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def after(which: int, presses: int = 1) -> Callable[..., Callable[..., Any]]:
    """Return a wrapper of functions after whose call number `which` Ctrl-C is pressed."""
    calls = 0

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            found = function(*args, **options)
            for _ in range(presses if calls == which else 0):
                press()
            return found

        return wrapped

    return wrap


def square(values: Any) -> float:
    return float(values["x"] ** 2)


def resumed(total: int) -> None:
    """Resume the study: it is unlocked, and each trial has one result."""
    study = minimize(square, SPACE, trials=total, resume=True, **MINE)
    assert study.counts == {"COMPLETE": total}
    assert [trial.number for trial in study.trials] == [*range(total)]


PLACES = [
    (SqlStore, "write"),
    (StudyState, "commit"),
    (Scheduler, "tell"),
    (Scheduler, "collect"),
    (StudyState, "send"),
]


@pytest.mark.parametrize("sampler", ["random", "tpe"])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place[1])
def test_an_interrupt_within_a_turn_waits_for_its_end(
    place: tuple[type, str], sampler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(*place, after(5)(getattr(*place)))
        with pytest.warns(UserWarning, match="interrupted") as warned:
            study = minimize(square, SPACE, trials=50, seed=0, sampler=sampler, **MINE)
    assert [each.filename for each in warned] == [__file__]
    assert 0 < study.count("COMPLETE") < 50
    assert study.counts == load_study(MINE["store"], "mine").counts
    assert study.running_on is None
    resumed(20)


def test_an_interrupt_ends_the_objective_at_once_and_its_trial_is_run_again() -> None:
    ended: list[float] = []

    def objective(values: Any) -> float:
        if len(ended) == 3:
            press()
        ended.append(values["x"])
        return 0.0

    with pytest.warns(UserWarning, match="interrupted: 3 trials have ended"):
        study = minimize(objective, SPACE, trials=50, seed=0, **MINE)
    assert (len(ended), study.counts) == (3, {"COMPLETE": 3, "WAITING": 1})
    # It is resumed with another objective.
    with pytest.warns(UserWarning, match="trials of other code: 3 of version"):
        resumed(6)


def test_a_search_ends_although_the_objective_catches_the_interrupt() -> None:
    def objective(values: Any) -> float:
        try:
            press()
        except KeyboardInterrupt:
            return 1.0
        return 0.0

    with pytest.warns(UserWarning, match="interrupted: 1 trial has ended"):
        study = minimize(objective, SPACE, trials=50, seed=0)
    assert [trial.loss for trial in study.trials if trial.state is S.COMPLETE] == [1.0]


def test_an_interrupt_before_the_objective_begins_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[object] = []
    at_once = Interrupts.at_once

    def pressed(interrupts: Interrupts, objective: Callable[..., Any]) -> Callable[..., Any]:
        def first(values: Any) -> Any:
            press()
            return at_once(interrupts, objective)(values)

        return first

    monkeypatch.setattr(Interrupts, "at_once", pressed)
    with pytest.warns(UserWarning, match="interrupted: 0 trials"):
        minimize(called.append, SPACE, trials=50, seed=0)
    assert called == []


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place[1])
def test_a_second_interrupt_does_not_wait_and_leaves_the_study_unlocked(
    place: tuple[type, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(*place, after(5, presses=2)(getattr(*place)))
        with pytest.raises(KeyboardInterrupt):
            minimize(square, SPACE, trials=50, seed=0, **MINE)
    assert load_study(MINE["store"], "mine").running_on is None
    resumed(20)


def test_an_interrupt_while_a_study_opens_leaves_it_unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("shadho_celery.session.opening.open_study", after(1)(open_study))
        with pytest.raises(KeyboardInterrupt):
            minimize(square, SPACE, trials=50, seed=0, **MINE)
    assert load_study(MINE["store"], "mine").running_on is None
    resumed(3)


def run_by_hand() -> None:
    with Study(SPACE, seed=0, **MINE) as study:
        while True:
            trial = study.ask()
            study.tell(trial, square(trial.values))


@pytest.mark.parametrize("which", [1, 2, 3, 4, 5, 6])
def test_an_interrupt_in_a_loop_of_ones_own_comes_between_its_calls(
    which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(StudyState, "commit", after(which)(StudyState.commit))
        with pytest.raises(KeyboardInterrupt):
            run_by_hand()
    recorded = load_study(MINE["store"], "mine")
    assert recorded.running_on is None
    assert recorded.count("RUNNING", "QUEUED") == 0
    resumed(10)


def test_an_interrupt_while_a_study_closes_leaves_it_unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    study = Study(SPACE, seed=0, **MINE)
    study.ask()
    with monkeypatch.context() as patched:
        patched.setattr(StudyState, "commit", after(1, presses=2)(StudyState.commit))
        with pytest.raises(KeyboardInterrupt):
            study.close()
    assert load_study(MINE["store"], "mine").running_on is None
    resumed(3)


def test_a_handler_of_the_programs_own_is_called_and_kept() -> None:
    came = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        with Study(SPACE, seed=0) as study:
            study.run(lambda values: press() or 0.0, trials=4)  # type: ignore[func-returns-value]
            assert (study.count("COMPLETE"), came) == (4, [signal.SIGINT] * 4)
            with Interrupts() as interrupts, interrupts:
                press()
                assert len(came) == 4
            assert len(came) == 5
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_search_in_another_thread_leaves_signals_alone() -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(minimize(square, SPACE, trials=3, seed=0)))
    thread.start()
    thread.join()
    assert found[0].count("COMPLETE") == 3
