"""What each place of a gang was asked for and works on, as its coordinator knows it."""

from __future__ import annotations

from collections.abc import Callable

from shadho_celery.training.backups import Times


class Duties:
    """Who works on what, and for how long; how long each took goes to `times`."""

    def __init__(self, times: Times, now: Callable[[], float]) -> None:
        self._times, self._now = times, now
        #: what each place works on: the step it was sent, and when
        self._asked: dict[int, tuple[int, float]] = {}
        #: newest step that each place was sent
        self._sent: dict[int, int] = {}
        #: places whose vector was refused: they wait for the next step
        self._idle: set[int] = set()

    @property
    def working(self) -> list[int]:
        """Places that are at work, on the step under way or still on an older one."""
        return list(self._asked)

    @property
    def idle(self) -> frozenset[int]:
        """Places that have nothing to do until there is a next step."""
        return frozenset(self._idle)

    def clear(self, place: int) -> None:
        """Nobody is there any more, or somebody else."""
        self._idle.discard(place)
        for told in (self._asked, self._sent):
            told.pop(place, None)

    def send(self, place: int, step: int) -> None:
        """A place is sent a step; while it is at work on an older one, it is asked for it when that is done."""
        self._idle.discard(place)
        self._sent[place] = step
        self._asked.setdefault(place, (step, self._now()))

    def answer(self, place: int, step: int, at: float) -> None:
        """The vector that it was asked for came from a place at the moment `at`."""
        asked = self._asked.get(place)
        if asked is not None and asked[0] == step:
            del self._asked[place]
            self._times.tell(place, at - asked[1])

    def goes_on(self, place: int, step: int) -> bool:
        """Whether a place whose vector came too late has been sent the step under way, and is at work on it now."""
        if self._sent.get(place, -1) < step:
            return False
        self._asked.setdefault(place, (step, self._now()))
        return True

    def wait(self, place: int) -> None:
        """What came from a place was refused: it waits for the next step."""
        self._idle.add(place)

    def cut_off(self) -> list[int]:
        """The step is over: the places that give up on it, after so long."""
        places, now = self.working, self._now()
        for place in places:
            self._times.tell(place, now - self._asked.pop(place)[1], finished=False)
        return places
