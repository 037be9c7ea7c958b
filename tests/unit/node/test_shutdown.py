"""The signals that end a worker."""

from __future__ import annotations

import atexit
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from celery.apps.worker import _reload_current_worker
from celery.worker import state

from shadho_celery.errors import UsageError
from shadho_celery.fleet import urls
from shadho_celery.node import shutdown
from shadho_celery.node.shutdown import Shutdown
from shadho_celery.node.stay import MAX_TOO_LONG, Stay

INT, TERM, QUIT = signal.SIGINT, signal.SIGTERM, signal.SIGQUIT


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A worker whose signals are handled; nothing ends this process."""
    before = {number: signal.getsignal(number) for number in (INT, TERM, QUIT)}
    monkeypatch.setattr(state, "should_stop", None)
    monkeypatch.setattr(threading, "Timer", MagicMock())
    worker = SimpleNamespace(app=SimpleNamespace(shadho_slots=MagicMock()), steps=[], exitcode=None)
    Shutdown(worker).start(worker)
    yield worker
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("signals", "drained", "closed", "code"),
    [
        ([INT], 1, 0, 0),
        ([TERM], 1, 0, 0),
        ([TERM, TERM], 1, 0, 0),
        ([INT, INT], 1, 1, 130),
        ([INT, INT, INT, QUIT, TERM], 1, 1, 130),
        ([TERM, INT], 1, 1, 130),
        ([TERM, QUIT, INT], 1, 1, 131),
        ([QUIT, TERM], 0, 1, 131),
    ],
)
def test_the_first_signal_drains_and_the_second_but_another_sigterm_gives_back(
    worker: SimpleNamespace, signals: list[signal.Signals], drained: int, closed: int, code: int
) -> None:
    for number in signals:
        signal.raise_signal(number)
    for thread in threading.enumerate():
        if thread.name == shutdown.THREAD:
            thread.join()
    slots = worker.app.shadho_slots
    assert (slots.heartbeat.drain.call_count, slots.close.call_count) == (drained, closed)
    assert state.should_stop == worker.exitcode == code


def test_the_end_waits_until_the_reason_is_logged() -> None:
    logged = threading.Event()
    threading.Timer(0.05, logged.set).start()
    threading.Thread(target=logged.wait, name=shutdown.THREAD, daemon=True).start()
    shutdown.await_reason()
    assert logged.is_set()


def test_a_worker_that_is_asked_to_end_finishes_its_trials_first(worker: SimpleNamespace) -> None:
    heartbeat = worker.app.shadho_slots.heartbeat
    heartbeat.on_end("me@here")
    heartbeat.on_end("me@here")
    await_threads()
    assert (heartbeat.drain.call_count, worker.app.shadho_slots.close.call_count) == (1, 0)
    assert state.should_stop == worker.exitcode == 0


def test_where_the_system_refuses_threads_the_work_of_a_signal_is_left_to_the_thread_of_the_beat(
    worker: SimpleNamespace, refuse_threads: Callable[[str], None]
) -> None:
    refuse_threads("work")
    signal.raise_signal(TERM)
    slots = worker.app.shadho_slots
    slots.heartbeat.drain.assert_not_called()
    [work] = slots.beat.do_soon.call_args.args
    work()
    slots.heartbeat.drain.assert_called_once()


@pytest.mark.parametrize("number", [TERM, QUIT])
def test_a_worker_ends_though_the_system_refuses_the_limit_of_its_end(
    worker: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    started(monkeypatch, worker, GRACE="0.01s")
    timer = threading.Timer
    assert isinstance(timer, MagicMock)
    timer.return_value.start.side_effect = RuntimeError("can't start new thread")
    signal.raise_signal(number)
    await_threads()
    slots = worker.app.shadho_slots
    assert (slots.preempt.call_count, slots.close.call_count) == (int(number == TERM), 1)


def await_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == shutdown.THREAD:
            thread.join()


def started(monkeypatch: pytest.MonkeyPatch, worker: SimpleNamespace, **variables: str) -> Shutdown:
    """A step with this environment that does not watch by itself."""
    for name, value in variables.items():
        monkeypatch.setenv(f"SHADHO_{name}", value)
    monkeypatch.setattr(Shutdown, "_watch", lambda _: None)
    worker.app.shadho_slots.too_long, worker.app.shadho_slots.left = set(), 60.0
    worker.app.shadho_slots.ran_at = -math.inf
    step = Shutdown(worker)
    step.start(worker)
    return step


def test_a_worker_with_a_grace_is_preempted_by_sigterm_once_and_ends_after_it(
    worker: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it stops already; Ctrl-C then ends it at once."""
    step = started(monkeypatch, worker, GRACE="20s")
    for number in (INT, TERM, TERM):
        signal.raise_signal(number)
    await_threads()
    slots = worker.app.shadho_slots
    assert (slots.heartbeat.drain.call_count, slots.preempt.call_count, slots.close.call_count) == (1, 1, 0)
    timer = threading.Timer
    assert isinstance(timer, MagicMock)
    seconds, late = timer.call_args.args
    assert (seconds, worker.exitcode) == (20.0, 0)
    late()
    step._end_late()
    assert slots.close.call_count == 1


