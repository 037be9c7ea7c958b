"""The command `slurm`, which prints or submits the script of a SLURM job array. Each task of the array is a worker."""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import click

from shadho_celery.cli import shared_options
from shadho_celery.cli.messages import say
from shadho_celery.cli.shared_options import duration_option
from shadho_celery.core.checks import one_line, printable, short
from shadho_celery.core.hardware import check_class_name, price
from shadho_celery.core.units import duration
from shadho_celery.core.users import ADMINS_FILE
from shadho_celery.errors import UsageError
from shadho_celery.fleet import urls
from shadho_celery.fleet.signing import KEY_FILE, UNSIGNED_CONTROL
from shadho_celery.node import stay

#: signal that SLURM sends to the worker before the job's time limit
SIGNAL = "USR1"

#: seconds from the end of the grace to the end of the job, in which a worker returns its trials
END_SECONDS = 10

#: SLURM may send a signal this many seconds too early
EARLY_SECONDS = 60

#: seconds after which a call of `sbatch` or `scancel` is given up
CALL_SECONDS = 50.0

#: environment variables whose values are written into the script, because they are public and valid on all machines
CARRIED = (
    "SHADHO_ACCEPT_CODE",
    "SHADHO_LEASE_SECONDS",
    "SHADHO_PRICE",
    "SHADHO_START",
    UNSIGNED_CONTROL,
    urls.CA,
    urls.CERTIFICATE,
    urls.KEY,
)

#: pattern of an option of sbatch. It allows no line feeds, and no backslashes, which sbatch unescapes even in quotes
OPTION = r"--[a-z][a-z-]*(=[^\\\x00-\x1f\x7f]+)?"

#: options of sbatch that a user may not give, because the worker relies on the values in the script
KEPT = ("--time", "--time-min", "--signal")

#: pattern of the value of --gpus: numbers of GPUs, with or without their type
GPUS = r"([\w.-]+:)?0*[1-9]\d{0,3}(,([\w.-]+:)?0*[1-9]\d{0,3})*"


@shared_options.command(
    "slurm --class gpu_large --count 4 --for 4h --gpus 1 --import my_study > workers.sh",
    "slurm --class cpu --for 2d --partition long --url-file ~/fleet.urls --submit",
    "slurm --class cpu --for 8h --grace 5m --idle-exit 10m -- --cpus-per-task=8 --mem=32G",
    "slurm --class cpu --for 8h --slots 2 --price 0.12 --python /opt/shadho/bin/python -- --cpus-per-task=8",
    more="The script has no URLs: give a --url-file that the nodes can read, or set the variables where sbatch is "
    "called.",
)
@click.option("--class", "compute_class", required=True, metavar="NAME", help="Compute class of the workers.")
@click.option("--count", type=click.IntRange(min=1), default=1, show_default=True, help="Number of workers.")
@duration_option(
    "--for",
    "seconds",
    required=True,
    help="Time limit of each job, such as 4h, in whole minutes. Its worker ends in time.",
)
@duration_option("--grace", default="2m", help="Time for running trials to write a checkpoint before the job ends.")
@duration_option("--idle-exit", "idle", help="End after this time without a trial.")
@click.option("--import", "imports", multiple=True, metavar="MODULE", help="Study file to run; may be repeated.")
@click.option("--slots", type=click.IntRange(min=1), help="Trials at a time.  [default: one per GPU, else per core]")
@shared_options.price_option
@click.option(
    "--python",
    default=sys.executable,
    metavar="PATH",
    help="Python on the nodes with this package, or its name on PATH there.  [default: the one of this command]",
)
@click.option("--partition", metavar="NAME", help="Partition of the cluster.")
@click.option("--gpus", metavar="[TYPE:]NUMBER", help="GPUs of each worker, such as 2 or a100:2.")
@click.option("--submit", is_flag=True, help="Call sbatch with the script, instead of printing it.")
@click.argument("others", nargs=-1, metavar="[-- SBATCH_OPTIONS]")
@shared_options.file_options
def slurm(
    *,
    compute_class: str,
    count: int,
    seconds: float,
    grace: float,
    idle: float | None,
    imports: Sequence[str],
    slots: int | None,
    python: str,
    partition: str | None,
    gpus: str | None,
    submit: bool,
    others: Sequence[str],
    url_file: str | None,
    signing_key_file: str | None,
) -> None:
    """Print an sbatch script for workers of one class: an array of jobs that SLURM may requeue.

    Running trials are told before a job ends, or when it is preempted, so that they write a checkpoint.
    """
    check_class_name(compute_class, "--class")
    price()
    if not python.strip():
        raise UsageError("--python is empty; give the path of a Python on the nodes, such as /opt/shadho/bin/python")
    files = shared_options.environment(None, None, url_file, signing_key_file)
    if not (url_file or urls.is_fleet({})):
        problem = f"no fleet is named; give --url-file, or set {urls.BROKER} and {urls.REDIS} where sbatch is called"
        if submit:
            raise UsageError(f"--submit: {problem}")
        say(f"Warning: {problem}", err=True)
    minutes = math.ceil(seconds / 60)
    stays = minutes * 60 - END_SECONDS - EARLY_SECONDS
    if stays <= grace:
        least = duration(60 * math.ceil((grace + END_SECONDS + EARLY_SECONDS + 1) / 60))
        raise UsageError(f"--for must be at least {least} with this --grace, in which trials return")
    if gpus is not None and re.fullmatch(GPUS, gpus, re.ASCII) is None:
        raise UsageError(f"--gpus: {short(gpus, 60)} is not a number of GPUs; write it as 2 or a100:2")
    given = {"--partition": partition, "--gpus": gpus}
    own = [f"{name}={value}" for name, value in given.items() if value is not None]
    directives = [*_directives(compute_class, count, minutes, math.ceil(grace)), *own, *_checked(others)]
    variables = {name: os.environ[name] for name in CARRIED if os.environ.get(name)}
    variables |= {stay.FOR: f"{stays}s", stay.GRACE: f"{math.ceil(grace)}s", stay.SIGNAL: SIGNAL}
    variables |= {} if idle is None else {stay.IDLE: f"{math.ceil(idle)}s"}
    # The path of the signing key may come from the environment, too.
    key = files.get(KEY_FILE) or os.environ.get(KEY_FILE)
    variables |= {KEY_FILE: _absolute(key)} if key else {}
    variables |= {ADMINS_FILE: _absolute(admins)} if (admins := os.environ.get(ADMINS_FILE)) else {}
    words = ["exec", python, "-m", "shadho_celery", "worker", f"--class={compute_class}"]
    words += [] if slots is None else [f"--slots={slots}"]
    words += [f"--import={name}" for name in imports]
    words += [f"--url-file={_absolute(url_file)}"] if url_file else []
    text = script(directives, variables, words)
    if submit:
        say(submitted(text))
    else:
        say(text, nl=False)


