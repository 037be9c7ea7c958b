"""Shutdown of a worker. After the first signal its running trials finish; after the second one they are given back.

A worker that is preempted gives its trials back after a grace period, in which they may write checkpoints. A worker may
also end without a signal, after a set time or when it has been idle for long (`stay`). An embedded worker ends at once
at any signal, because its broker ends with it.

Celery's own handlers also let running tasks finish. But at a second signal they end tasks in a way that Celery's thread
pool does not support, and they cannot end the slots' processes or give claimed attempts back.
"""

from __future__ import annotations

import atexit
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from celery import bootsteps
from celery.apps.worker import _reload_current_worker
from celery.worker import state

from shadho_celery.core.system import NoThread, start_thread
from shadho_celery.core.units import duration
from shadho_celery.fleet import urls
from shadho_celery.node.logs import tell
from shadho_celery.node.slots import Slots
from shadho_celery.node.stay import MAX_TOO_LONG, Stay

#: seconds after the second signal within which trials must be given back; then the process ends even if Redis or the
#: broker has not answered, and the leases run out
END_SECONDS = 10.0

#: name of the threads that carry out a signal
THREAD = "shadho-shutdown"

#: seconds between two checks whether a worker should end by itself
WATCH_SECONDS = 0.5

#: seconds for which an ending worker waits until its reason is logged
REASON_SECONDS = 1.0


def await_reason() -> None:
    """Wait until the log says why this worker ends. An idle worker could otherwise end before that."""
    for thread in [each for each in threading.enumerate() if each.name == THREAD]:
        thread.join(REASON_SECONDS)


class Shutdown(bootsteps.StartStopStep):  # type: ignore[misc]
    """Handles SIGINT, SIGTERM, SIGQUIT and the signals of `Stay`, from before the worker connects until its process
    ends.

    The worker ends at once at SIGQUIT, at SIGINT if it is already stopping, and if it is embedded at any signal.
    Further signals have no effect.
    """

    def start(self, worker: Any) -> None:
        self._worker = worker
        self._slots: Slots = worker.app.shadho_slots
        self._is_stopping = self._is_preempted = self._is_ending = False
        self._is_embedded = os.environ.get(urls.EMBEDDED) == "1"
        self._stay = Stay.configured()
        for number in {signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, *self._stay.signals}:
            signal.signal(number, self._handle)
        self._slots.heartbeat.on_end = lambda by: self._leave(f"stopping after the running trials, as {by} asks")
        #: monotonic times: at which the worker preempts itself, to end after `Stay.seconds`; and since which it has had
        #: no trial
        self._ends_at = time.monotonic() + (self._stay.seconds or math.inf) - self._stay.grace
        self._idle_since = time.monotonic()
        if self._stay.seconds or self._stay.idle:
            self._slots.leaves_at = self._ends_at
            start_thread(threading.Thread(target=self._watch, name="shadho-stay", daemon=True))

    def _handle(self, number: int, frame: object) -> None:
        is_second = number == signal.SIGQUIT or (number == signal.SIGINT and self._is_stopping) or self._is_embedded
        if is_second and not self._is_ending:
            self._is_stopping = self._is_ending = True
            self._stop(128 + number, self._end)
        elif number in self._stay.signals:
            self._preempt(f"preempted by {signal.Signals(number).name}")
        elif not self._is_stopping:
            self._leave("stopping after the running trials; press Ctrl-C again to give them back and stop at once")

    def _watch(self) -> None:
        while not (self._is_preempted or self._is_ending):
            self.look(time.monotonic())
            time.sleep(WATCH_SECONDS)

    def look(self, now: float) -> None:
        """End the worker if its time is over, if it has been idle for too long, or if further trials would not end in
        time.
        """
        # A short trial may start and end between two calls.
        self._idle_since = now if len(self._slots.leases) else max(self._idle_since, self._slots.ran_at)
        if now >= self._ends_at:
            self._preempt(f"the {duration(self._stay.seconds or 0.0)} of --for are over")
        elif self._is_stopping:
            return
        elif self._stay.idle is not None and now - self._idle_since >= self._stay.idle:
            self._leave(f"stopping, because there was no trial for {duration(self._stay.idle)}")
        elif len(self._slots.too_long) >= MAX_TOO_LONG:
            left = duration(max(0.0, self._slots.left))
            self._leave(f"stopping after the running trials, because no other is predicted to end within {left}")

    def _leave(self, why: str) -> None:
        """Take no more trials, and end when the running trials have finished. `why` is logged."""

        def work() -> None:
            tell(why)
            self._slots.heartbeat.drain()

        if self._is_stopping:
            return
        self._is_stopping = True
        self._stop(0, work)

    def _preempt(self, why: str) -> None:
        """Take no more trials, tell the running ones, and after the grace period give back those that still run."""

        def work() -> None:
            count, grace = len(self._slots.leases), duration(self._stay.grace)
            tell(f"{why}; running trials: {count}" + (f", which have {grace} to write a checkpoint" if count else ""))
            limit = threading.Timer(self._stay.grace, self._end_late)
            limit.daemon = True
            try:
                start_thread(limit)
            except NoThread:
                self._slots.preempt()
                time.sleep(self._stay.grace)
                self._end_late()
            else:
                self._slots.preempt()

        if not self._is_preempted:
            self._is_stopping = self._is_preempted = True
            self._stop(0, work)

    def _stop(self, code: int, work: Callable[[], None]) -> None:
        """Make Celery stop with exit code `code` as soon as no task runs. Call `work` in a new thread.

        A new thread is needed because the signal may have interrupted the main thread while it held a lock that `work`
        needs.
        """
        # Celery would restart a worker that has received SIGHUP when the worker ends.
        atexit.unregister(_reload_current_worker)
        state.should_stop = self._worker.exitcode = code
        try:
            start_thread(threading.Thread(target=work, name=THREAD, daemon=True))
        except NoThread:
            # Let the beat's thread call it. While Python exits, that thread does not run, but nothing is left to do.
            self._slots.beat.do_soon(work)

    def _end_late(self) -> None:
        if not self._is_ending:
            self._is_ending = True
            self._end()

    def _end(self) -> None:
        limit = threading.Timer(END_SECONDS, os._exit, (self._worker.exitcode,))
        limit.daemon = True
        # If no thread can start, there is no limit: the end only takes longer if Redis or the broker does not answer.
        with suppress(NoThread):
            start_thread(limit)
        running = len(self._slots.leases)
        tell("stopping at once" + (f"; running trials to give back: {running}" if running else ""))
        self._slots.close()
        if self._is_embedded:
            # Celery would take up to a second to notice, and return messages to a broker that ends.
            os._exit(self._worker.exitcode)
