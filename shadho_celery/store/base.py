"""The protocol of a store, the record of a study, and the identity of the process that holds a study's lock.

The holder of a lock is identified by host, process id, start time, kernel boot and pid namespace. Host and process id
are not enough, because they may be equal in two containers, or after a reboot of a machine.
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
from shadho_celery.core.users import UserName

#: URL of the store of commands without --store
DEFAULT_STORE = "sqlite:///shadho.db"
#: number of records that are read from a store at a time
PAGE = 2000
#: maximum number of characters of a command that is shown
MAX_COMMAND = 500


@dataclass(frozen=True, kw_only=True)
class StudyRecord:
    """A study without its trials. `settings` and later fields may change; `space` and `tree` only if a schema grows."""

    #: key that is globally unique, because studies of several stores may share one Redis; also the name of folders
    key: StudyKey
    name: Annotated[Name, Meta(min_length=1)]
    #: module with SPACE and objective; "" for a search without a module
    module: Name
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    #: by label: description of its domain and conditions
    space: Mapping[str, str]
    #: time of its creation in seconds since the epoch
    created_at: Moment
    #: by name: options given in any run, as last given
    settings: Mapping[str, Any] = field(default_factory=dict)
    #: by name: values of the settings `settings.IN_FORCE` in the latest run; the sampler is None if it was a user's own
    #: class
    in_force: Mapping[str, Any] = field(default_factory=dict)
    #: by subspace: text that says which sampler `auto` has chosen, and why; empty with other samplers
    choices: Mapping[str, str] = field(default_factory=dict)
    #: decade (order of magnitude) of the seconds of its first trials, for the sampler `auto`; None before they end
    decade: Annotated[float, Meta(gt=0)] | None = None
    #: latest plan, if its trials are placed by money
    money_plan: MoneyPlan | None = None
    #: labels of the space in the form of `space.stored`; None if they were not recorded
    tree: Mapping[str, Any] | None = None
    #: names of the compute classes to which attempts could be sent, in the order of `AttemptRecord.placed`
    classes: tuple[Name, ...] = ()
    #: user who has begun it; None if an earlier version has begun it
    owner: UserName | None = None

    @property
    def asked(self) -> int | None:
        """Limit on the number of trials in the latest run; None without a limit."""
        limit: int | None = self.in_force.get("trials") or self.settings.get("trials")
        return limit

    @property
    def command(self) -> str:
        """Command that its trials run, in the form of a shell; "" if they call a function. It is shown, never run."""
        return one_line(shlex.join(self.in_force.get("command") or ()), MAX_COMMAND)

    @property
    def is_simulated(self) -> bool:
        """True if its trials were simulated. Then it cannot be resumed."""
        return bool(self.in_force.get("simulated"))

    @property
    def objectives(self) -> Mapping[str, str]:
        """Direction of each loss by name; empty in a study with one loss that has no name."""
        return self.in_force.get("objectives") or {}


@dataclass(kw_only=True)
class Turn:
    """A scheduler's changes in one turn. Fields about the study are None if they have not changed."""

    new: Sequence[Trial] = ()
    changed: Sequence[Trial] = ()
    reported: list[Report] = field(default_factory=list)
    choices: Mapping[str, str] | None = None
    decade: float | None = None
    money_plan: MoneyPlan | None = None
    #: one record for each attempt that has changed
    attempted: Sequence[AttemptRecord] = ()
    #: new or changed sessions and machines
    seen: Sequence[SessionRecord | MachineRecord] = ()
    classes: Sequence[str] | None = None
    #: requests to the study that were carried out or refused
    asked: list[Action] = field(default_factory=list)


class Store(Protocol):
    """Keeps the trials and reports of studies, and the lock that a running study holds."""

    @property
    def safe_url(self) -> str:
        """URL of the store for messages, without a password."""

    def trials(self, key: str, numbers: Collection[int]) -> Iterable[Trial]:
        """Return the trials with these numbers, sorted by number.

        Raises StoreError for a trial that cannot be read.
        """

    def reports(self, key: str, numbers: Collection[int] | None = None) -> Iterable[Report]:
        """Return the reports of all trials of the study, or of the trials with these numbers, sorted by trial, attempt
        and step.
        """

    def numbers(self, key: str) -> Iterable[int]:
        """Return the numbers of the study's trials."""

    def write(self, key: str, fence: int, now: float, turn: Turn) -> Collection[int]:
        """Record one turn of the scheduler in one transaction.

        Returns the numbers of the `changed` trials whose rows were missing, and which were written again in full.
        Raises LockLost if `fence` is too old, because another scheduler has locked the study since.
        """

    def unlock(self, key: str, fence: int) -> None:
        """Unlock the study."""


#: value of a start time, or of boot and pid namespace, if the machine does not provide them
UNKNOWN = "?"


def holder_name() -> str:
    """Return the name of this process in a lock: host, process id, start time, boot id and pid namespace."""
    return f"{socket.gethostname()} {os.getpid()} {_started_at(os.getpid())} {_namespace()}"


def is_held(holder: str, expires: float, now: float) -> bool:
    """Return whether `holder` may still be running.

    A process of another machine or container, which cannot be checked, counts as running until `expires`.
    """
    host, pid, started_at, namespace = _parts(holder)
    if UNKNOWN not in (started_at, namespace) and (host, namespace) == (socket.gethostname(), _namespace()):
        # The process can be checked. A later process with the same id has another start time.
        return pid.isdecimal() and len(pid) < 20 and _started_at(int(pid)) == started_at
    return now < expires


def described(holder: str) -> str:
    """Return the host and the process id of a holder, for messages."""
    host, pid, *_ = _parts(holder)
    return f"{one_line(host, 120)} (process {one_line(pid, 20)})"


def _parts(holder: str) -> list[str]:
    """Return the host, process id, start time and namespace in a holder's name. Missing parts are UNKNOWN."""
    return (holder.split(" ") + 4 * [UNKNOWN])[:4]


def _namespace() -> str:
    """Return the boot id of the running kernel and the inode of this process's pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return UNKNOWN


def _started_at(pid: int) -> str:
    """Return the start time of a process in clock ticks since boot; "" if it does not run; UNKNOWN without /proc."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else rest[18]  # a zombie process has ended
    except OSError:
        return "" if Path("/proc/self/stat").exists() else UNKNOWN