def _directives(compute_class: str, count: int, minutes: int, grace: int) -> list[str]:
    """Return the options of sbatch for an array of jobs that may be requeued."""
    return [
        f"--job-name=shadho-{re.sub('[^A-Za-z0-9_.-]', '-', compute_class)}",
        f"--array=1-{count}",
        "--nodes=1",
        "--ntasks=1",
        f"--time={minutes}",
        "--requeue",
        # A job that is requeued appends to the log of its first run.
        "--open-mode=append",
        "--export=ALL",
        # B: the signal is sent only to the worker, not to its trials.
        f"--signal=B:{SIGNAL}@{grace + END_SECONDS}",
    ]


def _checked(others: Sequence[str]) -> Sequence[str]:
    """Return a user's options of sbatch. Raises UsageError if one of them is in KEPT."""
    for each in others:
        name = each.partition("=")[0]
        # sbatch also accepts the first letters of a long option.
        if len(name) > len("--") and any(kept.startswith(name) for kept in KEPT):
            raise UsageError(f"{short(each, 60)} would end workers before they know; give --for and --grace instead")
    return others


def script(directives: Sequence[str], variables: dict[str, str], words: Sequence[str]) -> str:
    """Return the script: options of sbatch, environment variables, and the worker's command, run with `exec`.

    Raises UsageError for a word that is not an option of sbatch, and for control characters.
    """
    lines = [
        "#!/bin/bash",
        *map(_directive, directives),
        "",
        "# Those of the machine that submits.",
        "unset SHADHO_HOST SHADHO_LISTEN SHADHO_CORES",
        *(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
        "# In place of the shell, which gets the signal.",
        shlex.join(words),
        "",
    ]
    text = "\n".join(lines)
    if printable(text) != text:
        raise UsageError(f"{short(text, 80)} has control characters; use names and paths without them")
    return text


def _directive(option: str) -> str:
    if re.fullmatch(OPTION, option) is None:
        raise UsageError(f"{short(option, 80)} is not an option of sbatch like --mem=32G, without backslashes")
    name, mark, value = option.partition("=")
    return f"#SBATCH {name}{mark}{value and shlex.quote(value)}"


def submitted(text: str) -> str:
    """Submit a script with sbatch, and return what it prints. Raises UsageError if that fails."""
    program = shutil.which("sbatch")
    if program is None:
        raise UsageError("--submit: there is no sbatch on PATH; use a login node of the cluster, or print the script")
    try:
        done = subprocess.run(
            [program], input=text, capture_output=True, text=True, errors="replace", check=False, timeout=CALL_SECONDS
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(f"sbatch failed: {one_line(error, 500)}") from None
    if done.returncode:
        raise UsageError(f"sbatch ended with {done.returncode}: {one_line(done.stderr or done.stdout, 500)}")
    return done.stdout.strip()


def cancel_waiting(job: str) -> None:
    """Cancel the tasks of a job that have not started. Errors are ignored."""
    with suppress(OSError, subprocess.SubprocessError):
        words = ["scancel", "--state=PENDING", job]
        subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=CALL_SECONDS)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())
