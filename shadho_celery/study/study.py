"""The state of one search, kept in step with its store.

A study takes events in any order and any number of times; a trial gets at most one result. What changed since the last
`commit` is written by it in one transaction.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from heapq import merge

from msgspec.structs import replace

from shadho_celery.core.attempts import Attempts
from shadho_celery.core.clock import Clock, SystemClock
from shadho_celery.core.trial import (
    WELL,
    Attempt,
    Event,
    Lost,
    Outcome,
    Params,
    Report,
    Result,
    Started,
    Trial,
    TrialState,
)
from shadho_celery.store.base import Store, StudyRecord
from shadho_celery.study.trials import Counts, FinishedTrials

#: claimed attempts of one trial that may be lost before it is FAILED
MAX_LOST = 3

#: seconds after which the lock is renewed although nothing has changed
RENEW_SECONDS = 5.0

_S = TrialState


class Study:
    """One search, and everything known about it. Open one with `open_study`."""

    def __init__(
        self,
        store: Store,
        record: StudyRecord,
        fence: int,
        trials: Iterable[Trial] = (),
        clock: Clock | None = None,
    ) -> None:
        """`trials` are those of earlier runs, in the order of their numbers."""
        self.store = store
        self.record = record
        self.clock = clock or SystemClock()
        #: copies sent in this run, and trials that a copy has ended
        self.copied = self.rescued = 0
        #: trials that have not finished, by number
        self._open: dict[int, Trial] = {}
        self._live: Attempts[Attempt] = Attempts()
        #: trials of which an attempt has ended badly while another one lived
        self._suspects: set[int] = set()
        self._waiting: deque[int] = deque()
        #: waiting trials by subspace and slots
        self._waiting_slots: Counter[tuple[str, int]] = Counter()
        self._counts = Counts()
        self._taken: Counter[str | None] = Counter()
        self._asked: Counter[str] = Counter()
        self._classes: set[str] = set()
        self._fence = fence
        self._new: set[int] = set()
        self._changed: set[int] = set()
        self._reports: list[Report] = []
        self._written_at = self.clock.now()
        #: finished trials in the order in which their results came
        self.trials = FinishedTrials(trial for trial in trials if self._reopened(trial))

    @property
    def name(self) -> str:
        """Name of the study in its store."""
        return self.record.name

    # Its trials

    def __len__(self) -> int:
        """Trials asked for so far."""
        return len(self._open) + len(self.trials)

    def __iter__(self) -> Iterator[Trial]:
        """All trials in the order of their numbers, finished or not."""
        ended = sorted(self.trials, key=lambda trial: trial.number)
        return merge(ended, [self._open[n] for n in sorted(self._open)], key=lambda trial: trial.number)

    def trial(self, number: int) -> Trial:
        """Return the trial of that number, in whatever state. Raises KeyError where there is none."""
        found = self._open.get(number) or self.trials.get(number)
        if found is None:
            raise KeyError(number)
        return found

    def count(self, *states: TrialState, compute_class: str | None = None, subspace: str | None = None) -> int:
        """Return the trials in one of `states`; of one compute class or of one subspace where that is given.

        Of a class, every live attempt that was sent there counts: a trial with two of them counts twice.
        """
        where = {"compute_class": compute_class, "subspace": subspace}
        return self._counts.count(*states, **where) + self.trials.count(*states, **where)

    def count_wider(self, slots: int, subspace: str) -> int:
        """Return the WAITING trials of a subspace that take more than so many slots."""
        return sum(n for (name, width), n in self._waiting_slots.items() if name == subspace and width > slots)

    @property
    def counted(self) -> int:
        """Trials that count against the `trials` limit."""
        return self.trials.count(_S.COMPLETE, _S.PRUNED, _S.FAILED)

    @property
    def best(self) -> Trial | None:
        """The COMPLETE trial with the least loss, of those with the highest budget."""
        return self.trials.best

    def best_of(self, subspace: str) -> float | None:
        """Return the least loss in `subspace`, at the highest budget that it was given."""
        return self.trials.best_of(subspace)

    def asked(self, subspace: str) -> int:
        """Return the trials drawn in `subspace` so far, without those that carry another one on."""
        return self._asked[subspace]

    @property
    def subspaces(self) -> list[str]:
        """Subspaces that trials were drawn in."""
        return sorted(self._asked)

    @property
    def compute_classes(self) -> list[str]:
        """Classes that trials were sent to."""
        return sorted(self._classes)

    # Its live attempts

    @property
    def in_flight(self) -> int:
        """Trials that were sent and have not ended."""
        return len(self._live)

    @property
    def sent(self) -> list[Trial]:
        """Trials that were sent and have not ended, the one sent last at the end."""
        return [self._open[number] for number in self._live.numbers]

    @property
    def attempts(self) -> Iterator[Attempt]:
        """Live attempts, copies included."""
        return iter(self._live)

    @property
    def copies(self) -> int:
        """Live attempts beside the first one of their trial."""
        return sum(len(self._live.of(number)) - 1 for number in self._live.numbers)

    @property
    def alone(self) -> Iterator[Trial]:
        """Trials that run in one slot and have no other live attempt: those that may be copied.

        Without those of which an attempt has ended badly, or workers were lost: the one that lives decides on them.
        """
        for trial in self.sent:
            is_suspect = trial.number in self._suspects or trial.lost >= MAX_LOST - 1
            if (
                trial.state is _S.RUNNING
                and trial.slots == 1
                and not is_suspect
                and len(self._live.of(trial.number)) == 1
            ):
                yield trial

    def lives(self, number: int, attempt: int) -> bool:
        """Return whether an attempt may still end its trial, as far as is known."""
        trial = self._open.get(number)
        return trial is not None and (
            attempt in self._live.of(number) or (trial.state is _S.WAITING and attempt == trial.attempt)
        )

    def taken(self, compute_class: str) -> int:
        """Return the slots of a class that live attempts take."""
        return self._taken[compute_class]

    # What happens

    def add(
        self,
        subspace: str,
        params: Params,
        seed: int,
        budget: float | None = None,
        *,
        slots: int = 1,
        rung: int | None = None,
        origin: int | None = None,
    ) -> Trial:
        """Return a new WAITING trial with the next number, which is given `budget`: None for all of the fidelity.

        `origin` is the number of the trial whose params and seed it has, where it stands on a higher `rung`.
        """
        trial = Trial(
            number=len(self),
            subspace=subspace,
            params=params,
            seed=seed,
            budget=budget,
            slots=slots,
            rung=rung,
            origin=origin,
            asked_at=self.clock.now(),
        )
        self._new.add(trial.number)
        self._asked[subspace] += origin is None
        self._put(trial)
        return trial

    def hold_back(self, trial: Trial, *, first: bool = False) -> None:
        """Have a trial wait until `next_waiting` is asked for one like it; as the `first` of those that wait."""
        if first:
            self._waiting.appendleft(trial.number)
        else:
            self._waiting.append(trial.number)

    def next_waiting(self, fits: Callable[[Trial], bool] = lambda trial: True) -> Trial | None:
        """Take the first trial that waits to be sent and `fits` off the list of those; None where there is none."""
        found, passed_over = None, []
        while self._waiting and found is None:
            trial = self._open.get(self._waiting.popleft())
            if trial is not None and trial.state is _S.WAITING:
                if fits(trial):
                    found = trial
                else:
                    passed_over.append(trial.number)
        self._waiting.extendleft(reversed(passed_over))
        return found

    def send(self, trial: Trial, compute_class: str) -> Attempt:
        """Return the trial's next attempt, which is to be sent to `compute_class`.

        Where one of its attempts runs already the new one is a copy, which may end the trial as well.
        """
        trial = trial.evolve(attempt=trial.attempt + 1)
        self.copied += bool(self._live.of(trial.number))
        attempt = trial.attempted(state=_S.QUEUED, compute_class=compute_class, host=None, started_at=None)
        self._put_attempt(attempt)
        self._note(self._shown(trial))
        return attempt

    def tell(self, event: Event) -> Trial | None:
        """Take note of `event`; return the trial as it is now, or None where the event changes nothing.

        Events may come late, twice, or for attempts that were given up: a trial that has ended stays as it is.
        """
        trial = self._open.get(event.number)
        if trial is None:
            return None
        if isinstance(event, Result):
            return self._end(trial, event)
        if isinstance(event, Lost):
            return self._lose(trial, event.attempt, event.reason, claimed=event.claimed)
        if isinstance(event, Started):
            return self._start(trial, event)
        if not self.lives(event.number, event.attempt):
            return None
        self._reports.append(event)
        return trial

    def commit(self) -> None:
        """Write all that changed, in one transaction; without changes only the lock is renewed, now and then.

        Raises LockLost where another scheduler has taken the study over, StoreError where the store fails.
        """
        now = self.clock.now()
        if not (self._new or self._changed or self._reports) and now - self._written_at < RENEW_SECONDS:
            return
        self.store.write(
            self.record.key,
            self._fence,
            now,
            new=[self.trial(number) for number in sorted(self._new)],
            changed=[self.trial(number) for number in sorted(self._changed - self._new)],
            reported=self._reports,
        )
        self._new.clear()
        self._changed.clear()
        self._reports.clear()
        self._written_at = now

    def close(self) -> None:
        """Write what is left and give the study back."""
        self.commit()
        self.store.unlock(self.record.key, self._fence)

    def _start(self, trial: Trial, event: Started) -> Trial | None:
        attempt = self._live.find(event.number, event.attempt)
        if attempt is None or attempt.state is not _S.QUEUED:
            return None
        running = attempt.evolve(state=_S.RUNNING, started_at=event.at, host=event.host, worker=event.worker)
        self._put_attempt(running)
        return self._note(self._shown(trial))

    def _end(self, trial: Trial, result: Result) -> Trial | None:
        """Decide whether a result ends its trial, or only its attempt: the one place that does."""
        if result.retry is not None:
            return self._lose(trial, result.attempt, result.retry.reason, outgrown=result.retry.outgrown)
        live = dict(self._live.of(trial.number))
        if self._live.settle(trial.number, result.attempt, well=result.outcome.state in WELL):
            self.rescued += result.attempt in live and result.attempt != min(live)
            return self._finish(trial, result, live)
        self._uncount(live[result.attempt])
        self._suspects.add(trial.number)
        return self._note(self._shown(trial))

    def _lose(
        self, trial: Trial, attempt: int, reason: str, *, claimed: bool = False, outgrown: str | None = None
    ) -> Trial | None:
        """Take away an attempt that will not end its trial; the last one returns it to WAITING, or fails it."""
        lost = self._live.find(trial.number, attempt)
        if lost is None:
            return None
        self._uncount(lost)
        too_small = ",".join(name for name in (trial.outgrown, outgrown) if name) or None
        trial = replace(trial, lost=trial.lost + claimed, outgrown=too_small)
        if self._live.lose(trial.number, attempt):
            return self._note(self._shown(trial))
        trial = trial.evolve(state=_S.LOST)
        if trial.lost >= MAX_LOST:
            error = f"{trial.lost} attempts were lost; the last one: {reason}"
            failed = Outcome(state=_S.FAILED, error=error)
            return self._note(trial.evolve(state=_S.FAILED, outcome=failed, finished_at=self.clock.now()))
        self.hold_back(trial)
        return self._note(trial.evolve(state=_S.WAITING))

    def _finish(self, trial: Trial, result: Result, live: dict[int, Attempt]) -> Trial:
        """End a trial by a result; `live` were its attempts until now."""
        for attempt in live.values():
            self._uncount(attempt)
        seen = live.get(result.attempt, trial)
        return self._note(
            trial.evolve(
                state=result.outcome.state,
                outcome=result.outcome,
                host=result.host or seen.host,
                compute_class=result.compute_class or seen.compute_class,
                started_at=seen.started_at or result.at - (result.outcome.seconds or 0.0),
                finished_at=result.at,
            )
        )

    def _shown(self, trial: Trial) -> Trial:
        """Return a trial as it looks in the oldest of its live attempts."""
        live = self._live.of(trial.number)
        oldest = live[min(live)]
        # Not `evolve`: where it seems to go back from RUNNING to QUEUED another attempt is shown, and none went back.
        return replace(
            trial,
            state=oldest.state,
            compute_class=oldest.compute_class,
            host=oldest.host,
            started_at=oldest.started_at,
        )

    def _note(self, trial: Trial) -> Trial:
        """Make `trial` the current version of itself, which `commit` will write."""
        live = self._live.of(trial.number)
        kept = None if live.keys() <= {trial.attempt} else tuple(live.values())
        if kept != trial.live:
            trial = replace(trial, live=kept)
        self._put(trial)
        self._changed.add(trial.number)
        return trial

    def _put(self, trial: Trial) -> None:
        before = self._open.pop(trial.number, None)
        if before is not None:
            self._count_open(before, -1)
        if trial.state.is_finished:
            self.trials.add(trial)
        else:
            self._open[trial.number] = trial
            self._count_open(trial, +1)

    def _count_open(self, trial: Trial, by: int) -> None:
        self._counts.add(trial, by)
        if trial.state is _S.WAITING:
            self._waiting_slots[trial.subspace, trial.slots] += by

    def _put_attempt(self, attempt: Attempt) -> None:
        before = self._live.find(attempt.number, attempt.attempt)
        if before is not None:
            self._uncount(before)
        self._live.put(attempt.number, attempt.attempt, attempt)
        self._counts.add_placed(attempt)
        self._taken[attempt.compute_class] += attempt.slots
        self._classes.add(str(attempt.compute_class))

    def _uncount(self, attempt: Attempt) -> None:
        self._counts.add_placed(attempt, -1)
        self._taken[attempt.compute_class] -= attempt.slots

    def _reopened(self, trial: Trial) -> bool:
        """Take up a trial of an earlier run; return whether it has finished."""
        self._asked[trial.subspace] += trial.origin is None
        if trial.compute_class is not None:
            self._classes.add(trial.compute_class)
        if trial.state.is_finished:
            return True
        self._put(trial)
        if trial.state is _S.WAITING:
            # Its attempt was lost or taken back, or the scheduler was stopped before it was sent.
            self.hold_back(trial)
        else:
            for attempt in trial.live or [trial.attempted(state=trial.state)]:
                self._put_attempt(attempt)
        return False
