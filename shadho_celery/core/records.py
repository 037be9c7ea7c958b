"""Records of attempts, sessions of workers and machines; and records of the actions that users request.

A study writes the records of attempts, sessions and machines for charts, and to explain where trials were placed. The
scheduler uses them only for the money that attempts have cost, the backlogs of classes, and the rates of preemption.

Each action is one record. Its command, the routes and buttons of the dashboard and the requests over Redis are made
from it. `Control` has a method for it, and `session.steering` the function that carries it out.
"""

from __future__ import annotations

import math
import platform
import struct
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, get_args

from msgspec import Meta, Struct
from msgspec.structs import replace

from shadho_celery import __version__
from shadho_celery.core.checks import resolve
from shadho_celery.core.hardware import Gpu, Machine
from shadho_celery.core.trial import MAX_TEXT, AttemptNumber, Bytes, Name, Number, Price, StoredMoment, Words
from shadho_celery.core.units import money
from shadho_celery.core.users import UserName

#: number of bytes for each class in `AttemptRecord.placed`: three numbers of 32 bits
CLASS_BYTES = 12
#: maximum number of classes of a study in a record; greatest absolute value of a float of 32 bits
MAX_CLASSES, _MOST = 10_000, 3.4e38


class End(Words):
    """How an attempt ended."""

    COMPLETE = "complete"
    PRUNED = "pruned"
    FAILED = "failed"
    CANCELLED = "cancelled"
    #: its worker no longer renewed its lease
    LOST = "lost"
    #: it failed on this worker, and its trial is tried on another one
    RETRIED = "retried"
    #: its class had too little memory, and its trial is tried on another class
    OUTGROWN = "outgrown"
    #: another attempt has ended its trial
    SUPERSEDED = "superseded"
    #: its worker gave it back for a reason other than the trial, for instance because the worker was stopped
    RETURNED = "returned"
    #: it ended before a worker claimed it, because the scheduler took it back or there was no worker
    UNCLAIMED = "unclaimed"


class MoneyPlan(Struct, frozen=True, kw_only=True):
    """The latest plan of a study with the setting `place_by` "money"."""

    #: time in seconds since the epoch by which its trials should have ended
    deadline: StoredMoment
    #: expected money for all of its trials, ended ones included; None if the deadline cannot be kept
    money: Annotated[float, Meta(ge=0, le=1e18)] | None = None
    #: the most money that a deadline an hour later can save; this is also the least that a deadline an hour earlier
    #: costs
    an_hour: Annotated[float, Meta(ge=0, le=1e18)] = 0.0

    @property
    def hour_words(self) -> str:
        """Text that says how much money a deadline an hour later would save, and one an hour earlier would cost."""
        if self.an_hour < 0.005:
            return "an hour more saves nothing"
        amount = money(self.an_hour)
        return f"an hour more saves up to {amount}, an hour less costs at least {amount}"


class Leaving(Words):
    """Why a session ended."""

    #: the worker was stopped and ended as requested
    STOPPED = "stopped"
    #: the worker was told that its machine will be taken away, and gave its trials back
    PREEMPTED = "preempted"
    #: the worker stopped announcing itself
    LOST = "lost"
    #: the worker gets no more trials of this study for now, because it fails trials that other workers complete
    QUARANTINED = "quarantined"
    #: the worker can no longer run this study, for instance because its code has changed
    UNFIT = "unfit"
    #: the number of slots of the worker changed, and it has another session
    RESIZED = "slots changed"
    #: the run of the study, or its scheduler, ended
    ENDED = "study ended"


_Slot = Annotated[int, Meta(ge=0, le=10**6)]


