"""Cores of a host: those that this process may use, and the processes with which it shares them."""

from __future__ import annotations

import hashlib
import math
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True)
class Cores:
    """Cores that this process may use."""

    count: int
    #: numbers of the processors on which it may run; it uses `count` of them at a time
    processors: set[int]
    #: id of the running system, or of the control group whose CPU quota limits this process. Processes with equal ids
    #: share the cores. Host names cannot be used: containers on one system have different ones, or the same on several
    #: systems.
    pool: str
    #: True if ``SHADHO_CORES`` limits the count
    is_limited: bool


def usable_cores() -> Cores:
    """Return the cores that this process may use. Never raises."""
    processors = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    # A larger quota does not limit anything.
    quotas = [(quota, group) for quota, group in _quotas() if quota < len(processors)]
    quota, group = min(quotas, default=(len(processors), ""))
    usable = max(1, math.ceil(quota))
    told = os.environ.get("SHADHO_CORES", "")
    # Python reads no number of thousands of digits, and no machine has as many cores as one of ten digits.
    limit = int(told) if told.isdecimal() and len(told) < 10 else 0
    pool = hashlib.blake2b(f"{_running_system()} {group}".encode(), digest_size=8).hexdigest()
    return Cores(count=min(usable, limit or usable), processors=processors, pool=pool, is_limited=bool(limit))


def _running_system() -> str:
    """Return the id of the running kernel, which all its containers share."""
    with suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return socket.gethostname()


def _quotas() -> Iterator[tuple[float, str]]:
    """Yield the CPU quotas that apply to this process, in cores, each with an id of its control group."""
    for folder in _control_groups():
        with suppress(OSError, ValueError):
            if (quota := _quota(folder)) > 0:
                # A container sees its own group as the root. The inode is the same everywhere.
                yield quota, str(folder.stat().st_ino)


def _control_groups() -> Iterator[Path]:
    """Yield the folders of the control groups, of either version, that may limit this process's CPU time."""
    lines: list[str] = []
    with suppress(OSError):
        lines = _OWN_GROUPS.read_text().splitlines()
    for line in lines:
        controllers, _, path = line.partition(":")[2].partition(":")
        if not controllers or "cpu" in controllers.split(","):
            root = _GROUPS / ("cpu" if controllers else "")
            folder = root / path.lstrip("/")
            yield from (each for each in (folder, *folder.parents) if each.is_relative_to(root))


def _quota(folder: Path) -> float:
    """Return the quota of a control group in cores. Raises OSError or ValueError if it has none."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except FileNotFoundError:
        quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    return int(quota) / max(1, int(period))
