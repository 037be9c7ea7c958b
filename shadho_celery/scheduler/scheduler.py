"""The loop: collect what happened, tell those who learn from it, assign work to classes, fill their queues."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from msgspec.structs import replace

from shadho_celery.core.hardware import DEFAULT_CLASSES, ComputeClass, by_strength
from shadho_celery.core.trial import Attempt, Event, Result, Trial, TrialState
from shadho_celery.executors.base import Executor
from shadho_celery.placement.policies import Policy
from shadho_celery.placement.shares import Shares
from shadho_celery.predictors.cost_model import CostModel
from shadho_celery.scheduler.memory_fit import MemoryFit
from shadho_celery.scheduler.proposals import MakeSampler, Proposals
from shadho_celery.scheduler.reservations import Reservations
from shadho_celery.scheduler.rounds import Endless, Rounds
from shadho_celery.scheduler.speculation import Idle, Speculation, most_copies
from shadho_celery.scheduler.widths import Width
from shadho_celery.space.split import Subspace
from shadho_celery.study.limits import Limits
from shadho_celery.study.study import Study

#: seconds that one turn of the loop waits for something to happen
TURN_SECONDS = 0.5

#: seconds between two looks at how long the running trials have run
WATCH_SECONDS = 10.0

#: trials after which a class is ranked by how fast it has been, and no more by its hardware
TIMED_TRIALS = 5


class Scheduler:
    """Runs one study to its limits on one executor."""

    def __init__(
        self,
        study: Study,
        subspaces: Sequence[Subspace],
        executor: Executor,
        *,
        policy: Policy,
        shares: Shares,
        cost_model: CostModel,
        make_sampler: MakeSampler,
        limits: Limits,
        expected: Sequence[str] = DEFAULT_CLASSES,
        width: Width = lambda params: 1,
        rounds: Rounds | None = None,
        speculate: bool = True,
    ) -> None:
        """`expected` orders the classes that do not differ in their hardware, strongest first.

        `width` says how many slots of one class a trial takes, `rounds` which trials there are to be: any number of new
        ones by default. With `speculate` late trials are copied to idle slots.
        """
        self.study = study
        self.cost_model = cost_model
        self.limits = limits
        self.expected = expected
        #: their names, in the order of the search space
        self.subspaces = tuple(subspace.name for subspace in subspaces)
        #: those that live, strongest first
        self.classes: list[ComputeClass] = []
        #: seconds that one turn waits at most for something to happen
        self.turn_seconds = TURN_SECONDS
        #: True once nothing new is sent; what runs is waited for
        self.stopping = False
        self._executor = executor
        self._memory_fit = MemoryFit(cost_model, expected)
        self._reservations = Reservations(study)
        self._proposals = Proposals(
            study,
            subspaces,
            policy=policy,
            shares=shares,
            rounds=Endless() if rounds is None else rounds,
            make_sampler=make_sampler,
            limits=limits,
            width=width,
        )
        self._speculation = Speculation(cost_model) if speculate else None
        self._began = self._watched_at = study.clock.now()
        self._take_up()

    # The loop

    def run(self, on_turn: Callable[[], None] = lambda: None) -> None:
        """Turn the loop until the study has reached a limit, or has been stopped, and nothing runs any more."""
        while not self.done:
            self.turn()
            on_turn()

    def turn(self) -> None:
        """One turn of the loop; returns after `turn_seconds` at the latest, but for what an inline trial takes."""
        self.tell(self.collect())
        self.assign()
        self.fill()

    def collect(self) -> Sequence[Event]:
        """What happened since the last turn."""
        # Once the time is up there is nothing to be punctual for: what runs is waited for without haste.
        left = self.turn_seconds if self.stopping else self._seconds_left()
        if self._speculation is not None:
            left = min(left, self._speculation.due - self.study.clock.now())
        return self._executor.poll(max(0.0, min(self.turn_seconds, left)))

    def tell(self, events: Sequence[Event]) -> None:
        """Take note of `events` and let policy and samplers learn from the trials that finished."""
        for event in events:
            trial = self.study.tell(self._with_retry(event) if isinstance(event, Result) else event)
            if trial is not None and trial.state.is_finished:
                self._learn(trial)

    def assign(self) -> None:
        """See which classes live, how strong they are, and whether the study is at its end."""
        now = self.study.clock.now()
        if now - self._watched_at >= WATCH_SECONDS:
            self._watched_at = now
            self.cost_model.watch(self.study.sent, now)
        self.classes = self._in_order(self._executor.classes())
        self._memory_fit.see(self.classes)
        self._reservations.see(self.classes)
        self._proposals.see(self.classes)
        if not self.stopping and self._limit_reached():
            self.stop(running=self._target_reached())

    def fill(self) -> None:
        """Give every class the trials it has room for, recorded before they are sent."""
        batch = [self.study.send(trial, compute_class) for compute_class, trial in self._placed()] or self._copied()
        self.study.commit()
        if batch:
            self._executor.submit(batch)
        else:
            self._spill()

    def stop(self, *, running: bool = False) -> None:
        """Send nothing more and take back what no worker has claimed; with `running` stop the others too.

        Trials taken back wait in the study for the next time it is resumed.
        """
        self.stopping = True
        if self.study.in_flight:
            self._executor.cancel([trial.number for trial in self.study.sent], running=running)

    @property
    def done(self) -> bool:
        """True once a limit is reached, or the study was stopped, and nothing runs any more."""
        return self.study.in_flight == 0 and (self.stopping or self._limit_reached())

    # What the verbs stand on

    def _take_up(self) -> None:
        """Learn from the trials of earlier runs, and take up those that were in flight."""
        self._learn(*self.study.trials)
        if self.study.in_flight:
            self._executor.submit(list(self.study.attempts))

    def _with_retry(self, result: Result) -> Result:
        """Return a result, with its reason where its trial is to be tried again on a class with more memory."""
        if not self.study.lives(result.number, result.attempt):
            return result
        retry = self._memory_fit.retry(result, self.study.trial(result.number))
        return result if retry is None else replace(result, retry=retry)

    def _learn(self, *trials: Trial) -> None:
        self.cost_model.tell(*trials)
        self._proposals.tell(*trials)

    def _in_order(self, classes: Sequence[ComputeClass]) -> list[ComputeClass]:
        """Strongest first: by their hardware, until every class has shown how fast it is."""
        ordered = by_strength(classes, self.expected)
        if all(self.cost_model.timed(compute_class.name) >= TIMED_TRIALS for compute_class in ordered):
            ordered.sort(key=lambda compute_class: self.cost_model.slowness(compute_class.name))
        return ordered

    def _placed(self) -> Iterator[tuple[str, Trial]]:
        """Trials to send and their class: one a class in turn, the strongest first, until no class has room."""
        # Near the end a trial that waits in a queue is better sent to whichever slot falls free first.
        slots = sum(compute_class.slots for compute_class in self.classes)
        near_end = min(self._left(), self._proposals.rounds.left) <= slots
        takers = self.classes
        while takers:
            still_taking = []
            for compute_class in takers:
                room = self._reservations.free(compute_class, 0 if near_end else compute_class.ahead)
                trial = self._next_trial(compute_class) if room > 0 and self._left() > 0 else None
                if trial is None:
                    continue
                if self._reservations.may_start(trial, compute_class):
                    self._reservations.release(compute_class)
                    still_taking.append(compute_class)
                    yield compute_class.name, trial
                else:
                    self._reservations.reserve(compute_class, trial)
                    self.study.hold_back(trial, first=True)
            takers = still_taking

    def _next_trial(self, compute_class: ComputeClass) -> Trial | None:
        """A trial for a free slot: one that waits to be sent and fits, else a new one; None where none fits."""
        fits = partial(self._memory_fit.fits, compute_class=compute_class)
        waiting = self.study.next_waiting(
            lambda trial: fits(trial) and self._reservations.may_take(compute_class, trial)
        )
        if waiting is not None or self._reservations.is_reserved(compute_class):
            return waiting
        return self._proposals.ask(compute_class.name, fits, self._left())

    def _spill(self) -> None:
        """With nothing to send, take back what waits in one class's queue while a slot of another is free."""
        if self.stopping:
            return
        room = [(c, self._reservations.free(c)) for c in self.classes]
        crowded = {c.name for c, free in room if free < 0}
        # A class that gathers slots takes nothing else: what is taken back for it would go back to where it was.
        takers = [(c, free) for c, free in room if free > 0 and not self._reservations.is_reserved(c)]
        if not crowded or not takers:
            return
        waiting = [t for t in self.study.sent if t.state is TrialState.QUEUED and t.compute_class in crowded]
        for compute_class, free in takers:
            fitting = [t.number for t in waiting if t.slots <= free and self._memory_fit.fits(t, compute_class)]
            if fitting:
                self._executor.cancel(fitting[-free:], running=False)

    def _copied(self) -> list[Attempt]:
        """With nothing to send, copies of late trials for the slots that idle."""
        if self._speculation is None:
            return []
        self._speculation.due = math.inf
        if self.stopping or all(self._reservations.free(each) <= 0 for each in self.classes):
            return []
        alone = (trial for trial in self.study.alone if trial.subspace in self._proposals.samplers)
        size = self.study.in_flight if self._proposals.rounds.size is None else self._proposals.rounds.size
        most = most_copies(size) - self.study.copies
        late = self._speculation.ask(alone, self._idle, most, self.study.clock.now())
        return [self.study.send(trial, compute_class) for trial, compute_class in late]

    def _idle(self) -> list[Idle]:
        """The slots that have nothing to do, but for those that are gathered for a trial that takes several."""
        busy = Counter((attempt.compute_class, attempt.host) for attempt in self.study.attempts)
        return [
            Idle(
                compute_class=each.name,
                slots=self._reservations.free(each),
                hosts={host: slots - busy[each.name, host] for host, slots in each.hosts.items()},
                fits=partial(self._memory_fit.fits, compute_class=each),
            )
            for each in self.classes
            if self._reservations.free(each) > 0 and not self._reservations.is_reserved(each)
        ]

    def _left(self) -> float:
        """Trials that may still be sent."""
        return 0 if self.stopping else self.limits.trials_left(self.study.counted + self.study.in_flight)

    def _seconds_left(self) -> float:
        return self.limits.seconds_left(self._began, self.study.clock.now())

    def _limit_reached(self) -> bool:
        is_full = self.limits.trials_left(self.study.counted) <= 0
        return is_full or self._seconds_left() <= 0 or self._target_reached()

    def _target_reached(self) -> bool:
        return self.limits.is_met_by(self.study.best)
