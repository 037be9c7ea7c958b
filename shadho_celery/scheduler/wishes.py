"""Numbers of slots that a study wants.

`Demand` computes them for classes whose workers are started on demand. `CheapestSlots` computes them for a study whose
trials are placed by money: the slots with which the trials end by a deadline for the least money.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

import numpy as np

from shadho_celery.core.files import ClassSpec
from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.records import MoneyPlan
from shadho_celery.core.trial import Params, Trial, TrialState
from shadho_celery.core.units import duration, money
from shadho_celery.placement.base import Fits
from shadho_celery.placement.bound import Cheapest, Held, Room, at_most, cheapest, wanted_slots
from shadho_celery.placement.model import CostModel
from shadho_celery.placement.policies import OPTIMISM
from shadho_celery.scheduler.proposals import Proposals
from shadho_celery.study.state import StudyState

#: a number of wanted slots is reduced only after fewer slots were wanted for this many seconds
HOLD_SECONDS = 30.0

#: least seconds between two updates; one second is added for each PER_SECOND pairs of subspace and class
LOOK_SECONDS, PER_SECOND = 3.0, 100

#: predicted seconds of a trial are at least this, because sending it takes as long
SHORTEST = 0.01

#: the mix of subspaces is computed for this number of further trials per subspace
DEALT = 20


@dataclass(eq=False)
class Demand:
    """The slots that one study wants of each declared class, updated every few seconds.

    The numbers include the slots that attempts of the study use, or wait for in the class's queue. They rise at once,
    and fall after HOLD_SECONDS. The number of new slots, beyond those of live workers, is at most the number that
    `new_trials` need. The number of all slots is at most the number that `at_once` trials need. Of classes that are not
    declared, a study wants only live slots (`StudyWants.wants`).
    """

    #: the classes for which workers may be started on demand, the strongest first
    declared: Mapping[str, ClassSpec]
    study: StudyState
    cost_model: CostModel
    proposals: Proposals
    #: by class: maximum number of slots of a trial, for classes for which it is known
    widest: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._live_widest: Mapping[str, int] = {}
        self._held = Held(HOLD_SECONDS)
        self._looked_at = -math.inf
        #: as of the last update, by class: slots that are wanted if new slots are not limited; slots in use
        self._kept: Mapping[str, int] = {}
        self._used: Counter[str | None] = Counter()
        #: mean number of slots of a trial, as of the last update
        self._slots = 1.0
        #: wanted slots by class
        self.wanted: dict[str, int] = {}

    def update(
        self, classes: Sequence[ComputeClass], left: float, seconds_left: float, new_trials: float = math.inf
    ) -> None:
        """Update `wanted`. The linear program is solved again only if that is due. `classes` are the live classes.

        `left` is the number of trials that may still be started, except those for which no machine is started.
        `new_trials` is the number of these trials for which new slots may be wanted, because live workers do not have
        them yet.
        """
        now, live = self.study.clock.now(), {each.name: each.slots for each in classes}
        self._live_widest = {each.name: each.room for each in classes}
        names = [*{**self.declared, **live}]
        pairs = len(self.cost_model.row_of) * len(names)
        if now - self._looked_at >= max(LOOK_SECONDS, pairs / PER_SECOND):
            self._looked_at = now
            self._solve(names, live, left, seconds_left)
        new = {name: max(0, kept - max(live.get(name, 0), self._used[name])) for name, kept in self._kept.items()}
        limited = at_most(new, new_trials * self._slots)
        self.wanted = {name: kept - new[name] + limited[name] for name, kept in self._kept.items()}
        if (most := self.proposals.limits.at_once) is not None:
            used = {name: min(number, self._used[name]) for name, number in self.wanted.items()}
            free = {name: number - used[name] for name, number in self.wanted.items()}
            free = at_most(free, max(0.0, most * self._slots - self._used.total()))
            self.wanted = {name: used[name] + number for name, number in free.items()}

    def _solve(self, names: Sequence[str], live: Mapping[str, int], left: float, seconds_left: float) -> None:
        """Update the slots of each class that are wanted if new slots are not limited."""
        queued = Counter[str | None]()
        self._used.clear()
        for attempt in self.study.attempts:
            (self._used if attempt.state is TrialState.RUNNING else queued)[attempt.compute_class] += attempt.slots
        for name, slots in queued.items():
            self._used[name] += max(0, min(slots, live.get(str(name), 0) - self._used[name]))
        sent = self.study.sent
        self._slots = sum(trial.slots for trial in sent) / len(sent) if sent else 1.0
        rooms = {name: self._room(name, live.get(name, 0)) for name in names}
        useful = self._useful(rooms, left, seconds_left)
        if not self.cost_model.has_learned:
            # The seconds of trials are not known yet, so one worker of each class is wanted to measure them.
            for name, spec in self.declared.items():
                if rooms[name].most and seconds_left > spec.startup_seconds:
                    useful[name] = max(useful.get(name, 0), int(min(spec.slots, left)))
        wanted = {name: max(useful.get(name, 0), self._used[name]) for name in self.declared}
        self._kept = self._held.see(wanted, self.study.clock.now())

    def _room(self, name: str, live: int) -> Room:
        spec = self.declared.get(name)
        if spec is None:
            return Room(live, live)
        widest = max(self.widest.get(name, math.inf), self._live_widest.get(name, 0))
        if widest < min(map(self.proposals.least_slots, self.cost_model.row_of)):
            # No trial fits the workers of the class.
            return Room(0, 0)
        return Room(live, max(live, spec.most), spec.startup_seconds)

    def _useful(self, rooms: Mapping[str, Room], left: float, seconds_left: float) -> dict[str, int]:
        """Return the slots of each class that would shorten the rest of the study."""
        names, row_of = [*rooms], self.cost_model.row_of
        sent = self.study.sent
        budgets = [trial.budget for trial in sent if trial.budget is not None]
        budget = sum(budgets) / len(budgets) if budgets else None
        width = self._slots
        # A trial with twice the mean number of slots takes as many slot seconds as two trials with the mean number. If
        # widths are searched, the model already predicts slot seconds.
        own = [1.0 if self.cost_model.widths else self._width(name, sent, width) for name in row_of]
        relative = np.array(own).reshape(-1, 1) / width
        costs = self.cost_model.costs(self.cost_model.typical(budget), names)
        typical = np.maximum(np.exp(costs.log_seconds) * relative, SHORTEST).tolist()
        return wanted_slots(
            {kind: dict(zip(names, typical[row], strict=True)) for kind, row in row_of.items()},
            self.proposals.mix(DEALT * len(row_of)),
            rooms,
            left=left,
            seconds_left=seconds_left,
            width=width,
        )

    @staticmethod
    def _width(subspace: str, sent: Sequence[Trial], default: float) -> float:
        """Return the mean number of slots of a subspace's trials in flight, or `default` if there are none."""
        slots = [trial.slots for trial in sent if trial.subspace == subspace]
        return sum(slots) / len(slots) if slots else default


