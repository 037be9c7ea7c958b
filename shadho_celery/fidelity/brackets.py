"""Successive halving and Hyperband, which consist of brackets.

A bracket has trials on several rungs of a ladder of budgets. When a rung has all its results, its best trials are
promoted to the next rung. Successive halving runs one bracket at a time. Hyperband has brackets that start at different
budgets.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from shadho_celery.core.columns import feasible_loss, feasible_losses
from shadho_celery.core.trial import Trial, TrialState
from shadho_celery.fidelity.ladder import Ladder
from shadho_celery.fidelity.rounds import Round, Rounds, Wanted
from shadho_celery.study.forecast import Forecast
from shadho_celery.study.front import order_of

#: the losses of a trial, see `feasible_losses`, and its origin
Result = tuple[tuple[float, ...], int]


def best_of(results: Collection[Result], most: int, gone: Collection[int] = ()) -> list[int]:
    """Return the origins of the best results, at most `most`, without those that are `gone`. The best come first.

    Failed trials are left out. Trials with several losses are in the order of `study.front.order_of`: those of the
    first front come first.
    """
    known = sorted(each for each in results if each[0][0] < math.inf)
    if known and len(known[0][0]) > 1:
        losses, is_gone = np.array([each[0] for each in known]), np.array([each[1] in gone for each in known])
        known = [known[place] for place in order_of(losses, np.zeros(len(known)), most, is_gone)]
    return [origin for _, origin in known[:most] if origin not in gone]


@dataclass
class _Rung:
    """The trials of a bracket at one budget."""

    budget: float
    #: number of results after which the next rung starts
    wanted: int
    #: number of trials that are sent to get these results
    sent: int
    #: origins that are promoted to this rung, the best first; None for the lowest rung, which has new trials
    chosen: list[int] | None = None
    #: by number of a trial on this rung: its origin
    origins: dict[int, int] = field(default_factory=dict)
    #: pairs (losses, origin) in the order of the results; the loss of a failed trial is infinite
    losses: list[Result] = field(default_factory=list)
    #: True once no more trials are added, because trials of it were promoted, or a finite search has no more points
    is_closed: bool = False

    @property
    def left(self) -> int:
        """Number of trials that are not added yet."""
        return 0 if self.is_closed else self.sent - len(self.origins)

    @property
    def is_complete(self) -> bool:
        return len(self.losses) >= min(self.wanted, len(self.origins) if self.is_closed else self.sent)


class Bracket:
    """A sequence of rungs with rising budgets. Failed trials rank last, and cancelled trials are ignored."""

    def __init__(self, first: int, budgets: Sequence[float], sizes: Sequence[int], backups: int = 0) -> None:
        """`first` is the ladder's index of its lowest rung. `budgets` and `sizes` are by rung, the lowest first.

        Each rung gets `backups` more trials than it waits for.
        """
        self.first = first
        self.rungs = [_Rung(b, size, size + backups) for b, size in zip(budgets, sizes, strict=True)]
        self._place = 0
        #: by origin: the budget that it has already reached under another ladder
        self._ahead: dict[int, float] = {}
        #: True once its top rung is complete
        self.is_over = False

    @property
    def rung(self) -> _Rung:
        """The current rung."""
        return self.rungs[self._place]

    def offers(self) -> Sequence[Wanted]:
        """Return the trials of the current rung that may be sent; [] while the bracket waits for results."""
        rung = self.rung
        if self.is_over or rung.left <= 0:
            return []
        if rung.chosen is None:
            return [Wanted(budget=rung.budget, rung=self.first, left=rung.left)]
        there = set(rung.origins.values())
        place = self.first + self._place
        return [Wanted(budget=rung.budget, rung=place, origin=each) for each in rung.chosen if each not in there]

    def add(self, trial: Trial, place: int) -> None:
        """Add a trial to the bracket's rung with index `place`. Lower rungs then take no more trials."""
        for rung in self.rungs[:place]:
            rung.is_closed = True
        self.rungs[place].origins[trial.number] = trial.number if trial.origin is None else trial.origin

    def add_of_other_ladder(self, origin: int, budget: float) -> None:
        """Record the budget that an origin has reached under another ladder.

        It need not run at this and lower budgets.
        """
        self._ahead[origin] = max(budget, self._ahead.get(origin, 0.0))
        rung = self.rung
        if budget >= rung.budget and origin in (rung.chosen or ()) and origin not in rung.origins.values():
            rung.chosen = [each for each in rung.chosen or () if each != origin]
            rung.sent -= 1
            self._advance()

    def tell(self, trial: Trial) -> None:
        """Record a finished trial of this bracket."""
        rung = next(rung for rung in self.rungs if trial.number in rung.origins)
        if trial.state is TrialState.CANCELLED:
            # A cancelled trial is replaced: a promotion is offered again, and instead of a new draw another one is
            # drawn. If the rung is closed, it may have waited only for this trial.
            del rung.origins[trial.number]
        else:
            rung.losses.append((feasible_losses(trial), rung.origins[trial.number]))
        self._advance()

    @property
    def promotable(self) -> set[int]:
        """Origins that its current rung, or a higher one, may continue."""
        rung = self.rung
        over = {origin for losses, origin in rung.losses if losses[0] == math.inf or rung is self.rungs[-1]}
        return {*(rung.chosen or ()), *rung.origins.values()} - over

    def end_draws(self) -> None:
        """Take no more new draws, and continue with the trials that exist."""
        self.rungs[0].is_closed = True
        self._advance()

    def _advance(self) -> None:
        """Move to the first incomplete rung, and choose the trials that are promoted to it."""
        while (last := self.rung).is_complete:
            if last is self.rungs[-1]:
                self.is_over = True
                return
            self._place += 1
            rung = self.rung
            # If the lowest rung was closed with too few trials, a fraction of each rung is promoted instead of a fixed
            # number.
            is_short = self.rungs[0].is_closed and len(self.rungs[0].origins) < self.rungs[0].wanted
            count = math.ceil(len(last.origins) * rung.wanted / last.wanted) if is_short else rung.sent
            best = best_of(last.losses[: last.wanted], count)
            rung.chosen = [each for each in best if self._ahead.get(each, 0.0) < rung.budget]
            rung.sent = len(rung.chosen)


