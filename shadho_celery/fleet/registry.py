"""Registry of workers and studies in Redis. Each worker and each study announces itself regularly. An announcement that
is not renewed expires.

Keys: ``shadho:workers`` and ``shadho:studies`` (sets of names), ``shadho:worker:NAME`` and ``shadho:study:NAME`` (JSON,
preceded by a signature if there is a key; each expires unless it is renewed), ``shadho:worker:NAME:left`` (exists for
LEFT_SECONDS after a worker has withdrawn). ``shadho:host:POOL`` is the set of names of the workers that share the cores
of one host; it expires unless one of these workers renews it.
"""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Annotated, Any, Generic, TypeVar

from msgspec import Meta, Struct

from shadho_celery.core.addresses import PLACE
from shadho_celery.core.code import MAX_PROBLEM, CodeVersion
from shadho_celery.core.hardware import Machine, Usage
from shadho_celery.core.names import BY_VALUE
from shadho_celery.core.trial import Clean, Int64, Moment, Name, Number, Positive, Price
from shadho_celery.core.users import UserName
from shadho_celery.errors import ServiceError
from shadho_celery.fleet.broker import PROTOCOL
from shadho_celery.fleet.policy import Proof
from shadho_celery.fleet.redis import Redis, spoilt_keys_pass
from shadho_celery.fleet.signing import MOST_KEYS, UNSIGNED, Sealed, Signer
from shadho_celery.runner.protocol import MAX_COMPLAINT, MAX_COMPLAINTS

#: seconds after which an announcement expires unless it is renewed
ANNOUNCE_SECONDS = 20.0

#: seconds for which schedulers can see that a worker has withdrawn in order
LEFT_SECONDS = 120.0

#: maximum number of characters of an announcement
MAX_ANNOUNCEMENT = 1_000_000

#: maximum virtual time of a study (`fleet.workers`): slot seconds divided by its weight
MAX_VIRTUAL = 1e18

#: maximum number of slots in an announcement
MAX_SLOTS = 10**6
_Slots = Annotated[int, Meta(ge=0, le=MAX_SLOTS)]
#: name of a compute class, which is also part of a queue's name, for which AMQP allows 255 bytes
_ClassName = Annotated[Clean, Meta(max_length=63)]


#: identifies a key (`Signer.fingerprint`)
Fingerprint = Annotated[str, Meta(max_length=8)]

#: one of a worker's complaints: a printable line
_Complaint = Annotated[Clean, Meta(max_length=MAX_COMPLAINT)]

#: HOST:PORT at which Prometheus reads the metrics of a worker or run; "" if they are not served to other machines
_MetricsPlace = Annotated[str, Meta(pattern=rf"^\Z|{PLACE}")]

#: maximum number of trials of one study that a worker with very many slots announces
MAX_TOLD = 1000


class RunningTrial(Struct, frozen=True, kw_only=True):
    """A trial, or a replica of one, that runs in a slot of the announced worker."""

    number: Number
    #: start of the trial in seconds since the epoch, by the worker's clock
    started_at: Moment
    #: rank in the trial's gang if the slot runs a replica, else None
    rank: Number | None = None
    #: number of slots that it takes
    slots: _Slots = 1
    #: predicted seconds, as in `Attempt`
    expected: Annotated[float, Meta(ge=0, le=1e12)] | None = None


class Share(Struct, frozen=True, kw_only=True):
    """The slots and the running trials of one study on a worker."""

    #: the study's name, for people
    name: Name = ""
    #: number of slots that run trials of the study
    slots: _Slots = 0
    #: the trials in these slots, in order of their start; at most MAX_TOLD
    trials: list[RunningTrial] = []


class Keys(Struct, frozen=True, kw_only=True):
    """Base of the announcements: the keys of a process, by their fingerprints."""

    #: key that signs, "" without a key
    key: Fingerprint = ""
    #: all keys whose signatures it accepts; earlier versions of the package announce only `key`
    keys: Annotated[tuple[Fingerprint, ...], Meta(max_length=MOST_KEYS)] = ()
    #: key of the control requests that it obeys, "" for unsigned ones; None if it refuses them
    control: Fingerprint | None = None

    def knows(self, fingerprint: str) -> bool:
        """Return whether it accepts what the key with this fingerprint has signed; for "", what is not signed."""
        return fingerprint in (self.key, *self.keys)

    def obeys(self, fingerprint: str) -> bool:
        """Return whether it obeys requests that this key has signed; for "", unsigned ones."""
        return self.control is not None and fingerprint in (self.control, *self.keys)


