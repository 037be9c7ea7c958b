"""Ranks on this machine: copies of the process of rank 0 that continue in the same `with` block."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress

import torch

from shadho_celery.errors import UsageError


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
        # Only rank 0 has the writing end, so the others read its end of file when it has ended.
        self._lifeline = os.pipe()

    def start(self, ranks: int) -> int:
        """Fork until there are `ranks` ranks. Return 0, or in a new process its rank."""
        # What is buffered now would be written by each process.
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in range(1, ranks):
            pid = os.fork()
            if not pid:
                self._begin()
                return rank
            self.pids[rank] = pid
        os.close(self._lifeline[0])
        return 0

    def _begin(self) -> None:
        """Prepare a new process: it ends with rank 0, and leaves the decision about Ctrl-C to it."""
        self.pids.clear()
        os.close(self._lifeline[1])
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # The threads of OpenMP do not exist in this process.
        torch.set_num_threads(1)
        threading.Thread(target=self._end_with_parent, name="rank-lifeline", daemon=True).start()

    def _end_with_parent(self) -> None:
        os.read(self._lifeline[0], 1)
        os._exit(1)

    def died(self) -> str | None:
        """Return how one of the processes has ended other than by leaving its block, or None."""
        for rank, pid in [*self.pids.items()]:
            with suppress(ChildProcessError):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if not ended:
                    continue
                del self.pids[rank]
                code = os.waitstatus_to_exitcode(status)
                if code < 0:
                    return f"rank {rank} was ended by signal {signal.Signals(-code).name}"
                if code:
                    return f"rank {rank} ended with exit code {code}"
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
        with suppress(OSError):
            os.close(self._lifeline[1])
