"""How a worker is known to the schedulers, and takes messages only while none of them keeps it off."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import redis

from shadho_celery.clock import Clock
from shadho_celery.intake import Intake
from shadho_celery.registry import Registry
from shadho_celery.strikes import Strikes
from shadho_celery.underway import Underway

log = logging.getLogger(__name__)

#: seconds between two announcements
ANNOUNCE_EVERY = 5.0


class Presence:
    """One worker's announcements, and its standing with the studies. `beat` is for one thread, the rest for any."""

    def __init__(
        self, client: redis.Redis, worker: str, facts: Mapping[str, Any], underway: Underway, clock: Clock
    ) -> None:
        """`worker` is its name, `facts` what it announces beside how much is `underway` and whether it is kept off."""
        self._client = client
        self._registry = Registry(client, "worker")
        self._studies = Registry(client, "study")
        self._worker = worker
        self._facts = facts
        self._underway = underway
        self._clock = clock
        self._announced = threading.Event()
        self._announced_at = clock.now()
        self._intake: Intake | None = None
        self._lock = threading.Lock()
        #: studies that let this worker have nothing, and how they say so: ``held`` or ``fenced``
        self._kept_off: dict[str, str] = {}

    def announce(self, intake: Intake | None = None) -> None:
        """Let the schedulers know of this worker, until it is withdrawn; `intake` brings it messages."""
        self._intake = intake
        self._announced.set()
        self._announce()

    def withdraw(self) -> None:
        """Be forgotten by the schedulers: nothing new is sent."""
        self._announced.clear()
        try:
            self._registry.withdraw(self._worker)
        except redis.RedisError:
            log.warning("could not sign off; the schedulers will notice")

    def heard(self) -> None:
        """A message has come."""
        if self._intake is not None:
            self._intake.heard()

    def beat(self, *, has_room: bool) -> None:
        """To be called every second or so, with whether a slot is free. Raises redis-py's errors."""
        self._see_whether_let_on()
        if self._intake is not None and has_room:
            self._intake.check(lambda: bool(self._studies.living()))
        if self._announced.is_set() and self._clock.now() - self._announced_at >= ANNOUNCE_EVERY:
            self._announce()
            self._announced_at = self._clock.now()

    def keep_off(self, study: str) -> None:
        """Take no more messages until the study's scheduler has judged the failures."""
        with self._lock:
            is_new = study not in self._kept_off
            self._kept_off.setdefault(study, "held")
        if self._intake is not None:
            self._intake.pause()
        if is_new:
            self._announce_now()

    def _see_whether_let_on(self) -> None:
        """Go on where every study that had doubts has been answered; one that has fenced this worker never is."""
        living = self._studies.living() if self._kept_off else {}
        for study, was in list(self._kept_off.items()):
            stands = Strikes(self._client, study).standing(self._worker)
            if stands == "held" and study not in living:
                # Its scheduler has gone without an answer; the next one begins without doubts.
                stands = "free"
            if stands == "fenced" and was != "fenced":
                log.error("fenced: this worker failed trials that others finished; mend this machine, then restart it")
            with self._lock:
                if stands == "free":
                    del self._kept_off[study]
                else:
                    self._kept_off[study] = stands
            if stands != was:
                self._announce_now()
            if not self._kept_off and self._intake is not None:
                self._intake.resume()

    def _announce(self) -> None:
        with self._lock:
            is_held = bool(self._kept_off)
        self._registry.announce(self._worker, {**self._facts, "busy": len(self._underway), "held": is_held})

    def _announce_now(self) -> None:
        """Announce what has changed, where Redis answers; else the next announcement tells."""
        with suppress(redis.RedisError):
            self._announce()
