"""One run of a study from the command line, with its view and its printed report, and the dashboard beside it.

The dashboard (`run --dashboard`) is a separate process, which ends with the run.
"""

from __future__ import annotations

import gc
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
from rich.console import Console

from shadho_celery.cli import shared_options, tables
from shadho_celery.cli.live import Fleet, LiveView, PlainView, ShownOutput, WorkerLines
from shadho_celery.cli.messages import readable_warnings, say
from shadho_celery.core.checks import printable
from shadho_celery.errors import NoSuccessfulTrial, UsageError
from shadho_celery.fleet.redis import own_address
from shadho_celery.metrics.server import MetricsServer
from shadho_celery.objective import study_file
from shadho_celery.objective.command import FACTS, Command
from shadho_celery.results.report import report_of, run_of, state_at_rest
from shadho_celery.results.study import study_json
from shadho_celery.results.trial import Values
from shadho_celery.scheduler import known_points
from shadho_celery.session.opening import Opening
from shadho_celery.session.session import Options, Session, check_command, request_of
from shadho_celery.store.memory import database

#: seconds that the dashboard may take to end before it is killed
END_SECONDS = 5.0
#: beginning of the first line that the dashboard prints, before its URL
_SAID = "dashboard: "


@contextmanager
def dashboard_beside(store: str, environment: Mapping[str, str], say: Callable[[str], None]) -> Iterator[None]:
    """Run a dashboard for a store, and `say` its URL once. Raises UsageError if its packages are not installed.

    `environment` is the command's environment as it was before the run added the URLs of its own servers.
    """
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise UsageError('--dashboard needs the extra dashboard; in the checkout: pip install -e ".[dashboard]"')
    # The store is passed in a variable, because other users can see arguments, and the URL may have a password.
    process = subprocess.Popen(
        [sys.executable, "-m", "shadho_celery", "dashboard", "--port", "0", "--with-parent"],
        env={**environment, shared_options.STORE_VARIABLE: store},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Ctrl-C in the terminal must reach only the run, which then ends the dashboard.
        start_new_session=True,
    )
    reader = threading.Thread(target=_pass_on, args=(process, say), daemon=True)
    reader.start()
    try:
        yield
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        process.kill()
        process.wait()
        reader.join(END_SECONDS)


def _pass_on(process: subprocess.Popen[str], say: Callable[[str], None]) -> None:
    """Say the dashboard's URL or error. Read and drop its other lines, because it would block if its pipe were full."""
    is_said = False
    for line in process.stdout or ():
        if not is_said and line.startswith((_SAID, "Error")):
            is_said = True
            say(line.strip())


#: prints a line on standard error, because standard output is for results, which a script may read
say_beside = partial(say, err=True)


@dataclass(frozen=True, kw_only=True)
class RunOptions(Options):
    """Options of a run that only the command line has."""

    #: True if the output of embedded trials is to be printed
    show_output: bool = False
    #: True if the log lines of the embedded workers are to be printed
    verbose: bool = False
    as_json: bool = False
    #: environment of the dashboard beside the run; None without a dashboard
    dashboard: Mapping[str, str] | None = None
    #: server of the run's metrics; None if they are not served
    metrics: MetricsServer | None = None


def run_study(options: RunOptions) -> int:
    """Run the study and return the exit code. Raises ShadhoError."""
    study_file.refuse_nested(study_file.module_name(options.study))
    with readable_warnings():
        # Text that the study's code prints in this process must not be mixed with the JSON object.
        beside: AbstractContextManager[object] = redirect_stdout(sys.stderr) if options.as_json else nullcontext()
        with beside:
            file = study_file.load(options.study)
        # From now on, the garbage collector skips the objects of the libraries that the study file has imported.
        gc.freeze()
        console = tables.make_console(stderr=options.as_json)
        # `on_end` is called at the end of this block.
        shown = sys.stdout
        with beside, Session(options, file, say_beside) as session:
            shared_options.warn_of_password("--store", options.store, "PGPASSWORD or ~/.pgpass")
            view = view_of(session, console)
            if options.show_output:
                view.also.append(ShownOutput(session.study, view.note))
            if options.verbose and session.embedded is not None:
                view.also.append(WorkerLines(session.embedded.logs.items(), view.note))
            if options.metrics is not None:
                # Imported here, because most runs serve no metrics.
                from shadho_celery.metrics.run import collector

                options.metrics.serve(collector(session))
                workers = session.executor.workers
                workers.metrics = options.metrics.place(own_address(workers.servers.client))
                view.note(f"metrics: {options.metrics.url}")
            served = options.dashboard
            with nullcontext() if served is None else dashboard_beside(options.store, served, view.note):
                code = session.run(view)
            with redirect_stdout(shown):
                _show_result(session, options, console)
        return code


