"""Processes that end with their parent, even if it is killed."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable

import torch

#: seconds between two looks whether the parent has ended
CHECK_SECONDS = 0.1


def begin_child(parent: int, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Prepare a new process that computes: it ends with its parent, and leaves the decision about Ctrl-C to it.

    `meanwhile` is that of `end_with_parent`.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The threads of OpenMP do not exist in a forked process.
    torch.set_num_threads(1)
    # Nor do other threads. An object of the parent that waits for its thread when it is collected, such as the store of
    # a failed `launch`, would end this process.
    gc.freeze()
    end_with_parent(parent, meanwhile)


def end_with_parent(parent: int, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Start a thread that ends this process once the process `parent` has ended. Until then it calls `meanwhile`."""

    def watch() -> None:
        while os.getppid() == parent:
            meanwhile()
            time.sleep(CHECK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()
