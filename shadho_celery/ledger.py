"""The role of whatever a study is written down in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from shadho_celery.trial import Report, Trial


class Ledger(Protocol):
    """Where a study writes down what happens: a `Store`, or memory."""

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
        """Record one turn of the loop, all or nothing; LockLost where `fence` is old."""

    def unlock(self, key: str, fence: int) -> None:
        """Give the study back."""