class AttemptRecord(Struct, kw_only=True, array_like=True):
    """An attempt of a trial, from its placement to its end. Facts that are not known, or not known yet, are None.

    If several records of an attempt are written, a fact that is None in a later one does not replace a known fact.
    Records are not frozen, because the recorder adds facts when they become known.
    """

    #: number of the trial, and number of the attempt of this trial
    number: Number
    attempt: AttemptNumber
    #: compute class to which it was sent
    compute_class: Name | None = None
    #: name of the machine
    host: Name | None = None
    #: name of the worker that has claimed it
    worker: Name | None = None
    #: number of the worker's slot that has run it, from 0
    slot: _Slot | None = None
    #: seconds since the epoch by the scheduler's clock
    queued_at: StoredMoment | None = None
    #: times in seconds since the epoch by the worker's clock; the end of an attempt without a result is by the
    #: scheduler's clock
    started_at: StoredMoment | None = None
    ended_at: StoredMoment | None = None
    #: how it ended (below); None while it is live
    end: End | None = None
    #: True for a speculative copy of a running attempt
    copy: bool | None = None
    #: price per hour of all its slots; None if its worker announces no price
    price: Price | None = None
    # Here as `pack` returns them.
    #: by class that was live when it was placed: predicted `seconds`, `backlog` (seconds queued there), shadow `price`
    placed: Annotated[bytes, Meta(max_length=CLASS_BYTES * MAX_CLASSES)] | None = None
    #: user whose run has sent it
    owner: UserName | None = None

    def merged(self, later: AttemptRecord) -> AttemptRecord:
        """Return this record with the facts of a `later` record of the same attempt that are not None."""
        facts = {name: fact for name in self.__struct_fields__ if (fact := getattr(later, name)) is not None}
        return replace(self, **facts)


class SessionRecord(Struct, frozen=True, kw_only=True):
    """A period in which a worker could run trials of a study, with about the same number of slots."""

    #: name of the worker
    worker: Name
    #: time of its start in seconds since the epoch by the scheduler's clock
    since: StoredMoment
    #: compute class and machine of the worker
    compute_class: Name
    host: Name
    # See `Recorder.follow`.
    #: number of slots at its start; a change is recorded within a minute
    slots: _Slot
    #: time of its end; None while it lasts
    until: StoredMoment | None = None
    #: why it ended (below); None while it lasts
    reason: Leaving | None = None
    #: price of each slot per hour; None if the worker announces none
    price: Price | None = None
    #: pairs of a time, in seconds since the epoch, and the mean number of slots that ran trials of other studies from
    #: this time until that of the next pair; 0 before the first pair
    others: Annotated[
        tuple[tuple[StoredMoment, Annotated[float, Meta(ge=0, le=10**6)]], ...], Meta(max_length=5000)
    ] = ()


class MachineRecord(Struct, frozen=True, kw_only=True):
    """A machine that has run, or could have run, trials of a study."""

    #: name of the machine
    host: Name
    #: GPUs of its workers, each with `name`, `memory` in bytes and `id`, and with `device` unless that is cuda
    gpus: Annotated[tuple[Gpu, ...], Meta(max_length=1000)] = ()
    #: number of cores that its workers may use; 0 if unknown
    cores: Annotated[int, Meta(ge=0, le=10**6)] = 0
    #: bytes of RAM; 0 if unknown
    memory: Bytes = 0
    #: by name: versions of `shadho_celery` and `python`
    versions: Annotated[Mapping[Name, Name], Meta(max_length=100)] = {}

    @classmethod
    def of(cls, machine: Machine, versions: Mapping[str, str]) -> MachineRecord:
        """Return the record of a machine that a worker has announced, without the unique ids of its GPUs."""
        gpus = tuple(replace(gpu, uuid="") for gpu in machine.cards)
        return cls(host=machine.host, gpus=gpus, cores=machine.cores, memory=machine.memory, versions=versions)

    def beside(self, other: MachineRecord | None) -> MachineRecord:
        """Return this record with all GPUs of both records, sorted by id.

        If a machine has several workers, each of them announces only its own GPUs.
        """
        more = () if other is None else [gpu for gpu in other.gpus if gpu.id not in {each.id for each in self.gpus}]
        return replace(self, gpus=tuple(sorted([*self.gpus, *more], key=lambda gpu: (len(gpu.id), gpu.id))[:1000]))


class Present(NamedTuple):
    """Facts about a worker that can run trials of a study now."""

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
    """Facts about a live class at the time when the scheduler placed an attempt. Unknown numbers are None."""

    #: predicted seconds of the trial on the class
    seconds: float | None
    #: sum of the predicted seconds of the study's attempts in the queue of the class
    backlog: float | None
    #: shadow price of a second on the class, relative to the other classes; only policy `cost` has prices
    price: float | None


_UNKNOWN = Placed(None, None, None)


def pack(found: Mapping[str, Placed], order: Sequence[str]) -> bytes:
    """Return the facts about the live classes as three numbers of 32 bits for each class, in the study's `order` of
    classes.
    """
    known = [*order]
    while len(known) > 1 and known[-1] not in found:
        known.pop()
    numbers = [math.nan if n is None else n for name in known for n in found.get(name, _UNKNOWN)]
    try:
        return struct.pack(f"<{len(numbers)}f", *numbers)
    except OverflowError:
        return struct.pack(f"<{len(numbers)}f", *[min(max(n, -_MOST), _MOST) for n in numbers])


