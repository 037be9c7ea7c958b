"""Watch over a run on workers: what its user should know of servers, workers, code and failures."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
        troubles = {"store": self.study.trouble, "servers": self.executor.trouble}
        outages = [
            Notice(kind=Kind.SERVERS, about=name, text=f"{trouble}; trying again")
            for name, trouble in troubles.items()
            if trouble is not None
        ]
        if outages or self._outages.said:
            yield from self._outages.see(outages, now)
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
            yield from self._untold(_notices({Kind.CODE: others}))
        found = {Kind.DELETIONS: self.study.deletions(at_end=True), Kind.SEARCH: self.scheduler.notices()}
        yield from self._untold(_notices(found))

    def present(self) -> list[Notice]:
        """Return the present notices of failures, classes and code."""
        found: dict[Kind, Iterable[object]] = {
            Kind.FLEET: self.executor.notices(),
            Kind.DELETIONS: self.study.deletions(),
            Kind.SEARCH: self.scheduler.notices(),
        }
        if self.study.best is not None:
            shares, ended = (self.study.record.in_force or {}).get("shares"), ended_by_subspace(self.study)
            counts = {name: (of.failed, of.complete + of.pruned) for name, of in ended.items()}
            starved = starved_words(shares, counts)
            found[Kind.SHARES] = [] if starved is None else [starved]
            most, failures = self.plan.limits.failures or math.inf, self.study.failures.common()
            # Without their number, which changes: it is said once.
            found[Kind.FAILURES] = [
                f"{most} trials and more fail with {each.failure}" for each in failures if each.trials >= most
            ]
        edited = self.disk.edited(self.code)
        found[Kind.CODE] = [self._edited(edited)] if edited else self.executor.workers.with_other_code()
        return _notices(found)

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

    def _untold(self, notices: Iterable[Notice]) -> Iterator[str]:
        for notice in notices:
            if notice not in self._told:
                self._told.add(notice)
                yield str(notice)

    def _edited(self, path: str) -> str:
        """Return the text of a notice that a file of the study is not any more as this run has read it."""
        then = f"stop it with Ctrl-C, and --resume {self.study.name} goes on with the new code"
        if self.executor.has_workers:
            return f"{path} was edited; this run goes on with its code of before while workers have it: {then}"
        return f"{path} was edited, no worker has its version of before, and this run waits for one: {then}"


def _notices(found: Mapping[Kind, Iterable[object]]) -> list[Notice]:
    return [Notice(kind=kind, text=str(text)) for kind, texts in found.items() for text in texts]


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
