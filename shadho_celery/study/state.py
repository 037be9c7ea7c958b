"""The state of one search (`StudyState`), which is written to a store, and the limits that end it (`Limits`).

A study accepts events in any order and any number of times. A trial gets at most one result. `commit` writes all
changes since the last commit in one transaction.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import chain
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
from msgspec import ValidationError, convert
from msgspec.structs import replace

from shadho_celery.core.attempts import Attempts, Sent, Transition
from shadho_celery.core.checks import listed
from shadho_celery.core.code import Digest
from shadho_celery.core.columns import Summary
from shadho_celery.core.records import Action, MoneyPlan
from shadho_celery.core.settings import StudySettings
from shadho_celery.core.system import Clock, SystemClock
from shadho_celery.core.trial import (
    COUNTED,
    MAX_ATTEMPTS,
    WELL,
    Attempt,
    Event,
    Losses,
    Lost,
    Outcome,
    Params,
    Report,
    Result,
    Retry,
    Started,
    Trial,
    TrialState,
    turned_first,
)
from shadho_celery.errors import SpaceError, StoreOutage, UsageError
from shadho_celery.space.schema import Suggested
from shadho_celery.space.stored import read_schema, record_values
from shadho_celery.store.base import Store, StudyRecord, Turn
from shadho_celery.study.recorder import Recorder
from shadho_celery.study.table import BLOCK, StudyTrials, collector_paused

#: number of lost claimed attempts after which a trial is FAILED
MAX_LOST = 3
#: up to this number, a trial's attempts that were lost because their machines vanished do not count as lost
MAX_VANISHED = 3

#: if this number of a trial's latest attempts ended because their machines vanished, no machine is started for it
VANISHING = 2

#: maximum number of trials that a message names
SHOWN = 10

#: maximum number of lost attempts that are kept for display
MAX_LOST_ATTEMPTS = 1000

#: seconds after which the lock is renewed although nothing has changed
RENEW_SECONDS = 5.0

#: first and longest pause in seconds between attempts to reach an unavailable store; each pause is twice the last one
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0

_S = TrialState

#: outcome of a pruned trial whose attempts were lost; its loss is filled in from its last report
_STOPPED = Outcome(state=_S.PRUNED)
#: outcome of a trial that was cancelled while no worker ran it
_UNWANTED = Outcome(state=_S.CANCELLED)
_UNCHANGED = Transition()
_T = TypeVar("_T")
_number = attrgetter("number")


@dataclass
class _Course:
    """Facts about an unfinished trial that are not in its record."""

    #: True if it was cancelled while it was in flight
    is_cancelled: bool = False
    #: True if one of its attempts has failed while another one was live
    is_suspect: bool = False
    #: number of its latest attempts in a row whose machines vanished, and the time at which the last of them was lost
    vanished: int = 0
    vanished_at: float = -math.inf
    #: number of times that a worker has given it back while it ran
    given_back: int = 0
    #: its report with the greatest step
    report: Report | None = None


class StudyState(StudyTrials):
    """State of one search: its trials, their live attempts, and numbers of both. Created by `open_study`."""

    def __init__(
        self,
        store: Store,
        record: StudyRecord,
        fence: int,
        trials: Iterable[Trial | Summary] = (),
        clock: Clock | None = None,
        *,
        first_number: int = 0,
        warm_start: Sequence[Trial] = (),
        given: Callable[[Params], str | None] | None = None,
    ) -> None:
        """`trials` are the trials of earlier runs, sorted by number. New trials get the next numbers, at least
        `first_number`.

        `given` returns the record of the values that the objective gets for params, see `Trial.given`.
        """
        super().__init__(store, record, trials, warm_start)
        self.fence = fence
        self._given = given
        #: labels that the objectives have asked for so far; None in a study with a declared space
        self.schema = read_schema(record.tree)
        #: outline of the schema from which the present space was made; and True once the schema has another outline, so
        #: that the space must be made again
        self._outline = None if self.schema is None else self.schema.outline()
        self.has_grown = False
        #: name of the study in its store
        self.name = record.name
        self.clock = clock or SystemClock()
        #: in this run: number of copies that were sent, number of trials that a copy has ended, and number of results
        #: that were refused because they are for other params than those of their trial
        self.copied = self.rescued = self.refused = 0
        #: records of attempts, workers and machines that `commit` must write
        self.recorder = Recorder(record.classes)
        #: what `commit` must write
        self._turn = Turn(choices=self.choices if self.choices != record.choices else None)
        #: decade (order of magnitude) of the seconds of the first trials, as recorded; None if it is not recorded
        self.decade = record.decade
        #: the live attempts of all trials; the executor uses this object, too
        self.live: Attempts[Sent] = Attempts()
        #: by number of an unfinished trial: facts that are not in its record
        self._courses: defaultdict[int, _Course] = defaultdict(_Course)
        self._waiting: deque[int] = deque()
        #: claimed attempts that were lost in this run, each with the reason, and True if the worker has given it back.
        #: The code that shows them to the user removes them
        self.lost_attempts: deque[tuple[Attempt, str, bool]] = deque(maxlen=MAX_LOST_ATTEMPTS)
        #: by class: number of slots that live attempts use. Every class to which attempts were ever sent has an entry
        self._taken: Counter[str] = Counter()
        #: by class and machine: number of slots of live attempts that run on the machine or must run there
        self._taken_on: defaultdict[str, Counter[str | None]] = defaultdict(Counter)
        #: by subspace and number: the unfinished trials, except promoted ones
        self._pending: defaultdict[str, dict[int, Trial]] = defaultdict(dict)
        #: by number of a trial that `commit` must write: True if it is new
        self._unwritten: dict[int, bool] = {}
        self._written_at = self.clock.now()
        #: numbers of the trials that were written again in this run, because another program had deleted them from the
        #: store
        self.rewritten: set[int] = set()
        #: the error if the store cannot be written at the moment, else None
        self.trouble: StoreOutage | None = None
        self._pause, self._retry_at = FIRST_PAUSE, -math.inf
        #: number of trials that ended COMPLETE, PRUNED or FAILED, which the limit on trials bounds
        self.counted = self.count(*COUNTED)
        #: number of the next trial. It may be greater than the number of trials, because rows may have been deleted
        self._next = max(first_number, self.trials.last_number + 1)
        self._taken.update(dict.fromkeys(self.trials.compute_classes, 0))
        for trial in self._open.values():
            self._reopen(trial)

    def next_numbers(self, count: int) -> list[int]:
        """Return the numbers of the next `count` trials that can end: the unfinished trials, then new trials."""
        waiting = sorted(self._open)[:count]
        return [*waiting, *range(self._next, self._next + count - len(waiting))]

    # Trials

    def __len__(self) -> int:
        """Return the number of trials so far."""
        return len(self._open) + len(self.trials)

    def __iter__(self) -> Iterator[Trial]:
        """Iterate over all trials by number, finished or not."""
        numbers = sorted([*self.trials.numbers, *self._open])
        for start in range(0, len(numbers), BLOCK):
            block = numbers[start : start + BLOCK]
            finished = iter(self.trials.of([number for number in block if number not in self._open]))
            yield from [self._open.get(number) or next(finished) for number in block]

    def drawn(self) -> Iterator[str]:
        """Iterate over the subspaces of the trials, in the order of their numbers. Promoted trials are left out."""
        is_open = [(trial.number, trial.subspace) for trial in self._open.values() if trial.origin is None]
        return (name for _, name in merge(self.trials.drawn(), sorted(is_open)))

    def recalled(self) -> Iterator[Trial]:
        """Iterate over all trials by number. Finished trials have only the facts that `FinishedTrials.recall` gives
        them.
        """
        finished = chain.from_iterable(block for block, _ in self._kept_locked(self.trials.recall(by_number=True)))
        return merge(finished, sorted(self._open.values(), key=_number), key=_number)

    def history(self) -> Iterator[tuple[list[Trial], Mapping[str, int]]]:
        """Iterate over blocks of finished trials like `FinishedTrials.recall`, and renew the lock before each block."""
        return self._kept_locked(self.trials.recall())

    def find_open(self, number: int) -> Trial | None:
        """Return the trial with this number if it has not finished, otherwise None."""
        return self._open.get(number)

    def trial(self, number: int) -> Trial:
        """Return the trial with this number, finished or not. Raises KeyError if there is no such trial."""
        found = self._open.get(number) or self.trials.get(number)
        if found is None:
            raise KeyError(number)
        return found

    def wider(self, slots: int) -> list[Trial]:
        """Return the WAITING trials that take more than this number of slots."""
        return [each for each in self._open.values() if each.slots > slots and each.state is _S.WAITING]

    @property
    def best(self) -> Trial | None:
        """The COMPLETE trial with the least loss among those with the highest budget; see `FinishedTrials.best`."""
        return self.trials.best

    @property
    def settled(self) -> Trial | None:
        """The best trial, with the mean of its results as its loss; None while it lacks results under other seeds."""
        best, found = self.best, self.trials.repeated
        if best is None or (found.results if found else 1) < self.trials.repeats.wanted:
            return None
        return replace(best, outcome=replace(best.outcome, loss=found.mean)) if found else best

    @property
    def repeating(self) -> Counter[int]:
        """By number of a trial: number of its repeats that have not ended."""
        return Counter(int(trial.origin or 0) for trial in self._open.values() if trial.is_repeat)

    def pending(self, subspace: str | None = None) -> Collection[Trial]:
        """Return the unfinished trials of one subspace, or of all subspaces. Promoted trials are left out."""
        if subspace is None:
            return [trial for pending in self._pending.values() for trial in pending.values()]
        return self._pending[subspace].values()

    @property
    def subspaces(self) -> list[str]:
        """Names of the subspaces that have trials, sorted."""
        return sorted(self._asked)

    @property
    def compute_classes(self) -> list[str]:
        """Names of the compute classes to which trials were sent, sorted."""
        return sorted(self._taken)

    # Live attempts

    def taken(self, compute_class: str) -> int:
        """Return the number of slots of a class that live attempts use."""
        return self._taken[compute_class]

    def taken_on(self, compute_class: str) -> Mapping[str | None, int]:
        """Return by machine the slots of a class of live attempts that run on the machine or must run there."""
        return self._taken_on[compute_class]

    @property
    def in_flight(self) -> int:
        """Number of trials that were sent and have not ended."""
        return len(self.live)

    @property
    def sent(self) -> list[Trial]:
        """Trials that were sent and have not ended, in the order in which their first live attempts were sent."""
        return [self._open[number] for number in self.live.numbers]

    @property
    def attempts(self) -> list[Attempt]:
        """The live attempts of all trials, copies included."""
        return [sent.attempt for sent in self.live]

    @property
    def copies(self) -> int:
        """Number of live copies: the live attempts except the first one of each trial."""
        return sum(len(self.live.of(number)) - 1 for number in self.live.numbers)

    @property
    def alone(self) -> list[Trial]:
        """Trials that may be copied: they run in one slot, have one live attempt, and are not being pruned.

        A trial is left out if one of its attempts has failed, or if one more lost attempt would make it FAILED.
        """
        running = [each for each in self.sent if each.state is _S.RUNNING and each.step is None and each.slots == 1]
        suspects = {number for number, course in self._courses.items() if course.is_suspect}
        sound = [each for each in running if each.number not in suspects and each.lost < MAX_LOST - 1]
        return [each for each in sound if len(self.live.of(each.number)) == 1 and each.attempt < MAX_ATTEMPTS]

    def running_since(self, trial: Trial) -> float:
        """Return the time (`Clock.now`) at which this scheduler learned that a RUNNING trial had started."""
        live = self.live.of(trial.number)
        return live[min(live)].began

    def is_current(self, number: int, attempt: int) -> bool:
        """Return whether an attempt is live, or is the last attempt of a trial that is waiting again.

        Reports of an attempt that is not current are ignored, but its late result may still end the trial.
        """
        trial = self._open.get(number)
        return trial is not None and (
            attempt in self.live.of(number) or (trial.state is _S.WAITING and attempt == trial.attempt)
        )

    def last_report(self, attempt: Attempt) -> Report | None:
        """Return the latest report of a live attempt, or None."""
        sent = self.live.find(attempt.number, attempt.attempt)
        return None if sent is None else sent.report

    def running(self) -> Mapping[str, int]:
        """Return by machine the number of slots of live attempts that run on the machine or must run there."""
        slots: Counter[str] = Counter()
        for attempt in self.attempts:
            if host := attempt.host or attempt.only_on:
                slots[host] += attempt.slots
        return slots

    # Events

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
        sampler: str | None = None,
    ) -> Trial:
        """Add a WAITING trial with the next number, and return it. A `budget` of None means that the trial is not
        limited.

        `sampler` and `origin` are as in `Trial`.
        """
        trial = Trial(
            number=self._next,
            subspace=subspace,
            params=params,
            given=self._values_of(params),
            seed=seed,
            budget=budget,
            slots=slots,
            rung=rung,
            origin=origin,
            sampler=sampler,
            asked_at=self.clock.wall(),
        )
        self._next += 1
        self._unwritten[trial.number] = True
        self._asked[subspace] += origin is None
        self._put(trial)
        return trial

    def _values_of(self, params: Params) -> str | None:
        """Return the record of the values that an objective gets for params, or None."""
        if self.schema is not None:
            return record_values(self.schema, params)
        return None if self._given is None else self._given(params)

    def use_code(self, code: Digest) -> None:
        """Set the version of the code of this run.

        The classes on which unfinished trials ran out of memory under another version are forgotten.
        """
        self.code = code
        for trial in [*self._open.values()]:
            if (known := self.current(trial)) is not trial:
                self._note(known)

    def current(self, trial: Trial) -> Trial:
        """Return a trial with only the facts from which samplers and models should learn under this version of the
        code.

        A trial that failed under another version becomes CANCELLED. What is known about its memory is removed. Losses
        and seconds are kept.
        """
        outcome = trial.outcome
        if not self.code or outcome.code in (None, self.code):
            return trial
        trial = replace(trial, outgrown=None, outgrown_memory=None)
        if trial.state is _S.FAILED:
            return replace(trial, state=_S.CANCELLED, outcome=outcome.cancelled())
        return replace(trial, outcome=outcome.without_memory())

    def note_choice(self, subspace: str, choice: str) -> None:
        """Record the text that says which sampler `auto` has chosen for a subspace, and why."""
        if self.choices.get(subspace) != choice:
            self.choices[subspace] = choice
            self._turn.choices = self.choices

    def note_decade(self, seconds: float) -> None:
        """Record the decade of the seconds of the first trials, unless it is already recorded."""
        if self.decade is None:
            self.decade = self._turn.decade = seconds

    def note_money_plan(self, plan: MoneyPlan) -> None:
        """Record the latest plan of a study that is placed by money."""
        if plan != self.record.money_plan:
            self._turn.money_plan = plan
            self.record = dataclasses.replace(self.record, money_plan=plan)

    def put_waiting(self, trial: Trial, *, first: bool = False) -> None:
        """Put a trial at the end of the queue from which `next_waiting` takes trials; at its front if `first`."""
        self._waiting.insert(0 if first else len(self._waiting), trial.number)

    def widen(self, trial: Trial, slots: int) -> Trial:
        """Set the number of slots that the scheduler has chosen for a WAITING trial. Return the changed trial."""
        return trial if trial.slots == slots else self._note(replace(trial, slots=slots))

    def next_waiting(self, fits: Callable[[Trial], bool] = lambda trial: True) -> Trial | None:
        """Remove the first trial that `fits` from the queue of waiting trials, and return it; None if no trial fits."""
        passed_over = []
        try:
            while self._waiting:
                trial = self._open.get(self._waiting.popleft())
                if trial is not None and trial.state is _S.WAITING:
                    passed_over.append(trial.number)
                    if fits(trial):
                        passed_over.pop()
                        return trial
            return None
        finally:
            # The other trials are put back even if `fits` raises an exception.
            self._waiting.extendleft(reversed(passed_over))

    def send(self, trial: Trial, compute_class: str, only_on: str | None = None, *, again: bool = False) -> Attempt:
        """Add the next attempt of a trial, for `compute_class`, and return it. It is a copy if another attempt is live.

        If `only_on` is given, only this machine may run the attempt; later attempts may run on any machine. For a copy
        it is ignored, because a copy must run on another machine than the first attempt. If `again`, workers on which
        the trial has failed may run it, too.
        """
        trial = trial.evolve(attempt=trial.attempt + 1, failed_on=() if again else trial.failed_on)
        is_copy = bool(self.live.of(trial.number))
        self.copied += is_copy
        where = {"compute_class": compute_class, "only_on": None if is_copy else only_on}
        attempt = trial.attempted(state=_S.QUEUED, host=None, started_at=None, **where)
        self._enter(attempt)
        self.recorder.queue(attempt, self.clock.wall(), is_copy=is_copy)
        self._show(trial)
        return attempt

    def tell(self, event: Event) -> Transition:
        """Apply `event`, and return what it changes.

        Events may arrive late, twice, or for attempts that were given up. An event for a finished trial changes
        nothing.
        """
        trial = self._open.get(event.number)
        if trial is None:
            return _UNCHANGED
        if isinstance(event, Result):
            return self._end(trial, event)
        if isinstance(event, Lost):
            return self._lose(trial, event, event.reason)
        if isinstance(event, Started):
            return self._start(trial, event)
        if not self.is_current(event.number, event.attempt):
            return _UNCHANGED
        self._turn.reported.append(event)
        if (sent := self.live.find(event.number, event.attempt)) is not None:
            sent.report = event
        course = self._courses[event.number]
        if course.report is None or event.step > course.report.step:
            course.report = event
        return Transition(trial=trial)

    def prune(self, number: int) -> None:
        """Mark a trial to be pruned: its `step` is set to that of its last report. It ends once its attempts are
        cancelled or lost.
        """
        trial = self._open[number]
        if trial.step is None:
            self._note(replace(trial, step=self._last_step(trial)))

    def cancel(self, number: int) -> Trial | None:
        """Cancel an unfinished trial. Return the ended trial if it was waiting, else None.

        A trial in flight becomes CANCELLED once its attempts are cancelled or lost, unless one of them ends it before.
        """
        trial = self._open[number]
        if trial.state is _S.WAITING:
            return self._end_now(trial, _UNWANTED)
        self._courses[number].is_cancelled = True
        return None

    def reshape(self, record: StudyRecord, trials: Iterable[Trial | Summary]) -> None:
        """Continue with a space that has grown, as the next run would, but with the same lock and live attempts.

        `record` has the new space. `trials` are the trials in the store, with the subspaces of the new space.
        """
        kept = self.code, self.failures, self.choices
        super().__init__(self.store, record, trials, self.warm_start)
        self.code, self.failures, self.choices = kept
        self._outline, self.has_grown = None if self.schema is None else self.schema.outline(), False
        for sent in self.live:
            sent.attempt = sent.attempt.evolve(subspace=self._open[sent.attempt.number].subspace)
            self._counts.add_placed(sent.attempt)
        self._pending.clear()
        for trial in self._open.values():
            if trial.origin is None:
                self._pending[trial.subspace][trial.number] = trial
            if trial.state is _S.WAITING and trial.number not in self._waiting:
                # The trial was drawn ahead. The scheduler of the new space looks for it in this queue.
                self.put_waiting(trial)

    @property
    def vanishing(self) -> list[int]:
        """Numbers of the waiting trials whose latest attempts, at least VANISHING, ended because their machines
        vanished.
        """
        found = [number for number, course in self._courses.items() if course.vanished >= VANISHING]
        return [number for number in found if self._open[number].state is _S.WAITING]

    def vanishing_since(self, moment: float) -> list[int]:
        """Return those `vanishing` trials whose last machine has vanished after this moment."""
        return [number for number in self.vanishing if self._courses[number].vanished_at > moment]

    def given_back(self, times: int) -> list[int]:
        """Return the numbers of the unfinished trials that workers have given back while they ran, at least `times`
        times.
        """
        return [number for number, course in self._courses.items() if course.given_back >= times]

    def give_up(self, number: int, error: str) -> Trial:
        """End a waiting trial as FAILED with this error. Return it."""
        return self._end_now(self._open[number], Outcome(state=_S.FAILED, error=error))

    def note_action(self, action: Action) -> None:
        """Record an action at the next `commit`. Its answer is sent only afterwards, so no answered action is lost."""
        self._turn.asked.append(action)

    @property
    def to_stop(self) -> list[int]:
        """Numbers of the trials in flight that will end PRUNED."""
        return [trial.number for trial in self.sent if trial.step is not None]

    def reports(self) -> Iterable[Report]:
        """Return the recorded reports of all trials in the order of their times."""
        return sorted(self.store.reports(self.record.key), key=attrgetter("at"))

    def commit(self) -> bool:
        """Write all changes in one transaction. Without changes, only renew the lock, every `RENEW_SECONDS`.

        Returns False while the store is unavailable; `trouble` has the reason. Call this again then: it tries the store
        after increasing pauses. Raises LockLost if another scheduler has taken over the study (a fence that is too
        old), and StoreError if the store fails.
        """
        now = self.clock.now()
        if self.trouble is not None and now < self._retry_at:
            return False
        recorder, turn = self.recorder, self._turn
        is_new = self._unwritten or turn.reported or recorder.is_urgent or turn.asked or self.trouble
        if not is_new and now - self._written_at < RENEW_SECONDS:
            return True
        unwritten = sorted(self._unwritten.items())
        turn.new = [self.trial(number) for number, is_new in unwritten if is_new]
        turn.changed = [self.trial(number) for number, is_new in unwritten if not is_new]
        turn.attempted, turn.seen, turn.classes = recorder.attempted(self.clock.wall()), recorder.seen, recorder.classes
        try:
            rewritten = self.store.write(self.record.key, self.fence, self.clock.wall(), turn)
        except StoreOutage as error:
            self.wait_for_store(error)
            return False
        self.rewritten.update(rewritten)
        self._turn = Turn()
        self._unwritten.clear()
        if turn.classes is not None:
            self.record = dataclasses.replace(self.record, classes=(*turn.classes,))
        recorder.clear()
        self.trials.release()
        self._written_at = now
        self.trouble, self._pause = None, FIRST_PAUSE
        return True

    def deletions(self, *, at_end: bool = False) -> Iterator[str]:
        """Yield warnings about trials that another program has deleted from the store in this run.

        Unfinished trials were written again. Finished trials cannot be written again, and are checked only if `at_end`.
        """
        if self.rewritten:
            yield f"rows deleted from the store while the study ran are written again: {named(self.rewritten)}"
        if not at_end:
            return
        # Arrays are used, because sets of a million numbers would take more memory than the study.
        stored = np.fromiter(self.store.numbers(self.record.key), np.int64)
        missing = np.setdiff1d(np.array(self.trials.numbers, np.int64), stored, assume_unique=True).tolist()
        if gone := [number for number in missing if number not in self._unwritten]:
            yield (
                f"results were deleted from the store while the study ran: {named(gone)}; restore the store from a "
                f"copy, or resume study {self.name} to continue without them"
            )

    def wait_for_store(self, trouble: StoreOutage) -> None:
        """Record that the store is unavailable. The next try follows after a pause."""
        self.trouble = trouble
        self._retry_at = self.clock.now() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def close(self) -> None:
        """Write the last changes and unlock the study. It is unlocked even if the changes cannot be written.

        Raises StoreError if they cannot be written, also if the store is only unavailable.
        """
        self.recorder.close(self.clock.wall())
        try:
            if not self.commit() and self.trouble is not None:
                raise self.trouble
        finally:
            self.unlock()

    def unlock(self) -> None:
        """Unlock the study without writing the changes since the last `commit`."""
        self.store.unlock(self.record.key, self.fence)

    def _kept_locked(self, blocks: Iterator[_T]) -> Iterator[_T]:
        with collector_paused():
            for block in blocks:
                self.commit()
                yield block

    def _start(self, trial: Trial, event: Started) -> Transition:
        sent = self.live.find(event.number, event.attempt)
        if sent is None or sent.is_claimed:
            return _UNCHANGED
        self._count_attempt(sent.attempt, -1)
        facts = {"started_at": event.at, "host": event.host, "worker": event.worker}
        sent.attempt, sent.began = sent.attempt.evolve(state=_S.RUNNING, **facts), self.clock.now()
        self._count_attempt(sent.attempt, +1)
        self.recorder.start(sent.attempt, event)
        return Transition(trial=self._show(trial))

    def _end(self, trial: Trial, result: Result) -> Transition:
        """End a trial by a result, or only the attempt.

        A result with a `retry`, which the executor or the scheduler has set, ends only its attempt. Otherwise
        `Attempts.finish` decides. A result for other params than those of the trial is refused.
        """
        if not result.is_of(trial.params):
            self.refused += 1
            return _UNCHANGED
        if result.retry is not None:
            return self._lose(trial, result, result.retry.reason, result.retry)
        live = dict(self.live.of(trial.number))
        own = live.get(result.attempt)
        asked, outcome = self._with_asked(trial, result.outcome)
        if not self.live.finish(trial.number, result.attempt, well=outcome.state in WELL):
            if own is None:
                return Transition(ended=())
            self._leave(result, [own])
            self._courses[trial.number].is_suspect = True
            return Transition(trial=self._show(trial), ended=[own])
        ended = [*live.values()]
        self._leave(result, ended)
        if own is None:
            # The attempt had been given up as lost.
            late = trial.attempted(attempt=result.attempt, compute_class=None, host=None, started_at=None)
            self.recorder.end(late, result, result.at, is_pruned=trial.step is not None)
        self.rescued += own is not None and result.attempt != min(live)
        seen = trial if own is None else own.attempt
        if (outcome.state is _S.CANCELLED and trial.step is not None) or outcome.state is _S.PRUNED:
            outcome = self._pruned(trial, outcome)
        finished = asked.evolve(
            state=outcome.state,
            outcome=outcome,
            step=self._last_step(trial) if outcome.state is _S.PRUNED else None,
            host=result.host or seen.host,
            compute_class=result.compute_class or seen.compute_class,
            started_at=seen.started_at or result.at - (result.outcome.seconds or 0.0),
            finished_at=result.at,
        )
        return Transition(trial=self._note(finished), ended=ended, is_over=True)

    def _with_asked(self, trial: Trial, outcome: Outcome) -> tuple[Trial, Outcome]:
        """Return a trial with the params for which its objective has asked, and the outcome. Extend the schema by them.

        A trial that is not COMPLETE may have ended before it asked for all labels, so it also keeps the proposed values
        of other labels. The outcome is FAILED if the trial asked for a label with another type, scale or options than
        earlier trials did. Its bounds may differ.
        """
        if self.schema is None or outcome.asked is None:
            return trial, outcome
        try:
            asked = convert(outcome.asked, dict[str, Suggested])
            self.schema = self.schema.seen(asked, is_complete=outcome.state is _S.COMPLETE)
        except (SpaceError, ValidationError) as error:
            lost: dict[str, Any] = {"loss": None, "losses": {}, "constraints": {}, "asked": None}
            return trial, replace(outcome, state=_S.FAILED, error=outcome.error or str(error), **lost)
        params = {label: each.drawn for label, each in asked.items()}
        # If the objective got another option than the proposed one, such as a user's, the trial has another subspace.
        others = [label for label, each in asked.items() if each.law.choices and trial.params.get(label) != each.drawn]
        self.has_grown |= bool(others) or self.schema.outline() != self._outline
        if outcome.state is not _S.COMPLETE:
            params = {**self.schema.proposed(trial.params), **params}
        return replace(trial, params=params, given=self._values_of(params)), outcome

    def _lose(self, trial: Trial, event: Lost | Result, reason: str, retry: Retry | None = None) -> Transition:
        """End an attempt without a result for its trial: it was lost, or is retried for `reason`."""
        sent = self.live.find(trial.number, event.attempt)
        if sent is None:
            return _UNCHANGED
        is_loss, course = retry is None or retry.is_loss, self._courses[trial.number]
        if sent.is_claimed and is_loss and trial.step is None:
            is_given_back = isinstance(event, Lost) and event.given_back
            self.lost_attempts.append((sent.attempt, reason, is_given_back))
            course.given_back += is_given_back
        is_counted = event.claimed if isinstance(event, Lost) else is_loss
        if isinstance(event, Lost) and event.vanished:
            course.vanished, course.vanished_at = course.vanished + 1, self.clock.now()
        elif sent.is_claimed:
            course.vanished = 0
        if isinstance(event, Lost) and event.vanished and (trial.vanished or 0) < MAX_VANISHED:
            trial = replace(trial, vanished=(trial.vanished or 0) + 1)
        else:
            trial = replace(trial, lost=trial.lost + is_counted)
        if retry is not None:
            trial = replace(
                trial,
                outgrown=",".join(filter(None, (trial.outgrown, retry.outgrown))) or None,
                outgrown_memory=",".join(filter(None, (trial.outgrown_memory, retry.memory))) or None,
                failed_on=(*trial.failed_on, *filter(None, [retry.failed_on])),
                outcome=replace(trial.outcome, code=self.code or None),
            )
        is_over = self.live.lose(trial.number, event.attempt)
        self._leave(event, [sent])
        trial = self._without_attempts(trial, reason) if is_over else self._show(trial)
        return Transition(trial=trial, ended=[sent], is_over=is_over)

    def _without_attempts(self, trial: Trial, reason: str) -> Trial:
        """Return a trial after its last live attempt was lost for this `reason`.

        The trial is PRUNED if it was being pruned, CANCELLED if it was cancelled, FAILED after too many attempts, and
        otherwise WAITING again.
        """
        trial = trial.evolve(state=_S.LOST)
        if trial.step is not None:
            return self._end_now(replace(trial, step=self._last_step(trial)), self._pruned(trial))
        if self._courses[trial.number].is_cancelled:
            return self._end_now(trial, _UNWANTED)
        if trial.lost >= MAX_LOST or trial.attempt >= MAX_ATTEMPTS:
            count = f"{trial.lost} attempts" if trial.lost >= MAX_LOST else f"all {MAX_ATTEMPTS} attempts"
            besides = f", besides {trial.vanished} whose machines vanished" if trial.vanished else ""
            error = f"{count} were lost{besides}; the last one: {reason}"
            return self._end_now(trial, Outcome(state=_S.FAILED, error=error))
        self.put_waiting(trial)
        return self._note(trial.evolve(state=_S.WAITING))

    def _end_now(self, trial: Trial, outcome: Outcome) -> Trial:
        """End a trial that has no live attempt with this outcome. Return it."""
        return self._note(trial.evolve(state=outcome.state, outcome=outcome, finished_at=self.clock.wall()))

    def _pruned(self, trial: Trial, outcome: Outcome = _STOPPED) -> Outcome:
        """Return the outcome of a trial that was stopped because of its reports, with the loss of its last report."""
        last = self._courses[trial.number].report
        loss = last.loss if last is not None and math.isfinite(last.loss) else None
        losses: Losses = {} if loss is None else dict.fromkeys([*self.record.objectives][:1], loss)
        if last is not None and last.losses is not None:
            # If one of several losses is not finite, the trial has none.
            is_whole = last.losses.keys() == self.record.objectives.keys()
            loss, losses = (loss, last.losses) if is_whole else (None, {})
        return replace(outcome, state=_S.PRUNED, loss=loss, losses=losses, error=None)

    def _last_step(self, trial: Trial) -> int | None:
        last = self._courses[trial.number].report
        return None if last is None else last.step

    def _show(self, trial: Trial) -> Trial:
        """Give a trial the state, class, host and start time of its oldest live attempt. Return the changed trial."""
        live = self.live.of(trial.number)
        oldest = live[min(live)].attempt
        shown = {name: getattr(oldest, name) for name in ("state", "compute_class", "host", "started_at")}
        # `evolve` would refuse a change from RUNNING to QUEUED. Here, this only means that another attempt is shown.
        return self._note(replace(trial, **shown))

    def _note(self, trial: Trial) -> Trial:
        """Replace an unfinished trial by `trial` with its live attempts, to be written by `commit`. Return it."""
        if trial.state is _S.FAILED and trial.outcome.code is None and self.code:
            # No worker has reported the version of the code, because the trial was lost or could not be run.
            trial = replace(trial, outcome=replace(trial.outcome, code=self.code))
        live = self.live.of(trial.number)
        kept = None if live.keys() <= {trial.attempt} else tuple(sent.attempt for sent in live.values())
        if kept != trial.live:
            trial = replace(trial, live=kept)
        self._put(trial)
        self._unwritten.setdefault(trial.number, False)
        return trial

    def _put(self, trial: Trial) -> None:
        before = self._open.pop(trial.number, None)
        if before is not None:
            self._counts.add(before, -1)
        if trial.state.is_finished:
            self._courses.pop(trial.number, None)
            self._pending[trial.subspace].pop(trial.number, None)
            self.trials.add(trial)
            self.counted += trial.state in COUNTED
        else:
            self._open[trial.number] = trial
            if trial.origin is None:
                self._pending[trial.subspace][trial.number] = trial
            self._counts.add(trial)

    def _enter(self, attempt: Attempt) -> None:
        """Add a live attempt."""
        now = self.clock.now()
        sent = Sent(attempt, now, now if attempt.state is _S.RUNNING else math.inf)
        self.live.put(attempt.number, attempt.attempt, sent)
        self._count_attempt(attempt, +1)

    def _leave(self, event: Lost | Result, gone: Sequence[Sent]) -> None:
        """Record the end of these attempts by an event, and subtract them from the numbers of live attempts."""
        is_pruned, now = self._open[event.number].step is not None, self.clock.wall()
        for sent in gone:
            self._count_attempt(sent.attempt, -1)
            self.recorder.end(sent.attempt, event, now, is_pruned=is_pruned)

    def _count_attempt(self, attempt: Attempt, by: int) -> None:
        self._counts.add_placed(attempt, by)
        self._taken[str(attempt.compute_class)] += by * attempt.slots
        self._taken_on[str(attempt.compute_class)][attempt.only_on or attempt.host] += by * attempt.slots

    def _reopen(self, trial: Trial) -> None:
        """Add an unfinished trial of an earlier run, with its live attempts."""
        self._next = max(self._next, trial.number + 1)
        if trial.origin is None:
            self._pending[trial.subspace][trial.number] = trial
        if trial.compute_class is not None:
            self._taken[trial.compute_class] += 0
        if trial.step is not None:
            # There is at least one report, because it was written in one transaction with the decision to prune.
            reports = self.store.reports(self.record.key, [trial.number])
            self._courses[trial.number].report = max(reports, key=attrgetter("step"))
        if trial.vanished:
            # The store does not record whether the vanished attempts were the latest ones, so this is assumed.
            self._courses[trial.number].vanished = trial.vanished
        if trial.state is _S.WAITING:
            # Its attempt was lost or cancelled, or the scheduler ended before the trial was sent.
            self.put_waiting(trial)
        else:
            for attempt in trial.live or [trial.attempted(state=trial.state)]:
                self._enter(attempt)


def named(numbers: Collection[int]) -> str:
    """Return a text with the numbers of these trials, at most SHOWN of them."""
    return f"trial{'s' * (len(numbers) > 1)} {listed(sorted(numbers), SHOWN)}"


@dataclass(frozen=True)
class Limits:
    """The limits of a study. All but `at_once` end the study. A field is None if there is no such limit."""

    #: maximum number of trials that end COMPLETE, PRUNED or FAILED
    trials: int | None = None
    #: maximum seconds of this run of the scheduler
    seconds: float | None = None
    #: the study ends when a feasible trial has at most this loss (minimised)
    target: float | None = None
    #: the study stops if this number of first trials of the run all fail in the same way, and no trial ever succeeded
    failures: int | None = None
    #: the study ends after this number of trials in a row without a better feasible loss; with several losses, without
    #: a change of the Pareto front
    without_gain: int | None = None
    #: lowest budget at which a loss counts for the target; None for any budget
    budget: float | None = None
    #: money: no trial is sent once the attempts have cost this much
    money: float | None = None
    #: maximum number of attempts in flight at a time; unlike the other limits, it does not end the study
    at_once: int | None = None

    def __post_init__(self) -> None:
        if self.seconds is not None and not self.seconds > 0:
            raise UsageError(f"a study needs more than {self.seconds} seconds; change seconds")
        if self.trials is self.seconds is self.target is self.without_gain is self.money is None:
            raise UsageError("a study needs an end: give trials, seconds, target or early_stop")

    @classmethod
    def of(cls, settings: StudySettings) -> Limits:
        """Return the limits in the settings. Raises UsageError if there is no limit, or a target for several losses."""
        failures, target = settings.max_failures or None, settings.target
        if target is not None and settings.objectives:
            if settings.has_several:
                names = ", ".join(settings.objectives)
                raise UsageError(f"a target is for one loss, but this study has several: {names}; leave out target")
            target = turned_first(target, settings.objectives)
        return cls(
            trials=settings.trials,
            seconds=settings.seconds,
            target=target,
            failures=failures,
            without_gain=settings.early_stop,
            money=settings.max_cost,
            at_once=settings.at_once,
        )

    def trials_left(self, trials: int) -> float:
        """Return how many trials may follow after this number of trials; infinity without a limit on trials."""
        return math.inf if self.trials is None else self.trials - trials

    def seconds_left(self, began: float, now: float) -> float:
        """Return the remaining seconds at the time `now` of a run that started at `began`; infinity without a limit."""
        return math.inf if self.seconds is None else began + self.seconds - now

    def is_met_by(self, best: Trial | None) -> bool:
        """Return whether the `best` COMPLETE trial is feasible and reaches the target."""
        if self.target is None or best is None or best.outcome.violation:
            return False
        if self.budget is not None and best.budget is not None and best.budget < self.budget:
            # Losses at lower budgets do not count.
            return False
        return (best.outcome.loss or 0.0) <= self.target
