"""The state of a search: its trials, and what they add up to, kept in step with its store.

A study takes events in any order and any number of times; a trial gets at most one result. What changed since the last
`commit` is written by it in one transaction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from shadho_celery.attempts import Attempts
from shadho_celery.clock import Clock, SystemClock
from shadho_celery.ledger import Ledger
from shadho_celery.store import StudyRecord
from shadho_celery.tally import Tally
from shadho_celery.trial import WELL, Event, Lost, Report, Result, Started, Trial, TrialState

#: claimed attempts of one trial that may be lost before it is FAILED
MAX_LOST = 3

_S = TrialState


class Study(Tally):
    """One search, and everything known about it. Open one with `open_study`."""

    def __init__(
        self,
        store: Ledger,
        record: StudyRecord,
        fence: int,
        trials: Iterable[Trial] = (),
        clock: Clock | None = None,
    ) -> None:
        super().__init__()
        self.store = store
        self.record = record
        self.clock = clock or SystemClock()
        #: copies sent in this run, and trials that a copy has ended
        self.copied = self.rescued = 0
        self._attempts = Attempts()
        self._waiting: deque[int] = deque()
        self._fence = fence
        self._new: set[int] = set()
        self._changed: set[int] = set()
        self._reports: list[Report] = []
        self._written_at = self.clock.now()
        for trial in trials:
            self._attempts.take_up(trial)
            self._put(trial, self._attempts.beside(trial))
            if trial.state is _S.WAITING:
                # Its attempt was lost or taken back, or the scheduler was stopped before it was sent.
                self.hold_back(trial)
        self.trials.sort(key=lambda trial: trial.finished_at or 0.0)

    @property
    def name(self) -> str:
        return self.record.name

    # Live attempts

    @property
    def attempts(self) -> Iterator[Trial]:
        """Trials as they look in each live attempt, copies included."""
        for trial in self._sent.values():
            yield from self._attempts.of(trial).values()

    @property
    def alone(self) -> Iterator[Trial]:
        """Trials that run in one slot and have no other live attempt: those that may be copied.

        Without those of which an attempt has ended badly, or workers were lost: the one that lives decides on them.
        """
        for trial in self._sent.values():
            is_suspect = trial.lost >= MAX_LOST - 1 or not self._attempts.may_add(trial)
            if trial.state is _S.RUNNING and trial.slots == 1 and not is_suspect:
                yield trial

    def lives(self, number: int, attempt: int) -> bool:
        """Whether an attempt may still end its trial, as far as is known."""
        trial = self._by_number[number]
        return attempt in self._attempts.of(trial) and not trial.state.is_finished

    # What happens

    def add(
        self,
        subspace: str,
        params: Mapping[str, Any],
        seed: int,
        budget: float | None = None,
        *,
        slots: int = 1,
        rung: int | None = None,
        origin: int | None = None,
    ) -> Trial:
        """A new WAITING trial with the next number, which is given `budget`: None for all of the fidelity.

        `origin` is the number of the trial whose params and seed it has, where it stands on a higher `rung`.
        """
        trial = Trial(
            number=len(self._by_number),
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
        self._put(trial)
        return trial

    def hold_back(self, trial: Trial, *, first: bool = False) -> None:
        """Have a new trial wait until `next_waiting` is asked for one like it; as the `first` of those that wait."""
        if first:
            self._waiting.appendleft(trial.number)
        else:
            self._waiting.append(trial.number)

    def next_waiting(self, fits: Callable[[Trial], bool] = lambda trial: True) -> Trial | None:
        """The first trial that waits to be sent and `fits`, taken off the list of those; None where there is none."""
        found, passed_over = None, []
        while self._waiting and found is None:
            trial = self._by_number[self._waiting.popleft()]
            if trial.state is _S.WAITING:
                if fits(trial):
                    found = trial
                else:
                    passed_over.append(trial.number)
        self._waiting.extendleft(reversed(passed_over))
        return found

    def queue(self, trial: Trial, compute_class: str) -> Trial:
        """The trial as it is sent to `compute_class` under its next attempt number."""
        return self._change(trial, state=_S.QUEUED, attempt=trial.attempt + 1, compute_class=compute_class)

    def copy(self, trial: Trial, compute_class: str) -> Trial:
        """The trial as it is sent to `compute_class` once more, as another attempt beside the one that runs.

        The first attempt to end well ends the trial; one that does not, while another lives, is taken away only.
        """
        attempt = self._attempts.add(trial, compute_class)
        self.copied += 1
        self._change(trial, attempt=attempt.attempt)
        return attempt

    def tell(self, event: Event) -> Trial | None:
        """Take note of `event`; the trial as it is now, or None where the event changes nothing.

        Events may come late, twice, or for attempts that were given up: a trial that has ended stays as it is.
        """
        trial = self._by_number.get(event.number)
        if trial is None or trial.state.is_finished:
            return None
        alive = self._attempts.of(trial)
        if isinstance(event, Result):
            if event.state in WELL or len(alive) == 1 or event.attempt not in alive:
                return self._finish(trial, event)
            self._attempts.suspect(trial)
            event = Lost(number=event.number, attempt=event.attempt, reason=str(event.error), claimed=False)
        if event.attempt not in alive:
            return None
        if isinstance(event, Started):
            return self._start(trial, alive[event.attempt], event)
        if isinstance(event, Lost):
            return self._lose(trial, event)
        self._reports.append(event)
        return trial

    def commit(self) -> None:
        """Write all that changed, in one transaction; without changes only the lock is renewed, now and then.

        Raises LockLost where another scheduler has taken the study over, StoreError where the store fails.
        """
        now = self.clock.now()
        if not (self._new or self._changed or self._reports) and now - self._written_at < 5.0:
            return
        self.store.write(
            self.record.key,
            self._fence,
            now,
            new=[self._by_number[number] for number in sorted(self._new)],
            changed=[self._by_number[number] for number in sorted(self._changed - self._new)],
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

    def _start(self, trial: Trial, attempt: Trial, event: Started) -> Trial | None:
        if attempt.state is not _S.QUEUED:
            return None
        running = attempt.evolve(state=_S.RUNNING, started_at=event.at, host=event.host)
        return self._note(self._attempts.change(trial, running))

    def _lose(self, trial: Trial, event: Lost) -> Trial | None:
        if trial.state is _S.WAITING:
            return None
        outgrown = ",".join(name for name in (trial.outgrown, event.outgrown) if name) or None
        trial = replace(trial, lost=trial.lost + event.claimed, outgrown=outgrown)
        if self._attempts.lose(trial, event.attempt):
            return self._note(self._attempts.shown(trial))
        lost = self._change(trial, state=_S.LOST)
        if lost.lost >= MAX_LOST:
            reason = f"{lost.lost} attempts were lost; the last one: {event.reason}"
            return self._change(lost, state=_S.FAILED, error=reason, finished_at=self.clock.now())
        self.hold_back(lost)
        return self._change(lost, state=_S.WAITING)

    def _finish(self, trial: Trial, result: Result) -> Trial:
        seen = self._attempts.of(trial).get(result.attempt, trial)
        self.rescued += self._attempts.is_copy(trial, result.attempt)
        self._attempts.end(trial)
        return self._change(
            trial,
            state=result.state,
            loss=result.loss,
            metrics=result.metrics,
            error=result.error,
            host=result.host or seen.host,
            compute_class=result.compute_class or seen.compute_class,
            started_at=seen.started_at or result.at - (result.seconds or 0.0),
            finished_at=result.at,
            seconds=result.seconds,
            memory=result.memory,
            warning=result.warning,
        )

    def _change(self, trial: Trial, **changes: Any) -> Trial:
        return self._note(trial.evolve(**changes))

    def _note(self, trial: Trial) -> Trial:
        """Make `trial` the current version of itself, which `commit` will write."""
        live = self._attempts.kept(trial)
        if live != trial.live:
            trial = replace(trial, live=live)
        self._put(trial, self._attempts.beside(trial))
        self._changed.add(trial.number)
        return trial
