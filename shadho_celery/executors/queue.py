"""Runs trials on a fleet of Celery workers: attempts go out through the broker, events come back over the channel."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import redis

from shadho_celery.channel import SchedulerChannel, configured_lease
from shadho_celery.clock import Clock, SystemClock
from shadho_celery.errors import ServiceError
from shadho_celery.executors.fleet import Fleet, Sent
from shadho_celery.executors.gangs import Gangs, Room
from shadho_celery.executors.referee import Referee
from shadho_celery.executors.sharing import BUNDLE_SECONDS, MESSAGE_SECONDS, bundles
from shadho_celery.hardware import ComputeClass
from shadho_celery.registry import is_outage
from shadho_celery.routing import Publisher
from shadho_celery.seats import SchedulerSeats
from shadho_celery.signing import UNSIGNED, Signer
from shadho_celery.strikes import Strikes
from shadho_celery.trial import WELL, Assembling, Event, GangEvent, Lost, Result, Started, Trial, TrialState, Unseated

#: seconds between two looks at workers, leases and fellow studies
LOOK_SECONDS = 1.0

#: seconds for which a class has had a free slot after which an unclaimed message is presumed lost
UNCLAIMED_SECONDS = 30.0

#: seconds after which what waits for a class without live workers is taken back
DESERTED_SECONDS = 10.0

#: looks in a row that find no lease of a claimed attempt, after which it is lost: its result may be on its way, or
#: Redis has lost its memory and the worker will tell it again
MISSED_LOOKS = 10

#: seconds within which the seats of a trial's gang are to be taken
GANG_WAIT_SECONDS = 60.0

#: seconds for which a slot has been free after which it idles, and a backup replica may have it
IDLE_SECONDS = 2.0

#: seconds between two attempts to reach a broker that is away
RETRY_SECONDS = 2.0

#: seconds of a class's work that should wait in its queue: about what the scheduler takes to notice and refill
AHEAD_SECONDS = 0.2
MAX_AHEAD = 256

#: seconds between two turns while the queues hold work ahead: each turn then does more at once
PACE_SECONDS = 0.04


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
        trial_timeout: float | None = None,
        gang_wait_seconds: float = GANG_WAIT_SECONDS,
        clock: Clock | None = None,
        signer: Signer = UNSIGNED,
    ) -> None:
        """`study` is the study's key, `module` the one its workers must have been started with.

        `weight` is its part of the slots when several studies want them. With `adopt` trials that a former scheduler
        left running are waited for; without, their workers are known to be gone, and all workers are on one machine.
        A trial is stopped after `trial_timeout` seconds; one whose gang is not complete after `gang_wait_seconds`
        gives its slots back, and is lost unclaimed.
        """
        self._channel = SchedulerChannel(client, study, signer)
        self._fleet = Fleet(client, study, module, weight, signer.fingerprint)
        self._publisher = publisher
        self._study = study
        self._module = module
        self._adopt = adopt
        self._timeout = trial_timeout
        self._clock = clock or SystemClock()
        #: attempts in flight by trial and attempt
        self._sent: dict[int, dict[int, Sent]] = {}
        self._events: list[Event] = []
        self._ended: list[tuple[int, int]] = []
        #: why the broker takes nothing, and Redis answers nothing, at the moment; None while they do
        self._refusal: ServiceError | None = None
        self._silence: ServiceError | None = None
        #: what it has not taken, and the moment to try again
        self._unsent: list[Trial] = []
        self._retry_at = -math.inf
        #: attempts of an earlier life; and those after which another one follows although they have ended
        self._orphans: list[tuple[int, int]] = []
        self._reopened: list[tuple[int, int]] = []
        #: what is to be taken back, for as long as Redis does not answer
        self._unwanted: list[tuple[list[tuple[int, int]], bool]] = []
        self._looked_at = -math.inf
        self._seen_leases_at = self._clock.now()
        #: mean seconds of a class's trials
        self._seconds: dict[str, float] = {}
        self._polled_at = -math.inf
        strikes = Strikes(client, study)
        self._referee = Referee(strikes)
        self._seats = SchedulerSeats(client, study, signer)
        self._gangs = Gangs(self._seats, publisher.publish, gang_wait_seconds)
        self._tended_at = -math.inf
        #: attempts of an earlier life that may have called for replicas
        self._unheard: list[tuple[int, int]] = []
        self._channel.open()
        strikes.open()

    def classes(self) -> Sequence[ComputeClass]:
        with _outages_pass():
            self._look()
        return [replace(each, ahead=self._ahead(each)) for each in self._fleet.classes]

    @property
    def trouble(self) -> ServiceError | None:
        """What is in the way at the moment, and will be tried again."""
        return self._refusal or self._silence

    def workers(self) -> Mapping[str, Mapping[str, Any]]:
        """What every live worker announces, also those that cannot run this study."""
        with _outages_pass():
            self._look()
        return self._fleet.announced

    def notices(self) -> Sequence[str]:
        """What the operator should know of workers and messages, once each."""
        found = [*self._referee.notices, *self._gangs.notices]
        if self._channel.forged:
            found.append("Warning: results that are not signed with our key are refused; see --signing-key-file")
        return found

    def refused(self) -> int:
        """Late results that were refused, as far as Redis can tell."""
        try:
            return self._channel.refused()
        except redis.RedisError:
            return 0

    def submit(self, trials: Sequence[Trial]) -> None:
        now = self._clock.now()
        for trial in trials:
            name = str(trial.compute_class)
            running = trial.state is TrialState.RUNNING
            sent = Sent(trial.attempt, name, now, running, trial, host=trial.host or "" if running else "")
            self._sent.setdefault(trial.number, {})[trial.attempt] = sent
        if not self._adopt and self._polled_at == -math.inf:
            # Known from an earlier life: whatever ran them has ended with it.
            self._orphans += [(trial.number, trial.attempt) for trial in trials]
            return
        self._unheard += [(trial.number, trial.attempt) for trial in trials if trial.state is TrialState.RUNNING]
        queued = [trial for trial in trials if trial.state is TrialState.QUEUED]
        # Not for a copy of what runs: that may have ended in this moment.
        again = [trial for trial in queued if trial.attempt > 1 and len(self._sent[trial.number]) == 1]
        self._reopened += [(trial.number, trial.attempt - 1) for trial in again]
        self._unsent += queued
        self._send()

    def poll(self, seconds: float) -> Sequence[Event]:
        self._send()
        try:
            self._confirm()
            self._take_back()
            self._referee.speak()
            self._look()
            self._tend_gangs()
            self._pace()
            wait = 0.0 if self._events else min(seconds, LOOK_SECONDS if self._sent else 0.1)
            events = [*self._events, *self._heard(self._channel.drain(int(wait * 1000)))]
        except redis.RedisError as error:
            if not is_outage(error):
                raise _unusable(error) from error
            self._silence = _unusable(error)
            self._clock.sleep(min(seconds, LOOK_SECONDS))
            return []
        self._events, self._silence = [], None
        return [self._judged(event) for event in events]

    def cancel(self, numbers: Iterable[int], *, running: bool) -> None:
        self._cancel([(number, attempt) for number in numbers for attempt in self._sent.get(number, ())], running)

    def _cancel(self, attempts: list[tuple[int, int]], running: bool) -> None:
        if attempts:
            self._unwanted.append((attempts, running))
            with _outages_pass():
                self._take_back()

    def backups_running(self, compute_class: str) -> int:
        """Slots of a class that backup replicas take; a trial that is sent there gets theirs."""
        return self._gangs.backups(compute_class)

    def close(self) -> None:
        try:
            self._fleet.withdraw()
            self._confirm()
            if not self._sent:
                self._channel.erase()
        except redis.RedisError:
            pass
        self._publisher.close()

    def _take_back(self) -> None:
        if self._orphans:
            self._channel.give_up(self._orphans, "it ran on this machine, and ended with its scheduler")
            self._orphans.clear()
        while self._unwanted:
            attempts, running = self._unwanted[0]
            self._channel.cancel(attempts, running=running)
            del self._unwanted[0]

    def _send(self) -> None:
        """Publish what is to be sent; a broker that is away is asked again now and then, while what runs goes on."""
        if not (self._unsent or self._reopened) or self._clock.now() < self._retry_at:
            return
        try:
            if self._reopened:
                self._channel.reopen(self._reopened)
                self._reopened.clear()
            self._publish([trial for trial in self._unsent if trial.attempt in self._sent.get(trial.number, ())])
        except redis.RedisError as error:
            if not is_outage(error):
                raise _unusable(error) from error
        except ServiceError as error:
            self._refusal, self._retry_at = error, self._clock.now() + RETRY_SECONDS
        else:
            self._refusal, self._retry_at = None, -math.inf
            self._unsent.clear()

    def _publish(self, trials: Sequence[Trial]) -> None:
        by_class: dict[str, list[Trial]] = defaultdict(list)
        for trial in trials:
            by_class[str(trial.compute_class)].append(trial)
        slots = {compute_class.name: compute_class.slots for compute_class in self._fleet.classes}
        self._publisher.publish(
            (name, self._payload(bundle))
            for name, group in by_class.items()
            for bundle in [
                *bundles(
                    [t for t in group if not self._goes_alone(t)], self._seconds.get(name, math.inf), slots.get(name, 1)
                ),
                *([t] for t in group if self._goes_alone(t)),
            ]
        )

    def _goes_alone(self, trial: Trial) -> bool:
        """Whether a message may carry nothing but this: it takes several slots, or not every machine may have it."""
        return trial.slots > 1 or self._other_host(trial) is not None

    def _other_host(self, trial: Trial) -> str | None:
        """The machine on which another attempt of the trial runs; None where there is no such attempt."""
        others = (sent for attempt, sent in self._sent.get(trial.number, {}).items() if attempt != trial.attempt)
        return next((sent.host for sent in others if sent.claimed), None)

    def _payload(self, trials: Sequence[Trial]) -> dict[str, Any]:
        return {
            "study": self._study,
            "module": self._module,
            "attempts": [_attempt(trial, self._timeout, self._other_host(trial)) for trial in trials],
            # Where there is nobody to compare it with, a worker's failures tell nothing of it.
            "watched": self._adopt and len(self._fleet.able) > 1,
        }

    def _judged(self, event: Event) -> Event:
        """The event as the study is to take it; the books of what is in flight are kept."""
        sent = self._sent.get(event.number, {}).get(event.attempt)
        if isinstance(event, Result) and self._adopt and sent is not None:
            event = self._referee.judge(event, len(self._fleet.able - {event.worker}))
        if isinstance(event, Started) and sent is not None:
            sent.claimed, sent.worker, sent.host = True, event.worker, event.host
        elif isinstance(event, Result) or (isinstance(event, Lost) and sent is not None):
            self._note_end(event, sent)
        return event

    def _note_end(self, event: Result | Lost, sent: Sent | None) -> None:
        """An attempt has ended, and with it its trial: but where it did not end well, and others live."""
        alive = self._sent.get(event.number, {})
        if isinstance(event, Result) and sent is not None:
            self._time(sent.compute_class, event.seconds or 0.0)
        if sent is not None and (isinstance(event, Lost) or event.state not in WELL):
            self._gangs.close(event.number, event.attempt)
            del alive[event.attempt]
            if alive:
                # Where no worker had claimed the other one yet, this one has ended the trial for Redis.
                self._reopened.append((event.number, event.attempt))
        else:
            self._gangs.close(event.number)
            alive.clear()
        if not alive:
            self._sent.pop(event.number, None)

    def _in_flight(self) -> Iterator[tuple[int, Sent]]:
        """Number and attempt of all that was sent and has not ended."""
        for number, attempts in self._sent.items():
            for sent in attempts.values():
                yield number, sent

    def _heard(self, events: Iterable[Event | GangEvent]) -> list[Event]:
        """What the study is to know of; what happens inside gangs is dealt with here."""
        found: list[Event] = []
        for event in events:
            if isinstance(event, Assembling):
                self._assemble(event)
            elif isinstance(event, Unseated):
                self._gangs.failed(event)
            else:
                found.append(event)
                continue
            # At once, and not at the next look.
            self._tended_at = -math.inf
        return found

    def _assemble(self, call: Assembling) -> None:
        """A trial has called for its replicas: from now on there are seats to be filled."""
        sent = self._sent.get(call.number, {}).get(call.attempt)
        if sent is None or sent.trial is None:
            return
        # Its time limit is its coordinator's; with that one all of them end.
        payload = {**self._payload([sent.trial]), "attempts": [_attempt(sent.trial, None)]}
        self._gangs.open(call, sent.compute_class, sent.slots, payload, self._clock.now())

    def _tend_gangs(self) -> None:
        """Every LOOK_SECONDS: see who sits where, publish free seats, give up gangs that do not come together."""
        now = self._clock.now()
        if self._unheard:
            for call in self._seats.calls(self._unheard):
                self._assemble(call)
            self._unheard.clear()
        if not self._gangs or now - self._tended_at < LOOK_SECONDS or now < self._retry_at:
            return
        self._tended_at = now

        def has_waited(compute_class: str, at: float) -> bool:
            return self._fleet.has_waited(compute_class, at, now, UNCLAIMED_SECONDS)

        try:
            self._gangs.tend(now, {each.name: self._room(each, now) for each in self._fleet.classes}, has_waited)
        except ServiceError as error:
            self._refusal, self._retry_at = error, now + RETRY_SECONDS
            return
        for gang in self._gangs.overdue(now):
            self._channel.give_up([(gang.number, gang.attempt)], gang.reason, claimed=gang.failed)

    def _room(self, compute_class: ComputeClass, now: float) -> Room:
        """What this study's trials leave of a class for backup replicas."""
        taken = sum(sent.slots for _, sent in self._in_flight() if sent.compute_class == compute_class.name)
        idles = self._fleet.has_waited(compute_class.name, -math.inf, now, IDLE_SECONDS)
        return Room(
            spare=math.ceil(compute_class.share) - taken,
            idle=compute_class.slots - compute_class.busy if idles else 0,
        )

    def _ahead(self, compute_class: ComputeClass) -> int:
        """Trials to keep waiting: what the class does while the scheduler takes its turn."""
        seconds = self._seconds.get(compute_class.name, math.inf)
        return min(MAX_AHEAD, round(compute_class.share * AHEAD_SECONDS / seconds))

    def _pace(self) -> None:
        """Where the queues hold work ahead, let some events gather first."""
        if any(self._ahead(compute_class) for compute_class in self._fleet.classes):
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
        self._fleet.look(now, [sent for _, sent in self._in_flight()], self._referee.fenced)
        if not self._fleet.able:
            self._referee.release(self._fleet.kept_off)
        self._see_leases(now - self._seen_leases_at)
        self._seen_leases_at = now
        self._see_strays(now)

    def _see_leases(self, unseen_seconds: float) -> None:
        """Claimed attempts whose lease has ended, or of which Redis knows nothing any more, are lost."""
        if unseen_seconds > max(configured_lease() / 3, 3 * LOOK_SECONDS):
            # We could not look, so workers may not have been able to renew: they get the time to do so.
            self._channel.extend_leases()
        ended = self._channel.ended_leases()
        for number, attempt in ended:
            reason = "its worker fell silent: the lease ran out"
            self._events.append(Lost(number=number, attempt=attempt, reason=reason))
        claimed = [(number, sent.attempt) for number, sent in self._in_flight() if sent.claimed]
        for (number, attempt), known in zip(claimed, self._channel.leased(claimed), strict=True):
            sent = self._sent[number][attempt]
            sent.missed = 0 if known else sent.missed + 1
            if sent.missed >= MISSED_LOOKS:
                reason = "Redis has forgotten it, and no worker tells of it any more"
                self._events.append(Lost(number=number, attempt=attempt, reason=reason, claimed=False))
        self._ended = sorted(ended)

    def _see_strays(self, now: float) -> None:
        """Take back what should long have been claimed, and what waits for a class that has died out."""
        strays = []
        for number, sent in self._in_flight():
            if sent.claimed:
                continue
            if self._fleet.is_deserted(sent, now, DESERTED_SECONDS) or self._fleet.has_waited(
                sent.compute_class, sent.at, now, UNCLAIMED_SECONDS
            ):
                strays.append((number, sent.attempt))
        # Sent as a new attempt, which costs the trial nothing: the old message will be refused.
        self._cancel(strays, running=False)


def _attempt(trial: Trial, timeout: float | None, not_on: str | None = None) -> dict[str, Any]:
    record = {"number": trial.number, "attempt": trial.attempt, "params": trial.params, "seed": trial.seed}
    others: dict[str, Any] = {
        "budget": trial.budget,
        "timeout": timeout,
        "slots": trial.slots if trial.slots > 1 else None,
    }
    others |= {"origin": trial.origin, "not_on": not_on}
    return {**record, **{name: value for name, value in others.items() if value is not None}}


@contextmanager
def _outages_pass() -> Iterator[None]:
    """Redis restarts or is cut off for a while: nothing is known to have happened, and nothing is lost."""
    try:
        yield
    except redis.RedisError as error:
        if not is_outage(error):
            raise _unusable(error) from error


def _unusable(error: redis.RedisError) -> ServiceError:
    cause = " ".join(str(error).split())[:200]
    return ServiceError(f"Redis cannot be used at the moment ({cause}); see to its server, its memory and its disk")
