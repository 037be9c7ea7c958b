"""A search in this process: the shortest way from an objective to its best params."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from shadho_celery import assignment, samplers
from shadho_celery import shares as sharing
from shadho_celery.assignment import make_policy
from shadho_celery.context import Objective
from shadho_celery.cost_model import CostModel
from shadho_celery.errors import NoSuccessfulTrial
from shadho_celery.executors.base import Executor
from shadho_celery.executors.inline import InlineExecutor
from shadho_celery.hardware import DEFAULT_CLASSES
from shadho_celery.hints import Cost, make_hint
from shadho_celery.limits import Limits
from shadho_celery.opening import open_study
from shadho_celery.rounds import make_rounds
from shadho_celery.samplers import make_sampler
from shadho_celery.scheduler import Scheduler
from shadho_celery.shares import make_shares
from shadho_celery.space.compile import Space, compile_space
from shadho_celery.space.split import split
from shadho_celery.store import Store
from shadho_celery.study import Study
from shadho_celery.widths import Slots, make_width

DEFAULT_POLICY = "cost"
DEFAULT_SHARES = "uniform"
DEFAULT_SAMPLER = "random"

#: each study has a folder of its own in it
CHECKPOINTS = Path(".shadho/checkpoints")

#: our samplers for the modules of hyperopt's ``suggest`` functions
_HYPEROPT = {"hyperopt.tpe": "tpe", "hyperopt.rand": "random"}

#: mixed into the study's seed for the policy's own draws, so that they are not those of a sampler
_POLICY_STREAM = 0x70


def minimize(
    objective: Objective,
    space: Any,
    *,
    trials: int | None = None,
    seconds: float | None = None,
    target: float | None = None,
    seed: int | None = None,
    sampler: str = DEFAULT_SAMPLER,
    policy: str = DEFAULT_POLICY,
    shares: str = DEFAULT_SHARES,
    rungs: Mapping[str, Any] | None = None,
    store: str = "sqlite://",
    study: str | None = None,
    resume: bool = False,
) -> Study:
    """Search `space` (a hyperopt expression) for the params with the least loss, trial after trial in this process.

    The search ends after `trials`, after `seconds`, or at a loss of `target` or less, whichever comes first. The same
    `seed` gives the same trials. `shares` says how trials are shared out between subspaces: "uniform", by the space's
    own law, or by "promise". With `rungs`, such as ``{"least": 1, "most": 9, "eta": 3}``, many trials are given a small
    ``context.budget`` and the best of them go on to larger ones (successive halving). `store` keeps them: in memory, or
    at a database URL such as ``sqlite:///shadho.db``, where `study` names the search and `resume` carries it on.

    Returns the study: `.trials` in the order they finished, each with `.params` by label, `.loss` and `.state`;
    `.best` is the one with the least loss, None where none succeeded. Raises SpaceError for a space that cannot be
    searched, UsageError for arguments that make no sense.
    """
    limits = Limits(trials=trials, seconds=seconds, target=target)
    check_names(sampler, policy, shares)
    make_rounds(rungs)  # what makes no ladder is refused before a study is recorded
    compiled = compile_space(space)
    with closing(Store(store)) as database:
        search = open_study(database, compiled.describe(), name=study, resume=resume, seed=seed)
        executor = InlineExecutor(objective, compiled.evaluate, checkpoints=CHECKPOINTS / search.record.key)
        with closing(search):
            make_scheduler(
                compiled, search, executor, limits, sampler=sampler, policy=policy, shares=shares, rungs=rungs
            ).run()
    return search


def fmin(
    fn: Objective,
    space: Any,
    algo: Any = None,
    max_evals: int | None = None,
    *,
    rstate: np.random.Generator | int | None = None,
    timeout: float | None = None,
    loss_threshold: float | None = None,
    **ignored: Any,
) -> dict[str, Any]:
    """Search as hyperopt's ``fmin`` is called: the best trial's drawn value of every active label.

    `algo` is a sampler's name, or hyperopt's ``tpe.suggest`` or ``rand.suggest``, for which ours of that name runs.
    `rstate` seeds the search. What else hyperopt takes (`trials`, `verbose`...) is ignored, with a warning. Raises
    NoSuccessfulTrial where no trial succeeded.
    """
    if ignored:
        warnings.warn(f"fmin ignores {', '.join(ignored)}", stacklevel=3)
    sampler = algo if isinstance(algo, str) else _HYPEROPT.get(getattr(algo, "__module__", ""), DEFAULT_SAMPLER)
    seed = int(rstate.integers(2**31)) if isinstance(rstate, np.random.Generator) else rstate
    study = minimize(fn, space, trials=max_evals, seconds=timeout, target=loss_threshold, seed=seed, sampler=sampler)
    if study.best is None:
        raise NoSuccessfulTrial
    return dict(study.best.params)


def check_names(sampler: str, policy: str, shares: str = DEFAULT_SHARES) -> None:
    """Raise UsageError for a name that does not exist; to be asked before a study is recorded."""
    samplers.check(sampler)
    assignment.check(policy)
    sharing.check(shares)


def make_scheduler(
    space: Space,
    study: Study,
    executor: Executor,
    limits: Limits,
    *,
    sampler: str = DEFAULT_SAMPLER,
    policy: str = DEFAULT_POLICY,
    shares: str = DEFAULT_SHARES,
    cost: Cost | None = None,
    slots: Slots = 1,
    rungs: Mapping[str, Any] | None = None,
    speculate: bool = True,
    expected: tuple[str, ...] = (),
) -> Scheduler:
    """The scheduler of `study`, its parts chosen by name; UsageError for a name that does not exist.

    `cost` says what trials are thought to cost beside one another, see `hints.make_hint`; `slots` how many slots each
    takes, see `widths.make_width`; `rungs` which budgets they are given, see `rounds.SuccessiveHalving`.
    """
    subspaces = split(space)
    cost_model = CostModel(subspaces, None if cost is None else make_hint(cost, space, subspaces))
    generator = np.random.default_rng([study.record.seed, _POLICY_STREAM])
    return Scheduler(
        study,
        subspaces,
        executor,
        policy=make_policy(policy, subspaces, cost_model, generator),
        shares=make_shares(shares, {subspace.name: subspace.probability for subspace in subspaces}),
        cost_model=cost_model,
        make_sampler=lambda subspace, entropy: make_sampler(sampler, subspace, entropy),
        limits=limits,
        width=make_width(slots, space, subspaces),
        rounds=make_rounds(rungs),
        speculate=speculate,
        expected=expected or DEFAULT_CLASSES,
    )
