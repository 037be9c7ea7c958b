"""Pool of drawn trials, from which a free slot takes the one that its compute class is comparatively good at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from shadho_celery.core.trial import Trial
from shadho_celery.predictors.cost_model import CostModel
from shadho_celery.predictors.features import Array

#: trials in the pool: a quarter of the slots, and four for each slot of a small fleet up to so many; the most of all.
#: A sampler that learns from losses loses by each trial that is drawn ahead: there it is a quarter of the slots.
PART_OF_SLOTS, EACH_SLOT, LEAST, MOST = 4, 4, 32, 64
#: with fewer trials of a subspace to choose from, none of it are drawn ahead
LEAST_EACH = 2
#: part of a subspace's trials that must be missing before others are drawn: together they are predicted faster
REFILL = 4
#: trials of its subspace, in units of the subspace's part of the pool, that may be sent before a drawn trial: it then
#: leaves the pool and goes to the next slot that fits. So none waits for more than 32 rounds of a fleet of up to 8
#: slots, 256 trials up to 128 slots, and two rounds of a larger fleet, or of any with an adaptive sampler.
PATIENCE = 8


class Pool:
    """Drawn trials in the order of their draws, and their predicted log seconds by class."""

    def __init__(self, cost_model: CostModel) -> None:
        self._model = cost_model
        #: the trials, the oldest first
        self.trials: list[Trial] = []
        #: of each trial, what the cost model knows its params by, and the trials of its subspace that had been sent
        #: when it was drawn
        self._functions: list[Array] = []
        self._sent_before: list[int] = []
        #: log seconds of the trials on the live classes, shape (trials, classes), as of a version of the model
        self._log_seconds = np.empty((0, 0))
        self._version = -1
        self._counts: Counter[str] = Counter()
        #: by subspace, trials that have been sent from the pool
        self._sent: Counter[str] = Counter()
        #: by subspace that has a part in the pool, the most of its trials
        self._sizes: dict[str, int] = {}
        self._classes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.trials)

    @property
    def subspaces(self) -> list[str]:
        """Subspaces of the trials."""
        return [name for name, count in self._counts.items() if count]

    def of(self, subspace: str) -> list[Trial]:
        """Return the trials of a subspace, the oldest first."""
        return [trial for trial in self.trials if trial.subspace == subspace]

    def count(self, subspace: str) -> int:
        """Return the number of trials of a subspace."""
        return self._counts[subspace]

    def see_classes(self, names: Sequence[str]) -> None:
        """Replace the live classes."""
        if self._classes != tuple(names):
            self._classes = tuple(names)
            self._log_seconds = self._predicted()

    def share_out(self, slots: int, probabilities: Mapping[str, float], *, is_adaptive: bool = False) -> None:
        """Share the places of the pool out among subspaces; without a choice of classes there are none."""
        size = slots // PART_OF_SLOTS if is_adaptive else max(slots // PART_OF_SLOTS, min(EACH_SLOT * slots, LEAST))
        size = min(size, MOST) if len(self._classes) > 1 else 0
        parts = {name: int(size * probability) for name, probability in probabilities.items()}
        self._sizes = {name: part for name, part in parts.items() if part >= LEAST_EACH}

    def missing(self) -> dict[str, int]:
        """Return by subspace how many trials are to be drawn now."""
        missing = {name: size - self._counts[name] for name, size in self._sizes.items()}
        return {name: number for name, number in missing.items() if number >= max(1, self._sizes[name] // REFILL)}

    def add(self, subspace: str, trials: Sequence[Trial]) -> None:
        """Put drawn trials of a subspace into the pool."""
        if not trials:
            return
        functions = self._model.functions(subspace, [trial.params for trial in trials])
        self.trials += trials
        self._functions += list(functions)
        self._sent_before += [self._sent[subspace]] * len(trials)
        self._counts[subspace] += len(trials)
        predicted = self._model.log_seconds_of(subspace, functions, self._classes)
        self._log_seconds = np.concatenate([self._log_seconds, predicted])

    def take(self, trial: Trial) -> Trial | None:
        """Remove a trial that is sent; return the one of its subspace that has now waited too long, removed too."""
        subspace = trial.subspace
        self._remove(self._place(number=trial.number))
        self._sent[subspace] += 1
        if not self._counts[subspace]:
            return None
        oldest = self._place(subspace=subspace)
        most = PATIENCE * max(self._sizes.get(subspace, 0), LEAST_EACH)
        return self._remove(oldest) if self._sent[subspace] - self._sent_before[oldest] >= most else None

    def log_seconds(self) -> Array:
        """Return the trials' log seconds on the live classes, shape (trials, classes), as believed now."""
        version = self._model.version
        if version != self._version:
            self._version = version
            self._log_seconds = self._predicted()
        return self._log_seconds

    def _predicted(self) -> Array:
        predicted = np.empty((len(self.trials), len(self._classes)))
        for name in self.subspaces:
            places = [place for place, trial in enumerate(self.trials) if trial.subspace == name]
            functions = np.array([self._functions[place] for place in places])
            predicted[places] = self._model.log_seconds_of(name, functions, self._classes)
        return predicted

    def _place(self, number: int | None = None, subspace: str | None = None) -> int:
        """Return the place of the trial of that number, or of the first one of a subspace."""
        return next(
            place for place, trial in enumerate(self.trials) if trial.number == number or trial.subspace == subspace
        )

    def _remove(self, place: int) -> Trial:
        trial = self.trials.pop(place)
        self._counts[trial.subspace] -= 1
        del self._functions[place], self._sent_before[place]
        # In place: `np.delete` takes five times as long.
        self._log_seconds[place:-1] = self._log_seconds[place + 1 :]
        self._log_seconds = self._log_seconds[:-1]
        return trial
