"""`minimize`: a complete search in one call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shadho_celery.core.arguments import Resume, refuse_unknown
from shadho_celery.core.settings import read_settings, with_settings
from shadho_celery.errors import UsageError
from shadho_celery.objective.call import Objective, check_objective
from shadho_celery.program.recorded import ShownStudy
from shadho_celery.program.study import Study
from shadho_celery.results.on_trial import OnTrial, check_on_trial
from shadho_celery.results.warm_start import WarmStartSource
from shadho_celery.samplers.base import MakeSampler
from shadho_celery.scheduler.plan import DEFAULT_SETTINGS
from shadho_celery.study.limits import Limits

#: settings that apply to one run, which are arguments of `Study.run`
BOUNDS = ("trials", "seconds", "target", "max_failures", "early_stop")


@with_settings
@refuse_unknown
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
    resume: Resume = False,
    progress: bool | None = None,
    workers: Mapping[str, int] | None = None,
    broker: str | None = None,
    redis: str | None = None,
    trial_timeout: float | None = None,
    on_trial: OnTrial | None = None,
    warm_start: WarmStartSource | None = None,
) -> ShownStudy:
    """Search for the params with the least loss.

    `objective` is a function of a point of `space` (a hyperopt expression). Trials run one after another in this
    process. To run them on workers, give the name of a study file, such as "my_study", or the `objective` and `SPACE`
    of a module. These are workers of this machine, with slots by class in `workers`, such as ``{"cpu": 4}``, or those
    of a fleet, with the URLs `broker` and `redis`, by default from CELERY_BROKER_URL and SHADHO_REDIS_URL.

    `seed` makes the search repeatable. `store` is a database URL, by default in memory. `study` is the study's name in
    the store, and `resume` continues it; with "if-exists" the study begins if there is none of this name. `enqueue` are
    points to evaluate first (see `Study.enqueue`). `warm_start` are finished trials to learn from: a study, its name,
    "STORE_URL#STUDY", a CSV file, hyperopt's `Trials`, or pairs of params and loss.
    `on_trial(study, trial)` is called after each trial. `study.stop()` ends the search, as Ctrl-C does.

    Return the study. It has `.trials`, each with `.params` by label, `.values`, `.loss` and `.state`. Its `.best`
    raises NoSuccessfulTrial if no trial succeeds. Raises SpaceError or UsageError for invalid arguments.
    """
    settings: dict[str, Any] = {"trials": trials, "seconds": seconds, "target": target, "early_stop": early_stop}
    settings |= {"max_failures": max_failures, "sampler": sampler, "policy": policy, "shares": shares, "pruner": pruner}
    settings |= {"fidelity": fidelity, "objectives": objectives, "direction": direction, "trial_timeout": trial_timeout}
    opened: dict[str, Any] = {"store": store, "study": study, "resume": resume, "seed": seed, "warm_start": warm_start}
    opened["enqueue"] = enqueue
    if not (isinstance(objective, str) or workers or broker or redis):
        return _search_here(objective, space, settings, opened, on_trial=on_trial, progress=progress)
    # Imported late, because a search in this process does not need it.
    from shadho_celery.program.on_workers import search_on_workers

    where: dict[str, Any] = {"workers": workers, "broker": broker, "redis": redis}
    return search_on_workers(objective, space, settings, opened, on_trial, silent=progress is False, **where)


def _search_here(
    objective: Objective,
    space: object,
    settings: Mapping[str, Any],
    opened: Mapping[str, Any],
    *,
    on_trial: OnTrial | None,
    progress: bool | None,
) -> ShownStudy:
    """Search in this process. Arguments are checked before a study is recorded."""
    check_objective(objective, "the objective")
    if settings["trial_timeout"] is not None:
        raise UsageError("trial_timeout= needs workers: a trial in this process cannot be stopped")
    check_on_trial(on_trial, "on_trial")
    bounds = {name: settings[name] for name in BOUNDS}
    losses = {name: settings[name] for name in ("objectives", "direction")}
    Limits.of(read_settings({**bounds, **losses}))
    named = {name: settings[name] for name in ("sampler", "policy", "shares", "pruner", "fidelity")}
    with Study(space, **opened, **named, **losses) as found:
        found.run(objective, **bounds, progress=progress, on_trial=on_trial)
    return found