def keys_of(signer: Signer, control: Signer | None) -> dict[str, Any]:
    """Return the fields of `Keys` for a process with these signers, of which `control` is for requests."""
    own = None if control is None else control.fingerprint
    return {"key": signer.fingerprint, "keys": signer.fingerprints, "control": own}


class Worker(Keys, frozen=True, kw_only=True):
    """A worker's announcement. Every field has a default, because workers with another protocol may not announce it."""

    protocol: int = 0
    compute_class: _ClassName = ""
    #: number of the worker's slots; if trials share GPUs, number of slots that it can use at the moment
    slots: _Slots = 0
    #: True if trials share GPUs as far as their predicted GPU memory fits
    shares_gpus: bool = False
    #: number of slots that run a trial
    busy: _Slots = 0
    #: slots and running trials of each study, by the study's key
    studies: dict[str, Share] = {}
    #: number of trials that have ended on this worker since its start; None if it does not announce that
    ended: Number | None = None
    #: modules whose objectives the worker runs
    imports: list[str] = []
    #: versions of the code that the worker's processes have imported, by module. Modules that are not imported yet, or
    #: that were edited after the import, are left out
    codes: dict[str, CodeVersion] = {}
    #: True if the worker runs code that a study ships to it
    accepts_code: bool = False
    #: reason why shipped code cannot run on this worker, by the code's digest
    unfit: dict[str, Annotated[str, Meta(max_length=2 * MAX_PROBLEM)]] = {}
    pid: int = 0
    machine: Machine = Machine()
    #: versions of the package and of Python, by name
    versions: Annotated[dict[Name, Name], Meta(max_length=100)] = {}
    #: id of the storage in which the worker keeps checkpoints. Workers with equal ids share storage; "" means unknown.
    storage: Name = ""
    #: whole seconds by which the worker's clock is ahead of the Redis server's clock; None if it does not announce that
    clock_offset: Annotated[int, Meta(ge=-(2**40), le=2**40)] | None = None
    #: True if the worker takes no messages because its circuit breaker is open for a study, or it is quarantined
    quarantined: bool = False
    #: True if the worker takes no messages because it will end or is drained; it still finishes its running trials
    draining: bool = False
    #: True if the worker takes no messages until somebody undrains it
    drained: bool = False
    #: sequence numbers of the latest records (`drains.Drain`) that the worker obeys: first of the record for its place
    #: (`place_of`), then of the record for this worker alone; 0 for no record
    drain_sequence: Number = 0
    own_drain_sequence: Number = 0
    #: problems that slow the worker down although its trials run, as texts for people, without duplicates
    complaints: Annotated[list[_Complaint], Meta(max_length=MAX_COMPLAINTS)] = []
    #: money that one slot costs per hour; None if it is not known
    price: Price | None = None
    #: use of the machine by all processes
    usage: Usage = Usage()
    metrics: _MetricsPlace = ""

    @property
    def state(self) -> str:
        """State of the worker in one word. A drained worker whose trials have not ended yet is draining."""
        if self.draining:
            return "drained" if self.drained and not self.busy else "draining"
        return "quarantined" if self.quarantined else "serving"


class Progress(Struct, frozen=True, kw_only=True):
    """State of a study, and its progress in trials."""

    #: running, paused or stopping
    state: Name = "running"

    #: number of trials that have ended and count against the limit
    ended: Number = 0
    #: maximum number of trials that may end; None without a limit
    limit: Number | None = None
    running: Number = 0
    #: number of trials that are drawn but have not started
    waiting: Number = 0
    #: sum of the slots of all trials that are still to be sent, drawn or not; 0 while the study sends no trials
    sendable_slots: _Slots = 0


