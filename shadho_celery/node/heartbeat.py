"""Heartbeat of a worker: announcements, drains, circuit breakers, and the thread that handles them (`Beat`).

`Meter` measures the use of the machine that is announced, by all processes: load, RAM and GPUs.

A worker takes no messages while it is drained or while its circuit breaker is open for a study. It obeys the latest
drain that it has seen, counts its trials and renewals since its start, and touches a file for health checks.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import redis
from msgspec.structs import replace

from shadho_celery.core.checks import as_record
from shadho_celery.core.hardware import Gpu, GpuUsage, Usage, price
from shadho_celery.core.records import own_versions
from shadho_celery.core.system import HEARTBEAT_FILE, Clock, NoThread, Outage, start_thread
from shadho_celery.core.trial import Outcome, TrialState
from shadho_celery.errors import UsageError
from shadho_celery.fleet.broker import PROTOCOL
from shadho_celery.fleet.channel import Breaker, Quarantine
from shadho_celery.fleet.drains import Drain, Drains
from shadho_celery.fleet.policy import Guard
from shadho_celery.fleet.redis import clock_offset
from shadho_celery.fleet.registry import Host, Registry, StudyWants, Worker, place_of
from shadho_celery.fleet.signing import UNSIGNED, Signer
from shadho_celery.node.consumer import Consumer
from shadho_celery.node.leases import Leases
from shadho_celery.node.logs import tell

log = logging.getLogger(__name__)


class Obeyed:
    """The drain or undrain that a worker obeys, for its place or for the worker alone.

    An older record in Redis is refused, because somebody must have put it back. A missing record changes nothing.
    """

    def __init__(self, drains: Drains, place: str) -> None:
        self._drains, self._place = drains, place
        #: the latest record so far, or None
        self.latest: Drain | None = None
        self._has_warned = False

    @property
    def drain(self) -> Drain | None:
        """The drain that is in force, or None."""
        return self.latest if self.latest is not None and self.latest.is_drained else None

    def follow(self) -> None:
        """Read the record in Redis, and obey it if it is new. Raises redis-py's errors."""
        found = self._drains.latest(self._place)
        before = 0 if self.latest is None else self.latest.sequence
        if found is None or found.sequence == before:
            return
        if found.sequence > before:
            self.latest = found
        elif not self._has_warned:
            self._has_warned = True
            log.warning("an old drain or undrain of this worker was put back into Redis; it is refused")


class Tally:
    """Counters of one worker since its start. Any thread may read them."""

    def __init__(self) -> None:
        #: number of ended trials by state, and the sum of their seconds
        self.trials: Counter[TrialState] = Counter()
        self.seconds = 0.0
        #: number of announcements to the schedulers, and of renewals of leases
        self.heartbeats = self.renewals = 0
        self.redis = Outage("Redis")
        self._lock = threading.Lock()

    def end(self, outcome: Outcome) -> None:
        """Count a trial that has ended, in the thread of its slot."""
        with self._lock:
            self.trials[outcome.state] += 1
            self.seconds += outcome.seconds or 0.0


def announced(**facts: object) -> Worker:
    """Return the announcement of this process as a worker, with these fields. Raises UsageError if schedulers would
    refuse it.
    """
    own = {"protocol": PROTOCOL, "pid": os.getpid(), "price": price(), "versions": own_versions()}
    return as_record(own | facts, Worker, "this worker's announcement", "see -Q, -c and SHADHO_HOST")


#: seconds between two announcements
ANNOUNCE_EVERY = 5.0

#: seconds between two checks whether the worker is drained
DRAIN_EVERY = 2.0

#: seconds between two comparisons of this machine's clock with that of the Redis server
COMPARE_EVERY = 60.0


