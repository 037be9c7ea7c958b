"""Plan of a study: its ladder, sampler, pruner, limits and other parts, made from its settings and its search space.

`make_scheduler` creates the study's scheduler from the plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from shadho_celery.core.checks import check_name
from shadho_celery.core.hardware import DEFAULT_CLASSES
from shadho_celery.core.names import FIDELITIES, POLICIES, SHARES, named
from shadho_celery.core.settings import StudySettings
from shadho_celery.errors import UsageError
from shadho_celery.fidelity.ladder import Ladder, ladder_of
from shadho_celery.fidelity.pruners import Asha, PrunerSettings, Pruning, read_pruner
from shadho_celery.fidelity.rounds import Rounds
from shadho_celery.placement.model import CostModel, declared_cost
from shadho_celery.placement.policies import make_policy
from shadho_celery.placement.shares import make_shares
from shadho_celery.placement.widths import Width, make_width
from shadho_celery.results.warm_start import refuse_if_resumed
from shadho_celery.samplers import Maker, find_sampler
from shadho_celery.samplers.random import name_of
from shadho_celery.scheduler.executors import Executor
from shadho_celery.scheduler.proposals import Proposals, make_samplers
from shadho_celery.scheduler.scheduler import Scheduler
from shadho_celery.scheduler.wishes import CheapestSlots
from shadho_celery.space.space import Space
from shadho_celery.space.split import Subspace, bounded, split, undivided
from shadho_celery.study.keeper import Keeper
from shadho_celery.study.state import Limits, StudyState

DEFAULT_SETTINGS = StudySettings()

#: number that is mixed into the study's seed for the draws of the policy, so that they differ from those of samplers
_POLICY_STREAM = 0x70

#: limits of a study that ends only when its caller ends it
ENDLESS = Limits(target=-math.inf)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The parts of a study that follow from its settings and its search space."""

    #: settings in force
    settings: StudySettings
    space: Space
    #: subspaces into which the space is split, in the order of the space
    subspaces: Sequence[Subspace]
    #: limits that end the study
    limits: Limits
    #: budgets of its trials; None for a study without budgets
    ladder: Ladder | None
    #: creates the sampler of a subspace, or of the whole space
    make_sampler: Maker
    #: settings of its pruner; None for no pruner
    pruner: PrunerSettings | None
    #: number of slots of a trial, by its params
    width: Width
    #: warning for the user that the bounds between params allow few points, or None
    warning: str | None = None

    @classmethod
    def of(cls, space: Space, settings: StudySettings = DEFAULT_SETTINGS, limits: Limits | None = None) -> Plan:
        """Return the plan for a space and settings. `limits` replace the limits in the settings.

        Raises UsageError for an unknown name, for settings that cannot be combined, for an invalid ladder, pruner or
        number of slots, for settings without a limit, and for bounds between params that allow no point.
        """
        subspaces, warning = bounded(split(replace(space, where=settings.where)))
        plan = _plan(settings, subspaces[0].space, subspaces, limits or Limits.of(settings))
        return replace(plan, warning=warning)

    def with_settings(self, settings: StudySettings, limits: Limits | None = None) -> Plan:
        """Return the plan for other settings and the same space. Raises UsageError like `of`."""
        plan = _plan(settings, self.space, self.subspaces, limits or Limits.of(settings))
        return replace(plan, warning=self.warning)

    def with_space(self, space: Space) -> Plan:
        """Return the plan of the same settings for another space."""
        return Plan.of(space, self.settings, self.limits)

    def check_sampler(self) -> None:
        """Raise UsageError if the sampler cannot be created for this space. Call this before anything is recorded."""
        self.make_sampler(self.whole if self.spans_space else self.subspaces[0], (0, 0))

    def check_warm_start(self, given: object, *, resume: bool) -> None:
        """Raise UsageError if a warm start is given for a study that is resumed, or that would not learn from it."""
        refuse_if_resumed(given, resume=resume)
        if given is not None and self.ladder is not None and self.ladder.how == "dehb":
            raise UsageError(
                "how: dehb learns only from its own trials; leave out the warm start, or choose another how"
            )

    def make_pruning(self, *, needs_reports: bool = True) -> Pruning | None:
        """Return a new `Pruning` for one run of the study, or None if the study has no pruner."""
        how: dict[str, bool] = {"is_command": self.settings.command is not None, "needs_reports": needs_reports}
        return None if self.pruner is None else Pruning(self.pruner, self.settings.objectives or (), **how)

    @property
    def spans_space(self) -> bool:
        """True if one sampler draws in the whole space."""
        return self.make_sampler.spans_space

    @property
    def whole(self) -> Subspace:
        """The whole space as one subspace."""
        return undivided(self.space)


