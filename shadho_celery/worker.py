"""Command that starts the worker for this machine's class: ``python -m shadho_celery.worker``.

It is the same as ``celery -A shadho_celery worker -Q CLASS`` with the class that is detected for this machine.
"""

from __future__ import annotations

from shadho_celery.cli.interrupts import end_quietly

if __name__ == "__main__":
    end_quietly()

import os
from typing import NoReturn

import click

from shadho_celery.cli import shared_options
from shadho_celery.cli.command import Command, Duration
from shadho_celery.cli.each_kind import Workers, workers_of
from shadho_celery.cli.interrupts import Output
from shadho_celery.cli.messages import say
from shadho_celery.cli.shared_options import metrics_options
from shadho_celery.core import hardware
from shadho_celery.core.checks import short
from shadho_celery.core.units import counted
from shadho_celery.errors import UsageError
from shadho_celery.metrics import server
from shadho_celery.node import stay
from shadho_celery.objective.study_file import check_modules, preloaded
from shadho_celery.runner.starting import ForkServers

EXAMPLES = """
\b
Examples:
  python -m shadho_celery.worker                           # the machine's own class; a worker for each kind of GPU
  python -m shadho_celery.worker --class cpu --slots 4     # four trials at a time, as class cpu
  python -m shadho_celery.worker --slots-per-gpu auto      # small trials share a GPU
  python -m shadho_celery.worker --import my_study         # for my_study's objective
  python -m shadho_celery.worker --for 4h --grace 2m       # on a machine that is taken away after four hours
  python -m shadho_celery.worker --price 2.40              # a slot costs 2.40 an hour; reports then tell the money
  python -m shadho_celery.worker --url-file ~/fleet.urls   # broker and Redis from a file
  python -m shadho_celery.worker --signing-key-file ~/shadho.key   # only for trials signed with that key
  python -m shadho_celery.worker --signing-key-file ~/shadho.key --accept-code   # also for code signed with it
"""


@click.command(cls=Command, epilog=EXAMPLES)
@click.option("--class", "compute_class", metavar="NAME", help="Compute class to serve.  [default: detected]")
@click.option("--slots", type=click.IntRange(min=1), help="Trials at a time.  [default: one per GPU, else per core]")
@click.option(
    "--slots-per-gpu",
    metavar="N|auto",
    help="Trials at a time on each GPU. With auto, trials share a GPU as far as the GPU memory fits that similar ones "
    "have taken; a trial of unknown size is alone.  [default: 1; env: SHADHO_SLOTS_PER_GPU]",
)
@click.option("--import", "imports", multiple=True, metavar="MODULE", help="Study file to run; may be repeated.")
@click.option(
    "--accept-code",
    is_flag=True,
    help="Run the code that a study ships (--code ship), signed with the fleet's key, without its files here.",
)
@click.option(
    "--for",
    "seconds",
    type=Duration(),
    metavar="DURATION",
    help="End after this time, such as 4h; take only trials that are predicted to end in time.  [env: SHADHO_FOR]",
)
@click.option(
    "--idle-exit",
    "idle",
    type=Duration(),
    metavar="DURATION",
    help="End after this time without a trial, such as 10m.  [env: SHADHO_IDLE_EXIT]",
)
@click.option(
    "--grace",
    type=Duration(),
    metavar="DURATION",
    help="At SIGTERM, tell running trials to write a checkpoint, and give them back after this time at most; without "
    "it they finish first.  [env: SHADHO_GRACE]",
)
@click.option(
    "--preempt-signal",
    metavar="NAME",
    help="Do so at this signal too, such as USR1; the grace is then 30s by default.  [env: SHADHO_PREEMPT_SIGNAL]",
)
@click.option("--price", metavar="MONEY", help="Money that a slot costs an hour, for reports and --max-cost.")
@metrics_options
@click.option("--loglevel", default="INFO", show_default=True, help="Level of the worker's log.")
@click.option("-v", "--verbose", is_flag=True, help="The same as --loglevel DEBUG.")
@shared_options.control_option
@shared_options.fleet_options
@shared_options.refusals()
def main(
    *,
    compute_class: str | None,
    slots: int | None,
    slots_per_gpu: str | None,
    imports: tuple[str, ...],
    accept_code: bool,
    seconds: float | None,
    idle: float | None,
    grace: float | None,
    preempt_signal: str | None,
    price: str | None,
    metrics_port: int | None,
    metrics_host: str | None,
    loglevel: str,
    verbose: bool,
    unsigned_control: bool,
    **connection: str | None,
) -> None:
    """Serve trials on this machine until Ctrl-C. Running trials finish first; a second Ctrl-C gives them back.

    Without --class, a machine with GPUs of several kinds gets a worker for each kind, and they end together.
    """
    Output.is_optional = True
    os.environ.update(shared_options.environment(**connection) | shared_options.allowed(unsigned_control))
    modules = [name for each in imports for name in each.split(",") if name]
    check_modules(modules)
    if compute_class is not None:
        hardware.check_class_name(compute_class, "--class")
    durations = {stay.FOR: seconds, stay.IDLE: idle, stay.GRACE: grace}
    given = {
        "SHADHO_IMPORTS": ",".join(modules) if imports else None,
        "SHADHO_ACCEPT_CODE": "1" if accept_code else None,
        **{variable: None if value is None else f"{value:f}" for variable, value in durations.items()},
        stay.SIGNAL: preempt_signal or None,
        hardware.SLOTS_PER_GPU: slots_per_gpu,
        "SHADHO_PRICE": price,
        server.PORT: metrics_port,
        server.HOST: metrics_host,
    }
    os.environ.update({variable: str(value) for variable, value in given.items() if value is not None})
    # What the environment holds is checked, too.
    stay.Stay.configured()
    hardware.slots_per_gpu()
    hardware.price()
    _serve(compute_class, slots, "DEBUG" if verbose else loglevel)


def _serve(compute_class: str | None, slots: int | None, level: str) -> NoReturn:
    """Run the worker of this class, or one for each kind of GPU of this machine, as the environment says."""
    machine = hardware.detect()
    each = workers_of(machine) if compute_class is None else []
    name = compute_class or (" and ".join(name for name, _ in each) if len(each) > 1 else machine.compute_class)
    gpus = hardware.gpus_text(machine.cards) or "no GPU"
    if not machine.cards and (visible := os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()) not in {"", "-1"}:
        gpus += f" (CUDA_VISIBLE_DEVICES is {short(visible, 60)}, and the driver shows no such GPU)"
    say(f"{machine.host}: {counted(machine.cores, 'core')}, {gpus}; serving class {name}", err=True)
    if len(each) > 1:
        if slots:
            raise UsageError("--slots is for one worker, and this machine gets one a kind of GPU; give --slots-per-gpu")
        raise SystemExit(Workers(["--loglevel", level]).serve(each))
    # The imports of the prepared process take as long as those of Celery.
    fork_servers = ForkServers(preloaded(os.environ.get("SHADHO_IMPORTS", "").split(",")))
    fork_servers.prepare()
    # Imported late, because the application reads the environment, which is complete only now.
    from shadho_celery.celery import app

    app.shadho_fork_servers = fork_servers
    arguments = ["worker", "-Q", name, "-l", level, "--without-gossip", "--without-mingle"]
    app.worker_main(arguments + (["-c", str(slots)] if slots else []))
    # Celery returns no exit code.
    raise SystemExit(app.shadho_exit_code)


if __name__ == "__main__":
    main()
