"""Records of the machines (attempts, sessions of workers, machines), and of the actions that people ask for.

A study writes the former for pictures and for "why did this trial go there". No decision depends on them, except that
the money which attempts have cost counts against a limit.

Each action is one record. Its command, the routes and buttons of the dashboard and the requests over Redis are made
from it. `Control` has a method for it, and `session.steering` the function that carries it out.
"""

from __future__ import annotations

import math
import platform
import struct
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, ClassVar, NamedTuple, get_args

from msgspec import Meta, Struct
from msgspec.structs import replace

from shadho_celery import __version__
from shadho_celery.core.checks import resolve
from shadho_celery.core.hardware import Gpu, Machine
from shadho_celery.core.trial import MAX_TEXT, Bytes, Name, Number, Place, Price, StoredMoment
from shadho_celery.core.units import money

#: bytes of one class in `AttemptRecord.placed`: three numbers of 32 bits
CLASS_BYTES = 12
#: maximum number of classes of one study in a record; and the greatest number that fits 32 bits
MAX_CLASSES, _MOST = 10_000, 3.4e38


class End(str, Enum):
    """How an attempt ended."""

    COMPLETE = "complete"
    PRUNED = "pruned"
    FAILED = "failed"
    CANCELLED = "cancelled"
    #: its worker no longer renewed its lease
    LOST = "lost"
    #: it failed on one worker, and its trial is tried on another
    RETRIED = "retried"
    #: its class had too little memory, and its trial is tried on another
    OUTGROWN = "outgrown"
    #: another attempt has ended its trial
    SUPERSEDED = "superseded"
    #: a worker gave it back without fault of the trial, for instance because it was stopped
    RETURNED = "returned"
    #: it ended before a worker claimed it: it was taken back, or no worker was there
    UNCLAIMED = "unclaimed"

    __str__ = str.__str__


class MoneyPlan(Struct, frozen=True, kw_only=True):
    """What a study that is placed by money expects, as of its latest plan."""

    #: seconds since the epoch at which its trials should have ended
    deadline: StoredMoment
    #: money for all of its trials, those that have ended included; None if the deadline cannot be kept
    money: Annotated[float, Meta(ge=0, le=1e18)] | None = None
    #: money that an hour more saves at most, and that an hour less costs at least
    an_hour: Annotated[float, Meta(ge=0, le=1e18)] = 0.0

    @property
    def hour_words(self) -> str:
        """Text of what an hour more and an hour less of the deadline cost."""
        if self.an_hour < 0.005:
            return "an hour more saves nothing"
        amount = money(self.an_hour)
        return f"an hour more saves up to {amount}, an hour less costs at least {amount}"


class Leaving(str, Enum):
    """Why a session ended."""

    #: the worker stopped in order
    STOPPED = "stopped"
    #: the worker was told that its machine is taken away, and gave its trials back
    PREEMPTED = "preempted"
    #: the worker no longer announced itself
    LOST = "lost"
    #: the worker gets no more trials of this study, because it fails trials that others finish
    QUARANTINED = "quarantined"
    #: the worker can no longer run this study, for instance because its code was edited
    UNFIT = "unfit"
    #: the worker stayed, with another number of slots, and has another session
    RESIZED = "slots changed"
    #: the run of the study ended, or its scheduler did
    ENDED = "study ended"

    __str__ = str.__str__


_Slot = Annotated[int, Meta(ge=0, le=10**6)]


