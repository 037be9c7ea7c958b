"""The role of an executor: it gets trials run and says what became of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from shadho_celery.hardware import ComputeClass
from shadho_celery.trial import Event, Trial


class Executor(Protocol):
    """Gets trials run."""

    def classes(self) -> Sequence[ComputeClass]:
        """The compute classes that have live workers for this study, with their room."""

    def submit(self, trials: Sequence[Trial]) -> None:
        """Send QUEUED trials to their compute class; every one of them ends in an event.

        Sending an attempt twice is harmless. Another attempt may be sent while one runs: it goes to another machine,
        and the first to end COMPLETE or PRUNED ends the others, of which nothing is heard any more. A RUNNING trial,
        known from an earlier life of the scheduler, is not sent but watched: it too ends in an event.
        """

    def poll(self, seconds: float) -> Sequence[Event]:
        """What happened, as soon as anything has, or nothing after about `seconds`.

        The call also confirms that the events returned by the one before it are recorded: those are not seen again,
        while unconfirmed ones come again after a crash.
        """

    def cancel(self, numbers: Iterable[int], *, running: bool) -> None:
        """Take back the trials that no worker has claimed (they end LOST, unclaimed); with `running` stop the others.

        Takes effect in events, some time later.
        """

    def close(self) -> None:
        """Let go of connections; what runs elsewhere goes on."""
