"""Inside a slot's process: run one attempt after another, as the worker's end (`runner`) sends them."""

from __future__ import annotations

import faulthandler
import functools
import inspect
import os
import queue
import random
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from shadho_celery.core.checks import short
from shadho_celery.core.trial import GangCall, Outcome, TrialState, whole
from shadho_celery.errors import UsageError
from shadho_celery.objective import study_file
from shadho_celery.objective.call import Objective, call, describe, joined
from shadho_celery.objective.context import LocalContext, ReplicaDone, TrialTimeout
from shadho_celery.objective.memory import PeakMemory
from shadho_celery.runner.cleanup import Cleanup, identity
from shadho_celery.runner.protocol import (
    HARD_SECONDS,
    PIPE_LOST,
    Ended,
    FromChild,
    Gang,
    Ready,
    Reported,
    RunAttempt,
    TimeUp,
    decode_to_child,
    encode,
)

if TYPE_CHECKING:
    from shadho_celery.space.compile import Space

#: interrupts a trial at its time limit; hardly anything else uses it
_INTERRUPT = signal.SIGVTALRM


class Child:
    """Runs the attempts that come in by a pipe."""

    def __init__(self, pipe: socket.socket) -> None:
        self._pipe = pipe
        self._pipe_identity = identity(pipe.fileno())
        self._pid = os.getpid()
        self._sending = threading.Lock()
        self._stop = threading.Event()
        self._timed_out = threading.Event()
        #: True while the objective itself runs
        self._is_in_objective = False
        self._orders: queue.SimpleQueue[RunAttempt] = queue.SimpleQueue()
        self._studies: dict[str, tuple[Objective, Space]] = {}

    def serve(self, modules: Sequence[str]) -> None:
        """Import `modules`, then run attempts until the pipe ends."""
        faulthandler.enable()
        signal.signal(_INTERRUPT, self._interrupt)
        threading.Thread(target=self._listen, daemon=True).start()
        for name in modules:
            # A module that cannot be imported fails its own trials, not those of the others.
            with suppress(BaseException):
                self._study(name)
        cleanup = Cleanup()
        self._send(Ready())
        while True:
            self._serve_one(self._orders.get(), cleanup)

    def _serve_one(self, order: RunAttempt, cleanup: Cleanup) -> None:
        is_over = False

        def tell(record: FromChild) -> None:
            # A thread that a trial left behind must not speak for the next one.
            self._send(record, unless=lambda: is_over)

        outcome = self._run(order, tell, cleanup.spares[2])
        if os.getpid() != self._pid:
            # The trial has forked, and here its child comes back.
            os._exit(0)
        try:
            left = cleanup.clear()
        except Exception as error:
            left = [f"what cannot be cleared away: {type(error).__name__}: {short(error)}"]
        if left:
            outcome = replace(outcome, warning=joined(outcome.warning, f"it left behind {', '.join(left)}"))
        with self._sending:
            is_over = True
        # After want of memory it is unknown what still holds some.
        self._send(Ended(outcome=outcome, is_unfit=bool(left) or outcome.out_of_memory))

    def _listen(self) -> None:
        """Read the pipe; end this process when the worker's end closes, or the trial has closed this one."""
        with suppress(OSError, ValueError):
            for line in self._pipe.makefile("r", encoding="utf-8", newline="\n"):
                record = decode_to_child(line)
                if isinstance(record, RunAttempt):
                    self._stop.clear()
                    self._timed_out.clear()
                    self._orders.put(record)
                elif isinstance(record, TimeUp):
                    self._timed_out.set()
                    signal.pthread_kill(threading.main_thread().ident or 0, _INTERRUPT)
                else:
                    self._stop.set()
        os._exit(PIPE_LOST)

    def _interrupt(self, *_: object) -> None:
        if self._is_in_objective and self._timed_out.is_set():
            self._is_in_objective = False
            raise TrialTimeout("the trial has reached its time limit (--trial-timeout)")

    def _context(self, order: RunAttempt, tell: Callable[[FromChild], None]) -> LocalContext:
        attempt, seat = order.attempt, order.replica
        called: list[GangCall] = []

        def report(step: int, loss: float) -> None:
            # A replica computes for the trial; what becomes of the trial its coordinator tells.
            if seat is None:
                tell(Reported(step=step, loss=loss))

        def call_replicas(address: str, token: str, backups: int) -> None:
            if seat is not None:
                raise UsageError("no replicas can be called: this is one; look at context.replica first")
            if attempt.slots < 2:
                raise UsageError('no replicas can be called: the trial has one slot; see STUDY["slots"]')
            try:
                call = msgspec.convert({"address": address, "token": token, "backups": backups}, GangCall)
            except msgspec.ValidationError:
                raise UsageError(
                    f"no replica can be sent to {address!r}: give host:port, a token, and backups >= 0"
                ) from None
            called.append(call)
            tell(Gang(call=call))

        def gang_assembled() -> None:
            # A gang that has called nobody is this trial's own affair.
            if called:
                tell(Gang(call=replace(called[-1], assembled=True)))

        return LocalContext(
            trial=attempt.number,
            attempt=attempt.attempt,
            seed=attempt.seed,
            checkpoints=Path(order.checkpoint_dir),
            device="cuda" if os.environ.get("CUDA_VISIBLE_DEVICES") else "cpu",
            compute_class=order.compute_class,
            slot=order.slot,
            budget=whole(attempt.budget),
            on_report=report,
            stopped=self._stop.is_set,
            timeout=order.timeout,
            timed_out=self._timed_out.is_set,
            slots=attempt.slots,
            replica=seat,
            is_copy=attempt.not_on is not None,
            on_call_replicas=call_replicas,
            on_gang_assembled=gang_assembled,
        )

    def _run(self, order: RunAttempt, tell: Callable[[FromChild], None], output: int) -> Outcome:
        timeout = order.timeout

        def told(record: FromChild) -> None:
            if isinstance(record, Gang):
                # Its limit is paused while it waits for replicas; the dump set below would come too early.
                faulthandler.cancel_dump_traceback_later()
            tell(record)

        context = self._context(order, told)
        try:
            objective, space = self._study(order.module)
        except BaseException as error:
            return Outcome(state=TrialState.FAILED, error=describe(error), seconds=0.0)
        peak = PeakMemory()
        _seed(context.seed)
        if timeout is not None:
            # Where a trial hangs in C, and Python cannot raise anything in it, this still says where.
            faulthandler.dump_traceback_later(timeout + HARD_SECONDS - 1, file=output)
        try:
            outcome = call(
                objective,
                lambda: space.evaluate(order.attempt.params),
                context,
                fatal=() if context.replica is None else (ReplicaDone,),
            )
        except ReplicaDone:
            outcome = Outcome(state=TrialState.CANCELLED, error="its gang needs it no more", seconds=0.0)
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

    def _study(self, module: str) -> tuple[Objective, Space]:
        """Return the objective of `module`, made interruptible, and its compiled space."""
        if module not in self._studies:
            # hyperopt takes long to import: not before there is a study.
            from shadho_celery.space.compile import compile_space

            file = study_file.load(module)
            self._studies[module] = (self._interruptible(file.objective), compile_space(file.space))
        return self._studies[module]

    def _send(self, record: FromChild, unless: Callable[[], bool] = lambda: False) -> None:
        with self._sending:
            if unless():
                return
            if identity(self._pipe.fileno()) != self._pipe_identity:
                # What is open there now is the trial's own, and not to be written to.
                with suppress(OSError):
                    os.write(2, b"the trial closed the descriptor that its process speaks to the worker by\n")
                os._exit(PIPE_LOST)
            self._pipe.sendall(encode(record))


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


def main(arguments: Sequence[str]) -> None:
    """In the process: serve on the socket whose descriptor comes first; the others are the modules."""
    Child(socket.socket(fileno=int(arguments[0]))).serve(arguments[1:])
