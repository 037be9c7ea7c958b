"""Known points that leave some labels out: the sampler proposes these beside what a point gives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np

from shadho_celery import samplers
from shadho_celery.core.settings import StudySettings
from shadho_celery.core.trial import Params, Trial, TrialState
from shadho_celery.placement.pool import WHOLE
from shadho_celery.scheduler.proposals import spans_space
from shadho_celery.space.points import fill
from shadho_celery.space.space import Space
from shadho_celery.space.split import split, undivided
from shadho_celery.study.study import Study

#: proposals of which the one nearest to a partial point completes it; and the most of them for all points together
PROPOSALS, MOST_PROPOSALS = 8, 64

#: mixed into the study's seed for the proposals
_STREAM = 0x6F

#: name of a subspace and params within it
Found = tuple[str, Params]


def filled(
    study: Study,
    space: Space,
    settings: StudySettings,
    points: Sequence[object],
    completed: Sequence[Found],
) -> list[Found]:
    """Return subspace and params of each point, what it leaves out taken from the sampler's proposals.

    `completed` are those whose missing labels were drawn from the law.
    """
    # Points that are no mapping have been refused before.
    partial = [place for place, point in enumerate(points) if {*completed[place][1]} - {*point}]  # type: ignore[misc]
    if not partial:
        return [*completed]
    subspaces, whole = split(space), undivided(space)
    entropy = [study.record.seed, _STREAM, len(study)]
    make = samplers.find_sampler(settings.sampler, settings.trials, len(settings.objectives or ()))
    parts = {WHOLE: whole} if spans_space(make) else {each.name: each for each in subspaces}
    known = [each for place, each in enumerate(completed) if place not in partial]
    # Whatever the sampler: its own trials may repeat, but a point that a person names should tell something new.
    tried = {whole.key(params) for params in chain(_tried(study), (params for _, params in known))}

    def is_new(params: Params) -> bool:
        return whole.key(params) not in tried

    found, generator = [*completed], np.random.default_rng(entropy)
    for index, (name, part) in enumerate(parts.items()):
        places = [place for place in partial if name in {WHOLE, completed[place][0]}]
        if not places:
            continue
        # Not the scheduler's: a sampler that waits for the results of all that it proposes must not miss these.
        sampler = make(part, (*entropy, index))
        for told in _history(study, name):
            sampler.tell(told)
        count = max(1, min(PROPOSALS, MOST_PROPOSALS // len(places)))
        proposals = sampler.ask(count * len(places), _pending(study, name, known))
        for nth, place in enumerate(places):
            own = proposals[nth * count : (nth + 1) * count]
            params = fill(space, points[place], completed[place][1], own, generator, is_new=is_new)
            tried.add(whole.key(params))
            found[place] = next(each.name for each in subspaces if each.contains(params)), params
    return found


def _tried(study: Study) -> Iterator[Params]:
    """Yield the params of the study's trials, and of those that have taught it; cancelled ones count as untried."""
    for trials in [*_history(study, WHOLE), study.pending()]:
        yield from (each.params for each in trials if each.state is not TrialState.CANCELLED)


def _history(study: Study, name: str) -> Iterator[list[Trial]]:
    """Yield the trials that have taught a subspace, or WHOLE, block by block: those from elsewhere and its own."""
    for trials in chain([study.warm_start], (block for block, _ in study.history())):
        if told := [each for each in trials if name in {WHOLE, each.subspace}]:
            yield told


def _pending(study: Study, name: str, known: Iterable[Found]) -> list[Trial]:
    """Return the pending trials of a subspace, or of WHOLE, and those that whole points are about to be."""
    others = (each for each in known if name in {WHOLE, each[0]})
    return [
        *study.pending(None if name == WHOLE else name),
        *(
            Trial(number=len(study) + nth, subspace=subspace, params=params)
            for nth, (subspace, params) in enumerate(others)
        ),
    ]
