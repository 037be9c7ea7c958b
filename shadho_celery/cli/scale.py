"""The command `scale`, which starts and ends workers so that there are as many slots as the running studies want."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click
from msgspec.structs import replace

from shadho_celery.cli import shared_options
from shadho_celery.cli.interrupts import Output
from shadho_celery.cli.messages import say
from shadho_celery.cli.slurm import cancel_waiting
from shadho_celery.core.checks import one_line
from shadho_celery.core.files import ClassSpec, read_class_spec
from shadho_celery.core.system import Outage
from shadho_celery.errors import ServiceError, UsageError
from shadho_celery.fleet import urls

if TYPE_CHECKING:
    from shadho_celery.fleet.drains import Starts
    from shadho_celery.session.scaling import ScaledFleet, Scaling

#: seconds between two readings of the fleet's state
LOOK_SECONDS = 2.0

#: seconds in which a command must return before it gets SIGTERM, and further seconds before SIGKILL
RETURN_SECONDS, KILL_SECONDS = 60.0, 5.0

#: second half of the warning that Redis does not answer
OUTAGE = "no worker is started or ended meanwhile"

#: number of bytes that are read from the end of a command's output
MAX_OUTPUT = 2000


@shared_options.command(
    "scale --class-spec classes.toml --max 8 --command ./start-workers.sh",
    "scale --class-spec classes.toml --max 20 --slurm -- --for 4h --gpus 1 --import my_study",
    more="""A class spec, of which only [classes.NAME] is required:
  [classes.gpu_large]
  slots = 1                # of one worker
  max_workers = 4
  startup_seconds = 120    # from the start of a worker until it takes trials
  memory_gib = 64          # --mem of --slurm
  price = 2.40             # SHADHO_PRICE of its workers""",
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "--class-spec", "path", type=click.Path(path_type=Path), required=True, metavar="FILE", help="Classes to scale."
)
@click.option(
    "--max",
    "most",
    type=click.IntRange(min=1),
    required=True,
    help="Maximum number of workers at a time, all classes of the file together.",
)
@click.option("--slurm", is_flag=True, help="Submit jobs of shadho-celery slurm with the options in ARGS.")
@click.option(
    "--command",
    "is_command",
    is_flag=True,
    help="Run the command in ARGS, without a shell. It starts SHADHO_COUNT workers of class SHADHO_CLASS, variables of "
    f"its environment, and must return within {RETURN_SECONDS:.0f} s.",
)
@shared_options.duration_option(
    "--cooldown", default="60s", help="Time for which idle workers are kept after they are no longer wanted."
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
@shared_options.on_fleet
def scale(*, path: Path, most: int, slurm: bool, is_command: bool, cooldown: float, words: tuple[str, ...]) -> None:
    """Start workers for the slots that the running studies want, and end idle workers that no study wants.

    It runs until Ctrl-C, after which the workers stay. Workers finish their trials before they end.
    """
    Output.is_optional = True
    spec = read_class_spec(path)
    if slurm is is_command:
        raise UsageError("give either --slurm or --command")
    if not urls.is_fleet({}):
        raise UsageError(f"no fleet is named; give --broker and --redis, or set {urls.BROKER} and {urls.REDIS}")
    if is_command and not words:
        raise UsageError("--command: give the command that starts workers at the end of the line")
    program = words[0] if is_command else "sbatch"
    if shutil.which(program) is None:
        raise UsageError(f"there is no program {one_line(program)}; give its path, or make the file executable")
    own = {name for option in click.get_current_context().command.params for name in option.opts}
    if taken := [word for word in words if is_command and word.startswith("--") and word.partition("=")[0] in own]:
        name = taken[0].partition("=")[0]
        say(f"Warning: {name} goes to {one_line(program)}; if it is for scale, give it before --command", err=True)
    starter = _Starter(spec, words, is_slurm=slurm)
    if slurm:
        starter.check()
    _run(spec, most, cooldown, starter)


def _run(spec: Mapping[str, ClassSpec], most: int, cooldown: float, starter: _Starter) -> None:
    """Read the state of the fleet every LOOK_SECONDS, and start and end workers accordingly."""
    # Imported here, so that `--help` stays fast.
    from shadho_celery.session.scaling import LONGEST_PAUSE, ScaledFleet, Scaling

    fleet = ScaledFleet(lambda text: say(f"Warning: {text}", err=True))
    scaling = Scaling(spec, most, cooldown)
    # Redis keeps the record of a start until its workers are no longer expected, and the longest pause has passed.
    seconds = {name: each.come_seconds + LONGEST_PAUSE for name, each in spec.items()}
    say(f"scaling {', '.join(map(one_line, spec))} to at most {most} workers")
    redis = Outage("Redis")
    ahead = _resume(fleet, scaling, starter, spec, redis)
    while True:
        now = time.monotonic() + ahead
        for name, reason in starter.failures(now):
            say(scaling.fail(name, now, reason), err=True)
        try:
            wanted, backlog, workers = fleet.look()
            asks = {"has_left": fleet.has_left, "may_end": fleet.may_end}
            decision = scaling.look(now, wanted, workers, backlog=backlog, **asks, calling=starter.calling)
            for line in decision.lines:
                say(line, err=line.startswith("Warning"))
            for name in decision.overdue:
                starter.give_up(name)
            try:
                # The records are written before the workers start. Otherwise, if this scaler is killed in between, the
                # next scaler would start the workers again.
                fleet.keep(starter.with_jobs(scaling.starting), seconds)
            except ServiceError:
                for name in decision.starts:
                    say(scaling.fail(name, now, "Redis does not record the start"), err=True)
                raise
            for name, count in decision.starts.items():
                starter.start(name, count, now)
            fleet.end(decision.ends)
            _note(redis, None)
        except ServiceError as error:
            _note(redis, error)
        time.sleep(LOOK_SECONDS)


def _note(redis: Outage, error: ServiceError | None) -> None:
    """Print one line when Redis stops answering, and one when it answers again."""
    text = None if error is None else f"Warning: {one_line(error, 300)}; {OUTAGE}"
    if (line := redis.see(text, time.monotonic())) is not None:
        say(line, err=True)


def _resume(
    fleet: ScaledFleet, scaling: Scaling, starter: _Starter, spec: Mapping[str, ClassSpec], redis: Outage
) -> float:
    """Restore the state of an earlier scaler. Return how many seconds Redis's clock is ahead of `time.monotonic`."""
    while True:
        try:
            kept, (*_, workers), now = fleet.recall(spec), fleet.look(), fleet.time()
        except ServiceError as error:
            _note(redis, error)
            time.sleep(LOOK_SECONDS)
            continue
        starter.resume(kept)
        for line in scaling.resume(kept, workers, now):
            say(line)
        return now - time.monotonic()


@dataclass(kw_only=True)
class _Call:
    """A command that starts workers of one class and has not returned."""

    process: subprocess.Popen[bytes]
    output: IO[bytes]
    since: float
    is_told: bool = False

    @property
    def text(self) -> str:
        """The last MAX_OUTPUT bytes of the command's output."""
        self.output.seek(max(0, self.output.seek(0, os.SEEK_END) - MAX_OUTPUT))
        return self.output.read().decode(errors="replace").strip()


class _Starter:
    """Runs the command that starts workers, at most one at a time for each class."""

    def __init__(self, spec: Mapping[str, ClassSpec], words: Sequence[str], *, is_slurm: bool) -> None:
        self._spec, self._words, self._is_slurm = spec, words, is_slurm
        self._calls: dict[str, _Call] = {}
        #: id of the latest SLURM job, by class
        self._jobs: dict[str, str] = {}
        #: reason why the command could not be called, by class
        self._refused: dict[str, str] = {}

    @property
    def calling(self) -> Collection[str]:
        """Classes whose command has been called and has not returned."""
        return self._calls.keys()

    def with_jobs(self, starting: Mapping[str, Starts]) -> dict[str, Starts]:
        """Return the records of starting workers, with the id of each class's latest SLURM job."""
        return {name: replace(record, job=self._jobs.get(name, "")) for name, record in starting.items()}

    def resume(self, kept: Mapping[str, Starts]) -> None:
        """Take over the ids of SLURM jobs from the records of an earlier scaler."""
        self._jobs.update({name: record.job for name, record in kept.items() if record.job})

    def check(self) -> None:
        """Raise UsageError unless the command `slurm` accepts the user's options."""
        name = next(iter(self._spec))
        words = self._command(name, 1, submit=False)
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        if done.returncode:
            problem = _last_line(done.stderr.decode(errors="replace"))
            raise UsageError(f"--slurm: {problem.removeprefix('Error: ')}")

    def start(self, name: str, count: int, now: float) -> None:
        """Call the command that starts `count` workers of a class."""
        own = {"SHADHO_CLASS": name, "SHADHO_COUNT": str(count)}
        price = self._spec[name].price
        own |= {} if price is None else {"SHADHO_PRICE": f"{price:g}"}
        output = tempfile.TemporaryFile()  # noqa: SIM115 -- it is open until the command returns
        try:
            # The workers get their own session, so that Ctrl-C does not reach them.
            process = subprocess.Popen(
                self._command(name, count),
                env=os.environ | own,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            output.close()
            self._refused[name] = f"the command cannot be called: {error.strerror}"
            return
        self._calls[name] = _Call(process=process, output=output, since=now)

    def failures(self, now: float) -> Iterator[tuple[str, str]]:
        """Yield each class whose command has failed since the last call, with the reason. End commands that hang."""
        refused, self._refused = self._refused, {}
        yield from refused.items()
        for name, call in [*self._calls.items()]:
            code = call.process.poll()
            if code is None:
                if now - call.since > RETURN_SECONDS + KILL_SECONDS:
                    call.process.kill()
                elif now - call.since > RETURN_SECONDS and not call.is_told:
                    call.is_told = True
                    # Only the command itself is ended, because its children may be workers.
                    call.process.terminate()
                    yield name, f"the command did not return within {RETURN_SECONDS:.0f} s and is ended"
                continue
            del self._calls[name]
            text = call.text
            call.output.close()
            if code and not call.is_told:
                what = signal.Signals(-code).name if -code in {*signal.Signals} else str(code)
                yield name, f"the command ended with {what}: {_last_line(text) or 'it has printed nothing'}"
            elif self._is_slurm and (job := re.search(r"^Submitted batch job (\d+)", text, re.MULTILINE)):
                self._jobs[name] = job[1]

    def give_up(self, name: str) -> None:
        """Cancel the tasks of a class's latest SLURM job that have not started."""
        if job := self._jobs.pop(name, None):
            cancel_waiting(job)

    def _command(self, name: str, count: int, *, submit: bool = True) -> list[str]:
        if not self._is_slurm:
            return [*self._words]
        # After two dashes come the user's options of sbatch, which must also come last here.
        place = self._words.index("--") if "--" in self._words else len(self._words)
        options, others = self._words[:place], self._words[place + 1 :]
        memory = self._spec[name].memory_gib
        memories = [f"--mem={max(1, round(memory * 1024))}M"] if memory else []
        words = [sys.executable, "-m", "shadho_celery", "slurm", *options, f"--class={name}", f"--count={count}"]
        return [*words, *["--submit"] * submit, *["--"] * bool(others or memories), *memories, *others]


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return one_line(lines[-1], 300) if lines else ""
