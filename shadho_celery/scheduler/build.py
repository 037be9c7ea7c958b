"""Build the scheduler of a study from names and settings."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shadho_celery import samplers
from shadho_celery.core.checks import check_name
from shadho_celery.core.hardware import DEFAULT_CLASSES
from shadho_celery.core.settings import StudySettings
from shadho_celery.executors.base import Executor
from shadho_celery.placement.policies import POLICIES, make_policy
from shadho_celery.placement.shares import SHARES, make_shares
from shadho_celery.predictors.cost_model import CostModel
from shadho_celery.predictors.declared_cost import declared_cost
from shadho_celery.scheduler.rounds import Endless, Rounds
from shadho_celery.scheduler.scheduler import Scheduler
from shadho_celery.scheduler.widths import make_width
from shadho_celery.space.compile import Space
from shadho_celery.space.split import split
from shadho_celery.study.limits import Limits
from shadho_celery.study.study import Study

DEFAULT_SETTINGS = StudySettings()

#: mixed into the study's seed for the policy's own draws, so that they are not those of a sampler
_POLICY_STREAM = 0x70


def check_settings(settings: StudySettings) -> None:
    """Raise UsageError for a name that does not exist, and for rungs that make no ladder."""
    check_name("sampler", settings.sampler, samplers.SAMPLERS)
    check_name("policy", settings.policy, POLICIES)
    check_name("kind of shares", settings.shares, SHARES)
    make_rounds(settings.rungs)


def make_rounds(rungs: Mapping[str, object] | None) -> Rounds:
    """Return the rounds that ``STUDY["rungs"]`` asks for; none without it. Raises UsageError for what is no ladder."""
    if rungs is None:
        return Endless()
    # Most searches have none.
    from shadho_celery.scheduler.successive_halving import Ladder, SuccessiveHalving

    return SuccessiveHalving(Ladder.of(rungs))


def make_scheduler(
    space: Space, study: Study, executor: Executor, limits: Limits, settings: StudySettings = DEFAULT_SETTINGS
) -> Scheduler:
    """Return the scheduler of `study`, its parts chosen by `settings`. Raises UsageError as `check_settings`."""
    check_settings(settings)
    subspaces = split(space)
    declared = None if settings.cost is None else declared_cost(settings.cost, space, subspaces)
    cost_model = CostModel(subspaces, declared)
    generator = np.random.default_rng([study.record.seed, _POLICY_STREAM])
    return Scheduler(
        study,
        subspaces,
        executor,
        policy=make_policy(settings.policy, subspaces, cost_model, generator),
        shares=make_shares(settings.shares, {subspace.name: subspace.probability for subspace in subspaces}),
        cost_model=cost_model,
        make_sampler=samplers.SAMPLERS[settings.sampler],
        limits=limits,
        width=make_width(settings.slots, space, subspaces),
        rounds=make_rounds(settings.rungs),
        speculate=settings.speculate,
        expected=settings.classes or DEFAULT_CLASSES,
    )
