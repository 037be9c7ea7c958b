"""Watch over a run on workers: what its user should know of servers, workers, code and failures."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from shadho_celery.core.trial import TrialState
from shadho_celery.embedded.embedded import Embedded
from shadho_celery.placement.shares import starved_words
from shadho_celery.results.report import ended_by_subspace
from shadho_celery.session.notices import Conditions, Kind, Notice
from shadho_celery.transport.registry import able, start_command, unable
from shadho_celery.transport.signing import Signer

if TYPE_CHECKING:
    from shadho_celery.session.session import Session

#: seconds after which a missing worker is warned of; longer than one takes to announce itself again
MISSING_SECONDS = 10.0

#: seconds between two looks for notices: each looks at every worker
LOOK_SECONDS = 1.0


class Watch:
    """Finds the notices of one run, and tells each once."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._told = set[Notice]()
        self._looked_at = -math.inf
        self._outages, self._missing = Conditions(), Conditions()

    def news(self, now: float) -> Iterator[str]:
        """Yield a line for each new notice, and for servers and workers that are in order again."""
        session = self._session
        troubles = {"store": session.study.trouble, "servers": session.executor.trouble}
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
        if session.executor.known_for >= MISSING_SECONDS:
            yield from self._missing.see(self.missing(), now)

    def last_news(self, *, is_fleet: bool) -> Iterator[str]:
        """Yield a line for each notice that a short run has not told: it may have ended before the look for them."""
        session = self._session
        if is_fleet and not session.disk.edited(session.code):
            # Such a run is not sure that they will not read their files anew.
            others = sorted(session.executor.workers.with_other_code(0.0))
            yield from self._untold(_notices({Kind.CODE: others}))
        found = {Kind.DELETIONS: session.study.deletions(at_end=True), Kind.SEARCH: session.scheduler.notices()}
        yield from self._untold(_notices(found))

    def present(self) -> list[Notice]:
        """Return the present notices of failures, classes and code."""
        session, study = self._session, self._session.study
        found: dict[Kind, Iterable[object]] = {
            Kind.FLEET: session.executor.notices(),
            Kind.DELETIONS: study.deletions(),
            Kind.SEARCH: session.scheduler.notices(),
        }
        if study.best is not None and study.count(TrialState.FAILED):
            counts = {name: (of.failed, of.complete + of.pruned) for name, of in ended_by_subspace(study).items()}
            starved = starved_words((study.record.in_force or {}).get("shares"), counts)
            found[Kind.SHARES] = [] if starved is None else [starved]
            most, failures = session.plan.limits.failures or math.inf, study.failures.common()
            # Without their number, which changes: it is said once.
            found[Kind.FAILURES] = [
                f"{most} trials and more fail with {each.failure}" for each in failures if each.trials >= most
            ]
        edited = session.disk.edited(session.code)
        found[Kind.CODE] = [self._edited(edited)] if edited else session.executor.workers.with_other_code()
        return _notices(found)

    def missing(self) -> Iterator[Notice]:
        """Yield a notice for each thing that workers lack at present."""
        session, module, classes = self._session, self._session.file.module, self._session.plan.settings.classes
        live = session.executor.workers.announced
        if session.embedded is not None:
            # Users who have named the workers do without the other classes.
            expected = () if session.options.workers else classes
            yield from _missing_here(session.embedded, expected, {worker.compute_class for worker in live.values()})
            return
        wanted = module, Signer.configured().fingerprint, session.code
        served: Counter[str] = Counter()
        for worker in able(live, *wanted).values():
            served[worker.compute_class] += worker.slots
        live = {name: worker for name, worker in live.items() if not worker.draining}
        first = next(iter(classes), "gpu_large")
        trouble = unable(live, *wanted, refused=session.executor.workers.refused, compute_class=first)
        if trouble is not None and not session.disk.edited(session.code):
            yield Notice(kind=Kind.MISSING, about="able", text=str(trouble))
            if any(module in worker.imports for worker in live.values()):
                # They are not missing.
                return
        if served and max(served.values()) < session.widest:
            text = (
                f"trials take up to {session.widest} slots of one class, and no class has as many; start more workers "
                "of one class, or with more slots"
            )
            yield Notice(kind=Kind.MISSING, about="slots", text=text)
        # A class whose workers have other modules is served; the line above is about them.
        there = {worker.compute_class for worker in live.values()}
        for name in classes:
            if name not in there:
                text = f"no worker serves the queue {name}; start one: {start_command(name, module)}"
                yield Notice(kind=Kind.MISSING, about=f"class {name}", text=text)

    def _untold(self, notices: Iterable[Notice]) -> Iterator[str]:
        for notice in notices:
            if notice not in self._told:
                self._told.add(notice)
                yield str(notice)

    def _edited(self, path: str) -> str:
        """Return the text of a notice that a file of the study is not any more as this run has read it."""
        then = f"stop it with Ctrl-C, and --resume {self._session.study.name} goes on with the new code"
        if self._session.executor.has_workers:
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
