"""Queue executor: sends attempts to Celery workers through the broker, and receives their events over the channel.

The function `remove` deletes the Redis keys of a study that was deleted from the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import redis
from msgspec import structs

from shadho_celery.core.attempts import Attempts, Sent
from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.records import Answer
from shadho_celery.core.system import Clock, SystemClock
from shadho_celery.core.trial import Attempt, Event, GangEvent, Result, TrialState
from shadho_celery.errors import ServiceError
from shadho_celery.fleet import urls
from shadho_celery.fleet.channel import HOLD_SECONDS, Quarantine, SchedulerChannel, Shipping
from shadho_celery.fleet.circuit_breaker import CircuitBreaker
from shadho_celery.fleet.control import TO_WORKERS, Client, Inbox, Request, Sweep
from shadho_celery.fleet.dispatch import LOOK_SECONDS, Dispatch, LeaseMonitor
from shadho_celery.fleet.drains import Drain, Drains, DrainWatch
from shadho_celery.fleet.gangs import Gangs
from shadho_celery.fleet.redis import connect, flush, is_outage, outages_pass, refusals, unusable
from shadho_celery.fleet.registry import Progress, of_other_protocols, one_a_disk
from shadho_celery.fleet.seats import SchedulerSeats
from shadho_celery.fleet.workers import FleetStudy, Servers, Workers
from shadho_celery.study.recorder import Recorder

#: seconds after which a study's sources are shipped again, in case Redis has lost them
SHIP_SECONDS = 30.0

#: maximum number of queues whose messages are counted for the metrics, because each count is a request to the broker.
#: Further queues, in the order of their names, are left out
MOST_QUEUES = 100


class QueueExecutor:
    """Executor with one queue per compute class. The classes are those that live workers announce.

    `live` are the study's live attempts. `progress` and `wanted` are passed to `Workers`. `recorder` is told which
    workers come and go.

    Raises StudyLocked if another scheduler runs the study on this Redis, and UsageError if sources must be shipped
    without a signing key.
    """

    def __init__(
        self,
        servers: Servers,
        study: FleetStudy,
        live: Attempts[Sent],
        *,
        progress: Callable[[], Progress | None] = lambda: None,
        wanted: Callable[[], Mapping[str, int]] = dict,
        recorder: Recorder | None = None,
        clock: Clock | None = None,
    ) -> None:
        client, signer, control = servers.client, servers.signer, servers.control
        self._clock = clock or SystemClock()
        self._study, self._publisher, key = study, servers.publisher, study.template.study
        #: inbox that receives control requests; None if this process refuses requests
        self._inbox = (
            None
            if control is None
            else Inbox(client, key, study.fence, control, servers.guard, study.begun_by, study.owner)
        )
        self._guard = servers.guard
        #: sender of requests to workers to delete folders; None if this process has no key for them
        self._sweeps = None if control is None else Client(client, control, TO_WORKERS)
        self.channel = channel = SchedulerChannel(client, key, signer, study.fence, self._inbox)
        quarantine = Quarantine(client, key)
        self._breaker = CircuitBreaker(quarantine)
        #: live workers as of the last `poll`
        self.workers = workers = Workers(servers, study, progress, wanted)
        self._drain_watch = None if control is None else DrainWatch(Drains(client, control))
        #: sequence numbers of the drains that workers obeyed at the last call of `drains`
        self._obeyed = workers.obeyed
        self._recorder = recorder
        #: workers that were present at the last call of `_record_workers`
        self._recorded: frozenset[str] = frozenset()
        self._in_flight = live
        self._dispatch = Dispatch(
            study.template, self._publisher, channel, workers, live, self._clock, study.takes_over
        )
        self._leases = LeaseMonitor(channel, workers, live, self._breaker, self._clock)
        seats = SchedulerSeats(client, key, signer)
        self.gangs = Gangs(seats, self._dispatch, workers, live, study.gang_wait_seconds)
        #: ships the sources; None if there are none
        sources = study.sources
        self._ship = None if sources is None else partial(Shipping(client, signer).send, key, sources, study.inputs)
        #: True until the first poll; attempts that are submitted before it were sent by an earlier scheduler
        self._is_new = True
        #: True if the last `poll` returned all events from before the last check of the leases. The caller handles
        #: these events before it polls again
        self._is_informed = False
        #: pending calls that take attempts back; they are repeated until Redis answers
        self._unwanted: list[Callable[[], object]] = []
        #: reason why Redis is unavailable, or None; meanwhile no trial can end
        self.silence: ServiceError | None = None
        self._take_over(quarantine)

    def _take_over(self, quarantine: Quarantine) -> None:
        """Lock the study on this Redis, and ship its sources. Raises StudyLocked or ServiceError."""
        with refusals():
            self.channel.repair()
            self.channel.lock()
            quarantine.reset(self._dispatch.template.code)
            if self._ship is not None:
                self._ship()
        #: times at which the lock was last renewed and the sources were last shipped
        self._held_at = self._shipped_at = self._clock.now()

    def classes(self) -> Sequence[ComputeClass]:
        known = self.workers.take_turns(self._clock.now(), self._in_flight)
        # Under a limit of the user, trials that are queued ahead would exceed it on free slots of others.
        return [replace(each, ahead=0 if each.most is not None else self._dispatch.pace.ahead(each)) for each in known]

    @property
    def trouble(self) -> ServiceError | None:
        """Reason why the broker or Redis cannot be used at the moment, or None. Failed calls are tried again."""
        return next(filter(None, self.troubles.values()), None)

    @property
    def troubles(self) -> Mapping[str, ServiceError | None]:
        """The reasons of `trouble` by the name of the server; None for a server that can be used."""
        return {"the broker": self._publisher.refusal or self._dispatch.refusal, "Redis": self.silence}

    @property
    def unwelcome(self) -> str | None:
        """Reason why the policy of the fleet does not let the study's user run it any more, or None."""
        template, owner = self._study.template, self._study.owner
        return None if self._guard is None else self._guard.unwelcome(template.study, owner, template.proof)

    @property
    def has_workers(self) -> bool:
        """True if the last `poll` found workers that can run this study, quarantined or not."""
        return bool(self.workers.able or self.workers.quarantined)

    @property
    def known_for(self) -> float:
        """Seconds for which all live workers have been known: since the start, or Redis last failed or lost data."""
        return self.workers.known_for(self._clock.now())

    def waiting_messages(self) -> Mapping[str, int]:
        """Return the number of messages in the queue of each class of the announced workers. Any thread may call this.

        Classes without a queue are left out. Raises ServiceError.
        """
        names = {worker.compute_class for worker in self.workers.announced.values()}
        found = self._publisher.depths(sorted(names)[:MOST_QUEUES])
        return {name: count for name, count in found.items() if count is not None}

    def look(self) -> None:
        """Read the workers' announcements now, because a short study may end before `poll` reads them again."""
        with outages_pass():
            self.workers.look(self._clock.now(), self._in_flight, self._breaker.quarantined)

    def notices(self) -> Sequence[str]:
        """Return warnings about workers and messages for the operator."""
        found = [*self._breaker.notices, *self.gangs.notices, *self.workers.complaints()]
        if self.workers.able and (said := of_other_protocols(self.workers.announced, self._study.template.module)):
            found.append(f"some workers get no trials: they {said}")
        if self._guard is not None:
            found += self._guard.notices(self._study.owner)
        if self.channel.forged or self.workers.refused:
            found.append(
                "records in Redis are refused: they are not signed with our key, or no worker writes such; "
                "see --signing-key-file, and who may write to Redis"
            )
        return found

    def refused(self) -> int:
        """Return the number of late results that were refused, or 0 if Redis does not answer."""
        with suppress(redis.RedisError):
            return self.channel.refused()
        return 0

    def submit(self, attempts: Sequence[Attempt]) -> None:
        now = self._clock.now()
        if now - self._held_at > HOLD_SECONDS / 2:
            # After a slow pass of the scheduler's loop, another scheduler may have taken over the study.
            with outages_pass():
                self._confirm()
        for attempt in attempts:
            # The attempt waits in its queue from now on, but was created long before if the store was unavailable.
            if (sent := self._in_flight.find(attempt.number, attempt.attempt)) is not None:
                sent.at = now
        if self._is_new and not self._study.takes_over:
            orphans = [(attempt.number, attempt.attempt) for attempt in attempts]
            reason = "it ran on this machine and ended with its scheduler"
            self._unwanted.append(partial(self.channel.give_up, orphans, reason))
            return
        if running := [(a.number, a.attempt) for a in attempts if a.state is TrialState.RUNNING]:
            self.gangs.expect(running)
        queued = [attempt for attempt in attempts if attempt.state is TrialState.QUEUED]
        # Speculative copies are left out: the attempt that they copy is still in flight, and its result may arrive.
        again = [a for a in queued if a.attempt > 1 and len(self._in_flight.of(a.number)) == 1]
        self._dispatch.reopened += [(a.number, a.attempt - 1) for a in again]
        self._dispatch.to_publish += queued
        self._dispatch.send()

    def poll(self, seconds: float) -> Sequence[Event]:
        asked_at = self._clock.now()
        if self._is_informed and (missing := self._leases.missing()):
            self._unwanted.append(partial(self.channel.take_back_missing, missing))
        self._is_informed = False
        try:
            if self.silence is not None:
                self.channel.repair()
            if self._ship is not None and asked_at - self._shipped_at >= SHIP_SECONDS:
                self._ship()
                self._shipped_at = asked_at
            self._confirm()
            if self._drain_watch is not None:
                self._drain_watch.drains.follow_keys()
            flush(self._breaker.pending_calls)
            self._leases.note_wait(self._clock.now() - asked_at)
            # Send before taking attempts back, because `send` also reopens trials whose attempts have ended.
            self._dispatch.send()
            asked_at = self._clock.now()
            flush(self._unwanted)
            unclaimed = self._leases.look(asked_at)
            has_changed = self._record_workers()
            if unclaimed and self._dispatch.refusal is None:
                # The trials of these attempts get new attempts, which do not count as retries. Workers will refuse the
                # old messages.
                self._take_back(unclaimed, running=False)
            for lost in self.gangs.tend(self._clock.now()) if self.gangs.is_needed else ():
                self.channel.give_up([(lost.number, lost.attempt)], lost.reason, claimed=lost.claimed)
            self._dispatch.pace.turn(self.workers.classes)
            lost_events = self._leases.lost_events
            # Do not wait at the first poll, or if a worker has just come: there are free slots to fill.
            is_waiting = not (lost_events or self._is_new or has_changed)
            wait = min(seconds, LOOK_SECONDS if self._in_flight else 0.1) if is_waiting else 0.0
            self._is_new = False
            asked_at = self._clock.now()
            events: list[Event] = [*lost_events]
            for event in self.channel.drain(int(wait * 1000)):
                if isinstance(event, GangEvent):
                    self.gangs.hear(event, self._clock.now())
                else:
                    events.append(event)
            self._leases.note_wait(self._clock.now() - asked_at - wait)
        except redis.RedisError as error:
            if not is_outage(error):
                raise unusable(error) from error
            self.silence, self._leases.was_silent = unusable(error), True
            self._clock.sleep(min(seconds, LOOK_SECONDS))
            return []
        self._leases.lost_events, self.silence = [], None
        self._leases.returned, self._leases.ended = self._leases.ended, []
        self._is_informed = self.channel.is_drained
        return [self._judged(event) if isinstance(event, Result) else event for event in events]

    def renew_lock(self) -> None:
        now = self._clock.now()
        if now - self._held_at < HOLD_SECONDS / 4:
            return
        with outages_pass():
            self.channel.renew_lock()
            # Other schedulers and workers must see that the study is alive.
            self.workers.look(now, self._in_flight, self._breaker.quarantined)
            self._held_at = now

    def cancel(self, numbers: Iterable[int], *, running: bool, pruned: bool = False) -> None:
        attempts = [(number, attempt) for number in numbers for attempt in self._in_flight.of(number)]
        if attempts:
            with outages_pass():
                self._take_back(attempts, running=running, pruned=pruned)

    def change(self, trial_timeout: float | None, weight: float) -> None:
        """From now on, send trials with this time limit in seconds, and share slots by this weight."""
        self._dispatch.template = structs.replace(self._dispatch.template, timeout=trial_timeout)
        self.workers.weight = weight

    def forget(self, trials: bytes) -> None:
        """Let the live workers that obey control requests delete the folders of these trials; see `core.files`.

        This does not wait for the workers. Folders that a worker cannot delete now can be deleted by a later call, or
        by the command `clean`.
        """
        if self._sweeps is None:
            return
        key, names = self._study.template.study, one_a_disk(self.workers.announced, self._sweeps.signer.fingerprint)
        with outages_pass():
            self._sweeps.ask(names, self._study.owner or key, Sweep(studies={key: trials}, is_sure=True))

    @property
    def has_news(self) -> bool:
        """True if `requests` or `drains` may return something."""
        has_drains = self.silence is None and self._obeyed is not self.workers.obeyed
        return has_drains or (self._inbox is not None and bool(self._inbox.arrived))

    def requests(self) -> Sequence[tuple[Request, Answer | None]]:
        """Return the requests to this scheduler since the last call, each with None or with the answer that refused it.

        Call `answer` for each request that has None.
        """
        if self._inbox is None:
            return ()
        found, self._inbox.arrived = self._inbox.arrived, []
        return found

    def drains(self) -> Mapping[str, Drain]:
        """Return the drains and undrains that workers have obeyed since the last call, by place. See `DrainWatch`."""
        found: Mapping[str, Drain] = {}
        with outages_pass():
            if self._drain_watch is not None:
                found = self._drain_watch.news(self.workers.obeyed)
            self._obeyed = self.workers.obeyed
        return found

    def answer(self, request: Request, answer: Answer) -> None:
        """Send the answer to a request. While Redis is unavailable the answer is dropped, and the request expires."""
        if self._inbox is not None:
            with outages_pass():
                self._inbox.answer(request, answer)

    def close(self) -> None:
        try:
            with suppress(redis.RedisError):
                self._confirm()
                self.workers.withdraw()
                # Before the first poll, it is not known which attempts an earlier scheduler left running.
                if self._in_flight or self._is_new:
                    self.channel.unlock()
                else:
                    self.channel.erase()
        finally:
            self._publisher.close()

    def abandon(self) -> None:
        """Close connections and unlock the study. The next scheduler gets the events that were not confirmed."""
        with suppress(redis.RedisError):
            self.channel.unlock()
        self._publisher.close()

    def _record_workers(self) -> bool:
        """Record the workers that have come or gone since the last call. Return whether any have."""
        present = self.workers.present
        if present is self._recorded:
            if self._recorder is not None:
                self._recorder.follow(self._clock.wall(), self.workers.describe, self.workers.others)
            return False
        if self._recorder is not None:
            self._recorder.see(present, self._clock.wall(), self.workers.describe, self.workers.leaving)
        self._recorded = present
        return True

    def _confirm(self) -> None:
        """Remove recorded events and ended leases from Redis. Raises LockLost if another scheduler has the lock."""
        self.channel.confirm()
        if self._leases.returned:
            self.channel.forget(self._leases.returned)
            self._leases.returned = []
        self._held_at = self._clock.now()

    def _take_back(self, attempts: Sequence[tuple[int, int]], *, running: bool, pruned: bool = False) -> None:
        """Take back (number, attempt) pairs now, or as soon as Redis answers again."""
        self._unwanted.append(partial(self.channel.cancel, attempts, running=running, pruned=pruned))
        flush(self._unwanted)

    def _judged(self, result: Result) -> Result:
        """Update the circuit breakers and the mean time of trials. Return the result, which may then ask for a retry.

        A result whose params differ from the attempt's is returned unchanged, and the study refuses it. If Redis has
        recorded that such a result ended an attempt, `LeaseMonitor.missing` later returns the attempt.
        """
        sent = self._in_flight.find(result.number, result.attempt)
        if sent is None or not result.is_of(sent.attempt.params):
            return result
        if self._study.takes_over:
            # A worker with an open breaker may try the trial later.
            paused = self.workers.quarantined - self._breaker.quarantined
            result = self._breaker.judge(result, self.workers.able | paused)
        if result.retry is None:
            # A failure on a broken worker says nothing about how long trials take.
            self._dispatch.pace.tell(str(sent.attempt.compute_class), result.outcome.seconds or 0.0)
        return result

    def note_end(self, event: Event, ended: Sequence[Sent], *, is_over: bool) -> None:
        """Count the slot seconds of the `ended` attempts, and free their seats and records in Redis.

        If `is_over` is True, the event has ended its trial.
        """
        now = self._clock.now()
        for sent in ended:
            is_own = sent.attempt.attempt == event.attempt
            seconds = event.outcome.seconds if isinstance(event, Result) and is_own else None
            self.workers.turns.end(sent, now, seconds)
        if isinstance(event, Result) and is_over and ended:
            self.channel.note_end(event.number, event.attempt)
            # If this attempt was assumed lost, a later attempt may already be in Redis.
            if others := [sent.key for sent in ended if sent.attempt.attempt != event.attempt]:
                self._unwanted.append(partial(self.channel.give_up, others, "another attempt has ended its trial"))
        if self.gangs.is_needed:
            self.gangs.close(event.number, None if is_over else event.attempt)
        if not is_over:
            # According to Redis this attempt has ended the trial, so later attempts cannot be claimed until the trial
            # is reopened.
            self._dispatch.reopened.append((event.number, event.attempt))


def remove(study: str, numbers: int) -> None:
    """Remove the Redis keys of a study that was deleted from the store, so that workers stop its trials and refuse its
    messages.

    `study` is the study's key. It had `numbers` trials. Raises ServiceError if Redis cannot be used, or if a scheduler
    runs the study from another copy of the store.
    """
    with connect(urls.url(urls.REDIS)) as client, refusals():
        where = SchedulerChannel(client, study).remove(numbers)
    if where:
        raise ServiceError(f"the scheduler on {where} runs the study from another copy of the store")
