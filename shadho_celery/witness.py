"""What happens in a worker, put into the events that tell of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shadho_celery.clock import Clock
from shadho_celery.context import Outcome
from shadho_celery.seats import Seat
from shadho_celery.trial import Assembling, Report, Result, Started, TrialState, Unseated
from shadho_celery.underway import Running


@dataclass(frozen=True, kw_only=True)
class Witness:
    """Tells what happens in one worker."""

    #: the worker's name
    worker: str
    host: str
    compute_class: str
    clock: Clock

    def started(self, attempt: Mapping[str, Any]) -> Started:
        """The worker is about to run an attempt of a message."""
        return Started(
            number=attempt["number"],
            attempt=attempt["attempt"],
            host=self.host,
            at=self.clock.now(),
            worker=self.worker,
        )

    def report(self, running: Running, record: Mapping[str, Any]) -> Report:
        """A trial has reported."""
        return Report(number=running.number, attempt=running.attempt, at=self.clock.now(), **record)

    def assembling(self, running: Running, record: Mapping[str, Any]) -> Assembling:
        """A trial calls for replicas, or tells that they have come."""
        now = self.clock.now()
        return Assembling(number=running.number, attempt=running.attempt, call=running.calls, at=now, **record)

    def result(self, running: Running, outcome: Outcome) -> Result:
        """An attempt has ended, or was stopped."""
        cancelled = bool(running.stopped)
        return Result(
            number=running.number,
            attempt=running.attempt,
            state=TrialState.CANCELLED if cancelled else outcome.state,
            loss=None if cancelled else outcome.loss,
            metrics=outcome.metrics,
            error="cancelled" if cancelled else outcome.error,
            host=self.host,
            compute_class=self.compute_class,
            seconds=outcome.seconds,
            memory=outcome.memory,
            at=self.clock.now(),
            worker=self.worker,
            out_of_memory=outcome.out_of_memory and not cancelled,
            warning=outcome.warning,
        )

    def unseated(self, seat: Seat, outcome: Outcome) -> Unseated:
        """A replica has failed."""
        return Unseated(
            number=seat.number,
            attempt=seat.attempt,
            call=seat.call,
            rank=seat.rank,
            error=outcome.error or "its objective returned without taking part in a gang",
            host=self.host,
            at=self.clock.now(),
            worker=self.worker,
        )
