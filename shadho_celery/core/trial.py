"""Records of a trial, its attempts and their events; the objectives of a study.

A trial is one evaluation of one set of params. An attempt is one sending of it to a worker: the retry of a lost one is
another attempt, and so is a speculative copy beside an attempt that still runs. Scheduler, executors, messages and
workers share these records, and their fields are declared only here.
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

#: drawn value of every active label, by label
Params = Mapping[str, Any]

#: maximum of a trial's number: more than any study has, and the largest integer that every JSON reader keeps exact
MAX_COUNT = 2**53 - 1
#: maximum number of slots of a trial, and of replicas of a gang
MAX_SLOTS = 1024
#: maximum number of attempts of a trial, claimed or not; after the last one the trial is FAILED
MAX_ATTEMPTS = 1000

Number = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Count = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Place = Annotated[int, Meta(ge=1, le=MAX_ATTEMPTS)]
#: rung of a ladder of budgets, from 0; far more than a ladder has
Rung = Annotated[int, Meta(ge=0, le=1000)]
#: a number that is neither NaN nor infinite
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
#: losses or constraints by name
Losses = Mapping[str, Finite]
#: maximum of a time limit in seconds, and of a weight; sums of such numbers are finite
MAX_POSITIVE = 1e300
Positive = Annotated[float, Meta(gt=0, le=MAX_POSITIVE)]
#: time limit of a trial in seconds, at most 30 years: the timers of some systems take no more than 290
TimeLimit = Annotated[float, Meta(gt=0, le=1e9)]
#: a signed integer of 64 bits, the largest type of a database
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
#: duration of a trial in seconds, at most 300 years; and a moment in seconds since the epoch, before the year 5138
Seconds = Annotated[float, Meta(ge=0, le=1e10)]
Moment = Annotated[float, Meta(ge=0, le=1e11)]
#: a moment in a store, of any clock, that can be shown as a date
StoredMoment = Annotated[float, Meta(ge=-1e11, le=1e11)]
#: price in money an hour, in any currency
Price = Annotated[float, Meta(ge=0, le=1e9)]
Bytes = Annotated[int, Meta(ge=0, le=2**63 - 1)]
#: text without characters that stores and queues refuse; and a name that fits a column of a store
Clean = Annotated[str, Meta(pattern=r"^[^\x00-\x1f\ud800-\udfff]*\Z")]
Name = Annotated[Clean, Meta(max_length=255)]
#: maximum number of characters of an error or a warning, more than `objective.call` creates
MAX_TEXT = 16_000
#: maximum number of characters of the last lines of a trial's output
MAX_LOG = 4000
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
#: maximum nesting of metrics: more than `objective.result` accepts, and few enough for every encoder
MAX_LEVELS = 120


#: kinds of memory, joined by commas
_Memories = Annotated[str, Meta(pattern=r"^(gpu|host)(,(gpu|host))*\Z")]


class TrialState(str, Enum):
    """State of a trial. After its attempt is LOST, the trial is WAITING again, for its next attempt."""

    WAITING = "WAITING"
    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    COMPLETE = "COMPLETE"
    PRUNED = "PRUNED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    LOST = "LOST"

    # Without these methods a member is printed as "TrialState.X" by some versions of Python.
    __str__ = str.__str__
    __format__ = str.__format__  # type: ignore[assignment]  # Enum names its parameter otherwise

    #: True if no other state can follow
    is_finished: bool


FINISHED = frozenset({TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAILED, TrialState.CANCELLED})
for _state in TrialState:
    _state.is_finished = _state in FINISHED
#: final states that count against the limit `trials`
COUNTED = FINISHED - {TrialState.CANCELLED}
#: final states of a success; it ends the other attempts of the trial, see `attempts.Attempts`
WELL = frozenset({TrialState.COMPLETE, TrialState.PRUNED})


class Memory(str, Enum):
    """Kind of memory that a trial may run out of: that of its GPU, or the RAM of its machine."""

    GPU = "gpu"
    HOST = "host"

    @property
    def words(self) -> str:
        """Name of this kind of memory in messages."""
        return "GPU memory" if self is Memory.GPU else "host memory"

    __str__ = str.__str__
    __format__ = str.__format__  # type: ignore[assignment]


_S = TrialState
#: Valid next states of each state. A result may arrive before the event that says that its trial was started or lost,
#: so a final state may follow QUEUED and WAITING directly.
LAWFUL: Mapping[TrialState, frozenset[TrialState]] = {
    _S.WAITING: frozenset({_S.QUEUED}) | FINISHED,
    _S.QUEUED: frozenset({_S.RUNNING, _S.LOST}) | FINISHED,
    _S.RUNNING: frozenset({_S.LOST}) | FINISHED,
    _S.LOST: frozenset({_S.WAITING}) | FINISHED,
    **{state: frozenset() for state in FINISHED},
}


#: encodes labels in sorted order, because a database may return them in another order
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
    """Return the sum of the constraints above 0: how far a trial is from being feasible."""
    return min(sum([value for value in constraints.values() if value > 0]), sys.float_info.max)


class Outcome(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Outcome of one call of an objective. Part of trials and results, and sent through the pipe from its process."""

    #: COMPLETE, PRUNED, FAILED or CANCELLED
    state: TrialState
    #: loss in minimised form; the first one of several losses. A COMPLETE trial has one. For a PRUNED trial it is
    #: the loss of its last report, or None if that is not finite
    loss: Finite | None = None
    #: losses by name in a study with `objectives`, in minimised form: a loss to maximise has the opposite sign
    losses: Losses = {}
    #: constraints by name, as the objective returned them; the trial is feasible if none is above 0
    constraints: Losses = {}
    #: further results of the objective
    metrics: Mapping[str, Any] = {}
    #: reason of the failure, with its traceback
    error: str | None = None
    #: seconds that the objective itself took, by the monotonic clock of its process
    seconds: Seconds | None = None
    #: peak bytes of the process's resident memory; None if not measured
    memory: Bytes | None = None
    #: peak bytes of GPU memory; None if the trial used no GPU, or if they were not measured
    gpu_memory: Bytes | None = None
    #: kind of memory that ran out, if the trial FAILED because of this; the trial may succeed on another compute class
    out_of_memory: Memory | None = None
    #: True if the trial FAILED because one of the processes that train it together was lost; it is tried again
    rank_lost: bool = False
    #: message to the user about a trial that ended well, for example about a dropped metric
    warning: str | None = None
    #: last lines of the output with time stamps, if the trial FAILED
    log: str | None = None
    #: digest of the code that ran, also of an attempt that is repeated; None if it is not known
    code: Digest | None = None
    #: whether the checkpoint folder of a promoted trial, or of one whose earlier attempt has ended, contained files at
    #: its start; None for other trials, or if this is not known
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
        """True if the state is in `FINISHED` and the other fields fit it.

        COMPLETE requires a loss, FAILED and CANCELLED must not have one. Metrics must be finite and not nested too
        deeply for an encoder. Texts have at most MAX_TEXT characters, and the output at most MAX_LOG.
        """
        fits = (self.state is TrialState.COMPLETE) == (self.loss is not None) or self.state is TrialState.PRUNED
        is_short = max(len(self.error or ""), len(self.warning or "")) <= MAX_TEXT and len(self.log or "") <= MAX_LOG
        return self.state.is_finished and fits and is_short and _is_storable(self.metrics, MAX_LEVELS)

    def cancelled(self, seconds: float | None = None) -> Outcome:
        """Return this outcome as CANCELLED, without losses. `seconds` replace those of this outcome, if given."""
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
    """Fields that a trial and its attempts have in common."""

    #: position of the trial in its study, from 0, in the order in which trials were proposed
    number: Number
    #: name of the subspace of the params, such as ``kernel=rbf``
    subspace: str
    params: Params
    #: seed for the objective's own random draws, the same in every attempt
    seed: int = 0
    #: budget of the trial; None for the full fidelity
    budget: Annotated[float, Meta(ge=0, le=sys.float_info.max)] | None = None
    #: number of slots of one class that the trial uses at the same time
    slots: Annotated[int, Meta(ge=1, le=MAX_SLOTS)] = 1
    #: names of the workers on which the trial has failed; they must not run it again
    failed_on: Annotated[tuple[Name, ...], Meta(max_length=MAX_ATTEMPTS)] = ()
    #: number of the trial on rung 0 whose params, seed and checkpoints it uses; None if it uses its own
    origin: Number | None = None
    compute_class: str | None = None
    #: name of the machine on which it runs, or last ran
    host: str | None = None
    #: seconds since the epoch
    started_at: StoredMoment | None = None


