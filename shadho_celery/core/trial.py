"""Records of a trial, its attempts and their events, and the directions of a study's losses.

A trial is one evaluation of one set of params. An attempt is one sending of a trial to a worker. After a lost attempt,
the trial is sent again as another attempt; a speculative copy of a running trial is another attempt, too. Scheduler,
executors, messages and workers share these records.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from shadho_celery.core.checks import plain, resolve
from shadho_celery.core.code import Digest
from shadho_celery.errors import UsageError

#: by label: drawn value of each active label, which is a label of the options that were chosen
Params = Mapping[str, Any]
#: key in the params of an enqueued trial, whose value has the user's values of labels, as JSON. No label has this name
POINT = "(point)"

#: greatest number of a trial: the greatest integer that all JSON readers keep exact
MAX_COUNT = 2**53 - 1
#: maximum number of slots of a trial, and of replicas in a gang
MAX_SLOTS = 1024
#: maximum number of attempts of a trial, claimed or not; after the last one the trial is FAILED
MAX_ATTEMPTS = 1000

Number = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Count = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
AttemptNumber = Annotated[int, Meta(ge=1, le=MAX_ATTEMPTS)]
#: rung of a ladder of budgets, from 0; ladders have far fewer rungs
Rung = Annotated[int, Meta(ge=0, le=1000)]
#: a number that is neither NaN nor infinite
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
#: losses or constraints by name
Losses = Mapping[str, Finite]
#: maximum of positive numbers such as a weight, so that sums of them are finite
MAX_POSITIVE = 1e300
Positive = Annotated[float, Meta(gt=0, le=MAX_POSITIVE)]
#: time limit of a trial in seconds, at most about 30 years, because timers have a maximum
TimeLimit = Annotated[float, Meta(gt=0, le=1e9)]
#: a signed integer of 64 bits, the largest type of a database
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
#: duration of a trial in seconds, at most 300 years; and a time in seconds since the epoch, up to the year 5138
Seconds = Annotated[float, Meta(ge=0, le=1e10)]
Moment = Annotated[float, Meta(ge=0, le=1e11)]
#: a time in a store, in seconds since the epoch, which can be shown as a date
StoredMoment = Annotated[float, Meta(ge=-1e11, le=1e11)]
#: price per hour, in any currency
Price = Annotated[float, Meta(ge=0, le=1e9)]
Bytes = Annotated[int, Meta(ge=0, le=2**63 - 1)]
#: text without characters that stores and queues refuse; and such a text that fits a column of a store
Clean = Annotated[str, Meta(pattern=r"^[^\x00-\x1f\ud800-\udfff]*\Z")]
Name = Annotated[Clean, Meta(max_length=255)]
#: maximum number of characters of an error or a warning; the texts that `objective.call` makes are shorter
MAX_TEXT = 16_000
#: maximum number of characters of the last lines of a trial's output
MAX_LOG = 4000
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
#: maximum nesting of metrics: more than `objective.result` accepts, but few enough for all encoders
MAX_LEVELS = 120


#: kinds of memory, joined by commas
_Memories = Annotated[str, Meta(pattern=r"^(gpu|host)(,(gpu|host))*\Z")]


class Words(str, Enum):
    """Base of the names in a fixed list, which are shown as their values."""

    # Without these methods, some versions of Python would print a member as "TrialState.X".
    __str__ = str.__str__
    __format__ = str.__format__  # type: ignore[assignment]  # Enum names its parameter otherwise


class TrialState(Words):
    """State of a trial. After an attempt was LOST, the trial is WAITING again until its next attempt is sent."""

    WAITING = "WAITING"
    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    COMPLETE = "COMPLETE"
    PRUNED = "PRUNED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    LOST = "LOST"

    #: True if no other state can follow
    is_finished: bool


FINISHED = frozenset({TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAILED, TrialState.CANCELLED})
for _state in TrialState:
    _state.is_finished = _state in FINISHED
#: final states that count for the limit on trials
COUNTED = FINISHED - {TrialState.CANCELLED}
#: final states of a success, which ends all attempts of the trial, see `attempts.Attempts.finish`
WELL = frozenset({TrialState.COMPLETE, TrialState.PRUNED})


def shown_limit(asked: int | None, ended: int) -> int | None:
    """Return the limit on trials to show beside `ended` trials. They may exceed `asked` if failed trials ran again."""
    return asked and max(asked, ended)


class Memory(Words):
    """Kind of memory that a trial may run out of: the memory of its GPU, or the RAM of its machine."""

    GPU = "gpu"
    HOST = "host"

    @property
    def words(self) -> str:
        """Name of this kind of memory in messages."""
        return "GPU memory" if self is Memory.GPU else "host memory"


_S = TrialState
#: By state: the valid next states. A final state may directly follow QUEUED and WAITING, because a result may arrive
#: before the event that the attempt was started or lost.
LAWFUL: Mapping[TrialState, frozenset[TrialState]] = {
    _S.WAITING: frozenset({_S.QUEUED}) | FINISHED,
    _S.QUEUED: frozenset({_S.RUNNING, _S.LOST}) | FINISHED,
    _S.RUNNING: frozenset({_S.LOST}) | FINISHED,
    _S.LOST: frozenset({_S.WAITING}) | FINISHED,
    **{state: frozenset() for state in FINISHED},
}


#: encoder that sorts labels, because a database may return them in another order
_encode = msgspec.json.Encoder(order="deterministic", enc_hook=plain).encode


def digest_of(params: Params) -> str:
    """Return the BLAKE2b digest of the JSON of `params`: 8 bytes as sixteen hexadecimal digits."""
    try:
        text = _encode(params)
    except UnicodeEncodeError:
        # The params have an unpaired surrogate, which msgspec refuses.
        text = json.dumps(params, sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def violation_of(constraints: Losses) -> float:
    """Return the sum of the constraints above 0, which measures how far a trial is from being feasible."""
    return min(sum([value for value in constraints.values() if value > 0]), sys.float_info.max)


class Outcome(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Outcome of a call of an objective. Trials and results contain it, and the process of the objective sends it."""

    #: COMPLETE, PRUNED, FAILED or CANCELLED
    state: TrialState
    #: the loss, or the first of several losses, negated if it is maximised. A COMPLETE trial has one. For a PRUNED
    #: trial, it is the loss of its last report, or None if that is not finite
    loss: Finite | None = None
    #: losses by name in a study with `objectives`, negated if they are maximised
    losses: Losses = {}
    #: constraints by name, as the objective returned them; the trial is feasible if none is above 0
    constraints: Losses = {}
    #: further results of the objective
    metrics: Mapping[str, Any] = {}
    #: reason of the failure, with its traceback
    error: str | None = None
    #: seconds that the objective itself took, by the monotonic clock of its process
    seconds: Seconds | None = None
    #: peak bytes of the process's resident memory; None if they were not measured
    memory: Bytes | None = None
    #: peak bytes of GPU memory; None if the trial used no GPU, or if they were not measured
    gpu_memory: Bytes | None = None
    #: kind of memory that ran out, if the trial FAILED for this reason. It may succeed on another compute class
    out_of_memory: Memory | None = None
    #: True if the trial FAILED because a process of its process group was lost. It is tried again
    rank_lost: bool = False
    #: message to the user about a trial that ended well, for example about a dropped metric
    warning: str | None = None
    #: last lines of the output with time stamps, if the trial FAILED
    log: str | None = None
    #: digest of the code that has run, also if only an attempt has ended and is retried; None if it is not known
    code: Digest | None = None
    #: True if the checkpoint folder had files at the start, for a promoted trial and for a repeated attempt; None for
    #: other trials, or if it is not known
    continued: bool | None = None
    #: labels that the objective has asked for, each in the form of `space.schema.Suggested`; None in a study with a
    #: space
    asked: Mapping[str, Any] | None = None

    @property
    def violation(self) -> float:
        """Sum of the constraints above 0; 0 for a feasible trial, and for one without constraints."""
        return violation_of(self.constraints)

    @property
    def is_an_end(self) -> bool:
        """True if this is a valid outcome of an ended trial: the state is final, and the other fields fit it.

        A COMPLETE trial must have a loss; a FAILED or CANCELLED trial must not. Metrics must be finite and have at most
        MAX_LEVELS levels. Texts have at most MAX_TEXT characters, and the log at most MAX_LOG.
        """
        fits = (self.state is TrialState.COMPLETE) == (self.loss is not None) or self.state is TrialState.PRUNED
        is_short = max(len(self.error or ""), len(self.warning or "")) <= MAX_TEXT and len(self.log or "") <= MAX_LOG
        return self.state.is_finished and fits and is_short and _is_storable(self.metrics, MAX_LEVELS)

    def cancelled(self, seconds: float | None = None) -> Outcome:
        """Return this outcome as CANCELLED, without losses. If given, `seconds` replace its seconds."""
        seconds = self.seconds if seconds is None else seconds
        state = TrialState.CANCELLED
        facts = {"error": "cancelled", "seconds": seconds, "out_of_memory": None, "log": None}
        return replace(self, state=state, loss=None, losses={}, constraints={}, **facts)

    def without_memory(self) -> Outcome:
        """Return the outcome as if its memory had not been measured."""
        return replace(self, memory=None, gpu_memory=None)


