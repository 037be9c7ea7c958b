"""Record of why attempts went where they did: what each live class would have cost at that moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shadho_celery.core.records import Placed
from shadho_celery.core.trial import Attempt, Trial
from shadho_celery.predictors.cost_model import CostModel
from shadho_celery.study.recorder import Recorder

#: typical seconds of a subspace's trials below which its trials are short
SHORT_SECONDS = 0.1


@dataclass(eq=False)
class Placements:
    """Collects the attempts that are placed in a turn, and records for each what was known of the live classes.

    The predictions are those that placement compared. They are read once a turn, for all attempts together. With a
    single class there is nothing to compare: of subspaces whose trials are short, the effect of the params is then left
    out, because the prediction would take as long as a part of the trial.
    """

    recorder: Recorder
    cost_model: CostModel

    def __post_init__(self) -> None:
        #: attempts that are not recorded yet, each with the prices at its placement
        self._placed: list[tuple[Attempt, Mapping[str, float]]] = []

    def add(self, attempt: Attempt, prices: Mapping[str, float]) -> None:
        """Add an attempt in the order of placement. `prices` are those of the live classes, if the policy has any."""
        self._placed.append((attempt, prices))

    def record(self, classes: Sequence[str]) -> dict[tuple[int, int], float]:
        """Record the added attempts, which were placed while these classes were live.

        Return the predicted seconds of each of them on its class, if these are a second or more, by number and attempt.
        """
        placed, self._placed = self._placed, []
        predicted = self._predicted([attempt for attempt, _ in placed], classes)
        for (attempt, prices), seconds in zip(placed, predicted, strict=True):
            known = zip(classes, seconds, strict=True)
            found = {n: Placed(each, self.recorder.backlog(n), prices.get(n)) for n, each in known}
            self.recorder.place(attempt, found)
        expected = {}
        for (attempt, _), seconds in zip(placed, predicted, strict=True):
            # Its class may be gone since, if the store was not available meanwhile.
            own = dict(zip(classes, seconds, strict=True)).get(str(attempt.compute_class))
            if own is not None and own >= 1.0:
                expected[attempt.number, attempt.attempt] = own
        return expected

    def _predicted(self, attempts: Sequence[Attempt], classes: Sequence[str]) -> list[Sequence[float | None]]:
        """Return the predicted seconds of each attempt on each class; None before the model has learned from a trial.

        They are also None for a trial of a subspace that the study no longer has.
        """
        model = self.cost_model
        found: list[Sequence[float | None]] = [(None,) * len(classes)] * len(attempts)
        if not model.has_learned:
            return found
        known = [place for place, attempt in enumerate(attempts) if attempt.subspace in model.row_of]
        asked: list[Trial | Attempt] = [attempts[place] for place in known]
        if len(classes) == 1:
            typical = dict(zip(model.row_of, model.typical(), strict=True))
            is_short = np.exp(model.predict([*typical.values()], classes).mean[:, 0]) < SHORT_SECONDS
            short = {name for name, each in zip(typical, is_short.tolist(), strict=True) if each}
            asked = [typical[a.subspace] if a.subspace in short and a.budget is None else a for a in asked]
        for place, seconds in zip(known, np.exp(model.predict(asked, classes).mean).tolist(), strict=True):
            found[place] = seconds
        return found