class Attempt(_Evaluation, frozen=True, kw_only=True, omit_defaults=True):
    """One sending of a trial to a worker."""

    #: number of the attempt within its trial, from 1
    attempt: Place
    #: QUEUED until a worker claims it, then RUNNING
    state: TrialState = TrialState.QUEUED
    #: name of the worker that claimed it
    worker: str = ""
    #: machine that must not run this attempt, because another attempt of the trial is there; None for no such machine
    not_on: str | None = None
    #: predicted seconds on its compute class, if these are a second or more
    expected: Annotated[float, Meta(ge=0, le=1e12)] | None = None
    #: machine that must run this attempt, through its own queue; None for any machine of the class
    only_on: Name | None = None
    #: bytes of GPU memory that suffice for it; None if that is not known, so that it needs a GPU of its own
    gpu_bytes: Bytes | None = None

    def evolve(self, **changes: Any) -> Attempt:
        """Return a copy with `changes`."""
        return replace(self, **changes)


class Trial(_Evaluation, frozen=True, kw_only=True):
    """Evaluation of one set of params.

    While the trial runs, `compute_class`, `host` and `started_at` are those of its oldest live attempt.
    """

    state: TrialState = TrialState.WAITING
    #: record of the values that the objective gets, see `space.stored`; None if they are the params
    given: str | None = None
    #: name of the sampler that chose its params, of several in `auto` the one; or how else they were chosen: `start`
    #: (of `auto`, before it learns), `promoted`, `enqueued` or `added`
    sampler: Name | None = None
    #: number of the latest attempt, from 1; 0 before the first
    attempt: Annotated[int, Meta(ge=0, le=MAX_ATTEMPTS)] = 0
    #: number of attempts that were lost after a worker had claimed them, and that count against the trial
    lost: int = 0
    #: number of further attempts whose machines have vanished, which do not count; None for none
    vanished: Annotated[int, Meta(ge=0, le=MAX_ATTEMPTS)] | None = None
    #: `NO_OUTCOME` until the trial ends
    outcome: Outcome = NO_OUTCOME
    #: seconds since the epoch
    asked_at: StoredMoment | None = None
    finished_at: StoredMoment | None = None
    #: rung of the ladder of budgets, from 0; None if the study has no rungs
    rung: Rung | None = None
    #: step of the last report of a trial that is PRUNED, or will be once its attempts have ended; None for other trials
    step: Int64 | None = None
    #: compute classes with too little memory for it, joined by commas; see `hardware.shortages`
    outgrown: str | None = None
    #: kind of memory that each of these classes had too little of, joined by commas
    outgrown_memory: _Memories | None = None
    #: live attempts; None if the latest attempt is the only one, see `living`
    live: Sequence[Attempt] | None = None

    def evolve(self, **changes: Any) -> Trial:
        """Return a copy with `changes`. Raises ValueError for an unlawful change of state."""
        state = changes.get("state", self.state)
        if state is not self.state and state not in LAWFUL[self.state]:
            raise ValueError(f"trial {self.number} cannot go from {self.state} to {state}")
        return replace(self, **changes)

    @property
    def living(self) -> Sequence[Attempt]:
        """The attempts of the trial that are queued or run."""
        if self.state not in {TrialState.QUEUED, TrialState.RUNNING}:
            return ()
        return tuple(self.live or [self.attempted(state=self.state)])

    def attempted(self, **where: Any) -> Attempt:
        """Return the latest attempt of the trial, made from the fields that both have; `where` overrides its fields."""
        shared = {name: getattr(self, name) for name in _Evaluation.__struct_fields__}
        return Attempt(**{**shared, "attempt": self.attempt, **where})


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

    It has only params, losses and constraints. Other facts, such as the seconds on other machines, would mislead.
    """
    outcome = Outcome(state=TrialState.COMPLETE, loss=loss, losses=losses or {}, constraints=constraints or {})
    return Trial(number=number, subspace=subspace, params=params, state=outcome.state, outcome=outcome)


class _Event(Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower, omit_defaults=True):
    """Event of one attempt."""

    number: Number
    attempt: Place


class Started(_Event, frozen=True, kw_only=True):
    """A worker claimed an attempt."""

    host: Name
    #: seconds since the epoch
    at: Moment
    #: name of the worker that claimed it
    worker: Name = ""
    #: number of the worker's slot that runs it, from 0; None if it is not known
    slot: Annotated[int, Meta(ge=0, le=10**6)] | None = None


class Report(_Event, frozen=True, kw_only=True):
    """An objective reported an intermediate loss, which may be NaN or infinite."""

    step: Int64
    loss: float
    #: seconds since the epoch
    at: Moment


class Retry(Struct, frozen=True, kw_only=True):
    """Reason to repeat a trial although its attempt has returned a result."""

    reason: str
    #: compute class that had too little memory for the trial
    outgrown: str | None = None
    #: kind of memory that this class had too little of
    memory: Memory | None = None
    #: name of the worker on which the trial has failed; it must not run the trial again
    failed_on: str | None = None
    #: True if the attempt counts as lost, of which a trial may have only a few
    is_loss: bool = False


class Result(_Event, frozen=True, kw_only=True):
    """An attempt ended with an outcome."""

    outcome: Outcome
    host: Name | None = None
    compute_class: Name | None = None
    #: seconds since the epoch
    at: Moment
    #: name of the worker that ran it
    worker: Name = ""
    #: digest of the params, by `digest_of`; None if the trial ran in the process of the scheduler
    digest: Annotated[str, Meta(max_length=16)] | None = None
    #: set by the scheduler if the trial is repeated
    retry: Retry | None = None

    def is_of(self, params: Params) -> bool:
        """Return whether these `params` gave this result. It may belong to a trial of another store that has the same
        number.
        """
        return self.digest is None or self.digest == digest_of(params)


class Lost(_Event, frozen=True, kw_only=True):
    """An attempt was lost: its worker no longer renews its lease, or it was cancelled before a worker claimed it."""

    reason: Text
    #: True if the loss counts against the trial: a worker had claimed the attempt, and the trial may be the cause
    claimed: bool = True
    #: True if the whole machine of its worker is gone, so that the trial is probably not the cause
    vanished: bool = False
    #: True if a worker with limited time has declined it, because it is predicted to end after the worker does
    is_too_long: bool = False
    #: True if its worker has given it back, because it could not end there
    given_back: bool = False


#: ``host:port`` of a gang's coordinator; and the secret that admits a replica, either plain or encrypted for transport
Address = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:%\[\]-]{1,255}:[0-9]{1,5}\Z")]
Token = Annotated[str, Meta(pattern=r"^([A-Za-z0-9_=+/.-]{1,256}|aes:[A-Za-z0-9_=-]{1,400})\Z")]


class _Coordinator(Struct, frozen=True, kw_only=True):
    """Endpoint of a gang's coordinator."""

    address: Address
    token: Token

    def __post_init__(self) -> None:
        if not 0 <= int(self.address.rpartition(":")[2]) < 2**16:
            raise ValueError("its address has a port above 65535")