class StudyWants(Keys, frozen=True, kw_only=True):
    """A study's announcement: the slots that it wants, its weight and its virtual times. Name and progress are only
    displayed.

    Older versions of the package announce only some of these.
    """

    name: Name = ""
    #: user who runs it, "" if its scheduler does not announce that
    owner: UserName = ""
    #: the user's signature of `policy.study_text`, or ""
    proof: Proof = ""
    #: progress of the study; None if its scheduler does not announce that
    progress: Progress | None = None
    #: fence of the study's scheduler, which requests to the scheduler must contain
    fence: Int64 = 0
    weight: Positive = 1.0
    #: slots that its trials take or may take until its next announcement, and those without the limit of its user
    taken: _Slots = 0
    asks: _Slots = 0
    #: what it has used of the limit of its user, as a virtual time; a new study begins with the least of its siblings
    spent: Annotated[float, Meta(ge=0, le=MAX_VIRTUAL)] = 0.0
    #: wanted slots by compute class
    wants: dict[str, Annotated[float, Meta(ge=0, le=1e12)]] = {}
    #: virtual time (`fleet.workers`) of the study by compute class, for classes where it wants more slots than it has
    turns: dict[str, Annotated[float, Meta(ge=0, le=MAX_VIRTUAL)]] = {}
    #: slots that would shorten the study, by compute class, for the classes whose workers may be started on demand
    wanted_slots: dict[_ClassName, _Slots] = {}
    metrics: _MetricsPlace = ""

    @property
    def backlog(self) -> dict[str, int]:
        """Slots that the study's trials take or wait for, by class, in classes that are not in `wanted_slots`.

        A scaler keeps workers for these slots, but does not start any.
        """
        sendable = 0 if self.progress is None else self.progress.sendable_slots
        return {name: int(slots) + sendable for name, slots in self.wants.items() if name not in self.wanted_slots}


def one_a_disk(workers: Mapping[str, Worker], control: str | None = None) -> list[str]:
    """Return the names of workers: one for each folder of checkpoints, which several workers may share.

    With `control`, the fingerprint of a signer, workers that do not obey its requests are left out.
    """
    found = {name: each for name, each in workers.items() if control is None or each.obeys(control)}
    return [*{each.storage or name: name for name, each in found.items()}.values()]


def wanted_slots(studies: Iterable[StudyWants], workers: Iterable[Worker]) -> dict[str, int]:
    """Return the slots that all studies together want of each class.

    The number exceeds the live slots only for slots that are wanted on demand (`StudyWants.wanted_slots`).
    """
    wanted, backlog, live = Counter[str](), Counter[str](), Counter[str]()
    for study in studies:
        wanted.update(study.wanted_slots)
        backlog.update(study.backlog)
    for worker in workers:
        live[worker.compute_class] += 0 if worker.draining else worker.slots
    return {name: max(wanted[name], min(live[name], wanted[name] + backlog[name])) for name in {**wanted, **backlog}}


_SEALED: Mapping[type[Struct], Sealed[Any]] = {kind: Sealed(kind, MAX_ANNOUNCEMENT) for kind in (Worker, StudyWants)}

T = TypeVar("T", bound=Struct)