class Brackets(Rounds):
    """Runs brackets in turn.

    By default, one bracket runs at a time. With `overlap`, the next bracket starts if all started brackets wait for
    results.
    """

    def __init__(
        self, budgets: Sequence[float], sizes: Sequence[Sequence[int]], *, backups: int = 0, overlap: bool = False
    ) -> None:
        """`budgets` are the budgets of all rungs, the lowest first.

        `sizes` has the sizes of the rungs of each bracket.
        """
        self._budgets = budgets
        #: by the rung on which a bracket starts: the sizes of its rungs
        self._sizes = {len(budgets) - len(each): each for each in sizes}
        self._backups = backups
        self._overlap = overlap
        #: brackets that have started and not ended, in the order of their starts; number of brackets that have started
        self._active: list[Bracket] = []
        self._begun = 0
        #: by trial number: the bracket of the trial
        self._home: dict[int, Bracket] = {}
        #: number of new draws of the started brackets, plus cancelled draws
        self._drawn = 0
        self._begin()

    @property
    def present(self) -> Round:
        # This is the first bracket that has trials to send, or the next bracket if all wait and brackets overlap.
        asking = [bracket for bracket in self._active if bracket.rung.left > 0]
        bracket = asking[0] if asking else self._next() if self._overlap else None
        size = sum(bracket.rung.sent for bracket in self._active)
        return Round(size=size, left=0 if bracket is None else bracket.rung.left)

    def offers(self, slots: int = 0) -> Sequence[Wanted]:
        found: Sequence[Wanted] = [offer for bracket in self._active for offer in bracket.offers()]
        drawn = self._drawn
        if not found and self._overlap:
            bracket = self._next()
            found, drawn = bracket.offers(), drawn + bracket.rungs[0].sent
        return [offer if offer.origin is not None else replace(offer, drawn=drawn) for offer in found]

    def add(self, trial: Trial) -> None:
        rung = rung_of(trial, self._budgets)
        if rung is None:
            if trial.origin in self._home and trial.budget is not None and trial.state is not TrialState.CANCELLED:
                self._home[trial.origin].add_of_other_ladder(trial.origin, trial.budget)
                self._end_brackets()
            return
        bracket = self._drawing(rung) if trial.origin is None else self._home.get(trial.origin)
        if bracket is not None and bracket.first <= rung:
            bracket.add(trial, rung - bracket.first)
            self._home[trial.number] = bracket

    def tell(self, trial: Trial) -> None:
        bracket = self._home.get(trial.number)
        if bracket is None or rung_of(trial, self._budgets) is None:
            return
        bracket.tell(trial)
        if trial.state is TrialState.CANCELLED:
            del self._home[trial.number]
            self._drawn += trial.origin is None
        self._end_brackets()

    @property
    def promotable(self) -> Collection[int]:
        return {origin for bracket in self._active for origin in bracket.promotable}

    def end_draws(self) -> None:
        for bracket in self._active:
            bracket.end_draws()
        self._end_brackets()

    def _end_brackets(self) -> None:
        """Remove ended brackets, and start another one if no bracket is left."""
        self._active = [bracket for bracket in self._active if not bracket.is_over]
        if not self._active:
            self._begin()

    def _drawing(self, rung: int) -> Bracket | None:
        """Return the bracket that takes a new draw on `rung`. If necessary, start one; None if none starts there."""
        for bracket in self._active:
            if bracket.first == rung and bracket.rungs[0].left > 0:
                return bracket
        if rung not in self._sizes:
            return None
        self._begin(self._bracket(rung))
        return self._active[-1]

    def _begin(self, bracket: Bracket | None = None) -> None:
        """Start a bracket, by default the next one."""
        bracket = bracket or self._next()
        self._begun += 1
        self._drawn += bracket.rungs[0].sent
        self._active = [*self._active, bracket] if self._overlap else [bracket]

    def _next(self) -> Bracket:
        """Return the bracket that starts next."""
        return self._bracket([*self._sizes][self._begun % len(self._sizes)])

    def _bracket(self, first: int) -> Bracket:
        """Return a bracket that starts on the rung with index `first`."""
        return Bracket(first, self._budgets[first:], self._sizes[first], self._backups)


