"""Notices of a run: warnings as records of a kind, each said once, or again when it is over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto

#: seconds for which something must be in order again before that is said
OVER_SECONDS = 5.0


class Kind(Enum):
    """What a notice is about."""

    #: a server that does not answer
    SERVERS = auto()
    #: workers that the study lacks
    MISSING = auto()
    #: workers and messages that are refused or quarantined
    FLEET = auto()
    #: files of the study, here and where workers have others
    CODE = auto()
    #: choice and placement of trials
    SEARCH = auto()
    #: subspaces that get fewer trials
    SHARES = auto()
    #: trials that fail in one way
    FAILURES = auto()
    #: trials that were deleted from the store
    DELETIONS = auto()


@dataclass(frozen=True, kw_only=True)
class Notice:
    """One warning."""

    kind: Kind
    text: str
    #: which server, class or worker, where a later notice of the kind replaces this one
    about: str = ""

    def __str__(self) -> str:
        return f"Warning: {self.text}"


class Conditions:
    """Notices of what may pass by itself: said when it begins, and when it is over."""

    def __init__(self) -> None:
        #: by kind and subject, the notices that were said, and the moment at which one of them was last true
        self.said: dict[tuple[Kind, str], list[Notice]] = {}
        self._seen_at: dict[tuple[Kind, str], float] = {}

    def see(self, found: Iterable[Notice], now: float) -> Iterator[str]:
        """Yield what to say of the notices that are true `now`: those that are new, and those that are over."""
        for notice in found:
            key = notice.kind, notice.about
            self._seen_at[key] = now
            if notice not in (said := self.said.setdefault(key, [])):
                said.append(notice)
                yield str(notice)
        for key in [key for key, seen_at in self._seen_at.items() if now - seen_at >= OVER_SECONDS]:
            del self._seen_at[key]
            yield f"over: {self.said.pop(key)[-1].text.partition(';')[0]}"
