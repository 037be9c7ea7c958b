"""How many gradients make a step while replicas come and go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from shadho_celery.errors import ShadhoError


@dataclass(frozen=True, kw_only=True)
class Patience:
    """What to do while there are fewer replicas than N."""

    #: for so long the gang waits for its first N replicas
    start_seconds: float = 60.0
    #: for so long a step waits for others in place of those that are gone
    grace_seconds: float = 10.0
    #: then: go on with those there are, N and learning rate in proportion; wait on; or end with an error
    on_few: Literal["shrink", "wait", "fail"] = "shrink"


class Width:
    """N as it is now; `adapt` follows how many replicas are alive and returns what to note where it changes N."""

    def __init__(self, replicas: int, patience: Patience, now: Callable[[], float]) -> None:
        #: gradients that make a step
        self.wanted = replicas
        self._replicas, self._patience, self._now = replicas, patience, now
        self._short_since: float | None = None
        self._until = now() + patience.start_seconds

    def begin(self, present: int, reason: str, hopeless: Callable[[], bool]) -> tuple[bool, str | None]:
        """Whether the first step may begin with those present, and what to note; `hopeless` tells if no more can come.

        Raises ShadhoError where too few came in time.
        """
        if present >= self._replicas:
            return True, None
        late = self._now() > self._until and self._patience.on_few != "wait"
        if not (late or hopeless()):
            return False, None
        missing = f"{present} of {self._replicas} replicas came{reason}"
        if self._patience.on_few == "fail" or not present:
            raise ShadhoError(
                f"{missing} within {self._patience.start_seconds:g} s; look whether they started, or ask for fewer"
            )
        return True, self._set(present, missing)

    def adapt(self, alive: int, reason: str, hopeless: Callable[[], bool]) -> str | None:
        """Follow the number of replicas that are alive, and return what to note.

        Raises ShadhoError where there are too few for too long, or it is waited for more and `hopeless` that they come.
        """
        if alive >= self.wanted:
            self._short_since = None
            return self._set(min(alive, self._replicas), "replicas are back")
        if self._short_since is None:
            self._short_since = self._now()
        waits = self._patience.on_few == "wait" and not hopeless()
        if waits or self._now() - self._short_since < self._patience.grace_seconds:
            return None
        here = f"{alive} of {self._replicas} replicas are left{reason}"
        if self._patience.on_few != "shrink":
            raise ShadhoError(f"{here}; see why the others ended, or allow the gang to shrink")
        if not alive:
            raise ShadhoError(f"{here}; see why they ended")
        return self._set(alive, here)

    def _set(self, wanted: int, why: str) -> str | None:
        if wanted == self.wanted:
            return None
        self.wanted, self._short_since = wanted, None
        return f"{why}: a step is made of {wanted}"
