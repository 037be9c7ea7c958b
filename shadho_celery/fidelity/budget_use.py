"""Detection of objectives that ignore their budget, so that their trials take equally long with any budget."""

from __future__ import annotations

import statistics

from shadho_celery.core.trial import Trial, TrialState

#: number of promoted trials for the decision, and the least ratio of their seconds to those on the rung below
ENOUGH, MULTIPLE = 5, 1.15
#: least ratio of the work on two rungs for which more seconds are expected
MORE_WORK = 1.5
#: trials shorter than this many seconds are ignored, because they are mostly start-up
LEAST_SECONDS = 0.02
#: number of latest promoted trials that are used
LATEST = 20

NOTICE = (
    "promoted trials take no longer than with the budget below, so that budgets save nothing; does the objective look "
    "at context.budget, or is most of its time its start-up?"
)


class BudgetUse:
    """Compares the seconds of promoted trials with those of the same params on the rung below."""

    def __init__(self) -> None:
        #: by origin and rung: class, seconds, budget, and the part of the budget that was computed
        self._seconds: dict[tuple[int, int], tuple[str | None, float, float, float]] = {}
        self._multiples: list[float] = []
        #: a notice if budgets seem to be ignored, else None
        self.notice: str | None = None

    def tell(self, trial: Trial) -> None:
        """Learn from a finished trial. It is not compared if its origin ran on another class on the rung below."""
        seconds, continued = trial.outcome.seconds, trial.outcome.continued
        if trial.state is not TrialState.COMPLETE or trial.rung is None or seconds is None:
            return
        origin = trial.number if trial.origin is None else trial.origin
        below = self._seconds.get((origin, trial.rung - 1))
        budget = trial.budget or 1.0
        work = budget - (below[2] if below is not None and continued else 0.0)
        self._seconds[origin, trial.rung] = trial.compute_class, seconds, budget, work
        if below is None or below[0] != trial.compute_class or below[1] < LEAST_SECONDS or continued is None:
            return
        # With eta 2, a trial that continues from budget 1 to 2 has as much work as the trial at budget 1.
        if work >= MORE_WORK * below[3]:
            self._multiples = [*self._multiples[1 - LATEST :], seconds / below[1]]
            is_ignored = len(self._multiples) >= ENOUGH and statistics.median(self._multiples) < MULTIPLE
            self.notice = NOTICE if is_ignored else None