class GangCall(_Coordinator, frozen=True, kw_only=True):
    """Request of a trial with several slots for the replicas of its gang, or the message that they have all joined."""

    #: number of backup replicas, which run in other slots than those of the trial
    backups: Annotated[int, Meta(ge=0, le=MAX_SLOTS)] = 0
    #: True when enough replicas have joined the gang
    assembled: bool = False


class ReplicaSeat(_Coordinator, frozen=True, kw_only=True):
    """Seat of a replica in the gang of its trial: its rank, and where it finds the coordinator."""

    #: rank of the replica, from 1; the coordinator has rank 0, and backup replicas have the highest ranks
    rank: Annotated[int, Meta(ge=0, le=2 * MAX_SLOTS)]
    #: number of the gang among those that the attempt has started, from 1
    call: Count = 1


class Called(_Event, frozen=True, kw_only=True):
    """An attempt requested the replicas of its gang, or announced that they have joined."""

    #: number of the request in this attempt, from 1; a request ends the seats of earlier ones
    call: Count
    gang: GangCall
    #: seconds since the epoch
    at: Moment


class ReplicaFailed(_Event, frozen=True, kw_only=True):
    """A replica failed; its seat is free again."""

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

# Several threads decode these records: those of a worker's slots, and those that read the channel.
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
    """Return a budget as an objective gets it: as an int if it is a whole number, so that ``range(budget)`` works.

    Stores keep budgets as floats, and a ladder computes them by division.
    """
    # Above 2**53 a float cannot represent every whole number.
    return int(budget) if isinstance(budget, float) and budget.is_integer() and budget <= 2**53 else budget


