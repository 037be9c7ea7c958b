"""Quorum: how many gradients make a step while replicas come and go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from shadho_celery.errors import ShadhoError


@dataclass(frozen=True, kw_only=True)
class QuorumPolicy:
    """Reaction to fewer than N replicas."""

    #: seconds to wait for the first N replicas
    start_seconds: float = 60.0
    #: seconds for which a step waits for replacements of lost replicas
    grace_seconds: float = 10.0
    #: after that: continue with fewer replicas and a lower learning rate, wait on, or end with an error
    on_few: Literal["shrink", "wait", "fail"] = "shrink"


class Quorum:
    """Number of gradients that currently make a step. It follows the number of live replicas."""

    def __init__(self, replicas: int, policy: QuorumPolicy, now: Callable[[], float]) -> None:
        #: gradients that make a step
        self.size = replicas
        self._replicas, self._policy, self._now = replicas, policy, now
        self._short_since: float | None = None
        self._until = now() + policy.start_seconds

    def start(self, present: int, reason: str, hopeless: Callable[[], bool]) -> tuple[bool, str | None]:
        """Decide whether the first step may begin with those present. Return the decision and a note.

        `hopeless` returns True if no more replicas can come. Raises ShadhoError if too few came in time.
        """
        if present >= self._replicas:
            return True, None
        late = self._now() > self._until and self._policy.on_few != "wait"
        if not (late or hopeless()):
            return False, None
        missing = f"{present} of {self._replicas} replicas came{reason}"
        if self._policy.on_few == "fail" or not present:
            raise ShadhoError(
                f"{missing} within {self._policy.start_seconds:g} s; check that they were started, or ask for fewer"
            )
        return True, self._resize(present, missing)

    def follow(self, alive: int, reason: str, hopeless: Callable[[], bool]) -> str | None:
        """Follow the number of live replicas. Return a note if the quorum changes.

        Raises ShadhoError if there are too few for too long, or if the policy is to wait and no more can come.
        """
        if alive >= self.size:
            self._short_since = None
            return self._resize(min(alive, self._replicas), "replicas are back")
        if self._short_since is None:
            self._short_since = self._now()
        waits = self._policy.on_few == "wait" and not hopeless()
        if waits or self._now() - self._short_since < self._policy.grace_seconds:
            return None
        left = f"{alive} of {self._replicas} replicas are left{reason}"
        if self._policy.on_few != "shrink":
            raise ShadhoError(f"{left}; find out why the others ended, or let the gang shrink (on_few='shrink')")
        if not alive:
            raise ShadhoError(f"{left}; find out why they ended")
        return self._resize(alive, left)

    def _resize(self, size: int, reason: str) -> str | None:
        if size == self.size:
            return None
        self.size, self._short_since = size, None
        return f"{reason}: a step now takes {size} gradients"
