"""Demand: the slots that a study could use of each class whose workers are started on demand."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from shadho_celery.core.files import ClassSpec
from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.trial import Trial, TrialState
from shadho_celery.placement.bound import Held, Room, at_most, wanted_slots
from shadho_celery.placement.model import CostModel
from shadho_celery.scheduler.proposals import Proposals
from shadho_celery.study.state import StudyState

#: seconds for which a number of slots stays wanted after it is no longer needed
HOLD_SECONDS = 30.0

#: seconds between two updates, and pairs of subspace and class that add a second
LOOK_SECONDS, PER_SECOND = 3.0, 100

#: least seconds of a trial, because sending it takes as long
LEAST_SECONDS = 0.01

#: trials that are divided to give the mix of subspaces, for each subspace
DEALT = 20


class Demand:
    """The slots that one study wants of each declared class, updated every few seconds.

    The numbers include the slots that the study's attempts take, or wait for in the class's queue. They rise at once,
    and fall after HOLD_SECONDS. New slots, beyond those of live workers, are never more than the trials need that are
    still to be sent. Of other classes a study wants live slots only (`StudyWants.wants`).
    """

    def __init__(
        self,
        declared: Mapping[str, ClassSpec],
        study: StudyState,
        cost_model: CostModel,
        proposals: Proposals,
        *,
        widest: Mapping[str, int] | None = None,
    ) -> None:
        """`declared` are the classes that may have workers on demand, the strongest first.

        `widest` are the most slots that a trial can take of a declared class, where they are known.
        """
        self._widest = widest or {}
        self._live_widest: Mapping[str, int] = {}
        self._declared, self._study, self._cost_model, self._proposals = declared, study, cost_model, proposals
        self._held = Held(HOLD_SECONDS)
        self._looked_at = -math.inf
        #: slots by class, as of the last update: those that are wanted without a limit on new ones, and those in use
        self._kept: Mapping[str, int] = {}
        self._used: Counter[str | None] = Counter()
        #: mean number of slots of a trial, as of the last update
        self._slots = 1.0
        #: wanted slots by class
        self.wanted: dict[str, int] = {}

    def look(self, classes: Sequence[ComputeClass], left: float, seconds_left: float, unsent: float = math.inf) -> None:
        """Limit the new slots, and update the wanted slots if that is due. `classes` are the live ones.

        `left` is the number of trials that may still be started, without those for which no machine is started.
        `unsent` is the number of them for which new slots may be wanted: those that live workers do not have yet.
        """
        now, live = self._study.clock.now(), {each.name: each.slots for each in classes}
        self._live_widest = {each.name: each.room for each in classes}
        names = [*{**self._declared, **live}]
        pairs = len(self._cost_model.row_of) * len(names)
        if now - self._looked_at >= max(LOOK_SECONDS, pairs / PER_SECOND):
            self._looked_at = now
            self._update(names, live, left, seconds_left)
        new = {name: max(0, kept - max(live.get(name, 0), self._used[name])) for name, kept in self._kept.items()}
        limited = at_most(new, unsent * self._slots)
        self.wanted = {name: kept - new[name] + limited[name] for name, kept in self._kept.items()}

    def _update(self, names: Sequence[str], live: Mapping[str, int], left: float, seconds_left: float) -> None:
        """Update the slots of each class that are wanted without a limit on new ones."""
        queued = Counter[str | None]()
        self._used.clear()
        for attempt in self._study.attempts:
            (self._used if attempt.state is TrialState.RUNNING else queued)[attempt.compute_class] += attempt.slots
        for name, slots in queued.items():
            self._used[name] += max(0, min(slots, live.get(str(name), 0) - self._used[name]))
        sent = self._study.sent
        self._slots = sum(trial.slots for trial in sent) / len(sent) if sent else 1.0
        rooms = {name: self._room(name, live.get(name, 0)) for name in names}
        useful = self._useful(rooms, left, seconds_left)
        if not self._cost_model.has_learned:
            # How long trials take is not known, so a worker of each class is to tell.
            for name, spec in self._declared.items():
                if rooms[name].most and seconds_left > spec.startup_seconds:
                    useful[name] = max(useful.get(name, 0), int(min(spec.slots, left)))
        wanted = {name: max(useful.get(name, 0), self._used[name]) for name in self._declared}
        self._kept = self._held.see(wanted, self._study.clock.now())

    def _room(self, name: str, live: int) -> Room:
        spec = self._declared.get(name)
        if spec is None:
            return Room(live, live)
        widest = max(self._widest.get(name, math.inf), self._live_widest.get(name, 0))
        if widest < min(map(self._proposals.least_slots, self._cost_model.row_of)):
            # No trial fits its workers.
            return Room(0, 0)
        return Room(live, max(live, spec.most), spec.startup_seconds)

    def _useful(self, rooms: Mapping[str, Room], left: float, seconds_left: float) -> dict[str, int]:
        """Return the slots of each class that would shorten the rest of the study."""
        names, row_of = [*rooms], self._cost_model.row_of
        sent = self._study.sent
        budgets = [trial.budget for trial in sent if trial.budget is not None]
        budget = sum(budgets) / len(budgets) if budgets else None
        width = self._slots
        # A trial of twice the mean number of slots takes as many slot seconds as two of the mean number.
        # With searched widths, the model predicts slot seconds, whatever the width.
        own = [1.0 if self._cost_model.widths else self._width(name, sent, width) for name in row_of]
        relative = np.array(own).reshape(-1, 1) / width
        costs = self._cost_model.costs(self._cost_model.typical(budget), names)
        typical = np.maximum(np.exp(costs.log_seconds) * relative, LEAST_SECONDS).tolist()
        return wanted_slots(
            {kind: dict(zip(names, typical[row], strict=True)) for kind, row in row_of.items()},
            self._proposals.mix(DEALT * len(row_of)),
            rooms,
            left=left,
            seconds_left=seconds_left,
            width=width,
        )

    @staticmethod
    def _width(subspace: str, sent: Sequence[Trial], default: float) -> float:
        """Return the mean number of slots of a subspace's trials among those in flight, or `default` without any."""
        slots = [trial.slots for trial in sent if trial.subspace == subspace]
        return sum(slots) / len(slots) if slots else default
