"""The methods that a study needs of a store, and the record of a study."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

from msgspec import Meta

from shadho_celery.core.actions import Action
from shadho_celery.core.payload import StudyKey
from shadho_celery.core.records import AttemptRecord, MachineRecord, MoneyPlan, SessionRecord
from shadho_celery.core.trial import Moment, Name, Report, Trial

#: URL of the store of a command without --store
DEFAULT_STORE = "sqlite:///shadho.db"


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
