"""The most memory that one trial has used, and whether it was too much."""

from __future__ import annotations

import errno
import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

_RESET = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_PEAK = re.compile(rb"^VmHWM:\s*(\d+) kB$", re.MULTILINE)
_VMSTAT = Path("/proc/vmstat")
_KILLS = re.compile(rb"^oom_kill (\d+)$", re.MULTILINE)

#: What libraries say of it: CUDA's, torch on the CPU and JAX; then joblib, DataLoader and subprocess, of a child that
#: the system has killed.
_TELLING = re.compile(
    r"out of memory|CU\w+_STATUS_ALLOC_FAILED|can't allocate memory|unable to allocate|cannot allocate memory"
    r"|SIGKILL\(-9\)|killed by signal: Killed|died with <Signals.SIGKILL",
    re.IGNORECASE,
)


class PeakMemory:
    """Measures from its creation on: what torch's tensors take on the GPU, else this process's resident memory.

    Not counted: child processes; and on a GPU what CUDA itself takes, and libraries other than torch. Never raises.
    """

    def __init__(self) -> None:
        # Whatever a trial has done to torch or to its GPU, the next trial's own error tells it better.
        with suppress(Exception):
            if (cuda := _cuda()) is not None:
                cuda.reset_peak_memory_stats()
        self._was_reset = _reset_resident()

    def read(self) -> int | None:
        """Peak bytes since then; None where the system tells only that of the process's whole life."""
        with suppress(Exception):
            # Not what is reserved, which the allocator keeps from one trial to the next. Where this trial was the
            # first on the GPU there was no peak to set back: all of it is its own.
            if (cuda := _cuda()) is not None and (used := int(cuda.max_memory_allocated())):
                return used
        return _peak_resident() if self._was_reset else None


def _cuda() -> Any:
    """Return torch.cuda where this process computes on a GPU with it; torch is never loaded for this."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


def _reset_resident() -> bool:
    """Set the peak back to what is resident now, where the system can (Linux)."""
    try:
        # Not as a file of Python's: this is done for each trial, and that would take longer than all the rest.
        descriptor = os.open(_RESET, os.O_WRONLY)
        try:
            os.write(descriptor, b"5")
        finally:
            os.close(descriptor)
    except OSError:
        return False
    return True


def _peak_resident() -> int | None:
    try:
        descriptor = os.open(_STATUS, os.O_RDONLY)
        try:
            found = _PEAK.search(os.read(descriptor, 10_000))
        finally:
            os.close(descriptor)
    except OSError:
        return None
    return 1024 * int(found[1]) if found else None


def is_out_of_memory(error: BaseException) -> bool:
    """True where `error`, or one that it came of, says that memory ran out, be it the machine's or the GPU's."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    with suppress(Exception):
        while cause is not None and cause not in seen and len(seen) < 10:
            if _says_so(cause):
                return True
            seen.append(cause)
            cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return False


def _says_so(error: BaseException) -> bool:
    # By name: torch is never loaded for this, and has had its own in two places.
    if isinstance(error, MemoryError) or any(base.__name__ == "OutOfMemoryError" for base in type(error).__mro__):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, Exception) and _TELLING.search(str(error)[:10_000]) is not None


def system_kills() -> int:
    """How many processes this machine has killed for want of memory since it was started; 0 where it does not say."""
    try:
        found = _KILLS.search(_VMSTAT.read_bytes())
    except OSError:
        return 0
    return int(found[1]) if found else 0
