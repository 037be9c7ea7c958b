"""Width of a trial, which is its number of slots of one class, and reservations of slots for wide trials.

The width is set in the study file (`make_width`), or chosen when the trial is placed (`Widths`). A class or a machine
is reserved until it has enough free slots for a wide trial (`Reservations`).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shadho_celery.core.attempts import Sent
from shadho_celery.core.checks import short
from shadho_celery.core.failures import user_code
from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.settings import SlotsSetting
from shadho_celery.core.trial import MAX_SLOTS, Params, Trial, TrialState
from shadho_celery.errors import UsageError
from shadho_celery.placement.base import Fits
from shadho_celery.placement.memory import MemoryFit
from shadho_celery.placement.model import CostModel
from shadho_celery.space.features import Array
from shadho_celery.space.split import Subspace
from shadho_celery.study.state import StudyState


class Reservations:
    """Free slots of each class for one study, and reservations for wide trials.

    A class with too few free slots for a trial is reserved for it: no other trial is sent there until enough slots are
    free. If all slots of a trial must be on one worker, only one machine of the class is reserved, and the other
    machines get trials.
    """

    def __init__(self, study: StudyState, *, is_searched: bool = False) -> None:
        """`is_searched` is True if `Widths` chooses widths: a width that was chosen for one class may be poor on
        others.
        """
        self._study = study
        self._is_searched = is_searched
        #: by class and machine (None for the whole class): the number of the trial for which it is reserved
        self.reserved: dict[tuple[str, str | None], int] = {}

    @property
    def names(self) -> set[str]:
        """Names of the classes that are reserved, or that have a reserved machine."""
        return {name for name, _ in self.reserved}

    def see(self, classes: Sequence[ComputeClass], fits: Fits = lambda trial, target: True) -> None:
        """Drop the reservations that are no longer valid.

        The class has no workers any more, it has too few slots for the trial, the trial no longer `fits`, or it no
        longer waits.
        """
        targets = {target.key: target for each in classes for target in each.targets}
        for key, number in list(self.reserved.items()):
            trial, target = self._study.find_open(number), targets.get(key)
            is_waiting = trial is not None and trial.state is TrialState.WAITING
            if (
                trial is None
                or target is None
                or not is_waiting
                or trial.slots > target.room
                or not fits(trial, target)
            ):
                del self.reserved[key]

    def free(self, compute_class: ComputeClass, ahead: int = 0) -> int:
        """Return the number of free slots of a class plus `ahead` places in its queue. It is negative if too many are
        used.
        """
        free = compute_class.limit + ahead + compute_class.silent - self._study.taken(compute_class.name)
        if compute_class.host is None:
            return free
        taken = self._study.taken_on(compute_class.name)
        # Slots for earlier reservations are subtracted. Otherwise other machines would use up the study's share, and
        # the machines that were reserved earlier would wait.
        for (name, host), number in self.reserved.items():
            if (name, host) == compute_class.key:
                break
            trial = self._study.find_open(number)
            if name == compute_class.name and trial is not None:
                free -= max(0, trial.slots - taken[host])
        return min(free, compute_class.slots - taken[compute_class.host])

    def may_take(self, compute_class: ComputeClass, trial: Trial) -> bool:
        """Return True unless the class is reserved for another trial.

        A trial for which another class is reserved may take this one only if it can start at once, and not at all if
        its width was chosen for the reserved class.
        """
        if compute_class.key in self.reserved:
            return self.reserved[compute_class.key] == trial.number
        kept = [name for (name, _), number in self.reserved.items() if number == trial.number]
        if kept and self._is_searched and compute_class.name not in kept:
            return False
        return not kept or self.may_start(trial, compute_class)

    def may_start(self, trial: Trial, compute_class: ComputeClass) -> bool:
        """Return True if the class has enough free slots for a trial. A trial of one slot may always be sent, because
        it can wait in the queue.

        A trial that is wider than the study's share of the class starts when enough slots are free and the study uses
        none of them. If all of its slots are on one worker, it may exceed the share while a part of the share is free,
        unless it is the turn of other studies. Then it does not wait until slots are free: the worker keeps them for
        it, so that narrow trials of others cannot hold it up.
        """
        may_queue = trial.slots == 1 and compute_class.host is None
        if may_queue or trial.slots <= min(self.free(compute_class), self._together(compute_class)):
            return True
        name, taken = compute_class.name, self._study.taken(compute_class.name)
        if compute_class.most is not None and taken + trial.slots > compute_class.most:
            return False
        if compute_class.widest and compute_class.turn != 0:
            here = compute_class.slots - self._study.taken_on(name)[compute_class.host]
            has_part = taken < compute_class.share and self.free(compute_class) > 0
            return has_part and trial.slots <= min(compute_class.room, here, self._together(compute_class))
        return not taken and trial.slots <= compute_class.slots - compute_class.busy

    def best(self, trial: Trial, machines: Sequence[ComputeClass], home: str | None) -> ComputeClass:
        """Return the machine of a class that a trial takes: its `home`, or the machine with the fewest free slots that
        are enough.

        If it cannot start on any machine, return the one with the most free slots, which is then reserved.
        """
        free = {each.host: min(self.free(each), self._together(each)) for each in machines}
        open_ = [each for each in machines if self.may_take(each, trial)]
        ready = [each for each in open_ if self.may_start(trial, each)]
        if ready:
            return min(ready, key=lambda each: (each.host != home, free[each.host], each.busy))
        return max(open_, key=lambda each: (free[each.host], -each.busy))

    def _together(self, compute_class: ComputeClass) -> int:
        """Return the greatest number of free slots of one worker of a machine, or the number of slots if workers are
        not known.
        """
        left = {**compute_class.by_worker} or {"": compute_class.slots}
        unclaimed = []
        for attempt in self._study.attempts if compute_class.by_worker else ():
            if attempt.compute_class == compute_class.name and attempt.worker in left:
                left[attempt.worker] -= attempt.slots
            elif (attempt.compute_class, attempt.only_on) == compute_class.key and not attempt.worker:
                unclaimed.append(attempt.slots)
        # A worker with too few free slots leaves an attempt to a worker with enough.
        for slots in sorted(unclaimed, reverse=True):
            least = min((free for free in left.values() if free >= slots), default=max(left.values()))
            left[next(name for name, free in left.items() if free == least)] -= slots
        return max(left.values())


#: function from drawn params to the number of slots
Width = Callable[[Params], int]

#: number of draws from each subspace with which the setting is tested before the study starts
SAMPLES = 8

#: a width counts as faster than estimated by this many standard deviations, so that widths with few trials are tried
OPTIMISM = 1.5
#: a late trial is expected to run on for this fraction of the seconds that it has run
OVERDUE = 0.1
#: log costs are rounded to this many decimal places; of widths with equal costs, one that was not tried is chosen
DIGITS = 6


def make_width(slots: SlotsSetting, subspaces: Sequence[Subspace], name: str = "slots") -> Width:
    """Return the setting `slots` or `gpus` as a function of drawn params.

    `name` is the name of the setting. Raises UsageError unless the setting gives whole numbers from 1 to MAX_SLOTS.
    """
    space = subspaces[0].space
    if isinstance(slots, (list, tuple)):
        slots = min(_count(each, name) for each in slots)
    if isinstance(slots, int):
        width = _count(slots, name)
        return lambda params: width

    def width_of(params: Params) -> int:
        with user_code(f"STUDY['{name}'] failed", dict(params)):
            values = space.evaluate(params)
            if callable(slots):
                return _count(slots(values), name)
            if isinstance(values, Mapping) and slots in values:
                return _count(values[slots], name)
        raise UsageError(f"STUDY['{name}'] is {slots!r}, which is not a key of the params; give a number or a function")

    generator = np.random.default_rng(0)
    for subspace in subspaces:
        for params in subspace.sample(generator, SAMPLES):
            width_of(params)
    return width_of


def widest(width: Width, subspaces: Sequence[Subspace]) -> int:
    """Return the largest width, estimated from draws of each subspace. Raises UsageError like `make_width`."""
    generator = np.random.default_rng(1)
    return max(width(params) for subspace in subspaces for params in subspace.sample(generator, 8 * SAMPLES))


def _count(value: object, name: str) -> int:
    number = value.item() if isinstance(value, np.generic) else value
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= MAX_SLOTS:
        raise UsageError(
            f"STUDY['{name}'] gives {short(value, 60)}; a trial takes a whole number of {name} from 1 to {MAX_SLOTS}"
        )
    return number


@dataclass(eq=False)
class Widths:
    """Chooses a width for each trial when it is placed: the width that costs least on the trial's class.

    A width costs the slot seconds of the trial, and the idle seconds of free slots until a machine has enough of them.
    The widest one is tried first, because it needs the least memory of each GPU and gives a result soonest. With
    another width, a trial may take very long. So a second trial of a subspace starts with this width on a class only
    when the first one has ended, or its seconds are extrapolated.
    """

    study: StudyState
    model: CostModel
    memory_fit: MemoryFit
    reservations: Reservations

    def __post_init__(self) -> None:
        self._classes: Mapping[str, ComputeClass] = {}
        #: by number of the trial and the attempt: expected seconds of a live attempt
        self._expected: dict[tuple[int, int], float] = {}

    def see(self, classes: Sequence[ComputeClass]) -> None:
        """Update the live classes."""
        self._classes = {each.name: each for each in classes}
        if len(self._expected) > 2 * len(self.study.live):
            live = {sent.key for sent in self.study.live}
            self._expected = {key: seconds for key, seconds in self._expected.items() if key in live}

    def choose(self, trial: Trial, compute_class: ComputeClass) -> int:
        """Return the number of slots that a trial takes on a class or on one of its machines."""
        name = compute_class.name
        widths, idle = self.model.widths_on(name), self._idle(name)
        fitting = self.memory_fit.widths(trial, self._classes[name])
        able = [w for w, each in zip(widths, idle, strict=True) if w in fitting and each < math.inf]
        if not able:
            return min(compute_class.room, max(fitting, default=widths[0]))
        seconds, evidence = self.model.slot_seconds([trial], name, OPTIMISM)
        costs = np.log(seconds[0] + idle).round(DIGITS).tolist()
        tried = self._tried([trial], name, evidence)[0].tolist()
        known = [
            (costs[place], tried[place] > 0, -width)
            for place, width in enumerate(widths)
            if width in able and (width == max(able) or tried[place] < math.inf)
        ]
        return -min(known)[2]

    def excess(self, trials: Sequence[Trial], compute_class: ComputeClass) -> Array:
        """Return for each trial the log of the factor by which it costs more in a free slot of a class than if all
        slots of the class were free.
        """
        name = compute_class.name
        costs, evidence = self.model.slot_seconds(trials, name)
        costs[:, :-1][np.isinf(self._tried(trials, name, evidence)[:, :-1])] = math.inf
        now = (costs + self._idle(name, free_only=True)).min(axis=1)
        return np.asarray(np.log(now / costs.min(axis=1))) if np.isfinite(now).all() else np.zeros(len(trials))

    def _tried(self, trials: Sequence[Trial], compute_class: str, evidence: Array) -> Array:
        """Return for each trial and width how many trials of its subspace run on a class or have ended there.

        The number is infinite if a first trial with this width runs, and has neither ended nor is extrapolated: no
        second one may start. `evidence` is as `CostModel.slot_seconds` returns it.
        """
        widths = self.model.widths_on(compute_class)
        running = Counter(
            (attempt.subspace, attempt.slots)
            for attempt in self.study.attempts
            if attempt.compute_class == compute_class
        )
        now = np.array([[running[trial.subspace, width] for width in widths] for trial in trials])
        return np.where((now > 0) & (evidence == 0), math.inf, now + evidence)

    def _idle(self, compute_class: str, *, free_only: bool = False) -> Array:
        """Return for each width the slot seconds that free slots of a class would be idle until the trial can start, on
        the best machine.

        They are infinite for a width for which no machine without a reservation has enough slots. With `free_only`,
        only machines with free slots are considered. Otherwise a machine whose slots all become free later would seem
        best, and the slot that is free now would not be used.
        """
        left: defaultdict[str | None, list[float]] = defaultdict(list)
        live = [sent for sent in self.study.live if sent.attempt.compute_class == compute_class]
        for sent in live:
            left[sent.attempt.only_on or sent.attempt.host] += [self._left(sent)] * sent.attempt.slots
        widths = self.model.widths_on(compute_class)
        least = np.full(len(widths), math.inf)
        for target in self._classes[compute_class].targets:
            free = self.reservations.free(target)
            if (free_only and free <= 0) or target.key in self.reservations.reserved:
                continue
            ends = [0.0] * max(0, free) + sorted(left[target.host])
            # A trial that is wider than the study's share of the class would wait until the study uses no slot of the
            # class.
            most = min(len(ends), target.room, max(target.limit, widths[0]))
            for row, width in enumerate(widths):
                if width <= most and ends[width - 1] < math.inf:
                    least[row] = min(least[row], width * ends[width - 1] - sum(ends[:width]))
        return least

    def _left(self, sent: Sent) -> float:
        """Return the expected seconds until an attempt ends; infinity before the model has learned from a trial."""
        attempt = sent.attempt
        if not self.model.has_learned or attempt.subspace not in self.model.row_of:
            return math.inf
        if sent.key not in self._expected:
            found = self.model.predict([attempt], [str(attempt.compute_class)])
            self._expected[sent.key] = math.exp(found.mean[0, 0])
        ran = max(0.0, self.study.clock.now() - min(sent.began, self.study.clock.now()))
        return max(self._expected[sent.key] - ran, ran * OVERDUE)
