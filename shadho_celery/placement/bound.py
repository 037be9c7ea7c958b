"""Linear programs of the best placement: the most trials that a fleet can complete, and the least money for trials."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

#: mean seconds of a trial, by kind of trial (such as its subspace) and compute class
Seconds = Mapping[str, Mapping[str, float]]


def solved(
    rates: Array, costs: Array, least: Array, most: Array, *, more: Array | None = None, bounds: Any = (0.0, None)
) -> Any:
    """Return scipy's solution of a linear program over the x_kc, which are slots or slot seconds of classes for kinds.

    It minimises `costs`, such that sum_c x_kc rates_kc is at least `least` for each kind k, and sum_k x_kc is at most
    `most` for each class c. Further variables follow the x_kc: `more` has their columns, shape (kinds + classes, n), in
    the negative of the first constraints and in the second ones.
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
    """Return the bound for kinds of trials in a fixed mix, if all durations were known and none was random.

    `seconds` has every kind and every class of `slots`; `mix` has the share of each kind, equal shares by default. The
    program is: maximise r subject to sum_c x_kc / seconds_kc >= r mix_k for each kind k, and sum_k x_kc <= slots_c for
    each class c, where x_kc is the number of slots of class c that run trials of kind k. What a slot adds is the dual
    value of its class's constraint. Raises ValueError without kinds or slots.
    """
    kinds, classes = [*seconds], [*slots]
    if not kinds or not classes or not any(slots.values()):
        raise ValueError("a bound needs trials of at least one kind, and slots of at least one class")
    shares = np.array([1.0 if mix is None else mix[kind] for kind in kinds], dtype=float)
    shares /= shares.sum()
    rates = np.array([[1.0 / seconds[kind][name] for name in classes] for kind in kinds])
    # Beside the x_kc there is r.
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
    """The least money for which a fleet can complete some trials in a time, and the slots that this takes."""

    #: money for all of the trials
    money: float
    #: money that an hour more saves at most, and that an hour less costs at least
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

    `seconds` has every kind of `trials` and every class of `slots`; infinite seconds stand for a kind that must not run
    on a class. `prices` are the money that a slot costs an hour, and `times` the seconds in which a class can begin
    trials. `widths` are the slots that a trial of each kind takes, 1 by default. The program is: minimise
    sum_kc price_c w_kc subject to sum_c w_kc / (width_k seconds_kc) >= trials_k for each kind k, and
    sum_k w_kc <= slots_c times_c for each class c, where w_kc are the slot seconds of class c for trials of kind k.
    The dual values z_c of the classes' constraints are what their slot seconds save. So, with T the time, the money
    changes by -sum_c slots_c z_c dT. As the money is convex in T, more time saves at most that, and less costs at least
    that. Source: Dantzig, "Linear Programming and Extensions", 1963, chapters 6 and 12.
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
