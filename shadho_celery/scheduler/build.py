"""Construction of a study's scheduler from its plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shadho_celery.core.hardware import DEFAULT_CLASSES
from shadho_celery.core.names import FIDELITIES, named
from shadho_celery.core.settings import other_sampler
from shadho_celery.executors.base import Executor
from shadho_celery.fidelity.ladder import Ladder, ladder_of
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

#: mixed into the study's seed for the policy's draws, so that they differ from every sampler's
_POLICY_STREAM = 0x70


def changes(before: Mapping[str, Any], now: Mapping[str, Any], trials: int) -> list[str]:
    """Return a line for what a study of so many trials goes on with another of: sampler, budgets.

    `before` and `now` are the settings in force.
    """
    lines = [other_sampler(before.get("sampler", now["sampler"]), now["sampler"], trials)]
    was, is_now = (None if ladder is None else ladder.in_words for ladder in map(ladder_of, (before, now)))
    # Studies of earlier versions do not have theirs on record.
    if trials and was is not None and was != is_now:
        lines += [f"budgets from now on: {is_now or 'none'}; until now: {was}"]
    return [line for line in lines if line is not None]


def other_code(trials: Mapping[str, int], now: str) -> list[str]:
    """Return a line if a study has trials of other versions of its code than the one of `now`, "" for an unknown one.

    `trials` has the number of its trials by version.
    """
    others = ", ".join(f"{count} of version {code}" for code, count in trials.items() if code != now)
    if not now or not others:
        return []
    same = f", beside {trials[now]} of this version" if trials.get(now) else ""
    return [
        f"Warning: the objective's code is now version {now}, and this study has trials of other code: {others}{same}; "
        "all of them share its best trials, sampler and pruner; begin a new study for the new code"
    ]


def make_rounds(ladder: Ladder | None, space: Space | None = None, seed: int = 0, limit: int | None = None) -> Rounds:
    """Return the rounds on a ladder, endless ones without.

    `space` and `seed` are for those that propose trials, and `limit` on trials is for those that choose their rungs.
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
