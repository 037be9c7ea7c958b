"""Folders of trials that the setting `keep` keeps, and those that are no longer needed."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import numpy as np

from shadho_celery.core.columns import Merit, feasible_loss, merit
from shadho_celery.core.trial import Trial, TrialState
from shadho_celery.study.repeats import FEW
from shadho_celery.study.table import StudyTrials

#: seconds between two lists of the trials whose folders are not needed
KEEP_SECONDS = 5.0


class Keeper:
    """Finds the trials whose folders are not needed: finished trials that are not among the best or to be promoted."""

    def __init__(self, best: int) -> None:
        """Keep the folders of the `best` trials, or of all trials on the front of several losses."""
        self._most = best
        #: by origin (`Trial.folder`): merit and number of its best trial; only for the origins of the best trials
        self._best: dict[int, tuple[Merit, int]] = {}
        #: time at which `news` last computed `unneeded`, and its result
        self._told_at = -math.inf
        self._told = b""

    def tell(self, trials: Iterable[Trial]) -> None:
        """Learn from finished trials."""
        for trial in trials:
            if trial.state is TrialState.COMPLETE and trial.outcome.loss is not None:
                mine, origin = (merit(trial), trial.number), trial.folder
                self._best[origin] = min(mine, self._best.get(origin, mine))
                if len(self._best) > self._most:
                    del self._best[max(self._best, key=self._best.__getitem__)]

    def unneeded(self, study: StudyTrials, promotable: Collection[int]) -> bytes:
        """Return the trials whose folders are not needed, as `core.files` has sets of trials."""
        # One of the FEW best trials may be the best after its repeats.
        repeated = study.trials.repeats.folders(max(self._most, FEW))
        best = [trial.folder for trial in study.trials.front] or repeated or self._best
        needed = {*best, *study.open_origins, *promotable}
        bits = np.ones(study.trials.last_number + 1, bool)
        bits[[number for number in needed if number < len(bits)]] = False
        return np.packbits(bits, bitorder="little").tobytes()

    def news(self, study: StudyTrials, promotable: Collection[int], now: float) -> bytes | None:
        """Return `unneeded` at most every KEEP_SECONDS; None before that, or if it has not changed.

        At the time infinity, which stands for the end of the run, it is always returned.
        """
        if now - self._told_at < KEEP_SECONDS:
            return None
        found, before = self.unneeded(study, promotable), self._told
        self._told_at, self._told = now, found
        return None if found == before and now < math.inf else found


def may_be_promoted(trials: Iterable[Trial], most: float) -> set[int]:
    """Return the origins that might still be promoted, whichever algorithm gives budgets up to `most`."""
    reached: dict[int, float] = {}
    for trial in trials:
        if trial.state is TrialState.CANCELLED:
            # A cancelled promotion is offered again, so it does not count.
            continue
        budget = math.inf if trial.budget is None or feasible_loss(trial) == math.inf else trial.budget
        reached[trial.folder] = max(budget, reached.get(trial.folder, 0.0))
    return {origin for origin, budget in reached.items() if budget < most}
