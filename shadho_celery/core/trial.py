"""A trial, its attempts, and what can happen to them.

A trial is one evaluation of one set of params. An attempt is one sending of it to a worker: a retry after a loss, or a
speculative copy beside an attempt that still runs, is another. Scheduler, executors, messages and workers share these
records; a field is declared here and nowhere else.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import replace

from shadho_celery.core.checks import resolve

#: label -> drawn value, of every active label
Params = Mapping[str, Any]

#: more than any study has trials, and still exact in every reader of JSON
MAX_COUNT = 2**53 - 1
#: slots that a trial may take, and replicas that a gang may have
MAX_SLOTS = 1024

Number = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Count = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
#: a number that is neither NaN nor infinite
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
#: what databases keep in a signed integer of 64 bits
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class TrialState(str, Enum):
    """Where a trial stands. A LOST attempt returns its trial to WAITING under the next attempt number."""

    WAITING = "WAITING"
    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    COMPLETE = "COMPLETE"
    PRUNED = "PRUNED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    LOST = "LOST"

    def __str__(self) -> str:
        # As a str mixed into Enum it would print as "TrialState.X" on some versions of Python.
        return self.value

    def __format__(self, specification: str) -> str:
        return format(self.value, specification)

    @property
    def is_finished(self) -> bool:
        """True where nothing more can happen to the trial."""
        return self in FINISHED

    @property
    def counts(self) -> bool:
        """True where the trial counts against the study's `trials` limit."""
        return self in COUNTED


FINISHED = frozenset({TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAILED, TrialState.CANCELLED})
COUNTED = FINISHED - {TrialState.CANCELLED}
#: ways to end well; see `attempts.Attempts` for what follows from it
WELL = frozenset({TrialState.COMPLETE, TrialState.PRUNED})

_S = TrialState
#: The lawful transitions. A result may overtake the news that its trial started or was given up for lost, so QUEUED
#: and WAITING may finish at once.
LAWFUL: Mapping[TrialState, frozenset[TrialState]] = {
    _S.WAITING: frozenset({_S.QUEUED}) | FINISHED,
    _S.QUEUED: frozenset({_S.RUNNING, _S.LOST}) | FINISHED,
    _S.RUNNING: frozenset({_S.LOST}) | FINISHED,
    _S.LOST: frozenset({_S.WAITING}) | FINISHED,
    **{state: frozenset() for state in FINISHED},
}


class Outcome(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one call of an objective ended. Trial, result, message and store hold this record, and copy no field of it."""

    #: COMPLETE, PRUNED, FAILED or CANCELLED
    state: TrialState
    #: there where the state is COMPLETE
    loss: Finite | None = None
    #: what the objective returned beside the loss
    metrics: Mapping[str, Any] = {}
    #: why it failed, with its traceback
    error: str | None = None
    #: seconds the objective itself took
    seconds: Finite | None = None
    #: peak bytes the objective used: of GPU memory where it ran on a GPU, else of the process's resident memory; None
    #: where it was not measured
    memory: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    #: True where it FAILED for want of memory, which is a fact about its class as much as about its params
    out_of_memory: bool = False
    #: what its user should know although it ended well: a metric that was dropped, say
    warning: str | None = None

    def cancelled(self, seconds: float | None = None) -> Outcome:
        """Return the outcome of an attempt that was stopped after so many seconds: whatever it gave does not count."""
        seconds = self.seconds if seconds is None else seconds
        state = TrialState.CANCELLED
        return replace(self, state=state, loss=None, error="cancelled", seconds=seconds, out_of_memory=False)


class _Evaluation(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a trial and each of its attempts share: what is to be evaluated, and where it stands."""

    #: position of the trial in its study, from 0, in the order in which the trials were asked for
    number: Number
    #: name of the subspace the params were drawn in, such as ``kernel=rbf``
    subspace: str
    params: Params
    #: seed for the objective's own random draws, the same in every attempt
    seed: int = 0
    #: how much of the fidelity the trial is given; None for all of it
    budget: Finite | None = None
    #: slots of one class that it takes, all or none
    slots: Annotated[int, Meta(ge=1, le=MAX_SLOTS)] = 1
    #: number of the trial on rung 0 whose params, seed and checkpoints it carries on; None where they are its own
    origin: Number | None = None
    compute_class: str | None = None
    #: name of the machine it runs on, or ran on last
    host: str | None = None
    #: seconds since the epoch
    started_at: float | None = None


class Attempt(_Evaluation, frozen=True, kw_only=True, omit_defaults=True):
    """One sending of a trial to a worker."""

    #: its place among the attempts of its trial, from 1
    attempt: Count
    #: QUEUED until a worker claims it, then RUNNING
    state: TrialState = TrialState.QUEUED
    #: name of the worker that claimed it
    worker: str = ""
    #: the machine that another attempt of the trial runs on, and this one must not
    not_on: str | None = None

    def evolve(self, **changes: Any) -> Attempt:
        """Return a copy with `changes` made."""
        return replace(self, **changes)


class Trial(_Evaluation, frozen=True, kw_only=True):
    """One evaluation of one set of params.

    While it runs, `compute_class`, `host` and `started_at` are those of its oldest live attempt.
    """

    state: TrialState = TrialState.WAITING
    #: number of the latest attempt, from 1; 0 before the first
    attempt: int = 0
    #: claimed attempts that were lost
    lost: int = 0
    #: how it ended; None until then
    outcome: Outcome | None = None
    #: seconds since the epoch
    asked_at: float | None = None
    finished_at: float | None = None
    #: the rung of a ladder of budgets that it stands on, from 0; None where the study has no rungs
    rung: int | None = None
    #: compute classes that it ran out of memory on, joined by commas
    outgrown: str | None = None
    #: the live attempts, where they are not just the latest one
    live: Sequence[Attempt] | None = None

    @property
    def loss(self) -> float | None:
        """Loss of the outcome; None where there is none."""
        return self.outcome.loss if self.outcome else None

    @property
    def metrics(self) -> Mapping[str, Any]:
        """Metrics of the outcome."""
        return self.outcome.metrics if self.outcome else {}

    @property
    def error(self) -> str | None:
        """Error of the outcome."""
        return self.outcome.error if self.outcome else None

    @property
    def seconds(self) -> float | None:
        """Seconds that the objective took."""
        return self.outcome.seconds if self.outcome else None

    def evolve(self, **changes: Any) -> Trial:
        """Return a copy with `changes` made. Raises ValueError for a change of state that is not lawful."""
        state = changes.get("state", self.state)
        if state is not self.state and state not in LAWFUL[self.state]:
            raise ValueError(f"trial {self.number} cannot go from {self.state} to {state}")
        return replace(self, **changes)

    def attempted(self, **where: Any) -> Attempt:
        """Return the trial's attempt number `attempt` as it is now, but for `where`."""
        shared = {name: getattr(self, name) for name in _Evaluation.__struct_fields__}
        return Attempt(**{**shared, "attempt": self.attempt, **where})


class _Event(Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower, omit_defaults=True):
    """What happened to one attempt of a trial."""

    number: Number
    attempt: Count


class Started(_Event, frozen=True, kw_only=True):
    """A worker claimed an attempt."""

    host: str
    #: seconds since the epoch
    at: Finite
    #: name of the worker that claimed it
    worker: str = ""


class Report(_Event, frozen=True, kw_only=True):
    """An objective reported its loss on the way; it may be NaN or infinite."""

    step: Int64
    loss: float
    #: seconds since the epoch
    at: Finite


class Retry(Struct, frozen=True, kw_only=True):
    """Why a trial is tried again although its attempt has ended in a result."""

    reason: str
    #: the class whose memory it was too large for
    outgrown: str | None = None


class Result(_Event, frozen=True, kw_only=True):
    """An attempt ended."""

    outcome: Outcome
    host: str | None = None
    compute_class: str | None = None
    #: seconds since the epoch
    at: Finite
    #: name of the worker that ran it
    worker: str = ""
    #: set on the scheduler's side: the trial is to be tried again
    retry: Retry | None = None


class Lost(_Event, frozen=True, kw_only=True):
    """An attempt will not end any more: its worker fell silent, or it was taken back before one claimed it."""

    reason: str
    #: False where no worker had claimed it, or the trial was not to blame; only the others count against it
    claimed: bool = True


#: where a coordinator listens, ``host:port``, and what a replica must know to be let in
Address = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:%\[\]-]{1,255}:[0-9]{1,5}\Z")]
Token = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_=+/.-]{1,256}\Z")]


