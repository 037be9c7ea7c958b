"""Command that runs a study: ``shadho-celery run tasks.svm``.

Without the URL of a broker or Redis, everything runs on this machine (embedded mode). Otherwise trials run on the
workers that use these servers (a fleet).
"""

from __future__ import annotations

from shadho_celery.cli.interrupts import end_quietly, ending_quickly

if __name__ == "__main__":
    end_quietly()

# The top level has only the imports that --help needs, because the modules of the scheduler take seconds to import.
import os
import re
import shlex
import sys
from collections.abc import Mapping
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import click

from shadho_celery.cli import shared_options
from shadho_celery.cli.control import points
from shadho_celery.cli.interrupts import Output
from shadho_celery.cli.messages import say
from shadho_celery.cli.shared_options import refusal
from shadho_celery.core.checks import short
from shadho_celery.core.hardware import CLASS_NAME, DEFAULT_CLASSES
from shadho_celery.core.names import FORMS
from shadho_celery.core.settings import KEPT
from shadho_celery.core.system import without_collections
from shadho_celery.errors import UsageError
from shadho_celery.fleet import urls
from shadho_celery.metrics.server import MetricsServer
from shadho_celery.session.workers import start_early


def _workers(_: object, __: object, values: tuple[str, ...]) -> dict[str, int]:
    """Return the number of slots by class, from a text such as ``cpu=4`` or ``gpu_large=1,cpu=2``."""
    slots: dict[str, int] = {}
    for part in filter(str.strip, ",".join(values).split(",")):
        name, _, count = part.strip().partition("=")
        # The number of digits is limited, because Python refuses to convert thousands of digits.
        if not (re.match(CLASS_NAME, name) and count.isdecimal() and len(count) < 10 and int(count)):
            raise refusal(UsageError(f"--workers {short(part, 60)} is not of the form CLASS=SLOTS, such as cpu=4"))
        slots[name] = int(count)
    return slots


@shared_options.refusals()
def _points(_: object, __: object, path: Path | None) -> list[object]:
    """Return the known points (params to run first) in the file of --enqueue, or an empty list without a file."""
    return [] if path is None else points(path)


