"""Families of metrics of a run: its trials, the fleet as the scheduler sees it, and the throughput relative to its
upper bound.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from shadho_celery.core.trial import TrialState, turned_first
from shadho_celery.errors import ServiceError
from shadho_celery.fleet.registry import Worker
from shadho_celery.metrics.server import Collector, Family, Kept, Kind, Samples
from shadho_celery.placement.bound import throughput_bound
from shadho_celery.placement.durations import filled
from shadho_celery.session.session import Session

#: states of a study
STATES = ("running", "paused", "stopping")

#: states of trials, except LOST, because a trial whose attempt was lost waits again
TRIAL_STATES = [state for state in TrialState if state is not TrialState.LOST]

#: seconds after which the numbers of messages are read from the broker again, and the bound is computed again
QUEUES_SECONDS, BOUND_SECONDS = 5.0, 30.0


class Run:
    """One run, with values that are computed for its metrics. Any thread may read them."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.study, self.scheduler = session.study, session.scheduler
        self._began = time.monotonic()
        self._complete_before = self.study.count(TrialState.COMPLETE)
        #: number of waiting messages by class; None if the broker does not answer
        self.queues = Kept(self._queues, QUEUES_SECONDS)
        #: maximum of completed trials per second with the study's slots (`_bound`); None while it is not known
        self.bound = Kept(self._bound, BOUND_SECONDS)

    @property
    def share(self) -> float | None:
        """Completed trials of this run, divided by the number that the current bound would have allowed, or None."""
        seconds, bound = time.monotonic() - self._began, self.bound.get()
        complete = self.study.count(TrialState.COMPLETE) - self._complete_before
        return complete / (bound * seconds) if bound and seconds > 0 else None

    def workers(self) -> dict[str, list[Worker]]:
        """Return the live workers of each class."""
        found = defaultdict(list)
        for worker in self.session.executor.workers.announced.values():
            found[worker.compute_class].append(worker)
        return found

    def _queues(self) -> Mapping[str, int] | None:
        try:
            return self.session.executor.waiting_messages()
        except ServiceError:
            return None

    def _bound(self) -> float | None:
        """Return the maximum of completed trials per second, from the mean slot seconds of each subspace on each class.

        Failed and pruned trials add to the seconds, but not to the number of completed trials. Where a subspace has no
        completed trial on a class, its mean is estimated from other subspaces and classes.
        """
        timed = dict(self.study.trials.timed)
        slots = {each.name: each.share for each in self.scheduler.classes}
        done = {pair: each for pair, each in timed.items() if each.complete and each.seconds}
        means = {pair: each.slot_seconds / each.complete for pair, each in done.items()}
        if not means or not any(slots.values()):
            return None
        mix: dict[str, float] = defaultdict(float)
        for subspace, name in means:
            mix[subspace] += timed[subspace, name].complete
        try:
            return throughput_bound(filled(means, mix, slots), slots, mix).rate
        except ValueError:
            # The linear program could not be solved, because its coefficients differ too much in size.
            return None


def _optional(number: float | None) -> Samples:
    return {} if number is None else {(): number}


def _class_trials(run: Run) -> Samples:
    count, classes = run.study.count, run.study.compute_classes
    return {
        (name, state.lower()): count(state, compute_class=name)
        for name in classes
        for state in TRIAL_STATES
        if state is not TrialState.WAITING
    }