class GangCall(Struct, frozen=True, kw_only=True):
    """A trial that takes several slots calls for the replicas of its gang, or tells that they have come."""

    address: Address
    token: Token
    #: backup replicas beyond those of the trial's slots
    backups: Annotated[int, Meta(ge=0, le=MAX_SLOTS)] = 0
    #: True once as many replicas as the gang needs have said hello
    assembled: bool = False

    def __post_init__(self) -> None:
        check_port(self.address)


class ReplicaSeat(Struct, frozen=True, kw_only=True):
    """What a replica needs to join the gang of its trial."""

    address: Address
    token: Token
    #: number of the replica, from 1 (the coordinator's own is 0); backup replicas come last
    rank: Annotated[int, Meta(ge=0, le=2 * MAX_SLOTS)]
    #: which of the trial's gangs it belongs to, from 1
    call: Count = 1

    def __post_init__(self) -> None:
        check_port(self.address)


def check_port(address: str) -> None:
    """Raise ValueError for a port that there cannot be."""
    if not 0 <= int(address.rpartition(":")[2]) < 2**16:
        raise ValueError("its address has a port above 65535")


class Called(_Event, frozen=True, kw_only=True):
    """An attempt called for the replicas of its gang, or told that they have come."""

    #: which call of this attempt it is, from 1; the seats of an earlier one are over
    call: Count
    gang: GangCall
    #: seconds since the epoch
    at: Finite


class ReplicaFailed(_Event, frozen=True, kw_only=True):
    """A replica failed; its seat is free again."""

    call: Count
    #: its place in the gang, from 1: the coordinator's own is 0
    rank: Count
    error: str
    host: str
    #: seconds since the epoch
    at: Finite
    #: name of the worker that ran it
    worker: str = ""


Event = Started | Report | Result | Lost

#: what happens inside a trial's gang: the executor's business, which a study never hears of
GangEvent = Called | ReplicaFailed

# Several threads decode them: those of a worker's slots, and those of what reads the channel.
resolve(Trial, Attempt, Event | GangEvent, ReplicaSeat)


def whole(budget: float | None) -> float | None:
    """Return a budget as objectives get it: an int where it is a whole number, so that ``range(budget)`` works.

    Stores keep budgets as floats, and a ladder is made by division.
    """
    # Beyond 2**53 not all whole numbers are floats.
    return int(budget) if isinstance(budget, float) and budget.is_integer() and budget <= 2**53 else budget
