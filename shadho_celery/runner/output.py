"""Output of a slot's process and all its children: read from one pipe, and written to the log of each trial.

The process writes a boundary into the pipe when a trial starts and when it has ended (`protocol.boundary`). The output
between two boundaries belongs to that trial, whenever it is read. A trial that prints faster than its output is read
waits for room in the pipe; other trials do not wait.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from shadho_celery.core.clock import SystemClock
from shadho_celery.runner.protocol import NO_ORDER, boundary
from shadho_celery.runner.trial_log import TrialLog

log = logging.getLogger(__name__)

#: bytes read at a time: as many as a pipe holds
READ = 1 << 16

#: seconds to wait after each read, so that output accumulates: minimum, multiple of the work before, and maximum
REST_SECONDS, REST_FACTOR, MAX_REST_SECONDS = 0.002, 4.0, 0.1

#: seconds to wait for output that is on its way
LAST_SECONDS = 2.0

#: number of ended trials whose last lines are kept for the worker
KEPT = 256


class Output:
    """Reads one process's output in its own thread. The methods may be called from any thread."""

    def __init__(self, mark: str, complain: Callable[[str], None]) -> None:
        """`mark` makes the boundaries different from anything that a trial prints.

        `complain` is called with the reason why a log is incomplete. The writing end of the pipe is `end`; close it
        once the process has it.
        """
        reading, end = os.pipe()
        self._reading, self.end = os.fdopen(reading, "rb", buffering=0), os.fdopen(end, "wb", buffering=0)
        self._complain = complain
        self._clock = SystemClock()
        prefix = re.escape(boundary(mark, NO_ORDER).partition(b" ")[0])
        self._boundary = re.compile(prefix + rb" (\d+)\0")
        self._longest = len(boundary(mark, 10**18))
        #: bytes that were read and may be the beginning of a boundary
        self._held = b""
        #: paths of the logs of orders that have not ended
        self._paths: dict[int, str] = {}
        #: log of the running order; None while it has printed nothing
        self._log: TrialLog | None = None
        #: running order; last orders that have started and ended; and last lines of those that have printed
        self._current = self._begun = self._ended = NO_ORDER
        self._last_lines: deque[tuple[int, str]] = deque(maxlen=KEPT)
        self._is_over = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, name="shadho-output", daemon=True)
        self._thread.start()

    def expect(self, order: int, path: str) -> None:
        """Record the log of an order. Call this before the order is sent."""
        with self._changed:
            self._paths[order] = path

    def last_lines(self, order: int) -> str:
        """Return the last lines that a trial has printed, or "". If the process died before it started, return the
        process's own.

        Waits for output that is on its way.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._ended >= order, LAST_SECONDS)
            found = dict(self._last_lines)
            return found.get(order, "" if self._begun >= order else found.get(NO_ORDER, ""))

    def join(self) -> None:
        """Wait until all output has been read. Call this after the process and its children have ended."""
        self._thread.join(LAST_SECONDS)

    def _read(self) -> None:
        with suppress(OSError):
            while part := self._reading.read(READ):
                began = time.monotonic()
                try:
                    self._divide(part)
                except Exception:
                    # If the pipe were not read, it would soon be full, and every trial of the slot would wait for it.
                    log.exception("output of a trial was lost; this is a bug")
                # At most a fifth of the worker's time for a trial that prints without end.
                rest = REST_FACTOR * (time.monotonic() - began)
                time.sleep(min(MAX_REST_SECONDS, max(REST_SECONDS, rest)))
        self._reading.close()
        self._write(self._held)
        self._turn(NO_ORDER)
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _divide(self, part: bytes) -> None:
        """Divide the output among the trials."""
        *before, rest = self._boundary.split(self._held + part)
        for output, order in zip(before[::2], before[1::2], strict=True):
            self._write(output)
            self._turn(int(order))
        held = rest.find(b"\0", max(0, len(rest) - self._longest))
        self._held = rest[held:] if held >= 0 else b""
        self._write(rest[:held] if held >= 0 else rest)
        with self._changed:
            # Those that have ended, and those that were recalled before they started.
            while self._paths and (first := next(iter(self._paths))) < self._begun:
                del self._paths[first]
            self._changed.notify_all()

    def _write(self, output: bytes) -> None:
        if output:
            if self._log is None:
                path = self._paths.get(self._current)
                self._log = TrialLog(Path(path) if path else None, self._clock)
            self._log.write(output)

    def _turn(self, order: int) -> None:
        """End the log of the previous order and begin another one."""
        if self._log is not None:
            self._log.close()
            if self._log.trouble:
                self._complain(f"logs of trials are incomplete: {self._log.trouble}")
            with self._changed:
                self._last_lines.append((self._current, self._log.last_lines))
            self._log = None
        # After the last lines, because a waiting worker asks for them.
        self._ended = max(self._ended, self._current)
        self._begun = max(self._begun, order)
        self._current = order
