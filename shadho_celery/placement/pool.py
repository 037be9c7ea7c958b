"""Parts of the policy `cost`: the pool of trials drawn ahead, and the placement of promoted trials.

From the pool, a free slot takes a trial that its compute class runs fast in comparison with other classes
(`CostPolicy`).

A slot takes a promoted trial if the trial is expected to end first in this slot, waiting times for other slots included
(minimum completion time). Otherwise the slot gets a new trial. Of the promoted trials that it may take, it takes the
one that would lose the most time elsewhere, relative to its length (sufferage). Higher rungs are preferred, because
rounds wait for their results. Source of both rules: Maheswaran, Ali, Siegel, Hensgen, Freund, "Dynamic Mapping of a
Class of Independent Tasks onto Heterogeneous Computing Systems", Journal of Parallel and Distributed Computing 59,
1999. A trial waits at most for the time that it could gain elsewhere. Then the next slot takes it, so a wrong
prediction cannot delay it further.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import compress, groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.trial import Trial
from shadho_celery.placement.base import Choice, Fits, Load, Slot
from shadho_celery.placement.model import CostModel, Costs
from shadho_celery.space.features import Array

#: number of trials in the pool: the slots divided by PART_OF_SLOTS, up to MOST; but on a small fleet at least EACH_SLOT
#: trials for each slot, up to LEAST
PART_OF_SLOTS, EACH_SLOT, LEAST, MOST = 4, 4, 32, 64
#: factor of this number for a pool with only one part, whose trials differ only by their params
UNDIVIDED = 2
#: for a sampler that learns from losses, the number on a small fleet is the slots divided by PART_OF_FEW, up to
#: LEAST_ADAPTIVE, because each trial drawn ahead makes such a sampler worse
PART_OF_FEW, LEAST_ADAPTIVE = 2, 8
#: name of the pool's only part, instead of subspaces, if one sampler draws in the whole space
WHOLE = ""
#: if a subspace's part of the pool has fewer places than this, no trials of the subspace are drawn ahead
LEAST_EACH = 2
#: a part is refilled when one in this many of its places is empty, because several trials together are predicted faster
REFILL = 2
#: a trial is overdue once MOST_WAIT times n trials of its part have been sent since it was drawn, where n is the number
#: of the part's places. These are 32 rounds of a fleet of up to 8 slots, 256 trials on up to 64 slots, and four rounds
#: of a larger fleet; with several subspaces or an adaptive sampler, two rounds.
MOST_WAIT = 8
#: number of trials for each slot that may be set aside near the limit on time, because they would end too late
ASIDE = 1


@dataclass(eq=False)
class Pool:
    """Trials drawn ahead, in the order of their draws, and their predicted costs on each class."""

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
        self._drawn: list[tuple[str, int]] = []
        #: rows of the trials' subspaces in the cost model, shape (trials,); 0 if one sampler draws in the whole space
        self.rows: NDArray[np.intp] = np.empty(0, dtype=np.intp)
        #: costs of the trials on the live classes
        self._costs = Costs(np.empty((0, 0)), np.empty((0, 0)))
        #: version of the model with which these costs were computed
        self.version = -1
        #: by part: number of trials that are set aside, because they would end after the limit on time on every class
        self._aside: Counter[str] = Counter()
        #: maximum number of trials set aside that do not take a place of the pool
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
            added = list(drawn)
            part, row = (WHOLE, 0) if self.is_whole else (subspace, self.model.row_of[subspace])
            self.trials += added
            self.rows = np.append(self.rows, [row] * len(added))
            self._drawn += [(part, self._sent[part])] * len(added)
            self.in_part[part] += len(added)
            costs = self.model.costs(added, self._classes)
            self._costs = Costs(*map(np.concatenate, zip(self._costs, costs, strict=True)))

    def set_aside(self, late: NDArray[np.bool_] | None) -> None:
        """Set aside only the trials of this mask. They take no places of the pool, so other trials are drawn."""
        self._aside = Counter() if late is None else Counter(part for part, _ in compress(self._drawn, late))

    def waits(self) -> Array:
        """Return how long the trials have waited, shape (trials,), as a multiple of the time until they are overdue."""
        most = {part: MOST_WAIT * max(self.sizes.get(part, 0), LEAST_EACH) for part in self.in_part}
        return np.array([(self._sent[part] - before) / most[part] for part, before in self._drawn])

    def take(self, place: int) -> Trial:
        """Remove the trial at index `place` and return it, because it is being sent."""
        trial, (part, _) = self.trials.pop(place), self._drawn.pop(place)
        self._sent[part] += 1
        self.in_part[part] -= 1
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


#: weight of the newest trial in a class's mean seconds
NEWEST = 0.1
#: one rung counts as much as this log factor of time that a trial would lose elsewhere. If classes differ only in
#: speed, the factor is the same on all rungs except for noise, so that the higher rung decides
RUNG = math.log(1.25)


class _Place(NamedTuple):
    """A class, or one machine of a class, that may run a promoted trial, with the expected waiting time and seconds."""

    compute_class: str
    only_on: str | None
    #: expected seconds until a slot is free for the trial, and expected seconds of the trial itself
    wait: float
    seconds: float

    @property
    def end(self) -> float:
        return self.wait + self.seconds


class Promotions:
    """Chooses a promoted trial for a free slot, or leaves all of them to other slots."""

    def __init__(self, cost_model: CostModel) -> None:
        self._model = cost_model
        self._classes: Mapping[str, ComputeClass] = {}
        #: by class: moving average of the seconds of its trials
        self._mean: dict[str, float] = {}
        #: by origin and rung: the time at which the promotion was first offered
        self._offered_at: dict[tuple[int, int], float] = {}

    def see(self, classes: Sequence[ComputeClass]) -> None:
        """Update the live classes."""
        self._classes = {each.name: each for each in classes}

    def tell(self, trials: Sequence[Trial]) -> None:
        """Learn from finished trials."""
        for trial in trials:
            if trial.outcome.seconds is None or trial.compute_class is None:
                continue
            before = self._mean.get(trial.compute_class, trial.outcome.seconds)
            self._mean[trial.compute_class] = before + NEWEST * (trial.outcome.seconds - before)

    def pick(self, slot: Slot, offered: Sequence[Trial], fits: Fits, new: int | None = None) -> Choice | None:
        """Return the promotion for a free slot, or None to leave all promotions to other slots.

        `offered` has the promoted trials, the next one in turn first. `new` is the rung of the new trial that the slot
        may get instead. A slot leaves a promotion to other slots only if it gets a new trial on a lower rung.
        """
        before, self._offered_at = self._offered_at, {}
        best: tuple[float, Choice] | None = None
        #: by other class: slots of those earlier trials in `offered` that would run faster on that class than on this
        #: one
        ahead: Counter[str] = Counter()
        for trial in offered:
            key = int(trial.origin or 0), int(trial.rung or 0)
            since = self._offered_at[key] = before.get(key, slot.now)
            here, elsewhere = self._places(slot, trial, fits, ahead)
            if here is None:
                continue
            gain, patience = 0.0, 0.0
            if elsewhere is not None:
                gain, patience = math.log(elsewhere.end / here.seconds), here.seconds - elsewhere.seconds
                if patience > 0:
                    ahead[elsewhere.compute_class] += trial.slots
            if gain < 0 and slot.now - since < patience and new is not None and new < key[1]:
                continue
            score = gain + RUNG * key[1]
            if best is None or score > best[0]:
                best = score, Choice(trial, here.only_on)
        return None if best is None else best[1]

    def _places(
        self, slot: Slot, trial: Trial, fits: Fits, ahead: Mapping[str, int]
    ) -> tuple[_Place | None, _Place | None]:
        """Return the fastest place for a trial in the slot's class, and the place elsewhere that would end it first.

        Either may be None.
        """
        load, compute_class = slot.load, slot.compute_class.name
        fitting = [name for name, known in self._classes.items() if fits(trial, known)]
        if compute_class not in fitting:
            return None, None
        home = self._model.budgets.host(int(trial.origin or 0)) or ""
        # The first row is for any machine of a class, the second row for the machine that has the checkpoint.
        seconds = self._model.promoted_seconds(trial, fitting, home)
        here: list[_Place] = []
        elsewhere: list[_Place] = []
        for name, (anywhere, at_home) in zip(fitting, seconds.T.tolist(), strict=True):
            known = self._classes[name]
            wait = 0.0 if name == compute_class else self._wait(known, load, ahead, trial.slots)
            (here if name == compute_class else elsewhere).append(_Place(name, None, wait, anywhere))
            if home in known.hosts and at_home < anywhere:
                slots = known.hosts[home]
                is_free = name == compute_class and load.running().get(home, 0) + trial.slots <= slots
                wait = 0.0 if is_free else self._mean.get(name, math.inf) * trial.slots / slots
                (here if is_free else elsewhere).append(_Place(name, home, wait, at_home))
        first = min(elsewhere, key=lambda place: place.end, default=None)
        return min(here, key=lambda place: place.seconds), None if first is None or first.end == math.inf else first

    def _wait(self, known: ComputeClass, load: Load, ahead: Mapping[str, int], width: int) -> float:
        """Return the expected seconds until a class would have `width` free slots for another trial.

        `ahead` has the slots of the trials that would go to each class first.
        """
        slots = known.limit
        queue = ahead.get(known.name, 0) + width + min(0, load.taken(known.name) - slots)
        return queue * self._mean.get(known.name, math.inf) / max(slots, 1) if queue > 0 else 0.0
