"""Warnings about conditions of a run that may pass, as records. Each is shown once, and so is the end of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

#: seconds for which a condition must not have been true before its end is shown
OVER_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Notice:
    """A warning to the user about one condition, such as a missing worker."""

    text: str
    #: class or fact concerned. Notices with equal `about` end together
    about: str
    #: what is true once the condition has passed
    over: str = ""

    def __str__(self) -> str:
        return f"Warning: {self.text}"


class Conditions:
    """Notices of conditions that may pass by themselves. Each is shown when it begins, and when it is over."""

    def __init__(self) -> None:
        #: notices that were shown, by subject; and the moments at which one of them was first and last true
        self._said: dict[str, list[Notice]] = {}
        self._seen: dict[str, tuple[float, float]] = {}

    def see(self, found: Iterable[Notice], now: float) -> Iterator[str]:
        """Yield the lines to show, given the notices `found` to be true `now`: each new notice, and each end of one."""
        for notice in found:
            about = notice.about
            self._seen[about] = self._seen.get(about, (now, now))[0], now
            if notice not in (said := self._said.setdefault(about, [])):
                said.append(notice)
                yield str(notice)
        for about in [about for about, (_, until) in self._seen.items() if now - until >= OVER_SECONDS]:
            since, until = self._seen.pop(about)
            yield f"{self._said.pop(about)[-1].over}, after {until - since:.0f} s"
