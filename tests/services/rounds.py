"""A player of rounds, without a study: it asks for trials, and tells how they ended."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from heapq import heappop, heappush

from shadho_celery.core.trial import Outcome, Params, Trial, TrialState
from shadho_celery.fidelity.rounds import Replay, Rounds

S = TrialState


class Player:
    """Asks for trials and tells how they ended; a trial's loss comes from the params' number, its origin's."""

    def __init__(
        self, rounds: Rounds, loss: Callable[[int, float], float | None] = lambda origin, budget: origin
    ) -> None:
        self.rounds = rounds
        self.loss = loss
        self.trials: list[Trial] = []
        self.finished: list[Trial] = []
        #: time, which passes by one with each trial that is sent or ends
        self.now = 0.0

    def resumed(self, rounds: Rounds) -> Player:
        """Return a player of rounds that are told what these were, and go on."""
        other = Player(rounds, self.loss)
        other.trials, other.finished, other.now = [*self.trials], [*self.finished], self.now
        replay = Replay(rounds, self.trials)
        for trial in self.finished:
            replay.tell(trial)
        replay.end()
        return other

    @property
    def running(self) -> list[Trial]:
        return [trial for trial in self.trials if not trial.state.is_finished]

    def ask(self) -> Trial | None:
        """The next trial, as it is sent; None where there is none to be had."""
        offers = self.rounds.offers()
        assert offers == self.rounds.offers(), "to look again changes nothing"
        if not offers:
            return None
        wanted = offers[0]
        trial = Trial(
            number=len(self.trials),
            subspace="all",
            params=self.params(wanted.params, wanted.origin),
            budget=wanted.budget,
            rung=wanted.rung,
            origin=wanted.origin,
            asked_at=self._tick(),
        )
        self.trials.append(trial)
        self.rounds.add(trial)
        return trial

    def params(self, proposed: Params | None, origin: int | None) -> Params:
        if proposed is not None:
            return proposed
        return {} if origin is None else self.trials[origin].params

    def ask_all(self, most: int = 1_000_000) -> list[Trial]:
        found: list[Trial] = []
        while len(found) < most and (trial := self.ask()) is not None:
            found.append(trial)
        return found

    def finish(self, trial: Trial, state: TrialState | None = None) -> None:
        loss = self.loss(trial.number if trial.origin is None else trial.origin, trial.budget or 0.0)
        state = state or (S.FAILED if loss is None else S.COMPLETE)
        outcome = Outcome(state=state, loss=loss if state is S.COMPLETE else None)
        ended = trial.evolve(state=state, outcome=outcome, finished_at=self._tick())
        self.trials[trial.number] = ended
        self.finished.append(ended)
        self.rounds.tell(ended)

    def play(self, trials: int, shuffle: random.Random | None = None) -> Player:
        """Run so many trials, all that can be had at a time, ending in order or shuffled."""
        while len(self.finished) < trials:
            running = self.ask_all()
            assert running, "as long as nothing runs there must be something to do"
            if shuffle is not None:
                shuffle.shuffle(running)
            for trial in running:
                self.finish(trial)
                if self.rounds.present.left > 0 and trial is not running[-1]:
                    break
            for trial in self.running:
                self.finish(trial)
        return self

    def play_on(self, slots: int, trials: int, chance: random.Random) -> Player:
        """Run so many trials on slots that are kept busy; which of them ends next is a matter of chance."""
        while len(self.finished) < trials:
            self.ask_all(slots - len(self.running))
            self.finish(chance.choice(self.running))
        return self

    def play_out(self, slots: int, limit: int, seconds: Callable[[float], float]) -> Player:
        """Send so many trials to slots that are kept busy, and run them all; `seconds` has the budget."""
        now, ends = 0.0, list[tuple[float, int]]()
        while len(self.trials) < limit or ends:
            for trial in self.ask_all(min(slots - len(ends), limit - len(self.trials))):
                heappush(ends, (now + seconds(trial.budget or 0.0), trial.number))
            now, number = heappop(ends)
            self.finish(self.trials[number])
        return self

    def _tick(self) -> float:
        self.now += 1
        return self.now


def shape(trials: Iterable[Trial]) -> list[tuple[int | None, float | None, int | None]]:
    return [(trial.rung, trial.budget, trial.origin) for trial in trials]
