"""Shutdown: the first signal lets a worker's running trials finish, the second one gives them back.

An embedded worker ends at once at any signal, because its broker ends with it.

Celery's own handlers also let running tasks finish. But at a second signal they end tasks in ways that Celery's thread
pool does not support, and they do not know the slots' processes and the claimed attempts.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from celery import bootsteps
from celery.apps.worker import _reload_current_worker
from celery.worker import state

from shadho_celery.node.logs import tell
from shadho_celery.node.slots import Slots
from shadho_celery.transport import urls

#: seconds after the second signal within which trials are given back; if Redis or the broker does not answer, the
#: process then ends in any case, and the leases run out
END_SECONDS = 10.0

#: name of the threads that carry out a signal
THREAD = "shadho-shutdown"


class Shutdown(bootsteps.StartStopStep):  # type: ignore[misc]
    """Handles SIGINT, SIGTERM and SIGQUIT, from before the worker connects until its process ends.

    SIGQUIT, SIGINT after any other signal, and each signal to an embedded worker end the worker at once. Further
    signals change nothing.
    """

    def start(self, worker: Any) -> None:
        self._worker = worker
        self._slots: Slots = worker.app.shadho_slots
        self._is_stopping = self._is_ending = False
        self._is_embedded = os.environ.get(urls.EMBEDDED) == "1"
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: object) -> None:
        # If the worker has had a SIGHUP, Celery would restart it when it ends.
        atexit.unregister(_reload_current_worker)
        is_second = number == signal.SIGQUIT or (number == signal.SIGINT and self._is_stopping) or self._is_embedded
        if is_second and not self._is_ending:
            self._is_stopping = self._is_ending = True
            self._stop(128 + number, self._end)
        elif not self._is_stopping:
            self._is_stopping = True
            self._stop(0, self._drain)

    def _stop(self, code: int, work: Callable[[], None]) -> None:
        """Make Celery stop with an exit code as soon as no task runs. Do the `work` in a new thread.

        The signal has interrupted the main thread anywhere, perhaps while it holds a lock that the work needs.
        """
        state.should_stop = self._worker.exitcode = code
        # Python starts no new threads while it exits, and nothing is left to do then.
        with suppress(RuntimeError):
            threading.Thread(target=work, name=THREAD, daemon=True).start()

    def _drain(self) -> None:
        tell("stopping after the running trials; press Ctrl-C again to give them back and stop at once")
        self._slots.heartbeat.drain()

    def _end(self) -> None:
        limit = threading.Timer(END_SECONDS, os._exit, (self._worker.exitcode,))
        limit.daemon = True
        limit.start()
        running = len(self._slots.leases)
        tell("stopping at once" + (f"; running trials to give back: {running}" if running else ""))
        self._slots.close()
        if self._is_embedded:
            # Celery would take up to a second to notice, and return messages to a broker that ends.
            os._exit(self._worker.exitcode)