#: outcome of a trial that has not ended
NO_OUTCOME = Outcome(state=TrialState.WAITING)


class _Evaluation(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fields that a trial and its attempts have in common."""

    #: position of the trial in its study, from 0, in the order in which trials were proposed
    number: Number
    #: name of the subspace of the params, such as ``kernel=rbf``
    subspace: str
    params: Params
    #: seed for the random draws of the objective; the same in all attempts
    seed: int = 0
    #: budget of the trial; None if it is not limited
    budget: Annotated[float, Meta(ge=0, le=sys.float_info.max)] | None = None
    #: number of slots of one class that the trial uses at the same time
    slots: Annotated[int, Meta(ge=1, le=MAX_SLOTS)] = 1
    #: names of the workers on which the trial has failed; they must not run it again
    failed_on: Annotated[tuple[Name, ...], Meta(max_length=MAX_ATTEMPTS)] = ()
    #: number of the trial on rung 0 whose params, seed and checkpoints it uses; None if it uses its own. For a repeat,
    #: which has no rung, the number of the trial whose params it has; an attempt of a repeat has None
    origin: Number | None = None
    compute_class: str | None = None
    #: name of the machine on which it runs, or has run last
    host: str | None = None
    #: seconds since the epoch
    started_at: StoredMoment | None = None


class Attempt(_Evaluation, frozen=True, kw_only=True, omit_defaults=True):
    """One sending of a trial to a worker."""

    #: number of the attempt of its trial, from 1
    attempt: AttemptNumber
    #: QUEUED until a worker claims it, then RUNNING
    state: TrialState = TrialState.QUEUED
    #: name of the worker that claimed it
    worker: str = ""
    #: machine that must not run this attempt, because it runs another attempt of the trial; None if there is none
    not_on: str | None = None
    #: predicted seconds on its compute class; None if they are not known or less than one
    expected: Annotated[float, Meta(ge=0, le=1e12)] | None = None
    #: the only machine that may run this attempt, which is sent to the queue of this machine; None for any machine of
    #: the class
    only_on: Name | None = None
    #: bytes of GPU memory that suffice for it; None if they are not known. Then it needs a whole GPU
    gpu_bytes: Bytes | None = None

    def evolve(self, **changes: Any) -> Attempt:
        """Return a copy with these changes."""
        return replace(self, **changes)


class Trial(_Evaluation, frozen=True, kw_only=True):
    """A trial: one evaluation of one set of params.

    While it runs, `compute_class`, `host` and `started_at` are those of its oldest live attempt.
    """

    state: TrialState = TrialState.WAITING
    #: record of the values that the objective gets, see `space.stored`; None if they are equal to the params
    given: str | None = None
    #: name of the sampler that has proposed its params; for `auto`, the sampler that it has used, or `start` for its
    #: first trials. For other trials `promoted`, `repeated`, `enqueued` or `added`
    sampler: Name | None = None
    #: number of the latest attempt, from 1; 0 before the first one
    attempt: Annotated[int, Meta(ge=0, le=MAX_ATTEMPTS)] = 0
    #: number of attempts that were lost after a worker had claimed them. After a few of them the trial is FAILED
    lost: int = 0
    #: number of further lost attempts whose machines have vanished, which are not in `lost`; None if there are none
    vanished: Annotated[int, Meta(ge=0, le=MAX_ATTEMPTS)] | None = None
    #: `NO_OUTCOME` until the trial ends
    outcome: Outcome = NO_OUTCOME
    #: seconds since the epoch
    asked_at: StoredMoment | None = None
    finished_at: StoredMoment | None = None
    #: rung of the ladder of budgets, from 0; None for a repeat, or if the study has no rungs
    rung: Rung | None = None
    #: step of the last report of a trial that is PRUNED, or will be once its attempts have ended; None for other trials
    step: Int64 | None = None
    #: compute classes with too little memory for it, joined by commas; see `hardware.shortages`
    outgrown: str | None = None
    #: for each of these classes, the kind of memory that was too small, joined by commas
    outgrown_memory: _Memories | None = None
    #: live attempts; None if the latest attempt is the only one, see `living`
    live: Sequence[Attempt] | None = None

    def evolve(self, **changes: Any) -> Trial:
        """Return a copy with these changes. Raises ValueError for a change of state that is not in LAWFUL."""
        state = changes.get("state", self.state)
        if state is not self.state and state not in LAWFUL[self.state]:
            raise ValueError(f"trial {self.number} cannot go from {self.state} to {state}")
        return replace(self, **changes)

    @property
    def is_repeat(self) -> bool:
        """True if it has the params and budget of an earlier trial, its origin, and a seed and folder of its own."""
        return self.origin is not None and self.rung is None

    @property
    def folder(self) -> int:
        """Number of the trial whose checkpoint folder it uses."""
        return self.number if self.origin is None or self.is_repeat else self.origin

    @property
    def living(self) -> Sequence[Attempt]:
        """The live attempts of the trial, which are queued or run."""
        if self.state not in {TrialState.QUEUED, TrialState.RUNNING}:
            return ()
        return tuple(self.live or [self.attempted(state=self.state)])

    def attempted(self, **where: Any) -> Attempt:
        """Return the latest attempt of the trial, made from the common fields. `where` has values of its fields."""
        shared = {name: getattr(self, name) for name in _Evaluation.__struct_fields__}
        own = {"attempt": self.attempt, "origin": None if self.is_repeat else self.origin}
        return Attempt(**{**shared, **own, **where})


def taught(
    number: int,
    subspace: str,
    params: Params,
    loss: float,
    *,
    losses: Losses | None = None,
    constraints: Losses | None = None,
) -> Trial:
    """Return a COMPLETE trial of an earlier study, from which a study learns (warm start).

    It has only params, losses and constraints. Other facts, such as seconds that were measured on other machines, are
    left out.
    """
    outcome = Outcome(state=TrialState.COMPLETE, loss=loss, losses=losses or {}, constraints=constraints or {})
    return Trial(number=number, subspace=subspace, params=params, state=outcome.state, outcome=outcome)


class _Event(Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower, omit_defaults=True):
    """An event of an attempt."""

    number: Number
    attempt: AttemptNumber


class Started(_Event, frozen=True, kw_only=True):
    """A worker has claimed an attempt."""

    host: Name
    #: seconds since the epoch
    at: Moment
    #: name of the worker that claimed it
    worker: Name = ""
    #: number of the slot of the worker that runs it, from 0; None if it is not known
    slot: Annotated[int, Meta(ge=0, le=10**6)] | None = None


class Report(_Event, frozen=True, kw_only=True):
    """An objective has reported an intermediate loss, which may be NaN or infinite."""

    step: Int64
    #: the loss, or the first of several losses, negated if it is maximised
    loss: float
    #: seconds since the epoch
    at: Moment
    #: losses by name in a study with several objectives, negated if they are maximised, without those that are NaN or
    #: infinite; None in other studies
    losses: Losses | None = None


class Retry(Struct, frozen=True, kw_only=True):
    """Reason to try a trial again although its attempt has ended with a result."""

    reason: str
    #: compute class that had too little memory for the trial
    outgrown: str | None = None
    #: kind of memory that was too small on this class
    memory: Memory | None = None
    #: name of the worker on which the trial has failed; it must not run the trial again
    failed_on: str | None = None
    #: True if the attempt counts as lost. A trial with too many lost attempts is FAILED
    is_loss: bool = False


class Result(_Event, frozen=True, kw_only=True):
    """An attempt has ended with an outcome."""

    outcome: Outcome
    host: Name | None = None
    compute_class: Name | None = None
    #: seconds since the epoch
    at: Moment
    #: name of the worker that ran it
    worker: Name = ""
    #: digest of the params, by `digest_of`; None if the trial ran in the process of the scheduler
    digest: Annotated[str, Meta(max_length=16)] | None = None
    #: reason to try the trial again instead of ending it; set by the executor or the scheduler
    retry: Retry | None = None

    def is_of(self, params: Params) -> bool:
        """Return whether this is a result for these `params`.

        It may be the result of a trial of another store with the same number.
        """
        return self.digest is None or self.digest == digest_of(params)


class Lost(_Event, frozen=True, kw_only=True):
    """An attempt was lost or given up: its worker stopped renewing its lease, or it was cancelled before a worker
    claimed it.
    """

    reason: Text
    #: True if a worker had claimed the attempt, and the trial may be the cause of the loss, so that it counts as lost
    claimed: bool = True
    #: True if the machine of its worker has vanished, so that the trial is probably not the cause
    vanished: bool = False
    #: True if a worker with limited time has declined it, because it is predicted to end after the worker ends
    is_too_long: bool = False
    #: True if its worker has given it back, because the worker ends
    given_back: bool = False


#: ``host:port`` of a gang's coordinator; and the secret that a replica needs to join, plain or encrypted for transport
Address = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:%\[\]-]{1,255}:[0-9]{1,5}\Z")]
Token = Annotated[str, Meta(pattern=r"^([A-Za-z0-9_=+/.-]{1,256}|aes:[A-Za-z0-9_=-]{1,400})\Z")]


class _Coordinator(Struct, frozen=True, kw_only=True):
    """Address of the coordinator of a gang (the processes of one distributed trial), and the secret to join."""

    address: Address
    token: Token

    def __post_init__(self) -> None:
        if not 0 <= int(self.address.rpartition(":")[2]) < 2**16:
            raise ValueError("its address has a port above 65535")


class GangCall(_Coordinator, frozen=True, kw_only=True):
    """Request of a trial for the replicas of its gang, or the message that enough of them have joined."""

    #: number of backup replicas, which run in slots that do not belong to the trial
    backups: Annotated[int, Meta(ge=0, le=MAX_SLOTS)] = 0
    #: True if enough replicas have joined the gang
    assembled: bool = False


class ReplicaSeat(_Coordinator, frozen=True, kw_only=True):
    """Seat of a replica in the gang of its trial: its rank, and the address of the coordinator."""

    #: rank of the replica, from 1; the coordinator has rank 0, and backup replicas have the highest ranks
    rank: Annotated[int, Meta(ge=0, le=2 * MAX_SLOTS)]
    #: number of the gang among the gangs that the attempt has started, from 1
    call: Count = 1


class Called(_Event, frozen=True, kw_only=True):
    """An attempt has requested the replicas of its gang, or announced that they have joined."""

    #: number of the request in this attempt, from 1. Replicas of earlier requests can no longer join
    call: Count
    gang: GangCall
    #: seconds since the epoch
    at: Moment


class ReplicaFailed(_Event, frozen=True, kw_only=True):
    """A replica has failed, so another replica may take its rank."""

    call: Count
    #: rank of the replica in the gang, from 1; the coordinator has rank 0
    rank: Count
    error: Text
    host: Name
    #: seconds since the epoch
    at: Moment
    #: name of the worker that ran it
    worker: Name = ""


Event = Started | Report | Result | Lost

#: events within the gang of a trial, which the executor handles; a study does not see them
GangEvent = Called | ReplicaFailed

# Types are resolved here, because several threads decode these records: those of a worker's slots, and those that read
# the channel.
resolve(Trial, Attempt, Event | GangEvent, ReplicaSeat)


def _is_storable(value: object, levels: int) -> bool:
    """Return whether a value from JSON has at most `levels` levels of nesting, and only numbers that stores accept."""
    if isinstance(value, float):
        return math.isfinite(value)
    if not isinstance(value, (Mapping, list)):
        return True
    inside = value.values() if isinstance(value, Mapping) else value
    return levels > 0 and False not in [_is_storable(each, levels - 1) for each in inside]


def whole(budget: float | None) -> float | None:
    """Return a budget in the form that an objective gets: an int if possible, so that ``range(budget)`` works.

    Stores keep budgets as floats, and a ladder computes them by division.
    """
    # Above 2**53, floats cannot represent all integers.
    return int(budget) if isinstance(budget, float) and budget.is_integer() and budget <= 2**53 else budget


Direction = Literal["minimize", "maximize"]
_Name = Annotated[str, Meta(min_length=1, max_length=60, pattern=r"^[^\x00-\x1f\ud800-\udfff]*\Z")]
#: direction of each loss by name; the first loss is used if a single number is needed
Objectives = Annotated[Mapping[_Name, Direction], Meta(min_length=1, max_length=10)]


def turned(losses: Losses, objectives: Mapping[str, str] | None) -> dict[str, float]:
    """Return the losses, with each maximised loss negated. A second call restores them."""
    # The value is subtracted from 0, because -value would change 0.0 to -0.0.
    return {
        name: 0.0 - value if (objectives or {}).get(name) == "maximize" else value for name, value in losses.items()
    }


def turned_first(loss: float, objectives: Mapping[str, str] | None) -> float:
    """Return the loss of the first objective, negated if it is maximised."""
    if not objectives:
        return loss
    first = next(iter(objectives))
    return turned({first: loss}, objectives)[first]


def in_words(objectives: Mapping[str, str] | None) -> str:
    """Return a text with the objectives for a message."""
    return ", ".join(f"{way} {name}" for name, way in objectives.items()) if objectives else "one loss without a name"


def refuse_others(objectives: Mapping[str, str] | None, in_force: Mapping[str, Any]) -> None:
    """Raise UsageError if the objectives of a resumed study, or their order, differ from those `in_force` before."""
    before = in_force.get("objectives")
    if in_force and [*(before or {}).items()] != [*(objectives or {}).items()]:
        raise UsageError(
            f"this study was started with other objectives: {in_words(before)}, not {in_words(objectives)}; start "
            "another study (without resume), or restore them"
        )
