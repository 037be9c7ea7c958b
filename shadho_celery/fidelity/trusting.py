"""ASHA that trusts a low rung only as far as its ranks have agreed with those of the next one."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import combinations

from shadho_celery.core.trial import Trial, TrialState
from shadho_celery.fidelity.asha import Asha
from shadho_celery.fidelity.brackets import rung_of
from shadho_celery.fidelity.ladder import Ladder

#: first draws that go through all rungs, whatever comes of them, and how many draws there are to one such later on
PILOTS, PROBE = 4, 12
#: latest trials on two rungs by which these are compared
LATEST = 16
#: trust in a ladder from a rung up to the top, below which no trial begins on that rung
ENOUGH = 0.3


class TrustingAsha(Asha):
    """ASHA whose first rung, and whose part that is promoted, follow from how rungs have agreed so far.

    The trust in a rung is Kendall's rank correlation of the losses there with those on the next rung, of the latest
    trials that have both. A fraction ``eta**-trust`` of a rung is promoted: 1 / eta where the ranks agree, all where
    they do not. A new trial begins on the lowest rung from which the product of trust up to the top is enough, and at
    the full budget where none is. The first trials, and one in some later on, go through all rungs: without them no
    trust could be had, or had again.
    """

    def __init__(self, ladder: Ladder) -> None:
        super().__init__(ladder)
        self._drawn = 0
        #: origins that go through all rungs, and have not come to the top
        self._pilots: list[int] = []
        #: by rung, the origins of its latest results
        self._latest: list[deque[int]] = [deque(maxlen=LATEST) for _ in self._budgets]
        #: by rung below the top, the trust in it; None before it is known
        self.trust: list[float | None] = [None] * (len(self._budgets) - 1)

    def add(self, trial: Trial) -> None:
        if trial.origin is None and rung_of(trial, self._budgets) is not None:
            if self._is_pilot(self._drawn):
                self._pilots.append(trial.number)
            self._drawn += 1
        super().add(trial)

    def tell(self, trial: Trial) -> None:
        super().tell(trial)
        origin = trial.number if trial.origin is None else trial.origin
        is_through = trial.rung == len(self._budgets) - 1 or trial.state is TrialState.FAILED
        if is_through and trial.state is not TrialState.CANCELLED and origin in self._pilots:
            self._pilots.remove(origin)
        if trial.rung and rung_of(trial, self._budgets) is not None:
            lower, upper = self._rungs[trial.rung - 1], self._rungs[trial.rung]
            if trial.origin in lower.losses and trial.origin in upper.losses:
                self._latest[trial.rung].append(trial.origin)
            both = self._latest[trial.rung]
            self.trust[trial.rung - 1] = _agreement([(lower.losses[each], upper.losses[each]) for each in both])

    def _promotable(self, place: int) -> Sequence[int]:
        rung, trust = self._rungs[place], self.trust[place]
        fraction = self._eta ** -(1.0 if trust is None else trust)
        return [*dict.fromkeys([*self._waiting_pilots(place), *rung.candidates(math.floor(len(rung) * fraction))])]

    def _waiting_pilots(self, place: int) -> Sequence[int]:
        """Return the pilots whose next rung is the one above; a failed one goes no further."""
        rung = self._rungs[place]
        losses = [(origin, rung.losses.get(origin, math.inf)) for origin in self._pilots]
        return [origin for origin, loss in losses if loss < math.inf and not rung.is_promoted(origin)]

    def _first(self) -> int:
        if self._is_pilot(self._drawn):
            return 0
        product, first = 1.0, len(self._budgets) - 1
        for place in range(len(self.trust) - 1, -1, -1):
            trust = self.trust[place]
            product *= 1.0 if trust is None else trust
            if product < ENOUGH:
                break
            first = place
        return first

    @staticmethod
    def _is_pilot(draw: int) -> bool:
        return draw < PILOTS or draw % PROBE == 0


def _agreement(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return Kendall's rank correlation of two losses, 0 for a negative one; None for fewer than two finite pairs."""
    known = [pair for pair in pairs if math.isfinite(pair[0]) and math.isfinite(pair[1])]
    compared = list(combinations(known, 2))
    if not compared:
        return None
    signs = [_sign(one[0] - other[0]) * _sign(one[1] - other[1]) for one, other in compared]
    return max(0.0, sum(signs) / len(compared))


def _sign(difference: float) -> int:
    return (difference > 0) - (difference < 0)
