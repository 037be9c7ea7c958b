"""Holder of a lock: a process, identified by its process id, its start time, and the system where these are valid.

A process id belongs to one pid namespace of a running kernel: containers may have the same host name and id, and so may
two boots of one machine.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

#: start time, or kernel and pid namespace, on a machine that does not provide it
UNKNOWN = "?"


def holder_name() -> str:
    """Return the name of this process in a lock: host, process id, time of start, boot id and pid namespace."""
    return f"{socket.gethostname()} {os.getpid()} {_started_at(os.getpid())} {_namespace()}"


def is_held(holder: str, expires: float, now: float) -> bool:
    """Return whether `holder` may still run. One that cannot be checked from here counts as running until `expires`."""
    host, pid, started_at, namespace = _parts(holder)
    if UNKNOWN not in (started_at, namespace) and (host, namespace) == (socket.gethostname(), _namespace()):
        # No need to wait for the expiry: a process that got the same id later is not the holder.
        return pid.isdecimal() and _started_at(int(pid)) == started_at
    return now < expires


def described(holder: str) -> str:
    """Return host and process id of a holder, for messages."""
    host, pid, *_ = _parts(holder)
    return f"{host} (process {pid})"


def _parts(holder: str) -> list[str]:
    """Return the four parts of a holder's name; those that it lacks are unknown."""
    return (holder.split(" ") + 4 * [UNKNOWN])[:4]


def _namespace() -> str:
    """Return the boot id of the running kernel and the inode of this process's pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return UNKNOWN


def _started_at(pid: int) -> str:
    """Return the process's start in clock ticks since boot; "" if there is no process, UNKNOWN without /proc."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else rest[18]  # a zombie is dead
    except OSError:
        return "" if Path("/proc/self/stat").exists() else UNKNOWN
