"""Role of an executor, which runs attempts and returns events; and the queue operation shared by implementations."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.trial import Attempt, Event


class Executor(Protocol):
    """Runs attempts.

    Six methods, one more than other roles: while the store is away the lock of the study is kept (`keep`), although
    nothing is collected (`poll`), which would confirm events that are not recorded.
    """

    def classes(self) -> Sequence[ComputeClass]:
        """Return the compute classes with live workers for this study, as of the last `poll`."""

    def submit(self, attempts: Sequence[Attempt]) -> None:
        """Send QUEUED attempts to their compute class. Each ends in an event, unless another one has ended its trial.

        Sending an attempt twice is harmless. A copy is sent while another attempt of its trial runs: it goes to another
        machine, and the first to end COMPLETE or PRUNED ends the others. An attempt with `only_on` runs only on that
        machine: if no worker there takes it soon, it ends LOST, unclaimed. A RUNNING attempt, known from an earlier run
        of the scheduler, is not sent but watched, and also ends in an event.
        """

    def poll(self, seconds: float) -> Sequence[Event]:
        """Return events as soon as there are any, or none after about `seconds`.

        The call also confirms that the events of the last call are recorded. Only unconfirmed events are returned again
        after a crash.
        """

    def keep(self) -> None:
        """Keep the study from other schedulers while it is not polled. Call this every few seconds."""

    def cancel(self, numbers: Iterable[int], *, running: bool, pruned: bool = False) -> None:
        """Take back the trials that no worker has claimed; they end LOST, unclaimed. With `running`, stop the others.

        Those in `pruned` are stopped because of their reports, which a worker's log says. The events arrive some time
        later.
        """

    def close(self) -> None:
        """Close connections. Trials on other machines continue."""


def take(queue: deque[Attempt], numbers: Iterable[int]) -> list[Attempt]:
    """Remove the attempts of these trials from a queue, and return them."""
    unwanted = set(numbers)
    taken = [attempt for attempt in queue if attempt.number in unwanted]
    for attempt in taken:
        queue.remove(attempt)
    return taken
