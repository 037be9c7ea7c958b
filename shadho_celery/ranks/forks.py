"""Ranks on this machine: copies of the process of rank 0 that continue in the same `with` block."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

import torch

from shadho_celery.errors import UsageError
from shadho_celery.ranks.children import begin_child, how_ended


class Forks:
    """Processes that were forked by rank 0. They end with it, even if it is killed."""

    def __init__(self) -> None:
        """Raises UsageError if this process cannot be forked."""
        if not hasattr(os, "fork"):
            raise UsageError("several ranks in one slot need fork, which this system lacks; set STUDY['slots']")
        if torch.cuda.is_initialized():
            raise UsageError(
                "several ranks in one slot are forked, which is not possible after the first use of CUDA; "
                "open the process group before"
            )
        #: process number of each rank from 1
        self.pids: dict[int, int] = {}

    def start(self, ranks: int) -> int:
        """Fork until there are `ranks` ranks. Return 0, or in a new process its rank."""
        # What is buffered now would be written by each process.
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        for rank in range(1, ranks):
            pid = os.fork()
            if not pid:
                self.pids.clear()
                begin_child(parent)
                return rank
            self.pids[rank] = pid
        return 0

    def died(self) -> str | None:
        """Return how one of the processes has ended other than by leaving its block, or None."""
        for rank, pid in [*self.pids.items()]:
            with suppress(ChildProcessError):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if not ended:
                    continue
                del self.pids[rank]
                if code := os.waitstatus_to_exitcode(status):
                    return how_ended(rank, code)
        return None

    def close(self, seconds: float) -> None:
        """Wait up to `seconds` for the processes to exit. Kill those that are left then."""
        until = time.monotonic() + seconds
        while self.pids and time.monotonic() < until:
            self.died()
            time.sleep(0.01)
        for pid in self.pids.values():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        self.pids.clear()
