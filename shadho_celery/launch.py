"""Runs a study: ``python -m shadho_celery.launch tasks.svm``.

Without a server named, everything runs on this machine (embedded mode); with one, on the fleet that it serves.
"""

from __future__ import annotations

import io
import math
import os
import sys
from contextlib import nullcontext, redirect_stdout
from typing import Any

import click

from shadho_celery.cli import connection_options
from shadho_celery.cli.options import Options
from shadho_celery.cli.session import DEFAULT_TRIALS, Session
from shadho_celery.errors import ShadhoError, UsageError
from shadho_celery.objective import study_file
from shadho_celery.placement.policies import POLICIES
from shadho_celery.placement.shares import SHARES
from shadho_celery.samplers import SAMPLERS
from shadho_celery.scheduler.build import DEFAULT_SETTINGS
from shadho_celery.store.sql import DEFAULT_STORE
from shadho_celery.transport import urls

EXAMPLES = f"""
\b
Examples:
  python -m shadho_celery.launch tasks.svm                          # everything on this machine
  python -m shadho_celery.launch tasks.svm --trials 40 --seed 0
  python -m shadho_celery.launch tasks.svm --workers cpu=4          # four trials at a time
  python -m shadho_celery.launch tasks.svm --resume --trials 80     # carry the latest study on
  {urls.BROKER}=amqp://127.0.0.1 {urls.REDIS}=redis://127.0.0.1/0 \\
      python -m shadho_celery.launch tasks.svm                      # on the fleet
"""


def _workers(_: object, __: object, values: tuple[str, ...]) -> dict[str, int]:
    """``cpu=4`` or ``gpu_large=1,cpu=2`` as slots by class."""
    slots: dict[str, int] = {}
    for part in (part for value in values for part in value.split(",") if part.strip()):
        name, separator, count = part.strip().partition("=")
        if not separator or not name or not count.isdecimal() or int(count) < 1:
            raise connection_options.refusal(
                UsageError(f"--workers {part!r} is not of the form CLASS=SLOTS, such as cpu=4")
            )
        slots[name] = int(count)
    return slots


def _finite(_: object, parameter: click.Parameter, value: float | None) -> float | None:
    """No number that JSON cannot carry."""
    if value is not None and not math.isfinite(value):
        raise connection_options.refusal(UsageError(f"{parameter.opts[0]} is to be a number, not {value}"))
    return value


@click.command(epilog=EXAMPLES)
@click.argument("study_module", metavar="STUDY_FILE")
@click.option("--trials", type=click.IntRange(min=1), help=f"Trials of the whole study.  [default: {DEFAULT_TRIALS}]")
@click.option("--seconds", type=float, callback=_finite, help="Send nothing new after this many seconds.")
@click.option("--target", type=float, callback=_finite, help="Stop at this loss or less.")
@click.option("--seed", type=click.IntRange(min=0), help="Makes the search repeatable.  [default: drawn]")
@click.option(
    "--sampler", type=click.Choice([*SAMPLERS]), help=f"Proposes params.  [default: {DEFAULT_SETTINGS.sampler}]"
)
@click.option(
    "--policy", type=click.Choice(POLICIES), help=f"Places trials on classes.  [default: {DEFAULT_SETTINGS.policy}]"
)
@click.option(
    "--shares",
    type=click.Choice(SHARES),
    help=f"Trials a subspace gets: evenly, or more where the best loss may be beaten.  [default: {DEFAULT_SETTINGS.shares}]",
)
@click.option(
    "--speculation/--no-speculation",
    "speculate",
    default=None,
    help="Start a late trial once more where a slot of another machine idles; the first result counts.  [default: do]",
)
@click.option("--study", "name", metavar="NAME", help="Name of the study.  [default: module and time]")
@click.option(
    "--resume",
    is_flag=False,
    flag_value="",
    metavar="[NAME]",
    help="Carry a study on: the one of that name, else the study file's latest. Options that are not given are those "
    "of its earlier runs.",
)
@click.option("--store", default=DEFAULT_STORE, show_default=True, help="Database URL that keeps the trials.")
@click.option(
    "--workers", multiple=True, callback=_workers, metavar="CLASS=SLOTS", help="Workers to embed; may be repeated."
)
@click.option(
    "--weight",
    type=click.FloatRange(min=0, min_open=True),
    callback=_finite,
    help="Part of the slots beside other studies.  [default: 1]",
)
@click.option(
    "--trial-timeout",
    type=click.FloatRange(min=0, min_open=True),
    callback=_finite,
    metavar="SECONDS",
    help="Time of one trial: then its objective gets a TrialTimeout, and is killed five seconds later.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else on standard output.")
@connection_options.options
def main(study_module: str, resume: str | None, **given: Any) -> None:
    """Run the study in STUDY_FILE: a module with SPACE and objective, such as tasks.svm or my_study.py.

    On this machine where no broker or Redis is named, else on the fleet that they serve. Ctrl-C once finishes what
    runs, twice stops at once; either way --resume carries on.
    """
    for stream in (sys.stdout, sys.stderr):
        # What a trial says may hold anything, and a terminal's encoding little.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        found = connection_options.environment(
            *(given.pop(name) for name in ("broker", "redis", "url_file", "signing_key_file"))
        )
        os.environ.update(found)
        given["name"] = resume or given["name"]
        options = Options(
            study=study_module, resume=resume is not None, fleet=connection_options.is_fleet(found), **given
        )
        if options.fleet and options.workers:
            raise UsageError(
                "--workers is for embedded mode; on a fleet start workers with celery -A shadho_celery worker"
            )
        sys.exit(run(options))
    except ShadhoError as error:
        raise connection_options.refusal(error) from None


def run(options: Options) -> int:
    """Run the study; the exit code. Raises ShadhoError."""
    # What a study file prints as it is imported is not the result.
    with redirect_stdout(sys.stderr) if options.as_json else nullcontext():
        file = study_file.load(options.study)
    with Session(options, file) as session:
        code = session.search()
        session.show_result()
    return code


if __name__ == "__main__":
    main()