def unpack(packed: bytes | None, order: Sequence[str]) -> dict[str, Placed]:
    """Return by name the facts about the classes that were live; {} for bytes that `pack` cannot have written."""
    if not packed or len(packed) % CLASS_BYTES:
        return {}
    known = [Placed(*map(_known, each)) for each in struct.iter_unpack("<3f", packed)]
    return {name: facts for name, facts in zip(order, known, strict=False) if any(n is not None for n in facts)}


def _known(number: float) -> float | None:
    return number if math.isfinite(number) else None


#: maximum number of known points in a request, and of characters of a note
MAX_POINTS, MAX_NOTE = 1000, 2000


class Deed(Struct, frozen=True, forbid_unknown_fields=True, tag_field="action", tag=str.lower):
    """Base of actions that a user can request. A subclass's name is the action's, its docstring the command's help."""

    #: description in the list of commands
    line: ClassVar[str]
    #: command lines without the program's name; the first one is also shown for a fleet
    examples: ClassVar[tuple[str, ...]]
    #: question of the dashboard's button, with placeholders such as {study}
    question: ClassVar[str]
    #: text of the button, if it is not the name of the action
    button: ClassVar[str] = ""
    #: object of the action: a study, a trial, a worker, the whole fleet, or `note` for the notes on a study or a trial
    scope: ClassVar[str] = "study"
    #: True if the button is shown only for a paused study or a drained worker; False if only for others; None for all
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
    With --failed they are the params of failed trials.
    """

    line = "Let a running study run known points next."
    examples = (
        "enqueue svm-3f2a points.jsonl",
        "enqueue svm-3f2a --failed      # after a fix, all failed trials",
        "enqueue svm-3f2a --failed 3 7  # two of them",
    )
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


class Note(Deed, frozen=True):
    """Record the note TEXT on STUDY, or on one of its trials, whether or not the study runs.

    Pages and the commands show and trial show notes with their users and times.
    """

    line = "Record a note on a study or a trial."
    examples = ('note svm-3f2a "new data since trial 40"', 'note svm-3f2a --trial 12 "diverges after step 3"')
    question = "Add a note to {study}"
    button = "add a note"
    scope = "note"

    text: Annotated[str, Meta(pattern=r"\S", max_length=MAX_NOTE, description=f"1 to {MAX_NOTE} visible characters")]
    #: number of the trial; None for a note on the study
    trial: Number | None = None


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


OfStudy = Stop | Pause | Unpause | Cancel | Enqueue | Set | Note
OfWorker = Drain | Undrain


def name_of(deed: Deed | type[Deed]) -> str:
    """Return the name of an action."""
    return str(deed.__struct_config__.tag)


#: all actions by name, in the order of the list of commands
ACTIONS: Mapping[str, type[Deed]] = {name_of(each): each for each in (*get_args(OfStudy), *get_args(OfWorker), Clean)}


class Answer(Struct, frozen=True, kw_only=True):
    """The result of a request."""

    #: False if the request was refused; then `text` has the reason
    is_done: bool
    text: Annotated[str, Meta(max_length=MAX_TEXT)]


class Action(Struct, frozen=True, kw_only=True):
    """A request to a running study, or to workers of its fleet, as it is recorded in the store."""

    #: id of the request, 32 hexadecimal digits
    id: Name
    #: time in seconds since the epoch, by the scheduler's clock; for a drain, by the clock of Redis
    at: StoredMoment
    #: user who has sent the request
    by: Name
    #: name of the action, such as ``stop``
    action: Name
    #: by name: arguments of the action
    arguments: Mapping[str, Any]
    answer: Answer
    #: fencing number of the scheduler that got the request; None if no scheduler carries it out: for a drain, and for a
    #: note on a study that does not run
    fence: int | None = None


def notes_of(actions: Sequence[Action], trial: int | None = None) -> list[dict[str, Any]]:
    """Return the notes among actions as plain values, or only those on one `trial`."""
    notes = (each for each in actions if each.action == "note" and each.answer.is_done)
    # A store may have been written by a stranger, so an argument may be missing.
    found = [{"trial": None, "text": "", **each.arguments, "at": each.at, "by": each.by} for each in notes]
    return [each for each in found if trial in (None, each["trial"])]
