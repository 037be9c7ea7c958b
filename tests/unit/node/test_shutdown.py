"""The signals that end a worker."""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from celery.apps.worker import _reload_current_worker
from celery.worker import state

from shadho_celery.node import shutdown
from shadho_celery.node.shutdown import Shutdown
from shadho_celery.transport import urls

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
