"""The most memory that one trial has used."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

_RESET = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_PEAK = re.compile(rb"^VmHWM:\s*(\d+) kB$", re.MULTILINE)


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
        _RESET.write_text("5")
    except OSError:
        return False
    return True


def _peak_resident() -> int | None:
    try:
        found = _PEAK.search(_STATUS.read_bytes())
    except OSError:
        return None
    return 1024 * int(found[1]) if found else None
