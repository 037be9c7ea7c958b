"""Proposals of new trials: rounds ask for them, shares and policy choose the subspace, its sampler draws the params."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import numpy as np

from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.trial import Trial, TrialState
from shadho_celery.placement.policies import Policy
from shadho_celery.placement.shares import Shares
from shadho_celery.samplers.base import Sampler
from shadho_celery.scheduler.rounds import Rounds, Wanted
from shadho_celery.scheduler.widths import Width
from shadho_celery.space.split import Subspace
from shadho_celery.study.limits import Limits
from shadho_celery.study.study import Study

#: draws for a slot until one fits its memory
DRAWS = 20

#: trials of a subspace that may wait for a class with more memory; then new ones come from other subspaces
WAITING_PER_SUBSPACE = 4

#: trials of a subspace too wide for every class that may wait for each narrower one; and draws to find a subspace's
#: narrowest trials
TOO_WIDE = 50

MakeSampler = Callable[[Subspace, Sequence[int]], Sampler]


class Proposals:
    """Proposes new trials, and learns from the finished ones."""

    def __init__(
        self,
        study: Study,
        subspaces: Sequence[Subspace],
        *,
        policy: Policy,
        shares: Shares,
        rounds: Rounds,
        make_sampler: MakeSampler,
        limits: Limits,
        width: Width,
    ) -> None:
        """Count the trials of the study; learning from them is left to `tell`."""
        self._study = study
        self._seed = study.record.seed
        self._index = {subspace.name: place for place, subspace in enumerate(subspaces)}
        self._subspaces = subspaces
        #: samplers by subspace
        self.samplers = {s.name: make_sampler(s, (self._seed, place)) for place, s in enumerate(subspaces)}
        self.policy = policy
        self.shares = shares
        self.rounds = rounds
        self._limits = limits
        self._width = width
        #: slots of the widest class; and by subspace, slots of its narrowest trials
        self._widest = 0
        self._narrowest: dict[str, int] = {}
        self._adaptive = any(sampler.adaptive for sampler in self.samplers.values())
        #: trials by subspace for a total, of which there is one at a time
        self._quotas = lru_cache(maxsize=1)(shares.quotas)
        for name in study.drawn():
            shares.deal(name)
        if rounds.size is not None:
            for trial in study.recalled():
                rounds.add(trial)

    def see(self, classes: Sequence[ComputeClass]) -> None:
        """Update the live classes, the strongest first."""
        self.policy.see_classes([compute_class.name for compute_class in classes])
        self._widest = max((compute_class.slots for compute_class in classes), default=0)

    def ask(self, compute_class: str, fits: Callable[[Trial], bool], left: float) -> Trial | None:
        """Return a new trial that `fits` a class; None if none is wanted now.

        Trials that do not fit wait in the study. `left` bounds the trials that are still to be sent, with the waiting
        ones.
        """
        for _ in range(DRAWS):
            wanted = self.rounds.ask()
            if wanted is None or self._study.count(TrialState.WAITING) >= left:
                return None
            trial = self._made(wanted, compute_class)
            if trial is None:
                return None
            self.rounds.add(trial)
            if fits(trial):
                return trial
            self._study.hold_back(trial)
        return None

    def tell(self, *trials: Trial, following: Mapping[str, int] | None = None) -> None:
        """Learn from finished trials, in the order of their results; `following` as in `FinishedTrials.recall`."""
        # Losses compare at one budget only, and the trials on higher rungs are a selection.
        lowest = [trial for trial in trials if not trial.rung]
        self.policy.tell(*lowest, following=following)
        for trial in lowest:
            self.shares.tell(trial)
            if trial.subspace in self.samplers:
                self.samplers[trial.subspace].tell(trial)
        for trial in trials:
            self.rounds.tell(trial)

    def _made(self, wanted: Wanted, compute_class: str) -> Trial | None:
        """Add the wanted trial to the study; None if no subspace may get a new one."""
        if wanted.origin is not None:
            return self._promoted(self._study.trial(wanted.origin), wanted)
        backlogs = {name: behind for name, behind in self._backlogs(wanted.drawn).items() if self._may_wait(name)}
        return self._drawn(self.policy.pick(compute_class, backlogs), wanted) if backlogs else None

    def _promoted(self, origin: Trial, wanted: Wanted) -> Trial:
        """Add the trial again, on a higher rung."""
        draw = (origin.subspace, origin.params, origin.seed)
        return self._study.add(*draw, wanted.budget, slots=origin.slots, rung=wanted.rung, origin=origin.number)

    def _drawn(self, name: str, wanted: Wanted) -> Trial:
        """Add a new trial in the subspace called `name`."""
        place = self._study.asked(name)
        params = self.samplers[name].ask(place)
        self.shares.deal(name)
        seed = trial_seed(self._seed, self._index[name], place)
        return self._study.add(name, params, seed, wanted.budget, slots=self._width(params), rung=wanted.rung)

    def _may_wait(self, name: str) -> bool:
        """Return True if another trial of a subspace may wait; the waiting ones are too large for the class.

        Trials too wide for every class do not count, as long as the subspace has narrower ones.
        """
        waiting = self._study.count(TrialState.WAITING, subspace=name)
        if waiting < WAITING_PER_SUBSPACE:
            return True
        too_wide = self._study.count_wider(self._widest, name)
        if waiting - too_wide >= WAITING_PER_SUBSPACE or self._least_slots(name) > self._widest:
            return False
        return too_wide < TOO_WIDE * (1 + self._study.asked(name) - too_wide)

    def _least_slots(self, name: str) -> int:
        """Return the slots of the narrowest trials of a subspace, estimated from some draws."""
        if name not in self._narrowest:
            draws = self._subspaces[self._index[name]].sample(np.random.default_rng(self._seed), TOO_WIDE)
            self._narrowest[name] = min(self._width(params) for params in draws)
        return self._narrowest[name]

    def _backlogs(self, drawn: int | None) -> dict[str, float]:
        """Return the backlog of each subspace that may get a trial, the one whose turn it is first.

        If the proposals do not depend on the losses, a limit on trials fixes the number of each subspace. The policy
        then decides only on their order and place, and the seed on the set. In rounds, the limit is the number `drawn`
        by the end of each.
        """
        backlogs = self.shares.backlogs()
        limit = self._limits.trials if drawn is None else drawn
        if limit is None or not self.shares.fixed or self._adaptive:
            return backlogs
        total = limit + (self._study.count(TrialState.CANCELLED) if drawn is None else 0)
        quotas = self._quotas(total)
        return {n: behind for n, behind in backlogs.items() if self._study.asked(n) < quotas[n]} or backlogs


def trial_seed(seed: int, subspace: int, index: int) -> int:
    """Return the seed of a subspace's trial number `index`, independent of the timing of the trials."""
    entropy = (seed, subspace, index)
    # The same as of a tuple, in half the time.
    words = np.array(entropy, np.uint32) if seed < 2**32 else entropy
    return int(np.random.SeedSequence(words).generate_state(1)[0])
