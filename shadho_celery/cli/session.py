"""One run of one study from the command line: its options, everything it opens, its warnings, and its end."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from shadho_celery import __version__
from shadho_celery.cli import connection_options, views
from shadho_celery.cli.conditions import Conditions
from shadho_celery.cli.interrupts import INTERRUPTED
from shadho_celery.cli.live import Fleet, LiveView, PlainView
from shadho_celery.cli.messages import say
from shadho_celery.cli.shown_output import ShownOutput
from shadho_celery.core import hardware
from shadho_celery.core.checks import mask
from shadho_celery.core.code import CodeVersion, Sources
from shadho_celery.core.folders import EMBEDDED, below
from shadho_celery.core.objectives import refuse_others
from shadho_celery.core.settings import BUDGETS, DEFAULT_TRIALS, StudySettings, continued, read_settings
from shadho_celery.core.trial import Trial, TrialState
from shadho_celery.embedded.embedded import Embedded
from shadho_celery.errors import NestedStart, NoSuccessfulTrial, ServiceError, UsageError
from shadho_celery.fleet.executor import QueueExecutor
from shadho_celery.objective.sources import DiskWatch, contents
from shadho_celery.objective.study_file import StudyFile
from shadho_celery.results.on_trial import OnTrial, TrialCallback, check_on_trial
from shadho_celery.results.study import RunningStudy, StudyResults
from shadho_celery.results.warm_start import read_source
from shadho_celery.scheduler.build import changes, make_scheduler, other_code
from shadho_celery.scheduler.known_points import completed, enqueue
from shadho_celery.scheduler.plan import Plan
from shadho_celery.scheduler.widths import widest
from shadho_celery.space.compile import compile_space
from shadho_celery.space.stored import to_json
from shadho_celery.store.base import DEFAULT_STORE
from shadho_celery.store.sql import SqlStore
from shadho_celery.study.open import open_study
from shadho_celery.study.state import StudyState
from shadho_celery.study.warm_start import Source, fit
from shadho_celery.transport import urls
from shadho_celery.transport.broker import Publisher
from shadho_celery.transport.celery_settings import file_of_folder
from shadho_celery.transport.redis import connect
from shadho_celery.transport.registry import Progress, able, start_command, unable
from shadho_celery.transport.signing import Signer

#: exit codes of a run that was stopped at once, as shells have them: 128 and the signal's number
STOPPED = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: 143}

#: seconds after which a missing worker is warned of; longer than one takes to announce itself again
MISSING_SECONDS = 10.0

#: seconds between two looks for warnings: each looks at every worker
WARN_SECONDS = 1.0

#: seconds for which a study that has reached its limit waits for a server that is away
GIVE_UP_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the command line."""

    study: str
    #: settings that were given, which the study keeps for a later run
    given: Mapping[str, object] = field(default_factory=dict)
    seed: int | None = None
    name: str | None = None
    resume: bool = False
    #: True if trials that cannot be read are to be moved away
    repair: bool = False
    store: str = DEFAULT_STORE
    #: slots by class of the embedded workers; empty for the default
    workers: Mapping[str, int] = field(default_factory=dict)
    #: True if embedded workers are to play all default classes, one slot each
    demo: bool = False
    #: True if the output of embedded trials is to be printed
    show_output: bool = False
    #: True if the sources are to be shipped to the workers that accept code
    ship: bool = False
    #: known points to run first: label -> value of each
    points: Sequence[object] = ()
    #: where trials come from that teach a new study: a name, a file, or what was read already
    warm_start: str | Path | Source | None = None
    #: called after each trial, in place of the study file's
    on_trial: OnTrial | None = None
    #: True if no progress is shown
    silent: bool = False
    as_json: bool = False
    #: True if broker or Redis is named
    fleet: bool = False

    def over(
        self,
        stated: Mapping[str, object],
        earlier: Mapping[str, object] | None = None,
        in_force: Mapping[str, object] | None = None,
    ) -> StudySettings:
        """Return the settings in force.

        Each is the option, else that of an earlier run, else the study file's, else what was `in_force` in an earlier
        run, else the default. Raises UsageError for one that no message could carry.
        """
        return read_settings({**(in_force or {}), **stated, **(earlier or {}), **self.given})


