"""Search in this process: the shortest way from an objective to its best params."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct
from msgspec.structs import replace

from shadho_celery.core.checks import as_record
from shadho_celery.core.settings import StudySettings
from shadho_celery.errors import NoSuccessfulTrial, UsageError
from shadho_celery.executors.inline import InlineExecutor
from shadho_celery.objective.call import Objective
from shadho_celery.scheduler.build import DEFAULT_SETTINGS, check_settings, make_scheduler
from shadho_celery.space.compile import compile_space
from shadho_celery.space.stored import to_json
from shadho_celery.store.sql import SqlStore
from shadho_celery.study.limits import Limits
from shadho_celery.study.open import open_study
from shadho_celery.study.study import Study

#: folder of the studies' checkpoint folders
CHECKPOINTS = Path(".shadho/checkpoints")

#: samplers by the module of hyperopt's ``suggest`` function
_HYPEROPT = {"hyperopt.tpe": "tpe", "hyperopt.rand": "random"}


class _Names(Struct, frozen=True, kw_only=True):
    """Arguments of `minimize` by which its study is opened, each with the description that a refusal shows."""

    store: Annotated[str, Meta(description="a database URL such as sqlite:///shadho.db")]
    study: Annotated[str | None, Meta(description="name of the study")]
    resume: Annotated[bool, Meta(description="whether the study is continued; its name is `study`")]
    seed: Annotated[int | None, Meta(description="a whole number from 0 to 2**63 - 1")]


def minimize(
    objective: Objective,
    space: object,
    *,
    trials: int | None = None,
    seconds: float | None = None,
    target: float | None = None,
    seed: int | None = None,
    sampler: str = DEFAULT_SETTINGS.sampler,
    policy: str = DEFAULT_SETTINGS.policy,
    shares: str = DEFAULT_SETTINGS.shares,
    rungs: Mapping[str, object] | None = None,
    store: str = "sqlite://",
    study: str | None = None,
    resume: bool = False,
) -> Study:
    """Search `space` (a hyperopt expression) for the params with the least loss, trial after trial in this process.

    The search ends after `trials`, after `seconds`, or at a loss of `target` or less, whichever comes first. The same
    `seed` gives the same trials. `shares` divides the trials among subspaces: "uniform", by the space's own law, or by
    "promise". With `rungs`, such as ``{"least": 1, "most": 9, "eta": 3}``, many trials get a small ``context.budget``
    and the best of them are promoted to larger ones (successive halving). `store` is in memory, or a database URL such
    as ``sqlite:///shadho.db``; there `study` names the search and `resume` continues it.

    Returns the study: `.trials` in the order of their results, each with `.params` by label, `.loss` and `.state`;
    `.best` is the one with the least loss, None without a success. Raises SpaceError for an unsuitable space,
    UsageError for invalid arguments.
    """
    if not callable(objective):
        raise UsageError(f"the objective is no function but {type(objective).__name__}")
    # Invalid arguments are refused before a study is recorded.
    names = as_record({"store": store, "study": study, "resume": resume, "seed": seed}, _Names)
    bounds = {"trials": trials, "seconds": seconds, "target": target}
    settings = as_record({**bounds, "sampler": sampler, "policy": policy, "shares": shares}, StudySettings)
    settings = replace(settings, rungs=rungs)
    check_settings(settings)
    limits = Limits(trials=settings.trials, seconds=settings.seconds, target=settings.target)
    compiled = compile_space(space)
    with closing(SqlStore(names.store)) as database:
        search = open_study(
            database,
            compiled.describe(),
            name=names.study,
            resume=names.resume,
            seed=names.seed,
            tree=to_json(compiled),
        )
        folder = CHECKPOINTS / search.record.key
        executor = InlineExecutor(objective, compiled.evaluate, checkpoints=folder, study=search.name)
        with closing(search):
            make_scheduler(compiled, search, executor, limits, settings).run()
    return search


def fmin(
    fn: Objective,
    space: object,
    algo: object = None,
    max_evals: int | None = None,
    *,
    rstate: np.random.Generator | int | None = None,
    timeout: float | None = None,
    loss_threshold: float | None = None,
    **ignored: object,
) -> dict[str, Any]:
    """Search as hyperopt's ``fmin`` is called; return the best trial's drawn value of every active label.

    `algo` is a sampler's name, or hyperopt's ``tpe.suggest`` or ``rand.suggest``, replaced by our sampler of that name.
    `rstate` seeds the search. Other arguments of hyperopt's (`trials`, `verbose`...) are ignored, with a warning.
    Raises NoSuccessfulTrial if no trial succeeded.
    """
    if ignored:
        warnings.warn(f"fmin ignores {', '.join(ignored)}", stacklevel=3)
    sampler = (
        algo if isinstance(algo, str) else _HYPEROPT.get(getattr(algo, "__module__", ""), DEFAULT_SETTINGS.sampler)
    )
    seed = int(rstate.integers(2**31)) if isinstance(rstate, np.random.Generator) else rstate
    study = minimize(fn, space, trials=max_evals, seconds=timeout, target=loss_threshold, seed=seed, sampler=sampler)
    if study.best is None:
        raise NoSuccessfulTrial
    return dict(study.best.params)
