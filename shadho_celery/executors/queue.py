"""Runs trials on a fleet of Celery workers: attempts go out through the broker, events come back over the channel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import redis

from shadho_celery.channel import SchedulerChannel
from shadho_celery.clock import Clock, SystemClock
from shadho_celery.errors import ServiceError
from shadho_celery.executors import lookout
from shadho_celery.executors.fleet import Fleet
from shadho_celery.executors.gangs import Gangs
from shadho_celery.executors.in_flight import InFlight, Sent
from shadho_celery.executors.lookout import Lookout
from shadho_celery.executors.messages import Messages
from shadho_celery.executors.outages import outages_pass, unusable
from shadho_celery.executors.outbox import Outbox
from shadho_celery.executors.pace import Pace
from shadho_celery.executors.referee import Referee
from shadho_celery.executors.usher import Usher
from shadho_celery.hardware import ComputeClass
from shadho_celery.registry import is_outage
from shadho_celery.routing import Publisher
from shadho_celery.seats import SchedulerSeats
from shadho_celery.signing import UNSIGNED, Signer
from shadho_celery.strikes import Strikes
from shadho_celery.trial import WELL, Event, GangEvent, Lost, Result, Started, Trial, TrialState

#: seconds within which the seats of a trial's gang are to be taken
GANG_WAIT_SECONDS = 60.0


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
        self._clock = clock or SystemClock()
        self._adopt = adopt
        self._publisher = publisher
        self._channel = SchedulerChannel(client, study, signer)
        strikes = Strikes(client, study)
        self._referee = Referee(strikes)
        self._fleet = Fleet(client, study, module, weight, signer.fingerprint)
        self._in_flight = InFlight()
        self._pace = Pace(self._clock)
        messages = Messages(
            study=study,
            module=module,
            trial_timeout=trial_timeout,
            may_watch=adopt,
            fleet=self._fleet,
            in_flight=self._in_flight,
            pace=self._pace,
        )
        self._outbox = Outbox(self._channel, publisher, messages, self._in_flight, self._clock)
        self._lookout = Lookout(self._channel, self._fleet, self._in_flight, self._referee, self._clock.now())
        self._gangs = Gangs(SchedulerSeats(client, study, signer), publisher.publish, gang_wait_seconds)
        self._usher = Usher(self._gangs, self._fleet, self._in_flight, messages, self._outbox)
        #: True until the first poll: what is submitted until then is known from an earlier life
        self._is_new = True
        #: attempts of an earlier life that have ended with it
        self._orphans: list[tuple[int, int]] = []
        #: what is to be taken back, for as long as Redis does not answer
        self._unwanted: list[tuple[list[tuple[int, int]], bool]] = []
        #: why Redis answers nothing at the moment; None while it does
        self._silence: ServiceError | None = None
        self._channel.open()
        strikes.open()

    def classes(self) -> Sequence[ComputeClass]:
        with outages_pass():
            self._look()
        return [replace(each, ahead=self._pace.ahead(each)) for each in self._fleet.classes]

    @property
    def trouble(self) -> ServiceError | None:
        """What is in the way at the moment, and will be tried again."""
        return self._outbox.refusal or self._silence

    def workers(self) -> Mapping[str, Mapping[str, Any]]:
        """What every live worker announces, also those that cannot run this study."""
        with outages_pass():
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
            host = trial.host or "" if running else ""
            self._in_flight.add(Sent(trial.number, trial.attempt, name, now, running, trial, host=host))
        if self._is_new and not self._adopt:
            # Whatever ran them has ended with the earlier life.
            self._orphans += [(trial.number, trial.attempt) for trial in trials]
            return
        self._usher.expect([(trial.number, trial.attempt) for trial in trials if trial.state is TrialState.RUNNING])
        queued = [trial for trial in trials if trial.state is TrialState.QUEUED]
        # Not for a copy of what runs: that may have ended in this moment.
        again = [t for t in queued if t.attempt > 1 and len(self._in_flight.attempts(t.number)) == 1]
        self._outbox.reopen([(trial.number, trial.attempt - 1) for trial in again])
        self._outbox.add(queued)
        self._outbox.send()

    def poll(self, seconds: float) -> Sequence[Event]:
        self._outbox.send()
        try:
            self._confirm()
            self._take_back()
            self._referee.speak()
            self._look()
            for gang in self._usher.tend(self._clock.now()):
                self._channel.give_up([(gang.number, gang.attempt)], gang.reason, claimed=gang.failed)
            self._pace.turn(self._fleet.classes)
            self._is_new = False
            losses = self._lookout.losses
            wait = 0.0 if losses else min(seconds, lookout.LOOK_SECONDS if self._in_flight else 0.1)
            events = [*losses, *self._heard(self._channel.drain(int(wait * 1000)))]
        except redis.RedisError as error:
            if not is_outage(error):
                raise unusable(error) from error
            self._silence = unusable(error)
            self._clock.sleep(min(seconds, lookout.LOOK_SECONDS))
            return []
        self._lookout.losses, self._silence = [], None
        return [self._judged(event) for event in events]

    def cancel(self, numbers: Iterable[int], *, running: bool) -> None:
        self._cancel([(number, attempt) for number in numbers for attempt in self._in_flight.attempts(number)], running)

    def _cancel(self, attempts: list[tuple[int, int]], running: bool) -> None:
        if attempts:
            self._unwanted.append((attempts, running))
            with outages_pass():
                self._take_back()

    def backups_running(self, compute_class: str) -> int:
        """Slots of a class that backup replicas take; a trial that is sent there gets theirs."""
        return self._gangs.backups(compute_class)

    def close(self) -> None:
        try:
            self._fleet.withdraw()
            self._confirm()
            if not self._in_flight:
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

    def _judged(self, event: Event) -> Event:
        """The event as the study is to take it; the books of what is in flight are kept."""
        sent = self._in_flight.find(event.number, event.attempt)
        if isinstance(event, Result) and self._adopt and sent is not None:
            event = self._referee.judge(event, len(self._fleet.able - {event.worker}))
        if isinstance(event, Started) and sent is not None:
            sent.claimed, sent.worker, sent.host = True, event.worker, event.host
        elif isinstance(event, Result) or (isinstance(event, Lost) and sent is not None):
            self._note_end(event, sent)
        return event

    def _note_end(self, event: Result | Lost, sent: Sent | None) -> None:
        """An attempt has ended, and with it its trial: but where it did not end well, and others live."""
        if isinstance(event, Result) and sent is not None:
            self._pace.tell(sent.compute_class, event.seconds or 0.0)
        if sent is not None and (isinstance(event, Lost) or event.state not in WELL):
            self._gangs.close(event.number, event.attempt)
            self._in_flight.remove(event.number, event.attempt)
            if self._in_flight.attempts(event.number):
                # Where no worker had claimed the other one yet, this one has ended the trial for Redis.
                self._outbox.reopen([(event.number, event.attempt)])
        else:
            self._gangs.close(event.number)
            self._in_flight.remove(event.number)

    def _heard(self, events: Iterable[Event | GangEvent]) -> list[Event]:
        """What the study is to know of; what happens inside gangs is dealt with here."""
        found: list[Event] = []
        for event in events:
            if isinstance(event, GangEvent):
                self._usher.hear(event, self._clock.now())
            else:
                found.append(event)
        return found

    def _confirm(self) -> None:
        self._channel.confirm()
        self._lookout.confirm()

    def _look(self) -> None:
        """See now and then who lives, and what got lost."""
        # Sent as a new attempt, which costs the trial nothing: the old message will be refused.
        self._cancel(self._lookout.look(self._clock.now()), running=False)