class AttemptRecord(Struct, kw_only=True, array_like=True):
    """One attempt of a trial, from its placement to its end. Facts that are not known, or not yet, are None.

    A store keeps the known facts of an earlier record of the same attempt where a later record has None. Records are
    not frozen, because the recorder adds each fact when it becomes known.
    """

    #: number of the trial, and of the attempt within it
    number: Number
    attempt: Place
    compute_class: Name | None = None
    #: name of the machine
    host: Name | None = None
    #: name of the worker that claimed it
    worker: Name | None = None
    #: number of the worker's slot that ran it, from 0
    slot: _Slot | None = None
    #: seconds since the epoch by the scheduler's clock
    queued_at: StoredMoment | None = None
    #: seconds since the epoch by the worker's clock, except the end of an attempt without a result
    started_at: StoredMoment | None = None
    ended_at: StoredMoment | None = None
    end: End | None = None
    #: True for a speculative copy of an attempt that was running
    copy: bool | None = None
    #: price of all slots that it takes; None if its worker announces no price
    price: Price | None = None
    #: `pack` of the classes that were live when it was placed
    placed: Annotated[bytes, Meta(max_length=CLASS_BYTES * MAX_CLASSES)] | None = None

    def merged(self, later: AttemptRecord) -> AttemptRecord:
        """Return the facts of a `later` record of the same attempt, with those of this record where it has None."""
        facts = {name: fact for name in self.__struct_fields__ if (fact := getattr(later, name)) is not None}
        return replace(self, **facts)


class SessionRecord(Struct, frozen=True, kw_only=True):
    """A time in which a worker could run trials of a study, with about the same number of slots."""

    worker: Name
    #: seconds since the epoch by the scheduler's clock
    since: StoredMoment
    compute_class: Name
    host: Name
    #: slots at its start; a change is recorded within a minute (`Recorder.follow`)
    slots: _Slot
    #: None while it lasts
    until: StoredMoment | None = None
    reason: Leaving | None = None
    #: price of each slot; None if the worker announces none
    price: Price | None = None
    #: mean number of its slots that ran trials of other studies, by the time from which on; 0 before the first time.
    #: A time is seconds since the epoch, and lasts until the next one (`Recorder.follow`)
    others: Annotated[
        tuple[tuple[StoredMoment, Annotated[float, Meta(ge=0, le=10**6)]], ...], Meta(max_length=5000)
    ] = ()


class MachineRecord(Struct, frozen=True, kw_only=True):
    """A machine that has run, or could have run, trials of a study."""

    host: Name
    gpus: Annotated[tuple[Gpu, ...], Meta(max_length=1000)] = ()
    #: cores that its workers may use; 0 if unknown
    cores: Annotated[int, Meta(ge=0, le=10**6)] = 0
    #: bytes of RAM; 0 if unknown
    memory: Bytes = 0
    #: versions by name: `shadho_celery` and `python`
    versions: Annotated[Mapping[Name, Name], Meta(max_length=100)] = {}

    @classmethod
    def of(cls, machine: Machine, versions: Mapping[str, str]) -> MachineRecord:
        """Return the record of an announced machine, without the unique ids of its GPUs."""
        gpus = tuple(replace(gpu, uuid="") for gpu in machine.cards)
        return cls(host=machine.host, gpus=gpus, cores=machine.cores, memory=machine.memory, versions=versions)

    def beside(self, other: MachineRecord | None) -> MachineRecord:
        """Return this record with those GPUs of the `other` record that it lacks, in the order of their ids.

        Each of several workers of a machine announces its own GPUs.
        """
        more = () if other is None else [gpu for gpu in other.gpus if gpu.id not in {each.id for each in self.gpus}]
        return replace(self, gpus=tuple(sorted([*self.gpus, *more], key=lambda gpu: (len(gpu.id), gpu.id))[:1000]))


class Present(NamedTuple):
    """A worker that can run trials of a study now."""

    compute_class: str
    slots: int
    machine: MachineRecord
    #: price of each slot
    price: float | None = None


resolve(AttemptRecord, SessionRecord, MachineRecord)


def own_versions() -> dict[str, str]:
    """Return the versions of this package and of Python in this process."""
    return {"shadho_celery": __version__, "python": platform.python_version()}