class Registry(Generic[T]):
    """The announcements of all workers, or of all studies: `kind` is Worker or StudyWants."""

    def __init__(self, client: Redis, kind: type[T], signer: Signer = UNSIGNED, *, index: str = "") -> None:
        """Use `index` as the key of the set of names. By default, it is the set of all announced names of the kind."""
        self._client = client
        self._sealed: Sealed[T] = _SEALED[kind]
        self._signer = signer
        #: number of announcements that the last `living` refused, because they were unsigned or malformed
        self.refused = 0
        plural, singular = ("workers", "worker") if issubclass(kind, Worker) else ("studies", "study")
        self._index, self._name = index or f"shadho:{plural}", f"shadho:{singular}:{{}}"
        self._left = f"{self._name}:left"
        #: name -> latest text and its decoded announcement, which is reused because most announcements do not change
        self._known: dict[str, tuple[str, T | None]] = {}
        #: keys that were accepted when these texts were decoded
        self._keys = signer.fingerprints

    def announce(self, name: str, announcement: T) -> bool:
        """Announce `name` for the next ANNOUNCE_SECONDS. Return True if Redis did not know the name before."""
        key = self._name.format(name)
        text = self._signer.seal(key, announcement)
        with self._client.pipeline(transaction=False) as pipe:
            pipe.sadd(self._index, name)
            pipe.set(key, text, px=int(ANNOUNCE_SECONDS * 1000))
            return bool(pipe.execute()[0] == 1)

    def withdraw(self, name: str) -> None:
        """Remove an announcement at once."""
        self._client.delete(self._name.format(name))
        self._client.srem(self._index, name)

    def note_leaving(self, name: str) -> None:
        """Record for LEFT_SECONDS that `name` withdraws in order. Call this before `withdraw`."""
        self._client.set(self._left.format(name), "1", px=int(LEFT_SECONDS * 1000))

    def has_left(self, name: str) -> bool:
        """Return whether `name` has withdrawn in order, rather than become silent."""
        return bool(self._client.exists(self._left.format(name)))

    def clear(self) -> None:
        """Remove all announcements. Live processes announce themselves again."""
        self._client.delete(self._index)

    def ages(self, names: Iterable[str]) -> dict[str, float]:
        """Return the seconds since the latest announcement of each name whose announcement has not expired."""
        names = [*names]
        with self._client.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.pttl(self._name.format(name))
            left = pipe.execute()
        return {
            name: max(0.0, ANNOUNCE_SECONDS - milliseconds / 1000)
            for name, milliseconds in zip(names, left, strict=True)
            if milliseconds >= 0
        }

    def living(self) -> dict[str, T]:
        """Return the live announcements by name. Unsigned and malformed ones are left out and counted in `refused`."""
        names = sorted(self._client.smembers(self._index))
        texts = self._client.mget([self._name.format(name) for name in names]) if names else []
        if expired := [name for name, text in zip(names, texts, strict=True) if text is None]:
            self._client.srem(self._index, *expired)
        keys, before = self._signer.fingerprints, self._known
        if keys != self._keys:
            self._keys, before = keys, {}
        self._known = {
            name: before[name]
            if name in before and before[name][0] == text
            else (text, self._sealed.read(self._name.format(name), text, self._signer))
            for name, text in zip(names, texts, strict=True)
            if text is not None
        }
        living = {name: announcement for name, (_, announcement) in self._known.items() if announcement is not None}
        self.refused = len(self._known) - len(living)
        return living


#: stands for an unknown version of the code, which may run any trial
ANY_CODE = CodeVersion()


def able(
    workers: Mapping[str, Worker], module: str, fingerprint: str = "", code: CodeVersion = ANY_CODE
) -> dict[str, Worker]:
    """Return the live `workers` that can run trials of `module` in the version `code`.

    They use our protocol and know the signing key with this `fingerprint`. Draining workers are left out.
    """
    return sorted_out(workers, module, fingerprint, code)[0]


def sorted_out(
    workers: Mapping[str, Worker], module: str, fingerprint: str, code: CodeVersion
) -> tuple[dict[str, Worker], dict[str, str]]:
    """Return the result of `able`, and a warning for each worker, by name, that lacks only this version of the code."""
    found: dict[str, Worker] = {}
    differing: dict[str, str] = {}
    for name, worker in workers.items():
        # A worker that gets shipped code does not use the files on its own disk.
        is_shipped = code.is_shipped and worker.accepts_code
        if worker.protocol != PROTOCOL or not worker.knows(fingerprint) or worker.draining:
            continue
        if is_shipped:
            lack = worker.unfit.get(code.digest, "")
        elif module in worker.imports:
            known = worker.codes.get(module, ANY_CODE)
            lack = "" if known.is_usable(code.digest) else known.difference(code)
        else:
            continue
        if lack:
            differing[name] = f"worker {name} on {worker.machine.host} gets no trials: {lack}"
        else:
            found[name] = worker
    return found, differing


