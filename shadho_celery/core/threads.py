"""Start of threads. The system may refuse them, as it may refuse processes: both count against the same limit."""

from __future__ import annotations

import threading


class NoThread(OSError):
    """The system refuses another thread."""

    def __init__(self) -> None:
        super().__init__(
            "the system refuses another thread; raise the limit of processes and threads (ulimit -u, or that of the "
            "container)"
        )


def start_thread(thread: threading.Thread) -> None:
    """Start a thread. Raises NoThread, where Python raises RuntimeError, if the system refuses it.

    Callers then handle one kind of error, OSError, for processes and threads.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise NoThread from error
