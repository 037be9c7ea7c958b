"""Known points, put into a study as its next trials."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from shadho_celery.core.settings import StudySettings
from shadho_celery.core.trial import Outcome, Params, Result, Trial
from shadho_celery.errors import SpaceError, UsageError
from shadho_celery.executors.inline import HOST, INLINE_CLASS
from shadho_celery.scheduler.partial_points import filled
from shadho_celery.scheduler.proposals import trial_seed
from shadho_celery.scheduler.widths import make_width
from shadho_celery.space.points import complete
from shadho_celery.space.space import Space
from shadho_celery.space.split import split
from shadho_celery.study.study import Study

#: mixed into the study's seed for the draws that complete a partial point
_STREAM = 0x6E


def enqueue(study: Study, space: Space, settings: StudySettings, points: Iterable[object]) -> int:
    """Add a WAITING trial for each point, in order; return their number. A scheduler made later sends them first.

    Each takes the place of a draw of its subspace. What a point leaves out is what the sampler proposes beside what it
    gives. Nothing is added if one of them is refused: raises as `completed`.
    """
    points = [*points]
    found = completed(space, settings, points, [study.record.seed, _STREAM, len(study)])
    added = _add(study, space, settings, filled(study, space, settings, points, found))
    for trial in added:
        study.hold_back(trial)
    study.commit()
    return len(added)


def adopt(
    study: Study, space: Space, settings: StudySettings, points: Iterable[object], outcomes: Iterable[Outcome]
) -> None:
    """Add a finished trial for each point, which was evaluated elsewhere, with its outcome. Raises as `completed`.

    What a point leaves out is drawn from the law. A value between two of a grid teaches, too.
    """
    found = completed(space, settings, points, [study.record.seed, _STREAM, len(study)], off_grid=True)
    for trial, outcome in zip(_add(study, space, settings, found), outcomes, strict=True):
        attempt, at = study.send(trial, INLINE_CLASS), study.clock.wall()
        study.tell(Result(number=trial.number, attempt=attempt.attempt, outcome=outcome, host=HOST, at=at))
    study.commit()


def _add(study: Study, space: Space, settings: StudySettings, found: Iterable[tuple[str, Params]]) -> list[Trial]:
    subspaces = split(space)
    places = {subspace.name: place for place, subspace in enumerate(subspaces)}
    width = make_width(settings.slots, space, subspaces)
    return [
        study.add(name, params, trial_seed(study.record.seed, places[name], study.asked(name)), slots=width(params))
        for name, params in found
    ]


def completed(
    space: Space,
    settings: StudySettings,
    points: Iterable[object],
    entropy: Sequence[int] = (0,),
    *,
    off_grid: bool = False,
) -> list[tuple[str, Params]]:
    """Return subspace and params of each point, what it leaves out drawn by the law with the seed `entropy`.

    A value between two of a grid is one of the space only `off_grid`. Raises UsageError with the place of a point
    (from 0) that is no part of the space, and the cause.
    """
    points = list(points)
    if points and settings.least_budget is not None:
        raise UsageError("known points cannot be enqueued in a study with rungs or fidelity; leave out one of the two")
    subspaces, generator = split(space), np.random.default_rng(entropy)
    found = []
    for place, point in enumerate(points):
        try:
            found.append(complete(space, subspaces, point, generator, off_grid=off_grid))
        except SpaceError as error:
            raise UsageError(f"point {place}: {str(error).rstrip('.')}") from None
    return found
