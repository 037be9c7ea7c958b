"""The shortest way from an objective to its best params."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shadho_celery.core.checks import as_record
from shadho_celery.core.settings import read_settings
from shadho_celery.errors import Surface, UsageError, told
from shadho_celery.objective.call import Objective, check_objective
from shadho_celery.program.study import Names, Study
from shadho_celery.results.on_trial import OnTrial, check_on_trial
from shadho_celery.results.study import StudyResults
from shadho_celery.results.warm_start import WarmStartSource
from shadho_celery.samplers import MakeSampler
from shadho_celery.scheduler.plan import DEFAULT_SETTINGS
from shadho_celery.study.limits import Limits


@told(Surface.PYTHON)
def minimize(
    objective: Objective | str,
    space: object = None,
    *,
    trials: int | None = None,
    seconds: float | None = None,
    target: float | None = None,
    max_failures: int = DEFAULT_SETTINGS.max_failures,
    early_stop: int | None = None,
    seed: int | None = None,
    sampler: str | MakeSampler | None = None,
    policy: str | None = None,
    shares: str | None = None,
    fidelity: Mapping[str, object] | None = None,
    pruner: str | Mapping[str, object] | None = None,
    objectives: Mapping[str, str] | None = None,
    direction: str | None = None,
    enqueue: Iterable[Mapping[str, Any]] = (),
    store: str = "sqlite://",
    study: str | None = None,
    resume: bool = False,
    progress: bool | None = None,
    workers: Mapping[str, int] | None = None,
    broker: str | None = None,
    redis: str | None = None,
    trial_timeout: float | None = None,
    on_trial: OnTrial | None = None,
    warm_start: WarmStartSource | None = None,
) -> StudyResults:
    """Search for the params with the least loss.

    `objective` is a function of a point of `space` (a hyperopt expression), and trials run one after another in this
    process. Or it is the name of a study file, such as "my_study", and trials run in workers: embedded ones of this
    machine, or those of a fleet. An objective that a module has as `objective`, beside its `SPACE`, may have workers,
    too.

    `trials`, `seconds`, `target`: the search ends when the study has so many trials, after so many seconds, or at a
        feasible loss as good as `target`, whichever comes first. Ctrl-C ends it, and what there is is returned.
    `max_failures`: it also ends, and says so, if its first trials, so many, all fail in one way; 0 for never.
    `early_stop`: it also ends after so many trials without a better feasible loss; of several losses, without a change
        of the front.
    `seed`: makes the search repeatable.
    `sampler`: "auto", the default, "random", "qmc", "grid", "tpe", "gp", "cma", "local", "optuna:NAME" and
        "hyperopt:NAME", theirs of that name, or your own class (`samplers.base.Sampler`).
    `policy`: places trials on classes of workers.
    `shares`: divides the trials among subspaces: "promise", the default with sampler "auto", more to those that may
        hold the best loss; "even", the default with others, by the space's own law, but a tenth to a subspace that only
        fails; "uniform"; or "paper", with that policy. With `resume` sampler, policy and shares are those of before,
        unless they are given.
    `fidelity`: such as ``{"least": 1, "most": 81, "eta": 3, "how": "asha"}``; many trials get a small
        ``context.budget``, and the best of them are promoted to larger ones, by "asha" (without waiting), "halving"
        (successive halving), "hyperband", "bohb" (Hyperband, and a sampler that learns by budget), "dehb" (differential
        evolution), or "auto". For workers it stands in the study file.
    `pruner`: stops a trial early by the losses that it tells ``context.report(step, loss)``, if it looks at
        ``context.should_stop()``: "median", "percentile:25" (not among the best quarter), "patience:10" (ten steps
        without a better loss), "threshold:100" (a loss above), "asha" (not among the best third at the steps 1, 3, 9,
        ...), or a dict such as ``{"how": "median", "startup_trials": 5, "warmup_steps": 3}``. With `resume` it is that
        of before, unless another, or "none", is given.
    `objectives`: such as ``{"error": "minimize", "accuracy": "maximize"}``, the names and directions of the `losses`
        that the objective returns. Of several, `.front` has the feasible trials that no other one dominates.
        For workers it stands in the study file.
    `direction`: "maximize" if the objective returns a number that should be large, such as an accuracy; short for
        objectives with one name, "loss". For workers it stands in the study file, too.
    `enqueue`: known points to begin with, see `Study.enqueue`.
    `warm_start`: finished trials from elsewhere that teach a new study and do not count as its own: the name of a study
        of the store, "STORE_URL#STUDY", a CSV file as `export` writes it, or with a column for each label and one named
        loss, a study, hyperopt's `Trials`, or a list of (params by label, what the objective returns: a number). A
        warning says what did not fit.
    `store`: a database URL such as ``sqlite:///shadho.db``; by default trials are kept in memory. `study` names the
        search there, and `resume` continues it.
    `progress`: shows it on standard error, by default in a terminal and in a notebook; workers' progress always, unless
        False.
    `workers`: slots of the embedded workers by class, such as ``{"cpu": 4}``. `broker`, `redis`: URLs of a fleet, by
        default those of the environment variables CELERY_BROKER_URL and SHADHO_REDIS_URL.
    `trial_timeout`: seconds after which a worker stops a trial.
    `on_trial`: a function that is called in this process after each trial, once it is recorded, with the study as it
        is then, which has `best`, `trials` and `stop()`, and the trial. What it raises is warned of, and stops nothing.

    Returns the study: `.trials` by number, each with `.params` by label, `.values` as the objective got them, `.loss`
    and `.state`; `.best` is the one with the least loss. Without a success a warning says why, `.best` raises
    NoSuccessfulTrial, and `.best_or_none` is None. Raises SpaceError for an unsuitable space, UsageError for invalid
    arguments.
    """
    bounds: dict[str, Any] = {"trials": trials, "seconds": seconds, "target": target}
    bounds |= {"max_failures": max_failures, "early_stop": early_stop}
    named: dict[str, Any] = {"sampler": sampler, "policy": policy, "shares": shares, "pruner": pruner}
    of_file: dict[str, Any] = {"fidelity": fidelity, "objectives": objectives, "direction": direction}
    names: dict[str, Any] = {"store": store, "study": study, "resume": resume, "seed": seed}
    as_record(names, Names)
    if isinstance(objective, str) or workers or broker or redis:
        # A search in this process needs none of it.
        from shadho_celery.program.on_workers import search_on_workers

        return search_on_workers(
            objective,
            space,
            {**bounds, **named, "trial_timeout": trial_timeout},
            of_file,
            {"name": names.pop("study"), **names, "points": [*enqueue], "on_trial": on_trial, "warm_start": warm_start},
            workers=workers,
            addresses={"CELERY_BROKER_URL": broker, "SHADHO_REDIS_URL": redis},
            silent=progress is False,
        )
    check_objective(objective, "the objective")
    if trial_timeout is not None:
        raise UsageError("trial_timeout= needs workers: a trial in this process cannot be stopped")
    # Invalid arguments are refused before a study is recorded.
    if on_trial is not None:
        check_on_trial(on_trial, "on_trial")
    Limits.of(read_settings({**bounds, "objectives": objectives, "direction": direction}))
    with Study(space, **names, **named, **of_file, enqueue=enqueue, warm_start=warm_start) as opened:
        opened.run(objective, **bounds, progress=progress, on_trial=on_trial)
    return opened
