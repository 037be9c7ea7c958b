"""A queue executor without a study: it keeps the live attempts itself, by the study's rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shadho_celery.core.attempts import Attempts, Sent
from shadho_celery.core.payload import Payload
from shadho_celery.core.system import Clock
from shadho_celery.core.trial import WELL, Attempt, Event, Lost, Result, Started, TrialState
from shadho_celery.fleet.executor import QueueExecutor
from shadho_celery.fleet.workers import FleetStudy, Servers


class ToldExecutor(QueueExecutor):
    """Enters the attempts that it is given, and tells itself the events that it returns."""

    def __init__(
        self, client: Any, publisher: Any, study: str, module: str, clock: Clock | None = None, **facts: Any
    ) -> None:
        told = FleetStudy(template=Payload(study=study, module=module, attempts=[]), **facts)
        super().__init__(Servers(client=client, publisher=publisher), told, Attempts(), clock=clock)

    def submit(self, attempts: Sequence[Attempt]) -> None:
        now = self._clock.now()
        for each in attempts:
            sent = Sent(each, now)
            if sent.is_claimed:
                sent.began = now
            self._in_flight.put(*sent.key, sent)
        super().submit(attempts)

    def poll(self, seconds: float) -> Sequence[Event]:
        events = super().poll(seconds)
        for event in events:
            self._tell(event)
        return events

    def _tell(self, event: Event) -> None:
        live = dict(self._in_flight.of(event.number))
        sent = live.get(event.attempt)
        if isinstance(event, Started) and sent is not None:
            sent.attempt = sent.attempt.evolve(state=TrialState.RUNNING, worker=event.worker, host=event.host)
            sent.began = self._clock.now()
        elif isinstance(event, Lost) and sent is not None:
            self.note_end(event, [sent], is_over=self._in_flight.lose(*sent.key))
        elif isinstance(event, Result) and all(event.is_of(each.attempt.params) for each in live.values()):
            well = event.outcome.state in WELL
            is_over = self._in_flight.finish(event.number, event.attempt, well=well)
            gone = [each for which, each in live.items() if is_over or which == event.attempt]
            self.note_end(event, gone, is_over=is_over)
