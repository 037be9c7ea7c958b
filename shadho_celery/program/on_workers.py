"""Search on workers, either those of this machine or those of a fleet, with a study file or a function by value."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from shadho_celery.cli import tables
from shadho_celery.cli.messages import say
from shadho_celery.cli.run import view_of
from shadho_celery.core.checks import check_whole, short
from shadho_celery.core.hardware import check_class_name, detect
from shadho_celery.core.system import overridden
from shadho_celery.core.trial import COUNTED
from shadho_celery.errors import NestedStart, UsageError
from shadho_celery.fleet import urls
from shadho_celery.fleet.signing import Signer
from shadho_celery.objective import by_value, study_file
from shadho_celery.objective.call import check_objective
from shadho_celery.objective.study_file import StudyFile
from shadho_celery.program.interrupts import warn
from shadho_celery.program.recorded import ShownStudy, is_notebook, summary
from shadho_celery.session.session import Options, Session
from shadho_celery.session.workers import STOPPED


def search_on_workers(
    objective: object,
    space: object,
    settings: Mapping[str, Any],
    opened: Mapping[str, Any],
    *,
    workers: object,
    broker: str | None,
    redis: str | None,
) -> ShownStudy:
    """Run a study on workers to its end. The arguments are those of `minimize`; `opened` are fields of `Options`."""
    module = objective if isinstance(objective, str) else _module_of(objective, space)
    given = _given(settings)
    # A study file must contain the following settings itself.
    if space is not None and isinstance(objective, str):
        raise UsageError("a study file has its own SPACE; leave out space")
    which = ["a sampler of your own"] * callable(given.get("sampler"))
    which += [name for name in ("fidelity", "keep", "objectives", "where") if name in given]
    if which and module:
        raise UsageError(f"{which[-1]} cannot be passed to workers' studies; set STUDY in the study file")
    with _ending_unguarded(module):
        slots, found = _slots(workers), _given({urls.BROKER: broker, urls.OWN_BROKER: broker, urls.REDIS: redis})
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "a study on workers runs in the main thread, which gets Ctrl-C; run it there, or by itself"
            )
        with _environment(found):
            is_fleet = urls.is_fleet(found)
            if is_fleet and slots:
                raise UsageError(
                    "workers are for this machine alone; on a fleet start them by hand, and leave out workers"
                )
            opened = {**opened, "points": [*opened["points"]]}
            opened |= {"workers": slots, "fleet": is_fleet, "ship": is_fleet and opened.get("ship", not module)}
            with _read(module, objective, space, is_fleet=is_fleet) as file:
                return _run(Options(study=file.module, given=given, **opened), file)


def _read(module: str, objective: Any, space: object, *, is_fleet: bool) -> AbstractContextManager[StudyFile]:
    """Return the study of a module, or if that is "" of a function by value, for use in a `with` block."""
    if module:
        return nullcontext(study_file.load(module))
    check_objective(objective, "the objective")
    if not is_fleet:
        return by_value.kept(objective, space)
    if not Signer.configured().fingerprint:
        raise UsageError(
            "a function is sent to the workers of a fleet only signed; set SHADHO_SIGNING_KEY_FILE here and there, or "
            "give the name of a study file"
        )
    return nullcontext(by_value.sent(objective, space))


def _run(options: Options, file: StudyFile) -> ShownStudy:
    # A notebook shows only a summary at the end, as it does for a search in its own process.
    is_summed_up = is_notebook() and not options.silent
    options = replace(options, silent=options.silent or is_summed_up)
    with Session(options, file, partial(say, err=True)) as session:
        code = session.run(view_of(session, tables.make_console()))
        for line in session.watch.last_news(is_fleet=options.fleet):
            say(line, err=True)
        if is_summed_up:
            say(summary(session.scheduler), err=True)
    if code == STOPPED[signal.SIGTERM]:
        # SIGTERM is meant for the whole program, but Ctrl-C only for the search.
        raise SystemExit(code)
    opened = session.opened
    results = ShownStudy(opened.store, opened.study.record, opened.space)
    if session.scheduler.hopeless:
        warn(f"stopped: {session.scheduler.hopeless} (max_failures)")
    elif any(results.counts.get(state) for state in COUNTED) and (why := results.why_no_best()) is not None:
        warn(why)
    return results


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


@contextmanager
def _ending_unguarded(module: str) -> Iterator[None]:
    """On NestedStart, print one line and end the program, if the program is the study file and has no main guard.

    Such a file would start its study again whenever it is imported.
    """
    try:
        study_file.refuse_nested(module)
        yield
    except NestedStart as error:
        # Within the import of another study file, or within a trial, raise the error, which ends that import or trial.
        if study_file.WITHIN in os.environ or not study_file.is_program(module):
            raise
        say(f"shadho_celery: {error}", err=True)
        raise SystemExit(error.exit_code) from None


@contextmanager
def _environment(found: Mapping[str, str]) -> Iterator[None]:
    """Set the environment variables with the URLs of servers for a `with` block, and restore them afterwards."""
    with overridden(dict.fromkeys([*urls.DEFAULTS, urls.OWN_BROKER, urls.IGNORE])):
        urls.prefer_own()
        os.environ.update(found)
        yield


def _module_of(objective: object, space: object) -> str:
    """Return the name of the module that defines this objective and this space. Workers import it.

    Return "" if there is none: the function is then sent by value.
    """
    name = getattr(objective, "__module__", None)
    found = vars(sys.modules[name]) if isinstance(name, str) and name in sys.modules else {}
    is_module = name != "__main__" and found.get("objective") is objective and found.get("SPACE", objective) is space
    return str(name) if is_module else ""


def _slots(workers: object) -> Mapping[str, int]:
    """Return the number of slots by class. A single number means slots of this machine's class.

    Raises UsageError unless `workers` is a whole number or maps classes to whole numbers.
    """
    if isinstance(workers, int):
        workers = {detect().compute_class: workers}
    if workers is not None and not isinstance(workers, Mapping):
        raise UsageError(f'workers are {short(workers, 60)}; give a number, or slots by class, such as {{"cpu": 4}}')
    for name, slots in (workers or {}).items():
        check_class_name(name, "workers")
        check_whole(1, 10**9, **{f"workers: {name}": slots})
    return workers or {}
