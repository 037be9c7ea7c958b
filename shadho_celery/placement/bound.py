"""Upper bound of the throughput that any placement can reach on a fleet, as a linear program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

#: mean seconds of a trial, by kind of trial (such as its subspace) and compute class
Seconds = Mapping[str, Mapping[str, float]]


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
    # Imported late, because the import takes a tenth of a second.
    from scipy import sparse
    from scipy.optimize import linprog

    shares = np.array([1.0 if mix is None else mix[kind] for kind in kinds], dtype=float)
    shares /= shares.sum()
    rates = np.array([[1.0 / seconds[kind][name] for name in classes] for kind in kinds])
    # Columns: the x_kc by kind, and r. Sparse, because a flat space has thousands of kinds of trials.
    work = sparse.hstack([sparse.block_diag([-row[None] for row in rates]), shares[:, None]])
    room = sparse.hstack([sparse.kron(np.ones(len(kinds)), sparse.eye(len(classes))), np.zeros((len(classes), 1))])
    found = linprog(
        np.append(np.zeros(rates.size), -1.0),
        A_ub=sparse.vstack([work, room], format="csr"),
        b_ub=np.append(np.zeros(len(kinds)), [float(slots[name]) for name in classes]),
        method="highs",
    )
    if not found.success:
        raise ValueError(f"the linear program has no solution: {found.message}")
    duals = -found.ineqlin.marginals[len(kinds) :]
    return Bound(rate=float(-found.fun), per_slot=dict(zip(classes, duals.tolist(), strict=True)))