@dataclass(eq=False)
class Heartbeat:
    """One worker's announcements and circuit breakers. One thread calls `beat`; other methods are for any thread."""

    client: redis.Redis
    #: name of the worker
    name: str
    #: its announcement; `beat` adds the running trials and the state of the circuit breakers
    worker: Worker
    leases: Leases
    clock: Clock
    _: KW_ONLY
    signer: Signer = UNSIGNED
    #: signer of the drains that this worker obeys; None to refuse them
    control: Signer | None = None
    #: checks who has drained this worker; None without a policy
    guard: Guard | None = None
    #: measures the use of the machine, which is announced
    measure: Callable[[], Usage] = Usage

    def __post_init__(self) -> None:
        self._workers = Registry(self.client, Worker, self.signer)
        self._studies = Registry(self.client, StudyWants, self.signer)
        #: True if there are announcements of studies, but none with a key that this worker knows
        self.is_stranger = self._was_stranger = self._has_warned = False
        self._host = Host(self.client, self.name, self.worker.machine, self.signer)
        #: other live workers that share this worker's cores
        self.neighbours: Collection[Worker] = ()
        #: neighbours that use GPUs of this worker, and that its log has already named
        self._sharing_gpus: set[str] = set()
        #: drains that this worker obeys: for its class and host, and for it alone; the latter may also ask it to end
        places = (place_of(self.name), self.name)
        drains = None if self.control is None else Drains(self.client, self.control, self.guard)
        self._obeyed = [Obeyed(drains, each) for each in places if drains is not None]
        #: called once if a user asks this worker to finish its trials and end, with the name of the user and host
        self.on_end: Callable[[str], None] | None = None
        self._was_drained = False
        self._is_announced = threading.Event()
        self._is_draining = False
        #: number of free slots that are reserved for trials that wait for more slots
        self._kept = 0
        #: counters of this worker
        self.tally = Tally()
        #: time of the last announcement that Redis accepted
        self._heard_at = -math.inf
        self._announced_at = self._drain_read_at = self._compared_at = self.clock.now()
        #: receives the worker's messages; set once the worker is announced
        self.consumer: Consumer | None = None
        self._lock = threading.Lock()
        #: studies whose circuit breaker is not closed for this worker
        self._breakers: dict[str, Breaker] = {}

    @property
    def is_drained(self) -> bool:
        """True if this worker is drained: it takes no messages."""
        return any(each.drain is not None for each in self._obeyed)

    @property
    def state(self) -> str:
        """State of this worker in one word: serving, drained, ending or quarantined."""
        if self._is_draining:
            return "ending"
        return "drained" if self.is_drained else "quarantined" if self._breakers else "serving"

    @property
    def age(self) -> float:
        """Seconds since the last announcement; infinite before the first one."""
        return self.clock.now() - self._heard_at

    def announce(self, consumer: Consumer | None = None) -> None:
        """Announce this worker to the schedulers until `withdraw`. `consumer` receives its messages."""
        self.consumer = consumer
        if consumer is not None and self.is_drained:
            consumer.pause("drain")
        self._is_announced.set()
        self._announce_now()
        with suppress(redis.RedisError):
            self._follow_keys()
            self._meet_neighbours()

    def check(self) -> None:
        """Try the Redis commands that a worker needs, before it gets messages. Raises redis-py's errors.

        It reads announcements, and withdraws its own, which does not exist yet. It also learns whether it is drained.
        """
        self._follow_keys()
        self._follow_drain()
        self._compare_clocks()
        self._meet_neighbours()
        self._workers.withdraw(self.name)

    def drain(self) -> None:
        """Announce from now on that this worker takes no more messages, because it is about to end."""
        self._is_draining = True
        self._announce_now()

    def withdraw(self) -> None:
        """Withdraw this worker's announcement, so that schedulers send no new trials to it."""
        self._is_announced.clear()
        try:
            self._workers.note_leaving(self.name)
            self._workers.withdraw(self.name)
        except redis.RedisError:
            log.warning("could not withdraw the announcement; it expires by itself")

    def tell(self, **facts: object) -> None:
        """Change these fields of the announcement (`Worker`). If that changes anything, announce it at once."""
        if all(getattr(self.worker, name) == fact for name, fact in facts.items()):
            return
        with self._lock:
            self.worker = replace(self.worker, **facts)
        self._announce_now()

    def beat(self, *, has_free_slot: bool, kept: int = 0) -> None:
        """Announce the worker if that is due, and read its circuit breakers and drains. Raises redis-py's errors.

        Call this about every second. `kept` free slots are reserved for trials that wait for more slots.
        """
        self._kept = kept
        if self._breakers:
            self._follow_breakers()
        if self.clock.now() - self._drain_read_at >= DRAIN_EVERY:
            self._follow_drain()
            self._drain_read_at = self.clock.now()
        if self.clock.now() - self._compared_at >= COMPARE_EVERY:
            self._compare_clocks()
        if self.consumer is not None and has_free_slot:
            self.consumer.reconnect_if_stuck(lambda: bool(self._studies.living()))
        if self._is_announced.is_set() and self.clock.now() - self._announced_at >= ANNOUNCE_EVERY:
            usage = self.measure()
            with self._lock:
                self.worker = replace(self.worker, usage=usage)
            self._announce()
            self._follow_keys()
            self._meet_neighbours()
            self._announced_at = self.clock.now()
        if self._studies.refused and not self._has_warned:
            self._has_warned = True
            log.warning(
                "announcements of studies are refused: they are unsigned, signed with another key, or malformed"
            )

    def pause_for(self, study: str) -> None:
        """Take no more messages until the study's scheduler has examined this worker's failures."""
        with self._lock:
            is_new = study not in self._breakers
            self._breakers.setdefault(study, Breaker.OPEN)
        if self.consumer is not None:
            self.consumer.pause()
        if is_new:
            self._announce_now()

    def _follow_breakers(self) -> None:
        """Read the state of the open breakers. Take messages again once all are closed. A quarantine never ends."""
        living = self._studies.living()
        for study, before in list(self._breakers.items()):
            state = Quarantine(self.client, study).state(self.name)
            if state is Breaker.OPEN and study not in living:
                # The study's scheduler has ended without a decision, and the next one would close all breakers.
                state = Breaker.CLOSED
            if state is before:
                continue
            if state is Breaker.QUARANTINED:
                log.error(
                    "quarantined: this worker fails trials that others finish; repair this machine, then restart it"
                )
            with self._lock:
                if state is Breaker.CLOSED:
                    del self._breakers[study]
                else:
                    self._breakers[study] = state
            self._announce_now()
            if not self._breakers and self.consumer is not None:
                self.consumer.resume()

    def _follow_drain(self) -> None:
        """Read whether this worker is drained or should end, and pause or resume its messages. Raises redis-py's
        errors.
        """
        for obeyed in self._obeyed:
            obeyed.follow()
        drains = [each.drain for each in self._obeyed if each.drain is not None]
        if self.on_end is not None and (by := next((drain.by for drain in drains if drain.ends), None)) is not None:
            on_end, self.on_end = self.on_end, None
            on_end(by)
        before, self._was_drained = self._was_drained, self.is_drained
        if before == self.is_drained:
            return
        drain = next(iter(drains), None)
        if drain is not None and drain.ends:
            tell(f"ended by {drain.by}: running trials finish, and no others are taken")
        elif drain is not None:
            tell(f"drained by {drain.by}: running trials finish, and no others are taken until it is undrained")
        else:
            tell("undrained: this worker takes trials again")
        if self.consumer is not None:
            (self.consumer.pause if self.is_drained else self.consumer.resume)("drain")
        self._announce_now()

    def _follow_keys(self) -> None:
        """Take no messages while all studies sign with keys that this worker does not know: it would refuse and lose
        them. Raises redis-py's errors.
        """
        living = self._studies.living()
        self.is_stranger = bool(self.signer.fingerprint and self._studies.refused and not living)
        if self.consumer is None or self._was_stranger == self.is_stranger:
            return
        self._was_stranger = self.is_stranger
        if self.is_stranger:
            self.consumer.pause("key")
            tell(
                "all studies sign with keys that this worker does not know; it waits for one in its --signing-key-file"
            )
        else:
            self.consumer.resume("key")
            tell("this worker takes trials again: its key file has the key of a study, or these studies have ended")

    def _compare_clocks(self) -> None:
        """Update the announced difference between this machine's clock and that of the Redis server.

        It is rounded to seconds, so that the announcement rarely changes and is rarely decoded. Raises redis-py's
        errors.
        """
        self._compared_at = self.clock.now()
        offset = round(clock_offset(self.client))
        with self._lock:
            self.worker = replace(self.worker, clock_offset=offset)

    def _meet_neighbours(self) -> None:
        """Find the other workers that share this worker's cores. If this worker is announced, make it visible to them.

        Raises redis-py's errors.
        """
        neighbours = self._host.neighbours(joins=self._is_announced.is_set())
        self.neighbours = neighbours.values()
        self._warn_of_shared_gpus(neighbours)

    def _warn_of_shared_gpus(self, neighbours: Mapping[str, Worker]) -> None:
        """Log a warning, once for each other worker of the host, if that worker uses GPUs of this worker."""
        own = self.worker.machine.gpus_for(self.worker.compute_class)
        for name, each in neighbours.items() if self._is_announced.is_set() else ():
            theirs = each.machine.gpus_for(each.compute_class)
            both = [gpu.id for gpu in own if any(gpu.is_same(other) for other in theirs)]
            if both and not each.draining and name not in self._sharing_gpus:
                self._sharing_gpus.add(name)
                log.warning(
                    "GPU %s is also used by worker %s; unless that has just died, give each its own "
                    "CUDA_VISIBLE_DEVICES",
                    " and ".join(both),
                    name,
                )

    def _announce(self) -> None:
        with self._lock:
            studies = self.leases.studies()
            is_drained = self.is_drained
            latest, own = [each.latest for each in self._obeyed] or (None, None)
            worker = replace(
                self.worker,
                busy=sum([each.slots for each in studies.values()]) + self._kept,
                studies=studies,
                ended=self.tally.trials.total(),
                quarantined=bool(self._breakers) or self._is_draining or is_drained,
                draining=self._is_draining or is_drained,
                drained=is_drained,
                drain_sequence=0 if latest is None else latest.sequence,
                own_drain_sequence=0 if own is None or own.ends else own.sequence,
            )
        self._workers.announce(self.name, worker)
        self.tally.heartbeats += 1
        self._heard_at = self.clock.now()

    def _announce_now(self) -> None:
        """Announce a change at once if Redis answers; otherwise the next announcement contains it."""
        if self._is_announced.is_set():
            with suppress(redis.RedisError):
                self._announce()


