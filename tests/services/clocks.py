"""A machine's clocks, of which a test sets the one that tells the time of day."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path

#: Python imports it at its start: `time.time` then follows the file, which may change at any moment.
SITE = """
import mmap, os, struct, time

with open(os.environ["TEST_CLOCK"], "rb") as file:
    ahead = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
machines = time.time
time.time = lambda: machines() + struct.unpack("d", ahead)[0]
"""


class MachineTime:
    """Stands in for the module `time`; time passes only in `sleep`."""

    def __init__(self) -> None:
        self._since_boot = 5_000.0
        self._epoch = 1_700_000_000.0

    def monotonic(self) -> float:
        return self._since_boot

    def time(self) -> float:
        return self._epoch + self._since_boot

    def sleep(self, seconds: float) -> None:
        self._since_boot += seconds

    def set_by(self, seconds: float) -> None:
        """Set the time of day forward; back if `seconds` are negative."""
        self._epoch += seconds


class ProcessClock:
    """The time of day of all processes that have its `environment`; a test sets it while they run."""

    def __init__(self, folder: Path, path: str) -> None:
        """`folder` is for its files; `path` is the PYTHONPATH of the processes."""
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(SITE)
        self._file = folder / "ahead"
        self._file.write_bytes(struct.pack("d", 0.0))
        self.environment: Mapping[str, str] = {
            "PYTHONPATH": f"{folder}{os.pathsep}{path}",
            "TEST_CLOCK": str(self._file),
        }

    def set_to(self, ahead: float) -> None:
        """Set it so many seconds ahead of the machine's clock; behind it if they are negative."""
        with self._file.open("r+b") as file:
            file.write(struct.pack("d", ahead))
