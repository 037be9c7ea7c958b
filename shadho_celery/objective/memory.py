"""Peak memory of one trial, and the detection of its end for lack of memory."""

from __future__ import annotations

import errno
import os
import re
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

_RESET = Path("/proc/self/clear_refs")
_VMSTAT = Path("/proc/vmstat")
_KILLS = re.compile(rb"^oom_kill (\d+)$", re.MULTILINE)

#: out-of-memory messages of CUDA's libraries, torch on the CPU and JAX; then those of joblib, DataLoader and subprocess
#: about a child that the system has killed
_TELLING = re.compile(
    r"out of memory|CU\w+_STATUS_ALLOC_FAILED|can't allocate memory|unable to allocate|cannot allocate memory"
    r"|SIGKILL\(-9\)|killed by signal: Killed|died with <Signals.SIGKILL",
    re.IGNORECASE,
)


class PeakMemory:
    """Peak since its creation: of the memory of torch's tensors on the GPU, else of this process's resident memory.

    Not counted are child processes, and on a GPU CUDA itself and libraries other than torch. Never raises.
    """

    def __init__(self) -> None:
        # If a trial has broken torch or its GPU, the next trial's own error tells it better.
        with suppress(Exception):
            if (cuda := _cuda()) is not None:
                cuda.reset_peak_memory_stats()
        self._was_reset = _reset_resident()

    def read(self) -> int | None:
        """Return the peak in bytes; None if the system tells only that of the process's whole life."""
        with suppress(Exception):
            # Not the reserved memory, which the allocator keeps from one trial to the next. For the first trial on the
            # GPU there was no peak to reset: all of it is its own.
            if (cuda := _cuda()) is not None and (used := int(cuda.max_memory_allocated())):
                return used
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if self._was_reset else None


def _cuda() -> Any:
    """Return torch.cuda if this process uses a GPU with it; torch is never imported for this."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


def _reset_resident() -> bool:
    """Reset the peak to the current resident memory; return whether the system can do so (Linux)."""
    with suppress(OSError):
        # Not `open`: it takes several times as long, of each trial.
        descriptor = os.open(_RESET, os.O_WRONLY)
        try:
            os.write(descriptor, b"5")
        finally:
            os.close(descriptor)
        return True
    return False


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` or one of its causes says that memory ran out, the machine's or the GPU's."""
    cause: BaseException | None = error
    with suppress(Exception):
        # A chain of causes may be a circle.
        for _ in range(10):
            if cause is None:
                break
            if _says_so(cause):
                return True
            cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return False


def _says_so(error: BaseException) -> bool:
    # By name: torch is never imported for this, and has had its own in two places.
    is_named_so = any(base.__name__ == "OutOfMemoryError" for base in type(error).__mro__)
    if is_named_so or isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return isinstance(error, Exception) and _TELLING.search(str(error)[:10_000]) is not None


def system_kills() -> int:
    """Return how many processes the system has killed so far because memory ran out; 0 if it does not tell."""
    with suppress(OSError):
        found = _KILLS.search(_VMSTAT.read_bytes())
        return int(found[1]) if found else 0
    return 0