class _StopNow(Exception):
    """Leave the loop."""


class Session:
    """Runs one study to its end, on this machine or on the fleet. A context manager; raises ShadhoError."""

    def __init__(self, options: Options, file: StudyFile) -> None:
        """Refuse invalid settings before anything is opened; the settings of an earlier run are read later."""
        self._options = options
        self._file = file
        self._began = time.monotonic()
        settings = self._settled({}, {})
        #: settings of the run before this one
        self._in_force_before: Mapping[str, object] = {}
        self._space = compile_space(file.space)
        self._plan = Plan.of(self._space, settings)
        self._plan.check_sampler()
        completed(self._plan, options.points)
        self._plan.check_warm_start(options.warm_start, resume=options.resume)
        self._on_trial = options.on_trial or file.on_trial
        if self._on_trial is not None:
            check_on_trial(self._on_trial, f"on_trial of {file.module}" if options.on_trial is None else "on_trial")
        #: version of the study's code, and what tells whether its files are still so
        self._code = file.code.with_space(self._space.describe())
        self._disk = DiskWatch()
        self._sources = _shipped(self._code) if options.ship else None
        self._code = replace(self._code, is_shipped=options.ship)
        #: slots of the widest trial
        self._widest = widest(self._plan.width, self._plan.subspaces)
        self._console = views.make_console(stderr=options.as_json)
        self._embedded: Embedded | None = None
        #: most slots of each class so far
        self._slots: dict[str, int] = {}
        self._signals: list[int] = []
        #: warnings that were said, and the moment of the last look for them
        self._warned: set[str] = set()
        self._warned_at = -math.inf
        #: what is wrong at the moment with servers, and with workers
        self._outages, self._missing = Conditions(), Conditions()
        #: False while a turn of the loop may be incomplete
        self._is_whole = True
        #: the last moment at which all servers answered, or more was to be sent
        self._stuck_since = self._began
        self._opened = ExitStack()

    def _settle(self, earlier: Mapping[str, object], in_force: Mapping[str, object]) -> Mapping[str, object]:
        """Plan by the settings in force, and return those to keep. Raises UsageError for invalid ones.

        Earlier runs were given those of `earlier`, and had those of `in_force`.
        """
        settings = self._settled(earlier, in_force)
        if settings != self._plan.settings:
            self._plan = self._plan.with_settings(settings)
        self._in_force_before = in_force
        return settings.in_force()

    def _settled(self, earlier: Mapping[str, object], in_force: Mapping[str, object]) -> StudySettings:
        """Return the settings in force; arguments as of `_settle`."""
        given = {**self._file.stated, **earlier, **self._options.given}
        # Budgets are what the study file says of them.
        before = {name: value for name, value in continued(in_force, given).items() if name not in BUDGETS}
        settings = self._options.over(self._file.stated, earlier, before)
        if settings.trials is settings.seconds is settings.target is settings.early_stop is None:
            settings = replace(settings, trials=DEFAULT_TRIALS)
        # Workers read the losses by the study file, whatever this study had before.
        refuse_others(self._file.settings.objectives, in_force)
        return replace(settings, shares=settings.shares_in_force)

    def __enter__(self) -> Session:
        with ExitStack() as opened:
            # Entered first and left last: a signal must not interrupt opening and closing either.
            opened.enter_context(self._note_signals())
            self._open(opened)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def _open(self, opened: ExitStack) -> None:
        """Open store, servers, study and scheduler, to be closed in reverse order."""
        self._store = opened.enter_context(closing(SqlStore(self._options.store)))
        connection_options.warn_of_password("--store", self._options.store, "PGPASSWORD or ~/.pgpass")
        if self._options.fleet:
            # Before the study is recorded: a server that is down should leave no empty study behind.
            client, publisher = connect(urls.url(urls.REDIS)), Publisher.configured()
            unset = "" if os.environ.get(urls.REDIS) else f" ({urls.REDIS} is not set)"
            say(f"fleet: broker {mask(urls.url(urls.BROKER))}, Redis {mask(urls.url(urls.REDIS))}{unset}", err=True)
        taught = self._taught()
        self._study = open_study(
            self._store,
            self._space.describe(),
            module=self._file.module,
            name=self._options.name,
            resume=self._options.resume,
            seed=self._options.seed,
            settings=self._options.given,
            settle=self._settle,
            tree=to_json(self._space),
            repaired=partial(say, err=True) if self._options.repair else None,
            warm_start=taught,
        )
        opened.callback(self._study.close)
        #: trials that had ended before this run
        self._counted_before = self._study.counted
        if not self._options.fleet:
            self._embedded = opened.enter_context(closing(self._embed()))
            os.environ.update(self._embedded.urls)
            client, publisher = connect(self._embedded.urls[urls.REDIS]), Publisher.configured(with_folder=False)
        self._executor = QueueExecutor(
            client,
            publisher,
            self._study.record.key,
            self._file.module,
            weight=self._plan.settings.weight,
            adopt=self._options.fleet,
            trial_timeout=self._plan.settings.trial_timeout,
            gang_wait_seconds=self._plan.settings.gang_wait_seconds,
            signer=Signer.configured(),
            fence=self._study.fence,
            name=self._study.name,
            progress=self._progress,
            code=self._code,
            sources=self._sources,
        )
        opened.callback(self._close_executor)
        # A scheduler counts them, and sends them first.
        enqueue(self._study, self._plan, self._options.points)
        self._scheduler = make_scheduler(self._plan, self._study, self._executor)
        self._running = RunningStudy(self._store, self._study.record, self._space.evaluate, self._scheduler.stop)

    def _progress(self) -> Progress:
        """Return how far the study is, to be announced."""
        count = self._study.count
        return Progress(
            ended=self._study.counted,
            limit=self._plan.limits.trials,
            running=count(TrialState.RUNNING),
            waiting=count(TrialState.WAITING, TrialState.QUEUED),
        )

    def _taught(self) -> Sequence[Trial]:
        """Return the trials from elsewhere that teach a new study, and say which."""
        given = self._options.warm_start
        if given is None:
            return ()
        objectives = self._plan.settings.objectives
        if not isinstance(given, Source):
            given = read_source(given, self._space, self._store, self._plan.settings.least_budget, objectives)
        found = fit(given, self._plan.subspaces, objectives)
        say(found.words, err=True)
        return found.trials

    def _close_executor(self) -> None:
        """Record the results, then close the executor, which deletes them; else leave them for the next one."""
        close = self._executor.abandon
        try:
            if self._is_whole and self._study.commit():
                close = self._executor.close
        finally:
            close()

    def _embed(self) -> Embedded:
        if file := file_of_folder():
            say(f"{file} is not read: on this machine alone a study has a broker and workers of its own", err=True)
        machine = hardware.detect()
        workers = self._options.workers or self._default_workers(machine)
        if max(workers.values()) < self._widest:
            raise UsageError(
                f"STUDY['slots'] gives a trial {self._widest} slots of one class, and no class has as many here; "
                f"give --workers {next(iter(workers))}={self._widest}"
            )
        return Embedded(below(EMBEDDED, self._study.record.key), workers, [self._file.module], machine.cores)

    def _default_workers(self, machine: hardware.Machine) -> dict[str, int]:
        """Return the slots by class of the embedded workers without --workers."""
        if self._options.demo:
            return dict.fromkeys(hardware.DEFAULT_CLASSES, self._widest)
        if machine.gpus:
            cores = max(1, machine.cores - len(machine.gpus))
            return {machine.compute_class: len(machine.gpus), "cpu": cores if self._widest == 1 else self._widest}
        if self._widest > 1:
            return {machine.compute_class: max(self._widest, machine.cores)}
        slots = machine.slots_for("cpu", self._plan.settings.cores)
        if names := self._plan.settings.classes:
            say(
                f"no GPU here: CPU workers stand in for the classes {', '.join(names)}, one slot each, so that you can "
                f"see the placement; a study without classes, or --workers cpu={slots}, uses all cores as class cpu",
                err=True,
            )
            return dict.fromkeys(names, 1)
        return {"cpu": slots}

    def search(self) -> int:
        """Turn the loop to its end under a view; return the exit code."""
        is_terminal = self._console.is_terminal and not self._options.silent
        fleet = Fleet(workers=lambda: self._executor.workers, module=self._file.module)
        view = (
            LiveView(self._scheduler, self._space, self._console, fleet)
            if is_terminal
            else PlainView(self._scheduler, fleet)
        )

        shown = ShownOutput(self._study.record.key, view.note) if self._options.show_output else None

        def on_turn() -> None:
            self._handle_signals(view.note)
            if self._embedded is not None:
                self._embedded.raise_if_dead()
            self._give_up_at_limit()
            self._refuse_nested_trials()
            self._refuse_other_code()
            self._slots |= {c.name: max(c.slots, self._slots.get(c.name, 0)) for c in self._scheduler.classes}
            self._warn(view.note)
            if shown is not None:
                shown.update(self._study.attempts)
            if not self._options.silent:
                view.update()

        if self._on_trial is not None:
            callback = TrialCallback(self._on_trial, self._running, lambda text: view.note(f"Warning: {text}"))
            self._scheduler.on_trial = self._with_own_output(callback)
        say(f"study {self._study.name} (seed {self._study.record.seed}) in {self._store.safe_url}", err=True)
        if self._options.resume:
            lines = changes(self._in_force_before, self._plan.settings.in_force(), self._study.counted)
            lines += other_code(self._store.codes(self._study.record.key), self._code.digest)
            for line in lines:
                say(line, err=True)
        if self._scheduler.done:
            ended = self._study.counted
            say(f"nothing is left to run: {ended} trials have ended; --trials {2 * ended} runs more", err=True)
        self._is_whole = False
        with view:
            try:
                self._scheduler.run(on_turn)
            except _StopNow:
                # Embedded workers end with this process: their trials are lost, not cancelled, and wait for --resume.
                self._scheduler.stop(running=self._options.fleet)
                self._is_whole = True
                return STOPPED[signal.Signals(self._signals[-1])]
            if shown is not None:
                shown.close()
        self._is_whole = True
        return 0 if self._study.best is not None or self._signals else NoSuccessfulTrial.exit_code

    def _with_own_output(self, callback: TrialCallback) -> Callable[[Trial], None]:
        """Return a callback that prints to standard error where standard output is the JSON object's."""

        def called(trial: Trial) -> None:
            with redirect_stdout(sys.stderr) if self._options.as_json else nullcontext():
                callback(trial)

        return called

    def _warn(self, say: Callable[[str], None]) -> None:
        """Say each new warning once, and when servers answer again or the workers that were missing have come."""
        now = time.monotonic()
        outages = {"store": self._study.trouble, "servers": self._executor.trouble}
        found = {name: f"Warning: {each}; trying again" for name, each in outages.items() if each is not None}
        for line in self._outages.see(found, now):
            say(line)
        if now - self._warned_at < WARN_SECONDS:
            return
        self._warned_at = now
        for warning in self._warnings():
            if warning not in self._warned:
                self._warned.add(warning)
                say(warning)
        # Workers announce themselves again after an outage, or once Redis has lost its data.
        if self._executor.known_for >= MISSING_SECONDS:
            for line in self._missing.see(dict(self._missing_workers()), now):
                say(line)

    def _give_up_at_limit(self) -> None:
        """Raise ServiceError once nothing can end for a while, because a server is away, and the limit is reached."""
        now, is_stuck = time.monotonic(), self._study.trouble is not None or self._executor.is_silent
        if not (is_stuck and self._scheduler.stopping):
            self._stuck_since = now
        elif now - self._stuck_since > GIVE_UP_SECONDS:
            raise ServiceError(
                f"{self._study.trouble or self._executor.trouble}; the study has reached its limit and ends without "
                f"the results of {self._study.in_flight} trials that run: --resume {self._study.name} takes them up"
            )

    def _refuse_nested_trials(self) -> None:
        """Raise NestedStart if a trial has tried to start a study on workers: so will the next ones."""
        kind = f"{NestedStart.__module__}.{NestedStart.__qualname__}: "
        for each in self._study.failures.common():
            if each.failure.headline.startswith(kind):
                raise NestedStart(f"trial {each.first} failed: {str(each.failure).removeprefix(kind)}")

    def _refuse_other_code(self) -> None:
        """Raise UsageError if all embedded workers have had other code for a while, and no trial has ended.

        Their files are those of this process, and no other worker can come: the study would wait for ever.
        """
        if self._embedded is None or self._executor.has_workers or self._study.counted > self._counted_before:
            return
        found = self._executor.other_code()
        if len(found) >= len(self._embedded.workers) and not self._disk.edited(self._code):
            raise UsageError(f"no embedded worker can run this study: {found[0].removeprefix('Warning: ')}")

    @property
    def results(self) -> StudyResults:
        """The study as it is recorded; also after the end of the session."""
        return StudyResults(self._store, self._study.record, self._space.evaluate)

    def show_result(self) -> None:
        """Print the table, or the JSON object."""
        self._study.commit()
        if self._options.as_json:
            seconds = time.monotonic() - self._began
            found = views.as_json(self._study, seconds, self._scheduler.subspaces, self._slots)
            sys.stdout.write(json.dumps(found) + "\n")
        else:
            refused = self._executor.refused() + self._study.refused
            where = self._file.module, self._study.name, self._store.safe_url
            trials = views.further_trials(self._plan.limits.trials, self._study.counted)
            resume = views.resume_command(*where, trials, self._options.workers)
            views.summary(self._study, self._space, self._console, resume, refused, run_lines=self._run_lines())
            if forged := self._executor.forged:
                say(f"records in Redis refused, unsigned or malformed: {forged}", err=True)
        if self._options.fleet and not self._disk.edited(self._code):
            # A short run ends before it is sure that they will not read their files anew.
            for warning in sorted({*self._executor.other_code(at_end=True)} - self._warned):
                say(warning, err=True)
        if self._scheduler.hopeless:
            say(
                f"stopped: {self._scheduler.hopeless}; fix it and go on with --resume {self._study.name}, or let it "
                "run on with --max-failures 0",
                err=True,
            )
        elif self._scheduler.is_stale:
            gain = "a change of the front" if len(self._study.objectives) > 1 else "a better feasible loss"
            say(
                f"ended: {self._plan.limits.without_gain} trials without {gain} (--early-stop); "
                f"--resume {self._study.name} --early-stop {2 * (self._plan.limits.without_gain or 0)} goes on",
                err=True,
            )
        elif self._running.is_stopped:
            say(f"ended: on_trial called study.stop(); --resume {self._study.name} goes on", err=True)
        elif self._scheduler.is_exhausted:
            tried = "has no further params, all of its points have been tried"
            say(f"ended: the sampler {tried if self._study.counted else 'returned no params'}", err=True)
        # A short run may have ended before the last look for warnings.
        for warning in (
            f"Warning: {each}" for each in [*self._study.deletions(at_end=True), *self._scheduler.notices()]
        ):
            if warning not in self._warned:
                say(warning, err=True)
        if self._study.best is None and not self._scheduler.hopeless:
            say(str(NoSuccessfulTrial()) if self._study.counted else "No trial has ended.", err=True)

    def _run_lines(self) -> list[str]:
        """Return lines on this run: its time and rate, the machines of the study, and the versions."""
        key, trials = self._study.record.key, self._study.counted - self._counted_before
        versions = f"shadho_celery {__version__}", f"Python {platform.python_version()}"
        time_line = views.time_line(time.monotonic() - self._began, trials)
        return [time_line, *views.place_lines(self._store.hosts(key), self._store.codes(key), versions)]

    def _warnings(self) -> Iterator[str]:
        """Yield the present warnings of failures, classes, code and workers."""
        yield from self._executor.notices()
        yield from (f"Warning: {each}" for each in [*self._study.deletions(), *self._scheduler.notices()])
        if self._study.best is not None:
            yield from (f"Warning: {each}" for each in views.share_lines(self._study) if "share" in each)
            yield from _of_failures(self._study, self._plan.limits.failures or math.inf)
        if edited := self._disk.edited(self._code):
            yield self._edited(edited)
        else:
            yield from self._executor.other_code()

    def _missing_workers(self) -> Iterator[tuple[str, str]]:
        """Yield a warning for each thing that workers lack at present, by a name of it."""
        live, wanted = self._executor.workers, (self._file.module, Signer.configured().fingerprint, self._code)
        served: Counter[str] = Counter()
        for worker in able(live, *wanted).values():
            served[worker.compute_class] += worker.slots
        if self._embedded is not None:
            # Who has named the workers does without the other classes.
            expected = () if self._options.workers else self._plan.settings.classes
            yield from _embedded_warnings(self._embedded, expected, {worker.compute_class for worker in live.values()})
            return
        live = {name: worker for name, worker in live.items() if not worker.draining}
        first = next(iter(self._plan.settings.classes), "gpu_large")
        trouble = unable(live, *wanted, refused=self._executor.unsigned, compute_class=first)
        if trouble is not None and not self._disk.edited(self._code):
            yield "able", f"Warning: {trouble}"
            if any(self._file.module in worker.imports for worker in live.values()):
                # They are not missing.
                return
        if served and max(served.values()) < self._widest:
            yield (
                "slots",
                f"Warning: trials take up to {self._widest} slots of one class, and no class has as many; "
                "start more workers of one class, or with more slots",
            )
        # A class whose workers have other modules is served; the line above is about them.
        there = {worker.compute_class for worker in live.values()}
        for name in self._plan.settings.classes:
            if name not in there:
                start = start_command(name, self._file.module)
                yield f"class {name}", f"Warning: no worker serves the queue {name}; start one: {start}"

    def _edited(self, path: str) -> str:
        """Return the warning that a file of the study is not any more as this run has read it."""
        then = f"stop it with Ctrl-C, and --resume {self._study.name} goes on with the new code"
        if self._executor.has_workers:
            return f"Warning: {path} was edited; this run goes on with its code of before while workers have it: {then}"
        return f"Warning: {path} was edited, no worker has its version of before, and this run waits for one: {then}"

    @contextmanager
    def _note_signals(self) -> Iterator[None]:
        """Note Ctrl-C and SIGTERM, to be handled between two turns of the loop."""

        def note(number: int, _: object) -> None:
            self._signals.append(number)
            if len(self._signals) > 2:
                # The loop does not come to its next turn, perhaps because of a network that does not answer.
                raise SystemExit(STOPPED[signal.Signals(number)])

        before = {number: signal.signal(number, note) for number in STOPPED}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle_signals(self, say: Callable[[str], None]) -> None:
        """Let running trials finish after one Ctrl-C; stop at once after two, or after SIGTERM.

        One ends the wait for a store that is away: --resume finds the results of what was sent, and asks for the rest.
        """
        at_once = len(self._signals) > 1 or signal.SIGTERM in self._signals
        is_first = bool(self._signals) and not self._scheduler.stopping
        if self._study.trouble is not None and (at_once or is_first):
            raise self._study.trouble
        if at_once:
            raise _StopNow
        if self._signals and not self._scheduler.stopping:
            self._scheduler.stop()
            say("stopping: running trials finish first; Ctrl-C again stops at once")


