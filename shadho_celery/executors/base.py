"""Role of an executor, which runs attempts and returns events, and a function for the queues of implementations."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from shadho_celery.core.attempts import Sent
from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.trial import Attempt, Event


class Executor(Protocol):
    """Runs attempts.

    It has seven methods, two more than other roles. While the store cannot be reached, the scheduler keeps its lock on
    the study with `keep`. It cannot use `poll` then, because `poll` confirms events that are not recorded yet.
    """

    def classes(self) -> Sequence[ComputeClass]:
        """Return the compute classes with live workers for this study, as of the last `poll`."""

    def submit(self, attempts: Sequence[Attempt]) -> None:
        """Send QUEUED attempts to their compute classes.

        Each attempt ends in an event, unless another attempt has ended its trial. Sending an attempt twice is harmless.
        A copy is sent while another attempt of its trial runs. It goes to another machine, and the first attempt that
        ends COMPLETE or PRUNED ends the other. An attempt with `only_on` runs only on that machine: if no worker there
        takes it soon, it ends LOST, unclaimed. A RUNNING attempt is known from an earlier run of the scheduler: it is
        not sent but watched, and also ends in an event.
        """

    def poll(self, seconds: float) -> Sequence[Event]:
        """Return events as soon as there are any, or an empty sequence after about `seconds`.

        The call also confirms that the events of the last call are recorded. After a crash, only unconfirmed events are
        returned again.
        """

    def keep(self) -> None:
        """Keep the scheduler's lock on the study while `poll` is not called. Call this every few seconds."""

    def cancel(self, numbers: Iterable[int], *, running: bool, pruned: bool = False) -> None:
        """Take back the trials that no worker has claimed; they end LOST, unclaimed.

        With `running`, also stop the trials that run. With `pruned`, their workers are told that the reason is their
        reports, which they log. The events arrive some time later.
        """

    def note_end(self, event: Event, ended: Sequence[Sent], *, is_over: bool) -> None:
        """Free what the `ended` attempts hold, which are no longer live because of an event of `poll`.

        `is_over` says that their trial has no live attempt left.
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
