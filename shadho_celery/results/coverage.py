"""Hypervolume of the Pareto front of a study with several losses, over the course of the study."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from shadho_celery.core.checks import plain, short
from shadho_celery.core.objectives import turned
from shadho_celery.errors import UsageError
from shadho_celery.study.front import Front, hypervolumes, reference_point
from shadho_celery.study.trials import FinishedTrials

#: maximum number of entries in a history; if the front changed more often, some changes are left out
MOST = 100
#: number of trials that are compared with the front at once
BLOCK = 2000

Array = NDArray[np.float64]


class Coverage(Struct, frozen=True, kw_only=True):
    """Hypervolume of a front over time, with one reference point. With more than three losses it is an estimate."""

    #: reference point: a loss for each name, in the objective's own direction
    reference: Mapping[str, float]
    #: pairs of a number of ended trials and the hypervolume of the front after so many trials; the last pair is current
    history: Sequence[tuple[int, float]]

    @property
    def hypervolume(self) -> float:
        """The current hypervolume."""
        return self.history[-1][1]


def coverage(
    trials: FinishedTrials, objectives: Mapping[str, str], reference: Mapping[str, float] | None = None
) -> Coverage | None:
    """Return the hypervolume of the front over time. Return None for a study of one loss, or without a feasible trial.

    By default the `reference` point is worse than the worst value of each loss so far, by a tenth of the loss's range.
    Raises UsageError unless it has a finite number for each loss.
    """
    if reference is not None:
        reference = _checked(reference, objectives)
    if len(objectives) < 2:
        return None
    found = [(ended, [losses[name] for name in objectives]) for ended, losses in trials.losses()]
    ended = np.array([ended for ended, _ in found], np.intp)
    return coverage_of(ended, np.array([losses for _, losses in found], float), objectives, reference)


def coverage_of(
    ended: NDArray[np.intp],
    losses: Array,
    objectives: Mapping[str, str],
    reference: Mapping[str, float] | None = None,
) -> Coverage | None:
    """Return the hypervolume over time of the minimised `losses` of feasible trials, shape (trials, losses).

    `ended` has the number of trials that had ended when each of them had. Returns None without trials.
    """
    if not len(ended):
        return None
    if reference is None:
        point = reference_point(losses)
    else:
        minimised = turned(reference, objectives)
        point = np.array([minimised[name] for name in objectives])
    changes = _changes(losses)
    looked_at = sorted({round(place) for place in np.linspace(0, len(changes) - 1, min(MOST, len(changes)))})
    # The volume of a point stays covered when a better one replaces it on the front.
    volumes = hypervolumes(losses[changes], point, [place + 1 for place in looked_at])
    history = [(int(ended[changes[place]]), volume) for place, volume in zip(looked_at, volumes, strict=True)]
    own = turned(dict(zip(objectives, point.tolist(), strict=True)), objectives)
    return Coverage(reference=own, history=history)


def _changes(losses: Array) -> list[int]:
    """Return the indices of the trials that were on the front when they ended."""
    front, found = Front(), []
    for start in range(0, len(losses), BLOCK):
        block = losses[start : start + BLOCK]
        # Most trials are far from the front: they are left out together.
        is_behind = np.zeros(len(block), bool)
        for point in front.points if len(front) else []:
            is_behind |= (point <= block).all(axis=1)
        for place in np.flatnonzero(~is_behind).tolist():
            if front.add(start + place, block[place].tolist()):
                found.append(start + place)
    return found


def _checked(reference: object, objectives: Mapping[str, str]) -> dict[str, float]:
    """Return a reference point as floats. Raises UsageError unless it has a finite number for each loss."""
    if isinstance(reference, Mapping) and {*reference} == {*objectives}:
        with suppress(msgspec.ValidationError):
            found = msgspec.convert(plain(reference), dict[str, float])
            if all(map(math.isfinite, found.values())):
                return found
    losses = ", ".join(objectives)
    raise UsageError(f"the reference point {short(reference)} should have the losses {losses}, a finite number each")
