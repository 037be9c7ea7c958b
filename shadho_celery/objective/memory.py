"""Peak memory of one trial, and detection that GPU memory or RAM ran out."""

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

#: messages about RAM: of torch on the CPU and numpy; then of joblib, DataLoader and subprocess about a child process
#: killed by the system
_OF_HOST = re.compile(
    r"can't allocate memory|unable to allocate|cannot allocate memory"
    r"|SIGKILL\(-9\)|killed by signal: Killed|died with <Signals.SIGKILL",
    re.IGNORECASE,
)
#: messages of CUDA's libraries, and of CUDA itself, torch and JAX; JAX does not say which memory it was
_OF_LIBRARY = re.compile(r"CU\w+_STATUS_ALLOC_FAILED", re.IGNORECASE)
_OF_ANY = re.compile(r"out.of.memory", re.IGNORECASE)
_GPU = re.compile(r"cuda|\bhip\b|gpu", re.IGNORECASE)


class PeakMemory:
    """Peaks since its creation: GPU memory of torch's tensors, and resident memory of this process.

    Child processes are not counted. On a GPU, neither CUDA itself nor other libraries than torch are counted. Never
    raises.
    """

    def __init__(self) -> None:
        # If a trial has broken torch or its GPU, the next trial's own error describes it better.
        with suppress(Exception):
            if (cuda := _cuda()) is not None:
                cuda.reset_peak_memory_stats()
        # The system sets the peak to the current resident memory (Linux).
        self._was_reset = False
        with suppress(OSError):
            # Not with `open`, which takes several times as long for each trial.
            descriptor = os.open(_RESET, os.O_WRONLY)
            try:
                os.write(descriptor, b"5")
                self._was_reset = True
            finally:
                os.close(descriptor)

    def read(self, memory: Memory) -> int | None:
        """Return a peak in bytes, or None without a GPU or if the system only knows the peak of the whole process."""
        if memory is Memory.HOST:
            return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if self._was_reset else None
        with suppress(Exception):
            # Not the reserved memory, which the allocator keeps from trial to trial. For the first trial on the GPU
            # there was no peak to reset, and all of it is its own.
            if (cuda := _cuda()) is not None:
                return int(cuda.max_memory_allocated()) or None
        return None


def _cuda() -> Any:
    """Return torch.cuda if this process uses a GPU with it. torch is never imported for this."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


def exhausted(error: BaseException) -> Memory | None:
    """Return the kind of memory that ran out according to `error` or one of its causes, or None."""
    cause: BaseException | None = error
    with suppress(Exception):
        # A chain of causes may be circular.
        for _ in range(10):
            if cause is None:
                break
            if (memory := _told_by(cause)) is not None:
                return memory
            cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return None


def _told_by(error: BaseException) -> Memory | None:
    # By name: torch is never imported for this, and has had this exception in two places. CuPy's is a MemoryError.
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
        # A slot of a class without GPUs has an empty list.
        has_gpu = bool(os.environ.get("CUDA_VISIBLE_DEVICES"))
        is_of_gpu = _GPU.search(text) or (has_gpu and not isinstance(error, MemoryError))
        return Memory.GPU if is_of_gpu else Memory.HOST
    return Memory.HOST if isinstance(error, MemoryError) else None


def _text(error: BaseException) -> str:
    """Return the message of an error, or "" if it cannot be read, or if reading it raises an exception that must
    pass.
    """
    with suppress(Exception):
        return str(error)[:10_000] if isinstance(error, Exception) else ""
    return ""


def system_kills() -> int:
    """Return how many processes the system has killed so far because memory ran out; 0 if that is not known."""
    with suppress(OSError):
        found = _KILLS.search(_VMSTAT.read_bytes())
        return int(found[1]) if found else 0
    return 0
