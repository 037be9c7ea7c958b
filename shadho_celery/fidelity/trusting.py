"""ASHA that trusts a low rung only as far as its ranks have agreed with those of the next one."""

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

#: first draws that go through all rungs, whatever comes of them, and how many draws there are to one such later on
PILOTS, PROBE = 4, 12
#: trust in a ladder from a rung up to the top, below which no trial begins on that rung
ENOUGH = 0.3


class TrustingAsha(Asha):
    """ASHA whose first rung, and whose part that is promoted, follow from how rungs have agreed so far.

    The trust in a rung is Kendall's rank correlation of the losses there with those on the next rung, of the latest
    trials that have both. A fraction ``eta**-trust`` of a rung is promoted: 1 / eta where the ranks agree, all where
    they do not. A new trial begins on the lowest rung from which the product of trust up to the top is enough, and at
    the full budget where none is. The first trials, and one in some later on, go through all rungs: without them no
    trust could be had, or had again.

    Rungs are left out from which the limit on trials lets few come to the top, or none: those whose round does not fit
    in what is left of it when the study begins or is resumed. A round from r rungs below the top is ``eta**r`` new
    trials and the promotions that follow, and what the other slots begin in the meantime: the first of them comes to
    the top after ``1 + eta + ... + eta**(r - 1)`` times the duration of a new trial, as durations follow the budgets.
    """

    def __init__(self, ladder: Ladder, limit: int | None = None) -> None:
        """`limit` is that on the trials of all rungs together; None without one."""
        super().__init__(ladder)
        self._limit = limit
        self._slots = 0
        self._drawn = 0
        #: trials of a resumed study that no round gains from: failed ones, and those of another ladder
        self._spent = 0
        #: origins that go through all rungs, and have not come to the top
        self._pilots: list[int] = []
        #: by rung, the origins of its latest results
        self._latest: list[deque[int]] = [deque(maxlen=LATEST) for _ in self._budgets]
        #: by rung below the top, the trust in it; None before it is known
        self.trust: list[float | None] = [None] * (len(self._budgets) - 1)

    @property
    def present(self) -> Round:
        return Round(notice=self._notice if self._slots and self._lowest else None)

    @property
    def _notice(self) -> str:
        """A sentence on the rungs that the limit leaves out."""
        spent = f", {self._spent} of which have failed or had other budgets," if self._spent else ""
        return (
            f"fidelity auto begins at budget {self._budgets[self._lowest]:g}: with a limit of {self._limit} trials"
            f"{spent} few if any would come from a lower one to {self._budgets[-1]:g}"
        )

    def offers(self, slots: int = 0) -> Sequence[Wanted]:
        # Rungs are left out by the latest fleet that is known.
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
        return [*dict.fromkeys([*self._waiting_pilots(place), *rung.candidates(whole(len(rung) * fraction))])]

    def _waiting_pilots(self, place: int) -> Sequence[int]:
        """Return the pilots whose next rung is the one above; a failed one goes no further."""
        rung = self._rungs[place]
        losses = [(origin, rung.losses.get(origin, math.inf)) for origin in self._pilots]
        return [origin for origin, loss in losses if loss < math.inf and not rung.is_promoted(origin)]

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
        """The lowest rung whose round fits in the limit; the top one if none does."""
        top = len(self._budgets) - 1
        return next((place for place in range(top) if self._is_affordable(top - place)), top)

    def _is_affordable(self, rungs: int) -> bool:
        """Return whether a round from so many rungs below the top fits in the limit."""
        if self._limit is None:
            return True
        on_rungs: list[int] = [self._eta**above for above in range(rungs + 1)]
        others = max(self._slots - 1, 0) * sum(on_rungs[:-1])
        return sum(on_rungs) + others <= self._limit - self._spent

    @staticmethod
    def _is_pilot(draw: int) -> bool:
        return draw < PILOTS or draw % PROBE == 0
