"""Holder of a study's lock: a process, identified by its process id and the time of its start."""

from __future__ import annotations

import os
import socket
from pathlib import Path

#: time of start on a machine that does not tell it
UNKNOWN = "?"


def holder_name() -> str:
    """Return the name of this process in a lock: host, process id and time of start."""
    return f"{socket.gethostname()} {os.getpid()} {_started_at(os.getpid())}"


def is_held(holder: str, expires: float, now: float) -> bool:
    """Return whether `holder` may still run."""
    host, pid, started_at = holder.rsplit(" ", 2)
    if host == socket.gethostname() and started_at != UNKNOWN:
        # No need to wait for the expiry; a process that got the same id later is not the holder.
        return _started_at(int(pid)) == started_at
    return now < expires


def _started_at(pid: int) -> str:
    """Return the process's start in clock ticks since the machine's; "" for no process, UNKNOWN without /proc."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else rest[18]  # a zombie is dead
    except OSError:
        return "" if Path("/proc/self/stat").exists() else UNKNOWN
