"""The books of what is in flight: which attempts were sent and have not ended, and who claimed them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shadho_celery.trial import Trial


@dataclass
class Sent:
    """An attempt in flight."""

    number: int
    attempt: int
    compute_class: str
    at: float
    claimed: bool = False
    #: the trial as it was sent
    trial: Trial | None = None
    #: name of the worker that claimed it, and of its machine
    worker: str = ""
    host: str = ""
    #: looks in a row at which Redis knew no lease of the claimed attempt
    missed: int = 0

    @property
    def slots(self) -> int:
        """Slots that it takes."""
        return 1 if self.trial is None else self.trial.slots


class InFlight:
    """The attempts of one study that were sent and have not ended."""

    def __init__(self) -> None:
        #: by trial and attempt
        self._sent: dict[int, dict[int, Sent]] = {}

    def __bool__(self) -> bool:
        return bool(self._sent)

    def __iter__(self) -> Iterator[Sent]:
        for attempts in self._sent.values():
            yield from attempts.values()

    def add(self, sent: Sent) -> None:
        """Enter an attempt, or enter it anew."""
        self._sent.setdefault(sent.number, {})[sent.attempt] = sent

    def find(self, number: int, attempt: int) -> Sent | None:
        """The attempt; None where it is not in flight."""
        return self._sent.get(number, {}).get(attempt)

    def attempts(self, number: int) -> list[int]:
        """The attempts of a trial, in the order in which they were sent."""
        return list(self._sent.get(number, ()))

    def remove(self, number: int, attempt: int | None = None) -> None:
        """Strike out an attempt; without `attempt` all of its trial's."""
        attempts = self._sent.get(number, {})
        for each in [each for each in attempts if attempt in (None, each)]:
            del attempts[each]
        if not attempts:
            self._sent.pop(number, None)

    def other_host(self, trial: Trial) -> str | None:
        """The machine on which another attempt of the trial runs; None where there is no such attempt."""
        others = (sent for attempt, sent in self._sent.get(trial.number, {}).items() if attempt != trial.attempt)
        return next((sent.host for sent in others if sent.claimed), None)
