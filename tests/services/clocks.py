"""A machine's clocks, of which a test sets the one that tells the time of day."""

from __future__ import annotations


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
