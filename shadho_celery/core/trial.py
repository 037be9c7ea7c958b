"""Records of a trial, its attempts and their events.

A trial is one evaluation of one set of params. An attempt is one sending of it to a worker. A retry after a loss is
another attempt, and so is a speculative copy beside an attempt that still runs. Scheduler, executors, messages and
workers share these records; a field is declared here and nowhere else.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from shadho_celery.core.checks import plain, resolve
from shadho_celery.core.code import Digest

#: label -> drawn value, of every active label
Params = Mapping[str, Any]

#: largest number of a trial: larger than in any study, and exact in every JSON reader
MAX_COUNT = 2**53 - 1
#: maximum number of slots of a trial, and of replicas of a gang
MAX_SLOTS = 1024
#: maximum number of attempts of a trial, claimed or not; after the last one the trial is FAILED
MAX_ATTEMPTS = 1000

Number = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Count = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Place = Annotated[int, Meta(ge=1, le=MAX_ATTEMPTS)]
#: a number that is neither NaN nor infinite
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
#: such numbers by name
Losses = Mapping[str, Finite]
#: largest time limit in seconds, and largest weight, in a message; sums of such numbers are finite
MAX_POSITIVE = 1e300
Positive = Annotated[float, Meta(gt=0, le=MAX_POSITIVE)]
#: a signed integer of 64 bits, the largest type of a database
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
#: duration of a trial in seconds, at most 300 years; and a moment in seconds since the epoch, before the year 5138
Seconds = Annotated[float, Meta(ge=0, le=1e10)]
Moment = Annotated[float, Meta(ge=0, le=1e11)]
#: a moment in a store, of any clock, that can be shown as a date
StoredMoment = Annotated[float, Meta(ge=-1e11, le=1e11)]
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
    """State of a trial. A LOST attempt returns its trial to WAITING under the next attempt number."""

    WAITING = "WAITING"
    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    COMPLETE = "COMPLETE"
    PRUNED = "PRUNED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    LOST = "LOST"

    # Without these an Enum of strings prints as "TrialState.X" on some versions of Python.
    __str__ = str.__str__
    __format__ = str.__format__  # type: ignore[assignment]  # Enum names its parameter otherwise

    #: True if the trial cannot change any more
    is_finished: bool


FINISHED = frozenset({TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAILED, TrialState.CANCELLED})
for _state in TrialState:
    _state.is_finished = _state in FINISHED
#: ways to end that count against the `trials` limit
COUNTED = FINISHED - {TrialState.CANCELLED}
#: ways to end well; `attempts.Attempts` decides what happens to the other attempts of the trial
WELL = frozenset({TrialState.COMPLETE, TrialState.PRUNED})


class Memory(str, Enum):
    """Kind of memory that a trial may run out of: of its GPU, or the RAM of its machine."""

    GPU = "gpu"
    HOST = "host"

    @property
    def words(self) -> str:
        """Its name in messages."""
        return "GPU memory" if self is Memory.GPU else "host memory"

    __str__ = str.__str__
    __format__ = str.__format__  # type: ignore[assignment]


_S = TrialState
#: Valid transitions. A result may arrive before the event that its trial was started or lost, so QUEUED and WAITING
#: may finish directly.
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
    """Return 8 bytes of BLAKE2b of the JSON of `params`, in hexadecimal digits."""
    try:
        text = _encode(params)
    except UnicodeEncodeError:
        # An unpaired surrogate.
        text = json.dumps(params, sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def violation_of(constraints: Losses) -> float:
    """Return the sum of the constraints above 0: how far a trial is from being feasible."""
    return min(sum([value for value in constraints.values() if value > 0]), sys.float_info.max)


class Outcome(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Outcome of one call of an objective. Trials, results and the pipe contain this record."""

    #: COMPLETE, PRUNED, FAILED or CANCELLED
    state: TrialState
    #: set if the state is COMPLETE; the first one of several losses. For a PRUNED trial the loss of its last report, or
    #: None if that is not finite
    loss: Finite | None = None
    #: losses by name in a study with `objectives`, in minimised form: a loss to maximise has the opposite sign
    losses: Losses = {}
    #: constraints by name, as the objective returned them; the trial is feasible if none is above 0
    constraints: Losses = {}
    #: further results of the objective
    metrics: Mapping[str, Any] = {}
    #: reason of the failure, with its traceback
    error: str | None = None
    #: seconds the objective itself took, by the monotonic clock of its process
    seconds: Seconds | None = None
    #: peak bytes of the process's resident memory; None if not measured. In stores up to version 0.5, these are bytes
    #: of GPU memory if the trial ran on a GPU
    memory: Bytes | None = None
    #: peak bytes of GPU memory; None if the trial used no GPU, or if they were not measured
    gpu_memory: Bytes | None = None
    #: the memory that ran out, if this is why the trial FAILED; it depends on the compute class and on the params
    out_of_memory: Memory | None = None
    #: message to the user about a trial that ended well, for example about a dropped metric
    warning: str | None = None
    #: last lines of the output with time stamps, if the trial FAILED
    log: str | None = None
    #: digest of the code that ran
    code: Digest | None = None
    #: True if the checkpoint folder of a promoted trial contained files at its start, False if not; None for a trial
    #: that is not promoted, or if this is not known
    continued: bool | None = None

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
        """Return the outcome without a loss of an attempt that was stopped after this many seconds."""
        seconds = self.seconds if seconds is None else seconds
        state = TrialState.CANCELLED
        facts = {"error": "cancelled", "seconds": seconds, "out_of_memory": None, "log": None}
        return replace(self, state=state, loss=None, losses={}, constraints={}, **facts)


