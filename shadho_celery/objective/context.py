"""The context of a trial: what its objective is given beside the params."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from shadho_celery.core.checks import short
from shadho_celery.core.trial import ReplicaSeat
from shadho_celery.objective.result import Unreadable, number, scalar


class TrialTimeout(Exception):
    """The trial has reached its time limit. Raised inside the objective, which has seconds left to return what it has.

    An objective may catch it to save a checkpoint and return its loss so far, which then counts.
    """


class ReplicaDone(BaseException):
    """This process is a replica of a trial and its work is done: it leaves the objective; only its caller sees it."""


class Context(Protocol):
    """A trial as its objective sees it."""

    #: number of the trial in its study
    trial: int
    #: number of this attempt, from 1
    attempt: int
    #: seed for the objective's random draws, the same in every attempt
    seed: int
    #: how much of the fidelity this trial is given; None for all of it
    budget: float | None
    #: "cuda" where the slot has a GPU, else "cpu"
    device: str
    compute_class: str
    #: number of the slot on its worker, from 0
    slot: int
    #: slots that are reserved for the trial, this one included
    slots: int
    #: the seat that this process has in the trial's gang; None in the trial itself
    replica: ReplicaSeat | None
    #: True where another attempt of the trial runs, maybe in the same `checkpoint_dir`: leave its files as they are
    is_copy: bool
    #: trainings of gangs that this attempt has begun so far
    gangs: int

    @property
    def checkpoint_dir(self) -> Path:
        """Folder in which this trial keeps its checkpoints; a later attempt finds them there."""

    def report(self, step: int, loss: float) -> None:
        """Tell the scheduler the loss reached at `step` (a whole number that grows); from any thread.

        Raises TypeError or ValueError where they are no such numbers.
        """

    def should_stop(self) -> bool:
        """True once the trial was cancelled or its time is up; the objective should return what it has, at once."""

    def call_replicas(self, address: str, token: str, backups: int) -> None:
        """Have the other slots of the trial, and as many idle ones as `backups`, join the gang at `address`.

        ``shadho_celery.training.gang`` does so for a trial with more than one slot.
        """

    def gang_assembled(self) -> None:
        """Tell that the replicas that were called have come.

        A gang of which nobody does so gives its slots back after a while. ``shadho_celery.training.gang`` does.
        """


def _ignore(step: int, loss: float) -> None:
    pass


def _never() -> bool:
    return False


def _nobody_to_tell() -> None:
    pass


def _nobody_to_call(address: str, token: str, backups: int) -> None:
    raise RuntimeError("no replicas can be called from here: only trials of a fleet have slots beside their own")


@dataclass(kw_only=True)
class LocalContext:
    """The form of Context that knows no network: reports go to a function, the stop flag comes from one."""

    trial: int = 0
    attempt: int = 1
    seed: int = 0
    budget: float | None = None
    checkpoints: Path = field(default_factory=lambda: Path(".shadho/checkpoints"))
    device: str = "cpu"
    compute_class: str = "local"
    slot: int = 0
    slots: int = 1
    replica: ReplicaSeat | None = None
    is_copy: bool = False
    gangs: int = 0
    on_report: Callable[[int, float], None] = _ignore
    stopped: Callable[[], bool] = _never
    #: seconds the trial may take; None for as many as it likes
    timeout: float | None = None
    #: whether those are over
    timed_out: Callable[[], bool] = _never
    on_call_replicas: Callable[[str, str, int], None] = _nobody_to_call
    on_gang_assembled: Callable[[], None] = _nobody_to_tell

    @property
    def checkpoint_dir(self) -> Path:
        # Made when it is asked for: most objectives keep nothing.
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        return self.checkpoints

    def report(self, step: int, loss: float) -> None:
        # It may be NaN on the way: a training that diverges may be the one to learn from.
        self.on_report(_whole(step), _told(loss, "context.report: the loss", finite=False))

    def should_stop(self) -> bool:
        return self.stopped() or self.timed_out()

    def call_replicas(self, address: str, token: str, backups: int) -> None:
        self.on_call_replicas(address, token, backups)

    def gang_assembled(self) -> None:
        self.on_gang_assembled()


def _whole(step: Any) -> int:
    """The step as an int of 64 bits. Raises TypeError or ValueError with a message for the objective's author."""
    what = "context.report: the step"
    if _told(step, what) % 1:
        raise ValueError(f"{what} must be a whole number, not {short(step)}")
    whole = int(scalar(step))
    if not -(2**63) <= whole < 2**63:
        raise ValueError(f"{what} is too large: {short(step)}")
    return whole


def _told(value: Any, what: str, *, finite: bool = True) -> float:
    """`value` as a float. Raises TypeError or ValueError with a message for the objective's author."""
    try:
        return number(value, what, finite=finite)
    except Unreadable as error:
        kind = TypeError if "is no number" in str(error) else ValueError
        raise kind(str(error)) from None
