"""The shortest way from an objective to its best params."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shadho_celery.core.checks import as_record
from shadho_celery.core.settings import StudySettings
from shadho_celery.errors import UsageError
from shadho_celery.objective.call import Objective
from shadho_celery.program.study import Study
from shadho_celery.program.words import python_words
from shadho_celery.scheduler.build import DEFAULT_SETTINGS
from shadho_celery.scheduler.proposals import MakeSampler
from shadho_celery.study.limits import Limits


def minimize(
    objective: Objective,
    space: object,
    *,
    trials: int | None = None,
    seconds: float | None = None,
    target: float | None = None,
    seed: int | None = None,
    sampler: str | MakeSampler = DEFAULT_SETTINGS.sampler,
    policy: str = DEFAULT_SETTINGS.policy,
    shares: str = DEFAULT_SETTINGS.shares,
    rungs: Mapping[str, object] | None = None,
    enqueue: Iterable[Mapping[str, Any]] = (),
    store: str = "sqlite://",
    study: str | None = None,
    resume: bool = False,
    progress: bool | None = None,
) -> Study:
    """Search `space` (a hyperopt expression) for the params with the least loss, trial after trial in this process.

    The search ends after `trials`, after `seconds`, or at a loss of `target` or less, whichever comes first. Ctrl-C
    ends it at once, and what there is is returned. The same `seed` gives the same trials. `sampler` is "random" or "tpe".
    `shares` divides the trials among subspaces: "uniform", by the space's own law, or by "promise". With `rungs`, such
    as ``{"least": 1, "most": 9, "eta": 3}``, many trials get a small ``context.budget`` and the best of them are
    promoted to larger ones (successive halving). `enqueue` are known points to begin with, see `Study.enqueue`. `store`
    is in memory, or a database URL such as ``sqlite:///shadho.db``; there `study` names the search and `resume`
    continues it. `progress` shows a bar on standard error, by default in a terminal and in a notebook.

    Returns the study: `.trials` by number, each with `.params` by label, `.values` as the objective got them, `.loss`
    and `.state`; `.best` is the one with the least loss, None without a success. Raises SpaceError for an unsuitable
    space, UsageError for invalid arguments.
    """
    with python_words():
        if not callable(objective):
            raise UsageError(f"the objective is no function but {type(objective).__name__}")
        # Invalid arguments are refused before a study is recorded.
        bounds = as_record({"trials": trials, "seconds": seconds, "target": target}, StudySettings)
        Limits(trials=bounds.trials, seconds=bounds.seconds, target=bounds.target)
    opened = Study(
        space,
        store=store,
        study=study,
        resume=resume,
        seed=seed,
        sampler=sampler,
        policy=policy,
        shares=shares,
        rungs=rungs,
    )
    with opened:
        opened.enqueue(enqueue)
        opened.run(objective, trials=trials, seconds=seconds, target=target, progress=progress)
    return opened
