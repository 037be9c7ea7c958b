"""A trial and what can happen to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any


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
#: how one of several live attempts ends its trial; ending otherwise it leaves it to the others
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One evaluation of one set of params."""

    #: position in the study, from 0, in the order in which the trials were asked for
    number: int
    #: name of the subspace the params were drawn in, such as ``kernel=rbf``
    subspace: str
    #: the drawn value of every active label
    params: Mapping[str, Any]
    #: seed for the objective's own random draws, the same for every attempt
    seed: int = 0
    state: TrialState = TrialState.WAITING
    #: number of the latest attempt, from 1; 0 before the first
    attempt: int = 0
    #: claimed attempts that were lost
    lost: int = 0
    #: compute class of the latest attempt
    compute_class: str | None = None
    loss: float | None = None
    #: what the objective returned beside the loss, and the last reported step
    metrics: Mapping[str, Any] = field(default_factory=dict)
    #: why the trial failed, with its traceback
    error: str | None = None
    #: name of the machine the latest attempt ran on
    host: str | None = None
    #: seconds since the epoch
    asked_at: float | None = None
    started_at: float | None = None
    finished_at: float | None = None
    #: seconds the objective itself took
    seconds: float | None = None
    #: peak bytes the objective used: of GPU memory where it ran on a GPU, else of the process's resident memory; None
    #: where it was not measured
    memory: int | None = None
    #: how much of the fidelity the trial is given; None for all of it
    budget: float | None = None
    #: slots of one class that it takes, all or none
    slots: int = 1
    #: the rung of a ladder of budgets that it stands on, from 0; None where the study has no rungs
    rung: int | None = None
    #: number of the trial on rung 0 whose params, seed and checkpoints it carries on; None where they are its own
    origin: int | None = None
    #: compute classes that it ran out of memory on, joined by commas
    outgrown: str | None = None
    #: what its user should know although it ended well: a metric that was dropped, say
    warning: str | None = None
    #: where a trial that was copied runs, one item an attempt; None where its latest attempt is the only one that lives
    live: Sequence[Mapping[str, Any]] | None = None

    def evolve(self, **changes: Any) -> Trial:
        """A copy with `changes` made; a change of state must be lawful."""
        state = changes.get("state", self.state)
        if state is not self.state and state not in LAWFUL[self.state]:
            raise ValueError(f"trial {self.number} cannot go from {self.state} to {state}")
        return replace(self, **changes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """A worker claimed an attempt."""

    number: int
    attempt: int
    host: str
    #: seconds since the epoch
    at: float
    #: name of the worker that claimed it
    worker: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """An objective reported its loss on the way."""

    number: int
    attempt: int
    step: int
    loss: float
    #: seconds since the epoch
    at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """How an attempt ended."""

    number: int
    attempt: int
    #: COMPLETE, PRUNED, FAILED or CANCELLED
    state: TrialState
    loss: float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    host: str | None = None
    compute_class: str | None = None
    #: seconds the objective itself took
    seconds: float | None = None
    #: peak bytes the objective used, None where it was not measured
    memory: int | None = None
    #: seconds since the epoch
    at: float
    #: name of the worker that ran it
    worker: str = ""
    #: True where it FAILED for want of memory, which is a fact about its class as much as about its params
    out_of_memory: bool = False
    #: what its user should know although it ended well
    warning: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """An attempt will not end any more: its worker fell silent, or it was taken back before one claimed it."""

    number: int
    attempt: int
    reason: str
    #: False where no worker had claimed it, or the trial was not to blame; only the others count against it
    claimed: bool = True
    #: the class whose memory it was too large for
    outgrown: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Assembling:
    """An attempt that takes several slots called for the replicas of its gang, or tells that they have come."""

    number: int
    attempt: int
    #: which call of this attempt it is, from 1; the seats of an earlier one are over
    call: int
    #: where the gang's coordinator listens: ``host:port``
    address: str
    #: what a replica must know to be let in
    token: str
    #: backup replicas beyond those of the trial's slots
    backups: int = 0
    #: True once as many replicas as the gang needs have said hello
    assembled: bool = False
    #: seconds since the epoch
    at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Unseated:
    """A replica failed; its seat is free again."""

    number: int
    attempt: int
    call: int
    #: its place in the gang, from 1: the coordinator's own is 0
    rank: int
    error: str
    host: str
    #: seconds since the epoch
    at: float
    #: name of the worker that ran it
    worker: str = ""


Event = Started | Report | Result | Lost

#: what happens inside a trial's gang: the executor's business, which a study never hears of
GangEvent = Assembling | Unseated
