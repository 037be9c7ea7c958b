"""CPU cores of a host: which of them this process may use, and which processes share them."""

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
    """The CPU cores that this process may use."""

    count: int
    #: numbers of the processors on which this process may run; it uses at most `count` of them at a time
    processors: set[int]
    #: digest that is equal for the processes that share these cores: of the running system, and of the control group
    #: whose CPU quota limits this process. A host name would not do: containers on one system have different host
    #: names, and containers on different systems may have the same one.
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
    # Python refuses to convert thousands of digits. A number of ten digits is more than the cores of any machine.
    limit = int(told) if told.isdecimal() and len(told) < 10 else 0
    pool = hashlib.blake2b(f"{_running_system()} {group}".encode(), digest_size=8).hexdigest()
    return Cores(count=min(usable, limit or usable), processors=processors, pool=pool, is_limited=bool(limit))


def _running_system() -> str:
    """Return the id of the running kernel, which is the same in all its containers; the host name without one."""
    with suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return socket.gethostname()


def _quotas() -> Iterator[tuple[float, str]]:
    """Yield each CPU quota that applies to this process, in cores, with an id of its control group."""
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