Direction = Literal["minimize", "maximize"]
_Name = Annotated[str, Meta(min_length=1, max_length=60, pattern=r"^[^\x00-\x1f\ud800-\udfff]*\Z")]
#: direction of each loss by name; the first loss is used where a single number is needed
Objectives = Annotated[Mapping[_Name, Direction], Meta(min_length=1, max_length=10)]


def turned(losses: Losses, objectives: Mapping[str, str] | None) -> dict[str, float]:
    """Return losses in minimised form: those to maximise are negated. The same call restores the user's own losses."""
    # The value is subtracted from 0, because -value would turn 0.0 into -0.0.
    return {
        name: 0.0 - value if (objectives or {}).get(name) == "maximize" else value for name, value in losses.items()
    }


def turned_first(loss: float, objectives: Mapping[str, str] | None) -> float:
    """Do the same as `turned` for a single loss, which is that of the first objective."""
    if not objectives:
        return loss
    first = next(iter(objectives))
    return turned({first: loss}, objectives)[first]


def in_words(objectives: Mapping[str, str] | None) -> str:
    """Return objectives as text for a message."""
    return ", ".join(f"{way} {name}" for name, way in objectives.items()) if objectives else "one loss without a name"


def refuse_others(objectives: Mapping[str, str] | None, in_force: Mapping[str, Any]) -> None:
    """Raise UsageError if the objectives of a resumed study, or their order, are not those `in_force` before."""
    before = in_force.get("objectives")
    if in_force and [*(before or {}).items()] != [*(objectives or {}).items()]:
        raise UsageError(
            f"this study was started with other objectives: {in_words(before)}, not {in_words(objectives)}; start "
            "another study (without resume), or restore them"
        )