def _seconds(run: Run) -> Samples:
    found: dict[tuple[str, ...], tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for (_, name), each in dict(run.study.trials.timed).items():
        count, seconds = found[name,]
        found[name,] = count + each.ended, seconds + each.seconds
    return found


def _best(run: Run) -> Samples:
    best = run.study.best
    if best is None or best.outcome.loss is None:
        return {}
    found = run.study.trials.repeated
    return {(): turned_first(best.outcome.loss if found is None else found.mean, run.study.record.objectives)}


def _workers(run: Run) -> Samples:
    live = ((name, worker) for name, workers in run.workers().items() for worker in workers)
    return Counter((name, "draining" if worker.draining else worker.state) for name, worker in live)


FAMILIES: Sequence[Family[Run]] = [
    Family(
        "shadho_study_state",
        "1 for the state of the study: running, paused or stopping.",
        labels=("state",),
        read=lambda run: {(state,): float(state == run.scheduler.state) for state in STATES},
    ),
    Family(
        "shadho_turn_age_seconds",
        "Seconds since the last turn of the scheduler's loop; a turn takes less than a second.",
        read=lambda run: {(): time.monotonic() - run.session.turned_at},
    ),
    Family(
        "shadho_trials",
        "Number of trials by state.",
        labels=("state",),
        read=lambda run: {(state.lower(),): run.study.count(state) for state in TRIAL_STATES},
    ),
    Family(
        "shadho_trials_limit",
        "Number of trials after which the study ends.",
        read=lambda run: _optional(run.scheduler.limits.trials),
    ),
    Family(
        "shadho_class_trials",
        "Number of ended trials, and of live attempts, by compute class and state.",
        labels=("class", "state"),
        read=_class_trials,
    ),
    Family(
        "shadho_trial_seconds",
        "Seconds of ended trials, by compute class; those of earlier runs are included.",
        labels=("class",),
        kind=Kind.SUMMARY,
        read=_seconds,
    ),
    Family("shadho_best_loss", "Best loss so far; the first of several.", read=_best),
    Family(
        "shadho_lost_attempts",
        "Claimed attempts that were lost, with their workers or a rank.",
        kind=Kind.COUNTER,
        read=lambda run: {(): run.study.lost},
    ),
    Family(
        "shadho_money_spent",
        "Money that ended attempts have cost, by compute class, if workers announce prices.",
        labels=("class",),
        kind=Kind.COUNTER,
        read=lambda run: {(name,): spent for name, spent in dict(run.study.recorder.spent).items()},
    ),
    Family(
        "shadho_workers",
        "Number of live workers of the fleet, by compute class and state: serving, draining or quarantined.",
        labels=("class", "state"),
        read=_workers,
    ),
    Family(
        "shadho_slots",
        "Number of slots of the live workers, by compute class.",
        labels=("class",),
        read=lambda run: {(name,): sum(each.slots for each in found) for name, found in run.workers().items()},
    ),
    Family(
        "shadho_busy_slots",
        "Number of these slots that run a trial of any study, by compute class.",
        labels=("class",),
        read=lambda run: {(name,): sum(each.busy for each in found) for name, found in run.workers().items()},
    ),
    Family(
        "shadho_wanted_slots",
        "Number of slots that the study could use, those that it uses included, by compute class (--class-spec).",
        labels=("class",),
        read=lambda run: {(name,): slots for name, slots in dict(run.scheduler.wanted_slots).items()},
    ),
    Family(
        "shadho_queue_messages",
        "Number of messages that wait in the queue of a compute class, of all studies.",
        labels=("class",),
        read=lambda run: {(name,): count for name, count in (run.queues.get() or {}).items()},
    ),
    Family(
        "shadho_server_up",
        "1 if the store, or the servers (broker and Redis), answer.",
        labels=("server",),
        read=lambda run: {
            ("store",): float(run.study.trouble is None),
            ("servers",): float(run.session.executor.trouble is None),
        },
    ),
    Family(
        "shadho_outages",
        "Times that the store, or one of the servers, has stopped to answer.",
        labels=("server",),
        kind=Kind.COUNTER,
        read=lambda run: {(name,): count for name, count in dict(run.session.watch.outages).items()},
    ),
    Family(
        "shadho_bound_trials_per_second",
        "Completed trials per second that a linear program allows with the study's slots and mean slot seconds so far.",
        read=lambda run: _optional(run.bound.get()),
    ),
    Family(
        "shadho_bound_share",
        "Completed trials of this run, divided by those that the present bound allows in the same time.",
        read=lambda run: _optional(run.share),
    ),
]


def collector(session: Session) -> Collector[Run]:
    """Return the collector of a run's metrics."""
    return Collector(FAMILIES, Run(session), {"study": session.study.name, "owner": session.study.recorder.owner or ""})
