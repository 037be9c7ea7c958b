"""Processes of ranks and replicas: they begin alike, and end with their parent, even if it is killed."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess

import torch

#: seconds between two looks whether the parent, or a child, has ended
CHECK_SECONDS = 0.1


def begin_child(parent: int, meanwhile: Callable[[], None] = lambda: None, threads: int = 1) -> None:
    """Prepare a new process that computes: it ends with its parent, and leaves the decision about Ctrl-C to it.

    A thread ends this process once the process `parent` has ended. Until then it calls `meanwhile`. torch uses
    `threads` threads.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The threads of OpenMP do not exist in a forked process.
    torch.set_num_threads(threads)
    # Nor do other threads. An object of the parent that waits for its thread when it is collected, such as a store of
    # torch, would end this process.
    gc.freeze()

    def watch() -> None:
        while os.getppid() == parent:
            meanwhile()
            time.sleep(CHECK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def end_children(children: Sequence[BaseProcess], seconds: float) -> None:
    """Wait up to `seconds` for the processes to exit. Kill those that are left then."""
    until = time.monotonic() + seconds
    for child in children:
        child.join(max(0.0, until - time.monotonic()))
    for child in children:
        child.kill()
        child.join()


def how_ended(rank: int, code: int) -> str:
    """Return how a rank has ended, by its exit code or the negative number of a signal."""
    if code < 0:
        # Most real-time signals have no name.
        name = signal.Signals(-code).name if -code in {*signal.Signals} else str(-code)
        return f"rank {rank} was ended by signal {name}"
    return f"rank {rank} ended with exit code {code}"
