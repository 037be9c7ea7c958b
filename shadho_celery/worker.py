"""Command that starts the workers of this machine: ``python -m shadho_celery.worker``.

It starts one worker for each kind of GPU, or a single worker on a machine without GPUs. A single worker is the same as
that of ``celery -A shadho_celery worker -Q CLASS``, where CLASS is the class detected for this machine.
"""

from __future__ import annotations

from shadho_celery.cli.interrupts import end_quietly

if __name__ == "__main__":
    end_quietly()

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import click

from shadho_celery.cli import shared_options
from shadho_celery.cli.interrupts import Output
from shadho_celery.cli.messages import say
from shadho_celery.cli.shared_options import variable_option
from shadho_celery.core import hardware
from shadho_celery.core.checks import short
from shadho_celery.core.files import read_text
from shadho_celery.core.hardware import Machine
from shadho_celery.core.system import HEARTBEAT_FILE
from shadho_celery.core.units import counted
from shadho_celery.errors import UsageError
from shadho_celery.metrics import server
from shadho_celery.node import stay
from shadho_celery.objective.study_file import check_modules, preloaded
from shadho_celery.runner.process_tree import PR_SET_PDEATHSIG, prctl
from shadho_celery.runner.starting import ForkServers

COMMAND = (sys.executable, "-m", "shadho_celery.worker")

#: seconds between two checks whether workers have ended
CHECK_SECONDS = 0.2


def workers_of(machine: Machine) -> list[tuple[str, dict[str, str]]]:
    """Return, for each kind of GPU, the compute class of its worker and the environment variables of its process.

    From the second worker on, the worker's number is added to the port of the metrics and to the name of the heartbeat
    file, because two workers cannot share them.
    """
    kinds = enumerate(machine.kinds())
    return [(own.compute_class, dict(_environment(number, own, machine))) for number, own in kinds]


