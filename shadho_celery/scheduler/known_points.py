"""Known points, put into a study as its next trials."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np

from shadho_celery import samplers
from shadho_celery.core.settings import StudySettings
from shadho_celery.core.trial import Outcome, Params, Result, Trial, TrialState
from shadho_celery.errors import SpaceError, UsageError
from shadho_celery.executors.inline import HOST, INLINE_CLASS
from shadho_celery.placement.pool import WHOLE
from shadho_celery.samplers.base import Sampler
from shadho_celery.scheduler.proposals import spans_space, trial_seed
from shadho_celery.scheduler.widths import make_width
from shadho_celery.space.points import complete, fill
from shadho_celery.space.space import Space
from shadho_celery.space.split import split, undivided
from shadho_celery.space.tree import Value
from shadho_celery.study.study import Study

#: mixed into the study's seed for the draws and proposals that complete a partial point
_STREAM = 0x6E
#: proposals of which the one nearest to a partial point completes it; and the most of them for all points together
PROPOSALS, MOST_PROPOSALS = 8, 64


def enqueue(study: Study, space: Space, settings: StudySettings, points: Iterable[object]) -> int:
    """Add a WAITING trial for each point, in order; return their number. A scheduler made later sends them first.

    Each takes the place of a draw of its subspace. What a point leaves out is what the sampler proposes beside what it
    gives. Nothing is added if one of them is refused: raises as `completed`.
    """
    added = _add(study, space, settings, _filled(study, space, settings, [*points]))
    for trial in added:
        study.hold_back(trial)
    study.commit()
    return len(added)


def adopt(
    study: Study, space: Space, settings: StudySettings, points: Iterable[object], outcomes: Iterable[Outcome]
) -> None:
    """Add a finished trial for each point, which was evaluated elsewhere, with its outcome. Raises as `completed`.

    What a point leaves out is drawn from the law.
    """
    found = completed(space, settings, points, [study.record.seed, _STREAM, len(study)])
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


def _filled(study: Study, space: Space, settings: StudySettings, points: Sequence[object]) -> list[tuple[str, Params]]:
    """Return subspace and params of each point, what it leaves out taken from proposals. Raises as `completed`."""
    entropy = [study.record.seed, _STREAM, len(study)]
    found = completed(space, settings, points, entropy)
    make = samplers.find_sampler(settings.sampler, settings.trials, len(settings.objectives or ()))
    subspaces = split(space)
    parts = {WHOLE: undivided(space)} if spans_space(make) else {each.name: each for each in subspaces}
    # `completed` has refused what is no mapping.
    partial = [place for place, point in enumerate(points) if {*found[place][1]} - {*point}]  # type: ignore[misc]
    generator, filled = np.random.default_rng([*entropy, PROPOSALS]), [*found]
    if not partial:
        return filled
    # Whatever the sampler: its own trials may repeat, but a point that a person names should tell something new.
    tried = {_key(params) for params in _tried(study)}
    tried.update(_key(params) for place, (_, params) in enumerate(found) if place not in partial)

    def is_new(params: Params) -> bool:
        return _key(params) not in tried

    for index, name in enumerate(parts):
        places = [place for place in partial if name in {WHOLE, found[place][0]}]
        if not places:
            continue
        # Not the scheduler's: a sampler that waits for the results of all that it proposes must not miss these.
        adviser = _taught(make(parts[name], (*entropy, index)), study, name)
        others = [each for place, each in enumerate(found) if place not in partial and name in {WHOLE, each[0]}]
        count = max(1, min(PROPOSALS, MOST_PROPOSALS // len(places)))
        proposals = adviser.ask(count * len(places), _pending(study, name, others))
        for nth, place in enumerate(places):
            own = proposals[nth * count : (nth + 1) * count]
            params = fill(space, points[place], found[place][1], own, generator, is_new=is_new)
            tried.add(_key(params))
            filled[place] = next(part.name for part in subspaces if part.contains(params)), params
    return filled


def _tried(study: Study) -> Iterator[Params]:
    """Yield the params of the study's trials, and of those that have taught it; cancelled ones count as untried."""
    for trials in chain([study.warm_start, study.pending()], (block for block, _ in study.history())):
        yield from (each.params for each in trials if each.state is not TrialState.CANCELLED)


def _key(params: Params) -> frozenset[tuple[str, Value]]:
    return frozenset(params.items())


def _taught(sampler: Sampler, study: Study, name: str) -> Sampler:
    """Return the sampler, with the study's history of a subspace, or of WHOLE."""
    for trials in chain([study.warm_start], (block for block, _ in study.history())):
        if told := [each for each in trials if name in {WHOLE, each.subspace}]:
            sampler.tell(told)
    return sampler


def _pending(study: Study, name: str, others: Iterable[tuple[str, Params]]) -> list[Trial]:
    """Return the pending trials of a subspace, or of WHOLE, and others that are about to be."""
    found = [*study.pending(None if name == WHOLE else name)]
    return found + [
        Trial(number=len(study) + nth, subspace=subspace, params=params)
        for nth, (subspace, params) in enumerate(others)
    ]


def completed(
    space: Space, settings: StudySettings, points: Iterable[object], entropy: Sequence[int] = (0,)
) -> list[tuple[str, Params]]:
    """Return subspace and params of each point, what it leaves out drawn by the law with the seed `entropy`.

    Raises UsageError with the place of a point (from 0) that is no part of the space, and the cause.
    """
    points = list(points)
    if points and settings.rungs is not None:
        raise UsageError("known points cannot be enqueued in a study with rungs; leave out one of the two")
    subspaces, generator = split(space), np.random.default_rng(entropy)
    found = []
    for place, point in enumerate(points):
        try:
            found.append(complete(space, subspaces, point, generator))
        except SpaceError as error:
            raise UsageError(f"point {place}: {str(error).rstrip('.')}") from None
    return found
