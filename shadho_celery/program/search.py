"""The shortest way from an objective to its best params."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shadho_celery.core.checks import as_record, short
from shadho_celery.core.hardware import CLASS_NAME
from shadho_celery.core.settings import read_settings
from shadho_celery.core.trial import COUNTED
from shadho_celery.errors import NestedStart, Surface, UsageError, told
from shadho_celery.objective import study_file
from shadho_celery.objective.call import Objective, check_objective
from shadho_celery.program.notices import warn
from shadho_celery.program.study import Names, Study
from shadho_celery.program.warm_start import WarmStartSource, of_object
from shadho_celery.results.on_trial import OnTrial, check_on_trial
from shadho_celery.results.study import StudyResults
from shadho_celery.samplers import MakeSampler
from shadho_celery.scheduler.plan import DEFAULT_SETTINGS
from shadho_celery.space.compile import compile_space
from shadho_celery.study.limits import Limits
from shadho_celery.study.warm_start import Source, refuse_if_resumed


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
        "hyperopt:NAME", theirs of that name, or a class of one's own (`samplers.base.Sampler`).
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
    limits: dict[str, Any] = {"trials": trials, "seconds": seconds, "target": target}
    limits |= {"max_failures": max_failures, "early_stop": early_stop}
    named = {"sampler": sampler, "policy": policy, "shares": shares, "pruner": pruner}
    given: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    names: dict[str, Any] = {"store": store, "study": study, "resume": resume, "seed": seed}
    as_record(names, Names)
    if isinstance(objective, str) or workers or broker or redis:
        module = objective if isinstance(objective, str) else _module_of(objective, space)
        if space is not None and isinstance(objective, str):
            raise UsageError("a study file has its own SPACE; leave out space")
        own = {"a sampler of one's own": callable(sampler), "fidelity": fidelity is not None}
        own |= {"objectives": objectives is not None, "direction": direction is not None}
        if which := [name for name, is_given in own.items() if is_given]:
            raise UsageError(f"{which[-1]} cannot be passed to workers' studies; set STUDY in the study file")
        kept = {**limits, **given, "trial_timeout": trial_timeout}
        with _ending_unguarded(module):
            return _run_on_workers(
                module,
                {name: value for name, value in kept.items() if value is not None},
                {
                    "seed": seed,
                    "name": study,
                    "resume": resume,
                    "store": store,
                    "points": [*enqueue],
                    "on_trial": on_trial,
                    "warm_start": _source(module, warm_start, resume),
                },
                workers=_slots(workers),
                urls={"CELERY_BROKER_URL": broker, "SHADHO_REDIS_URL": redis},
                silent=progress is False,
            )
    check_objective(objective, "the objective")
    if trial_timeout is not None:
        raise UsageError("trial_timeout= needs workers: a trial in this process cannot be stopped")
    # Invalid arguments are refused before a study is recorded.
    if on_trial is not None:
        check_on_trial(on_trial, "on_trial")
    Limits.of(read_settings({**limits, "objectives": objectives, "direction": direction}))
    names["fidelity"] = fidelity
    given |= {"objectives": objectives, "direction": direction}
    with Study(space, **names, **given, enqueue=enqueue, warm_start=warm_start) as opened:
        opened.run(objective, **limits, progress=progress, on_trial=on_trial)
    return opened


@contextmanager
def _ending_unguarded(module: str) -> Iterator[None]:
    """End the program in one line if it is the study file itself, and starts its study again when that is imported."""
    try:
        study_file.refuse_nested(module)
        yield
    except NestedStart as error:
        # The import of this file within that of another one, or within a trial, fails by itself.
        if study_file.WITHIN in os.environ or not study_file.is_program(module):
            raise
        sys.stderr.write(f"shadho_celery: {error}\n")
        raise SystemExit(error.exit_code) from None


def _source(module: str, given: Any, resume: bool) -> str | Path | Source | None:
    """Return a warm start as a session takes it."""
    refuse_if_resumed(given, resume=resume)
    if given is None or isinstance(given, (str, Path)):
        return given
    file = study_file.load(module)
    return of_object(given, compile_space(file.space), file.settings.least_budget)


def _module_of(objective: Objective, space: object) -> str:
    """Return the module that has this objective and this space, so that workers can import them."""
    name = getattr(objective, "__module__", None)
    found = vars(sys.modules[name]) if isinstance(name, str) and name in sys.modules else {}
    if name == "__main__" or found.get("objective") is not objective or found.get("SPACE") is not space:
        raise UsageError(
            "workers are processes of their own, which import what they run: put the function, as `objective`, and the "
            "space, as `SPACE`, into a module, and pass its name in place of both"
        )
    return str(name)


def _run_on_workers(
    module: str,
    given: Mapping[str, object],
    names: Mapping[str, Any],
    *,
    workers: Mapping[str, int],
    urls: Mapping[str, str | None],
    silent: bool,
) -> StudyResults:
    """Run a study file to its end, on embedded workers or on a fleet."""
    # None of it is needed by a search in this process.
    from shadho_celery.cli import connection_options
    from shadho_celery.cli.session import STOPPED, Options, Session
    from shadho_celery.transport.urls import prefer_own

    if threading.current_thread() is not threading.main_thread():
        raise UsageError("a study on workers runs in the main thread, which gets Ctrl-C; run it there, or by itself")
    found = {name: url for name, url in urls.items() if url}
    before = {name: os.environ.get(name) for name in urls}
    try:
        prefer_own()
        os.environ.update(found)
        is_fleet = connection_options.is_fleet(found)
        if is_fleet and workers:
            raise UsageError("workers are for this machine alone; on a fleet start them by hand, and leave out workers")
        options = Options(
            study=module,
            given=given,
            workers=workers,
            fleet=is_fleet,
            silent=silent,
            **names,
        )
        file = study_file.load(module)
        with told(Surface.WORKERS, {*file.stated}.difference(given)), Session(options, file) as session:
            code = session.search()
        if code == STOPPED[signal.SIGTERM]:
            # It is meant for the whole program; Ctrl-C for the search alone.
            raise SystemExit(code)
        results = session.results
        if any(results.counts.get(state) for state in COUNTED) and (why := results.why_no_best()) is not None:
            warn(why)
        return results
    finally:
        # The addresses, those of embedded servers too, are those of this run alone.
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


def _slots(workers: object) -> Mapping[str, int]:
    """Return the slots by class. Raises UsageError for what is none."""
    if workers is not None and not isinstance(workers, Mapping):
        raise UsageError(f'workers are {short(workers, 60)}; give slots by class, such as {{"cpu": 4}}')
    for name, slots in (workers or {}).items():
        is_count = isinstance(slots, int) and not isinstance(slots, bool) and 0 < slots < 10**9
        if not (isinstance(name, str) and re.match(CLASS_NAME, name) and is_count):
            raise UsageError(f'workers: {short({name: slots}, 60)} is no class with its slots; such as {{"cpu": 4}}')
    return workers or {}
