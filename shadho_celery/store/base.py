"""The methods that a study needs of a store, and the record of a study.

Holder of a lock: a process, identified by its host, process id, start time, kernel boot and pid namespace.

Host and process id are not enough: two containers may have the same ones, and so may two boots of one machine.
"""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol

from msgspec import Meta

from shadho_celery.core.checks import one_line
from shadho_celery.core.payload import StudyKey
from shadho_celery.core.records import Action, AttemptRecord, MachineRecord, MoneyPlan, SessionRecord
from shadho_celery.core.trial import Moment, Name, Report, Trial

#: URL of the store of a command without --store
DEFAULT_STORE = "sqlite:///shadho.db"
#: maximum number of characters of a command that is shown
MAX_COMMAND = 500


@dataclass(frozen=True, kw_only=True)
class StudyRecord:
    """A study without its trials. Only `settings`, `in_force` and what follows change, without `tree`."""

    #: globally unique, because studies of several stores may share one Redis; also used in names of folders
    key: StudyKey
    name: Annotated[Name, Meta(min_length=1)]
    #: module with SPACE and objective; "" for a search without a module
    module: Name
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    #: label -> description of its domain and condition
    space: Mapping[str, str]
    #: seconds since the epoch
    created_at: Moment
    #: options that the study's command lines have given so far: name -> value
    settings: Mapping[str, Any] = field(default_factory=dict)
    #: values of the settings `settings.IN_FORCE` in the latest run; the sampler is None if it was a function
    in_force: Mapping[str, Any] = field(default_factory=dict)
    #: by subspace: which sampler `auto` chose last, and why; empty with other samplers
    choices: Mapping[str, str] = field(default_factory=dict)
    #: decade of the seconds of its first trials, by which `auto` divides proposals; None until they have ended
    decade: Annotated[float, Meta(gt=0)] | None = None
    #: its latest plan, if it is placed by money
    money_plan: MoneyPlan | None = None
    #: the labels of the space in the machine-readable form of `space.stored`; None if they were not given
    tree: Mapping[str, Any] | None = None
    #: names of the compute classes that its attempts could go to, in the order of `AttemptRecord.placed`
    classes: tuple[Name, ...] = ()

    @property
    def asked(self) -> int | None:
        """Limit on the number of trials in the latest run, or None."""
        limit: int | None = self.in_force.get("trials") or self.settings.get("trials")
        return limit

    @property
    def command(self) -> str:
        """Command that its trials run, in the form of a shell; "" if they call a function. It is shown, never run."""
        return one_line(shlex.join(self.in_force.get("command") or ()), MAX_COMMAND)

    @property
    def is_simulated(self) -> bool:
        """True if its trials were simulated, so that it cannot continue."""
        return bool(self.in_force.get("simulated"))

    @property
    def objectives(self) -> Mapping[str, str]:
        """By name of each loss: its direction. Empty in a study of one loss without a name."""
        return self.in_force.get("objectives") or {}


@dataclass(kw_only=True)
class Turn:
    """The changes of one turn of the loop. Facts of the study are None if they have not changed."""

    new: Sequence[Trial] = ()
    changed: Sequence[Trial] = ()
    reported: list[Report] = field(default_factory=list)
    choices: Mapping[str, str] | None = None
    decade: float | None = None
    money_plan: MoneyPlan | None = None
    #: one record for each attempt that has changed
    attempted: Sequence[AttemptRecord] = ()
    #: new or ended sessions, and machines
    seen: Sequence[SessionRecord | MachineRecord] = ()
    classes: Sequence[str] | None = None
    #: requests to the study that were answered
    asked: list[Action] = field(default_factory=list)


class Store(Protocol):
    """Keeps the trials and reports of studies, and the lock that a running study holds."""

    @property
    def safe_url(self) -> str:
        """URL of the store for messages, without a password."""

    def trials(self, key: str, numbers: Collection[int]) -> Iterable[Trial]:
        """Return the trials with these numbers, in the order of the numbers.

        Raises StoreError for a trial that cannot be read.
        """

    def reports(self, key: str, numbers: Collection[int] | None = None) -> Iterable[Report]:
        """Return the study's reports, or those of the trials with these numbers, by trial, attempt and step."""

    def numbers(self, key: str) -> Iterable[int]:
        """Return the numbers of the study's trials."""

    def write(self, key: str, fence: int, now: float, turn: Turn) -> Collection[int]:
        """Record one turn of the loop in one transaction.

        Returns the numbers of the `changed` trials that were missing and have been written again in full. Raises
        LockLost if `fence` is old: another scheduler has locked the study since.
        """

    def unlock(self, key: str, fence: int) -> None:
        """Unlock the study."""


#: stands for a start time, or for boot and pid namespace, that the machine does not provide
UNKNOWN = "?"


def holder_name() -> str:
    """Return the name of this process in a lock: host, process id, start time, boot id and pid namespace."""
    return f"{socket.gethostname()} {os.getpid()} {_started_at(os.getpid())} {_namespace()}"


def is_held(holder: str, expires: float, now: float) -> bool:
    """Return whether `holder` may still be running.

    A process that cannot be checked from this machine or container counts as running until `expires`.
    """
    host, pid, started_at, namespace = _parts(holder)
    if UNKNOWN not in (started_at, namespace) and (host, namespace) == (socket.gethostname(), _namespace()):
        # No need to wait for the expiry: a process that got the same id later is not the holder.
        return pid.isdecimal() and len(pid) < 20 and _started_at(int(pid)) == started_at
    return now < expires


def described(holder: str) -> str:
    """Return the host and the process id of a holder, for messages."""
    host, pid, *_ = _parts(holder)
    return f"{one_line(host, 120)} (process {one_line(pid, 20)})"


def _parts(holder: str) -> list[str]:
    """Return host, process id, start time and namespace of a holder's name. Missing parts are UNKNOWN."""
    return (holder.split(" ") + 4 * [UNKNOWN])[:4]


def _namespace() -> str:
    """Return the boot id of the running kernel and the inode of this process's pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return UNKNOWN


def _started_at(pid: int) -> str:
    """Return a process's start time in clock ticks since boot, "" if it does not run, or UNKNOWN without /proc."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else rest[18]  # a zombie is dead
    except OSError:
        return "" if Path("/proc/self/stat").exists() else UNKNOWN
