"""One run of one study from the command line: what is opened, in which order, and how it ends."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from shadho_celery.cli import connection_options, views
from shadho_celery.cli.options import Options
from shadho_celery.cli.warnings import Warnings
from shadho_celery.core import hardware
from shadho_celery.embedded.embedded import Embedded
from shadho_celery.errors import NoSuccessfulTrial, UsageError
from shadho_celery.fleet.executor import QueueExecutor
from shadho_celery.objective.study_file import StudyFile
from shadho_celery.scheduler.build import check_settings, make_scheduler
from shadho_celery.scheduler.widths import widest
from shadho_celery.space.compile import compile_space
from shadho_celery.store.sql import DEFAULT_STORE, SqlStore
from shadho_celery.study.limits import Limits
from shadho_celery.study.open import open_study
from shadho_celery.transport import urls
from shadho_celery.transport.broker import Publisher
from shadho_celery.transport.redis import connect
from shadho_celery.transport.signing import Signer

DEFAULT_TRIALS = 100

#: columns of the result where there is no terminal to ask
PLAIN_WIDTH = 120

#: exit codes of a run that was stopped at once, as shells have them: 128 and the signal's number
STOPPED = {signal.SIGINT: 130, signal.SIGTERM: 143}


class _StopNow(Exception):
    """Leave the loop."""


class Session:
    """Runs one study to its end, on this machine or on the fleet. A context manager; raises ShadhoError."""

    def __init__(self, options: Options, file: StudyFile) -> None:
        self._options = options
        self._file = file
        self._began = time.monotonic()
        # What makes no sense is refused before anything is opened; an earlier run's settings are then read.
        self._settle({})
        self._space = compile_space(file.space)
        self._expected = self._settings.classes
        #: slots of one class that the widest trial takes
        self._widest = widest(self._settings.slots, self._space)
        is_plain = not sys.stdout.isatty() and "COLUMNS" not in os.environ
        self._console = Console(stderr=options.as_json, width=PLAIN_WIDTH if is_plain else None)
        self._embedded: Embedded | None = None
        self._slots: dict[str, int] = {}
        self._signals: list[int] = []
        #: False while a turn of the loop may have been left in its middle
        self._is_whole = True
        self._opened = ExitStack()

    def _settle(self, earlier: Mapping[str, Any]) -> None:
        """Decide what holds, given the settings of `earlier` runs. Raises UsageError for what makes no sense."""
        self._settings = self._options.over(self._file.stated, earlier)
        check_settings(self._settings)
        bounds = {name: getattr(self._settings, name) for name in ("trials", "seconds", "target")}
        self._limits = Limits(**(bounds if set(bounds.values()) != {None} else {"trials": DEFAULT_TRIALS}))

    def __enter__(self) -> Session:
        with ExitStack() as opened:
            # First in, last out: opening and closing are not to be cut in half either.
            opened.enter_context(self._note_signals())
            self._open(opened)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def _open(self, opened: ExitStack) -> None:
        """Open store, servers, study and scheduler; what is opened last is closed first."""
        self._store = opened.enter_context(closing(SqlStore(self._options.store)))
        connection_options.warn_of_password("--store", self._options.store, "PGPASSWORD or ~/.pgpass")
        if self._options.fleet:
            # Before the study is recorded: a server that is down should leave no empty study behind.
            client, publisher = connect(urls.url(urls.REDIS)), Publisher.configured()
            _say(f"fleet: broker {urls.mask(urls.url(urls.BROKER))}, Redis {urls.mask(urls.url(urls.REDIS))}")
        self._study = open_study(
            self._store,
            self._space.describe(),
            module=self._file.module,
            name=self._options.name,
            resume=self._options.resume,
            seed=self._options.seed,
            settings=self._options.given,
        )
        opened.callback(self._study.close)
        self._settle(self._study.record.settings)
        if not self._options.fleet:
            self._embedded = opened.enter_context(closing(self._embed()))
            os.environ.update({urls.BROKER: self._embedded.broker_url, urls.REDIS: self._embedded.redis_url})
            client, publisher = connect(self._embedded.redis_url), Publisher.configured()
        self._executor = QueueExecutor(
            client,
            publisher,
            self._study.record.key,
            self._file.module,
            weight=self._settings.weight,
            adopt=self._options.fleet,
            trial_timeout=self._settings.trial_timeout,
            gang_wait_seconds=self._settings.gang_wait_seconds,
            signer=Signer.configured(),
        )
        opened.callback(self._let_go, publisher)
        self._scheduler = make_scheduler(self._space, self._study, self._executor, self._limits, self._settings)

    def _let_go(self, publisher: Publisher) -> None:
        """Close the executor, which forgets what it has brought: that must have been recorded before."""
        if self._is_whole:
            with ExitStack() as broken:
                broken.callback(publisher.close)
                self._study.commit()
                broken.pop_all()
            self._executor.close()
        else:
            publisher.close()

    def _embed(self) -> Embedded:
        machine = hardware.detect()
        workers = self._options.workers or self._play_classes(machine)
        if max(workers.values()) < self._widest:
            raise UsageError(
                f"STUDY['slots'] gives a trial {self._widest} slots of one class, and no class has as many here; "
                f"give --workers {next(iter(workers))}={self._widest}"
            )
        return Embedded(Path(".shadho") / self._study.name, workers, [self._file.module], machine.cores)

    def _play_classes(self, machine: hardware.Machine) -> dict[str, int]:
        """The embedded workers by default."""
        if machine.gpus:
            cores = max(1, machine.cores - len(machine.gpus))
            return {machine.compute_class: len(machine.gpus), "cpu": cores if self._widest == 1 else self._widest}
        if self._widest > 1:
            return {machine.compute_class: max(self._widest, machine.cores)}
        names = self._expected or hardware.DEFAULT_CLASSES
        _say(
            f"no GPU here: CPU workers play the classes {', '.join(names)}; --workers cpu={machine.cores} for real use"
        )
        return dict.fromkeys(names, 1)

    def search(self) -> int:
        """Turn the loop to its end under a view; the exit code."""
        is_terminal = self._console.is_terminal
        view = views.LiveView(self._scheduler, self._console) if is_terminal else views.PlainView(self._scheduler)
        warnings = Warnings(self._expected, self._executor, self._file.module, self._widest)

        def on_turn() -> None:
            self._heed_signals(view.note)
            if self._embedded is not None:
                self._embedded.raise_if_dead()
            for compute_class in self._scheduler.classes:
                self._slots[compute_class.name] = max(compute_class.slots, self._slots.get(compute_class.name, 0))
            for warning in warnings.due():
                view.note(warning)
            view.update()

        _say(f"study {self._study.name} (seed {self._study.record.seed}) in {self._store.safe_url}")
        self._is_whole = False
        with view:
            try:
                self._scheduler.run(on_turn)
            except _StopNow:
                # Embedded workers end with us: what they run is lost rather than cancelled, and waits for --resume.
                self._scheduler.stop(running=self._options.fleet)
                self._is_whole = True
                return STOPPED[signal.Signals(self._signals[-1])]
        self._is_whole = True
        return 0 if self._study.best is not None or self._signals else NoSuccessfulTrial.exit_code

    def show_result(self) -> None:
        """The table, or the JSON object."""
        self._study.commit()
        seconds = time.monotonic() - self._began
        resume = ["python", "-m", "shadho_celery.launch", self._file.module, "--resume", self._study.name]
        if self._options.store != DEFAULT_STORE:
            resume += ["--store", self._store.safe_url]
        asked = self._limits.trials or 0
        resume += ["--trials", str(asked if asked > self._study.counted else 2 * max(1, self._study.counted))]
        if self._options.as_json:
            sys.stdout.write(
                json.dumps(views.as_json(self._study, seconds, self._scheduler.subspaces, self._slots)) + "\n"
            )
        else:
            refused = self._executor.refused()
            views.summary(self._study, self._space, self._console, shlex.join(resume), refused=refused)
        if self._study.best is None:
            _say(str(NoSuccessfulTrial()) if self._study.counted else "No trial has ended.")

    @contextmanager
    def _note_signals(self) -> Iterator[None]:
        """Take Ctrl-C and SIGTERM down, to be heeded between two turns of the loop, where nothing is half done."""

        def note(number: int, _: object) -> None:
            self._signals.append(number)
            if len(self._signals) > 2:
                # Somebody insists: something hangs, in a network that does not answer perhaps.
                raise SystemExit(STOPPED[signal.Signals(number)])

        before = {number: signal.signal(number, note) for number in STOPPED}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _heed_signals(self, say: Any) -> None:
        """Ctrl-C once: finish what runs; twice, or SIGTERM: stop now."""
        if len(self._signals) > 1 or signal.SIGTERM in self._signals:
            raise _StopNow
        if self._signals and not self._scheduler.stopping:
            self._scheduler.stop()
            say("stopping: what runs is finished first; Ctrl-C again stops at once")


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