class SuccessiveHalving(Brackets):
    """One bracket after another, each from the lowest budget. A bracket starts when the one before has ended.

    The rungs of a bracket have the budgets ``most * eta**-k`` down to `least`, and ``eta**k`` trials. When a rung is
    complete, its best 1 / eta trials are promoted, so the promotions depend only on the losses. Failed trials rank
    last, and cancelled trials are ignored. Source: Jamieson, Talwalkar, "Non-stochastic Best Arm Identification and
    Hyperparameter Optimization", AISTATS 2016; here in the form of bracket s_max of Li et al., "Hyperband", JMLR 18,
    2018.

    With `backups` b, every rung gets n + b *different* trials, and the next rung starts after the first n results, so
    it does not wait for slow trials. Late trials are not promoted, even with a low loss, but their results are kept.
    This is biased if good trials are slow, as large models often are. Copies of late trials (the setting `speculate`)
    save most of the waiting time without a bias.
    """

    def __init__(self, ladder: Ladder) -> None:
        sizes = [ladder.eta**below for below in range(ladder.top, -1, -1)]
        super().__init__(ladder.budgets, [sizes], backups=ladder.backups)


class Hyperband(Brackets):
    """Brackets s_max, ..., 0 in turn, where bracket s starts s rungs below the top.

    If all started brackets wait for results, the next bracket starts, so no slot waits for the end of a rung. Source:
    Li, Jamieson, DeSalvo, Rostamizadeh, Talwalkar, "Hyperband", JMLR 18, 2018, algorithm 1.
    """

    def __init__(self, ladder: Ladder) -> None:
        super().__init__(ladder.budgets, sizes_of(ladder), overlap=True)


#: brackets start only on rungs whose trust is at least this, except one in PROBE brackets
ENOUGH, PROBE = 0.5, 12


