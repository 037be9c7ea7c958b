"""Proposals of new trials: rounds ask for them, shares and policy choose the subspace, its sampler draws the params."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import takewhile
from typing import TypeVar

import numpy as np
from msgspec.structs import replace

from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.trial import WELL, Params, Trial, TrialState
from shadho_celery.fidelity.replay import Replay
from shadho_celery.fidelity.rounds import Endless, Rounds, Wanted
from shadho_celery.placement.policies import Policy
from shadho_celery.placement.pool import WHOLE
from shadho_celery.placement.shares import Shares
from shadho_celery.samplers import MakeSampler, spans_space
from shadho_celery.samplers.auto import AutoSampler
from shadho_celery.samplers.by_budget import ByBudget
from shadho_celery.samplers.own import OwnSampler
from shadho_celery.samplers.unrepeated import Unrepeated
from shadho_celery.scheduler.widths import Width
from shadho_celery.space.split import Subspace, undivided
from shadho_celery.study.limits import Limits
from shadho_celery.study.state import StudyState

P = TypeVar("P")
#: whether a trial fits the class of a name
Fits = Callable[[Trial, str], bool]

#: draws for a slot until one fits its memory
DRAWS = 20

#: results for each trial in a class's queue, where the sampler learns from losses
RESULTS_PER_AHEAD = 4

#: trials of a subspace that may wait for a class with more memory; then new ones come from other subspaces
WAITING_PER_SUBSPACE = 4

#: trials of a subspace too wide for every class that may wait for each narrower one; and draws to find a subspace's
#: narrowest trials
TOO_WIDE = 50


class Proposals:
    """Proposes new trials, and learns from the finished ones."""

    def __init__(
        self,
        study: StudyState,
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
        self._by_name = {subspace.name: subspace for subspace in subspaces}
        #: names, in the order of the search space
        self.subspaces = tuple(self._index)
        #: True if one sampler draws in the whole space, which leaves nothing to the shares
        self._spans_space = spans_space(make_sampler)
        #: by subspace, or one of WHOLE
        self.samplers = (
            {WHOLE: make_sampler(undivided(subspaces[0].space), (self._seed,))}
            if self._spans_space
            else {s.name: make_sampler(s, (self._seed, place)) for place, s in enumerate(subspaces)}
        )
        #: the pool's parts, and the share of its trials that each has
        self._parts = {WHOLE: 1.0} if self._spans_space else {s.name: s.probability for s in subspaces}
        self.policy = policy
        self._pool = policy.pool
        self.shares = shares
        self.rounds = rounds
        self._limits = limits
        self._width = width
        #: slots of the widest class; and by subspace, slots of its narrowest trials
        self._widest = 0
        self._narrowest: dict[str, int] = {}
        #: subspaces, or WHOLE, whose sampler has no further params
        self._exhausted: set[str] = set()
        #: by origin and rung, the promoted trials that were offered, as they would be added
        self._seen_offers: dict[tuple[int | None, int | None], Trial] = {}
        #: by promoted trial that is not sent yet, the one machine that is to run it
        self._machines: dict[int, str] = {}
        self._all_tried: int | None = None
        self._adaptive = any(sampler.adaptive for sampler in self.samplers.values())
        self._learns_by_budget = any(_part(each, ByBudget) is not None for each in self.samplers.values())
        for name in study.drawn():
            shares.deal(name)
        #: takes the results of earlier runs for the rounds; None without such, or without rounds
        self._replay = None if isinstance(rounds, Endless) else Replay(rounds, study.recalled())

    @property
    def is_exhausted(self) -> bool:
        """True once no sampler has further params, and nothing is to be promoted."""
        if len(self._exhausted) < len(self.samplers):
            return False
        return all(offer.origin is None and offer.params is None for offer in self.rounds.offers())

    @property
    def most_ahead(self) -> int:
        """Trials that may wait in a class's queue: what learns from losses should know some before it proposes many."""
        return self._study.counted // RESULTS_PER_AHEAD if self._adaptive else sys.maxsize

    @property
    def all_tried(self) -> int | None:
        """Number of points of a finite space, once all have been tried and trials repeat them; None before."""
        return self._all_tried

    def see(self, classes: Sequence[ComputeClass]) -> None:
        """Update the live classes, the strongest first."""
        self.policy.see_classes([compute_class.name for compute_class in classes])
        if self.policy.promotions is not None:
            self.policy.promotions.see_classes(classes)
        self._widest = max((compute_class.slots for compute_class in classes), default=0)
        slots = sum(compute_class.slots for compute_class in classes)
        self.rounds.see(slots)
        if self._pool is not None:
            self._pool.share_out(slots, self._parts, is_adaptive=self._adaptive)

    def ask(self, compute_class: str, fits: Fits, left: float) -> Trial | None:
        """Return a new trial that `fits` a class; None if none is wanted now.

        Trials that do not fit wait in the study. `left` bounds the trials that are still to be sent, with the waiting
        ones.
        """

        def fits_here(trial: Trial) -> bool:
            return fits(trial, compute_class)

        self._draw_ahead(left)
        draws = 0
        while draws < DRAWS:
            draws += 1
            offers = self._offers(left)
            wanted = next((offer for offer in offers if offer.origin is None), None)
            promotion = self._promotion(compute_class, offers, fits)
            if promotion is not None:
                trial = self._promoted(*promotion)
            elif wanted is not None and wanted.params is not None:
                trial = self._added(self._subspace_of(wanted.params), wanted.params, wanted)
                self.shares.deal(trial.subspace)
            else:
                picked = self._picked(wanted, compute_class, fits_here)
                if isinstance(picked, Trial):
                    return self._taken(picked)
                if picked is None or wanted is None:
                    return None
                drawn = self._drawn(picked, wanted)
                if not drawn:
                    # One subspace less to draw from, which is no misfit.
                    draws -= 1
                    continue
                [trial] = drawn
                self.shares.deal(trial.subspace)
            if fits_here(trial):
                return trial
            self._study.hold_back(trial)
        return None

    def machine_for(self, trial: Trial) -> str | None:
        """Return the one machine that is to run a promoted trial, whose checkpoint it has; None for any of the class.

        The answer is for its first attempt: it is given once.
        """
        return self._machines.pop(trial.number, None)

    def tell(self, *trials: Trial, following: Mapping[str, int] | None = None) -> None:
        """Learn from finished trials, in the order of their results; `following` as in `FinishedTrials.recall`."""
        # Policy `paper` compares losses, which it can at one budget only.
        self.policy.tell(*(trial for trial in trials if not trial.rung), following=following)
        if self.policy.promotions is not None:
            self.policy.promotions.tell(trials)
        self.teach(trials)
        rounds = self._replay or self.rounds
        for trial in trials:
            rounds.tell(trial)

    def end_history(self) -> None:
        """Go on from here: all results of earlier runs are told."""
        if self._replay is not None:
            self._replay.end()
            self._replay = None

    def teach(self, trials: Sequence[Trial]) -> None:
        """Let shares and samplers learn from finished trials, of this study or from elsewhere."""
        by_sampler: defaultdict[str, list[Trial]] = defaultdict(list)
        for trial in trials:
            # Promoted trials are a selection.
            if not self._spans_space and trial.origin is None:
                self.shares.tell(trial)
            if self._learns_by_budget or trial.origin is None:
                by_sampler[WHOLE if self._spans_space else trial.subspace].append(trial)
        for name, told in by_sampler.items():
            if name in self.samplers:
                self.samplers[name].tell(told)

    def _offers(self, left: float) -> Sequence[Wanted]:
        """Return what the rounds offer; nothing if no further trial may wait."""
        return () if self._study.waiting() >= left else self.rounds.offers()

    def _new(self, left: float) -> Wanted | None:
        """Return the offer of a new draw; None if it is the turn of others."""
        offers = self._offers(left)
        if self.policy.promotions is None:
            offers = offers[:1]
        return next((offer for offer in offers if offer.origin is None and offer.params is None), None)

    def _promotion(self, compute_class: str, offers: Sequence[Wanted], fits: Fits) -> tuple[Wanted, str | None] | None:
        """Return the promotion for a slot of a class, and the one machine for it; None if there is none."""
        # Those behind a new trial are of later brackets: it is not their turn.
        wanted = [*takewhile(lambda offer: offer.origin is not None, offers)]
        if not wanted:
            return None
        promotions = self.policy.promotions
        if promotions is None:
            return wanted[0], None
        offered = [self._offered(offer) for offer in wanted]
        self._seen_offers = {(trial.origin, trial.rung): trial for trial in offered}
        new = next((offer.rung for offer in offers if offer.origin is None), None)
        choice = promotions.pick(compute_class, offered, fits, self._study, now=self._study.clock.now(), new=new)
        return None if choice is None else (wanted[choice.place], choice.only_on)

    def _offered(self, wanted: Wanted) -> Trial:
        """Return a promoted trial as it would be added."""
        assert wanted.origin is not None
        key = wanted.origin, wanted.rung
        if key not in self._seen_offers:
            origin = self._study.trial(wanted.origin)
            facts = {"budget": wanted.budget, "rung": wanted.rung, "origin": wanted.origin}
            self._seen_offers[key] = replace(origin, **facts, state=TrialState.WAITING, outcome=None)
        return self._seen_offers[key]

    def _draw_ahead(self, left: float) -> None:
        """Draw the trials that are missing in the policy's pool; their shares count them when they are sent.

        No more are drawn ahead of a subspace than have succeeded there: before, nothing is known of what the params do,
        and of one that only fails every trial drawn would be run.
        """
        if self._pool is None:
            return
        for name, missing in self._pool.missing().items():
            wanted = self._new(left)
            if wanted is None:
                return
            subspace = None if name == WHOLE else name
            drawn = len(self._pool) if subspace is None else self._pool.count(subspace)
            number = min(
                missing,
                left - self._study.waiting(),
                self._quota_left(name, wanted.drawn),
                self._study.count(*WELL, subspace=subspace) - drawn,
            )
            this_round = wanted.drawn
            while number > 0 and name not in self._exhausted and wanted is not None and wanted.drawn == this_round:
                at_once = int(min(number, wanted.left))
                self._pool.add(name, self._drawn(name, wanted, at_once))
                number -= at_once
                wanted = self._new(left)

    def _picked(self, wanted: Wanted | None, compute_class: str, fits: Callable[[Trial], bool]) -> str | Trial | None:
        """Return a trial of the pool that fits, or a subspace that may get a new trial; None if there is neither."""
        if self._spans_space:
            return self._picked_of_all(wanted, compute_class, fits)
        backlogs = self.shares.backlogs()
        left = {name: behind for name, behind in backlogs.items() if name not in self._exhausted}
        may_draw = [] if wanted is None else self._with_quota(left, wanted.drawn) or [*left]
        may_draw = [name for name in may_draw if self._may_wait(name)]
        if len(may_draw) < len(backlogs):
            pooled = () if self._pool is None else self._pool.subspaces
            backlogs = {name: behind for name, behind in backlogs.items() if name in may_draw or name in pooled}
        budget = None if wanted is None else wanted.budget
        picked = self.policy.pick(compute_class, backlogs, fits, budget) if backlogs else None
        return picked if isinstance(picked, Trial) or picked in may_draw else None

    def _picked_of_all(
        self, wanted: Wanted | None, compute_class: str, fits: Callable[[Trial], bool]
    ) -> str | Trial | None:
        """Return a trial of the pool that fits, or WHOLE, if its sampler may draw; None if there is neither."""
        if self._pool is not None and len(self._pool):
            budget = None if wanted is None else wanted.budget
            picked = self.policy.pick(compute_class, dict.fromkeys(self._pool.subspaces, 0.0), fits, budget)
            if isinstance(picked, Trial):
                return picked
        may_draw = wanted is not None and not self._exhausted and self._may_wait(*self.subspaces)
        return WHOLE if may_draw else None

    def _taken(self, trial: Trial) -> Trial:
        """Take a trial out of the pool, for it to be sent, and let another go that has waited there too long."""
        assert self._pool is not None
        self.shares.deal(trial.subspace)
        overdue = self._pool.take(trial)
        if overdue is not None:
            self.shares.deal(overdue.subspace)
            self._study.hold_back(overdue)
        return trial

    def _promoted(self, wanted: Wanted, only_on: str | None) -> Trial:
        """Add a trial again, on a higher rung."""
        offered = self._offered(wanted)
        del self._seen_offers[wanted.origin, wanted.rung]
        draw = (offered.subspace, offered.params, offered.seed)
        trial = self._study.add(*draw, wanted.budget, slots=offered.slots, rung=wanted.rung, origin=wanted.origin)
        self.rounds.add(trial)
        if only_on is not None:
            self._machines[trial.number] = only_on
        return trial

    def _drawn(self, name: str, wanted: Wanted, number: int = 1) -> list[Trial]:
        """Add so many new trials in the subspace called `name`, or in those of WHOLE."""
        sampler = self.samplers[name]
        asked = sampler.ask(number, self._study.pending() if name == WHOLE else self._study.pending(name))
        if (auto := _part(sampler, AutoSampler)) is not None:
            by_budget = _part(sampler, ByBudget)
            budget = None if by_budget is None else by_budget.budget
            words = "" if budget is None else f", by the losses at budget {budget:g}"
            self._study.note_choice(name, auto.choice + words)
        if len(asked) < number:
            self._exhausted.add(name)
            if self.is_exhausted:
                self._let_repeat()
            if len(self._exhausted) == len(self.samplers):
                self.rounds.end_draws()
        if name != WHOLE:
            return [self._added(name, params, wanted) for params in asked]
        return [self._added(self._subspace_of(params), params, wanted) for params in asked]

    def _let_repeat(self) -> None:
        """Let the samplers that may repeat points do so: every point has been tried, and losses may be noisy."""
        repeating = [each for sampler in self.samplers.values() if (each := _part(sampler, Unrepeated)) is not None]
        for each in repeating:
            each.may_repeat = True
        if repeating:
            self._exhausted.clear()
            self._all_tried = sum(each.points or 0 for each in repeating)

    def _subspace_of(self, params: Params) -> str:
        return next(name for name, subspace in self._by_name.items() if subspace.contains(params))

    def _added(self, name: str, params: Params, wanted: Wanted) -> Trial:
        seed = trial_seed(self._seed, self._index[name], self._study.asked(name))
        trial = self._study.add(name, params, seed, wanted.budget, slots=self._width(params), rung=wanted.rung)
        self.rounds.add(trial)
        return trial

    def _may_wait(self, *names: str) -> bool:
        """Return True if another trial of some subspaces may wait; the waiting ones are too large for the class.

        Trials too wide for every class do not count, as long as the subspaces have narrower ones.
        """
        waiting = 0
        for name in names:
            waiting += self._study.waiting(name)
            waiting -= 0 if self._pool is None else self._pool.count(name)
        most = WAITING_PER_SUBSPACE * len(names)
        if waiting < most:
            return True
        too_wide = sum(self._study.count_wider(self._widest, name) for name in names)
        if self._pool is not None:
            too_wide -= sum(trial.slots > self._widest for name in names for trial in self._pool.of(name))
        if waiting - too_wide >= most or min(map(self._least_slots, names)) > self._widest:
            return False
        return too_wide < TOO_WIDE * (1 + sum(map(self._study.asked, names)) - too_wide)

    def _least_slots(self, name: str) -> int:
        """Return the slots of the narrowest trials of a subspace, estimated from some draws."""
        if name not in self._narrowest:
            draws = self._by_name[name].sample(np.random.default_rng(self._seed), TOO_WIDE)
            self._narrowest[name] = min(self._width(params) for params in draws)
        return self._narrowest[name]

    def _quota_left(self, name: str, drawn: int | None) -> float:
        """Return how many more trials may be drawn in a subspace, or in WHOLE."""
        quotas = self._quotas(drawn)
        return math.inf if quotas is None else quotas[name] - self._study.asked(name)

    def _with_quota(self, names: Collection[str], drawn: int | None) -> list[str]:
        """Return the subspaces in which more trials may be drawn."""
        quotas = self._quotas(drawn)
        return [*names] if quotas is None else [name for name in names if quotas[name] > self._study.asked(name)]

    def _quotas(self, drawn: int | None) -> Mapping[str, int] | None:
        """Return the trials that are to be drawn by subspace; None if their numbers are not fixed.

        If the proposals do not depend on the losses, a limit on trials fixes the number of each subspace. The policy
        then decides only on their order and place, and the seed on the set. In rounds, the limit is the number `drawn`
        by the end of each.
        """
        limit = self._limits.trials if drawn is None else drawn
        if limit is None or not self.shares.fixed or self._adaptive or self._spans_space:
            return None
        total = limit + (self._study.count(TrialState.CANCELLED) if drawn is None else 0)
        return self.shares.quotas(total)


def _part(sampler: object, kind: type[P]) -> P | None:
    """Return the part of a sampler that is of a kind: some ask another one within them."""
    while not isinstance(sampler, kind):
        if not isinstance(sampler, (Unrepeated, ByBudget, OwnSampler)):
            return None
        sampler = sampler.sampler
    return sampler


def trial_seed(seed: int, subspace: int, index: int) -> int:
    """Return the seed of a subspace's trial number `index`, independent of the timing of the trials."""
    entropy = (seed, subspace, index)
    # The same as of a tuple, in half the time.
    words = np.array(entropy, np.uint32) if seed < 2**32 else entropy
    return int(np.random.SeedSequence(words).generate_state(1)[0])
