"""Tells a worker that breaks trials from trials that break: what several workers have failed with is the trials' own.

A machine with a broken driver or a missing library fails its trials at once, is free again at once, and so draws the
whole study to itself (a black hole). Here a failure that only one worker has had so far is given a second opinion on
another worker. Where that one finishes the trial, the failure counts against the first worker; where it fails alike,
the failure is known, and from then on believed whoever reports it. So a study in which many trials rightly fail pays
one more run for each kind of failure, and no more.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shadho_celery.trial import Result, TrialState

#: failures of what others finished after which a worker is fenced: in all, and without a success among them
FENCE_AFTER, FENCE_ROW = 5, 2
#: and the least part of its results that the first must be
FENCE_SHARE = 0.1
#: results after which one such failure is enough for a worker that has finished nothing
HOPELESS_AFTER = 2
#: times that one trial may fail, on two workers or on one, before its failure is believed in any case
MAX_OPINIONS, MAX_FAILURES = 3, 4
#: failures that took longer than so many times a successful trial are believed: a black hole is quick
PATIENCE = 3.0

_TRACEBACK = "Traceback (most recent call last)"
_PLACE = re.compile(r'^\s+File "(?P<file>[^"]*)", line (?P<line>\d+)', re.MULTILINE)
_CHANGING = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?|'[^']*'|\"[^\"]*\"")


def signature(error: str | None) -> str:
    """What makes two failures one: the kind of exception and where it was raised, else the words without numbers."""
    text = (error or "").strip()
    # How a process died is told in the first line; what faulthandler has to say of it differs from time to time.
    places = [*_PLACE.finditer(text)] if _TRACEBACK in text else []
    if not places:
        return _CHANGING.sub("#", text.partition("\n")[0])[:200] or "no reason"
    last = places[-1]
    kind = text.splitlines()[-1].partition(":")[0]
    # Not the folder: it may differ from machine to machine.
    return f"{kind[:100]} {last['file'].rpartition('/')[2]}:{last['line']}"


def gist(error: str | None) -> str:
    """The one line of an error that tells most: the last one of a traceback, else the first."""
    lines = (error or "").strip().splitlines() or ["no reason given"]
    return lines[-1 if _TRACEBACK in (error or "") else 0]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What follows from a result."""

    #: True where the trial is to be tried elsewhere before its failure is believed
    elsewhere: bool = False
    #: a failure that is known from now on
    known: str | None = None
    #: workers that have nothing left to answer for
    absolved: frozenset[str] = frozenset()
    #: workers about which nothing was found out, and which may try one trial more
    on_probation: frozenset[str] = frozenset()
    #: workers that get no more trials
    fenced: frozenset[str] = frozenset()


BELIEVED = Verdict()


class Standing:
    """How the workers of one study do beside one another. Values in, verdicts out."""

    def __init__(self) -> None:
        #: the last failure that nobody else has had, by worker: its machine and the error
        self.errors: dict[str, tuple[str, str]] = {}
        #: by kind of failure, who has had it
        self._had: defaultdict[str, set[str]] = defaultdict(set)
        self._known: set[str] = set()
        #: by number of a trial whose failure is not believed yet, the workers it failed on and how
        self._open: dict[int, list[tuple[str, str]]] = {}
        #: failures of what others finished, in all and since a worker's last success
        self._against: Counter[str] = Counter()
        self._row: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()
        self._finished_by: Counter[str] = Counter()
        self._fenced: set[str] = set()
        #: mean seconds of a successful trial, 0 before the first
        self._seconds = 0.0

    def tell(self, result: Result, others: int) -> Verdict:
        """Judge a result, where `others` are the workers beside its own that could run the trial."""
        if result.state is TrialState.CANCELLED or result.out_of_memory or not result.worker:
            return BELIEVED
        self._ended[result.worker] += 1
        return self._failed(result, others) if result.state is TrialState.FAILED else self._finished(result)

    def _finished(self, result: Result) -> Verdict:
        self._finished_by[result.worker] += 1
        self._row[result.worker] = 0
        seconds = result.seconds or 0.0
        self._seconds += (0.2 if self._seconds else 1.0) * (seconds - self._seconds)
        failures = self._open.pop(result.number, [])
        guilty = [worker for worker, _ in failures if worker != result.worker]
        self._against.update(guilty)
        self._row.update(guilty)
        fenced = {worker for worker in guilty if self._is_black_hole(worker)} - self._fenced
        self._fenced |= fenced
        return Verdict(fenced=frozenset(fenced), on_probation=self._cleared(guilty))

    def _failed(self, result: Result, others: int) -> Verdict:
        failure = signature(result.error)
        self._had[failure].add(result.worker)
        if len(self._had[failure]) > 1 or not others:
            self._known.add(failure)
        failures = [*self._open.get(result.number, []), (result.worker, failure)]
        most = MAX_OPINIONS if len({worker for worker, _ in failures}) > 1 else MAX_FAILURES
        is_slow = bool(self._seconds) and (result.seconds or 0.0) > PATIENCE * self._seconds
        if failure in self._known or is_slow or len(failures) >= most:
            self._open.pop(result.number, None)
            return self._believed(failure, failures)
        self._open[result.number] = failures
        self.errors[result.worker] = (result.host or "an unknown machine", (result.error or "").strip())
        return Verdict(elsewhere=True)

    def _believed(self, failure: str, failures: Sequence[tuple[str, str]]) -> Verdict:
        unexplained = {worker for worker, how in failures if how not in self._known}
        cleared = self._cleared(worker for worker, _ in failures)
        return Verdict(
            known=failure if failure in self._known else None,
            absolved=cleared - unexplained,
            on_probation=cleared & unexplained,
        )

    def _is_black_hole(self, worker: str) -> bool:
        against, ended = self._against[worker], self._ended[worker]
        if not self._finished_by[worker]:
            return against > 0 and ended >= HOPELESS_AFTER
        return self._row[worker] >= FENCE_ROW or against >= max(FENCE_AFTER, FENCE_SHARE * ended)

    def _cleared(self, workers: Iterable[str]) -> frozenset[str]:
        """Those of `workers` about which no trial is left to tell, and that are not fenced."""
        suspects = {worker for failures in self._open.values() for worker, _ in failures}
        return frozenset(workers) - suspects - self._fenced
