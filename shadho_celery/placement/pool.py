"""Pool of drawn trials, from which a free slot takes the one that its compute class is comparatively good at."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from shadho_celery.core.trial import Trial
from shadho_celery.predictors.cost_model import CostModel
from shadho_celery.predictors.features import Array

#: trials in the pool: a quarter of the slots, and four for each slot of a small fleet up to so many; the most of all.
PART_OF_SLOTS, EACH_SLOT, LEAST, MOST = 4, 4, 32, 64
#: a sampler that learns from losses loses by each trial that is drawn ahead: there it is a quarter of the slots, and
#: half of those of a small fleet up to so many
PART_OF_FEW, LEAST_ADAPTIVE = 2, 8
#: the pool's one part where one sampler draws in the whole space, in place of a subspace's name
WHOLE = ""
#: with fewer trials of a subspace to choose from, none of it are drawn ahead
LEAST_EACH = 2
#: part of a subspace's trials that must be missing before others are drawn: together they are predicted faster
REFILL = 2
#: trials of its part, in units of the part's places in the pool, that may be sent before a drawn trial: it then
#: leaves the pool and goes to the next slot that fits. So none waits for more than 32 rounds of a fleet of up to 8
#: slots, 256 trials up to 128 slots, and two rounds of a larger fleet, or of any with an adaptive sampler.
MOST_WAIT = 8


class Pool:
    """Drawn trials in the order of their draws, and what their params are predicted to do to their log seconds."""

    def __init__(
        self,
        cost_model: CostModel,
        shares: Mapping[str, float],
        *,
        size: int | None = None,
        is_adaptive: bool = False,
    ) -> None:
        """Hold up to `size` trials, by default as many as the slots ask for.

        `shares` are those of its parts: the subspaces, or WHOLE if one sampler draws in the whole space. A sampler that
        `is_adaptive` learns from losses, so that fewer trials are drawn ahead.
        """
        self._model = cost_model
        self._shares = shares
        self._size = size
        self._is_adaptive = is_adaptive
        #: True if one sampler draws in the whole space
        self.is_whole = WHOLE in shares
        #: the trials, the oldest first
        self.trials: list[Trial] = []
        #: of each trial, its part, what the cost model knows its params by, and the trials of its part that had been
        #: sent when it was drawn
        self._parts: list[str] = []
        self._functions: list[Array] = []
        self._sent_before: list[int] = []
        #: rows of the trials' subspaces in the cost model, shape (trials,)
        self.rows: NDArray[np.intp] = np.empty(0, dtype=np.intp)
        #: departures of the trials from their subspace's log seconds, shape (trials, live classes)
        self._departures = np.empty((0, 0))
        #: version of the model's belief in the effects of params that they are of
        self.version = -1
        #: trials by part
        self.in_part: Counter[str] = Counter()
        #: by part, trials that have been sent from the pool
        self._sent: Counter[str] = Counter()
        #: by part that is worth drawing ahead for, the most of its trials
        self.sizes: dict[str, int] = {}
        self._classes: tuple[str, ...] = ()

    def see(self, classes: Sequence[str], slots: int) -> None:
        """Update the live classes and their slots, and share the places of the pool out among its parts.

        Without a choice of classes there are no places.
        """
        if self._classes != tuple(classes):
            self._classes = tuple(classes)
            self._departures = self._predicted()
        of_few = min(slots // PART_OF_FEW, LEAST_ADAPTIVE) if self._is_adaptive else min(EACH_SLOT * slots, LEAST)
        size = max(slots // PART_OF_SLOTS, of_few)
        size = min(size, MOST) if self._size is None else self._size
        size = size if len(classes) > 1 else 0
        parts = {name: int(size * share) for name, share in self._shares.items()}
        self.sizes = {name: part for name, part in parts.items() if part >= LEAST_EACH}

    def missing(self) -> dict[str, int]:
        """Return by part how many trials are to be drawn now."""
        missing = {name: size - self.in_part[name] for name, size in self.sizes.items()}
        return {name: number for name, number in missing.items() if number >= max(1, self.sizes[name] // REFILL)}

    def add(self, trials: Sequence[Trial]) -> None:
        """Put drawn trials into the pool, in the order of their draws."""
        for (subspace, budget), drawn in groupby(trials, lambda trial: (trial.subspace, trial.budget)):
            added, part = list(drawn), WHOLE if self.is_whole else subspace
            functions = self._model.functions(subspace, [trial.params for trial in added])
            self.trials += added
            self._functions += list(functions)
            self._parts += [part] * len(added)
            self.rows = np.append(self.rows, [self._model.row_of[subspace]] * len(added))
            self._sent_before += [self._sent[part]] * len(added)
            self.in_part[part] += len(added)
            predicted = self._model.departures(subspace, functions, self._classes, budget)
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
        """Return by how much the trials depart from their subspaces' log seconds, shape (trials, live classes)."""
        version = self._model.effects_version
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
            predicted[places] = self._model.departures(name, functions, self._classes, budget)
        return predicted

    def _remove(self, place: int) -> Trial:
        trial = self.trials.pop(place)
        self.in_part[self._parts[place]] -= 1
        del self._parts[place], self._functions[place], self._sent_before[place]
        # In place: `np.delete` takes five times as long.
        for each in (self._departures, self.rows):
            each[place:-1] = each[place + 1 :]
        self._departures, self.rows = self._departures[:-1], self.rows[:-1]
        return trial