def _environment(number: int, own: Machine, machine: Machine) -> Iterator[tuple[str, str]]:
    yield "CUDA_VISIBLE_DEVICES", own.visible
    if machine.is_limited:
        yield "SHADHO_CORES", str(max(1, machine.cores * len(own.cards) // len(machine.cards)))
    port, file = os.environ.get(server.PORT, ""), os.environ.get(HEARTBEAT_FILE)
    if number and port.isdecimal() and int(port):
        yield server.PORT, str(int(port) + number)
    if number and file:
        yield HEARTBEAT_FILE, f"{file}.{number}"


class Workers:
    """Runs the workers of one machine as child processes. A signal to this process is passed on to all of them."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """`arguments` are options of each worker."""
        self._arguments = arguments
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_ending = False

    def serve(self, each: Sequence[tuple[str, Mapping[str, str]]]) -> int:
        """Run a worker for each class and environment. Return 0, or the exit code of the first worker that failed.

        If a worker fails, all others end too, after their running trials. If a worker ends with exit code 0, for
        example because it was idle for too long, the others continue.
        """
        for number in {signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP, *stay.Stay.configured().signals}:
            signal.signal(number, self.pass_on)
        for name, environment in each:
            process = subprocess.Popen(
                [*COMMAND, "--class", name, *self._arguments],
                env={**os.environ, **environment},
                # Without its own session, a worker would get Ctrl-C twice: from the terminal and from `pass_on`. The
                # second Ctrl-C would end it at once.
                start_new_session=True,
                # If this process is killed, Linux sends SIGQUIT to the worker, which gives its trials back and ends at
                # once.
                preexec_fn=partial(prctl, PR_SET_PDEATHSIG, signal.SIGQUIT),  # noqa: PLW1509 -- this process has one thread
            )
            self._processes.append(process)
        code = 0
        while None in [process.poll() for process in self._processes]:
            code = code or self._failed()
            if code and not self._is_ending:
                say(f"a worker of this machine has ended with exit code {code}, so the others end too", err=True)
                self.pass_on(signal.SIGTERM)
            time.sleep(CHECK_SECONDS)
        return code or self._failed()

    def pass_on(self, number: int, _: object = None) -> None:
        """Send a signal to all workers. This is the handler of the signals that this process gets."""
        self._is_ending |= number != signal.SIGHUP
        for process in self._processes:
            process.send_signal(number)

    def _failed(self) -> int:
        """Return the exit code of the first worker that failed (128 + N after signal N, as in shells), or 0."""
        code = next((process.returncode for process in self._processes if process.returncode), 0)
        return 128 - code if code < 0 else code


@shared_options.command(
    "python -m shadho_celery.worker                           # the machine's own class; a worker for each kind of GPU",
    "python -m shadho_celery.worker --class cpu --slots 4     # four trials at a time, as class cpu",
    "python -m shadho_celery.worker --slots-per-gpu auto      # small trials share a GPU",
    "python -m shadho_celery.worker --import my_study         # for my_study's objective",
    "python -m shadho_celery.worker --for 4h --grace 2m       # on a machine that is taken away after four hours",
    "python -m shadho_celery.worker --price 2.40              # a slot costs 2.40 an hour; reports then tell the money",
    "python -m shadho_celery.worker --join -                  # for a fleet whose line (of fleet start) is pasted",
    "python -m shadho_celery.worker --url-file ~/fleet.urls   # broker and Redis from a file",
    "python -m shadho_celery.worker --signing-key-file ~/shadho.key   # only for trials signed with that key",
    "python -m shadho_celery.worker --signing-key-file ~/shadho.key --accept-code   # also for code signed with it",
)
@click.option("--class", "compute_class", metavar="NAME", help="Compute class to serve.  [default: detected]")
@click.option("--slots", type=click.IntRange(min=1), help="Trials at a time.  [default: one per GPU, else per core]")
@variable_option(
    hardware.SLOTS_PER_GPU,
    "--slots-per-gpu",
    metavar="N|auto",
    help="Trials at a time on each GPU. With auto, trials share a GPU as far as the GPU memory fits that similar ones "
    "have taken; a trial of unknown size is alone.  [default: 1; env: SHADHO_SLOTS_PER_GPU]",
)
@click.option(
    "--join",
    metavar="TEXT|FILE|-",
    help="Join the fleet whose fleet start has printed this text; the worker accepts its signed code. Other users can "
    "see the text for a moment, unless a file has it, or standard input (-).",
)
@click.option("--import", "imports", multiple=True, metavar="MODULE", help="Study file to run; may be repeated.")
@variable_option(
    "SHADHO_ACCEPT_CODE",
    "--accept-code",
    is_flag=True,
    help="Run the code that a study ships (--code ship), signed with the fleet's key, without its files here.",
)
@variable_option(
    stay.FOR,
    "--for",
    type=shared_options.Duration(),
    metavar="DURATION",
    help="End after this time, such as 4h; take only trials that are predicted to end in time.  [env: SHADHO_FOR]",
)
@variable_option(
    stay.IDLE,
    "--idle-exit",
    type=shared_options.Duration(),
    metavar="DURATION",
    help="End after this time without a trial, such as 10m.  [env: SHADHO_IDLE_EXIT]",
)
@variable_option(
    stay.GRACE,
    "--grace",
    type=shared_options.Duration(),
    metavar="DURATION",
    help="At SIGTERM, tell running trials to write a checkpoint, and give them back after this time at most; without "
    "it they finish first.  [env: SHADHO_GRACE]",
)
@variable_option(
    stay.SIGNAL,
    "--preempt-signal",
    metavar="NAME",
    help="Do so at this signal too, such as USR1; the grace is then 30s by default.  [env: SHADHO_PREEMPT_SIGNAL]",
)
@shared_options.price_option
@shared_options.metrics_options
@click.option("--loglevel", default="INFO", show_default=True, help="Level of the worker's log.")
@click.option("-v", "--verbose", is_flag=True, help="The same as --loglevel DEBUG.")
@shared_options.control_option
@shared_options.fleet_options
@shared_options.refusals()
def main(
    *,
    compute_class: str | None,
    slots: int | None,
    join: str | None,
    imports: tuple[str, ...],
    metrics_port: int | None,
    metrics_host: str | None,
    loglevel: str,
    verbose: bool,
    **connection: str | None,
) -> None:
    """Serve trials on this machine until Ctrl-C. Running trials finish first; a second Ctrl-C gives them back.

    Without --class, a machine with GPUs of several kinds gets a worker for each kind, and they end together.
    """
    Output.is_optional = True
    if join is not None:
        if any(connection.values()):
            raise UsageError("--join names broker, Redis and signing key; leave out the options that name others")
        _join(join)
    os.environ.update(shared_options.environment(**connection))
    modules = [name for each in imports for name in each.split(",") if name]
    check_modules(modules)
    if compute_class is not None:
        hardware.check_class_name(compute_class, "--class")
    given = {server.PORT: metrics_port, server.HOST: metrics_host}
    given |= {"SHADHO_IMPORTS": ",".join(modules)} if imports else {}
    os.environ.update({variable: str(value) for variable, value in given.items() if value is not None})
    # These functions also check values that come from the environment.
    stay.Stay.configured()
    hardware.slots_per_gpu()
    hardware.price()
    _serve(compute_class, slots, "DEBUG" if verbose else loglevel)


def _join(given: str) -> NoReturn:
    """Save what `given` tells about a fleet, and run this command again without --join, as a worker of this fleet.

    So the password and the key are not on the command line of the worker. Raises UsageError or ServiceError if the
    fleet cannot be joined.
    """
    # Imported here, because --help does not need them.
    from shadho_celery.fleet import access
    from shadho_celery.fleet.redis import connect

    if given == "-":
        if sys.stdin.isatty():
            say("paste the line of shadho-celery fleet start, then press Enter:", err=True)
        given = sys.stdin.readline(access.MAX_TEXT)
    elif os.path.exists(path := os.path.expanduser(given)):  # noqa: PTH110, PTH111 -- of pathlib they may raise
        given = read_text(Path(path), f"--join: {given}", is_secret=True)
    fleet = access.read_access(given)
    connect(
        fleet.url,
        "run shadho-celery fleet start on the fleet's machine, which starts it or prints its line again; check that "
        f"no firewall blocks port {fleet.port}, and that no other program uses it",
    ).close()
    folder = access.state_folder(f"joined-{fleet.address}")
    with access.created(folder):
        variables = access.save(fleet, folder)
    again = f". {shlex.quote(str(folder / access.ENVIRONMENT))} && shadho-celery worker --accept-code"
    say(f"joining the fleet on {fleet.address}; without the line: {again}", err=True)
    words = sys.orig_argv[1:]
    place = next(index for index, word in enumerate(words) if word.partition("=")[0] == "--join")
    del words[place : place + 1 + (words[place] == "--join")]
    os.execve(sys.executable, [sys.executable, *words], {**os.environ, **variables, "SHADHO_ACCEPT_CODE": "1"})


def _serve(compute_class: str | None, slots: int | None, level: str) -> NoReturn:
    """Run the worker of the given class, or without a class a worker for each kind of GPU of this machine."""
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
    # The prepared process is started first, because its imports can then run beside the import of Celery.
    fork_servers = ForkServers(preloaded(os.environ.get("SHADHO_IMPORTS", "").split(",")))
    fork_servers.prepare()
    # Imported here, because the application reads the environment when it is imported.
    from shadho_celery.celery import app

    app.shadho_fork_servers = fork_servers
    arguments = ["worker", "-Q", name, "-l", level, "--without-gossip", "--without-mingle"]
    app.worker_main(arguments + (["-c", str(slots)] if slots else []))
    # `worker_main` returns no exit code.
    raise SystemExit(app.shadho_exit_code)


if __name__ == "__main__":
    main()