def test_a_worker_is_preempted_when_its_time_is_up_less_the_grace(
    worker: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = started(monkeypatch, worker, FOR="1h", GRACE="2m")
    slots = worker.app.shadho_slots
    assert slots.leaves_at == step._ends_at
    step.look(step._ends_at - 1.0)
    assert state.should_stop is None
    step.look(step._ends_at)
    await_threads()
    assert slots.preempt.call_count == 1


def test_a_worker_leaves_when_it_is_idle_or_when_no_trial_would_end_in_time(
    worker: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = started(monkeypatch, worker, IDLE_EXIT="10m")
    slots, began = worker.app.shadho_slots, float(math.ceil(step._idle_since))  # sums of whole numbers are exact
    slots.leases.__len__.return_value = 1
    step.look(began + 500.0)
    slots.leases.__len__.return_value = 0
    step.look(began + 1000.0)
    # A short trial has run since.
    slots.ran_at = began + 1050.0
    step.look(began + 1100.0)
    step.look(began + 1649.0)
    assert state.should_stop is None
    step.look(began + 1650.0)
    await_threads()
    assert (slots.heartbeat.drain.call_count, slots.preempt.call_count) == (1, 0)
    step = started(monkeypatch, worker, FOR="1h")
    slots.too_long = {("study", number) for number in range(MAX_TOO_LONG)}
    step.look(began)
    await_threads()
    assert (slots.heartbeat.drain.call_count, slots.preempt.call_count) == (2, 0)


def test_a_stay_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Stay.configured() == Stay()
    monkeypatch.setenv("SHADHO_FOR", "60")
    # The trials of a worker without a grace finish at SIGTERM, also if its time is limited.
    assert Stay.configured() == Stay(seconds=60.0, grace=15.0)
    monkeypatch.setenv("SHADHO_PREEMPT_SIGNAL", "SIGUSR1")
    assert Stay.configured().signals == {TERM, signal.SIGUSR1}
    for name, value in {"PREEMPT_SIGNAL": "KILL", "GRACE": "60", "IDLE_EXIT": "soon"}.items():
        with monkeypatch.context() as changed:
            changed.setenv(f"SHADHO_{name}", value)
            with pytest.raises(UsageError, match=f"SHADHO_{name}"):
                Stay.configured()


@pytest.mark.parametrize("number", [INT, TERM, QUIT])
def test_an_embedded_worker_closes_its_slots_and_ends_at_the_first_signal(
    worker: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """It does not wait for Celery, which would give messages back to a broker that ends too."""
    slots = worker.app.shadho_slots
    end = MagicMock(side_effect=lambda _: slots.close.assert_called_once_with())
    monkeypatch.setenv(urls.EMBEDDED, "1")
    monkeypatch.setattr(os, "_exit", end)
    Shutdown(worker).start(worker)
    for _ in range(2):
        signal.raise_signal(number)
    for thread in threading.enumerate():
        if thread.name == shutdown.THREAD:
            thread.join()
    end.assert_called_once_with(128 + number)
    slots.heartbeat.drain.assert_not_called()


def test_a_worker_that_is_told_to_end_does_not_restart_as_it_was_told_before(
    worker: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Celery registers the restart that a SIGHUP asks for, to be done at the process's end."""
    unregister = MagicMock()
    monkeypatch.setattr(atexit, "unregister", unregister)
    signal.raise_signal(TERM)
    unregister.assert_called_with(_reload_current_worker)