def unable(
    workers: Mapping[str, Worker],
    module: str,
    fingerprint: str = "",
    code: CodeVersion = ANY_CODE,
    *,
    refused: int = 0,
    compute_class: str = "gpu_large",
) -> ServiceError | None:
    """Return an error that says why no live worker can run this `code` of `module`. Return None if a worker can.

    `refused` is the number of announcements that are not signed with our key. The command in the remedy uses
    `compute_class`.
    """
    found, others = sorted_out(workers, module, fingerprint, code)
    if found:
        return None
    if others:
        first = others[min(others)]
        return ServiceError(f"no live worker has this study's code of {module}, and the study waits for one: {first}")
    drained = sorted({place_of(name) for name, worker in workers.items() if worker.drained})
    workers = {name: worker for name, worker in workers.items() if not worker.draining}
    if drained and not workers:
        return ServiceError(f"all live workers are drained; run shadho-celery undrain {shlex.quote(drained[0])}")
    start = partial(start_command, module=module, is_shipped=code.is_shipped)
    if not (workers or refused):
        return ServiceError(f"no worker is live; start one on a node: {start(compute_class)}")
    accepting = [worker for worker in workers.values() if code.is_shipped and worker.accepts_code]
    having = [worker for worker in workers.values() if module in worker.imports] + accepting
    if workers and not having:
        names = {worker.compute_class for worker in workers.values()}
        name = compute_class if compute_class in names else min(names)
        return ServiceError(f"no live worker {needs(module)}; start one: {start(name)}")
    if having and all(worker.protocol != PROTOCOL for worker in having):
        return ServiceError(f"the workers that have {module} {of_other_protocols(workers, module)}")
    return ServiceError(
        f"the workers that have {module} sign with another key than this scheduler, or only one side signs; "
        "give all of them the same --signing-key-file"
    )


def of_other_protocols(workers: Mapping[str, Worker], module: str) -> str:
    """Return a warning about live workers that have `module` but use another protocol, or "" if there are none.

    The warning is a sentence without its subject, which the caller puts in front.
    """
    theirs = {worker.protocol for worker in workers.values() if module in worker.imports} - {PROTOCOL}
    if not theirs:
        return ""
    spoken = ", ".join(map(str, sorted(theirs)))
    return (
        f"speak protocol {spoken}, this scheduler {PROTOCOL}; install the same version of shadho_celery on both sides"
    )


def place_of(worker: str) -> str:
    """Return the part of a worker's name that stays the same when the worker restarts: ``CLASS@HOST``.

    The rest of the name is its process id and a random part. Workers of one class on one host have the same place.
    """
    return worker.rsplit(".", 2)[0]


def obeyed_drains(workers: Mapping[str, Worker]) -> dict[str, int]:
    """Return the greatest sequence number of a drain that workers obey, by place, or for a worker alone by its name."""
    found: dict[str, int] = defaultdict(int)
    for name, worker in workers.items():
        for place, sequence in (place_of(name), worker.drain_sequence), (name, worker.own_drain_sequence):
            if sequence:
                found[place] = max(sequence, found[place])
    return {**found}


def start_command(compute_class: str, module: str, *, is_shipped: bool = False) -> str:
    """Return the command that starts a worker for trials of `module`, whose code may be shipped, on a node."""
    what = "SHADHO_ACCEPT_CODE=1" if is_shipped or module.endswith(BY_VALUE) else f"SHADHO_IMPORTS={module}"
    return f"{what} celery -A shadho_celery worker -Q {shlex.quote(compute_class)}"


def needs(module: str) -> str:
    """Return the condition under which a worker gets trials of `module`, as a phrase whose subject is the worker."""
    return "accepts code (--accept-code)" if module.endswith(BY_VALUE) else f"has {module}"


class Host:
    """The workers on one worker's host that share its cores."""

    def __init__(self, client: Redis, name: str, machine: Machine, signer: Signer = UNSIGNED) -> None:
        """Use the worker's `name`, and the `machine` that it announces."""
        self._client = client
        self._name = name
        self._pool = machine.pool
        self._index = f"shadho:host:{machine.pool}"
        self._workers = Registry(client, Worker, signer, index=self._index)

    def neighbours(self, *, joins: bool) -> dict[str, Worker]:
        """Return the other live workers that share the host's cores, by name.

        With `joins`, make this worker visible to them for the next ANNOUNCE_SECONDS; announce it first.
        """
        living: dict[str, Worker] = {}
        # Schedulers do not repair this key.
        with spoilt_keys_pass(partial(self._client.delete, self._index)):
            if joins and self._pool:
                with self._client.pipeline(transaction=False) as pipe:
                    pipe.sadd(self._index, self._name).pexpire(self._index, int(ANNOUNCE_SECONDS * 1000)).execute()
            living = self._workers.living() if self._pool else {}
        return {name: each for name, each in living.items() if name != self._name and each.machine.pool == self._pool}