class HeartbeatFile:
    """File that a live worker touches every second, also during an outage of the broker or of Redis.

    A health check that reads the file's age therefore restarts a worker that hangs, but not a worker that waits for the
    end of an outage.
    """

    def __init__(self) -> None:
        """Use the file that the environment names, if any. Raises UsageError if it cannot be written."""
        path = os.environ.get(HEARTBEAT_FILE)
        self._path, self._is_written = Path(path).absolute() if path else None, True
        self.touch()
        if not self._is_written:
            raise UsageError(
                f"{HEARTBEAT_FILE}: {self._path} cannot be written; "
                "name a file in a folder in which this user may write"
            )

    def touch(self) -> None:
        """Set the time of the file to now, by the clock of its file system. If that fails, log it once."""
        if self._path is None:
            return
        try:
            self._path.touch()
            self._is_written = True
        except OSError as error:
            if self._is_written:
                log.warning("%s cannot be touched: %s", self._path, error.strerror)
            self._is_written = False

    def remove(self) -> None:
        """Remove the file, because the worker ends."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink()


#: seconds between two calls of `beat` in the thread, and between two calls of `look`
BEAT_SECONDS, LOOK_SECONDS = 1.0, 0.2


@dataclass(eq=False)
class Beat:
    """The thread that renews a worker's leases. It runs until the worker closes, even if a call in it fails."""

    #: called every LOOK_SECONDS, and below it every BEAT_SECONDS
    look: Callable[[], None]
    beat: Callable[[], None]
    #: gets the Redis errors of both, and None after a `beat` without one
    note: Callable[[redis.RedisError | None], None]
    #: ends the thread
    closing: threading.Event

    def __post_init__(self) -> None:
        """Raises UsageError for a heartbeat file that cannot be written."""
        self.file = HeartbeatFile()
        #: functions that the thread should call soon
        self._soon = deque[Callable[[], None]]()

    def start(self) -> None:
        """Start the thread. Raises NoThread."""
        start_thread(threading.Thread(target=self._beat, name="shadho-beat", daemon=True))

    def do_soon(self, work: Callable[[], None]) -> None:
        """Call `work` in the thread, within about LOOK_SECONDS. Signal handlers may call this method."""
        self._soon.append(work)

    def _beat(self) -> None:
        beaten_at = time.monotonic()
        while not self.closing.wait(LOOK_SECONDS):
            while self._soon:
                self._try(self._soon.popleft())
            if time.monotonic() - beaten_at >= BEAT_SECONDS:
                beaten_at = time.monotonic()
                self.file.touch()
                if not self._try(self.beat, self.note):
                    # If Redis does not answer, `look` would wait for it again.
                    continue
            self._try(self.look)

    def _try(self, work: Callable[[], None], note: Callable[[None], None] = lambda _: None) -> bool:
        """Call `work` and return whether it succeeded. `note` is called with None after a success.

        Errors do not leave this function: Redis errors are passed to `self.note`, other errors are logged.
        """
        try:
            work()
            note(None)
            return True
        except redis.RedisError as error:
            self.note(error)
        except Exception:
            # Catch all exceptions, because without this thread all leases would run out.
            log.exception("a part of the beat failed, and the beat continues; this is a bug")
        return False


