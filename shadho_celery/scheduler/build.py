"""Construction of a study's scheduler from names and settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from shadho_celery import samplers
from shadho_celery.core.checks import check_name
from shadho_celery.core.hardware import DEFAULT_CLASSES
from shadho_celery.core.names import FIDELITIES, NO_PRUNER, POLICIES, SHARES, named
from shadho_celery.core.settings import StudySettings, other_sampler
from shadho_celery.errors import UsageError
from shadho_celery.executors.base import Executor
from shadho_celery.fidelity.ladder import Fidelity, Ladder, ladder_of
from shadho_celery.fidelity.pruners import Asha as AshaSettings
from shadho_celery.fidelity.pruners import Pruning, make_pruning, read_pruner
from shadho_celery.fidelity.rounds import Endless, Rounds
from shadho_celery.placement.policies import make_policy
from shadho_celery.placement.shares import make_shares
from shadho_celery.predictors.cost_model import CostModel
from shadho_celery.predictors.declared_cost import declared_cost
from shadho_celery.samplers import BY_BUDGET
from shadho_celery.scheduler.proposals import Proposals, spans_space
from shadho_celery.scheduler.scheduler import Scheduler
from shadho_celery.scheduler.widths import make_width
from shadho_celery.space.compile import Space
from shadho_celery.space.split import split, undivided
from shadho_celery.study.limits import Limits
from shadho_celery.study.state import StudyState
from shadho_celery.study.warm_start import refuse_if_resumed

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
    read_ladder(settings)
    make_pruning(settings.pruner, settings.objectives)
    if settings.has_several and settings.pruner not in (None, NO_PRUNER):
        raise UsageError("a pruner judges reports of one loss, and this study has several; leave out one of the two")
    if settings.has_several and read_ladder(settings) is not None:
        given = "STUDY['rungs']" if settings.fidelity is None else "STUDY['fidelity']"
        raise UsageError(
            f"{given} promotes trials by one loss, and this study has several; leave out {given} or objectives"
        )


def check_sampler(settings: StudySettings, space: Space) -> None:
    """Raise UsageError if the sampler cannot be made for a space: before anything is recorded."""
    make = samplers.find_sampler(settings.sampler, settings.trials, len(settings.objectives or ()))
    make(undivided(space) if spans_space(make) else split(space)[0], (0, 0))


def check_warm_start(given: object, settings: StudySettings, *, resume: bool) -> None:
    """Raise UsageError for a warm start of a study that is continued, or of one that would not learn from it."""
    refuse_if_resumed(given, resume=resume)
    ladder = read_ladder(settings)
    if given is not None and ladder is not None and ladder.way == "dehb":
        raise UsageError(
            "how: dehb learns from trials of its own only; leave out the warm start, or choose another how"
        )


def read_ladder(settings: StudySettings) -> Ladder | None:
    """Return the ladder of ``STUDY["fidelity"]`` or ``STUDY["rungs"]``, None without. Raises UsageError."""
    if settings.fidelity is not None and settings.rungs is not None:
        raise UsageError("fidelity and rungs both give budgets; leave out rungs, which is fidelity with how: halving")
    ladder = ladder_of({"fidelity": settings.fidelity, "rungs": settings.rungs})
    if not isinstance(ladder, Fidelity):
        return ladder
    if ladder.backups and ladder.how != "halving":
        raise UsageError(f"fidelity.backups are trials that halving does not wait for; leave them out of {ladder.how}")
    is_asha = make_pruning(settings.pruner) is not None and isinstance(read_pruner(settings.pruner), AshaSettings)
    if ladder.how in {"asha", "auto"} and is_asha:
        raise UsageError(
            f"how: {ladder.how} promotes trials and pruner asha stops them, by the same rule; leave out one of the "
            "two, or choose pruner none if the study began with it"
        )
    if ladder.how == "bohb" and settings.sampler not in BY_BUDGET:
        raise UsageError(f"how: bohb asks a sampler that learns; leave out sampler, or choose {', '.join(BY_BUDGET)}")
    if ladder.how == "dehb" and settings.sampler != "auto":
        raise UsageError("how: dehb proposes the trials itself; leave out sampler, or choose auto")
    return ladder


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
        "all of them share its best trials, sampler and pruner; give --study NAME without --resume for a new study"
    ]


def make_rounds(ladder: Ladder | None, space: Space | None = None, seed: int = 0, limit: int | None = None) -> Rounds:
    """Return the rounds on a ladder, endless ones without.

    `space` and `seed` are for those that propose trials, and `limit` on trials is for those that choose their rungs.
    """
    if ladder is None:
        return Endless()
    more = {"dehb": (space, seed), "auto": (limit,)}.get(ladder.way, ())
    rounds: Rounds = named(FIDELITIES[ladder.way])(ladder, *more)
    return rounds


def make_scheduler(
    space: Space,
    study: StudyState,
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
    ladder = read_ladder(settings)
    limits = limits if ladder is None else replace(limits, budget=ladder.most)
    budgets = () if ladder is None else ladder.budgets
    make_sampler = samplers.find_sampler(settings.sampler, limits.trials, len(settings.objectives or ()), budgets)
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
        rounds=make_rounds(ladder, space, study.record.seed, limits.trials),
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
        pruning=pruning or make_pruning(settings.pruner, settings.objectives),
    )
