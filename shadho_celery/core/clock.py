"""Clocks: a clock is an argument, so the same code runs on the machine's clock and on a simulated one.

A clock has two readings. Intervals are computed from `now`, a monotonic time. Records contain `wall`, the time of day,
which an administrator, NTP or a resumed virtual machine may set back or forward at any time.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Gives the time, and waits for time to pass."""

    def now(self) -> float:
        """Return the seconds since an arbitrary moment in the past. They never decrease (monotonic)."""

    def wall(self) -> float:
        """Return the seconds since the epoch, for records."""

    def sleep(self, seconds: float) -> None:
        """Return once `seconds` have passed on this clock."""


class SystemClock:
    """The machine's own clock, as the module `time` reads it."""

    now = staticmethod(time.monotonic)
    wall = staticmethod(time.time)
    sleep = staticmethod(time.sleep)


class ManualClock:
    """A clock that moves only on request, for tests and for the simulator. Both readings are the same."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += max(0.0, seconds)

    def advance_to(self, moment: float) -> None:
        """Set the clock forward to `moment` (in seconds). An earlier moment changes nothing."""
        self._now = max(self._now, moment)
