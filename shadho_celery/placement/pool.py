"""Pool of drawn trials, from which a free slot takes the one that its compute class runs comparatively fast."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from shadho_celery.core.trial import Trial
from shadho_celery.predictors.cost_model import CostModel
from shadho_celery.predictors.features import Array

#: number of trials in the pool: a quarter of the slots; on a small fleet four per slot up to this many; and the maximum
PART_OF_SLOTS, EACH_SLOT, LEAST, MOST = 4, 4, 32, 64
#: a sampler that learns from losses gets worse with each trial drawn ahead, so its number is a quarter of the slots, or
#: on a small fleet half of them up to this many
PART_OF_FEW, LEAST_ADAPTIVE = 2, 8
#: the pool's only part, instead of subspaces, if one sampler draws in the whole space
WHOLE = ""
#: if a subspace would have fewer trials to choose from, none of it are drawn ahead
LEAST_EACH = 2
#: fraction of a subspace's trials that must be missing before others are drawn: predicting them together is faster
REFILL = 2
#: number of trials of its part, in units of the part's places in the pool, that may be sent before a drawn trial; then
#: it leaves the pool and goes to the next slot that fits. So none waits for more than 32 rounds of a fleet of up to 8
#: slots, 256 trials up to 128 slots, and two rounds of a larger fleet, or of any with an adaptive sampler.
MOST_WAIT = 8


@dataclass(eq=False)
class Pool:
    """Drawn trials in the order of their draws, and the predicted effects of their params on their log seconds."""

    model: CostModel
    #: shares of its parts: the subspaces, or WHOLE if one sampler draws in the whole space
    shares: Mapping[str, float]
    _: KW_ONLY
    #: number of trials that it may hold; None for as many as the slots ask for
    size: int | None = None
    #: True if the samplers learn from losses, so that fewer trials are drawn ahead
    is_adaptive: bool = False

    def __post_init__(self) -> None:
        #: True if one sampler draws in the whole space
        self.is_whole = WHOLE in self.shares
        #: the trials, the oldest first
        self.trials: list[Trial] = []
        #: for each trial: its part, the cost model's representation of its params, and the number of trials of its part
        #: that had been sent when it was drawn
        self._parts: list[str] = []
        self._functions: list[Array] = []
        self._sent_before: list[int] = []
        #: rows of the trials' subspaces in the cost model, shape (trials,)
        self.rows: NDArray[np.intp] = np.empty(0, dtype=np.intp)
        #: departures of the trials from their subspace's log seconds, shape (trials, live classes)
        self._departures = np.empty((0, 0))
        #: version of the model's estimated effects of params for which they were computed
        self.version = -1
        #: trials by part
        self.in_part: Counter[str] = Counter()
        #: number of trials that have been sent from the pool, by part
        self._sent: Counter[str] = Counter()
        #: maximum number of its trials, by part that is drawn ahead
        self.sizes: dict[str, int] = {}
        self._classes: tuple[str, ...] = ()

    def see(self, classes: Sequence[str], slots: int) -> None:
        """Update the live classes and their slots, and share the places of the pool out among its parts.

        Without a choice of classes there are no places.
        """
        if self._classes != tuple(classes):
            self._classes = tuple(classes)
            self._departures = self._predicted()
        of_few = min(slots // PART_OF_FEW, LEAST_ADAPTIVE) if self.is_adaptive else min(EACH_SLOT * slots, LEAST)
        size = max(slots // PART_OF_SLOTS, of_few)
        size = min(size, MOST) if self.size is None else self.size
        size = size if len(classes) > 1 else 0
        parts = {name: int(size * share) for name, share in self.shares.items()}
        self.sizes = {name: part for name, part in parts.items() if part >= LEAST_EACH}

    def missing(self) -> dict[str, int]:
        """Return how many trials should be drawn now, by part."""
        missing = {name: size - self.in_part[name] for name, size in self.sizes.items()}
        return {name: number for name, number in missing.items() if number >= max(1, self.sizes[name] // REFILL)}

    def add(self, trials: Sequence[Trial]) -> None:
        """Put drawn trials into the pool, in the order of their draws."""
        for (subspace, budget), drawn in groupby(trials, lambda trial: (trial.subspace, trial.budget)):
            added, part = list(drawn), WHOLE if self.is_whole else subspace
            functions = self.model.functions(subspace, [trial.params for trial in added])
            self.trials += added
            self._functions += list(functions)
            self._parts += [part] * len(added)
            self.rows = np.append(self.rows, [self.model.row_of[subspace]] * len(added))
            self._sent_before += [self._sent[part]] * len(added)
            self.in_part[part] += len(added)
            predicted = self.model.departures(subspace, functions, self._classes, budget)
            self._departures = np.concatenate([self._departures, predicted])

    def take(self, place: int) -> Trial | None:
        """Remove the trial at a place, to be sent; return the one of its part that has waited too long, removed too."""
        part = self._parts[place]
        self._remove(place)
        self._sent[part] += 1
        if not self.in_part[part]:
            return None
        oldest = self._parts.index(part)
        most = MOST_WAIT * max(self.sizes.get(part, 0), LEAST_EACH)
        return self._remove(oldest) if self._sent[part] - self._sent_before[oldest] >= most else None

    def departures(self) -> Array:
        """Return the trials' departures from their subspaces' log seconds, shape (trials, live classes)."""
        version = self.model.effects_version
        if version != self.version:
            self.version = version
            self._departures = self._predicted()
        return self._departures

    def _predicted(self) -> Array:
        predicted = np.empty((len(self.trials), len(self._classes)))
        alike: defaultdict[tuple[str, float | None], list[int]] = defaultdict(list)
        for place, trial in enumerate(self.trials):
            alike[trial.subspace, trial.budget].append(place)
        for (name, budget), places in alike.items():
            functions = np.array([self._functions[place] for place in places])
            predicted[places] = self.model.departures(name, functions, self._classes, budget)
        return predicted

    def _remove(self, place: int) -> Trial:
        trial = self.trials.pop(place)
        self.in_part[self._parts[place]] -= 1
        del self._parts[place], self._functions[place], self._sent_before[place]
        # In place, because `np.delete` takes five times as long.
        for each in (self._departures, self.rows):
            each[place:-1] = each[place + 1 :]
        self._departures, self.rows = self._departures[:-1], self.rows[:-1]
        return trial
