"""Signals that are meant for a worker, which alone ends trials.

A service manager or a batch system may send them to all processes of the worker.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: SIGXCPU is not among them, because the system sends it at a trial's own limit of CPU seconds
FOR_WORKER = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def shielded() -> Iterator[None]:
    """Block the signals in programs that start within a `with` block, until they call `ignore`.

    A new interpreter takes some time until then.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_WORKER)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore() -> None:
    """Ignore the signals, and unblock them."""
    for number in FOR_WORKER:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FOR_WORKER)


def leave_to_worker() -> None:
    """In a trial's process: let the signals have no effect here, except on what the trial starts.

    `multiprocessing` terminates the processes that a trial forks, maybe before these have reset their handlers. So the
    signals are blocked from the fork until then.
    """
    for number in FOR_WORKER[1:]:
        # SIGINT stays ignored, also in programs that the trial starts: Ctrl-C at a terminal is for the scheduler.
        signal.signal(number, _do_nothing)
    forking = threading.local()

    def block() -> None:
        forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_WORKER)

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, forking.mask)

    def reset() -> None:
        for number in FOR_WORKER:
            if signal.getsignal(number) is _do_nothing:
                signal.signal(number, signal.SIG_DFL)
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=reset)


def _do_nothing(number: int, frame: object) -> None:
    """Do nothing, as the handler of a signal.

    Programs that a trial starts would inherit an ignored signal, and could not be terminated. A handler is reset.
    """
