"""Proposals of new trials.

The rounds (`fidelity.rounds`) request a trial with a budget, the shares and the policy choose its subspace, and the
sampler of the subspace proposes the params. `make_samplers` creates the samplers of a study.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import groupby
from typing import TypeVar

import numpy as np
from msgspec.structs import replace

from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.trial import NO_OUTCOME, WELL, Params, Trial, TrialState
from shadho_celery.fidelity.rounds import Replay, Rounds, Wanted
from shadho_celery.placement.base import Choice, Excess, Fits, Offers, Policy, Slot
from shadho_celery.placement.policies import CostPolicy
from shadho_celery.placement.pool import WHOLE
from shadho_celery.placement.shares import UniformShares
from shadho_celery.placement.widths import Width
from shadho_celery.samplers import Maker
from shadho_celery.samplers.auto import AutoSampler, Decade
from shadho_celery.samplers.random import LearnsBudgets, Sampler, WholeSampler
from shadho_celery.samplers.wrapped import ByBudget, OwnSampler, Unrepeated
from shadho_celery.space.split import UNDIVIDED, Subspace, undivided
from shadho_celery.study.repeats import FEW
from shadho_celery.study.state import Limits, StudyState

P = TypeVar("P")

#: recorded instead of a sampler for trials whose params a user has given: trials to run, and trials with a result
ENQUEUED, ADDED = "enqueued", "added"
#: recorded instead of a sampler for repeats
REPEATED = "repeated"
#: while new trials are drawn, one in this number of trials may be a repeat
REPEAT_EVERY = 10

#: maximum number of draws for a slot until a trial fits the slot's class
DRAWS = 20

#: if the sampler learns from losses, at most one trial is queued in a class for this many results
RESULTS_PER_AHEAD = 4

#: maximum number of a subspace's trials that wait for a larger class; then new trials come from other subspaces
WAITING_PER_SUBSPACE = 4

#: number of latest trials, for each subspace or budget, from which the mix of subspaces or budgets is estimated
SHOWN = 20

#: maximum number of waiting trials that are too wide for every class, for each trial that is not too wide; also the
#: number of draws from which the slots of a subspace's narrowest trials are estimated
TOO_WIDE = 50


@dataclass(eq=False)
class Proposals:
    """Proposes new trials of a study, and learns from its finished trials."""

    study: StudyState
    members: Sequence[Subspace]
    _: KW_ONLY
    policy: Policy
    shares: UniformShares
    rounds: Rounds
    #: samplers by subspace, or a single sampler under WHOLE, see `make_samplers`
    samplers: Mapping[str, Sampler]
    #: name of the samplers, which is recorded with each trial
    sampler: str
    limits: Limits
    width: Width
    #: budgets of the ladder, the lowest first; () without one
    budgets: Sequence[float] = ()

    def __post_init__(self) -> None:
        samplers = self.samplers
        self._index = {subspace.name: index for index, subspace in enumerate(self.members)}
        #: names of the subspaces, in the order of the search space
        self.subspaces = tuple(self._index)
        #: True if one sampler draws in the whole space, so that shares do not apply
        self.spans_space = WHOLE in samplers
        #: slots of all classes that the study may use; slots of the widest trial that some class can run
        self.slots = self._widest = 0
        #: seconds until the limit on time; infinity without one
        self._seconds_left = math.inf
        #: by subspace: number of slots of its narrowest trials
        self._narrowest: dict[str, int] = {}
        #: subspaces, or WHOLE, whose sampler has no more params
        self._exhausted: set[str] = set()
        #: by subspace and number: trials that were drawn ahead for the policy and not sent yet
        self._ahead: defaultdict[str, dict[int, Trial]] = defaultdict(dict)
        #: True once a trial that was drawn ahead is too wide for every class
        self._has_too_wide = False
        #: numbers of the trials drawn ahead that an earlier run has drawn; the shares have already counted them
        self._dealt: set[int] = set()
        #: by origin and rung: the promotions that the rounds offer, each as the trial that would be added
        self._promotable: dict[tuple[int | None, int | None], Trial] = {}
        #: by number of a promoted trial that was not sent yet: the only machine that may run its first attempt, because
        #: it has the checkpoint
        self.machines: dict[int, str] = {}
        #: number of points of a finite space once all of them have been tried, so that trials repeat them; None before
        self.all_tried: int | None = None
        #: subspaces of the latest new trials; budgets of the latest trials
        self._latest: deque[str] = deque(maxlen=SHOWN * len(self.members))
        self._budgets: deque[float] = deque(maxlen=SHOWN * max(1, len(self.budgets)))
        self._adaptive = any(sampler.adaptive for sampler in samplers.values())
        #: decade of the seconds of the study's first trials, shared by the samplers of all subspaces
        self._decade = Decade(self.study.decade)
        self._learns_budgets = any(_part(each, LearnsBudgets) or _part(each, ByBudget) for each in samplers.values())
        for sampler in samplers.values():
            if (auto := _part(sampler, AutoSampler)) is not None:
                auto.decade = self._decade
        #: sampler that learns from all subspaces; None if each subspace has its own
        self._whole: WholeSampler | None = None
        if len(samplers) > 1 and isinstance(first := next(iter(samplers.values())), Unrepeated):
            self._whole = first.sampler
        #: latest result of this sampler's `outlook`: factors of the subspaces' probabilities for the shares
        self._followed: Mapping[str, float] = {}
        #: subspaces whose failures are forgotten, because another version of the code ran; subspaces with a later trial
        #: of this version; and, in order, subspaces that get a trial before others
        self._forgotten: set[str] = set()
        self._current: set[str] = set()
        self._renewed: list[str] = []
        #: replays the results of earlier runs to the rounds; None after the replay, or in a study without budgets
        self._replay: Replay | None = None

    def begin(self) -> None:
        """Count the trials of earlier runs, and offer the policy the trials that were drawn ahead and not sent.

        The caller then calls `tell` with their results.
        """
        for name in self.study.drawn():
            self.deal(name)
        if self.budgets:
            self._replay = Replay(self.rounds, (trial for trial in self.study.recalled() if not trial.is_repeat))
        elif isinstance(self.policy, CostPolicy):
            while (trial := self.study.next_waiting(self._was_ahead)) is not None:
                self._ahead[trial.subspace][trial.number] = trial
                self._dealt.add(trial.number)
                self.policy.offer([trial])

    def _was_ahead(self, trial: Trial) -> bool:
        """Return whether a waiting trial of an earlier run was drawn ahead, so that the policy should place it."""
        is_drawn = trial.sampler not in {None, ENQUEUED, ADDED}
        return is_drawn and not trial.attempt and trial.origin is None and trial.subspace in self._index

    def deal(self, subspace: str) -> None:
        """Record that a new trial of a subspace is sent."""
        self.shares.deal(subspace)
        self._latest.append(subspace)

    def mix(self, trials: int) -> dict[str, float]:
        """Return the expected number of trials of each subspace among the next `trials` trials.

        If shares are fixed, a subspace that is behind its share gets more. Otherwise the mix depends on losses and is
        estimated from the latest trials. As a prior, as many trials as there are subspaces are added, divided by the
        probabilities of the space.
        """
        if self.shares.fixed and not self.spans_space:
            waiting = {name: self.study.count(TrialState.WAITING, subspace=name) for name in self.subspaces}
            sent = {name: self.study.asked(name) - waiting[name] for name in self.subspaces}
            quotas = self.shares.quotas(trials + sum(sent.values()))
            return {name: float(max(0, quotas[name] - sent[name])) for name in self.subspaces}
        latest, total = Counter(self._latest), len(self._latest) + len(self.members)
        law = {each.name: each.probability * len(self.members) for each in self.members}
        return {name: trials * (latest[name] + number) / total for name, number in law.items()}

    def budget_mix(self) -> dict[float, float]:
        """Return the expected share of each budget among the next trials; {} without a ladder.

        It is estimated from the latest trials. As a prior, trials in inverse proportion to their budgets are added,
        half as many as the maximum number of latest trials.
        """
        latest, law = Counter(self._budgets), sum(1 / each for each in self.budgets)
        weight = SHOWN / 2 * len(self.budgets)
        total = sum(latest[each] for each in self.budgets) + weight
        return {each: (latest[each] + weight / each / law) / total for each in self.budgets}

    @property
    def is_exhausted(self) -> bool:
        """True once no sampler has more params, and the rounds offer neither promotions nor params of their own."""
        if len(self._exhausted) < len(self.samplers):
            return False
        return all(offer.origin is None and offer.params is None for offer in self.rounds.offers(self.slots))

    def is_ahead(self, trial: Trial) -> bool:
        """Return whether a trial was drawn ahead and not sent yet. The policy may choose such a trial for any slot."""
        return trial.number in self._ahead[trial.subspace]

    @property
    def most_ahead(self) -> int:
        """Maximum number of trials in a class's queue. It is small at first for a sampler that learns from losses."""
        return self.study.counted // RESULTS_PER_AHEAD if self._adaptive else sys.maxsize

    def see(self, classes: Sequence[ComputeClass], seconds_left: float = math.inf) -> None:
        """Update the live classes, the strongest first, and the seconds until the limit on time."""
        self.policy.see(classes)
        self._seconds_left = seconds_left
        self.slots = sum(compute_class.slots for compute_class in classes)
        self.slots = min(self.slots, self.limits.at_once or self.slots)
        self._widest = max((compute_class.room for compute_class in classes), default=0)

    def prices(self, subspace: str) -> Mapping[str, float]:
        """Return the prices of the live classes for the trials of a subspace; {} if the policy has no prices."""
        return self.policy.prices(subspace) if self.spans_space or subspace in self._index else {}

    def ask(
        self, compute_class: ComputeClass, fits: Fits, trials_left: float, excess: Excess | None = None
    ) -> Trial | None:
        """Return a new trial that `fits` a class, or None if no trial is wanted now.

        New trials that do not fit wait in the study. `trials_left` is the maximum number of trials that may still be
        sent, waiting trials included. `excess` is as in `Slot`.
        """
        slot = Slot(compute_class, self.study, self.study.clock.now(), excess, self._seconds_left)
        # Trials that are drawn ahead take no place of the last repeats.
        reserve = min(FEW * (self.study.trials.repeats.wanted - 1), (self.limits.trials or 0) // 2)
        if wants := self.policy.wants():
            self._draw_ahead(wants, trials_left - reserve)
        for _ in range(DRAWS):
            trial = self._repeated(trials_left, reserve) or self._chosen(slot, fits, trials_left)
            if trial is None or fits(trial, compute_class):
                return trial
            self.study.put_waiting(trial)
        return None

    def tell(self, trials: Sequence[Trial], following: Mapping[str, int] | None = None) -> None:
        """Learn from finished trials, in the order of their results. `following` is as in `FinishedTrials.recall`."""
        self.policy.tell(trials, following)
        self.teach(trials)
        rounds = self._replay or self.rounds
        for trial in trials:
            if not trial.is_repeat:
                rounds.tell(trial)

    def end_history(self) -> None:
        """End the replay of earlier runs. Call this after all their results were passed to `tell`.

        Subspaces with forgotten failures are treated as new by the shares, and are tried first.
        """
        if self._forgotten:
            self.shares.restart(self._forgotten & self._index.keys())
        likely_first = sorted(self.members, key=lambda each: -each.probability)
        self._renewed = [each.name for each in likely_first if each.name in self._forgotten - self._current]
        if self._replay is not None:
            self._replay.end()
            self._replay = None

    def teach(self, trials: Sequence[Trial]) -> None:
        """Let shares and samplers learn from finished trials of this study, or from those of its warm start."""
        told, trials = trials, [*map(self.study.current, trials)]
        for old, new in zip(told, trials, strict=True):
            if old.state is not new.state:
                self._forgotten.add(new.subspace)
                self._current.discard(new.subspace)
            elif new.state is not TrialState.CANCELLED and new.outcome.code == self.study.code:
                self._current.add(new.subspace)
        # Shares do not learn from promoted and repeated trials, because these are selected for their good losses.
        if not self.spans_space:
            for trial in trials:
                if trial.origin is None:
                    self.shares.tell(trial)
        # In the stream of a sampler that does not learn, only its own proposals have places.
        learns = self._learns_budgets, self._adaptive
        learned = (trial for trial in trials if trial.origin is None or learns[trial.is_repeat])
        tell_samplers(self.samplers, learned)
        if self._decade.recorded is not None:
            self.study.note_decade(self._decade.recorded)

    def _chosen(self, slot: Slot, fits: Fits, trials_left: float) -> Trial | None:
        """Return the trial that the policy chooses for a slot, after adding it to the study if it is new.

        Returns None if no trial is wanted now.
        """
        while True:
            wanted, offers = self._offers(trials_left)
            is_renewed = bool(self._renewed) and wanted is not None and wanted.params is None
            choice = Choice(self._renewed.pop(0)) if is_renewed else self.policy.pick(slot, offers, fits)
            picked = None if choice is None else choice.picked
            if choice is not None and isinstance(picked, Trial):
                return self._taken(picked) if picked.origin is None else self._promoted(picked, choice)
            if wanted is None:
                return None
            if wanted.params is not None:
                drawn = [self._added(self._subspace_of(wanted.params), wanted.params, wanted, wanted.sampler)]
            elif isinstance(picked, str):
                drawn = self._drawn(picked, wanted)
            else:
                return None
            if drawn:
                self._note_budget(drawn[0])
                self.deal(drawn[0].subspace)
                return drawn[0]
            # The sampler of this subspace has no more params, so choose again among the other subspaces.

    @property
    def lacking(self) -> Sequence[int]:
        """Numbers of the trials to repeat, see `Repeats.lacking`."""
        return self.study.trials.repeats.lacking(self.study.repeating, self.limits.budget)

    def _repeated(self, trials_left: float, reserve: int) -> Trial | None:
        """Add the repeat that is due to the study. Return it, or None if no repeat is due.

        While new trials are drawn, one in REPEAT_EVERY trials may be a repeat. At the end of the search, and with the
        last `reserve` trials within the limit, the best trials get all the results that they lack.
        """
        if self.study.trials.repeats.wanted == 1:
            return None
        left, lacking = trials_left - self.study.count(TrialState.WAITING), self.lacking
        is_end = left <= min(len(lacking), reserve) or len(self._exhausted) == len(self.samplers)
        if left <= 0 or not lacking or not (is_end or (len(self.study) + 1) % REPEAT_EVERY == 0):
            return None
        first = self.study.trial(lacking[0])
        seed = trial_seed(first.seed, first.number, len(self.study))
        facts = first.subspace, first.params, seed, first.budget
        return self.study.add(*facts, slots=first.slots, origin=first.number, sampler=REPEATED)

    def _wanted(self, trials_left: float) -> tuple[Sequence[Wanted], Wanted | None]:
        """Return the promotions that the rounds offer, and the new trial that they want next, or None.

        Nothing is wanted if the number of waiting trials has reached `trials_left`, the number that may still be sent.
        """
        if self.study.count(TrialState.WAITING) >= trials_left:
            return (), None
        offers = self.rounds.offers(self.slots)
        new = next((index for index, offer in enumerate(offers) if offer.origin is None), None)
        # Offers after the first new trial belong to later brackets and are not due yet.
        return (offers, None) if new is None else (offers[:new], offers[new])

    def _offers(self, trials_left: float) -> tuple[Wanted | None, Offers]:
        """Return the new trial that the rounds want next, or None, and the offers among which the policy chooses."""
        promotions, new = self._wanted(trials_left)
        known, self._promotable = self._promotable, {}
        for wanted in promotions:
            assert wanted.origin is not None
            key = wanted.origin, wanted.rung
            facts = {"budget": wanted.budget, "rung": wanted.rung, "origin": wanted.origin}
            self._promotable[key] = known.get(key) or replace(
                self.study.trial(wanted.origin), **facts, state=TrialState.WAITING, outcome=NO_OUTCOME
            )
        if self._whole is not None and self.shares.follows:
            outlook = self._whole.outlook(self.members, len(self.study.pending()))
            if outlook is not self._followed:
                self._followed = outlook
                self.shares.follow(outlook)
        backlogs = {} if self.spans_space else self.shares.backlogs()
        return new, Offers(
            backlogs=backlogs,
            open=[] if new is None or new.params is not None else self._open(backlogs, new.drawn),
            promotions=[*self._promotable.values()],
            budget=None if new is None else new.budget,
            rung=None if new is None else new.rung,
        )

    def _open(self, backlogs: Mapping[str, float], drawn: int | None) -> list[str]:
        """Return the names of the subspaces in which a new trial may be drawn, or WHOLE for the whole space."""
        if self.spans_space:
            return [WHOLE] if not self._exhausted and self._may_wait(*self.subspaces) else []
        left, quotas = [name for name in backlogs if name not in self._exhausted], self._quotas(drawn)
        if quotas is not None:
            left = [name for name in left if quotas[name] > self.study.asked(name)] or left
        return [name for name in left if self._may_wait(name)]

    def _draw_ahead(self, wants: Mapping[str, int], trials_left: float) -> None:
        """Draw trials ahead: for each subspace the number in `wants`, which comes from the policy.

        The shares count them when they are sent. The number of trials drawn ahead in a subspace is at most the number
        of trials that have succeeded there. Before the first success, nothing is known about the effect of the params;
        and in a subspace that always fails, all trials drawn ahead would have to be run.
        """
        for name, missing in wants.items():
            wanted = self._new(trials_left)
            if wanted is None:
                return
            subspaces = self.subspaces if name == WHOLE else (name,)
            quotas = self._quotas(wanted.drawn)
            number = min(
                missing,
                trials_left - self.study.count(TrialState.WAITING),
                math.inf if quotas is None else quotas[name] - self.study.asked(name),
                self.study.count(*WELL, subspace=None if name == WHOLE else name)
                - sum(len(self._ahead[each]) for each in subspaces),
            )
            this_round = wanted.drawn
            while number > 0 and name not in self._exhausted and wanted is not None and wanted.drawn == this_round:
                if self._has_too_wide and not self._may_wait(*subspaces):
                    break
                at_once = int(min(number, wanted.left))
                drawn = self._drawn(name, wanted, at_once)
                for trial in drawn:
                    if trial.slots <= self._widest:
                        self._ahead[trial.subspace][trial.number] = trial
                    else:
                        # The policy could not place this trial, so it waits in the study.
                        self._has_too_wide = True
                        self._note_budget(trial)
                        self.deal(trial.subspace)
                        self.study.put_waiting(trial)
                self.policy.offer([trial for trial in drawn if self.is_ahead(trial)])
                number -= at_once
                wanted = self._new(trials_left)

    def _new(self, trials_left: float) -> Wanted | None:
        """Return the next new trial that the rounds want if a sampler draws it, or None."""
        _, new = self._wanted(trials_left)
        return None if new is None or new.params is not None else new

    def _taken(self, trial: Trial) -> Trial:
        """Remove a trial from those drawn ahead, and return it."""
        self._note_budget(trial)
        if trial.number in self._dealt:
            self._dealt.remove(trial.number)
        else:
            self.deal(trial.subspace)
        del self._ahead[trial.subspace][trial.number]
        return trial

    def _promoted(self, offered: Trial, choice: Choice) -> Trial:
        """Add a promotion to the study: a trial with the params of its origin, on a higher rung. Return it."""
        trial = self.study.add(
            *(offered.subspace, offered.params, offered.seed, offered.budget),
            slots=offered.slots,
            rung=offered.rung,
            origin=offered.origin,
            sampler="promoted",
        )
        self._note_budget(trial)
        self.rounds.add(trial)
        if choice.only_on is not None:
            self.machines[trial.number] = choice.only_on
        return trial

    def _note_budget(self, trial: Trial) -> None:
        if trial.budget is not None:
            self._budgets.append(trial.budget)

    def _drawn(self, name: str, wanted: Wanted, number: int = 1) -> list[Trial]:
        """Draw `number` new trials in the subspace called `name`, or in the whole space for WHOLE, and add them.

        Returns fewer trials if the sampler has no more params. If one sampler draws in the whole space, a trial in one
        subspace is drawn at random.
        """
        if self.spans_space and name != WHOLE:
            generator = np.random.default_rng([self.study.record.seed, len(self.study)])
            [params] = self.members[self._index[name]].sample(generator, 1)
            return [self._added(name, params, wanted, self.sampler)]
        sampler = self.samplers[name]
        sees_all = name == WHOLE or learns_whole(sampler)
        if (of_all := _part(sampler, LearnsBudgets)) is not None:
            of_all.budget = wanted.budget
        asked = sampler.ask(number, self.study.pending() if sees_all else self.study.pending(name))
        if (auto := _part(sampler, AutoSampler)) is not None:
            self.study.note_choice(name if self._whole is None else UNDIVIDED, auto.choice)
        if len(asked) < number:
            self._exhausted.add(name)
            if self.is_exhausted:
                self._let_repeat()
            if len(self._exhausted) == len(self.samplers):
                self.rounds.end_draws()
        names = [self._subspace_of(params) if name == WHOLE else name for params in asked]
        by = [self.sampler] * len(asked) if auto is None else auto.proposed_by
        drawn = zip(names, asked, by, strict=False)
        return [self._added(subspace, params, wanted, chosen) for subspace, params, chosen in drawn]

    def _let_repeat(self) -> None:
        """Allow samplers to repeat params, because all points of the space have been tried and losses may be noisy."""
        repeating = [each for sampler in self.samplers.values() if (each := _part(sampler, Unrepeated)) is not None]
        for each in repeating:
            each.may_repeat = True
        if repeating:
            self._exhausted.clear()
            self.all_tried = sum(each.points or 0 for each in repeating)

    def _subspace_of(self, params: Params) -> str:
        return next(subspace.name for subspace in self.members if subspace.contains(params))

    def _added(self, name: str, params: Params, wanted: Wanted, sampler: str | None) -> Trial:
        seed = trial_seed(self.study.record.seed, self._index[name], self.study.asked(name))
        trial = self.study.add(
            name, params, seed, wanted.budget, slots=self.width(params), rung=wanted.rung, sampler=sampler
        )
        self.rounds.add(trial)
        return trial

    def _may_wait(self, *names: str) -> bool:
        """Return True if one more trial of these subspaces may wait because it is too large for a class.

        Waiting trials that are too wide for every class are ignored as long as the subspaces have narrower trials,
        within TOO_WIDE.
        """
        waiting = 0
        for name in names:
            waiting += self.study.count(TrialState.WAITING, subspace=name) - len(self._ahead[name])
        most = WAITING_PER_SUBSPACE * len(names)
        if waiting < most:
            return True
        too_wide = sum(trial.subspace in names for trial in self.study.wider(self._widest))
        too_wide -= sum(trial.slots > self._widest for name in names for trial in self._ahead[name].values())
        if waiting - too_wide >= most or min(map(self.least_slots, names)) > self._widest:
            return False
        return too_wide < TOO_WIDE * (1 + sum(map(self.study.asked, names)) - too_wide)

    def least_slots(self, name: str) -> int:
        """Return the number of slots of a subspace's narrowest trials, estimated from TOO_WIDE draws."""
        if name not in self._narrowest:
            draws = self.members[self._index[name]].sample(np.random.default_rng(self.study.record.seed), TOO_WIDE)
            self._narrowest[name] = min(self.width(params) for params in draws)
        return self._narrowest[name]

    def _quotas(self, drawn: int | None) -> Mapping[str, int] | None:
        """Return the number of trials to draw in each subspace, or None if it is not fixed.

        If proposals do not depend on losses, a limit on trials fixes the number in each subspace. Then the seed
        determines the set of trials, and the policy only their order and classes. In rounds, the limit is `drawn`, the
        number of trials drawn until the end of the current round.
        """
        limit = self.limits.trials if drawn is None else drawn
        if limit is None or not self.shares.fixed or self._adaptive or self.spans_space:
            return None
        total = limit + (self.study.count(TrialState.CANCELLED) if drawn is None else 0)
        return self.shares.quotas(total)


def _part(sampler: object, kind: type[P]) -> P | None:
    """Return the sampler, or the sampler wrapped in it, that is an instance of `kind`; None if there is none."""
    while not isinstance(sampler, kind):
        if not isinstance(sampler, (Unrepeated, ByBudget, OwnSampler)):
            return None
        sampler = sampler.sampler
    return sampler


def make_samplers(make: Maker, subspaces: Sequence[Subspace], entropy: Sequence[int]) -> dict[str, Sampler]:
    """Return the samplers by subspace, or a single sampler under WHOLE that draws in the whole space."""
    if make.spans_space:
        return {WHOLE: make(undivided(subspaces[0].space), entropy)}
    seeded = {subspace: (*entropy, index) for index, subspace in enumerate(subspaces)}
    if make.is_whole and len(subspaces) > 1:
        shared = make.learner(undivided(subspaces[0].space), entropy)
        return {each.name: Unrepeated(shared, each, seed) for each, seed in seeded.items()}
    return {each.name: make(each, seed) for each, seed in seeded.items()}


def tell_samplers(samplers: Mapping[str, Sampler], trials: Iterable[Trial]) -> None:
    """Let each sampler learn from the trials of its subspace.

    The order of the results is kept, because samplers of several subspaces may share what they learn.
    """
    for name, told in groupby(trials, lambda trial: WHOLE if WHOLE in samplers else trial.subspace):
        if name in samplers:
            samplers[name].tell([*told])


def learns_whole(sampler: Sampler) -> bool:
    """Return True if a subspace's sampler learns from the whole space, so that it needs the pending trials of all
    subspaces.
    """
    return _part(sampler, Unrepeated) is not None


def trial_seed(seed: int, subspace: int, index: int) -> int:
    """Return the seed of the `index`-th trial of a subspace. It does not depend on the timing of the trials."""
    entropy = (seed, subspace, index)
    # An array gives the same seed as a tuple, but takes half the time.
    words = np.array(entropy, np.uint32) if seed < 2**32 else entropy
    return int(np.random.SeedSequence(words).generate_state(1)[0])
