"""Known points: params that a user gives as the next trials of a study, or as trials that were run elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np

from shadho_celery.core.checks import short
from shadho_celery.core.trial import POINT, Outcome, Params, Report, Result, Trial, TrialState, turned_first
from shadho_celery.errors import SpaceError, UsageError
from shadho_celery.objective.result import scalar
from shadho_celery.placement.pool import WHOLE
from shadho_celery.placement.shares import UniformShares
from shadho_celery.scheduler.executors import HOST, INLINE_CLASS
from shadho_celery.scheduler.plan import Plan
from shadho_celery.scheduler.proposals import ADDED, ENQUEUED, learns_whole, make_samplers, tell_samplers, trial_seed
from shadho_celery.scheduler.scheduler import Scheduler
from shadho_celery.space.points import complete, fill
from shadho_celery.space.schema import Schema
from shadho_celery.study.state import StudyState

#: number of a sampler's proposals for a point without some labels, of which the nearest gives the missing values;
#: maximum number of proposals for all points together
PROPOSALS, MOST_PROPOSALS = 8, 64

#: numbers that are mixed into the study's seed: for draws of missing labels, and for the sampler's proposals
_STREAM, _PROPOSAL_STREAM = 0x6E, 0x6F

#: name of a subspace, and params in it
Found = tuple[str, Params]


def enqueue(study: StudyState, plan: Plan, points: Iterable[object], scheduler: Scheduler | None = None) -> list[int]:
    """Add a WAITING trial for each point, in order. Return the numbers of the trials.

    The study's `scheduler`, or a scheduler created later, sends them before new trials.

    Each of these trials counts as a draw in its subspace. The sampler proposes values for the labels that a point
    lacks. If one of the points is refused, nothing is added. Raises UsageError as `completed` does.

    In a study without a space, a point has values by label. Its trial gets them when it asks for these labels.
    """
    points = [*points]
    by_label: list[Params] = [{} for _ in points]
    if study.schema is not None:
        by_label = [{POINT: _written(*each)} for each in enumerate(points)]
        points = [_known(plan, study.schema.proposed(each)) for each in by_label]
    found = completed(plan, points, [study.record.seed, _STREAM, len(study)])
    filled = zip(_filled(study, plan, points, found), by_label, strict=True)
    added = _add(study, plan, [(name, {**params, **more}) for (name, params), more in filled], ENQUEUED)
    if scheduler is not None:
        scheduler.enqueue(added)
    else:
        for trial in added:
            study.put_waiting(trial)
    study.commit()
    return [trial.number for trial in added]


def _written(index: int, point: Any) -> str:
    """Return the values of a point by label as JSON. Raises UsageError for any other point."""
    try:
        return json.dumps({**point}, default=scalar)
    except (TypeError, ValueError):
        raise UsageError(f"point {index}: {short(point, 60)} is not a dict of labels and plain values") from None


def _known(plan: Plan, params: Params) -> Params:
    """Return the params that can belong to one point of the space. If params exclude each other, the first are kept."""
    found: Params = {}
    for label in params:
        with suppress(SpaceError):
            point = {**found, label: params[label]}
            complete(plan.space, plan.subspaces, point, np.random.default_rng(_STREAM))
            found = point
    return found


def as_given(points: Iterable[Params], schema: Schema | None) -> list[Params]:
    """Return params of trials as points that a user gives. `schema` is that of the study."""
    return [dict(params) if schema is None else schema.read_values(params) for params in points]


def add_finished(
    study: StudyState,
    plan: Plan,
    points: Iterable[object],
    outcomes: Iterable[Outcome],
    reports: Mapping[int, float] | None = None,
) -> None:
    """Add a finished trial for each point that was evaluated elsewhere, with its outcome.

    Labels that a point lacks are drawn at random. A value between two grid points of its domain is accepted. `reports`
    are losses by step that each of the trials has reported. Raises UsageError as `completed` does.
    """
    found = completed(plan, points, [study.record.seed, _STREAM, len(study)], off_grid=True)
    if study.schema is not None:
        # The labels of these trials come with their outcomes.
        found = [(name, {}) for name, _ in found]
    for trial, outcome in zip(_add(study, plan, found, ADDED), outcomes, strict=True):
        sent = study.send(trial, INLINE_CLASS)
        which: dict[str, Any] = {"number": sent.number, "attempt": sent.attempt, "at": study.clock.wall()}
        for step, loss in (reports or {}).items():
            study.tell(Report(step=step, loss=turned_first(loss, study.record.objectives), **which))
        study.tell(Result(outcome=outcome, host=HOST, **which))
    study.commit()


def _add(study: StudyState, plan: Plan, found: Iterable[Found], sampler: str) -> list[Trial]:
    indexes, added = {subspace.name: index for index, subspace in enumerate(plan.subspaces)}, []
    for name, params in found:
        seed = trial_seed(study.record.seed, indexes[name], study.asked(name))
        added.append(study.add(name, params, seed, slots=plan.width(params), sampler=sampler))
    return added


def failed(trials: Iterable[Trial], schema: Schema | None) -> list[Trial]:
    """Return the trials that have failed, without those whose params were tried again by a later trial.

    If `schema` is given, the study has no space. A later trial is then an enqueued one whose labels, as far as the
    failed trial has them, have the same values.
    """
    latest = {tuple(sorted(trial.params.items())) or trial.number: trial for trial in trials}.values()
    enqueued = [] if schema is None else [each for each in latest if each.sampler == ENQUEUED]
    points = [*zip(enqueued, as_given([each.params for each in enqueued], schema), strict=True)]

    def is_repeated(trial: Trial) -> bool:
        [given] = as_given([trial.params], schema)
        later = (point for repeat, point in points if repeat.number > trial.number)
        return any(all(point.get(label, value) == value for label, value in given.items()) for point in later)

    found = [each for each in latest if each.state is TrialState.FAILED and not is_repeated(each)]
    return sorted(found, key=lambda each: each.number)


def first(plan: Plan, points: Sequence[object], seed: int, number: int) -> list[Params]:
    """Return the params of the first `number` trials of a new study: the known points, then proposals of its samplers.

    The proposals are divided among the subspaces by their probabilities. There are fewer than `number` only if the
    samplers have no further points. Raises the same errors as `completed`.
    """
    found = completed(plan, points, [seed, _STREAM, 0])[:number]
    samplers = make_samplers(plan.make_sampler, plan.subspaces, (seed,))
    while samplers and (left := number - len(found)):
        weights = {each.name: each.probability for each in plan.subspaces if each.name in samplers}
        parts = UniformShares(weights).quotas(left) if weights else {WHOLE: left}
        for name, count in parts.items():
            sampler, sees_all = samplers[name], name == WHOLE or learns_whole(samplers[name])
            pending = [Trial(number=index, subspace=each, params=params) for index, (each, params) in enumerate(found)]
            own = [trial for trial in pending if sees_all or trial.subspace == name]
            proposed = sampler.ask(count, own) if count else []
            found += [(name, params) for params in proposed]
            if len(proposed) < count:
                # This sampler has no further points, so the other samplers propose the rest.
                del samplers[name]
    return [params for _, params in found]


def completed(
    plan: Plan, points: Iterable[object], entropy: Sequence[int] = (0,), *, off_grid: bool = False
) -> list[Found]:
    """Return the subspace and the params of each point. Missing labels are drawn at random with the seed `entropy`.

    If `off_grid`, a value between two grid points of its domain is accepted. Raises UsageError for a point outside the
    space, with the point's index (from 0) and the cause.
    """
    points = list(points)
    if points and plan.ladder is not None:
        raise UsageError("known points cannot be enqueued in a study with fidelity; leave out one of the two")
    generator = np.random.default_rng(entropy)
    found = []
    for index, point in enumerate(points):
        try:
            found.append(complete(plan.space, plan.subspaces, point, generator, off_grid=off_grid))
        except SpaceError as error:
            raise UsageError(f"point {index}: {str(error).rstrip('.')}") from None
        if not plan.space.allows(found[-1][1]):
            raise UsageError(f"point {index}: {short(point, 200)} is refused by where, the bounds between params")
    return found


def _filled(study: StudyState, plan: Plan, points: Sequence[object], completed: Sequence[Found]) -> list[Found]:
    """Return the subspace and the params of each point. Missing labels are taken from the sampler's proposals.

    `completed` has the same points with random values of the missing labels.
    """
    # Points that are not mappings were already refused when `completed` was computed.
    partial = [index for index, point in enumerate(points) if {*completed[index][1]} - {*point}]  # type: ignore[misc]
    if not partial:
        return [*completed]
    whole, entropy = plan.whole, [study.record.seed, _PROPOSAL_STREAM, len(study)]
    known = [each for index, each in enumerate(completed) if index not in partial]
    # A sampler may repeat trials, but a user's point should add information. So, if possible, it is completed to params
    # that are new.
    tried = {whole.key(params) for _, params in known}
    for trials in chain(_history(study), [study.pending()]):
        # Params of cancelled trials count as new.
        tried |= {whole.key(each.params) for each in trials if each.state is not TrialState.CANCELLED}

    def is_new(params: Params) -> bool:
        return whole.key(params) not in tried

    found, generator = [*completed], np.random.default_rng(entropy)
    # New samplers are made, because those of the scheduler may wait for the results of all their proposals.
    samplers = make_samplers(plan.make_sampler, plan.subspaces, entropy)
    for told in _history(study):
        tell_samplers(samplers, told)
    for name, sampler in samplers.items():
        indexes = [index for index in partial if name in {WHOLE, completed[index][0]}]
        if not indexes:
            continue
        count = max(1, min(PROPOSALS, MOST_PROPOSALS // len(indexes)))
        proposals = sampler.ask(count * len(indexes), _pending(study, WHOLE if learns_whole(sampler) else name, known))
        for nth, index in enumerate(indexes):
            own = proposals[nth * count : (nth + 1) * count]
            params = fill(plan.space, points[index], completed[index][1], own, generator, is_new=is_new)
            tried.add(whole.key(params))
            found[index] = next(each.name for each in plan.subspaces if each.contains(params)), params
    return found


def _history(study: StudyState) -> Iterator[Sequence[Trial]]:
    """Yield blocks of the finished trials from which samplers learn: those of the warm start, then those
    of the study.
    """
    return chain([study.warm_start], ([*map(study.current, block)] for block, _ in study.history()))


def _pending(study: StudyState, name: str, known: Iterable[Found]) -> list[Trial]:
    """Return the pending trials of a subspace, or of all subspaces for WHOLE, and trials for the points in `known`."""
    others = enumerate((each for each in known if name in {WHOLE, each[0]}), len(study))
    given = [Trial(number=number, subspace=subspace, params=params) for number, (subspace, params) in others]
    return [*study.pending(None if name == WHOLE else name), *given]
