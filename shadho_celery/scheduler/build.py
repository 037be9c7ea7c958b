"""Construction of a study's scheduler from names and settings."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shadho_celery import samplers
from shadho_celery.core.checks import check_name
from shadho_celery.core.hardware import DEFAULT_CLASSES
from shadho_celery.core.settings import POLICIES, SHARES, StudySettings
from shadho_celery.errors import UsageError
from shadho_celery.executors.base import Executor
from shadho_celery.fidelity.pruners import NO_PRUNER, Pruning, make_pruning
from shadho_celery.fidelity.rounds import Endless, Rounds
from shadho_celery.placement.policies import make_policy
from shadho_celery.placement.shares import make_shares
from shadho_celery.predictors.cost_model import CostModel
from shadho_celery.predictors.declared_cost import declared_cost
from shadho_celery.scheduler.proposals import Proposals, spans_space
from shadho_celery.scheduler.scheduler import Scheduler
from shadho_celery.scheduler.widths import make_width
from shadho_celery.space.compile import Space
from shadho_celery.space.split import split, undivided
from shadho_celery.study.limits import Limits
from shadho_celery.study.study import Study

DEFAULT_SETTINGS = StudySettings()

#: mixed into the study's seed for the policy's draws, so that they differ from every sampler's
_POLICY_STREAM = 0x70


def check_settings(settings: StudySettings) -> None:
    """Raise UsageError unless every name exists, the rungs are a valid ladder, and several losses are possible."""
    samplers.find_sampler(settings.sampler, objectives=len(settings.objectives or ()))
    check_name("policy", settings.policy, POLICIES)
    check_name("kind of shares", settings.shares_in_force, SHARES)
    if settings.shares == "paper" != settings.policy:
        raise UsageError("shares 'paper' are those of --policy paper, which has ranks; choose even, uniform or promise")
    make_rounds(settings.rungs)
    make_pruning(settings.pruner)
    if settings.has_several and settings.pruner not in (None, NO_PRUNER):
        raise UsageError("a pruner judges reports of one loss, and this study has several; leave out one of the two")
    if settings.has_several and settings.rungs is not None:
        raise UsageError("rungs promote trials by one loss, and this study has several; leave out rungs or objectives")


def check_sampler(settings: StudySettings, space: Space) -> None:
    """Raise UsageError if the sampler cannot be made for a space: before anything is recorded."""
    make = samplers.find_sampler(settings.sampler, settings.trials, len(settings.objectives or ()))
    make(undivided(space) if spans_space(make) else split(space)[0], (0, 0))


def make_rounds(rungs: Mapping[str, object] | None) -> Rounds:
    """Return the rounds for ``STUDY["rungs"]``, endless ones without it. Raises UsageError for an invalid ladder."""
    if rungs is None:
        return Endless()
    # Most searches do not need this import.
    from shadho_celery.fidelity.ladder import Ladder
    from shadho_celery.fidelity.successive_halving import SuccessiveHalving

    return SuccessiveHalving(Ladder.of(rungs))


def least_budget(rungs: Mapping[str, object] | None) -> float | None:
    """Return the budget of the lowest rung, of which samplers learn; None without rungs."""
    least = None if rungs is None else rungs.get("least")
    return float(least) if isinstance(least, (int, float)) else None


def make_scheduler(
    space: Space,
    study: Study,
    executor: Executor,
    limits: Limits,
    settings: StudySettings = DEFAULT_SETTINGS,
    *,
    pruning: Pruning | None = None,
) -> Scheduler:
    """Return the scheduler of `study` with the parts named by `settings`. Raises UsageError as `check_settings`.

    An executor that runs trials in this process asks the same `pruning` while one runs; by default one is made.
    """
    check_settings(settings)
    make_sampler = samplers.find_sampler(settings.sampler, limits.trials, len(settings.objectives or ()))
    if settings.policy == "paper" and spans_space(make_sampler):
        raise UsageError("policy 'paper' ranks subspaces, which this sampler chooses itself; choose cost or fifo")
    subspaces = split(space)
    declared = None if settings.cost is None else declared_cost(settings.cost, space, subspaces)
    cost_model = CostModel(subspaces, declared)
    generator = np.random.default_rng([study.record.seed, _POLICY_STREAM])
    proposals = Proposals(
        study,
        subspaces,
        policy=make_policy(settings.policy, subspaces, cost_model, generator, settings.pool),
        shares=make_shares(settings.shares_in_force, {subspace.name: subspace.probability for subspace in subspaces}),
        rounds=make_rounds(settings.rungs),
        make_sampler=make_sampler,
        limits=limits,
        width=make_width(settings.slots, space, subspaces),
    )
    return Scheduler(
        study,
        executor,
        proposals,
        cost_model=cost_model,
        limits=limits,
        expected=settings.classes or DEFAULT_CLASSES,
        speculate=settings.speculate,
        pruning=pruning or make_pruning(settings.pruner),
    )
