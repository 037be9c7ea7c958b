"""Proposals of new trials: rounds say which there are to be, shares and policy choose the subspace, its sampler the params."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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

#: new trials that are drawn for a slot until one fits its memory
DRAWS = 20

#: trials of a subspace that may wait for a class with more memory; then the others draw in other subspaces
WAITING_PER_SUBSPACE = 4

#: trials of a subspace too wide for every class that may wait for each one that is not; and draws that show whether
#: there are such at all
TOO_WIDE = 50

MakeSampler = Callable[[Subspace, Sequence[int]], Sampler]


class Proposals:
    """Proposes new trials, and learns from those that have finished which to propose."""

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
        """Take the trials that the study has into account, but learn nothing from them: `tell` does."""
        self._study = study
        self._seed = study.record.seed
        self._index = {subspace.name: place for place, subspace in enumerate(subspaces)}
        self._subspaces = {subspace.name: subspace for subspace in subspaces}
        #: one for each subspace, by its name
        self.samplers = {s.name: make_sampler(s, (self._seed, place)) for place, s in enumerate(subspaces)}
        self.policy = policy
        self.shares = shares
        self.rounds = rounds
        self._limits = limits
        self._width = width
        #: slots of the class that has most of them; and by subspace, those of its narrowest trials
        self._widest = 0
        self._narrowest: dict[str, int] = {}
        self._adaptive = any(sampler.adaptive for sampler in self.samplers.values())
        self._quotas: dict[str, int] = {}
        self._quotas_for = -1
        for trial in study:
            if trial.origin is None:
                shares.deal(trial.subspace)
            rounds.add(trial)

    def see(self, classes: Sequence[ComputeClass]) -> None:
        """Take note of the live classes, the strongest first."""
        self.policy.see_classes([compute_class.name for compute_class in classes])
        self._widest = max((compute_class.slots for compute_class in classes), default=0)

    def ask(self, compute_class: str, fits: Callable[[Trial], bool], left: float) -> Trial | None:
        """Return a new trial that `fits` a class; None where there is to be none now.

        Those that do not fit wait in the study. `left` is how many trials may still be sent, those that wait included.
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
            # It stays in the study until a class has room that it fits.
            self._study.hold_back(trial)
        return None

    def tell(self, *trials: Trial) -> None:
        """Learn from trials, in the order in which they finished."""
        # Losses compare at one budget only: those of the higher rungs are about trials that were chosen already.
        lowest = [trial for trial in trials if not trial.rung]
        self.policy.tell(*lowest)
        for trial in lowest:
            self.shares.tell(trial)
            if trial.subspace in self.samplers:
                self.samplers[trial.subspace].tell(trial)
        for trial in trials:
            self.rounds.tell(trial)

    def _made(self, wanted: Wanted, compute_class: str) -> Trial | None:
        """Return what is wanted, as a trial of the study; None where no subspace may get a new one."""
        if wanted.origin is not None:
            return self._promoted(self._study.trial(wanted.origin), wanted)
        backlogs = {name: behind for name, behind in self._backlogs(wanted.drawn).items() if self._may_wait(name)}
        return self._drawn(self.policy.pick(compute_class, backlogs), wanted) if backlogs else None

    def _promoted(self, origin: Trial, wanted: Wanted) -> Trial:
        """Return the trial again, on a higher rung."""
        return self._study.add(
            origin.subspace,
            origin.params,
            origin.seed,
            wanted.budget,
            slots=origin.slots,
            rung=wanted.rung,
            origin=origin.number,
        )

    def _drawn(self, name: str, wanted: Wanted) -> Trial:
        """Return a new trial in the subspace called `name`."""
        place = self._study.asked(name)
        params = self.samplers[name].ask(place)
        self.shares.deal(name)
        seed = trial_seed(self._seed, self._index[name], place)
        return self._study.add(name, params, seed, wanted.budget, slots=self._width(params), rung=wanted.rung)

    def _may_wait(self, name: str) -> bool:
        """Return whether another trial of a subspace may be held back; those that wait are too large for the class.

        What is too wide for every class keeps none of these from narrower trials, where there are such.
        """
        waiting = self._study.count(TrialState.WAITING, subspace=name)
        if waiting < WAITING_PER_SUBSPACE:
            return True
        too_wide = self._study.count_wider(self._widest, name)
        if waiting - too_wide >= WAITING_PER_SUBSPACE or self._least_slots(name) > self._widest:
            return False
        return too_wide < TOO_WIDE * (1 + self._study.asked(name) - too_wide)

    def _least_slots(self, name: str) -> int:
        """Return the slots that the narrowest trials of a subspace take, as far as some draws show."""
        if name not in self._narrowest:
            draws = self._subspaces[name].sample(np.random.default_rng(self._seed), TOO_WIDE)
            self._narrowest[name] = min(self._width(params) for params in draws)
        return self._narrowest[name]

    def _backlogs(self, drawn: int | None) -> dict[str, float]:
        """Return the subspaces that may get a trial, with how far each is behind its share, the furthest first.

        Where the proposals do not depend on the losses, a limit on trials fixes each subspace's number of them: the
        policy decides on order and place, the seed on the set. In rounds it is those `drawn` by the end of each.
        """
        backlogs = self.shares.backlogs()
        limit = self._limits.trials if drawn is None else drawn
        if limit is None or not self.shares.fixed or self._adaptive:
            return backlogs
        total = limit + (self._study.count(TrialState.CANCELLED) if drawn is None else 0)
        if total != self._quotas_for:
            self._quotas, self._quotas_for = self.shares.quotas(total), total
        return {n: behind for n, behind in backlogs.items() if self._study.asked(n) < self._quotas[n]} or backlogs


def trial_seed(seed: int, subspace: int, index: int) -> int:
    """Return the seed of a subspace's trial number `index`: the same however the study's trials are timed."""
    return int(np.random.SeedSequence((seed, subspace, index)).generate_state(1)[0])
