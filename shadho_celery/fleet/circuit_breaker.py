"""Circuit breakers: distinguish failures of workers from failures of trials, and quarantine workers.

A machine with a broken driver or a missing library fails each trial at once, and is then free for the next one. Without
a circuit breaker it would take most trials of a study (a black hole). If only one worker has had a kind of failure, the
trial is tried again on another worker. If the trial succeeds there, the failure counts against the first worker. If it
fails in the same way, failures of this kind count as caused by the trials from then on, on every worker. An error in
the study's own code therefore costs one additional run for each kind of failure.

The strikes in Redis (`fleet.channel`) open a breaker at once. Later the scheduler decides whether to close the breaker,
to half-open it (allow one more trial), or to quarantine the worker.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Set
from functools import partial

from msgspec.structs import replace

from shadho_celery.core.checks import one_line
from shadho_celery.core.failures import headline, read_failure
from shadho_celery.core.trial import Result, Retry, TrialState
from shadho_celery.fleet.channel import Quarantine

#: a worker is quarantined after this many failures of trials that succeeded on another worker: in all, or in a row
MAX_AGAINST, MAX_AGAINST_ROW = 5, 2
#: minimum share of such failures in all results of a worker, for a quarantine because of MAX_AGAINST
MIN_SHARE = 0.1
#: a worker without any success is quarantined after one failure of a trial that succeeded on another worker, once it
#: has had this many results
HOPELESS_AFTER = 2
#: a failure is accepted as the trial's result, whatever its kind, once the trial has failed on this many workers
MAX_OPINIONS = 3
#: a failure is accepted if it took longer than PATIENCE times the mean seconds of a successful trial, and longer than
#: FAST_SECONDS: black holes fail fast, but a busy machine may take a second to fail
PATIENCE, FAST_SECONDS = 3.0, 5.0
#: weight of the latest trial in the mean seconds of successful trials
DECAY = 0.2


class CircuitBreaker:
    """Decides for one study whether its trials or its workers have caused failures."""

    def __init__(self, quarantine: Quarantine) -> None:
        self._quarantine = quarantine
        #: pending calls that record decisions in Redis; they are repeated until Redis answers
        self.pending_calls: list[Callable[[], object]] = []
        #: quarantined workers
        self.quarantined: set[str] = set()
        #: warnings for the operator
        self.notices: list[str] = []
        #: worker -> its machine, and the error of its last failure that no other worker has had
        self._errors: dict[str, tuple[str, str]] = {}
        #: kind of failure -> workers that have had it
        self._had: defaultdict[str, set[str]] = defaultdict(set)
        #: kinds of failures that are caused by the trials
        self._known: set[str] = set()
        #: number of a trial whose failure is undecided, because another worker should try it -> worker and kind of each
        #: of its failures
        self._doubted: dict[int, list[tuple[str, str]]] = {}
        #: worker -> number of its failures of trials that succeeded on another worker: in all, and since its last
        #: success
        self._against: Counter[str] = Counter()
        self._row: Counter[str] = Counter()
        #: worker -> number of its results, and of its successes
        self._ended: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        #: mean seconds of a successful trial; 0 before the first
        self._seconds = 0.0

    def judge(self, result: Result, able: Set[str]) -> Result:
        """Return `result`, with a request for a retry (`retry`) if another one of the `able` workers should try the
        trial.
        """
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
        """Close the breakers of the given workers that have no undecided failure. If each of them has an undecided
        failure, close all their breakers.

        Call this if no other worker is left to try the failed trials.
        """
        workers = {*workers}
        self.pending_calls += [partial(self._quarantine.close, worker) for worker in self._cleared(workers) or workers]

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
        # The breakers of workers with other undecided failures do not change.
        self.pending_calls += [partial(self._quarantine.half_open, worker) for worker in self._cleared(guilty)]
        self.pending_calls += [partial(self._quarantine.quarantine, worker) for worker in black_holes]
        self.notices += [self._notice(worker) for worker in black_holes]

    def _is_believed(self, result: Result, able: Set[str]) -> bool:
        """Record a failure. Return whether it is accepted as the trial's result. Otherwise another worker should try
        the trial.
        """
        kind = read_failure(result.outcome.error).cause
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
            # A worker that has finished nothing and has undecided failures of its own may itself be broken, so do not
            # ask it.
            others -= {worker for worker in self._suspects() if not self._finished[worker]}
        is_slow = bool(self._seconds) and (result.outcome.seconds or 0.0) > max(PATIENCE * self._seconds, FAST_SECONDS)
        is_asked = bool(others) and not has_returned and len(failures) < MAX_OPINIONS
        if is_asked and not is_slow and kind not in self._known:
            self._doubted[result.number] = failures
            self._errors[result.worker] = (result.host or "an unknown machine", (result.outcome.error or "").strip())
            return False
        self._doubted.pop(result.number, None)
        # Close the breaker of a single worker, so that it continues. Once another worker has joined, the other worker
        # tries the next trial with this failure.
        unexplained = set() if is_alone else {worker for worker, how in failures if how not in self._known}
        cleared = self._cleared(worker for worker, _ in failures)
        known = kind if kind in self._known else None
        self.pending_calls += [partial(self._quarantine.close, worker, known) for worker in cleared - unexplained]
        self.pending_calls += [partial(self._quarantine.half_open, worker) for worker in cleared & unexplained]
        return True

    def _is_black_hole(self, worker: str) -> bool:
        against, ended = self._against[worker], self._ended[worker]
        if not self._finished[worker]:
            return against > 0 and ended >= HOPELESS_AFTER
        return self._row[worker] >= MAX_AGAINST_ROW or against >= max(MAX_AGAINST, MIN_SHARE * ended)

    def _cleared(self, workers: Iterable[str]) -> set[str]:
        """Return the given workers that have no undecided failure and are not quarantined."""
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
