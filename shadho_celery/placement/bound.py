"""Linear programs of the best placement: the most trials that a fleet can complete, and the least money for trials.

A third program computes how many slots of each class would shorten the rest of a study.

`Held` and `at_most` limit the numbers of slots that follow from it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shadho_celery.space.features import Array

#: mean seconds of a trial, by kind of trial (such as its subspace) and compute class
Seconds = Mapping[str, Mapping[str, float]]


def solved(
    rates: Array, costs: Array, least: Array, most: Array, *, more: Array | None = None, bounds: Any = (0.0, None)
) -> Any:
    """Return scipy's solution of a linear program. Its variables x_kc are the slots, or slot seconds, of class c for
    trials of kind k.

    It minimises `costs`, such that sum_c x_kc rates_kc is at least `least` for each kind k, and sum_k x_kc is at most
    `most` for each class c. `more` adds n variables after the x_kc. It is an array of their coefficients with the shape
    (kinds + classes, n). Each of its first rows belongs to the constraint of a kind, written as "at most" with all
    signs changed. Each of the other rows belongs to the constraint of a class.
    """
    # Imported late, because the import takes a tenth of a second.
    from scipy import sparse
    from scipy.optimize import linprog

    # Sparse, because a flat space has thousands of kinds of trials.
    work = sparse.block_diag([-row[None] for row in rates])
    table = sparse.vstack([work, sparse.kron(np.ones(len(rates)), sparse.eye(rates.shape[1]))])
    table = table if more is None else sparse.hstack([table, more])
    return linprog(costs, A_ub=table.tocsr(), b_ub=np.append(-least, most), bounds=bounds, method="highs")


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The most trials per second that a fleet can complete, and what one more slot would add."""

    #: trials per second
    rate: float
    #: trials per second that one more slot of a class would add, by class
    per_slot: Mapping[str, float]


def throughput_bound(seconds: Seconds, slots: Mapping[str, float], mix: Mapping[str, float] | None = None) -> Bound:
    """Return the bound for kinds of trials in a fixed mix. It assumes that durations are known and not random.

    `seconds` has every kind and every class of `slots`; `mix` has the share of each kind, equal shares by default. The
    program is: maximise r subject to sum_c x_kc / seconds_kc >= r mix_k for each kind k, and sum_k x_kc <= slots_c for
    each class c, where x_kc is the number of slots of class c that run trials of kind k. `per_slot` has the dual values
    of the classes' constraints. Raises ValueError without kinds or slots.
    """
    kinds, classes = [*seconds], [*slots]
    if not kinds or not classes or not any(slots.values()):
        raise ValueError("a bound needs trials of at least one kind, and slots of at least one class")
    shares = np.array([1.0 if mix is None else mix[kind] for kind in kinds], dtype=float)
    shares /= shares.sum()
    rates = np.array([[1.0 / seconds[kind][name] for name in classes] for kind in kinds])
    # The last variable is r.
    found = solved(
        rates,
        np.append(np.zeros(rates.size), -1.0),
        np.zeros(len(kinds)),
        np.array([slots[name] for name in classes], float),
        more=np.append(shares, np.zeros(len(classes)))[:, None],
    )
    if not found.success:
        raise ValueError(f"the linear program has no solution: {found.message}")
    duals = -found.ineqlin.marginals[len(kinds) :]
    return Bound(rate=float(-found.fun), per_slot=dict(zip(classes, duals.tolist(), strict=True)))


@dataclass(frozen=True, kw_only=True)
class Cheapest:
    """The least money for which a fleet can complete given trials within given times, and the slots that run them."""

    #: money for all of the trials
    money: float
    #: the most money that an hour more can save; it is also the least that an hour less costs
    an_hour: float
    #: number of slots of each class that run trials, on average over the class's time
    slots: Mapping[str, float]
    #: mean seconds of the trials on each class; 0 for a class without trials
    seconds: Mapping[str, float]


