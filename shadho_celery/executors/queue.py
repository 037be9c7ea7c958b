"""Runs trials on a fleet of Celery workers: attempts go out through the broker, events come back over the channel."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import redis

from shadho_celery.channel import SchedulerChannel
from shadho_celery.clock import Clock, SystemClock
from shadho_celery.errors import ServiceError
from shadho_celery.executors.sharing import BUNDLE_SECONDS, MESSAGE_SECONDS, allow, bundles
from shadho_celery.hardware import ComputeClass, uses_gpus
from shadho_celery.registry import Registry
from shadho_celery.routing import PROTOCOL, Publisher
from shadho_celery.trial import Event, Lost, Result, Started, Trial, TrialState

#: Redis restarts or is cut off for a while: nothing is known to have happened, and nothing is lost.
OUTAGES = (redis.ConnectionError, redis.TimeoutError)

#: seconds between two looks at workers, leases and fellow studies
LOOK_SECONDS = 1.0

#: seconds for which a class has had a free slot after which an unclaimed message is presumed lost
UNCLAIMED_SECONDS = 30.0

#: seconds after which what waits for a class without live workers is taken back
DESERTED_SECONDS = 10.0

#: seconds between two attempts to reach a broker that is away
RETRY_SECONDS = 2.0

#: seconds of a class's work that should wait in its queue: about what the scheduler takes to notice and refill
AHEAD_SECONDS = 0.2
MAX_AHEAD = 256

#: seconds between two turns while the queues hold work ahead: each turn then does more at once
PACE_SECONDS = 0.04


@dataclass
class _Sent:
    """An attempt in flight."""

    attempt: int
    compute_class: str
    at: float
    claimed: bool = False
    #: looks in a row at which Redis knew no lease of the claimed attempt
    missed: int = 0


class QueueExecutor:
    """One queue a compute class, as the live workers announce them."""

    def __init__(
        self,
        client: redis.Redis,
        publisher: Publisher,
        study: str,
        module: str,
        *,
        weight: float = 1.0,
        adopt: bool = True,
        clock: Clock | None = None,
    ) -> None:
        """`study` is the study's key, `module` the one its workers must have been started with.

        `weight` is its part of the slots when several studies want them. With `adopt` trials that a former scheduler
        left running are waited for; without, their workers are known to be gone.
        """
        self._channel = SchedulerChannel(client, study)
        self._workers = Registry(client, "worker")
        self._studies = Registry(client, "study")
        self._publisher = publisher
        self._study = study
        self._module = module
        self._weight = weight
        self._clock = clock or SystemClock()
        self._sent: dict[int, _Sent] = {}
        self._events: list[Event] = []
        self._ended: list[tuple[int, int]] = []
        #: why the broker takes nothing at the moment; None while it does
        self.trouble: ServiceError | None = None
        #: what it has not taken, and the moment to try again
        self._unsent: list[Trial] = []
        self._retry_at = -math.inf
        #: what is to be taken back, for as long as Redis does not answer
        self._unwanted: list[tuple[list[tuple[int, int]], bool]] = []
        self._looked_at = -math.inf
        self._announced: dict[str, dict[str, Any]] = {}
        self._classes: list[ComputeClass] = []
        #: mean seconds of a class's trials
        self._seconds: dict[str, float] = {}
        self._polled_at = -math.inf
        self._free_since: dict[str, float] = {}
        self._seen_at: dict[str, float] = {}
        self._channel.open()
        if not adopt:
            self._channel.end_leases()

    def classes(self) -> Sequence[ComputeClass]:
        with suppress(*OUTAGES):
            self._look()
        return [replace(each, ahead=self._ahead(each)) for each in self._classes]

    def workers(self) -> Mapping[str, Mapping[str, Any]]:
        """What every live worker announces, also those that cannot run this study."""
        with suppress(*OUTAGES):
            self._look()
        return self._announced

    def submit(self, trials: Sequence[Trial]) -> None:
        now = self._clock.now()
        for trial in trials:
            name = str(trial.compute_class)
            running = trial.state is TrialState.RUNNING
            self._sent[trial.number] = _Sent(attempt=trial.attempt, compute_class=name, at=now, claimed=running)
        self._unsent += [trial for trial in trials if trial.state is TrialState.QUEUED]
        self._send()

    def poll(self, seconds: float) -> Sequence[Event]:
        self._send()
        try:
            self._confirm()
            self._take_back()
            self._look()
            self._pace()
            wait = 0.0 if self._events else min(seconds, LOOK_SECONDS if self._sent else 0.1)
            events = self._events + self._channel.drain(int(wait * 1000))
        except OUTAGES:
            self._clock.sleep(min(seconds, LOOK_SECONDS))
            return []
        self._events = []
        for event in events:
            self._note(event)
        return events

    def cancel(self, numbers: Iterable[int], *, running: bool) -> None:
        attempts = [(number, self._sent[number].attempt) for number in numbers if number in self._sent]
        if attempts:
            self._unwanted.append((attempts, running))
            with suppress(*OUTAGES):
                self._take_back()

    def close(self) -> None:
        try:
            self._studies.withdraw(self._study)
            self._confirm()
            if not self._sent:
                self._channel.erase()
        except redis.RedisError:
            pass
        self._publisher.close()

    def _take_back(self) -> None:
        while self._unwanted:
            attempts, running = self._unwanted[0]
            self._channel.cancel(attempts, running=running)
            del self._unwanted[0]

    def _send(self) -> None:
        """Publish what is to be sent; a broker that is away is asked again now and then, while what runs goes on."""
        if not self._unsent or self._clock.now() < self._retry_at:
            return
        attempts = {number: sent.attempt for number, sent in self._sent.items()}
        try:
            self._publish([trial for trial in self._unsent if attempts.get(trial.number) == trial.attempt])
        except ServiceError as error:
            self.trouble, self._retry_at = error, self._clock.now() + RETRY_SECONDS
        else:
            self.trouble, self._retry_at = None, -math.inf
            self._unsent.clear()

    def _publish(self, trials: Sequence[Trial]) -> None:
        by_class: dict[str, list[Trial]] = defaultdict(list)
        for trial in trials:
            by_class[str(trial.compute_class)].append(trial)
        slots = {compute_class.name: compute_class.slots for compute_class in self._classes}
        self._publisher.publish(
            (name, self._payload(bundle))
            for name, group in by_class.items()
            for bundle in bundles(group, self._seconds.get(name, math.inf), slots.get(name, 1))
        )

    def _payload(self, trials: Sequence[Trial]) -> dict[str, Any]:
        return {
            "study": self._study,
            "module": self._module,
            "attempts": [_attempt(trial) for trial in trials],
        }

    def _note(self, event: Event) -> None:
        """Keep the books of what is in flight."""
        sent = self._sent.get(event.number)
        if sent is None:
            return
        if isinstance(event, Started) and event.attempt == sent.attempt:
            sent.claimed = True
        elif isinstance(event, Result) or (isinstance(event, Lost) and event.attempt == sent.attempt):
            del self._sent[event.number]
            if isinstance(event, Result):
                self._time(sent.compute_class, event.seconds or 0.0)

    def _ahead(self, compute_class: ComputeClass) -> int:
        """Trials to keep waiting: what the class does while the scheduler takes its turn."""
        seconds = self._seconds.get(compute_class.name, math.inf)
        return min(MAX_AHEAD, round(compute_class.share * AHEAD_SECONDS / seconds))

    def _pace(self) -> None:
        """Where the queues hold work ahead, let some events gather first."""
        if any(self._ahead(compute_class) for compute_class in self._classes):
            self._clock.sleep(max(0.0, self._polled_at + PACE_SECONDS - self._clock.now()))
        self._polled_at = self._clock.now()

    def _time(self, compute_class: str, seconds: float) -> None:
        """Learn how long a class's trials take: a mean that forgets, and never believes the first short one."""
        before = self._seconds.get(compute_class, 10 * BUNDLE_SECONDS)
        self._seconds[compute_class] = before + 0.2 * (max(seconds, MESSAGE_SECONDS) - before)

    def _confirm(self) -> None:
        self._channel.confirm()
        self._channel.forget(self._ended)
        self._ended.clear()

    def _look(self) -> None:
        """Every LOOK_SECONDS: who lives, whose lease has ended, what got lost."""
        now = self._clock.now()
        if now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        self._announced = self._workers.living()
        self._see_classes(now)
        self._see_leases()
        self._see_strays(now)

    def _see_classes(self, now: float) -> None:
        able = [w for w in self._announced.values() if self._module in w["imports"] and w["protocol"] == PROTOCOL]
        by_name: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for worker in able:
            by_name[worker["compute_class"]].append(worker)
        fellows = self._studies.living()
        fellows.pop(self._study, None)
        wants = {}
        self._classes = []
        for name, workers in by_name.items():
            slots = sum(w["slots"] for w in workers)
            busy = sum(w["busy"] for w in workers)
            others = [(f["weight"], f["wants"].get(name, 0)) for f in fellows.values()]
            allowance = allow(slots, self._weight, others)
            in_flight = sum(sent.compute_class == name for sent in self._sent.values())
            wants[name] = slots if in_flight >= math.ceil(allowance) or not self._sent else in_flight + 1
            if busy < slots:
                self._free_since.setdefault(name, now)
            else:
                self._free_since.pop(name, None)
            self._seen_at[name] = now
            self._classes.append(
                ComputeClass(
                    name=name,
                    slots=slots,
                    busy=busy,
                    workers=len(workers),
                    allowance=allowance,
                    memory=min(_memory(name, w["machine"]) for w in workers),
                    gpu_memory=min(w["machine"]["gpu_memory"] for w in workers) if uses_gpus(name) else 0,
                    cores=max(w["machine"]["cores"] for w in workers),
                )
            )
        self._studies.announce(self._study, {"weight": self._weight, "wants": wants})

    def _see_leases(self) -> None:
        """Claimed attempts whose lease has ended, or of which Redis knows nothing any more, are lost."""
        ended = set(self._channel.ended_leases())
        claimed = [(number, sent.attempt) for number, sent in self._sent.items() if sent.claimed]
        for (number, attempt), known in zip(claimed, self._channel.leased(claimed), strict=True):
            sent = self._sent[number]
            sent.missed = 0 if known else sent.missed + 1
            # Once is no proof: the result may be on its way to us.
            if sent.missed > 3:
                ended.add((number, attempt))
        for number, attempt in ended:
            reason = "its worker fell silent: the lease ran out"
            self._events.append(Lost(number=number, attempt=attempt, reason=reason))
        self._ended = sorted(ended)

    def _see_strays(self, now: float) -> None:
        """Send again what should long have been claimed; take back what waits for a class that has died out."""
        again, deserted = [], []
        for number, sent in self._sent.items():
            if sent.claimed:
                continue
            if now - max(sent.at, self._seen_at.get(sent.compute_class, -math.inf)) > DESERTED_SECONDS:
                deserted.append(number)
            elif now - max(sent.at, self._free_since.get(sent.compute_class, now)) > UNCLAIMED_SECONDS:
                again.append(number)
        if deserted:
            self.cancel(deserted, running=False)
        if again:
            # Taken back and sent as a new attempt: it costs the trial nothing, and the old message is refused.
            self.cancel(again, running=False)


def _attempt(trial: Trial) -> dict[str, Any]:
    record = {"number": trial.number, "attempt": trial.attempt, "params": trial.params, "seed": trial.seed}
    return record if trial.budget is None else {**record, "budget": trial.budget}


def _memory(compute_class: str, machine: Mapping[str, Any]) -> int:
    """Bytes that a trial of the class may use on an announced machine: of its smallest GPU, else of its RAM."""
    of_gpu = machine["gpu_memory"] if uses_gpus(compute_class) else 0
    return int(of_gpu or machine["memory"])
