"""Circuit breakers: distinguish failures of workers from failures of trials, and quarantine workers.

A machine with a broken driver or a missing library fails its trials at once and is free again at once. Without a
circuit breaker it would take most trials of a study (a black hole). If only one worker has had a kind of failure, the
trial is tried again on another worker. If it succeeds there, the failure counts against the first worker. If it fails
in the same way, failures of this kind count as caused by the trials from then on, on every worker. If a study's own
code fails, each kind of failure therefore costs one additional run.

The strikes in Redis (`fleet.channel`) open a breaker at once. Later the scheduler decides: it closes the breaker,
half-opens it (one more trial), or quarantines the worker.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Set
from functools import partial

from msgspec.structs import replace

from shadho_celery.core.checks import one_line
from shadho_celery.core.failures import cause_of, headline
from shadho_celery.core.trial import Result, Retry, TrialState
from shadho_celery.fleet.channel import Quarantine

#: numbers of failures after which a worker is quarantined, if the trials succeeded on another worker: in all, and in a
#: row
MAX_AGAINST, MAX_AGAINST_ROW = 5, 2
#: minimum share of such failures in all results of a worker for its quarantine by their total
MIN_SHARE = 0.1
#: number of results after which one such failure is enough for a worker that has had no success
HOPELESS_AFTER = 2
#: number of workers on which a trial may fail before its failure is accepted in any case
MAX_OPINIONS = 3
#: a failure is accepted if it took longer than both this times the mean seconds of a successful trial and this many
#: seconds: black holes fail fast, but a busy machine may take a second to fail
PATIENCE, FAST_SECONDS = 3.0, 5.0
#: weight of the latest trial in the mean seconds of successful trials
DECAY = 0.2


class CircuitBreaker:
    """Decides for one study whether failures are caused by its trials or by the workers on which they ran."""

    def __init__(self, quarantine: Quarantine) -> None:
        self._quarantine = quarantine
        #: pending calls that record decisions in Redis; they are repeated until Redis answers
        self.unsaid: list[Callable[[], object]] = []
        #: quarantined workers
        self.quarantined: set[str] = set()
        #: warnings for the operator
        self.notices: list[str] = []
        #: machine and error of a worker's last failure that no other worker has had, by worker
        self._errors: dict[str, tuple[str, str]] = {}
        #: workers that have had a kind of failure, by kind
        self._had: defaultdict[str, set[str]] = defaultdict(set)
        #: kinds of failures that are caused by the trials
        self._known: set[str] = set()
        #: worker and kind of each failure of a trial, by number of the trials whose failure is not accepted yet
        self._doubted: dict[int, list[tuple[str, str]]] = {}
        #: number of failures of trials that succeeded on another worker, by worker: in all, and since its last success
        self._against: Counter[str] = Counter()
        self._row: Counter[str] = Counter()
        #: number of results and of successes, by worker
        self._ended: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        #: mean seconds of a successful trial; 0 before the first
        self._seconds = 0.0

    def judge(self, result: Result, able: Set[str]) -> Result:
        """Return the result. If one of the other `able` workers should try the trial, the result asks for a retry."""
        outcome = result.outcome
        if outcome.state is TrialState.CANCELLED or outcome.out_of_memory or outcome.rank_lost or not result.worker:
            return result
        self._ended[result.worker] += 1
        if outcome.state is not TrialState.FAILED:
            self._note_success(result)
            return result
        if self._is_believed(result, able):
            return result
        reason = f"it failed on {result.worker}, so another worker tries it: {one_line(headline(outcome.error))}"
        return replace(result, retry=Retry(reason=reason, failed_on=result.worker))

    def release(self, workers: Iterable[str]) -> None:
        """Close the breakers of those of these workers that have no undecided failure, or else of all of them.

        Call this if no other worker can try their trials.
        """
        workers = {*workers}
        self.unsaid += [partial(self._quarantine.close, worker) for worker in self._cleared(workers) or workers]

    def _note_success(self, result: Result) -> None:
        """Count a success, and count the trial's earlier failures against the workers on which it failed."""
        self._finished[result.worker] += 1
        self._row[result.worker] = 0
        self._seconds += (DECAY if self._seconds else 1.0) * ((result.outcome.seconds or 0.0) - self._seconds)
        guilty = [worker for worker, _ in self._doubted.pop(result.number, []) if worker != result.worker]
        self._against.update(guilty)
        self._row.update(guilty)
        black_holes = {worker for worker in guilty if self._is_black_hole(worker)} - self.quarantined
        self.quarantined |= black_holes
        # Workers with other undecided failures keep their breakers as they are.
        self.unsaid += [partial(self._quarantine.half_open, worker) for worker in self._cleared(guilty)]
        self.unsaid += [partial(self._quarantine.quarantine, worker) for worker in black_holes]
        self.notices += [self._notice(worker) for worker in black_holes]

    def _is_believed(self, result: Result, able: Set[str]) -> bool:
        """Record a failure. Return True if the trial's result is this failure, and False if another worker should try
        the trial.
        """
        kind = cause_of(result.outcome.error)
        self._had[kind].add(result.worker)
        if len(self._had[kind]) > 1:
            self._known.add(kind)
        is_alone = not able - {result.worker}
        earlier = self._doubted.get(result.number, [])
        # A trial returns to the same worker only if no other worker took it.
        has_returned = result.worker in {worker for worker, _ in earlier}
        failures = [*earlier, (result.worker, kind)]
        others = able - {worker for worker, _ in failures}
        if self._finished[result.worker]:
            # The opinion of a worker that has finished nothing and is suspected itself would tell nothing.
            others -= {worker for worker in self._suspects() if not self._finished[worker]}
        is_slow = bool(self._seconds) and (result.outcome.seconds or 0.0) > max(PATIENCE * self._seconds, FAST_SECONDS)
        is_asked = bool(others) and not has_returned and len(failures) < MAX_OPINIONS
        if is_asked and not is_slow and kind not in self._known:
            self._doubted[result.number] = failures
            self._errors[result.worker] = (result.host or "an unknown machine", (result.outcome.error or "").strip())
            return False
        self._doubted.pop(result.number, None)
        # A worker that is alone goes on. Once another worker has joined, the next failure of this kind is tried there.
        unexplained = set() if is_alone else {worker for worker, how in failures if how not in self._known}
        cleared = self._cleared(worker for worker, _ in failures)
        known = kind if kind in self._known else None
        self.unsaid += [partial(self._quarantine.close, worker, known) for worker in cleared - unexplained]
        self.unsaid += [partial(self._quarantine.half_open, worker) for worker in cleared & unexplained]
        return True

    def _is_black_hole(self, worker: str) -> bool:
        against, ended = self._against[worker], self._ended[worker]
        if not self._finished[worker]:
            return against > 0 and ended >= HOPELESS_AFTER
        return self._row[worker] >= MAX_AGAINST_ROW or against >= max(MAX_AGAINST, MIN_SHARE * ended)

    def _cleared(self, workers: Iterable[str]) -> set[str]:
        """Return those of `workers` that have no undecided failure and are not quarantined."""
        return set(workers) - self._suspects() - self.quarantined

    def _suspects(self) -> set[str]:
        """Return the workers with undecided failures."""
        return {worker for failures in self._doubted.values() for worker, _ in failures}

    def _notice(self, worker: str) -> str:
        host, error = self._errors.get(worker, ("an unknown machine", ""))
        return (
            f"worker {worker} on {host} is quarantined: others finish the trials it fails; its last error: "
            f"{one_line(headline(error))}; repair that machine and restart the worker"
        )
