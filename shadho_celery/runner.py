"""A slot's process: trials run here, apart from the worker, so that nothing a trial does can reach it.

Both ends of the pipe between them are in this file. The worker's end is `Runner`; the process is this module run as
``python -m shadho_celery.runner``, which reads one JSON record a line and answers in kind:

- in: ``{"trial": {...}}`` runs a trial, ``{"stop": true}`` raises its stop flag; the end of the pipe ends the process
  and all its children
- out: ``{"ready": true}`` once the study modules are imported, ``{"report": {...}}``, ``{"outcome": {...}}``
"""

from __future__ import annotations

import fcntl
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shadho_celery import study_file
from shadho_celery.clock import SystemClock
from shadho_celery.context import LocalContext, Objective, Outcome, call, describe
from shadho_celery.memory import PeakMemory
from shadho_celery.trial import TrialState

if TYPE_CHECKING:
    from shadho_celery.space.compile import Space

#: seconds a trial has to return after its stop flag was raised
STOP_SECONDS = 2.0

#: characters of a dead process's output that are kept
TAIL = 4000


class Runner:
    """The worker's end of one slot's process, which is started when needed and replaced after a death."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        """`modules` are imported before the first trial; `environment` is added to this process's own."""
        self._modules = list(modules)
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Any = None
        self._lines: Any = None
        self._output: Any = None
        self._lifeline = -1
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the process unless it lives; it gets ready while others do something else."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return
            self._reap()
            ours, theirs = socket.socketpair()
            lifeline, self._lifeline = os.pipe()
            descriptors = [theirs.fileno(), lifeline]
            self._output = tempfile.TemporaryFile()  # noqa: SIM115 -- lives as long as the process
            with theirs:
                self._process = subprocess.Popen(
                    # Unbuffered: what a trial printed before it crashed is in the file by then.
                    [sys.executable, "-u", "-m", "shadho_celery.runner", *map(str, descriptors), *self._modules],
                    pass_fds=descriptors,
                    stdin=subprocess.DEVNULL,
                    stdout=self._output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **self._environment},
                    # Its own process group, to be killed as one, children of the trial included.
                    start_new_session=True,
                )
            os.close(lifeline)
            threading.Thread(target=_end_group, args=(self._process.pid,), daemon=True).start()
            self._pipe = ours
            self._lines = ours.makefile("r", encoding="utf-8", newline="\n")

    def run(self, trial: Mapping[str, Any], on_report: Callable[[Mapping[str, Any]], None]) -> Outcome:
        """Run one trial to its end; the end of the process is an outcome too."""
        began = SystemClock().now()
        self.start()
        self._output.seek(0)
        self._output.truncate()
        try:
            self._pipe.sendall(_line({"trial": trial}))
            for line in self._lines:
                record = json.loads(line)
                if "report" in record:
                    on_report(record["report"])
                elif "outcome" in record:
                    outcome = record["outcome"]
                    return Outcome(**{**outcome, "state": TrialState(outcome["state"])})
        except (OSError, ValueError):
            pass
        return Outcome(state=TrialState.FAILED, error=self._obituary(), seconds=SystemClock().now() - began)

    def stop_trial(self) -> None:
        """Raise the running trial's stop flag."""
        pipe = self._pipe
        if pipe is not None:
            with suppress(OSError):
                pipe.sendall(_line({"stop": True}))

    def kill(self) -> None:
        """End the process and its children at once."""
        with self._lock:
            self._reap()

    def _reap(self) -> None:
        if self._process is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with suppress(OSError):
            self._lines.close()
            self._pipe.close()
            self._output.close()
            os.close(self._lifeline)
        self._process = None

    def _obituary(self) -> str:
        """How the process died, and the last it printed."""
        with self._lock:
            if self._process is None:
                return "the trial's process was killed"
            try:
                code = self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                code = 0
            end = f"signal {_signal_name(-code)}" if code < 0 else f"exit code {code}"
            self._output.seek(max(0, self._output.seek(0, os.SEEK_END) - TAIL))
            tail = self._output.read().decode("utf-8", "replace").strip()
            self._reap()
        return f"the trial's process ended with {end}" + (f"; it last printed:\n{tail}" if tail else "")


