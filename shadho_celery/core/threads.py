"""Threads: their start, and the number of threads of linear algebra.

The system may refuse to start a thread as it may refuse to start a process, because they share a limit.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from threadpoolctl import ThreadpoolController


class NoThread(OSError):
    """The system refuses another thread."""

    def __init__(self) -> None:
        super().__init__(
            "the system refuses another thread; raise the limit of processes and threads (ulimit -u, or that of the "
            "container)"
        )


def start_thread(thread: threading.Thread) -> None:
    """Start a thread. Raises NoThread instead of Python's RuntimeError if the system refuses it.

    So callers can handle the same error, OSError, for processes and threads.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise NoThread from error


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Limit linear algebra to one thread, in a with statement or as a decorator.

    The matrices of a scheduler are small, and its machine often runs trials, too. Several threads would wait for each
    other, and would take cores from the trials.
    """
    with _libraries().limit(limits=1, user_api="blas"):
        yield


@cache
def _libraries() -> ThreadpoolController:
    # The controller knows only libraries that are already loaded, so numpy's and scipy's are loaded first.
    import numpy as np  # noqa: F401
    import scipy.linalg  # noqa: F401

    return ThreadpoolController()
