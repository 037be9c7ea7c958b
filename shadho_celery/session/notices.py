"""Warnings during a run, as records. Each is shown once. If its condition passes, a line says what is true again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto

#: seconds for which a condition must not have been true before its end is shown
OVER_SECONDS = 5.0


class Kind(Enum):
    """Subject of a notice."""

    #: workers that the study needs and that are missing
    MISSING = auto()
    #: workers and messages that are refused or quarantined
    FLEET = auto()
    #: files of the study that were edited, or that differ on a worker
    CODE = auto()
    #: sampling and placement of trials
    SEARCH = auto()
    #: trials that fail in the same way
    FAILURES = auto()
    #: money that the trials may cost
    MONEY = auto()
    #: trials that were deleted from the store
    DELETIONS = auto()


@dataclass(frozen=True, kw_only=True)
class Notice:
    """A warning to the user about one condition."""

    kind: Kind
    text: str
    #: class or worker concerned; "" if the kind says it. Notices with equal `kind` and `about` end together
    about: str = ""
    #: what is true once the condition has passed
    over: str = ""

    def __str__(self) -> str:
        return f"Warning: {self.text}"


class Conditions:
    """Notices of conditions that may pass by themselves. Each is shown when it begins, and when it is over."""

    def __init__(self) -> None:
        #: notices that were shown, by kind and subject; and the moments at which one of them was first and last true
        self._said: dict[tuple[Kind, str], list[Notice]] = {}
        self._seen: dict[tuple[Kind, str], tuple[float, float]] = {}

    def see(self, found: Iterable[Notice], now: float) -> Iterator[str]:
        """Yield the lines to show, given the notices `found` to be true `now`: each new notice, and each end of one."""
        for notice in found:
            key = notice.kind, notice.about
            self._seen[key] = self._seen.get(key, (now, now))[0], now
            if notice not in (said := self._said.setdefault(key, [])):
                said.append(notice)
                yield str(notice)
        for key in [key for key, (_, until) in self._seen.items() if now - until >= OVER_SECONDS]:
            since, until = self._seen.pop(key)
            yield f"{self._said.pop(key)[-1].over}, after {until - since:.0f} s"
