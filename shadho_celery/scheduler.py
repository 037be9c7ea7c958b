"""The loop: collect what happened, tell those who learn from it, assign work to classes, fill their queues."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from shadho_celery.assignment import Policy, Shares
from shadho_celery.executors.base import Executor
from shadho_celery.hardware import DEFAULT_CLASSES, ComputeClass, by_strength
from shadho_celery.samplers.base import Sampler
from shadho_celery.space.split import Subspace
from shadho_celery.study import Limits, Study
from shadho_celery.trial import Event, Trial, TrialState

#: seconds that one turn of the loop waits for something to happen
TURN_SECONDS = 0.5

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
        make_sampler: MakeSampler,
        limits: Limits,
        expected: Sequence[str] = DEFAULT_CLASSES,
    ) -> None:
        """`expected` orders the classes that do not differ in their hardware, strongest first."""
        self.study = study
        self.limits = limits
        self.expected = expected
        self.classes: list[ComputeClass] = []
        #: True once nothing new is sent; what runs is waited for
        self.stopping = False
        self._executor = executor
        self._policy = policy
        self._seed = study.record.seed
        #: their names, in the order of the search space
        self.subspaces = tuple(subspace.name for subspace in subspaces)
        self._index = {subspace.name: place for place, subspace in enumerate(subspaces)}
        self._samplers = {s.name: make_sampler(s, (self._seed, place)) for place, s in enumerate(subspaces)}
        self._shares = Shares({subspace.name: subspace.probability for subspace in subspaces})
        self._quotas: dict[str, int] = {}
        self._quotas_for = -1
        self._began = study.clock.now()
        self._take_up()

    # The loop

    def run(self, on_turn: Callable[[], None] = lambda: None) -> None:
        """Turn the loop until the study has reached a limit, or has been stopped, and nothing runs any more."""
        while not self.done:
            self.turn()
            on_turn()

    def turn(self) -> None:
        """One turn of the loop; returns after TURN_SECONDS at the latest, but for what an inline trial takes."""
        self.tell(self.collect())
        self.assign()
        self.fill()

    def collect(self) -> Sequence[Event]:
        """What happened since the last turn."""
        # Once the time is up there is nothing to be punctual for: what runs is waited for without haste.
        left = TURN_SECONDS if self.stopping else self._seconds_left()
        return self._executor.poll(max(0.0, min(TURN_SECONDS, left)))

    def tell(self, events: Sequence[Event]) -> None:
        """Take note of `events` and let policy and samplers learn from the trials that finished."""
        for event in events:
            trial = self.study.tell(event)
            if trial is not None and trial.state.is_finished:
                self._learn(trial)

    def assign(self) -> None:
        """See which classes live, how strong they are, and whether the study is at its end."""
        self.classes = by_strength(self._executor.classes(), self.expected)
        self._policy.see_classes([compute_class.name for compute_class in self.classes])
        if not self.stopping and self._limit_reached():
            self.stop(running=self._target_reached())

    def fill(self) -> None:
        """Give every class the trials it has room for, recorded before they are sent."""
        batch = []
        for compute_class in self._places():
            trial = self._next_trial(compute_class)
            batch.append(self.study.queue(trial, compute_class))
        self.study.commit()
        if batch:
            self._executor.submit(batch)

    def stop(self, *, running: bool = False) -> None:
        """Send nothing more and take back what no worker has claimed; with `running` stop the others too.

        Trials taken back wait in the study for the next time it is resumed.
        """
        self.stopping = True
        if self.study.in_flight:
            self._executor.cancel([trial.number for trial in self._sent()], running=running)

    @property
    def done(self) -> bool:
        """True once a limit is reached, or the study was stopped, and nothing runs any more."""
        return self.study.in_flight == 0 and (self.stopping or self._limit_reached())

    # What the verbs stand on

    def _take_up(self) -> None:
        """Learn from the trials of earlier runs, and take up those that were in flight."""
        for trial in self.study.trials:
            self._learn(trial)
        if self.study.in_flight:
            self._executor.submit(self._sent())

    def _sent(self) -> list[Trial]:
        """Trials that were sent and have not ended."""
        return [trial for trial in self.study if trial.state in (TrialState.QUEUED, TrialState.RUNNING)]

    def _learn(self, trial: Trial) -> None:
        self._policy.tell(trial)
        if trial.subspace in self._samplers:
            self._samplers[trial.subspace].tell(trial)

    def _places(self) -> Iterator[str]:
        """The class of each trial to send: one a class in turn, the strongest first, until no class has room."""
        left = self._left()
        # Near the end a trial that waits in a queue is better sent to whichever slot falls free first.
        near_end = left <= sum(compute_class.slots for compute_class in self.classes)
        room = {c.name: self._room(c, 0 if near_end else c.ahead) for c in self.classes}
        while left > 0 and any(free > 0 for free in room.values()):
            for name, free in room.items():
                if free > 0 and left > 0:
                    room[name] -= 1
                    left -= 1
                    yield name

    def _room(self, compute_class: ComputeClass, ahead: int) -> int:
        in_flight = self.study.count(TrialState.QUEUED, TrialState.RUNNING, compute_class=compute_class.name)
        return math.ceil(compute_class.share) + ahead - in_flight

    def _left(self) -> float:
        """Trials that may still be sent."""
        if self.stopping:
            return 0
        if self.limits.trials is None:
            return math.inf
        return self.limits.trials - self.study.counted - self.study.in_flight

    def _next_trial(self, compute_class: str) -> Trial:
        """A trial for a free slot of `compute_class`: one that waits to be sent again, else a new one."""
        waiting = self.study.next_waiting()
        if waiting is not None:
            return waiting
        name = self._policy.pick(compute_class, self._choices())
        place = self.study.asked(name)
        params = self._samplers[name].ask(place)
        return self.study.add(name, params, trial_seed(self._seed, self._index[name], place))

    def _choices(self) -> list[str]:
        """Subspaces that may get a trial, the one most behind its share first.

        Where the proposals do not depend on the losses, a limit on trials fixes each subspace's number of them: the
        policy decides on order and place, the seed on the set.
        """
        dealt = {name: self.study.asked(name) for name in self.subspaces}
        order = self._shares.in_order(dealt)
        if self.limits.trials is None or any(sampler.adaptive for sampler in self._samplers.values()):
            return order
        total = self.limits.trials + self.study.count(TrialState.CANCELLED)
        if total != self._quotas_for:
            self._quotas, self._quotas_for = self._shares.quotas(total), total
        return [name for name in order if dealt[name] < self._quotas[name]] or order

    def _seconds_left(self) -> float:
        if self.limits.seconds is None:
            return math.inf
        return self._began + self.limits.seconds - self.study.clock.now()

    def _limit_reached(self) -> bool:
        enough = self.limits.trials is not None and self.study.counted >= self.limits.trials
        return enough or self._seconds_left() <= 0 or self._target_reached()

    def _target_reached(self) -> bool:
        best = self.study.best
        return self.limits.target is not None and best is not None and (best.loss or 0.0) <= self.limits.target


def trial_seed(seed: int, subspace: int, index: int) -> int:
    """The seed of a subspace's trial number `index`: the same however the study's trials are timed."""
    return int(np.random.SeedSequence((seed, subspace, index)).generate_state(1)[0])
