"""Runs a study: ``python -m shadho_celery.launch tasks.svm``.

Without a server named, everything runs on this machine (embedded mode); with one, on the fleet that it serves.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from shadho_celery import hardware, report, study_file, urls
from shadho_celery.assignment import POLICIES
from shadho_celery.errors import NoSuccessfulTrial, ShadhoError, UsageError
from shadho_celery.samplers import SAMPLERS
from shadho_celery.search import DEFAULT_POLICY, DEFAULT_SAMPLER

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

DEFAULT_TRIALS = 100

#: seconds after which a class that is expected but has no live worker is warned of
MISSING_SECONDS = 10.0


@dataclass(kw_only=True)
class Options:
    """The command line, as it was given."""

    study: str
    trials: int | None
    seconds: float | None
    target: float | None
    seed: int | None
    sampler: str | None
    policy: str | None
    name: str | None
    resume: bool
    store: str
    workers: dict[str, int] = field(default_factory=dict)
    weight: float | None
    as_json: bool
    fleet: bool

    def setting(self, name: str, file: study_file.StudyFile, default: Any = None) -> Any:
        """The option `name`, else what the study file says, else `default`."""
        given = getattr(self, name)
        return given if given is not None else file.settings.get(name, default)


def _workers(_: Any, __: Any, values: tuple[str, ...]) -> dict[str, int]:
    """``cpu=4`` or ``gpu_large=1,cpu=2`` as slots by class."""
    slots: dict[str, int] = {}
    for part in (part for value in values for part in value.split(",") if part.strip()):
        name, separator, count = part.strip().partition("=")
        if not separator or not name or not count.isdecimal() or int(count) < 1:
            raise urls.refusal(UsageError(f"--workers {part!r} is not of the form CLASS=SLOTS, such as cpu=4"))
        slots[name] = int(count)
    return slots


@click.command(epilog=EXAMPLES)
@click.argument("study_module", metavar="STUDY_FILE")
@click.option("--trials", type=click.IntRange(min=1), help=f"Trials of the whole study.  [default: {DEFAULT_TRIALS}]")
@click.option("--seconds", type=float, help="Send nothing new after this many seconds.")
@click.option("--target", type=float, help="Stop at this loss or less.")
@click.option("--seed", type=click.IntRange(min=0), help="Makes the search repeatable.  [default: drawn]")
@click.option("--sampler", type=click.Choice([*SAMPLERS]), help=f"Proposes params.  [default: {DEFAULT_SAMPLER}]")
@click.option("--policy", type=click.Choice(POLICIES), help=f"Places trials on classes.  [default: {DEFAULT_POLICY}]")
@click.option("--study", "name", metavar="NAME", help="Name of the study.  [default: module and time]")
@click.option(
    "--resume",
    is_flag=False,
    flag_value="",
    metavar="[NAME]",
    help="Carry a study on: the one of that name, else the study file's latest.",
)
@click.option("--store", default="sqlite:///shadho.db", show_default=True, help="Database URL that keeps the trials.")
@click.option(
    "--workers", multiple=True, callback=_workers, metavar="CLASS=SLOTS", help="Workers to embed; may be repeated."
)
@click.option(
    "--weight",
    type=click.FloatRange(min=0, min_open=True),
    help="Part of the slots beside other studies.  [default: 1]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else on standard output.")
@urls.options
def main(study_module: str, resume: str | None, **given: Any) -> None:
    """Run the study in STUDY_FILE: a module with SPACE and objective, such as tasks.svm or my_study.py.

    On this machine where no broker or Redis is named, else on the fleet that they serve. Ctrl-C once finishes what
    runs, twice stops at once; either way --resume carries on.
    """
    try:
        found = urls.environment(*(given.pop(name) for name in ("broker", "redis", "url_file")))
        os.environ.update(found)
        given["name"] = resume or given["name"]
        options = Options(study=study_module, resume=resume is not None, fleet=urls.is_fleet(found), **given)
        if options.fleet and options.workers:
            raise UsageError(
                "--workers is for embedded mode; on a fleet start workers with celery -A shadho_celery worker"
            )
        sys.exit(run(options))
    except ShadhoError as error:
        raise urls.refusal(error) from None


def run(options: Options) -> int:
    """Run the study; the exit code. Raises ShadhoError."""
    file = study_file.load(options.study)
    with _Launch(options, file) as launch:
        code = launch.search()
        launch.show_result()
    return code


class _Launch:
    """One run of one study: what it is made of, and in which order that is opened and closed."""

    def __init__(self, options: Options, file: study_file.StudyFile) -> None:
        # Slow to import, and not needed to say what is wrong with a command line.
        from shadho_celery.space.compile import compile_space
        from shadho_celery.store import Store
        from shadho_celery.study import Limits

        self._options = options
        self._file = file
        self._began = time.monotonic()
        trials = options.setting("trials", file)
        seconds = options.setting("seconds", file)
        target = options.setting("target", file)
        if trials is None and seconds is None and target is None:
            trials = DEFAULT_TRIALS
        self._limits = Limits(trials=trials, seconds=seconds, target=target)
        self._space = compile_space(file.space)
        self._expected = tuple(file.settings.get("classes", ()))
        self._console = Console(stderr=options.as_json)
        self._store = Store(options.store)
        self._embedded: Any = None
        self._slots: dict[str, int] = {}
        self._interrupts = 0
        self._taken_back = False

    def __enter__(self) -> _Launch:
        try:
            self._open()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for part in ("executor", "embedded", "study", "store"):
            opened = getattr(self, f"_{part}", None)
            if opened is not None:
                opened.close()

    def _open(self) -> None:
        from shadho_celery.channel import connect
        from shadho_celery.executors.queue import QueueExecutor
        from shadho_celery.routing import Publisher
        from shadho_celery.search import make_scheduler
        from shadho_celery.study import open_study

        if self._options.fleet:
            # Before the study is recorded: a server that is down should leave no empty study behind.
            client, publisher = connect(urls.url(urls.REDIS)), Publisher.configured()
        self._study = open_study(
            self._store,
            self._space.describe(),
            module=self._file.module,
            name=self._options.name,
            resume=self._options.resume,
            seed=self._options.seed,
        )
        if not self._options.fleet:
            self._embedded = self._embed()
            os.environ.update({urls.BROKER: self._embedded.broker_url, urls.REDIS: self._embedded.redis_url})
            client = connect(self._embedded.redis_url)
            publisher = Publisher.configured()
        self._executor = QueueExecutor(
            client,
            publisher,
            self._study.record.key,
            self._file.module,
            weight=self._options.setting("weight", self._file, 1.0),
            adopt=self._options.fleet,
        )
        self._scheduler = make_scheduler(
            self._space,
            self._study,
            self._executor,
            self._limits,
            sampler=self._options.setting("sampler", self._file, DEFAULT_SAMPLER),
            policy=self._options.setting("policy", self._file, DEFAULT_POLICY),
            expected=self._expected,
        )

    def _embed(self) -> Any:
        from shadho_celery.embedded import Embedded

        machine = hardware.detect()
        workers = self._options.workers or self._play_classes(machine)
        return Embedded(Path(".shadho") / self._study.name, workers, [self._file.module], machine.cores)

    def _play_classes(self, machine: hardware.Machine) -> dict[str, int]:
        """The embedded workers by default."""
        if machine.gpus:
            return {machine.compute_class: len(machine.gpus), "cpu": max(1, machine.cores - len(machine.gpus))}
        names = self._expected or hardware.DEFAULT_CLASSES
        self._say(
            f"no GPU here: CPU workers play the classes {', '.join(names)}; --workers cpu={machine.cores} for real use"
        )
        return dict.fromkeys(names, 1)

    # The run

    def search(self) -> int:
        """Turn the loop to its end under a view; the exit code."""
        view = (
            report.LiveView(self._scheduler, self._console)
            if self._console.is_terminal
            else report.PlainView(self._scheduler)
        )
        watch = _Watch(self._expected, self._executor, self._file.module)

        def on_turn() -> None:
            if self._interrupts and not self._taken_back:
                self._taken_back = True
                self._scheduler.stop()
                view.note("stopping: what runs is finished first; Ctrl-C again stops at once")
            if self._embedded is not None:
                self._embedded.check()
            for compute_class in self._scheduler.classes:
                self._slots[compute_class.name] = max(compute_class.slots, self._slots.get(compute_class.name, 0))
            for warning in watch.warnings():
                view.note(warning)
            view.update()

        self._say(f"study {self._study.name} (seed {self._study.record.seed}) in {self._store.safe_url}")
        with view, self._signals():
            try:
                self._scheduler.run(on_turn)
            except _StopNow as stop:
                # Embedded workers end with us: what they run is lost rather than cancelled, and waits for --resume.
                self._scheduler.stop(running=self._options.fleet)
                return stop.code
        return 0 if self._study.best is not None or self._interrupts else NoSuccessfulTrial.exit_code

    def show_result(self) -> None:
        """The table, or the JSON object."""
        self._study.commit()
        seconds = time.monotonic() - self._began
        resume = ["python", "-m", "shadho_celery.launch", self._file.module, "--resume", self._study.name]
        if self._options.store != "sqlite:///shadho.db":
            resume += ["--store", self._store.safe_url]
        resume += ["--trials", str(2 * max(1, self._study.counted))]
        if self._options.as_json:
            print(json.dumps(report.as_json(self._study, seconds, self._scheduler.subspaces, self._slots)))
        else:
            report.summary(self._study, self._space, self._console, shlex.join(resume))
        if self._study.best is None:
            self._say(str(NoSuccessfulTrial()))

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C once: finish what runs; twice, or SIGTERM: stop now."""

        def on_interrupt(*_: Any) -> None:
            self._interrupts += 1
            if self._interrupts > 1:
                raise _StopNow(130)
            # No more than a flag here: what waits is taken back between two turns, where nothing is half done.
            self._scheduler.stopping = True

        def on_terminate(*_: Any) -> None:
            raise _StopNow(143)

        before = {signal.SIGINT: on_interrupt, signal.SIGTERM: on_terminate}
        before = {number: signal.signal(number, handler) for number, handler in before.items()}  # type: ignore[misc]
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class _StopNow(BaseException):
    """Leave the loop at once."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class _Watch:
    """Notices classes without workers and workers without the study, and says so once each."""

    def __init__(self, expected: tuple[str, ...], executor: Any, module: str) -> None:
        self._expected = expected
        self._executor = executor
        self._module = module
        self._began = time.monotonic()
        self._said: set[str] = set()

    def warnings(self) -> list[str]:
        """What has to be said now."""
        if time.monotonic() - self._began < MISSING_SECONDS:
            return []
        from shadho_celery.executors.queue import start_command, unable

        live = self._executor.workers()
        found = []
        trouble = unable(live, self._module)
        if trouble is not None:
            found.append(f"Warning: {trouble}")
        able = {worker["compute_class"] for worker in live.values() if self._module in worker["imports"]}
        found += [
            f"Warning: no worker serves the queue {name}; start one: {start_command(name, self._module)}"
            for name in self._expected
            if name not in able
        ]
        new = [text for text in found if text not in self._said]
        self._said.update(new)
        return new


if __name__ == "__main__":
    main()