class Placed(NamedTuple):
    """What the scheduler knew of one live class when it placed an attempt. A number that was not known is None."""

    #: predicted seconds of the trial on this class
    seconds: float | None
    #: predicted seconds of the attempts of the study that waited in the queue of this class
    backlog: float | None
    #: price of a second on this class, relative to the other classes; only policy `cost` has prices
    price: float | None


_UNKNOWN = Placed(None, None, None)


def pack(found: Mapping[str, Placed], order: Sequence[str]) -> bytes:
    """Return the facts of the live classes as three 32-bit numbers a class, in the study's `order` of classes."""
    known = [*order]
    while len(known) > 1 and known[-1] not in found:
        known.pop()
    numbers = [math.nan if n is None else n for name in known for n in found.get(name, _UNKNOWN)]
    try:
        return struct.pack(f"<{len(numbers)}f", *numbers)
    except OverflowError:
        return struct.pack(f"<{len(numbers)}f", *[min(max(n, -_MOST), _MOST) for n in numbers])


def unpack(packed: bytes | None, order: Sequence[str]) -> dict[str, Placed]:
    """Return the facts of the classes that were live, by name. Bytes that `pack` cannot have written give {}."""
    if not packed or len(packed) % CLASS_BYTES:
        return {}
    known = [Placed(*map(_known, each)) for each in struct.iter_unpack("<3f", packed)]
    return {name: facts for name, facts in zip(order, known, strict=False) if any(n is not None for n in facts)}


def _known(number: float) -> float | None:
    return number if math.isfinite(number) else None


#: maximum number of known points in a request
MAX_POINTS = 1000


class Deed(Struct, frozen=True, forbid_unknown_fields=True, tag_field="action", tag=str.lower):
    """What a request asks for. The class's name is that of the action, its docstring the help of the command."""

    #: line in the list of commands
    line: ClassVar[str]
    #: command lines after the program's name; the first one is also shown for a fleet
    examples: ClassVar[tuple[str, ...]]
    #: question of the dashboard's button, with the names of what it is about in braces
    question: ClassVar[str]
    #: text of the button, if it is not the action's name
    button: ClassVar[str] = ""
    #: what it is about: a study, a trial of one, a worker, or the whole fleet
    scope: ClassVar[str] = "study"
    #: whether the button is for a paused study or a drained worker; None: for any
    while_held: ClassVar[bool | None] = None


class Stop(Deed, frozen=True):
    """End the running study STUDY: start no more trials, and finish the running ones, as after one Ctrl-C.

    shadho-celery resume continues it.
    """

    line = "End a running study once its trials have finished."
    examples = ("stop svm-3f2a",)
    question = "End {study} once its running trials have finished?"


class Pause(Deed, frozen=True):
    """Let the running study STUDY start no more trials until shadho-celery unpause. Its running trials finish.

    The study keeps its scheduler. The time for --seconds goes on.
    """

    line = "Let a running study start no more trials for now."
    examples = ("pause svm-3f2a",)
    question = "Start no more trials of {study} until it is unpaused? Its running trials finish."
    while_held = False


class Unpause(Deed, frozen=True):
    """Let the paused study STUDY start trials again."""

    line = "Let a paused study start trials again."
    examples = ("unpause svm-3f2a",)
    question = "Start trials of {study} again?"
    while_held = True


class Cancel(Deed, frozen=True):
    """Cancel trial number TRIAL of the running study STUDY, whether it runs or waits.

    It ends CANCELLED and does not count towards --trials, so another trial takes its place.
    """

    line = "Cancel one trial of a running study."
    examples = ("cancel svm-3f2a 12",)
    question = "Stop trial {number} of {study}?"
    scope = "trial"

    number: Number


class Enqueue(Deed, frozen=True):
    """Let the running study STUDY run the known points in FILE before other trials.

    FILE is as for --enqueue of shadho-celery run: one JSON object per line, such as {"rate": 0.1}, or a JSON list.
    """

    line = "Let a running study run known points next."
    examples = ("enqueue svm-3f2a points.jsonl",)
    question = "Let {study} run known points before other trials"

    points: Annotated[list[Any], Meta(min_length=1, max_length=MAX_POINTS)]


