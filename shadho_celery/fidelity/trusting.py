"""ASHA that trusts a low rung in proportion to how well its ranks have agreed with those of the next rung."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from shadho_celery.core.trial import Trial, TrialState
from shadho_celery.fidelity.asha import Asha
from shadho_celery.fidelity.brackets import rung_of
from shadho_celery.fidelity.ladder import Ladder
from shadho_celery.fidelity.rounds import Round, Wanted
from shadho_celery.study.rungs import LATEST, agreement

#: number of first draws that go through all rungs; of the later draws, one in this many also does
PILOTS, PROBE = 4, 12
#: no trial starts on a rung if the product of trust from there up to the top is below this
ENOUGH = 0.3


class TrustingAsha(Asha):
    """ASHA whose first rung and promoted fraction depend on how well the ranks of rungs have agreed so far.

    The trust in a rung is Kendall's rank correlation of the losses there with those on the next rung, over the latest
    trials that have both. A fraction ``eta**-trust`` of a rung is promoted: 1 / eta if the ranks agree, all if they do
    not. A new trial starts on the lowest rung from which the product of trust up to the top is large enough, or at the
    full budget. The first trials, and some later trials, go through all rungs, because trust is measured with them.

    Rungs are left out if the limit on trials would let few or no trials reach the top from them. These are the rungs
    whose round does not fit in the remaining limit when the study starts or is resumed. A round from r rungs below the
    top is ``eta**r`` new trials, the promotions that follow, and what other slots start meanwhile. The first trial
    reaches the top after ``1 + eta + ... + eta**(r - 1)`` times the duration of a new trial, because durations are in
    proportion to budgets.
    """

    def __init__(self, ladder: Ladder, limit: int | None = None) -> None:
        """`limit` is the limit on the number of trials on all rungs together, or None."""
        super().__init__(ladder)
        self._limit = limit
        self._slots = 0
        self._drawn = 0
        #: number of trials of a resumed study that no round uses: failed trials, and trials of another ladder
        self._spent = 0
        #: origins that go through all rungs and have not reached the top
        self._pilots: list[int] = []
        #: by rung: origins of the latest results that have a result on the rung below, too
        self._latest: list[deque[int]] = [deque(maxlen=LATEST) for _ in self._budgets]
        #: by rung below the top: trust, or None before it is known
        self.trust: list[float | None] = [None] * (len(self._budgets) - 1)

    @property
    def present(self) -> Round:
        if not (self._slots and self._lowest):
            return Round()
        spent = f", {self._spent} of which have failed or had other budgets," if self._spent else ""
        lowest = self._budgets[self._lowest]
        return Round(
            notice=f"fidelity auto starts at budget {lowest:g}: with a limit of {self._limit} trials{spent} few or no "
            f"trials would get from a lower one to {self._budgets[-1]:g}"
        )

    def offers(self, slots: int = 0) -> Sequence[Wanted]:
        # Which rungs are left out depends on the latest known number of slots.
        self._slots = slots or self._slots
        return super().offers(slots)

    def add(self, trial: Trial) -> None:
        is_of_ladder = rung_of(trial, self._budgets) is not None
        self._spent += trial.state is TrialState.FAILED or not is_of_ladder
        if trial.origin is None and is_of_ladder:
            if self._is_pilot(self._drawn):
                self._pilots.append(trial.number)
            self._drawn += 1
        super().add(trial)

    def tell(self, trial: Trial) -> None:
        super().tell(trial)
        origin = trial.number if trial.origin is None else trial.origin
        has_fallen = trial.state in {TrialState.FAILED, TrialState.PRUNED}
        is_through = trial.rung == len(self._budgets) - 1 or has_fallen
        if is_through and trial.state is not TrialState.CANCELLED and origin in self._pilots:
            self._pilots.remove(origin)
        if trial.rung and rung_of(trial, self._budgets) is not None:
            lower, upper = self._rungs[trial.rung - 1], self._rungs[trial.rung]
            if trial.origin in lower.losses and trial.origin in upper.losses:
                self._latest[trial.rung].append(trial.origin)
            both = self._latest[trial.rung]
            self.trust[trial.rung - 1] = agreement([(lower.losses[each], upper.losses[each]) for each in both])

    def _promotable(self, place: int) -> Sequence[int]:
        rung, trust = self._rungs[place], self.trust[place]
        fraction = self._eta ** -(1.0 if trust is None else trust)
        whole = math.ceil if self._is_finite else math.floor
        # Pilots that wait for promotion from this rung come first. Failed pilots are not promoted.
        known = [origin for origin in self._pilots if rung.losses.get(origin, math.inf) < math.inf]
        pilots = [origin for origin in known if origin not in rung.promoted]
        return [*dict.fromkeys([*pilots, *rung.candidates(whole(len(rung) * fraction))])]

    def _first(self) -> int:
        lowest = self._lowest
        if self._is_pilot(self._drawn):
            return lowest
        product, first = 1.0, len(self._budgets) - 1
        for place in range(len(self.trust) - 1, lowest - 1, -1):
            trust = self.trust[place]
            product *= 1.0 if trust is None else trust
            if product < ENOUGH:
                break
            first = place
        return first

    @property
    def _lowest(self) -> int:
        """The lowest rung whose round fits in the limit on trials, or else the top rung."""
        top = len(self._budgets) - 1
        return next((place for place in range(top) if self._is_affordable(top - place)), top)

    def _is_affordable(self, rungs: int) -> bool:
        """Return whether a round from this many rungs below the top fits in the limit on trials."""
        if self._limit is None:
            return True
        on_rungs: list[int] = [self._eta**above for above in range(rungs + 1)]
        others = max(self._slots - 1, 0) * sum(on_rungs[:-1])
        return sum(on_rungs) + others <= self._limit - self._spent

    @staticmethod
    def _is_pilot(draw: int) -> bool:
        return draw < PILOTS or draw % PROBE == 0
