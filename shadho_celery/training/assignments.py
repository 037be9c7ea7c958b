"""Assignments: the step on which each place of a gang works, and the resulting response times."""

from __future__ import annotations

from collections.abc import Callable

from shadho_celery.training.backups import Times


class Assignments:
    """Table of the steps on which places work. The time that each took is recorded in `times`."""

    def __init__(self, times: Times, now: Callable[[], float]) -> None:
        self._times, self._now = times, now
        #: step and time of its assignment, by place at work
        self._current: dict[int, tuple[int, float]] = {}
        #: newest step sent, by place
        self._sent: dict[int, int] = {}
        #: places whose vector was refused, which wait for the next step
        self._idle: set[int] = set()

    @property
    def busy(self) -> list[int]:
        """Places at work, on the current step or on an older one."""
        return list(self._current)

    @property
    def idle(self) -> frozenset[int]:
        """Places without work before the next step."""
        return frozenset(self._idle)

    def clear(self, place: int) -> None:
        """Remove the entries of a place, because its replica has left or was replaced."""
        self._idle.discard(place)
        self._current.pop(place, None)
        self._sent.pop(place, None)

    def assign(self, place: int, step: int) -> None:
        """Record that a step was sent. A place that still works on an older one begins it after `resume`."""
        self._idle.discard(place)
        self._sent[place] = step
        self._current.setdefault(place, (step, self._now()))

    def complete(self, place: int, step: int, at: float) -> None:
        """Record that the vector of an assigned step arrived at the time `at`."""
        current = self._current.get(place)
        if current is not None and current[0] == step:
            del self._current[place]
            self._times.record(place, at - current[1])

    def resume(self, place: int, step: int) -> bool:
        """Let a place whose vector was late continue with `step`. Return False if that step was not sent to it."""
        if self._sent.get(place, -1) < step:
            return False
        self._current.setdefault(place, (step, self._now()))
        return True

    def set_idle(self, place: int) -> None:
        """Record that the vector of a place was refused. The place waits for the next step."""
        self._idle.add(place)

    def cancel_all(self) -> list[int]:
        """Cancel the work of all places, because their step has ended. Return them, and record their times so far."""
        places, now = self.busy, self._now()
        for place in places:
            self._times.record(place, now - self._current.pop(place)[1], finished=False)
        return places