def cheapest(
    seconds: Seconds,
    trials: Mapping[str, float],
    slots: Mapping[str, float],
    prices: Mapping[str, float],
    times: Mapping[str, float],
    *,
    widths: Mapping[str, int] | None = None,
) -> Cheapest | None:
    """Return the cheapest placement that completes the trials in time, or None if no placement does.

    `seconds` has every kind of `trials` and every class of `slots`; infinite seconds mean that a kind must not run on a
    class. `prices` are the money that a slot costs an hour, and `times` the seconds in which a class can begin trials.
    `widths` are the slots that a trial of each kind takes, 1 by default. The program is: minimise sum_kc price_c w_kc
    subject to sum_c w_kc / (width_k seconds_kc) >= trials_k for each kind k, and sum_k w_kc <= slots_c times_c for each
    class c, where w_kc are the slot seconds of class c for trials of kind k. The dual value z_c of a class's constraint
    is the money that one more slot second of the class saves. If all times change by dT, the money changes by -sum_c
    slots_c z_c dT at first. The money is convex in T, so an hour more saves at most this rate, and an hour less costs
    at least this rate. Source: Dantzig, "Linear Programming and Extensions", 1963, chapters 6 and 12.
    """
    kinds, classes = [*trials], [*slots]
    slots_of = np.array([1 if widths is None else widths[kind] for kind in kinds])[:, None]
    rates = np.array([[1.0 / seconds[kind][name] for name in classes] for kind in kinds]) / slots_of
    found = solved(
        rates,
        np.tile([prices[name] / 3600 for name in classes], len(kinds)),
        np.array([trials[kind] for kind in kinds]),
        np.array([slots[name] * max(0.0, times[name]) for name in classes]),
    )
    if not found.success:
        return None
    used = found.x.reshape(rates.shape)
    worked, ran, begun = used.sum(axis=0), (used / slots_of).sum(axis=0), (used * rates).sum(axis=0)
    saved = zip(classes, (-found.ineqlin.marginals[len(kinds) :]).tolist(), strict=True)
    return Cheapest(
        money=float(found.fun),
        an_hour=3600 * sum(slots[name] * each for name, each in saved if times[name] > 0),
        slots={name: float(w) / times[name] if w > 0 else 0.0 for name, w in zip(classes, worked, strict=True)},
        seconds={n: float(w / b) if b > 0 else 0.0 for n, w, b in zip(classes, ran, begun, strict=True)},
    )


#: the rest of a study should take at most this many times the time that it would take on all slots
SLACK = 1.1

#: number of trials that a slot must complete in that time: to be worth starting, and to be worth keeping
WORTH_STARTING, WORTH_KEEPING = 0.25, 0.05

#: time of a study without an end, in multiples of its longest first trial
ENDLESS = 100.0

#: part of a slot that is not rounded up to a whole one
ROUNDING = 0.05


class Room(NamedTuple):
    """Number of slots that a class has now, and the most that it may have."""

    #: slots of live workers
    live: int
    #: slots that it may have in total, at least `live`
    most: int
    #: seconds from the decision to start a worker until it takes trials
    startup: float = 0.0


def wanted_slots(
    seconds: Seconds,
    mix: Mapping[str, float],
    rooms: Mapping[str, Room],
    *,
    left: float,
    seconds_left: float = math.inf,
    width: float = 1.0,
) -> dict[str, int]:
    """Return the number of slots of each class that a study could use for its remaining trials.

    `seconds` has the seconds of a trial by kind and class, `mix` the share of each kind. `left` is the number of trials
    that do not run yet, `seconds_left` the time until the study's limit; both may be infinite. `width` is the mean
    number of slots of a trial. The result is the least number of slots with which the rest of the study ends about as
    soon as with all slots in `rooms`. It includes the live slots, which are preferred to new slots.

    The time H is SLACK times the time for `left` trials at the bound of throughput on all slots. It is at least so long
    that a trial of each kind can end on its best class. Within H, a slot of class c has H_c seconds: H for a live slot,
    and H minus the start-up for a new slot. The slot runs only whole trials, floor(H_c / seconds_kc) of kind k, so each
    of these effectively takes s_kc = H_c / floor(H_c / seconds_kc) seconds. The program is: maximise r - sum_c e w_c
    subject to r <= left, sum_c x_kc / s_kc >= r mix_k for each kind k, and sum_k x_kc <= w_c H_c and w_c <= slots_c for
    each class c, where the live and the new slots of a class are separate. Here w_c are slots, x_kc are slot seconds,
    and e is the least number of trials for which a slot is wanted.
    """
    kinds = [kind for kind in seconds if mix.get(kind, 0.0) > 0.0]
    rooms = {name: room for name, room in rooms.items() if room.most > 0}
    if not kinds or not rooms or left <= 0 or seconds_left <= 0:
        return dict.fromkeys(rooms, 0)
    columns = [_Column(name, room.live / width, 0.0, WORTH_KEEPING) for name, room in rooms.items() if room.live]
    columns += [
        _Column(name, (room.most - room.live) / width, room.startup, WORTH_STARTING)
        for name, room in rooms.items()
        if room.most > room.live
    ]
    times = np.array([[seconds[kind][column.name] for column in columns] for kind in kinds])
    first = float((times + [column.startup for column in columns]).min(axis=1).max())
    rate = throughput_bound(
        {kind: seconds[kind] for kind in kinds}, {name: room.most / width for name, room in rooms.items()}, mix
    ).rate
    horizon = max(ENDLESS * first if math.isinf(left) else SLACK * left / rate, first)
    shares = np.array([mix[kind] for kind in kinds], dtype=float)
    total = dict.fromkeys(rooms, 0.0)
    for column, slots in zip(columns, _fewest(times, shares, columns, min(horizon, seconds_left), left), strict=True):
        total[column.name] += slots * width
    return {name: min(room.most, math.ceil(total[name] - ROUNDING)) for name, room in rooms.items()}