def dry_run(options: RunOptions, number: int) -> int:
    """Print what the first trials would get, and return the exit code. Raises ShadhoError."""
    with readable_warnings(), redirect_stdout(sys.stderr):
        # Text that the study's code prints must not be mixed with the values, as in a run.
        file = study_file.load(options.study)
        if file.space is None:
            raise UsageError(f"{file.module} has no SPACE, so its values are not known before a trial; run one trial")
        plan = Opening(request_of(options, file)).plan
        check_command(file, plan, is_fleet=options.fleet)
        seed = int(np.random.SeedSequence().generate_state(1)[0]) if options.seed is None else options.seed
        found = known_points.first(plan, options.points, seed, number)
        values = [*map(file.runnable(plan.space)[1], found)]
        if isinstance(file.objective, Command):
            for trial, value in enumerate(values):
                # The other facts are not known before the trial is sent, so their placeholders are printed unchanged.
                facts: Any = SimpleNamespace(**{name: f"{{{name}}}" for name in FACTS} | {"trial": trial})
                values[trial] = shlex.join(file.objective.arguments(value.by_label, facts))
    if plan.warning is not None:
        say_beside(f"Warning: {plan.warning}")
    if options.as_json:
        shared_options.print_json({"study_file": file.module, "values": values})
    for value in () if options.as_json else values:
        if isinstance(value, str):
            say(printable(value))
        else:
            shared_options.print_json(value)
    return 0


def view_of(session: Session, console: Console) -> LiveView | PlainView:
    """Return the view of a run: a live view in a terminal, otherwise a line every few seconds."""
    executor = session.executor
    fleet = Fleet(workers=lambda: executor.workers.announced, module=session.file.module, gangs=executor.gangs.seated)
    if console.is_terminal and not session.options.silent:
        return LiveView(session.scheduler, session.opened.space, console, fleet)
    return PlainView(session.scheduler, fleet)


def _show_result(session: Session, options: RunOptions, console: Console) -> None:
    """Print the report as tables or as a JSON object, and the reason if the study has ended early."""
    session.study.commit()
    store, study = database(session.opened.store), session.study
    # JSON has the values as they are in the store, so that later commands print the same JSON.
    values = Values(study.record, None if options.as_json else session.opened.space)
    subspaces = session.scheduler.subspaces if options.as_json else ()
    state = state_at_rest(study.record, store.steered(study.record.key), study.counted)
    report = report_of(study, store, values, subspaces, state=state)
    refused = session.executor.refused() + study.refused
    ended = {state: study.count(state) - before for state, before in session.counts_before.items()}
    run = run_of(study, time.monotonic() - session.began, ended, session.slots, refused)
    if options.as_json:
        shared_options.print_json(study_json(report, run))
    else:
        trials = tables.further_trials(session.plan.limits.trials, study.counted)
        where = session.file.module, study.name, store.safe_url
        resume = tables.resume_command(*where, trials, options.workers, ship=options.ship)
        tables.summary(report, console, resume, run)
        if forged := session.executor.channel.forged:
            say_beside(f"records in Redis refused, unsigned or malformed: {forged}")
    for line in (_ending(session), *session.watch.last_news(is_fleet=options.fleet)):
        if line:
            say_beside(line)
    if session.study.best is None and not session.scheduler.hopeless:
        say_beside(str(NoSuccessfulTrial()) if session.study.counted else "No trial has ended.")


def _ending(session: Session) -> str | None:
    """Return why a study has ended before its limit, and how to continue it. Return None if it reached its limit."""
    (why, of), resume = session.scheduler.ending, f"--resume {session.study.name}"
    more = {
        "hopeless": f"; fix it and go on with {resume}, or let it run on with --max-failures 0",
        "early_stop": f" (--early-stop); {resume} --early-stop {2 * (session.plan.limits.without_gain or 0)} goes on",
        "max_cost": f" (--max-cost); {resume} --max-cost {2 * session.scheduler.spent:.3g} goes on",
        "on_trial": f"; {resume} goes on",
        "sampler": "",
    }
    return f"{'stopped' if of == 'hopeless' else 'ended'}: {why}{more[of]}" if of in more else None
