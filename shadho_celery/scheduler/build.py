"""Construction of a study's scheduler from its plan."""

from __future__ import annotations

import numpy as np

from shadho_celery.core.hardware import DEFAULT_CLASSES
from shadho_celery.core.names import FIDELITIES, named
from shadho_celery.executors.base import Executor
from shadho_celery.fidelity.ladder import Ladder
from shadho_celery.fidelity.pruners import Pruning
from shadho_celery.fidelity.rounds import Endless, Rounds
from shadho_celery.placement.policies import make_policy
from shadho_celery.placement.shares import make_shares
from shadho_celery.predictors.cost_model import CostModel
from shadho_celery.predictors.declared_cost import declared_cost
from shadho_celery.scheduler.plan import Plan
from shadho_celery.scheduler.proposals import Proposals, make_samplers
from shadho_celery.scheduler.scheduler import Scheduler
from shadho_celery.space.space import Space
from shadho_celery.study.state import StudyState

#: mixed into the study's seed for the policy's draws, so that they differ from those of samplers
_POLICY_STREAM = 0x70


def make_rounds(ladder: Ladder | None, space: Space | None = None, seed: int = 0, limit: int | None = None) -> Rounds:
    """Return the rounds on a ladder; endless ones without.

    `space` and `seed` are for rounds that propose trials. `limit` on trials is for rounds that choose their rungs.
    """
    if ladder is None:
        return Endless()
    more = {"dehb": (space, seed), "auto": (limit,)}.get(ladder.how, ())
    rounds: Rounds = named(FIDELITIES[ladder.how])(ladder, *more)
    return rounds


def make_scheduler(plan: Plan, study: StudyState, executor: Executor, *, pruning: Pruning | None = None) -> Scheduler:
    """Return the scheduler of `study`, begun, with the parts that its plan names.

    An executor that runs trials in this process asks the same `pruning` while one runs; by default one is made.
    """
    settings, subspaces = plan.settings, plan.subspaces
    declared = None if settings.cost is None else declared_cost(settings.cost, plan.space, subspaces)
    cost_model = CostModel(subspaces, declared)
    generator = np.random.default_rng([study.record.seed, _POLICY_STREAM])
    samplers = make_samplers(plan.make_sampler, subspaces, study.record.seed)
    policy = make_policy(
        *(settings.policy, subspaces, cost_model, generator),
        pool_size=settings.pool,
        has_rungs=plan.ladder is not None,
        spans_space=plan.spans_space,
        is_adaptive=any(sampler.adaptive for sampler in samplers.values()),
    )
    proposals = Proposals(
        study,
        subspaces,
        policy=policy,
        shares=make_shares(settings.shares_in_force, {subspace.name: subspace.probability for subspace in subspaces}),
        rounds=make_rounds(plan.ladder, plan.space, study.record.seed, plan.limits.trials),
        samplers=samplers,
        limits=plan.limits,
        width=plan.width,
    )
    scheduler = Scheduler(
        study,
        executor,
        proposals,
        cost_model=cost_model,
        limits=plan.limits,
        expected=settings.classes or DEFAULT_CLASSES,
        speculate=settings.speculate,
        pruning=pruning or plan.make_pruning(),
    )
    scheduler.begin()
    return scheduler