class TrustingHyperband(Hyperband):
    """Hyperband without the brackets that start on rungs which predict the losses at the top badly (`auto`).

    The trust in a rung is that of a `Forecast`. One in PROBE brackets starts on the lowest rung whatever its trust, so
    that it can be regained.

    If a limit on trials would let few or no trials reach the top from a low rung, no bracket starts there. This is the
    case if the bracket does not fit in the remaining limit when the study starts or is resumed, together with the
    trials that other slots start until its first trial reaches the top. This takes ``1 + eta + ... + eta**(r - 1)``
    times the duration of a new trial r rungs below the top, because durations are in proportion to budgets.
    """

    def __init__(self, ladder: Ladder, limit: int | None = None) -> None:
        """`limit` is the study's limit on the number of trials, on all rungs together, or None."""
        self._eta, self._limit, self._slots = ladder.eta, limit, 0
        #: number of trials that were failed when they were added, or belong to another ladder: trials of earlier runs
        #: that do not help the rounds
        self._spent = 0
        #: by rung: the losses by origin
        self._results: list[dict[int, float]] = [{} for _ in ladder.budgets]
        #: forecast by these results; None until a bracket needs it, because it takes longer the more results there are
        self._forecast: Forecast | None = None
        super().__init__(ladder)

    @property
    def present(self) -> Round:
        present = super().present
        if not (self._slots and self._lowest):
            return present
        spent = f", {self._spent} of which have failed or had other budgets," if self._spent else ""
        notice = (
            f"fidelity auto starts at budget {self._budgets[self._lowest]:g}: with a limit of {self._limit} trials"
            f"{spent} few or no trials would get from a lower one to {self._budgets[-1]:g}"
        )
        return present._replace(notice=notice)

    def offers(self, slots: int = 0) -> Sequence[Wanted]:
        # The number of slots is kept, because the rungs that are left out depend on it.
        self._slots = slots or self._slots
        if not self._home:
            # The first bracket may have to start higher.
            self._active, self._begun, self._drawn = [], 0, 0
            self._begin()
        for bracket in self._active:
            if bracket.first < self._lowest:
                # Failed trials of earlier runs have used up the limit that it needs.
                bracket.end_draws()
        self._end_brackets()
        return super().offers(slots)

    def add(self, trial: Trial) -> None:
        self._spent += trial.state is TrialState.FAILED or rung_of(trial, self._budgets) is None
        super().add(trial)

    def tell(self, trial: Trial) -> None:
        rung = rung_of(trial, self._budgets)
        if rung is not None and trial.state is not TrialState.CANCELLED:
            self._results[rung][trial.number if trial.origin is None else trial.origin] = feasible_loss(trial)
            self._forecast = None
        super().tell(trial)

    def _next(self) -> Bracket:
        self._forecast = forecast = self._forecast or Forecast(self._results)
        trusted = [rung for rung in range(self._lowest, len(self._sizes)) if forecast.trust(rung) >= ENOUGH]
        firsts = [self._lowest] if self._begun % PROBE == 0 else trusted
        return self._bracket(firsts[self._begun % len(firsts)])

    @property
    def _lowest(self) -> int:
        """The lowest rung whose bracket fits in the limit on trials, or else the top rung."""
        left = math.inf if self._limit is None else self._limit - self._spent
        for rung, sizes in self._sizes.items():
            others = max(self._slots - 1, 0) * sum(self._eta**above for above in range(len(sizes) - 1))
            if sum(sizes) + others <= left:
                return rung
        return len(self._budgets) - 1


def sizes_of(ladder: Ladder) -> list[Sequence[int]]:
    """Return for each of the brackets s_max, ..., 0 the number of trials on each of its rungs, the lowest first."""
    return [
        # n = ceil((s_max + 1) / (s + 1) * eta**s), computed with integers; rung i has floor(n / eta**i) trials.
        [math.floor(-(-(ladder.top + 1) * ladder.eta**s // (s + 1)) / ladder.eta**rung) for rung in range(s + 1)]
        for s in range(ladder.top, -1, -1)
    ]


def rung_of(trial: Trial, budgets: Sequence[float]) -> int | None:
    """Return the rung of a trial; None if it belongs to another ladder, for example of an earlier run."""
    if trial.rung is None or trial.rung >= len(budgets) or trial.budget != budgets[trial.rung]:
        return None
    return trial.rung
