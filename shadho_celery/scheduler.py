"""The loop: collect what happened, tell those who learn from it, assign work to classes, fill their queues."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from shadho_celery.assignment import Policy
from shadho_celery.capacity import Capacity
from shadho_celery.cost_model import CostModel
from shadho_celery.executors.base import Executor
from shadho_celery.hardware import DEFAULT_CLASSES, ComputeClass, by_strength
from shadho_celery.limits import Limits
from shadho_celery.rounds import Endless, Rounds, Wanted
from shadho_celery.samplers.base import Sampler
from shadho_celery.shares import Shares
from shadho_celery.space.split import Subspace
from shadho_celery.speculation import Idle, Speculation, most_copies
from shadho_celery.study import Study
from shadho_celery.trial import Event, Trial, TrialState
from shadho_celery.widths import Width

#: seconds that one turn of the loop waits for something to happen
TURN_SECONDS = 0.5

#: seconds between two looks at how long the running trials have run
WATCH_SECONDS = 10.0

#: trials after which a class is ranked by how fast it has been, and no more by its hardware
TIMED_TRIALS = 5

#: new trials that are drawn for a slot until one fits its memory
DRAWS = 20

#: trials of a subspace that may wait for a class with more memory; then the others draw in other subspaces
WAITING_PER_SUBSPACE = 4

MakeSampler = Callable[[Subspace, Sequence[int]], Sampler]


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
        self._capacity = Capacity(cost_model, expected)
        self.limits = limits
        self.expected = expected
        self.classes: list[ComputeClass] = []
        #: seconds that one turn waits at most for something to happen
        self.turn_seconds = TURN_SECONDS
        #: True once nothing new is sent; what runs is waited for
        self.stopping = False
        self._executor = executor
        self._policy = policy
        self._seed = study.record.seed
        #: their names, in the order of the search space
        self.subspaces = tuple(subspace.name for subspace in subspaces)
        self._index = {subspace.name: place for place, subspace in enumerate(subspaces)}
        self._samplers = {s.name: make_sampler(s, (self._seed, place)) for place, s in enumerate(subspaces)}
        self._shares = shares
        self._adaptive = any(sampler.adaptive for sampler in self._samplers.values())
        self._quotas: dict[str, int] = {}
        self._quotas_for = -1
        self._width = width
        self._rounds = Endless() if rounds is None else rounds
        self._speculation = Speculation(cost_model) if speculate else None
        #: by class, the trial whose slots it gathers: nothing else is sent there until they are free
        self._gathering: dict[str, int] = {}
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
            if event.number >= len(self.study):
                continue
            is_alive = self.study.lives(event.number, event.attempt)
            told = self._capacity.escalated(event, self.study.trial(event.number)) if is_alive else event
            trial = self.study.tell(told)
            if trial is not None and trial.state.is_finished:
                self._learn(trial)

    def assign(self) -> None:
        """See which classes live, how strong they are, and whether the study is at its end."""
        now = self.study.clock.now()
        if now - self._watched_at >= WATCH_SECONDS:
            self._watched_at = now
            self.cost_model.watch(self.study.sent, now)
        self.classes = self._in_order(self._executor.classes())
        self._capacity.see(self.classes)
        self._policy.see_classes([compute_class.name for compute_class in self.classes])
        if not self.stopping and self._limit_reached():
            self.stop(running=self._target_reached())

    def fill(self) -> None:
        """Give every class the trials it has room for, recorded before they are sent."""
        batch = [self.study.queue(trial, compute_class) for compute_class, trial in self._placed()] or self._copied()
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
        for trial in self.study:
            if trial.origin is None:
                self._shares.deal(trial.subspace)
            self._rounds.add(trial)
        self._learn(*self.study.trials)
        if self.study.in_flight:
            self._executor.submit(self.study.sent)

    def _learn(self, *trials: Trial) -> None:
        """Learn from trials in the order in which they finished."""
        self.cost_model.tell(*trials)
        # Losses compare at one budget only: those of the higher rungs are about trials that were chosen already.
        lowest = [trial for trial in trials if not trial.rung]
        self._policy.tell(*lowest)
        for trial in lowest:
            self._shares.tell(trial)
            if trial.subspace in self._samplers:
                self._samplers[trial.subspace].tell(trial)
        for trial in trials:
            self._rounds.tell(trial)

    def _in_order(self, classes: Sequence[ComputeClass]) -> list[ComputeClass]:
        """Strongest first: by their hardware, until every class has shown how fast it is."""
        ordered = by_strength(classes, self.expected)
        if all(self.cost_model.timed(compute_class.name) >= TIMED_TRIALS for compute_class in ordered):
            ordered.sort(key=lambda compute_class: self.cost_model.slowness(compute_class.name))
        return ordered

    def _placed(self) -> Iterator[tuple[str, Trial]]:
        """Trials to send and their class: one a class in turn, the strongest first, until no class has room."""
        # Near the end a trial that waits in a queue is better sent to whichever slot falls free first.
        near_end = min(self._left(), self._rounds.left) <= sum(compute_class.slots for compute_class in self.classes)
        self._forget_gathering()
        takers = self.classes
        while takers:
            still_taking = []
            for compute_class in takers:
                room = self._room(compute_class, 0 if near_end else compute_class.ahead)
                trial = self._next_trial(compute_class) if room > 0 and self._left() > 0 else None
                if trial is None:
                    continue
                if self._may_start(trial, compute_class):
                    self._gathering.pop(compute_class.name, None)
                    still_taking.append(compute_class)
                    yield compute_class.name, trial
                else:
                    self._gathering[compute_class.name] = trial.number
                    self.study.hold_back(trial, first=True)
            takers = still_taking

    def _may_start(self, trial: Trial, compute_class: ComputeClass) -> bool:
        """Whether the class has all the slots that the trial takes; a trial of one slot may wait in the queue.

        One that is wider than the study's part beside other studies goes when the slots are free and none is ours.
        """
        if trial.slots == 1 or trial.slots <= self._room(compute_class, 0):
            return True
        is_alone = self.study.taken(compute_class.name) == 0
        return is_alone and trial.slots <= compute_class.slots - compute_class.busy

    def _is_left_to(self, trial: Trial, compute_class: ComputeClass) -> bool:
        """Whether a trial that waits may go to a class: not while the class, or another one, gathers slots for it."""
        if compute_class.name in self._gathering:
            return self._gathering[compute_class.name] == trial.number
        return trial.number not in self._gathering.values() or self._may_start(trial, compute_class)

    def _forget_gathering(self) -> None:
        """A class that has gone, or whose trial was sent elsewhere or has ended, gathers no slots any more."""
        live = {compute_class.name for compute_class in self.classes}
        for name, number in list(self._gathering.items()):
            if name not in live or self.study.trial(number).state is not TrialState.WAITING:
                del self._gathering[name]

    def _room(self, compute_class: ComputeClass, ahead: int) -> int:
        taken = self.study.taken(compute_class.name)
        return math.ceil(compute_class.share) + ahead + compute_class.stranded - taken

    def _spill(self) -> None:
        """With nothing to send, take back what waits in one class's queue while a slot of another is free."""
        if self.stopping:
            return
        room = [(c, self._room(c, 0)) for c in self.classes]
        crowded = {c.name for c, free in room if free < 0}
        if not crowded or all(free <= 0 for _, free in room):
            return
        waiting = [t for t in self.study.sent if t.state is TrialState.QUEUED and t.compute_class in crowded]
        for compute_class, free in room:
            fitting = [trial.number for trial in waiting if self._capacity.fits(trial, compute_class)]
            if free > 0 and fitting:
                self._executor.cancel(fitting[-free:], running=False)

    def _copied(self) -> list[Trial]:
        """With nothing to send, copies of late trials for the slots that idle."""
        if self._speculation is None:
            return []
        self._speculation.due = math.inf
        if self.stopping or all(self._room(each, 0) <= 0 for each in self.classes):
            return []
        alone = (trial for trial in self.study.alone if trial.subspace in self._index)
        size = self.study.in_flight if self._rounds.size is None else self._rounds.size
        most = most_copies(size) - self.study.copies
        late = self._speculation.ask(alone, self._idle, most, self.study.clock.now())
        return [self.study.copy(trial, compute_class) for trial, compute_class in late]

    def _idle(self) -> list[Idle]:
        """The slots that have nothing to do, but for those that are gathered for a trial that takes several."""
        busy = Counter((trial.compute_class, trial.host) for trial in self.study.attempts)
        return [
            Idle(
                compute_class=each.name,
                slots=self._room(each, 0),
                hosts={host: slots - busy[each.name, host] for host, slots in each.hosts.items()},
                fits=partial(self._capacity.fits, compute_class=each),
            )
            for each in self.classes
            if self._room(each, 0) > 0 and each.name not in self._gathering
        ]

    def _left(self) -> float:
        """Trials that may still be sent."""
        return 0 if self.stopping else self.limits.trials_left(self.study.counted + self.study.in_flight)

    def _next_trial(self, compute_class: ComputeClass) -> Trial | None:
        """A trial for a free slot: one that waits to be sent and fits, else a new one; None where none fits."""
        waiting = self.study.next_waiting(
            lambda trial: self._capacity.fits(trial, compute_class) and self._is_left_to(trial, compute_class)
        )
        if waiting is not None or compute_class.name in self._gathering:
            return waiting
        for _ in range(DRAWS):
            wanted = self._rounds.ask()
            if wanted is None or self.study.count(TrialState.WAITING) >= self._left():
                return None
            trial = self._made(wanted, compute_class)
            if trial is None:
                return None
            self._rounds.add(trial)
            if self._capacity.fits(trial, compute_class):
                return trial
            # It stays in the study until a class has room that it fits.
            self.study.hold_back(trial)
        return None

    def _may_wait(self, name: str) -> bool:
        """Whether another trial of a subspace may be held back; those that wait are too large for whoever asks."""
        return self.study.count(TrialState.WAITING, subspace=name) < WAITING_PER_SUBSPACE

    def _made(self, wanted: Wanted, compute_class: ComputeClass) -> Trial | None:
        """What is wanted, as a trial of the study; None where no subspace may get a new one."""
        if wanted.origin is not None:
            origin = self.study.trial(wanted.origin)
            return self.study.add(
                origin.subspace,
                origin.params,
                origin.seed,
                wanted.budget,
                slots=origin.slots,
                rung=wanted.rung,
                origin=origin.number,
            )
        backlogs = {n: b for n, b in self._backlogs(wanted.drawn).items() if self._may_wait(n)}
        return self._draw(self._policy.pick(compute_class.name, backlogs), wanted) if backlogs else None

    def _draw(self, name: str, wanted: Wanted) -> Trial:
        """A new trial in the subspace called `name`."""
        place = self.study.asked(name)
        params = self._samplers[name].ask(place)
        self._shares.deal(name)
        seed = trial_seed(self._seed, self._index[name], place)
        return self.study.add(name, params, seed, wanted.budget, slots=self._width(params), rung=wanted.rung)

    def _backlogs(self, drawn: int | None) -> dict[str, float]:
        """Subspaces that may get a trial, with how far each is behind its share, the furthest first.

        Where the proposals do not depend on the losses, a limit on trials fixes each subspace's number of them: the
        policy decides on order and place, the seed on the set. In rounds it is those `drawn` by the end of each.
        """
        backlogs = self._shares.backlogs()
        limit = self.limits.trials if drawn is None else drawn
        if limit is None or not self._shares.fixed or self._adaptive:
            return backlogs
        total = limit + (self.study.count(TrialState.CANCELLED) if drawn is None else 0)
        if total != self._quotas_for:
            self._quotas, self._quotas_for = self._shares.quotas(total), total
        return {n: behind for n, behind in backlogs.items() if self.study.asked(n) < self._quotas[n]} or backlogs

    def _seconds_left(self) -> float:
        return self.limits.seconds_left(self._began, self.study.clock.now())

    def _limit_reached(self) -> bool:
        is_full = self.limits.trials_left(self.study.counted) <= 0
        return is_full or self._seconds_left() <= 0 or self._target_reached()

    def _target_reached(self) -> bool:
        return self.limits.is_met_by(self.study.best)


def trial_seed(seed: int, subspace: int, index: int) -> int:
    """The seed of a subspace's trial number `index`: the same however the study's trials are timed."""
    return int(np.random.SeedSequence((seed, subspace, index)).generate_state(1)[0])
