"""Watch over a run on workers: what its user should know of servers, workers, code and failures."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from shadho_celery.core.code import CodeVersion
from shadho_celery.embedded.embedded import Embedded
from shadho_celery.fleet.executor import QueueExecutor
from shadho_celery.objective.sources import DiskWatch
from shadho_celery.placement.shares import starved_words
from shadho_celery.results.report import ended_by_subspace
from shadho_celery.scheduler.plan import Plan
from shadho_celery.scheduler.scheduler import Scheduler
from shadho_celery.session.notices import Conditions, Kind, Notice
from shadho_celery.study.state import StudyState
from shadho_celery.transport.registry import able, start_command, unable
from shadho_celery.transport.signing import Signer

#: seconds after which a missing worker is warned of; longer than one takes to announce itself again
MISSING_SECONDS = 10.0

#: seconds between two looks for notices: each looks at every worker
LOOK_SECONDS = 1.0


@dataclass(kw_only=True)
class Watch:
    """Finds the notices of one run, and tells each once."""

    plan: Plan
    study: StudyState
    scheduler: Scheduler
    executor: QueueExecutor
    #: module of the study file, and its code as this run has read it
    module: str
    code: CodeVersion
    disk: DiskWatch
    #: slots of the widest trial
    widest: int
    #: workers of this machine; None on a fleet
    embedded: Embedded | None = None
    #: True if the user has named the classes of the embedded workers
    has_named_workers: bool = False
    _told: set[Notice] = field(default_factory=set)
    _looked_at: float = -math.inf
    _outages: Conditions = field(default_factory=Conditions)
    _missing: Conditions = field(default_factory=Conditions)

    def news(self, now: float) -> Iterator[str]:
        """Yield a line for each new notice, and for servers and workers that are in order again."""
        yield from self._outages.see(self._silent_servers(), now)
        if now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        yield from self._untold(self.present())
        # Workers announce themselves again after an outage, or once Redis has lost its data.
        if self.executor.known_for >= MISSING_SECONDS:
            yield from self._missing.see(self.missing(), now)

    def last_news(self, *, is_fleet: bool) -> Iterator[str]:
        """Yield a line for each notice that a short run has not told: it may have ended before the look for them."""
        if is_fleet and not self.disk.edited(self.code):
            # Such a run is not sure that they will not read their files anew.
            others = sorted(self.executor.workers.with_other_code(0.0))
            yield from self._untold(Notice(kind=Kind.CODE, text=text) for text in others)
        deleted = (Notice(kind=Kind.DELETIONS, text=str(text)) for text in self.study.deletions(at_end=True))
        yield from self._untold(deleted)
        yield from self._untold(Notice(kind=Kind.SEARCH, text=text) for text in self.scheduler.notices())

    def present(self) -> Iterator[Notice]:
        """Yield the present notices of failures, classes and code."""
        yield from (Notice(kind=Kind.FLEET, text=text) for text in self.executor.notices())
        yield from (Notice(kind=Kind.DELETIONS, text=str(text)) for text in self.study.deletions())
        yield from (Notice(kind=Kind.SEARCH, text=text) for text in self.scheduler.notices())
        if self.study.best is not None:
            shares, ended = (self.study.record.in_force or {}).get("shares"), ended_by_subspace(self.study)
            counts = {name: (of.failed, of.complete + of.pruned) for name, of in ended.items()}
            if (starved := starved_words(shares, counts)) is not None:
                yield Notice(kind=Kind.SHARES, text=starved)
            yield from _of_failures(self.study, self.plan.limits.failures or math.inf)
        if edited := self.disk.edited(self.code):
            yield self._edited(edited)
        else:
            yield from (Notice(kind=Kind.CODE, text=text) for text in self.executor.workers.with_other_code())

    def missing(self) -> Iterator[Notice]:
        """Yield a notice for each thing that workers lack at present."""
        live = self.executor.workers.announced
        if self.embedded is not None:
            # Users who have named the workers do without the other classes.
            expected = () if self.has_named_workers else self.plan.settings.classes
            yield from _missing_here(self.embedded, expected, {worker.compute_class for worker in live.values()})
            return
        wanted = self.module, Signer.configured().fingerprint, self.code
        served: Counter[str] = Counter()
        for worker in able(live, *wanted).values():
            served[worker.compute_class] += worker.slots
        live = {name: worker for name, worker in live.items() if not worker.draining}
        first = next(iter(self.plan.settings.classes), "gpu_large")
        trouble = unable(live, *wanted, refused=self.executor.workers.refused, compute_class=first)
        if trouble is not None and not self.disk.edited(self.code):
            yield Notice(kind=Kind.MISSING, about="able", text=str(trouble))
            if any(self.module in worker.imports for worker in live.values()):
                # They are not missing.
                return
        if served and max(served.values()) < self.widest:
            text = (
                f"trials take up to {self.widest} slots of one class, and no class has as many; start more workers of "
                "one class, or with more slots"
            )
            yield Notice(kind=Kind.MISSING, about="slots", text=text)
        # A class whose workers have other modules is served; the line above is about them.
        there = {worker.compute_class for worker in live.values()}
        for name in self.plan.settings.classes:
            if name not in there:
                text = f"no worker serves the queue {name}; start one: {start_command(name, self.module)}"
                yield Notice(kind=Kind.MISSING, about=f"class {name}", text=text)

    def _silent_servers(self) -> Iterator[Notice]:
        outages = {"store": self.study.trouble, "servers": self.executor.trouble}
        for name, trouble in outages.items():
            if trouble is not None:
                yield Notice(kind=Kind.SERVERS, about=name, text=f"{trouble}; trying again")

    def _untold(self, notices: Iterator[Notice]) -> Iterator[str]:
        for notice in notices:
            if notice not in self._told:
                self._told.add(notice)
                yield str(notice)

    def _edited(self, path: str) -> Notice:
        """Return the notice that a file of the study is not any more as this run has read it."""
        then = f"stop it with Ctrl-C, and --resume {self.study.name} goes on with the new code"
        text = f"{path} was edited, no worker has its version of before, and this run waits for one: {then}"
        if self.executor.has_workers:
            text = f"{path} was edited; this run goes on with its code of before while workers have it: {then}"
        return Notice(kind=Kind.CODE, text=text)


def _of_failures(study: StudyState, most: float) -> Iterator[Notice]:
    """Yield a notice for each kind of failure that at least so many trials have had."""
    for each in study.failures.common():
        if each.trials >= most:
            # Without their number, which changes: it is said once.
            yield Notice(kind=Kind.FAILURES, text=f"{most} trials and more fail with {each.failure}")


def _missing_here(embedded: Embedded, expected: Sequence[str], live: Collection[str]) -> Iterator[Notice]:
    """Yield a notice for each class without a live worker; on one machine no other can be started by hand."""
    for name in embedded.workers:
        if name not in live:
            text = f"the embedded worker of class {name} does not answer; see its log in {embedded.directory}"
            yield Notice(kind=Kind.MISSING, about=f"class {name}", text=text)
    if missing := [name for name in expected if name not in embedded.workers]:
        slots = {**embedded.workers, **dict.fromkeys(missing, 1)}
        wanted = ",".join(f"{name}={count}" for name, count in slots.items())
        text = (
            f"STUDY['classes'] names {', '.join(missing)}, which no embedded worker serves; trials run on "
            f"{', '.join(embedded.workers)} alone, unless you give --workers {shlex.quote(wanted)}"
        )
        yield Notice(kind=Kind.MISSING, about="classes", text=text)