class _Run(shared_options.Command):
    """The command `run`, whose words after ``--`` are a command that its trials run."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        place = args.index("--") if "--" in args else len(args)
        ctx.meta["command"] = args[place + 1 :] if place < len(args) else None
        return super().parse_args(ctx, args[:place])


@shared_options.command(
    "run tasks.svm                          # everything on this machine",
    "run tasks.svm --trials 40 --seed 0",
    "run tasks.svm --workers cpu=4          # four trials at a time",
    "run tasks.svm --demo                   # three simulated classes on this machine",
    "run tasks.svm --dashboard              # with a web page that follows it",
    "run tasks.svm --track mlflow           # with MLflow, which shows the ended trials",
    "run tasks.svm --resume --trials 80     # continue the latest study",
    "run tasks.svm --dry-run 5              # what five trials would get, and no more",
    "run tasks.svm --warm-start svm-3f2a    # learn from an earlier study",
    "run study.toml                         # a command and its space in TOML",
    "run -- python train.py --lr {lr:log:1e-4:1e-1} --opt {opt:choice:adam:sgd}",
    f"{urls.BROKER}=amqp://127.0.0.1 {urls.REDIS}=redis://127.0.0.1/0 \\\n"
    "      shadho-celery run tasks.svm                      # on the fleet",
    cls=_Run,
)
@click.argument("study_module", metavar="STUDY_FILE | -- COMMAND", required=False)
@shared_options.study_options
@click.option(
    "--loss", "loss_name", metavar="TEXT", help="Name before the loss in the output of COMMAND, such as val_loss."
)
@click.option("--seed", type=click.IntRange(min=0), help="Makes the search repeatable.  [default: drawn]")
@click.option("--study", "name", metavar="NAME", help="Name of the study.  [default: short, such as svm-3f2a]")
@click.option(
    "--resume",
    is_flag=False,
    flag_value="",
    metavar="[NAME]",
    help="Resume the study with this name, by default the latest study of the study file. Options that are not given "
    "are those of its earlier runs, except --workers.",
)
@click.option(
    "--retry-failed",
    is_flag=True,
    help="With --resume: first run the params of failed trials again, as after a fix, also beyond the limit on trials.",
)
@click.option(
    "--dry-run",
    type=click.IntRange(1, 1000),
    metavar="N",
    help="Print what the objective would get in the first N trials, one a line. Nothing is started or recorded.",
)
@click.option("--resume-if-exists", is_flag=True, help="Resume the study named by --study, or begin it the first time.")
@shared_options.store_option
@click.option(
    "--workers",
    multiple=True,
    callback=_workers,
    metavar="CLASS=SLOTS",
    help="Workers on this machine; may be repeated.  [default: a class for each kind of GPU, and the cores as "
    "class cpu]",
)
@click.option(
    "--class-spec",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Classes of the fleet that need no live worker, with slots and start-up seconds. The study starts without "
    "them and announces how many slots it wants; shadho-celery scale starts workers.",
)
@click.option("--demo", is_flag=True, help=f"Simulate the classes {', '.join(DEFAULT_CLASSES)} here, one slot each.")
@click.option(
    "--code",
    type=click.Choice(["check", "ship"]),
    default="check",
    show_default=True,
    help="check: workers run their own copies of the study's files, if they are the same. ship: workers get "
    "these files, if they accept code and the fleet has a signing key.",
)
@click.option(
    "--show-output",
    is_flag=True,
    help="Print the output of the trials. Each line begins with the number of its trial; on this machine only.",
)
@click.option(
    "--enqueue",
    "points",
    type=click.Path(path_type=Path),
    callback=_points,
    metavar="FILE",
    help='File of known points to run first: one JSON object per line, such as {"rate": 0.1}, or a JSON list. A choice '
    "is given by the index or the name of its option. The sampler proposes missing labels.",
)
@click.option(
    "--warm-start",
    metavar="SOURCE",
    help="Finished trials from which a new study learns; they are not counted as its own. A study of the store, such "
    "as svm-3f2a, of another store, such as sqlite:///old.db#svm, or a CSV file, such as trials.csv of shadho-celery "
    "export, or one with a column for each label and one for the loss that the objective returns, named loss or as "
    "the objective. Trials that do not fit are left out with a message.",
)
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Print the log of the workers. Each line begins with its class; on this machine only.",
)
@click.option("--dashboard", is_flag=True, help="Show the study on a web page of this machine while it runs.")
@shared_options.metrics_options
@click.option("-q", "--quiet", "silent", is_flag=True, help="Show no progress, only warnings and the result.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else on standard output.")
@click.option("--local", is_flag=True, help="Run on this machine, even if the environment names a broker.")
@shared_options.control_option
@shared_options.fleet_options
@shared_options.refusals()
def main(study_module: str | None, resume: str | None, local: bool, **given: Any) -> None:
    """Run the study in STUDY_FILE: a module with SPACE and objective, such as tasks.svm or my_study.py.

    It may also be a file in TOML, such as study.toml. Without a file, run COMMAND with the values of a trial in place
    of each {LABEL:DOMAIN}.

    It runs on this machine unless a broker or Redis is named, else on their fleet. Ctrl-C once lets running trials
    finish, twice stops at once; --resume continues in both cases.
    """
    Output.is_optional = True
    words, loss = click.get_current_context().meta["command"], given.pop("loss_name")
    if words is not None and study_module is not None:
        raise UsageError(
            f"a command after -- is a study of its own; leave out {short(study_module, 60)}, or the command"
        )
    if words is None and loss is not None:
        raise UsageError("--loss is for a command after --; in a study file, set loss beside command")
    if words is None and study_module is None:
        taken = (
            f"--resume has taken {short(resume, 60)} as the name of a study; write run {resume} --resume for its "
            "latest study, or shadho-celery resume NAME; a command is given again: run --resume NAME -- COMMAND"
        )
        raise click.UsageError(taken if resume else "Missing argument 'STUDY_FILE'.", click.get_current_context())
    connection = ("broker", "redis", "url_file", "signing_key_file")
    options = [given.pop(name) for name in connection]
    if local and any(options[:3]):
        raise UsageError("--local is for this machine alone; leave out --broker, --redis and --url-file, or --local")
    found = shared_options.environment(*options)
    is_fleet = not local and urls.is_fleet(found)
    given["broker_from"] = shared_options.origin(found)
    os.environ.update(found)
    _refuse_misplaced({**given, "resumes": resume is not None or given["resume_if_exists"]}, is_fleet)
    if words is not None:
        from shadho_celery.objective.toml_study import write_command  # imports msgspec, which --help does not need

        study_module = write_command(words, loss)
        if is_fleet and given["code"] != "ship":
            raise UsageError(
                "the workers of a fleet take a command only from a study file on their machine; copy "
                f"{study_module} to study.toml, start them with --import study.toml, and run that; or use --code ship"
            )
    # Copied now, because the run later adds the URLs of its own servers to the environment.
    given["dashboard"] = dict(os.environ) if given["dashboard"] else None
    given["ship"] = given.pop("code") == "ship"
    if given["workers"] and given["demo"]:
        raise UsageError("--demo names the classes itself; leave out either --demo or --workers")
    say(f"shadho_celery: reading {study_module} ...", err=True)
    port, host = given.pop("metrics_port"), given.pop("metrics_host")
    given["metrics"] = None if port is None else MetricsServer(port, host)
    given["given"] = {name: value for name in KEPT if (value := given.pop(name)) is not None}
    given["name"] = resume or given["name"]
    if_exists = given.pop("resume_if_exists") and "if-exists"
    given |= {"resume": resume is not None or if_exists, "fleet": is_fleet}
    sys.exit(_start(str(study_module), given))


def _refuse_misplaced(given: Mapping[str, Any], is_fleet: bool) -> None:
    """Raise UsageError for an option that does not apply: on a fleet, in embedded mode, or to a new or resumed one."""
    if is_fleet and (given["workers"] or given["demo"]):
        option = "--workers" if given["workers"] else "--demo"
        raise UsageError(f"{option} is for embedded mode; on a fleet start workers with celery -A shadho_celery worker")
    if given["retry_failed"] and not given["resumes"]:
        raise UsageError("--retry-failed is for --resume: a new study has no failed trials")
    if given["dry_run"] and (given["resumes"] or given["warm_start"]):
        raise UsageError("--dry-run shows a new study's first trials; leave out --resume and --warm-start")
    if given["code"] == "ship" and not is_fleet:
        raise UsageError("--code ship is for a fleet; embedded workers read the same files as this command")
    if given["class_spec"] is not None and not is_fleet:
        raise UsageError("--class-spec is for a fleet; name one by --broker and --redis, or give --workers")
    if is_fleet and given["show_output"]:
        raise UsageError("--show-output is for embedded mode; on a fleet: shadho-celery logs STUDY TRIAL --follow")
    if is_fleet and given["verbose"]:
        raise UsageError("--verbose is for embedded mode; on a fleet give -v to shadho-celery worker")


def _start(study: str, given: dict[str, Any]) -> int:
    """Run the study. If it is new and embedded, start its workers first: they start while slow modules are imported."""
    if number := given.pop("dry_run"):
        from shadho_celery.cli.run import RunOptions, dry_run

        return dry_run(RunOptions(study=study, **given), number)
    early = None
    if not (given["resume"] or given["fleet"]):
        secret_urls = [url for url in (given["store"], given["warm_start"]) if url]
        early = start_early(study, given["given"], given["workers"], is_demo=given["demo"], secret_urls=secret_urls)
    with nullcontext() if early is None else closing(early):
        with without_collections():
            # Imported here, where few calls are nested. In deeply nested calls, numpy's import takes three times as
            # long, because CPython may allocate a part of its stack at each call.
            import numpy  # noqa: F401

            from shadho_celery.cli.run import RunOptions, run_study

        return run_study(RunOptions(study=study, early=early, **given))


@shared_options.command(
    "resume svm-3f2a",
    "resume svm --trials 80",
    context_settings={"ignore_unknown_options": True},
)
@shared_options.study_argument
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@shared_options.store_option
def resume(name: str, options: tuple[str, ...], store: str) -> None:
    """Continue STUDY, ended or interrupted, in the folder of its study file; OPTIONS are those of run.

    A study that has reached its limit needs a new one, such as --trials 80.
    """
    from shadho_celery.study.open import check_continues  # imports numpy and SQLAlchemy: not for --help

    with shared_options.opened(store, name) as study:
        check_continues(study.name, is_simulated=study.is_simulated)
        module, found = shared_options.file_of(study), study.name
    if module.endswith(tuple(FORMS)):
        from shadho_celery.objective.toml_study import resume_words  # imports msgspec: not for --help

        again = shlex.join(resume_words(module, found))
        raise UsageError(f"study {found!r} runs a command, which is taken from your own file: {again}")
    # The name follows after =, because it may begin with a dash.
    words = [module, f"--resume={found}", f"--store={store}", *options]
    main.main(words, prog_name="shadho-celery run", standalone_mode=False)


if __name__ == "__main__":
    with ending_quickly():
        main(prog_name="shadho-celery run")
