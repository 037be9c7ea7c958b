"""Who holds a study's lock: a process that can be told from one that got its number later."""

from __future__ import annotations

import os
import socket
from pathlib import Path

#: the moment of birth on a machine that does not tell it
UNKNOWN = "?"


def holder_name() -> str:
    """How this process names itself in a lock: host, process and the process's moment of birth."""
    return f"{socket.gethostname()} {os.getpid()} {_birth(os.getpid())}"


def is_held(holder: str, expires: float, now: float) -> bool:
    """True where `holder` may still be at work."""
    host, pid, birth = holder.rsplit(" ", 2)
    if host == socket.gethostname() and birth != UNKNOWN:
        # Beats waiting for the expiry, and a number that another process got since does not pass for the holder.
        return _birth(int(pid)) == birth
    return now < expires


def _birth(pid: int) -> str:
    """Clock ticks between the machine's start and the process's, "" for no such process, UNKNOWN without /proc."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else rest[18]  # a zombie is dead
    except OSError:
        return "" if Path("/proc/self/stat").exists() else UNKNOWN