#: outcome of a trial that has not ended
NO_OUTCOME = Outcome(state=TrialState.WAITING)


class _Evaluation(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Fields that a trial and its attempts have in common."""

    #: position of the trial in its study, from 0, in the order of asking
    number: Number
    #: name of the subspace of the params, such as ``kernel=rbf``
    subspace: str
    params: Params
    #: seed for the objective's own random draws, the same in every attempt
    seed: int = 0
    #: budget of the trial; None for the full fidelity
    budget: Finite | None = None
    #: number of slots of one class that the trial takes, all at once
    slots: Annotated[int, Meta(ge=1, le=MAX_SLOTS)] = 1
    #: names of the workers on which the trial has failed, and which must not run it again
    failed_on: Annotated[tuple[Name, ...], Meta(max_length=MAX_ATTEMPTS)] = ()
    #: number of the trial on rung 0 with whose params, seed and checkpoints it continues; None for its own
    origin: Number | None = None
    compute_class: str | None = None
    #: name of its present or last machine
    host: str | None = None
    #: seconds since the epoch
    started_at: StoredMoment | None = None


class Attempt(_Evaluation, frozen=True, kw_only=True, omit_defaults=True):
    """Sending of a trial to a worker."""

    #: number of the attempt within its trial, from 1
    attempt: Place
    #: QUEUED until a worker claims it, then RUNNING
    state: TrialState = TrialState.QUEUED
    #: name of the worker that claimed it
    worker: str = ""
    #: machine of another attempt of the trial, which must not run this one
    not_on: str | None = None
    #: machine that must run this attempt, through its own queue; None for any machine of the class
    only_on: Name | None = None

    def evolve(self, **changes: Any) -> Attempt:
        """Return a copy with `changes`."""
        return replace(self, **changes)


class Trial(_Evaluation, frozen=True, kw_only=True):
    """Evaluation of one set of params.

    While it runs, `compute_class`, `host` and `started_at` come from its oldest live attempt.
    """

    state: TrialState = TrialState.WAITING
    #: number of the latest attempt, from 1; 0 before the first
    attempt: Annotated[int, Meta(ge=0, le=MAX_ATTEMPTS)] = 0
    #: claimed attempts that were lost
    lost: int = 0
    #: `NO_OUTCOME` until the trial ends
    outcome: Outcome = NO_OUTCOME
    #: seconds since the epoch
    asked_at: StoredMoment | None = None
    finished_at: StoredMoment | None = None
    #: rung of the ladder of budgets, from 0; None if the study has no rungs
    rung: int | None = None
    #: step of the last report of a trial that is PRUNED, or will be when its attempts have ended; None for others
    step: Int64 | None = None
    #: compute classes with too little memory for it, joined by commas; see `hardware.shortages`
    outgrown: str | None = None
    #: kinds of memory that these classes lacked, joined by commas; not recorded up to version 0.5
    outgrown_memory: _Memories | None = None
    #: live attempts, unless the latest attempt is the only one
    live: Sequence[Attempt] | None = None

    def evolve(self, **changes: Any) -> Trial:
        """Return a copy with `changes`. Raises ValueError for an unlawful change of state."""
        state = changes.get("state", self.state)
        if state is not self.state and state not in LAWFUL[self.state]:
            raise ValueError(f"trial {self.number} cannot go from {self.state} to {state}")
        return replace(self, **changes)

    @property
    def living(self) -> Sequence[Attempt]:
        """Its attempts that are queued or run."""
        if self.state not in {TrialState.QUEUED, TrialState.RUNNING}:
            return ()
        return tuple(self.live or [self.attempted(state=self.state)])

    def attempted(self, **where: Any) -> Attempt:
        """Return the trial's attempt number `attempt` in its present state, except for `where`."""
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
    """Return a COMPLETE trial of another study, from which a study learns: params, losses and constraints.

    Other facts, such as the seconds on other machines, would mislead.
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


class Report(_Event, frozen=True, kw_only=True):
    """An objective reported an intermediate loss; it may be NaN or infinite."""

    step: Int64
    loss: float
    #: seconds since the epoch
    at: Moment


class Retry(Struct, frozen=True, kw_only=True):
    """Reason to repeat a trial although its attempt has returned a result."""

    reason: str
    #: compute class with too little memory
    outgrown: str | None = None
    #: kind of memory that this class lacks
    memory: Memory | None = None
    #: name of the worker on which the trial has failed, and which must not run it again
    failed_on: str | None = None


class Result(_Event, frozen=True, kw_only=True):
    """An attempt ended."""

    outcome: Outcome
    host: Name | None = None
    compute_class: Name | None = None
    #: seconds since the epoch
    at: Moment
    #: name of the worker that ran it
    worker: Name = ""
    #: `digest_of` of its params; None from an executor in the process of the scheduler
    digest: Annotated[str, Meta(max_length=16)] | None = None
    #: set by the scheduler if the trial is repeated
    retry: Retry | None = None

    def is_of(self, params: Params) -> bool:
        """Return whether this is a result of these params. Another store may have a trial of the same number."""
        return self.digest is None or self.digest == digest_of(params)


class Lost(_Event, frozen=True, kw_only=True):
    """An attempt was lost: its worker fell silent, or it was cancelled before a worker claimed it."""

    reason: Text
    #: True if the loss counts against the trial: a worker had claimed the attempt, and the trial may be the cause
    claimed: bool = True


#: ``host:port`` of a coordinator, and the secret that admits a replica, as it is or encrypted on its way
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
    """Request of a trial with several slots for the replicas of its gang, or the message that they have joined."""

    #: backup replicas beyond those of the trial's slots
    backups: Annotated[int, Meta(ge=0, le=MAX_SLOTS)] = 0
    #: True when enough replicas have joined the gang
    assembled: bool = False


class ReplicaSeat(_Coordinator, frozen=True, kw_only=True):
    """Seat of a replica in the gang of its trial."""

    #: number of the replica, from 1 (the coordinator's own is 0); backup replicas come last
    rank: Annotated[int, Meta(ge=0, le=2 * MAX_SLOTS)]
    #: number of the trial's gang, from 1
    call: Count = 1


class Called(_Event, frozen=True, kw_only=True):
    """An attempt requested the replicas of its gang, or announced that they have joined."""

    #: number of the request in this attempt, from 1; it ends the seats of earlier requests
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

# Several threads decode them: those of a worker's slots, and those of what reads the channel.
resolve(Trial, Attempt, Event | GangEvent, ReplicaSeat)


def _is_storable(value: object, levels: int) -> bool:
    """Return whether a value from JSON has at most this many `levels`, and only numbers that every store accepts."""
    if isinstance(value, float):
        return math.isfinite(value)
    if not isinstance(value, (Mapping, list)):
        return True
    inside = value.values() if isinstance(value, Mapping) else value
    return levels > 0 and False not in [_is_storable(each, levels - 1) for each in inside]


def whole(budget: float | None) -> float | None:
    """Return a budget for an objective: an int if it is a whole number, so that ``range(budget)`` works.

    Stores keep budgets as floats, and a ladder computes them by division.
    """
    # Beyond 2**53 not all whole numbers are floats.
    return int(budget) if isinstance(budget, float) and budget.is_integer() and budget <= 2**53 else budget
