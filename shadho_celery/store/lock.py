"""Holder of a lock: a process, identified by its host, process id, start time, kernel boot and pid namespace.

Host and process id are not enough: two containers may have the same ones, and so may two boots of one machine.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from shadho_celery.core.checks import one_line

#: stands for a start time, or for boot and pid namespace, that the machine does not provide
UNKNOWN = "?"


def holder_name() -> str:
    """Return the name of this process in a lock: host, process id, start time, boot id and pid namespace."""
    return f"{socket.gethostname()} {os.getpid()} {_started_at(os.getpid())} {_namespace()}"


def is_held(holder: str, expires: float, now: float) -> bool:
    """Return whether `holder` may still be running.

    A process that cannot be checked from this machine or container counts as running until `expires`.
    """
    host, pid, started_at, namespace = _parts(holder)
    if UNKNOWN not in (started_at, namespace) and (host, namespace) == (socket.gethostname(), _namespace()):
        # No need to wait for the expiry: a process that got the same id later is not the holder.
        return pid.isdecimal() and len(pid) < 20 and _started_at(int(pid)) == started_at
    return now < expires


def described(holder: str) -> str:
    """Return the host and the process id of a holder, for messages."""
    host, pid, *_ = _parts(holder)
    return f"{one_line(host, 120)} (process {one_line(pid, 20)})"


def _parts(holder: str) -> list[str]:
    """Return host, process id, start time and namespace of a holder's name. Missing parts are UNKNOWN."""
    return (holder.split(" ") + 4 * [UNKNOWN])[:4]


def _namespace() -> str:
    """Return the boot id of the running kernel and the inode of this process's pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return UNKNOWN


def _started_at(pid: int) -> str:
    """Return a process's start time in clock ticks since boot, "" if it does not run, or UNKNOWN without /proc."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else rest[18]  # a zombie is dead
    except OSError:
        return "" if Path("/proc/self/stat").exists() else UNKNOWN
