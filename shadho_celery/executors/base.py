"""The role of an executor: it gets attempts run and says what became of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.trial import Attempt, Event


class Executor(Protocol):
    """Gets attempts run."""

    def classes(self) -> Sequence[ComputeClass]:
        """Return the compute classes that have live workers for this study, as of the last `poll`."""

    def submit(self, attempts: Sequence[Attempt]) -> None:
        """Send QUEUED attempts to their compute class; every one of them ends in an event.

        Sending an attempt twice is harmless. A copy is sent while another attempt of its trial runs: it goes to another
        machine, and the first to end COMPLETE or PRUNED ends the others, of which nothing is heard any more. A RUNNING
        attempt, known from an earlier life of the scheduler, is not sent but watched: it too ends in an event.
        """

    def poll(self, seconds: float) -> Sequence[Event]:
        """Return what happened, as soon as anything has, or nothing after about `seconds`.

        The call also confirms that the events returned by the one before it are recorded: those are not seen again,
        while unconfirmed ones come again after a crash.
        """

    def cancel(self, numbers: Iterable[int], *, running: bool) -> None:
        """Take back the trials that no worker has claimed (they end LOST, unclaimed); with `running` stop the others.

        Takes effect in events, some time later.
        """

    def close(self) -> None:
        """Let go of connections; what runs elsewhere goes on."""
