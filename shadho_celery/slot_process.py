"""What runs inside a slot's process: one trial after another, as the worker's end (`runner.py`) sends them."""

from __future__ import annotations

import faulthandler
import functools
import inspect
import json
import os
import queue
import random
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shadho_celery import study_file
from shadho_celery.context import (
    LocalContext,
    Objective,
    Outcome,
    ReplicaDone,
    ReplicaSeat,
    TrialTimeout,
    call,
    describe,
    joined,
)
from shadho_celery.errors import UsageError
from shadho_celery.leavings import Leavings, identity
from shadho_celery.memory import PeakMemory
from shadho_celery.payloads import MAX_REPLICAS, is_address, is_token
from shadho_celery.returned import short
from shadho_celery.rounds import whole
from shadho_celery.trial import TrialState

if TYPE_CHECKING:
    from shadho_celery.space.compile import Space

#: seconds that a trial has to return after its time limit, before its process is killed
HARD_SECONDS = 5.0

#: exit code of a process whose end of the pipe was closed by its trial
PIPE_LOST = 74

#: interrupts a trial at its time limit; hardly anything else uses it
_INTERRUPT = signal.SIGVTALRM


class SlotProcess:
    """Runs the trials that come in by a pipe."""

    def __init__(self, pipe: socket.socket) -> None:
        self._pipe = pipe
        self._pipe_identity = identity(pipe.fileno())
        self._pid = os.getpid()
        self._sending = threading.Lock()
        self._stop = threading.Event()
        self._timed_out = threading.Event()
        #: True while the objective itself runs
        self._is_in_objective = False
        self._trials: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._studies: dict[str, tuple[Objective, Space]] = {}

    def serve(self, modules: Sequence[str]) -> None:
        """Import `modules`, then run trials until the pipe ends."""
        faulthandler.enable()
        signal.signal(_INTERRUPT, self._interrupt)
        threading.Thread(target=self._listen, daemon=True).start()
        for name in modules:
            # A module that cannot be imported fails its own trials, not those of the others.
            with suppress(BaseException):
                self._objective(name)
        leavings = Leavings()
        self._send({"ready": True})
        while True:
            self._serve_one(self._trials.get(), leavings)

    def _serve_one(self, trial: dict[str, Any], leavings: Leavings) -> None:
        is_over = False

        def tell(record: Mapping[str, Any]) -> None:
            # A thread that a trial left behind must not speak for the next one.
            self._send(record, unless=lambda: is_over)

        outcome = self._run(trial, tell, leavings.spares[2])
        if os.getpid() != self._pid:
            # The trial has forked, and here its child comes back.
            os._exit(0)
        try:
            left = leavings.clear()
        except Exception as error:
            left = [f"what cannot be cleared away: {type(error).__name__}: {short(error)}"]
        if left:
            outcome = replace(outcome, warning=joined(outcome.warning, f"it left behind {', '.join(left)}"))
        with self._sending:
            is_over = True
        # After want of memory nobody knows what still holds some.
        self._send({"outcome": vars(outcome), "replace": bool(left) or outcome.out_of_memory})

    def _listen(self) -> None:
        """Read the pipe; end this process when the worker's end closes, or the trial has closed this one."""
        with suppress(OSError, ValueError):
            for line in self._pipe.makefile("r", encoding="utf-8", newline="\n"):
                record = json.loads(line)
                if "trial" in record:
                    self._stop.clear()
                    self._timed_out.clear()
                    self._trials.put(record["trial"])
                elif "time_out" in record:
                    self._timed_out.set()
                    signal.pthread_kill(threading.main_thread().ident or 0, _INTERRUPT)
                else:
                    self._stop.set()
        os._exit(PIPE_LOST)

    def _interrupt(self, *_: Any) -> None:
        if self._is_in_objective and self._timed_out.is_set():
            self._is_in_objective = False
            raise TrialTimeout("the trial has reached its time limit (--trial-timeout)")

    def _context(self, trial: dict[str, Any], tell: Callable[[Mapping[str, Any]], None]) -> LocalContext:
        seat = trial.get("replica")
        called: dict[str, Any] = {}

        def report(step: int, loss: float) -> None:
            # A replica computes for the trial; what becomes of the trial its coordinator tells.
            if seat is None:
                tell({"report": {"step": step, "loss": loss}})

        def call_replicas(address: str, token: str, backups: int) -> None:
            if seat is not None:
                raise UsageError("no replicas can be called: this is one; look at context.replica first")
            if (trial.get("slots") or 1) < 2:
                raise UsageError('no replicas can be called: the trial has one slot; see STUDY["slots"]')
            if not is_address(address) or not is_token(token) or not 0 <= backups <= MAX_REPLICAS:
                raise UsageError(f"no replica can be sent to {address!r}: give host:port, a token, and backups >= 0")
            called.update(address=address, token=token, backups=backups)
            tell({"gang": {**called, "assembled": False}})

        def gang_assembled() -> None:
            # A gang that has called nobody is this trial's own affair.
            if called:
                tell({"gang": {**called, "assembled": True}})

        return LocalContext(
            trial=trial["number"],
            attempt=trial["attempt"],
            seed=trial["seed"],
            checkpoints=Path(trial["checkpoint_dir"]),
            device="cuda" if os.environ.get("CUDA_VISIBLE_DEVICES") else "cpu",
            compute_class=trial["compute_class"],
            slot=trial["slot"],
            budget=whole(trial.get("budget")),
            on_report=report,
            stopped=self._stop.is_set,
            timeout=trial.get("timeout"),
            timed_out=self._timed_out.is_set,
            slots=trial.get("slots") or 1,
            replica=None if seat is None else ReplicaSeat(**seat),
            is_copy=trial.get("not_on") is not None,
            on_call_replicas=call_replicas,
            on_gang_assembled=gang_assembled,
        )

    def _run(self, trial: dict[str, Any], tell: Callable[[Mapping[str, Any]], None], output: int) -> Outcome:
        timeout = trial.get("timeout")

        def told(record: Mapping[str, Any]) -> None:
            if "gang" in record:
                # Its limit stands still while it waits for replicas; the dump set below would come too early.
                faulthandler.cancel_dump_traceback_later()
            tell(record)

        context = self._context(trial, told)
        try:
            objective, space = self._objective(trial["module"])
        except BaseException as error:
            return Outcome(state=TrialState.FAILED, error=describe(error))
        peak = PeakMemory()
        _seed(context.seed)
        if timeout is not None:
            # Where a trial hangs in C, and Python cannot raise anything in it, this still says where.
            faulthandler.dump_traceback_later(timeout + HARD_SECONDS - 1, file=output)
        try:
            outcome = call(
                objective,
                lambda: space.evaluate(trial["params"]),
                context,
                fatal=() if context.replica is None else (ReplicaDone,),
            )
        except ReplicaDone:
            outcome = Outcome(state=TrialState.CANCELLED, error="its gang needs it no more")
        if timeout is not None:
            faulthandler.cancel_dump_traceback_later()
        return replace(outcome, memory=peak.read())

    def _interruptible(self, objective: Objective) -> Objective:
        """The objective, in which a time limit may interrupt, and nowhere else."""
        limit = sys.getrecursionlimit()

        @functools.wraps(objective, updated=())
        def run(*arguments: Any) -> Any:
            self._is_in_objective = True
            try:
                return objective(*arguments)
            finally:
                self._is_in_objective = False
                # At once: with one set too low nothing more could be called here.
                sys.setrecursionlimit(limit)

        with suppress(TypeError, ValueError):
            # Or it would be worked out again for each trial, which takes as long as the rest of the call.
            run.__signature__ = inspect.signature(objective)  # type: ignore[attr-defined]
        return run

    def _objective(self, module: str) -> tuple[Objective, Space]:
        """The objective of `module`, made interruptible, and its compiled space."""
        if module not in self._studies:
            # Here and not above: the worker's own process imports this file too, and needs no hyperopt.
            from shadho_celery.space.compile import compile_space

            file = study_file.load(module)
            self._studies[module] = (self._interruptible(file.objective), compile_space(file.space))
        return self._studies[module]

    def _send(self, record: Mapping[str, Any], unless: Callable[[], bool] = lambda: False) -> None:
        with self._sending:
            if unless():
                return
            if identity(self._pipe.fileno()) != self._pipe_identity:
                # What is open there now is the trial's own, and not to be written to.
                with suppress(OSError):
                    os.write(2, b"the trial closed the descriptor that its process speaks to the worker by\n")
                os._exit(PIPE_LOST)
            self._pipe.sendall(line(record))


def line(record: Mapping[str, Any]) -> bytes:
    """A record as both ends of the pipe write it."""
    return json.dumps(record).encode() + b"\n"


def _seed(seed: int) -> None:
    """Seed the generators that everybody shares, so that no trial draws on from where another has left them."""
    random.seed(seed)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(seed % 2**32)
    torch = sys.modules.get("torch")
    if torch is not None:
        # Not torch.manual_seed: it takes a fifth of a millisecond where there is no GPU.
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)
