"""The most memory that one trial has used."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

_RESET = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


class PeakMemory:
    """Measures from its creation on: on the GPU that torch computes on, else this process's resident memory.

    What child processes use is not counted. Costs some ten microseconds.
    """

    def __init__(self) -> None:
        self._began_on_gpu = _begin_on_gpu()
        try:
            # Linux: sets the peak of the resident memory back to what it is now.
            _RESET.write_text("5")
            self._reset = True
        except OSError:
            self._reset = False

    def read(self) -> int | None:
        """Peak bytes since then; None where the system does not tell (its figure is of the process's life)."""
        torch = _torch_on_gpu()
        if torch is not None:
            # A trial that has just loaded torch had no peak to set back: all of it is its own.
            used = int(torch.cuda.max_memory_allocated())
            if used or self._began_on_gpu:
                return used
        if not self._reset:
            return None
        try:
            lines = _STATUS.read_text().splitlines()
            return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
        except (OSError, StopIteration, ValueError):
            return None


def _begin_on_gpu() -> bool:
    torch = _torch_on_gpu()
    if torch is not None:
        torch.cuda.reset_peak_memory_stats()
    return torch is not None


def _torch_on_gpu() -> Any:
    """Return torch where this process has loaded it and computes on a GPU with it; it is never loaded for this."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    return torch if cuda is not None and cuda.is_available() and cuda.is_initialized() else None
