"""The role of a store, as a study needs it, and the record of a study."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shadho_celery.core.trial import Report, Trial


@dataclass(frozen=True, kw_only=True)
class StudyRecord:
    """A study without its trials; but for `settings` it does not change."""

    #: globally unique: studies of several stores may share one Redis
    key: str
    name: str
    #: module with SPACE and objective; "" where there is none
    module: str
    seed: int
    #: label -> domain and condition in words
    space: Mapping[str, str]
    #: seconds since the epoch
    created_at: float
    #: what its command lines have asked for so far: option -> value
    settings: Mapping[str, Any] = field(default_factory=dict)


class Store(Protocol):
    """Where a study records what happens."""

    @property
    def safe_url(self) -> str:
        """What it is, to be shown."""

    def write(
        self,
        key: str,
        fence: int,
        now: float,
        *,
        new: Sequence[Trial],
        changed: Sequence[Trial],
        reported: Iterable[Report],
    ) -> None:
        """Record one turn of the loop, all or nothing. Raises LockLost where `fence` is old."""

    def unlock(self, key: str, fence: int) -> None:
        """Give the study back."""