def _end_group(leader: int) -> None:
    """Once the process has died, end the children it left: one of them may hold the pipe, and so hide its death."""
    if hasattr(os, "waitid"):
        with suppress(ChildProcessError, ProcessLookupError, PermissionError):
            os.waitid(os.P_PID, leader, os.WEXITED | os.WNOWAIT)
            os.killpg(leader, signal.SIGKILL)


def _signal_name(number: int) -> str:
    """SIGSEGV; the number where it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record).encode() + b"\n"


class _Process:
    """The other end: what runs inside the process."""

    def __init__(self, pipe: socket.socket) -> None:
        self._pipe = pipe
        self._sending = threading.Lock()
        self._stop = threading.Event()
        self._trials: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._studies: dict[str, tuple[Objective, Space]] = {}

    def serve(self, modules: Sequence[str]) -> None:
        """Import `modules`, then run trials until the pipe ends."""
        threading.Thread(target=self._listen, daemon=True).start()
        for name in modules:
            # A module that cannot be imported fails its own trials, not those of the others.
            with suppress(Exception):
                self._objective(name)
        self._send({"ready": True})
        while True:
            outcome = self._run(self._trials.get())
            # What it printed belongs to this trial, and must be in the file before the worker looks.
            sys.stdout.flush()
            self._send({"outcome": asdict(outcome)})

    def _listen(self) -> None:
        """Read the pipe; when the worker's end closes, end this process and everything it started."""
        with suppress(OSError, ValueError):
            for line in self._pipe.makefile("r", encoding="utf-8", newline="\n"):
                record = json.loads(line)
                if "trial" in record:
                    self._stop.clear()
                    self._trials.put(record["trial"])
                else:
                    self._stop.set()
        os.killpg(0, signal.SIGKILL)

    def _run(self, trial: dict[str, Any]) -> Outcome:
        context = LocalContext(
            trial=trial["number"],
            attempt=trial["attempt"],
            seed=trial["seed"],
            checkpoint_dir=Path(trial["checkpoint_dir"]),
            device="cuda" if os.environ.get("CUDA_VISIBLE_DEVICES") else "cpu",
            compute_class=trial["compute_class"],
            slot=trial["slot"],
            budget=trial.get("budget"),
            on_report=lambda step, loss: self._send({"report": {"step": step, "loss": loss}}),
            stopped=self._stop.is_set,
        )

        try:
            objective, space = self._objective(trial["module"])
        except Exception as error:
            return Outcome(state=TrialState.FAILED, error=describe(error))
        peak = PeakMemory()
        outcome = call(objective, lambda: space.evaluate(trial["params"]), context)
        return replace(outcome, memory=peak.read())

    def _objective(self, module: str) -> tuple[Objective, Space]:
        """The objective and the compiled space of `module`."""
        if module not in self._studies:
            # Here and not above: the worker's own process imports this file too, and needs no hyperopt.
            from shadho_celery.space.compile import compile_space

            file = study_file.load(module)
            self._studies[module] = (file.objective, compile_space(file.space))
        return self._studies[module]

    def _send(self, record: Mapping[str, Any]) -> None:
        with self._sending:
            self._pipe.sendall(_line(record))


def _hang_on(lifeline: int) -> None:
    """Have the kernel kill this process group when the worker's end of the pipe `lifeline` closes (Linux only).

    `_listen` sees the end of its own pipe everywhere, but not while a trial keeps Python's lock in a long call into C.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
            fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)


def main() -> None:
    """Serve on the socket whose descriptor is the first argument; the second's end is ours; the others are modules."""
    # Ctrl-C at a terminal is for the scheduler; this process ends with its worker.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor, lifeline, *modules = sys.argv[1:]
    _hang_on(int(lifeline))
    _Process(socket.socket(fileno=int(descriptor))).serve(modules)


if __name__ == "__main__":
    main()
