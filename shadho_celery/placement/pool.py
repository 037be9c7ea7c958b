"""Pool of trials drawn ahead. A free slot takes the trial that its compute class runs comparatively fast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import compress, groupby

import numpy as np
from numpy.typing import NDArray

from shadho_celery.core.trial import Trial
from shadho_celery.predictors.cost_model import CostModel, Costs
from shadho_celery.predictors.features import Array

#: number of trials in the pool: the slots divided by PART_OF_SLOTS, up to MOST; but on a small fleet at least EACH_SLOT
#: trials for each slot, up to LEAST
PART_OF_SLOTS, EACH_SLOT, LEAST, MOST = 4, 4, 32, 64
#: a pool that is not divided among subspaces has this many times as many: they differ only by their params
UNDIVIDED = 2
#: with a sampler that learns from losses, and gets worse with each trial drawn ahead: on a small fleet only the slots
#: divided by PART_OF_FEW, up to LEAST_ADAPTIVE
PART_OF_FEW, LEAST_ADAPTIVE = 2, 8
#: name of the pool's only part, instead of subspaces, if one sampler draws in the whole space
WHOLE = ""
#: if a subspace's part of the pool has room for fewer trials than this, none of its trials are drawn ahead
LEAST_EACH = 2
#: a part is refilled when one in this many of its places is empty: predicting several trials together is faster
REFILL = 2
#: a trial is overdue after this number times its part's places of later trials of the part were sent. So no trial waits
#: for more than 32 rounds of a fleet of up to 8 slots, 256 trials on fleets of up to 64 slots, and four rounds of a
#: larger fleet; two rounds with several subspaces, or an adaptive sampler.
MOST_WAIT = 8
#: near the limit on time, this number of further trials for each slot may be set aside, because they would end too late
ASIDE = 1


@dataclass(eq=False)
class Pool:
    """Trials drawn ahead, in the order of their draws, and what each of them is predicted to cost on each class."""

    model: CostModel
    #: fraction of the pool for each of its parts: the subspaces, or WHOLE if one sampler draws in the whole space
    shares: Mapping[str, float]
    _: KW_ONLY
    #: number of trials that the pool may hold; None to determine it from the number of slots
    size: int | None = None
    #: True if the samplers learn from losses, so that fewer trials are drawn ahead
    is_adaptive: bool = False

    def __post_init__(self) -> None:
        #: True if one sampler draws in the whole space
        self.is_whole = WHOLE in self.shares
        #: the trials, the oldest first
        self.trials: list[Trial] = []
        #: for each trial: its part, and the number of trials of its part that had been sent when it was drawn
        self._parts: list[str] = []
        self._sent_before: list[int] = []
        #: rows of the trials' subspaces in the cost model, shape (trials,)
        self.rows: NDArray[np.intp] = np.empty(0, dtype=np.intp)
        #: costs of the trials on the live classes
        self._costs = Costs(np.empty((0, 0)), np.empty((0, 0)))
        #: version of the model with which they were computed
        self.version = -1
        #: number of trials by part that are set aside, because on each class they would end after the limit on time
        self._aside: Counter[str] = Counter()
        #: maximum number of these that take no place of the pool
        self._most_aside = 0
        #: number of trials by part
        self.in_part: Counter[str] = Counter()
        #: number of trials that have been sent from the pool, by part
        self._sent: Counter[str] = Counter()
        #: maximum number of trials by part; parts from which no trials are drawn ahead are left out
        self.sizes: dict[str, int] = {}
        self._classes: tuple[str, ...] = ()

    def see(self, classes: Sequence[str], slots: int) -> None:
        """Update the live classes and their slots, and divide the places of the pool among its parts.

        With fewer than two classes there is nothing to choose, so the pool has no places.
        """
        if self._classes != tuple(classes):
            self._classes = tuple(classes)
            self._costs = self.model.costs(self.trials, classes)
        of_few = min(slots // PART_OF_FEW, LEAST_ADAPTIVE) if self.is_adaptive else min(EACH_SLOT * slots, LEAST)
        usual = min(slots // PART_OF_SLOTS, MOST)
        if len(self.shares) == 1 and not self.is_adaptive:
            usual *= UNDIVIDED
        size = max(usual, of_few) if self.size is None else self.size
        size = size if len(classes) > 1 else 0
        self._most_aside = ASIDE * slots
        parts = {name: int(size * share) for name, share in self.shares.items()}
        self.sizes = {name: part for name, part in parts.items() if part >= LEAST_EACH}

    def missing(self) -> dict[str, int]:
        """Return for each part how many trials should be drawn now. Parts that need none are left out."""
        most = {name: min(self.in_part[name], int(self._most_aside * self.shares[name])) for name in self.sizes}
        aside = {name: min(self._aside[name], most[name]) for name in self.sizes}
        missing = {name: size + aside[name] - self.in_part[name] for name, size in self.sizes.items()}
        return {name: number for name, number in missing.items() if number >= max(1, self.sizes[name] // REFILL)}

    def add(self, trials: Sequence[Trial]) -> None:
        """Put drawn trials into the pool, in the order of their draws."""
        for subspace, drawn in groupby(trials, lambda trial: trial.subspace):
            added, part = list(drawn), WHOLE if self.is_whole else subspace
            self.trials += added
            self._parts += [part] * len(added)
            self.rows = np.append(self.rows, [self.model.row_of[subspace]] * len(added))
            self._sent_before += [self._sent[part]] * len(added)
            self.in_part[part] += len(added)
            costs = self.model.costs(added, self._classes)
            self._costs = Costs(*map(np.concatenate, zip(self._costs, costs, strict=True)))

    def set_aside(self, late: NDArray[np.bool_] | None) -> None:
        """Set the trials of this mask aside, and no others: they take no places, so that others are drawn."""
        self._aside = Counter() if late is None else Counter(compress(self._parts, late))

    def waits(self) -> Array:
        """Return how long the trials have waited, shape (trials,), as a multiple of the time until they are overdue."""
        most = {part: MOST_WAIT * max(self.sizes.get(part, 0), LEAST_EACH) for part in self.in_part}
        waited = zip(self._parts, self._sent_before, strict=True)
        return np.array([(self._sent[part] - before) / most[part] for part, before in waited])

    def take(self, place: int) -> Trial:
        """Remove the trial at index `place`, because it is sent, and return it."""
        part = self._parts[place]
        trial = self.trials.pop(place)
        self._sent[part] += 1
        self.in_part[part] -= 1
        del self._parts[place], self._sent_before[place]
        # The arrays are changed in place, because `np.delete` takes five times as long.
        for each in (self.rows, *self._costs):
            each[place:-1] = each[place + 1 :]
        self.rows, self._costs = self.rows[:-1], Costs(*(each[:-1] for each in self._costs))
        return trial

    def costs(self) -> Costs:
        """Return what the trials cost on the live classes."""
        version = self.model.version
        if version != self.version:
            self.version = version
            self._costs = self.model.costs(self.trials, self._classes)
        return self._costs
