"""Start and end of the processes of ranks and replicas. They end with their parent, even if the parent is killed."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess

import torch

#: seconds between two checks whether the parent, or a child, has ended
CHECK_SECONDS = 0.1


def begin_child(parent: int, meanwhile: Callable[[], None] = lambda: None, threads: int = 1) -> None:
    """Prepare a new process of a rank or replica: it ends with its parent, and ignores Ctrl-C, which its parent
    handles.

    A thread ends this process once the process `parent` has ended. Until then it calls `meanwhile`. torch uses
    `threads` threads.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A forked process does not have the threads of OpenMP, so create new ones.
    torch.set_num_threads(threads)
    # A fork has only one thread. Objects of the parent such as a torch store wait for their thread when they are
    # garbage collected, which would end this process, so prevent collection.
    gc.freeze()

    def watch() -> None:
        while os.getppid() == parent:
            meanwhile()
            time.sleep(CHECK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def end_children(children: Sequence[BaseProcess], seconds: float) -> None:
    """Wait up to `seconds` for the processes to exit. Then kill the remaining processes."""
    until = time.monotonic() + seconds
    for child in children:
        child.join(max(0.0, until - time.monotonic()))
    for child in children:
        child.kill()
        child.join()


def how_ended(rank: int, code: int) -> str:
    """Return a text that says how a rank has ended. `code` is its exit code, or the negative number of a signal."""
    if code < 0:
        # Most real-time signals have no name.
        name = signal.Signals(-code).name if -code in {*signal.Signals} else str(-code)
        return f"rank {rank} was ended by signal {name}"
    return f"rank {rank} ended with exit code {code}"