class Set(Deed, frozen=True):
    """Change settings of the running study STUDY. Later runs of it have the new values too.

    --trial-timeout applies to the trials that are sent from now on. A study that is already stopping does not change.
    """

    line = "Change settings of a running study."
    examples = (
        "set svm-3f2a --trials 200",
        "set svm-3f2a --seconds 7200 --early-stop 50",
        "set svm-3f2a --weight 3        # three times the slots of a study of weight 1",
    )
    question = "Change settings of {study}, also for its later runs"
    button = "set limits"

    settings: dict[str, Any]


class Drain(Deed, frozen=True):
    """Let WORKER finish its trials and take no more, as before the maintenance of its machine.

    WORKER is CLASS@HOST, with a host of shadho-celery status: all workers of that class on that host. Those that start
    there later are drained too, until shadho-celery undrain. The full name of one of several workers there stands for
    that worker alone. No study needs to run.
    """

    line = "Let a worker take no more trials."
    examples = (
        "drain cpu@node7                # all workers of class cpu on node7",
        "drain cpu@node7.3817.0bdf      # one of them, by its name of shadho-celery status",
    )
    question = "Let {worker} finish its trials and take no more?"
    scope = "worker"
    while_held = False

    worker: Annotated[str, Meta(min_length=1, max_length=500)]


class Undrain(Deed, frozen=True):
    """Let WORKER, which shadho-celery drain has drained, take trials again."""

    line = "Let a drained worker take trials again."
    examples = ("undrain cpu@node7",)
    question = "Let {worker} take trials again?"
    scope = "worker"
    while_held = True

    worker: Annotated[str, Meta(min_length=1, max_length=500)]


class Clean(Deed, frozen=True):
    """Let the live workers delete folders of checkpoints that no study needs.

    These are the folders that STUDY["keep"] does not keep, of each STUDY, or of all studies of the store. Running
    studies are left out: their schedulers do this. A STUDY that is not in the store is named by its key, and all of its
    folders are deleted. Without --yes, sizes are shown first, and a question is asked. If no fleet is named, the
    folders are those of this folder.
    """

    line = "Delete folders of checkpoints that no study needs."
    examples = (
        "clean                          # of all studies of the store",
        "clean svm-3f2a --yes",
        "clean 0123456789abcdef         # all folders of a study that was deleted, by its key",
    )
    question = "Delete these folders?"
    scope = "fleet"

    studies: list[Annotated[str, Meta(min_length=1, max_length=500)]]
    is_sure: bool = False


OfStudy = Stop | Pause | Unpause | Cancel | Enqueue | Set
OfWorker = Drain | Undrain


def name_of(deed: Deed | type[Deed]) -> str:
    """Return the name of an action."""
    return str(deed.__struct_config__.tag)


#: all actions by name, in the order of the list of commands
ACTIONS: Mapping[str, type[Deed]] = {name_of(each): each for each in (*get_args(OfStudy), *get_args(OfWorker), Clean)}


class Answer(Struct, frozen=True, kw_only=True):
    """What has become of a request."""

    #: False if it was refused; `text` then has the reason
    is_done: bool
    text: Annotated[str, Meta(max_length=MAX_TEXT)]


class Action(Struct, frozen=True, kw_only=True):
    """A request to a running study, or to workers of its fleet, as its store records it."""

    #: id of the request, 32 hexadecimal digits
    id: Name
    #: seconds since the epoch, by the scheduler's clock; of a drain, by the clock of Redis
    at: StoredMoment
    #: user and host
    by: Name
    #: name of the action, such as ``stop``
    action: Name
    #: its arguments by name
    arguments: Mapping[str, Any]
    answer: Answer
    #: fencing number of the scheduler that was asked; None for a drain, which no scheduler carries out
    fence: int | None = None
