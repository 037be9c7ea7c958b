"""Context of a trial, which is the objective's second argument, and the reports that the objective makes.

`Context` lists what an objective may use. `LocalContext` implements it, and `Reports` decides which reports are sent.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from shadho_celery.core.checks import short
from shadho_celery.core.files import CHECKPOINTS
from shadho_celery.core.names import LAUNCH, elsewhere, named
from shadho_celery.core.trial import ReplicaSeat, turned
from shadho_celery.errors import ShadhoError, UsageError
from shadho_celery.objective.result import Unreadable, number, scalar

#: signal that interrupts an objective at its time limit; few libraries use it
INTERRUPT = signal.SIGVTALRM

#: number of reports up to which all reports of an attempt are sent; with more, they are thinned out
MAX_REPORTS = 1000


class TrialTimeout(Exception):
    """The trial has reached its time limit. Raised inside the objective, which then has a few seconds to return.

    An objective may catch it, save a checkpoint and return its loss so far. This loss then counts as the trial's loss.
    """


class TrialStopped(BaseException):
    """The trial was cancelled or pruned, but the objective has not returned. Raised inside the objective.

    The objective's result is discarded. ``except Exception`` does not catch this exception.
    """


class ReplicaDone(BaseException):
    """The work of this replica is done. Raised inside the objective to end it, and caught by the objective's caller."""


class RankLost(ShadhoError):
    """A rank of the trial's process group was lost; the trial is tried again from its checkpoint."""


