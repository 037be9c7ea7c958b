"""Keeps workers off that fail what others finish, and has their trials tried elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shadho_celery.standing import Standing, gist
from shadho_celery.strikes import Strikes
from shadho_celery.trial import Event, Lost, Result

#: characters of an error that a notice shows
SHOWN = 200


class Referee:
    """Judges the results of one study's workers by `Standing`, and says in Redis who is kept off."""

    def __init__(self, strikes: Strikes) -> None:
        self._strikes = strikes
        self._standing = Standing()
        #: what is to be said in Redis, for as long as it does not answer
        self._unsaid: list[Callable[[], None]] = []
        #: names of the workers that get no more trials
        self.fenced: set[str] = set()
        #: what the operator should know
        self.notices: list[str] = []

    def judge(self, result: Result, others: int) -> Event:
        """The result, or the loss of its attempt where another worker is to try the trial first.

        `others` are the workers beside its own that could do so.
        """
        verdict = self._standing.tell(result, others)
        for worker in verdict.absolved:
            self._unsaid.append(lambda worker=worker: self._strikes.absolve(worker, verdict.known))  # type: ignore[misc]
        for worker in verdict.on_probation:
            self._unsaid.append(lambda worker=worker: self._strikes.try_again(worker))  # type: ignore[misc]
        self.fenced |= verdict.fenced
        for worker in verdict.fenced:
            self._unsaid.append(lambda worker=worker: self._strikes.fence(worker))  # type: ignore[misc]
            self.notices.append(self._notice(worker))
        if not verdict.elsewhere:
            return result
        reason = f"it failed on {result.worker}, and is tried elsewhere: {gist(result.error)[:SHOWN]}"
        return Lost(number=result.number, attempt=result.attempt, reason=reason, claimed=False)

    def release(self, workers: Iterable[str]) -> None:
        """Let these workers go on: nobody else is left that could try their trials."""
        for worker in workers:
            self._unsaid.append(lambda worker=worker: self._strikes.absolve(worker))  # type: ignore[misc]

    def speak(self) -> None:
        """Say in Redis what was decided. Raises redis-py's errors; what was not said is said the next time."""
        while self._unsaid:
            self._unsaid[0]()
            del self._unsaid[0]

    def _notice(self, worker: str) -> str:
        host, error = self._standing.errors.get(worker, ("an unknown machine", ""))
        return (
            f"Warning: worker {worker} on {host} is fenced: others finish the trials it fails; its last error: "
            f"{gist(error)[:SHOWN]}; mend that machine and restart the worker"
        )
