"""A slot's process: trials run here, apart from the worker, so that nothing a trial does can reach it.

The worker's end is `Runner`. The process is `slot_process.py`, started under a guardian (`guardian.py`) that lets
nothing of it stay behind. Between them is a pipe of JSON records, one a line:

- in: ``{"trial": {...}}`` runs a trial, ``{"stop": true}`` raises its stop flag, ``{"time_out": true}`` interrupts it;
  the end of the pipe ends the process
- out: ``{"ready": true}`` once the study modules are imported, ``{"report": {...}}``, ``{"gang": {...}}`` where the
  trial calls for replicas or tells that they have come, ``{"outcome": {...}}``, with ``"replace": true`` where the
  process is not fit for another trial
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shadho_celery.clock import SystemClock
from shadho_celery.context import MAX_ERROR, Outcome
from shadho_celery.guarded import Garbage, Guarded, as_garbage
from shadho_celery.payloads import MAX_REPLICAS, is_address, is_token
from shadho_celery.slot_process import HARD_SECONDS, SlotProcess
from shadho_celery.trial import TrialState

#: seconds a trial has to return after its stop flag was raised
STOP_SECONDS = 2.0

#: seconds that a process may take to import its study modules, before they count as part of its trial
IMPORT_SECONDS = 300.0


Told = Callable[[Mapping[str, Any]], None]


def _ignore(_: Mapping[str, Any]) -> None:
    pass


class Runner:
    """The worker's end of one slot's process, which is started when needed and replaced after a death."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        """`modules` are imported before the first trial; `environment` is added to this process's own."""
        self._arguments = ["shadho_celery.runner", *modules]
        self._environment = dict(environment)
        self._process: Guarded | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the process unless it lives; it gets ready while others do something else. Raises OSError."""
        self._living()

    def run(self, trial: Mapping[str, Any], on_report: Told, on_gang: Told = _ignore) -> Outcome:
        """Run one trial to its end; the end of the process is an outcome too.

        `trial["timeout"]`, where it is there, are the seconds it may take, but for those in which it waits for its
        replicas. `on_gang` gets what it calls for replicas with, ``address``, ``token`` and ``backups``, and that again
        once they have come: ``assembled``.
        """
        began = SystemClock().now()
        try:
            process = self._living()
        except OSError as error:
            return Outcome(state=TrialState.FAILED, error=f"the slot's process cannot be started: {error}")
        limit = _TimeLimit(trial.get("timeout"), process)
        garbage = ""
        try:
            outcome = self._converse(process, trial, on_report, on_gang, limit)
        except Garbage as error:
            garbage, outcome = str(error), None
            process.kill()
        except BaseException:
            # Whatever it is, the trial must not go on beside the next one.
            process.kill()
            raise
        finally:
            limit.end()
        if outcome is None:
            how, is_hungry = process.obituary()
            text = garbage or limit.struck or how
            return Outcome(
                state=TrialState.FAILED,
                error=text + (f"; it last printed:\n{process.tail}" if process.tail else ""),
                seconds=SystemClock().now() - began,
                out_of_memory=is_hungry,
            )
        if process.is_unfit:
            process.kill()
        return outcome

    def stop_trial(self) -> None:
        """Raise the running trial's stop flag."""
        process = self._process
        if process is not None:
            process.send({"stop": True})

    def kill(self) -> None:
        """End the process and its children at once."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()

    def _living(self) -> Guarded:
        """The process, a new one where there is none that lives."""
        with self._lock:
            if self._process is None or not self._process.is_idle():
                if self._process is not None:
                    self._process.kill()
                    self._process = None
                self._process = Guarded(self._arguments, self._environment)
            return self._process

    @staticmethod
    def _converse(
        process: Guarded,
        trial: Mapping[str, Any],
        on_report: Told,
        on_gang: Told,
        limit: _TimeLimit,
    ) -> Outcome | None:
        """Send the trial and hear what comes of it; None where the process has died."""
        process.forget_output()
        process.send({"trial": trial})
        limit.begin()
        for record in iter(process.receive, None):
            if "report" in record:
                on_report(_report(record))
            elif "gang" in record:
                call = _gang(record)
                limit.stand(still=not call["assembled"])
                on_gang(call)
            elif "outcome" in record:
                process.is_unfit = bool(record.get("replace"))
                return _outcome(record)
        return None


def _report(record: Mapping[str, Any]) -> Mapping[str, Any]:
    with as_garbage():
        step = int(record["report"]["step"])
        if not -(2**63) <= step < 2**63:
            raise ValueError("no such number")
        return {"step": step, "loss": float(record["report"]["loss"])}


def _gang(record: Mapping[str, Any]) -> Mapping[str, Any]:
    with as_garbage():
        address, token = str(record["gang"]["address"]), str(record["gang"]["token"])
        backups, assembled = int(record["gang"]["backups"]), bool(record["gang"]["assembled"])
        if not (is_address(address) and is_token(token) and 0 <= backups <= MAX_REPLICAS):
            raise ValueError("no call for replicas")
        return {"address": address, "token": token, "backups": backups, "assembled": assembled}


def _outcome(record: Mapping[str, Any]) -> Outcome:
    """The outcome in a record: a trial may have written one of its own, so that nothing in it is taken on trust."""
    with as_garbage():
        told = dict(record["outcome"])
        state = TrialState(told["state"])
        loss = None if told["loss"] is None else float(told["loss"])
        memory = None if told["memory"] is None else int(told["memory"])
        seconds = float(told["seconds"])
        if not state.is_finished or (state is TrialState.COMPLETE) != (loss is not None):
            raise ValueError("no end of a trial")
        if not all(map(math.isfinite, (loss or 0.0, seconds))) or not 0 <= (memory or 0) < 2**63:
            raise ValueError("no such number")
        return Outcome(
            state=state,
            loss=loss,
            metrics=dict(told["metrics"]),
            error=_text(told["error"]),
            seconds=seconds,
            memory=memory,
            out_of_memory=bool(told["out_of_memory"]),
            warning=_text(told["warning"]),
        )


def _text(told: Any) -> str | None:
    return None if told is None else str(told).encode("utf-8", "replace").decode()[: 2 * MAX_ERROR]


class _TimeLimit:
    """Interrupts a trial when its time is up, and kills its process where that does not help."""

    def __init__(self, seconds: float | None, process: Guarded) -> None:
        self.seconds = seconds
        #: once it has killed the process, why
        self.struck = ""
        self._process = process
        self._over = threading.Event()
        self._is_still = False
        #: held to end it, or to have it stand still or go on
        self._changed = threading.Condition()

    def begin(self) -> None:
        """From now on its time counts."""
        if self.seconds is not None:
            threading.Thread(target=self._watch, args=(self.seconds,), daemon=True).start()

    def stand(self, *, still: bool) -> None:
        """While it stands still, its time does not count."""
        with self._changed:
            self._is_still = still
            self._changed.notify_all()

    def end(self) -> None:
        """The trial is over: from now on its process may run another one."""
        with self._changed:
            self._over.set()
            self._changed.notify_all()

    def _watch(self, seconds: float) -> None:
        self._process.await_ready(IMPORT_SECONDS, self._over)
        with self._changed:
            left = seconds
            while left > 0 and not self._over.is_set():
                began, is_still = time.monotonic(), self._is_still
                self._changed.wait(None if is_still else left)
                if not is_still:
                    left -= time.monotonic() - began
            if not self._over.is_set():
                self._process.send({"time_out": True})
        if self._over.wait(HARD_SECONDS):
            return
        with self._changed:
            if not self._over.is_set():
                self.struck = (
                    f"timed out after {seconds:g} s (--trial-timeout): it went on when it was interrupted, "
                    f"and was killed {HARD_SECONDS:g} s later"
                )
                self._process.kill()


def main(arguments: Sequence[str]) -> None:
    """In the process: serve on the socket whose descriptor comes first; the others are the modules."""
    SlotProcess(socket.socket(fileno=int(arguments[0]))).serve(arguments[1:])