def _plan(settings: StudySettings, space: Space, subspaces: Sequence[Subspace], limits: Limits) -> Plan:
    check_name("policy", settings.policy, POLICIES)
    check_name("shares", settings.shares_in_force, SHARES)
    if settings.shares == "paper" != settings.policy:
        raise UsageError("shares 'paper' are those of policy paper, which has ranks; choose even, uniform or promise")
    pruner = read_pruner(settings.pruner, settings.objectives)
    ladder = _ladder(settings, pruner)
    if settings.has_several and settings.repeats > 1:
        raise UsageError("repeats have the mean of one loss, and this study has several; leave out one of the two")
    _check_money(settings, limits)
    budgets = () if ladder is None else ladder.budgets
    setting, slots = settings.width
    make_sampler = find_sampler(settings.sampler, limits.trials, len(settings.objectives or ()), budgets)
    if settings.policy == "paper" and make_sampler.spans_space:
        raise UsageError("policy 'paper' ranks subspaces, but this sampler chooses them itself; choose cost or fifo")
    return Plan(
        settings=settings,
        space=space,
        subspaces=subspaces,
        # Only a loss at the greatest budget counts for the target.
        limits=limits if ladder is None else replace(limits, budget=ladder.most),
        ladder=ladder,
        make_sampler=make_sampler,
        pruner=pruner,
        width=make_width(slots, subspaces, setting),
    )


def _ladder(settings: StudySettings, pruner: PrunerSettings | None) -> Ladder | None:
    """Return the ladder of ``STUDY["fidelity"]``, or None if that is not set.

    Raises UsageError if it is invalid, or cannot be combined with the other settings.
    """
    ladder = ladder_of({"fidelity": settings.fidelity})
    if ladder is None:
        return None
    if ladder.backups and ladder.how != "halving":
        raise UsageError(f"fidelity.backups are trials that halving does not wait for; leave them out of {ladder.how}")
    if ladder.how in {"asha", "auto"} and isinstance(pruner, Asha):
        raise UsageError(
            f"how: {ladder.how} promotes trials and pruner asha stops them, by the same rule; leave out one of the "
            "two, or choose pruner none if the study began with it"
        )
    if ladder.how == "dehb" and settings.has_several:
        raise UsageError("how: dehb learns one loss, but this study has several; choose asha, hyperband or halving")
    if ladder.how == "dehb" and settings.sampler != "auto":
        raise UsageError("how: dehb proposes the trials itself; leave out sampler, or choose auto")
    return ladder


def _check_money(settings: StudySettings, limits: Limits) -> None:
    """Raise UsageError if the settings for placement by money are incomplete, or if only a deadline is given."""
    is_by_money = settings.place_by == "money"
    if is_by_money and settings.deadline is None:
        raise UsageError("place_by money needs a deadline, such as 4h")
    if settings.deadline is not None and not is_by_money:
        raise UsageError("deadline is for place_by money; give both, or leave it out")
    if is_by_money and limits.trials is None:
        raise UsageError("deadline is the time for a number of trials; give trials, too")


def make_rounds(ladder: Ladder | None, space: Space | None = None, seed: int = 0, limit: int | None = None) -> Rounds:
    """Return the rounds for a ladder; without a ladder, one endless round.

    `space` and `seed` are needed by rounds that propose trials themselves. `limit` is the maximum number of trials,
    which is needed by rounds that choose their rungs.
    """
    if ladder is None:
        return Rounds()
    more = {"dehb": (space, seed), "auto": (limit,)}.get(ladder.how, ())
    rounds: Rounds = named(FIDELITIES[ladder.how])(ladder, *more)
    return rounds


def make_scheduler(
    plan: Plan, study: StudyState, executor: Executor, *, pruning: Pruning | None = None, is_known: bool = False
) -> Scheduler:
    """Return the scheduler of `study` with the parts of its plan, after a call of `begin`.

    Give `pruning` if the executor uses the same object while a trial runs in this process. By default it is created
    here. `is_known` is True if the executor already has the attempts in flight.
    """
    settings, subspaces = plan.settings, plan.subspaces
    declared = None if settings.cost is None else declared_cost(settings.cost, plan.space, subspaces)
    cost_model = CostModel(subspaces, declared, settings.widths)
    generator = np.random.default_rng([study.record.seed, _POLICY_STREAM])
    samplers = make_samplers(plan.make_sampler, subspaces, (study.record.seed,))
    policy = make_policy(
        *(settings.policy, subspaces, cost_model, generator),
        pool_size=settings.pool,
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
        sampler=settings.sampler if isinstance(settings.sampler, str) else name_of(settings.sampler),
        limits=plan.limits,
        width=plan.width,
        budgets=() if plan.ladder is None else plan.ladder.budgets,
    )
    scheduler = Scheduler(
        study,
        executor,
        proposals,
        cost_model=cost_model,
        limits=plan.limits,
        expected=settings.classes or DEFAULT_CLASSES,
        speculate=settings.speculate,
        pruning=pruning or plan.make_pruning(needs_reports=study.schema is None),
        cheapest=None
        if settings.deadline_seconds is None
        else CheapestSlots(proposals, cost_model, settings.deadline_seconds),
        keeper=Keeper(settings.keep["best"]) if settings.keep else None,
    )
    scheduler.begin(is_known=is_known)
    return scheduler
