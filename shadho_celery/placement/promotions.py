"""Placement of promoted trials: a free slot takes a promoted trial, or leaves it to a machine that would end it sooner.

A promoted trial and its checkpoint's machine are known before a slot is free. A slot takes the trial if it is expected
to end there first, including waiting times (minimum completion time). Otherwise the slot gets a new trial. Of the
promoted trials that it may take, the slot prefers the trial that would lose most elsewhere, in proportion (sufferage);
of equal trials it prefers the one on the highest rung, because rounds wait for its result. Source of both rules:
Maheswaran, Ali, Siegel, Hensgen, Freund, "Dynamic Mapping of a Class of Independent Tasks onto Heterogeneous Computing
Systems", Journal of Parallel and Distributed Computing 59, 1999. A trial that has waited for as long as it could gain
elsewhere is taken by the next slot, so a wrong prediction cannot delay it further.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.trial import Trial
from shadho_celery.placement.base import Choice, Fits, Load, Slot
from shadho_celery.predictors.cost_model import CostModel

#: weight of the newest trial in a class's mean seconds
NEWEST = 0.1
#: score of one rung, in units of the log factor of time that a trial would lose elsewhere. If classes differ only in
#: speed, that factor is the same on all rungs except for noise
RUNG = math.log(1.25)


class _Place(NamedTuple):
    """A class, or one machine of a class, that may run a promoted trial, and the time this would take."""

    compute_class: str
    only_on: str | None
    #: expected seconds until a slot takes the trial, and seconds of the trial itself
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

        The `offered` trials are as they would be added to the study, the next one in turn first. `new` is the rung of
        the new trial that the slot may get instead; a promotion is left only for a new trial on a lower rung.
        """
        before, self._offered_at = self._offered_at, {}
        best: tuple[float, Choice] | None = None
        #: by other class: slots of earlier trials in `offered` that would run faster there than here
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
        # On any machine of the class, and on the one that has the checkpoint.
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

        `ahead` counts by class the slots of the trials that would go there first.
        """
        slots = known.limit
        queue = ahead.get(known.name, 0) + width + min(0, load.taken(known.name) - slots)
        return queue * self._mean.get(known.name, math.inf) / max(slots, 1) if queue > 0 else 0.0