def _of_failures(study: StudyState, most: float) -> Iterator[str]:
    """Yield a warning for each kind of failure that at least so many trials have had."""
    for each in study.failures.common():
        if each.trials >= most:
            # Without their number, which changes: it is said once.
            yield f"Warning: {most} trials and more fail with {each.failure}"


def _shipped(code: CodeVersion) -> Sources:
    """Return the sources of a study for its workers. Raises UsageError for what cannot be shipped."""
    try:
        return msgspec.convert({"code": code.digest, "files": contents(code)}, Sources)
    except msgspec.ValidationError as error:
        raise UsageError(f"the study's code cannot be shipped: {error}; copy its files to the workers") from None


def _embedded_warnings(embedded: Embedded, expected: Sequence[str], live: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield a warning for each class without a live worker; on one machine no other can be started by hand."""
    for name in embedded.workers:
        if name not in live:
            where = f"see its log in {embedded.directory}"
            yield f"class {name}", f"Warning: the embedded worker of class {name} does not answer; {where}"
    if missing := [name for name in expected if name not in embedded.workers]:
        slots = {**embedded.workers, **dict.fromkeys(missing, 1)}
        wanted = ",".join(f"{name}={count}" for name, count in slots.items())
        yield (
            "classes",
            f"Warning: STUDY['classes'] names {', '.join(missing)}, which no embedded worker serves; trials run on "
            f"{', '.join(embedded.workers)} alone, unless you give --workers {shlex.quote(wanted)}",
        )