class Meter:
    """Measures the use of this machine and of a worker's GPUs."""

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self._gpus = [gpu for gpu in gpus if gpu.uuid]
        self._found: dict[str, GpuUsage] = {}
        #: thread that asks the driver of the GPUs; None before the first `look`
        self._asking: threading.Thread | None = None

    def look(self) -> Usage:
        """Return the use of the machine. The use of its GPUs is that at the previous call.

        The driver is asked in a thread, because it may hang. Its GPUs are then left out.
        """
        import psutil

        load = memory = None
        with suppress(OSError, psutil.Error):
            load, memory = round(os.getloadavg()[0], 1), _part(psutil.virtual_memory().percent / 100)
        if self._asking is not None and self._asking.is_alive():
            return Usage(load=load, memory=memory)
        found = self._found
        if self._gpus:
            with suppress(NoThread):
                self._asking = threading.Thread(target=self._ask, name="shadho-gpus", daemon=True)
                start_thread(self._asking)
        return Usage(load=load, memory=memory, gpus=found)

    def _ask(self) -> None:
        """Ask the driver. It is opened at the first call and stays open, because opening it may take seconds."""
        import pynvml

        found = {}
        for gpu in self._gpus:
            with suppress(pynvml.NVMLError):
                pynvml.nvmlInit()
                handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
                told = pynvml.nvmlDeviceGetMemoryInfo(handle)
                found[gpu.id] = GpuUsage(memory=(memory := _part(told.used / max(1, told.total))))
                # The driver does not tell this of a part of a GPU (MIG).
                busy = _part(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
                found[gpu.id] = GpuUsage(busy=busy, memory=memory)
        self._found = found


def _part(told: float) -> float:
    """Return a part of a whole, rounded. An announcement with a part below 0 or above 1 would be refused as a whole."""
    return min(1.0, max(0.0, round(told, 2)))
