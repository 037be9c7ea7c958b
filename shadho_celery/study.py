"""The state of a search: its trials, and what they add up to, kept in step with its store.

A study takes events in any order and any number of times; a trial gets at most one result. What changed since the last
`commit` is written by it in one transaction.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from shadho_celery.clock import Clock, SystemClock
from shadho_celery.store import StudyRecord
from shadho_celery.trial import WELL, Event, Lost, Report, Result, Started, Trial, TrialState

#: claimed attempts of one trial that may be lost before it is FAILED
MAX_LOST = 3

_S = TrialState


def merit(trial: Trial) -> tuple[float, float]:
    """What COMPLETE trials are ordered by, the best first: losses compare at one budget only, the highest counts."""
    return -(math.inf if trial.budget is None else trial.budget), math.inf if trial.loss is None else trial.loss


class Ledger(Protocol):
    """Where a study writes down what happens: a `Store`, or memory."""

    @property
    def safe_url(self) -> str:
        """What it is, to be shown."""

    def write(
        self,
        key: str,
        fence: int,
        now: float,
        *,
        new: Sequence[Trial],
        changed: Sequence[Trial],
        reported: Iterable[Report],
    ) -> None:
        """Record one turn of the loop, all or nothing; LockLost where `fence` is old."""

    def unlock(self, key: str, fence: int) -> None:
        """Give the study back."""


class Study:
    """One search, and everything known about it. Open one with `open_study`."""

    def __init__(
        self,
        store: Ledger,
        record: StudyRecord,
        fence: int,
        trials: Iterable[Trial] = (),
        clock: Clock | None = None,
    ) -> None:
        self.store = store
        self.record = record
        self.clock = clock or SystemClock()
        #: finished trials in the order in which their results came
        self.trials: list[Trial] = []
        #: the COMPLETE trial with the least loss, of those with the highest budget
        self.best: Trial | None = None
        self._fence = fence
        self._by_number: dict[int, Trial] = {}
        self._new: set[int] = set()
        self._changed: set[int] = set()
        self._reports: list[Report] = []
        self._waiting: deque[int] = deque()
        self._sent: dict[int, Trial] = {}
        #: of trials that were copied, how the trial looks in each of its live attempts: attempt -> trial
        self._attempts: dict[int, dict[int, Trial]] = {}
        #: those of them that the trial itself does not show
        self._copies: dict[int, list[Trial]] = {}
        #: those of them of which an attempt has failed
        self._suspects: set[int] = set()
        #: copies sent in this run, and trials that a copy has ended
        self.copied = self.rescued = 0
        self._by_state: Counter[TrialState] = Counter()
        self._by_class: Counter[tuple[str | None, TrialState]] = Counter()
        #: slots that its trials in flight take, by class
        self._taken: Counter[str | None] = Counter()
        self._by_subspace: Counter[tuple[str, TrialState]] = Counter()
        self._asked: Counter[str] = Counter()
        self._best_of: dict[str, Trial] = {}
        self._written_at = self.clock.now()
        for trial in trials:
            self._put(trial)
            if trial.state is _S.WAITING and not trial.attempt:
                # Recorded, and the scheduler was stopped before it was sent.
                self._waiting.append(trial.number)
        self.trials.sort(key=lambda trial: trial.finished_at or 0.0)

    # What is known

    @property
    def name(self) -> str:
        return self.record.name

    def trial(self, number: int) -> Trial:
        """The trial of that number, in whatever state; KeyError where there is none."""
        return self._by_number[number]

    def __len__(self) -> int:
        """Trials asked for so far."""
        return len(self._by_number)

    def __iter__(self) -> Iterator[Trial]:
        """All trials in the order of their numbers, finished or not."""
        return iter(self._by_number.values())

    def count(self, *states: TrialState, compute_class: str | None = None, subspace: str | None = None) -> int:
        """Trials in one of `states`; of one compute class or of one subspace where that is given.

        Of a class, every live attempt that was sent there counts.
        """
        if compute_class is not None:
            return sum(self._by_class[compute_class, state] for state in states)
        if subspace is not None:
            return sum(self._by_subspace[subspace, state] for state in states)
        return sum(self._by_state[state] for state in states)

    @property
    def counted(self) -> int:
        """Trials that count against the `trials` limit."""
        return self.count(_S.COMPLETE, _S.PRUNED, _S.FAILED)

    @property
    def in_flight(self) -> int:
        """Trials that were sent and have not ended."""
        return len(self._sent)

    @property
    def sent(self) -> list[Trial]:
        """Trials that were sent and have not ended, the one sent last at the end."""
        return list(self._sent.values())

    def taken(self, compute_class: str) -> int:
        """Slots of a class that its trials in flight take."""
        return self._taken[compute_class]

    @property
    def attempts(self) -> Iterator[Trial]:
        """Trials as they look in each live attempt, copies included."""
        for number, trial in self._sent.items():
            if number in self._attempts:
                yield from self._attempts[number].values()
            else:
                yield trial

    @property
    def alone(self) -> Iterator[Trial]:
        """Trials that run in one slot and have no other live attempt: those that may be copied.

        Without those of which an attempt has ended badly, or workers were lost: the one that lives decides on them.
        """
        for trial in self._sent.values():
            is_suspect = trial.number in self._suspects or trial.lost >= MAX_LOST - 1
            if trial.state is _S.RUNNING and trial.slots == 1 and trial.number not in self._copies and not is_suspect:
                yield trial

    @property
    def copies(self) -> int:
        """Live attempts beside the first one of their trial."""
        return sum(map(len, self._copies.values()))

    def lives(self, number: int, attempt: int) -> bool:
        """Whether an attempt may still end its trial, as far as is known."""
        trial = self._by_number[number]
        return attempt in self._attempts.get(number, (trial.attempt,)) and not trial.state.is_finished

    @property
    def compute_classes(self) -> list[str]:
        """Classes that trials were sent to."""
        return sorted({name for name, _ in self._by_class if name is not None})

    @property
    def subspaces(self) -> list[str]:
        """Subspaces that trials were drawn in."""
        return sorted(self._asked)

    def asked(self, subspace: str) -> int:
        """Trials drawn in `subspace` so far, cancelled ones included; those that carry another on were not drawn."""
        return self._asked[subspace]

    def best_of(self, subspace: str) -> float | None:
        """The least loss in `subspace`, at the highest budget that it was given."""
        best = self._best_of.get(subspace)
        return None if best is None else best.loss

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
        attempt = trial.attempt + 1
        another = replace(
            trial, state=_S.QUEUED, attempt=attempt, compute_class=compute_class, host=None, started_at=None
        )
        self._attempts.setdefault(trial.number, {trial.attempt: trial})[attempt] = another
        self.copied += 1
        self._change(trial, attempt=attempt)
        return another

    def tell(self, event: Event) -> Trial | None:
        """Take note of `event`; the trial as it is now, or None where the event changes nothing.

        Events may come late, twice, or for attempts that were given up: a trial that has ended stays as it is.
        """
        trial = self._by_number.get(event.number)
        if trial is None or trial.state.is_finished:
            return None
        alive = self._attempts.get(event.number, {trial.attempt: trial})
        if isinstance(event, Result):
            if event.state in WELL or len(alive) == 1 or event.attempt not in alive:
                return self._finish(trial, event)
            self._suspects.add(event.number)
            event = Lost(number=event.number, attempt=event.attempt, reason=str(event.error), claimed=False)
        if event.attempt not in alive:
            return None
        if isinstance(event, Started):
            return self._start(trial, event)
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

    def _start(self, trial: Trial, event: Started) -> Trial | None:
        alive = self._attempts.get(trial.number)
        if alive is not None and (attempt := alive[event.attempt]).state is _S.QUEUED:
            alive[event.attempt] = replace(attempt, state=_S.RUNNING, started_at=event.at, host=event.host)
            return self._show(trial, alive)
        if alive is not None or trial.state is not _S.QUEUED:
            return None
        return self._change(trial, state=_S.RUNNING, started_at=event.at, host=event.host)

    def _lose(self, trial: Trial, event: Lost) -> Trial | None:
        if trial.state is _S.WAITING:
            return None
        facts: dict[str, Any] = {
            "lost": trial.lost + event.claimed,
            "outgrown": ",".join(name for name in (trial.outgrown, event.outgrown) if name) or None,
        }
        alive = self._attempts.get(trial.number, {event.attempt: trial})
        del alive[event.attempt]
        if alive:
            return self._show(trial, alive, **facts)
        self._attempts.pop(trial.number, None)
        lost = self._change(trial, state=_S.LOST, **facts)
        if lost.lost >= MAX_LOST:
            reason = f"{lost.lost} attempts were lost; the last one: {event.reason}"
            return self._change(lost, state=_S.FAILED, error=reason, finished_at=self.clock.now())
        return self._change(lost, state=_S.WAITING)

    def _show(self, trial: Trial, alive: Mapping[int, Trial], **facts: Any) -> Trial:
        """The trial as it looks in the oldest of its live attempts."""
        oldest = alive[min(alive)]
        names = ("state", "compute_class", "host", "started_at")
        # Not `evolve`: where it seems to go back from RUNNING to QUEUED another attempt is shown, and none went back.
        shown = replace(trial, **{name: getattr(oldest, name) for name in names}, **facts)
        self._put(shown)
        self._changed.add(shown.number)
        return shown

    def _finish(self, trial: Trial, result: Result) -> Trial:
        alive = self._attempts.pop(trial.number, {})
        seen = alive.get(result.attempt, trial)
        self.rescued += bool(alive) and result.attempt != min(alive)
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
        changed = trial.evolve(**changes)
        self._put(changed)
        self._changed.add(changed.number)
        return changed

    def _put(self, trial: Trial) -> None:
        """Make `trial` the current version of itself and keep every sum right."""
        before = self._by_number.get(trial.number)
        self._by_number[trial.number] = trial
        if before is None:
            self._asked[trial.subspace] += trial.origin is None
        else:
            self._tally(before, -1)
        self._tally(trial, +1)
        if self._attempts or self._copies:
            self._tally_copies(trial)
        if trial.state in (_S.QUEUED, _S.RUNNING):
            self._sent[trial.number] = trial
        else:
            self._sent.pop(trial.number, None)
        if trial.state is _S.WAITING and trial.attempt:
            self._waiting.append(trial.number)
        if trial.state.is_finished:
            self.trials.append(trial)
        if trial.state is _S.COMPLETE and trial.loss is not None:
            of_it = self._best_of.get(trial.subspace)
            if of_it is None or merit(trial) < merit(of_it):
                self._best_of[trial.subspace] = trial
            if self.best is None or merit(trial) < merit(self.best):
                self.best = trial

    def _tally(self, trial: Trial, by: int) -> None:
        self._by_state[trial.state] += by
        self._by_subspace[trial.subspace, trial.state] += by
        self._tally_slots(trial, by)

    def _tally_slots(self, trial: Trial, by: int) -> None:
        self._by_class[trial.compute_class, trial.state] += by
        if trial.state in (_S.QUEUED, _S.RUNNING):
            self._taken[trial.compute_class] += by * trial.slots

    def _tally_copies(self, trial: Trial) -> None:
        """Count the attempts of a trial that it does not show, which take slots of their classes as well."""
        for copy in self._copies.pop(trial.number, ()):
            self._tally_slots(copy, -1)
        alive = self._attempts.get(trial.number, {})
        if len(alive) > 1:
            self._copies[trial.number] = [alive[attempt] for attempt in sorted(alive)[1:]]
            for copy in self._copies[trial.number]:
                self._tally_slots(copy, +1)