class Context(Protocol):
    """What an objective may know about its trial, and the functions that it may call.

    It has more members than other protocols of this package, because it has all facts about a trial.
    """

    #: name of the trial's study; "" outside of a study
    study: str
    #: number of the trial in its study
    trial: int
    #: number of this attempt, from 1
    attempt: int
    #: seed for the objective's random draws, the same in every attempt
    seed: int
    #: budget of this trial, such as a number of epochs; None for the full fidelity
    budget: float | None
    #: "cuda" if the slot has a GPU, "mps" if that is Apple's, else "cpu"
    device: str
    #: compute class of the worker
    compute_class: str
    #: number of the slot on its worker, from 0
    slot: int
    #: number of slots that are reserved for the trial, including this one
    slots: int
    #: number of these slots that are on this worker, each with a GPU if the worker has any; see ``STUDY["gpus"]``
    gpus: int
    #: seat of this process in the trial's gang, if it is a replica; None in the process of the trial itself
    replica: ReplicaSeat | None
    #: True if another attempt of the trial runs, maybe with the same `checkpoint_dir`; then do not change files there
    is_copy: bool
    #: number of gangs that this attempt has started so far
    gangs: int
    #: True if the fleet has a signing key, so that the processes of a gang encrypt what they exchange
    encrypted: bool

    @property
    def checkpoint_dir(self) -> Path:
        """Folder for this trial's checkpoints. A later attempt of the trial finds them there."""

    def report(self, step: int, loss: float | Mapping[str, float]) -> None:
        """Send the loss at `step` to the scheduler. Steps are whole numbers that increase. May be called from any
        thread.

        The loss has the same sign as the one that the objective returns. In a study with several objectives, it is a
        dict with all losses by name. If an attempt makes more than MAX_REPORTS reports, only a part of them is sent,
        and the trial gets a warning. Raises TypeError or ValueError if the step is not a whole number, or the loss is
        not a number, or not a dict with the names of the objectives.
        """

    def should_stop(self) -> bool:
        """Return whether the objective should return at once. `stop_reason` gives the reason.

        The reasons are that the trial was cancelled or pruned, that its time is up, or that its worker is preempted. If
        a cancelled or pruned trial continues, it gets a TrialStopped exception, and is killed half a second later. If a
        preempted trial returns, another worker continues it from its checkpoint.
        """

    @property
    def stop_reason(self) -> str:
        """Reason why the trial should stop: ``stopped``, ``timeout`` or ``preempted``; "" if it should not.

        A trial is ``stopped`` if it was cancelled or pruned. The worker of a preempted trial ends soon, so the
        trial should write a checkpoint if it has no recent one.
        """

    def launch(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call ``function(context, *arguments)`` in one process for each of the trial's `gpus`. Return rank 0's result.

        These processes are the ranks of a process group of torch. The context of each has its `rank`, the `size` of the
        group and its own `device`. Only reports of rank 0 are sent, and `should_stop` returns the same in every rank.
        The function and its arguments are pickled. Raises UsageError if they cannot be pickled, and RankFailed with the
        traceback of a rank that fails.
        """

    def call_replicas(self, address: str, token: str, backups: int, *, is_last: bool = False) -> None:
        """Start replicas in the trial's other slots and in up to `backups` idle slots. They join the gang at `address`.

        ``shadho_celery.training.gang`` calls this for a trial with more than one slot. After a call with `is_last`,
        such as that for a process group, another call raises UsageError.
        """

    def gang_assembled(self) -> None:
        """Inform the scheduler that all replicas have joined.

        If this is not called in time, the gang's slots are released.
        ``shadho_celery.training.gang`` calls this.
        """


#: names of the members of `Context`
CONTEXT_NAMES = frozenset(Context.__annotations__) | {name for name in vars(Context) if not name.startswith("_")}


#: context of the trial whose objective is called here; None outside of a trial, and in another thread of the objective
CURRENT: ContextVar[Context | None] = ContextVar("shadho_celery.trial", default=None)


class Reports:
    """Decides which reports of an attempt are sent.

    At first each report is sent, then every second, then every fourth, and so on, so that the sent reports are spread
    evenly. The stride doubles whenever MAX_REPORTS of the reports sent so far are multiples of it. A report that is
    sent goes out at once, because a pruner needs it. Of a million reports, 6000 are sent.
    """

    def __init__(self) -> None:
        #: number of reports that were made, and number of those that were sent
        self.made = self.sent = self._kept = 0
        self._stride = 1

    def keeps_next(self) -> bool:
        """Count one more report, and return whether to send it."""
        self.made += 1
        if (self.made - 1) % self._stride:
            return False
        self.sent += 1
        self._kept += 1
        if self._kept >= MAX_REPORTS:
            self._kept, self._stride = (MAX_REPORTS + 1) // 2, 2 * self._stride
        return True

    @property
    def warning(self) -> str | None:
        """Warning that only a part of the reports was sent, or None."""
        if self.sent == self.made:
            return None
        return f"of {self.made} reports {self.sent} were sent, at the end every {self._stride}th"


def _refuse_call(address: str, token: str, backups: int) -> None:
    raise RuntimeError("replicas cannot be called from here; only trials of a fleet have further slots")


@dataclass(kw_only=True)
class LocalContext:
    """Context that does not use the network. Functions given to it receive the reports and tell whether to stop."""

    study: str = ""
    trial: int = 0
    attempt: int = 1
    seed: int = 0
    budget: float | None = None
    checkpoints: str | Path = CHECKPOINTS
    device: str = "cpu"
    compute_class: str = "local"
    slot: int = 0
    slots: int = 1
    gpus: int = 1
    replica: ReplicaSeat | None = None
    is_copy: bool = False
    gangs: int = 0
    #: True if this attempt has called the ranks of a process group
    has_group: bool = False
    encrypted: bool = False
    #: gets the step and the loss of a report, or all losses by name if there are several; they are minimised
    on_report: Callable[[int, float | Mapping[str, float]], None] = lambda step, loss: None
    #: directions of the study's losses by name
    objectives: Mapping[str, str] | None = None
    reports: Reports = field(default_factory=Reports)
    #: lines that are added to the warning of the trial
    warnings: list[str] = field(default_factory=list)
    #: labels that the objective has asked for so far, see `Outcome.asked`; None in a study with a space
    asked: Mapping[str, Any] | None = None
    #: facts that the objective of a study without a space has noted, which become metrics
    facts: Mapping[str, Any] = field(default_factory=dict)
    stopped: Callable[[], bool] = lambda: False
    #: returns whether the worker is about to end, and the trial goes on elsewhere
    preempted: Callable[[], bool] = lambda: False
    #: True once the objective was informed of the preemption. Its result may then be that of a part of the trial
    was_told: bool = False
    #: time limit of the trial in seconds; None for no limit
    timeout: float | None = None
    #: returns whether the time limit has passed
    timed_out: Callable[[], bool] = lambda: False
    on_call_replicas: Callable[[str, str, int], None] = _refuse_call
    on_gang_assembled: Callable[[], None] = lambda: None
    #: called with the peaks of all ranks of a launch, or replicas of a gang: resident bytes, and the most bytes on one
    #: GPU
    on_ranks: Callable[[int, int], None] = lambda host, gpu: None

    def __dir__(self) -> list[str]:
        """Return only the members of `Context`. The other fields are for the caller of the objective."""
        return sorted(CONTEXT_NAMES)

    def __getattr__(self, name: str) -> Any:
        here = elsewhere(name, CONTEXT_NAMES)
        hint = f"; here it is {'context.' if here.isidentifier() else ''}{here}" if here else ""
        raise AttributeError(f"a trial's context has no attribute {name!r}{hint}")

    @property
    def checkpoint_dir(self) -> Path:
        # Created at the first use, because most objectives keep no files.
        folder = Path(self.checkpoints)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def report(self, step: int, loss: float | Mapping[str, float]) -> None:
        step, losses = _step(step, loss), turned(_reported(loss, self.objectives), self.objectives)
        if self.reports.keeps_next():
            self.on_report(step, losses if len(losses) > 1 else next(iter(losses.values())))

    @property
    def stop_reason(self) -> str:
        if self.stopped():
            return "stopped"
        if self.timed_out():
            return "timeout"
        if self.preempted():
            self.was_told = True
            return "preempted"
        return ""

    def should_stop(self) -> bool:
        return bool(self.stop_reason)

    def launch(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return named(LAUNCH)(self, function, arguments)

    def call_replicas(self, address: str, token: str, backups: int, *, is_last: bool = False) -> None:
        if self.has_group:
            raise UsageError(
                "a process group cannot be followed by another group or gang in the same trial, because its ranks "
                "cannot skip the first block; put both trainings into one block"
            )
        self.on_call_replicas(address, token, backups)
        self.has_group = is_last

    def gang_assembled(self) -> None:
        self.on_gang_assembled()


def reported(loss: float | Mapping[str, float]) -> dict[str, Any]:
    """Return the fields `loss` and `losses` of a `Report` of one loss, or of several losses by name, as minimised."""
    if not isinstance(loss, Mapping):
        return {"loss": loss}
    return {
        "loss": next(iter(loss.values())),
        "losses": {n: value for n, value in loss.items() if math.isfinite(value)},
    }


def _step(step: Any, loss: Any) -> int:
    """Return the step as an int of 64 bits. Raises TypeError or ValueError with a message for the user."""
    what = "context.report: the step"
    if _number(step, what) % 1:
        is_swapped = isinstance(loss, int)
        order = "; report(value, step) is Optuna's order" if is_swapped else ""
        raise ValueError(
            f"{what} must be a whole number, not {short(step)}: write context.report(step, loss), or "
            f"report(loss=..., step=...){order}"
        )
    whole = int(scalar(step))
    if not -(2**63) <= whole < 2**63:
        raise ValueError(f"{what} is too large: {short(step)}")
    return whole


def _reported(loss: Any, objectives: Mapping[str, str] | None) -> dict[str, float]:
    """Return the losses of a report by name. Raises TypeError or ValueError with a message for the user."""
    what, names = "context.report: the loss", objectives or {"loss": "minimize"}
    form = "{{{}}}".format(", ".join(f"{name!r}: ..." for name in names))
    remedy = f"the study's objectives are {', '.join(names)}: report {form}" if len(names) > 1 else "report a number"
    if not isinstance(loss, Mapping) and len(names) > 1:
        raise TypeError(f"{what} is not a dict but {short(loss)}; {remedy}")
    losses = loss if isinstance(loss, Mapping) else dict.fromkeys(names, loss)
    if losses.keys() != names.keys():
        raise ValueError(f"{what} is a dict with {', '.join(map(short, losses)) or 'no names'}; {remedy}")
    # A loss may be NaN, so that a pruner can stop a training that diverges.
    return {name: _number(losses[name], what if len(names) < 2 else f"{what} {name}", finite=False) for name in names}


def _number(value: object, what: str, *, finite: bool = True) -> float:
    """Return `value` as a float. Raises TypeError or ValueError with a message for the user."""
    try:
        return number(value, what, finite=finite)
    except Unreadable as error:
        kind = TypeError if "is not a number" in str(error) else ValueError
        raise kind(str(error)) from None