class _Column(NamedTuple):
    """The live slots of a class, or the further slots that it may have."""

    name: str
    slots: float
    startup: float
    #: least number of trials for which a slot is wanted
    worth: float


def _fewest(times: Array, shares: Array, columns: Sequence[_Column], horizon: float, left: float) -> list[float]:
    """Solve the program of `wanted_slots`. Return the slots of each column. `times` has shape (kinds, columns)."""
    kinds, count = times.shape
    available = np.array([max(0.0, horizon - column.startup) for column in columns])
    # A slot runs whole trials: it does not begin a trial that cannot end in time.
    trials = np.floor(available / times + 1e-9)
    rates = np.where(trials > 0, trials / np.maximum(available, 1e-9), 0.0)
    # After the x_kc come the variables w_c, and r.
    more = np.zeros((kinds + count, count + 1))
    more[:kinds, -1], more[kinds:, :-1] = shares / shares.sum(), -np.diag(available)
    slots_bounds = [(0.0, column.slots) for column in columns]
    found = solved(
        rates,
        np.concatenate([np.zeros(rates.size), [column.worth for column in columns], [-1.0]]),
        np.zeros(kinds),
        np.zeros(count),
        more=more,
        bounds=[(0.0, None)] * rates.size + slots_bounds + [(0.0, None if math.isinf(left) else left)],
    )
    if not found.success:
        raise ValueError(f"the linear program has no solution: {found.message}")
    slots: list[float] = found.x[rates.size : rates.size + count].tolist()
    return slots


class Held:
    """Numbers by name, each held at the greatest value of the latest `seconds`: they rise at once and fall late
    (hysteresis).
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        #: by name: times and values since the greatest value that still counts, the values in falling order
        self._past: dict[str, deque[tuple[float, int]]] = {}

    def see(self, values: Mapping[str, int], now: float) -> dict[str, int]:
        """Return the numbers at the time `now`, in seconds. A name that `values` lacks has the value 0."""
        for name in {**self._past, **values}:
            value, past = values.get(name, 0), self._past.setdefault(name, deque())
            while past and past[-1][1] <= value:
                past.pop()
            past.append((now, value))
            while past[0][0] <= now - self._seconds and len(past) > 1:
                past.popleft()
        held = {name: past[0][1] for name, past in self._past.items()}
        self._past = {name: past for name, past in self._past.items() if held[name] or name in values}
        return held


def at_most(numbers: Mapping[str, int], most: float) -> dict[str, int]:
    """Return the numbers by name, reduced in proportion if their sum is more than `most` (largest remainders).

    Of equal remainders, the first one is rounded up.
    """
    total = sum(numbers.values())
    if total <= most:
        return {**numbers}
    whole = max(0, math.floor(most + 1e-9))
    shares = {name: number * whole / total for name, number in numbers.items()}
    found = {name: math.floor(share) for name, share in shares.items()}
    by_remainder = sorted(shares, key=lambda name: found[name] - shares[name])
    for name in by_remainder[: whole - sum(found.values())]:
        found[name] += 1
    return found