#: number of sets of params, drawn in all subspaces together, that represent the remaining trials
DRAWS = 64

#: number of plans until the deadline, and least seconds between two plans
PLANS, LEAST_SECONDS = 200, 5.0

#: the seconds of a class count as known after this number of trials; until then, it runs this many trials at a time
KNOWN_TRIALS = 5

#: no trial begins on a class later than this many times the class's mean seconds before the deadline, because some
#: trials are longer
MARGIN = 2.0

#: a class is clearly faster for a trial than another class that takes more than this many times as long
SOONER = 2.0

#: smaller fractions of a slot are rounding errors
NO_SLOT = 1e-6


@dataclass(eq=False)
class CheapestSlots:
    """Chooses the number of slots of each class for a study that should end by a deadline for the least money.

    The linear program `placement.bound.cheapest` computes how many slots of each class the remaining trials need. The
    policy then places trials on these slots as usual. That is sufficient, because the money for the slots depends only
    on the time for which they run, and the policy keeps this time short. The program is solved again at intervals with
    the latest predictions, so a study that falls behind gets more slots.
    """

    proposals: Proposals
    model: CostModel
    #: seconds from the start of the run to the deadline
    seconds: float
    _: KW_ONLY
    #: by class: number of slots that the study uses; None to use all slots
    slots: Mapping[str, int] | None = None
    #: latest solution; None before the first one, and if the deadline cannot be kept
    plan: Cheapest | None = None
    #: message that says why trials are placed by time; None if they are placed by money
    notice: str | None = None

    def __post_init__(self) -> None:
        self._study = self.proposals.study
        self._due = -math.inf
        self._offered: object = None
        self._seconds_left = self.seconds
        #: by subspace: sets of params that represent its trials, each as a trial
        self._drawn: dict[str, list[Trial]] = {}
        #: live classes; and the greatest expected seconds of a trial on a live class, as of the latest plan
        self._classes: list[str] = []
        self._longest = math.inf
        #: expected seconds on the live classes of trials that were examined in this turn of the scheduler
        self._expected: dict[tuple[object, ...], list[float]] = {}

    def most(self, compute_class: ComputeClass) -> int:
        """Return the maximum number of slots of a class that the study uses."""
        return compute_class.limit if self.slots is None else self.slots.get(compute_class.name, 0)

    @property
    def words(self) -> str | None:
        """Line with the expected money, and the money that another deadline would save or cost; None if trials are
        placed by time.
        """
        if self.plan is None:
            return None
        spent = self._study.recorder.spending(self._study.clock.wall())
        total = f"about {money(spent + self.plan.money)} in all by the deadline in {duration(self._seconds_left)}"
        return f"{total}; {self._recorded(self.plan).hour_words}"

    def is_in_time(self, trial: Trial, compute_class: ComputeClass) -> bool:
        """Return False if a trial would probably end after the deadline on this class, and is clearly faster on another
        class.
        """
        if MARGIN * self._longest <= self._seconds_left or compute_class.name not in self._classes:
            return True
        if trial.subspace not in self.model.row_of or not self.model.has_learned:
            return True
        key = (trial.subspace, trial.budget, trial.origin, *trial.params.items())
        # The predictions are kept, because the same trials are examined for each free slot.
        if key not in self._expected:
            self._expected[key] = self.model.mean_seconds([trial], self._classes)[0].tolist()
        expected = self._expected[key]
        own = expected[self._classes.index(compute_class.name)]
        return MARGIN * own <= self._seconds_left or own <= SOONER * min(expected)

    def see(self, classes: Sequence[ComputeClass], began: float, fits: Fits) -> None:
        """Make a new plan if it is due, or if the live classes have changed. `began` is the start time of the run.

        Call this in each turn, after the cost model has learned.
        """
        self._expected.clear()
        now, prices = self._study.clock.now(), self._study.recorder.prices()
        self._seconds_left = max(0.0, began + self.seconds - now)
        timed = {each.name: min(self.model.timed(each.name), KNOWN_TRIALS) for each in classes}
        offered = [(each.name, each.share, prices.get(each.name), timed[each.name]) for each in classes]
        if offered == self._offered and now < self._due:
            return
        self._classes = [each.name for each in classes]
        self._offered, self._due = offered, now + max(LEAST_SECONDS, self.seconds / PLANS)
        left = self.proposals.limits.trials_left(self._study.counted + self._study.in_flight)
        # If no trials are left to send, all slots may be used, for copies of late trials.
        self.slots, self.plan = None, None
        if left <= 0 or not classes:
            return
        self.notice = None
        if all(prices.get(each.name) is None for each in classes):
            self.notice = "trials are placed by time: no worker announces a price (worker --price)"
            # With this value, `is_in_time` is always True and requests no predictions.
            self._longest = 0.0
            return
        known = {each.name: prices.get(each.name) or 0.0 for each in classes}
        if self.model.has_learned:
            self.plan = self._planned(classes, known, int(left), fits)
            self._study.note_money_plan(self._recorded(self.plan))
            if self.plan is None:
                self.notice = (
                    f"the deadline of {duration(self.seconds)} cannot be kept, so trials are placed by time from now on"
                )
                return
        self.slots = {each.name: self._slots(each, known) for each in classes}

    def _recorded(self, plan: Cheapest | None) -> MoneyPlan:
        now = self._study.clock.wall()
        deadline = round(now + self._seconds_left)
        if plan is None:
            return MoneyPlan(deadline=deadline)
        spent = self._study.recorder.spending(now)
        return MoneyPlan(deadline=deadline, money=spent + plan.money, an_hour=max(0.0, plan.an_hour))

    def release(self) -> None:
        """Use all slots until the next plan. Call this if no trial can run on the chosen slots."""
        self.slots = None

    def _slots(self, compute_class: ComputeClass, prices: Mapping[str, float]) -> int:
        """Return how many slots of a class to use: those of the plan, or KNOWN_TRIALS if its seconds are not
        known yet.
        """
        name, most = compute_class.name, compute_class.limit
        cost = prices[name]
        if not cost or (self.plan is None and cost == min(prices.values())):
            return most
        planned = 0 if self.plan is None else math.ceil(self.plan.slots[name] - NO_SLOT)
        return min(most, max(planned, 0 if self.model.timed(name) >= KNOWN_TRIALS else KNOWN_TRIALS))

    def _planned(
        self, classes: Sequence[ComputeClass], prices: Mapping[str, float], left: int, fits: Fits
    ) -> Cheapest | None:
        names = [each.name for each in classes]
        budgets: list[tuple[float | None, float]] = [*self.proposals.budget_mix().items()] or [(None, 1.0)]
        mix = self.proposals.mix(left)
        kinds: list[tuple[Trial, float]] = []
        # Subspaces from which no more trials are expected are included, because `_longest` must cover all trials.
        for subspace in self.proposals.subspaces:
            drawn = self._draws(subspace)
            number = mix.get(subspace, 0.0) / len(drawn)
            kinds += [(trial.evolve(budget=budget), number * share) for budget, share in budgets for trial in drawn]
        most = (self.proposals.limits.at_once or math.inf) * max(trial.slots for trial, _ in kinds)
        slots = {each.name: min(each.share, most) for each in classes}
        asked = [trial.evolve(budget=self._units(trial.budget)) for trial, _ in kinds]
        expected = self.model.mean_seconds(asked, names, OPTIMISM).tolist()
        seconds = {
            str(index): {c.name: s if fits(trial, c) else math.inf for c, s in zip(classes, row, strict=True)}
            for index, ((trial, _), row) in enumerate(zip(kinds, expected, strict=True))
        }
        trials = {str(index): number for index, (_, number) in enumerate(kinds) if number}
        widths = {kind: kinds[int(kind)][0].slots for kind in trials}
        known = [each for by_class in seconds.values() for each in by_class.values() if each < math.inf]
        self._longest = max(known, default=math.inf)
        return self._solved({kind: seconds[kind] for kind in trials}, trials, slots, prices, widths)

    def _solved(
        self,
        seconds: Mapping[str, Mapping[str, float]],
        trials: Mapping[str, float],
        slots: Mapping[str, float],
        prices: Mapping[str, float],
        widths: Mapping[str, int],
    ) -> Cheapest | None:
        """Return the cheapest placement in which the last trials end before the deadline.

        Trials begin on a class at the latest MARGIN times its mean seconds before the deadline. If there is no solution
        with this margin, a solution without it is returned, if there is one.
        """
        left = self._seconds_left
        in_time = {
            kind: {name: each if MARGIN * each <= left else math.inf for name, each in by_class.items()}
            for kind, by_class in seconds.items()
        }
        times = dict.fromkeys(slots, left)
        found = cheapest(in_time, trials, slots, prices, times, widths=widths)
        if found is None:
            return cheapest(seconds, trials, slots, prices, times, widths=widths)
        times = {name: left - MARGIN * found.seconds[name] for name in slots}
        return cheapest(in_time, trials, slots, prices, times, widths=widths) or found

    def _units(self, budget: float | None) -> float | None:
        """Return the part of a trial's budget that it computes itself.

        If trials continue from checkpoints, the budget of the lower rung is subtracted.
        """
        if budget is None or not self.model.budgets.continues:
            return budget
        return budget - max((each for each in self.proposals.budgets if each < budget), default=0.0)

    def _draws(self, subspace: str) -> Sequence[Trial]:
        if subspace not in self._drawn:
            members = self.proposals.members
            index = [each.name for each in members].index(subspace)
            # These draws do not use the study's own random streams, so its trials are the same as with placement by
            # time.
            generator = np.random.default_rng([self._study.record.seed, index])
            drawn: Sequence[Params] = members[index].sample(generator, max(1, DRAWS // len(members)))
            self._drawn[subspace] = [
                Trial(number=0, subspace=subspace, params=each, slots=self.proposals.width(each)) for each in drawn
            ]
        return self._drawn[subspace]
