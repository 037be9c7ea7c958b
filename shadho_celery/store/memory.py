"""A store in memory, for searches that end with their process."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from shadho_celery.core.trial import Report, Trial
from shadho_celery.errors import LockLost


class MemoryStore:
    """Keeps the trials and reports of one study in memory. It is several hundred times as fast as a database."""

    safe_url = "memory"

    def __init__(self, fence: int = 1) -> None:
        """Writes with another fencing number than `fence` raise LockLost."""
        self._fence = fence
        self._trials: dict[int, Trial] = {}
        self._reports: list[Report] = []

    def write(
        self,
        key: str,
        fence: int,
        now: float,
        *,
        new: Sequence[Trial] = (),
        changed: Sequence[Trial] = (),
        reported: Iterable[Report] = (),
        choices: Mapping[str, str] | None = None,
    ) -> Collection[int]:
        if fence != self._fence:
            raise LockLost
        self._trials |= {trial.number: trial for trial in (*new, *changed)}
        self._reports += reported
        return ()

    def unlock(self, key: str, fence: int) -> None:
        pass

    def numbers(self, key: str = "") -> Collection[int]:
        return self._trials.keys()

    def trials(self, key: str = "", numbers: Collection[int] | None = None) -> list[Trial]:
        """Return all trials, or those with the given `numbers`, in the order of their numbers."""
        wanted = self._trials.keys() if numbers is None else self._trials.keys() & set(numbers)
        return [self._trials[number] for number in sorted(wanted)]

    def reports(self, key: str, number: int | None = None) -> list[Report]:
        """Return all reports, or those of one trial, in the order in which they were written."""
        return [each for each in self._reports if number in (None, each.number)]
