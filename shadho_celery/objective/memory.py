"""Peak memory of one trial, and the detection of its end for lack of memory: its GPU's or the machine's."""

from __future__ import annotations

import errno
import os
import re
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from shadho_celery.core.trial import Memory

_RESET = Path("/proc/self/clear_refs")
_VMSTAT = Path("/proc/vmstat")
_KILLS = re.compile(rb"^oom_kill (\d+)$", re.MULTILINE)

#: messages about RAM: of torch on the CPU and numpy; then those of joblib, DataLoader and subprocess about a child that
#: the system has killed
_OF_HOST = re.compile(
    r"can't allocate memory|unable to allocate|cannot allocate memory"
    r"|SIGKILL\(-9\)|killed by signal: Killed|died with <Signals.SIGKILL",
    re.IGNORECASE,
)
#: messages of CUDA's libraries, and of CUDA itself, torch and JAX; the latter's does not say whose memory it was
_OF_LIBRARY = re.compile(r"CU\w+_STATUS_ALLOC_FAILED", re.IGNORECASE)
_OF_ANY = re.compile(r"out.of.memory", re.IGNORECASE)
_GPU = re.compile(r"cuda|\bhip\b|gpu", re.IGNORECASE)


class PeakMemory:
    """Peaks since its creation: of the memory of torch's tensors on the GPU, and of this process's resident memory.

    Not counted are child processes, and on a GPU CUDA itself and libraries other than torch. Never raises.
    """

    def __init__(self) -> None:
        # If a trial has broken torch or its GPU, the next trial's own error tells it better.
        with suppress(Exception):
            if (cuda := _cuda()) is not None:
                cuda.reset_peak_memory_stats()
        self._was_reset = _reset_resident()

    def read(self, memory: Memory) -> int | None:
        """Return a peak in bytes; None without a GPU, or if the system tells only that of the process's whole life."""
        if memory is Memory.HOST:
            return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if self._was_reset else None
        with suppress(Exception):
            # Not the reserved memory, which the allocator keeps from one trial to the next. For the first trial on the
            # GPU there was no peak to reset: all of it is its own.
            if (cuda := _cuda()) is not None:
                return int(cuda.max_memory_allocated()) or None
        return None


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


def exhausted(error: BaseException) -> Memory | None:
    """Return the memory of which `error`, or one of its causes, says that it ran out; None if none says so."""
    cause: BaseException | None = error
    with suppress(Exception):
        # A chain of causes may be a circle.
        for _ in range(10):
            if cause is None:
                break
            if (memory := _told_by(cause)) is not None:
                return memory
            cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return None


def _told_by(error: BaseException) -> Memory | None:
    # By name: torch is never imported for this, and has had its own in two places. CuPy's is a MemoryError, too.
    if any(base.__name__ == "OutOfMemoryError" for base in type(error).__mro__):
        return Memory.GPU
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return Memory.HOST
    text = _text(error)
    if _OF_LIBRARY.search(text):
        return Memory.GPU
    if _OF_HOST.search(text):
        return Memory.HOST
    if _OF_ANY.search(text):
        is_of_gpu = _GPU.search(text) or (_has_gpu() and not isinstance(error, MemoryError))
        return Memory.GPU if is_of_gpu else Memory.HOST
    return Memory.HOST if isinstance(error, MemoryError) else None


def _text(error: BaseException) -> str:
    """Return the message of an error; "" if it has none that can be read, or ends more than a trial."""
    with suppress(Exception):
        return str(error)[:10_000] if isinstance(error, Exception) else ""
    return ""


def _has_gpu() -> bool:
    """Return whether this process's slot was given a GPU; a slot of a class without has an empty list."""
    return bool(os.environ.get("CUDA_VISIBLE_DEVICES"))


def system_kills() -> int:
    """Return how many processes the system has killed so far because memory ran out; 0 if it does not tell."""
    with suppress(OSError):
        found = _KILLS.search(_VMSTAT.read_bytes())
        return int(found[1]) if found else 0
    return 0
